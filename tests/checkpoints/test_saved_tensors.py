"""Tensors by name from any number of parts and tensor ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpp_plugin.engine.checkpoints.checkpoint_files import WEIGHT, BrokenFile, CheckpointManifest
from gpp_plugin.engine.checkpoints.save_checkpoint import FileContents, write_files
from gpp_plugin.engine.checkpoints.saved_tensors import (
    CheckpointTensors,
    TensorPlace,
    cut_shard,
    join_shards,
)
from gpp_plugin.errors import CheckpointError

WHOLE = torch.arange(48.0).view(8, 6)


def saved(target: Path, files: dict[str, FileContents]) -> CheckpointTensors:
    """Write files and return what reads them."""
    manifest = CheckpointManifest(
        stages=(), num_ranks=1, dtype="float32", zero_stage=0, step=0, saved_ns=0,
        files=write_files(target, files), texts={},
    )  # fmt: skip
    return CheckpointTensors(target, manifest)


def part(tensor: Tensor, **what: Any) -> FileContents:
    contents = FileContents()
    contents.add("x", tensor, **{"what": WEIGHT, "name": "x", "stage": 0, **what})
    return contents


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_any_elements_of_any_parts(tmp_path: Path, parts: int) -> None:
    flat, files, at = WHOLE.reshape(-1), {}, 0
    for number, piece in enumerate(flat.chunk(parts)):
        files[f"{number}.safetensors"] = part(piece, what="exp_avg", shape=(8, 6), start=at)
        at += piece.numel()
    found = saved(tmp_path, files)
    place = TensorPlace(stage=0, shape=(8, 6))
    for start in range(0, 48, 5):
        for count in range(0, 48 - start, 7):
            wanted = flat[start : start + count]
            assert torch.equal(found.elements("exp_avg", "x", place, start, count), wanted)
            named = {file for file, _ in found.needed("exp_avg", "x", place, start, count)}
            overlapping = {f"{number}.safetensors" for number in range(parts)
                           if set(flat.chunk(parts)[number].tolist()) & set(wanted.tolist())}  # fmt: skip
            assert named == overlapping, "no other file is touched"
    assert torch.equal(found.whole("exp_avg", "x", place), WHOLE)


def test_elements_that_are_nowhere(tmp_path: Path) -> None:
    flat = WHOLE.reshape(-1)
    files = {"a": part(flat[:10], shape=(8, 6), start=0), "b": part(flat[20:], shape=(8, 6), start=20)}
    with pytest.raises(BrokenFile, match="elements 10 to 20 are in no file"):
        saved(tmp_path, files).whole(WEIGHT, "x", TensorPlace(stage=0, shape=(8, 6)))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("before, after", [(1, 2), (2, 1), (2, 2), (2, 4), (4, 2)])
def test_another_tensor_size(tmp_path: Path, axis: int, stride: int, before: int, after: int) -> None:
    """Weights as they are, and moments in two pieces of each shard."""
    whole = torch.arange(64.0).view(8, 8)
    files = {}
    for rank in range(before):
        shard = cut_shard(whole, rank, before, axis=axis, stride=stride)
        told = {
            "shape": tuple(shard.shape),
            "shard": (rank, before) if before > 1 else None,
            "axis": axis if before > 1 else 0,
            "stride": stride if before > 1 else 1,
        }
        files[f"model-{rank}"] = part(shard, **told)
        flat, cut = shard.reshape(-1), shard.numel() // 3
        files[f"moment-{rank}-0"] = part(flat[:cut], **told, what="exp_avg", start=0)
        files[f"moment-{rank}-1"] = part(flat[cut:], **told, what="exp_avg", start=cut)
    found = saved(tmp_path, files)
    for rank in range(after):
        own = cut_shard(whole, rank, after, axis=axis, stride=stride)
        shard = (rank, after) if after > 1 else None
        place = TensorPlace(stage=0, shape=tuple(own.shape), shard=shard, axis=axis, stride=stride)
        found.check_fits(WEIGHT, "x", place)
        assert torch.equal(found.whole(WEIGHT, "x", place), own)
        assert torch.equal(found.elements("exp_avg", "x", place, 3, 5), own.reshape(-1)[3:8])
        found.check(found.needed("exp_avg", "x", place, 3, 5))


def test_shards_make_the_whole() -> None:
    """The example of Megatron's MLP: gate and up projection in one tensor."""
    whole = torch.tensor([[10.0], [11], [12], [13], [20], [21], [22], [23]])
    shards = [cut_shard(whole, rank, 2, axis=0, stride=2) for rank in range(2)]
    assert shards[0].flatten().tolist() == [10, 11, 20, 21]
    assert torch.equal(join_shards(shards, axis=0, stride=2), whole)


def test_another_shape_is_refused(tmp_path: Path) -> None:
    found = saved(tmp_path, {"a": part(WHOLE)})
    with pytest.raises(CheckpointError, match=r"'x' is of shape \(8, 6\) in .* holds \(8, 5\) of it"):
        found.check_fits(WEIGHT, "x", TensorPlace(stage=0, shape=(8, 5)))
    with pytest.raises(CheckpointError, match="has no weight of 'y'"):
        found.whole(WEIGHT, "y", TensorPlace(stage=0, shape=(8, 5)))


def test_a_buffer_that_two_stages_have_is_each_one_s_own(tmp_path: Path) -> None:
    files = {str(stage): part(torch.full((2,), float(stage)), what="buffer", stage=stage) for stage in (1, 3)}
    found = saved(tmp_path, files)
    answers = [found.whole("buffer", "x", TensorPlace(stage=stage, shape=(2,))) for stage in (1, 3, 7)]
    assert [float(answer[0]) for answer in answers] == [1, 3, 1], "another plan's takes the first"
