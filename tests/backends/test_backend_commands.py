"""`gpp backends`, `gpp bench backends` and the parts of models that they measure."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from gpp_benchmarks.backends import _ablated
from gpp_plugin.backends.forward_code import WHOLE, part_codes
from gpp_plugin.cli import main
from gpp_plugin.commands.backends_command import format_backends, rows_of
from gpp_plugin.doctor.checks import Status, check_backends
from gpp_plugin.errors import ConfigError
from gpp_plugin.ir.profile import BackendCost, PlacedGroup, StageBackend
from tests.models import build


def result_of(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@torch.no_grad()
def test_a_part_makes_what_its_module_makes() -> None:
    model, make_batch = build("clip")
    batch = make_batch(2)
    vision, projection = part_codes(model, batch, ["vision_model", "visual_projection"])
    pooled = model.eval().vision_model(pixel_values=batch["pixel_values"]).pooler_output
    (made,) = vision.run(*vision.examples)
    torch.testing.assert_close(made, pooled)
    assert [tuple(t.shape) for t in vision.examples] == [(2, 1, 8, 8)]
    # what comes before it was computed for its example
    torch.testing.assert_close(projection.examples[0], pooled)
    torch.testing.assert_close(projection.run(*projection.examples)[0], model.visual_projection(pooled))
    with pytest.raises(ConfigError, match="--part 'vison_model': no module .* did you mean 'vision_model"):
        part_codes(model, batch, ["vison_model"])


def test_the_command_measures_the_whole_model_and_says_what_it_would_take(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["--backends", "torch", "--samples", "2", "--again", "--json"]
    assert main(["backends", "two_branch", *asked]) == 0
    result = result_of(capsys)
    (row,) = result["rows"]
    assert (row["part"], row["backend"], row["is_chosen"], row["over_torch"]) == (WHOLE, "torch", True, 1.0)
    assert [choice["backend"] for choice in result["choices"]] == ["torch"]


def test_the_benchmark_has_a_row_a_backend_and_one_for_auto(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--models", "amoeba_like", "--backends", "torch", "--samples", "1", "--rounds", "1", "--json"]
    assert main(["bench", "backends", *asked]) == 0
    result = result_of(capsys)
    assert [(row["backend"], row["over_torch"] > 0) for row in result["rows"]] == [
        ("torch", True),
        ("auto", True),
    ]
    assert result["rows"][1]["takes"] == "torch" and result["thesis"]
    assert result["ablation"] == [] and result["is_monotone"]


def test_the_ablation_takes_the_favourite_away_first_and_the_others_alone() -> None:
    costs = [
        BackendCost(backend="torch", us=10.0),
        BackendCost(backend="b", us=7.0),
        BackendCost(backend="a", us=5.0),
        BackendCost(backend="c", refused="cannot"),
    ]
    assert _ablated("tower", costs) == {("a",): "b", ("a", "b"): "torch", ("b",): "a"}


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backends", "clip_tini"]) == 1
    assert "did you mean 'clip_tiny'" in capsys.readouterr().err
    assert main(["backends", "clip_tiny", "--samples", "0"]) == 1
    assert capsys.readouterr().err == "gpp backends: --samples 0: give at least 1\n"
    with pytest.raises(SystemExit):
        main(["backends", "clip_tiny", "--backends", "openvno"])
    assert "no 'openvno'; did you mean 'openvino'?" in capsys.readouterr().err


def test_the_table_has_times_refusals_and_the_choice() -> None:
    costs = (
        BackendCost(backend="torch", us=2000.0),
        BackendCost(backend="openvino", us=1000.0, build_s=3.0, error=4e-7),
        BackendCost(backend="onnxruntime", refused="operator topk (aten.topk.default): RuntimeError"),
    )
    chosen = StageBackend(
        stage="vision", groups=(PlacedGroup(backend="openvino"),), us=1000.0, torch_us=2000.0, costs=costs
    )
    assert format_backends([chosen]).splitlines() == [
        "vision       ms  x as fast  error  s to build",
        "torch     2.000       1.00  0e+00         0.0",
        "openvino  1.000       2.00  4e-07         3.0",
        "onnxruntime: operator topk (aten.topk.default): RuntimeError",
        "-> openvino, 1.000 ms less a forward",
    ]
    rows = rows_of([chosen])["rows"]
    assert [(row["backend"], row["over_torch"], row["is_chosen"]) for row in rows] == [
        ("torch", 1.0, False),
        ("openvino", 2.0, True),
        ("onnxruntime", None, False),
    ]


def test_the_doctor_has_a_row_a_backend() -> None:
    found = {check.name: check for check in check_backends()}
    assert set(found) >= {"backend inductor", "backend onnxruntime", "backend openvino"}
    assert found["backend inductor"].status is Status.OK and not found["backend inductor"].is_required
    for check in found.values():
        assert (check.status is Status.OK) == (check.advice == "")
