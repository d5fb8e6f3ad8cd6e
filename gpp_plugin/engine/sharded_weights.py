"""A stage's parameters under ZeRO 3: each data-parallel rank holds a part of them, and all for the stage's tasks.

    flat      | embed            | norm | layer.weight          | bias | pad |     parameters are views of it
    part      | rank 0             | rank 1             | rank 2             |     what a rank keeps

What `gather` and `free` change is the *storage* of the flat buffer: freed it has no bytes, gathered it has the same
values as before. Parameters, and whatever autograd has saved of them for a backward, are views of that storage and stay
as they are; so a micro-batch's forward may be of one gather and its backward of another. The part is given back while
the flat buffer, in which it lies too, is there: a rank never holds more than the whole.

Trained parameters lie in the flat buffers of the optimizer, whose partitions are the ranks' parts, and which steps
those (`WeightUpdater.publish_to`); the others in flat buffers made here, one for each type. Buffers stay whole.

Between mini-batches a parameter has its shape and no memory: it reads as not-a-number, and what is written to it is
refused, but for a clamp of one element through `.data`, which changes no bit. One of a single element (a temperature)
has its value on the rank that keeps it, and may be written there. Whoever needs values has `gathered`, which gathers
all stages of the rank into buffers of their own, and takes what is written.

Source: ZeRO (Rajbhandari et al., SC 2020; arXiv 1910.02054), section 5.3; storages that are released and come back:
    FSDP (Zhao et al., VLDB 2023; arXiv 2304.11277), section 4.2
Tests: tests/integrations/test_sharded_weights.py
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_plugin.errors import ConfigError, RuntimeFailure
from gpp_plugin.runtime.ranks.collectives import begin_all_gather

GATHERED = "the gather of a stage's parameters"
"""What ranks wait for in it, in errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatWeights:
    """Parameters that lie one after the other in one buffer.

    Args:
        whole: the buffer, with a storage of its own; as many elements as the stage's ranks divide.
        places: the parameters, and the first element of each.
    """

    whole: Tensor
    places: tuple[tuple[nn.Parameter, int], ...]


