"""The searches against brute force, on a small sample (all of it: gpp bench plan-quality)."""

import dataclasses
import random

import pytest

from gpp_benchmarks._oracle import (
    bottleneck_us,
    placed_series_parallel,
    random_request,
    random_series_parallel,
    without_communication,
)
from gpp_benchmarks.plan_quality import check_auto, check_series_parallel, search_bottleneck
from gpp_plugin.plan.request import PlanRequest


@pytest.mark.parametrize("seed", range(40))
def test_the_dp_equals_brute_force_over_series_parallel_plans(seed):
    assert check_series_parallel(seed)["is_equal"]


def uneven(rng: random.Random) -> PlanRequest:
    """Return a request whose blocks differ in every number that the oracle knows, and links that cost nothing."""
    graph = random_series_parallel(rng, rng.randint(3, 6))
    request = random_request(rng, graph, ranks=rng.randint(2, 4), is_tight=False)
    costs = tuple(
        dataclasses.replace(
            cost,
            backward_us=(cost.forward_us[0] * rng.choice([0.5, 1.0, 3.0]),),
            saved_bytes_fixed=float(rng.randint(0, 200)),
            optimizer_bytes=rng.randint(0, 900),
            transient_bytes_per_sample=float(rng.randint(0, 300)),
        )
        for cost in request.profile.costs
    )
    profile = dataclasses.replace(request.profile, costs=costs)
    return without_communication(dataclasses.replace(request, profile=profile))


@pytest.mark.parametrize("seed", range(10))
def test_the_dp_at_each_limit_of_memory_where_another_plan_begins_to_fit(seed):
    """At the limit it finds that plan, and with a byte less it does not: so every level counts what it holds."""
    request = uneven(random.Random(seed))
    plans = sorted(
        (max(stage.memory_bytes for stage in plan.stages), bottleneck_us(plan.stages))
        for plan in placed_series_parallel(request)
    )
    best, front = float("inf"), []
    for need, us in plans:
        if us < best * (1 - 1e-9):
            front.append((need, us, best))
            best = us
    for need, us, before in [front[0], *random.Random(seed).sample(front, min(3, len(front)))]:
        assert search_bottleneck(dataclasses.replace(request, memory_limit_bytes=need)) == pytest.approx(us)
        found = search_bottleneck(dataclasses.replace(request, memory_limit_bytes=need - 1))
        assert (float("inf") if found is None else found) == pytest.approx(before)


@pytest.mark.parametrize("seed", range(10))
def test_auto_equals_brute_force_over_all_partitions(seed):
    row = check_auto(seed)
    assert (row["us"] is None) == (row["best_us"] is None)
    if row["us"] is not None:
        assert row["us"] <= row["best_us"] * (1 + 1e-6)
