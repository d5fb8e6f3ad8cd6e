"""Runs one rank's windows of an asynchronous pipeline one behind the other, and what drains it.

What a window leaves to the next one is a `Carry`; windows that repeat are one program, whose numbers are shifted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from gpp_plugin.ir.program import RankProgram
from gpp_plugin.ir.schedule import TaskKind
from gpp_plugin.runtime.carry import Carry, WindowPlace
from gpp_plugin.runtime.executor import MiniBatchResult, StageExecutor
from gpp_plugin.schedule.async_1f1b import Windows
from gpp_plugin.schedule.windows import RankWindows

MakeExecutor = Callable[[RankProgram, WindowPlace], StageExecutor]


def is_trained(programs: RankWindows) -> bool:
    """Return whether a rank runs backwards."""
    tasks = [i.task for i in programs.steps[-1].instructions if i.task is not None]
    return any(task.kind is TaskKind.BACKWARD for task in tasks)


@dataclass(slots=True, kw_only=True)
class WindowRunner:
    """The executors of all windows of one rank, at one shape.

    Args:
        mini_batch: samples of one window.
        steps, drains: of each window, and of what is left after it; the last ones serve all later windows.
        window: windows run since the pipeline was empty.
    """

    windows: Windows
    mini_batch: int
    steps: tuple[StageExecutor, ...]
    drains: tuple[StageExecutor, ...]
    window: int = 0
    carry: Carry = field(default_factory=Carry)

    @classmethod
    def make(cls, programs: RankWindows, make: MakeExecutor, *, mini_batch: int) -> WindowRunner:
        """Return the runner of a rank's programs, each compiled by ``make``."""
        windows, trained = programs.windows, is_trained(programs)

        def place(window: int, carried: int) -> WindowPlace:
            return WindowPlace(
                carried=programs.carried[carried],
                first_micro_batch=(window - 1) * windows.micro_batches,
                is_trained=trained,
            )

        return cls(
            windows=windows,
            mini_batch=mini_batch,
            steps=tuple(make(p, place(w, w - 1)) for w, p in enumerate(programs.steps, start=1)),
            drains=tuple(make(p, place(w, w)) for w, p in enumerate(programs.drains, start=1)),
        )

    @property
    def shift(self) -> int:
        """Return how many micro-batches more the last window's numbers mean than its program says."""
        return (self.window - self.windows.program_of(self.window)) * self.windows.micro_batches

    def run(self, inputs: Sequence[Sequence[Tensor]], *, record: bool = False) -> MiniBatchResult:
        """Run the next window on its inputs."""
        self.window += 1
        if self.window > self.windows.first_steady:
            self.carry.renumber(-self.windows.micro_batches, -self.mini_batch)
        self.carry.shift = self.shift
        executor = self.steps[self.windows.program_of(self.window) - 1]
        return executor.run(inputs, record=record, carry=self.carry)

    def drain(self, *, record: bool = False) -> MiniBatchResult:
        """Run the backwards that are left."""
        executor = self.drains[self.windows.program_of(self.window) - 1]
        result = executor.run((), record=record, carry=self.carry)
        for pending in self.carry.sends:
            pending.wait()
        return result

    def empty(self) -> None:
        """Begin anew with an empty pipeline."""
        self.carry = Carry()
        self.window = 0
