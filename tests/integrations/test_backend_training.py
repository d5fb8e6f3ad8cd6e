"""Backends in training and evaluation through `deepspeed.initialize`: losses as on torch, weights that change, mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpp_plugin.extensions import find_backend
from tests.integrations import backend_jobs as jobs
from tests.ranks import run_kept_ranks

INSTALLED = [name for name in ("onnxruntime", "openvino") if not find_backend(name).missing()]
CASES: list[Any] = ["off", {"vision": "baked"}, ["baked"], *({"vision": name} for name in INSTALLED)]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """Return the answers of both ranks to each case, ``off`` first."""
    folder = str(tmp_path_factory.mktemp("costs"))
    of_ranks = run_kept_ranks(jobs.train_all, 2, CASES, folder, timeout_s=290)
    return [list(of_case) for of_case in zip(*of_ranks, strict=True)]


def test_losses_are_those_of_torch_to_rounding_and_after_weights_changed(
    answers: list[list[dict[str, Any]]],
) -> None:
    off, *others = answers
    assert all(one["backends"] == {} and not one["taken"] and one["built"] == 0 for one in off)
    for both in others:
        for own, right in zip(both, off, strict=True):
            assert own["losses"] == pytest.approx(right["losses"], rel=1e-5)
        vision, language = both
        assert vision["stage"] == "vision" and vision["taken"] and not language["taken"]


def test_a_backend_that_is_named_is_built_again_for_new_weights(
    answers: list[list[dict[str, Any]]],
) -> None:
    vision, language = answers[1]
    assert vision["backends"] == language["backends"] == {"vision": "baked"}
    assert vision["built"] in (2, 3), (
        "in training, for other weights, and where evaluation has other operators"
    )
    # 4 micro-batches a step: the first of training, and that behind the change, run on torch and are compared twice
    assert vision["run"] >= 5 * 4 and language["built"] == 0


def test_a_list_is_measured_once_for_all_ranks_and_the_plan_says_what_was_chosen(
    answers: list[list[dict[str, Any]]],
) -> None:
    vision, language = answers[2]
    assert vision["backends"] == language["backends"] == {"vision": "baked"}
    assert vision["costs"] == language["costs"] == {"vision": ["torch", "baked"]}
    assert vision["notes"] == language["notes"]
    (note,) = vision["notes"]
    assert note.startswith("stage vision runs on baked: a forward takes ") and "x as fast" in note
    assert language["built"] == 0


def test_stages_that_train_or_are_none_are_refused_on_every_rank(tmp_path: Path) -> None:
    cases = [{"language": "baked"}, {"visoin": "baked"}]
    for texts in run_kept_ranks(jobs.refusals, 2, cases, str(tmp_path), timeout_s=200):
        assert texts == [
            "ConfigError: graph_pipeline.backends: 'language': 'baked': the stage trains, and backends run stages "
            "without gradients alone; freeze its parameters (requires_grad_(False)) or remove it",
            "ConfigError: graph_pipeline.backends: 'visoin': 'baked': no such stage; did you mean 'vision'?; stages are "
            "vision, language",
        ]
