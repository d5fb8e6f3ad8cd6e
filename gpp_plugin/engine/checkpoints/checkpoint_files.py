"""Safetensors files written with a checksum of the header and of each tensor, and read by parts.

    8 bytes            length of the header
    header             JSON: name -> dtype, shape, offsets; "__metadata__"
    tensors            one behind the other, without gaps

Header and tensors are the whole file, so that a flipped bit is in exactly one of the sums. They are taken while the
file is written, not read back. A reader checks the header and those tensors that it is going to read.

Source: this project
Tests: tests/checkpoints/test_tensor_file.py, tests/checkpoints/test_forged.py,
    tests/integrations/test_checkpoint.py, tests/integrations/test_resharding.py
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gpp_plugin.engine.checkpoints.checkpoint_directory import check_inside, open_regular
from gpp_plugin.errors import CheckpointError, GppError, first_line
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.serialize import MAX_BYTES, from_plain, parse_json, to_plain
from gpp_plugin.ir.typed_leaves import MOST_BYTES, Bytes, Count, Index, OneOf

# States as JSON with tensors beside: what schedulers, counters, random generators and users hand to a checkpoint.
#
# JSON has no tuples, no infinity, no keys but strings and no tensors; each is an object with one key that begins
# with $:
#
#     (0.9, 0.999)       {"$tuple": [0.9, 0.999]}
#     inf                {"$float": "inf"}
#     {3: 1}             {"$dict": [[3, 1]]}          Counter({3: 1})    {"$counter": [[3, 1]]}
#     b"x"               {"$bytes": "eA=="}           numpy's arrays     {"$array": ["<i8", [1], "AQAAAAAAAAA="]}
#     tensor of shape () {"$scalar": ["float32", 7.0]}
#     another tensor     {"$tensor": "client_state.mean"}       its name in the file of tensors beside
#                        {"$embedded": ["uint8", [1], "AQ=="]}  where there is none
#
# Anything else is refused by name: what would need pickle to be written would run code when it is read.


CONTENT_ERRORS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What values of a wrong kind let fail that take them for the right one; a recursion that is too deep included."""
MOST_LEVELS = 64
"""Deeper states are refused when written, so that a reader may refuse them too."""
MOST_DEPTH = 4 * MOST_LEVELS
"""Of the JSON of such a state: a dict whose keys are no strings is an object, a list and pairs."""


def to_json(value: Any, *, path: str, tensors: dict[str, Tensor] | None, level: int = 0) -> Any:
    """Return ``value`` as JSON types, and put its tensors into ``tensors`` under their paths; None: into the JSON.

    Args:
        level: of states around it.

    Raises:
        CheckpointError: something in it is neither JSON nor a tensor; the message names its path.

    >>> to_json({"best": (float("inf"), 2)}, path="client_state", tensors={})
    {'best': {'$tuple': [{'$float': 'inf'}, 2]}}
    """
    if level > MOST_LEVELS:
        raise CheckpointError(f"{path}: deeper than {MOST_LEVELS} levels; flatten it")
    if isinstance(value, np.generic):  # numpy's own numbers; its float64 is a float as well
        value = value.item()
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if type(value) is bytes:
        return {"$bytes": _text_of(value)}
    if type(value) is np.ndarray and not value.dtype.hasobject:
        return {
            "$array": [value.dtype.str, list(value.shape), _text_of(np.ascontiguousarray(value).tobytes())]
        }
    if isinstance(value, Tensor):
        return _tensor_to_json(value, path, tensors)

    def inner(item: Any, at: object) -> Any:
        return to_json(item, path=f"{path}.{at}", tensors=tensors, level=level + 1)

    if isinstance(value, Counter):
        return {"$counter": [[inner(k, "key"), inner(v, k)] for k, v in value.items()]}
    if isinstance(value, Mapping):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: inner(item, key) for key, item in value.items()}
        return {"$dict": [[inner(k, "key"), inner(v, k)] for k, v in value.items()]}
    if type(value) is list:
        return [inner(item, at) for at, item in enumerate(value)]
    if type(value) in (tuple, torch.Size):
        return {"$tuple": [inner(item, at) for at, item in enumerate(value)]}
    kind = type(value)
    raise CheckpointError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}: a checkpoint holds numbers, strings, lists, dicts and "
        "tensors, as anything else would run code when it is read; save its parts, or its state_dict()"
    )


