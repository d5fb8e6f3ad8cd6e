"""Backends in training and evaluation through `deepspeed.initialize`: losses as on torch, and for weights that change."""

from __future__ import annotations

from typing import Any

import pytest

from gpp_plugin.plugins import find_backend
from tests.integrations import backend_jobs as jobs
from tests.ranks import run_kept_ranks

INSTALLED = [name for name in ("onnxruntime", "openvino") if not find_backend(name).missing()]
CASES: list[Any] = ["off", ["baked"], *({"vision": name} for name in INSTALLED)]


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
    for vision, language in others[:-1]:
        assert vision["stage"] == "vision" and vision["taken"] and not language["taken"]


def test_what_was_measured_is_told_to_all_ranks_and_built_again_for_new_weights(
    answers: list[list[dict[str, Any]]],
) -> None:
    vision, language = answers[1]
    assert vision["backends"] == language["backends"] == {"vision": "baked"}
    assert vision["costs"] == language["costs"] == {"vision": ["torch", "baked"]}
    assert vision["notes"] == language["notes"]
    (note,) = vision["notes"]
    assert note.startswith("stage vision runs on baked: a forward takes ") and "x as fast" in note
    # when it was measured, in training, for other weights, and where evaluation has other operators
    assert vision["built"] in (3, 4) and language["built"] == 0
    assert vision["run"] > 4 * 4, "it ran the micro-batches of four steps"


def test_stages_are_cut_with_what_they_take_on_backends(answers: list[list[dict[str, Any]]]) -> None:
    first, second = answers[-1]
    assert first["planned"] == second["planned"] and first["forward_on"] == second["forward_on"]
    (note,) = first["planned"]
    assert note.startswith("with backends a step takes ") and " ms simulated, on torch " in note
    # where the tower lies best with blocks that train, their stage runs on torch
    assert set(first["forward_on"].values()) <= {"", "baked"}
    # of stages that are given the times alone are others
    given = answers[1][0]
    assert given["planned"] == [] and given["forward_on"] == {"vision": "baked", "language": ""}
