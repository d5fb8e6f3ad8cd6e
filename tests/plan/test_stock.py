"""The chain stock DeepSpeed is given: equal degrees, one loss unit a rank, the smallest slowest stage."""

import dataclasses
import itertools

import pytest

from gpp_plugin.errors import PlanInfeasible
from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.plan.baselines.stock_chain import ChainStage, Cut, cut_bytes, linearise
from gpp_plugin.plan.registry import make_plan
from tests.plan.graphs import branches, chain, make_graph, make_profile, make_request


@pytest.mark.parametrize("seed", range(20))
def test_no_other_cut_of_the_chain_has_a_quicker_slowest_stage(seed):
    graph = chain(7)
    times = {block.name: float((seed * 37 + i * 61) % 97 + 1) for i, block in enumerate(graph.blocks)}
    plan = make_plan("stock_1f1b", make_request(graph, make_profile(graph, times), ranks=3))
    values = list(times.values())
    best = min(
        max(sum(values[:i]), sum(values[i:j]), sum(values[j:]))
        for i, j in itertools.combinations(range(1, 7), 2)
    )
    assert max(stage.forward_us for stage in plan.stages) == pytest.approx(best)


def test_branches_follow_each_other_and_take_the_time_of_a_chain():
    graph = branches(2, 2)
    plan = make_plan("stock_1f1b", make_request(graph, ranks=5, mini_batch=5))
    assert [stage.blocks for stage in plan.stages] == [("b0.0",), ("b0.1",), ("b1.0",), ("b1.1",), ("join",)]
    assert plan.iteration_us == pytest.approx((5 + 4) * 300)  # (m + p - 1)(f + b)
    assert [stage.in_flight for stage in plan.stages] == [5, 4, 3, 2, 1]
    assert plan.depth == 3  # of the graph, were it run as one


def test_ranks_are_shared_out_evenly():
    plan = make_plan("stock_1f1b", make_request(chain(6), ranks=6, num_stages=3, loss_unit=2, mini_batch=16))
    assert [(stage.ranks, stage.micro_batch_size) for stage in plan.stages] == [
        ((0, 1), 4),
        ((2, 3), 4),
        ((4, 5), 4),
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 4, "num_stages": 3}, "3 stages do not divide 4 ranks; write stages 2"),
        ({"ranks": 4, "num_stages": 2, "mini_batch": 9, "loss_unit": 3}, "does not divide the mini-batch of 9"),
        ({"ranks": 8}, "8 stages and the model has 6 blocks; write stages 4"),
        ({"ranks": 2, "schedule": "gpipe"}, "runs 1F1B only"),
    ],
)  # fmt: skip
def test_what_deepspeed_cannot_run_is_refused(changes, message):
    with pytest.raises(PlanInfeasible, match=message):
        make_plan("stock_1f1b", make_request(chain(6), **changes))


def test_one_loss_a_mini_batch_is_said_to_run_nothing_at_the_same_time():
    plan = make_plan("stock_1f1b", make_request(chain(4), ranks=4, loss_unit=16, mini_batch=16))
    assert any("single micro-batch" in note for note in plan.notes)


def _chain(graph: BlockGraph, stages: int) -> list[ChainStage]:
    plan = make_plan("stock_1f1b", make_request(graph, ranks=stages))
    return list(linearise(plan, graph))


def _with_inputs(graph: BlockGraph, **inputs: tuple[str, ...]) -> BlockGraph:
    blocks = tuple(dataclasses.replace(b, inputs=inputs.get(b.name, ())) for b in graph.blocks)
    return dataclasses.replace(graph, blocks=blocks)


def test_a_skip_edge_is_carried_through_the_stages_between():
    graph = make_graph([("a", "b"), ("b", "c"), ("c", "d"), ("a", "d")], loss="d", bytes_per_sample=12)
    cuts = [stage.after for stage in _chain(graph, 4)]
    assert [cut_bytes(cut, graph.tensors, 5) for cut in cuts[:-1]] == [60, 120, 120]
    assert cuts == [
        Cut(differentiable=("a:out",), constant=(), inputs=()),
        Cut(differentiable=("a:out", "b:out"), constant=(), inputs=()),
        Cut(differentiable=("a:out", "c:out"), constant=(), inputs=()),
        None,
    ]


def test_a_branch_that_comes_second_waits_for_its_inputs_behind_the_first():
    graph = make_graph([("a0", "a1"), ("b0", "b1"), ("a1", "join"), ("b1", "join")], loss="join")
    graph = _with_inputs(graph, a0=("image",), b0=("text",), b1=("mask",), join=("labels", "mask"))
    stages = _chain(graph, 5)
    assert [stage.loads for stage in stages] == [("image", "text", "mask"), (), (), (), ("labels", "mask")]
    assert [stage.reads for stage in stages] == [("image",), (), ("text",), ("mask",), ("labels", "mask")]
    assert [stage.after.inputs for stage in stages[:-1]] == [
        ("text", "mask"),
        ("text", "mask"),
        ("mask",),
        (),
    ]
    assert [stage.after.differentiable for stage in stages[:-1]] == [
        ("a0:out",),
        ("a1:out",),
        ("a1:out", "b0:out"),
        ("a1:out", "b1:out"),
    ]


def test_what_no_later_stage_differentiates_is_constant():
    graph = make_graph([("a", "b"), ("b", "c"), ("a", "c")], loss="c")
    frozen = dataclasses.replace(graph.tensors["a:out"], requires_grad=False)
    graph = dataclasses.replace(graph, tensors={**graph.tensors, "a:out": frozen})
    assert [stage.after for stage in _chain(graph, 3)[:-1]] == [
        Cut(differentiable=(), constant=("a:out",), inputs=()),
        Cut(differentiable=("b:out",), constant=("a:out",), inputs=()),
    ]
