"""Times pieces of code on one device and counts what they hold.

On CUDA each piece is timed in a busy stream (`HeadStart`), by itself and in a chain with the others.
"""

from __future__ import annotations

import itertools
import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

# Bytes a piece of code holds: what it saves for backward, and its peak while it runs.


class SavedStorages:
    """The storages autograd saved while `recording` was open, each once, by data pointer.

    Args:
        exclude: tensors whose storages do not count (parameters, constants).
    """

    def __init__(self, exclude: Iterable[Tensor] = ()) -> None:
        self._excluded = {storage_key(tensor) for tensor in exclude}
        self._held: list[Tensor] = []
        self.bytes_of: dict[int, int] = {}

    @contextmanager
    def recording(self) -> Iterator[SavedStorages]:
        """Count what is saved inside the block; the tensors are held until `clear`, so no pointer recurs."""
        with saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield self

    def _pack(self, tensor: Tensor) -> Tensor:
        # Each storage once, however many views of it are saved; a sparse tensor has none and is rare enough to leave
        # out
        key = storage_key(tensor)
        if key not in self._excluded and tensor.layout is torch.strided:
            self._held.append(tensor.detach())
            self.bytes_of[key] = tensor.untyped_storage().nbytes()
        return tensor.detach()  # an operator that held its own result would hold its graph, for ever

    def clear(self) -> None:
        """Release the tensors held."""
        self._held.clear()

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all storages."""
        return sum(self.bytes_of.values())


def storage_key(tensor: Tensor) -> int:
    """Return what identifies the memory of ``tensor`` while it lives."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operators make while it is active, and their peak.

    Sees every operator's results, of the backward too, but not scratch memory inside a kernel.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self._sizes: dict[weakref.ref[Any], int] = {}

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Do not count the storages of ``tensors`` should an operator return them."""
        for tensor in (t for t in tensors if t.layout is torch.strided):
            self._sizes.setdefault(weakref.ref(tensor.untyped_storage(), self._forget), 0)

    def reset_peak(self) -> None:
        """Start a new peak from what is live now."""
        self.peak_bytes = self.live_bytes

    def _forget(self, reference: weakref.ref[Any]) -> None:
        self.live_bytes -= self._sizes.pop(reference, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A weak reference is called when the storage is freed: live bytes are those made and not freed yet. Views and
        # results in place have a storage that is known already.
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, Tensor) and value.layout is torch.strided:
                storage = value.untyped_storage()
                reference = weakref.ref(storage, self._forget)
                if reference not in self._sizes:
                    self._sizes[reference] = storage.nbytes()
                    self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return result


# Times on a device in a busy stream: what work takes there, and not what its launches take on the host.
#
# A kernel of 5 us that takes the host 8 us to launch is timed as 8 us where the device waits for the host, and takes 5
# us in a training step, in which the host runs before the device. So the device is held before the first mark, for as
# long as the host needs to queue everything behind it:
#
#     host     hold | m0 | launches of a | m1 | launches of b | m2
#     device   hold ................................. | m0 | a | m1 | b | m2
#
# A lap counts as busy where the host had queued its end before the device reached its beginning; laps that are not
# busy have launches in them, and count only where no run has a busy one (code that reads the device from the host).

LONGEST_HOLD_US = 50_000.0
"""A hold beyond this would cost more than it shows: queues are full long before (about a thousand launches)."""
MARGIN = 1.5
"""How much longer the device is held than the host took to queue everything the last time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """A mark in a stream: when the host had queued it, and when the device reached it, on one clock."""

    host_us: float
    device_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lap:
    """The time between two marks; ``is_busy``: the device never waited for the host in it."""

    us: float
    is_busy: bool


def laps_between(stamps: Sequence[Stamp]) -> list[Lap]:
    """Return the time on the device between each mark and the next.

    >>> late, early = Stamp(host_us=9.0, device_us=10.0), Stamp(host_us=3.0, device_us=10.0)
    >>> begin = Stamp(host_us=1.0, device_us=5.0)
    >>> [laps_between([begin, end])[0].is_busy for end in (late, early)]
    [False, True]
    """
    return [
        Lap(us=end.device_us - begin.device_us, is_busy=end.host_us <= begin.device_us)
        for begin, end in zip(stamps, stamps[1:], strict=False)
    ]


