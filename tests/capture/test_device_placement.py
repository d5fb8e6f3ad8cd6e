"""A rank's code computes on the rank's own device, whatever device rank 0 captured and planned on.

Without a GPU what code for ``cuda:0`` to ``cuda:7`` names is read; `tests.gpu` runs it on real ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from gpp_plugin.capture.captured_graph import CapturedGraph
from gpp_plugin.capture.coarsen import coarsen
from gpp_plugin.capture.export import capture_model
from gpp_plugin.capture.recapture import recapture
from gpp_plugin.ir.analysis import Analysis
from gpp_plugin.ir.serialize import dumps, loads
from gpp_plugin.model.graph.captured_part import CapturedPart
from gpp_plugin.model.graph.resolve import resolve_module
from gpp_plugin.model.graph.stage_costs import describe_module
from gpp_plugin.profile.block_survey import block_codes
from gpp_plugin.profile.cost_store import CostStore
from gpp_plugin.profile.measure import profile_blocks
from gpp_plugin.runtime.stage_module import StageFunction, build_stage_function
from tests.capture.graphs import Calls
from tests.models import build

Codes: TypeAlias = Iterator[tuple[str, StageFunction]]

FAMILIES = ("gpt2", "clip", "t5", "llava", "whisper", "bert", "llama")
NUM_STAGES = 3
SAMPLES = 2


def make_part(name: str, device: torch.device) -> tuple[CapturedPart, dict[str, Any]]:
    """Return a model as a rank on ``device`` has it, and a batch of it on the host."""
    model, make_batch = build(name, layers=1, device="meta")
    batch = make_batch(SAMPLES)
    resolved = resolve_module(model, batch, num_ranks=1)
    part = CapturedPart(resolved.stages[0], dtype=None, device=device, granularity="layer", called={})
    return part, part.arguments(batch, {}, SAMPLES)


def written_devices(captured: CapturedGraph) -> list[str]:
    """Return what in the code of a model's stages and blocks names another device than the capture's."""
    found: list[str] = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        for what, function in (*stage_codes(captured), *profiled_codes(captured)):
            found += [f"{what}: {problem}" for problem in _written(function, captured.device)]
    return found


def stage_codes(captured: CapturedGraph) -> Codes:
    """Yield the code of three stages."""
    graph = coarsen(captured)
    size = -(-len(graph.blocks) // NUM_STAGES)
    for first in range(0, len(graph.blocks), size):
        blocks = graph.blocks[first : first + size]
        names = {block.name for block in blocks}
        crossing = {
            n for edge in graph.edges if edge.src in names and edge.dst not in names for n in edge.tensors
        }
        ends = {*captured.op_graph.outputs.values(), captured.op_graph.loss}
        nodes = [node for block in blocks for node in block.nodes]
        yield (
            f"stage {first // size}",
            build_stage_function(captured, nodes, [n for n in nodes if n in crossing | ends]),
        )


def profiled_codes(captured: CapturedGraph) -> Codes:
    """Yield the code of every block and of its replicas, as a profile times them."""
    for code in block_codes(captured, coarsen(captured)):
        yield f"block {code.block}", code.function
        if code.replicas is not None:
            yield f"replicas of {code.block}", code.replicas


def _written(function: StageFunction, device: torch.device) -> list[str]:
    """Return the devices in a code's arguments, those of bodies that it calls included, and of its constants."""
    assert function.module is not None
    found = [f"a constant is on {c.device}" for c in function.constants if c.device != device]
    for inner in function.module.modules():
        for node in inner.graph.nodes if isinstance(inner, fx.GraphModule) else ():
            found += _elsewhere(node, (node.args, node.kwargs), device)
    return found


def _elsewhere(node: fx.Node, value: Any, device: torch.device) -> list[str]:
    leaves = torch.utils._pytree.tree_leaves(value)
    devices = [part.device if isinstance(part, Tensor) else part for part in leaves]
    return [
        f"{node.name} ({node.target}): {d}" for d in devices if isinstance(d, torch.device) and d != device
    ]


def told(captured: CapturedGraph) -> Analysis:
    """Return an analysis as rank 0 tells it to the others."""
    return loads(Analysis, dumps(captured.analysis))


@pytest.mark.parametrize(("name", "is_training"), [*((name, True) for name in FAMILIES), ("clip", False)])
def test_code_of_every_rank_names_its_own_device(name: str, is_training: bool) -> None:
    first, arguments = make_part(name, torch.device("cuda", 0))
    rank_0 = first.capture(arguments, is_training=is_training)
    own, arguments = make_part(name, torch.device("cuda", 3))
    captured = own.capture_again(told(rank_0), arguments)
    assert "index=3" in "".join(function.code for _, function in stage_codes(captured))
    assert written_devices(captured) == []


def constants() -> torch.nn.Module:
    """Return a model that makes a table, and positions, while it is traced."""

    def run(model: Any, x: torch.Tensor) -> torch.Tensor:
        table = torch.tensor([1.0, 2.0, 3.0, 4.0])
        return (model.linear(x) * table + torch.arange(4, device=x.device)).mean()

    return Calls(run, linear=torch.nn.Linear(4, 4))


def test_a_constant_lies_where_the_code_computes() -> None:
    captured = capture_model(constants(), {"x": torch.randn(2, 4)}, device="cuda:0")
    assert captured.constants, "the table is a constant of the graph"
    for index in (0, 5):
        elsewhere = dataclasses.replace(captured, device=torch.device("cuda", index))
        assert written_devices(elsewhere) == []


def test_what_computes_on_the_cpu_on_purpose_stays_there() -> None:
    captured = capture_model(constants(), {"x": torch.randn(2, 4)})
    nodes = [node.name for node in captured.op_graph.nodes]
    elsewhere = dataclasses.replace(captured, device=torch.device("meta"))
    code = build_stage_function(elsewhere, nodes, [str(captured.op_graph.loss)]).code
    assert "cpu" in code and "meta" not in code


def test_an_analysis_for_another_type_of_device_is_refused() -> None:
    model, batch = constants(), {"x": torch.randn(2, 4)}
    analysis = capture_model(model, batch).analysis
    with pytest.raises(ValueError, match=r"device is cuda:1, .* analysed for cpu; use one type"):
        recapture(model, analysis, batch, device="cuda:1")


def test_what_was_measured_on_one_device_is_found_from_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A store that rank 0 wrote on cuda:0 serves a job whose rank 0 is on cuda:3, a GPU of the same model."""
    keys: list[str] = []

    def find_or_measure(store: CostStore, key: dict[str, Any], _: Any) -> None:
        keys.append(str(store.path(key)))

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(CostStore, "find_or_measure", find_or_measure)
    model, batch = constants(), {"x": torch.randn(2, 4)}
    for index in (0, 3):
        captured = capture_model(model, batch, device=f"cuda:{index}")
        state: dict[str, torch.Tensor] = dict(model.named_parameters())
        profile_blocks(captured, coarsen(captured), model_state=state, batch=batch, cache_dir=tmp_path)
    assert len(keys) == 2 and len(set(keys)) == 1
    modules = [torch.nn.Identity(), torch.nn.Identity()]
    for index, module in enumerate(modules):
        module.device = torch.device("cuda", 3 * index)
    assert describe_module(modules[0]) == describe_module(modules[1])
