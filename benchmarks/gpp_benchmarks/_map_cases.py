"""Stages on fewer ranks by brute force: every partition, every map of its stages to ranks, every in-flight count.

Times, bytes and edges are the oracles' own (`_oracle_costs`). In what order a rank runs the tasks of its stages, and
how long that takes, is the package's (`schedule.build`, `simulate.predict`): a plan is what these make of it. So what
is checked is the planner's choice of stages, ranks and counts, not its orders.

    counts first    GraphPipe's Table 2, once, one and a half times and twice, and all micro-batches, of every map
    then            of the best `NUM_COUNTED` every vector of counts from Table 2's up to all micro-batches
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
from gpp_plugin.plan.costs.link_times import with_link_times
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.plan.shared.share_ranks import share_ranks
from gpp_plugin.simulate.predict import predict_iteration_us

SIZE, MICRO_BATCHES = 4, 4
MOST_STAGES = 6
NUM_COUNTED = 4
FACTORS = (1.0, 1.5, 2.0, math.inf)


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
        "best_us": best,
        "ratio": us / best if us is not None and best < math.inf else None,
        "best": None if found is None else _in_words(found),
        "seconds": round(seconds, 3),
        "oracle_seconds": round(time.process_time() - begin - seconds, 3),
    }


def _in_words(plan: PipelinePlan) -> list[str]:
    return [f"{' '.join(s.blocks)} on {s.ranks[0]}, {s.in_flight} in flight" for s in plan.stages]


def best_map_us(request: PlanRequest) -> tuple[float, PipelinePlan | None]:
    """Return the shortest step of all partitions into the stages asked for, on all maps, and its plan."""
    best, best_plan = math.inf, None
    kept: list[tuple[float, int, PipelinePlan]] = []
    for number, plan in enumerate(_placed_plans(request)):
        if _least_us(plan) >= (kept[0][0] * -1 if len(kept) == NUM_COUNTED else math.inf):
            continue
        us, counted = min(
            ((_step_us(each, request), each) for each in _factored(plan)), key=lambda pair: pair[0]
        )
        heapq.heappush(kept, (-us, number, counted))
        if len(kept) > NUM_COUNTED:
            heapq.heappop(kept)
        if us < best:
            best, best_plan = us, counted
    for _, _, plan in sorted(kept, key=lambda item: -item[0]):
        for counted in _all_counts(plan, request):
            us = _step_us(counted, request)
            if us < best * (1 - 1e-9):
                best, best_plan = us, counted
    return best, best_plan


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
            stages = tuple(
                dataclasses.replace(stage, ranks=(rank,))
                for stage, rank in zip(plan.stages, placed, strict=True)
            )
            yield dataclasses.replace(plan, stages=stages)


def _least_us(plan: PipelinePlan) -> float:
    """Return how long the busiest rank computes."""
    busy: dict[int, float] = {}
    for stage in plan.stages:
        work = (stage.forward_us + stage.backward_us) * num_micro_batches(plan, stage)
        busy[stage.ranks[0]] = busy.get(stage.ranks[0], 0.0) + work
    return max(busy.values())


def _factored(plan: PipelinePlan) -> Iterator[PipelinePlan]:
    for factor in FACTORS:
        yield _with_counts(plan, [min(MICRO_BATCHES, stage.in_flight * factor) for stage in plan.stages])


def _all_counts(plan: PipelinePlan, request: PlanRequest) -> Iterator[PipelinePlan]:
    groups = tuple(stage.blocks for stage in plan.stages)
    least = oracle_plan(request, groups, [1] * len(groups), SIZE)
    ranges = [range(stage.in_flight, MICRO_BATCHES + 1) for stage in least.stages]
    for counts in itertools.product(*ranges):
        yield _with_counts(plan, counts)


def _with_counts(plan: PipelinePlan, counts: Any) -> PipelinePlan:
    stages = (
        dataclasses.replace(s, in_flight=math.ceil(count))
        for s, count in zip(plan.stages, counts, strict=True)
    )
    return dataclasses.replace(plan, stages=tuple(stages))


def _step_us(plan: PipelinePlan, request: PlanRequest) -> float:
    """Return the shorter step of orders that take messages to be free and of orders that do not."""
    best = math.inf
    for each in (plan, with_link_times(plan, request.cluster)):
        try:
            best = min(best, predict_iteration_us(each, cluster=request.cluster))
        except (PlanError, ScheduleError):
            continue
    return best