def _tensor_to_json(value: Tensor, path: str, tensors: dict[str, Tensor] | None) -> Any:
    if value.is_sparse or value.is_quantized or value.is_complex() or value.is_meta:
        raise CheckpointError(f"{path} is a tensor of {value.dtype}, {value.layout}; save a dense real one")
    if value.dim() == 0 and value.dtype in _SCALARS:
        number = value.item()
        plain = number if not isinstance(number, float) or math.isfinite(number) else repr(number)
        return {"$scalar": [str(value.dtype).removeprefix("torch."), plain]}
    if tensors is None:
        own = value.detach().cpu().contiguous().reshape(-1)
        content = own.view(torch.uint8).numpy().tobytes() if own.numel() else b""
        return {"$embedded": [str(own.dtype).removeprefix("torch."), list(value.shape), _text_of(content)]}
    name = path
    while name in tensors:  # keys with dots may spell the same path
        name += "_"
    tensors[name] = value.detach()
    return {"$tensor": name}


def _text_of(content: bytes) -> str:
    return base64.b64encode(content).decode()


_SCALARS = {
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
}


def from_json(plain: Any, *, tensor: Callable[[str], Tensor] | None) -> Any:
    """Return what `to_json` encoded.

    Args:
        tensor: reads a tensor by its name in the file beside; None: there is none.

    Raises:
        CheckpointError: it is not what `to_json` writes.
    """
    if isinstance(plain, list):
        return [from_json(item, tensor=tensor) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if len(plain) != 1 or not next(iter(plain)).startswith("$"):
        return {key: from_json(item, tensor=tensor) for key, item in plain.items()}
    ((tag, value),) = plain.items()
    make = _MAKE.get(tag)
    if make is None and (tag != "$tensor" or tensor is None):
        raise CheckpointError(
            f"{tag!r} is no kind of value that checkpoints hold; is the file another release's?"
        )
    try:
        if make is None:
            assert tensor is not None
            return tensor(value)
        return make(from_json(value, tensor=tensor))
    except CONTENT_ERRORS as error:
        raise CheckpointError(
            f"{tag} of {str(value)[:80]!r} is not as checkpoints write it ({error})"
        ) from error


def _scalar(encoded: list[Any]) -> Tensor:
    name, value = encoded
    kinds = {str(kind).removeprefix("torch."): kind for kind in _SCALARS}
    if name not in kinds or not isinstance(value, (int, float, str)):
        raise ValueError(f"no number of type {name!r}")
    return torch.tensor(float(value) if isinstance(value, str) else value, dtype=kinds[name])


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _array(encoded: list[Any]) -> Any:
    dtype, shape, text = encoded
    return np.frombuffer(_bytes(text), dtype=np.dtype(dtype)).reshape(shape).copy()


def _embedded(encoded: list[Any]) -> Tensor:
    name, shape, text = encoded
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no type {name!r}")
    content = bytearray(_bytes(text))
    flat = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)


_MAKE: dict[str, Callable[[Any], Any]] = {
    "$tuple": tuple,
    "$float": float,
    "$dict": lambda pairs: {key: item for key, item in pairs},
    "$counter": lambda pairs: Counter({key: count for key, count in pairs}),
    "$scalar": _scalar,
    "$bytes": _bytes,
    "$array": _array,
    "$embedded": _embedded,
}


DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
}
CHUNK = 1 << 24
MOST_HEADER_BYTES = 100_000_000
"""As safetensors itself has it."""


class BrokenFile(CheckpointError):
    """A file is not what its checkpoint says: cut, changed, or another one."""


@contextlib.contextmanager
def parsing(file: str) -> Iterator[None]:
    """Refuse a file whose content breaks what reads it: right checksums say that it is whole, not that it is ours.

    Raises:
        BrokenFile: names the file; one line.
    """
    try:
        yield
    except BrokenFile:
        raise
    except (CheckpointError, *CONTENT_ERRORS) as error:
        if isinstance(error, CheckpointError) and file in str(error):
            raise
        kind = "" if isinstance(error, GppError) else f"{type(error).__name__}: "
        raise BrokenFile(f"{file} is not what was written ({kind}{first_line(error)[:300]})") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSums:
    """What a manifest says about a file of tensors.

    Args:
        num_bytes: of the whole file.
        header: checksum of length and header.
        tensors: checksum of each tensor's bytes, by its name in the file.
    """

    num_bytes: int
    header: str
    tensors: dict[str, str]


def checksum() -> Any:
    """Return a new sum: BLAKE2b of 128 bits, the quickest of the standard library's where a processor has no SHA."""
    return hashlib.blake2b(digest_size=16)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str]) -> FileSums:
    """Write a safetensors file and bring it to the disk.

    Args:
        tensors: anywhere; each is brought to host memory when its turn comes.

    Raises:
        CheckpointError: a tensor's type has no name in safetensors.
    """
    # Wide types first, as safetensors has them: every tensor then begins at a multiple of its element size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    at = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in DTYPES:
            raise CheckpointError(f"{name!r} is of {tensor.dtype}, which safetensors files cannot hold")
        end = at + tensor.nbytes
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    first = len(text).to_bytes(8, "little") + text
    with path.open("wb") as stream:
        stream.write(first)
        sums = {name: _write_tensor(stream, tensors[name]) for name in order}
        stream.flush()
        os.fsync(stream.fileno())
    head = checksum()
    head.update(first)
    return FileSums(num_bytes=len(first) + at, header=head.hexdigest(), tensors=sums)


