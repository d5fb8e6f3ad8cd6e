"""The process groups of a graph of stages, created once, in the same order on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.plan import PipelinePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedParameter:
    """A parameter that several stages hold.

    Args:
        name: its name in every one of those stages' modules.
        stages: indices into the plan's stages.
        owner: the one of them that counts it in the norm and saves it.
    """

    name: str
    stages: tuple[int, ...]
    owner: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageGroups:
    """Process groups over global ranks.

    Args:
        world: all ranks of the plan.
        data: one group per stage, in the plan's order; this rank may only use its own stage's.
        tied: one group per set of stages that shares parameters.
        single: this rank alone.
    """

    world: dist.ProcessGroup
    data: tuple[dist.ProcessGroup | int, ...]
    tied: dict[tuple[int, ...], dist.ProcessGroup | int]
    single: dist.ProcessGroup

    @classmethod
    def create(
        cls, plan: PipelinePlan, tied: Sequence[TiedParameter] = (), *, timeout_s: float
    ) -> StageGroups:
        """Create the groups; collective over all ranks of the default group.

        Args:
            timeout_s: how long a collective waits for its peers.

        Raises:
            PlanError: the plan's ranks are not those of this job, or a tie names a stage it does not have.
        """
        ranks = sorted(rank for stage in plan.stages for rank in stage.ranks)
        if ranks != list(range(dist.get_world_size())):
            raise PlanError(
                f"the plan uses ranks {ranks}, the job has {dist.get_world_size()}; "
                "start as many processes as the plan has ranks"
            )
        for tie in tied:
            if tie.owner not in tie.stages or not all(0 <= s < len(plan.stages) for s in tie.stages):
                raise PlanError(
                    f"tied parameter {tie.name!r}: stages {tie.stages}, owner {tie.owner}; "
                    f"the plan has stages 0..{len(plan.stages) - 1}, and the owner must be one of them"
                )
        timeout = timedelta(seconds=timeout_s)
        world = dist.new_group(ranks, timeout=timeout)
        data = tuple(dist.new_group(list(stage.ranks), timeout=timeout) for stage in plan.stages)
        sets = sorted({tuple(sorted(set(tie.stages))) for tie in tied})
        shared = {
            stages: dist.new_group(
                sorted(rank for stage in stages for rank in plan.stages[stage].ranks), timeout=timeout
            )
            for stages in sets
        }
        single = dist.new_group([dist.get_rank()], timeout=timeout, use_local_synchronization=True)
        return cls(world=world, data=data, tied=shared, single=single)


class StageMpu:
    """The model-parallel unit DeepSpeed asks about its groups: data-parallel inside one stage, else alone.

    Args:
        stage_ranks: the stage's global ranks in order.
        rank: this global rank, one of them.
        data_group: the stage's process group.
        single_group: a group of this rank alone.
    """

    def __init__(
        self,
        *,
        stage_ranks: Sequence[int],
        rank: int,
        data_group: dist.ProcessGroup,
        single_group: dist.ProcessGroup,
    ) -> None:
        self._ranks = list(stage_ranks)
        self._rank = rank
        self._data_group = data_group
        self._single_group = single_group

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """Return the stage's group."""
        return self._data_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Return the stage's global ranks."""
        return self._ranks

    def get_data_parallel_world_size(self) -> int:
        """Return the stage's degree."""
        return len(self._ranks)

    def get_data_parallel_rank(self) -> int:
        """Return this rank's position in the stage's group."""
        return dist.get_group_rank(self._data_group, self._rank)

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """Return the group of this rank alone: stages are not tensor-parallel."""
        return self._single_group

    def get_model_parallel_world_size(self) -> int:
        """Return 1."""
        return 1

    def get_model_parallel_rank(self) -> int:
        """Return 0."""
        return 0

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_pipeline_model_parallel_group = get_model_parallel_group
    get_pipeline_model_parallel_world_size = get_model_parallel_world_size
    get_pipeline_model_parallel_rank = get_model_parallel_rank


def broadcast_in_place(tensor: torch.Tensor, *, source: int, group: dist.ProcessGroup | int) -> None:
    """Give every rank of ``group`` the bits of ``tensor`` on global rank ``source``; any dtype and shape.

    DeepSpeed's own broadcast refuses tensors without dimensions (a CLIP ``logit_scale``).
    """
    assert isinstance(group, dist.ProcessGroup)  # else this rank is not of the group
    flat = tensor.detach().contiguous().reshape(-1)
    dist.broadcast(flat.view(torch.uint8), src=source, group=group)
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


@torch.no_grad()
def make_replicas_equal(
    module: nn.Module, *, plan: PipelinePlan, stage: int, groups: StageGroups, tied: Sequence[TiedParameter]
) -> None:
    """Start every copy of a parameter from the same bits: the stage's first rank's, the owner's for ties.

    Collective over the stage's ranks, and over those of the stages that share parameters with it.
    """
    ranks = plan.stages[stage].ranks
    if len(ranks) > 1:
        for parameter in module.parameters():
            broadcast_in_place(parameter, source=min(ranks), group=groups.data[stage])
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for tie in tied:
        source = min(plan.stages[tie.owner].ranks)
        group = groups.tied[tuple(sorted(set(tie.stages)))]
        broadcast_in_place(parameters[tie.name], source=source, group=group)
