"""Saving a checkpoint of all stages: whole or not at all, at once or behind the training.

    all ranks   agree on tag and directory; rank 0 makes <tag>.tmp-...
    each rank   writes, sums and syncs its files there
    rank 0      manifest, rename to <tag>, then `latest`, then what retention releases

With a `BackgroundSave` each rank takes copies in host memory and a thread of its own writes them. Threads do not use
process groups, whose order is the training's: a rank's thread ends with a small file that says what it wrote, or why it
could not, and rank 0's waits for those files. The ranks agree about the end at the next save, load or `wait`.

Source: this project
Tests: tests/integrations/test_checkpoint.py, tests/checkpoints/test_killed_saves.py
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gpp_plugin import __version__
from gpp_plugin.engine.checkpoints import checkpoint_directory as places
from gpp_plugin.engine.checkpoints.checkpoint_directory import sync_directory
from gpp_plugin.engine.checkpoints.checkpoint_files import (
    BUFFER,
    MANIFEST,
    PLAN,
    STATE,
    STATE_TENSOR,
    STATE_TENSORS,
    WEIGHT,
    CheckpointManifest,
    SavedFile,
    SavedGroup,
    TensorRecord,
    manifest_text,
    plain_of,
    saved_stages,
    text_sum,
    to_json,
    write_tensors,
)
from gpp_plugin.engine.checkpoints.saved_tensors import TensorPlace
from gpp_plugin.engine.rank_engine import StageEngine
from gpp_plugin.engine.stage_groups import is_shard
from gpp_plugin.errors import CheckpointError, GppError
from gpp_plugin.ir.serialize import dumps, escape_name, from_plain, to_plain
from gpp_plugin.runtime.random_streams import (
    MODEL_STREAMS,
    HostStreams,
    described_streams,
    host_streams,
    streams_described,
)
from gpp_plugin.runtime.ranks.collectives import exchange
from gpp_plugin.runtime.ranks.job_board import job_board, shared_error

# The files that one rank brings to a checkpoint, as tensors that are not yet written.


STATE_KEY = "gpp_plugin"
"""Where a file's metadata have the JSON that accompanies its tensors."""


@dataclass(slots=True, kw_only=True)
class FileContents:
    """A file to be: its tensors, what they are, and JSON beside them."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    entries: dict[str, TensorRecord] = field(default_factory=dict)
    beside: Any = None

    def add(self, key: str, tensor: Tensor, **what: Any) -> None:
        """Add a tensor under a name in the file."""
        self.tensors[key] = tensor
        self.entries[key] = TensorRecord(
            dtype=str(tensor.dtype).removeprefix("torch."),
            count=tensor.numel(),
            **{"shape": tuple(tensor.shape), "start": 0, **what},
        )

    def copied(self) -> FileContents:
        """Return the same with copies in host memory, which training does not change."""
        tensors = {key: tensor.detach().to("cpu", copy=True) for key, tensor in self.tensors.items()}
        return FileContents(tensors=tensors, entries=self.entries, beside=self.beside)


@dataclass(slots=True, kw_only=True)
class RankFiles:
    """What one rank writes, and its facts about its optimizers for the manifest."""

    files: dict[str, FileContents]
    optimizer: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)
    groups: list[SavedGroup] = field(default_factory=list)


def rank_files(stages: Sequence[StageEngine]) -> RankFiles:
    """Return what this rank writes of its stages: views of their tensors, not copies.

    Raises:
        CheckpointError: a state is neither JSON nor tensors.
    """
    found = RankFiles(files={})
    own = FileContents()
    for engine in stages:
        if engine.position == 0:
            found.files[_file_name(engine, "model")] = _model_file(engine)
        if engine.position > 0 or engine.tensor_position > 0:
            # running statistics are each replica's own, also those of a module that two stages of a rank call
            for name, buffer in engine.saved_buffers().items():
                own.add(replica_key(engine, name), buffer, what=BUFFER, name=name, stage=engine.stage_index)
        if engine.is_trained:
            _add_optimizer(engine, found)
    state = {"rank_state": None, "random": random_state(stages[0].device)}
    own.beside = state_beside(own, state, "rank", stage=stages[0].stage_index)
    found.files[rank_file(stages[0].rank)] = own
    return found


def state_beside(contents: FileContents, state: Any, path: str, *, stage: int = 0) -> Any:
    """Return a state as JSON, and add its tensors to a file."""
    tensors: dict[str, Tensor] = {}
    plain = to_json(state, path=path, tensors=tensors)
    for name, tensor in tensors.items():
        contents.add(name, tensor, what=STATE_TENSOR, name=name, stage=stage)
    return plain


def rank_file(rank: int) -> str:
    """Return the name of a rank's own file."""
    return f"rank-{rank:05d}.safetensors"


