"""The moves of the refinement and the ranks it shares out: which plans are a move away, and what is known of them."""

from __future__ import annotations

import dataclasses

import pytest

from gpp_plugin.ir.plan import ModelGrid
from gpp_plugin.plan.make import StageDraft, build_plan
from gpp_plugin.plan.refine.degrees import DegreeChooser
from gpp_plugin.plan.refine.refine import Refiner
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.plan.request import PlanRequest, batch_rules
from tests.plan.graphs import chain, costs_of, make_graph, make_profile, make_request, uneven_request


def refiner_of(request: PlanRequest) -> Refiner:
    return Refiner(request, costs_of(request), batch_rules(request), budget=1 << 40)


def draft_of(refiner: Refiner, mask: int, degree: int, size: int, tensor: int = 1) -> StageDraft:
    blocks = refiner.sets.blocks(mask)
    return StageDraft(blocks=blocks, degree=degree, micro_batch_size=size, tensor=tensor)


def test_ranks_move_by_rows_of_tensor_ranks() -> None:
    """A stage on 2x2 ranks that gives one row frees 2 ranks: one of 1x2 gets one row more, one of 1x4 none."""
    refiner = refiner_of(uneven_request(0, mini_batch=8))
    masks = [refiner.sets.mask_of([f"b{i}"]) for i in (0, 1, 4)]
    drafts = [draft_of(refiner, m, d, 4, t) for m, d, t in zip(masks, (2, 1, 1), (2, 2, 4), strict=True)]
    found = [[(d.degree, d.tensor) for d in moved] for moved in refiner._moved_ranks(masks, drafts)]
    assert found == [[(1, 2), (2, 2), (1, 4)]]


def test_a_stage_goes_to_other_grids_of_as_many_ranks() -> None:
    refiner = refiner_of(uneven_request(0, mini_batch=8, tensor_parallel=None))
    for block, others in (("b0", [(2, 2), (1, 4)]), ("b3", [(2, 2)]), ("b2", [])):
        mask = refiner.sets.mask_of([block])
        grids = list(refiner._other_grids(mask, draft_of(refiner, mask, 4, 4)))
        assert [(d.degree, d.tensor) for d in grids] == others
        assert all(d.micro_batch_size == 4 for d in grids)
    refiner = refiner_of(uneven_request(0, mini_batch=2, tensor_parallel=None))
    mask = refiner.sets.mask_of(["b0"])
    grids = list(refiner._other_grids(mask, draft_of(refiner, mask, 1, 1, 4)))
    assert [(d.degree, d.tensor) for d in grids] == [(2, 2)], "four rows cannot share out two samples"


def test_neighbours_have_the_next_two_sizes_on_either_side() -> None:
    request = make_request(chain(4), ranks=2, mini_batch=256, num_stages=2)
    refiner = refiner_of(request)
    names = [block.name for block in request.graph.blocks]
    at = refiner.candidate([names[:2], names[2:]], 8)
    assert at is not None
    assert {found.wish for found in refiner._neighbours(at) if found is not None} == {2, 4, 8, 16, 32}


def test_no_step_is_shorter_than_is_told_before_it_is_predicted() -> None:
    """Forwards and backwards of 10 + 20 and 5 + 10 us a micro-batch of 2, of 4 samples; reductions of 7 and 100 us."""
    refiner = refiner_of(make_request(chain(2), mini_batch=4))
    masks = [refiner.sets.mask_of([f"layers.{i}"]) for i in range(2)]
    # the second stage begins after 10 us; its gradients are reduced while the first still has 20 us to go
    for steps in ((0.0, 0.0), (3.0, 5.0)):  # of the optimizers, when all stages are through

        def least_us(*times, steps=steps):
            return refiner._least_us(masks, [(*own, step) for own, step in zip(times, steps, strict=True)])

        assert least_us((10.0, 20.0, 2, 7.0), (5.0, 10.0, 2, 100.0)) == 10.0 + 30.0 + 100.0 + steps[1]
        assert least_us((10.0, 20.0, 2, 7.0), (5.0, 10.0, 2, 1.0)) == 60.0 + 7.0 + steps[1]
        assert least_us((10.0, 20.0, 2, 0.0), (50.0, 10.0, 2, 1.0)) == 10.0 + 120.0 + 20.0 + steps[1]


