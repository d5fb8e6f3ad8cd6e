"""PipeDream, Piper, DAPPLE: what each must get right, and that all obey the same request."""

import itertools

import pytest

from gpp_plugin.errors import PlanInfeasible
from gpp_plugin.plan.baselines.piper import list_downsets
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.registry import make_plan
from tests.plan.graphs import branches, chain, diamond, make_cluster, make_profile, make_request

ONE_EACH = {"data_parallel": 1, "mini_batch": 64, "micro_batch_sizes": {"*": 1}}


def bottleneck(plan) -> float:
    return max((s.forward_us + s.backward_us) / s.micro_batch_size for s in plan.stages)


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


def test_piper_stages_may_span_branches():
    """Two branches of two blocks and a join on two ranks: any downset can be the first stage."""
    plan = make_plan("piper", make_request(branches(2, 2), ranks=2, **ONE_EACH))
    assert bottleneck(plan) == 300.0 * 3


def test_downsets_of_known_graphs():
    def count(graph):
        found = list_downsets(CostModel(graph, make_profile(graph), make_cluster(1)), 10_000)
        return len(found) if found is not None else None

    assert count(chain(5)) == 6
    assert count(diamond()) == 6  # {}, a, ab, ac, abc, abcd
    assert count(branches(4, 8)) == 9**4 + 1


def test_piper_says_when_it_cannot():
    with pytest.raises(PlanInfeasible, match="cannot plan .* more than 8000 downsets"):
        make_plan("piper", make_request(branches(7, 4), ranks=4))


def test_dapple_prefers_few_stages_when_micro_batches_are_few():
    request = make_request(chain(8), ranks=4, mini_batch=8, micro_batch_sizes={"*": 4})
    plan = make_plan("dapple", request)
    assert plan.num_ranks == 4
    assert len(plan.stages) <= 2


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


@pytest.mark.parametrize("seed", range(4))
def test_auto_is_never_behind_on_a_chain(seed):
    import random

    rng = random.Random(seed)
    graph = chain(rng.randint(5, 9))
    times = {block.name: float(rng.randint(10, 200)) for block in graph.blocks}
    cluster = make_cluster(4, bandwidth=1e7, latency=2.0)
    request = make_request(graph, make_profile(graph, times, parameter=2000), ranks=4, cluster=cluster)
    auto = make_plan("auto", request).iteration_us
    for name in ("uniform", "pipedream", "piper", "dapple", "autopipe", "graphpipe"):
        assert auto <= make_plan(name, request).iteration_us * (1 + 1e-9), name
