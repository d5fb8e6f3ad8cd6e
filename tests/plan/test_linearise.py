"""What crosses the cuts of a chain: skip edges pass through every stage between."""

import dataclasses

from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.plan.baselines.linearise import ChainStage, Cut, cut_bytes, linearise
from gpp_plugin.plan.registry import make_plan
from tests.plan.graphs import make_graph, make_request


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
