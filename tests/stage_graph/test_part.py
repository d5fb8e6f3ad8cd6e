"""A captured part as the whole graph sees it: names, the loss, shared parameters, what it keeps of what it receives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpp_plugin import StageGraph
from gpp_plugin.errors import ConfigError
from gpp_plugin.ir.tensors import LayoutKind, TensorSpec
from gpp_plugin.model.graph.captured_part import CapturedPart, PartContext
from gpp_plugin.model.graph.describe_graph import PartView, describe_graph
from gpp_plugin.model.graph.module_trial import Shapes, input_specs
from gpp_plugin.model.graph.resolve import ResolvedGraph, resolve
from gpp_plugin.model.graph.user_module import check_ties, tied_names
from tests.capture.graphs import counted_exports

WIDTH, UNIT = 4, 2


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.spare = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class Last(nn.Module):
    """Reads one tensor under two names; its loss is of two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, left: Tensor, right: Tensor, target: Tensor | None = None) -> dict[str, Any]:
        hidden = torch.tanh(self.layer(left)) * right
        far = None if target is None else (hidden - target).square().mean()
        return {"far": far, "large": None if target is None else hidden.abs().mean(), "hidden": hidden}


def graph_of(*ties: tuple[str, ...]) -> StageGraph:
    graph = StageGraph("parts", losses=["far", "large"])
    graph.capture("first", First(), inputs=["x"], outputs=["made"], ranks=[0])
    graph.capture(
        "last",
        Last(),
        inputs={"left": "made", "right": "made", "target": "target"},
        outputs=["far", "large", "hidden"],
        ranks=[1],
        reported=["hidden"],
    )
    for tie in ties:
        graph.tie(*tie)
    return graph


BATCH = {"x": torch.randn(8, 3, WIDTH), "target": torch.randn(8, 3, WIDTH)}


def trace(graph: StageGraph) -> tuple[ResolvedGraph, dict[str, PartView], Any]:
    """Return the graph, its captured parts, and the whole as planners see it."""
    resolved = resolve(graph, batch_keys=tuple(BATCH), num_ranks=2)
    called = tied_names(resolved)
    tensors: dict[str, TensorSpec] = {}
    views, parameters = {}, {}
    for name, part in _parts(resolved, called).items():
        captured = part.capture(part.arguments(BATCH, tensors, UNIT), is_training=True)
        views[name] = part.view(captured)
        parameters[name] = part.parameters(captured.op_graph)
        tensors.update(views[name].outputs)
    check_ties(resolved, parameters)
    shapes = Shapes(num_samples=UNIT, tensors=tensors, inputs=input_specs(BATCH, UNIT))
    reference = describe_graph(
        resolved, shapes, parameters, called, coupled=frozenset(), views=views, is_training=True
    )
    return resolved, views, reference


def test_the_sum_of_losses_is_the_loss_of_the_block_that_makes_it() -> None:
    _, views, reference = trace(graph_of())
    loss = reference.analysis.op_graph.loss
    assert loss == "last.far + last.large"
    assert views["last"].outputs[loss].layout.kind is LayoutKind.UNIT
    (block,) = reference.block_graph.loss_blocks
    assert loss in reference.block_graph.block(block).nodes
    assert reference.block_graph.block(block).is_coupled


def test_what_is_received_is_kept_once_and_made_by_the_other_part() -> None:
    _, _, reference = trace(graph_of())
    kept = {tensor.name: tensor for tensor in reference.block_graph.saved}
    # tanh keeps its own result, which the next layer and the product keep too
    assert [block.partition(".")[0] for block in kept["first.made"].kept_by] == ["first", "last"]
    assert kept["first.made"].made_by in kept["first.made"].kept_by
    assert kept["first.made"].bytes == UNIT * 3 * WIDTH * 4
    assert not [name for name in kept if "argument" in name]
    (edge,) = (edge for edge in reference.block_graph.edges if edge.src.startswith("first"))
    assert edge.tensors == ("first.made",)


def test_a_shared_parameter_has_one_name_and_the_blocks_that_read_it() -> None:
    _, _, reference = trace(graph_of(("last.layer.weight", "first.layer.weight")))
    blocks = reference.block_graph.tied["first.layer.weight"]
    assert [block.partition(".")[0] for block in blocks] == ["first", "last"]
    assert "last.layer.weight" not in {n for b in reference.block_graph.blocks for n in b.parameters}
    (parameter,) = (p for p in reference.analysis.op_graph.parameters if p.name == "first.layer.weight")
    assert parameter.aliases == ("last.layer.weight",)


