"""What a user may get wrong about a stage graph: one line that names stage and edge, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from gpp_plugin import StageGraph
from gpp_plugin.errors import ConfigError
from gpp_plugin.ir.block_graph import Parameter
from gpp_plugin.model.graph.resolve import resolve
from gpp_plugin.model.graph.user_module import check_replicas, describe_tensors
from tests.ranks import run_kept_ranks
from tests.stage_graph import jobs


def two(
    *,
    first: dict[str, Any] | None = None,
    second: dict[str, Any] | None = None,
    losses: list[str] | None = None,
) -> StageGraph:
    """A body and a head, with changes."""
    graph = StageGraph("two", losses=losses)
    base: dict[str, Any] = {"name": "body", "inputs": ["x"], "outputs": ["hidden"], "ranks": [0]}
    head: dict[str, Any] = {"name": "head", "inputs": ["hidden", "target"], "outputs": ["loss"], "ranks": [1]}
    for changes, given in ((first, base), (second, head)):
        given = {**given, **(changes or {})}
        graph.stage(given.pop("name"), given.pop("module", nn.Identity()), **given)
    return graph


FIRST: list[tuple[dict[str, Any], str]] = [
    ({"ranks": [0, 0]}, "rank 0 is listed twice"),
    ({"ranks": [0, 2, 3], "tensor": 2}, "its 3 ranks [0, 2, 3] are no multiple of tensor=2"),
    ({"ranks": [0, 2, 4, 3], "tensor": 2}, "its tensor-parallel ranks [[0, 2], [4, 3]] do not ascend"),
    ({"ranks": []}, "ranks is []"),
    ({"ranks": 0}, "ranks is 0; list one or more global ranks"),
    ({"module": 3}, "its module is a int; give a torch module, or a function"),
    ({"inputs": "x"}, "inputs is the text 'x'; give a list: ['x']"),
    ({"inputs": None}, "inputs is None; give a list of names"),
    ({"inputs": [1]}, "inputs holds 1; names are texts"),
    ({"outputs": []}, "it has no outputs"),
    ({"outputs": {"hidden"}}, "outputs is {'hidden'}; give a list of names"),
    ({"layouts": {"hiden": 1}}, "layouts names 'hiden'; its outputs are hidden"),
    ({"layouts": ["hidden"]}, "layouts is ['hidden']; give a dict"),
    ({"layouts": {"hidden": -1}}, "the layout of 'hidden' is -1; give its batch axis"),
    ({"sharded_inputs": {"x": "0"}}, "sharded_inputs of 'x' is '0'; give the axis"),
    ({"reported": "hidden"}, "reported is the text 'hidden'; give a list: ['hidden']"),
    ({"coupled": "yes"}, "coupled is 'yes'; give True, False, or None"),
    ({"name": "forward"}, "torch modules have an attribute of this name"),
    ({"name": 3}, "a name is text, not empty, and has no dots"),
]
"""What one stage has instead, and what is said of it."""
REFUSED_AT_ONCE: list[tuple[Callable[[], Any], str]] = [
    *((lambda own=own: two(first=own), f"stage {own.get('name', 'body')!r}: {text}") for own, text in FIRST),
    (lambda: two(second={"name": "body"}), "stage 'body': there is one of this name already"),
    (lambda: two(second={"ranks": [0, 1], "tensor": 2}), "'head': rank 0 is a rank of stage 'body' too, on another"),
    (lambda: StageGraph("two", losses="loss"), "losses is the text 'loss'; give a list: ['loss']"),
    (lambda: two().tie(["body.weight"]), "graph.tie: ['body.weight'] is no text"),
    (lambda: two().tie("body.weight"), "are no two parameters"),
    (lambda: two().tie("body.weight", "tail.weight"), "'tail.weight' is not \"stage.parameter\"; the stages are body"),
]  # fmt: skip


def assert_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("make", "message"), REFUSED_AT_ONCE)
def test_one_stage(make: Callable[[], Any], message: str) -> None:
    assert_refused(make, message)


AS_A_WHOLE: list[tuple[dict[str, Any], str]] = [
    ({"second": {"ranks": [2]}}, "stage 'head': rank 2 does not exist, the job has 2 ranks (0..1)"),
    (
        {"second": {"inputs": ["hiden", "target"]}},
        "stage 'head': input 'hiden' is neither an output of another stage (hidden) nor a tensor of the batch "
        "(target, x); did you mean 'hidden'?",
    ),
    (
        {"second": {"inputs": ["body.hiden", "target"]}},
        "input 'body.hiden' names no output of stage 'body', whose outputs are hidden; did you mean 'hidden'?",
    ),
    (
        {"first": {"inputs": ["x", "head.loss"]}},
        "the stages form a cycle: body -> head -> body (stage 'head' reads 'body.hidden')",
    ),
    ({"second": {"outputs": ["score"]}}, "stage graph 'two' has no loss: no stage has an output called 'loss'"),
    ({"losses": ["lose"]}, "loss 'lose' is no output; the outputs are body.hidden, head.loss"),
    (
        {"first": {"outputs": ["hidden", "extra"]}},
        "stage 'body': no stage reads its output 'body.extra' and it is no loss",
    ),
    (
        {"second": {"inputs": ["x", "target"]}, "first": {"reported": ["hidden"]}},
        "stage 'body': no loss is reached from it (its outputs are body.hidden)",
    ),
    (
        {"second": {"inputs": {"a": "hidden", "b": "hidden"}, "sharded_inputs": {"a": 1}}},
        "stage 'head': inputs 'a' and 'b' are both 'body.hidden', held in two ways",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), AS_A_WHOLE)
def test_the_whole_graph(changes: dict[str, Any], message: str) -> None:
    assert_refused(lambda: resolve(two(**changes), batch_keys=("x", "target"), num_ranks=2), message)


def test_a_graph_without_stages_or_with_ranks_left_out() -> None:
    assert_refused(
        lambda: resolve(StageGraph("none"), batch_keys=(), num_ranks=2), "stage graph 'none' has no stages"
    )
    assert_refused(
        lambda: resolve(two(), batch_keys=("x", "target"), num_ranks=3),
        "ranks [2] of 3 are in no stage; the stages are body on [0], head on",
    )


def test_copies_are_alike() -> None:
    """Data positions hold the same parameters; tensor positions each have their own."""
    graph = two(first={"ranks": [0, 2, 1, 3], "tensor": 2}, second={"ranks": [4]})
    resolved = resolve(graph, batch_keys=("x", "target"), num_ranks=5)

    def held(*widths: int) -> list[dict[str, tuple[Parameter, ...]]]:
        return [{"body": describe_tensors("body", nn.Linear(2, width))} for width in widths] + [{"head": ()}]

    check_replicas(resolved, held(4, 4, 3, 3))
    with pytest.raises(ConfigError) as caught:
        check_replicas(resolved, held(4, 4, 3, 5))
    assert str(caught.value).startswith(
        "stage 'body': parameter 'body.weight' is [3, 2] float32 on rank 2 and [5, 2] float32 on rank 3"
    )


def test_an_output_of_two_stages_needs_its_stage() -> None:
    graph = two()
    graph.stage("other", nn.Identity(), inputs=["x"], outputs=["hidden"], ranks=[2])
    graph.stage("last", nn.Identity(), inputs=["hidden"], outputs=["loss"], ranks=[3])
    with pytest.raises(
        ConfigError, match="'hidden' is an output of stages body and other; write \"other.hidden\""
    ):
        resolve(graph, batch_keys=("x", "target"), num_ranks=4)


BUILT = {
    "factory": "stage 'body': its factory failed on rank 0: ValueError: no such weights",
    "two_arguments": "stage 'body': its factory takes (width, depth, bias=True); it is called with one StageContext, or "
    "with nothing: bind the rest",
    "in_parts": "stage 'head': its backward cannot be made in two parts (it fails, or its gradients are others then)",
    "no_module": "stage 'body': its factory returned a int; return a torch module",
    "missing_field": "stage 'body': its module returned no 'hidden', only other; its outputs are 'hidden'",
    "too_many": "stage 'body': its module returned 2 values; its outputs are 'hidden'",
    "no_tensor": "stage 'body': output 'hidden' is a NoneType; outputs are tensors",
    "rejects": "stage 'head': its module fails on hidden [2, 3, 5] float32 (edge body.hidden -> head), target [2, 3, 6] "
    "float32: RuntimeError: mat1 and mat2 shapes cannot be multiplied",
    "no_number": "stage 'head': loss 'head.loss' is [2, 3] float32; return one floating-point number",
    "not_uniform": "stage 'body': output 'body.hidden' is said to be uniform and is [2, 3, 6] of 2 samples and "
    "[4, 3, 6] of 4",
    "wrong_axis": "stage 'body': output 'body.hidden' is said to have its samples along axis 1",
    "tie": "graph.tie: 'body.wait' is no parameter of stage 'body'; it has body.weight, body.bias",
    "tie_shape": "graph.tie: 'body.weight' is [6, 6] float32 on a rank and 'head.bias' is [6] float32",
    "argument": "stage 'body': its module fails on y [2, 3, 6] float32: TypeError:",
    "planner": "graph_pipeline.planner: 'graphpipe' with stage graph 'two': its stages are explicit; remove the key",
    "size": "stage 'head' on 1 x 1 ranks has no micro-batch size of 4 for a mini-batch of 8: it computes whole loss units "
    "of 2",
}


def test_what_shows_when_stages_are_built() -> None:
    """Every rank raises the same, whichever rank found out, and none waits."""
    told = run_kept_ranks(jobs.build_wrongly, 2, list(BUILT))
    for name, message in BUILT.items():
        lines = [rank[name] for rank in told]
        assert lines[0] == lines[1], name
        assert message in lines[0] and "\n" not in lines[0], (name, lines[0])
