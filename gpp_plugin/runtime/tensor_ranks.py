"""What the tensor ranks of a data position do together inside a task, as operators of a stage's generated code.

    shared    x ──► x      backward: the gradients of all ranks summed     where a region begins
    summed    x ──► sum    backward: the gradient as it is                 where a region ends
    joined    part of a parameter ──► whole    backward: its own part      where a whole one is read
    drawn     a number that all of them have                               in front of what draws at random

What is whole must be the same bits on every rank, dropped elements too, whatever a rank's generators have drawn before.
So each forward of a micro-batch takes one number, which the group's first rank draws from torch's generator and sends
from host to host; every operator that draws seeds the generators by it, by its own place in the code and, inside a
region, by the rank's position. A forward that runs again drops the same, as whoever recomputes restores torch's
generator.

Source: Megatron-LM (arXiv 1909.08053), section 3; dropout by seeds: this project
Tests: tests/runtime/test_shard_graph.py, tests/integrations/test_captured_tensor.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_plugin.capture.find_regions import regions_of_stage
from gpp_plugin.errors import ConfigError
from gpp_plugin.ir.analysis import TensorShard
from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.runtime.random_streams import restored_streams, seed_streams_of
from gpp_plugin.runtime.ranks.waiting import all_reduce, finish
from gpp_plugin.runtime.stage_module import Reference

# Parameters of a captured stage in parts, a part a tensor rank.
#
#     weight of q, k, v      rank 0          rank 1              parts (4, 4, 4) along axis 0 of 2 ranks
#     q0 q1 q2 q3            q0 q1           q2 q3
#     k0 k1 k2 k3            k0 k1           k2 k3
#     v0 v1 v2 v3            v0 v1           v2 v3
#
# They say so by the attributes that Megatron's layers give their parameters, by which norms, checkpoints and exports
# go.


def parameter_shards(reference: Reference, plan: PipelinePlan, index: int) -> dict[str, TensorShard]:
    """Return how the parameters of a stage are cut that its tensor ranks share out, by name."""
    if plan.stages[index].tensor == 1:
        return {}
    regions = regions_of_stage(reference.block_graph, reference.analysis.sharding.regions, plan, index)
    return {shard.name: shard for region in regions for shard in region.parameters}


def own_part(whole: Tensor, shard: TensorShard, position: int, degree: int) -> Tensor:
    """Return what one of ``degree`` ranks holds, in memory of its own."""
    # a copy also of one piece: a view would keep the whole tensor in memory. Of parts (4, 4, 4) rank 1 of 2 takes rows
    # 2 and 3, 6 and 7, 10 and 11.
    pieces = [whole.narrow(shard.axis, first, count) for first, count in shard.rows(position, degree)]
    return torch.cat(pieces, shard.axis)


def mark_part(parameter: nn.Parameter, shard: TensorShard) -> None:
    """Let a parameter say that each tensor rank holds its own part, and how parts make the whole."""
    marked: Any = parameter
    marked.tensor_model_parallel = True
    marked.partition_dim = shard.axis
    marked.partition_stride = len(shard.parts)


def check_shared_out(reference: Reference, requested: object) -> None:
    """Refuse tensor ranks for a model of which nothing can be shared out among them.

    Args:
        requested: ``tensor_parallel`` of the configuration.

    Raises:
        ConfigError: names the operator that is in the way.
    """
    graph = reference.block_graph
    if requested in (1, "auto") or graph.sharding:
        return
    why = next(iter(graph.undivided.values()), "it has no linear operators")
    raise ConfigError(
        f"graph_pipeline.tensor_parallel is {requested!r} and nothing of {graph.model} can be shared out among tensor "
        f'ranks: {why}; set it to 1, or to "auto" for what can be'
    )


def describe_whole(reference: Reference, plan: PipelinePlan) -> list[str]:
    """Return a line for each stage on tensor ranks some of whose linear operators are computed whole on all of them."""
    reasons = {each.name: each.reason for each in reference.analysis.sharding.whole}
    blocks = {block.name: block for block in reference.block_graph.blocks}
    lines = []
    for stage in plan.stages:
        own = [n for b in stage.blocks for n in blocks[b].nodes if n in reasons]
        if stage.tensor > 1 and own:
            more = f", and {len(own) - 1} more" if len(own) > 1 else ""
            lines.append(
                f"stage {stage.name!r}: each of its {stage.tensor} tensor ranks computes all of operator "
                f"{own[0]!r}{more}: {reasons[own[0]]}"
            )
    return lines


RESULT, GRADIENT = "the result of a region", "the gradient of what a region reads"
"""What is summed."""
_SEEDS = 1 << 48
_NEXT_OPERATOR, _NEXT_POSITION = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F
"""Large odd numbers: seeds of neighbouring operators and positions lie far from each other."""


@dataclass(slots=True, kw_only=True)
class TensorRanks:
    """A stage's tensor ranks of one data position, as one of them sees them.

    Args:
        position, size: of this rank, and how many there are.
        group: theirs; None until the job's groups are made.
        parts: how the stage's parameters are cut, as it holds them; None until it does.
        sent_bytes: of `RESULT` and `GRADIENT`, the bytes of the tensors that have been summed so far.
    """

    stage: str
    position: int
    size: int
    group: dist.ProcessGroup | int | None = None
    parts: Mapping[str, TensorShard] | None = None
    sent_bytes: dict[str, int] = field(default_factory=dict)

    def sum(self, tensor: Tensor, what: str, *, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Return the sum of the ranks' tensors, or what else ``op`` makes of them."""
        assert self.group is not None, "the groups of a job are made before it runs"
        total = tensor.clone(memory_format=torch.contiguous_format)
        all_reduce(
            total, op=op, group=self.group, what=f"{what} over the tensor ranks of stage {self.stage!r}"
        )
        self.sent_bytes[what] = self.sent_bytes.get(what, 0) + total.nbytes
        return total

    def join(self, part: Tensor, shard: TensorShard) -> Tensor:
        """Return the whole of the ranks' parts."""
        assert isinstance(self.group, dist.ProcessGroup), "the groups of a job are made before it runs"
        own = part.detach().contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size)]
        work = dist.all_gather(parts, own, group=self.group, async_op=True)
        finish(work, own, group=self.group, what=f"the whole of {shard.name} in stage {self.stage!r}")
        pieces = [each.chunk(len(shard.parts), shard.axis) for each in parts]
        return torch.cat([own[i] for i in range(len(shard.parts)) for own in pieces], shard.axis)


