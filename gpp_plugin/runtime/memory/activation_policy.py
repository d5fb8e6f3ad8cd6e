"""Runs a stage's forwards under saved-tensor hooks: one shell for every memory plan, and a policy per saved tensor.

    forward    begin ──► hooks on ──► the stage's code ──► hooks off ──► finish
                                          │ each tensor that autograd saves
                                          ▼
                                        pack: keep it  │  move it to the host  │  drop it, to be made again
    backward   prefetch ──► autograd requests each tensor: unpack ──► end

The shell handles micro-batches, their halves, what comes next and the counter. What happens to a saved tensor is
decided by a `Pass`, one a forward, that the `ActivationPolicy` of the stage's code makes:

    everything stays (and is counted)     `ActivationPolicy`
    captured code                         `CapturedPolicy`     by name in its first pass, by position in all others
    a user's module that swaps            `SwapByNumber`       by the number of the tensor's storage
    a user's module that runs again       `RunAgain`           dropped, but for what is there anyway

A stage without a memory plan that is not counted has none of this, and pays one comparison a task for that.

Nothing says what the operators inside of a user's module are, so plans name its storages by number (`StorageNumbers`),
in the order in which it first keeps them, and recompute it as one segment (Chen et al., 2016, arXiv:1604.06174).

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
from torch.autograd.graph import saved_tensors_hooks

from gpp_plugin.capture.eager.opaque_call import saving_separately
from gpp_plugin.errors import PlanError
from gpp_plugin.ir.memory_report import MemoryCounts
from gpp_plugin.ir.plan import MemoryPlan
from gpp_plugin.ir.program import InstructionKind, RankProgram
from gpp_plugin.ir.schedule import TaskKind
from gpp_plugin.runtime.memory.counting import (
    HeldTogether,
    MemoryCounter,
    Packed,
    Pass,
    StorageNumbers,
    pack_versioned,
    storage_id,
    unpack,
)
from gpp_plugin.runtime.memory.recompute import (
    Held,
    MovingPass,
    PlannedPass,
    Recipe,
    Replay,
    SecondForward,
    SurveyPass,
    Swap,
    is_movable,
)
from gpp_plugin.runtime.memory.segments import (
    INSIDE,
    MemoryPolicy,
    SegmentCode,
    StageOperators,
    make_policy,
)
from gpp_plugin.runtime.memory.swap import ReturnQueue, SwapLink
from gpp_plugin.runtime.random_streams import streams_of
from gpp_plugin.runtime.stage_module import StageFunction

Turn = tuple[bool, int, int | None]
"""A task: whether it is (the end of) a backward, its micro-batch, its half."""
NextBackward = Callable[[Turn], int | None]

# ---- policies ---------------------------------------------------------------------------------------


class ActivationPolicy:
    """Decides what becomes of the tensors that one stage's code saves at one shape: here all stay, so are counted.

    Attributes:
        frees_received: whether received tensors may be gone before the backward; autograd must then not hold them.
    """

    frees_received = False

    def __init__(self, call: Callable[..., tuple[Tensor, ...]]) -> None:
        self._call = call

    def begin(self, fixed: Sequence[Tensor], received: Sequence[Tensor], **context: Any) -> Pass:
        """Return a forward that is about to run.

        Args:
            fixed: parameters and the model's inputs, which are there anyway.
            context: micro-batch and counter, as of `Pass`.
        """
        return Pass(self._call, **context)


# ---- the shell --------------------------------------------------------------------------------------


class StageActivations:
    """Runs the forwards of a stage that swaps, recomputes or is counted, and gets ready for its backwards.

    Args:
        whole, half: the policy of the stage's code for a micro-batch, and of that for half of one.
        leaves: positions of the received tensors that take a gradient.
        constants: tensors that are there anyway beside parameters and inputs; they do not count.
        link: what moves storages to the host, shared by all shapes of a runner; None where nothing is swapped.
        next_backward: task -> the micro-batch whose backward comes right after it, if one does (`backwards_after`).
    """

    def __init__(
        self,
        *,
        whole: ActivationPolicy,
        half: ActivationPolicy | None,
        leaves: Sequence[int],
        constants: Sequence[Tensor],
        link: SwapLink | None = None,
        next_backward: NextBackward = lambda turn: None,
    ) -> None:
        self._policies = whole, half
        self._leaves = tuple(leaves)
        self._constants = tuple(constants)
        self._link = link
        self._next_backward = next_backward
        self._passes: dict[int, list[Pass]] = {}
        self._counter: MemoryCounter | None = None

    def forward(
        self,
        micro_batch: int,
        half: int | None,
        parameters: Sequence[Tensor],
        inputs: Sequence[Tensor],
        received: Sequence[Tensor],
    ) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """Run the stage's code.

        Args:
            half: 0 or 1 where ``inputs`` and ``received`` are half a micro-batch's.

        Returns:
            For each received tensor that takes a gradient the leaf it arrives at, and the outputs.
        """
        # Two micro-batches in flight, the first in halves: ``passes`` is {0: [half a, half b], 1: [whole]} until B0.
        # A leaf of a received tensor that may leave the device is an empty stand-in (`enter_graph`); where it stays,
        # the tensor itself is the leaf.
        # The prefetch comes before anything of this forward is launched: a copy back waits for what the stream that
        # computes holds by then. Of its own backward, right behind it, nothing has left yet.
        following = self._next_backward((False, micro_batch, half))
        if following != micro_batch:
            self._prefetch(following, beside_forward=True)
        policy = self._policies[half is not None]
        assert policy is not None, "a program with half forwards needs their code"
        counter, fixed = self._counter, (*parameters, *inputs)
        if counter is not None:
            counter.begin(micro_batch, fixed, received if half is None else ())
        entered = list(received)
        leaves = []
        for index in self._leaves:
            if policy.frees_received:
                leaf, entered[index] = enter_graph(entered[index])
            else:
                leaf = entered[index].requires_grad_(True)
            leaves.append(leaf)
        forward = policy.begin(fixed, entered, micro_batch=micro_batch, counter=counter)
        with saved_tensors_hooks(forward.packer(), unpack), saving_separately(forward.keep, unpack):
            outputs = forward.run(fixed, entered)
        forward.finish()
        if half:
            self._passes[micro_batch].append(forward)
        else:
            self._passes[micro_batch] = [forward]
        return leaves, outputs

    def begin_backward(self, micro_batch: int, *, is_whole: bool = True) -> None:
        """Bring back what the micro-batch's backward needs first: of its last half.

        In 1F1B that was requested before the forward in front of it; in the cool-down when the backward in front of it
        used the last of its own:

            F0  F1  F2  B0  F3  B1  B2  B3
                   └►0     └►1    └►2 └►3         the arrows: who is prefetched there

        Args:
            is_whole: weight gradients are a part of it, so that nothing is used behind it.
        """
        self._prefetch(micro_batch)
        passes = self._passes.get(micro_batch)
        following = self._next_backward((True, micro_batch, None)) if is_whole else None
        if passes and following is not None:
            passes[0].call_behind(functools.partial(self._prefetch, following))

    def begin_weight_gradient(self, micro_batch: int) -> None:
        """Bring back beside it what the next backward needs first."""
        self._prefetch(self._next_backward((True, micro_batch, None)))

    def end_backward(self, micro_batch: int) -> None:
        """Release the micro-batch."""
        self._passes.pop(micro_batch, None)
        if self._counter is not None:
            self._counter.end(micro_batch)

    def _prefetch(self, micro_batch: int | None, *, beside_forward: bool = False) -> None:
        if micro_batch is None:
            return
        # Where counting began in between, the forward ran without this object, and there is nothing to bring.
        for forward in reversed(self._passes.get(micro_batch, ())):
            forward.prefetch(beside_forward=beside_forward)

    def start_counting(self, together: HeldTogether | None = None) -> None:
        """Count what the forwards from now on keep, ``together`` with the rank's other stages."""
        self._counter = MemoryCounter(self._constants, together)

    def stop_counting(self) -> MemoryCounts | None:
        """Count no longer, and return what was counted."""
        counter, self._counter = self._counter, None
        return counter.counts() if counter is not None else None

    def clear(self) -> None:
        """Forget all micro-batches: a mini-batch ended or failed."""
        self._passes.clear()
        if self._link is not None:
            self._link.clear()


