"""How a plan is rehearsed, and what a plan must hold for it; everything is checked before a process starts."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from gpp_plugin.config.key_names import place_of, setting_of
from gpp_plugin.errors import ConfigError, GppError, PlanError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.tensors import LayoutKind, TensorSpec, batch_layout
from gpp_plugin.plan.plan_form import check_form, read_plan

LARGEST_MEMORY_SHARE = 0.8
"""Of the memory that is free, what a rehearsal may fill with messages and gradients."""
LEAST_COMM_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalSettings:
    """How often, at which speed and with how large messages.

    Args:
        steps: mini-batches that are measured; one more runs before them.
        scale_time: factor of every task's planned duration.
        scale_bytes: factor of every message and of the gradients that are reduced.
        comm_timeout_s: longest wait for a message; None: by the plan's own times.
    """

    steps: int = 5
    scale_time: float = 1.0
    scale_bytes: float = 1.0
    comm_timeout_s: float | None = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"{place_of('steps')}: {self.steps} is not valid; give at least 1")
        for name in ("scale_time", "scale_bytes"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{place_of(name)}: {value:g} is not valid; give a number above 0")
        if self.comm_timeout_s is not None and not self.comm_timeout_s > 0:
            raise ConfigError(
                f"{place_of('timeout_s')}: {self.comm_timeout_s:g} is not valid; give seconds above 0"
            )


def load_rehearsable(path: Path) -> PipelinePlan:
    """Read a plan and check that it can be rehearsed.

    Raises:
        GppError: the file is missing, not a plan of this release, or cannot be rehearsed.
    """
    plan = read_plan(path)
    try:
        check_rehearsable(plan)
    except GppError as error:
        raise type(error)(f"{path}: {error}") from error
    return plan


def check_rehearsable(plan: PipelinePlan) -> None:
    """Refuse a plan whose ranks, times or tensors do not say what to run.

    Raises:
        PlanError: it says what is missing and how to get it.
    """
    # What any plan is, then times, and the shape of all that is sent. Memory and programs are checked elsewhere
    # (`check_memory`, `run._check_programs`).
    check_form(plan)
    if not any(stage.forward_us for stage in plan.stages):
        raise PlanError("its stages have no forward_us; make the plan with gpp plan --out")
    for stage in plan.stages:
        times = (stage.forward_us, stage.backward_us)
        if not all(math.isfinite(time) and time >= 0 for time in times):
            raise PlanError(
                f"stage {stage.name!r} takes {times[0]} and {times[1]} us; times must be 0 or more"
            )
    known = {spec.name for spec in plan.tensors}
    for number, edge in enumerate(plan.edges):
        missing = [name for name in (*edge.batch_tensors, *edge.whole_tensors) if name not in known]
        if missing:
            raise PlanError(
                f"edge {number} sends {missing[0]!r}, whose shape the plan does not hold; "
                "make the plan anew with gpp plan --out"
            )


def scale_tensors(plan: PipelinePlan, factor: float) -> dict[str, TensorSpec]:
    """Return the plan's tensors by name, with ``factor`` times the elements.

    At a factor of 1 shapes are the model's own. At others a tensor becomes a matrix of samples x elements
    (one row of elements where it has no batch axis), at least one element each; one that tensor ranks hold as
    shards keeps its axes, and the longest that has neither samples nor shards is scaled.
    """
    if factor == 1.0:
        return {spec.name: spec for spec in plan.tensors}
    cut: dict[str, set[int]] = defaultdict(set)
    for edge in plan.edges:
        for name in (*edge.batch_tensors, *edge.whole_tensors):
            cut[name].update(axis for axis in (edge.src_shard_axis, edge.dst_shard_axis) if axis is not None)
    return {spec.name: _scale_tensor(spec, factor, cut[spec.name]) for spec in plan.tensors}


def _scale_tensor(spec: TensorSpec, factor: float, shard_axes: set[int]) -> TensorSpec:
    # [8 samples, 197 tokens, 768], factor 0.1, at axis 0 the samples:
    #
    #   without shards                (8, 15130)           1/10 of 197 * 768 elements a sample
    #   tokens in shards (axis 1)     (8, 197, 77)         axis 1 must go on dividing among the tensor ranks
    #   no batch axis, no shards      (121037,)            1/10 of all 8 * 197 * 768
    elements = math.prod(spec.shape)
    if elements == 0:
        return spec
    is_batch = spec.layout.kind is LayoutKind.BATCH
    if shard_axes:
        free = set(range(len(spec.shape))) - shard_axes - ({spec.layout.axis} if is_batch else set())
        if not free:
            return spec
        axis = max(free, key=spec.shape.__getitem__)
        scaled = max(1, round(spec.shape[axis] * factor))
        return dataclasses.replace(spec, shape=(*spec.shape[:axis], scaled, *spec.shape[axis + 1 :]))
    rows = spec.num_samples if is_batch else 1
    return TensorSpec(
        name=spec.name,
        dtype=spec.dtype,
        shape=(rows, max(1, round(elements / rows * factor)))
        if is_batch
        else (max(1, round(elements * factor)),),
        num_samples=spec.num_samples,
        layout=batch_layout(0) if is_batch else spec.layout,
        requires_grad=spec.requires_grad,
    )


def message_memory_bytes(plan: PipelinePlan, settings: RehearsalSettings) -> float:
    """Return about how many bytes all ranks together need for messages and gradients."""
    tensors = scale_tensors(plan, settings.scale_bytes)
    total = 0.0
    for edge in plan.edges:
        for index, shard_axis in ((edge.src, edge.src_shard_axis), (edge.dst, edge.dst_shard_axis)):
            stage = plan.stages[index]
            one = sum(
                tensors[name].bytes_for(stage.local_batch_size)
                for name in (*edge.batch_tensors, *edge.whole_tensors)
            )
            # A consumer may have received the activations of all micro-batches in flight, a producer sends
            # the same tensor again and again. Two stages of 1 rank, 10 MB a micro-batch, in flight 2 and 1:
            # 10 * (1 + 1) where it is made and 10 * (1 + 1) where it is used, 40 MB.
            held = stage.in_flight if index == edge.dst else 1
            copies = stage.degree * (stage.tensor if shard_axis is None else 1)
            total += one * copies * (held + 1)  # the one more: its gradients
    reduced = sum(stage.gradient_bytes * len(stage.ranks) for stage in plan.stages if stage.degree > 1)
    return total + reduced * settings.scale_bytes


def check_memory(plan: PipelinePlan, settings: RehearsalSettings, free_bytes: float) -> None:
    """Refuse a rehearsal whose messages do not fit this machine's memory.

    Raises:
        ConfigError: says how much smaller they must be.
    """
    needed = message_memory_bytes(plan, settings)
    limit = free_bytes * LARGEST_MEMORY_SHARE
    if needed > limit:
        fitting = settings.scale_bytes * limit / needed
        digit = 10.0 ** math.floor(math.log10(fitting))
        fitting = math.floor(fitting / digit) * digit  # one digit, rounded down
        raise ConfigError(
            f"the messages and gradients of {plan.num_ranks} ranks take about {needed / 2**30:.1f} GiB, this "
            f"machine has {free_bytes / 2**30:.1f} GiB free; write "
            f"{setting_of('scale_bytes', fitting)}"
        )
