"""GraphPipe's partitioner against closed forms and the cases of the papers."""

import dataclasses
import random

import networkx as nx
import numpy as np
import pytest

from gpp_benchmarks._oracle import random_request, random_series_parallel
from gpp_benchmarks.plan_quality import search_bottleneck
from gpp_plugin.plan.baselines.chain_costs import as_sequential
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.costs.estimate import estimate_plan_us, evaluate_us
from gpp_plugin.plan.graphpipe.graphpipe import make_search
from gpp_plugin.plan.graphpipe.intervals import build_series, decompose
from gpp_plugin.plan.graphpipe.stage_search import StageSearch, read_groups
from gpp_plugin.plan.graphpipe.stage_table import InTime, StageTable
from gpp_plugin.plan.make import StageDraft, build_plan
from gpp_plugin.plan.refine.refine import Refiner
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.plan.request import batch_rules
from gpp_plugin.schedule.build import plan_in_flight
from gpp_plugin.simulate.predict import simulate_plan
from tests.plan.graphs import (
    bottleneck,
    branches,
    chain,
    clip,
    costs_of,
    encoder_decoder,
    make_cluster,
    make_graph,
    make_profile,
    make_request,
)

FREE = {"loss_unit": 1, "data_parallel": 1, "mini_batch": 64, "micro_batch_sizes": {"*": 1}}


@pytest.mark.parametrize(("num", "length"), [(2, 3), (3, 2), (4, 4), (7, 2)])
def test_equal_branches_without_join_match_the_closed_form(num, length):
    """n branches of k unit blocks: nk devices give t = 1 and depth k, n devices t = k and depth 1."""
    graph = branches(num, length, join=None)
    wide = make_plan("graphpipe", make_request(graph, ranks=num * length, **FREE))
    assert (bottleneck(wide), wide.depth) == (300.0, length)
    narrow = make_plan("graphpipe", make_request(graph, ranks=num, **FREE))
    assert (bottleneck(narrow), narrow.depth) == (300.0 * length, 1)


def two_branch():
    """GraphPipe, section 7.5: 4 x (attention, linear, linear) a branch and a light concatenation."""
    edges, names, times = [], [], {}
    for b in "ab":
        path = [f"{b}.{i}.{kind}" for i in range(4) for kind in ("attention", "linear1", "linear2")]
        names += path
        edges += [*zip(path, path[1:], strict=False), (path[-1], "concat")]
        times.update(dict.fromkeys(path, 1.0))
    times["concat"] = 0.018
    graph = make_graph(edges, names=names)
    return graph, make_profile(graph, times, backward_ratio=0.0)


def test_case_study_of_the_paper():
    """One branch's last stage owns the join: bottleneck 3.018 at depth 5; the linear plan has depth 8."""
    graph, profile = two_branch()
    plan = make_plan("graphpipe", make_request(graph, profile, ranks=8, **FREE))
    assert bottleneck(plan) == pytest.approx(3.018)
    assert (len(plan.stages), plan.depth) == (8, 5)
    assert [s.in_flight for s in plan.stages if s.name == "b.3" or "concat" in s.blocks] == [1]
    linear = make_plan("uniform", make_request(graph, profile, ranks=8, num_stages=8, **FREE))
    costs = CostModel(graph, profile, make_cluster(8))
    chained = as_sequential(linear, costs)
    assert (linear.depth, chained.depth) == (5, 8)  # the stages' real dependencies are not a chain
    assert max(s.in_flight for s in chained.stages) == 8
    assert estimate_plan_us(chained, costs) > linear.iteration_us > plan.iteration_us * 0.999


def test_full_batch_loss_takes_one_micro_batch():
    request = make_request(clip(), ranks=4, loss_unit=16, micro_batch_sizes={"loss": 16}, num_stages=3)
    plan = make_plan("graphpipe", request)
    loss = plan.stages[plan.stage_index("loss")]
    assert (loss.micro_batch_size, loss.degree, loss.in_flight) == (16, 1, 1)
    assert all(plan.num_micro_batches(i) > 1 for i in range(3) if i not in plan.loss_stages())


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize(
    "graph", [clip(), encoder_decoder(), branches(7, 2), chain(6)], ids=["clip", "t5", "seven", "chain"]
)
def test_the_number_of_stages_asked_for_uses_all_ranks(graph, stages):
    plan = make_plan("graphpipe", make_request(graph, ranks=4, num_stages=stages))
    assert len(plan.stages) == stages
    assert plan.num_ranks == 4
    if stages == 2:
        equal = make_plan("graphpipe", make_request(graph, ranks=4, num_stages=2, data_parallel=2))
        assert {s.degree for s in equal.stages} == {2}


