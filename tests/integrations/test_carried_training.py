"""What a forward leaves for the next one is trained with on two stages as in one process, and comes with checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import carried_models
from tests.carried_models import make_batch
from tests.integrations import carried_jobs
from tests.ranks import run_kept_ranks
from tests.reference import train_reference

BATCH, UNIT, STEPS = 4, 2, 5


@pytest.mark.parametrize("recompute", ["off", "full"])
def test_two_stages_train_as_one_process_also_after_a_checkpoint(recompute: str, tmp_path: Path) -> None:
    batches = [make_batch(BATCH, seed) for seed in range(STEPS)]
    block = {"memory": {"recompute": recompute}}
    directory = str(tmp_path) if recompute == "off" else ""
    answers = run_kept_ranks(
        carried_jobs.train_carried, 2, "Everything", batches, directory, block, timeout_s=120
    )
    torch.manual_seed(0)
    alone = train_reference(
        carried_models.Everything(),
        batches,
        unit=UNIT,
        make_optimizer=lambda own: torch.optim.SGD(own, lr=0.1),
    )
    state = alone.model.state_dict()
    assert answers[0]["losses"] == answers[1]["losses"] == pytest.approx(alone.losses, rel=2e-6)
    assert answers[0]["state"].keys() == state.keys() and len(answers[0]["stages"]) == 2
    for name, value in state.items():
        torch.testing.assert_close(answers[0]["state"][name], value, rtol=1e-5, atol=1e-6)
