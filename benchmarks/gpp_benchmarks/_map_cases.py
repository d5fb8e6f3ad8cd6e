"""Stages on fewer ranks by brute force: every partition, every map of its stages to ranks, every in-flight count.

Times, bytes and edges are the oracles' own (`_oracle_costs`). In what order a rank runs the tasks of its stages, and
how long that takes, is the package's (`schedule.build`, `simulate.predict`): a plan is what these make of it. So what
is checked is the planner's choice of stages, ranks and counts, not its orders: both are judged by the same simulator.

    first    every map with GraphPipe's Table 2 in flight; those whose bound (`_least_us`) is least before the others,
             until that alone is as long as the `NUM_COUNTED` best
    then     of these, from Table 2's counts and from all micro-batches, one stage's count after another, whatever is
             shorter; and of the best every vector of counts from Table 2's up to all micro-batches

Each with orders that take messages to be free, and with orders that do not.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import random
import time
from collections.abc import Iterator
from typing import Any

from gpp_benchmarks._oracle import all_partitions, random_dag, random_request
from gpp_benchmarks._oracle_costs import Groups, num_micro_batches, oracle_plan
from gpp_plugin.errors import PlanError, PlanInfeasible, ScheduleError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.plan.make import with_link_times
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.plan.shared.share_ranks import share_ranks
from gpp_plugin.simulate.predict import predict_iteration_us

SIZE, MICRO_BATCHES = 4, 4
MOST_STAGES = 6
NUM_COUNTED = 3


def map_request(seed: int) -> PlanRequest:
    """Return a random graph that is asked for in more stages than ranks: 2 to 4 ranks, up to `MOST_STAGES` stages."""
    rng = random.Random(9_000_011 * (seed + 1))
    ranks = rng.choice([2, 3, 4])
    blocks = rng.randint(ranks + 1, MOST_STAGES)
    request = random_request(rng, random_dag(rng, blocks), ranks=ranks, is_tight=False, micro_batch_size=SIZE)
    return dataclasses.replace(
        request,
        mini_batch=MICRO_BATCHES * SIZE,
        num_stages=rng.randint(ranks + 1, blocks),
        data_parallel=1,
        virtual_stages=None,
    )


def check_map(seed: int) -> dict[str, Any]:
    """Compare the search for shared ranks with brute force on one random graph."""
    request = map_request(seed)
    begin = time.process_time()
    try:
        plan = share_ranks(make_plan("auto", request), request, schedule="1f1b")
        us: float | None = plan.iteration_us
    except PlanInfeasible:
        us = None
    seconds = time.process_time() - begin
    best, found = best_map_us(request)
    return {
        "kind": "maps",
        "seed": seed,
        "blocks": len(request.graph.blocks),
        "stages": request.num_stages,
        "ranks": request.num_ranks,
        "us": us,
        "best_us": best if best < math.inf else None,
        "ratio": us / best if us is not None and best < math.inf else None,
        "best": None if found is None else _in_words(found),
        "seconds": round(seconds, 3),
        "oracle_seconds": round(time.process_time() - begin - seconds, 3),
    }


def _in_words(plan: PipelinePlan) -> list[str]:
    return [f"{' '.join(s.blocks)} on {s.ranks[0]}, {s.in_flight} in flight" for s in plan.stages]


def best_map_us(request: PlanRequest) -> tuple[float, PipelinePlan | None]:
    """Return the shortest step of all partitions into the stages asked for, on all maps, and its plan."""
    bounded = sorted(
        ((_least_us(plan), number, plan) for number, plan in enumerate(_placed_plans(request))),
        key=lambda item: item[:2],
    )
    kept: list[tuple[float, int, PipelinePlan]] = []  # a heap of the best, the longest of them first
    for bound, number, plan in bounded:
        if len(kept) == NUM_COUNTED and bound >= -kept[0][0]:
            break
        heapq.heappush(kept, (-_step_us(plan, request), number, plan))
        if len(kept) > NUM_COUNTED:
            heapq.heappop(kept)
    if not kept:
        return math.inf, None
    moved = [(*_moved_counts(plan, request), plan) for _, _, plan in sorted(kept, key=lambda item: -item[0])]
    best, counted, plan = min(moved, key=lambda each: each[0])
    if best <= _least_us(plan) * (1 + 1e-9):
        return best, plan.with_each(in_flight=counted)
    for counts in itertools.product(*(range(stage.in_flight, MICRO_BATCHES + 1) for stage in plan.stages)):
        us = _step_us(plan.with_each(in_flight=counts), request)
        if us < best * (1 - 1e-9):
            best, counted = us, counts
    return best, plan.with_each(in_flight=counted)


def _moved_counts(plan: PipelinePlan, request: PlanRequest) -> tuple[float, tuple[int, ...]]:
    """Return the shortest step that changes of one stage's count after another lead to, and its counts."""
    found = []
    for start in (tuple(stage.in_flight for stage in plan.stages), (MICRO_BATCHES,) * len(plan.stages)):
        counts, best = start, _step_us(plan.with_each(in_flight=start), request)
        is_improved = True
        while is_improved:
            is_improved = False
            for i, count in itertools.product(range(len(counts)), range(1, MICRO_BATCHES + 1)):
                changed = (*counts[:i], count, *counts[i + 1 :])
                us = best if changed == counts else _step_us(plan.with_each(in_flight=changed), request)
                if us < best * (1 - 1e-9):
                    counts, best, is_improved = changed, us, True
        found.append((best, counts))
    return min(found)