def replica_key(engine: StageEngine, name: str) -> str:
    """Return what a replica's buffer is called in its rank's file."""
    return f"{engine.stage_index}/{name}"


def place_of(engine: StageEngine, name: str, tensor: Tensor) -> TensorPlace:
    """Return how a stage holds one of its tensors."""
    size = engine.stage.tensor
    is_cut = size > 1 and is_shard(tensor)
    return TensorPlace(
        stage=engine.stage_index,
        shape=tuple(tensor.shape),
        shard=(engine.tensor_position, size) if is_cut else None,
        axis=int(getattr(tensor, "partition_dim", 0)) if is_cut else 0,
        stride=int(getattr(tensor, "partition_stride", 1)) if is_cut else 1,
    )


def _file_name(engine: StageEngine, kind: str, position: str = "") -> str:
    shard = "" if engine.stage.tensor == 1 else f"-t{engine.tensor_position}"
    return f"{kind}-{engine.stage_index:02d}-{escape_name(engine.stage.name)}{shard}{position}.safetensors"


def _described(engine: StageEngine, name: str, tensor: Tensor) -> dict[str, Any]:
    return {"name": name, **asdict(place_of(engine, name, tensor))}


def _model_file(engine: StageEngine) -> FileContents:
    """Return a stage's weights: each tie only on its owner, and of tensor ranks what all have only on the first."""
    contents = FileContents()
    buffers = engine.saved_buffers()
    for name, tensor in engine.own_weights().items():
        is_cut = place_of(engine, name, tensor).shard is not None
        if engine.tensor_position == 0 or is_cut:
            what = BUFFER if name in buffers else WEIGHT
            contents.add(name, tensor.detach(), what=what, **_described(engine, name, tensor))
    return contents


def _add_optimizer(engine: StageEngine, found: RankFiles) -> None:
    """Add this rank's part of a stage's optimizer; where nothing is partitioned, the first data position's."""
    held = engine.optimizer_pieces()
    found.optimizer = held.kind
    for name, numbers in held.numbers.items():
        found.numbers[name] = _without_tensors(numbers, f"optimizer state of {name}")
    for group in held.groups:
        options = _without_tensors(group.options, f"optimizer.param_groups.{group.number}")
        found.groups.append(replace(group, options=options))
    if not engine.is_partitioned and engine.position > 0:
        return
    parameters = dict(engine.module.named_parameters(remove_duplicate=False))
    contents = FileContents()
    for piece in held.pieces:
        facts = _described(engine, piece.name, parameters[piece.name])
        if engine.tensor_position > 0 and facts["shard"] is None:
            continue  # all tensor ranks have the same
        if piece.start is None:
            facts["shape"] = tuple(piece.tensor.shape)
        contents.add(
            f"{piece.what}/{piece.name}", piece.tensor, **{**facts, "what": piece.what, "start": piece.start}
        )
    position = engine.position if engine.is_partitioned else 0
    found.files[_file_name(engine, "optimizer", f"-{position:05d}")] = contents


def _without_tensors(state: Mapping[str, Any], path: str) -> Any:
    beside: dict[str, Tensor] = {}
    plain = to_json(dict(state), path=path, tensors=beside)
    if beside:
        name, tensor = next(iter(beside.items()))
        raise CheckpointError(
            f"{name} is a tensor of shape {tuple(tensor.shape)}, where a number is expected"
        )
    return plain


