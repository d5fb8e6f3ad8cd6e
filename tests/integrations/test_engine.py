"""The engine as a user has it: clipping, groups, what training skips, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpp_plugin.engine.loading.row_loader import make_loader
from tests.integrations import engine_jobs as jobs
from tests.models import build
from tests.ranks import run_kept_ranks, run_ranks
from tests.reference import gradient_errors, train_reference
from tests.runtime.odd_models import build_odd


@pytest.mark.parametrize("zero", [2, 0, 1, 3, "auto", "1 offloaded", "2 offloaded", "3 offloaded"])
def test_clipping_groups_and_schedule_equal_torch(zero: int | str) -> None:
    if zero == "auto":  # nobody names a stage: the planner's holds for optimizers and plan alike
        answers = run_kept_ranks(jobs.train_with_everything, 2, zero)
    else:
        answers = run_ranks(jobs.train_with_everything, 4, zero)
    assert {answer["zero"] for answer in answers} == {1 if zero == "auto" else int(str(zero)[0])}
    model, make_batch = build("t5")
    rates, norms = [answers[0]["first_rate"], *(rate for rate, _ in answers[0]["rates"])], list[float]()

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(jobs.decay_groups(parameters), lr=1e-3)

        def set_rate(*_: Any) -> None:
            for group in optimizer.param_groups:  # WarmupLR's first steps: linear to 2e-3 over three
                group["lr"] = rates[len(norms) - 1]

        clipped = jobs.clipping(lambda own: optimizer, 0.5, norms)(parameters)
        clipped.register_step_pre_hook(set_rate)
        return clipped

    batches = [make_batch(jobs.B, step) for step in range(4)]
    losses = train_reference(model, batches, unit=jobs.U, make_optimizer=make).losses
    for answer in answers:
        assert answer["norms"] == pytest.approx(norms, rel=2e-5)
        assert answer["losses"] == pytest.approx(losses, rel=2e-5)
    assert answers[0]["rates"][-1] == pytest.approx([2e-3, 2e-3])


def test_different_data_on_ranks_is_refused() -> None:
    for said in run_ranks(jobs.different_data, 2):
        assert said.keys() == {"sync", "async"}
        for line in said.values():
            assert "step 1: the ranks were given different mini-batches" in line
            assert line.endswith("; first: None"), "no rank of them is to blame"


def test_evaluation_runs_what_training_skips() -> None:
    answers = run_kept_ranks(jobs.evaluate_a_head, 2)
    model, make_batch = build_odd("evaluation_head")
    expected = model.eval()(**make_batch(jobs.B, 1))
    for answer in answers:
        assert set(answer["found"]) == {"extra", "turned", "norm"}
        for name, value in answer["found"].items():
            assert value.shape == expected[name].shape, name
            assert torch.allclose(value, expected[name], rtol=1e-5, atol=1e-6), name
        assert "no loss" in answer["refusal"]
    state = answers[0]["state"]
    assert set(state) == set(model.state_dict()) and torch.equal(state["table"], model.table)


def test_a_failed_mini_batch_leaves_nothing_behind() -> None:
    (answer,) = run_ranks(jobs.fail_and_go_on, 1, 1)
    assert "micro" in answer["said"][0] or "index" in answer["said"][0]
    assert not answer["said"][1]
    model, make_batch = build("gpt2")
    reference = train_reference(model, [make_batch(jobs.B, 0)], unit=jobs.U)
    errors = gradient_errors(answer["gradients"], reference.gradients)
    assert set(errors) == set(reference.gradients) and max(errors.values()) < 1e-5


def test_ranks_do_not_go_on_among_messages_of_a_failed_mini_batch() -> None:
    for answer in run_ranks(jobs.fail_and_go_on, 2, 2):
        assert answer["said"][0]
        assert "cannot go on" in answer["said"][1]


@pytest.mark.parametrize(("zero", "stages"), [(0, 2), (1, 1), (3, 1)])
def test_a_new_batch_size_is_planned_again_and_equals_one_process(zero: int, stages: int) -> None:
    answers = run_kept_ranks(jobs.change_batch_sizes, 2, zero, stages)
    model, make_batch = build("two_branch")
    rows = make_batch(48, 9)
    data = [{key: value[n] for key, value in rows.items()} for n in range(48)]
    (whole,) = make_loader(data, mini_batch=48, collate_fn=None, seed=0)
    batches, first = [], 0
    for step, size in enumerate(jobs.SIZES):
        own = {key: value[first : first + size] for key, value in whole.items()}
        batches.append(own if step < 4 else make_batch(size, step))
        first += size
    reference = train_reference(model, batches, unit=jobs.U)
    with torch.no_grad():
        evaluated = float(reference.model.eval()(**make_batch(6, 5))["loss"])
    wanted = dict(reference.model.named_parameters())
    for answer in answers:
        assert answer["losses"] == pytest.approx(reference.losses, rel=1e-5)
        assert answer["sizes"] == [(size, size // jobs.U) for size in jobs.SIZES]
        assert answer["counted"] == (len(jobs.SIZES), sum(jobs.SIZES), sum(jobs.SIZES) // jobs.U)
        assert answer["evaluated"] == pytest.approx(evaluated, rel=1e-5)
        assert all(
            "is no multiple of train_micro_batch_size_per_gpu, 2" in text for text in answer["refused"]
        )
        for name, value in answer["weights"].items() if zero < 3 else ():
            assert torch.allclose(value, wanted[name], rtol=1e-4, atol=1e-6), name
