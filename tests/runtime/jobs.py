"""What each rank runs in the equality tests; importable by the processes that run it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from torch import Tensor

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.serialize import dumps
from gpp_plugin.schedule.build import plan_in_flight
from tests.integrations.engine_jobs import config_of, make_engine
from tests.models import build
from tests.runtime.odd_models import build_odd

Job = dict[str, Any]


def make_config(job: Job) -> dict[str, Any]:
    """Return the DeepSpeed JSON of a job."""
    config: dict[str, Any] = {
        "train_batch_size": job["mini_batch"],
        "train_micro_batch_size_per_gpu": job["unit"],
        "zero_optimization": {"stage": job.get("zero", 0)},
        "block": {"planner": "graphpipe", "verify": True, **job.get("block", {})},
    }
    return config_of(**config | job.get("config", {}))


def by_hand(
    model: str, *stages: str | dict[str, Any], last: dict[str, Any] | None = None, **options: Any
) -> Job:
    """Return a job whose stages are the given modules; the last one takes everything else."""
    described = [stage if isinstance(stage, dict) else {"modules": stage.split("+")} for stage in stages]
    block = {"plan": {"stages": [*described, {"name": "loss", "modules": ["*"], **(last or {})}]}}
    return {"model": model, "mini_batch": 8, "unit": 2, "steps": 3, "block": block, **options}


def make_batches(make_batch: Any, job: Job) -> list[dict[str, Any]]:
    """Return the mini-batches of a job, cut to its lengths."""
    batches = [make_batch(job["mini_batch"], seed) for seed in range(job.get("steps", 5))]
    for batch, length in zip(batches, job.get("lengths", ()), strict=False):
        for key in ("input_ids", "attention_mask", "labels"):
            batch[key] = batch[key][:, :length].contiguous()
    return batches


def build_model(job: Job) -> Any:
    """Build a job's model with its fixed seed."""
    return build_odd(job["model"]) or build(job["model"], **job.get("model_options", {}))


def use_device(device: str) -> None:
    """Make DeepSpeed compute on ``device`` whatever the machine has; ranks share one CUDA device."""
    import torch
    from deepspeed.accelerator import set_accelerator

    if device == "cuda":
        from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

        torch.backends.cudnn.allow_tf32 = False
        set_accelerator(CUDA_Accelerator())
    else:
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        set_accelerator(CPU_Accelerator())


def with_saved_plan(job: Job, engine: Any) -> Job:
    """Return the job with the engine's plan as its saved one, each stage changed as ``job["overrides"]`` says.

    With ``job["memory"]`` every stage also swaps and recomputes.
    """
    plan: PipelinePlan = engine.plan
    changes = job["overrides"]
    stages = tuple(dataclasses.replace(s, **changes.get(i, {})) for i, s in enumerate(plan.stages))
    plan = dataclasses.replace(plan, stages=stages)
    if job.get("memory"):
        from tests.runtime.memory_stages import StageBlocks, plan_both

        graph = engine._reference.block_graph
        own = [StageBlocks(graph=graph, blocks=stage.blocks) for stage in stages]
        plan = plan.with_each(memory=[plan_both(blocks, 1) for blocks in own])
    saved = json.loads(dumps(plan.with_each(in_flight=plan_in_flight(plan))))
    return {**job, "block": {**job["block"], "plan": saved}}


def train(jobs: list[Job]) -> list[dict[str, Any]]:
    """Train each job in turn on this rank; return losses, this stage's first gradients, and the plan."""
    import torch

    use_device(jobs[0].get("device", "cpu"))
    answers = []
    for job in jobs:
        model, make_batch = build_model(job)
        batches = make_batches(make_batch, job)
        if "overrides" in job:
            job = with_saved_plan(job, make_engine(model, batches[0], make_config(job)))
        engine = make_engine(model, batches[0], make_config(job))
        engine.retain_gradients()
        torch.manual_seed(job.get("seed", torch.initial_seed()))
        losses: list[float] = []
        gradients: dict[str, Tensor] | None = None
        for batch in batches:
            losses.append(float(engine.train_batch(data_iter=iter([batch]))))
            if gradients is None:
                gradients = {name: g.cpu().clone() for name, g in engine.gradients.items()}
                engine.retain_gradients(False)
        answers.append(
            {
                "losses": losses,
                "gradients": gradients,
                "stage": engine.stage_name,
                "stages": [(s.name, s.degree, s.micro_batch_size, s.in_flight) for s in engine.plan.stages],
                "schedules": [(s.schedule, s.num_sliced) for s in engine.plan.stages],
                "has_memory": [s.memory is not None for s in engine.plan.stages],
                "memory": engine.memory_report() if job.get("memory") else None,
                "transport": type(engine._rank_runner._shared.transport).__name__,
            }
        )
    return answers


def train_plainly(jobs: list[Job]) -> list[dict[str, Any]]:
    """Train each job's model in this process; return losses, first gradients, and those of double precision."""
    from tests.reference import train_reference

    device = jobs[0].get("device", "cpu")
    use_device(device)
    answers = []
    for job in jobs:
        model, make_batch = build_model(job)
        batches = make_batches(make_batch, job)
        plain = train_reference(model, batches, unit=job["unit"], device=device)
        answers.append({"losses": plain.losses, "gradients": plain.gradients, "exact": exact_gradients(job)})
    return answers


def exact_gradients(job: Job) -> dict[str, Tensor]:
    """Return the gradients of a job's first mini-batch in double precision."""
    from tests.reference import train_reference

    model, make_batch = build_model(job)
    batch = {
        key: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for key, value in make_batches(make_batch, job)[0].items()
    }
    run = train_reference(model.double(), [batch], unit=job["unit"], device=job.get("device", "cpu"))
    return run.gradients
