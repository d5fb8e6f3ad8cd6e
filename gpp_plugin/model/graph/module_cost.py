"""What a stage that is the user's own module costs: timed on its ranks, all in step.

The number of runs is fixed: ranks that compute one stage together synchronise in its collectives.

Whether its backward can be made in two parts is unknown: an operator may release what it saved, or write to it, or
add to something on the way. So both are done and compared: a module whose gradients are not the same is never split.

Source: this project
Tests: tests/stage_graph/test_module_cost.py, tests/integrations/test_preparation.py
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from gpp_plugin.capture.captured_graph import CapturedGraph
from gpp_plugin.capture.eager.trial_run import refuse_lost_device
from gpp_plugin.capture.tracing.sample_batches import resize_batch
from gpp_plugin.errors import CaptureError, ConfigError
from gpp_plugin.ir.analysis import Analysis
from gpp_plugin.ir.profile import BlockCost, ModuleMemory, Profile, SavedStorage
from gpp_plugin.model.graph.captured_part import CapturedPart
from gpp_plugin.model.graph.describe_graph import PartView
from gpp_plugin.model.graph.module_trial import ModuleTrial, Place, stage_arguments
from gpp_plugin.model.graph.probe import Survey
from gpp_plugin.model.graph.resolve import GraphStage
from gpp_plugin.model.graph.user_module import UserModule
from gpp_plugin.profile.block_survey import CANNOT_SPLIT, NOT_MEASURED, SplitCost
from gpp_plugin.profile.measure import BLOCK_REPEATS, NODE_REPEATS, profile_blocks
from gpp_plugin.profile.timing import HeadStart, Lap, LiveBytes, Stopwatch, typical_laps
from gpp_plugin.report.progress import step
from gpp_plugin.runtime.batches import Batch
from gpp_plugin.runtime.memory.counting import StorageNumbers, storage_id
from gpp_plugin.runtime.memory.recompute import is_movable
from gpp_plugin.runtime.split import BackwardSplitter

# What the blocks of a captured part cost, a plain model's or one part's of a stage graph: profiled where they are not
# stored; other numbers of samples are traced only then.


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """How stages are profiled.

    Args:
        optimizer_bytes: optimizer state for each trained parameter.
        cache_dir: where profiles are stored; None for the default.
        with_split: time backwards in two parts too, for zero-bubble schedules.
    """

    optimizer_bytes: float
    cache_dir: str | None = None
    with_split: bool = False


class _Captures:
    """A part at the numbers of samples to profile; traced when a profile that is not stored requests one.

    A model may not allow the smallest ones (BatchNorm trains on no single sample): `impossible` has them then.
    """

    def __init__(self, part: CapturedPart, batch: Batch, survey: Survey, counts: Sequence[int]) -> None:
        self._part = part
        self._batch = batch
        self._shapes = survey.shapes.tensors
        self._analysis: Analysis = survey.analyses[part.stage.name]
        self._captures: dict[int, CapturedGraph] = {}
        self.counts = counts
        self.impossible: list[int] = []
        self.base = self._at(self._analysis.op_graph.num_samples)

    def at(self, count: int) -> CapturedGraph:
        """Return the part at ``count`` samples; all are traced before the first is timed.

        Raises:
            CaptureError: some are not possible.
        """
        for wanted in [n for n in self.counts if n not in self._captures]:
            try:
                self._at(wanted)
            except CaptureError as error:
                logger.info("%d samples at a time are not possible: %s", wanted, error)
                self.impossible.append(wanted)
        if self.impossible:
            raise CaptureError(f"{self.impossible} samples at a time are not possible")
        return self._captures[count]

    def _at(self, count: int) -> CapturedGraph:
        arguments = self._part.arguments(self._batch, self._shapes, count)
        self._captures[count] = self._part.capture_again(self._analysis, arguments)
        return self._captures[count]


def profile_part(
    part: CapturedPart,
    place: Place,
    batch: Batch,
    survey: Survey,
    *,
    counts: Sequence[int],
    measuring: Measuring,
) -> Profile:
    """Return the costs of a part's blocks, under the whole graph's names of them.

    Numbers of samples that the module cannot do are left out: the planner gives no rank fewer samples than the
    smallest that works. With counts 1, 2 and 8, and BatchNorm, which trains on no single sample, the first attempt
    fails before anything is timed and the second has 2 and 8.

    Args:
        counts: numbers of samples to time it at, increasing.

    Raises:
        CaptureError: the module cannot be captured where it must be.
        ProfileError: a block cannot be run.
    """
    # the capture at one loss unit is there already; the others are made by `captures.at`, which `profile_blocks` calls
    # only when its store has no profile under this key: a second start exports nothing here
    captures = _Captures(part, batch, survey, counts)
    module, graph = part.model, part.local_graph(captures.base)
    state: dict[str, Any] = dict(module.named_parameters()) | dict(module.named_buffers())

    def profile_at(counts: Sequence[int]) -> Profile:
        with step("profile blocks") as shown:

            def show(done: int, total: int, name: str) -> None:
                shown.update(done, total)
                logger.info("profiling: %d of %d blocks, %s", done, total, name)

            return profile_blocks(
                captures.base,
                graph,
                model_state=state,
                batch=_rows(part, place, batch, survey, max(counts)),
                capture_at=captures.at,
                sample_counts=counts,
                threads=torch.get_num_threads(),
                repeats=NODE_REPEATS if part.granularity == "node" else BLOCK_REPEATS,
                optimizer_bytes_per_parameter=measuring.optimizer_bytes,
                cache_dir=measuring.cache_dir,
                with_split=measuring.with_split,
                progress=show,
            )

    try:
        profile = profile_at(counts)
    except CaptureError:
        # nothing was timed yet: all counts are captured before the first block runs
        if not captures.impossible:
            raise
        captures.counts = [n for n in counts if n not in captures.impossible]
        captures.impossible = []
        profile = profile_at(captures.counts)
    return profile if part.stage.is_alone else _renamed(profile, part.view(captures.base))


def _rows(part: CapturedPart, place: Place, batch: Batch, survey: Survey, count: int) -> dict[str, Any]:
    """Return what the part is profiled on: real rows of the batch, and random ones of what other stages make."""
    stage = part.stage
    # a plain model, or a part that reads the batch alone: its own rows, so that ids and masks are what they will be
    if not stage.received:
        return resize_batch(batch, count)
    rows = stage_arguments(
        stage, batch, count, place, tensors=survey.shapes.tensors, values=survey.values, largest=count
    )
    return part.as_traced({name: tensor.detach() for name, tensor in rows.items()})


def _renamed(profile: Profile, view: PartView) -> Profile:
    """Return a profile of a capture's own blocks with the whole graph's names of them."""
    called = {local: name for name, local in view.local_blocks.items()}

    def renamed(blocks: Sequence[str]) -> tuple[str, ...]:
        return tuple(called[block] for block in blocks)

    return dataclasses.replace(
        profile,
        costs=tuple(dataclasses.replace(cost, block=called[cost.block]) for cost in profile.costs),
        shared=tuple(dataclasses.replace(s, blocks=renamed(s.blocks)) for s in profile.shared),
        tied=tuple(dataclasses.replace(t, blocks=renamed(t.blocks)) for t in profile.tied),
    )


# What a user's module keeps from forward to backward: which storages, in which order, until when.

RELEASE_S = 0.1


@dataclass(slots=True, kw_only=True)
class StorageUse:
    """One storage at one number of samples.

    Args:
        last_use: share of the forward's time after which it is saved for the last time.
        is_made: whether the module made it.
        is_movable: plain bytes that nobody but autograd holds.
    """

    num_bytes: int
    last_use: float = 1.0
    is_made: bool = True
    is_movable: bool = True


def record_saved(
    forward: Callable[[], Any], *, fixed: Iterable[Tensor], received: Iterable[Tensor], device: torch.device
) -> list[StorageUse]:
    """Run a forward and return what autograd keeps of it, by number (`StorageNumbers`).

    Args:
        forward: what it returns holds the graph.
        fixed: what is there anyway and does not count.
        received: what other stages made; it counts, and the module did not make it.
    """
    inputs = {storage_id(tensor) for tensor in received if tensor.layout is torch.strided}
    numbers, watch = StorageNumbers(fixed), Stopwatch(device)
    saved: list[tuple[int | None, Tensor]] = []

    def pack(tensor: Tensor) -> Tensor:
        watch.mark()
        saved.append((numbers.number(tensor), tensor.detach()))
        return saved[-1][1]  # detached: an operator that held its own result would hold its graph, for ever

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    watch.mark()
    until = list(itertools.accumulate(watch.laps_us()))
    uses: dict[int, StorageUse] = {}
    while saved:
        number, tensor = saved.pop()
        now = until[len(saved)]
        if number is not None:
            first = StorageUse(
                num_bytes=tensor.untyped_storage().nbytes(), last_use=now / until[-1] if now > 0 else 1.0
            )
            found = uses.setdefault(number, first)
            found.is_made = storage_id(tensor) not in inputs
            found.is_movable &= is_movable(tensor)
        del tensor
    del result
    _await_release(numbers, [number for number, found in uses.items() if found.is_made])
    for number, found in uses.items():  # what somebody still holds (a cache) would free nothing
        found.is_movable &= not found.is_made or numbers.is_free(number)
    return [uses[number] for number in sorted(uses)]


def _await_release(numbers: StorageNumbers, made: Sequence[int]) -> None:
    """Wait a little for those who let go late.

    Graphs of operators written in Python may hold themselves, and the thread of a collective inside the forward holds
    its result, and with that the graph, until it runs again.
    """
    deadline = time.monotonic() + RELEASE_S
    if not all(map(numbers.is_free, made)):
        gc.collect()
    while not all(map(numbers.is_free, made)) and time.monotonic() < deadline:
        time.sleep(0.002)


def module_memory(
    block: str, uses: Mapping[int, list[StorageUse]], input_bytes: Mapping[int, int]
) -> ModuleMemory:
    """Return what a module keeps at any number of samples.

    Args:
        uses: number of samples -> what it keeps then.
        input_bytes: number of samples -> bytes of all it receives, and of its buffers.
    """
    counts = sorted(uses)
    dropped = line([(n, sum(k.num_bytes for k in uses[n] if k.is_made)) for n in counts])
    held = line([(n, input_bytes[n] - sum(k.num_bytes for k in uses[n] if not k.is_made)) for n in counts])
    forms = {tuple(k.is_made for k in uses[n]) for n in counts}
    storages = []
    for number, most in enumerate(uses[counts[-1]] if len(forms) == 1 else ()):
        per_sample, fixed = line([(n, uses[n][number].num_bytes) for n in counts])
        storages.append(
            SavedStorage(
                bytes_per_sample=per_sample,
                bytes_fixed=fixed,
                last_use=most.last_use,
                is_made=most.is_made,
                # once is enough: what a module holds on to it holds on to always
                is_movable=any(uses[n][number].is_movable for n in counts),
            )
        )
    return ModuleMemory(
        block=block,
        storages=tuple(storages),
        dropped_bytes_per_sample=dropped[0],
        dropped_bytes_fixed=dropped[1],
        held_bytes_per_sample=held[0],
        held_bytes_fixed=held[1],
    )


def line(points: list[tuple[int, int]]) -> tuple[float, float]:
    """Return bytes a sample and bytes in any case through the first and the last of these points."""
    (low, least), (high, most) = points[0], points[-1]
    if low == high:
        return most / high, 0.0
    slope = max(most - least, 0) / (high - low)
    return slope, max(most - slope * high, 0.0)


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One number of samples: median times, what is saved for backward, the peak above it.

    Args:
        input_bytes: of all received tensors and buffers.
    """

    forward_us: float
    backward_us: float
    uses: list[StorageUse]
    input_bytes: int
    transient_bytes: int