def typical_laps(runs: Sequence[Sequence[Lap]]) -> list[Lap]:
    """Return the median of each lap over runs: of those in which it was busy, else of all.

    Args:
        runs: the same laps in each.
    """
    # runs of two laps, in us, * for busy: [9 4*] [6* 4*] [6* 5*] are 6* and 4*; [9 4*] [8 4*] are 8.5 and 4*
    typical = []
    for column in zip(*runs, strict=True):
        busy = [lap.us for lap in column if lap.is_busy]
        typical.append(Lap(us=statistics.median(busy or [lap.us for lap in column]), is_busy=bool(busy)))
    return typical


class HeadStart:
    """How long to hold a device so that the host queues first, learnt from run to run of the same code."""

    def __init__(self) -> None:
        self.hold_us = 0.0
        self._margin = MARGIN

    def learn(self, stamps: Sequence[Stamp]) -> None:
        """Take in a run that was made with this hold."""
        # The first run (kernels are loaded, caches filled) queues slowly; so the hold follows the last run, down too.
        # A run that was held for as long as it took to queue, and has laps that were not busy all the same, was
        # disturbed on the host, or is longer than the queue: the margin grows.
        queueing_us = stamps[-1].host_us - stamps[0].host_us
        if self.hold_us >= queueing_us and not all(lap.is_busy for lap in laps_between(stamps)):
            self._margin *= 2
        self.hold_us = min(self._margin * queueing_us, LONGEST_HOLD_US)


def clock_of(device_type: str) -> dict[str, str]:
    """Return what a stored profile's key says of how times were taken; nothing on a CPU, whose profiles stay valid."""
    return {"clock": "busy stream"} if device_type == "cuda" else {}


WARM_UPS = 2
"""Runs before the first one that counts: allocator, kernel choice, first gradient buffers."""
ENOUGH_S = 0.02
"""Fast code is run more often than requested, until this long: one interruption must not move the median."""
MOST_REPEATS = 50
CYCLES_PER_US = 2000
"""Of a GPU's clock, about: a hold of it need not be exact, as `HeadStart` sees what came of it."""
BUDGET_S = 2.0
"""Seconds after which slow code is not run again, once it has been timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """What a piece of code is called with: ``call(*parameters, *inputs, *received)``.

    Args:
        takes_gradient: for each of ``received``, whether its gradient is computed.
        constants: what ``call`` has bound already.
    """

    call: Callable[..., tuple[Tensor, ...]]
    parameters: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]
    received: tuple[Tensor, ...]
    takes_gradient: tuple[bool, ...]
    is_training: bool
    constants: tuple[Tensor, ...] = ()

    def forward(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return (results, the leaves that stand for ``received``)."""
        leaves = tuple(
            tensor.detach().requires_grad_(flag)
            for tensor, flag in zip(self.received, self.takes_gradient, strict=True)
        )
        with nullcontext() if self.is_training else torch.no_grad():
            return self.call(*self.parameters, *self.inputs, *leaves), leaves


OriginKind = Literal["received", "input", "parameter", "output"]
Origin = tuple[OriginKind, int]
"""The operand, or the earlier output, whose storage a tensor shares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Cost of one piece of code, and what it made.

    Args:
        saved_inside: bytes saved for backward in storages that no operand owns; those of model inputs never
            count, the mini-batch is there anyway.
        saved_received: bytes saved of each received operand's own storage; 0 where it is not saved.
        is_output_saved: for each output, whether its storage is among ``saved_inside``.
        output_origin: for each output, whose storage it shares; None if it has its own.
        transient_bytes: peak above operands, results and saved tensors; 0 where it was not measured.
    """

    forward_us: float
    backward_us: float
    saved_inside: int
    saved_received: tuple[int, ...]
    is_output_saved: tuple[bool, ...]
    output_origin: tuple[Origin | None, ...]
    transient_bytes: int
    outputs: tuple[Tensor, ...]

    @property
    def has_own_outputs(self) -> bool:
        """Return whether no output shares the storage of an operand."""
        return all(origin is None or origin[0] == "output" for origin in self.output_origin)

    def copied_outputs(self) -> tuple[Tensor, ...]:
        """Return the outputs in storages of their own, for a block that shares the measurement."""
        # storage by storage, so that two outputs that share one still do, and each lies in it as it did: strides and
        # offsets decide how fast the next block's kernels are
        storages: dict[int, torch.UntypedStorage] = {}
        copies = []
        for tensor in self.outputs:
            key = storage_key(tensor)
            if key not in storages:
                storages[key] = tensor.untyped_storage().clone()
            copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            copies.append(copy.set_(storages[key], tensor.storage_offset(), tensor.size(), tensor.stride()))
        return tuple(copies)


