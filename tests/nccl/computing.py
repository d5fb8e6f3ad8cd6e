"""Stages that compute, in a recorded job: the package's own compute, activation policies, gradients, weights and steps.

A stage's model is made up: what it gives its consumers depends on all that it receives and reads, by a few operators that
save tensors, one of them random. Everything around it is what an engine has: `AutogradCompute`, a `StageActivations` (every
stage another activation policy: keep, swap, recompute), `RankEngine` with `GradientStore` or `PartitionedGradients`,
`ShardedWeights` (ZeRO 3), `WeightVersions` (mode async), sums of tied parameters. The optimizer is plain SGD, under ZeRO
DeepSpeed's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import deepspeed.comm
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import stage_1_and_2
from torch import Tensor, nn

from gpp_plugin.engine.checkpoints.optimizer_pieces import OptimizerPieces
from gpp_plugin.engine.framework import StageReplica
from gpp_plugin.engine.rank_engine import RankEngine
from gpp_plugin.engine.stage_groups import StageGroups, TiedParameter
from gpp_plugin.integrations.deepspeed.master_weights import MasterWeights
from gpp_plugin.ir.plan import MemoryPlan, PipelinePlan, RecomputedSegment, SwappedTensor
from gpp_plugin.ir.program import RankProgram
from gpp_plugin.ir.tensors import LayoutKind, TensorSpec
from gpp_plugin.runtime import context_ranks
from gpp_plugin.runtime.compute import AutogradCompute, BoundaryGradients, HalfForwards
from gpp_plugin.runtime.memory.activation_policy import (
    StageActivations,
    backwards_after,
    make_stage_activations,
)
from gpp_plugin.runtime.memory.swap import SwapLink
from gpp_plugin.runtime.stage_module import StageFunction
from gpp_plugin.runtime.tensor_ranks import TensorLinks, TensorRanks, drawn, linear, seeded, shared, summed
from gpp_plugin.runtime.weight_versions import WeightVersions
from gpp_plugin.schedule.gathers import last_backward
from tests.integrations.framework_jobs import PlainOptimizer, Settings
from tests.nccl.fake_cuda import CUDA

LOSS = "loss"
POLICIES = ("keep", "swap", "recompute")


class MadeUpStage(nn.Module):
    """What a stage computes.

    Args:
        ranks: its tensor ranks, which sum within it; None for one.
        context: its context ranks, which exchange, gather and sum within it; None for one.
        together: all of them, which draw one number; None for one.
        num_sent: elements of a weight that is an output itself, where one has as many; 0 for none.
    """

    def __init__(
        self,
        *,
        has_loss: bool,
        is_tied: bool,
        ranks: TensorRanks | None,
        context: TensorRanks | None,
        together: TensorRanks | None,
        num_sent: int,
    ) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.full((5,), 0.5))
        self.second = nn.Parameter(torch.full((2, 4), 0.5))
        self.third = nn.Parameter(torch.full((8,), 0.5))
        if is_tied:
            self.tied = nn.Parameter(torch.full((6,), 0.5))
        self.sent = nn.Parameter(torch.full((num_sent,), 0.5)) if num_sent else None
        self.has_loss, self._ranks, self._context, self._together = has_loss, ranks, context, together

    def call(self, shapes: Sequence[tuple[int, ...]], *given: Tensor) -> tuple[Tensor, ...]:
        """Return outputs of some shapes, computed with the parameters and tensors given, and the loss."""
        weights = len(list(self.parameters()))
        # the second is that of a linear operator where there are tensor ranks, whose gradient is made beside a sum
        first = 1 if self._ranks is None else 2
        number = given[0].sum() + sum(weight.square().mean() for weight in given[first:weights])
        drop: Callable[..., Tensor] = nn.functional.dropout
        if self._ranks is not None:
            tensor, of_weights = shared(self._ranks, (0,))(number.expand(1, 4), None, given[1], None)
            number = linear(torch.ops.aten.linear.default, 0)(of_weights, tensor, given[1]).mean()
        if self._together is not None:
            seed = drawn(self._together)()
            drop = functools.partial(seeded(drop, self._together, CUDA, place=1, is_part=True), seed)
        for tensor in given[weights:]:
            if self._context is not None and tensor.requires_grad:
                tensor = context_ranks.entered(self._context)(tensor)
            hidden = torch.tanh(tensor.float() * number)
            number = number + drop(hidden, 0.25).mean()
        if self._ranks is not None:
            number = summed(self._ranks)(number)
        if self._context is not None:
            number = self._on_parts(number, self._context)
        made = [number * torch.ones(shape, device=number.device) for shape in shapes]
        if self.sent is not None:
            sent = given[weights - 1]
            made = [sent.view(m.shape) if m.numel() == sent.numel() else m for m in made]
        made = [*made, number.square()] if self.has_loss else made
        if self._context is not None:
            made = [context_ranks.left(self._context)(m) for m in made]
        return tuple(made)

    def _on_parts(self, number: Tensor, context: TensorRanks) -> Tensor:
        """Return a number of 5 positions and 5 heads: in parts of the one, of the other, whole again, and summed."""
        part = context_ranks.own(context, 1)(number.expand(2, 5, 5), None)
        heads = torch.tanh(context_ranks.exchanged(context, (1, 2))(part, 5))
        part = torch.tanh(context_ranks.exchanged(context, (2, 1))(heads, 5))
        whole = context_ranks.gathered(context, 1)(part, 5, None)
        return number + whole.mean() + context_ranks.summed(torch.sum, context)(part)


class ZeroOptimizer(PlainOptimizer):
    """Adam under DeepSpeed's ZeRO optimizer, which `MasterWeights` steps: what a stage on a device has."""

    def __init__(self, module: nn.Module, replica: StageReplica, zero: int) -> None:
        super().__init__(module)
        self.config = dataclasses.replace(PlainOptimizer.config, zero_stage=zero, gradient_clipping=0.0)
        with _deepspeed_on_a_tape():
            wrapper = stage_1_and_2.DeepSpeedZeroOptimizer(
                torch.optim.Adam(self.trained.values(), lr=0.05),
                {parameter: name for name, parameter in self.trained.items()},
                timers=None,
                optimizer_params={},
                dp_process_group=replica.data_group,
                communication_data_type=torch.float32,
                contiguous_gradients=False,
                partition_grads=False,  # as `config_values` has it: gradients are ours
            )
        self._masters = MasterWeights(wrapper, self.trained, data_group=replica.data_group)
        self.optimizer, self.layout = self._masters.optimizer, self._masters.layout
        self.flat_weights, self.publish_to = self._masters.flat_weights, self._masters.publish_to
        self.places = self._masters.places

    def apply(self, gradients: Any, *, coefficient: float, resting: Any) -> None:
        with _deepspeed_on_a_tape():
            self._masters.step_partitions(gradients, coefficient=coefficient, resting=resting)

    def pieces(self, foreign: Collection[str]) -> OptimizerPieces:
        return self._masters.pieces(foreign, group_numbers=[0])


