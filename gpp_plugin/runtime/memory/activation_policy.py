"""Runs a stage's forwards under saved-tensor hooks: one shell for every memory plan, and a policy per saved tensor.

    forward    begin ──► hooks on ──► the stage's code ──► hooks off ──► finish
                                          │ each tensor that autograd saves
                                          ▼
                                        pack: keep it  │  move it to the host  │  drop it, to be made again
    backward   prefetch ──► autograd requests each tensor: unpack ──► end

The shell handles micro-batches, their halves, what comes next and the counter. What happens to a saved tensor is
decided by a `Pass`, one a forward, that the `ActivationPolicy` of the stage's code makes:

    everything stays (and is counted)     `ActivationPolicy`         here
    captured code                         `CapturedPolicy`     by name in its first pass, by position in all others
    a user's module that swaps            `SwapByNumber`       by the number of the tensor's storage
    a user's module that runs again       `RunAgain`           dropped, but for what is there anyway

A stage without a memory plan that is not counted has none of this, and pays one comparison a task for that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from gpp_plugin.capture.eager.opaque_call import saving_separately
from gpp_plugin.errors import PlanError, RuntimeFailure
from gpp_plugin.ir.memory_plan import MemoryPlan
from gpp_plugin.ir.memory_report import MemoryCounts
from gpp_plugin.ir.program import InstructionKind, RankProgram
from gpp_plugin.ir.schedule import TaskKind
from gpp_plugin.runtime.memory.counting import HeldTogether, MemoryCounter
from gpp_plugin.runtime.memory.swap import SwapLink

# A stage's `MemoryPlan` in terms of its operators, checked before anything runs.

INSIDE = ":inside"
"""Ends the names of what an operator keeps beside operands and results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOperators:
    """What a captured stage is made of, by names that hold at every shape.

    Args:
        blocks: block of the stage -> its operators. Operators of the stage's code that are in none are replicated
            ones, cheap and made of the model's inputs.
        storage_of: operator or received tensor -> the one in whose storage it lies; left out where that is its own.
        local: operator as plans call it -> as the code does; left out where they agree.
        repeated: keys and values that attention repeats for its heads where it has a mask, and the same as they are,
            which it keeps where it has none.
    """

    blocks: Mapping[str, tuple[str, ...]]
    storage_of: Mapping[str, str]
    local: Mapping[str, str] = field(default_factory=dict)
    repeated: Sequence[tuple[str, str]] = ()

    def tensor(self, name: str) -> str:
        """Return what the code calls a tensor of a plan."""
        operator = name.removesuffix(INSIDE)
        return self.local.get(operator, operator) + name.removeprefix(operator)


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryPolicy:
    """What happens to the tensors that autograd keeps, by the names of `SavedTensor`.

    Args:
        segments: operators of each recomputed segment; ``dropped``: the tensors it makes again.
        operators: all operators of the stage's blocks.
        stand_ins: tensor -> those that are saved in its place where attention has no mask, or has one: a plan that
            names either means both.
    """

    segments: tuple[frozenset[str], ...]
    dropped: tuple[frozenset[str], ...]
    swapped: frozenset[str]
    operators: frozenset[str]
    storage_of: Mapping[str, str]
    stand_ins: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @cached_property
    def segment_of(self) -> dict[str, int]:
        """Return the segment of each operator that has one."""
        return {node: i for i, nodes in enumerate(self.segments) for node in nodes}

    def root(self, name: str) -> str:
        """Return the operator, or the stage's input, in whose storage a result lies."""
        return self.storage_of.get(name, name)


