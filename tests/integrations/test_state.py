"""What an engine holds and remembers: evaluation graphs, data that fails, weights and gradients under ZeRO."""

from __future__ import annotations

import pytest
import torch

from gpp_plugin.engine.evaluator import MAX_GRAPHS, MAX_RUNNERS
from tests.integrations import state_jobs as jobs
from tests.integrations.engine_jobs import U
from tests.ranks import run_kept_ranks
from tests.reference import units_of


def test_evaluation_depends_on_constants_and_keeps_a_few_plans() -> None:
    model = jobs.powered().eval()
    for answer in run_kept_ranks(jobs.evaluate_many, 2):
        for (size, power), loss in answer["losses"]:
            batch = jobs.powered_batch(size, power)
            with torch.no_grad():
                parts = [float(model(**part)["loss"]) * part["x"].shape[0] for part in units_of(batch, U)]
            assert loss == pytest.approx(sum(parts) / size, rel=1e-5), (size, power)
        assert answer["runners"] <= MAX_RUNNERS and answer["graphs"] <= MAX_GRAPHS


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_rank_that_cannot_load_its_data_tells_the_others(bad_rank: int) -> None:
    answers = run_kept_ranks(jobs.fail_to_load, 2, bad_rank)
    said = answers[bad_rank]["said"]
    assert said.startswith(f"RuntimeFailure: rank {bad_rank} could not load sample ")
    assert said.endswith(" of training_data: OSError: the disk is gone")
    other = answers[1 - bad_rank]
    assert other["said"] == f"RuntimeFailure: rank {bad_rank} could not load its mini-batch; see its error"
    assert other["step"] == answers[bad_rank]["step"] == 2


def test_zero_2_reduces_behind_each_backward_and_the_users_model_keeps_no_copies() -> None:
    for found in run_kept_ranks(jobs.hold_weights, 2, (0, 1, 2)):
        whole = found[0]["parameters"]
        assert [answer["reductions"] for answer in found] == [1, 1, 2], "of two micro-batches"
        assert found[1]["losses"] == found[0]["losses"] and found[2]["losses"] == pytest.approx(
            found[0]["losses"]
        )
        for answer in found:
            assert answer["shared"] and answer["model bytes"] <= whole + 4096
        part = found[2]["after reductions"][0]
        assert whole / 2 <= part <= whole / 2 + 64
        assert found[0]["as backwards end"] == [whole, whole] and found[0]["after reductions"] == [whole]
        assert found[1]["as backwards end"] == [whole, whole] and found[1]["after reductions"] == [whole]
        assert found[2]["as backwards end"] == [whole + part, whole + part]
        assert found[2]["after reductions"] == [part, part]
