"""Checkpoints of a graph of stages: files per stage and rank, a manifest, and `latest` last.

    <dir>/<tag>/model-00-<stage>.pt             parameters and buffers under their HuggingFace names
    <dir>/<tag>/optimizer-00-<stage>-00000.pt   masters and optimizer state; one per rank under ZeRO 1 and 2
    <dir>/<tag>/rank-00000.pt                   random states; replicas' buffers
    <dir>/<tag>/shared.pt                       schedule, loss scaler, counters, client state
    <dir>/<tag>/plan.json                       the plan, for graph_pipeline.plan of the job that goes on
    <dir>/<tag>/manifest.json                   plan, settings, files and sizes: written when all of these are
    <dir>/latest                                the tag: written after the manifest

A rank of several stages writes the files of each of them, as ranks of one stage would.
Tensor-parallel stages have one model file, and optimizer files, for each tensor position: ``model-00-<stage>-t1.pt``.
Stage names are escaped (`escape_name`), and told for people alone: files are found by the number before them, so that
a checkpoint of the same stages under other names (another release's) is read.
A save that dies half-way leaves a directory without a manifest, and `latest` at the one before.

Source: this project
Tests: tests/integrations/test_tensor_parallel.py
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gpp_plugin.engine.stage_engine import StageEngine
from gpp_plugin.errors import CheckpointError, GppError
from gpp_plugin.ir.serialize import escape_name, save, write_text_whole
from gpp_plugin.runtime.ranks.agree import exchange

MANIFEST = "manifest.json"
PLAN = "plan.json"
LATEST = "latest"
FORMAT = 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCheckpoint:
    """What a checkpoint held besides the stages' own state.

    Args:
        directory: the directory that was read.
        client_state: what the user gave to save.
        rank_state: what this rank's engine gave to save.
    """

    directory: Path
    client_state: dict[str, Any] = field(default_factory=dict)
    rank_state: Any = None


def save_checkpoint(
    stages: Sequence[StageEngine],
    directory: str | Path,
    tag: str,
    *,
    client_state: Mapping[str, Any] | None = None,
    rank_state: Any = None,
    save_latest: bool = True,
) -> Path:
    """Write a checkpoint of all stages between two mini-batches; collective over all ranks.

    Args:
        stages: this rank's, in the plan's order.
        directory: seen by all ranks.
        client_state: the user's, kept as rank 0 has it.
        rank_state: anything picklable, kept for each rank.
        save_latest: make this the checkpoint that is loaded without a tag.

    Returns:
        The checkpoint's directory.

    Raises:
        CheckpointError: a rank could not write, or the ranks disagree about the tag; `latest` stays as it was.
    """
    # Three agreements, each of which ends on all ranks if one rank failed: the directory is there and its old manifest
    # is not; every file is written whole; manifest, then `latest`. A save that dies in between leaves no manifest.
    engine = stages[0]
    target = Path(directory) / str(tag)
    tags = _all_ranks(engine, lambda: _prepare(engine, target), doing=f"prepare {target}")
    if len(set(tags)) > 1:
        raise CheckpointError(f"the ranks give different tags {sorted(set(tags))}; give all ranks the same")
    shared = {"client_state": dict(client_state or {})}
    written: list[dict[str, int]] = _all_ranks(
        engine, lambda: _write_files(stages, target, shared, rank_state), doing=f"write {target}"
    )
    files = {name: size for part in written for name, size in part.items()}

    def finish() -> None:
        if engine.rank == 0:
            save(engine.plan, target / PLAN)
            write_text_whole(target / MANIFEST, json.dumps(_manifest(engine, files), indent=1) + "\n")
            if save_latest:
                write_text_whole(Path(directory) / LATEST, f"{tag}\n")

    _all_ranks(engine, finish, doing=f"finish {target}")
    return target


def load_checkpoint(
    stages: Sequence[StageEngine],
    directory: str | Path,
    tag: str | None = None,
    *,
    load_optimizer: bool = True,
    load_scheduler: bool = True,
    weights_only: bool = False,
) -> LoadedCheckpoint:
    """Read a checkpoint that was written on the same plan; collective over all ranks.

    With optimizer and scheduler, training goes on bit for bit as if it had not stopped.

    Args:
        stages: this rank's, in the plan's order.
        tag: which checkpoint; None: the one `latest` names.
        load_optimizer: restore optimizer state and masters; else masters are taken from the parameters.
        load_scheduler: restore the learning-rate schedule.
        weights_only: restore nothing else: no optimizer, schedule, loss scale, counters or random states.

    Raises:
        CheckpointError: it is missing, torn, of another plan, precision or ZeRO stage, or not readable.
    """

    # Checked on all ranks before any of them changes anything: a refused checkpoint leaves training as it was.
    engine = stages[0]
    load_optimizer = load_optimizer and not weights_only

    def check() -> str:
        target = _find(Path(directory), tag)
        _check_manifest(engine, target, load_optimizer=load_optimizer)
        return str(target)

    names = _all_ranks(engine, check, doing=f"read {directory}")
    if len(set(names)) > 1:
        raise CheckpointError(
            f"the ranks would load different checkpoints {sorted(set(names))}; give one tag"
        )
    target = Path(names[0])
    answers: list[LoadedCheckpoint] = []
    _all_ranks(
        engine,
        lambda: answers.append(_read_files(stages, target, load_optimizer, load_scheduler, weights_only)),
        doing=f"read {target}",
    )
    return answers[0]


# ---- writing ---------------------------------------------------------------------------------------------


def _prepare(engine: StageEngine, target: Path) -> str:
    """Make the directory; a checkpoint that is written over is torn from here on."""
    if engine.rank == 0:
        target.mkdir(parents=True, exist_ok=True)
        (target / MANIFEST).unlink(missing_ok=True)
    return str(target)


def _write_files(
    stages: Sequence[StageEngine], target: Path, shared: dict[str, Any], rank_state: Any
) -> dict[str, int]:
    """Write this rank's files and return their sizes."""
    rank = stages[0].rank
    files: dict[str, Any] = {_rank_file(rank): _rank_contents(stages, rank_state)}
    for engine in stages:
        if engine.position == 0:
            files[_model_file(engine, engine.stage_index)] = engine.model_state()
        if engine.is_trained and (engine.is_partitioned or engine.position == 0):
            files[_optimizer_file(engine)] = engine.optimizer_state()
    if rank == 0:
        files["shared.pt"] = {"engine": stages[0].shared_state(), **shared}
    return {name: _write_whole(target / name, contents) for name, contents in files.items()}


