"""What `GraphPipelineEngine` writes and reads: checkpoints, HuggingFace files, state dicts.

Each of them is of the model between two mini-batches: what is under way is finished first. A checkpoint is loaded on
this plan, whatever plan wrote it (`load_checkpoint`): found, checked by all ranks, and only then read.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gpp_plugin.config.block import CheckpointConfig
from gpp_plugin.engine.checkpoints import checkpoint_directory as places
from gpp_plugin.engine.checkpoints.checkpoint_files import (
    BUFFER,
    MANIFEST,
    MOST_DEPTH,
    PLAN,
    STATE,
    STATE_TENSORS,
    WEIGHT,
    BrokenFile,
    CheckpointManifest,
    from_json,
    parsing,
    read_manifest,
    read_text,
    saved_stages,
)
from gpp_plugin.engine.checkpoints.save_checkpoint import (
    STATE_KEY,
    BackgroundSave,
    SaveOptions,
    all_ranks,
    place_of,
    rank_file,
    replica_key,
    restore_random_state,
    save_checkpoint,
)
from gpp_plugin.engine.checkpoints.saved_tensors import (
    CheckpointTensors,
    StageOptimizerState,
    cut_shard,
    join_shards,
)
from gpp_plugin.engine.loading.row_loader import check_position
from gpp_plugin.engine.loading.training_data import TrainingData
from gpp_plugin.engine.rank_engine import RankEngine, StageEngine
from gpp_plugin.engine.stage_groups import is_shard
from gpp_plugin.engine.training_steps import TrainingSteps
from gpp_plugin.errors import CheckpointError, ConfigError
from gpp_plugin.ir.block_graph import Parameter, is_carried
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.serialize import loads, parse_json
from gpp_plugin.model.model_source import ModelSource
from gpp_plugin.report.progress import shown_as
from gpp_plugin.runtime.random_streams import MODEL_STREAMS, streams_described
from gpp_plugin.runtime.ranks.agreement import WEIGHT as OF_WEIGHT
from gpp_plugin.runtime.ranks.agreement import agree, describe_tensor
from gpp_plugin.runtime.ranks.collectives import Collectives, do_together, finish
from gpp_plugin.runtime.ranks.placement_of_ranks import Setting

logger = logging.getLogger(__name__)


class PipelineFiles:
    """The model's files and states; every method is collective over all ranks.

    Args:
        stages: this rank's.
        steps: drains the pipeline.
        data: what is trained on; checkpoints hold where training is in it.
        source: writes exports, as the user's model has them.
        parameters: of the whole model.
        timeout_s: how long ranks wait for one that writes an export or its part of a checkpoint.
        keeping: how checkpoints are written and retained.
        take_written: makes the stages take what was written to the model since the last step, on this rank.
    """

    def __init__(
        self,
        *,
        stages: RankEngine,
        steps: TrainingSteps,
        data: TrainingData,
        source: ModelSource,
        parameters: Sequence[Parameter],
        setting: Setting,
        collectives: Collectives,
        timeout_s: float,
        keeping: CheckpointConfig,
        take_written: Callable[[], None],
    ) -> None:
        self._take_written = take_written
        self._keeping = keeping
        self._background = BackgroundSave(timeout_s=timeout_s)
        self._stages = stages
        self._steps = steps
        self._data = data
        self._source = source
        self._parameters = parameters
        self._setting = setting
        self._collectives = collectives
        self._timeout_s = timeout_s

    @shown_as("save a checkpoint")
    def save(
        self,
        directory: str | Path,
        tag: str | None,
        client_state: Mapping[str, Any] | None,
        save_latest: bool,
    ) -> None:
        """Write a checkpoint of all stages to ``directory/tag``; ``latest`` is written last.

        Raises:
            CheckpointError: it cannot be written, or the one before, behind the training, could not.
        """
        # Drained first, then named: what was under way counts as done in the tag's number of steps.
        self._drain()
        self.wait()
        for stage in self._stages.stages:
            stage.update.adopt_written()
        with self._stages.gathered():
            save_checkpoint(
                self._stages.stages,
                directory,
                f"global_step{self._stages.counters.global_steps}" if tag is None else str(tag),
                client_state=client_state,
                data=self._data.position(),
                program=self._data.program_streams(),
                options=SaveOptions(
                    save_latest=save_latest,
                    keep_last=self._keeping.keep_last,
                    keep_every=self._keeping.keep_every,
                    names={parameter.name: parameter.aliases for parameter in self._parameters},
                ),
                background=self._background if self._keeping.async_save else None,
            )

    def _drain(self) -> None:
        """End what is under way, and let the stages have what users have written; collective over all ranks."""
        self._steps.drain()
        do_together(self._take_written, what="a look at the model", group=self._setting.group)

    def wait(self) -> None:
        """Wait for a checkpoint that is being written behind the training; collective where there is one.

        Raises:
            CheckpointError: a rank could not write it.
        """
        self._background.wait(self._stages.stages[0])

    @shown_as("load a checkpoint")
    def load(
        self, directory: str | Path, tag: str | None, *, optimizer: bool, scheduler: bool, weights_only: bool
    ) -> tuple[str, dict[str, Any]] | tuple[None, None]:
        """Read a checkpoint of this model, of any plan; return the directory read and the client state.

        Without a tag, a directory in which nothing was ever saved gives ``(None, None)``.

        Raises:
            CheckpointError: it is missing, broken, or of another model.
            ConfigError: the ranks' files are not of one checkpoint.
        """
        self._steps.drain()
        self.wait()
        with self._stages.gathered():
            loaded = load_checkpoint(
                self._stages.stages,
                directory,
                tag,
                load_optimizer=optimizer,
                load_scheduler=scheduler,
                weights_only=weights_only,
                restore_data=self._data.restore,
            )
            if loaded is None:
                return None, None
            facts = loaded_facts(self._stages.stages, loaded.directory.name)
            agree(facts, what="a look at what each rank loaded", group=self._setting.group, is_partial=True)
        return str(loaded.directory), loaded.client_state

    @shown_as("export the model")
    def export(self, directory: str | Path) -> None:
        """Write sharded safetensors under HuggingFace names, one shard a stage.

        Nothing is gathered but what tensor ranks hold in parts, a tensor at a time, where the stage is written.
        """
        self._drain()
        with self._stages.gathered():
            self._source.save_pretrained(
                directory,
                states={
                    stage.stage_index: _without_carried(stage.module.state_dict()) | self._joined(stage)
                    for stage in self._stages.stages
                },
                plan=self._stages.plan,
                group=self._setting.group,
                timeout_s=self._timeout_s,
            )

    def gather(self) -> dict[str, Tensor] | None:
        """Return the whole model's state dict on rank 0 (CPU tensors), None elsewhere.

        Raises:
            ConfigError: a stage of a graph is tensor-parallel: how its shards make a whole is unknown.
            CommTimeout: a rank did not come.
        """
        self._drain()
        shared_out = [stage.name for stage in self._stages.plan.stages if stage.tensor > 1]
        if shared_out and not self._source.is_plain:
            raise ConfigError(
                f"gather_state_dict: the tensor ranks of stage {shared_out[0]!r} hold shards of its weights; use "
                "save_pretrained(), which writes a file a tensor rank, or save_checkpoint()"
            )
        own: dict[str, Tensor] = {}
        with self._stages.gathered():
            for stage in self._stages.stages:
                joined = self._joined(stage)
                if stage.stage.ranks[0] == self._setting.rank:  # its replicas hold the same
                    own |= _state_of(stage) | joined
        own = {name: value.detach().cpu() for name, value in own.items() if isinstance(value, Tensor)}
        gathered = self._collectives.gather_on_first(own, "the whole model's weights")
        if gathered is None:
            return None
        whole: dict[str, Tensor] = {}
        for part in gathered:
            whole.update(part)
        # Stages know a tied parameter by its first name; a state dict has it under all, as HuggingFace's does.
        for parameter in self._parameters:
            if parameter.name in whole:
                whole.update(dict.fromkeys(parameter.aliases, whole[parameter.name]))
        return whole

    def _joined(self, stage: StageEngine) -> dict[str, Tensor]:
        """Return what a stage's tensor ranks hold in parts, as whole tensors on its first rank; nothing on others.

        Collective over the tensor ranks of its first data and context position.

        Raises:
            CommTimeout: a rank did not come.
        """
        state: dict[str, Tensor] = {}
        size = stage.stage.tensor
        if size == 1 or not self._source.is_plain or stage.rank not in stage.stage.tensor_ranks(0):
            return state
        group = stage.groups.tensor[stage.stage_index]
        for name, parameter in stage.module.named_parameters():
            if is_shard(parameter):
                assert isinstance(group, dist.ProcessGroup), "this rank is in the group"
                own, is_first = parameter.detach().contiguous(), stage.tensor_position == 0
                parts = [torch.empty_like(own) for _ in range(size)] if is_first else []
                work = dist.gather(own, parts or None, group=group, group_dst=0, async_op=True)
                finish(work, own, group=group, what="a weight that tensor ranks hold in parts")
                place = place_of(stage, name, parameter)
                if parts:
                    state[name] = join_shards(parts, axis=place.axis, stride=place.stride).cpu()
        return state

    def stage_state(self, *, without_frozen: bool) -> dict[str, Tensor]:
        """Return this rank's parameters and persistent buffers under their HuggingFace names."""
        self._steps.drain()
        state: dict[str, Tensor] = {}
        with self._stages.gathered():
            for stage in self._stages.stages:
                own = _state_of(stage)
                if without_frozen:
                    for name, parameter in stage.module.named_parameters():
                        if not parameter.requires_grad:
                            own.pop(name)
                state |= own
        return state

    def load_stage_state(self, state: Mapping[str, Tensor], *, strict: bool) -> None:
        """Take this rank's tensors from a state dict of the whole model or of its stages.

        Raises:
            ConfigError: ``strict``, and a tensor of a stage is missing.
        """
        self._steps.drain()
        for stage in self._stages.stages:
            missing = sorted(_without_carried(stage.module.state_dict()).keys() - state.keys())
            if strict and missing:
                raise ConfigError(
                    f"load_module_state_dict: the state lacks {missing[0]!r} and {len(missing) - 1} more of stage "
                    f"{stage.stage.name}; give the whole model's state, or strict=False"
                )
        # Of a whole model's state a stage takes its own part. Masters are made anew of what was loaded: the next step
        # would write the old weights back.
        with self._stages.gathered():
            for stage in self._stages.stages:
                own = stage.module.state_dict()
                values = {n: v for n, v in state.items() if n in own}
                for name, parameter in stage.module.named_parameters():
                    # of what is a part already nothing is cut
                    if name in values and is_shard(parameter) and values[name].shape != parameter.shape:
                        place = place_of(stage, name, parameter)
                        position, size = stage.tensor_position, stage.stage.tensor
                        values[name] = cut_shard(
                            values[name], position, size, axis=place.axis, stride=place.stride
                        )
                stage.module.load_state_dict(values, strict=False)
                stage.refresh_masters()


