"""Parameters of a captured stage in parts, a part a tensor rank.

    weight of q, k, v      rank 0          rank 1              parts (4, 4, 4) along axis 0 of 2 ranks
    q0 q1 q2 q3            q0 q1           q2 q3
    k0 k1 k2 k3            k0 k1           k2 k3
    v0 v1 v2 v3            v0 v1           v2 v3

They say so by the attributes that Megatron's layers give their parameters, by which norms, checkpoints and exports go.

Source: this project
Tests: tests/integrations/test_captured_tensor.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gpp_plugin.capture.sharding.block_shardings import regions_of_stage
from gpp_plugin.errors import ConfigError
from gpp_plugin.ir.analysis import TensorShard
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.runtime.stage_source import Reference


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


def check_shared_out(reference: Reference, asked: object) -> None:
    """Refuse tensor ranks for a model of which nothing can be shared out among them.

    Args:
        asked: ``tensor_parallel`` of the configuration.

    Raises:
        ConfigError: names the operator that is in the way.
    """
    graph = reference.block_graph
    if asked in (1, "auto") or graph.sharding:
        return
    why = next(iter(graph.undivided.values()), "it has no linear operators")
    raise ConfigError(
        f"graph_pipeline.tensor_parallel is {asked!r} and nothing of {graph.model} can be shared out among tensor "
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
