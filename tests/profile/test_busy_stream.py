"""Times on a device that the host keeps busy, on a model of both: what laps are, and that launches are not in them.

In the model the host queues one kernel after the other, the device runs each when it is queued and the one before is
done, and marks are kernels of no length. So every number here is known exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from gpp_plugin.profile import block_survey, timing
from gpp_plugin.profile.timing import (
    LONGEST_HOLD_US,
    HeadStart,
    Lap,
    Operands,
    Stamp,
    clock_of,
    laps_between,
    time_chain,
    typical_laps,
)

LAUNCH_US = 8.0


@dataclass
class Model:
    """A host and a device; ``depth`` is how many launches the device's queue holds."""

    hold_us: float = 0.0
    depth: int = 10**6
    host_us: float = 0.0
    device_us: float = 0.0
    ends: list[float] = field(default_factory=list)
    stamps: list[Stamp] = field(default_factory=list)

    def launch(self, kernel_us: float, *, launch_us: float = LAUNCH_US) -> None:
        self.host_us += launch_us
        if len(self.ends) >= self.depth:  # the queue is full: the host waits until one has run
            self.host_us = max(self.host_us, self.ends[-self.depth])
        self.device_us = max(self.device_us, self.host_us) + kernel_us
        self.ends.append(self.device_us)

    def mark(self) -> None:
        self.stamps.append(Stamp(host_us=self.host_us, device_us=self.device_us))

    def laps(self) -> list[Lap]:
        return laps_between(self.stamps)


def run(kernels: list[list[float]], hold_us: float, *, depth: int = 10**6, slow: float = 1.0) -> list[Stamp]:
    """Return the marks around each lap of kernels, behind a hold."""
    model = Model(depth=depth)
    model.launch(hold_us, launch_us=0.0)
    model.mark()
    for lap in kernels:
        for kernel_us in lap:
            model.launch(kernel_us, launch_us=slow * LAUNCH_US)
        model.mark()
    return model.stamps


SMALL = [[1.0] * 10, [2.0] * 5]
"""Kernels of 10 us each lap, whose launches take the host 80 and 40 us."""
LARGE = [[100.0] * 10, [200.0] * 5]


def test_small_kernels_take_what_the_device_takes_behind_a_hold_alone() -> None:
    laps = laps_between(run(SMALL, 0.0))  # their launches
    assert [lap.is_busy for lap in laps] == [False, False]
    assert laps[0].us >= 80.0 and laps[1].us >= 40.0
    assert laps_between(run(SMALL, 200.0)) == [Lap(us=10.0, is_busy=True)] * 2
    # held for the first lap only: the second one has launches in it, and says so
    laps = laps_between(run(SMALL, 85.0))
    assert laps[0] == Lap(us=10.0, is_busy=True) and not laps[1].is_busy and laps[1].us > 10.0


def test_large_kernels_are_busy_soon_and_the_same_with_and_without() -> None:
    laps = laps_between(run(LARGE, 0.0))
    assert not laps[0].is_busy and laps[1] == Lap(us=1000.0, is_busy=True)
    assert laps_between(run(LARGE, 500.0)) == [Lap(us=1000.0, is_busy=True)] * 2


@pytest.mark.parametrize("kernels", [SMALL, LARGE, [[0.5] * 400, [3.0] * 2, [0.5] * 400]])
def test_the_hold_is_learnt_in_a_few_runs(kernels: list[list[float]]) -> None:
    head_start = HeadStart()
    runs = []
    for attempt in range(6):  # the first one queues a hundred times slower: kernels are loaded
        stamps = run(kernels, head_start.hold_us, slow=100.0 if attempt == 0 else 1.0)
        head_start.learn(stamps)
        runs.append(laps_between(stamps))
    assert typical_laps(runs[2:]) == [Lap(us=sum(lap), is_busy=True) for lap in kernels]
    queueing_us = LAUNCH_US * sum(map(len, kernels))
    assert head_start.hold_us == pytest.approx(1.5 * queueing_us), "and no longer than it helps"


def test_a_disturbed_host_gets_more_and_a_full_queue_ends_it() -> None:
    head_start = HeadStart()
    for _ in range(2):
        head_start.learn(run(SMALL, head_start.hold_us))
    assert head_start.hold_us == pytest.approx(1.5 * 120)
    # the hold was as long as queueing took, and a lap was not busy all the same: it grows
    early = [Stamp(host_us=0.0, device_us=50.0), Stamp(host_us=100.0, device_us=160.0)]
    head_start.learn(early)
    assert head_start.hold_us == pytest.approx(3.0 * 100)
    for _ in range(60):  # 40 launches, of which the queue holds 10: the host waits for the hold itself
        head_start.learn(run([[1.0] * 40], head_start.hold_us, depth=10))
    assert head_start.hold_us <= LONGEST_HOLD_US