class GatheredBytes:
    """What all stages of a rank hold at a time beside their parts while tasks run, and its most, in bytes."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def add(self, num_bytes: int) -> None:
        """Count what was gathered, or (negative) freed."""
        self.now += num_bytes
        self.most = max(self.most, self.now)


class _Sharded:
    """One flat buffer and this rank's part of it.

    Args:
        part: elements that the rank keeps; its storage is empty while ``whole`` has one.
    """

    def __init__(self, flat: FlatWeights, group: dist.ProcessGroup, position: int, degree: int) -> None:
        self._whole, self._group = flat.whole.detach(), group
        assert self._whole.untyped_storage().nbytes() == self._whole.nbytes, (
            "a flat buffer has its storage alone"
        )
        self._shape = degree, position
        self._places = flat.places
        self._own = self._own_part(self._whole)
        self.part = torch.empty_like(self._own)
        self._sizes = self._whole.nbytes, self.part.nbytes
        self.gathered_bytes = self._whole.nbytes - self.part.nbytes
        self.address = self._whole.untyped_storage()._cdata
        self.views = self._views_of(self._whole)
        self._read: Tensor | None = None
        self._is_filled = True
        self._hidden = self._make_hidden()
        self.part.untyped_storage().resize_(0)

    def _own_part(self, whole: Tensor) -> Tensor:
        degree, position = self._shape
        return whole.view(degree, -1)[position]

    def _views_of(self, whole: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        return [(p, whole.narrow(0, first, p.numel()).view(p.shape)) for p, first in self._places]

    def _make_hidden(self) -> list[tuple[nn.Parameter, Tensor]]:
        # a, b of several elements, s and t of one, t held by this rank:
        #     placeholders  nan nan      a and b see one number each in their whole shape, which torch rarely allows
        #                                write (`fill_`, or one element), and `written` finds
        #     singles       nan t        what is written to t belongs to the part; s is some other rank's to write
        first_own = self._shape[1] * self.part.numel()
        dtype, device = self.part.dtype, self.part.device
        single = [(p, first - first_own) for p, first in self._places if p.numel() == 1]
        own = [(k, at) for k, (_, at) in enumerate(single) if 0 <= at < self.part.numel()]
        self._several = [p for p, _ in self._places if p.numel() != 1]
        self._placeholders, self._singles = (
            _nothing(len(of), dtype, device) for of in (self._several, single)
        )
        self._own_singles = torch.tensor(own, dtype=torch.int64, device=device).reshape(-1, 2).unbind(1)
        return [
            *((p, seen.expand(p.shape)) for p, seen in zip(self._several, self._placeholders, strict=True)),
            *((p, seen.view(p.shape)) for (p, _), seen in zip(single, self._singles, strict=True)),
        ]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self._whole, self.part) if self._read is None else (self._whole, self.part, self._read)

    # Three parameters of 4, 4 and 2 elements on two ranks, this one the first; x are bytes that are there:
    #
    #                 whole         part
    #     freed       . . . . . . . . . .    x x x x x     `free`: its own half returns into the part first
    #     gathered    x x x x x x x x x x    . . . . .     `gather`: the halves of both ranks, then the part is freed
    #     broken off  x x ? ? ? x x x x x    x x x x x     the part is as it was; gloo's threads may still write here
    #
    # `_cdata` of a storage is torch's own object, the same before and after; the address of its bytes is not.

    @torch.no_grad()
    def gather(self) -> Callable[[], None]:
        self._whole.untyped_storage().resize_(self._sizes[0])
        # Where it breaks off the collective continues behind it, or may: bytes that it writes to are not released.
        return begin_all_gather(self._whole, self.part, group=self._group, what=GATHERED)

    @torch.no_grad()
    def fill(self, wait: Callable[[], None]) -> None:
        wait()
        self._is_filled = True
        self.part.untyped_storage().resize_(0)

    @torch.no_grad()
    def free(self) -> None:
        storage = self._whole.untyped_storage()
        if not self._is_filled:  # this buffer's gather failed, or that of one before it
            return
        if not storage.resizable():
            raise RuntimeFailure(
                "a stage's weights cannot be released behind its task: the model calls numpy() of a parameter in its "
                "forward, and the array shares its memory; use parameter.detach().clone().numpy(), or ZeRO 2"
            )
        self.part.untyped_storage().resize_(self._sizes[1])
        self.part.copy_(self._own)
        storage.resize_(0)
        self._is_filled = False

    @torch.no_grad()
    def hide(self) -> None:
        for parameter, seen in self._hidden:
            parameter.data = seen
        number, place = self._own_singles
        if len(number) and self.part.untyped_storage().nbytes():  # it has none where it could not be freed
            self._singles.index_copy_(0, number, self.part.index_select(0, place))

    @torch.no_grad()
    def keep_singles(self) -> None:
        number, place = self._own_singles
        if len(number) and self.part.untyped_storage().nbytes():
            self.part.index_copy_(0, place, self._singles.index_select(0, number))

    @torch.no_grad()
    def written(self) -> list[nn.Parameter]:
        seen = self._placeholders
        bits = _BITS[seen.dtype.itemsize]
        is_written = seen.view(bits) != _nothing(len(seen), seen.dtype, seen.device).view(bits)
        if not is_written.any():
            return []
        return [p for p, found in zip(self._several, is_written.tolist(), strict=True) if found]

    # What others read is a buffer of its own: a numpy array of a parameter would hold on to the storage of ``whole``.

    @torch.no_grad()
    def begin_reading(self) -> list[tuple[nn.Parameter, Tensor]]:
        self.keep_singles()
        read = torch.empty(self._whole.shape, dtype=self._whole.dtype, device=self._whole.device)
        begin_all_gather(read, self.part, group=self._group, what=GATHERED)()
        self._read = read
        return self._views_of(read)

    @torch.no_grad()
    def keep_written(self) -> None:
        if self._read is not None:
            self.part.copy_(self._own_part(self._read))

    @torch.no_grad()
    def end_reading(self) -> None:
        self.keep_written()
        self._read = None
        seen = self._placeholders
        seen.copy_(_nothing(len(seen), seen.dtype, seen.device))


class ShardedWeights:
    """The parameters of one stage on one of its data-parallel ranks; a `runtime.compute.StageWeights`.

    Args:
        parameters: all of the stage.
        flats: those that lie in flat buffers already, where they must stay.
        group: the stage's ranks; this one is number ``position`` of ``degree``.
        count: of the rank.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        flats: Sequence[FlatWeights],
        *,
        group: dist.ProcessGroup,
        position: int,
        degree: int,
        count: GatheredBytes,
    ) -> None:
        inside = {id(parameter) for flat in flats for parameter, _ in flat.places}
        rest = [p for p in parameters if id(p) not in inside and p.numel()]
        everything = [*flats, *_flattened(rest, degree)]
        self._flats = [_Sharded(flat, group, position, degree) for flat in everything]
        self.parts = tuple(flat.part for flat in self._flats[: len(flats)])
        """This rank's part of each of ``flats``; has elements while nothing is gathered."""
        self.parameters = frozenset(id(parameter) for flat in everything for parameter, _ in flat.places)
        self._addresses = frozenset(flat.address for flat in self._flats)
        self._num_bytes = sum(flat.gathered_bytes for flat in self._flats)
        self._count = count
        self.is_whole, self.is_read = True, False
        self._is_begun = False
        self._free()
        self.detach()
        self.versions = self._versions_now()
        """By parameter of several elements, how often it was written to when somebody could last do so."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return what takes memory: the rank's parts, or the flat buffers while they are gathered."""
        return tuple(tensor for flat in self._flats for tensor in flat.tensors)

    # ---- for the program ---------------------------------------------------------------------------------

    def gather(self) -> Callable[[], None]:
        """Begin to make the parameters whole, and return what waits for that; collective over the stage's ranks."""
        begun = [functools.partial(flat.fill, flat.gather()) for flat in self._flats]
        self._count.add(self._num_bytes)
        self._is_begun = True
        return functools.partial(self._finish, begun)

    def free(self) -> None:
        """Keep the rank's part alone."""
        self._free()
        self._count.add(-self._num_bytes)

    def apart(self, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return a forward's outputs: copies of those that are views of parameters, which will be gone."""
        if not any(output.untyped_storage()._cdata in self._addresses for output in outputs):
            return outputs
        return [
            output.detach().clone() if output.untyped_storage()._cdata in self._addresses else output
            for output in outputs
        ]

    # ---- for everybody else ------------------------------------------------------------------------------

    def attach(self) -> None:
        """Let the parameters be views of the flat buffers, whether there is anything in these or not."""
        for flat in self._flats:
            flat.keep_singles()
            for parameter, view in flat.views:
                parameter.data = view

    def detach(self) -> None:
        """Release what is gathered, and let the parameters have shapes alone."""
        try:
            if self.is_whole or self._is_begun:  # a mini-batch failed on its way
                self._count.now = 0
                self._free()
        finally:
            for flat in self._flats:
                flat.hide()

    def written(self) -> frozenset[int]:
        """Return the parameters (by identity) that were written to where the rank does not have their values."""
        return frozenset(id(parameter) for flat in self._flats for parameter in flat.written())

    def begin_reading(self) -> None:
        """Let the parameters have their values, outside of programs; collective over the stage's ranks."""
        self.is_read = True
        for flat in self._flats:
            for parameter, view in flat.begin_reading():
                parameter.data = view

    def keep_written(self) -> None:
        """Take into the rank's part what was written to parameters that are read."""
        for flat in self._flats:
            flat.keep_written()

    def end_reading(self) -> None:
        """Keep what was written, and let the parameters have shapes alone."""
        for flat in self._flats:
            flat.end_reading()
        self.is_read = False
        self.detach()
        self.versions = self._versions_now()

    def _versions_now(self) -> dict[int, int]:
        return {id(p): p._version for flat in self._flats for p, _ in flat.views if p.numel() != 1}

    def _finish(self, begun: Sequence[Callable[[], None]]) -> None:
        try:
            for fill in begun:
                fill()
        except BaseException:
            self._free()  # those before the one that failed
            self._count.add(-self._num_bytes)
            raise
        self.is_whole = True

    def _free(self) -> None:
        for flat in self._flats:
            flat.free()
        self.is_whole = self._is_begun = False


@contextlib.contextmanager
def attached(weights: Sequence[ShardedWeights]) -> Iterator[None]:
    """Let programs gather and free these weights while the context lasts.

    Raises:
        RuntimeFailure: weights of a stage cannot be released, and nothing else has failed; all others are.
    """
    assert not any(of_stage.is_read for of_stage in weights), (
        "an engine refuses mini-batches while weights are read"
    )
    try:
        for of_stage in weights:
            of_stage.attach()
        yield
    except BaseException:
        _detach_all(weights)  # what failed first says more than what failed because of it
        raise
    errors = _detach_all(weights)
    if errors:
        raise errors[0]


def _detach_all(weights: Sequence[ShardedWeights]) -> list[RuntimeFailure]:
    """Detach all stages, and return what some of them could not release."""
    errors = []
    for of_stage in weights:
        try:
            of_stage.detach()
        except RuntimeFailure as error:
            errors.append(error)
    return errors


@contextlib.contextmanager
def gathered(weights: Sequence[ShardedWeights]) -> Iterator[None]:
    """Hold these weights whole while the context lasts, and keep what is written there; collective over all ranks.

    All ranks gather those of their stages in the order of stages. Within another such context nothing is to be done.
    """
    if any(of_stage.is_read for of_stage in weights):
        yield
        return
    begun = []
    try:
        for of_stage in weights:
            begun.append(of_stage)
            of_stage.begin_reading()
        yield
    finally:
        for of_stage in begun:
            of_stage.end_reading()


def _flattened(parameters: Sequence[nn.Parameter], degree: int) -> Iterator[FlatWeights]:
    """Yield flat buffers with the values of parameters, one for each type, that ``degree`` ranks divide evenly."""
    of_type: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        of_type.setdefault(parameter.dtype, []).append(parameter)
    for dtype, members in of_type.items():
        total = sum(parameter.numel() for parameter in members)
        whole = torch.zeros(-(-total // degree) * degree, dtype=dtype, device=members[0].device)
        places, first = [], 0
        for parameter in members:
            whole.narrow(0, first, parameter.numel()).copy_(parameter.detach().reshape(-1))
            places.append((parameter, first))
            first += parameter.numel()
        yield FlatWeights(whole=whole, places=tuple(places))


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SIGNALLING = {
    torch.float64: 0x7FF4 << 48,
    torch.float32: 0x7FA0 << 16,
    torch.bfloat16: 0x7FA0,
    torch.float16: 0x7D00,
}


def _nothing(number: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return what placeholders hold: not-a-number, of the kind that arithmetic turns into another one.

    So ``weight.data[0].mul_(0.5)`` leaves other bits. What only compares (a clamp in float32) leaves these.
    """
    if dtype in _SIGNALLING:
        return torch.full((number,), _SIGNALLING[dtype], dtype=_BITS[dtype.itemsize], device=device).view(
            dtype
        )
    return torch.full((number,), float("nan") if dtype.is_complex else 0, dtype=dtype, device=device)


def check_sharding(zero_stage: int, *, mode: str, backends: object) -> None:
    """Refuse what cannot be done with parameters that ranks hold in parts.

    Raises:
        ConfigError: says what, and what to use.
    """
    if zero_stage < 3:
        return
    if mode == "async":
        raise ConfigError(
            "zero_optimization.stage: 3 with graph_pipeline.mode async, whose micro-batches need several versions of "
            'the weights at a time; use stage 2, or mode "sync"'
        )
    if backends != "off":
        raise ConfigError(
            "zero_optimization.stage: 3 with graph_pipeline.backends, which keep the weights of frozen stages in forms "
            'of their own; use stage 2, or backends "off"'
        )