def measure(operands: Operands, *, device: torch.device, repeats: int, with_peak: bool) -> Measurement:
    """Run ``operands.call`` forward and backward and return the median times and the bytes it holds."""
    # Three kinds of runs: times without anything else; one that records what is saved; one that follows the peak.
    # A storage belongs to its first holder, operands before outputs. An output that is a view of a received tensor has
    # the origin ("received", i), so that whatever saves it later saves that tensor's storage.
    [(forward, backward)] = time_chain([operands], device=device, repeats=repeats)
    saved = SavedStorages(exclude=(*operands.parameters, *operands.inputs, *operands.constants))
    with saved.recording():
        outputs, leaves = operands.forward()
    first: dict[int, Origin] = {}
    for position, tensor in enumerate(leaves):
        first.setdefault(storage_key(tensor), ("received", position))
    inside = {key: num_bytes for key, num_bytes in saved.bytes_of.items() if key not in first}
    sizes = [
        saved.bytes_of.get(storage_key(tensor), 0) if first[storage_key(tensor)][1] == position else 0
        for position, tensor in enumerate(leaves)
    ]
    owners: tuple[tuple[OriginKind, Sequence[Tensor]], ...] = (
        ("input", operands.inputs),
        ("parameter", operands.parameters),
        ("output", outputs),
    )
    for kind, tensors in owners:
        for position, tensor in enumerate(tensors):
            first.setdefault(storage_key(tensor), (kind, position))
    origins = [first[storage_key(tensor)] for tensor in outputs]
    measurement = Measurement(
        forward_us=forward.us,
        backward_us=backward.us,
        saved_inside=sum(inside.values()),
        saved_received=tuple(sizes),
        is_output_saved=tuple(storage_key(tensor) in inside for tensor in outputs),
        output_origin=tuple(None if own == ("output", i) else own for i, own in enumerate(origins)),
        transient_bytes=_peak(operands, device) if with_peak else 0,
        outputs=tuple(tensor.detach() for tensor in outputs),
    )
    for parameter in operands.parameters:
        parameter.grad = None
    return measurement


def time_chain(pieces: Sequence[Operands], *, device: torch.device, repeats: int) -> list[tuple[Lap, Lap]]:
    """Return what the forward and the backward of each piece take, run one behind the other without waiting.

    Args:
        pieces: in the order of their forwards; backwards run the other way round.
        repeats: fewest runs of the whole chain that count.
    """
    # The results of a run are freed as the next one makes them again: a forward does not write where the last one
    # wrote.
    made: list[Any] = [None] * len(pieces)
    seeded: list[tuple[list[Tensor], list[Tensor]]] = []
    head_start = HeadStart()

    def run() -> list[Lap]:
        watch = Stopwatch(device, head_start)
        for i, piece in enumerate(pieces):
            made[i] = piece.forward()
            watch.mark()
        seeded[:] = [with_seeds(outputs) for outputs, _ in made]
        watch.mark()
        for roots, seeds in reversed(seeded):
            if roots:
                torch.autograd.backward(roots, seeds)
            watch.mark()
        return watch.laps()

    # Laps: forwards | making random seeds, which does not count | backwards, the last piece's first.
    laps = repeat_runs(run, repeats=repeats)
    forwards, backwards = laps[: len(pieces)], laps[: len(pieces) : -1]
    none = Lap(us=0.0, is_busy=True)
    return [
        (forward, backward if roots else none)
        for forward, backward, (roots, _) in zip(forwards, backwards, seeded, strict=True)
    ]