def test_the_deepest_level_at_which_any_stage_fits():
    """Three blocks hold three micro-batches of 10 bytes at most: a byte less, and the first stage is at level 2."""
    for memory, us in ((30, 300.0), (29, 600.0)):
        profile = make_profile(chain(3), saved=10.0)
        request = make_request(chain(3), profile, ranks=3, cluster=make_cluster(3, memory=memory), **FREE)
        assert search_bottleneck(request) == pytest.approx(us)


def test_the_stage_that_needs_most_gets_the_device_that_has_most():
    """The first stage holds two micro-batches: it goes to the larger device, which is rank 1."""
    graph = chain(6)
    profile = make_profile(graph, saved=10.0)
    cluster = make_cluster(2, memory=(40, 60))
    plan = make_plan("graphpipe", make_request(graph, profile, ranks=2, cluster=cluster, **FREE))
    assert [(s.ranks, s.memory_bytes) for s in plan.stages] == [((1,), 60), ((0,), 30)]


def test_the_worked_example_of_the_recursion():
    """Blocks of 8 and 12 us a sample, 8 us a sample allowed: the tables in the docstring of `stage_search`."""
    graph = chain(2)
    first, second = (block.name for block in graph.blocks)
    profile = make_profile(graph, {first: 8.0 / 3, second: 4.0})
    request = make_request(graph, profile, ranks=4, mini_batch=16, loss_unit=1, micro_batch_sizes={"*": 4})
    link = dataclasses.replace(request.cluster.links[0], bytes_per_s=1e30)
    request = dataclasses.replace(request, cluster=dataclasses.replace(request.cluster, links=(link,)))
    costs, rules = CostModel(graph, profile, request.cluster), batch_rules(request)
    assert rules.degrees == [1, 2, 4]
    root = build_series(graph, costs, rules, decompose(nx.DiGraph([(0, 1)])))
    search = make_search(request, costs, rules, root, 4, 2)
    inf = float("inf")
    assert search.fewest_devices(8.0).tolist() == [inf, 4, 3]
    fewest = search.solved[id(root)].fewest[0, 0]  # [level, place]
    assert fewest.T.tolist() == [[inf, 4, 3], [inf, 2, 2], [0, 0, 0]]
    assert read_groups(search, 2) == [(0,), (1,)] and read_groups(search, 1) == [(0, 1)]


def test_more_micro_batches_in_flight_hide_slow_messages():
    """A round trip of 200 us between stages of 300: with Table 2's two in flight the third stage takes one in 400."""
    graph = chain(4)
    machines = make_cluster(4, latency=100.0)
    request = make_request(graph, ranks=4, cluster=machines, num_stages=4, **{**FREE, "mini_batch": 32})
    plan = make_plan("graphpipe", request)
    asked = plan_in_flight(plan)
    stages = tuple(
        dataclasses.replace(stage, in_flight=count) for stage, count in zip(plan.stages, asked, strict=True)
    )
    assert asked == (4, 3, 2, 1) and stages != plan.stages
    costs = CostModel(graph, request.profile, machines)
    assert plan.iteration_us < 0.85 * evaluate_us(dataclasses.replace(plan, stages=stages), costs)


@pytest.mark.parametrize("cuts", [(1, 8), (4, 5)])
def test_stages_are_evened_out_across_plateaus(cuts):
    """From 1 7 1 or 4 1 4 blocks to 3 3 3, though a move from one of two stages of 4 leaves the other."""
    request = make_request(chain(9), ranks=3, num_stages=3, **FREE)
    costs = costs_of(request)
    refiner = Refiner(request, costs, batch_rules(request), budget=1000)
    names = [block.name for block in request.graph.blocks]
    start = refiner.candidate([names[: cuts[0]], names[cuts[0] : cuts[1]], names[cuts[1] :]], 1)
    found = refiner.balance(start)
    assert [len(draft.blocks) for draft in found.drafts] == [3, 3, 3] and found.score < start.score


