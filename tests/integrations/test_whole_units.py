"""Models that take whole loss units, and whose Python reads values of them, train as in one process."""

from __future__ import annotations

import pytest

from tests.integrations import whole_unit_jobs
from tests.ranks import run_kept_ranks
from tests.reference import train_reference


def test_units_that_do_not_fit_are_refused_and_unlike_ones_train() -> None:
    for said in run_kept_ranks(whole_unit_jobs.refused, 2):
        other_size, ended, loss = said
        assert "a batch holds 5 samples; this model takes whole loss units" in other_size
        assert "ended after 1 of 2 batches" in ended
        assert float(loss) > 0


def test_in_mode_async_every_unit_is_a_step() -> None:
    answer = run_kept_ranks(whole_unit_jobs.windows, 1, 1)[0]
    assert "units of one mini-batch differ in shapes or in values" in answer["said"]
    units = [[unit] for units in answer["steps"] for unit in units]
    losses = train_reference(whole_unit_jobs.build_reader(), units).losses
    assert answer["last"] is None
    wanted = [sum(losses[i : i + 2]) / 2 for i in range(0, len(losses), 2)]
    assert answer["losses"] == pytest.approx(wanted, rel=1e-5)