def measure_module(
    stage: GraphStage,
    own: UserModule,
    place: Place,
    batch: Batch,
    survey: Survey,
    *,
    counts: Sequence[int],
    measuring: Measuring,
) -> Profile:
    """Return the cost of a module as a profile of one block; collective over the stage's ranks.

    Args:
        counts: numbers of samples to time it at, increasing; those that it cannot do are left out, but for the last.
            Backwards are timed in two parts at the largest.

    Raises:
        ConfigError: the module fails at its largest number of samples.
    """

    def trial(count: int) -> ModuleTrial:
        arguments = stage_arguments(
            stage, batch, count, place, tensors=survey.shapes.tensors, values=survey.values, largest=count
        )
        return ModuleTrial(stage=stage, module=own.user_module, device=place.device, arguments=arguments)

    # Times stay one a count, as a forward of 4 samples is rarely four forwards of one; saved bytes become a line. With
    # 4 KiB of hidden states a sample and a mask of 1 KiB that is saved once: 5, 17 and 33 KiB at 1, 4 and 8 samples,
    # so saved_bytes_per_sample is 4 KiB and saved_bytes_fixed 1 KiB.
    runs = _time_all(trial, counts)
    split = measure_split(trial(counts[-1])) if measuring.with_split else NOT_MEASURED
    done = sorted(runs)
    parameters = list(own.user_module.parameters())
    trained = [p for p in parameters if p.requires_grad]
    per_sample, fixed = line([(n, sum(k.num_bytes for k in runs[n].uses)) for n in done])
    cost = BlockCost(
        block=stage.name,
        samples=tuple(done),
        forward_us=tuple(runs[n].forward_us for n in done),
        backward_us=tuple(runs[n].backward_us for n in done),
        saved_bytes_per_sample=per_sample,
        saved_bytes_fixed=fixed,
        parameter_bytes=sum(p.nbytes for p in parameters) + sum(b.nbytes for b in own.user_module.buffers()),
        gradient_bytes=sum(p.nbytes for p in trained),
        optimizer_bytes=round(sum(p.numel() for p in trained) * measuring.optimizer_bytes),
        transient_bytes_per_sample=runs[done[-1]].transient_bytes / done[-1],
        split_factor=split.factor,
        input_share=split.input_share,
    )
    memory = module_memory(
        stage.name, {n: runs[n].uses for n in done}, {n: runs[n].input_bytes for n in done}
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
        uses = record_saved(
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
        uses=uses,
        input_bytes=sum(own_storages.values()) + sum(buffer.nbytes for buffer in module.buffers()),
        transient_bytes=transient,
    )


def _head_start(stage: GraphStage) -> HeadStart | None:
    """Return what gives the host a lead over the device; None where ranks compute the stage together."""
    # Ranks that were held for different times would wait for each other in the module's collectives, and count that.
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
    lead_of_whole, lead_of_parts = _head_start(trial.stage), _head_start(trial.stage)
    for attempt in range(WARM_UPS + REPEATS):
        wanted, whole = _run(trial, None, lead_of_whole)
        try:
            found, parts = _run(trial, splitter, lead_of_parts)
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
