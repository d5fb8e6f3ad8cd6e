"""Makes the keeper that executes a stage's `MemoryPlan`: its policy follows from the plan and from what the code is.

Source: this project
Tests: tests/runtime/test_memory_ranks.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from torch import Tensor, fx

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.memory_plan import MemoryPlan
from gpp_plugin.runtime.memory.counting import MemoryCounter
from gpp_plugin.runtime.memory.keeper import NextBackward, Pass, SavePolicy, StageKeeper
from gpp_plugin.runtime.memory.memory_policy import INSIDE, MemoryPolicy, StageOperators, make_policy
from gpp_plugin.runtime.memory.module_policies import RunAgain, SwapByNumber
from gpp_plugin.runtime.memory.recipe import PlannedPass, Recipe
from gpp_plugin.runtime.memory.save_survey import SurveyPass
from gpp_plugin.runtime.memory.swap import SwapLink
from gpp_plugin.runtime.stage_module import StageFunction


def make_keeper(
    *,
    stage: str,
    plan: MemoryPlan,
    blocks: tuple[str, ...],
    operators: StageOperators | None,
    whole: StageFunction,
    half: StageFunction | None = None,
    gradient_inputs: Sequence[str] = (),
    link: SwapLink,
    next_backward: NextBackward = lambda turn: None,
) -> StageKeeper:
    """Return what runs the forwards of a stage that swaps or recomputes.

    Args:
        stage: its name, for messages.
        blocks: all of the stage.
        operators: what captured code is made of; None where the code is the user's own module.
        whole, half: the stage's code for a micro-batch, and for half of it.
        gradient_inputs: received tensors that take a gradient.
        link: shared by all shapes of a lane.
        next_backward: as of `StageKeeper`.

    Raises:
        PlanError: the plan does not fit the stage's code.
    """
    make = _policy_maker(stage, plan, blocks, operators, whole, link)
    return StageKeeper(
        whole=make(whole),
        half=None if half is None else make(half),
        leaves=[whole.received.index(name) for name in gradient_inputs],
        constants=whole.constants,
        link=link,
        next_backward=next_backward,
    )


def _policy_maker(
    stage: str,
    plan: MemoryPlan,
    blocks: tuple[str, ...],
    operators: StageOperators | None,
    whole: StageFunction,
    link: SwapLink,
) -> Callable[[StageFunction], SavePolicy]:
    if whole.given is not None and plan.recomputed:
        return lambda function: RunAgain(stage, plan, blocks, function, link.device)
    if whole.given is not None:
        return lambda function: SwapByNumber(stage, plan, function, link)
    assert operators is not None, "captured code says what it is made of"
    policy = make_policy(stage, plan, operators)
    _check_swapped(stage, policy, whole)
    return lambda function: CapturedPolicy(function, policy, link)


class CapturedPolicy:
    """What to do with what a captured stage's code saves: found out in its first forward, followed in all others."""

    frees_received = True

    def __init__(self, function: StageFunction, policy: MemoryPolicy, link: SwapLink) -> None:
        assert function.module is not None
        self._function = function
        self._constants = function.bound
        self._policy = policy
        self._link = link
        # one for each version of the code: with masks of attention, and without
        self._recipes: dict[fx.GraphModule, Recipe] = {}

    def begin(
        self,
        fixed: Sequence[Tensor],
        received: Sequence[Tensor],
        *,
        micro_batch: int,
        counter: MemoryCounter | None,
    ) -> Pass:
        """Return a forward that is about to run."""
        known = (*self._constants, *fixed)
        module = self._module
        recipe = self._recipes.get(module)
        if recipe is not None:
            return PlannedPass(
                recipe,
                constants=self._constants,
                fixed=known,
                micro_batch=micro_batch,
                link=self._link,
                counter=counter,
            )
        names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        return SurveyPass(
            module,
            self._policy,
            dict(zip(names, (*known, *received), strict=True)),
            len(known),
            micro_batch=micro_batch,
            link=self._link,
            counter=counter,
            tell=functools.partial(self._recipes.__setitem__, module),
        )

    @property
    def _module(self) -> fx.GraphModule:
        """Return the code as it is for this mini-batch."""
        choice, module = self._function.choice, self._function.module
        assert module is not None
        return module if choice is None else choice.module


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
