"""What each stage costs: timed on its own ranks, stage after stage, so that none disturbs another.

The number of runs is fixed: ranks that compute one stage together meet in its collectives.
"""

from __future__ import annotations

import dataclasses
import logging
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpp_plugin.capture.graph import CapturedGraph
from gpp_plugin.errors import CaptureError, ConfigError
from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.profile import BlockCost, Profile, SharedStorage, TiedCost
from gpp_plugin.ir.serialize import fingerprint
from gpp_plugin.plan.given_recompute import WholeRecompute
from gpp_plugin.profile.measure import profile_blocks
from gpp_plugin.profile.memory import LiveBytes, SavedStorages, storage_key
from gpp_plugin.profile.timing import Stopwatch
from gpp_plugin.runtime.agree import exchange
from gpp_plugin.runtime.batches import Batch
from gpp_plugin.stage_graph.module import GivenModule
from gpp_plugin.stage_graph.part import ARGUMENT, CapturedPart
from gpp_plugin.stage_graph.probe import Survey
from gpp_plugin.stage_graph.resolve import GraphStage, ResolvedGraph
from gpp_plugin.stage_graph.trial import Place, call_stage, stage_arguments, undisturbed

logger = logging.getLogger(__name__)

WARM_UPS, REPEATS = 1, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One number of samples: median times, bytes kept for backward, the peak above them.

    Args:
        dropped_bytes: of those kept, what the stage made itself.
        given_bytes: of all received tensors and buffers.
    """

    forward_us: float
    backward_us: float
    saved_bytes: int
    dropped_bytes: int
    given_bytes: int
    transient_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """What all blocks of a stage graph cost.

    Args:
        shared, tied: as of `Profile`, of captured parts.
        by_stage: stage, as the user gave it -> the costs of its blocks.
        recompute: stage that is not captured -> what running it again drops and keeps.
    """

    shared: tuple[SharedStorage, ...]
    tied: tuple[TiedCost, ...]
    by_stage: Mapping[str, tuple[BlockCost, ...]]
    recompute: Mapping[str, WholeRecompute]

    def profile(self, graph: BlockGraph, *, device: str, stage: str | None = None) -> Profile:
        """Return them as the profile of the whole graph, or of one captured part."""
        stages = self.by_stage if stage is None else {stage: self.by_stage[stage]}
        blocks = {block.name for block in graph.blocks}
        return Profile(
            graph=fingerprint(graph),
            device=device,
            source="measured",
            costs=tuple(cost for costs in stages.values() for cost in costs),
            shared=tuple(storage for storage in self.shared if blocks.issuperset(storage.blocks)),
            tied=tuple(tie for tie in self.tied if blocks.issuperset(tie.blocks)),
        )


def measure_stages(
    graph: ResolvedGraph,
    own: GivenModule | CapturedPart,
    place: Place,
    batch: Batch,
    survey: Survey,
    *,
    counts: Mapping[str, Sequence[int]],
    optimizer_bytes: float,
    cache_dir: str | None = None,
) -> StageCosts:
    """Return the costs of every stage, the same on every rank; collective over all ranks.

    Args:
        counts: stage -> numbers of samples to time it at, increasing; those that its module cannot do are left
            out, but for the largest.
        optimizer_bytes: optimizer state for each trained parameter.
        cache_dir: where profiles of captured parts are kept.

    Raises:
        ConfigError: a stage fails at its largest number of samples.
    """
    by_stage: dict[str, tuple[BlockCost, ...]] = {}
    recompute: dict[str, WholeRecompute] = {}
    shared: list[SharedStorage] = []
    tied: list[TiedCost] = []
    for stage in graph.stages:
        first = stage.spec.ranks[0]
        is_mine = place.rank == first if stage.is_captured else place.rank in stage.spec.ranks

        def time_own(
            stage: GraphStage = stage, is_mine: bool = is_mine
        ) -> tuple[Profile, WholeRecompute | None] | None:
            if not is_mine:
                return None
            if isinstance(own, CapturedPart):
                profile = _part_profile(
                    own, place, batch, survey, counts[stage.name], optimizer_bytes, cache_dir
                )
                return profile, None
            cost, again = _cost(stage, own, place, batch, survey, counts[stage.name], optimizer_bytes)
            return Profile(graph="", device="", source="measured", costs=(cost,)), again

        told = exchange(time_own, what=f"profile of stage {stage.name!r}", group=place.group)
        answer = told[first]
        assert answer is not None, "a stage's first rank times it"
        profile, again = answer
        if again is not None:
            recompute[stage.name] = again
        by_stage[stage.name] = profile.costs
        shared += profile.shared
        tied += profile.tied
        if place.rank == 0:
            longest = sum(cost.forward_us[-1] for cost in profile.costs)
            logger.info("profiling: stage %s, a forward of %.0f us", stage.name, longest)
    return StageCosts(shared=tuple(shared), tied=tuple(tied), by_stage=by_stage, recompute=recompute)


def _part_profile(
    part: CapturedPart,
    place: Place,
    batch: Batch,
    survey: Survey,
    counts: Sequence[int],
    optimizer_bytes: float,
    cache_dir: str | None,
) -> Profile:
    """Profile a captured part's blocks, and call them as the whole graph does."""
    stage = part.stage
    analysis = survey.analyses[stage.name]
    captures: dict[int, CapturedGraph] = {}
    for count in sorted({*counts, analysis.op_graph.num_samples}):
        try:
            arguments = part.arguments(batch, survey.shapes.tensors, count)
            captures[count] = part.capture_again(analysis, arguments)
        except CaptureError as error:
            logger.info("%d samples at a time are not possible: %s", count, error)
    base = captures[analysis.op_graph.num_samples]
    view = part.view(base, survey.shapes.tensors)
    largest = max(captures)
    rows = stage_arguments(
        stage,
        batch,
        largest,
        place,
        tensors=survey.shapes.tensors,
        values=survey.values,
        largest=largest,
    )
    profile = profile_blocks(
        base,
        part.local_graph(base),
        model_state={**dict(part.model.named_parameters()), **dict(part.model.named_buffers())},
        batch={ARGUMENT + name: tensor.detach() for name, tensor in rows.items()},
        capture_at=captures.__getitem__,
        sample_counts=sorted(captures),
        device=place.device,
        threads=torch.get_num_threads(),
        optimizer_bytes_per_parameter=optimizer_bytes,
        cache_dir=cache_dir,
    )
    called = {local: name for name, local in view.local_blocks.items()}

    def renamed(blocks: Sequence[str]) -> tuple[str, ...]:
        return tuple(called[block] for block in blocks)

    return dataclasses.replace(
        profile,
        costs=tuple(dataclasses.replace(cost, block=called[cost.block]) for cost in profile.costs),
        shared=tuple(dataclasses.replace(s, blocks=renamed(s.blocks)) for s in profile.shared),
        tied=tuple(dataclasses.replace(t, blocks=renamed(t.blocks)) for t in profile.tied),
    )


def _cost(
    stage: GraphStage,
    own: GivenModule,
    place: Place,
    batch: Batch,
    survey: Survey,
    counts: Sequence[int],
    optimizer_bytes: float,
) -> tuple[BlockCost, WholeRecompute]:
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
    )
    dropped = _line([(n, runs[n].dropped_bytes) for n in done])
    kept_anyway = {n: runs[n].saved_bytes - runs[n].dropped_bytes for n in done}
    held = _line([(n, runs[n].given_bytes - kept_anyway[n]) for n in done])
    return cost, WholeRecompute(
        dropped_bytes_per_sample=dropped[0],
        dropped_bytes_fixed=dropped[1],
        held_bytes_per_sample=held[0],
        held_bytes_fixed=held[1],
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
    received = {
        storage_key(arguments[keyword]): arguments[keyword].untyped_storage().nbytes()
        for keyword, _ in stage.received
    }
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
        dropped_bytes=sum(size for key, size in saved.bytes_of.items() if key not in received),
        given_bytes=sum(received.values()) + sum(_bytes(buffer) for buffer in own.given.buffers()),
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