def repeat_runs(run: Callable[[], list[Lap]], *, repeats: int) -> list[Lap]:
    """Return the typical laps of the runs that count; fast code is run more often than requested."""
    # The first `WARM_UPS` runs are dropped, unless they took so long that there is time for no other. Fast code
    # (0.1 ms) thus runs up to 50 times, a layer of 10 ms ``repeats`` times, one of 3 s twice.
    runs: list[list[Lap]] = []
    started = time.perf_counter()
    for attempt in itertools.count():
        laps = run()
        elapsed_s = time.perf_counter() - started
        if attempt >= WARM_UPS or (attempt > 0 and elapsed_s > BUDGET_S):
            runs.append(laps)
        is_enough = len(runs) >= repeats and (elapsed_s > ENOUGH_S or len(runs) >= MOST_REPEATS)
        if is_enough or (runs and elapsed_s > BUDGET_S):
            break
    return typical_laps(runs)


def with_seeds(outputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs that take a gradient, and a random gradient for each."""
    roots = [tensor for tensor in outputs if tensor.requires_grad]
    return roots, [torch.randn_like(root) for root in roots]


def _peak(operands: Operands, device: torch.device) -> int:
    """Return the peak of forward and backward above what is held in between, gradients being there already."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        outputs, leaves = operands.forward()
        held, peak_forward = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        _backward(outputs)
        del leaves
        return max(0, max(peak_forward, torch.cuda.max_memory_allocated(device)) - held)
    #     live bytes   |  forward ▁▃▇▅ | held: outputs and what is saved | backward ▅▇▃▁ |
    # What is wanted is the higher of the two peaks above the middle: memory that a stage needs beside what it holds.
    counter = LiveBytes()
    grads = [p.grad for p in operands.parameters if p.grad is not None]
    counter.ignore((*operands.parameters, *operands.inputs, *operands.received, *grads))
    with counter:
        outputs, leaves = operands.forward()
        held, peak_forward = counter.live_bytes, counter.peak_bytes
        counter.reset_peak()
        _backward(outputs)
        del leaves
    return max(0, max(peak_forward, counter.peak_bytes) - held)


def _backward(outputs: Sequence[Tensor]) -> None:
    roots, seeds = with_seeds(outputs)
    if roots:
        torch.autograd.backward(roots, seeds)


class Stopwatch:
    """Laps in microseconds: events on CUDA, the thread's CPU time on one CPU thread, else the wall clock.

    Code on one thread never waits, so its CPU time is its wall time on a free core.

    Args:
        head_start: on CUDA, holds the device so that the host queues first; it learns from what is timed.
    """

    def __init__(self, device: torch.device, head_start: HeadStart | None = None) -> None:
        self._device = device
        self._clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        self._head_start = head_start
        self._events: list[torch.cuda.Event] = []
        self._clock_s: list[float] = []
        if device.type == "cuda":
            # host and device agree on the time of this event: the device has nothing to do
            torch.cuda.synchronize(device)
            self._origin = self._event()
            self._clock, self._origin_s = time.perf_counter, time.perf_counter()
            if head_start is not None and head_start.hold_us > 0:
                with torch.cuda.device(device):
                    torch.cuda._sleep(round(head_start.hold_us * CYCLES_PER_US))
        self.mark()

    def mark(self) -> None:
        """End a lap."""
        if self._device.type == "cuda":
            self._events.append(self._event())
        self._clock_s.append(self._clock())

    def laps_us(self) -> list[float]:
        """Return the microseconds of every lap so far."""
        return [lap.us for lap in self.laps()]

    def laps(self) -> list[Lap]:
        """Return every lap so far, when it is over."""
        if not self._events:
            laps = itertools.pairwise(self._clock_s)
            return [Lap(us=(b - a) * 1e6, is_busy=True) for a, b in laps]
        self._events[-1].synchronize()
        pairs = zip(self._events, self._clock_s, strict=True)
        stamps = [
            Stamp(host_us=(s - self._origin_s) * 1e6, device_us=self._origin.elapsed_time(event) * 1e3)
            for event, s in pairs
        ]
        if self._head_start is not None:
            self._head_start.learn(stamps)
        return laps_between(stamps)

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