@pytest.mark.parametrize("seed", range(60))
def test_the_longest_stages_are_enough(seed: int) -> None:
    """With holes among the stages in time and among those that fit, ordered or not behind them, shared ends or none."""
    rng = np.random.default_rng(seed)
    num, shared, rows = 7, int(rng.integers(0, 3)), 4
    shape = (3, rows, num + shared)
    levels = np.where(rng.random(shape) < 0.7, 9, rng.integers(1, 4, shape))
    ones = np.ones(shape, dtype=np.int64)
    table = StageTable(
        degrees=np.array([1.0, 2.0, 4.0]),
        fitted_level=np.zeros(3, dtype=np.int64),
        us_per_sample=np.where(rng.random(shape) < 0.6, 1.0, 2.0),
        max_level=levels,
        first_step=ones,
        step=ones,
    )
    in_time = table.us_per_sample <= 1.0
    behind = rng.integers(0, 9, (1, 2, num + shared)).astype(float)
    if seed % 3:
        behind[:, :, :num] = -np.sort(-behind[:, :, :num], axis=2)
    for level in (1, 2, 3, 9):
        (stages,) = table.allowed(InTime(is_in_time=in_time, limits=np.array([9])), level, num)
        fits = in_time & (levels >= level)
        cost = np.where(fits, table.degrees[:, None, None], np.inf).min(axis=0)
        assert (stages.cost == cost).all()
        assert (stages.fewest_with(behind) == (cost + behind[:, :, None, :]).min(axis=3)).all()


def make(seed: int) -> tuple[StageSearch, int]:
    rng = random.Random(seed)
    graph = random_series_parallel(rng, rng.randint(5, 10))
    request = random_request(rng, graph, ranks=rng.randint(3, 7), is_tight=seed % 2 == 1)
    costs, rules = costs_of(request), batch_rules(request)
    root = build_series(request.graph, costs, rules, decompose(nx.DiGraph(graph)))
    return make_search(request, costs, rules, root, rules.wishes[0], len(graph)), request.num_ranks


@pytest.mark.parametrize("seed", [*range(8), 36])  # 36: a join's stage takes part of a branch
def test_questions_may_end_early(seed: int) -> None:
    """With a most of levels and enough devices, levels up to the first that suffices are as without."""
    search, ranks = make(seed)
    times = search.times()
    for t in times[:: max(1, len(times) // 6)]:
        full = make(seed)[0].fewest_devices(float(t))
        first = next((level for level, devices in enumerate(full) if devices <= ranks), None)
        for most in (1, 3, search.max_level):
            found = search.fewest_devices(float(t), most_levels=most, enough=ranks)
            stop = most if first is None else min(most, first)
            assert found[: stop + 1].tolist() == full[: stop + 1].tolist()
            if first is not None and first <= most:
                other = make(seed)[0]
                other.fewest_devices(float(t))
                assert read_groups(search, first) == read_groups(other, first)


def test_more_in_flight_than_asked_for_never_makes_stages_wait_for_each_other() -> None:
    draw, lifted = random.Random(0), 0
    for _ in range(200):
        num = draw.randint(2, 6)
        sizes = [draw.choice((1, 2, 3, 4, 6, 12)) for _ in range(num)]
        extra = sorted((draw.randint(0, num) for _ in range(num)), reverse=True)
        request = make_request(chain(num), make_profile(chain(num)), ranks=num, mini_batch=24)
        costs = costs_of(request)
        drafts = [
            StageDraft(blocks=(block.name,), degree=1, micro_batch_size=size, extra_in_flight=more)
            for block, size, more in zip(request.graph.blocks, sizes, extra, strict=True)
        ]
        plan = build_plan(request, drafts, planner="", costs=costs)
        bare = plan_in_flight(plan)
        lifted += any(
            stage.in_flight > min(count + more, 24 // stage.micro_batch_size)
            for stage, count, more in zip(plan.stages, bare, extra, strict=True)
        )
        simulate_plan(plan, cluster=request.cluster)  # raises where they do
    assert lifted > 3
