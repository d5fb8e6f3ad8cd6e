"""Chooses the backends of a job's stages: one rank measures at a time, and all ranks get the choice.

Source: this project
Tests: tests/integrations/test_backend_training.py
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpp_plugin.backends.compiled_stage import CompiledStages, try_code
from gpp_plugin.backends.forward_code import ForwardCode, forward_code
from gpp_plugin.backends.measured_backends import TORCH, BackendLog
from gpp_plugin.backends.place_forward import UNMATCHED
from gpp_plugin.backends.stage_backends import Asked, check_stages, choose_backend
from gpp_plugin.ir.backend_costs import PlacedGroup, StageBackend
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.tensors import TensorSpec
from gpp_plugin.report.progress import step
from gpp_plugin.runtime.batches import Batch, ones_among
from gpp_plugin.runtime.rank_runner import RankRunner
from gpp_plugin.runtime.ranks.agree import exchange
from gpp_plugin.runtime.stage_module import StageCode
from gpp_plugin.schedule.orders.gpipe import forward_only_stages

logger = logging.getLogger(__name__)


def choose_backends(
    requested: Asked,
    runner: RankRunner,
    batch: Batch,
    *,
    log: BackendLog,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> dict[str, StageBackend]:
    """Return the backend of each stage that trains nothing, by name, the same on every rank; collective.

    Each stage is measured on its first rank while the others wait: ranks that measure side by side measure each other.

    Args:
        runner: this rank's, bound.
        batch: the sample batch.

    Raises:
        ConfigError: a stage is named that is none, or that trains.
    """
    # Stages 0 and 2 train nothing, on ranks (0, 1) and (3): rank 0 measures stage 0 while 1, 2 and 3 wait in the
    # exchange, then rank 3 measures stage 2 while the others wait. Rank 1 uses rank 0's choice.
    plan = runner.plan
    forward_only = sorted(forward_only_stages(plan))
    names = [stage.name for stage in plan.stages]
    own = [names[index] for index in forward_only]
    check_stages(requested, own, [name for name in names if name not in own])
    chosen: dict[str, StageBackend] = {}
    for index in forward_only:
        stage = names[index]

        def choose(index: int = index, stage: str = stage) -> StageBackend | None:
            if runner.rank != plan.stages[index].ranks[0]:
                return None
            code, weights = runner.runner_of(index).code_and_weights(batch)
            # a unit's tensors are as they are; others may be described at another number of samples
            samples = None if runner.has_ragged_units else plan.stages[index].local_batch_size
            has_tensor_ranks = plan.stages[index].tensor > 1
            if code.function.module is None or has_tensor_ranks:
                torch_alone = (PlacedGroup(backend=TORCH),)
                user_module = "a module of yours, run as it is"
                note = "its tensor ranks compute together" if has_tensor_ranks else user_module
                return StageBackend(stage=stage, groups=torch_alone, notes=(note,))
            return choose_backend(
                requested, stage, lambda: code_of_stage(stage, code, weights, batch, samples, device), log
            )

        answers = exchange(choose, what=f"measuring backends of stage {stage!r}", group=group)
        found = next(answer for answer in answers if answer is not None)
        chosen[stage] = found
        if runner.rank == 0:
            # a user who lists backends is warned of those that cannot run it or match nothing; "auto" takes what can
            fails = any(cost.refused for cost in found.costs) or any(UNMATCHED in n for n in found.notes)
            level = logging.WARNING if fails and requested != "auto" else logging.INFO
            logger.log(level, "%s", describe(found))
    if not forward_only and runner.rank == 0:
        logger.info("backends: every stage trains, and all of them run on torch")
    return chosen


def compile_stages(
    compiled: CompiledStages,
    runner: RankRunner,
    batch: Batch,
    *,
    whole: AbstractContextManager[None],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> None:
    """Compile the stages whose plan says so, and compare them with torch's operators; collective.

    What rank 0 measured while it planned is in the compiler's cache on disk.

    Args:
        runner: this rank's, bound.
        batch: the sample batch.
        whole: entered where anything is compiled, by all ranks: gathers weights that ranks hold in shards.
    """
    # Stages 0 and 1 on ranks 0 and 1: both compile at the same time, rank 0 finds its blocks on disk, rank 1 those that
    # are like rank 0's. A stage that turns out wrong stays on torch on its own rank alone: plans and programs are the
    # same, and only its times are others than planned.
    plan = runner.plan

    def compile_own() -> None:
        for index in runner.stages:
            stage, own = plan.stages[index], runner.runner_of(index)
            if not stage.compiled:
                continue
            code, weights = own.code_and_weights(batch)
            call = compiled.code(stage, code.function, code)
            if call is None:
                continue
            if (choice := code.function.choice) is not None:  # the version that such batches run
                choice.use(ones_among(batch, choice.inputs))
            tensors = examples_of(code, batch, stage.local_batch_size, device)
            takes = own.gradient_inputs(code)
            names = (*code.function.batch_inputs, *code.function.received)
            for name, tensor in zip(names, tensors, strict=True):
                tensor.requires_grad_(name in takes)
            try_code(call, weights, tensors)

    if any(stage.compiled for stage in plan.stages):
        # a weight between mini-batches has another stride, and no numbers to compare
        with step("compile"), whole:
            exchange(compile_own, what="compiling stages", group=group)
    compiled.start()


def with_backends(plan: PipelinePlan, chosen: Mapping[str, StageBackend]) -> PipelinePlan:
    """Return the plan with what its stages run on, and a line for each in its notes."""
    # what a saved plan ran on elsewhere says nothing of this job
    taken = {name: one for name, one in chosen.items() if not one.is_torch}
    stages = tuple(
        dataclasses.replace(stage, backend=taken[stage.name].backend if stage.name in taken else "")
        for stage in plan.stages
    )
    notes = (*plan.notes, *map(describe, taken.values()))
    return dataclasses.replace(plan, stages=stages, notes=notes)


def describe(chosen: StageBackend) -> str:
    """Return what a stage runs on, and why, in one line."""
    # Not measured (the user named it):   stage vision runs on openvino
    # measured, and another won:          stage vision runs on openvino: a forward takes 5.10 ms, on torch 7.02 (...)
    # measured, and torch won:            stage vision runs on torch: 7.02 ms a forward, the best other 1.03 x ...
    text = f"stage {chosen.stage} runs on {chosen.backend}"
    if chosen.us and chosen.torch_us:
        if chosen.is_torch:
            others = [cost for cost in chosen.costs if cost.backend != TORCH]
            best = min((cost.us for cost in others if not cost.refused), default=0.0)
            ratio = f", the best other {chosen.torch_us / best:.2f} x as fast" if best else ""
            text += f": {chosen.torch_us / 1e3:.2f} ms a forward{ratio}"
        else:
            text += (
                f": a forward takes {chosen.us / 1e3:.2f} ms, on torch {chosen.torch_us / 1e3:.2f} "
                f"({chosen.torch_us / chosen.us:.2f} x as fast)"
            )
    refused = (f"not on {cost.backend}: {cost.refused}" for cost in chosen.costs if cost.refused)
    return "; ".join((text, *refused, *chosen.notes))


def code_of_stage(
    stage: str,
    code: StageCode,
    weights: Sequence[Tensor],
    batch: Batch,
    samples: int | None,
    device: torch.device,
) -> ForwardCode:
    """Return a stage's code with tensors like those that it will take: the sample batch's rows, or made up.

    Args:
        samples: of a micro-batch on one rank; None: as many as each tensor was described with.
    """
    # Time does not depend on values, and whether results are right is seen on a real micro-batch before the backend
    # takes over; but token ids must be there to be looked up, so zeros stand for what is received as whole numbers.
    return forward_code(stage, code.function, weights, examples_of(code, batch, samples, device))


def examples_of(code: StageCode, batch: Batch, samples: int | None, device: torch.device) -> list[Tensor]:
    """Return tensors like those that a stage's code takes behind its weights; arguments as of `code_of_stage`."""
    function = code.function
    tensors = [_example(code.inputs[key], batch.get(key), samples, device) for key in function.batch_inputs]
    return tensors + [_example(code.tensors[name], None, samples, device) for name in function.received]


def _example(spec: TensorSpec, entry: Any, samples: int | None, device: torch.device) -> Tensor:
    """Return a tensor of a shape and type: the first rows of a batch's entry, random numbers, or zeros."""
    dtype = getattr(torch, spec.dtype)
    shape = spec.shape_for(spec.num_samples if samples is None else samples)
    if isinstance(entry, Tensor) and not entry.is_meta:
        sizes = zip(entry.shape, shape, strict=False)
        if entry.ndim == len(shape) and all(there >= wanted for there, wanted in sizes):
            return entry[tuple(slice(size) for size in shape)].to(device, dtype).contiguous()
    if dtype.is_floating_point:
        # a separate generator: what training draws does not depend on what was measured
        generator = torch.Generator().manual_seed(0)
        return torch.randn(shape, generator=generator).to(device, dtype)
    return torch.zeros(shape, dtype=dtype, device=device)