def chooser_of(request: PlanRequest) -> DegreeChooser:
    refiner = refiner_of(request)
    return DegreeChooser(request, refiner.costs, refiner.rules)


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_a_degree_takes_what_the_plan_of_it_does(zero_stage: int) -> None:
    """Compute and reductions, of which under ZeRO 2 each micro-batch has its own, with its latency."""
    request = uneven_request(0, mini_batch=16, zero_stage=zero_stage, micro_batch_sizes={"*": 4})
    chooser = chooser_of(request)
    everything = chooser.sets.mask_of([block.name for block in request.graph.blocks])
    for option in chooser._timed_options(everything, 4, ()):
        (draft,) = chooser.drafts([everything], [option])
        ranks = tuple(range(option.num_ranks))
        plan = build_plan(
            request,
            [dataclasses.replace(draft, ranks=ranks)],
            planner="",
            costs=chooser.costs,
            is_named=False,
        )
        (stage,) = plan.stages
        computing = (stage.forward_us + stage.backward_us) / stage.micro_batch_size
        reducing = chooser.costs.reduce_times(plan)[0] / request.mini_batch
        assert option.us_per_sample == pytest.approx(computing + reducing)
    assert {option.degree for option in chooser._timed_options(everything, 4, ())} == {1, 2, 4}


def test_a_stage_holds_no_more_micro_batches_than_there_are() -> None:
    """Two micro-batches and three stages: the first one holds 2, at its limit of memory and a byte below it."""
    graph = chain(3)
    profile = make_profile(graph, saved=100.0, parameter=7)
    for limit, fits in ((2 * 7 + 2 * 4 * 100, True), (2 * 7 + 2 * 4 * 100 - 1, False)):
        request = make_request(
            graph, profile, ranks=3, mini_batch=8, micro_batch_sizes={"*": 4}, memory_limit_bytes=limit
        )
        chooser = chooser_of(request)
        masks = [chooser.sets.mask_of([block.name]) for block in graph.blocks]
        assert (chooser.choose(masks, 4) is not None) == fits


def test_a_way_gives_each_stage_the_largest_tensor_size_up_to_it() -> None:
    chooser = chooser_of(uneven_request(0, mini_batch=8, tensor_parallel=None))
    for block, way, size in (("b0", 2, 2), ("b0", 4, 4), ("b3", 4, 2), ("b2", 4, 1), ("b0", 1, 1)):
        mask = chooser.sets.mask_of([block])
        options = chooser._in_way(chooser._timed_options(mask, 4, ()), mask, ModelGrid(tensor=way))
        assert {option.grid for option in options} == {(1, size)}


def test_steps_that_only_together_help_are_found() -> None:
    """Branches a (six blocks) and b (two) that join in z: of 3 | 2 | 1 no move of one block helps; 2 | 2 | 2 does."""
    edges = [(f"a{i}", f"a{i + 1}") for i in range(5)] + [("a5", "z"), ("b0", "b1"), ("b1", "z")]
    request = make_request(make_graph(edges, loss="z"), ranks=5, num_stages=5, data_parallel=1)
    refiner = refiner_of(request)
    even = (("a0", "a1"), ("a2", "a3"), ("a4", "a5"), ("b0", "b1"), ("z",))
    wanted = refiner.from_drafts([StageDraft(blocks=own, degree=1, micro_batch_size=1) for own in even], 1)
    for planner in ("auto", "graphpipe"):
        assert make_plan(planner, request).iteration_us <= wanted.score[1] * (1 + 1e-9)


def test_ranks_left_over_go_to_the_stages_with_most_work() -> None:
    """A loss had two of eight ranks, and stages of 20 times its work one."""
    graph = chain(4)
    times = dict(zip((block.name for block in graph.blocks), (100.0, 20.0, 19.0, 1.0), strict=True))
    chooser = chooser_of(make_request(graph, make_profile(graph, times), ranks=8, mini_batch=32))
    masks = [chooser.sets.mask_of([block.name]) for block in graph.blocks]
    options = chooser.choose(masks, 8)
    assert options is not None and [option.degree for option in options] == [4, 2, 1, 1]