def _write_tensor(stream: BinaryIO, tensor: Tensor) -> str:
    total = checksum()
    if tensor.numel():
        flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        array: Any = flat.numpy()
        data = memoryview(array)
        for first in range(0, len(data), CHUNK):
            part = data[first : first + CHUNK]
            total.update(part)
            stream.write(part)
    return str(total.hexdigest())


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderEntry:
    """A tensor as a file's header has it."""

    dtype: Annotated[str, OneOf(tuple(DTYPES.values()))]
    shape: tuple[Bytes, ...]
    data_offsets: tuple[Bytes, Bytes]


def check_tensors(path: Path, sums: FileSums, names: Iterable[str]) -> dict[str, HeaderEntry]:
    """Read the header and the tensors ``names``, compare their sums, and return the header.

    Raises:
        BrokenFile: the file is not there, of another size, or its bytes are others; the message names it and what.
    """
    try:
        with open_regular(path) as stream, parsing(path.name):
            return _check_open(stream, path, sums, names)
    except OSError as error:
        raise BrokenFile(f"{path.name} cannot be read ({error.strerror})") from error


def _check_open(stream: BinaryIO, path: Path, sums: FileSums, names: Iterable[str]) -> dict[str, HeaderEntry]:
    size = os.fstat(stream.fileno()).st_size
    if size != sums.num_bytes:
        raise BrokenFile(f"{path.name} has {size} bytes, the manifest says {sums.num_bytes}")
    first = stream.read(8)
    length = int.from_bytes(first, "little")
    if length > min(size - 8, MOST_HEADER_BYTES):
        raise BrokenFile(f"{path.name}: its header says that it is {length} bytes long")
    text = stream.read(length)
    total = checksum()
    total.update(first + text)
    if total.hexdigest() != sums.header:
        raise BrokenFile(f"{path.name}: its header is not what was written")
    plain = parse_json(text.decode(), what="a header of tensors")
    plain.pop("__metadata__", None)
    header: dict[str, HeaderEntry] = from_plain(dict[str, HeaderEntry], plain)
    if absent := sorted(name for name in names if name not in header or name not in sums.tensors):
        raise BrokenFile(f"{path.name} has no tensor {absent[0]!r}")
    for name in sorted(names, key=lambda name: header[name].data_offsets):
        begin, end = header[name].data_offsets
        if _sum_of(stream, 8 + length + begin, end - begin) != sums.tensors[name]:
            raise BrokenFile(f"{path.name}: the bytes of {name!r} are not what was written")
    return header


def _sum_of(stream: BinaryIO, at: int, num_bytes: int) -> str:
    total = checksum()
    stream.seek(at)
    while num_bytes > 0:
        part = stream.read(min(CHUNK, num_bytes))
        if not part:
            break
        total.update(part)
        num_bytes -= len(part)
    return str(total.hexdigest())


