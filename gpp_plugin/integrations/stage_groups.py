"""The process groups of a graph of stages, created once, in the same order on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from gpp_plugin.errors import PlanError
from gpp_plugin.integrations.tensor_parallel import is_shard
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
    """Process groups over global ranks; a rank may only use those of its own stage.

    Args:
        world: all ranks of the plan.
        data: by stage, in the plan's order, the ranks of this rank's tensor position.
        tensor: by stage, the ranks of this rank's data position.
        stage: by stage, all its ranks.
        tied: one per set of stages that shares parameters, the ranks of this rank's tensor position in them.
        single: this rank alone.
    """

    world: dist.ProcessGroup
    data: tuple[dist.ProcessGroup | int, ...]
    tensor: tuple[dist.ProcessGroup | int, ...]
    stage: tuple[dist.ProcessGroup | int, ...]
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
            PlanError: the plan's ranks are not those of this job, a grid of ranks is not as process groups order
                it, or a tie names a stage it does not have or joins grids of unlike tensor sizes.
        """
        _check(plan, tied)
        timeout = timedelta(seconds=timeout_s)
        world = dist.new_group(list(range(plan.num_ranks)), timeout=timeout)
        single = dist.new_group([dist.get_rank()], timeout=timeout, use_local_synchronization=True)
        positions = [range(stage.tensor) for stage in plan.stages]
        data = tuple(
            _own([dist.new_group(list(stage.data_ranks(t)), timeout=timeout) for t in row])
            for stage, row in zip(plan.stages, positions, strict=True)
        )
        tensor = tuple(
            single
            if stage.tensor == 1
            else _own(
                [dist.new_group(list(stage.tensor_ranks(d)), timeout=timeout) for d in range(stage.degree)]
            )
            for stage in plan.stages
        )
        whole = tuple(
            dist.new_group(list(stage.ranks), timeout=timeout)
            if stage.tensor > 1 and stage.degree > 1
            else (data if stage.tensor == 1 else tensor)[index]
            for index, stage in enumerate(plan.stages)
        )
        shared = {
            stages: _own(
                [
                    dist.new_group(
                        sorted(rank for stage in stages for rank in plan.stages[stage].data_ranks(t)),
                        timeout=timeout,
                    )
                    for t in positions[stages[0]]
                ]
            )
            for stages in sorted({tuple(sorted(set(tie.stages))) for tie in tied})
        }
        return cls(world=world, data=data, tensor=tensor, stage=whole, tied=shared, single=single)

    def close(self) -> None:
        """Let go of the groups that this rank is in; nothing may be under way in them."""
        groups = (self.world, self.single, *self.data, *self.tensor, *self.stage, *self.tied.values())
        for group in {id(g): g for g in groups if isinstance(g, dist.ProcessGroup)}.values():
            dist.destroy_process_group(group)


def _own(groups: Sequence[dist.ProcessGroup | int]) -> dist.ProcessGroup | int:
    """Return the one of these groups that this rank is in; of none of them what torch gives to outsiders."""
    return next((group for group in groups if isinstance(group, dist.ProcessGroup)), groups[0])


def _check(plan: PipelinePlan, tied: Sequence[TiedParameter]) -> None:
    ranks = sorted(rank for stage in plan.stages for rank in stage.ranks)
    if ranks != list(range(dist.get_world_size())):
        raise PlanError(
            f"the plan uses ranks {ranks}, the job has {dist.get_world_size()}; "
            "start as many processes as the plan has ranks"
        )
    for stage in plan.stages:
        rows = [stage.tensor_ranks(position) for position in range(stage.degree)]
        if any(list(row) != sorted(row) for row in rows):
            raise PlanError(
                f"stage {stage.name!r}: its tensor-parallel ranks {[list(row) for row in rows]} do not ascend, as "
                "process groups number them; list each data position's ranks in ascending order"
            )
    for tie in tied:
        if tie.owner not in tie.stages or not all(0 <= s < len(plan.stages) for s in tie.stages):
            raise PlanError(
                f"tied parameter {tie.name!r}: stages {tie.stages}, owner {tie.owner}; "
                f"the plan has stages 0..{len(plan.stages) - 1}, and the owner must be one of them"
            )
        sizes = {plan.stages[stage].name: plan.stages[stage].tensor for stage in tie.stages}
        if len(set(sizes.values())) > 1:
            raise PlanError(
                f"tied parameter {tie.name!r}: its stages have the tensor sizes {sizes}, so that their ranks hold "
                "unlike shards of it; give them the same tensor size"
            )


class StageMpu:
    """The model-parallel unit DeepSpeed asks about its groups: data-parallel inside one stage, else alone.

    Args:
        data_ranks: the global ranks of the data-parallel group in order.
        rank: this global rank, one of them.
        data_group: that group.
        single_group: a group of this rank alone.
    """

    def __init__(
        self,
        *,
        data_ranks: Sequence[int],
        rank: int,
        data_group: dist.ProcessGroup,
        single_group: dist.ProcessGroup,
    ) -> None:
        self._ranks = list(data_ranks)
        self._rank = rank
        self._data_group = data_group
        self._single_group = single_group

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """Return the data-parallel group of this rank's tensor position."""
        return self._data_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Return the global ranks of that group."""
        return self._ranks

    def get_data_parallel_world_size(self) -> int:
        """Return the stage's degree."""
        return len(self._ranks)

    def get_data_parallel_rank(self) -> int:
        """Return this rank's position in the data-parallel group."""
        return dist.get_group_rank(self._data_group, self._rank)

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """Return the group of this rank alone: norm and overflow are the graph's, tensor ranks included."""
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

    A shard has copies at its own tensor position only. Collective over the stage's ranks, and over those of the
    stages that share parameters with it.
    """
    own, rank = plan.stages[stage], dist.get_rank()
    data_position, tensor_position = own.position(rank)
    for parameter in module.parameters():
        if own.tensor > 1 and not is_shard(parameter):
            broadcast_in_place(
                parameter, source=own.tensor_ranks(data_position)[0], group=groups.tensor[stage]
            )
        if own.degree > 1:
            broadcast_in_place(parameter, source=own.data_ranks(tensor_position)[0], group=groups.data[stage])
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for tie in tied:
        source = plan.stages[tie.owner].data_ranks(tensor_position)[0]
        group = groups.tied[tuple(sorted(set(tie.stages)))]
        broadcast_in_place(parameters[tie.name], source=source, group=group)
