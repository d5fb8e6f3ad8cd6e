"""Adapters that ranks of a node share, in the simulator and in the costs, and which stages share a node."""

import dataclasses

import pytest

from gpp_plugin.errors import ConfigError
from gpp_plugin.ir.cluster import Cluster, Link
from gpp_plugin.plan.cluster_files import describe_cluster, read_cluster
from gpp_plugin.plan.costs.estimate import estimate_plan_us, evaluate_us
from gpp_plugin.plan.heterogeneous_devices import exchange_stages
from gpp_plugin.plan.make import StageDraft, build_plan
from gpp_plugin.rehearse.rehearsal import programs_of_plan
from gpp_plugin.simulate.predict import simulate_plan, simulate_programs
from tests.plan.graphs import costs_of, make_cluster, make_graph, make_profile, make_request
from tests.schedule.plans import on_ranks

NODE, BYTES_PER_S = 4, 1e9


def machines(num_nodes: int, adapters: int | None) -> Cluster:
    links = (
        Link(name="inner", span=NODE, bytes_per_s=1e15, latency_us=0.0),
        Link(name="outer", span=NODE * num_nodes, bytes_per_s=BYTES_PER_S, latency_us=0.0, adapters=adapters),
    )
    return dataclasses.replace(make_cluster(NODE * num_nodes), name="nodes", links=links)


def two_stages(adapters: int | None, num_bytes: int = 4_000_000):
    """One stage a node, 4 ranks each; every rank sends 1 MB, 1 ms on a link of its own, for each micro-batch."""
    graph = make_graph([("a", "b")], bytes_per_sample=num_bytes // 4)
    profile = make_profile(graph, 10.0)
    asked = make_request(graph, profile, cluster=machines(2, adapters), ranks=8, mini_batch=8, loss_unit=8)
    drafts = [StageDraft(blocks=(name,), degree=4, micro_batch_size=4) for name in "ab"]
    return asked, build_plan(asked, drafts, planner="test")


def test_ports_are_ranks_or_the_adapters_they_share():
    cluster = machines(2, 2)
    inner, outer = cluster.links
    assert [cluster.port(rank, inner) for rank in range(8)] == list(range(8))
    ports = [cluster.port(rank, outer) for rank in range(8)]
    assert ports == [16, 16, 17, 17, 18, 18, 19, 19]
    assert cluster.sharers(range(4), outer) == 2
    assert cluster.sharers((0, 2), outer) == 1
    without = machines(2, None)
    assert without.port(5, without.links[1]) == 5


@pytest.mark.parametrize(("adapters", "ms"), [(None, 1), (4, 1), (2, 2), (1, 4)])
def test_messages_of_a_node_take_turns_on_its_adapters(adapters, ms):
    asked, plan = two_stages(adapters)
    costs = costs_of(asked)
    simulated, quick = evaluate_us(plan, costs), estimate_plan_us(plan, costs)
    programs = simulate_programs(plan, programs_of_plan(plan), cluster=asked.cluster)
    # Two micro-batches there and back, of which computing takes 60 us. Ranks go on one by one as their messages come, so
    # the last message of the first micro-batch passes the first ones of the second; the quick prediction lets the ranks
    # of a stage wait for each other.
    assert simulated == pytest.approx((2 * ms + 1) * 1000 + 60)
    assert programs.iteration_us == pytest.approx(simulated)
    assert quick == pytest.approx(3 * ms * 1000 + 60)


def test_messages_inside_a_node_do_not_meet_on_its_adapters():
    asked, plan = two_stages(1)
    ranks = [(0, 1, 4, 5), (2, 3, 6, 7)]
    inside = simulate_plan(on_ranks(plan, *ranks), cluster=asked.cluster)
    assert inside.iteration_us < 0.05 * simulate_plan(plan, cluster=asked.cluster).iteration_us


def test_stages_with_much_to_tell_each_other_share_a_node():
    # a -> b -> c -> d on nodes of two ranks, only b -> c is large: in order it crosses the border
    graph = make_graph([("a", "b"), ("b", "c"), ("c", "d")], bytes_per_sample=1000)
    large = dataclasses.replace(graph.tensors["b:out"], shape=(1, 1_000_000))
    graph = dataclasses.replace(graph, tensors={**graph.tensors, "b:out": large})
    cluster = machines(2, None)
    links = (dataclasses.replace(cluster.links[0], span=2), dataclasses.replace(cluster.links[1], span=4))
    cluster = dataclasses.replace(cluster, devices=cluster.devices[:4], links=links)
    asked = make_request(graph, make_profile(graph, 1000.0), cluster=cluster, mini_batch=8)
    costs = costs_of(asked)
    drafts = [StageDraft(blocks=(name,), degree=1, micro_batch_size=1) for name in "abcd"]
    plan = build_plan(asked, drafts, planner="test")
    plan = dataclasses.replace(plan, iteration_us=evaluate_us(plan, costs))
    placed = exchange_stages(plan, asked)
    by_name = {stage.name: stage.ranks[0] // 2 for stage in placed.stages}
    names = [stage.name for stage in plan.stages]
    assert by_name[names[1]] == by_name[names[2]]
    assert placed.iteration_us == pytest.approx(evaluate_us(placed, costs))
    assert placed.iteration_us < 0.8 * plan.iteration_us
    assert "another order" in placed.notes[-1]
    # where the order is right nothing is exchanged
    small = dataclasses.replace(
        graph, tensors={**graph.tensors, "b:out": dataclasses.replace(large, shape=(1, 1))}
    )
    asked = dataclasses.replace(asked, graph=small, profile=make_profile(small, 1000.0))
    plan = build_plan(asked, drafts, planner="test")
    assert exchange_stages(plan, asked) is plan


def test_adapters_in_descriptions():
    plain = describe_cluster(machines(2, 2))
    assert plain["links"][1]["adapters"] == 2
    assert read_cluster(plain) == machines(2, 2)
    plain["links"][1]["adapters"] = 5
    with pytest.raises(ConfigError, match=r"links\[1\].adapters is 5; the 4 ranks of the level inside"):
        read_cluster(plain)
