"""What a user sees of training: monitors, the step log, wall-clock and FLOPs reports, timelines."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gpp_plugin.engine.setting import Monitor, Setting
from gpp_plugin.engine.stage_step import StepResult
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.timeline import Event, Timeline
from gpp_plugin.report.chrome_trace import write_trace
from gpp_plugin.runtime.lane import Reference
from gpp_plugin.runtime.ranks.meeting import Meeting
from gpp_plugin.runtime.recorder import Clock, gather_timeline

logger = logging.getLogger(__name__)

DEFAULT_STEPS_PER_PRINT = 10


def share_of_loss(losses: Sequence[tuple[Tensor, int]], num_samples: int, *, is_sum: bool) -> float:
    """Return what losses add to that of a batch; reads the device once.

    Args:
        losses: each with the samples that it is of.
        num_samples: of the whole batch.
        is_sum: the batch's loss is the sum of all losses; else their mean by samples.
    """
    if not losses:
        return 0.0
    values = torch.stack([loss.reshape(()) for loss, _ in losses]).tolist()
    if is_sum:
        return sum(values)
    return sum(value * count for value, (_, count) in zip(values, losses, strict=True)) / num_samples


class Metrics:
    """Writes losses, learning rates and times where the DeepSpeed configuration asks; on rank 0 only.

    Args:
        monitor: writes events, where the configuration asks for any.
    """

    def __init__(
        self,
        ds_config: Mapping[str, Any],
        setting: Setting,
        reference: Reference,
        plan: PipelinePlan,
        *,
        monitor: Monitor | None,
    ) -> None:
        self._is_writer = setting.rank == 0
        steps = ds_config.get("steps_per_print", DEFAULT_STEPS_PER_PRINT)
        self._steps_per_print = int(steps) if steps else 0
        self._has_breakdown = bool(ds_config.get("wall_clock_breakdown", False))
        profiler = ds_config.get("flops_profiler") or {}
        self._flops_step = int(profiler.get("profile_step", 1)) if profiler.get("enabled") else 0
        self._reference = reference
        self._plan = plan
        self._seconds: list[float] = []
        self._monitor = monitor

    def note_staleness(self, staleness: Mapping[str, int], global_samples: int) -> None:
        """Report, once, how many updates old each stage's gradients are in asynchronous mode."""
        if not self._is_writer:
            return
        listed = ", ".join(f"{stage} {updates}" for stage, updates in staleness.items())
        logger.info("asynchronous: updates between the weights of a gradient and its own update: %s", listed)
        if self._monitor is not None and self._monitor.enabled:
            self._monitor.write_events(
                [
                    (f"Train/Staleness/{stage}", updates, global_samples)
                    for stage, updates in staleness.items()
                ]
            )

    def after_step(
        self, *, loss: float, step: StepResult, global_steps: int, global_samples: int, seconds: float
    ) -> None:
        """Report one optimizer step."""
        if not self._is_writer:
            return
        # Kept for the mean of the next line only: a job that prints nothing keeps nothing.
        if self._steps_per_print:
            self._seconds.append(seconds)
        if self._monitor is not None and self._monitor.enabled:
            events = [("Train/Samples/train_loss", loss, global_samples)]
            # Names and the first group's rate are DeepSpeed's, so that plots of both go together.
            events += [("Train/Samples/lr", rate, global_samples) for rate in step.learning_rates[:1]]
            if step.loss_scale != 1.0:
                events.append(("Train/Samples/loss_scale", step.loss_scale, global_samples))
            self._monitor.write_events(events)
        if self._steps_per_print and global_steps % self._steps_per_print == 0:
            mean = sum(self._seconds) / len(self._seconds)
            logger.info(
                "step %d: loss %.4f, lr %s, %.1f ms a step, %.1f samples/s",
                global_steps,
                loss,
                ", ".join(f"{lr:.3g}" for lr in step.learning_rates) or "none",
                mean * 1e3,
                self._plan.mini_batch / mean,
            )
            if self._has_breakdown:
                logger.info("wall clock: train_batch %s ms", [round(s * 1e3, 2) for s in self._seconds])
            self._seconds.clear()
        if global_steps == self._flops_step:
            self._report_flops(seconds)

    def _report_flops(self, seconds: float) -> None:
        # FLOPs of the captured operators, for the samples the model was captured with. A backward computes gradients of
        # inputs and of weights, each about as much as the forward: three forwards in all.
        graph = self._reference.block_graph
        per_sample = {block.name: block.flops / graph.num_samples for block in graph.blocks}
        for stage in self._plan.stages:
            total = sum(per_sample[name] for name in stage.blocks) * self._plan.mini_batch
            logger.info("flops profiler: stage %s, forward %.4g FLOPs a mini-batch", stage.name, total)
        everything = sum(per_sample.values()) * self._plan.mini_batch
        logger.info(
            "flops profiler: forward %.4g FLOPs a mini-batch; about %.4g FLOP/s with backward as twice forward",
            everything,
            3 * everything / seconds,
        )


def keep_timeline(
    events: Sequence[Event],
    clock: Clock,
    *,
    plan: PipelinePlan,
    meeting: Meeting,
    path: str | None,
    step: int,
) -> Timeline | None:
    """Gather a step's events on rank 0, write them to ``path`` if there is one, and return them there."""
    timeline = gather_timeline(events, clock, plan=plan, meeting=meeting)
    if path is not None and timeline is not None:
        write_trace(timeline, plan, path, step=step)
    return timeline
