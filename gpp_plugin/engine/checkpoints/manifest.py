"""What a checkpoint consists of: `manifest.json`, written last, with a checksum of itself.

    manifest.json                               plan, settings, files, every tensor with its checksum
    plan.json                                   the plan, for graph_pipeline.plan of a job that is to have the same
    state.json, state.safetensors               schedule, loss scale, counters, data, the user's state; its tensors
    model-00-<stage>.safetensors                parameters and buffers under their names in the plain model
    optimizer-00-<stage>-00000.safetensors      masters and optimizer state, by parameter; of each rank under ZeRO
    rank-00000.safetensors                      a rank's random states, its replica's buffers, its place in the data

Tensor ranks write files of their own, ``-t1`` behind the stage. Nothing here depends on the plan but which file a
tensor, or which elements of it, are in: a tensor is known by its name in the plain model and by what it is of it.

Source: this project
Tests: tests/integrations/test_checkpoint.py, tests/integrations/test_resharding.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpp_plugin.engine.checkpoints.checkpoint_directory import check_inside
from gpp_plugin.engine.checkpoints.tensor_file import BrokenFile, FileSums, checksum
from gpp_plugin.errors import CheckpointError, ReadError, first_line
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.serialize import MAX_BYTES, from_plain, parse_json, to_plain
from gpp_plugin.ir.typed_leaves import Bytes, Count, Index

FORMAT = 2
MANIFEST = "manifest.json"
PLAN = "plan.json"
STATE = "state.json"
STATE_TENSORS = "state.safetensors"
WEIGHT, BUFFER, STATE_TENSOR = "weight", "buffer", "state"
_FILE = re.compile(r"^[A-Za-z0-9_~%][A-Za-z0-9_.~%-]*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """A tensor of a file: what it is of the plain model.

    Args:
        what: ``weight``, ``buffer``, ``state``, ``master``, or the optimizer's name of it.
        name: the parameter's or buffer's.
        shape: of the whole; under tensor parallelism of the tensor rank's shard.
        start, count: the elements of it that are here, flattened; ``start`` None: all, in a shape of its own.
        stage: which wrote it, by its number in the plan.
        shard: tensor position and tensor size of a shard; None: all tensor ranks have the same.
        axis, stride: how shards make the whole (Megatron's partition_dim and partition_stride).
    """

    what: str
    name: str
    dtype: str
    shape: tuple[Bytes, ...]
    start: Bytes | None
    count: Bytes
    stage: Index
    shard: tuple[Index, Count] | None = None
    axis: Index = 0
    stride: Count = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """A file of tensors: its checksums, and what its tensors are, by their names in it."""

    sums: FileSums
    tensors: dict[str, TensorRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedGroup:
    """A parameter group: its number among the model's, the names of its parameters, its options."""

    number: Index
    names: tuple[str, ...]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStage:
    """What of a stage decides whether two plans are the same to a checkpoint; its name is for people."""

    name: str
    blocks: tuple[str, ...]
    ranks: tuple[Index, ...]
    tensor: Count = 1

    @property
    def place(self) -> tuple[tuple[str, ...], tuple[int, ...], int]:
        """Return it without its name."""
        return (self.blocks, self.ranks, self.tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointManifest:
    """A checkpoint's table of contents.

    Args:
        stages: of the plan it was saved on; none where one process wrote it.
        dtype: of the parameters.
        zero_stage: 0 where every rank of a stage stepped all of it.
        step: optimizer steps so far.
        saved_ns: when, in nanoseconds since 1970.
        versions: releases, for people.
        texts: checksum of each file that holds no tensors.
        names: parameters and buffers of the plain model in its order, with their other names (a tied head's).
        optimizer: class of the optimizer; empty where there was none.
        numbers: by trained parameter, what the optimizer keeps of it in numbers.
        groups: parameter groups; one of the model's may be here more than once, where its parameters' options differ.
    """

    stages: tuple[SavedStage, ...]
    num_ranks: Count
    dtype: str
    zero_stage: Index
    step: Bytes
    saved_ns: Bytes
    files: dict[str, SavedFile]
    texts: dict[str, str]
    versions: dict[str, str] = field(default_factory=dict)
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    optimizer: str = ""
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: tuple[SavedGroup, ...] = ()

    def is_on(self, plan: PipelinePlan) -> bool:
        """Return whether it was saved on this plan, whatever its stages are called."""
        return [s.place for s in self.stages] == [s.place for s in saved_stages(plan)]

    def describe_plan(self) -> str:
        """Return the plan it was saved on, in a line."""
        return ", ".join(
            f"{s.name} ({len(s.blocks)} blocks on ranks {','.join(map(str, s.ranks))}"
            f"{f', tensor size {s.tensor}' if s.tensor > 1 else ''})"
            for s in self.stages
        )


def saved_stages(plan: PipelinePlan) -> tuple[SavedStage, ...]:
    """Return the stages of a plan as manifests have them."""
    return tuple(
        SavedStage(
            name=stage.name,
            blocks=tuple(stage.blocks),
            ranks=tuple(sorted(stage.ranks) if stage.tensor == 1 else stage.ranks),
            tensor=stage.tensor,
        )
        for stage in plan.stages
    )


def manifest_text(manifest: CheckpointManifest) -> str:
    """Return the text of ``manifest.json``."""
    body = json.dumps(to_plain(manifest), separators=(",", ":"), allow_nan=False)
    return f'{{"format":{FORMAT},"checksum":"{text_sum(body)}",\n"manifest":{body}}}\n'


def text_sum(text: str) -> str:
    """Return the checksum of a text."""
    total = checksum()
    total.update(text.encode())
    return str(total.hexdigest())


def read_manifest(target: Path) -> CheckpointManifest:
    """Return the manifest of a checkpoint.

    Raises:
        BrokenFile: it is not there, or not what was written.
        CheckpointError: another format's.
    """
    text = read_text(target, MANIFEST, missing="has no manifest: its save did not finish")
    try:
        plain = parse_json(text, what="a manifest")
        told = plain.get("format")
        if isinstance(told, int) and told != FORMAT:
            raise CheckpointError(
                f"checkpoint {target}: format {told}, this release reads {FORMAT}; load it with the release that wrote "
                "it, and give its weights on with save_pretrained()"
            )
        body = text[text.index('"manifest":') + len('"manifest":') : text.rindex("}")]
        if told != FORMAT or plain["checksum"] != text_sum(body):
            raise BrokenFile(f"{MANIFEST} is not what was written")
        manifest = from_plain(CheckpointManifest, plain["manifest"])
        for name in (*manifest.files, *manifest.texts):
            if not _FILE.match(name):
                raise BrokenFile(f"{MANIFEST} names a file {name[:100]!r}, which is none of a checkpoint")
        return manifest
    except (ValueError, KeyError, AttributeError, ReadError) as error:
        raise BrokenFile(f"{MANIFEST} is not what was written ({first_line(error)})") from error


def read_text(target: Path, name: str, *, missing: str = "", expected: str | None = None) -> str:
    """Return a text file of a checkpoint.

    Args:
        missing: said where it is not there.
        expected: its checksum.

    Raises:
        BrokenFile: it cannot be read, or is not what was written.
    """
    try:
        path = check_inside(target, target / name)
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise BrokenFile(f"{name} has more than {MAX_BYTES} bytes")
        text = data.decode()
    except OSError as error:
        raise BrokenFile(missing or f"{name} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise BrokenFile(f"{name} is not what was written ({error})") from error
    if expected is not None and text_sum(text) != expected:
        raise BrokenFile(f"{name} is not what was written")
    return text


def plain_of(value: Mapping[str, Any]) -> str:
    """Return the text of a JSON file of a checkpoint."""
    return json.dumps(value, indent=1, allow_nan=False) + "\n"
