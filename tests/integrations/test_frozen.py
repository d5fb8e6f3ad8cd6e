"""Frozen parts: no backward tasks, no gradient messages, no optimizer memory, and the plan knows it."""

from __future__ import annotations

from typing import Any

import pytest

from gpp_plugin.capture.coarsen import coarsen
from gpp_plugin.capture.export import capture_model
from gpp_plugin.ir.cluster import Cluster, Device, Link
from gpp_plugin.ir.profile import BlockCost
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.profile.analytic_costs import analytic_profile
from gpp_plugin.profile.measure import profile_blocks
from tests.integrations import frozen_jobs
from tests.models import build
from tests.ranks import run_kept_ranks
from tests.reference import gradient_errors, train_reference
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
    found = answers[name]
    covered: set[str] = set()
    for answer in found:
        assert answer["losses"] == found[0]["losses"]
        assert answer["losses"] == pytest.approx(reference.losses, rel=1e-5)
        errors = gradient_errors(answer["gradients"], reference.gradients)
        assert max(errors.values(), default=0.0) < 1e-5, errors
        covered |= set(answer["gradients"])
    assert covered == set(reference.gradients)


@pytest.mark.parametrize("name", TASKS)
def test_what_is_frozen_costs_nothing(answers: dict[str, list[dict[str, Any]]], name: str) -> None:
    model, _ = frozen_jobs.frozen_model(TASKS[name]["model"])
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
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
    for answer in answers[name]:
        index = plan.stage_index(answer["stage"].name)
        is_frozen = index in frozen
        assert answer["kinds"] == ("F" if is_frozen else "FB")
        assert (answer["stage"].backward_us == 0.0) == is_frozen
        feeds = [edge for edge in plan.edges if edge.dst == index and edge.gradient_tensors]
        assert bool(answer["gradients sent"]) == bool(feeds)
    assert trained


def test_stages_before_every_trained_parameter_only_run_forward(
    answers: dict[str, list[dict[str, Any]]],
) -> None:
    late = answers["LoRA in the last block"]
    plan = late[0]["plan"]
    for answer in late:
        has_adapter = any(name.startswith("transformer.h.1") for name in answer["stage"].blocks)
        is_before = not has_adapter and plan.stage_index(answer["stage"].name) not in plan.loss_stages()
        assert answer["kinds"] == ("F" if is_before else "FB"), plan.stages
    assert late[0]["kinds"] == "F"
    by_hand = {a["stage"].name: a["kinds"] for a in answers["frozen vision tower of CLIP, its stage by hand"]}
    assert by_hand == {
        "vision_model": "F",
        "text_model": "FB",
        "visual_projection+text_projection+loss": "FB",
    }


SLOW = Device(name="slow", memory_bytes=1 << 34, flops_per_s=1e9, memory_bytes_per_s=1e12, launch_us=0.0)


def costs_of(kind: str) -> tuple[dict[str, BlockCost], dict[str, BlockCost]]:
    """Return the derived and the measured costs of a model's blocks."""
    model, make_batch = frozen_jobs.frozen_model(kind)
    batch = make_batch(4)
    captured = capture_model(model, batch)
    graph = coarsen(captured)
    derived = analytic_profile(graph, SLOW, sample_counts=(4,), op_graph=captured.op_graph)
    measured = profile_blocks(
        captured, graph, model_state=dict(model.named_parameters()) | dict(model.named_buffers()), batch=batch
    )
    return derived.by_block(), measured.by_block()


def test_profiles_count_only_what_is_trained() -> None:
    lora = costs_of("gpt2 lora")
    late = costs_of("gpt2 late lora")
    trained = costs_of("gpt2 transformer.wte")
    for with_lora, with_late in zip(lora, late, strict=True):
        for costs in (with_lora, with_late):
            wide = costs["transformer.h.1"]
            assert (
                wide.gradient_bytes == 4 * (2 * 32 + 96 * 2)
                and wide.optimizer_bytes == 2 * wide.gradient_bytes
            )
            assert wide.parameter_bytes > 40 * wide.gradient_bytes
            assert costs["lm_head"].optimizer_bytes == costs["lm_head"].gradient_bytes == 0
            assert costs["lm_head"].backward_us[-1] > 0, "frozen, but a gradient passes"
        assert with_late["transformer.h.0"].backward_us[-1] == 0.0
        assert with_late["transformer.h.0"].saved_bytes_per_sample == 0.0
    ratio = lora[0]["transformer.h.1"].backward_us[-1] / trained[0]["transformer.h.1"].backward_us[-1]
    assert 0.5 < ratio < 0.65, "input gradients, and those of two thin matrices"


def test_the_planner_gives_a_frozen_tower_fewer_ranks() -> None:
    """Its layers cost a third of trained ones: forward only."""
    link = Link(name="all", span=4, bytes_per_s=1e12, latency_us=0.0)
    shares, times = {}, {}
    for is_frozen in (False, True):
        model, make_batch = build("clip", layers=6)
        if is_frozen:
            model.vision_model.requires_grad_(False)
        captured = capture_model(model, make_batch(4))
        graph = coarsen(captured)
        profile = analytic_profile(graph, SLOW, sample_counts=(1, 4), op_graph=captured.op_graph)
        request = PlanRequest(
            graph=graph,
            profile=profile,
            cluster=Cluster(name="four", devices=(SLOW,) * 4, links=(link,)),
            num_ranks=4,
            mini_batch=32,
            loss_unit=4,
            num_stages=4,
        )
        plan = make_plan("auto", request)
        times[is_frozen] = plan.iteration_us
        shares[is_frozen] = [
            sum(name.startswith("vision_model.encoder") for name in stage.blocks) for stage in plan.stages
        ]
        for stage in plan.stages:
            only_vision = all(name.startswith("vision_model") for name in stage.blocks)
            assert (stage.backward_us == 0.0) == (is_frozen and only_vision)
    assert max(shares[True]) > max(shares[False]), shares
    assert times[True] < 0.8 * times[False]
