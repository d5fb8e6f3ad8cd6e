"""What a stage computes: the forward and backward of one micro-batch, behind one small interface.

The executor moves messages in the order of the program. A `StageCompute` gets whole tensors and keeps what a backward
needs. `AutogradCompute` is the real one. Which tensors cross the
stage's boundary, and in which order, is frozen when it is made, so that a task passes plain sequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from gpp_plugin.ir.memory_report import MemoryCounts
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.program import Direction, InstructionKind, RankProgram
from gpp_plugin.ir.schedule import TaskKind
from gpp_plugin.ir.tensors import LayoutKind, TensorSpec
from gpp_plugin.runtime.batches import Batch, ones_among
from gpp_plugin.runtime.memory.activation_policy import ActivationPolicy, StageActivations
from gpp_plugin.runtime.memory.counting import HeldTogether
from gpp_plugin.runtime.split import BackwardSplitter, PendingWeights
from gpp_plugin.runtime.stage_module import StageFunction
from gpp_plugin.runtime.weight_versions import WeightVersions


class StageHooks(Protocol):
    """What the program asks of the stage's optimizer side."""

    @property
    def loss_scale(self) -> float:
        """Factor of every loss's seed gradient, the same on all ranks."""

    def accumulate(self) -> None:
        """Take up the gradients of one micro-batch's backward."""

    def begin_reduction(self) -> None:
        """Let gradients be summed over that group in the backward that follows, the mini-batch's last."""

    def reduce_data(self) -> None:
        """Sum gradients over the stage's data-parallel group."""

    def reduce_tied(self) -> None:
        """Sum gradients of tied parameters over the stages that share them."""

    def step(self) -> object:
        """Agree on norm and overflow with all ranks; update, or skip."""


