"""What each stage costs: timed on its own ranks, stage after stage, so that none disturbs another.

Source: this project
Tests: tests/stage_graph/test_equality.py, tests/stage_graph/test_engine.py
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.profile import BlockCost, ModuleMemory, Profile, SharedStorage, TiedCost
from gpp_plugin.ir.serialize import fingerprint
from gpp_plugin.model.graph.captured_part import CapturedPart
from gpp_plugin.model.graph.given_module import GivenModule
from gpp_plugin.model.graph.module_cost import measure_module
from gpp_plugin.model.graph.module_trial import Place
from gpp_plugin.model.graph.part_cost import profile_part
from gpp_plugin.model.graph.probe import Survey
from gpp_plugin.model.graph.resolve import GraphStage, ResolvedGraph
from gpp_plugin.model.graph.stored_profiles import StoredProfile
from gpp_plugin.runtime.batches import Batch
from gpp_plugin.runtime.ranks.agree import exchange, tell

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """How stages are profiled.

    Args:
        optimizer_bytes: optimizer state for each trained parameter.
        cache_dir: where profiles are kept; None for the default.
        with_split: time backwards in two parts too, for zero-bubble schedules.
    """

    optimizer_bytes: float
    cache_dir: str | None = None
    with_split: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """What all blocks of a stage graph cost.

    Args:
        shared, tied: as of `Profile`, of captured parts.
        by_stage: stage, as the user gave it -> the costs of its blocks.
        modules: as of `Profile`, of all other stages.
    """

    shared: tuple[SharedStorage, ...]
    tied: tuple[TiedCost, ...]
    by_stage: Mapping[str, tuple[BlockCost, ...]]
    modules: tuple[ModuleMemory, ...]

    def with_blocks(self, change: Callable[[Sequence[BlockCost]], tuple[BlockCost, ...]]) -> StageCosts:
        """Return what all blocks cost if each stage's cost something else."""
        return dataclasses.replace(
            self, by_stage={stage: change(costs) for stage, costs in self.by_stage.items()}
        )

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
            modules=tuple(module for module in self.modules if module.block in blocks),
        )


def measure_stages(
    graph: ResolvedGraph,
    own: Mapping[str, GivenModule | CapturedPart],
    place: Place,
    batch: Batch,
    survey: Survey,
    *,
    counts: Mapping[str, Sequence[int]],
    measuring: Measuring,
) -> StageCosts:
    """Return the costs of every stage, the same on every rank; collective over all ranks.

    Args:
        own: this rank's stages, by name.
        counts: stage -> numbers of samples to time it at, increasing; those that its module cannot do are left
            out, but for the largest.

    Raises:
        ConfigError: a stage fails at its largest number of samples.
    """
    own_stored = _own_stored(graph, own, place, survey, counts, measuring)
    stored = exchange(
        lambda: {name: stored.find() for name, stored in own_stored.items()},
        what="the stored profiles of stages",
        group=place.group,
        stages=place.stages,
    )
    found: dict[str, Profile] = {}
    # Stages take turns, and all other ranks wait meanwhile: on shared cores and links, stages that are timed side by
    # side would measure each other. With stages a (ranks 0, 1; captured) and b (ranks 2, 3; a user's module):
    #   rank 0   profile a | .         | .
    #   rank 1   .         | .         | .          a captured part's blocks run on its first rank alone
    #   rank 2   .         | profile b |            b has collectives inside: its ranks run it in step
    #   rank 3   .         | profile b |
    for stage in graph.stages:

        def time_own(stage: GraphStage = stage) -> Profile:
            return _time_own(
                stage, own[stage.name], place, batch, survey, counts=counts[stage.name], measuring=measuring
            )

        first = stage.spec.ranks[0]
        known = stored[first].get(stage.name)
        found[stage.name] = profile = _agreed(stage, place, time_own, known)
        if stage.name in own_stored and known is None:
            own_stored[stage.name].put(profile)
        if place.rank == 0:
            longest = sum(cost.forward_us[-1] for cost in profile.costs)
            logger.info("profiling: stage %s, a forward of %.0f us", stage.name, longest)
    profiles = found.values()
    return StageCosts(
        shared=tuple(storage for profile in profiles for storage in profile.shared),
        tied=tuple(tie for profile in profiles for tie in profile.tied),
        by_stage={name: profile.costs for name, profile in found.items()},
        modules=tuple(module for profile in profiles for module in profile.modules),
    )


def _agreed(
    stage: GraphStage, place: Place, time_own: Callable[[], Profile], stored: Profile | None
) -> Profile:
    """Return a stage's profile on every rank: the stored one, or what its ranks measure now; collective over all."""
    # A captured part is looked up where it is profiled, by its operators; a user's module has none to tell it from
    # others, so that its first rank has looked by a description of it, and spares all its ranks the runs.
    ranks = stage.spec.ranks[:1] if stage.is_captured else stage.spec.ranks

    def take_turn() -> Profile | None:
        return time_own() if place.rank in ranks else None

    what = "profile" if stage.is_alone else f"profile of stage {stage.name!r}"
    if stage.is_captured:
        profile = tell(take_turn, source=ranks[0], what=what, group=place.group, stages=place.stages)
        assert profile is not None, "its first rank has measured it"
        return profile
    if stored is not None:
        return stored
    told = exchange(take_turn, what=f"the {what}", group=place.group, stages=place.stages)
    return _of_all([answer for answer in told if answer is not None])


def _time_own(
    stage: GraphStage,
    own: GivenModule | CapturedPart,
    place: Place,
    batch: Batch,
    survey: Survey,
    *,
    counts: Sequence[int],
    measuring: Measuring,
) -> Profile:
    """Return what a stage of this rank costs: block by block where it is captured, else as a whole."""
    if isinstance(own, CapturedPart):
        return profile_part(
            own,
            place,
            batch,
            survey,
            counts=counts,
            optimizer_bytes=measuring.optimizer_bytes,
            cache_dir=measuring.cache_dir,
            with_split=measuring.with_split,
        )
    return measure_module(
        stage,
        own,
        place,
        batch,
        survey,
        counts=counts,
        optimizer_bytes=measuring.optimizer_bytes,
        with_split=measuring.with_split,
    )


def _own_stored(
    graph: ResolvedGraph,
    own: Mapping[str, GivenModule | CapturedPart],
    place: Place,
    survey: Survey,
    counts: Mapping[str, Sequence[int]],
    measuring: Measuring,
) -> dict[str, StoredProfile]:
    """Return where this rank's stages may have a stored profile: modules of which it is the first rank."""
    options = dataclasses.asdict(measuring)
    cache_dir = options.pop("cache_dir")
    stored = {}
    for name, module in own.items():
        stage = graph.stage(name)
        if isinstance(module, GivenModule) and place.rank == stage.spec.ranks[0]:
            stored[name] = StoredProfile(
                stage,
                module,
                place,
                survey,
                counts=counts[name],
                cache_dir=cache_dir,
                options=options,
            )
    return stored


def _of_all(told: Sequence[Profile]) -> Profile:
    """Return what a stage's first rank tells; no backward is split that one of its ranks cannot split."""
    first = told[0]
    dearest = max(told, key=lambda profile: profile.costs[0].split_factor)
    if len(first.costs) > 1 or dearest is first:
        return first
    return dataclasses.replace(first, costs=(dataclasses.replace(
        first.costs[0], split_factor=dearest.costs[0].split_factor, input_share=dearest.costs[0].input_share
    ),))  # fmt: skip
