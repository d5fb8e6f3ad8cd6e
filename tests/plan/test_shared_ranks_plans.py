"""Plans whose ranks hold several stages: what is searched, against brute force; what is refused, in one line."""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace

import pytest

from gpp_plugin.config.reader import read_config
from gpp_plugin.errors import ConfigError, PlanError, PlanInfeasible
from gpp_plugin.ir.plan import PipelinePlan, joined_breakdown
from gpp_plugin.ir.serialize import SCHEMA_VERSION, to_plain
from gpp_plugin.plan.choose_schedule import schedule_plan
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.costs.memory_formula import with_breakdown
from gpp_plugin.plan.edge_transports import note_edge_transports
from gpp_plugin.plan.explicit_plan import explicit_plan
from gpp_plugin.plan.make import StageDraft, build_plan
from gpp_plugin.plan.refine import share_ranks as share_ranks_module
from gpp_plugin.plan.refine.block_sets import Partitioner
from gpp_plugin.plan.refine.plan_evaluator import (
    PlanEvaluator,
    _heads_and_tails,
    collapsed,
    memory_excess,
)
from gpp_plugin.plan.refine.refine import Refiner
from gpp_plugin.plan.refine.share_ranks import share_ranks
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.plan.request import PlanRequest, SearchReport, batch_rules
from gpp_plugin.plan.validate_plan import check_request, validate_plan
from gpp_plugin.simulate.predict import predict_iteration_us
from tests.plan.graphs import branches, chain, costs_of, make_cluster, make_graph, make_profile, make_request


def shared(
    request: PlanRequest, planner: str = "auto", schedule: str = "1f1b"
) -> tuple[PipelinePlan, PipelinePlan]:
    """Return the plan without shared ranks and what is made of it."""
    check_request(request)
    plain = schedule_plan(make_plan(planner, request), request, schedule=schedule, slicing="off")
    return plain, share_ranks(plain, request, schedule=schedule)


def interleaved(virtual: int = 2, *, ranks: int = 2, blocks: int = 8, **changes: object) -> PlanRequest:
    graph = chain(blocks)
    return make_request(
        graph, ranks=ranks, data_parallel=1, micro_batch_sizes={"*": 1}, virtual_stages=virtual, **changes
    )


# ---- what is found ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "virtual"), [(2, 2), (4, 2), (2, 4)])
def test_interleaving_a_chain_shortens_the_bubble_as_published(ranks, virtual):
    """Narayanan et al.: m v (F + B) + (p - 1)(F + B) of a stage's times, m a multiple of p."""
    request = interleaved(virtual, ranks=ranks, blocks=ranks * virtual)
    plain, plan = shared(request)
    assert {len(plan.stages_of_rank(rank)) for rank in range(ranks)} == {virtual}
    one = 300.0  # F + B of a block
    assert plan.iteration_us == pytest.approx(16 * virtual * one + (ranks - 1) * one)
    assert plan.iteration_us < plain.iteration_us
    gain = f"{plain.iteration_us / plan.iteration_us - 1:.1%} quicker than one stage a rank"
    assert plan.notes[-1].startswith(f"{len(plan.stages)} stages on {ranks} ranks, the best of ")
    assert plan.notes[-1].endswith(f" ways to share ranks: {gain}")


@pytest.mark.parametrize("graph", [chain(5), branches(2, 2)], ids=["chain", "two"])
def test_what_may_share_ranks_is_never_worse_than_what_may_not(graph):
    uneven = {block.name: 50.0 + 37.0 * (i % 4) for i, block in enumerate(graph.blocks)}
    request = make_request(
        graph, make_profile(graph, uneven), ranks=2, virtual_stages=None, colocate=True, mini_batch=4
    )
    plain, plan = shared(request, schedule="auto")
    assert plan.iteration_us <= plain.iteration_us
    validate_plan(plan, graph, profile=request.profile, cluster=request.cluster)
    assert plan.num_ranks == 2


def test_auto_is_not_behind_our_other_planners_nor_one_micro_batch_size():
    """Two branches: a mini-batch at once, a branch a rank, has no bubble; the usual base plan pipelines them."""
    request = make_request(branches(2, 2), ranks=2, virtual_stages=None, colocate=True, mini_batch=4)
    _, plan = shared(request)
    others = [shared(request, planner="graphpipe")]
    others += [shared(dataclasses.replace(request, micro_batch_sizes={"*": size})) for size in (2, 4)]
    assert all(plan.iteration_us <= other.iteration_us * (1 + 1e-9) for _, other in others)


