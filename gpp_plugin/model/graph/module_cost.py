"""What a stage that is the user's own module costs: timed on its ranks, all in step.

The number of runs is fixed: ranks that compute one stage together meet in its collectives.

Whether its backward can be made in two parts nothing says: an operator may let go of what it saved, or write to it, or
add to something as it goes. So both are done and compared: a module whose gradients are not the same is never split.

Source: this project
Tests: tests/stage_graph/test_module_cost.py
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpp_plugin.capture.eager.trial_run import refuse_lost_device
from gpp_plugin.errors import ConfigError
from gpp_plugin.ir.profile import BlockCost, Profile
from gpp_plugin.model.graph.given_module import GivenModule
from gpp_plugin.model.graph.kept import Kept, line, module_memory, record_kept
from gpp_plugin.model.graph.module_trial import ModuleTrial, Place, stage_arguments
from gpp_plugin.model.graph.probe import Survey
from gpp_plugin.model.graph.resolve import GraphStage
from gpp_plugin.profile.busy_stream import HeadStart, Lap, typical_laps
from gpp_plugin.profile.held_bytes import LiveBytes
from gpp_plugin.profile.split_cost import CANNOT_SPLIT, NOT_MEASURED, SplitCost
from gpp_plugin.profile.timing import Stopwatch
from gpp_plugin.runtime.batches import Batch
from gpp_plugin.runtime.memory.counting import storage_id
from gpp_plugin.runtime.split import BackwardSplitter

logger = logging.getLogger(__name__)

WARM_UPS, REPEATS = 1, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One number of samples: median times, what is kept for backward, the peak above it.

    Args:
        given_bytes: of all received tensors and buffers.
    """

    forward_us: float
    backward_us: float
    kept: list[Kept]
    given_bytes: int
    transient_bytes: int


def measure_module(
    stage: GraphStage,
    own: GivenModule,
    place: Place,
    batch: Batch,
    survey: Survey,
    *,
    counts: Sequence[int],
    optimizer_bytes: float,
    with_split: bool,
) -> Profile:
    """Return the cost of a module as a profile of one block; collective over the stage's ranks.

    Args:
        counts: numbers of samples to time it at, increasing; those that it cannot do are left out, but for the last.
        optimizer_bytes: optimizer state for each trained parameter.
        with_split: time backwards in two parts too, at the largest number of samples.

    Raises:
        ConfigError: the module fails at its largest number of samples.
    """

    def trial(count: int) -> ModuleTrial:
        arguments = stage_arguments(
            stage, batch, count, place, tensors=survey.shapes.tensors, values=survey.values, largest=count
        )
        return ModuleTrial(stage=stage, module=own.given, device=place.device, arguments=arguments)

    # Times stay one a count, as a forward of 4 samples is rarely four forwards of one; kept bytes become a line. With
    # 4 KiB of hidden states a sample and a mask of 1 KiB that is kept once: 5, 17 and 33 KiB at 1, 4 and 8 samples,
    # so saved_bytes_per_sample is 4 KiB and saved_bytes_fixed 1 KiB.
    runs = _time_all(trial, counts)
    split = measure_split(trial(counts[-1])) if with_split else NOT_MEASURED
    done = sorted(runs)
    parameters = list(own.given.parameters())
    trained = [p for p in parameters if p.requires_grad]
    per_sample, fixed = line([(n, sum(k.num_bytes for k in runs[n].kept)) for n in done])
    cost = BlockCost(
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
        split_factor=split.factor,
        input_share=split.input_share,
    )
    memory = module_memory(
        stage.name, {n: runs[n].kept for n in done}, {n: runs[n].given_bytes for n in done}
    )
    return Profile(graph="", device="", source="measured", costs=(cost,), modules=(memory,))


def _time_all(trial: Callable[[int], ModuleTrial], counts: Sequence[int]) -> dict[int, _Run]:
    """Return by number of samples what was timed, without the numbers that the module cannot do.

    Raises:
        ConfigError: it cannot do the last.
    """
    # Small numbers may be refused (a norm over the batch wants two samples); the last is one that any plan may use.
    runs: dict[int, _Run] = {}
    for count in counts:
        try:
            runs[count] = _time(trial(count))
        except ConfigError as error:
            if count == counts[-1]:
                raise
            logger.info("%d samples at a time are not possible: %s", count, error)
    return runs


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _run_backward(roots: Sequence[Tensor]) -> None:
    if roots:
        torch.autograd.backward(list(roots), [torch.ones_like(root) for root in roots])


