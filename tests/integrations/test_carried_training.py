"""What a forward leaves for the next one is trained with on two stages as in one process, and comes with checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import carried_models
from tests.carried_models import make_batch
from tests.integrations import carried_jobs
from tests.ranks import run_kept_ranks

BATCH, UNIT, STEPS = 4, 2, 5


def train_alone(name: str, batches: list[dict[str, Any]]) -> tuple[list[float], dict[str, Tensor]]:
    """Train in one process, a loss unit after the other."""
    torch.manual_seed(0)
    model = getattr(carried_models, name)()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        units = [{key: value[i : i + UNIT] for key, value in batch.items()} for i in range(0, BATCH, UNIT)]
        found = []
        for unit in units:
            loss = model(**unit)["loss"] / len(units)
            loss.backward()
            found.append(float(loss))
        optimizer.step()
        losses.append(sum(found))
    return losses, model.state_dict()


@pytest.mark.parametrize("recompute", ["off", "full"])
def test_two_stages_train_as_one_process_also_after_a_checkpoint(recompute: str, tmp_path: Path) -> None:
    batches = [make_batch(BATCH, seed) for seed in range(STEPS)]
    block = {"stages": 2, "memory": {"recompute": recompute}}
    directory = str(tmp_path) if recompute == "off" else ""
    answers = run_kept_ranks(
        carried_jobs.train_carried, 2, "Everything", batches, directory, block, timeout_s=120
    )
    losses, state = train_alone("Everything", batches)
    assert answers[0]["losses"] == answers[1]["losses"] == pytest.approx(losses, rel=2e-6)
    assert answers[0]["state"].keys() == state.keys() and len(answers[0]["stages"]) == 2
    for name, value in state.items():
        torch.testing.assert_close(answers[0]["state"][name], value, rtol=1e-5, atol=1e-6)


def test_a_model_whose_python_reads_its_state_trains_as_one_block() -> None:
    names = tuple(kind.__name__ for kind in carried_models.WHOLE)
    batches = [make_batch(BATCH, seed) for seed in range(STEPS)]
    (answer,) = run_kept_ranks(carried_jobs.train_whole, 1, names, batches)
    for name in names:
        losses, state = train_alone(name, batches)
        assert answer[name]["losses"] == pytest.approx(losses, rel=2e-6)
        for key, value in state.items():
            torch.testing.assert_close(answer[name]["state"][key], value, rtol=1e-5, atol=1e-6)


def test_ranks_share_no_stage_that_keeps_state_unless_they_are_asked_to() -> None:
    for answer in run_kept_ranks(carried_jobs.train_with_copies, 2, [make_batch(BATCH, 0)]):
        assert answer["stages"].startswith(
            "each forward leaves centre for the next one, so that each stage has one"
        )
        assert '"data_parallel": 2' in answer["stages"] and "\n" not in answer["stages"]
        assert len(answer["advised"]) == 1 and len(answer["auto"]) == 2