def test_a_large_model_has_one_search_and_its_plan_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(share_ranks_module, "MAX_BASELINE_SIZE", 0)
    request = make_request(branches(2, 2), ranks=2, virtual_stages=None, colocate=True, mini_batch=4)
    plain, plan = shared(request)
    assert plan.iteration_us <= plain.iteration_us
    assert any("ways to share ranks beyond one search" in note for note in plan.notes)


def test_a_spent_budget_is_taken_down():
    request = interleaved(2, blocks=4)
    report = SearchReport()
    costs = costs_of(request)
    evaluator = PlanEvaluator(request, costs, budget=1, report=report)
    drafts = tuple(draft((f"layers.{i}",), (i % 2,), 1) for i in range(4))
    first = evaluator.evaluated(drafts)
    assert first is not None
    assert evaluator.evaluated(tuple(dataclasses.replace(d, ranks=(0,)) for d in drafts)) is None
    assert "some ways to share ranks" in report.notes[0]
    assert evaluator.evaluated(drafts) == first  # what is known costs nothing


def test_a_spent_budget_is_not_told_as_missing_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(share_ranks_module, "BUDGET", 0)
    with pytest.raises(
        PlanInfeasible, match="not all of .* were searched, for want of time: 0 simulated tasks"
    ):
        shared(interleaved(2, blocks=4))


# ---- parts -----------------------------------------------------------------------------------------------------


def draft(blocks: tuple[str, ...], ranks: tuple[int, ...], size: int) -> StageDraft:
    return StageDraft(blocks=blocks, degree=len(ranks), micro_batch_size=size, ranks=ranks)


def tower_and_trunk(request: PlanRequest) -> PipelinePlan:
    """Return two branches, one over all eight ranks, the other with the join in two stages of four."""
    return build_plan(
        request,
        [
            draft(("b0.0", "b0.1"), tuple(range(8)), 8),
            draft(("b1.0",), (0, 1, 2, 3), 4),
            draft(("b1.1", "join"), (4, 5, 6, 7), 4),
        ],
        planner="by hand",
    )


def test_ranks_that_do_the_same_are_simulated_as_one():
    request = make_request(branches(2, 2), ranks=8, cluster=make_cluster(8, bandwidth=1e9))
    plan = tower_and_trunk(request)
    small, cluster = collapsed(plan, request.cluster)
    assert [stage.ranks for stage in small.stages] == [(0, 1), (0,), (1,)]
    assert (small.mini_batch, [stage.micro_batch_size for stage in small.stages]) == (4, [2, 1, 1])
    whole = predict_iteration_us(plan, cluster=request.cluster)
    assert predict_iteration_us(small, cluster=cluster) == pytest.approx(whole, rel=1e-6)
    # a link inside of what is one rank now joins nobody; four ranks that a link joins in threes stay apart
    (link,) = request.cluster.links
    for span, ranks, spans in ((2, (0, 1), [2]), (3, tuple(range(8)), [3, 8])):
        links = (dataclasses.replace(link, span=span), link)
        small, cluster = collapsed(plan, dataclasses.replace(request.cluster, links=links))
        assert small.stages[0].ranks == ranks and [each.span for each in cluster.links] == spans