def backwards_after(program: RankProgram) -> dict[Turn, int]:
    """Return the tasks that a backward follows with no other task in between, and its micro-batch."""
    tasks = [i.task for i in program.instructions if i.kind is InstructionKind.COMPUTE and i.task is not None]
    return {
        (task.kind is not TaskKind.FORWARD, task.micro_batch, task.half): following.micro_batch
        for task, following in zip(tasks, tasks[1:], strict=False)
        if following.kind in (TaskKind.BACKWARD, TaskKind.INPUT_GRADIENT)
        and task.kind is not TaskKind.INPUT_GRADIENT
    }


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
        call, buffers, own = self._call, self._buffers, self._replay
        assert own is not None and buffers is not None
        self._replay = self._buffers = None
        fixed = {f"fixed {i}": i for i in range(self._num_fixed)}

        def again(replay: Replay, *operands: Tensor) -> None:
            replay.restore(0)
            with buffers.restored():
                call(*operands)

        code = SegmentCode(
            call=again,
            arguments=(*fixed, *own.held),
            scratch=frozenset(),
            nodes=frozenset(),
            is_random=True,
        )
        own.plan(SecondForward(code=code, places=tuple(self._places), fixed=fixed))


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
        self.recipes: WeakKeyDictionary[fx.GraphModule, dict[MemoryPolicy, Recipe]] = WeakKeyDictionary()

    def policy(self, operators: StageOperators, make: Callable[[], MemoryPolicy]) -> MemoryPolicy:
        """Return the policy of a stage's operators."""
        names = operators.storage_of
        key = (id(names), *operators.repeated)
        if key not in self._policies:
            while len(self._policies) >= MAX_POLICIES:
                self._policies.pop(next(iter(self._policies)))
            self._policies[key] = names, make()
        return self._policies[key][1]


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
    known = known or KnownSaves()
    policy: MemoryPolicy | None = None
    if whole.given is None:
        assert operators is not None, "captured code says what it is made of"
        policy = known.policy(
            operators, lambda: _check_swapped(stage, make_policy(stage, plan, operators), whole)
        )

    def make(function: StageFunction) -> ActivationPolicy:
        if policy is not None:
            return CapturedPolicy(function, policy, link, known)
        if plan.recomputed:
            return RunAgain(stage, plan, blocks, function, link.device)
        return SwapByNumber(stage, plan, function, link)

    return StageActivations(
        whole=make(whole),
        half=None if half is None else make(half),
        leaves=[whole.received.index(name) for name in gradient_inputs],
        constants=whole.constants,
        link=link,
        next_backward=next_backward,
    )


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
        choice = self._function.choice
        module = self._function.module if choice is None else choice.module
        assert module is not None
        # one for each version of the code: with masks of attention, and without
        recipes = self._known.recipes.setdefault(module, {})
        recipe = recipes.get(self._policy)
        if recipe is not None:
            return PlannedPass(recipe, constants=self._constants, fixed=known, link=self._link, **context)
        names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        return SurveyPass(
            module,
            self._policy,
            dict(zip(names, (*known, *received), strict=True)),
            len(known),
            link=self._link,
            on_recipe=functools.partial(recipes.__setitem__, self._policy),
            **context,
        )


def _check_swapped(stage: str, policy: MemoryPolicy, function: StageFunction) -> MemoryPolicy:
    """Return a policy if the stage has all that it swaps.

    Raises:
        PlanError: says what it lacks.
    """
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
    return policy
