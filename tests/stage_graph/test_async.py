"""Mode async on a user's own modules equals PipeDream's staleness emulated in one process."""

from __future__ import annotations

import pytest
import torch

from tests.integrations.pipedream import Emulation, PlainStage, reported
from tests.ranks import run_kept_ranks
from tests.stage_graph import jobs
from tests.stage_graph.graphs import B, U, Whole, batch_of

NUM_BATCHES = 6


def test_modules_step_after_every_micro_batch_with_the_weights_of_its_forward() -> None:
    answers = run_kept_ranks(jobs.train_asynchronously, 3, NUM_BATCHES)
    stages = [PlainStage(parameters=names, held=held) for names, held in answers[0]["stages"]]
    emulation = Emulation(
        Whole("skip").float(),
        stages,
        unit=U,
        window=B // U,
        make_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01),
    )
    losses = []
    for seed in range(NUM_BATCHES):
        batch = {key: rows.float() for key, rows in batch_of("skip", seed=seed).items()}
        losses.append(emulation.mini_batch(batch, U))
    emulation.flush()
    assert max(answers[0]["staleness"].values()) > 0
    wanted = dict(emulation.model.named_parameters())
    for answer in answers:
        assert answer["losses"] == pytest.approx(reported(losses, emulation.longest), abs=1e-6)
        assert answer["parameters"]
        for name, parameter in answer["parameters"].items():
            torch.testing.assert_close(parameter, wanted[name].detach(), rtol=1e-5, atol=1e-6)