class TensorLinks:
    """The tensor ranks of this rank's stages, by stage and ranks; code is made before there are process groups."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._known: dict[tuple[str, tuple[int, ...]], TensorRanks] = {}

    def of(self, stage: Stage) -> TensorRanks:
        """Return the ranks that compute the same samples of a stage as this one."""
        data_position, position = stage.position(self._rank)
        key = stage.name, stage.tensor_ranks(data_position)
        if key not in self._known:
            self._known[key] = TensorRanks(stage=stage.name, position=position, size=stage.tensor)
        return self._known[key]

    def join(self, stage: Stage, group: dist.ProcessGroup | int, parts: Mapping[str, TensorShard]) -> None:
        """Let the code of a stage use this group, and parameters as they are held, from now on."""
        self.of(stage).group, self.of(stage).parts = group, parts


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.sum(gradient, GRADIENT), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: TensorRanks) -> Tensor:
        return ranks.sum(tensor, RESULT)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: TensorRanks, shard: TensorShard) -> Tensor:
        ctx.ranks, ctx.shard = ranks, shard
        return ranks.join(part, shard)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        shard = ctx.shard
        rows = shard.rows(ctx.ranks.position, ctx.ranks.size)
        own = [gradient.narrow(shard.axis, first, count) for first, count in rows]
        return torch.cat(own, shard.axis), None, None


class TensorOperator:
    """An operator of generated code on tensor ranks: the target of a graph's node.

    Args:
        title: how generated code calls it.
    """

    def __init__(self, title: str, call: Callable[..., Any], *, is_random: bool = False) -> None:
        self.__name__ = title
        self._call = call
        self.tags = (torch.Tag.nondeterministic_seeded,) if is_random else ()

    def __str__(self) -> str:
        return self.__name__

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorOperator:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        return self._call(*args, **kwargs)


def shared(ranks: TensorRanks) -> TensorOperator:
    """Return what hands a whole tensor to a region."""
    return TensorOperator("tensor_shared", lambda tensor: _Shared.apply(tensor, ranks))  # type: ignore[no-untyped-call]


def summed(ranks: TensorRanks) -> TensorOperator:
    """Return what makes a whole tensor of the ranks' summands."""
    return TensorOperator("tensor_summed", lambda tensor: _Summed.apply(tensor, ranks))  # type: ignore[no-untyped-call]


def joined(ranks: TensorRanks, shard: TensorShard) -> TensorOperator:
    """Return what makes a whole parameter of the ranks' parts; all of them compute the same with it."""
    return TensorOperator("tensor_joined", lambda part: _Joined.apply(part, ranks, shard))  # type: ignore[no-untyped-call]


def drawn(ranks: TensorRanks) -> TensorOperator:
    """Return what draws one number for a forward, the same on all ranks of the group."""

    def draw() -> Tensor:
        number = torch.empty((), dtype=torch.int64).random_(_SEEDS)
        if ranks.position > 0:
            number.zero_()
        assert ranks.group is not None, "the groups of a job are made before it runs"
        # on the host, over the group's gloo: read from a device, it would be waited for in each forward
        all_reduce(number, group=ranks.group, what=f"the seed of a forward of stage {ranks.stage!r}")
        return number

    return TensorOperator("tensor_drawn", draw, is_random=True)


def seeded(
    call: Callable[..., Any], ranks: TensorRanks, device: torch.device, *, place: int, is_part: bool
) -> TensorOperator:
    """Return an operator that draws by the number of its forward, which is its first argument.

    Args:
        place: of the operator in the code.
        is_part: its result is a part: each rank drops other elements.
    """
    # Dropout of hidden states: the same seed on all ranks. Of attention's heads: one for each position, so that heads 0
    # and 2, of ranks 0 and 1, do not drop the same. The next operator of the forward draws differently from both.
    distance = place * _NEXT_OPERATOR + (ranks.position + 1) * _NEXT_POSITION * is_part

    def run(number: Tensor, *args: Any, **kwargs: Any) -> Any:
        with restored_streams(device):
            seed_streams_of(device, (int(number) + distance) % (1 << 63))
            return call(*args, **kwargs)

    return TensorOperator("tensor_seeded", run)