def test_the_busiest_rank_and_what_comes_before_and_after_its_tasks():
    """A tower on two ranks, and stages on these and on a third."""
    graph = chain(4)
    times = dict(zip((block.name for block in graph.blocks), (60.0, 10.0, 20.0, 40.0), strict=True))
    request = make_request(graph, make_profile(graph, times), ranks=3, mini_batch=8, memory_limit_bytes=800)
    evaluator = PlanEvaluator(request, CostModel(graph, request.profile, request.cluster))
    ranks = ((0, 1), (0,), (1,), (2,))
    drafts = [draft((block.name,), own, 2) for block, own in zip(graph.blocks, ranks, strict=True)]
    # each of two ranks has 4 x 3 x 60 us of the tower; beside that of the next two 4 x 2 x 3 x 10 and 20
    assert evaluator.busiest_us(drafts) == 720.0 + 480.0
    alone = dataclasses.replace(drafts[3], micro_batch_size=8)
    assert evaluator.busiest_us([drafts[0], alone]) == 8 * 3 * 40.0, "nothing of the tower is on its rank"
    sizes = (2, 8, 4, 4)
    plan = evaluator.plan_of(
        [dataclasses.replace(d, micro_batch_size=n) for d, n in zip(drafts, sizes, strict=True)]
    )
    heads, tails = _heads_and_tails(plan)
    assert heads == [0.0, 4 * 60.0, 4 * 60.0 + 80.0, 4 * 60.0 + 80.0 + 80.0]
    assert tails == [2 * us for us in heads]
    # a rank of 800 bytes whose stages need 600 and 400: they get 480 and 320
    asked = []
    evaluator._fitter = SimpleNamespace(fitted_stage=lambda stage, limit: asked.append(limit) or stage)
    needs = (600, 400, 100, 900)
    stages = (dataclasses.replace(s, memory_bytes=n) for s, n in zip(plan.stages, needs, strict=True))
    evaluator._optimized(dataclasses.replace(plan, stages=tuple(stages)))
    assert asked == [480, 320, 800]


@pytest.mark.parametrize("seed", range(6))
def test_the_bound_is_one(seed):
    draw = random.Random(seed)
    graph = branches(2, 3)
    profile = make_profile(graph, {block.name: draw.uniform(20, 200) for block in graph.blocks})
    request = make_request(graph, profile, ranks=3, mini_batch=8)
    costs = CostModel(graph, profile, request.cluster)
    evaluator = PlanEvaluator(request, costs)
    names = [block.name for block in graph.blocks]
    drafts = tuple(draft((name,), (draw.randrange(3),), draw.choice([1, 2, 4])) for name in names)
    drafts = tuple(dataclasses.replace(d, ranks=(i % 3,)) for i, d in enumerate(drafts))
    plan = evaluator.evaluated(drafts, is_exact=True)
    assert plan is not None
    least = evaluator.least_us(evaluator.plan_of(drafts))
    assert evaluator.busiest_us(drafts) <= least * (1 + 1e-9) <= plan.iteration_us * (1 + 2e-9)


def test_a_stage_on_more_ranks_keeps_its_micro_batch_or_what_a_rank_has_of_it():
    request = make_request(chain(1), mini_batch=24)
    refiner = Refiner(request, costs_of(request), batch_rules(request), budget=1)
    old = draft(("layers.0",), (0, 1), 4)
    for ranks, size in (((0, 1, 2, 3), 4), ((0, 1, 2), 6), ((3,), 4), ((0, 1, 2, 3, 4), None)):
        found = refiner._on_ranks(old, ranks)
        assert (None if found is None else found.micro_batch_size) == size


def test_a_cut_stage_goes_to_other_ranks_where_stages_may_be_virtual():
    """Of one virtual stage a rank none is cut, and of two each rank keeps its number."""
    for virtual, placed in ((None, {(0, 0, 1), (0, 1, 1), (1, 0, 1)}), (1, set()), (2, set())):
        request = make_request(
            chain(3), ranks=2, mini_batch=4, data_parallel=1, virtual_stages=virtual, colocate=virtual == 1
        )
        refiner = Refiner(request, costs_of(request), batch_rules(request), budget=1000)
        at = refiner.placed([draft(("layers.0", "layers.1"), (0,), 1), draft(("layers.2",), (1,), 1)])
        assert at is not None
        found = [
            tuple(own.ranks[0] for own in sorted(drafts, key=lambda own: own.blocks))
            for drafts in refiner._inherited(at, [0b001, 0b010, 0b100])
            if refiner._may_hold(at, drafts)
        ]
        assert set(found) == placed


def test_branches_come_with_all_that_precedes_them():
    graph = branches(3, 2)
    times = {block.name: 100.0 if block.name.startswith("b0") else 60.0 for block in graph.blocks}
    partitioner = Partitioner(CostModel(graph, make_profile(graph, times), make_cluster(4)), 1)
    assert partitioner.branches()[0] == ("b1.0", "b1.1", "b2.0", "b2.1")  # all but the heaviest
    assert ("b0.0", "b0.1") in partitioner.branches()


# ---- memory ----------------------------------------------------------------------------------------------------


