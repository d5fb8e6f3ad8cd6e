"""Which rank brings which tensor to a checkpoint, and what a manifest, a copy and random states say of where they were."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gpp_plugin.engine.checkpoints.checkpoint_files import (
    MANIFEST,
    BrokenFile,
    CheckpointManifest,
    manifest_text,
    read_manifest,
    saved_stages,
)
from gpp_plugin.engine.checkpoints.optimizer_pieces import OptimizerPiece, OptimizerPieces
from gpp_plugin.engine.checkpoints.save_checkpoint import (
    FileContents,
    RankFiles,
    random_state,
    rank_files,
    restore_random_state,
    write_files,
)
from gpp_plugin.engine.checkpoints.saved_tensors import CheckpointTensors, StageOptimizerState, TensorPlace
from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.runtime.random_streams import MODEL_STREAMS, are_same_on_host, host_streams


def engine_of(position: int, tensor_position: int, *, tensor: int, is_partitioned: bool) -> Any:
    """Return a stage with a weight that tensor ranks cut, one that all have, and a buffer, on one of its ranks."""
    module = nn.Module()
    module.cut, module.all = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4))
    module.register_buffer("mean", torch.zeros(5))
    vars(module.cut)["tensor_model_parallel"] = tensor > 1
    pieces = OptimizerPieces(
        kind="SGD",
        pieces=tuple(
            OptimizerPiece(name=name, what="momentum", start=0, tensor=torch.ones(1))
            for name in ("cut", "all")
        ),
        numbers={},
        groups=(),
    )
    return SimpleNamespace(
        position=position, tensor_position=tensor_position, rank=2 * position + tensor_position, stage_index=3,
        stage=SimpleNamespace(name="s", tensor=tensor), module=module, is_trained=True,
        is_partitioned=is_partitioned, device=torch.device("cpu"), saved_buffers=lambda: {"mean": module.mean},
        own_weights=lambda: {"cut": module.cut, "all": module.all, "mean": module.mean},
        optimizer_pieces=lambda: pieces,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("at", "tensor", "is_partitioned", "wanted"),
    [
        ((0, 0), 2, False, {"model": ["all", "cut", "mean"], "optimizer": ["all", "cut"], "rank": []}),
        ((0, 1), 2, False, {"model": ["cut"], "optimizer": ["cut"], "rank": ["mean"]}),
        ((1, 0), 2, False, {"rank": ["mean"]}),
        ((1, 1), 2, True, {"optimizer": ["cut"], "rank": ["mean"]}),
        ((0, 0), 1, True, {"model": ["all", "cut", "mean"], "optimizer": ["all", "cut"], "rank": []}),
        ((1, 0), 1, True, {"optimizer": ["all", "cut"], "rank": ["mean"]}),
    ],
)
def test_a_tensor_is_written_once_and_a_replica_s_buffers_by_each(
    at: tuple[int, int], tensor: int, is_partitioned: bool, wanted: dict[str, list[str]]
) -> None:
    found: RankFiles = rank_files([engine_of(*at, tensor=tensor, is_partitioned=is_partitioned)])
    names = {
        file.partition("-")[0]: sorted(entry.name for entry in contents.entries.values())
        for file, contents in found.files.items()
    }
    names["rank"] = [name for name in names["rank"] if name == "mean"]
    assert names == wanted
    if is_partitioned and at[0]:
        assert any(file.endswith(f"-{at[0]:05d}.safetensors") for file in found.files), "each its own part"


def test_a_copy_for_a_save_beside_training_does_not_change_with_it() -> None:
    contents, weight = FileContents(), torch.ones(2)
    contents.add("x", weight, what="weight", name="x", stage=0)
    copied = contents.copied()
    weight.zero_()
    assert copied.tensors["x"].tolist() == [1.0, 1.0]


def test_random_numbers_go_on_in_torch_python_and_numpy() -> None:
    device = torch.device("cpu")
    before = random_state(device)

    def draw() -> list[float]:
        # the second number of a pair that each of Python and numpy keeps
        return [float(torch.rand(())), random.gauss(0, 1), random.random(), *np.random.randn(3)]

    try:
        with MODEL_STREAMS.drawing():
            draw()
        state, program = random_state(device), host_streams()
        with MODEL_STREAMS.drawing():
            wanted = draw()
            draw()
        restore_random_state(device, state)
        with MODEL_STREAMS.drawing():
            assert draw() == wanted
        assert are_same_on_host(host_streams(), program), "the program draws from other generators"
    finally:
        restore_random_state(device, before)


def plan_of(*ranks: int, tensor: int = 1, name: str = "a") -> PipelinePlan:
    stage = Stage(
        name=name, blocks=("b",), ranks=ranks, tensor=tensor, micro_batch_size=2,
        in_flight=1,
    )  # fmt: skip
    named = {"model": "m", "graph": "g", "planner": "p"}
    return PipelinePlan(**named, mini_batch=4, loss_unit=2, stages=(stage,), edges=())


def manifest_of(plan: PipelinePlan, **more: Any) -> CheckpointManifest:
    kept: dict[str, Any] = {
        "stages": saved_stages(plan), "num_ranks": 2, "dtype": "float32", "zero_stage": 0, "step": 1,
        "saved_ns": 1, "files": {}, "texts": {}, **more,
    }  # fmt: skip
    return CheckpointManifest(**kept)


def test_a_plan_is_the_same_where_each_rank_holds_the_same() -> None:
    assert manifest_of(plan_of(1, 0)).is_on(plan_of(0, 1, name="another"))
    tensor = manifest_of(plan_of(1, 0, tensor=2))
    assert tensor.is_on(plan_of(1, 0, tensor=2))
    assert not tensor.is_on(plan_of(0, 1, tensor=2)), "tensor ranks have shards by their order"
    assert not tensor.is_on(plan_of(0, 1)) and not manifest_of(plan_of(0, 1)).is_on(plan_of(0, 1, tensor=2))


def test_a_manifest_with_another_number_is_not_what_was_written(tmp_path: Path) -> None:
    text = manifest_text(manifest_of(plan_of(0, 1)))
    (tmp_path / MANIFEST).write_text(text)
    assert read_manifest(tmp_path).step == 1
    (tmp_path / MANIFEST).write_text(text.replace('"step":1', '"step":2'))
    with pytest.raises(BrokenFile, match="is not what was written"):
        read_manifest(tmp_path)


def test_all_that_a_stage_will_read_is_checked_and_every_file_of_a_whole_checkpoint(tmp_path: Path) -> None:
    """Of momenta only the parts that this rank steps; a file without tensors counts as well."""
    files = {name: FileContents() for name in ("model", "near", "far", "rank-00000.safetensors")}
    files["model"].add("x", torch.zeros(6), what="weight", name="x", stage=0)
    for file, start in (("near", 0), ("far", 3)):
        for what in ("exp_avg", "exp_avg_sq"):
            files[file].add(what, torch.zeros(3), what=what, name="x", stage=0, shape=(6,), start=start)
    files["rank-00000.safetensors"].beside = {"random": 1}
    manifest = manifest_of(plan_of(0, 1), files=write_files(tmp_path, files), numbers={"x": {"step": 1}})
    saved = CheckpointTensors(tmp_path, manifest)
    state = StageOptimizerState(saved, {"x": TensorPlace(stage=0, shape=(6,))})
    assert state.needed("x", [(1, 2)]) == {("model", "x"), ("near", "exp_avg"), ("near", "exp_avg_sq")}
    assert {file for file, _ in state.needed("x", [(0, 1), (5, 1)])} == {"model", "near", "far"}
    saved.check_everything()
    (tmp_path / "rank-00000.safetensors").unlink()
    with pytest.raises(BrokenFile, match="rank-00000"):
        CheckpointTensors(tmp_path, dataclasses.replace(manifest)).check_everything()
