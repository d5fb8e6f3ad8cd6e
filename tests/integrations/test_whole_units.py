"""Models that take whole loss units, and whose Python reads values of them, train as in one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from gpp_plugin.engine.loading.mini_batch_loader import make_loader
from tests.integrations import whole_unit_jobs
from tests.ranks import run_kept_ranks
from tests.reference import gradient_errors, loss_of


def trained(
    model: Any, steps: Sequence[Sequence[dict[str, Any]]]
) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    """Return losses, the first step's gradients and the model after training on units in one process."""
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    losses: list[float] = []
    gradients: dict[str, torch.Tensor] = {}
    for units in steps:
        optimizer.zero_grad()
        total = 0.0
        for unit in units:
            loss = loss_of(model(**unit)) / len(units)
            loss.backward()
            total += float(loss.detach())
        gradients = gradients or {
            n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
        }
        losses.append(total)
        optimizer.step()
    return losses, gradients, model


def job(model: str, *, mini_batch: int = 8, loads: bool = False, **block: Any) -> dict[str, Any]:
    return {"model": model, "mini_batch": mini_batch, "unit": 2, "block": block, "loads": loads}


JOBS = {
    3: [job("reader", stages=3), job("reader", stages=2, mini_batch=12), job("reader", stages=3, loads=True)],
    2: [
        job("reader", stages=2, mini_batch=2),
        job("one_by_one", stages=2),
        job("reader", stages=2, loads=True),
    ],
}


@pytest.mark.parametrize("num_ranks", sorted(JOBS))
def test_units_train_as_in_one_process(num_ranks: int) -> None:
    tasks = JOBS[num_ranks]
    per_rank = run_kept_ranks(whole_unit_jobs.train, num_ranks, tasks, timeout_s=150)
    for index, one in enumerate(tasks):
        answers = [of_rank[index] for of_rank in per_rank]
        num_units = one["mini_batch"] // 2
        steps = whole_unit_jobs.units_of_steps(one["model"], num_units)
        if one["loads"]:
            loader = make_loader(
                whole_unit_jobs.Pairs(), mini_batch=one["mini_batch"], collate_fn=lambda items: items, seed=0
            )
            batches = [items for _ in range(4) for items in loader][: len(steps)]
            steps_seen = [
                [whole_unit_jobs.join(items[i : i + 2]) for i in range(0, len(items), 2)] for items in batches
            ]
        else:
            steps_seen = steps
        losses, gradients, model = trained(whole_unit_jobs.build(one["model"]), steps_seen)
        found = answers[0]
        assert found["stages"] == one["block"]["stages"]
        assert all(answer["losses"] == found["losses"] for answer in answers)
        assert found["losses"][0] == pytest.approx(losses[0], rel=1e-6)
        assert found["losses"] == pytest.approx(losses, rel=1e-5)
        covered: set[str] = set()
        for answer in answers:
            covered |= set(answer["gradients"])
            assert max(gradient_errors(answer["gradients"], gradients).values()) < 2e-6
        assert covered == set(gradients)
        model.eval()
        expected = [float(loss_of(model(**unit)).detach()) for unit in steps[1]]
        assert found["evaluated"] == pytest.approx(expected, rel=1e-5)


def test_units_that_do_not_fit_are_refused_and_unlike_ones_train() -> None:
    for said in run_kept_ranks(whole_unit_jobs.refused, 2):
        other_size, ended, loss = said
        assert "a batch holds 5 samples; this model takes whole loss units" in other_size
        assert "ended after 1 of 2 batches" in ended
        assert float(loss) > 0


def test_in_mode_async_every_unit_is_a_step() -> None:
    answer = run_kept_ranks(whole_unit_jobs.windows, 1, 1)[0]
    assert "units of one mini-batch differ in shapes or in values" in answer["said"]
    losses, _, _ = trained(
        whole_unit_jobs.build("reader"), [[unit] for units in answer["steps"] for unit in units]
    )
    assert answer["last"] is None
    wanted = [sum(losses[i : i + 2]) / 2 for i in range(0, len(losses), 2)]
    assert answer["losses"] == pytest.approx(wanted, rel=1e-5)