def test_a_ranks_stages_count_together():
    graph = chain(4)
    request = make_request(graph, make_profile(graph, parameter=100), ranks=2, virtual_stages=2)
    plan = build_plan(request, [draft((f"layers.{i}",), (i % 2,), 1) for i in range(4)], planner="by hand")
    each = plan.stages[0].memory_bytes
    limited = dataclasses.replace(request, memory_limit_bytes=2 * each)
    assert memory_excess(limited, plan)[0] == 0
    assert memory_excess(dataclasses.replace(request, memory_limit_bytes=2 * each - 1), plan)[0] == 1
    message = (
        r"rank 0 holds 2 stages that need 0\.000 GB together \('layers\.0' .*'layers\.2' .*\) and may .*: 300 bytes too many; "
        "lower micro_batch_sizes or virtual_stages"
    )
    with pytest.raises(PlanInfeasible, match=message):
        validate_plan(plan, graph, profile=request.profile, memory_limit_bytes=2 * each - 300)


def test_ranks_hold_one_of_their_stages_whole_under_zero_3():
    graph = chain(4)
    request = make_request(graph, make_profile(graph, parameter=100), ranks=2, virtual_stages=2, zero_stage=3)
    blocks = [("layers.0",), ("layers.1", "layers.2", "layers.3")]
    plan = build_plan(request, [draft(own, (0, 1), 2) for own in blocks], planner="by hand")
    assert [stage.sharded_bytes for stage in plan.stages] == [100, 300]
    assert [stage.gathered_bytes for stage in plan.stages] == [50, 150]
    each = [stage.memory_bytes for stage in plan.stages]
    twos = build_plan(
        dataclasses.replace(request, zero_stage=2), [draft(own, (0, 1), 2) for own in blocks], planner=""
    )
    assert each == [stage.memory_bytes for stage in twos.stages], (
        "a stage alone needs what it does under ZeRO 2"
    )
    limit = sum(each) - 50  # of the smaller one only the rank's part is there while the other one runs
    limited = dataclasses.replace(request, memory_limit_bytes=limit)
    assert memory_excess(limited, plan)[0] == 0
    validate_plan(plan, graph, profile=request.profile, memory_limit_bytes=limit, zero_stage=3)
    with pytest.raises(PlanInfeasible, match="holds 2 stages that need"):
        validate_plan(plan, graph, profile=request.profile, memory_limit_bytes=limit - 9, zero_stage=3)
    told = with_breakdown(plan, limited).memory
    assert [part.total for part in told] == each and joined_breakdown(told).total == limit
    roomy = joined_breakdown(with_breakdown(plan, request).memory)
    assert roomy.total == sum(each), "where both fit, the next one is gathered ahead"


def test_counts_in_flight_fit_the_memory_of_a_rank():
    graph = chain(8)
    profile = make_profile(graph, saved=100.0, parameter=1000)
    # four of eight blocks, 2000 bytes each, and ten micro-batches of two blocks at a time
    limit = 4 * 2000 + 10 * 200
    request = make_request(
        graph,
        profile,
        ranks=2,
        data_parallel=1,
        micro_batch_sizes={"*": 1},
        virtual_stages=2,
        memory_limit_bytes=limit,
    )
    _, plan = shared(request)
    assert memory_excess(request, plan)[0] <= 0
    with pytest.raises(
        PlanInfeasible, match="virtual_stages 2: none of .* fits their memory; lower virtual_stages"
    ):
        unlimited = make_plan("uniform", dataclasses.replace(request, memory_limit_bytes=None))
        share_ranks(unlimited, dataclasses.replace(request, memory_limit_bytes=8100))


# ---- what is refused -------------------------------------------------------------------------------------------


def plan_of(*placed: tuple[int, ...], tensor: tuple[int, ...] = (1, 1)) -> tuple[PipelinePlan, PlanRequest]:
    graph = chain(len(placed))
    request = make_request(graph, ranks=len({rank for ranks in placed for rank in ranks}))
    plan = build_plan(
        request, [draft((f"layers.{i}",), ranks, 4) for i, ranks in enumerate(placed)], planner="by hand"
    )
    stages = tuple(
        dataclasses.replace(s, tensor=t, in_flight=1) for s, t in zip(plan.stages, tensor, strict=True)
    )
    return dataclasses.replace(plan, stages=stages), request


