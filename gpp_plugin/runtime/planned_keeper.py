"""Executes a stage's `MemoryPlan`: what each forward keeps, moves to the host and drops, and when it comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.memory_plan import MemoryPlan
from gpp_plugin.ir.memory_report import MemoryCounts
from gpp_plugin.ir.program import InstructionKind, RankProgram
from gpp_plugin.ir.schedule import TaskKind
from gpp_plugin.runtime.counting import MemoryCounter
from gpp_plugin.runtime.memory_policy import INSIDE, MemoryPolicy, StageOperators, make_policy
from gpp_plugin.runtime.module_swap import SwappingModule, swapped_numbers
from gpp_plugin.runtime.recipe import Pass, PlannedPass, Recipe
from gpp_plugin.runtime.segments import lay_out
from gpp_plugin.runtime.stage_module import StageFunction
from gpp_plugin.runtime.survey import survey
from gpp_plugin.runtime.swap import HostLink

Turn = tuple[bool, int, int | None]
"""A task: whether it is (the end of) a backward, its micro-batch, its half."""
NextBackward = Callable[[Turn], int | None]


class PlannedKeeper:
    """Runs the forwards of a stage that swaps or recomputes.

    Args:
        stage: its name, for messages.
        whole, half: the stage's code for a micro-batch, and for half of it.
        gradient_inputs: received tensors that take a gradient.
        link: shared by all shapes of a lane.
        next_backward: task -> the micro-batch whose backward comes right after it, if one does (`backwards_after`).

    Raises:
        PlanError: the plan does not fit the stage's code.
    """

    def __init__(
        self,
        *,
        stage: str,
        plan: MemoryPlan,
        operators: StageOperators | None,
        whole: StageFunction,
        half: StageFunction | None = None,
        gradient_inputs: Sequence[str] = (),
        link: HostLink,
        next_backward: NextBackward = lambda turn: None,
    ) -> None:
        make = _code_maker(stage, plan, operators, whole, link)
        self._codes = tuple(make(function) if function else None for function in (whole, half))
        self._leaves = tuple(whole.received.index(name) for name in gradient_inputs)
        self._link = link
        self._next_backward = next_backward
        self._passes: dict[int, list[Pass]] = {}
        self._counter: MemoryCounter | None = None
        self._constants = whole.constants

    def forward(
        self,
        micro_batch: int,
        half: int | None,
        parameters: Sequence[Tensor],
        inputs: Sequence[Tensor],
        received: Sequence[Tensor],
    ) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """Return the leaves of received tensors, and the outputs."""
        if self._counter is not None:
            self._counter.begin(micro_batch, (*parameters, *inputs))
        code = self._codes[half is not None]
        assert code is not None, "a program with half forwards needs their code"
        entered = list(received)
        leaves = []
        for index in self._leaves:
            leaf, entered[index] = enter_graph(entered[index])
            leaves.append(leaf)
        kept, outputs = code.run(
            (*parameters, *inputs), entered, micro_batch=micro_batch, counter=self._counter
        )
        if half:
            self._passes[micro_batch].append(kept)
        else:
            self._passes[micro_batch] = [kept]
        self._prefetch_after((False, micro_batch, half))
        return leaves, outputs

    def begin_backward(self, micro_batch: int) -> None:
        """Bring back what the backward needs first."""
        for kept in reversed(self._passes[micro_batch]):
            kept.prefetch()

    def end_backward(self, micro_batch: int) -> None:
        """Let go of the micro-batch."""
        del self._passes[micro_batch]
        if self._counter is not None:
            self._counter.end(micro_batch)
        self._prefetch_after((True, micro_batch, None))

    def _prefetch_after(self, turn: Turn) -> None:
        micro_batch = self._next_backward(turn)
        if micro_batch is not None and micro_batch in self._passes:
            self.begin_backward(micro_batch)

    def start_counting(self) -> None:
        """Count what the forwards from now on keep."""
        self._counter = MemoryCounter(self._constants)

    def stop_counting(self) -> MemoryCounts | None:
        """Count no longer, and return what was counted."""
        counter, self._counter = self._counter, None
        return counter.counts() if counter is not None else None

    def clear(self) -> None:
        """Forget all micro-batches."""
        self._passes.clear()
        self._link.clear()


class _Runs(Protocol):
    """A stage's code at one shape, and what to do with what it saves."""

    def run(
        self, fixed: Sequence[Tensor], received: Sequence[Tensor], **surroundings: Any
    ) -> tuple[Pass, tuple[Tensor, ...]]:
        """Return what is kept of a pass, and its outputs."""


