"""PipeDream, Piper, DAPPLE: what each must get right, and that all obey the same request."""

import dataclasses
import itertools
import random

import networkx as nx
import pytest

from gpp_plugin.errors import PlanInfeasible
from gpp_plugin.plan.baselines.chain_costs import ChainCosts, as_sequential
from gpp_plugin.plan.baselines.piper import MAX_DOWNSETS, Downsets, best_of, list_downsets, partition_chain
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.costs.estimate import evaluate_us
from gpp_plugin.plan.graphpipe.graphpipe import make_search
from gpp_plugin.plan.graphpipe.intervals import build_series, decompose
from gpp_plugin.plan.make import StageDraft, build_plan
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.plan.request import batch_rules
from tests.plan.graphs import (
    bottleneck,
    branches,
    chain,
    costs_of,
    diamond,
    make_cluster,
    make_graph,
    make_profile,
    make_request,
)

ONE_EACH = {"data_parallel": 1, "mini_batch": 64, "micro_batch_sizes": {"*": 1}}


def test_pipedream_finds_the_smallest_bottleneck_of_a_chain():
    """Against all ways to cut seven unequal blocks on three ranks."""
    graph = chain(7)
    times = dict(zip((b.name for b in graph.blocks), (50.0, 70.0, 20.0, 90.0, 40.0, 10.0, 60.0), strict=True))
    plan = make_plan("pipedream", make_request(graph, make_profile(graph, times), ranks=3, **ONE_EACH))
    values = list(times.values())
    best = min(
        max(sum(values[:a]), sum(values[a:b]), sum(values[b:]))
        for a, b in itertools.combinations(range(1, 7), 2)
    )
    assert bottleneck(plan) == 3 * best


def test_pipedream_counts_the_stash_of_the_stage_itself():
    graph = chain(6)
    profile = make_profile(graph, saved=10.0)
    request = make_request(graph, profile, ranks=2, cluster=make_cluster(2, memory=40), **ONE_EACH)
    assert [len(s.blocks) for s in make_plan("pipedream", request).stages] == [2, 4]


def test_downsets_of_known_graphs():
    def count(graph):
        found = list_downsets(CostModel(graph, make_profile(graph), make_cluster(1)), 10_000)
        return len(found) if found is not None else None

    assert count(chain(5)) == 6
    assert count(diamond()) == 6  # {}, a, ab, ac, abc, abcd
    assert count(branches(4, 8)) == 9**4 + 1


def test_piper_says_when_it_cannot():
    with pytest.raises(PlanInfeasible, match=f"cannot plan .* more than {MAX_DOWNSETS} downsets"):
        make_plan("piper", make_request(branches(7, 4), ranks=4))


LIMITS = {
    "one size": {"micro_batch_sizes": {"*": 4}},
    "no single samples": {"micro_batch_sizes": {"*": 4}, "smallest_local_batch": 2},
    "a stage of its own size": {"micro_batch_sizes": {"layers.2": 8, "*": 4}},
    "samples a rank": {"loss_unit": 2, "keep_units": True},
}


def random_chain_request(seed: int, **changes: object):
    rng = random.Random(seed)
    graph = chain(6)
    graph = dataclasses.replace(
        graph,
        tensors={
            name: dataclasses.replace(spec, shape=(1, rng.randint(1, 400)))
            for name, spec in graph.tensors.items()
        },
    )
    times = {block.name: float(rng.randint(20, 200)) for block in graph.blocks}
    cluster = make_cluster(4, bandwidth=rng.choice([5e6, 2e7, 1e15]))
    profile = make_profile(graph, times, parameter=rng.choice([0, 500]))
    return make_request(graph, profile, ranks=4, cluster=cluster, **changes)


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("seed", range(4))
def test_all_searches_have_the_same_cost_of_a_stage(seed, limits):
    """GraphPipe's table, PipeDream's intervals: computing, reductions, and links divided by the degree."""
    request = random_chain_request(seed, **limits)
    costs, rules = costs_of(request), batch_rules(request)
    wish = rules.wishes[0]
    intervals = ChainCosts(request, costs, rules, wish)
    root = build_series(
        request.graph, costs, rules, decompose(nx.path_graph(len(costs.index), create_using=nx.DiGraph))
    )
    search = make_search(request, costs, rules, root, wish, len(costs.index))
    table = search.tables[id(root)]
    for degree, us in zip(table.degrees, table.us_per_sample, strict=True):
        # columns are ends: the interval [start, stop) is at column stop - 1
        assert us == pytest.approx(intervals.us_per_sample(int(degree))[:-1, 1:], rel=1e-12)


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("seed", range(4))
def test_piper_and_pipedream_agree_on_chains(seed, limits):
    """On a chain downsets are prefixes: with ample memory both search the same stages, at the same costs."""
    request = random_chain_request(seed, **limits)
    costs, rules = costs_of(request), batch_rules(request)
    for wish in rules.wishes:
        intervals = ChainCosts(request, costs, rules, wish)
        times = {d: intervals.us_per_sample(d) for d in rules.degrees}
        pipedream = next(partition_chain(intervals), None)
        downsets = list_downsets(costs, MAX_DOWNSETS)
        piper = best_of(Downsets(request, costs, rules, downsets), wish)
        if pipedream is None:
            assert piper is None
            continue
        us, drafts = piper
        assert us == pytest.approx(max(times[degree][start, stop] for start, stop, degree in pipedream))
        assert sorted(b for d in drafts for b in d.blocks) == sorted(costs.index), "no block is lost"
        assert sum(draft.degree for draft in drafts) == request.num_ranks


