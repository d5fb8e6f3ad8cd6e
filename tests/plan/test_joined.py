"""Joined planning: against brute force, against planning without, and against optimizing a finished plan."""

from __future__ import annotations

import dataclasses
import random
import re

import networkx as nx
import pytest

from gpp_benchmarks._memory_oracle import StageOracle, with_saved_tensors
from gpp_benchmarks._oracle import random_dag, random_request
from gpp_benchmarks._paper import paper_request
from gpp_benchmarks.plan_quality import check_joined
from gpp_plugin.errors import PlanError, PlanInfeasible
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.serialize import dumps, loads
from gpp_plugin.plan.choose_schedule import schedule_plan
from gpp_plugin.plan.memory.fitting import StageFitter
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.plan.request import PlanRequest
from tests.plan.graphs import costs_of

BOTH = ("recompute", "swap")


def tight(seed: int, *, ways: tuple[str, ...] = BOTH, num: int = 6, ranks: int = 3) -> PlanRequest:
    rng = random.Random(seed)
    graph = random_dag(rng, num) if seed % 2 else nx.path_graph(num, create_using=nx.DiGraph)
    request = random_request(rng, graph, ranks=ranks, is_tight=False)
    request = with_saved_tensors(rng, request, tightness=rng.uniform(0.6, 1.5))
    return dataclasses.replace(request, memory_optimization=ways)


@pytest.mark.parametrize("seed", [1, 2, 3, 6, 14, 19, 21, 25, 28, 32, 36])
def test_joined_plans_are_near_brute_force_and_never_behind_the_others(seed: int) -> None:
    row = check_joined(seed)
    assert row["us"] is not None and row["best_us"] is not None
    assert not row["is_behind"]
    assert row["us"] <= 1.05 * row["best_us"]


@pytest.mark.parametrize("seed", [2, 14])
def test_auto_plans_jointly_too(seed: int) -> None:
    row = check_joined(seed, "auto")
    assert row["plain_us"] is not None and row["us"] < row["plain_us"]
    assert row["us"] <= 1.05 * row["best_us"]


@pytest.mark.parametrize("planner", ["graphpipe", "auto"])
@pytest.mark.parametrize("model", ["mmt", "candle_uno"])
def test_ample_memory_changes_nothing(model: str, planner: str) -> None:
    request = paper_request(model, 4)
    device = dataclasses.replace(request.cluster.devices[0], memory_bytes=80 * 10**9)
    cluster = dataclasses.replace(request.cluster, devices=(device,) * 4)
    request = dataclasses.replace(request, cluster=cluster)
    plan = make_plan(planner, request)
    assert make_plan(planner, dataclasses.replace(request, memory_optimization=BOTH)) == plan
    assert all(stage.memory is None for stage in plan.stages)


@pytest.mark.parametrize("ways", [("recompute",), ("swap",), BOTH])
def test_plans_say_what_makes_them_fit_and_what_it_costs(ways: tuple[str, ...]) -> None:
    """Times and bytes are those of an evaluator that shares no code; the schedule stays as planned."""
    checked = 0
    for seed in range(8):
        request = tight(seed, ways=ways)
        try:
            plan = make_plan("graphpipe", request)
        except PlanInfeasible:
            continue
        costs = costs_of(request)
        for stage in plan.stages:
            assert stage.memory_bytes <= request.rank_limits[stage.ranks[0]]
            forward, backward = costs.stage_times(costs.indices(stage.blocks), stage.local_batch_size)
            if stage.memory is None:
                assert (stage.forward_us, stage.backward_us) == (forward, backward)
                continue
            assert bool(stage.memory.swapped) <= ("swap" in ways)
            assert bool(stage.memory.recomputed) <= ("recompute" in ways)
            plain = costs.stage_memory(
                costs.indices(stage.blocks), degree=stage.degree, local=stage.local_batch_size,
                in_flight=stage.in_flight,
            )  # fmt: skip
            host = request.cluster.devices[0].host_bytes_per_s
            oracle = StageOracle(stage, request.graph, request.profile, host, plain)
            segments = [
                (stage.blocks.index(s.blocks[0]), stage.blocks.index(s.blocks[-1]) + 1)
                for s in stage.memory.recomputed
            ]
            fit = oracle.weigh(segments, [t.name for t in stage.memory.swapped])
            assert fit.memory_bytes == pytest.approx(stage.memory_bytes, abs=1)
            # The last block of a segment need not run again where it keeps nothing of its own.
            assert stage.backward_us - backward <= fit.added_us * (1 + 1e-9)
            assert stage.backward_us - backward >= fit.added_us - max(oracle.forward) * len(segments) - 1e-6
            checked += 1
        assert schedule_plan(plan, request).stages == plan.stages or all(
            s.memory is None for s in plan.stages
        )
        assert loads(PipelinePlan, dumps(plan)) == plan
    assert checked >= 3


@pytest.mark.parametrize("ways", [("recompute",), BOTH])
def test_estimates_can_be_had(ways: tuple[str, ...]) -> None:
    """Where a search takes a stage to fit it does, and by recomputing alone at no more than was thought."""
    checked = 0
    for seed in range(20):
        request = tight(seed, num=5, ranks=2, ways=ways)
        costs = costs_of(request)
        fitter = StageFitter(request, costs)
        rows = tuple(sorted(random.Random(seed).sample(range(5), 3)))
        plain = costs.stage_memory(rows, degree=1, local=4, in_flight=3)
        for share in (0.6, 0.8, 0.95):
            place = {"degree": 1, "local": 4, "in_flight": 3, "limit": int(plain * share)}
            excess, us = fitter.estimate(rows, **place)
            choice = fitter.choose(rows, **place)
            if excess == 0:
                assert choice.excess_bytes == 0 and choice.memory is not None
                assert "swap" in ways or choice.memory.added_us <= us * (1 + 1e-9)
                checked += 1
    assert checked >= 20


def test_what_fits_nowhere_is_told_the_bytes_and_what_would_fit() -> None:
    """The limit that is named has a plan, and one that is clearly smaller has none."""
    request = tight(12, num=4, ranks=2)
    for planner in ("graphpipe", "auto"):
        with pytest.raises(PlanInfeasible) as caught:
            make_plan(planner, dataclasses.replace(request, memory_limit_bytes=700))
        said = str(caught.value)
        assert "\n" not in said
        found = re.search(
            r"needs (\d+) bytes and rank \d+ may use 700 \((\d+) too many.* (\d+) bytes a rank", said
        )
        assert found is not None, said
        need, missing, limit = map(int, found.groups())
        assert need - 700 == missing
        assert make_plan(planner, dataclasses.replace(request, memory_limit_bytes=limit)).stages
        with pytest.raises(PlanInfeasible):
            make_plan(planner, dataclasses.replace(request, memory_limit_bytes=(700 + limit) // 2))


def test_asynchronous_plans_are_fitted_beside_their_stashed_weights() -> None:
    """Weights of every micro-batch in flight stay; what is swapped and recomputed makes room for them."""
    fitted = 0
    for seed in range(8):
        request = dataclasses.replace(tight(seed, ranks=2), mode="async")
        try:
            plan = make_plan("graphpipe", request)
        except (PlanError, PlanInfeasible):
            continue
        assert plan.mode == "async"
        fitted += any(stage.memory is not None for stage in plan.stages)
    assert fitted >= 2