# ---- random states ---------------------------------------------------------------------------------------


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of the generators that models draw from: torch's, Python's, numpy's, a CUDA device's."""
    state = described_streams(MODEL_STREAMS.now())
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(device: torch.device, state: Mapping[str, Any], *, tries: bool = False) -> None:
    """Restore what `random_state` returned; a CUDA state on whatever device the rank has now.

    Args:
        tries: only look whether it can be, on generators of its own.
    """
    streams = streams_described(state)
    if tries:
        if "cuda" in state and device.type == "cuda":
            torch.Generator(device).set_state(state["cuda"])
        return
    MODEL_STREAMS.state = streams
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


# ---- writing ---------------------------------------------------------------------------------------------


def write_files(target: Path, files: Mapping[str, FileContents]) -> dict[str, SavedFile]:
    """Write files into a checkpoint's directory, bring them to the disk, and return what the manifest says of them."""
    written = {}
    for name, contents in files.items():
        beside = {} if contents.beside is None else {STATE_KEY: json.dumps(contents.beside, allow_nan=False)}
        sums = write_tensors(target / name, contents.tensors, metadata=beside)
        written[name] = SavedFile(sums=sums, tensors=contents.entries)
    sync_directory(target)
    return written


logger = logging.getLogger(__name__)

T = TypeVar("T")
_POLL_S = 0.05
_PART = "part-{rank:05d}.json"
_FAILED = "part-{rank:05d}.failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """How checkpoints are written and retained.

    Args:
        save_latest: make this the checkpoint that is loaded without a tag.
        keep_last: so many of those that the engine named stay (``global_step<n>``); None: all.
        keep_every: of the others those of every so many steps stay as well; None: none.
        names: parameters and buffers of the plain model in its order, with their other names.
    """

    save_latest: bool = True
    keep_last: int | None = None
    keep_every: int | None = None
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenPart:
    """What one rank has written.

    Args:
        optimizer, numbers, groups: as of `CheckpointManifest`.
    """

    files: dict[str, SavedFile]
    optimizer: str
    numbers: dict[str, dict[str, Any]]
    groups: tuple[SavedGroup, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSave:
    """A save that all ranks agree on: where it is written, what this rank writes, what rank 0 adds."""

    directory: Path
    tag: str
    temporary: Path
    files: RankFiles
    texts: Mapping[str, str]
    head: CheckpointManifest
    options: SaveOptions


def save_checkpoint(
    stages: Sequence[StageEngine],
    directory: str | Path,
    tag: str,
    *,
    client_state: Mapping[str, Any] | None = None,
    data: Any = None,
    program: HostStreams | None = None,
    options: SaveOptions | None = None,
    background: BackgroundSave | None = None,
) -> Path:
    """Write a checkpoint of all stages between two mini-batches; collective over all ranks.

    Args:
        stages: this rank's, in the plan's order.
        directory: seen by all ranks.
        client_state: the user's, JSON and tensors, saved as rank 0 has it.
        data: the position in the data, saved as rank 0 has it.
        program: the generators that the program draws from, saved as rank 0 has them; None: as they are.
        options: None: the defaults.
        background: writes it while training continues; None: it is written when this returns.

    Returns:
        The checkpoint's directory.

    Raises:
        CheckpointError: a state cannot be saved, a rank could not write, or the ranks disagree about the tag; the
            checkpoints that were there stay as they were.
    """
    # Three agreements, each of which ends on all ranks where one rank failed: the temporary directory is there; every
    # file is written whole and synced; rank 0 has written the manifest and renamed. Before the rename nobody reads it,
    # behind it the checkpoint is whole, so that a kill at any instant leaves the old or the new one.
    engine = stages[0]
    shared = {
        "client_state": dict(client_state or {}),
        "data": data,
        "random": to_json(described_streams(program or host_streams()), path="random", tensors=None),
    }
    prepared = _prepare(stages, Path(directory), tag, shared, options or SaveOptions())
    if background is not None:
        background.begin(prepared, engine.rank, dist.get_world_size())
        return prepared.directory / tag
    try:
        parts = all_ranks(engine, lambda: write_part(prepared), doing=f"write {prepared.directory / tag}")
        ends = all_ranks(
            engine,
            lambda: str(finish_save(prepared, parts)) if engine.rank == 0 else "",
            doing=f"finish {prepared.directory / tag}",
        )
    except BaseException:
        if engine.rank == 0:
            places.abandon(prepared.temporary)
        raise
    return Path(ends[0])


def _prepare(
    stages: Sequence[StageEngine],
    directory: Path,
    tag: str,
    shared: Mapping[str, Any],
    options: SaveOptions,
) -> PreparedSave:
    """Agree on the tag, and let rank 0 make the directory; nothing is there if a rank cannot continue."""
    engine = stages[0]
    made: list[tuple[RankFiles, dict[str, str]]] = []

    def look() -> str:
        places.check_tag(tag)
        files, texts = rank_files(stages), {}
        if engine.rank == 0:
            beside = FileContents()
            plain = {
                name: state_beside(beside, value, name)
                for name, value in {"engine": engine.shared_state(), **shared}.items()
            }
            texts = {STATE: plain_of(plain), PLAN: dumps(engine.plan) + "\n"}
            if beside.tensors:
                files.files[STATE_TENSORS] = beside
        made.append((files, texts))
        return tag

    tags = all_ranks(engine, look, doing=f"save {directory / str(tag)}")
    if len(set(tags)) > 1:
        raise CheckpointError(f"the ranks give different tags {sorted(set(tags))}; give all ranks the same")

    def begin() -> str:
        return str(places.begin(directory, tag)) if engine.rank == 0 else ""

    temporary = Path(all_ranks(engine, begin, doing=f"prepare {directory / tag}")[0])
    # the manifest but for what is written: of the plan what the files depend on, not predictions
    head = CheckpointManifest(
        stages=saved_stages(engine.plan),
        num_ranks=engine.plan.num_ranks,
        dtype=engine.config.dtype,
        zero_stage=engine.config.zero_stage,
        step=engine.counters.global_steps,
        saved_ns=time.time_ns(),
        files={},
        texts={},
        versions={"gpp_plugin": __version__, "torch": torch.__version__, **engine.updater.versions},
        names={name: tuple(others) for name, others in options.names.items()},
    )
    files, texts = made[0]
    return PreparedSave(
        directory=directory,
        tag=tag,
        temporary=temporary,
        files=files,
        texts=texts,
        head=head,
        options=options,
    )


def write_part(prepared: PreparedSave) -> WrittenPart:
    """Write this rank's files."""
    own = prepared.files
    return WrittenPart(
        files=write_files(prepared.temporary, own.files),
        optimizer=own.optimizer,
        numbers=own.numbers,
        groups=tuple(own.groups),
    )