def test_overlapping_ranks_are_a_plan():
    for placed in (((0, 1), (0, 1)), ((0, 1, 2, 3), (2, 3)), ((0, 1), (1, 2))):
        plan, request = plan_of(*placed)
        validate_plan(plan, request.graph)
    plan, request = plan_of((0, 1), (0, 1), tensor=(2, 2))
    validate_plan(plan, request.graph)


@pytest.mark.parametrize(("placed", "tensor"), [(((0, 1), (0, 1)), (1, 2)), (((0, 1, 2, 3), (2, 3)), (2, 2))])
def test_unlike_tensor_grids_are_not(placed, tensor):
    plan, request = plan_of(*placed, tensor=tensor)
    with pytest.raises(
        PlanError, match=r"rank \d holds stages 'layers.0' \(context x tensor of .* share a grid whole: give"
    ):
        validate_plan(plan, request.graph)


def test_mode_async_may_share_ranks():
    plan, request = plan_of((0,), (0, 1))
    validate_plan(dataclasses.replace(plan, mode="async"), request.graph)
    with pytest.raises(PlanError, match="p2p: P2PCommunicator runs one stage a rank"):
        note_edge_transports(plan, "megatron")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"virtual_stages": 0}, "virtual_stages: 0 is not valid; give 1 to 2147483647"),
        (
            {"virtual_stages": 4, "data_parallel": 1},
            "virtual_stages: 4 on 4 ranks with data_parallel 1 makes at least 16 stages and the model has 8 blocks; "
            "write virtual_stages 2",
        ),
        ({"colocate": True, "mode": "async"}, "colocate: mode async has one stage a rank"),
    ],
)
def test_impossible_requests(changes, message):
    with pytest.raises(PlanError, match=message):
        check_request(make_request(chain(8), ranks=4, **changes))


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (
            {"virtual_stages": 2, "mode": "async"},
            'and mode "async" has none; say in a plan which ranks each stage has; write mode "sync" or remove it',
        ),
        (
            {"colocate": "auto", "p2p": "megatron"},
            'which p2p "megatron" cannot run; write p2p "native" or remove it',
        ),
    ],
)
def test_wrong_keys(block, message):
    with pytest.raises(ConfigError) as raised:
        read_config({"train_batch_size": 8, "graph_pipeline": block})
    assert message in str(raised.value)


# ---- plans that are given --------------------------------------------------------------------------------------


def test_a_saved_plan_with_shared_ranks_is_read_again():
    request = interleaved(2, blocks=4)
    _, plan = shared(request)
    saved = {"schema": SCHEMA_VERSION, "type": "PipelinePlan", "value": to_plain(plan)}
    assert explicit_plan(saved, request).stages == plan.stages


def test_a_branch_on_the_ranks_of_the_rest_takes_at_least_their_micro_batches():
    request = make_request(branches(2, 3), ranks=2, mini_batch=8, data_parallel=None)
    rules, plan = batch_rules(request), make_plan("auto", request)
    partitioner = Partitioner(costs_of(request), 4)
    makers = share_ranks_module.StartMaker(request, rules, partitioner, plan)
    found = [
        (start.drafts[0].micro_batch_size, {draft.micro_batch_size for draft in start.drafts[1:]})
        for branch in partitioner.branches()
        for start in makers.colocated(branch)
    ]
    assert {size for size, _ in found} == {1, 2, 4, 8}
    assert any(size > max(trunk) for size, trunk in found) and all(
        size >= max(trunk) for size, trunk in found
    )


def test_ranks_that_hardly_compute_are_named() -> None:
    """A loss over all samples has a rank of its own, which computes 1 %: stages may share it where that is allowed."""
    graph = make_graph([("a", "b"), ("b", "loss")], loss="loss", coupled=["loss"])
    for us, is_named in ((1.0, True), (30.0, False)):
        profile = make_profile(graph, {"a": 100.0, "b": 100.0, "loss": us})
        request = make_request(graph, profile, ranks=3, loss_unit=16, num_stages=3, data_parallel=1)
        plan = share_ranks(schedule_plan(make_plan("auto", request), request), request)
        named = [note for note in plan.notes if note.startswith("rank 2: less than 2%")]
        assert bool(named) == is_named and all("colocate" in note for note in named)