def make_policy(stage: str, plan: MemoryPlan, operators: StageOperators) -> MemoryPolicy:
    """Translate a plan's blocks to operators.

    Raises:
        PlanError: a segment has blocks that the stage lacks or that another segment has, or a tensor is to be both
            swapped and made again.
    """
    taken: set[str] = set()
    for segment in plan.recomputed:
        absent = [name for name in segment.blocks if name not in operators.blocks]
        if absent:
            raise PlanError(
                f"stage {stage!r}: a segment to run again has block {absent[0]!r}, which is not one of the stage's; "
                "plan again for this model and granularity"
            )
        twice = [name for name in segment.blocks if name in taken]
        if twice:
            raise PlanError(f"stage {stage!r}: block {twice[0]!r} is in two segments to run again; keep one")
        taken.update(segment.blocks)
    dropped = {name for segment in plan.recomputed for name in segment.tensors}
    both = [tensor.name for tensor in plan.swapped if tensor.name in dropped]
    if both:
        raise PlanError(f"stage {stage!r}: tensor {both[0]!r} is both swapped and made again; choose one")
    return MemoryPolicy(
        segments=tuple(
            frozenset(node for block in segment.blocks for node in operators.blocks[block])
            for segment in plan.recomputed
        ),
        dropped=tuple(frozenset(map(operators.tensor, segment.tensors)) for segment in plan.recomputed),
        swapped=frozenset(operators.tensor(tensor.name) for tensor in plan.swapped),
        operators=frozenset(node for nodes in operators.blocks.values() for node in nodes),
        storage_of=operators.storage_of,
        stand_ins=_stand_ins(operators),
    )


def _stand_ins(operators: StageOperators) -> dict[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {}
    for pair in operators.repeated:
        repeated, source = (operators.storage_of.get(name, name) for name in pair)
        for name, other in ((repeated, source), (source, repeated)):
            found[name] = found.get(name, frozenset()) | {other}
    return found


Turn = tuple[bool, int, int | None]
"""A task: whether it is (the end of) a backward, its micro-batch, its half."""
NextBackward = Callable[[Turn], int | None]

# ---- what autograd holds in place of a saved tensor ------------------------------------------------

Versioned = tuple[Tensor, int]
"""A saved tensor and its version, which autograd does not check where there are hooks."""


Packed = Versioned | Callable[[], Tensor]
"""What stands for a saved tensor: itself where it stays, else what brings it back from the host or makes it again."""


def pack_versioned(tensor: Tensor) -> Versioned:
    """Return what stands for a saved tensor that stays where it is: not itself, or it would hold its own graph."""
    return tensor.detach(), tensor._version


def unpack(packed: Packed) -> Tensor:
    """Return the tensor that autograd saved.

    Raises:
        RuntimeFailure: it was written meanwhile.
    """
    if not isinstance(packed, tuple):
        return packed()
    tensor, version = packed
    if tensor._version != version:
        raise RuntimeFailure(
            f"a tensor of shape {tuple(tensor.shape)} was written in place after it was saved for backward (version "
            f"{version}, now {tensor._version}): a buffer that the forward uses and updates allows one micro-batch "
            "in flight"
        )
    return tensor


# ---- policies ---------------------------------------------------------------------------------------


class Pass:
    """One forward of a stage's code, of a micro-batch or half of one, and what is saved of it until its backward.

    It holds nothing that autograd or a plan could release earlier: arguments and outputs pass through.

    Args:
        call: the code.
        counter: None where nothing is counted.
    """

    def __init__(
        self, call: Callable[..., tuple[Tensor, ...]], *, micro_batch: int, counter: MemoryCounter | None
    ) -> None:
        self._call = call
        self._micro_batch = micro_batch
        self._counter = counter

    def packer(self) -> Callable[[Tensor], Packed]:
        """Return what takes each tensor that autograd saves, in order, and says what stands for it."""
        return self.keep

    def run(self, fixed: Sequence[Tensor], received: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the code on parameters and the model's inputs, and on what other stages sent; return its outputs."""
        return self._call(*fixed, *received)

    def keep(self, tensor: Tensor) -> Packed:
        """Leave a saved tensor where it is."""
        self.count(tensor)
        return pack_versioned(tensor)

    def count(self, tensor: Tensor) -> None:
        """Count a tensor that stays on the device."""
        if self._counter is not None:
            self._counter.keep(self._micro_batch, tensor)

    def finish(self) -> None:
        """End the forward."""

    def prefetch(self, *, beside_forward: bool = False) -> None:
        """Bring back what the backward needs first; ``beside_forward`` as of `SwapLink.bring`."""

    def call_behind(self, behind: Callable[[], None]) -> None:
        """Call something when the backward uses the last that came back; never where nothing does."""


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
