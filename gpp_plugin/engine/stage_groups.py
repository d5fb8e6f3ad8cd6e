"""The process groups of a graph of stages, created once, in the same order on every rank.

A stage's ranks are a grid of data, context and tensor positions. Those of one tensor position hold the same parameters,
whether they compute other samples or other positions of the same ones. Which parameters tensor ranks share out is
passed by the attributes that Megatron's layers give them:

``tensor_model_parallel``   each tensor rank holds a shard of its own: it counts in the norm on every rank
``sequence_parallel``       each tensor rank's gradient is of its part of the sequence: they are summed

A parameter without the first is a duplicate: the same on all tensor ranks, and counted on the first one only.

Source: this project
Tests: tests/integrations/test_tensor_parallel.py
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.runtime.ranks.collectives import finish


def is_shard(parameter: Tensor) -> bool:
    """Return whether each tensor rank holds its own shard of ``parameter``."""
    return bool(getattr(parameter, "tensor_model_parallel", False))


def duplicates(parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Return the names of those parameters that all tensor ranks hold alike."""
    return [name for name, parameter in parameters.items() if not is_shard(parameter)]


def sequence_parallel(parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Return the names of those parameters whose gradients are to be summed over the tensor ranks."""
    return [name for name, parameter in parameters.items() if getattr(parameter, "sequence_parallel", False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedParameter:
    """A parameter that several stages hold.

    Args:
        name: its name in every one of those stages' modules.
        stages: indices into the plan's stages.
        owner: the one of them that counts it in the norm and saves it.
        is_whole: all tensor ranks of its stages hold it alike; else it may be shards.
    """

    name: str
    stages: tuple[int, ...]
    owner: int
    is_whole: bool = False

    @property
    def holders(self) -> tuple[int, ...]:
        """Return its stages, each once, in the plan's order: what names the group that its gradient is summed in."""
        return tuple(sorted(set(self.stages)))


def tied_parameters(
    shared: Mapping[str, tuple[int, ...]], *, whole: Collection[str] = ()
) -> tuple[TiedParameter, ...]:
    """Return what several stages hold, from parameter name -> stages; the first of these owns it.

    Args:
        whole: those that all tensor ranks hold alike.
    """
    return tuple(
        TiedParameter(name=name, stages=stages, owner=stages[0], is_whole=name in whole)
        for name, stages in shared.items()
    )


def has_one_size(plan: PipelinePlan, stages: Iterable[int]) -> bool:
    """Return whether stages have one tensor size: then equal positions hold the same of what the stages share."""
    return len({plan.stages[stage].tensor for stage in stages}) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StageGroups:
    """Process groups over global ranks; a rank may only use those of its own stages.

    Stages on the same ranks have groups of their own: what a rank sends in one of them then depends on that stage's
    tasks alone, and not on how the rank interleaves its stages.

    Args:
        world: all ranks of the plan.
        data: by stage, in the plan's order, the ranks of this rank's tensor position: they hold the same parameters.
        tensor, context: by stage, the tensor ranks and the context ranks that this rank is one of.
        model: by stage, both together, the ranks that compute the same samples as this one. These three take tensors
            of the host as well.
        stage: by stage, all its ranks.
        tied: one per set of stages that shares parameters, the ranks of this rank's tensor position in them; all ranks
            of stages of different tensor sizes.
        single: this rank alone.
    """

    world: dist.ProcessGroup
    data: tuple[dist.ProcessGroup | int, ...]
    tensor: tuple[dist.ProcessGroup | int, ...]
    context: tuple[dist.ProcessGroup | int, ...]
    model: tuple[dist.ProcessGroup | int, ...]
    stage: tuple[dist.ProcessGroup | int, ...]
    tied: dict[tuple[int, ...], dist.ProcessGroup | int]
    single: dist.ProcessGroup

    @classmethod
    def create(
        cls,
        plan: PipelinePlan,
        tied: Sequence[TiedParameter] = (),
        *,
        timeout_s: float,
        backend: str | None = None,
    ) -> StageGroups:
        """Create the groups; collective over all ranks of the default group.

        Args:
            timeout_s: how long a collective waits for its peers (`collective_timeout_s`).
            backend: what moves the device's tensors (`JobPlacement.backend`); None: the default group's.

        Raises:
            PlanError: the plan's ranks are not those of this job, a grid of ranks is not as process groups order
                it, or a tie names a stage it does not have or joins grids of different tensor sizes.
        """
        # torch makes a group on all ranks of the job or on none: every rank runs these calls in this order, for
        # every stage, and keeps the groups that it is in. Example, a stage of 2 data x 2 context x 2 tensor positions
        # on ranks 0 to 7, seen from rank 5, which is at (1, 0, 1):
        #
        #     0 1 | 2 3    data {1 3 5 7}   tensor {4 5}   context {5 7}   model {4 5 6 7}   stage {0 .. 7}
        #     4 5 | 6 7    a row a data position, a field a context position, a column of a field a tensor position
        _check(plan, tied)
        new_group = partial(dist.new_group, timeout=timedelta(seconds=timeout_s), backend=backend)
        world = new_group(list(range(plan.num_ranks)))
        single = new_group([dist.get_rank()], use_local_synchronization=True)

        def make_one_of(
            grids: Iterable[Sequence[int]], backend: str | None = backend
        ) -> dist.ProcessGroup | int:
            return _own([new_group(list(ranks), backend=backend) for ranks in grids])

        data = tuple(
            make_one_of(stage.replicas(position) for position in range(stage.tensor)) for stage in plan.stages
        )
        # A grid with one column, or one row, needs no third group: groups cost sockets and threads. What ranks of the
        # same samples send within tasks has groups apart from that of gradients, which are summed in between. They also
        # send each other numbers of their hosts, those that dropout is seeded by.
        both = "cpu:gloo,cuda:nccl" if (backend or dist.get_backend()) == "nccl" else backend

        def make_row(
            ranks_of: Callable[[int, int], Sequence[int]], size: int, rows: Iterable[tuple[int, int]]
        ) -> dist.ProcessGroup | int:
            return make_one_of((ranks_of(*row) for row in rows), backend=both) if size > 1 else single

        tensor = tuple(make_row(s.tensor_ranks, s.tensor, _rows(s.degree, s.context)) for s in plan.stages)
        context = tuple(make_row(s.context_ranks, s.context, _rows(s.degree, s.tensor)) for s in plan.stages)
        model = tuple(
            make_one_of((stage.model_ranks(row) for row in range(stage.degree)), backend=both)
            if stage.tensor > 1 and stage.context > 1
            else (context if stage.context > 1 else tensor)[index]
            for index, stage in enumerate(plan.stages)
        )
        whole = tuple(
            make_one_of([stage.ranks])
            if stage.tensor > 1 and stage.num_replicas > 1
            else (data if stage.tensor == 1 else tensor)[index]
            for index, stage in enumerate(plan.stages)
        )
        # A tied parameter is summed over equal tensor positions of its stages: those hold the same shard of it. Of
        # different sizes all ranks hold it whole, and each brings its share (`TiedSums`).
        shared = {
            stages: make_one_of(
                sorted({rank for stage in stages for rank in plan.stages[stage].replicas(position)})
                for position in range(plan.stages[stages[0]].tensor)
            )
            if has_one_size(plan, stages)
            else make_one_of([sorted({rank for stage in stages for rank in plan.stages[stage].ranks})])
            for stages in sorted({tie.holders for tie in tied})
        }
        return cls(
            world=world,
            data=data,
            tensor=tensor,
            context=context,
            model=model,
            stage=whole,
            tied=shared,
            single=single,
        )

    def close(self) -> None:
        """Release the groups that this rank is in; nothing may be under way in them."""
        of_stages = (*self.data, *self.tensor, *self.context, *self.model, *self.stage)
        groups = (self.world, self.single, *of_stages, *self.tied.values())
        for group in {id(g): g for g in groups if isinstance(g, dist.ProcessGroup)}.values():
            dist.destroy_process_group(group)


def _rows(first: int, second: int) -> Iterable[tuple[int, int]]:
    """Return the positions of a grid, row by row."""
    return itertools.product(range(first), range(second))


def _own(groups: Sequence[dist.ProcessGroup | int]) -> dist.ProcessGroup | int:
    """Return the one of these groups that this rank is in; of none of them what torch gives to outsiders."""
    return next((group for group in groups if isinstance(group, dist.ProcessGroup)), groups[0])


def _check(plan: PipelinePlan, tied: Sequence[TiedParameter]) -> None:
    ranks = sorted({rank for stage in plan.stages for rank in stage.ranks})
    if ranks != list(range(dist.get_world_size())):
        raise PlanError(
            f"the plan uses ranks {ranks}, the job has {dist.get_world_size()}; "
            "start as many processes as the plan has ranks"
        )
    for stage in plan.stages:
        rows = [stage.model_ranks(position) for position in range(stage.degree)]
        if any(list(row) != sorted(row) for row in rows):
            kind = "context-parallel" if stage.context > 1 else "tensor-parallel"
            raise PlanError(
                f"stage {stage.name!r}: its {kind} ranks {[list(row) for row in rows]} do not ascend, as "
                "process groups number them; list each data position's ranks in ascending order"
            )
    for tie in tied:
        if tie.owner not in tie.stages or not all(0 <= s < len(plan.stages) for s in tie.stages):
            raise PlanError(
                f"tied parameter {tie.name!r}: stages {tie.stages}, owner {tie.owner}; "
                f"the plan has stages 0..{len(plan.stages) - 1}, and the owner must be one of them"
            )
        sizes = {plan.stages[stage].name: plan.stages[stage].tensor for stage in tie.stages}
        if len(set(sizes.values())) > 1 and not tie.is_whole:
            raise PlanError(
                f"tied parameter {tie.name!r}: its stages have the tensor sizes {sizes}, so that their ranks hold "
                "different shards of it; give them the same tensor size"
            )


def broadcast_in_place(tensor: torch.Tensor, *, source: int, group: dist.ProcessGroup | int) -> None:
    """Give every rank of ``group`` the bits of ``tensor`` on global rank ``source``; any dtype and shape.

    DeepSpeed's own broadcast refuses tensors without dimensions (a CLIP ``logit_scale``).
    """
    assert isinstance(group, dist.ProcessGroup)  # else this rank is not of the group
    flat = tensor.detach().contiguous().reshape(-1)
    work = dist.broadcast(flat.view(torch.uint8), src=source, group=group, async_op=True)
    finish(work, flat, group=group, what="the first weights of a stage's ranks")
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


@torch.no_grad()
def make_replicas_equal(
    modules: Mapping[int, nn.Module],
    *,
    plan: PipelinePlan,
    groups: StageGroups,
    tied: Sequence[TiedParameter],
) -> None:
    """Start every copy of a parameter from the same bits: the stage's first rank's, the owner's for ties.

    A shard has copies at its own tensor position only. Collective over the ranks of this rank's stages, and over those
    of the stages that share parameters with them.

    Args:
        modules: this rank's stages by their index in the plan.
    """
    # Rows first, then columns, so that position (0, 0) reaches every rank by way of its row's first one. Ties come
    # last: by then the owner's ranks agree, and each tensor position hears from the owner's first data position. Stages
    # and ties come in one order on all ranks: of a rank's stages each waits for ranks that are never at a later one.
    for stage in sorted(modules):
        _make_stage_equal(modules[stage], plan.stages[stage], stage, groups)
    named = {
        stage: dict(module.named_parameters(remove_duplicate=False)) for stage, module in modules.items()
    }
    for tie in sorted(tied, key=lambda tie: (tie.holders, tie.name)):
        copies = {stage: named[stage][tie.name] for stage in tie.holders if stage in named}
        if not copies:
            continue
        # of several copies on this rank the first is the owner's, if the owner is here, and the others follow it
        first = tie.owner if tie.owner in copies else min(copies)
        tensor_position = plan.stages[first].tensor_position(dist.get_rank())
        if not has_one_size(plan, tie.holders):
            tensor_position = 0
        source = plan.stages[tie.owner].replicas(tensor_position)[0]
        broadcast_in_place(copies[first], source=source, group=groups.tied[tie.holders])
        for stage in copies.keys() - {first}:
            copies[stage].copy_(copies[first])


def _make_stage_equal(module: nn.Module, own: Stage, index: int, groups: StageGroups) -> None:
    rank = dist.get_rank()
    row = own.tensor_ranks(own.position(rank)[0], own.context_position(rank))
    for parameter in module.parameters():
        if own.tensor > 1 and not is_shard(parameter):
            broadcast_in_place(parameter, source=row[0], group=groups.tensor[index])
        if own.num_replicas > 1:
            source = own.replicas(own.tensor_position(rank))[0]
            broadcast_in_place(parameter, source=source, group=groups.data[index])