def finish_save(prepared: PreparedSave, parts: Sequence[WrittenPart]) -> Path:
    """Write what says that all is there, and let the tag name it; on rank 0."""
    temporary, options = prepared.temporary, prepared.options
    for name, text in prepared.texts.items():
        places.write_synced(temporary / name, text)
    files: dict[str, SavedFile] = {}
    numbers: dict[str, dict[str, Any]] = {}
    groups: dict[tuple[int, str], dict[str, None]] = {}
    for part in parts:
        files |= part.files
        numbers |= part.numbers
        for group in part.groups:
            key = (group.number, json.dumps(group.options, sort_keys=True))
            groups.setdefault(key, {}).update(dict.fromkeys(group.names))
    manifest = replace(
        prepared.head,
        files=dict(sorted(files.items())),
        texts={name: text_sum(text) for name, text in prepared.texts.items()},
        optimizer=next((part.optimizer for part in parts if part.optimizer), ""),
        numbers=numbers,
        groups=tuple(
            SavedGroup(number=number, names=tuple(names), options=json.loads(options))
            for (number, options), names in sorted(groups.items(), key=lambda item: item[0])
        ),
    )
    places.write_synced(temporary / MANIFEST, manifest_text(manifest))
    target = places.finish(prepared.directory, prepared.tag, temporary, save_latest=options.save_latest)
    tags = set(places.tags_in(prepared.directory))
    gone = places.outdated(tags, keep_last=options.keep_last, keep_every=options.keep_every)
    places.forget(prepared.directory, [tag for tag in gone if tag != prepared.tag])
    return target


# ---- behind the training ---------------------------------------------------------------------------------


