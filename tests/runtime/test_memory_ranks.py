"""Pipelines whose stages swap and recompute: the same losses and gradients, bit by bit, and what was planned."""

from __future__ import annotations

from typing import Any

import torch

from tests.ranks import run_ranks
from tests.runtime import jobs
from tests.tiers import some

WHOLE: dict[str, Any] = {"num_sliced": 0, "joins_last_slice": False, "schedule": "1f1b"}
SLICED: dict[str, Any] = WHOLE | {"num_sliced": 2}
SPLIT: dict[str, Any] = WHOLE | {"schedule": "zero_bubble"}
STAGES = {"clip": ("text_model", "vision_model"), "t5": ("encoder", "decoder")}
ALL: dict[str, dict[str, Any]] = {
    "t5 in bf16": {"name": "t5", "bf16": True, "overrides": {0: WHOLE, 1: WHOLE, 2: WHOLE}},
    "clip with half forwards and split backwards": {
        "name": "clip",
        "bf16": False,
        "overrides": {0: SLICED, 1: SLICED | {"schedule": "zero_bubble"}, 2: SPLIT},
    },
}


def job_pair(name: str, *, bf16: bool, overrides: dict[int, dict[str, Any]]) -> list[jobs.Job]:
    """Return a job that keeps everything, and one whose three stages swap and recompute."""
    plain = jobs.by_hand(
        name,
        *STAGES[name],
        model_options={"dropout": 0.1},
        steps=2,
        seed=5,
        config={"bf16": {"enabled": bf16}},
        overrides=overrides,  # halves draw other masks: nothing is left to what takes least time today
    )
    return [plain, {**plain, "memory": True}]


def test_swapping_and_recomputing_stages_train_as_without() -> None:
    names = some(ALL, every=2)
    pairs = [job_pair(**ALL[name]) for name in names]
    per_rank = run_ranks(jobs.train, 3, [job for pair in pairs for job in pair], timeout_s=400)
    for index, what in enumerate(names):
        for rank, answers in enumerate(per_rank):
            plain, ours = answers[2 * index : 2 * index + 2]
            assert all(ours["has_memory"]) and not any(plain["has_memory"])
            assert ours["losses"] == plain["losses"], f"{what}: losses on rank {rank}"
            assert ours["gradients"].keys() == plain["gradients"].keys()
            for name, gradient in plain["gradients"].items():
                assert torch.equal(ours["gradients"][name], gradient), f"{what}: {name} on rank {rank}"
