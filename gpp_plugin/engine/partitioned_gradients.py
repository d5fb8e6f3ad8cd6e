"""Gradients under ZeRO 1 to 3: after a reduction each rank keeps the sums of its own partition only.

    ZeRO 1   whole gradients of a rank add up over the mini-batch in one buffer; one reduce-scatter at its end, which
             leaves the rank's sums in its own part of the buffer
    ZeRO 2   whole gradients live from a backward to the reduction behind it; partitions add up; so under ZeRO 3

Bytes one rank holds for N parameters on d ranks, gradients of g bytes an element, sums of s bytes (g = s, or
bf16 with fp32 sums):

                                ZeRO 0          ZeRO 1          ZeRO 2
    between two micro-batches   s N             s N             s N / d
    while a backward ends       s N (+ g N)     s N (+ g N)     s N / d + g N
    while it steps              s N             s N             s N / d

So ZeRO 2 does not lower what one backward makes; it lowers what is held beside the activations of the
micro-batches in flight, which is where a pipeline stage has its peak. What ZeRO 3 shares out beside them are the
parameters (`engine.sharded_weights`).

The parameters of one optimizer group stand one after the other in a flat buffer, which is padded and cut into
equal partitions, one a rank of the stage:

    flat        | embed            | norm | layer.weight          | bias | pad |
    partition   | rank 0             | rank 1             | rank 2             |

Neither sends early (`gradients`): a window of ZeRO 1 has a part of every layer, so that it is final when the backward
ends, and ZeRO 2 reduces behind each backward.

Source: ZeRO (Rajbhandari et al., SC 2020; arXiv 1910.02054), section 5
Tests: tests/integrations/test_engine.py, tests/integrations/test_state.py
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_plugin.engine.gradient_store import SUMMED, GradientBuffer, GradientStore, Summand, sum_over
from gpp_plugin.runtime.ranks.collectives import all_reduce


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpan:
    """Where a parameter stands: ``num_elements`` from element ``first`` of the flat buffer on."""

    name: str
    first: int
    num_elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Some elements of a parameter, and where they are in what was requested.

    Args:
        start: first element in the flattened parameter.
        offset: first element in the window.

    Example: ``weight`` stands on elements 10 to 30 of the flat buffer, and a window of 8 elements begins at 26. The
    window's part of it is its elements 16 to 20: start 16, offset 0, 4 elements.
    """

    name: str
    start: int
    offset: int
    num_elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatGroup:
    """One flat buffer: its parameters in order, and the elements of each rank's partition."""

    spans: tuple[ParameterSpan, ...]
    partition_size: int

    def segments(self, first: int, num_elements: int) -> Iterator[Segment]:
        """Yield the parts of parameters in a window of the flat buffer, in order."""
        return segments_of(self.spans, first, num_elements)


