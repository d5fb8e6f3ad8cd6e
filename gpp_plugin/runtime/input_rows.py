"""From a mini-batch to the rows that each micro-batch of a stage reads, on the stage's device.

On the CPU rows are cast and made contiguous at once. On CUDA every micro-batch's rows are copied on a stream of their
own, one event behind each, and the computing stream waits for a micro-batch's event when its forward takes the rows:

    copies    wait for compute | m0 | e0 | m1 | e1 | m2 | e2
    compute                    wait e0 | F0 ... wait e1 | F1 ... wait e2 | F2

Rows are copied out of page-locked memory: as the engine's own loader gives them, or through buffers that are
allocated once (`HostPool`). Memory on the device is the computing stream's: it is allocated before the copies wait for
that stream, and `InputRows.release` lets the stream wait for every copy before it is free again.

Source: this project
Tests: tests/runtime/test_input_rows.py, tests/runtime/test_float_inputs.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from gpp_plugin.ir.samples import SampleRange
from gpp_plugin.ir.tensors import LayoutKind, TensorSpec
from gpp_plugin.runtime.batches import Batch, OwnRows
from gpp_plugin.runtime.memory.swap import HostBuffer, HostPool


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
