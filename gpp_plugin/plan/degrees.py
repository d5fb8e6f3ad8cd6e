"""How many ranks each of a given set of stages gets: exact, all ranks used, smallest bottleneck."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import networkx as nx

from gpp_plugin.plan.batches import BatchRules
from gpp_plugin.plan.costs import CostModel, link_for_span, ring_us
from gpp_plugin.plan.registry import PlanRequest
from gpp_plugin.plan.stages import StageDraft


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    degree: int
    micro_batch_size: int
    us_per_sample: float


def choose_degrees(
    request: PlanRequest,
    costs: CostModel,
    rules: BatchRules,
    groups: Sequence[Sequence[str]],
    wish: int,
    *,
    heights: Sequence[int] | None = None,
) -> list[StageDraft] | None:
    """Give the groups degrees that add up to all ranks with the smallest bottleneck time per sample.

    Bisection over the finite set of stage times; whether the degrees can add up to the number of
    ranks is a subset-sum over bit sets.

    Args:
        wish: micro-batch size of every stage that neither coupling nor the user fixes.
        heights: stages on the longest path from each group to a sink; computed where not given.

    Returns:
        One draft a group, or None where no choice uses all ranks within memory.
    """
    if heights is None:
        heights = stage_heights(request, groups)
    options = [
        _stage_options(request, costs, rules, list(group), wish, height)
        for group, height in zip(groups, heights, strict=True)
    ]
    if not all(options):
        return None
    times = sorted({option.us_per_sample for stage in options for option in stage})
    floor = max(min(option.us_per_sample for option in stage) for stage in options)
    times = [t for t in times if t >= floor]
    low, high = 0, len(times) - 1
    if not _reachable(options, times[high], request.num_ranks):
        return None
    while low < high:
        middle = (low + high) // 2
        if _reachable(options, times[middle], request.num_ranks):
            high = middle
        else:
            low = middle + 1
    prefixes = _reachable(options, times[low], request.num_ranks)
    chosen: list[_Option] = []
    total = request.num_ranks
    for i in range(len(options) - 1, -1, -1):
        fitting = [
            option
            for option in options[i]
            if option.us_per_sample <= times[low]
            and option.degree <= total
            and prefixes[i] >> (total - option.degree) & 1
        ]
        best = min(fitting, key=lambda option: option.us_per_sample)
        chosen.append(best)
        total -= best.degree
    chosen.reverse()
    return [
        StageDraft(blocks=tuple(group), degree=option.degree, micro_batch_size=option.micro_batch_size)
        for group, option in zip(groups, chosen, strict=True)
    ]


def _reachable(options: Sequence[Sequence[_Option]], limit: float, num_ranks: int) -> list[int]:
    """Return after each stage the bit set of rank totals, or [] where ``num_ranks`` is not one."""
    mask = (1 << (num_ranks + 1)) - 1
    prefixes = [1]
    for stage in options:
        sums = 0
        for option in stage:
            if option.us_per_sample <= limit:
                sums |= prefixes[-1] << option.degree
        prefixes.append(sums & mask)
    return prefixes if prefixes[-1] >> num_ranks & 1 else []


def _stage_options(
    request: PlanRequest, costs: CostModel, rules: BatchRules, group: list[str], wish: int, height: int
) -> list[_Option]:
    rows = costs.indices(group)
    limit = min(device.memory_bytes for device in request.cluster.devices[: request.num_ranks])
    if request.memory_limit_bytes is not None:
        limit = min(limit, request.memory_limit_bytes)
    gradient = float(costs.gradient_bytes[rows].sum())
    options = []
    for degree in rules.degrees():
        size = rules.micro_batch_size(group, degree, wish)
        if size is None:
            continue
        local = size // degree
        num = request.mini_batch // size
        in_flight = num if request.schedule == "gpipe" else min(num, height)
        if costs.stage_memory(rows, degree=degree, local=local, in_flight=in_flight) > limit:
            continue
        forward, backward = costs.stage_times(rows, local)
        reduce_us = ring_us(gradient, degree, link_for_span(request.cluster, degree)) if gradient > 0 else 0.0
        options.append(
            _Option(
                degree=degree,
                micro_batch_size=size,
                us_per_sample=(forward + backward) / size + reduce_us / request.mini_batch,
            )
        )
    return options


def stage_heights(request: PlanRequest, groups: Sequence[Sequence[str]]) -> list[int]:
    """Return for each group the number of stages on its longest path to a sink, itself included."""
    stage_of = {block: i for i, group in enumerate(groups) for block in group}
    quotient = nx.DiGraph()
    quotient.add_nodes_from(range(len(groups)))
    quotient.add_edges_from(
        (stage_of[e.src], stage_of[e.dst]) for e in request.graph.edges if stage_of[e.src] != stage_of[e.dst]
    )
    heights = [1] * len(groups)
    for stage in reversed(list(nx.topological_sort(quotient))):
        heights[stage] = 1 + max((heights[s] for s in quotient.successors(stage)), default=0)
    return heights
