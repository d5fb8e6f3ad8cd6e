"""Compiled stages through `deepspeed.initialize`: losses and every gradient as on torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations import compile_jobs as jobs
from tests.ranks import run_kept_ranks


def train(
    cases: list[Any], folder: Path, *, model: str = "gpt2", dropout: float = 0.0, is_plain: bool = True
) -> Any:
    """Return the answers of both ranks to each case."""
    of_ranks = run_kept_ranks(jobs.train_all, 2, cases, model, str(folder), dropout, is_plain, timeout_s=290)
    return [list(of_case) for of_case in zip(*of_ranks, strict=True)]


def test_losses_and_gradients_are_those_of_torch(tmp_path: Path) -> None:
    off, whole, named = train([False, True, {"transformer.h": True}], tmp_path)
    for both in (whole, named):
        for own, right in zip(both, off, strict=True):
            assert own["losses"] == pytest.approx(right["losses"], rel=1e-5)
            assert own["error"] <= 1e-5 and own["differences"] == []
            assert own["num_compiled"] > 0 == right["num_compiled"]
    first, second = whole
    assert first["compiled"] == second["compiled"] and all(first["compiled"])
    assert all(label.endswith(" on compiled code") for label in first["labels"])
    assert any("memory.recompute and memory.swap are off" in note for note in first["notes"])
    assert off[0]["compiled"] == [(), ()] and off[0]["notes"] == []
    assert any(
        note.startswith("compile: transformer.h.0 and 1 like it compiled: ") for note in first["notes"]
    )
    blocks = [block for of_stage in named[0]["compiled"] for block in of_stage]
    assert blocks == ["transformer.h.0", "transformer.h.1"]


@pytest.mark.parametrize("is_plain", [True, False])
def test_weights_that_ranks_hold_in_parts_are_whole_while_their_stage_is_compiled(
    is_plain: bool, tmp_path: Path
) -> None:
    for off, own in run_kept_ranks(jobs.train_sharded, 2, str(tmp_path), is_plain, timeout_s=290):
        assert any(own["compiled"]) and not any(off["compiled"])
        assert own["losses"] == pytest.approx(off["losses"], rel=1e-5)
        assert own["again"] == 0 and own["wrong"] == []


@pytest.mark.parametrize("model", ["gpt2", "clip", "t5"])
def test_inductor_on_real_ranks(model: str, tmp_path: Path) -> None:
    off, whole = train([False, True], tmp_path, model=model, dropout=0.0, is_plain=False)
    for own, right in zip(whole, off, strict=True):
        assert own["losses"] == pytest.approx(right["losses"], rel=1e-5)
        assert own["error"] <= 1e-5