def _placed_plans(request: PlanRequest) -> Iterator[PipelinePlan]:
    """Yield every partition on every map to all ranks; ranks are alike, so that they are numbered as they are met."""
    assert request.num_stages is not None
    for groups in all_partitions(request.graph, request.num_stages):
        if len(groups) == request.num_stages:
            yield from _on_all_maps(request, groups)


def _on_all_maps(request: PlanRequest, groups: Groups) -> Iterator[PipelinePlan]:
    plan = oracle_plan(request, groups, [1] * len(groups), SIZE)
    for placed in itertools.product(range(request.num_ranks), repeat=len(groups)):
        if list(dict.fromkeys(placed)) == list(range(request.num_ranks)):
            yield plan.with_each(ranks=[(rank,) for rank in placed])


def _least_us(plan: PipelinePlan) -> float:
    """Return a time no order is shorter than: a rank's work, what must come before all of it, and after."""
    # Before a stage's first forward one of each stage on a path to it, after its last backward one of each of these:
    # stages come in topological order, 0 -> 1 -> 2 with F 1 and B 2 of each give 2 before stage 2 and 4 after it.
    before, after = [0.0] * len(plan.stages), [0.0] * len(plan.stages)
    for edge in plan.edges:  # sorted by source
        source = plan.stages[edge.src]
        before[edge.dst] = max(before[edge.dst], before[edge.src] + source.forward_us)
        after[edge.dst] = max(after[edge.dst], after[edge.src] + source.backward_us)
    least: dict[int, tuple[float, float, float]] = {}
    for index, stage in enumerate(plan.stages):
        work = (stage.forward_us + stage.backward_us) * num_micro_batches(plan, stage)
        head, busy, tail = least.get(stage.ranks[0], (math.inf, 0.0, math.inf))
        least[stage.ranks[0]] = min(head, before[index]), busy + work, min(tail, after[index])
    return max(sum(parts) for parts in least.values())


def _step_us(plan: PipelinePlan, request: PlanRequest) -> float:
    """Return the shorter step of orders that take messages to be free and of orders that do not; inf: it cannot run."""
    best = math.inf
    for each in (plan, with_link_times(plan, request.cluster)):
        try:
            best = min(best, predict_iteration_us(each, cluster=request.cluster))
        except (PlanError, ScheduleError):
            continue
    return best
