"""Frozen parts: no backward tasks, no gradient messages, no optimizer memory; the rest as in one process."""

from __future__ import annotations

from typing import Any

import pytest

from gpp_plugin.ir.plan import forward_only_stages
from gpp_plugin.simulate.predict import simulate_plan
from tests.integrations import frozen_jobs
from tests.integrations.engine_jobs import check_training
from tests.ranks import run_kept_ranks
from tests.reference import train_reference
from tests.runtime.jobs import Job, make_batches
from tests.tiers import some


def job(model: str, *, zero: int = 0, mini_batch: int = 8, **block: Any) -> Job:
    block = {"planner": "auto", **block}
    return {
        "model": model,
        "mini_batch": mini_batch,
        "unit": 2,
        "steps": 3,
        "zero": zero,
        "block": block,
    }


ALL_TASKS: dict[str, Job] = {
    "frozen vision tower of CLIP": job("clip vision_model", stages=3),
    "frozen vision tower of CLIP, its stage by hand": job(
        "clip vision_model",
        plan={"stages": [{"modules": ["vision_model"]}, {"modules": ["text_model"]}, {"modules": ["*"]}]},
    ),
    "frozen vision tower of LLaVA": job("llava model.vision_tower", stages=3),
    "frozen encoder of T5": job("t5 encoder.block+encoder.final_layer_norm", stages=3),
    "LoRA": job("gpt2 lora", stages=3),
    "LoRA, ZeRO 2": job("gpt2 lora", stages=1, zero=2, mini_batch=12),
    "LoRA, ZeRO 3": job("gpt2 lora", stages=1, zero=3, mini_batch=12),
    "LoRA in the last block": job("gpt2 late lora", stages=3),
    "frozen embedding": job("gpt2 transformer.wte+transformer.wpe", stages=3),
}
TASKS = dict(some(ALL_TASKS.items(), every=4))


@pytest.fixture(scope="module")
def answers() -> dict[str, list[dict[str, Any]]]:
    per_rank = run_kept_ranks(frozen_jobs.train_frozen, 3, list(TASKS.values()), timeout_s=300)
    return {name: [found[i] for found in per_rank] for i, name in enumerate(TASKS)}


@pytest.mark.parametrize("name", TASKS)
def test_training_equals_one_process(answers: dict[str, list[dict[str, Any]]], name: str) -> None:
    one = TASKS[name]
    model, make_batch = frozen_jobs.frozen_model(one["model"])
    reference = train_reference(model, make_batches(make_batch, one), unit=one["unit"])
    check_training(answers[name], reference)
    assert all(answer["losses"] == answers[name][0]["losses"] for answer in answers[name])


@pytest.mark.parametrize("name", TASKS)
def test_what_is_frozen_costs_nothing(answers: dict[str, list[dict[str, Any]]], name: str) -> None:
    for answer in answers[name]:
        degree = answer["stage"].degree
        sharded = degree if TASKS[name]["zero"] else 1
        assert answer["optimizer elements"] <= 2 * (answer["trained"] / sharded + 4), "two moments of Adam"
        if not answer["gradients"]:
            assert answer["optimizer elements"] == 0
    plan = answers[name][0]["plan"]
    frozen = {
        i
        for i in range(len(plan.stages))
        if not any(edge.gradient_tensors for edge in plan.edges if edge.src == i)
        and i not in plan.loss_stages()
    }
    assert frozen == forward_only_stages(plan)
    predicted = [e for e in simulate_plan(plan).events if e.task is not None]
    for rank, answer in enumerate(answers[name]):
        in_prediction = dict.fromkeys(e.task.kind.value for e in predicted if e.task and e.rank == rank)
        assert answer["kinds"] == "".join(in_prediction), "ranks run what planners and the simulator count"
        index = plan.stage_index(answer["stage"].name)
        is_frozen = index in frozen
        assert answer["kinds"] == ("F" if is_frozen else "FB")
        assert (answer["stage"].backward_us == 0.0) == is_frozen
        feeds = [edge for edge in plan.edges if edge.dst == index and edge.gradient_tensors]
        assert bool(answer["gradients sent"]) == bool(feeds)
