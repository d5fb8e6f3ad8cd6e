"""Mode async equals PipeDream's staleness emulated in one process, to 1e-6 over 20 mini-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpp_plugin.ir.memory_report import MemoryReport
from tests.integrations import async_jobs as jobs
from tests.integrations.engine_jobs import adamw
from tests.integrations.pipedream import Emulation, PlainStage, reported
from tests.models import build
from tests.ranks import run_kept_ranks

TOWERS = {
    "stages": [
        {"name": "vision", "modules": ["vision_model", "visual_projection"], "devices": 2},
        {"name": "text", "modules": ["text_model", "text_projection"], "devices": 1},
        {"name": "loss", "modules": ["*"], "devices": 1},
    ]
}

WARM_UP = {
    "type": "WarmupLR",
    "params": {
        "warmup_min_lr": 0.0, "warmup_max_lr": 2e-3, "warmup_num_steps": 10, "warmup_type": "linear",
    },
}  # fmt: skip


def rate_at(step: int) -> float:
    """Return the rate of `WARM_UP`, one step behind the optimizer as DeepSpeed's scheduler is."""
    return 2e-3 * min(1.0, max(0, step - 1) / 10)


def emulate(
    name: str,
    stages: list[tuple[tuple[str, ...], int]],
    *,
    mini_batch: int,
    micro: int,
    unit: int,
    **options: Any,
) -> Emulation:
    model, _ = build(name)
    known = {n for n, _ in model.named_parameters()}
    plain = [PlainStage(parameters=tuple(n for n in own if n in known), held=held) for own, held in stages]
    return Emulation(model, plain, unit=unit, window=mini_batch // micro, make_optimizer=adamw, **options)


def check_parameters(answers: list[dict[str, Any]], emulation: Emulation, tolerance: float = 1e-6) -> None:
    wanted = dict(emulation.model.named_parameters())
    for answer in answers:
        assert answer["parameters"]
        for name, parameter in answer["parameters"].items():
            if name.endswith("k_proj.bias"):
                continue  # its gradient is zero but for rounding, which Adam makes as large as any other
            expected = wanted[name].detach().to(parameter.dtype)
            assert torch.allclose(parameter, expected, rtol=1e-5, atol=tolerance), name


@pytest.mark.parametrize("vertical_sync", [True, False])
def test_a_graph_with_unequal_degrees_equals_the_emulation(vertical_sync: bool) -> None:
    block: dict[str, Any] = {"plan": TOWERS, "vertical_sync": vertical_sync}
    if vertical_sync:  # what is dropped is made again with the weights of its forward
        block["memory"] = {"recompute": "full"}
    config = jobs.async_config(mini_batch=16, unit=4, block=block)
    answers = run_kept_ranks(jobs.train, 4, "clip", 16, config, timeout_s=300)
    first = answers[0]
    emulation = emulate("clip", first["stages"], mini_batch=16, micro=4, unit=4, vertical_sync=vertical_sync)
    losses = [emulation.mini_batch(build("clip")[1](16, seed), 4) for seed in range(jobs.NUM_BATCHES)]
    emulation.flush()
    for answer in answers:
        assert answer["losses"] == pytest.approx(reported(losses, emulation.longest), abs=1e-6)
        assert answer["flushed"] == pytest.approx(losses[-1][-1], abs=1e-6)
        assert answer["again"] is None and answer["steps"] == jobs.NUM_BATCHES
        held = dict(vision=2, text=2, loss=2 if vertical_sync else 1)[answer["stage"]]
        assert answer["versions"] == (held, held - 1), "weights are held as planned, and no more"
        assert answer["staleness"] == {"vision": 1, "text": 1, "loss": int(vertical_sync)}
    check_memory(first["memory"])
    check_parameters(answers, emulation)


def check_memory(report: MemoryReport) -> None:
    """What every rank holds, stashed versions of weights among it, is what the plan counts."""
    assert report.differences == ()
    for rank in report.ranks:
        assert rank.counts is not None and rank.predicted is not None
        assert rank.counts.stashed_bytes == rank.predicted.stashed_weights
        assert rank.counts.peak_held_bytes == pytest.approx(rank.predicted.activations, rel=0.02)


@pytest.mark.parametrize(
    ("precision", "zero_stage", "tolerance"),
    [("fp32", 2, 1e-6), ("bf16", 0, 1e-2), ("fp32", 1, 1e-6)],
)
def test_replicated_stages_with_clipping_and_schedule_equal_the_emulation(
    precision: str, zero_stage: int, tolerance: float
) -> None:
    config = jobs.async_config(
        mini_batch=16,
        unit=2,
        block={"stages": 2, "data_parallel": 2, "micro_batch_sizes": 4},
        bf16={"enabled": precision == "bf16"},
        zero_optimization={"stage": zero_stage},
        gradient_clipping=0.05,
        scheduler=WARM_UP,
    )
    answers = run_kept_ranks(jobs.train, 4, "two_branch", 16, config, timeout_s=300)
    emulation = emulate(
        "two_branch", answers[0]["stages"], mini_batch=16, micro=4, unit=2, rate_at=rate_at, clip=0.05,
        dtype=torch.bfloat16 if precision == "bf16" else torch.float32,
    )  # fmt: skip
    losses = [emulation.mini_batch(build("two_branch")[1](16, seed), 4) for seed in range(jobs.NUM_BATCHES)]
    emulation.flush()
    for answer in answers:
        assert answer["losses"] == pytest.approx(reported(losses, emulation.longest), abs=tolerance)
        assert answer["versions"] == ((1, 0) if answer["has_loss"] else (2, 1))
    check_parameters(answers, emulation, tolerance)
    assert answers[0]["memory"].differences == ()


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Where a checkpoint of two ranks is, and what each saw that trained on, and that went on from it."""
    config = jobs.async_config(
        mini_batch=8,
        unit=2,
        block={"stages": 2},
        scheduler=WARM_UP,
        zero_optimization={"stage": 1},
    )
    directory = tmp_path_factory.mktemp("resumed")
    return directory, run_kept_ranks(jobs.resume, 2, str(directory), config, "two_branch", 8, timeout_s=300)


def test_checkpoints_resume_bit_for_bit(resumed: tuple[Path, list[dict[str, Any]]]) -> None:
    directory, answers = resumed
    for answer in answers:
        assert answer["found"] == answer["expected"] and answer["same"]
        assert answer["steps"] == 9
    assert (directory / "latest").read_text().strip() == "global_step4"


def test_two_stages_resumed_in_the_middle_equal_the_emulation(
    resumed: tuple[Path, list[dict[str, Any]]],
) -> None:
    _, answers = resumed
    emulation = emulate("two_branch", answers[0]["stages"], mini_batch=8, micro=2, unit=2, rate_at=rate_at)
    losses: list[float] = []
    for seeds in (range(4), range(4, 9)):  # what is in flight is trained before it is saved
        found = [emulation.mini_batch(build("two_branch")[1](8, seed), 2) for seed in seeds]
        losses += reported(found, emulation.longest)
        if seeds[0] == 0:
            emulation.flush()
    for answer in answers:
        assert [*answer["losses"], *answer["found"]] == pytest.approx(losses, abs=1e-6)
