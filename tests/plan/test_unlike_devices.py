"""Clusters of unlike devices: what stages take on them, and plans beside the best of all partitions."""

import dataclasses
import itertools
import random

import pytest

from gpp_plugin import api
from gpp_plugin.ir.block_graph import Block
from gpp_plugin.ir.cluster import Cluster, Device, Link
from gpp_plugin.ir.serialize import fingerprint
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.heterogeneous_devices import ranked_partitions
from gpp_plugin.plan.make import StageDraft, build_plan
from gpp_plugin.plan.memory.fitting import fitter_for
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.plan.request import PlanRequest, batch_rules
from tests.plan.graphs import costs_of, make_graph, make_profile, make_request

CHAIN = [(f"b{i}", f"b{i + 1}") for i in range(5)]


def device(speed: float, memory: int = 1 << 40) -> Device:
    return Device(
        name=f"x{speed:g}",
        memory_bytes=memory,
        flops_per_s=speed * 1e12,
        memory_bytes_per_s=1e12,
        efficiency=1.0,
    )


def cluster(*speeds: float) -> Cluster:
    link = Link(name="link", span=len(speeds), bytes_per_s=1e12, latency_us=0.5)
    return Cluster(name="mixed", devices=tuple(map(device, speeds)), links=(link,))


def request(edges, times, machines: Cluster, **changes) -> PlanRequest:
    graph = make_graph(edges)
    profile = make_profile(graph, times, parameter=1000)
    values = {"cluster": machines, "ranks": machines.num_devices, "mini_batch": 8}
    return make_request(graph, profile, **{**values, **changes})


def test_four_quick_and_four_slow_devices_share_work_by_speed():
    # 4 H100 and 4 A100 were planned as 8 H100 and lost 1.47 times: here 24 equal blocks, speeds 2.6 and 1
    chain = [(f"b{i}", f"b{i + 1}") for i in range(23)]
    machines = cluster(2.6, 2.6, 2.6, 2.6, 1.0, 1.0, 1.0, 1.0)
    asked = request(chain, 100.0, machines, mini_batch=64)
    plan = make_plan("auto", asked)
    work = 64 * 24 * 300.0
    perfect = work / (4 + 4 / 2.6)
    assert plan.iteration_us < 1.15 * perfect
    kinds = [{machines.devices[rank].name for rank in stage.ranks} for stage in plan.stages]
    assert all(len(kind) == 1 for kind in kinds)
    assert "devices of several speeds" in plan.notes[-1]


def test_a_stage_takes_what_its_slowest_rank_takes():
    asked = request(CHAIN, 100.0, cluster(2.0, 1.0))
    costs = costs_of(asked)
    assert costs.stage_times((0, 1), 1, (0,)) == pytest.approx((200.0, 400.0))
    assert costs.stage_times((0, 1), 1, (1,)) == pytest.approx((400.0, 800.0))
    assert costs.stage_times((0, 1), 1, (0, 1)) == pytest.approx((400.0, 800.0))
    assert costs.stage_times((0, 1), 1) == pytest.approx((200.0, 400.0)), "no ranks: the quickest"
    slow_first = request(CHAIN, 100.0, cluster(1.0, 2.0))
    costs = CostModel(slow_first.graph, slow_first.profile, slow_first.cluster)
    assert costs.stage_times((0, 1), 1, (1,)) == pytest.approx((100.0, 200.0)), "the profile is of the first"


def test_blocks_that_move_bytes_differ_by_bandwidth():
    quick = dataclasses.replace(device(8.0), memory_bytes_per_s=2e12, launch_us=0.0)
    slow = dataclasses.replace(device(1.0), launch_us=0.0)
    graph = make_graph([("product", "softmax")])
    blocks = (
        Block(name="product", flops=1e12, parameter_bytes=1000),
        Block(name="softmax", flops=1e3, saved_bytes=10**9),
    )
    graph = dataclasses.replace(graph, blocks=blocks)
    machines = Cluster(name="two", devices=(quick, slow), links=cluster(1, 1).links)
    costs = CostModel(graph, make_profile(graph, 100.0), machines)
    assert costs.stage_times((0,), 1, (1,))[0] == pytest.approx(800.0)
    assert costs.stage_times((1,), 1, (1,))[0] == pytest.approx(200.0, rel=1e-3)


def test_linear_partitions_are_exact():
    """The recurrence's bottleneck against all contiguous partitions on consecutive ranks."""
    rng = random.Random(0)
    times = {f"b{i}": rng.uniform(10, 100) for i in range(6)}
    asked = request(CHAIN, times, cluster(2.0, 2.0, 1.0), mini_batch=4, micro_batch_sizes={"*": 4})
    costs = costs_of(asked)
    for groups, wish in ranked_partitions(asked, costs, batch_rules(asked)):
        found = best_of_ranks(asked, costs, groups, wish)
        others = [
            best_of_ranks(asked, costs, other, wish)
            for cuts in itertools.combinations(range(1, 6), len(groups) - 1)
            for other in [[list(times)[a:b] for a, b in itertools.pairwise([0, *cuts, 6])]]
        ]
        assert found == pytest.approx(min(others))


def best_of_ranks(asked, costs, groups, size) -> float:
    best = float("inf")
    for cuts in itertools.combinations(range(1, 3), len(groups) - 1):
        bounds = [0, *cuts, 3]
        spans = [range(a, b) for a, b in itertools.pairwise(bounds)]
        if all(size % len(span) == 0 for span in spans):
            us = [
                sum(costs.stage_times(costs.indices(group), size / len(span), tuple(span))) / size
                for group, span in zip(groups, spans, strict=True)
            ]
            best = min(best, max(us))
    return best


def test_memory_of_unlike_devices_is_that_of_their_ranks():
    # the quick devices are small: what does not fit there goes to the slow ones
    machines = Cluster(
        name="mixed",
        devices=(device(2.0, 2500), device(2.0, 2500), device(1.0, 10_000), device(1.0, 10_000)),
        links=cluster(1, 1, 1, 1).links,
    )
    asked = request(CHAIN, 100.0, machines)
    plan = make_plan("auto", asked)
    for stage in plan.stages:
        assert stage.memory_bytes <= min(machines.devices[rank].memory_bytes for rank in stage.ranks)
    assert plan.graph == fingerprint(asked.graph)


def test_running_again_takes_longer_on_slower_devices():
    sizes = {"branches": 2, "layers": 3}
    asked = api.make_request("mmt", "h100_a100", sizes=sizes, num_devices=8, memory=("recompute",))
    costs = costs_of(asked)
    fitter = fitter_for(asked, costs)
    assert fitter is not None
    whole = StageDraft(blocks=tuple(b.name for b in asked.graph.blocks), degree=4, micro_batch_size=64)
    fitted = {}
    for ranks in ((0, 1, 2, 3), (4, 5, 6, 7)):
        plan = build_plan(asked, [dataclasses.replace(whole, ranks=ranks)], planner="", costs=costs)
        (stage,) = plan.stages
        tight = dataclasses.replace(asked, memory_limit_bytes=int(0.9 * stage.memory_bytes))
        (fitted[ranks],) = fitter_for(tight, costs).fitted(plan).stages
    quick, slow = fitted.values()
    assert quick.memory.recompute_us > 0
    ratio = slow.forward_us / quick.forward_us
    assert ratio > 1.5
    assert slow.memory.recompute_us == pytest.approx(ratio * quick.memory.recompute_us)