def segments_of(spans: Sequence[ParameterSpan], first: int, num_elements: int) -> Iterator[Segment]:
    """Yield the parts of ``spans`` that lie in a window of ``num_elements`` elements from ``first`` on."""
    for span in spans:
        begin, end = max(span.first, first), min(span.first + span.num_elements, first + num_elements)
        if begin < end:
            yield Segment(
                name=span.name, start=begin - span.first, offset=begin - first, num_elements=end - begin
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """Elements ``start`` to ``start + width`` of every rank's partition; ``segments`` by rank."""

    start: int
    width: int
    segments: tuple[tuple[Segment, ...], ...]


class PartitionedGradients:
    """Gradients of a stage's trained parameters, scaled by the loss scale, partitioned when they are reduced.

    Args:
        parameters: trained parameters by name, in the same order on every rank of the stage.
        layout: how they lie in the ranks' partitions.
        dtype: type in which gradients are added up.
        group: the stage's ranks; this one is number ``position`` of ``degree``.
        communication_dtype: type of the transfers; None: ``dtype``.
        bucket_elements: most elements sent at once.
        is_reduced_often: the program reduces behind each backward (ZeRO 2 and 3), so that micro-batches are added up
            in the partitions. Those between two reductions are added up by autograd in the parameters' type.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        layout: Sequence[FlatGroup],
        *,
        dtype: torch.dtype,
        group: dist.ProcessGroup,
        position: int,
        degree: int,
        communication_dtype: torch.dtype | None,
        bucket_elements: int,
        is_reduced_often: bool,
    ) -> None:
        self.parameters = dict(parameters)
        self.resting: frozenset[str] = frozenset()
        self._layout = tuple(layout)
        self._dtype = dtype
        self._comm_dtype = communication_dtype or dtype
        self._group = group
        self._position = position
        self._degree = degree
        self._bucket_elements = bucket_elements
        self._reached: set[str] = set()
        self._device = next(iter(self.parameters.values())).device
        # a group made without a name has no backend's either; on a CPU it is gloo's
        self._is_gloo = degree > 1 and (self._device.type == "cpu" or dist.get_backend(group) == "gloo")
        self._windows = [self._windows_of(flat) for flat in self._layout]
        # Of each flat group: under ZeRO 1 a buffer of all elements, whose part ``position`` is the rank's own; under
        # ZeRO 2 that part alone, while autograd makes the parameters' `grad` anew each time.
        self._buffers = [] if is_reduced_often else [self._buffer_of(flat) for flat in self._layout]
        own = [buffer.flat.view(degree, -1)[position] for buffer in self._buffers]
        sizes = [flat.partition_size for flat in self._layout]
        self.partitions = own or [torch.zeros(size, dtype=dtype, device=self._device) for size in sizes]
        """This rank's partition of each flat group, zero where no loss reached."""

    def _buffer_of(self, flat: FlatGroup) -> GradientBuffer:
        return GradientBuffer(
            {span.name: (self.parameters[span.name], span.first) for span in flat.spans},
            num_elements=flat.partition_size * self._degree,
            dtype=self._dtype,
            device=self._device,
        )

    def _windows_of(self, flat: FlatGroup) -> list[_Window]:
        """Cut a rank's partition into windows: together, those of all ranks are one message."""
        # A message holds one window of each rank's partition, so that a bucket of 100 elements on 4 ranks moves 25 of
        # every partition: partitions of 60 elements go as windows 0-24, 25-49 and 50-59.
        width = max(1, min(flat.partition_size, self._bucket_elements // self._degree))
        windows = []
        for start in range(0, flat.partition_size, width):
            own = min(width, flat.partition_size - start)
            windows.append(
                _Window(
                    start=start,
                    width=own,
                    segments=tuple(
                        tuple(flat.segments(rank * flat.partition_size + start, own))
                        for rank in range(self._degree)
                    ),
                )
            )
        return windows

    def accumulate(self) -> None:
        """Take up what autograd left in ``parameter.grad``, where whole gradients are added up in another type."""
        for buffer in self._buffers:
            buffer.accumulate()

    def begin_reduction(self) -> None:
        """Do nothing: `reduce_data` sends all."""

    def rest(self, names: Iterable[str]) -> None:
        """Let parameters stay as they are in this step, whatever gradient they have."""
        self.resting |= frozenset(names)
        for _, held in self._fragments(self.resting):
            held.zero_()

    def whole(self, name: str) -> Tensor | None:
        """Return where the sum of a gradient lies, in the parameter's shape; None where no loss reached it."""
        assert self._degree == 1, "a rank of several has a part"
        if name not in self._reached:
            return None
        ((_, held),) = self._fragments((name,))
        return held.view(self.parameters[name].shape)

    def is_empty(self) -> bool:
        """Return whether no loss reached any parameter on this rank."""
        if self._reached:
            return False
        if self._buffers:
            return all(buffer.is_empty() for buffer in self._buffers)
        return all(parameter.grad is None for parameter in self.parameters.values())

    def for_optimizer(self) -> list[Tensor]:
        """Return what an optimizer steps with: this rank's partitions, one for each group."""
        return self.partitions

    def held_bytes(self) -> int:
        """Return the bytes of all gradients held now."""
        if self._buffers:
            return sum(buffer.num_bytes for buffer in self._buffers)
        made = [p.grad.nbytes for p in self.parameters.values() if p.grad is not None]
        return sum(made) + sum(partition.nbytes for partition in self.partitions)

    def parts(self) -> list[Tensor]:
        """Return the buffers; under ZeRO 2 what autograd has made since the last sum, and the partitions."""
        for buffer in self._buffers:
            buffer.take_up()
        made = [p.grad for p in self.parameters.values() if p.grad is not None]
        return [buffer.flat for buffer in self._buffers] or [*made, *self.partitions]

    def clear(self) -> None:
        """Forget all gradients."""
        self.resting = frozenset()
        self._reached.clear()
        for buffer in self._buffers:
            buffer.clear()
        if not self._buffers:
            torch._foreach_zero_(self.partitions)
            self._let_go()

    def _let_go(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def unknown(self) -> Tensor | None:
        """Return None: a partition has a gradient of zero where no loss reached."""
        return None

    def learn(self, flags: Sequence[float]) -> None:
        """Refuse: nothing is unknown."""
        raise AssertionError("no flags were requested")

    @torch.no_grad()
    def reduce_data(self) -> None:
        """Sum what has come together since the last call over the stage's ranks, into the partitions; collective.

        Under ZeRO 1 once a mini-batch.
        """
        if not self._buffers:
            self._reached.update(name for name, p in self.parameters.items() if p.grad is not None)
            for windows, partition in zip(self._windows, self.partitions, strict=True):
                for window in windows:
                    partition.narrow(0, window.start, window.width).add_(self._sum(self._gathered(window)))
            self._let_go()
            return
        for buffer, windows, partition in zip(self._buffers, self._windows, self.partitions, strict=True):
            buffer.take_up()
            self._reached.update(name for name, held in buffer.held.items() if held.is_reached)
            rows = buffer.flat.view(self._degree, -1)
            for window in windows if self._degree > 1 else ():
                parts = rows.narrow(1, window.start, window.width).to(self._comm_dtype).contiguous()
                partition.narrow(0, window.start, window.width).copy_(self._sum(parts))

    def _gathered(self, window: _Window) -> Tensor:
        """Return what autograd made of a window, one row a rank's partition."""
        parts = torch.zeros(self._degree, window.width, dtype=self._comm_dtype, device=self._device)
        for part, segments in zip(parts, window.segments, strict=True):
            for segment in segments:
                gradient = self.parameters[segment.name].grad
                if gradient is not None:
                    piece = gradient.reshape(-1).narrow(0, segment.start, segment.num_elements)
                    part.narrow(0, segment.offset, segment.num_elements).copy_(piece)
        return parts

    def _sum(self, parts: Tensor) -> Tensor:
        """Return the sums over the stage's ranks of this rank's partition.

        Args:
            parts: [rank of the stage, element of the window]: row r is what this rank has of rank r's partition.
        """
        # A reduce-scatter sums row r of all ranks on rank r.
        if self._degree == 1:
            return parts[0]
        if self._is_gloo:  # its reduce-scatter is an all-reduce of a copy
            all_reduce(parts, group=self._group, what=SUMMED)
            return parts[self._position]
        sums = torch.empty(parts.shape[1], dtype=self._comm_dtype, device=self._device)
        _reduce_scatter(sums, parts.view(-1), self._group)
        return sums

    def sum_tensor(self, names: Sequence[str], *, group: dist.ProcessGroup | int) -> None:
        """Sum the gradients of ``names`` over the tensor ranks of a data position; collective over them.

        Those have the same part of each, after the stage's last reduction.
        """
        sum_over(group, [self.tied_summands(names)])

    def tied_summands(self, names: Sequence[str]) -> Iterator[Summand]:
        """Yield what this rank brings of ``names`` to sums over the ranks of several stages.

        Every rank brings its own part of them, after its stage's last reduction, so nothing is counted twice.
        """
        # The parameters of ``names`` are laid out one after the other anew, in the same order on every rank, and sent
        # window by window: each rank writes what it has of the window, zeros elsewhere. Example, names of 6 and 4
        # elements, windows of 5: elements 0-4 of the first, then its last and 0-3 of the second. Stages have their own
        # degrees, so that a rank's part in one of them says nothing about the parts in the other.
        spans, first = [], 0
        for name in names:
            count = self.parameters[name].numel()
            spans.append(ParameterSpan(name=name, first=first, num_elements=count))
            first += count
        for start in range(0, first, self._bucket_elements):
            width = min(self._bucket_elements, first - start)
            window = torch.zeros(width, dtype=self._dtype, device=self._device)
            own = [
                (slice(segment.offset + part.offset, segment.offset + part.offset + part.num_elements), held)
                for segment in segments_of(spans, start, width)
                for part, held in self._own_parts(segment)
            ]
            for where, held in own:
                window[where] = held
            yield Summand(brought=window, take=functools.partial(_take_parts, own))

    def _own_parts(self, segment: Segment) -> Iterator[tuple[Segment, Tensor]]:
        """Yield the parts of a segment that lie in this rank's partitions, with their sums."""
        for part, held in self._fragments((segment.name,)):
            begin = max(part.start, segment.start)
            end = min(part.start + part.num_elements, segment.start + segment.num_elements)
            if begin < end:
                own = Segment(
                    name=segment.name,
                    start=begin,
                    offset=begin - segment.start,
                    num_elements=end - begin,
                )
                yield own, held.narrow(0, begin - part.start, end - begin)

    def _fragments(self, names: Iterable[str]) -> Iterator[tuple[Segment, Tensor]]:
        """Yield the parts of parameters in this rank's partitions, with views of their sums."""
        wanted = set(names)
        for flat, partition in zip(self._layout, self.partitions, strict=True):
            for part in flat.segments(self._position * flat.partition_size, flat.partition_size):
                if part.name in wanted:
                    yield part, partition.narrow(0, part.offset, part.num_elements)

    @torch.no_grad()
    def squared_norm(self, *, without: Iterable[str], precision: torch.dtype) -> Tensor:
        """Return this rank's share of the squared L2 norm; the shares of the stage's ranks add up to all.

        Args:
            without: parameters that another stage counts.
        """
        names = self.parameters.keys() - set(without)
        norms = [torch.linalg.vector_norm(held, dtype=precision) for _, held in self._fragments(names)]
        if not norms:
            return torch.zeros((), dtype=precision, device=self._device)
        return torch.stack(norms).square().sum()

    def norms(self, names: Sequence[str]) -> Tensor:
        """Return the L2 norm of this rank's part of each gradient of ``names``, in double precision on the host."""
        squares = dict.fromkeys(names, 0.0)
        for part, held in self._fragments(names):
            squares[part.name] += float(held.float().square().sum())
        return torch.tensor([squares[name] for name in names], dtype=torch.float64).sqrt()

    @torch.no_grad()
    def gather(self) -> dict[str, Tensor]:
        """Return whole gradients by name, fp32, without those that no loss reached; collective over the stage."""
        reached = torch.tensor(
            [float(name in self._reached) for name in self.parameters], device=self._device
        )
        self._all_reduce(reached)
        gathered = {}
        for (name, parameter), is_reached in zip(self.parameters.items(), reached.tolist(), strict=True):
            whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=self._device)
            for part, held in self._fragments((name,)):
                whole.narrow(0, part.start, part.num_elements).copy_(held)
            self._all_reduce(whole)
            if is_reached:
                gathered[name] = whole.view(parameter.shape)
        return gathered

    def _all_reduce(self, tensor: Tensor) -> None:
        if self._degree > 1:
            all_reduce(tensor, group=self._group, what=SUMMED)


StageGradients = GradientStore | PartitionedGradients
"""A stage's gradients, whether each rank keeps all of them or its partition."""


@torch.no_grad()
def _take_parts(own: Sequence[tuple[slice, Tensor]], total: Tensor) -> None:
    """Take in a window of sums: of those elements of it that this rank holds."""
    for where, held in own:
        held.copy_(total[where])


def _reduce_scatter(sums: Tensor, window: Tensor, group: dist.ProcessGroup) -> None:
    # torch 2.13 renamed it, and warns of the old name
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    call(sums, window, group=group)
