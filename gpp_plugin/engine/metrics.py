"""What a user sees of training: monitors, step log, phases, messages, FLOPs, stragglers; numbers that are not finite.

`NanLocator` looks at what every operator of a mini-batch returns, and at the gradient that comes back to it:

    0F0   embed ok   layer.0 ok   layer.1 nan  <- first in a forward: made of finite inputs, in micro-batch 0
    0B0   head ok    layer.1 inf               <- or first in a backward, which runs from the loss down

It reads a number back for each operator, several times what a step costs: it is on where ``locate_nan`` requests it.
The module is that of the captured operator, which the line of the generated code that runs it names.

Source: this project
Tests: tests/integrations/test_observation.py, tests/integrations/test_non_finite.py
"""

from __future__ import annotations

import linecache
import logging
import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gpp_plugin.engine.framework import Monitor
from gpp_plugin.engine.stage_step import StepResult
from gpp_plugin.errors import RuntimeFailure
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.serialize import write_text_whole
from gpp_plugin.ir.timeline import Event, Timeline
from gpp_plugin.report.chrome_trace import write_trace
from gpp_plugin.report.timeline_chart import (
    PhaseTimes,
    describe_rank_time,
    format_messages,
    format_phases,
    mean_phases,
)
from gpp_plugin.runtime.batches import Batch, num_elements, units_of
from gpp_plugin.runtime.executor import MiniBatchResult
from gpp_plugin.runtime.ranks.collectives import Collectives
from gpp_plugin.runtime.ranks.failure_board import HERE, name_of
from gpp_plugin.runtime.ranks.job_board import mark_shared
from gpp_plugin.runtime.ranks.placement_of_ranks import Setting
from gpp_plugin.runtime.recorder import Clock, Moment, gather_timeline, spent_us
from gpp_plugin.runtime.stage_module import Reference
from gpp_plugin.simulate.timeline_metrics import STRAGGLES, RankTime, times_of_ranks

logger = logging.getLogger(__name__)

_ASKING = ("steps_per_print", "wall_clock_breakdown", "comms_logger", "flops_profiler")
"""Keys with which a user requests lines."""
DEFAULT_STEPS_PER_PRINT = 10
TOKEN_KEYS = ("input_ids", "decoder_input_ids")
"""Entries of a batch whose elements are tokens, padding among them."""
PEAK_TFLOPS = {
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "RTX 4090": 165.0,
    "RTX 3090": 71.0,
    "V100": 125.0,
}
"""Dense half-precision matrix TFLOP/s in data sheets, by what a device's name contains; the first that it does."""


def peak_flops(device_name: str) -> float | None:
    """Return the FLOP/s that MFU is relative to; None for a device whose data sheet is not known here.

    >>> peak_flops("NVIDIA H100 80GB HBM3"), peak_flops("NVIDIA H100 PCIe"), peak_flops("an abacus")
    (989000000000000.0, 756000000000000.0, None)
    """
    return next((tera * 1e12 for name, tera in PEAK_TFLOPS.items() if name in device_name), None)


class OutlierMonitor:
    """Finds losses far above the usual range, which the last losses give.

        the last losses   2.1 2.0 2.2 1.9 2.1 ...   median 2.1, usual distance from it 0.1 (their median, times 1.48)
        the next one      3.0                       9 deviations above: an outlier

    Median and median distance do not move with a few outliers among the last losses, as mean and variance would. The
    range is at least a hundredth of the median: a loss that hardly moves raises no alarm.

    Source: median absolute deviation, Hampel, JASA 69 (1974) 383
    """

    WINDOW = 100
    """Steps whose losses are the usual ones."""
    LEAST = 20
    """Steps before which nothing is an outlier."""
    DEVIATIONS = 8.0
    """How far above the median an outlier is, in deviations: of normal noise one in 10^15."""
    _NORMAL = 1.4826  # of normal noise the deviation is so many median distances
    _LEAST_RANGE = 0.01

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=self.WINDOW)

    def note(self, value: float) -> float | None:
        """Add a value to the window unless it is not finite; return its deviations if it is an outlier, else None."""
        found = None
        if len(self._last) >= self.LEAST and math.isfinite(value):
            middle = median(self._last)
            distance = self._NORMAL * median(abs(each - middle) for each in self._last)
            above = (value - middle) / max(distance, self._LEAST_RANGE * abs(middle), 1e-12)
            found = above if above > self.DEVIATIONS else None
        if math.isfinite(value):
            self._last.append(value)
        return found