def _code_maker(
    stage: str, plan: MemoryPlan, operators: StageOperators | None, whole: StageFunction, link: HostLink
) -> Callable[[StageFunction], _Runs]:
    if whole.given is not None:
        numbers = swapped_numbers(stage, plan)
        return lambda function: SwappingModule(function, numbers, link)
    assert operators is not None, "captured code says what it is made of"
    policy = make_policy(stage, plan, operators)
    _check_swapped(stage, policy, whole)
    return lambda function: _Code(function, policy, link)


class _Code:
    """A captured stage's code at one shape, and what to do with what it saves."""

    def __init__(self, function: StageFunction, policy: MemoryPolicy, link: HostLink) -> None:
        assert function.module is not None
        self._module: fx.GraphModule = function.module
        self._constants = function.constants
        self._policy = policy
        self._link = link
        self._recipe: Recipe | None = None

    def run(
        self, fixed: Sequence[Tensor], received: Sequence[Tensor], **surroundings: Any
    ) -> tuple[Pass, tuple[Tensor, ...]]:
        """Return what is kept of a pass, and its outputs.

        Args:
            fixed: parameters and the model's inputs.
        """
        known = (*self._constants, *fixed)
        if self._recipe is not None:
            planned = PlannedPass(self._recipe, fixed=known, link=self._link, **surroundings)
            return planned, planned.run((*known, *received))
        names = [node.name for node in self._module.graph.nodes if node.op == "placeholder"]
        layouts = lay_out(self._module.graph, self._policy, frozenset(names[: len(known)]))
        first, outputs, self._recipe = survey(
            self._module,
            layouts,
            self._policy,
            dict(zip(names, (*known, *received), strict=True)),
            len(known),
            link=self._link,
            **surroundings,
        )
        return first, outputs


def backwards_after(program: RankProgram) -> dict[Turn, int]:
    """Return the tasks that a backward follows with no other task in between, and its micro-batch."""
    tasks = [i.task for i in program.instructions if i.kind is InstructionKind.COMPUTE and i.task is not None]
    return {
        (task.kind is not TaskKind.FORWARD, task.micro_batch, task.half): following.micro_batch
        for task, following in zip(tasks, tasks[1:], strict=False)
        if following.kind in (TaskKind.BACKWARD, TaskKind.INPUT_GRADIENT)
        and task.kind is not TaskKind.INPUT_GRADIENT
    }


def _check_swapped(stage: str, policy: MemoryPolicy, function: StageFunction) -> None:
    assert function.module is not None
    placeholders = [node.name for node in function.module.graph.nodes if node.op == "placeholder"]
    first = len(placeholders) - len(function.received)
    known = policy.operators | {policy.root(name) for name in placeholders[first:]}
    for name in sorted(policy.swapped):
        if name.removesuffix(INSIDE) not in known:
            raise PlanError(
                f"stage {stage!r}: tensor {name!r} is to be swapped, but the stage neither makes nor receives it; plan "
                "again for this model"
            )


class _Entry(torch.autograd.Function):
    """Makes a tensor a result of the leaf that stands for it."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, holder: list[Tensor]) -> Tensor:
        """Return the tensor."""
        return holder[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return its gradient as the leaf's."""
        return gradients[0], None


def enter_graph(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return (leaf, tensor that requires a gradient, which arrives at the leaf).

    Autograd holds every leaf until the backward; this one has the shape of the tensor but not its memory, so that
    a received tensor is free when nobody uses it, or while it waits on the host.
    """
    leaf = torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape).requires_grad_(True)
    entered: Tensor = _Entry.apply(leaf, [tensor.detach()])  # type: ignore[no-untyped-call]
    return leaf, entered
