"""Compiled stages through `deepspeed.initialize`: losses and every gradient as in one process, and as on torch."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from gpp_plugin.backends import compiled_blocks
from tests.compilers import compile_plainly
from tests.integrations.engine_jobs import B, U, config_of, make_engine, steps_and_gradients
from tests.models import build
from tests.ranks import run_kept_ranks
from tests.reference import gradient_errors, train_reference


def train_one(asked: Any, *, model: str, folder: str) -> dict[str, Any]:
    """Train three steps, evaluate, and tell what is compiled."""
    made, make_batch = build(model)
    batches = [make_batch(B, seed) for seed in range(3)]
    block = {"stages": 2, "slicing": "off", "compile": asked, "profile_dir": folder}
    engine = make_engine(made, batches[0], config_of(block=block))
    losses, gradients = steps_and_gradients(engine, batches)
    losses.append(float(engine.eval_batch(iter([make_batch(B, 9)]))))
    report = engine.memory_report()
    told = {
        "losses": losses,
        "gradients": gradients,
        "compiled": [stage.compiled for stage in engine.plan.stages],
        "labels": [stage.forward_label for stage in engine.plan.stages],
        "notes": [note for note in engine.plan.notes if note.startswith("compile: ")],
        "num_compiled": engine._backends.compiled.compiler.num_compiled,
        "differences": list(report.differences),
    }
    engine.destroy()
    return told


def train_cases(cases: list[Any], model: str, folder: str, is_plain: bool) -> list[dict[str, Any]]:
    """Train once for each value of the key.

    Args:
        is_plain: with a compiler that takes no seconds.
    """
    compiler = compile_plainly if is_plain else compiled_blocks.compile_with_inductor
    with mock.patch.object(compiled_blocks, "compile_with_inductor", compiler):
        found = [train_one(asked, model=model, folder=folder) for asked in cases]
    for one in found:  # compiled code may make the planner cut the stages elsewhere
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, one["gradients"])
        one["gradients"] = {name: gradient for own in of_ranks for name, gradient in own.items()}
    right = found[0]["gradients"]
    for one in found:
        assert one["gradients"].keys() == right.keys()
        one["error"] = max(gradient_errors(one["gradients"], right).values())
    return found


def train(cases: list[Any], folder: Path, *, model: str = "gpt2", is_plain: bool = True) -> Any:
    """Return the answers of both ranks to each case."""
    of_ranks = run_kept_ranks(train_cases, 2, cases, model, str(folder), is_plain, timeout_s=290)
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
    like = "compile: transformer.h.0 and 1 like it compiled: "
    assert any(note.startswith(like) for note in first["notes"])


@pytest.mark.parametrize("model", ["gpt2", "clip", "t5"])
def test_inductor_on_real_ranks(model: str, tmp_path: Path) -> None:
    off, whole = train([False, True], tmp_path, model=model, is_plain=False)
    for own, right in zip(whole, off, strict=True):
        assert own["losses"] == pytest.approx(right["losses"], rel=1e-5)
        assert own["error"] <= 1e-5 and own["num_compiled"] > 0 == right["num_compiled"]
        assert right["compiled"] == [(), ()] and right["notes"] == []
