"""The process groups of a stage as megatron-core takes them: a `ProcessGroupCollection` laid out by a `HyperCommGrid`.

A stage's ranks are a grid of data x tensor positions, in Megatron's order ("tp-cp-pp-dp") with one position along cp
and pp: pipelining is the graph's. The grid numbers the stage's positions, so its ranks need not be consecutive; the
groups of more than one rank are those the stage's context holds, and nothing is put into `parallel_state`.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from gpp_plugin.errors import ConfigError
from gpp_plugin.model.graph.stage_context import StageContext


def collect_groups(context: StageContext) -> Any:
    """Return the `ProcessGroupCollection` of this rank's place; not collective beyond this rank.

    Raises:
        ConfigError: torch.distributed is not initialised; megatron-core nowhere does without.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection

    if context.tensor_group is None or context.data_group is None or context.single_group is None:
        raise ConfigError(
            f"stage {context.stage!r}: megatron-core's modules need torch.distributed; start ranks with torchrun or "
            "deepspeed (one is enough)"
        )
    _check_grid(context)
    # A stage of 2 tensor x 3 data positions, numbered tensor first: tensor groups (0 1) (2 3) (4 5), data
    # groups (0 2 4) (1 3 5), and everything that this grid has no second position along (cp, pp) is the
    # rank alone. The embedding groups are None: tied weights over stages are the graph's, not Megatron's
    # first and last stage's.
    alone = context.single_group
    tensor, data = context.tensor_group, context.data_group
    return ProcessGroupCollection(
        tp=tensor, cp=alone, pp=alone, dp=data, mp=tensor, tp_cp=tensor, dp_cp=data, embd=None, pos_embd=None
    )


def _check_grid(context: StageContext) -> None:
    from megatron.core.hyper_comm_grid import HyperCommGrid

    grid = HyperCommGrid([context.tensor_size, 1, 1, context.data_size], ["tp", "cp", "pp", "dp"])
    own = context.data_rank * context.tensor_size + context.tensor_rank
    for axis, group, position in (
        ("tp", context.tensor_group, context.tensor_rank),
        ("dp", context.data_group, context.data_rank),
    ):
        (members,) = (ranks for ranks in grid.get_rank_enum(axis) if own in ranks)
        assert len(members) == dist.get_world_size(group) and members.index(own) == position, (
            f"stage {context.stage!r}: its {axis} group is not the one of Megatron's grid: {members}"
        )
