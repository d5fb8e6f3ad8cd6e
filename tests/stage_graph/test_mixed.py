"""Captured and explicit stages in one model train as the model in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.ranks import run_kept_ranks
from tests.reference import train_reference
from tests.stage_graph import jobs
from tests.stage_graph.graphs import U
from tests.stage_graph.mixed import WholeMixed, mixed_batch

EXACT, NEAR = 1e-12, 1e-5


def test_a_mixed_graph_behind_deepspeed_initialize(tmp_path: Path) -> None:
    answers = run_kept_ranks(jobs.train_mixed_by_engine, 4, str(tmp_path))
    model = WholeMixed().float()
    batches = [{k: v.float() for k, v in mixed_batch(seed).items()} for seed in range(3)]
    losses = train_reference(model, batches, unit=U).losses
    for answer in answers:
        assert answer["losses"] == pytest.approx(losses, rel=NEAR)
        assert answer["reloaded"] == answer["losses"][2:]
        assert answer["hidden"].shape == (3, 5, 8)
    trained = WholeMixed().float()
    state = answers[0]["state"]
    assert set(state) == set(trained.state_dict())
    trained.load_state_dict(state)
    batch = {k: v.float() for k, v in mixed_batch(7).items()}
    with torch.no_grad():
        units = [{k: v[i : i + U] for k, v in batch.items()} for i in range(0, 8, U)]
        expected = sum(float(trained(**unit)) for unit in units) / len(units)
        hidden = trained.vision(pixel_values=batch["pixel_values"][:3]).last_hidden_state
    assert answers[0]["evaluated"] == pytest.approx(expected, rel=NEAR)
    torch.testing.assert_close(answers[3]["hidden"], hidden, rtol=1e-5, atol=1e-6)
