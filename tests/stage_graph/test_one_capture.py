"""A plain model and the same model as a graph of one captured part are one thing under two spellings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_kept_ranks
from tests.stage_graph import one_capture_jobs
from tests.stage_graph.one_capture_jobs import NUM_RANKS, WAYS, files_of

Answers = list[dict[str, dict[str, dict[str, Any]]]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("both")


@pytest.fixture(scope="module")
def answers(directory: Path) -> Answers:
    return run_kept_ranks(one_capture_jobs.train_both, NUM_RANKS, str(directory), timeout_s=300.0)


@pytest.mark.parametrize("way", WAYS)
def test_plan_programs_losses_gradients_and_weights_are_equal(answers: Answers, way: str) -> None:
    for answer in answers:
        plain, captured = answer[way]["plain"], answer[way]["captured"]
        for what in ("plan", "programs", "losses", "evaluated"):
            assert plain.get(what) == captured.get(what), what
        for left, right in zip(
            [*plain["gradients"], plain["weights"]],
            [*captured["gradients"], captured["weights"]],
            strict=True,
        ):
            assert list(left) == list(right)
            assert all(torch.equal(tensor, right[name]) for name, tensor in left.items())


@pytest.mark.parametrize("way", [way for way in WAYS if way != "async"])
def test_each_goes_on_from_the_other_s_checkpoint(answers: Answers, way: str) -> None:
    for answer in answers:
        for spelling in ("plain", "captured"):
            assert answer[way][spelling]["continued"] == answer[way][spelling]["next"]


@pytest.mark.parametrize("way", WAYS)
def test_they_save_the_same_files(answers: Answers, directory: Path, way: str) -> None:
    del answers
    plain, captured = (files_of(directory / way / f"{spelling}-export") for spelling in ("plain", "captured"))
    assert "config.json" in plain
    assert plain == captured


def test_both_share_one_profile(answers: Answers, directory: Path) -> None:
    del answers
    # and all ways do, but ZeRO 1, which holds other bytes of each parameter
    assert len(list((directory / "profiles").glob("*.json"))) == 2


def test_outputs_and_inputs_under_names_of_the_user_s_own() -> None:
    for answer in run_kept_ranks(one_capture_jobs.evaluate_named, 2):
        for plain, captured in zip(answer["plain"], answer["captured"], strict=True):
            same = torch.equal(plain, captured) if isinstance(plain, torch.Tensor) else plain == captured
            assert same
