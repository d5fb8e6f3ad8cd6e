"""Makes the keeper that executes a stage's `MemoryPlan`: its policy follows from the plan and from what the code is.

Code for many lengths is the same code at each of them, so what its first pass found out holds at all: which saved
tensor is which, by position. Sizes are in no recipe; a tensor that moves, or is counted, has its own.

    input_ids [4, 11]    code c, s0 = 11     surveyed: [None, Swap(0), Drop(1), ...]
    input_ids [4, 9]     code c, s0 = 9      the same recipe

Source: this project
Tests: tests/runtime/test_memory_ranks.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from weakref import WeakKeyDictionary

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

MAX_POLICIES = 64


class KnownSaves:
    """What was found out of a stage's codes: policies by what they are made of, recipes by the code itself."""

    def __init__(self) -> None:
        # A policy is of the operators' names, which code for all lengths has one mapping of, and of the operands that
        # its masks at a length repeat. Code lives as long as something runs it.
        self._policies: dict[tuple[object, ...], tuple[Mapping[str, str], MemoryPolicy]] = {}
        self._recipes: WeakKeyDictionary[fx.GraphModule, dict[MemoryPolicy, Recipe]] = WeakKeyDictionary()

    def policy(self, operators: StageOperators, make: Callable[[], MemoryPolicy]) -> MemoryPolicy:
        """Return the policy of a stage's operators."""
        names = operators.storage_of
        key = (id(names), *operators.repeated)
        if key not in self._policies:
            while len(self._policies) >= MAX_POLICIES:
                self._policies.pop(next(iter(self._policies)))
            self._policies[key] = names, make()
        return self._policies[key][1]

    def recipe(self, module: fx.GraphModule, policy: MemoryPolicy) -> Recipe | None:
        """Return what code does under a policy, if that was found out."""
        return self._recipes.get(module, {}).get(policy)

    def learn(self, module: fx.GraphModule, policy: MemoryPolicy, recipe: Recipe) -> None:
        """Take note of what code does under a policy."""
        self._recipes.setdefault(module, {})[policy] = recipe


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
    known: KnownSaves | None = None,
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
        known: of the same stage under the same plan at other shapes; learns what is found out here.

    Raises:
        PlanError: the plan does not fit the stage's code.
    """
    make = _policy_maker(stage, plan, blocks, operators, whole, link, known or KnownSaves())
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
    known: KnownSaves,
) -> Callable[[StageFunction], SavePolicy]:
    if whole.given is not None and plan.recomputed:
        return lambda function: RunAgain(stage, plan, blocks, function, link.device)
    if whole.given is not None:
        return lambda function: SwapByNumber(stage, plan, function, link)
    assert operators is not None, "captured code says what it is made of"
    made_of = operators

    def make() -> MemoryPolicy:
        policy = make_policy(stage, plan, made_of)
        _check_swapped(stage, policy, whole)
        return policy

    policy = known.policy(operators, make)
    return lambda function: CapturedPolicy(function, policy, link, known)


class CapturedPolicy:
    """What to do with what a captured stage's code saves: found out in its first forward, followed in all others."""

    frees_received = True

    def __init__(
        self, function: StageFunction, policy: MemoryPolicy, link: SwapLink, known: KnownSaves
    ) -> None:
        assert function.module is not None
        self._function = function
        self._constants = function.bound
        self._policy = policy
        self._link = link
        self._known = known

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
        # one for each version of the code: with masks of attention, and without
        recipe = self._known.recipe(module, self._policy)
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
            tell=functools.partial(self._known.learn, module, self._policy),
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
