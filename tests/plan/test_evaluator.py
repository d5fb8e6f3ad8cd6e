"""Plans that planners make of drawn requests, beside an evaluator that shares no code with the package."""

import dataclasses
import json
import random
from collections import Counter

import pytest

from gpp_plugin import api
from gpp_plugin.errors import PlanInfeasible
from gpp_plugin.ir.cluster import Link
from gpp_plugin.ir.plan import joined_breakdown
from gpp_plugin.ir.profile import BlockCost
from gpp_plugin.ir.serialize import dumps, to_plain
from gpp_plugin.plan.plan_form import write_plan
from gpp_plugin.rehearse.rehearsal import programs_of_plan
from tests import tiers
from tests.plan.evaluator import Evaluation, is_trained, order_by_hand
from tests.plan.graphs import (
    branches,
    chain,
    diamond,
    encoder_decoder,
    make_cluster,
    make_profile,
    make_request,
)

PLANNERS = ("auto", "graphpipe", "pipedream", "uniform")
SCHEDULES = ("auto", "1f1b", "2f2b", "gpipe", "greedy", "zero_bubble")


def drawn_request(seed):
    """Return a request of blocks no two of which cost the same, and how to plan it.

    Reductions are left out of what is compared: stages have one rank, or nothing to sum.
    """
    rng = random.Random(seed)
    shapes = [
        chain(rng.randint(4, 8)),
        branches(2, 3),
        branches(3, 2),
        branches(2, 2),
        diamond(),
        encoder_decoder(2),
    ]
    graph = rng.choice(shapes)
    may_share = rng.random() < 0.3
    sums_nothing = may_share or rng.random() < 0.3
    frozen = set()
    if graph.blocks[0].name == "b0.0" and rng.random() < 0.8:  # a tower that is not trained
        frozen = {block.name for block in graph.blocks if block.name.startswith("b0.")}
    tensors = {
        name: dataclasses.replace(
            spec, requires_grad=name.partition(":")[0] not in frozen, shape=(1, rng.randint(50, 5000))
        )
        for name, spec in graph.tensors.items()
    }
    graph = dataclasses.replace(graph, tensors=tensors)
    costs = []
    for block in graph.blocks:
        us, parameter = rng.uniform(20, 90), rng.randint(1000, 9000)
        trained = 0 if block.name in frozen or sums_nothing else rng.randint(500, parameter)
        back = 0.0 if block.name in frozen else rng.uniform(1, 3)
        costs.append(
            BlockCost(
                block=block.name,
                samples=(1, 4),
                forward_us=(us, us * rng.uniform(2, 4)),
                backward_us=(us * back, us * back * rng.uniform(2, 4)),
                saved_bytes_per_sample=0.0 if block.name in frozen else float(rng.randint(100, 900)),
                saved_bytes_fixed=0.0 if block.name in frozen else float(rng.randint(10, 90)),
                parameter_bytes=parameter,
                gradient_bytes=trained,
                optimizer_bytes=2 * trained,
                transient_bytes_per_sample=float(rng.randint(100, 900)),
                split_factor=rng.uniform(1.0, 1.2),
                input_share=rng.uniform(0.3, 0.7),
                pending_bytes_per_sample=float(rng.randint(10, 90)),
            )
        )
    profile = dataclasses.replace(make_profile(graph), costs=tuple(costs))
    ranks = rng.choice((2, 3, 4))
    links = tuple(
        Link(
            name=f"span {span}",
            span=span,
            bytes_per_s=10 ** rng.uniform(8, 10),
            latency_us=rng.uniform(0.5, 5),
        )
        for span in sorted({2, ranks})
    )
    device = dataclasses.replace(make_cluster(1).devices[0], memory_bytes_per_s=10 ** rng.uniform(8, 9))
    cluster = dataclasses.replace(make_cluster(ranks), devices=(device,) * ranks, links=links)
    options = {
        "ranks": ranks,
        "cluster": cluster,
        "mini_batch": rng.choice((8, 12, 16)),
        "zero_stage": rng.randint(0, 2),
    }
    options["loss_unit"] = rng.choice((1, 2, 4))
    options["data_parallel"] = None if sums_nothing else 1
    if may_share:
        options |= {"virtual_stages": rng.choice((None, 2)), "colocate": rng.random() < 0.5}
    if rng.random() < 0.25:
        options |= {
            "memory_limit_bytes": rng.randint(40_000, 80_000),
            "memory_optimization": ("recompute", "swap"),
        }
    return make_request(graph, profile, **options), rng.choice(PLANNERS)


def evaluated(request, planner, schedule):
    """Return a plan as it is read, and its evaluation, from JSON alone."""
    plan = api.plan_for(request, planner=planner, schedule=schedule)
    programs = json.loads(json.dumps(to_plain(programs_of_plan(plan))))
    read = json.loads(dumps(plan))["value"]
    given = (json.loads(json.dumps(to_plain(each))) for each in (request.cluster, request.profile))
    return plan, read, Evaluation(read, programs, *given, request.zero_stage)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_times_and_memory_of_drawn_plans(schedule, tmp_path):
    """Steps within 0.1 % of the plan's and the simulator's; no rank ever holds more than the plan says.

    Each plan is read back as it was, and made anew.
    """
    seen = Counter()
    first = 100 * SCHEDULES.index(schedule)
    most = 50 if tiers.is_whole() else 4 if schedule == "auto" else 6
    for seed in range(first, first + most):
        request, planner = drawn_request(seed)
        try:
            plan, read, found = evaluated(request, planner, schedule)
        except PlanInfeasible:
            seen["infeasible"] += 1
            continue
        where = (seed, planner, schedule, [stage.name for stage in plan.stages])
        write_plan(plan, tmp_path / "plan.json")
        assert api.load_plan(tmp_path / "plan.json") == plan, where
        if tiers.is_whole():
            assert api.plan_for(request, planner=planner, schedule=schedule) == plan, where
        assert plan.iteration_us == pytest.approx(found.step_us, rel=1e-3), where
        assert api.simulate(plan, request.cluster).iteration_us == pytest.approx(found.step_us, rel=1e-3), (
            where
        )
        for rank, peak in found.peaks().items():
            most = joined_breakdown([plan.memory[index] for index in plan.stages_of_rank(rank)]).total
            assert peak <= most + len(plan.stages), (*where, rank)
        for index, stage in enumerate(plan.stages) if not plan.shares_ranks else ():
            own = order_by_hand(read, index)
            ran = [task[1:3] for task in found.orders[stage.ranks[0]] if task[3] != 0]
            if is_trained(read, index):
                assert own in (None, ran), where
            else:
                assert ran == [("F", m) for m in range(plan.num_micro_batches(index))], where
        seen["plans"] += 1
        seen["frozen"] += not all(is_trained(read, index) for index in range(len(plan.stages)))
        seen["shared"] += plan.shares_ranks
        seen["several ranks"] += any(stage.degree > 1 for stage in plan.stages)
        seen["fitted"] += any(stage.memory is not None for stage in plan.stages)
        seen["halves"] += any(stage.num_sliced for stage in plan.stages)
    assert seen["plans"] > seen["infeasible"], seen
    if tiers.is_whole():
        assert min(seen[each] for each in ("frozen", "shared", "several ranks")) >= 2, seen