def _write_whole(path: Path, contents: Any) -> int:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            torch.save(contents, stream)
            stream.flush()
            os.fsync(stream.fileno())
            size = stream.tell()
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return size


def _rank_contents(stages: Sequence[StageEngine], rank_state: Any) -> dict[str, Any]:
    contents: dict[str, Any] = {
        "rank_state": rank_state,
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
    }
    device = stages[0].device
    if device.type == "cuda":
        contents["cuda"] = torch.cuda.get_rng_state(device)
    if "numpy" in sys.modules:
        contents["numpy"] = sys.modules["numpy"].random.get_state()
    # running statistics are each replica's own, also those of a module that two stages of a rank call
    replicas = {
        _buffers_key(stages, engine): {name: b.detach().cpu() for name, b in engine.module.named_buffers()}
        for engine in stages
        if engine.position > 0
    }
    return {**contents, **replicas}


def _buffers_key(stages: Sequence[StageEngine], engine: StageEngine) -> str:
    """Return where a rank's file has a replica's buffers, of one of its stages."""
    return "buffers" if len(stages) == 1 else f"buffers-{engine.stage_index:02d}"


# ---- reading ---------------------------------------------------------------------------------------------


def _find(directory: Path, tag: str | None) -> Path:
    if tag is not None:
        return directory / str(tag)
    try:
        return directory / (directory / LATEST).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise CheckpointError(
            f"{directory / LATEST} cannot be read ({error.strerror}); name a tag, or save a checkpoint there first"
        ) from error