class BackgroundSave:
    """Writes one checkpoint at a time in a thread of this rank.

    Args:
        timeout_s: how long rank 0's thread waits for what the others write.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._thread: threading.Thread | None = None
        self._failure: list[str] = []
        self._doing = ""
        self._temporary = Path()

    @property
    def is_busy(self) -> bool:
        """Return whether a save was begun whose end nobody has waited for."""
        return self._thread is not None

    def begin(self, prepared: PreparedSave, rank: int, num_ranks: int) -> None:
        """Take copies, and let the thread write them."""
        assert self._thread is None, "one at a time"
        copies = {name: contents.copied() for name, contents in prepared.files.files.items()}
        prepared.files.files = copies
        self._failure = []
        self._doing = f"write {prepared.directory / prepared.tag}"
        self._temporary = prepared.temporary
        self._thread = threading.Thread(
            target=self._run, args=(prepared, rank, num_ranks), name="gpp-checkpoint", daemon=False
        )
        self._thread.start()

    def wait(self, engine: StageEngine) -> None:
        """Wait until the save under way is whole; collective over all ranks.

        Raises:
            CheckpointError: a rank could not write it; the checkpoints before it are as they were.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None

        gathered = all_ranks(engine, lambda: list(self._failure), doing=self._doing)
        failures = [f"rank {rank}: {text}" for rank, texts in enumerate(gathered) for text in texts]
        if failures:
            if engine.rank == 0:  # now that no rank writes there any more
                places.abandon(self._temporary)
            raise shared_error("CheckpointError", f"the ranks could not {self._doing}: {'; '.join(failures)}")

    def _run(self, prepared: PreparedSave, rank: int, num_ranks: int) -> None:
        try:
            text = json.dumps(to_plain(write_part(prepared)))
            written = prepared.temporary / f".{_PART.format(rank=rank)}"
            places.write_synced(written, text)
            written.rename(prepared.temporary / _PART.format(rank=rank))
            if rank == 0:
                finish_save(prepared, self._await_parts(prepared.temporary, num_ranks))
        except BaseException as error:
            # whatever it is: raised at the next collective of the ranks, and on rank 0 now
            self._failure.append(f"{type(error).__name__}: {error}")
            with contextlib.suppress(OSError):  # a full disk still takes an empty file
                (prepared.temporary / _FAILED.format(rank=rank)).touch()

    def _await_parts(self, temporary: Path, num_ranks: int) -> list[WrittenPart]:
        """Return what all ranks have written, when they have, and remove the files that say so."""
        deadline = time.monotonic() + self._timeout_s
        paths = [temporary / _PART.format(rank=rank) for rank in range(num_ranks)]
        failed = [temporary / _FAILED.format(rank=rank) for rank in range(num_ranks)]
        while absent := [rank for rank, path in enumerate(paths) if not path.exists()]:
            if unable := [rank for rank in absent if failed[rank].exists()]:
                raise CheckpointError(f"rank {unable[0]} could not write its part")
            # A rank that failed, or ends because another did, still writes its part unless it is killed.
            board = job_board()
            if board is not None and board.first is not None:
                gone = [seen.rank for seen in board.look(absent) if seen.state != "alive"]
                if any(not paths[rank].exists() for rank in gone):
                    raise CheckpointError(str(board.first))
            if time.monotonic() > deadline:
                raise CheckpointError(f"ranks {absent} have not written their parts in {self._timeout_s:g} s")
            time.sleep(_POLL_S)
        parts = [from_plain(WrittenPart, json.loads(path.read_text(encoding="utf-8"))) for path in paths]
        for path in paths:
            path.unlink()
        return parts


def all_ranks(engine: StageEngine, action: Callable[[], T], *, doing: str) -> list[T]:
    """Run ``action`` on every rank and return what it gave on each; if one fails, all raise the same error."""

    def attempt() -> T:
        try:
            return action()
        except Exception as error:  # whatever it is, the other ranks must hear of it
            text = str(error) if isinstance(error, GppError) else repr(error)
            raise CheckpointError(f"rank {engine.rank} cannot {doing}: {text}") from error

    # On the default group, whose timeout is the job's: files may be large and disks slow.
    return exchange(attempt, what=doing, group=dist.group.WORLD)