@pytest.mark.parametrize(
    ("tie", "message"),
    [
        (("first.layer.wait", "last.layer.weight"), "'first.layer.wait' is no parameter of stage 'first'"),
        (("first.layer.weight", "last.layer.bias"), "tied parameters have one shape"),
        (
            ("first.layer.weight", "last.layer.weight", "last.other.weight"),
            "'last.layer.weight' and 'last.other.weight' are two parameters of one stage; make them one",
        ),
        (
            ("first.spare.weight", "last.layer.weight"),
            "no layer of captured stage 'first' reads its parameter that is called 'first.spare.weight'",
        ),
    ],
)
def test_ties_that_cannot_be(tie: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        trace(graph_of(tie))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_without_labels_a_part_lacks_its_losses_only() -> None:
    resolved = resolve(graph_of(), batch_keys=("x",), num_ranks=2, needs_loss=False)
    last = resolved.stage("last")
    assert (last.batch_inputs, last.losses) == ((), ())
    assert last.nodes == (("hidden", "last.hidden"),)
    graph = graph_of()
    graph.stage(
        "end", nn.Identity(), inputs={"input": "hidden", "other": "target"}, outputs=["compared"], ranks=[2]
    )
    names = [s.name for s in resolve(graph, batch_keys=("x",), num_ranks=3, needs_loss=False).stages]
    assert names == ["first", "last"]


def _steps(length: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(length)
    return {key: torch.randn(UNIT, length, WIDTH, generator=draw) for key in ("x", "target")}


def _parts(resolved: ResolvedGraph, called: dict[str, str]) -> dict[str, CapturedPart]:
    options: Any = {"dtype": torch.float32, "device": torch.device("cpu"), "granularity": "layer"}
    return {stage.name: CapturedPart(stage, called=called, **options) for stage in resolved.stages}


def test_parts_of_a_graph_are_captured_once_for_all_lengths() -> None:
    graph = graph_of()
    resolved, views, reference = trace(graph)
    blocks = [block.name for block in reference.block_graph.blocks]
    (made,) = views["first"].outputs
    stages = tuple(
        SimpleNamespace(
            name=name, blocks=tuple(b for b in blocks if b.startswith(name)), memory=None, model_parallel=1
        )
        for name in views
    )
    edge = SimpleNamespace(src=0, dst=1, batch_tensors=(made,), whole_tensors=())
    plan: Any = SimpleNamespace(edges=(edge,), stages=stages)
    parts = _parts(resolved, {})
    counted = []
    with counted_exports() as exports:
        for length in (3, 5, 4, 7, 3):
            batch = _steps(length)
            tensors: dict[str, TensorSpec] = {}
            for name, part in parts.items():
                tensors |= part.outputs_at(views[name].analysis, part.arguments(batch, tensors, UNIT))
            shapes = Shapes(num_samples=UNIT, tensors=tensors, inputs=input_specs(batch, UNIT))
            assert tensors[made].shape == (UNIT, length, WIDTH)
            given: dict[str, Tensor] = dict(batch)
            for stage, (name, part) in enumerate(parts.items()):
                around = PartContext(analysis=views[name].analysis, shapes=shapes)
                code = part.stage_code(reference, plan, stage, batch, UNIT, within=around)
                assert code.tensors.keys() >= tensors.keys()
                assert all(code.tensors[tensor] == spec for tensor, spec in tensors.items())
                assert code.inputs == shapes.inputs
                own = {f"{name}.{key}": value for key, value in part.model.named_parameters()}
                call = code.function
                reads = [given[key] for key in (*call.batch_inputs, *call.received)]
                outputs = call.call(*(own[tensor] for tensor in call.tensors), *reads)
                given |= dict(zip(call.outputs, outputs, strict=True))
            hidden = parts["first"].model(batch["x"])
            wanted = parts["last"].model(hidden, hidden, batch["target"])
            loss = (wanted["far"] + wanted["large"]).item()
            assert given["last.far + last.large"].item() == pytest.approx(loss, rel=1e-6)
            counted.append(len(exports))
    # as they are: once for shapes and once for code, as other parts were traced first; with symbols: once for both
    assert counted == [4, 6, 6, 6, 6]
