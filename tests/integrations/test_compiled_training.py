"""Compiled stages through `deepspeed.initialize`: losses and every gradient as in one process, and as on torch."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.integrations import compile_jobs as jobs
from tests.integrations.engine_jobs import B, U
from tests.models import build
from tests.ranks import run_kept_ranks
from tests.reference import gradient_errors, train_reference


def train(
    cases: list[Any], folder: Path, *, model: str = "gpt2", dropout: float = 0.0, is_plain: bool = True
) -> Any:
    """Return the answers of both ranks to each case."""
    of_ranks = run_kept_ranks(jobs.train_all, 2, cases, model, str(folder), dropout, is_plain, timeout_s=290)
    return [list(of_case) for of_case in zip(*of_ranks, strict=True)]


@pytest.fixture(scope="module", params=[True, {"transformer.h": True}], ids=["all", "layers"])
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Return what is asked to be compiled, and what both ranks found."""
    return request.param, train([request.param], tmp_path_factory.mktemp("compiled"))[0]


def test_losses_and_gradients_are_those_of_one_process(compiled: tuple[Any, Any]) -> None:
    model, make_batch = build("gpt2")
    plain = train_reference(model, [make_batch(B, seed) for seed in (0, 1, 2, 9)], unit=U)
    for own in compiled[1]:
        assert own["losses"] == pytest.approx(plain.losses, rel=1e-5), "three steps, and an evaluation"
        assert own["gradients"].keys() == plain.gradients.keys()
        assert max(gradient_errors(own["gradients"], plain.gradients).values()) <= 1e-5


def test_what_is_compiled_is_what_is_asked_and_is_told(compiled: tuple[Any, Any]) -> None:
    asked, (first, second) = compiled
    assert all(own["num_compiled"] > 0 and own["differences"] == [] for own in (first, second))
    assert first["compiled"] == second["compiled"]
    if asked is not True:
        assert [*chain(*first["compiled"])] == ["transformer.h.0", "transformer.h.1"]
        return
    assert all(first["compiled"])
    assert all(label.endswith(" on compiled code") for label in first["labels"])
    assert any("memory.recompute and memory.swap are off" in note for note in first["notes"])
    assert any(
        note.startswith("compile: transformer.h.0 and 1 like it compiled: ") for note in first["notes"]
    )


@pytest.mark.parametrize("model", ["gpt2", "clip", "t5"])
def test_inductor_on_real_ranks(model: str, tmp_path: Path) -> None:
    off, whole = train([False, True], tmp_path, model=model, dropout=0.0, is_plain=False)
    for own, right in zip(whole, off, strict=True):
        assert own["losses"] == pytest.approx(right["losses"], rel=1e-5)
        assert own["error"] <= 1e-5 and own["num_compiled"] > 0 == right["num_compiled"]
        assert right["compiled"] == [(), ()] and right["notes"] == []