def _check_manifest(engine: StageEngine, target: Path, *, load_optimizer: bool) -> None:
    try:
        manifest = json.loads((target / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        state = "has no readable manifest: its save did not finish" if target.is_dir() else "does not exist"
        raise CheckpointError(f"checkpoint {target} {state}; load another tag") from error
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{target}: format {manifest.get('format')}, this release reads {FORMAT}")
    ours = _manifest(engine, {})
    if _unnamed(manifest["stages"]) != _unnamed(ours["stages"]):
        raise CheckpointError(
            f"{target} was saved on another plan: {_describe(manifest['stages'])}; this run's plan is "
            f"{_describe(ours['stages'])}; give graph_pipeline.plan the plan it was saved on, {target / PLAN}"
        )
    if load_optimizer and manifest["settings"] != ours["settings"]:
        raise CheckpointError(
            f"{target} was saved with {manifest['settings']}; this run has {ours['settings']}; "
            "use the same, or load without the optimizer"
        )
    for name, size in manifest["files"].items():
        path = target / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            raise CheckpointError(
                f"checkpoint {target} is torn: {name} has {'no file' if found is None else f'{found} bytes'}, "
                f"the manifest says {size}; load another tag"
            )


def _read_files(
    stages: Sequence[StageEngine],
    target: Path,
    load_optimizer: bool,
    load_scheduler: bool,
    weights_only: bool,
) -> LoadedCheckpoint:
    own = torch.load(target / _rank_file(stages[0].rank), map_location="cpu", weights_only=False)
    files = json.loads((target / MANIFEST).read_text(encoding="utf-8"))["files"]
    shared = torch.load(target / "shared.pt", map_location="cpu", weights_only=False)
    for engine in stages:
        _read_stage(engine, target, files, own.get(_buffers_key(stages, engine), {}), load_optimizer)
        if not weights_only:
            engine.load_shared_state(shared["engine"], load_scheduler=load_scheduler)
    if not weights_only:
        _restore_random_state(stages[0].device, own)
    return LoadedCheckpoint(
        directory=target,
        client_state=shared["client_state"],
        rank_state=own["rank_state"],
    )


def _read_stage(
    engine: StageEngine,
    target: Path,
    files: Iterable[str],
    buffers: Mapping[str, torch.Tensor],
    load_optimizer: bool,
) -> None:
    """Read weights, and the optimizer's state, of one of the rank's stages.

    Args:
        buffers: of this replica.
    """
    model = _load_tensors(target / _model_file(engine, engine.stage_index, among=files))
    for tie in engine.tied:
        if tie.owner != engine.stage_index:
            model[tie.name] = _load_tensors(target / _model_file(engine, tie.owner, among=files))[tie.name]
    model.update({name: b for name, b in buffers.items() if name in model})
    engine.load_model_state(model)
    if not load_optimizer:
        engine.refresh_masters()
    elif engine.is_trained:
        file = target / _optimizer_file(engine, among=files)
        engine.load_optimizer_state(torch.load(file, map_location=engine.device, weights_only=False))


def _load_tensors(path: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return tensors


def _restore_random_state(device: torch.device, own: Mapping[str, Any]) -> None:
    torch.set_rng_state(own["torch"])
    random.setstate(own["python"])
    if "cuda" in own and device.type == "cuda":
        torch.cuda.set_rng_state(own["cuda"], device)
    if "numpy" in own and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(own["numpy"])


# ---- names and agreement ---------------------------------------------------------------------------------


def _stage_file(
    engine: StageEngine, kind: str, stage: int, position: str = "", *, among: Iterable[str] = ()
) -> str:
    """Return the name of a stage's file: kind, number, name, and of several tensor positions this one.

    Args:
        among: the files of a checkpoint that is read: what differs in the stage's name alone is the same file.
    """
    own = engine.plan.stages[stage]
    before = f"{kind}-{stage:02d}-"
    after = f"{'' if own.tensor == 1 else f'-t{engine.tensor_position}'}{position}.pt"
    alike = (name for name in among if name.startswith(before) and name.endswith(after))
    return next(alike, f"{before}{escape_name(own.name)}{after}")


def _model_file(engine: StageEngine, stage: int, *, among: Iterable[str] = ()) -> str:
    return _stage_file(engine, "model", stage, among=among)


def _optimizer_file(engine: StageEngine, *, among: Iterable[str] = ()) -> str:
    position = engine.position if engine.is_partitioned else 0
    return _stage_file(engine, "optimizer", engine.stage_index, f"-{position:05d}", among=among)


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


def _manifest(engine: StageEngine, files: Mapping[str, int]) -> dict[str, Any]:
    """Return the manifest; of the plan it holds what the files depend on, not predictions or batch sizes."""
    stages = [
        {"name": s.name, "blocks": list(s.blocks), "ranks": sorted(s.ranks)}
        if s.tensor == 1
        else {"name": s.name, "blocks": list(s.blocks), "ranks": list(s.ranks), "tensor": s.tensor}
        for s in engine.plan.stages
    ]
    return {
        "format": FORMAT,
        "stages": stages,
        "world_size": engine.plan.num_ranks,
        # ZeRO 1 and 2 write the same files: gradients are not saved
        "settings": {"dtype": engine.config.dtype, "zero_stage": min(engine.config.zero_stage, 1)},
        "files": dict(sorted(files.items())),
        **engine.versions,
        "torch": torch.__version__,
    }


def _unnamed(stages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a manifest's stages without their names: what is in the files does not depend on them."""
    return [{key: value for key, value in stage.items() if key != "name"} for stage in stages]


def _describe(stages: list[dict[str, Any]]) -> str:
    return ", ".join(
        f"{s['name']} ({len(s['blocks'])} blocks on ranks {','.join(map(str, s['ranks']))}"
        f"{', tensor size ' + str(s['tensor']) if 'tensor' in s else ''})"
        for s in stages
    )


def _all_ranks(engine: StageEngine, action: Callable[[], T], *, doing: str) -> list[T]:
    """Run ``action`` on every rank and return what it gave on each; if one fails, all raise the same error."""

    def attempt() -> T:
        try:
            return action()
        except Exception as error:  # whatever it is, the other ranks must hear of it
            text = str(error) if isinstance(error, GppError) else repr(error)
            raise CheckpointError(f"rank {engine.rank} cannot {doing}: {text}") from error

    # On the default group, whose timeout is the job's: files may be large and disks slow.
    return exchange(attempt, what=doing, group=dist.group.WORLD)
