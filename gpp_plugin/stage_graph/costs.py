"""What each stage costs: timed on its own ranks, stage after stage, so that none disturbs another.

The number of runs is fixed: ranks that compute one stage together meet in its collectives.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpp_plugin.errors import ConfigError
from gpp_plugin.ir.profile import BlockCost
from gpp_plugin.profile.memory import LiveBytes, SavedStorages
from gpp_plugin.profile.timing import Stopwatch
from gpp_plugin.runtime.agree import exchange
from gpp_plugin.runtime.batches import Batch
from gpp_plugin.stage_graph.module import GivenModule
from gpp_plugin.stage_graph.probe import Place, Survey, call_stage, stage_arguments, undisturbed
from gpp_plugin.stage_graph.resolve import GraphStage, ResolvedGraph

logger = logging.getLogger(__name__)

WARM_UPS, REPEATS = 1, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One number of samples: median times, bytes kept for backward, the peak above them."""

    forward_us: float
    backward_us: float
    saved_bytes: int
    transient_bytes: int


def measure_stages(
    graph: ResolvedGraph,
    own: GivenModule,
    place: Place,
    batch: Batch,
    survey: Survey,
    *,
    counts: Mapping[str, Sequence[int]],
    optimizer_bytes: float,
) -> tuple[BlockCost, ...]:
    """Return the costs of every stage, the same on every rank; collective over all ranks.

    Args:
        counts: stage -> numbers of samples to time it at, increasing; those that its module cannot do are left
            out, but for the largest.
        optimizer_bytes: optimizer state for each trained parameter.

    Raises:
        ConfigError: a stage fails at its largest number of samples.
    """
    costs = []
    for stage in graph.stages:
        is_mine = place.rank in stage.spec.ranks

        def time_own(stage: GraphStage = stage) -> BlockCost:
            return _cost(stage, own, place, batch, survey, counts[stage.name], optimizer_bytes)

        told = exchange(
            lambda run=time_own if is_mine else None: None if run is None else run(),  # type: ignore[misc]
            what=f"profile of stage {stage.name!r}",
            group=place.group,
        )
        cost = told[stage.spec.ranks[0]] if place.group is not None else told[0]
        assert cost is not None, "a stage's first rank times it"
        costs.append(cost)
        if place.rank == 0:
            logger.info("profiling: stage %s, %.0f us a micro-batch", stage.name, cost.forward_us[-1])
    return tuple(costs)


def _cost(
    stage: GraphStage,
    own: GivenModule,
    place: Place,
    batch: Batch,
    survey: Survey,
    counts: Sequence[int],
    optimizer_bytes: float,
) -> BlockCost:
    runs: dict[int, _Run] = {}
    for count in counts:
        try:
            runs[count] = _time(stage, own, place, batch, survey, count)
        except ConfigError as error:
            if count == counts[-1]:
                raise
            logger.info("%d samples at a time are not possible: %s", count, error)
    done = sorted(runs)
    parameters = [p for p in own.given.parameters()]
    trained = [p for p in parameters if p.requires_grad]
    per_sample, fixed = _line([(n, runs[n].saved_bytes) for n in done])
    return BlockCost(
        block=stage.name,
        samples=tuple(done),
        forward_us=tuple(runs[n].forward_us for n in done),
        backward_us=tuple(runs[n].backward_us for n in done),
        saved_bytes_per_sample=per_sample,
        saved_bytes_fixed=fixed,
        parameter_bytes=sum(_bytes(p) for p in parameters) + sum(_bytes(b) for b in own.given.buffers()),
        gradient_bytes=sum(_bytes(p) for p in trained),
        optimizer_bytes=round(sum(p.numel() for p in trained) * optimizer_bytes),
        transient_bytes_per_sample=runs[done[-1]].transient_bytes / done[-1],
    )


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _line(points: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Return bytes a sample and bytes in any case through the first and the last of these points."""
    (low, least), (high, most) = points[0], points[-1]
    if low == high:
        return most / high, 0.0
    slope = max(most - least, 0) / (high - low)
    return slope, max(most - slope * high, 0.0)


def _time(
    stage: GraphStage, own: GivenModule, place: Place, batch: Batch, survey: Survey, num_samples: int
) -> _Run:
    arguments = stage_arguments(
        stage,
        batch,
        num_samples,
        place,
        tensors=survey.shapes.tensors,
        values=survey.values,
        largest=num_samples,
    )
    batch_rows = [arguments[keyword] for keyword, _ in stage.batch_inputs]
    laps: list[tuple[float, float]] = []
    with undisturbed(own.given, is_training=True, device=place.device):
        for attempt in range(WARM_UPS + REPEATS):
            watch = Stopwatch(place.device)
            roots, seeds = _forward(stage, own, arguments)
            watch.mark()
            if roots:
                torch.autograd.backward(roots, seeds)
            watch.mark()
            forward_us, backward_us = watch.laps_us()
            if attempt >= WARM_UPS:
                laps.append((forward_us, backward_us if roots else 0.0))
        saved = SavedStorages(exclude=(*own.given.parameters(), *own.given.buffers(), *batch_rows))
        with saved.recording():
            kept = _forward(stage, own, arguments)
        del kept
        saved.clear()
        transient = _peak(stage, own, arguments, place.device)
    return _Run(
        forward_us=statistics.median(lap[0] for lap in laps),
        backward_us=statistics.median(lap[1] for lap in laps),
        saved_bytes=saved.total_bytes,
        transient_bytes=transient,
    )


def _forward(
    stage: GraphStage, own: GivenModule, arguments: dict[str, Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Run a forward and return what its backward starts from, with gradients."""
    fresh = {name: t.detach().requires_grad_(t.requires_grad) for name, t in arguments.items()}
    outputs = call_stage(stage, own.given, fresh)
    roots = [tensor for tensor in outputs.values() if tensor.requires_grad]
    return roots, [torch.ones_like(root) for root in roots]


def _peak(stage: GraphStage, own: GivenModule, arguments: dict[str, Tensor], device: torch.device) -> int:
    """Return the peak of forward and backward above what is held in between."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        roots, seeds = _forward(stage, own, arguments)
        held, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        if roots:
            torch.autograd.backward(roots, seeds)
        return max(0, max(peak, torch.cuda.max_memory_allocated(device)) - held)
    counter = LiveBytes()
    grads = [p.grad for p in own.given.parameters() if p.grad is not None]
    counter.ignore((*own.given.parameters(), *own.given.buffers(), *arguments.values(), *grads))
    with counter:
        roots, seeds = _forward(stage, own, arguments)
        held = counter.live_bytes
        if roots:
            torch.autograd.backward(roots, seeds)
    return max(0, counter.peak_bytes - held)
