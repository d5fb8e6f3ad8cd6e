"""DawnPiper's planner against the plain dynamic program, and its plans against the evaluator."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random

import pytest

from gpp_plugin.errors import PlanError, PlanInfeasible
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.serialize import dumps, fingerprint, loads
from gpp_plugin.plan.explicit_plan import explicit_plan
from gpp_plugin.plan.memory.dawnpiper import (
    BinaryPartition,
    allowed_cuts,
    cut_interval,
    memory_balanced_cuts,
    partition_chain,
)
from gpp_plugin.plan.memory.fitting import StageFitter
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.plan.validate_plan import validate_plan
from tests.plan.graphs import costs_of, make_cluster, make_request, with_stage
from tests.plan.operator_chains import best_partition, factory, operator_chain, random_chain

HUGE = 1 << 60
BOTH = ("recompute", "swap")


def test_the_known_example_where_the_papers_algorithm_is_not_optimal():
    """ALGORITHMS: times 1, 3, 1, 2, 3 on four stages; literal BiPar 4, exact 3."""
    graph, profile = operator_chain([1.0, 3.0, 1.0, 2.0, 3.0])
    plan = partition_chain(factory(graph, profile, [HUGE] * 4).at(1, 4))
    assert plan.key == (0, 3)
    assert plan.cuts == (0, 1, 2, 4, 5)


@pytest.mark.parametrize("num_stages", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("ways", [(), ("recompute",), BOTH])
def test_cuts_are_those_of_the_dynamic_program(num_stages, mode, ways):
    """Random chains, ample to tight memory; the same costs of stages on both sides."""
    for seed in range(12):
        rng = random.Random(seed)
        num = rng.randint(num_stages, 20)
        graph, profile = random_chain(rng, num)
        cluster = make_cluster(num_stages, host=rng.choice([1e6, 1e7, 1e8]))
        need = sum(c.saved_bytes_per_sample * num_stages + 2 * c.parameter_bytes for c in profile.costs)
        limit = int(need / num_stages * rng.choice([0.4, 0.7, 1.2, 3.0])) + 1
        optimizer = factory(
            graph, profile, [limit] * num_stages, cluster, mode=mode, memory_optimization=ways
        ).at(1, 4)  # fmt: skip
        key, cuts = BinaryPartition(optimizer, range(num + 1)).bi_partition(0, num, 0, num_stages - 1)
        exact = best_partition(num, num_stages, optimizer.estimate)
        assert len(cuts) == num_stages - 1 and list(cuts) == sorted(set(cuts))
        if exact[0] <= 0:
            assert key == pytest.approx(exact)
        else:
            assert key[0] > 0


def test_long_chains_are_cut_by_bisection_as_well_as_by_trying_all():
    rng = random.Random(5)
    times = [rng.randint(1, 9) for _ in range(150)]
    graph, profile = operator_chain(times, saved=[rng.randint(0, 50) for _ in times], parameters=3)
    need = sum(c.saved_bytes_per_sample for c in profile.costs)
    for limit in (HUGE, int(0.8 * need), int(0.7 * need)):
        optimizer = factory(graph, profile, [limit] * 4, mode="async").at(1, 4)
        key, _ = BinaryPartition(optimizer, range(151)).bi_partition(0, 150, 0, 3)
        assert key == pytest.approx(best_partition(150, 4, optimizer.estimate))


def tight_request(*, parameters: int = 20, **changes: object) -> PlanRequest:
    rng = random.Random(1)
    graph, profile = operator_chain(
        [rng.randint(50, 150) for _ in range(40)],
        saved=1000,
        parameters=parameters,
        backward_ratio=2.0,
        output=400,
    )
    cluster = make_cluster(4, memory=15_000, host=2e6)
    values: dict[str, object] = {"cluster": cluster, "micro_batch_sizes": {"*": 1}, "mini_batch": 8}
    return make_request(graph, profile, ranks=4, **{**values, **changes})


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("ways", [("recompute",), ("swap",), BOTH])
def test_plans_carry_what_makes_them_fit_and_pass_the_evaluator(mode, ways):
    """`make_plan` validates: bytes recomputed from the plan's own lists."""
    with pytest.raises(PlanInfeasible, match="it fits with memory.recompute"):
        make_plan("dawnpiper", tight_request(mode=mode))
    plan = make_plan("dawnpiper", tight_request(mode=mode, memory_optimization=ways))
    assert plan.mode == mode and len(plan.stages) == 4
    assert any(stage.memory is not None for stage in plan.stages)
    for stage in plan.stages:
        assert stage.memory_bytes <= 15_000
        if stage.memory is not None:
            assert bool(stage.memory.swapped) <= ("swap" in ways)
            assert bool(stage.memory.recomputed) <= ("recompute" in ways)
    assert loads(PipelinePlan, dumps(plan)) == plan