class TensorFile:
    """A safetensors file open for reading, memory-mapped: what is not requested is not read.

    Raises:
        BrokenFile: it is not one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = safe_open(path, framework="pt", device="cpu")
        except (SafetensorError, OSError, ValueError) as error:
            raise BrokenFile(f"{path.name} cannot be read: {error}") from error

    def metadata(self) -> dict[str, str]:
        """Return the strings beside the tensors."""
        return dict(self._file.metadata() or {})

    def names(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._file.keys())

    def whole(self, name: str) -> Tensor:
        """Return a tensor."""
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except SafetensorError as error:
            raise BrokenFile(f"{self._path.name}: {name!r}: {error}") from error
        return tensor

    def elements(self, name: str, first: int, count: int) -> Tensor:
        """Return ``count`` elements of the flattened tensor from ``first`` on; of its rows only those they are in.

        Of a tensor of 4 rows of 3, the elements 4 to 8 are in rows 1 and 2:

            . . .
            . x x        rows 1:3 are read, flattened, and cut from element 4 - 1 * 3 on
            x x .
            . . .
        """
        try:
            part = self._file.get_slice(name)
            shape = list(part.get_shape())
            if not shape:
                return self.whole(name).reshape(-1)[first : first + count]
            row = math.prod(shape[1:])
            if row == 0 or count == 0:
                return self.whole(name).reshape(-1)[:0]
            top = first // row
            bottom = -(-(first + count) // row)
            rows: Tensor = part[top:bottom]
        except SafetensorError as error:
            raise BrokenFile(f"{self._path.name}: {name!r}: {error}") from error
        return rows.reshape(-1).narrow(0, first - top * row, count)


# What a checkpoint consists of: `manifest.json`, written last, with a checksum of itself.
#
#     manifest.json                               plan, settings, files, every tensor with its checksum
#     plan.json                                   the plan, for graph_pipeline.plan of a job that is to have the same
#     state.json, state.safetensors               schedule, loss scale, counters, data, the user's state; its tensors
#     model-00-<stage>.safetensors                parameters and buffers under their names in the plain model
#     optimizer-00-<stage>-00000.safetensors      masters and optimizer state, by parameter; of each rank under ZeRO
#     rank-00000.safetensors                      a rank's random states, its replica's buffers, its place in the data
#
# Tensor ranks write files of their own, ``-t1`` behind the stage. Nothing here depends on the plan but which file a
# tensor, or which elements of it, are in: a tensor is known by its name in the plain model and by what it is of it.

FORMAT = 2
MANIFEST = "manifest.json"
PLAN = "plan.json"
STATE = "state.json"
STATE_TENSORS = "state.safetensors"
WEIGHT, BUFFER, STATE_TENSOR, MASTER = "weight", "buffer", "state", "master"
MOMENTS = ("exp_avg", "exp_avg_sq")
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

    def check(self, file: str) -> None:
        """Refuse records that contradict themselves: with right sums they were forged.

        Raises:
            BrokenFile: names the file, the tensor and its record.
        """
        if self.sums.tensors.keys() != self.tensors.keys():
            other = sorted(self.sums.tensors.keys() ^ self.tensors.keys())
            raise BrokenFile(f"{MANIFEST}: {file} has a sum or a record of {other[0]!r}, not both")
        for key, record in self.tensors.items():
            whole, begin = math.prod(record.shape), record.start
            is_inside = record.count == whole if begin is None else begin + record.count <= whole
            # what has a shape of its own is not cut, whatever its parameter is
            is_cut = record.shard is not None and begin is not None
            if is_cut and not (
                record.axis < len(record.shape) and not record.shape[record.axis] % record.stride
            ):
                is_inside = False
            if record.shard is not None and record.shard[0] >= record.shard[1]:
                is_inside = False
            if record.dtype not in _TORCH_NAMES or whole > MOST_BYTES or not is_inside:
                raise BrokenFile(f"{MANIFEST}: {file}: {key!r} cannot be so: {record}"[:400])

    def check_header(self, file: str, header: Mapping[str, HeaderEntry]) -> None:
        """Refuse a file whose header says otherwise than the manifest.

        Raises:
            BrokenFile: names the file and the tensor.
        """
        if header.keys() != self.tensors.keys():
            other = sorted(header.keys() ^ self.tensors.keys())
            raise BrokenFile(f"{file}: {other[0]!r} is in its header or in the manifest, not in both")
        for key, record in self.tensors.items():
            entry = header[key]
            shapes = {record.shape}
            if record.what not in (WEIGHT, BUFFER, STATE_TENSOR) and record.start is not None:
                shapes.add((record.count,))  # of what the optimizer keeps, elements in a row
            if entry.dtype != _TORCH_NAMES[record.dtype] or entry.shape not in shapes:
                raise BrokenFile(
                    f"{file}: {key!r} is {entry.dtype} of shape {entry.shape} in its header, the manifest says "
                    f"{record.dtype} of shape {record.shape}"
                )


_TORCH_NAMES = {str(kind).removeprefix("torch."): name for kind, name in DTYPES.items()}


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
        BrokenFile: it is not there, another release's, or not what was written.
    """
    text = read_text(target, MANIFEST, missing="has no manifest: its save did not finish")
    with parsing(MANIFEST):
        plain = parse_json(text, what="a manifest")
        written = plain.get("format")
        if isinstance(written, int) and written != FORMAT:
            raise BrokenFile(
                f"{MANIFEST} of {target} has format {written}, this release reads {FORMAT}; load it with the release "
                "that wrote it, and give its weights on with save_pretrained()"
            )
        body = text[text.index('"manifest":') + len('"manifest":') : text.rindex("}")]
        if written != FORMAT or plain["checksum"] != text_sum(body):
            raise BrokenFile(f"{MANIFEST} is not what was written")
        manifest: CheckpointManifest = from_plain(CheckpointManifest, plain["manifest"])
        for name in (*manifest.files, *manifest.texts):
            if not _FILE.match(name):
                raise BrokenFile(f"{MANIFEST} names a file {name[:100]!r}, which is none of a checkpoint")
        for name, file in manifest.files.items():
            file.check(name)
    return manifest


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
        with open_regular(path) as stream:
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
