"""Mini-batches with padding and without train in turns, captured with either, as in a single process."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from gpp_benchmarks._attention_models import Size, build_family
from tests.ranks import run_ranks
from tests.reference import gradient_errors, train_reference

UNIT = 2
SIZE = Size(width=16, layers=2, length=8, samples=8)


def train(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train each job in turn: a family, captured with one padding, on mini-batches of several."""
    import torch

    from gpp_plugin.runtime.stage_module import MaskChoice
    from tests.integrations.engine_jobs import make_engine
    from tests.runtime.jobs import make_config, use_device

    use_device("cpu")
    answers = []
    use = MaskChoice.use
    for job in jobs:
        model, make_batch = build_family(job["family"], SIZE)
        keeps: Any = (lambda choice, ones: use(choice, ())) if job.get("keeps_masks") else use
        with mock.patch.object(MaskChoice, "use", keeps):
            block = {"stages": 2, "planner": "auto", **job.get("block", {})}
            config = make_config({"mini_batch": SIZE.samples, "unit": UNIT, "block": block})
            engine = make_engine(model, make_batch(job["captured"]), config)
            engine.retain_gradients()
            losses, windows = [], []
            gradients: dict[str, torch.Tensor] = {}
            for padding in job["paddings"]:
                losses.append(float(engine.train_batch(data_iter=iter([make_batch(padding)]))))
                gradients = gradients or {name: g.clone() for name, g in engine.gradients.items()}
                windows.append(engine._rank_runner.num_running)
            answers.append(
                {
                    "losses": losses,
                    "gradients": gradients,
                    "windows": windows,
                    "num_shapes": len(engine._rank_runner.stage_runners[0]._compiled),
                    "has_memory": [s.memory is not None for s in engine.plan.stages],
                }
            )
    return answers


ASYNC = {"mode": "async", "schedule": "1f1b"}
JOBS: list[dict[str, Any]] = [
    {"family": "llama", "captured": "none", "paddings": ["left", "none", "right"]},
    {"family": "llama", "captured": "left", "paddings": ["none", "right", "none", "left"]},
    {"family": "t5", "captured": "none", "paddings": ["right", "none"]},
    {
        "family": "llama", "captured": "none", "paddings": ["none", "left", "none", "left"],
        "block": {"memory": {"recompute": "full"}},
    },
    {
        "family": "llama", "captured": "left", "paddings": ["none", "left", "none"],
        "block": {"memory": {"recompute": "full"}},
    },
    {"family": "llama", "captured": "none", "paddings": ["none", "left"] * 3, "block": ASYNC},
    {
        "family": "llama", "captured": "none", "paddings": ["none", "left"] * 3, "block": ASYNC,
        "keeps_masks": True,
    },
]  # fmt: skip


@pytest.fixture(scope="module")
def answers() -> list[list[dict[str, Any]]]:
    """Of each rank, of each job."""
    return run_ranks(train, 2, JOBS, timeout_s=300)


@pytest.mark.parametrize("number", range(5))
def test_training_equals_a_single_process(answers: list[list[dict[str, Any]]], number: int) -> None:
    job = JOBS[number]
    model, make_batch = build_family(job["family"], SIZE)
    batches = [make_batch(padding) for padding in job["paddings"]]
    reference = train_reference(model, batches, unit=UNIT)
    found: dict[str, Any] = {}
    for rank in answers:
        assert rank[number]["losses"][0] == pytest.approx(reference.losses[0], rel=1e-6)
        assert rank[number]["losses"] == pytest.approx(reference.losses, rel=1e-5)
        assert rank[number]["num_shapes"] == 1, "padding is no other shape: nothing is captured again"
        assert all(rank[number]["has_memory"]) == ("block" in job)
        found |= rank[number]["gradients"]
    assert found.keys() == reference.gradients.keys()
    assert max(gradient_errors(found, reference.gradients).values()) < 2e-6


def test_in_mode_async_padding_drains_nothing(answers: list[list[dict[str, Any]]]) -> None:
    for rank in answers:
        assert rank[5]["windows"] == [1, 2, 3, 4, 5, 6]
        assert rank[5]["losses"] == pytest.approx(rank[6]["losses"], rel=1e-5)
