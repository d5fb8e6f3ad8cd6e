"""Safetensors files: as others read them, by parts, and every flipped bit is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gpp_plugin.engine.checkpoints.checkpoint_files import (
    DTYPES,
    BrokenFile,
    FileSums,
    TensorFile,
    check_tensors,
    write_tensors,
)
from gpp_plugin.errors import CheckpointError

TENSORS = {
    "weight": torch.arange(12, dtype=torch.float32).view(4, 3),
    "turned": torch.arange(6.0).view(2, 3).T,
    "half": torch.rand(5).bfloat16(),
    "bytes": torch.arange(3, dtype=torch.uint8),
    "number": torch.tensor(2.5, dtype=torch.float64),
    "nothing": torch.zeros(0, 4),
}


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, FileSums]:
    path = tmp_path / "one.safetensors"
    return path, write_tensors(path, TENSORS, metadata={"said": "so"})


def test_safetensors_reads_what_is_written(written: tuple[Path, FileSums]) -> None:
    path, sums = written
    found = load_file(path)
    assert found.keys() == TENSORS.keys() == sums.tensors.keys()
    assert all(torch.equal(found[name], value) for name, value in TENSORS.items())
    assert path.stat().st_size == sums.num_bytes
    assert TensorFile(path).metadata() == {"format": "pt", "said": "so"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_can_be_written(dtype: torch.dtype, tmp_path: Path) -> None:
    value = torch.tensor([1, 0, 1]).to(dtype)
    write_tensors(tmp_path / "one", {"x": value}, metadata={})
    found = TensorFile(tmp_path / "one").whole("x")
    assert found.dtype == dtype and torch.equal(found.view(torch.uint8), value.view(torch.uint8))


def test_other_types_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'x' is of torch.complex64"):
        write_tensors(tmp_path / "one", {"x": torch.zeros(1, dtype=torch.complex64)}, metadata={})


def test_elements_of_rows(written: tuple[Path, FileSums]) -> None:
    file = TensorFile(written[0])
    for name, value in TENSORS.items():
        flat = value.reshape(-1)
        for first in range(flat.numel()):
            for count in range(flat.numel() - first + 1):
                assert torch.equal(file.elements(name, first, count), flat[first : first + count])


def test_every_byte_is_in_a_sum(written: tuple[Path, FileSums]) -> None:
    path, sums = written
    check_tensors(path, sums, TENSORS)
    good = path.read_bytes()
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 1 << (at % 8)
        path.write_bytes(bad)
        with pytest.raises(BrokenFile, match=r"one.safetensors"):
            check_tensors(path, sums, TENSORS)


def test_cut_and_foreign_files(written: tuple[Path, FileSums], tmp_path: Path) -> None:
    path, sums = written
    other = tmp_path / "other.safetensors"
    write_tensors(other, {**TENSORS, "weight": torch.ones(4, 3)}, metadata={"said": "so"})
    with pytest.raises(BrokenFile, match="the bytes of 'weight' are not what was written"):
        check_tensors(other, sums, TENSORS)
    check_tensors(other, sums, ["half"])  # what is not read is not looked at
    other.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        BrokenFile, match=f"has {sums.num_bytes - 1} bytes, the manifest says {sums.num_bytes}"
    ):
        check_tensors(other, sums, TENSORS)
    with pytest.raises(BrokenFile, match="cannot be read"):
        check_tensors(tmp_path / "none", sums, TENSORS)


@pytest.mark.parametrize(
    "data", [b"", b"\x00" * 8, b"\xff" * 64, b"\x80\x04cos\nsystem\n", b"PK\x03\x04" + b"x" * 99]
)
def test_what_is_no_safetensors_file_is_not_opened(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "one"
    path.write_bytes(data)
    with pytest.raises(BrokenFile):
        TensorFile(path)
    with pytest.raises(BrokenFile):
        check_tensors(path, FileSums(num_bytes=len(data), header="", tensors={}), [])


def test_the_header_is_aligned(written: tuple[Path, FileSums]) -> None:
    data = written[0].read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    for name, value in TENSORS.items():
        assert header[name]["data_offsets"][0] % value.element_size() == 0
