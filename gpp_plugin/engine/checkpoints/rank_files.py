"""The files that one rank brings to a checkpoint, as tensors that are not yet written.

Source: this project
Tests: tests/checkpoints/test_rank_files.py, tests/integrations/test_checkpoint.py
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpp_plugin.engine.checkpoints.checkpoint_directory import sync_directory
from gpp_plugin.engine.checkpoints.checkpoint_files import (
    BUFFER,
    STATE_TENSOR,
    WEIGHT,
    SavedFile,
    SavedGroup,
    TensorRecord,
    write_tensors,
)
from gpp_plugin.engine.checkpoints.saved_tensors import TensorPlace
from gpp_plugin.engine.checkpoints.state_values import to_json
from gpp_plugin.engine.stage_engine import StageEngine
from gpp_plugin.engine.stage_groups import is_shard
from gpp_plugin.errors import CheckpointError
from gpp_plugin.ir.serialize import escape_name

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


def rank_files(stages: Sequence[StageEngine], rank_state: Any) -> RankFiles:
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
    state = {"rank_state": rank_state, "random": random_state(stages[0].device)}
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
    place = place_of(engine, name, tensor)
    return {
        "name": name,
        "stage": place.stage,
        "shape": place.shape,
        "shard": place.shard,
        "axis": place.axis,
        "stride": place.stride,
    }


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
        found.groups.append(SavedGroup(number=group.number, names=group.names, options=options))
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
    """Return the states of the random generators of torch, Python and, where it is used, numpy."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        if kind == "MT19937":
            state["numpy"] = {"words": torch.tensor([int(key) for key in keys]), "rest": rest}
    return state


def restore_random_state(device: torch.device, state: Mapping[str, Any]) -> None:
    """Restore what `random_state` returned; a CUDA state on whatever device the rank has now."""
    torch.set_rng_state(state["torch"])
    facts = state["python"]
    random.setstate((facts["version"], tuple(facts["words"].tolist()), facts["gauss"]))
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
    if "numpy" in state and "numpy" in sys.modules:
        numpy = sys.modules["numpy"]
        words = numpy.array(state["numpy"]["words"].tolist(), dtype="uint32")
        numpy.random.set_state(("MT19937", words, *state["numpy"]["rest"]))


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