def _time(trial: ModuleTrial) -> _Run:
    stage, module, arguments = trial.stage, trial.module, trial.arguments
    received = [arguments[keyword] for keyword, _ in stage.received]
    laps: list[list[Lap]] = []
    head_start = _head_start(stage)
    with trial.undisturbed():
        for attempt in range(WARM_UPS + REPEATS):
            watch = Stopwatch(trial.device, head_start)
            roots, _ = trial.forward()
            watch.mark()
            _run_backward(roots)
            watch.mark()
            lap = watch.laps()
            if attempt >= WARM_UPS:
                laps.append(lap)
        forward, backward = typical_laps(laps)
        backward_us = backward.us if roots else 0.0
        del roots
        rows = [arguments[keyword] for keyword, _ in stage.batch_inputs]
        kept = record_kept(
            trial.forward,
            fixed=(*module.parameters(), *module.buffers(), *rows),
            received=received,
            device=trial.device,
        )
        transient = _peak(trial)
    own_storages = {storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in received}
    return _Run(
        forward_us=forward.us,
        backward_us=backward_us,
        kept=kept,
        given_bytes=sum(own_storages.values()) + sum(_bytes(buffer) for buffer in module.buffers()),
        transient_bytes=transient,
    )


def _head_start(stage: GraphStage) -> HeadStart | None:
    """Return what lets the host get ahead of the device; None where ranks compute the stage together."""
    # Ranks that were held for unlike times would wait for each other in the module's collectives, and count that.
    return HeadStart() if len(stage.spec.ranks) == 1 else None


def _peak(trial: ModuleTrial) -> int:
    """Return the peak of forward and backward above what is held in between."""
    device, module = trial.device, trial.module
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        roots, _ = trial.forward()
        held, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        _run_backward(roots)
        return max(0, max(peak, torch.cuda.max_memory_allocated(device)) - held)
    counter = LiveBytes()
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    counter.ignore((*module.parameters(), *module.buffers(), *trial.arguments.values(), *grads))
    with counter:
        roots, _ = trial.forward()
        held = counter.live_bytes
        _run_backward(roots)
    return max(0, counter.peak_bytes - held)


WARM_UPS, REPEATS = 1, 2

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
COARSE_TOLERANCE = 5e-2
"""How far a gradient may be off, over its norm: sums differ in their order."""
SMALL = 1e-3
"""Gradients of less than this share of the largest one's norm are mostly rounding."""

_Gradients = list[Tensor | None]


def measure_split(trial: ModuleTrial) -> SplitCost:
    """Time a backward whole and in two parts; `CANNOT_SPLIT` where the parts fail or make other gradients.

    Collective over the ranks that compute the stage together.
    """
    splitter = BackwardSplitter()
    laps: list[list[Lap]] = []
    ahead_of_whole, ahead_of_parts = _head_start(trial.stage), _head_start(trial.stage)
    for attempt in range(WARM_UPS + REPEATS):
        wanted, whole = _run(trial, None, ahead_of_whole)
        try:
            found, parts = _run(trial, splitter, ahead_of_parts)
        except Exception as error:  # whatever its operators say to being run twice
            refuse_lost_device(error)
            logger.info("stage %s: its backward cannot be split: %s", trial.stage.name, error)
            return CANNOT_SPLIT
        if not _are_same(wanted, found):
            logger.info("stage %s: its backward makes other gradients in two parts", trial.stage.name)
            return CANNOT_SPLIT
        if attempt >= WARM_UPS:
            laps.append([*whole, *parts])
    backward_us, input_us, weight_us = (typical.us for typical in typical_laps(laps))
    return SplitCost(backward_us=backward_us, input_gradient_us=input_us, weight_gradient_us=weight_us)


def _run(
    trial: ModuleTrial, splitter: BackwardSplitter | None, head_start: HeadStart | None
) -> tuple[_Gradients, list[Lap]]:
    """Return the gradients of received tensors and parameters, and the time of each part; the same draws each time."""
    with trial.undisturbed():
        roots, leaves = trial.forward()
        seeds = [torch.randn_like(root) for root in roots]
        watch = Stopwatch(trial.device, head_start)
        found: _Gradients
        if splitter is not None:
            found, pending = splitter.split(roots, leaves, seeds)
            watch.mark()
            pending.run()
        else:
            if roots:
                torch.autograd.backward(roots, seeds)
            found = [leaf.grad for leaf in leaves]
        watch.mark()
        found += [parameter.grad for parameter in trial.module.parameters()]
        return found, watch.laps()


def _are_same(wanted: Sequence[Tensor | None], found: Sequence[Tensor | None]) -> bool:
    largest = max((float(g.double().norm()) for g in wanted if g is not None), default=0.0)
    for want, have in zip(wanted, found, strict=True):
        if want is None or have is None:
            only = want if have is None else have
            if only is not None and float(only.norm()) > 0:
                return False
            continue
        tolerance = TOLERANCE.get(want.dtype, COARSE_TOLERANCE)
        norm = max(float(want.double().norm()), SMALL * largest)
        if not float((want.double() - have.double()).norm()) <= tolerance * norm:
            return False
    return True
