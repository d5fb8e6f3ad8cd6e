"""Loading a checkpoint on this plan, whatever plan wrote it: found, checked by all ranks, and only then read.

    find      the tag that is requested; else the one `latest` names, else the newest that is whole
    check     each rank: names and shapes fit, the bytes it is going to read are those that were written
    read      each rank: its own tensors, or its own elements of them

A checkpoint that is broken is passed over, with a warning, where the user did not request it by name. One that is whole
and does not fit (another model, another optimizer) is refused.

On the plan it was saved on, training continues bit for bit. On another plan weights, masters, optimizer state, steps,
schedule, loss scale, counters and the position in the data are the same bits; a rank takes the random state of the rank
of its number, where there was one, and all replicas of a stage take the buffers of the first.

Source: this project
Tests: tests/integrations/test_checkpoint.py, tests/integrations/test_resharding.py
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpp_plugin.engine.checkpoints import checkpoint_directory as places
from gpp_plugin.engine.checkpoints.checkpoint_files import (
    MANIFEST,
    MOST_DEPTH,
    STATE,
    STATE_TENSORS,
    WEIGHT,
    BrokenFile,
    CheckpointManifest,
    read_manifest,
    read_text,
)
from gpp_plugin.engine.checkpoints.save_checkpoint import (
    STATE_KEY,
    all_ranks,
    place_of,
    rank_file,
    replica_key,
    restore_random_state,
)
from gpp_plugin.engine.checkpoints.saved_tensors import CheckpointTensors, StageOptimizerState
from gpp_plugin.engine.stage_engine import StageEngine
from gpp_plugin.errors import CheckpointError
from gpp_plugin.ir.serialize import parse_json

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCheckpoint:
    """What a checkpoint held besides the stages' own state.

    Args:
        directory: the directory that was read.
        client_state: what the user gave to save.
        rank_state: what this rank's engine gave to save; None where it was saved on fewer ranks.
        data: the position in the data.
    """

    directory: Path
    client_state: dict[str, Any] = field(default_factory=dict)
    rank_state: Any = None
    data: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """What of a checkpoint is restored."""

    optimizer: bool
    scheduler: bool
    weights_only: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checked:
    """A checkpoint that this rank found whole and fitting."""

    saved: CheckpointTensors
    state: dict[str, Any]
    own: dict[str, Any] | None
    optimizers: dict[int, StageOptimizerState]


def load_checkpoint(
    stages: Sequence[StageEngine],
    directory: str | Path,
    tag: str | None = None,
    *,
    load_optimizer: bool = True,
    load_scheduler: bool = True,
    weights_only: bool = False,
) -> LoadedCheckpoint:
    """Read a checkpoint of this model; collective over all ranks.

    Args:
        stages: this rank's, in the plan's order.
        tag: which checkpoint; None: the one `latest` names, or the newest whole one where that is broken.
        load_optimizer: restore optimizer state and masters; else masters are taken from the parameters.
        load_scheduler: restore the learning-rate schedule.
        weights_only: restore nothing else: no optimizer, schedule, loss scale, counters or random states.

    Raises:
        CheckpointError: none is there, it is broken, or of another model or optimizer; nothing has changed.
    """
    engine = stages[0]
    root = Path(directory)
    wanted = _Wanted(
        optimizer=load_optimizer and not weights_only, scheduler=load_scheduler, weights_only=weights_only
    )
    checked = _check_first_whole(stages, root, tag, wanted)
    answers: list[LoadedCheckpoint] = []
    all_ranks(
        engine,
        lambda: answers.append(_read(stages, checked, wanted)),
        doing=f"read {checked.saved.target}",
    )
    return answers[0]


# ---- finding and checking --------------------------------------------------------------------------------


def has_checkpoint(engine: StageEngine, directory: Path) -> bool:
    """Return whether anything was ever saved there, whole now or not, as rank 0 finds it; collective over all ranks.

    Raises:
        CheckpointError: the directory cannot be read, or a link leads out of it.
    """

    def look() -> bool:
        if engine.rank != 0:
            return False
        tags = places.tags_in(directory)
        return os.path.lexists(directory / places.LATEST) or any(
            os.path.lexists(places.directory_of(directory, tag) / MANIFEST) for tag in tags
        )

    return all_ranks(engine, look, doing=f"look for checkpoints in {directory}")[0]


def _check_first_whole(
    stages: Sequence[StageEngine], root: Path, tag: str | None, wanted: _Wanted
) -> _Checked:
    """Return the checkpoint that is requested, or the first of the newest that all ranks find whole."""
    # Rank 0 says which one is tried, and every rank what it found: one that is broken for one rank is so for all.
    engine = stages[0]
    reasons: list[str] = []
    tried: list[str] = []
    while True:
        choices = all_ranks(
            engine,
            lambda: (tag, _next_tag(root, tag, tried, reasons) if engine.rank == 0 else ""),
            doing=f"read {root}",
        )
        tags = {requested for requested, _ in choices}
        if len(tags) > 1:
            raise CheckpointError(
                f"the ranks request different checkpoints: {sorted(map(str, tags))}; give all the same tag"
            )
        tried.append(choices[0][1])
        found: list[_Checked] = []

        def check(found: list[_Checked] = found) -> tuple[str, set[str]]:
            try:
                found.append(_check(stages, root, tried[-1], wanted))
            except BrokenFile as error:
                return str(error), set()
            held = (stage.held_weights() for stage in stages if stage.position == 0)
            return "", {name for weights in held for name in weights}

        verdicts = all_ranks(engine, check, doing=f"load {root / tried[-1]}")
        broken = next((text for text, _ in verdicts if text), "")
        if not broken:
            _check_all_held(found[0].saved, {name for _, names in verdicts for name in names})
            if reasons and engine.rank == 0:
                manifest = found[0].saved.manifest
                logger.warning(
                    "%s; %s is loaded instead, of step %d", "; ".join(reasons), tried[-1], manifest.step
                )
            return found[0]
        reasons.append(f"checkpoint {root / tried[-1]} is broken: {broken}")
        if tag is not None:
            raise CheckpointError(f"{reasons[0]}; load another tag, or none for the newest whole one")


def _check_all_held(saved: CheckpointTensors, held: set[str]) -> None:
    """Refuse a checkpoint of a larger model: nothing of it may be left behind in silence."""
    extra = sorted(saved.names(WEIGHT) - held)
    if extra:
        raise CheckpointError(
            f"{saved.target} has {extra[0]!r}{f' and {len(extra) - 1} more' if len(extra) > 1 else ''}, which this "
            "run's model does not; load it into the model it was saved of"
        )


def _next_tag(root: Path, tag: str | None, tried: Sequence[str], reasons: list[str]) -> str:
    """Return the tag to try next; on rank 0."""
    if tag is not None:
        return places.check_tag(tag)
    if not tried:
        try:
            named = places.read_latest(root)
            places.directory_of(root, named)
            return named
        except CheckpointError as error:
            reasons.append(str(error))
    times: dict[str, tuple[int, int]] = {}
    for other in places.tags_in(root):
        if other not in tried:
            try:
                manifest = read_manifest(places.directory_of(root, other))
                times[other] = (manifest.saved_ns, manifest.step)
            except CheckpointError as error:
                logger.debug("%s is passed over: %s", root / other, error)
    if not times:
        raise CheckpointError(
            f"{'; '.join(reasons)}; no whole checkpoint is in {root}: name a tag, or save a checkpoint there first"
        )
    return max(times, key=lambda other: times[other])


def _check(stages: Sequence[StageEngine], root: Path, tag: str, wanted: _Wanted) -> _Checked:
    """Compare a checkpoint with this rank's stages, and what it would read with its checksums.

    Raises:
        BrokenFile: it is not what was written.
        CheckpointError: it does not fit.
    """
    target = places.directory_of(root, tag)
    manifest = read_manifest(target)
    saved = CheckpointTensors(target, manifest)
    optimizers: dict[int, StageOptimizerState] = {}
    needed: set[tuple[str, str]] = set()
    for engine in stages:
        needed |= _check_weights(engine, saved)
        if wanted.optimizer and engine.is_trained and manifest.optimizer:
            optimizers[engine.stage_index] = state = _optimizer_state(engine, saved)
            engine.updater.check_kind(state)
            for name, spans in engine.updater.spans().items():
                needed |= state.needed(name, spans)
    own_file = rank_file(stages[0].rank)
    has_own = own_file in manifest.files
    if has_own:
        needed |= {(own_file, key) for key in manifest.files[own_file].tensors}
    texts = [own_file] if has_own else []
    if STATE_TENSORS in manifest.files:
        needed |= {(STATE_TENSORS, key) for key in manifest.files[STATE_TENSORS].tensors}
    saved.check(needed, texts)
    state_text = read_text(target, STATE, expected=manifest.texts.get(STATE, ""))
    beside = saved.file(own_file).metadata().get(STATE_KEY) if has_own else None
    return _Checked(
        saved=saved,
        state=parse_json(state_text, what=STATE, max_depth=MOST_DEPTH),
        own=None if beside is None else parse_json(beside, what=own_file, max_depth=MOST_DEPTH),
        optimizers=optimizers,
    )


def _check_weights(engine: StageEngine, saved: CheckpointTensors) -> set[tuple[str, str]]:
    """Return file and key of each weight that a stage reads.

    Raises:
        CheckpointError: one is not there, or of another shape.
    """
    needed: set[tuple[str, str]] = set()
    held = engine.held_weights()
    missing = [name for name in held if not saved.has(saved.kind_of(name), name)]
    if missing:
        raise CheckpointError(
            f"stage {engine.stage.name!r} has {missing[0]!r}"
            f"{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}, which {saved.target} does not: it was "
            f"saved of another model, or on stages whose names differ ({saved.manifest.describe_plan()}); load it into "
            "the model it was saved of"
        )
    for name, tensor in held.items():
        what, place = saved.kind_of(name), place_of(engine, name, tensor)
        saved.check_fits(what, name, place)
        needed |= saved.needed(what, name, place)
    return needed


def _optimizer_state(engine: StageEngine, saved: CheckpointTensors) -> StageOptimizerState:
    parameters = dict(engine.module.named_parameters(remove_duplicate=False))
    return StageOptimizerState(
        saved, {name: place_of(engine, name, parameters[name]) for name in engine.updater.spans()}
    )


# ---- reading ---------------------------------------------------------------------------------------------


def _read(stages: Sequence[StageEngine], checked: _Checked, wanted: _Wanted) -> LoadedCheckpoint:
    """Restore this rank's stages, and return the rest."""
    saved, manifest = checked.saved, checked.saved.manifest
    engine = stages[0]
    is_same = manifest.is_on(engine.plan)
    own = rank_file(engine.rank)
    for stage in stages:
        _read_weights(stage, saved, own if is_same and own in manifest.files else None)
        if stage.stage_index in checked.optimizers:
            stage.updater.restore(checked.optimizers[stage.stage_index])
        else:
            stage.refresh_masters()
    state = saved.shared_state(checked.state)
    rank_state = None
    if not wanted.weights_only:
        for stage in stages:
            stage.load_shared_state(state["engine"], load_scheduler=wanted.scheduler)
        if checked.own is not None:
            loaded = saved.state(checked.own, own)
            rank_state = loaded["rank_state"]
            restore_random_state(engine.device, loaded["random"])
        _log_what_differs(engine, manifest, is_same=is_same, has_own=checked.own is not None)
    return LoadedCheckpoint(
        directory=saved.target,
        client_state=state["client_state"],
        rank_state=rank_state,
        data=state["data"],
    )


