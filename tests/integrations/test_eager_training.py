"""Jobs with modules that run as they are equal one process: losses, gradients, weights after three AdamW steps."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.eager_models import build_eager
from tests.integrations import eager_jobs
from tests.ranks import run_kept_ranks
from tests.reference import gradient_errors, loss_of, train_reference, units_of
from tests.runtime.jobs import Job, make_batches
from tests.tiers import some


def job(model: str, *, zero: int = 0, **block: Any) -> Job:
    block = {"planner": "auto", "stages": 3, **block}
    return {"model": model, "mini_batch": 8, "unit": 4, "steps": 3, "zero": zero, "block": block}


ALL_TASKS: dict[str, Job] = {
    "gradient reversal": job("adversarial"),
    "a loop on values in every layer": job("routed"),
    "a loop on values, ZeRO 1": job("routed", zero=1, stages=2),
    "recomputed": job("routed, one frozen", memory={"recompute": "full"}),
    "asked for": job("adversarial", eager=["encoder.*"]),
    "ViLT": job("vilt"),
    "Reformer": job("reformer"),
    "DETR": job("detr"),
    "parts of a graph": job("parts", stages="auto", eager=["body.layers.0"]),
}
TASKS = dict(some(ALL_TASKS.items(), every=4))


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    directory = str(tmp_path_factory.mktemp("weights"))
    per_rank = run_kept_ranks(eager_jobs.train_eager, 3, list(TASKS.values()), directory, timeout_s=300)
    return {name: [found[i] for found in per_rank] for i, name in enumerate(TASKS)}


@pytest.mark.parametrize("name", TASKS)
def test_training_equals_one_process(answers: dict[str, list[dict[str, Any]]], name: str) -> None:
    one = TASKS[name]
    model, make_batch = build_eager(one["model"])
    batches = make_batches(make_batch, one)
    reference = train_reference(model, batches, unit=one["unit"])
    covered: set[str] = set()
    for answer in answers[name]:
        assert answer["losses"] == answers[name][0]["losses"]
        assert answer["losses"][0] == pytest.approx(reference.losses[0], rel=1e-6)
        assert answer["losses"] == pytest.approx(reference.losses, rel=1e-5)
        errors = gradient_errors(answer["gradients"], reference.gradients)
        assert max(errors.values(), default=0.0) < 2e-6, errors
        covered |= set(answer["gradients"])
    assert covered == set(reference.gradients)


def test_weights_are_saved_under_the_models_own_names(answers: dict[str, list[dict[str, Any]]]) -> None:
    name = "a loop on values in every layer"
    model, make_batch = build_eager(TASKS[name]["model"])
    trained = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3, weight_decay=0.01)
    for batch in make_batches(make_batch, TASKS[name]):
        optimizer.zero_grad()
        units = units_of(batch, 4)
        for part in units:
            (loss_of(trained(**part)) / len(units)).backward()
        optimizer.step()
    saved: dict[str, torch.Tensor] = {}
    for path in Path(answers[name][0]["weights"]).glob("*.safetensors"):
        with safe_open(path, framework="pt") as reader:
            saved |= {key: reader.get_tensor(key) for key in reader.keys()}
    wanted = trained.state_dict()
    assert saved.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.allclose(saved[key], value, rtol=1e-5, atol=1e-6), key
    assert float(wanted["layers.0.router.calls"]) == 6.0  # three steps of two units


def test_what_is_kept_whole_is_known_on_every_rank(answers: dict[str, list[dict[str, Any]]]) -> None:
    for answer in answers["a loop on values in every layer"]:
        assert answer["eager"] == tuple(f"layers.{i}.router" for i in range(3))
    assert {a["eager"] for a in answers["gradient reversal"]} == {()}, "a function needs no module kept whole"
    assert answers["asked for"][0]["eager"] == ("encoder.0", "encoder.1", "encoder.2")
    assert len(answers["ViLT"][0]["plan"].stages) == 3