class StragglerWatch:
    """Finds ranks whose tasks take longer than they should; every method is collective over all ranks.

        steps    1 .. 20         21                     .. 40         41
        times    median of 20    come; rank 0 compares        again

    A window's medians travel while the next step runs, so that no rank waits for another one, in mode async neither.

    Args:
        rank: this one.
        collectives: of all ranks.
    """

    WINDOW = 20
    """Steps whose median is compared."""
    RECOVERED = 1.2
    """Below so many times what it should take, a rank that was named is as quick as the others again."""
    MOST_NAMED = 4
    """Ranks in one line of the log."""

    def __init__(self, plan: PipelinePlan, *, rank: int, collectives: Collectives) -> None:
        self._plan, self._rank, self._collectives = plan, rank, collectives
        self._num_steps = self._most_tasks = 0
        self._unread: deque[Sequence[tuple[Moment, Moment]]] = deque(maxlen=self.WINDOW)
        self._us: list[float] = []
        self._medians = torch.zeros(plan.num_ranks, dtype=torch.float64)
        self._coming: Callable[[], None] | None = None
        self._named: dict[int, float] = {}

    def note(self, tasks: Sequence[tuple[Moment, Moment]]) -> dict[int, RankTime] | None:
        """Add this rank's tasks of a step; return the times of all ranks in the step behind a window, else None."""
        found = None
        if self._coming is not None:
            self._coming()
            found = times_of_ranks(self._plan, dict(enumerate(self._medians.tolist())))
            self._coming = None
        # On a device a step's times are read a step late or two: nothing waits for it here.
        self._unread.append(tasks)
        while self._unread and (us := spent_us(self._unread[0])) is not None:
            # where units lack a stage's branch it has fewer tasks than planned: as long as all would have taken
            count = len(self._unread.popleft())
            self._most_tasks = max(self._most_tasks, count)
            if count:
                self._us.append(us * self._most_tasks / count)
        self._num_steps += 1
        if self._num_steps % self.WINDOW == 0:
            self._medians.zero_()[self._rank] = median(self._us) if self._us else 0.0
            self._us.clear()
            self._coming = self._collectives.begin_sum(self._medians, "the times of tasks")
        return found

    def finish(self) -> None:
        """Wait for what is under way."""
        if self._coming is not None:
            self._coming()

    def new_stragglers(self, times: Mapping[int, RankTime]) -> str:
        """Return the ranks to name, in words: once, until they recover or become slower still; empty for none."""
        found = []
        for rank, time in times.items():
            if time.slowness < self.RECOVERED:
                self._named.pop(rank, None)
            elif time.slowness > STRAGGLES * max(self._named.get(rank, 1.0), 1.0):
                self._named[rank] = time.slowness
                found.append(rank)
        words = [
            f"{name_of(rank, self._plan.names_on_rank(rank))}, whose tasks take {describe_rank_time(times[rank])}"
            for rank in found
        ]
        more = len(words) - self.MOST_NAMED
        return "; ".join(words[: self.MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")


class Metrics:
    """Writes losses, learning rates and times as the DeepSpeed configuration says; on rank 0 only.

    The other ranks note their own times where phases or messages are requested, and send them with each line of the
    step log.

    Args:
        monitor: writes events, where the configuration requests any.
        collectives: of all ranks.
    """

    def __init__(
        self,
        ds_config: Mapping[str, Any],
        setting: Setting,
        reference: Reference,
        plan: PipelinePlan,
        *,
        monitor: Monitor,
        collectives: Collectives,
    ) -> None:
        self._is_writer = setting.rank == 0
        steps = ds_config.get("steps_per_print", DEFAULT_STEPS_PER_PRINT)
        self._steps_per_print = int(steps) if steps else 0
        self._is_active = any(ds_config.get(key) for key in _ASKING)
        self._has_breakdown = bool(ds_config.get("wall_clock_breakdown", False))
        self._has_messages = bool((ds_config.get("comms_logger") or {}).get("enabled", False))
        profiler = ds_config.get("flops_profiler") or {}
        self._flops_step = int(profiler.get("profile_step", 1)) if profiler.get("enabled") else 0
        self._flops_file: str | None = profiler.get("output_file")
        self._seconds: list[float] = []
        self._num_tokens = 0
        self._phases = PhaseTimes()
        self._write = monitor.write_events if monitor.enabled else None
        self._collectives = collectives
        self._outliers = OutlierMonitor()
        self._stragglers: StragglerWatch | None = None
        self._rank, self._graph = setting.rank, reference.block_graph
        self.use_plan(plan)
        name = torch.cuda.get_device_name(setting.device) if setting.device.type == "cuda" else ""
        self._peak = peak_flops(name) if setting.dtype in (torch.bfloat16, torch.float16) else None

    def use_plan(self, plan: PipelinePlan) -> None:
        """Report on the steps of this plan from now on; collective where there was another one."""
        self._plan = plan
        self._seconds.clear()
        self._num_tokens = 0
        if self._stragglers is not None:
            self._stragglers.finish()
        if plan.num_ranks > 1:
            self._stragglers = StragglerWatch(plan, rank=self._rank, collectives=self._collectives)
        # FLOPs of the captured operators, for a mini-batch of the samples the model was captured with. A backward
        # computes gradients of inputs and of weights, each about as much as the forward: three forwards in all, and
        # one of a stage that runs no backward.
        graph = self._graph
        per_sample = {block.name: block.flops / max(graph.num_samples, 1) for block in graph.blocks}
        self._forward_flops = {
            stage.name: sum(per_sample[name] for name in stage.blocks) * plan.mini_batch
            for stage in plan.stages
        }
        self._step_flops = sum(
            self._forward_flops[stage.name] * (3 if stage.backward_us or not stage.forward_us else 1)
            for stage in plan.stages
        )

    @property
    def needs_events(self) -> bool:
        """Return whether steps are to be recorded for the next line of the step log; alike on all ranks."""
        return bool(self._steps_per_print) and (self._has_breakdown or self._has_messages)

    def note_staleness(self, staleness: Mapping[str, int], global_samples: int) -> None:
        """Report, once, how many updates old each stage's gradients are in asynchronous mode."""
        if not self._is_writer:
            return
        listed = ", ".join(f"{stage} {updates}" for stage, updates in staleness.items())
        logger.info("asynchronous: updates between the weights of a gradient and its own update: %s", listed)
        if self._write is not None:
            self._write(
                [
                    (f"Train/Staleness/{stage}", updates, global_samples)
                    for stage, updates in staleness.items()
                ]
            )

    def after_step(
        self,
        *,
        loss: float,
        step: StepResult,
        result: MiniBatchResult,
        batch: Batch,
        global_steps: int,
        global_samples: int,
        seconds: float,
    ) -> None:
        """Report one optimizer step; collective.

        Args:
            result: this rank's of the step, with events where it `needs_events`.
            batch: the mini-batch, or its shapes.
        """
        if self.needs_events:
            self._phases.add(result.events, seconds * 1e6)
        if (
            self._stragglers is not None
            and (times := self._stragglers.note(result.tasks))
            and self._is_writer
        ):
            self._report_times(times, self._stragglers.new_stragglers(times), global_steps, global_samples)
        is_printed = bool(self._steps_per_print) and global_steps % self._steps_per_print == 0
        ranks = self._gather_phases() if is_printed and self.needs_events else None
        if not self._is_writer:
            return
        spike = self._outliers.note(loss)
        if spike is not None:
            logger.warning(
                "step %d: loss %.4g is a spike: %.1f deviations above the usual one of the last %d steps",
                *(global_steps, loss, spike, OutlierMonitor.WINDOW),
            )
        tokens = sum(num_elements(unit).get(key, 0) for unit in units_of(batch) for key in TOKEN_KEYS)
        if self._write is not None:
            self._write_events(loss, step, spike, ranks, tokens, global_samples, seconds)
        # Stored for the mean of the next line only: a job that prints nothing stores nothing.
        if self._steps_per_print:
            self._seconds.append(seconds)
            self._num_tokens += tokens
        if is_printed:
            self._print(loss, step, ranks, global_steps)
        if global_steps == self._flops_step:
            self._report_flops(seconds)

    def _report_times(
        self, times: Mapping[int, RankTime], stragglers: str, global_steps: int, global_samples: int
    ) -> None:
        """Write what the tasks of each rank took, and name those that straggle."""
        if stragglers:
            logger.warning(
                "step %d: slow in the last %d steps: %s; look at what else runs there, and at its clocks",
                *(global_steps, StragglerWatch.WINDOW, stragglers),
            )
        if self._write is None:
            return
        values: list[tuple[str, float, int]] = []
        for rank, time in times.items():
            values.append((f"Train/TaskTime/ms_rank_{rank}", time.us / 1e3, global_samples))
            for name, ratio in (("plan", time.over_plan), ("replicas", time.over_replicas)):
                if ratio:
                    values.append((f"Train/TaskTime/over_{name}_rank_{rank}", ratio, global_samples))
        self._write(values)

    def _gather_phases(self) -> dict[int, PhaseTimes] | None:
        """Return what all ranks noted since the last line, on rank 0; begin anew."""
        gathered = self._collectives.gather_on_first(self._phases, "the phases of steps")
        self._phases = PhaseTimes()
        return None if gathered is None else dict(enumerate(gathered))

    def _write_events(
        self,
        loss: float,
        step: StepResult,
        spike: float | None,
        ranks: Mapping[int, PhaseTimes] | None,
        tokens: int,
        global_samples: int,
        seconds: float,
    ) -> None:
        assert self._write is not None
        # Names and the first group's rate are DeepSpeed's, so that plots of both go together.
        values = {"Train/Samples/train_loss": loss}
        if step.learning_rates:
            values["Train/Samples/lr"] = step.learning_rates[0]
        if step.loss_scale != 1.0:
            values["Train/Samples/loss_scale"] = step.loss_scale
        values["Train/Samples/grad_norm"] = step.grad_norm
        for index, norm in step.stage_norms.items():
            values[f"Train/GradNorm/{self._plan.stages[index].name}"] = norm
        if spike is not None:
            values["Train/Samples/loss_spike"] = spike
        values["Train/Throughput/samples_per_second"] = self._plan.mini_batch / seconds
        if tokens:
            values["Train/Throughput/tokens_per_second"] = tokens / seconds
        if self._step_flops:
            rate = self._step_flops / seconds / self._plan.num_ranks
            values["Train/Throughput/tflops_per_rank"] = rate / 1e12
            if self._peak is not None:
                values["Train/Throughput/mfu"] = rate / self._peak
        if ranks is not None and self._has_breakdown:
            for phase, us in mean_phases(list(ranks.values())).items():
                values[f"Train/Samples/elapsed_time_ms_{phase}"] = us / 1e3
        self._write([(name, value, global_samples) for name, value in values.items()])

    def _print(
        self, loss: float, step: StepResult, ranks: Mapping[int, PhaseTimes] | None, global_steps: int
    ) -> None:
        """Log the mean of the steps since the last line."""
        mean = sum(self._seconds) / len(self._seconds)
        parts = [
            f"gradient norm {step.grad_norm:.3g}",
            f"{mean * 1e3:.1f} ms a step",
            f"{self._plan.mini_batch / mean:.1f} samples/s",
        ]
        if self._num_tokens:
            parts.append(f"{self._num_tokens / sum(self._seconds):.0f} tokens/s")
        if self._step_flops:
            rate = self._step_flops / mean / self._plan.num_ranks
            parts.append(f"{rate / 1e12:.3g} TFLOP/s a rank")
            if self._peak is not None:
                parts.append(f"MFU {100 * rate / self._peak:.1f} %")
        rates = ", ".join(f"{lr:.3g}" for lr in step.learning_rates) or "none"
        self._say("step %d: loss %.4f, lr %s, %s", global_steps, loss, rates, ", ".join(parts))
        if ranks is not None and self._has_breakdown:
            self._say(
                "wall clock, mean of %d steps:\n%s", len(self._seconds), format_phases(ranks, self._plan)
            )
        if ranks is not None and self._has_messages:
            self._say("messages of all ranks:\n%s", format_messages(ranks, self._plan))
        self._seconds.clear()
        self._num_tokens = 0

    def _report_flops(self, seconds: float) -> None:
        lines = [
            f"stage {name}, forward {flops:.4g} FLOPs a mini-batch"
            for name, flops in self._forward_flops.items()
        ]
        lines.append(
            f"forward {sum(self._forward_flops.values()):.4g} FLOPs a mini-batch; about "
            f"{self._step_flops / seconds:.4g} FLOP/s with backward as twice forward"
        )
        for line in lines:
            self._say("flops profiler: %s", line)
        if self._flops_file:
            try:
                write_text_whole(self._flops_file, "\n".join([*lines, ""]))
            except OSError as error:
                logger.warning("flops_profiler.output_file: %s", error)

    def _say(self, text: str, *values: object) -> None:
        """Log what the configuration requests; print it where it is requested by name and nobody has set up logging."""
        if self._is_active and not logger.hasHandlers():
            sys.stderr.write(f"{text % values}\n")
        else:
            logger.info(text, *values)


def keep_timeline(
    events: Sequence[Event],
    clock: Clock,
    *,
    plan: PipelinePlan,
    collectives: Collectives,
    path: str | None,
    step: int,
) -> Timeline | None:
    """Gather a step's events on rank 0, write them to ``path`` if there is one, and return them there."""
    timeline = gather_timeline(events, clock, plan=plan, collectives=collectives)
    if path is not None and timeline is not None:
        write_trace(timeline, plan, path, step=step)
    return timeline


# ---- gradients that are not finite --------------------------------------------------------------------------

MOST_FRAMES = 12
"""How far up the code that runs an operator is looked for."""


class SkippedSteps:
    """Ends a job that steps no more: its gradients are not finite, step after step.

    Args:
        most: how many steps running may be skipped; None: any number. While a dynamic loss scale sinks, as it does at
            the beginning in fp16, steps are not counted: it has an end of its own.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._running = 0
        self._last_scale = 0.0

    def count(self, step: StepResult, *, number: int, where: str = "") -> None:
        """Count one step, which all ranks took or skipped together.

        Args:
            number: of the step.
            where: the numbers were first seen not to be finite, where that is known.

        Raises:
            RuntimeFailure: too many have been skipped; the same on every rank.
        """
        has_sunk = step.loss_scale < self._last_scale
        self._last_scale = step.loss_scale
        if not step.overflow:
            self._running = 0
        elif not has_sunk:
            self._running += 1
        if self._most is None or self._running < self._most:
            return
        first = number - self._running + 1
        self._running = 0
        advice = f": {where}" if where else "; set graph_pipeline.locate_nan to see where"
        error = RuntimeFailure(
            f"{self._most} steps running were skipped (steps {first} to {number}): their gradients are not finite, and "
            f"the weights have not changed since{advice}; lower the learning rate or the gradients' clipping, look at "
            "these batches, or load an earlier checkpoint (graph_pipeline.max_skipped_steps: null continues for ever)"
        )
        mark_shared(error)
        raise error


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Where a number that is not finite was first seen on a rank.

    Args:
        order: sorts findings of ranks: forwards come before the backwards that carry their numbers back.
        place: in words.
    """

    order: tuple[int, int]
    place: str


class NanLocator(TorchFunctionMode):
    """Finds where numbers are not finite first; watches what runs inside ``with locator.watching():``."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Found | None = None
        self._fine = 0
        self._instruction = ""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch one mini-batch."""
        self.found = None
        with self:
            yield

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call an operator and look at what it returns."""
        result = func(*args, **(kwargs or {}))
        if self.found is None and HERE.instruction is not None:
            outputs = result if isinstance(result, tuple | list) else (result,)
            for output in outputs:
                if isinstance(output, Tensor) and output.is_floating_point() and output.numel():
                    self._look(func, output, args)
        return result

    def _look(self, func: Callable[..., Any], output: Tensor, args: Iterable[Any]) -> None:
        # Masks hold minus infinity, so in a forward only what is no number counts, or is above all numbers.
        code = _running_code()
        if code is None:
            return
        worst = float(output.detach().amax())
        if worst != worst or worst == float("inf"):
            inputs = [t for t in args if isinstance(t, Tensor) and t.is_floating_point() and t.numel()]
            if all(_is_fine(t) for t in inputs):
                self._note(0, code, func, "returns")
            return
        if output.requires_grad:
            output.register_hook(lambda gradient: self._look_back(gradient, code, func))

    def _look_back(self, gradient: Tensor, code: tuple[Any, str], func: Callable[..., Any]) -> None:
        if self.found is not None or HERE.instruction is None:
            return
        if self._instruction != str(HERE.instruction):
            self._instruction, self._fine = str(HERE.instruction), 0
        if bool(torch.isfinite(gradient).all()):
            self._fine += 1
        elif self._fine:  # else it came so from the stage behind, or with the loss
            self._note(1, code, func, "is given a gradient of")

    def _note(self, phase: int, code: tuple[Any, str], func: Callable[..., Any], does: str) -> None:
        owner, line = code
        module = _module_of(owner, line)
        task = getattr(HERE.instruction, "task", None)
        micro_batch = -1 if task is None else task.micro_batch
        operator = getattr(func, "__name__", str(func))
        self.found = Found(
            order=(phase, micro_batch),
            place=f"{module} (operator {operator}) of stage {HERE.stage!r} {does} numbers that are not finite, in "
            f"micro-batch {micro_batch}, at {HERE.instruction}",
        )


def _is_fine(tensor: Tensor) -> bool:
    worst = float(tensor.detach().amax())
    return worst == worst and worst != float("inf")


def _running_code() -> tuple[Any, str] | None:
    """Return the generated module, or the user's, whose code calls an operator now, and the line of it."""
    frame: FrameType | None = sys._getframe(3)
    for _ in range(MOST_FRAMES):
        if frame is None:
            return None
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return owner, linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def _module_of(owner: Any, line: str) -> str:
    """Return the path of the model's module whose operator a line of generated code runs."""
    if not isinstance(owner, torch.fx.GraphModule):
        return f"module {type(owner).__name__}"
    name = line.strip().split(" ", 1)[0].rstrip(";")
    node = next((node for node in owner.graph.nodes if node.name == name), None)
    stack = {} if node is None else node.meta.get("nn_module_stack") or {}
    paths = [str(entry[0]) for entry in stack.values()]
    path = next((path for path in reversed(paths) if path), "")
    # the capture is of a wrapper, whose one module is the model
    return f"module {path.split('.', 1)[-1]}" if path else f"operator {name}"


def first_found(found: Found | None, collectives: Collectives) -> str:
    """Return where numbers were first not finite on any rank; empty where no operator was seen; collective."""
    gathered = [
        each for each in collectives.gather(found, "where numbers are not finite") if each is not None
    ]
    return min(gathered, key=lambda each: each.order).place if gathered else ""
