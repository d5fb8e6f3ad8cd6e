"""Memory policies of code that is a user's module as it is: some of its storages are swapped, or all of it runs again.

Nothing says what the operators inside are, so plans name a module's storages by number (`StorageNumbers`), in the order
in which it first keeps them, and recompute it as one segment (Chen et al., 2016, arXiv:1604.06174).

Source: Chen et al. 2016 (arXiv 1604.06174); Capuchin (ASPLOS 2020, doi 10.1145/3373376.3378505)
Tests: tests/plan/test_module_memory.py, tests/runtime/test_module_swap.py, tests/stage_graph/test_recompute.py,
    tests/runtime/test_memory_ranks.py
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.memory_plan import MemoryPlan
from gpp_plugin.runtime.memory.activation_policy import (
    INSIDE,
    ActivationPolicy,
    MemoryPolicy,
    NextBackward,
    Packed,
    Pass,
    StageActivations,
    StageOperators,
    make_policy,
    pack_versioned,
)
from gpp_plugin.runtime.memory.counting import StorageNumbers, storage_id
from gpp_plugin.runtime.memory.recompute import (
    Held,
    MovingPass,
    PlannedPass,
    Recipe,
    Replay,
    SecondForward,
    Swap,
    is_movable,
)
from gpp_plugin.runtime.memory.save_survey import SurveyPass
from gpp_plugin.runtime.memory.segments import SegmentCode
from gpp_plugin.runtime.memory.swap import ReturnQueue, SwapLink
from gpp_plugin.runtime.random_streams import streams_of
from gpp_plugin.runtime.stage_module import StageFunction

# ---- swapped ----------------------------------------------------------------------------------------


class SwapByNumber(ActivationPolicy):
    """Moves some storages of a module to the host.

    The module need only save the same ones each time, and even that only so that what is
    planned is what leaves: a module that branches otherwise saves or swaps other storages, and its gradients are the
    same.

    Args:
        stage: its name, for messages.

    Raises:
        PlanError: the plan also recomputes, or names something else than storages of a module.
    """

    frees_received = True

    def __init__(self, stage: str, plan: MemoryPlan, function: StageFunction, link: SwapLink) -> None:
        assert function.given is not None
        numbers = [tensor.name.rpartition(":")[2] for tensor in plan.swapped]
        if plan.recomputed or not all(number.isdecimal() for number in numbers):
            what = plan.swapped[0].name if plan.swapped else plan.recomputed[0].blocks[:3]
            raise PlanError(
                f"stage {stage!r} runs the user's own module as it is: it swaps some of what that keeps, or runs again "
                f"as a whole, and its memory plan says {what!r}; plan again for this graph"
            )
        self._swapped = frozenset(map(int, numbers))
        super().__init__(function.call)
        self._module = function.given
        self._link = link

    def begin(self, fixed: Sequence[Tensor], received: Sequence[Tensor], **context: Any) -> Pass:
        """Return a forward that is about to run."""
        numbers = StorageNumbers((*fixed, *self._module.buffers()))
        return _NumberedPass(self._call, numbers, self._swapped, link=self._link, **context)


class _NumberedPass(MovingPass):
    """A forward whose saved tensors are known by the numbers of their storages."""

    def __init__(
        self,
        call: Callable[..., tuple[Tensor, ...]],
        numbers: StorageNumbers,
        swapped: frozenset[int],
        **context: Any,
    ) -> None:
        super().__init__(call, fixed=(), num_segments=0, **context)
        self._numbers = numbers
        self._swapped = swapped

    def packer(self) -> Callable[[Tensor], Packed]:
        """Return what moves the planned storages and keeps the others."""
        # What was written to after it left is another storage on the host. In ``made = layer(x); made.sin();
        # made.mul_(3.0); made * made`` the storage of ``made`` is saved at versions 0 and 1: slots 0 and 1.
        slots: dict[tuple[int, int], int] = {}
        free = itertools.count()

        def pack(tensor: Tensor) -> Packed:
            number = self._numbers.number(tensor)
            if number not in self._swapped or not is_movable(tensor, self._link.device):
                return self.keep(tensor)
            key = number, tensor._version
            if key not in slots:
                slots[key] = next(free)
            return self.pack(tensor, 0, Swap(slots[key]))

        return pack


# ---- run again --------------------------------------------------------------------------------------


class RunAgain(ActivationPolicy):
    """Runs a module again as a whole before its backward.

    It is one segment: what its forward saved is dropped, but for what is there anyway. What it received, the random
    state and the module's buffers as they were before the forward are saved instead. The second forward reads the
    buffers that the first one read, and leaves them as it found them: statistics are updated once.

    Args:
        stage: its name, for messages.
        blocks: all of the stage.

    Raises:
        PlanError: the plan swaps, or recomputes only some of the stage.
    """

    def __init__(
        self,
        stage: str,
        plan: MemoryPlan,
        blocks: tuple[str, ...],
        function: StageFunction,
        device: torch.device,
    ) -> None:
        if plan.swapped or [segment.blocks for segment in plan.recomputed] != [blocks]:
            raise PlanError(
                f"stage {stage!r} runs the user's own module as it is: it can be recomputed as a whole, and then swaps "
                "nothing; change its memory plan"
            )
        assert function.given is not None
        super().__init__(function.call)
        self._module = function.given
        self._device = device
        self._queue = ReturnQueue()  # of nothing: what is saved for the second forward stays on the device

    def begin(self, fixed: Sequence[Tensor], received: Sequence[Tensor], **context: Any) -> Pass:
        """Return a forward that is about to run, with random state and buffers as they are now."""
        buffers = _Buffers(self._module)
        replay = Replay(fixed=fixed, queue=self._queue, device=self._device, **context)
        replay.states[0] = streams_of(self._device)
        replay.held.update(
            {f"received {i}": Held(t.detach(), t.requires_grad) for i, t in enumerate(received)}
        )
        forward = _DroppingPass(
            self._call,
            replay,
            buffers,
            there=frozenset(storage_id(t) for t in (*fixed, *received) if t.layout is torch.strided),
            num_fixed=len(fixed),
            **context,
        )
        for tensor in (*received, *buffers.values):
            forward.count(tensor)
        return forward


class _DroppingPass(Pass):
    """A forward that keeps of what it saves only what is there anyway.

    Args:
        replay: makes the rest again.
        there: storages of parameters, inputs and received tensors.
        num_fixed: how many parameters and inputs there are.
    """

    def __init__(
        self,
        call: Callable[..., tuple[Tensor, ...]],
        replay: Replay,
        buffers: _Buffers,
        *,
        there: frozenset[int],
        num_fixed: int,
        **context: Any,
    ) -> None:
        super().__init__(call, **context)
        self._replay: Replay | None = replay
        self._buffers: _Buffers | None = buffers
        self._there = there
        self._places: list[int | None] = []
        self._num_fixed = num_fixed

    def packer(self) -> Callable[[Tensor], Packed]:
        """Return what drops all but what is there anyway."""
        # For every saved tensor its place, or None where it stays. Of a linear layer and a sigmoid behind it, which
        # save (input, weight) and (result): ``[None, None, 2]``; the second forward saves as many, in the same order.
        places, there, replay = self._places, self._there, self._replay
        assert replay is not None

        def pack(tensor: Tensor) -> Packed:
            stays = tensor.layout is not torch.strided or storage_id(tensor) in there
            places.append(None if stays else len(places))
            return pack_versioned(tensor) if stays else functools.partial(replay.get, len(places) - 1)

        return pack

    def finish(self) -> None:
        """Say how to run again, and leave that to autograd: it accompanies the last tensor that it makes."""
        assert self._replay is not None and self._buffers is not None
        received = tuple(self._replay.held)
        self._replay.plan(_second_forward(self._call, self._buffers, self._num_fixed, received, self._places))
        self._replay = self._buffers = None


def _second_forward(
    call: Callable[..., tuple[Tensor, ...]],
    buffers: _Buffers,
    num_fixed: int,
    received: tuple[str, ...],
    places: Sequence[int | None],
) -> SecondForward:
    fixed = {f"fixed {i}": i for i in range(num_fixed)}

    def again(replay: Replay, *operands: Tensor) -> None:
        replay.restore(0)
        with buffers.restored():
            call(*operands)

    code = SegmentCode(
        call=again, arguments=(*fixed, *received), scratch=frozenset(), nodes=frozenset(), is_random=True
    )
    return SecondForward(code=code, places=tuple(places), fixed=fixed)


class _Buffers:
    """A module's buffers as they are now.

    All of them: operators update statistics without raising a tensor's version, so nothing shows which are written.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._found = {name: (buffer, buffer.detach().clone()) for name, buffer in module.named_buffers()}

    @property
    def values(self) -> list[Tensor]:
        """Return what is held."""
        return [value for _, value in self._found.values()]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Go back to them for a while."""
        present = _Buffers(self._module)
        self._put_back()
        try:
            yield
        finally:
            present._put_back()

    def _put_back(self) -> None:
        for name, (buffer, value) in self._found.items():
            path, _, leaf = name.rpartition(".")
            # through `data`, which leaves the version: others may have saved a buffer, and will find it unchanged
            buffer.data.copy_(value)
            self._module.get_submodule(path)._buffers[leaf] = buffer


# Creates what executes a stage's `MemoryPlan`: its policy follows from the plan and from what the code is.
#
# Code for many lengths is the same code at each of them, so what its first pass found out holds at all: which saved
# tensor is which, by position. Sizes are in no recipe; a tensor that moves, or is counted, has its own.
#
#     input_ids [4, 11]    code c, s0 = 11     surveyed: [None, Swap(0), Drop(1), ...]
#     input_ids [4, 9]     code c, s0 = 9      the same recipe

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


def make_stage_activations(
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
) -> StageActivations:
    """Return what runs the forwards of a stage that swaps or recomputes.

    Args:
        stage: its name, for messages.
        blocks: all of the stage.
        operators: what captured code is made of; None where the code is the user's own module.
        whole, half: the stage's code for a micro-batch, and for half of it.
        gradient_inputs: received tensors that take a gradient.
        link: shared by all shapes of a runner.
        next_backward: as of `StageActivations`.
        known: of the same stage under the same plan at other shapes; learns what is found out here.

    Raises:
        PlanError: the plan does not fit the stage's code.
    """
    make = _policy_maker(stage, plan, blocks, operators, whole, link, known or KnownSaves())
    return StageActivations(
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
) -> Callable[[StageFunction], ActivationPolicy]:
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


class CapturedPolicy(ActivationPolicy):
    """What to do with what a captured stage's code saves: found out in its first forward, followed in all others."""

    frees_received = True

    def __init__(
        self, function: StageFunction, policy: MemoryPolicy, link: SwapLink, known: KnownSaves
    ) -> None:
        assert function.module is not None
        super().__init__(function.call)
        self._function = function
        self._constants = function.bound
        self._policy = policy
        self._link = link
        self._known = known

    def begin(self, fixed: Sequence[Tensor], received: Sequence[Tensor], **context: Any) -> Pass:
        """Return a forward that is about to run."""
        known = (*self._constants, *fixed)
        module = self._module
        # one for each version of the code: with masks of attention, and without
        recipe = self._known.recipe(module, self._policy)
        if recipe is not None:
            return PlannedPass(recipe, constants=self._constants, fixed=known, link=self._link, **context)
        names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        return SurveyPass(
            module,
            self._policy,
            dict(zip(names, (*known, *received), strict=True)),
            len(known),
            link=self._link,
            on_recipe=functools.partial(self._known.learn, module, self._policy),
            **context,
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
