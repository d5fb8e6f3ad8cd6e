"""A graph of the user's own stages trains as its stages in one process: loss and every gradient, in fp64."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import run_kept_ranks
from tests.reference import gradient_errors, train_reference
from tests.stage_graph import jobs
from tests.stage_graph.graphs import TIES, U, Whole, batch_of
from tests.tiers import some

EXACT = 1e-12

RUNS: dict[int, list[tuple[str, dict[str, Any]]]] = {
    3: [
        ("chain", {}),
        ("chain", {"schedule": "gpipe", "slicing": "off"}),
        ("two_encoders", {}),
        ("skip", {"micro_batch_sizes": {"a": 4, "b": 1}}),
        ("two_sinks", {}),
        ("int_and_bool", {}),
        ("prompt", {}),
    ],
    4: [
        ("diamond", {}),
        ("tied", {}),
        ("diamond", {"schedule": "zero_bubble"}),
        ("mixing", {"micro_batch_sizes": "search"}),
    ],
    6: [("degrees", {}), ("two_to_three", {})],
}


@pytest.mark.parametrize("num_ranks", RUNS)
def test_loss_and_gradients_are_one_process_s(num_ranks: int) -> None:
    runs = some(RUNS[num_ranks], every=2)
    names, blocks = [name for name, _ in runs], [block for _, block in runs]
    answers = run_kept_ranks(jobs.train_in_double, num_ranks, names, blocks)
    for index, name in enumerate(names):
        reference = train_reference(Whole(name), [batch_of(name)], unit=U)
        aliases = dict(TIES.get(name, ()))
        covered = set()
        for rank in answers:
            found = rank[index]
            assert found["loss"] == pytest.approx(reference.losses[0], rel=EXACT), name
            errors = gradient_errors(found["gradients"], reference.gradients)
            assert max(errors.values()) < EXACT, (name, errors)
            covered |= set(found["gradients"])
        assert covered == set(reference.gradients), name
        assert not covered & set(aliases.values()), "a tied parameter has one name"
