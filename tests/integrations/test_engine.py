"""The engine as a user has it: precision, clipping, groups, evaluation, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integrations import engine_jobs as jobs
from tests.models import build
from tests.ranks import run_kept_ranks, run_ranks
from tests.reference import gradient_errors, loss_of, train_reference, units_of
from tests.runtime.odd_models import build_odd


@pytest.mark.parametrize("zero", [2, 0, 1, 3])
def test_clipping_groups_and_schedule_equal_torch(zero: int) -> None:
    answers = run_ranks(jobs.train_with_everything, 4, zero)
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


def test_bf16_trains_within_its_rounding() -> None:
    answers = run_kept_ranks(jobs.train_in_precision, 4, "bf16")
    for name in ("t5", "clip"):
        model, make_batch = build(name)
        batches = [make_batch(jobs.B, seed) for seed in range(3)]
        reference = train_reference(model, batches, unit=jobs.U)
        for answer in answers:
            assert answer[name]["losses"] == pytest.approx(reference.losses, rel=2e-2)
            assert answer[name]["dtypes"] == {"torch.bfloat16"}
            assert answer[name]["resident"] < 1024, "the model keeps no uncast copy of the stage's parameters"
            assert answer[name]["says"] == (1, 0.0, True)


def test_evaluation_equals_the_plain_model() -> None:
    answers = run_kept_ranks(jobs.evaluate, 4)
    model, make_batch = build("gpt2", dropout=0.3)
    model.eval()
    with torch.no_grad():
        for size, (loss, logits) in answers[0]["losses"].items():
            batch = make_batch(size, size)
            parts = units_of(batch, jobs.U)
            expected = sum(float(loss_of(model(**p))) * p["input_ids"].shape[0] for p in parts) / size
            assert loss == pytest.approx(expected, rel=1e-6), size
            assert torch.allclose(logits, model(**batch).logits, rtol=1e-5, atol=1e-6), size
        unlabelled = {k: v for k, v in make_batch(6, 6).items() if k != "labels"}
        assert torch.allclose(answers[0]["unlabelled"], model(**unlabelled).logits, rtol=1e-5, atol=1e-6)
    assert answers[0]["plain"] == answers[0]["losses"][16][0]
    assert all(answer["losses"][5][0] == answers[0]["losses"][5][0] for answer in answers)
    assert len({answer["after"] for answer in answers}) == 1
    assert [answer["groups made"] for answer in answers] == [0] * 4, "all lanes share the messages' groups"


def test_different_data_on_ranks_is_refused() -> None:
    for said in run_ranks(jobs.different_data, 2):
        assert said.keys() == {"sync", "async"}
        assert all("step 1: the ranks were given different mini-batches" in line for line in said.values())


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
