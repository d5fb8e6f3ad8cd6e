"""Safetensors files written with a checksum of the header and of each tensor, and read by parts.

    8 bytes            length of the header
    header             JSON: name -> dtype, shape, offsets; "__metadata__"
    tensors            one behind the other, without gaps

Header and tensors are the whole file, so that a flipped bit is in exactly one of the sums. They are taken while the
file is written, not read back. A reader checks the header and those tensors that it is going to read.

Source: this project
Tests: tests/checkpoints/test_tensor_file.py
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gpp_plugin.errors import CheckpointError

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
        end = at + tensor.numel() * tensor.element_size()
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


def check_tensors(path: Path, sums: FileSums, names: Iterable[str]) -> None:
    """Read the header and the tensors ``names`` and compare their sums.

    Raises:
        BrokenFile: the file is not there, of another size, or its bytes are others; the message names it and what.
    """
    try:
        with path.open("rb") as stream:
            _check_open(stream, path, sums, names)
    except OSError as error:
        raise BrokenFile(f"{path.name} cannot be read ({error.strerror})") from error


def _check_open(stream: BinaryIO, path: Path, sums: FileSums, names: Iterable[str]) -> None:
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
    offsets = {name: entry["data_offsets"] for name, entry in json.loads(text).items() if name[:2] != "__"}
    for name in sorted(names, key=lambda name: offsets.get(name, [0])[0]):
        if name not in offsets or name not in sums.tensors:
            raise BrokenFile(f"{path.name} has no tensor {name!r}")
        begin, end = offsets[name]
        if _sum_of(stream, 8 + length + begin, end - begin) != sums.tensors[name]:
            raise BrokenFile(f"{path.name}: the bytes of {name!r} are not what was written")


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
    """A safetensors file open for reading, memory-mapped: what is not asked for is not read.

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
