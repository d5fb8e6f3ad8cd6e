"""A smaller plan that takes as long: ranks that hold the same stages side by side become one.

Two stages of four ranks each, micro-batches of eight, are simulated as two stages of one rank each, micro-batches of
two: the same tasks, the same bytes a message, a quarter of the nodes. It is exact where ranks side by side do the same
at the same times; what differs (a link that only some of them share) is left to the last judgement of the whole plan.

Source: this project
Tests: tests/plan/test_shared_ranks_plans.py
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict

from gpp_plugin.ir.cluster import Cluster
from gpp_plugin.ir.plan import PipelinePlan


def collapsed(plan: PipelinePlan, cluster: Cluster) -> tuple[PipelinePlan, Cluster]:
    """Return the plan with sets of ranks that hold the same stages as one, and the cluster of these; as large as
    possible, and the plan as it is where that is not.
    """
    # Of a tower on ranks 0 to 7 and a trunk of stages on (0, 1), (2, 3), (4, 5) and (6, 7) four pairs of ranks hold the
    # same stages: width 2, ranks 0 to 3, the tower's micro-batch of 8 becomes 4 and the trunk's of 2 becomes 1.
    holders = holders_of(plan)
    width = math.gcd(*holders.values(), plan.mini_batch, *(stage.micro_batch_size for stage in plan.stages))
    while width > 1:
        found = _with_width(plan, cluster, width)
        if found is not None:
            return found
        width = max(other for other in range(1, width) if width % other == 0)
    return plan, cluster


def holders_of(plan: PipelinePlan) -> dict[tuple[int, ...], int]:
    """Return the sets of stages that ranks hold, and how many ranks hold each.

    As `PipelinePlan.stages_of_rank` of every rank, in one walk over the stages: of thousands of ranks that counts.
    """
    held: dict[int, list[int]] = defaultdict(list)
    for index, stage in enumerate(plan.stages):
        for rank in stage.ranks:
            held[rank].append(index)
    return dict(Counter(tuple(own) for own in held.values()))


def _with_width(plan: PipelinePlan, cluster: Cluster, width: int) -> tuple[PipelinePlan, Cluster] | None:
    """Return the same with ``width`` ranks as one; None where they do not lie side by side, or tensors are sharded."""
    number: dict[tuple[int, ...], int] = {}
    for first in range(0, plan.num_ranks, width):
        number[tuple(range(first, first + width))] = len(number)
    stages = []
    for stage in plan.stages:
        parts = [stage.ranks[i : i + width] for i in range(0, len(stage.ranks), width)]
        if stage.tensor > 1 or any(part not in number for part in parts):
            return None
        ranks = tuple(number[part] for part in parts)
        stages.append(
            dataclasses.replace(stage, ranks=ranks, micro_batch_size=stage.micro_batch_size // width)
        )
    if any(link.span % width and width % link.span for link in cluster.links):
        return None
    # a level of fewer ranks than are one now joins nobody any more
    links = tuple(
        dataclasses.replace(link, span=link.span // width) for link in cluster.links if link.span % width == 0
    )
    small = dataclasses.replace(
        cluster, devices=cluster.devices[: plan.num_ranks : width], links=links or cluster.links[-1:]
    )
    return (
        dataclasses.replace(plan, mini_batch=plan.mini_batch // width, loss_unit=1, stages=tuple(stages)),
        small,
    )