def test_what_swapping_adds_is_the_time_of_the_slowest_link_to_the_host():
    """10 blocks of 1,000 bytes, 4 in flight: what a link of 2 MB/s, 2 bytes a microsecond, cannot hide, it adds."""
    asked = tight_request(memory_optimization=("swap",))
    added = []
    for rate in (1e6, 2e6, 1e12):
        slow = dataclasses.replace(asked.cluster.devices[2], host_bytes_per_s=rate)
        devices = (*asked.cluster.devices[:2], slow, asked.cluster.devices[3])
        request = dataclasses.replace(asked, cluster=dataclasses.replace(asked.cluster, devices=devices))
        fitter = StageFitter(request, costs_of(request))
        assert fitter.host.bytes_per_us == min(rate, 2e6) / 1e6
        added.append(fitter.estimate(tuple(range(10)), degree=1, local=1.0, in_flight=4, limit=15_000))
    assert added[0][0] == added[1][0] == 0.0, "all can leave"
    assert added[0][1] > added[1][1] == added[2][1] > 0.0


def test_a_plan_that_says_otherwise_is_refused():
    request = tight_request(memory_optimization=BOTH)
    plan = make_plan("dawnpiper", request)
    index = next(i for i, s in enumerate(plan.stages) if s.memory is not None and s.memory.swapped)
    stage = plan.stages[index]
    assert stage.memory is not None
    for memory, message in (
        (dataclasses.replace(stage.memory, swapped=stage.memory.swapped * 2), "twice"),
        (dataclasses.replace(stage.memory, swapped=()), "bytes too many"),
    ):
        changed = with_stage(plan, index, memory=memory)
        with pytest.raises(PlanError, match=message):
            validate_plan(changed, request.graph, profile=request.profile, cluster=request.cluster)


def test_what_fits_nowhere_is_told_the_bytes_and_the_nearest_that_fits():
    request = tight_request(memory_optimization=BOTH, parameters=1000)
    with pytest.raises(
        PlanInfeasible, match=r"stage 0 \d+ of 15000 \(\d+ too many\).*it fits on 7 ranks in 7 stages"
    ):
        make_plan("dawnpiper", request)


def test_a_saved_plan_is_refused_where_the_run_does_less():
    """A run that neither swaps nor recomputes, or is synchronous, must not take it silently."""
    request = tight_request(memory_optimization=BOTH)
    spec = json.loads(dumps(make_plan("dawnpiper", request)))
    assert explicit_plan(spec, request).planner == "dawnpiper"
    with pytest.raises(PlanError, match="needs (swap|recompute), which this run does not do"):
        explicit_plan(spec, dataclasses.replace(request, memory_optimization=()))
    with pytest.raises(PlanError, match="made for mode sync, and the run is async"):
        explicit_plan(spec, dataclasses.replace(request, mode="async"))


def optimizer_of(num: int, stages: int, **options: object):
    graph, profile = operator_chain([1.0] * num, saved=100.0)
    return factory(graph, profile, [10**6] * stages, **options).at(1, stages)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_memory_balance_is_exact(mode):
    for seed in range(10):
        graph, profile = random_chain(random.Random(seed), 11)
        o = factory(graph, profile, [10**6] * 3, mode=mode).at(1, 3)

        def worst(cuts: tuple[int, ...]) -> float:
            pairs = itertools.pairwise((0, *cuts, 11))
            return max(o.chain.memory_bytes(a, b, s, o.shape) for s, (a, b) in enumerate(pairs))  # noqa: B023

        best = min(worst(cuts) for cuts in itertools.combinations(range(1, 11), 2))
        found = tuple(memory_balanced_cuts(o.chain, o.shape, 0, 11, range(3)))
        assert worst(found) == pytest.approx(best, rel=1e-3)


def test_the_interval_lies_between_both_and_leaves_every_stage_an_operator():
    o = optimizer_of(25, 4, mode="async")
    low, high = cut_interval(o.chain, o.shape, 0, 25, 0, 3)
    assert (low, high) == (7 - 2, 13 + 2)
    assert cut_interval(o.chain, o.shape, 0, 4, 0, 3) == (2, 2)


def test_cuts_that_send_much_are_left_out_unless_all_near_by_do():
    graph, profile = operator_chain([10.0] * 20, output=40)
    tensors = {
        name: spec if i % 2 else type(spec)(
            name=spec.name, dtype=spec.dtype, shape=(1, 10_000), num_samples=1, layout=spec.layout
        )
        for i, (name, spec) in enumerate(graph.tensors.items())
    }  # fmt: skip
    graph = dataclasses.replace(graph, tensors=tensors)
    profile = dataclasses.replace(profile, graph=fingerprint(graph))
    slow = factory(graph, profile, [10**9] * 4, make_cluster(4, bandwidth=1e8)).at(1, 4)
    assert allowed_cuts(slow.chain, slow.shape).tolist() == [0, *range(2, 20, 2), 20]
    quick = factory(graph, profile, [10**9] * 4, make_cluster(4, bandwidth=1e12)).at(1, 4)
    assert allowed_cuts(quick.chain, quick.shape).tolist() == list(range(21))
