"""Mini-batches: collecting them from the user's batches, checking them, and what a rank has of one.

A mini-batch is a dict of tensors whose leading dimensions hold B samples, ``rows_per_sample`` rows
each; entries that are not tensors are constants of the capture.

The rows that each micro-batch of a stage reads are brought to the stage's device. On the CPU they are cast and made
contiguous at once. On CUDA every micro-batch's rows are copied on a stream of their own, one event behind each, and the
computing stream waits for a micro-batch's event when its forward takes the rows:

    copies    wait for compute | m0 | e0 | m1 | e1 | m2 | e2
    compute                    wait e0 | F0 ... wait e1 | F1 ... wait e2 | F2

Rows are copied out of page-locked memory: as the engine's own loader gives them, or through buffers that are
allocated once (`HostPool`). Memory on the device is the computing stream's: it is allocated before the copies wait for
that stream, and `InputRows.release` lets the stream wait for every copy before it is free again.

Source: this project
Tests: tests/runtime/test_batches.py, tests/runtime/test_input_rows.py, tests/runtime/test_float_inputs.py
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from gpp_plugin.capture.mask_values import inputs_of_ones
from gpp_plugin.capture.tracing.sample_batches import (
    WholeUnit,
    check_batch,
    count_samples,
    is_counted,
    is_padded,
    resize_batch,
    widen,
)
from gpp_plugin.errors import ConfigError
from gpp_plugin.ir.tensors import LayoutKind, SampleRange, TensorSpec
from gpp_plugin.runtime.memory.swap import HostBuffer, HostPool

K = TypeVar("K")
V = TypeVar("V")
Batch = Mapping[str, Any]
ChooseOrder = Callable[[Sequence[Mapping[str, int]]], Sequence[int]]
"""From the units of a mini-batch, each by the elements of its entries, to which unit is run at each place."""


def collect_mini_batch(batches: Iterable[Batch], mini_batch: int) -> dict[str, Any]:
    """Take batches until they hold ``mini_batch`` samples and join them.

    Args:
        batches: an iterator; only as many batches as needed are taken from it.

    Raises:
        StopIteration: the iterator ended before the first batch.
        ConfigError: it ended early, a batch does not fit, or shapes differ within the mini-batch.
    """
    iterator = iter(batches)
    taken: list[Batch] = [check_batch(next(iterator))]
    total = count_samples(taken[0])
    while total < mini_batch:
        taken.append(_following(iterator, f"{total} of train_batch_size={mini_batch} samples; {_REPEAT}"))
        total += count_samples(taken[-1])
    if total != mini_batch:
        raise ConfigError(
            f"the data iterator's batches hold {[count_samples(b) for b in taken]} samples, which do not sum to "
            f"train_batch_size={mini_batch}; choose a loader batch size that divides it"
        )
    return join_batches(taken)


_REPEAT = "drop the last incomplete mini-batch or repeat the data"


def _following(iterator: Iterator[Any], ended: str) -> Batch:
    """Return a batch behind the first.

    Raises:
        ConfigError: there is none, or it is no batch; ``ended`` says after what, and what to do.
    """
    try:
        return check_batch(next(iterator))
    except StopIteration:
        raise ConfigError(f"the data iterator ended after {ended}") from None


def collect_units(items: Iterable[Any], count: int, key: str = "graph_pipeline.units") -> list[Batch]:
    """Take the loss units of a mini-batch, one an item.

    Args:
        key: what says how many, for errors.

    Raises:
        StopIteration: the iterator ended before the first.
        ConfigError: it ended early, or an item is no batch.
    """
    iterator = iter(items)
    units = [check_batch(next(iterator))]
    while len(units) < count:
        units.append(_following(iterator, f"{len(units)} of {key}={count} items; {_REPEAT}"))
    return units


def join_batches(batches: Sequence[Batch]) -> dict[str, Any]:
    """Concatenate batches along the leading dimension; constants must agree.

    Raises:
        ConfigError: keys differ, or tensors are padded to different lengths within one mini-batch.
    """
    if len(batches) == 1:
        return dict(batches[0])
    joined: dict[str, Any] = {}
    if any(batch.keys() != batches[0].keys() for batch in batches):
        raise ConfigError(
            f"batches of one mini-batch have unlike keys {sorted({tuple(sorted(b)) for b in batches})}; "
            "collate all of them alike"
        )
    for key, value in batches[0].items():
        parts = [batch[key] for batch in batches]
        if not isinstance(value, Tensor):
            if any(isinstance(part, Tensor) or part != value for part in parts):
                raise ConfigError(
                    f"{key} has values {parts} within one mini-batch; what is no tensor must be the same in all its "
                    "batches"
                )
            joined[key] = value
            continue
        if is_padded(key, batches[0]):
            parts = widen(parts)
        shapes = {tuple(p.shape[1:]) if isinstance(p, Tensor) else None for p in parts}
        if len(shapes) > 1:
            raise ConfigError(
                f"{key} has shapes {sorted(map(str, shapes))} within one mini-batch; collate the whole mini-batch "
                "at once (or pad to a fixed length), so that padding is the same for all its samples, or let each be a "
                f'loss unit of its own shapes: "graph_pipeline": {{"units": {len(batches)}}}'
            )
        joined[key] = torch.cat([part for part in parts if part is not None])
    return joined


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class OwnRows(Mapping[str, Any]):
    """A mini-batch of which this process has some rows only.

    As a mapping it has the shapes of the whole mini-batch: tensors on the meta device, and constants.

    Args:
        shapes: that.
        held: rows of those tensors that were asked for, by key.
        samples: what the rows are of, in this order; what has no row a sample is there as it is.
        rows: rows a sample of each of ``held``; 0 where it has none.
        checksum: below 2^20; tells different mini-batches apart (`batch_checksum`).
        ones: inputs that hold ones only, in all rows of the mini-batch: as masks they hide nothing. Of the rows that
            this rank loaded, until ranks have told each other (`BatchSource`).
    """

    shapes: Batch
    held: Mapping[str, Tensor]
    samples: tuple[SampleRange, ...]
    rows: Mapping[str, int]
    checksum: int
    ones: frozenset[str] = frozenset()

    def __getitem__(self, key: str) -> Any:
        return self.shapes[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def take(self, key: str, axis: int, rows: int, wanted: SampleRange) -> Tensor:
        """Return some samples' rows of a tensor; the arguments are as of its layout.

        Raises:
            ConfigError: the tensor is not cut by samples, or not here.
        """
        tensor = self.held[key]
        if self.rows[key]:
            # of samples 2..3 and 6..7 there are four rows; sample 6 is row 2
            first = sum(part.num_samples for part in self.samples if part.end <= wanted.first_sample)
            at = next(part for part in self.samples if part.overlap(wanted) == wanted)
            return tensor.narrow(
                axis, (first + wanted.first_sample - at.first_sample) * rows, wanted.num_samples * rows
            )
        return tensor.narrow(axis, wanted.first_sample * rows, wanted.num_samples * rows)

    def take_whole(self, key: str) -> Tensor:
        """Return a tensor that is the same for all samples.

        Raises:
            ConfigError: it has rows for each sample after all.
        """
        if self.rows[key]:
            raise ConfigError(
                f"{key} has {self.rows[key]} rows a sample here, and was the same for all samples in the batch that "
                "the model was captured with; give it one shape in all batches"
            )
        return self.held[key]

    def pin_memory(self) -> OwnRows:
        """Return the same with its rows in page-locked memory; a loader calls this, on a thread of its own."""
        return replace(self, held={key: value.pin_memory() for key, value in self.held.items()})

    def stand_in(self) -> dict[str, Any]:
        """Return a batch of the whole's shapes on which a stage may run for a try: own rows, repeated in turn."""
        batch = dict(self.shapes)
        for key, value in self.held.items():
            length = self.shapes[key].shape[0] if self.rows[key] else 0
            batch[key] = torch.cat([value] * -(-length // value.shape[0]))[:length] if length else value
        return batch


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class UnitBatch(Mapping[str, Any]):
    """A mini-batch as a list of loss units, each of its own shapes; as a mapping it is the first of them.

    Args:
        units: in order; of those that this process does not read, perhaps shapes only (the meta device).
        checksum: below 2^20; None where the units are here as they are, and say it themselves.
        given: the number of each unit among those that the user gave; None: they are in that order.
    """

    units: tuple[Batch, ...]
    checksum: int | None = None
    given: tuple[int, ...] | None = None

    def __getitem__(self, key: str) -> Any:
        return self.units[0][key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.units[0])

    def __len__(self) -> int:
        return len(self.units[0])

    def pin_memory(self) -> UnitBatch:
        """Return the same with what is here in page-locked memory; a loader calls this."""

        def pinned(value: Any) -> Any:
            return value.pin_memory() if isinstance(value, Tensor) and not value.is_meta else value

        return replace(self, units=tuple({k: pinned(v) for k, v in unit.items()} for unit in self.units))


def arrange_units(units: Sequence[Batch], choose: ChooseOrder | None) -> UnitBatch:
    """Return a mini-batch of units in the order that ``choose`` finds best; in the given one without it."""
    if choose is None:
        return UnitBatch(units=tuple(units))
    given = tuple(choose([num_elements(unit) for unit in units]))
    return UnitBatch(units=tuple(units[number] for number in given), given=given)


def num_elements(unit: Batch) -> dict[str, int]:
    """Return how many elements each tensor of a unit has."""
    return {key: value.numel() for key, value in unit.items() if isinstance(value, Tensor)}


def units_of(batch: Batch) -> tuple[Batch, ...]:
    """Return the parts of a mini-batch that have shapes of their own: its units, or itself."""
    return batch.units if isinstance(batch, UnitBatch) else (batch,)


def without_keys(batch: Batch, keys: Collection[str]) -> Batch:
    """Return a batch, or each of its units, without some of its entries."""
    if isinstance(batch, UnitBatch):
        return replace(batch, units=tuple(without_keys(unit, keys) for unit in batch.units))
    return {key: value for key, value in batch.items() if key not in keys}


def unit_key(unit: Batch) -> tuple[Any, ...]:
    """Return what the code for a loss unit depends on: its samples, and what `shape_key` has.

    Raises:
        CaptureError: it has no common number of samples.
    """
    count = count_samples(unit)
    return (count, *shape_key(unit, count))


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitRule:
    """How batches become loss units of a model that takes whole ones.

    Args:
        num_samples: of a unit, typically: no axis need say how many there are.
        read: what Python reads of a unit; None where the model reads nothing.
    """

    num_samples: int
    read: Callable[[WholeUnit], tuple[Any, ...] | None]

    def unit(self, batch: Batch) -> WholeUnit:
        """Return a batch as one unit, with what Python reads of it."""
        if isinstance(batch, WholeUnit) and batch.readings is not None:
            return batch
        unit = WholeUnit(batch, num_samples=self.num_samples)
        unit.readings = self.read(unit)
        return unit

    def units(self, batch: UnitBatch) -> UnitBatch:
        """Return a mini-batch with what Python reads of each of its units, all of which are here."""
        return replace(batch, units=tuple(self.unit(unit) for unit in batch.units))

    def sample(self, batch: Batch) -> WholeUnit:
        """Return a unit like those to come, of a sample batch of any number of samples."""
        if not isinstance(batch, WholeUnit) and is_counted(batch):
            batch = resize_batch(batch, self.num_samples)
        return self.unit(batch)

    def evaluated(self, batch: Batch) -> UnitBatch:
        """Return a batch to evaluate as loss units: as many as it can be cut into, or one of any number of samples."""
        leading, size = _rows_of_all(batch), self.num_samples
        if leading is None or leading % size == 0:
            return self.units(UnitBatch(units=tuple(_cut_into_units(batch, (leading or size) // size, size))))
        return replace(self, num_samples=leading).units(UnitBatch(units=(batch,)))


def collect_whole_units(batches: Iterable[Any], num_units: int, num_samples: int) -> list[Batch]:
    """Take batches until they are ``num_units`` loss units; a batch is one, or can be cut into several.

    Args:
        num_samples: of a unit.

    Raises:
        StopIteration: the iterator ended before the first batch.
        ConfigError: it ended early, or a batch holds another number of samples.
    """
    iterator = iter(batches)
    units = _cut_into_units(check_batch(next(iterator)), num_units, num_samples)
    while len(units) < num_units:
        ended = (
            f"{len(units)} of {num_units} batches of a mini-batch; this model takes whole loss units: give one batch "
            "of train_micro_batch_size_per_gpu samples for each"
        )
        units.append(_following(iterator, ended))
    for unit in units:
        rows = _rows_of_all(unit)
        if rows is not None and rows != num_samples:
            raise ConfigError(
                f"a batch holds {rows} samples; this model takes whole loss units: give batches of "
                f"train_micro_batch_size_per_gpu={num_samples} samples, as many as make up train_batch_size, or say "
                "in graph_pipeline.units how many batches of any size do"
            )
    return units


def _cut_into_units(batch: Batch, num_units: int, samples: int) -> list[Batch]:
    """Return the units of a batch: it is one, unless each of its tensors has one row for each sample of all units."""
    size = num_units * samples
    if num_units == 1 or _rows_of_all(batch) != size:
        return [batch]
    return [take_samples(batch, first, samples, size) for first in range(0, size, samples)]


def _rows_of_all(batch: Batch) -> int | None:
    """Return the length of axis 0 where all tensors that have one have the same."""
    leading = {value.shape[0] for value in batch.values() if isinstance(value, Tensor) and value.ndim}
    return leading.pop() if len(leading) == 1 else None


def take_samples(batch: Batch, first: int, count: int, total: int) -> Batch:
    """Return ``count`` samples of a batch of ``total`` from ``first`` on; what has no row a sample stays whole."""

    def rows(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim == 0 or value.shape[0] % total:
            return value
        per_sample = value.shape[0] // total
        return value[first * per_sample : (first + count) * per_sample]

    return {key: rows(value) for key, value in batch.items()}


def lately(known: OrderedDict[K, V], key: K, make: Callable[[], V], *, most: int) -> V:
    """Return what is kept under a key, made where it is not; beyond ``most`` those used longest ago go."""
    if key not in known:
        known[key] = make()
        while len(known) > most:
            known.popitem(last=False)
    known.move_to_end(key)
    return known[key]


def shape_key(batch: Batch, num_samples: int) -> tuple[Any, ...]:
    """Return what a compiled shape depends on: dtypes, shapes beyond the samples, constants."""
    # Rows are told by sample, not as they are: 8 images at 4 samples and 16 at 8 are one shape, (.., 2.0, ..), as the
    # code of a stage is for a number of samples of its own, however many the mini-batch has.
    parts: list[Any] = []
    if isinstance(
        batch, WholeUnit
    ):  # nothing is told by sample; what Python reads decides about the code too
        parts, num_samples = [("unit", batch.num_samples, batch.readings)], 1
    for key in sorted(batch):
        value = batch[key]
        if isinstance(value, Tensor):
            rows = value.shape[0] / num_samples if value.ndim else 0.0
            parts.append((key, str(value.dtype), rows, tuple(value.shape[1:])))
        else:
            parts.append((key, repr(value)))
    return tuple(parts)


def batch_checksum(batch: Batch) -> int:
    """Return a number that tells different mini-batches apart (up to 64 KiB of each tensor).

    It is below 2^20, so that fp64 holds the sum of its squares over 8,192 ranks exactly.
    """
    if isinstance(batch, (OwnRows, UnitBatch)) and batch.checksum is not None:
        return batch.checksum
    if isinstance(batch, UnitBatch):
        return zlib.crc32(repr([batch_checksum(unit) for unit in batch.units]).encode()) & 0xFFFFF
    checksum = 0
    for key in sorted(batch):
        value = batch[key]
        if isinstance(value, Tensor) and value.numel():
            flat = value.detach().reshape(-1)
            step = max(1, flat.numel() * flat.element_size() // 65536)
            data = flat[::step].contiguous().cpu().view(torch.uint8).numpy().tobytes()
            checksum = zlib.crc32(data, checksum)
    return checksum & 0xFFFFF


def mini_batch_shapes(batch: Batch) -> dict[str, Any]:
    """Return a batch, or one unit, with its tensors on the meta device: shapes and dtypes, whatever it weighs."""
    shapes = {
        key: torch.empty(value.shape, dtype=value.dtype, device="meta")
        if isinstance(value, Tensor)
        else value
        for key, value in batch.items()
    }
    if isinstance(batch, WholeUnit):
        return WholeUnit(shapes, num_samples=batch.num_samples, readings=batch.readings)
    return shapes


def ones_among(batch: Batch, keys: Iterable[str]) -> frozenset[str]:
    """Return those of ``keys`` of which the whole mini-batch holds ones only: a rank may have rows of its own alone."""
    if isinstance(batch, UnitBatch):
        wanted = frozenset(keys)
        return wanted.intersection(*(inputs_of_ones(unit, wanted) for unit in batch.units))
    return batch.ones.intersection(keys) if isinstance(batch, OwnRows) else inputs_of_ones(batch, keys)


class CudaCopyStream:
    """A queue of copies to a device beside the one that computes: a CUDA stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def is_direct(self, rows: Tensor) -> bool:
        """Return whether rows can be copied from where they are while the host goes on: page-locked ones."""
        return rows.is_pinned()

    def follow(self) -> None:
        """Wait for the computing stream, which may still use the memory that is copied to."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy; torch keeps page-locked memory of its own from being lent on before it has run."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def record(self) -> torch.cuda.Event:
        """Return an event behind the copies queued so far."""
        return self._stream.record_event()

    def wait(self, event: torch.cuda.Event) -> None:
        """Let the computing stream wait for an event."""
        torch.cuda.current_stream(self._device).wait_event(event)


class InputRows(Sequence[tuple[Tensor, ...]]):
    """The rows of each micro-batch; those of one are on the device for whoever takes them.

    Args:
        rows: micro-batch -> one tensor a key.
        stream: copies them; None where nothing is under way.
        events: micro-batch -> the event behind its copies.
        lent: buffers that are copied from, given back to their pool by `release`.
    """

    def __init__(
        self,
        rows: Sequence[tuple[Tensor, ...]],
        *,
        stream: CudaCopyStream | None = None,
        events: Sequence[Any] = (),
        lent: Sequence[tuple[HostPool, HostBuffer]] = (),
    ) -> None:
        self._rows = rows
        self._stream = stream
        self._events = events
        self._lent = lent

    @overload
    def __getitem__(self, index: int) -> tuple[Tensor, ...]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[tuple[Tensor, ...]]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if self._events and self._stream is not None:
            asked: Any = self._events[index]
            for event in asked if isinstance(index, slice) else (asked,):
                self._stream.wait(event)
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __enter__(self) -> InputRows:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        """Let go of rows that nobody took, and of the buffers; what is queued for computing later waits for copies."""
        if self._stream is not None and self._events:
            self._stream.wait(self._events[-1])
            for pool, buffer in self._lent:
                buffer.read = self._events[-1]  # free when that is over
                pool.give(buffer)
        self._stream, self._events, self._lent = None, (), ()


class InputLink:
    """Brings rows of mini-batches to a device.

    Args:
        stream: copies beside the computation; None copies at once, as on a CPU. By default that of the device.
    """

    def __init__(
        self, device: torch.device, *, stream: CudaCopyStream | None = None, pool: HostPool | None = None
    ) -> None:
        self._device = device
        self._stream = stream
        self._pool = pool

    def slice_batch(
        self,
        batch: Batch,
        keys: Sequence[str],
        *,
        samples: Sequence[SampleRange],
        specs: Mapping[str, TensorSpec],
        dtype: torch.dtype | None,
    ) -> InputRows:
        """Return the rows that a rank reads in each micro-batch of its stage, in the order of ``keys``.

        All are contiguous, as in the capture: where an operator had to copy them first, autograd would keep the copy,
        and what a stage keeps would depend on how the user's batch lies in memory.

        Args:
            samples: of each micro-batch, those of the rank.
            specs: the captured model inputs by batch key (their layouts).
            dtype: floating inputs are cast to it; None keeps them.
        """
        # Stage of micro-batches of 4 samples on 2 ranks, mini-batch 8: rank 1 of the stage reads samples 2..3 and 6..7.
        # Of an input with 3 rows a sample (three images, say) that is rows 6..11 and 18..23.
        columns = [_rows(batch, key, specs[key], samples) for key in keys]
        return self._bring(columns, len(samples), dtype)

    def bring_units(
        self, units: Sequence[Batch], keys: Sequence[str], *, dtype: torch.dtype | None
    ) -> InputRows:
        """Return the inputs of each micro-batch where it is a loss unit of its own shape, in the order of ``keys``.

        Of those that a unit lacks it has an empty tensor, which nobody reads.
        """
        nothing = torch.empty(0, device=self._device)
        return self._bring([[unit.get(key, nothing) for unit in units] for key in keys], len(units), dtype)

    def _bring(
        self, columns: Sequence[Sequence[Tensor]], num_micro_batches: int, dtype: torch.dtype | None
    ) -> InputRows:
        """Return what each micro-batch reads, on the device.

        Args:
            columns: of each key, the rows of every micro-batch.
        """
        if self._device.type == "cuda" and self._stream is None:
            self._stream, self._pool = CudaCopyStream(self._device), HostPool(is_pinned=True)
        if self._stream is None:
            return InputRows(_by_micro_batch([self._move(c, dtype) for c in columns], num_micro_batches))
        return self._copy_beside(columns, num_micro_batches, self._stream, dtype)

    def _move(self, column: Sequence[Tensor], dtype: torch.dtype | None) -> list[Tensor]:
        """Return rows on the device, in the order given; what is the same for all micro-batches is moved once."""
        moved: dict[int, Tensor] = {}
        for part in column:
            if id(part) not in moved:
                moved[id(part)] = part.to(device=self._device, dtype=_wanted(part, dtype)).contiguous()
        return [moved[id(part)] for part in column]

    def _copy_beside(
        self,
        columns: Sequence[Sequence[Tensor]],
        count: int,
        stream: CudaCopyStream,
        dtype: torch.dtype | None,
    ) -> InputRows:
        """Queue all copies, those of the first micro-batch first."""
        # 1. All memory on the device, before the copies wait for the computing stream: what is allocated later might be
        #    memory that a kernel queued in between still uses. What lies on the device already is cast there.
        made: dict[int, Tensor] = {}
        for part in (part for column in columns for part in column):
            if id(part) not in made:
                made[id(part)] = self._allocate(part, dtype)
        stream.follow()
        # 2. Micro-batch by micro-batch: through page-locked memory where the rows are not in such already, which also
        #    casts and gathers them, and on. An event behind each, on one stream, so a later one covers those before.
        lent: list[tuple[HostPool, HostBuffer]] = []
        events: list[Any] = []
        queued: set[int] = set()
        for micro_batch in range(count):
            for column in columns:
                part = column[micro_batch]
                if part.device.type == "cpu" and id(part) not in queued:
                    queued.add(id(part))
                    target = made[id(part)]
                    stream.copy(target, self._staged(part, target, stream, lent))
            events.append(stream.record())
        done = [[made[id(part)] for part in column] for column in columns]
        return InputRows(_by_micro_batch(done, count), stream=stream, events=events, lent=lent)

    def _allocate(self, part: Tensor, dtype: torch.dtype | None) -> Tensor:
        wanted = _wanted(part, dtype)
        if part.device.type != "cpu":
            return part.to(device=self._device, dtype=wanted).contiguous()
        return torch.empty(part.shape, dtype=wanted, device=self._device)

    def _staged(
        self, source: Tensor, target: Tensor, stream: CudaCopyStream, lent: list[tuple[HostPool, HostBuffer]]
    ) -> Tensor:
        """Return the rows as they are to lie on the device, in page-locked memory."""
        if source.dtype == target.dtype and source.is_contiguous() and stream.is_direct(source):
            return source
        assert self._pool is not None
        num_bytes = target.numel() * target.element_size()
        buffer = self._pool.take(num_bytes)
        if buffer.read is not None:
            buffer.read.synchronize()  # the copy of an earlier mini-batch, over long ago
        lent.append((self._pool, buffer))
        staged = buffer.data[:num_bytes].view(target.dtype).view(target.shape)
        return staged.copy_(source)


def _wanted(part: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and part.is_floating_point() else part.dtype


def _rows(batch: Batch, key: str, spec: TensorSpec, samples: Sequence[SampleRange]) -> list[Tensor]:
    """Return the rows of each range; what has no batch axis is one tensor for all of them."""
    if spec.layout.kind is not LayoutKind.BATCH:
        return [batch.take_whole(key) if isinstance(batch, OwnRows) else batch[key]] * len(samples)
    axis, rows = spec.layout.axis, spec.layout.rows_per_sample
    if isinstance(batch, OwnRows):
        return [batch.take(key, axis, rows, s) for s in samples]
    return [batch[key].narrow(axis, s.first_sample * rows, s.num_samples * rows) for s in samples]


def _by_micro_batch(columns: Sequence[Sequence[Tensor]], count: int) -> list[tuple[Tensor, ...]]:
    return [tuple(column[i] for column in columns) for i in range(count)]
