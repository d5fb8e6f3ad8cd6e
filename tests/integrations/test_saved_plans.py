"""A plan that `gpp plan --out` made from a configuration alone trains the model through the ``plan`` key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpp_plugin.cli import main
from tests.integrations.engine_jobs import B, U, check_training
from tests.integrations.test_schedules import train_under
from tests.models import build
from tests.ranks import run_kept_ranks
from tests.reference import train_reference

SCHEDULES = ("auto", "1f1b", "2f2b", "gpipe", "greedy", "zero_bubble")


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Plan GPT-2 at twice the training's sequence length, once under each schedule; CLIP as it is."""
    folder = tmp_path_factory.mktemp("plans")
    made = {}
    for name, schedule, length in [*(("gpt2", s, 16) for s in SCHEDULES), ("clip", "auto", 8)]:
        model, _ = build(name)
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder / name)
        out = folder / f"{name}-{schedule}.json"
        arguments = (
            f"plan {folder / name} --cluster auto --devices 2 --mini-batch {B} --loss-unit {U} --stages 2"
        )
        arguments += f" --micro-batch 2 --length {length} --schedule {schedule} --out {out}"
        assert main(arguments.split()) == 0
        made[f"{name} {schedule}"] = out
    return made


def test_saved_plans_train(plans: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    blocks: list[dict[str, Any]] = [
        {"model": name.split()[0], "plan": str(path), "stages": "auto"} for name, path in plans.items()
    ]
    per_rank = run_kept_ranks(train_under, 2, blocks, timeout_s=200)
    for index, name in enumerate(plans):
        model, make_batch = build(name.split()[0])
        reference = train_reference(model, [make_batch(B, seed) for seed in range(2)], unit=U)
        answers = [found[index] for found in per_rank]
        check_training(answers, reference)
        if name.startswith("gpt2"):
            assert all(any("made for other shapes" in note for note in a["notes"]) for a in answers)
        wanted = {"gpt2 gpipe": "gpipe", "gpt2 greedy": "greedy", "gpt2 zero_bubble": "zero_bubble"}.get(name)
        if wanted:
            assert {stage.schedule for stage in per_rank[0][index]["stages"]} == {wanted}
