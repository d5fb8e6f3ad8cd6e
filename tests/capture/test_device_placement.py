"""A rank's code computes on the rank's own device, whatever device rank 0 captured and planned on.

Without a GPU: what code for ``cuda:0`` to ``cuda:7`` names is read; and captured on fake CUDA devices (`fake_cuda`: a
process of its own, where a C++ compiler is at hand) it runs on fake tensors of each, forward and backward.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gpp_plugin.capture.captured_graph import CapturedGraph
from gpp_plugin.capture.coarsen import coarsen
from gpp_plugin.capture.export import capture_model
from gpp_plugin.capture.recapture import recapture
from gpp_plugin.ir.analysis import Analysis
from gpp_plugin.ir.serialize import dumps, loads
from gpp_plugin.model.graph.stage_costs import describe_module
from gpp_plugin.profile.machine import CostStore
from gpp_plugin.profile.measure import profile_blocks
from gpp_plugin.runtime.stage_module import build_stage_function
from tests.capture import fake_cuda
from tests.capture.graphs import Calls
from tests.capture.placement_checks import FAMILIES, make_part, stage_codes, written_devices
from tests.waits import run_program

ROOT = Path(__file__).parents[2]


def told(captured: CapturedGraph) -> Analysis:
    """Return an analysis as rank 0 tells it to the others."""
    return loads(Analysis, dumps(captured.analysis))


@pytest.mark.parametrize(("name", "is_training"), [("gpt2", True), ("clip", True), ("clip", False)])
def test_code_of_every_rank_names_its_own_device(name: str, is_training: bool) -> None:
    first, arguments = make_part(name, torch.device("cuda", 0))
    rank_0 = first.capture(arguments, is_training=is_training)
    own, arguments = make_part(name, torch.device("cuda", 3))
    captured = own.capture_again(told(rank_0), arguments)
    assert "index=3" in "".join(function.code for _, function in stage_codes(captured))
    assert written_devices(captured) == []


@pytest.mark.skipif(
    fake_cuda.COMPILER is None or torch.cuda.is_available(), reason="needs a C++ compiler and no GPU"
)
def test_captured_on_its_own_device_a_rank_computes_forward_and_backward_there(tmp_path: Path) -> None:
    library = fake_cuda.compile_library(tmp_path)
    done = run_program(
        [sys.executable, "-m", "tests.capture.placement_job", str(library)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'benchmarks'}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    assert [name for name, _ in answers] == [*FAMILIES, "clip"]
    assert [answer for answer in answers if answer[1]] == []


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