@torch.no_grad()
def _read_weights(engine: StageEngine, saved: CheckpointTensors, own_file: str | None) -> None:
    """Read parameters and buffers, the buffers of a replica from its rank's own file where there is one."""
    buffers = engine.saved_buffers()
    for name, tensor in engine.held_weights().items():
        key = replica_key(engine, name)
        if name in buffers and own_file is not None and key in saved.manifest.files[own_file].tensors:
            value: Tensor = saved.file(own_file).whole(key)
        else:
            value = saved.whole(saved.kind_of(name), name, place_of(engine, name, tensor))
        tensor.copy_(value)


def _log_what_differs(
    engine: StageEngine, manifest: CheckpointManifest, *, is_same: bool, has_own: bool
) -> None:
    if engine.rank == 0 and not is_same:
        logger.info(
            "checkpoint of step %d, saved on another plan (%s): weights, optimizer state, schedule, counters and loss "
            "scale are the same; %s, so that dropout draws other numbers than it would have there",
            manifest.step,
            manifest.describe_plan() or "one process",
            "ranks take the random states of the ranks of their numbers"
            if has_own
            else "no random state is restored",
        )
    if engine.rank == 0 and not manifest.optimizer:
        logger.warning("the checkpoint has no optimizer state: it begins anew, from the weights")
    if engine.rank == 0 and manifest.dtype != engine.config.dtype:
        logger.warning(
            "the checkpoint is of %s, this run computes in %s: weights are taken from its masters where it has some",
            manifest.dtype,
            engine.config.dtype,
        )
