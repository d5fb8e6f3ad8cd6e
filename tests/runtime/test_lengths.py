"""Texts of another length each step: one more capture a rank, and each step is that of a single process."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import pytest
import torch

from gpp_plugin.runtime.memory import activation_policy
from tests.integrations.engine_jobs import logged, make_engine
from tests.ranks import run_kept_ranks
from tests.reference import gradient_errors, train_reference
from tests.runtime import jobs

TEXTS = ("input_ids", "attention_mask", "labels")
LENGTHS = (0, 3, -2, 1, 5, -1, 3)
"""Tokens more than the model's own batches have."""


def job(model: str, *, texts: tuple[str, ...] = TEXTS, stages: int = 2, **more: Any) -> jobs.Job:
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0}}}  # weights stay
    block = {"stages": stages, "planner": "graphpipe", **more.pop("block", {})}
    return {
        "model": model, "mini_batch": 8, "unit": 2, "texts": texts, "text_lengths": LENGTHS, "config": config,
        "block": block, **more,
    }  # fmt: skip


def make_batches(make_batch: Any, job: jobs.Job) -> list[dict[str, Any]]:
    """Return a job's mini-batches, the texts of each of another length, longer or shorter than the model's own."""
    batches = []
    for seed, length in enumerate(job["text_lengths"]):
        batch = make_batch(job["mini_batch"], seed)
        for key in job["texts"]:
            text = batch[key]
            # more of its end: an image's tokens are at the beginning
            longer = torch.cat([text, text[:, -5:]], dim=1)
            batch[key] = longer[:, : text.shape[1] + length].contiguous()
        batches.append(batch)
    return batches


def train(job: jobs.Job) -> dict[str, Any]:
    """Train on texts of many lengths, evaluate each of them too, and count what was exported on the way."""
    jobs.use_device("cpu")
    model, make_batch = jobs.build_model(job)
    batches = make_batches(make_batch, job)
    losses, evaluated, gradients = [], [], []
    export, survey = torch.export.export, activation_policy.SurveyPass
    with (
        mock.patch.object(torch.export, "export", wraps=export) as exports,
        mock.patch.object(activation_policy, "SurveyPass", wraps=survey) as surveys,
        logged("gpp_plugin") as records,
    ):
        if "overrides" in job:
            job = jobs.with_saved_plan(job, make_engine(model, batches[0], jobs.make_config(job)))
        engine = make_engine(model, batches[0], jobs.make_config(job))
        exports.reset_mock()
        surveys.reset_mock()
        for batch in batches:
            engine.retain_gradients()
            losses.append(float(engine.train_batch(data_iter=iter([batch]))))
            gradients.append({name: g.cpu().clone() for name, g in engine.gradients.items()})
        trained = exports.call_count
        for batch in batches if job.get("evaluates") else ():
            evaluated.append(float(engine.eval_batch(iter([batch]))))
    return {
        "losses": losses,
        "evaluated": evaluated,
        "gradients": gradients,
        "exports": trained,
        "surveys": surveys.call_count,
        "memory": [stage.memory is not None for stage in engine.plan.stages],
        "warnings": [each.getMessage() for each in records if each.levelno >= logging.WARNING],
    }


def check(one: jobs.Job, answers: list[dict[str, Any]]) -> None:
    """Hold every step's loss and gradients against the single process."""
    model, make_batch = jobs.build_model(one)
    for step, batch in enumerate(make_batches(make_batch, one)):
        plain = train_reference(model, [batch], unit=one["unit"])
        found: dict[str, Any] = {}
        for answer in answers:
            assert answer["losses"][step] == pytest.approx(plain.losses[0], rel=1e-6)
            found |= answer["gradients"][step]
            if answer["evaluated"]:
                assert answer["evaluated"][step] == pytest.approx(plain.losses[0], rel=1e-6)
        assert found.keys() == plain.gradients.keys()
        errors = gradient_errors(found, plain.gradients)
        assert max(errors.values()) <= 2e-6, (step, {n: e for n, e in errors.items() if e > 2e-6})


@pytest.mark.parametrize("name", ["llava", "t5"])
def test_steps_of_many_lengths_are_those_of_one_process(name: str) -> None:
    one = job(name, evaluates=True)
    answers = run_kept_ranks(train, 2, one, timeout_s=120)
    check(one, answers)
    for answer in answers:
        assert answer["exports"] == 1, "one more than the plan's own, for all lengths"
        assert answer["warnings"] == []


def test_labels_and_texts_change_apart_in_halves_of_forwards() -> None:
    one = job("t5", texts=("labels",), overrides={0: {"num_sliced": 2, "micro_batch_size": 4}})
    answers = run_kept_ranks(train, 2, one, timeout_s=120)
    check(one, answers)
    assert [answer["exports"] for answer in answers] == [1, 1], (
        "halves are of another number of samples, which is a symbol"
    )


def test_swapped_and_recomputed_at_many_lengths() -> None:
    one = job("gpt2", overrides={}, memory=True)
    answers = run_kept_ranks(train, 2, one, timeout_s=120)
    check(one, answers)
    assert all(all(answer["memory"]) for answer in answers)
    assert [answer["exports"] for answer in answers] == [1, 1]
    # the code of the first batch's shapes, and the code for all lengths
    assert [answer["surveys"] for answer in answers] == [2, 2]


def test_another_number_of_images_a_sample_is_a_length() -> None:
    # of 1, 2, 3, ... rows a sample
    one = job("bags", texts=(), block={"plan": {"stages": [{"modules": ["each"]}, {"modules": ["*"]}]}})
    one["block"].pop("stages")
    answers = run_kept_ranks(train, 2, one, timeout_s=120)
    check(one, answers)
    assert [answer["exports"] for answer in answers] == [1, 1]
