"""One rank of `gpp bench backends --training`: the same steps in each way, by turns; rank 0 tells of every run.

python -m gpp_benchmarks._backend_ranks SETTINGS_JSON
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_benchmarks._backend_towers import FROZEN_TOWERS, llava_batch
from gpp_benchmarks._ranks import rank_settings, start_engine
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.serialize import dumps
from gpp_plugin.launch import emit_event, end_rank
from gpp_plugin.report.plan_text import format_ranks

MINI_BATCH, UNIT = 32, 4
OPTIMIZER: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01, "eps": 1e-4}
WAYS = ("torch", "same stages", "stages cut again")


def main() -> None:
    """Train in each way, as often as the settings say, and on rank 0 alone as the model is."""
    settings = rank_settings()
    torch.manual_seed(0)
    model = FROZEN_TOWERS[settings["tower"]]()
    batches = [llava_batch(MINI_BATCH, seed) for seed in range(settings["steps"])]
    rank = 0
    plan: dict[str, Any] | None = None
    for number in range(settings["turns"]):
        for way in WAYS:
            block = {"profile_dir": settings["folder"], "comm_timeout_s": 300, "stages": settings["stages"]}
            block["backends"] = "off" if way == "torch" else settings["backends"]
            if way == "same stages":
                block["plan"] = plan
            found, own_plan = train(copy.deepcopy(model), batches, block, settling=settings["settling"])
            plan = json.loads(dumps(own_plan)) if plan is None else plan  # as it is saved
            rank = found.pop("rank")
            del found["gradients"]
            if rank == 0:
                emit_event(way=way, turn=number, **found)
    if rank == 0:
        emit_event(way="eager", losses=train_alone(copy.deepcopy(model), batches))
    end_rank()


def train(
    model: nn.Module,
    batches: Sequence[Mapping[str, Tensor]],
    block: Mapping[str, Any],
    *,
    settling: int,
    keeps_gradients: bool = False,
) -> tuple[dict[str, Any], PipelinePlan]:
    """Train on this rank and the others; return what is told of the run, and its plan; collective.

    Args:
        keeps_gradients: tell those of this rank's stages in the first step as well.
    """
    config = {
        "train_batch_size": MINI_BATCH,
        "train_micro_batch_size_per_gpu": UNIT,
        "optimizer": {"type": "AdamW", "params": {**OPTIMIZER, "torch_adam": True}},
        "graph_pipeline": dict(block),
    }
    start = time.perf_counter()
    engine = start_engine(model, batches[0], config)
    started = time.perf_counter() - start
    losses, step_ms, busy_ms = [], [], []
    engine.retain_gradients(keeps_gradients)
    gradients: dict[str, Tensor] = {}
    for number, batch in enumerate(batches):
        dist.barrier()
        began, busy = time.perf_counter(), time.process_time()
        losses.append(float(engine.train_batch(data_iter=iter([batch]))))
        took = torch.tensor([time.perf_counter() - began, time.process_time() - busy]) * 1e3
        if keeps_gradients and number == 0:
            gradients = {name: gradient.clone() for name, gradient in engine.gradients.items()}
            engine.retain_gradients(False)
        slowest = took[:1].clone()
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        dist.all_reduce(took)
        if number >= settling:
            step_ms.append(float(slowest[0]))
            busy_ms.append(float(took[1]))
    plan, report = engine.plan, engine.memory_report()
    found = {
        "rank": dist.get_rank(),
        "losses": losses,
        "step_ms": step_ms,
        "busy_ms": busy_ms,
        "gradients": gradients,
        "kept_bytes": [0 if rank.counts is None else rank.counts.peak_held_bytes for rank in report.ranks],
        "planned_bytes": [
            0 if rank.predicted is None else rank.predicted.activations for rank in report.ranks
        ],
        "start_s": started,
        "simulated_us": plan.iteration_us,
        "stages": ", ".join(f"{stage.forward_label} ({format_ranks(stage)})" for stage in plan.stages),
        "notes": [n for n in plan.notes if "backends" in n or "runs on" in n or n.startswith("compile")],
    }
    engine.destroy()
    return found, plan


def train_alone(
    model: nn.Module,
    batches: Sequence[Mapping[str, Tensor]],
    gradients: dict[str, Tensor] | None = None,
    *,
    steps: bool = True,
) -> list[float]:
    """Return the losses of the model as it is, in one process: each the mean over loss units.

    Args:
        gradients: takes those of the first step, by name.
        steps: the optimizer changes the model.
    """
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, **OPTIMIZER)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        total = 0.0
        for first in range(0, MINI_BATCH, UNIT):
            rows = {k: v[first : first + UNIT] if isinstance(v, Tensor) else v for k, v in batch.items()}
            loss = model(**rows)["loss"]
            (loss * UNIT / MINI_BATCH).backward()
            total += float(loss) * UNIT / MINI_BATCH
        if gradients is not None and not gradients:
            gradients.update(
                (name, p.grad.clone()) for name, p in model.named_parameters() if p.grad is not None
            )
        if steps:
            optimizer.step()
        losses.append(total)
    return losses


if __name__ == "__main__":
    main()