class StageWeights(Protocol):
    """A stage's parameters, of which this rank holds a part, and all of them between `gather` and `free` (ZeRO 3)."""

    def gather(self) -> Callable[[], None] | None:
        """Begin to make the parameters whole, where they were before; collective over the stage's data-parallel ranks.

        Returns:
            What waits for them before they are read or freed; None where they are there.
        """

    def free(self) -> None:
        """Keep the rank's part alone."""

    def apart(self, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return a forward's outputs: copies of those that are views of parameters, which will be gone."""


class StageCompute(Protocol):
    """Computes the tasks of one stage on one rank.

    A micro-batch goes through `forward` once, or once for each of its halves, and then through `backward`
    once, or through `input_gradient` and later `weight_gradient`; it is held in between.

    Attributes:
        received: names of the tensors `forward` takes from other stages, in order.
        outputs: names of the tensors it returns, in order.
        gradient_outputs: those outputs whose gradients `backward` takes, in order.
        gradient_inputs: those received tensors whose gradients it returns, in order.
    """

    received: tuple[str, ...]
    outputs: tuple[str, ...]
    gradient_outputs: tuple[str, ...]
    gradient_inputs: tuple[str, ...]

    def forward(
        self, micro_batch: int, half: int | None, inputs: Sequence[Tensor], received: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Return the outputs of a micro-batch, or of one half of it.

        Args:
            half: 0 or 1 for the first or second half of the samples; None for all.
            inputs: the rank's rows of the model's inputs for the whole micro-batch.
            received: the tensors of the half, or of the micro-batch.
        """

    def backward(self, micro_batch: int, gradients: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """Add up the gradients of parameters and return those of received tensors; releases the micro-batch.

        Args:
            gradients: of the outputs; None where no consumer sends one for this micro-batch (a tensor without a
                batch axis goes to each consumer task from the one micro-batch that has its first sample).
        """

    def input_gradient(self, micro_batch: int, gradients: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """Return the gradients of received tensors only; `weight_gradient` must follow."""

    def weight_gradient(self, micro_batch: int) -> None:
        """Add up the gradients of parameters after `input_gradient`; releases the micro-batch."""

    def clear(self) -> None:
        """Forget all micro-batches: a mini-batch ended or failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryGradients:
    """Which gradients cross a stage's boundary on one rank: the two orders of `StageCompute`."""

    outputs: tuple[str, ...]
    inputs: tuple[str, ...]


def has_backwards(program: RankProgram) -> bool:
    """Return whether a program has backwards, whole or in two parts."""
    return any(i.task is not None and i.task.kind is not TaskKind.FORWARD for i in program.instructions)


def boundary_gradients(
    program: RankProgram, plan: PipelinePlan, specs: Mapping[str, TensorSpec]
) -> BoundaryGradients:
    """Return the gradients that a rank's program receives and makes, each name once, in the order of edges.

    Nothing travels for tensors without elements. A tensor rank makes the gradients that another one of its data
    position sends: their backwards meet in collectives.
    """
    received = program.messages(InstructionKind.RECEIVE)
    outputs = {m.edge for m in received if m.direction is Direction.GRADIENT}
    is_trained = has_backwards(program)
    inputs = {i for i, edge in enumerate(plan.edges) if is_trained and edge.dst == program.stage}

    def names(edges: set[int]) -> tuple[str, ...]:
        found = dict.fromkeys(name for edge in sorted(edges) for name in plan.edges[edge].gradient_tensors)
        return tuple(name for name in found if name in specs and specs[name].bytes_for(1))

    return BoundaryGradients(outputs=names(outputs), inputs=names(inputs))


NO_GRADIENTS = BoundaryGradients(outputs=(), inputs=())


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfForwards:
    """What a stage needs to run a forward in two halves.

    Args:
        function: the stage's code at half the samples; inputs and outputs are those of the whole, in order.
        input_axes: batch axis of each model input, in the order of ``function.batch_inputs``.
        axes: batch axis of every boundary tensor by name; -1 for those that are the same for all samples.
    """

    function: StageFunction
    input_axes: tuple[int, ...]
    axes: Mapping[str, int]

    @classmethod
    def of(
        cls, function: StageFunction, *, inputs: Mapping[str, TensorSpec], tensors: Mapping[str, TensorSpec]
    ) -> HalfForwards:
        """Return what runs halves with this code.

        Args:
            inputs: the model's, by batch key; ``tensors`` those that cross the stage's boundary.
        """

        def axis(spec: TensorSpec) -> int:
            return spec.layout.axis if spec.layout.kind is LayoutKind.BATCH else -1

        return cls(
            function=function,
            input_axes=tuple(axis(inputs[key]) for key in function.batch_inputs),
            axes={name: axis(spec) for name, spec in tensors.items()},
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """What is kept of a forward, or of one half of it, for its backward.

    Args:
        loss: None where the stage yields none.
        roots: where the gradients of outputs arrive; not the outputs, which nobody needs once they are sent.
        leaves: received tensors that take a gradient.
    """

    loss: Tensor | None
    roots: list[Root]
    leaves: list[Tensor]


Root = Tensor | GradientEdge


def _root(output: Tensor) -> Root:
    return get_gradient_edge(output) if output.requires_grad else output


class AutogradCompute:
    """Computes a stage with its generated code and torch's autograd.

    Two halves of a forward draw their dropout masks one after the other, so a sliced micro-batch has other
    masks than a whole one would.

    Args:
        function: the stage's code; ``parameters`` are bound in the order of ``function.tensors``.
        gradients: which gradients the stage takes and makes.
        hooks: the optimizer side; None for a stage that runs no backwards, which keeps nothing.
        loss: node name of the loss if this stage yields it.
        loss_share: samples of one loss over those of the mini-batch.
        halves: None where no forward runs in halves.
        activations: runs the forwards of a stage that swaps or recomputes; None: everything is kept.
        versions: of the parameters, where they are updated between a micro-batch's forward and its backward.
        reduces_in: the micro-batch in whose backward, the mini-batch's last, gradients may be summed over the stage's
            ranks; None: in none.
        weights: holds the parameters where they are gathered for each task; None: they are always there.
        splitter: of backwards in two parts; one for all the code of a stage, whose graphs at other lengths have the
            same structure. None: one of its own.
    """

    def __init__(
        self,
        *,
        function: StageFunction,
        parameters: Sequence[Tensor],
        gradients: BoundaryGradients = NO_GRADIENTS,
        hooks: StageHooks | None = None,
        loss: str | None = None,
        loss_share: float = 1.0,
        halves: HalfForwards | None = None,
        activations: StageActivations | None = None,
        versions: WeightVersions | None = None,
        reduces_in: int | None = None,
        splitter: BackwardSplitter | None = None,
        weights: StageWeights | None = None,
    ) -> None:
        self._weights = weights
        self.received = function.received
        self.outputs = function.outputs
        self.gradient_outputs = gradients.outputs
        self.gradient_inputs = gradients.inputs
        self._function = function
        self._call = function.call
        self._parameters = tuple(parameters)
        self._hooks = hooks
        self._loss_share = loss_share
        self._loss = -1 if loss is None else function.outputs.index(loss)
        self._halves = halves
        self._roots = tuple(function.outputs.index(name) for name in self.gradient_outputs)
        self._leaves = tuple(function.received.index(name) for name in self.gradient_inputs)
        self._kept: dict[int, list[_Part]] = {}
        self._pending: dict[int, PendingWeights] = {}
        self._splitter = splitter or BackwardSplitter()
        self._planned_activations = self._activations = activations
        self._versions = versions
        self._reduces_in = reduces_in
        self._last_seed: tuple[float, Tensor] | None = None

    def forward(
        self, micro_batch: int, half: int | None, inputs: Sequence[Tensor], received: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Return the outputs of a micro-batch or half of it; keeps the graph if the stage has backwards."""
        call = self._call
        if half is not None:
            assert self._halves is not None, "a program with half forwards needs their code"
            call = self._halves.function.call
            inputs = [_half_of(t, a, half) for t, a in zip(inputs, self._halves.input_axes, strict=True)]
        if self._hooks is None:
            made = call(*self._parameters, *inputs, *received)
            return made if self._weights is None else self._weights.apart(made)
        parameters = self._parameters if self._versions is None else self._versions.use(micro_batch)
        # A stage without a plan, not counted: no hooks, nothing between code and autograd but this comparison.
        if self._activations is None:
            leaves = [received[index].requires_grad_(True) for index in self._leaves]
            outputs = call(*parameters, *inputs, *received)
        else:
            leaves, outputs = self._activations.forward(micro_batch, half, parameters, inputs, received)
        loss = outputs[self._loss] if self._loss >= 0 else None
        part = _Part(loss, [_root(outputs[index]) for index in self._roots], leaves)
        if half:
            self._kept[micro_batch].append(part)
        else:
            self._kept[micro_batch] = [part]
        holder = self._versions or self._weights
        return outputs if holder is None else holder.apart(outputs)

    def backward(self, micro_batch: int, gradients: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """Add up the gradients of parameters and return those of received tensors."""
        hooks = self._hooks
        assert hooks is not None, "a stage with backward tasks needs hooks"
        parts = self._kept.pop(micro_batch)
        roots, seeds = self._seed(parts, gradients)
        if self._activations is not None:
            self._activations.begin_backward(micro_batch)
        if self._versions is not None:
            self._versions.lend(micro_batch)
        if micro_batch == self._reduces_in:
            hooks.begin_reduction()
        if roots:
            run_backward(roots, seeds)
        if self._activations is not None:
            self._activations.end_backward(micro_batch)
        if self._versions is not None:
            self._versions.release(micro_batch)
        hooks.accumulate()
        return self._join_leaves(parts, [[leaf.grad for leaf in part.leaves] for part in parts])

    def input_gradient(self, micro_batch: int, gradients: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """Return the gradients of received tensors only."""
        parts = self._kept.pop(micro_batch)
        roots, seeds = self._seed(parts, gradients)
        leaves = list({id(leaf): leaf for part in parts for leaf in part.leaves}.values())
        if self._activations is not None:
            self._activations.begin_backward(micro_batch, is_whole=False)
        found, self._pending[micro_batch] = self._splitter.split(roots, leaves, seeds)
        gradient_of = {id(leaf): gradient for leaf, gradient in zip(leaves, found, strict=True)}
        return self._join_leaves(parts, [[gradient_of[id(leaf)] for leaf in part.leaves] for part in parts])

    def weight_gradient(self, micro_batch: int) -> None:
        """Add up the gradients of parameters after `input_gradient`."""
        hooks = self._hooks
        assert hooks is not None, "a stage with backward tasks needs hooks"
        if self._activations is not None:
            self._activations.begin_weight_gradient(micro_batch)
        self._pending.pop(micro_batch).run()
        if self._activations is not None:
            self._activations.end_backward(micro_batch)
        hooks.accumulate()

    def clear(self) -> None:
        """Forget all micro-batches."""
        self._kept.clear()
        self._pending.clear()
        if self._activations is not None:
            self._activations.clear()

    def start_counting(self, together: HeldTogether | None = None) -> None:
        """Count what the forwards from now on keep for their backwards, if there are any.

        Args:
            together: counts what all stages of the rank keep.
        """
        if self._activations is None and self._hooks is not None:
            self._activations = StageActivations(
                whole=ActivationPolicy(self._call),
                half=ActivationPolicy(self._halves.function.call) if self._halves is not None else None,
                leaves=self._leaves,
                constants=(*self._parameters, *self._function.constants),
            )
        if self._activations is not None:
            self._activations.start_counting(together)

    def stop_counting(self) -> MemoryCounts | None:
        """Count no longer, and return what was counted; None for a stage without backwards."""
        counts = self._activations.stop_counting() if self._activations is not None else None
        self._activations = self._planned_activations
        return counts

    def _seed(
        self, parts: Sequence[_Part], gradients: Sequence[Tensor | None]
    ) -> tuple[list[Root], list[Tensor]]:
        """Return what the backward starts from, and with which gradients: of the loss, and of outputs."""
        # Of a loss stage with output y, whole: roots [loss, y], seeds [scale x share, dy]. In halves: roots [loss a,
        # y a, loss b, y b], seeds [half of that, dy's first rows, half, dy's last rows], as each half's loss is a
        # mean over its own.
        roots: list[Root] = []
        seeds: list[Tensor] = []
        assert self._hooks is not None, "a stage with backward tasks needs hooks"
        seed = self._hooks.loss_scale * self._loss_share / len(parts)
        for half, part in enumerate(parts):
            if part.loss is not None and part.loss.requires_grad:
                if self._last_seed is None or self._last_seed[0] != seed:
                    self._last_seed = (
                        seed,
                        torch.full_like(part.loss, seed),
                    )  # the same as long as its number is
                roots.append(part.loss)
                seeds.append(self._last_seed[1])
            for name, root, gradient in zip(self.gradient_outputs, part.roots, gradients, strict=True):
                if gradient is None:
                    continue
                if len(parts) > 1:
                    axis = self._axis(name)
                    if axis < 0 and half:
                        continue  # the same for all samples: the first half's was sent for both
                    gradient = _half_of(gradient, axis, half)
                roots.append(root)
                seeds.append(gradient)
        return roots, seeds

    def _axis(self, name: str) -> int:
        assert self._halves is not None
        return self._halves.axes[name]

    def _join_leaves(
        self, parts: Sequence[_Part], gradients: Sequence[Sequence[Tensor | None]]
    ) -> list[Tensor]:
        """Return the gradients of received tensors: rows of both halves joined, or their sum."""
        # What no root depends on has a gradient of zeros: its producer waits for one. A tensor without a batch axis
        # that both halves read is one leaf of both, or a leaf of each (where it was put into the graph for each), to
        # be added.
        found = [
            [g if g is not None else torch.zeros_like(leaf) for g, leaf in zip(row, part.leaves, strict=True)]
            for row, part in zip(gradients, parts, strict=True)
        ]
        if len(parts) == 1:
            return found[0]
        joined = []
        for index, name in enumerate(self.gradient_inputs):
            axis = self._axis(name)
            if axis >= 0:
                joined.append(torch.cat([found[0][index], found[1][index]], dim=axis))
            elif parts[0].leaves[index] is parts[1].leaves[index]:
                joined.append(found[0][index])
            else:
                joined.append(found[0][index] + found[1][index])
        return joined


def run_backward(roots: Sequence[Root], seeds: Sequence[Tensor]) -> None:
    """Do what `torch.autograd.backward` does, without its checks of arguments: a fifth of a small backward."""
    _engine_run_backward(
        tuple(roots), tuple(seeds), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _half_of(tensor: Tensor, axis: int, half: int) -> Tensor:
    """Return the rows of one half, contiguous, or the tensor itself where it is the same for all samples."""
    if axis < 0:
        return tensor
    rows = tensor.shape[axis] // 2
    return tensor.narrow(axis, half * rows, rows).contiguous()


# ---- code by shape -----------------------------------------------------------------------------------------


class Boundary(NamedTuple):
    """What passes a stage's boundary in a mini-batch: all that any of its units has, in an order.

    Args:
        keys: of the batch that are read; ``received``, ``outputs`` and gradients as of `StageCompute`.
    """

    keys: tuple[str, ...] = ()
    received: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    gradient_outputs: tuple[str, ...] = ()
    gradient_inputs: tuple[str, ...] = ()

    @classmethod
    def joined(cls, parts: Collection[Boundary]) -> Boundary:
        """Return what any of several has, the first one's first."""
        columns = zip(*parts, strict=True)
        return cls(*(tuple(dict.fromkeys(itertools.chain.from_iterable(names))) for names in columns))

    def places_of(self, part: Boundary) -> Places | None:
        """Return where what one unit's code takes and returns stands among all of this; None where it is all."""
        if part == self:
            return None
        return tuple(tuple(map(all_of.index, own)) for all_of, own in zip(self, part, strict=True))


Places = tuple[tuple[int, ...], ...]
"""Positions of what `Boundary` names, in its order."""


class ComputeByShape:
    """Computes each micro-batch with the code of its unit's shape.

    Where units lack branches, their code takes and returns less. With other specialised values it may take the stage's
    inputs in another order, or do without one: a mask that hides nothing. What passes the stage's boundary is then all
    that any of the units has, and each unit's tensors stand at their places among it; the others are of no elements, or
    None.

    Args:
        computes: of each micro-batch of the rank; the same object where shapes are the same; None where the stage has
            nothing to do for the unit.
        functions: their code.
        reduces_in: the micro-batch in whose backward gradients may be summed over the stage's ranks; None: in none.
        hooks: the optimizer side, which begins those sums.
    """

    def __init__(
        self,
        computes: Sequence[AutogradCompute | None],
        functions: Sequence[StageFunction | None],
        *,
        reduces_in: int | None = None,
        hooks: StageHooks | None = None,
    ) -> None:
        parts = [
            Boundary(
                keys=function.batch_inputs,
                received=compute.received,
                outputs=compute.outputs,
                gradient_outputs=compute.gradient_outputs,
                gradient_inputs=compute.gradient_inputs,
            )
            if compute is not None and function is not None
            else None
            for compute, function in zip(computes, functions, strict=True)
        ]
        whole = Boundary.joined(dict.fromkeys(part for part in parts if part is not None))
        self.keys = whole.keys
        self.is_alike = all(part == whole for part in parts)
        self.received, self.outputs = whole.received, whole.outputs
        self.gradient_outputs, self.gradient_inputs = whole.gradient_outputs, whole.gradient_inputs
        self._places = tuple(None if part is None else whole.places_of(part) for part in parts)
        self._computes = tuple(computes)
        self._choices = tuple(None if function is None else function.choice for function in functions)
        self._ones: Sequence[frozenset[str]] = ()
        # micro-batches of a prefetched mini-batch are numbered behind those of the present one
        self._count = len(computes)
        self._reduces_in = reduces_in
        self._hooks = hooks

    def use_masks(self, units: Sequence[Batch]) -> None:
        """Run each unit from now on as an eager model would run it alone: attention without needless masks."""
        self._ones = [
            frozenset() if choice is None else ones_among(unit, choice.inputs)
            for unit, choice in zip(units, self._choices, strict=True)
        ]

    def _of(self, micro_batch: int) -> AutogradCompute:
        # a backward may run code again (recomputation), as its forward did
        number = micro_batch % self._count
        choice = self._choices[number]
        if choice is not None:
            choice.use(self._ones[number])
        compute = self._computes[number]
        assert compute is not None, "the program has no task for such a unit"
        return compute

    def _back(
        self, run: Callable[..., Sequence[Tensor]], micro_batch: int, gradients: Sequence[Tensor | None]
    ) -> Sequence[Tensor]:
        """Return the gradients of received tensors that a part of a backward makes of those of outputs."""
        places = self._places[micro_batch % self._count]
        if places is None:
            return run(micro_batch, gradients)
        *_, outputs, inputs = places
        found = run(micro_batch, [gradients[place] for place in outputs])
        return _spread(found, inputs, len(self.gradient_inputs))

    def forward(
        self, micro_batch: int, half: int | None, inputs: Sequence[Tensor], received: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Return the outputs of a unit."""
        compute, places = self._of(micro_batch), self._places[micro_batch % self._count]
        if places is None:
            return compute.forward(micro_batch, half, inputs, received)
        read, taken, returned, *_ = places
        own = [inputs[place] for place in read]
        made = compute.forward(micro_batch, half, own, [received[place] for place in taken])
        return _spread(made, returned, len(self.outputs))

    def backward(self, micro_batch: int, gradients: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """Add up the gradients of parameters and return those of received tensors."""
        if micro_batch == self._reduces_in and self._hooks is not None:
            self._hooks.begin_reduction()
        return self._back(self._of(micro_batch).backward, micro_batch, gradients)

    def input_gradient(self, micro_batch: int, gradients: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """Return the gradients of received tensors only."""
        return self._back(self._of(micro_batch).input_gradient, micro_batch, gradients)

    def weight_gradient(self, micro_batch: int) -> None:
        """Add up the gradients of parameters after `input_gradient`."""
        self._of(micro_batch).weight_gradient(micro_batch)

    def clear(self) -> None:
        """Forget all micro-batches."""
        for compute in self._computes:
            if compute is not None:
                compute.clear()


def _spread(tensors: Sequence[Tensor], places: Sequence[int], count: int) -> Sequence[Tensor]:
    """Return tensors at their places among ``count``; of the others there is nothing, and nobody takes them."""
    found: list[Any] = [None] * count
    for place, tensor in zip(places, tensors, strict=True):
        found[place] = tensor
    return found