def loaded_facts(stages: Sequence[StageEngine], tag: str) -> dict[str, str]:
    """Return what identifies a checkpoint that was loaded: its tag, counters, and the weights of a rank's stages.

    Counters are compared over all ranks, a stage's weights over its replicas, and over the stages that share them.
    """
    facts = {"the checkpoint": tag}
    for stage in stages:
        facts |= {"global_steps": str(stage.counters.global_steps), "loss_scale": str(stage.loss_scale)}
        where = f" of tensor position {stage.tensor_position}" if stage.stage.tensor > 1 else ""
        for name, parameter in stage.module.named_parameters():
            facts[f"{OF_WEIGHT}{name}{where}"] = describe_tensor(parameter)
    return facts


def _state_of(stage: StageEngine) -> dict[str, Tensor]:
    """Return a stage's state dict; copies, where the weights themselves will not stay whole."""
    state = _without_carried(stage.module.state_dict())
    return state if stage.weights is None else {name: value.clone() for name, value in state.items()}


def _without_carried(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict without attributes of modules, which the user's model has no buffers for."""
    return {name: value for name, value in state.items() if not is_carried(name)}


# ---- loading a checkpoint -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCheckpoint:
    """What a checkpoint held besides the stages' own state.

    Args:
        directory: the directory that was read.
        client_state: what the user gave to save.
    """

    directory: Path
    client_state: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checked:
    """A checkpoint that this rank found whole and fitting, and what of it is no tensor of the model.

    Args:
        state: of `state.json`, its tensors read, and the program's generators.
        random: of the rank's own file: what its model draws from.
    """

    saved: CheckpointTensors
    state: dict[str, Any]
    random: dict[str, Any] | None
    optimizers: dict[int, StageOptimizerState]


def load_checkpoint(
    stages: Sequence[StageEngine],
    directory: str | Path,
    tag: str | None = None,
    *,
    load_optimizer: bool = True,
    load_scheduler: bool = True,
    weights_only: bool = False,
    restore_data: Callable[[Any], None] = lambda position: None,
) -> LoadedCheckpoint | None:
    """Read a checkpoint of this model; collective over all ranks.

    Args:
        stages: this rank's, in the plan's order.
        tag: which checkpoint; None: the one `latest` names, or the newest whole one where that is broken.
        load_optimizer: restore optimizer state and masters; else masters are taken from the parameters.
        load_scheduler: restore the learning-rate schedule.
        weights_only: restore nothing else: no optimizer, schedule, loss scale, counters or random states.
        restore_data: takes the position in the data.

    Returns:
        None where no tag is requested and nothing was ever saved.

    Raises:
        CheckpointError: what is requested is missing or broken, or of another model or optimizer; nothing has changed.
    """
    engine = stages[0]
    root = Path(directory)
    wanted = _Wanted(
        optimizer=load_optimizer and not weights_only,
        scheduler=load_scheduler,
        more=not weights_only,
    )
    checked = _check_first_whole(stages, root, tag, wanted)
    if checked is None:
        return None
    doing = f"read {checked.saved.target}"
    if wanted.more:  # first, as a sampler or loader of the user's may refuse
        all_ranks(engine, lambda: restore_data(checked.state["data"]), doing=doing)
    all_ranks(engine, lambda: _read(stages, checked, wanted), doing=doing)
    return LoadedCheckpoint(directory=checked.saved.target, client_state=checked.state["client_state"])


class _Wanted(NamedTuple):
    """What of a checkpoint is loaded besides the weights: optimizer, schedule, and all the rest."""

    optimizer: bool
    scheduler: bool
    more: bool


# ---- finding and checking --------------------------------------------------------------------------------


def _check_first_whole(
    stages: Sequence[StageEngine], root: Path, tag: str | None, wanted: _Wanted
) -> _Checked | None:
    """Return the checkpoint that is requested, or the first of the newest that all ranks find whole.

    None where no tag is requested and nothing was ever saved, as rank 0 finds it.
    """
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
        if not choices[0][1]:
            return None
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


def _holds_checkpoints(root: Path) -> bool:
    """Return whether anything was ever saved in a directory, whole now or not.

    Raises:
        CheckpointError: it is a checkpoint itself, or no directory.
    """
    if os.path.lexists(root / MANIFEST):
        raise CheckpointError(
            f"{root} is a checkpoint itself; load from {root.parent} with tag={root.name!r}"
        )
    if os.path.lexists(root) and not root.is_dir():
        raise CheckpointError(f"{root} is no directory; give the one that checkpoints were saved in")
    return root.is_dir() and any(
        path.name == places.LATEST or places.is_own_tag(path.name) or os.path.lexists(path / MANIFEST)
        for path in root.iterdir()
        if not places.is_unfinished(path.name)
    )


def _next_tag(root: Path, tag: str | None, tried: Sequence[str], reasons: list[str]) -> str:
    """Return the tag to try next, an empty one where nothing was ever saved; on rank 0."""
    if tag is not None:
        return places.check_tag(tag)
    if not tried and not _holds_checkpoints(root):
        return ""
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
    """Compare a checkpoint with this rank's stages, and what it would read with its checksums; read all but tensors.

    Right checksums are not trusted: whoever forges a file can write them. What is read is of the types and in the
    ranges that restoring expects, so that it does not fail half-way.

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
            parameters = dict(engine.module.named_parameters(remove_duplicate=False))
            spans_of = engine.updater.spans()
            state = StageOptimizerState(
                saved, {name: place_of(engine, name, parameters[name]) for name in spans_of}
            )
            optimizers[engine.stage_index] = state
            engine.updater.check_saved(state)
            for name, spans in spans_of.items():
                needed |= state.needed(name, spans)
    own_file = rank_file(stages[0].rank)
    has_own = own_file in manifest.files
    if has_own:
        needed |= {(own_file, key) for key in manifest.files[own_file].tensors}
    texts = [own_file] if has_own else []
    if STATE_TENSORS in manifest.files:
        needed |= {(STATE_TENSORS, key) for key in manifest.files[STATE_TENSORS].tensors}
    saved.check(needed, texts)
    text = read_text(target, STATE, expected=manifest.texts.get(STATE, ""))
    with parsing(STATE):
        state = saved.shared_state(parse_json(text, what=STATE, max_depth=MOST_DEPTH))
        if not isinstance(state["client_state"], dict):
            raise BrokenFile(f"{STATE}: client_state is {str(state['client_state'])[:60]!r}, not a dict")
        if wanted.more:
            for engine in stages:
                engine.check_shared_state(state["engine"], load_scheduler=wanted.scheduler)
            if state["data"] is not None:
                check_position(state["data"])
            if state.get("random") is not None:  # those of before have none
                state["random"] = streams_described(from_json(state["random"], tensor=None))
    random = None
    if has_own:
        with parsing(own_file):
            beside = parse_json(
                saved.file(own_file).metadata()[STATE_KEY], what=own_file, max_depth=MOST_DEPTH
            )
            random = saved.state(beside, own_file)["random"]
            restore_random_state(stages[0].device, random, tries=True)
    if PLAN in manifest.texts and stages[0].rank == 0:
        # for graph_pipeline.plan of another job, which is better told now than when this checkpoint is the last
        text = read_text(target, PLAN, expected=manifest.texts[PLAN])
        with parsing(PLAN):
            if saved_stages(loads(PipelinePlan, text)) != manifest.stages:
                raise BrokenFile(f"{PLAN} is another plan than the manifest's, {manifest.describe_plan()}")
    return _Checked(saved=saved, state=state, random=random, optimizers=optimizers)


def _check_weights(engine: StageEngine, saved: CheckpointTensors) -> set[tuple[str, str]]:
    """Return file and key of each weight that a stage reads.

    Raises:
        CheckpointError: one is not there, or of another shape.
    """
    needed: set[tuple[str, str]] = set()
    is_same = saved.manifest.is_on(engine.plan)
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
        saved.check_fits(what, name, place, dtype=tensor.dtype)
        needed |= saved.needed(what, name, place)
        own = saved.manifest.files.get(rank_file(engine.rank)) if is_same else None
        record = None if own is None else own.tensors.get(replica_key(engine, name))
        if record is not None and (record.what, record.name, record.shape) != (BUFFER, name, place.shape):
            raise BrokenFile(
                f"{rank_file(engine.rank)} has {record.name!r} of shape {record.shape} for {name!r}"
            )
    return needed


# ---- reading ---------------------------------------------------------------------------------------------


def _read(stages: Sequence[StageEngine], checked: _Checked, wanted: _Wanted) -> None:
    """Restore this rank's stages and random states."""
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
    if wanted.more:
        for stage in stages:
            stage.load_shared_state(checked.state["engine"], load_scheduler=wanted.scheduler)
        if checked.random is not None:
            restore_random_state(engine.device, checked.random)
        # in checkpoints of before, models drew from the program's generators
        if program := checked.state.get("random") or (checked.random and MODEL_STREAMS.state):
            MODEL_STREAMS.continue_beside(program)
        _log_what_differs(engine, manifest, is_same=is_same, has_own=checked.random is not None)


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