@pytest.mark.parametrize("planner", ["pipedream", "piper"])
def test_least_samples_a_rank_are_obeyed(planner):
    """Four ranks on one stage would take one sample each; the quickest chain of what is left is found."""
    request = make_request(
        chain(3), ranks=4, micro_batch_sizes={"*": 4}, smallest_local_batch=2, data_parallel=None
    )
    plan = make_plan(planner, request)
    assert [stage.degree for stage in plan.stages] == [1, 1, 2] or bottleneck(plan) == 300.0
    assert min(stage.local_batch_size for stage in plan.stages) == 2
    assert sorted(name for stage in plan.stages for name in stage.blocks) == [f"layers.{i}" for i in range(3)]


@pytest.mark.parametrize("planner", ["pipedream", "piper"])
def test_memory_is_that_of_the_samples_a_rank_takes(planner):
    """Four samples a rank whatever the degree: one stage on both ranks is quicker, and does not fit."""
    graph = chain(4)
    times = dict(zip((b.name for b in graph.blocks), (100.0, 200.0, 100.0, 100.0), strict=True))
    profile = make_profile(graph, times, saved=10.0, parameter=20)
    request = make_request(
        graph, profile, ranks=2, cluster=make_cluster(2, memory=300), loss_unit=4, keep_units=True
    )
    free = dataclasses.replace(request, cluster=make_cluster(2))
    assert len(make_plan(planner, free).stages) == 1
    assert [len(stage.blocks) for stage in make_plan(planner, request).stages] == [2, 2]


@pytest.mark.parametrize("planner", ["autopipe", "pipedream", "piper", "uniform"])
def test_more_ranks_than_samples_of_a_rank(planner):
    """Four samples a rank on eight ranks: all in one stage, 32 at a time, is the quickest of all chains."""
    request = make_request(chain(8), ranks=8, mini_batch=64, loss_unit=4, keep_units=True)
    (stage,) = make_plan(planner, request).stages
    assert (stage.degree, stage.micro_batch_size) == (8, 32)


def test_waiting_for_the_stage_before_takes_no_message():
    """Two blocks without an edge, run as a chain: (2 + 1) x 300 us, whatever the latency."""
    graph = make_graph([], names=["a", "b"])
    request = make_request(graph, ranks=2, mini_batch=2, cluster=make_cluster(2, latency=1e4))
    costs = CostModel(graph, request.profile, request.cluster)
    drafts = [StageDraft(blocks=(name,), degree=1, micro_batch_size=1) for name in ("a", "b")]
    plan = build_plan(request, drafts, planner="", costs=costs)
    assert evaluate_us(plan, costs) == 600.0
    assert evaluate_us(as_sequential(plan, costs), costs) == 900.0


@pytest.mark.parametrize(
    "planner", ["uniform", "pipedream", "piper", "dapple", "autopipe", "graphpipe", "auto"]
)
@pytest.mark.parametrize("graph", [chain(8), branches(2, 3), diamond()], ids=["chain", "branches", "diamond"])
def test_every_planner_passes_the_evaluator(planner, graph):
    """`make_plan` validates: memory tight, links slow, degrees open."""
    profile = make_profile(graph, saved=20.0, parameter=100)
    cluster = make_cluster(4, memory=3000, bandwidth=1e7, latency=5.0)
    plan = make_plan(planner, make_request(graph, profile, ranks=4, cluster=cluster))
    assert plan.planner == planner
    assert plan.iteration_us > 0