@contextlib.contextmanager
def _deepspeed_on_a_tape() -> Iterator[None]:
    """Let DeepSpeed compute on the recorded device, and talk in the recorded groups."""
    device = mock.MagicMock(Stream=torch.cuda.Stream)
    device.current_device_name.return_value = "cuda"
    device.available_memory.return_value = 1 << 40
    device.is_synchronized_device.return_value = False
    talk = mock.MagicMock(wraps=dist)
    talk.is_initialized = talk.has_all_gather_into_tensor = lambda: True
    with (
        mock.patch.object(deepspeed.comm.comm, "cdb", talk),
        mock.patch.object(stage_1_and_2, "get_accelerator", lambda: device),
        mock.patch.object(stage_1_and_2, "see_memory_usage", lambda *args, **given: None),
        mock.patch.object(stage_1_and_2, "empty_cache", lambda: None),
        mock.patch.object(stage_1_and_2.groups, "_get_sequence_parallel_world_size", lambda: 1),
    ):
        yield


class ComputingStages:
    """What a rank's stages compute and train with.

    Args:
        early: the stages that sum gradients in their last backward.
        num_sent: as of `MadeUpStage`.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        rank: int,
        *,
        groups: StageGroups,
        ties: Sequence[TiedParameter],
        zero: int,
        early: frozenset[int],
        num_sent: int,
    ) -> None:
        self._num_sent = num_sent
        self._plan, self._zero, self._early, self._groups = plan, zero, early, groups
        indices = plan.stages_of_rank(rank)
        tied = {stage for tie in ties for stage in tie.stages}
        self._modules = {index: self._make_module(index, index in tied) for index in indices}
        self._link = SwapLink(CUDA)
        self.engine = RankEngine(
            modules=list(self._modules.values()),
            plan=plan,
            rank=rank,
            groups=groups,
            tied=ties,
            make_optimizer=self._make_optimizer,
            device=CUDA,
            steps_alone=plan.mode == "async",
            reduces_early=early,
        )

    def _make_module(self, index: int, is_tied: bool) -> MadeUpStage:
        has_loss = index in self._plan.loss_stages()
        stage, links = self._plan.stages[index], TensorLinks(dist.get_rank())
        groups = {kind: getattr(self._groups, kind)[index] for kind in ("tensor", "context", "model")}
        links.join(stage, groups, {})
        ranks, context, together = (
            found if (found := links.of(stage, kind)).size > 1 else None for kind in groups
        )
        return MadeUpStage(
            has_loss=has_loss,
            is_tied=is_tied,
            ranks=ranks,
            context=context,
            together=together,
            num_sent=self._num_sent,
        )

    def _make_optimizer(self, module: nn.Module, replica: StageReplica) -> Any:
        if self._zero:
            return ZeroOptimizer(module, replica, self._zero)
        made = PlainOptimizer(module)
        made.config = Settings(bucket_elements=14, gradient_clipping=0.0)  # a bucket of one, one of two
        return made

    def compute(
        self,
        index: int,
        program: RankProgram,
        *,
        received: tuple[str, ...],
        shapes: Sequence[Mapping[str, tuple[int, ...]]],
        gradients: BoundaryGradients,
        specs: Mapping[str, TensorSpec],
        versions: WeightVersions | None,
        is_trained: bool,
        is_training: bool,
    ) -> AutogradCompute:
        """Return what does a stage's tasks.

        Args:
            shapes: of its outputs, for a micro-batch and for half of one.
        """
        module, stage, own = self._modules[index], self._plan.stages[index], self.engine.of(index)
        whole, half = (self._function(module, each, received) for each in shapes)
        axes = {n: s.layout.axis if s.layout.kind is LayoutKind.BATCH else -1 for n, s in specs.items()}
        return AutogradCompute(
            function=whole,
            parameters=list(module.parameters()),
            gradients=gradients,
            hooks=own if is_trained else None,
            loss=LOSS if module.has_loss else None,
            loss_share=stage.local_batch_size / self._plan.mini_batch,
            halves=HalfForwards(function=half, input_axes=(0, 0), axes=axes),
            activations=self._keeper(index, (whole, half), gradients, program) if is_trained else None,
            versions=versions,
            reduces_in=last_backward(program) if is_training and index in self._early else None,
            weights=own.weights,
        )

    def versions(self, index: int) -> WeightVersions:
        """Return the versions of a stage's weights (mode async)."""
        own = list(self._modules[index].parameters())
        places = self.engine.of(index).updater.places
        return WeightVersions(own, most=self._plan.num_versions(index), make_places=places)

    def _function(
        self, module: MadeUpStage, shapes: Mapping[str, tuple[int, ...]], received: tuple[str, ...]
    ) -> StageFunction:
        return StageFunction(
            call=functools.partial(module.call, tuple(shapes.values())),
            tensors=tuple(name for name, _ in module.named_parameters()),
            constants=(),
            batch_inputs=("cast", "pinned"),
            received=received,
            outputs=(*shapes, *((LOSS,) if module.has_loss else ())),
            code="",
            given=module,
        )

    def _keeper(
        self,
        index: int,
        functions: Sequence[StageFunction],
        gradients: BoundaryGradients,
        program: RankProgram,
    ) -> StageActivations | None:
        stage = self._plan.stages[index]
        policy = POLICIES[index % len(POLICIES)]
        if policy == "keep":
            return None
        swapped = [SwappedTensor(name=f"s:{n}", bytes=1, free_us=0.0) for n in range(40)]
        segment = RecomputedSegment(
            blocks=stage.blocks, tensors=("s:0",), bytes=1, held_bytes=0, recompute_us=1.0
        )
        plan = MemoryPlan(swapped=tuple(swapped)) if policy == "swap" else MemoryPlan(recomputed=(segment,))
        return make_stage_activations(
            stage=stage.name,
            plan=plan,
            blocks=stage.blocks,
            operators=None,
            whole=functions[0],
            half=functions[1],
            gradient_inputs=gradients.inputs,
            link=self._link,
            next_backward=backwards_after(program).get,
        )