def test_what_counts_is_what_was_busy() -> None:
    def laps(*given: str) -> list[Lap]:
        return [Lap(us=float(text.rstrip("*")), is_busy=text.endswith("*")) for text in given]

    runs = [laps("9", "4*", "7"), laps("6*", "4*", "8"), laps("6*", "5*", "9"), laps("7*", "100", "30")]
    assert typical_laps(runs) == laps("6*", "4*", "8.5")


class _Kernel(torch.autograd.Function):
    """An operator whose forward and backward are kernels of a model's device."""

    @staticmethod
    def forward(ctx: object, x: Tensor, forward_us: float, backward_us: float) -> Tensor:
        _CURRENT[-1].launch(forward_us)
        ctx.backward_us = backward_us  # type: ignore[attr-defined]
        return x * 2

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, None, None]:
        _CURRENT[-1].launch(ctx.backward_us)  # type: ignore[attr-defined]
        return gradients[0] * 2, None, None


_CURRENT: list[Model] = []


def piece_of(
    call: Callable[[Tensor], tuple[Tensor, ...]], x: Tensor | None = None, *, is_trained: bool = True
) -> Operands:
    """Return code of one operand and no weights, ready to be timed."""
    return Operands(
        call=call,
        parameters=(),
        inputs=(),
        received=(torch.ones(3) if x is None else x,),
        takes_gradient=(is_trained,),
        is_training=True,
    )


def piece(forward_us: float, backward_us: float, **options: bool) -> Operands:
    return piece_of(lambda x: (_Kernel.apply(x, forward_us, backward_us),), **options)


def test_a_chain_runs_forwards_and_then_backwards_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def watch(device: torch.device, head_start: HeadStart) -> Model:
        _CURRENT.append(Model())  # every call of an operator is a kernel of the length it says
        _CURRENT[-1].launch(1000.0)
        _CURRENT[-1].mark()
        return _CURRENT[-1]

    monkeypatch.setattr(timing, "Stopwatch", watch)
    pieces = [piece(3.0, 7.0), piece(1.0, 5.0, is_trained=False), piece(2.0, 4.0)]
    found = time_chain(pieces, device=torch.device("cpu"), repeats=3)
    assert [(a.us, b.us) for a, b in found] == [(3.0, 7.0), (1.0, 0.0), (2.0, 4.0)]
    assert all(a.is_busy and b.is_busy for a, b in found)
    ends = [after - before for before, after in zip(_CURRENT[0].ends, _CURRENT[0].ends[1:], strict=False)]
    assert ends == [3.0, 1.0, 2.0, 4.0, 7.0], "three forwards, and the backwards of the two that have one"


def test_a_block_takes_its_times_from_the_chain_where_it_was_busy() -> None:
    def measured(place: int, forward_us: float, backward_us: float) -> block_survey._Measured:
        whole = timing.Measurement(
            forward_us=forward_us,
            backward_us=backward_us,
            saved_inside=0,
            saved_received=(),
            is_output_saved=(),
            output_origin=(),
            transient_bytes=9,
            outputs=(),
        )
        return block_survey._Measured(whole=whole, split=block_survey.NOT_MEASURED, place=place)

    busy, idle = (Lap(us=5.0, is_busy=True), Lap(us=6.0, is_busy=True)), (Lap(us=50.0, is_busy=False),) * 2
    masks = measured(0, 1.0, 0.0)
    for times, own, replicas, wanted in (
        ([busy], measured(0, 7.0, 8.0), None, (5.0, 6.0)),
        ([idle], measured(0, 7.0, 8.0), None, (7.0, 8.0)),
        ([], measured(0, 7.0, 8.0), None, (7.0, 8.0)),
        ([busy], measured(-1, 7.0, 8.0), None, (7.0, 8.0)),
        ([busy, busy], measured(1, 7.0, 8.0), masks, (10.0, 6.0)),
    ):
        result = block_survey._result(3, replicas, own, times)
        assert (result.forward_us, result.backward_us) == wanted
        assert (result.saved_bytes, result.transient_bytes) == (3, 9)


def test_profiles_of_a_cpu_stay_valid() -> None:
    assert clock_of("cpu") == {} and clock_of("cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a busy stream needs a GPU")
def test_a_gpu_is_timed_without_its_launches() -> None:
    device = torch.device("cuda")
    x = torch.ones(64, 64, device=device)

    def small(tensor: Tensor) -> tuple[Tensor, ...]:
        for _ in range(50):
            tensor = tensor + 1
        return (tensor,)

    operands = piece_of(small, x, is_trained=False)
    (found,) = time_chain([operands], device=device, repeats=7)
    watch = timing.Stopwatch(device)
    operands.forward()
    watch.mark()
    assert found[0].is_busy and found[0].us < watch.laps_us()[0]
