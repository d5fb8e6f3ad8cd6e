"""Checkpoints of four gloo ranks: exact resumption, other plans, broken and foreign files."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from gpp_plugin.engine.checkpoints.checkpoint_files import read_manifest
from gpp_plugin.engine.checkpoints.save_checkpoint import BackgroundSave, save_checkpoint
from gpp_plugin.engine.engine_files import load_checkpoint
from gpp_plugin.engine.framework import StepCounters
from gpp_plugin.engine.rank_engine import StageEngine
from gpp_plugin.engine.stage_groups import StageGroups
from gpp_plugin.errors import CheckpointError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.serialize import load
from gpp_plugin.runtime.random_streams import MODEL_STREAMS
from gpp_plugin.runtime.ranks.job_board import is_shared
from tests.integrations import toy
from tests.integrations.test_stage_engine import allow_fp16, make_config
from tests.ranks import run_kept_ranks

SCHEDULE = {
    "type": "OneCycle",
    "params": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.02, "cycle_first_step_size": 3},
}
FP16 = {"enabled": True, "initial_scale_power": 6, "hysteresis": 2, "loss_scale_window": 2}


def make_engine(rank: int, config: dict[str, Any], seed: int = 0) -> StageEngine:
    """Return an engine whose weights depend on ``seed`` and whose first stage has a statistic in a buffer."""
    module = toy.make_stage(toy.make_plan().stage_of_rank(rank))
    if rank < 2:
        module.register_buffer("running_mean", torch.full((2,), float(rank)))
        module.register_buffer("table", torch.full((2,), 9.0), persistent=False)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(seed)
    return toy.make_engine(rank, config, module=module)


def advance(engine: StageEngine, steps: range) -> list[Any]:
    """Train, with an overflow in step 1; return everything that must be equal after resumption."""
    seen: list[Any] = []
    for step in steps:
        toy.feed(engine, step, 2, spoil="out.bias" if step == 1 else None)
        result = engine.step()
        with MODEL_STREAMS.drawing():  # what a model would draw
            seen.append((result, torch.rand(3), random.random()))
        for buffer in engine.module.buffers():
            buffer.add_(step)
    return seen


def weights(engine: StageEngine) -> dict[str, Tensor]:
    state = {f"master.{name}": value for name, value in engine.parameter_state().items()}
    state.update({name: p.detach().clone() for name, p in engine.module.named_parameters()})
    state.update({name: b.clone() for name, b in engine.module.named_buffers() if name == "running_mean"})
    return state


def train_save_resume(config: dict[str, Any], directory: str) -> dict[str, Any]:
    rank = dist.get_rank()
    allow_fp16()
    torch.manual_seed(rank)
    random.seed(rank)
    straight = make_engine(rank, config)
    advance(straight, range(3))
    save_checkpoint([straight], directory, "middle", client_state={"epoch": 3})
    expected = advance(straight, range(3, 6)), weights(straight)
    resumed = make_engine(rank, config, seed=1)
    loaded = load_checkpoint([resumed], directory)
    assert loaded is not None
    found = advance(resumed, range(3, 6)), weights(resumed)
    counters = StepCounters(global_steps=6, skipped_steps=1, global_samples=48)
    assert straight.counters == resumed.counters == counters
    return {"expected": expected, "found": found, "loaded": loaded}


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_training_goes_on_bit_for_bit(tmp_path: Path, zero_stage: int, precision: str) -> None:
    more: dict[str, Any] = {"fp16": FP16} if precision == "fp16" else {}
    config = make_config(zero_stage, precision, scheduler=SCHEDULE, gradient_clipping=1.0, **more)
    for rank, report in enumerate(run_kept_ranks(train_save_resume, toy.NUM_RANKS, config, str(tmp_path))):
        (expected, expected_weights), (found, found_weights) = report["expected"], report["found"]
        for (result, noise, number), (result_2, noise_2, number_2) in zip(expected, found, strict=True):
            assert result == result_2
            assert torch.equal(noise, noise_2)
            assert number == number_2
        assert expected_weights.keys() == found_weights.keys()
        for name, value in expected_weights.items():
            assert torch.equal(value, found_weights[name]), (rank, name)
        loaded = report["loaded"]
        assert loaded.client_state == {"epoch": 3}
        assert loaded.directory == tmp_path / "middle"
    files = {path.name for path in (tmp_path / "middle").iterdir()}
    parts = ("00000", "00001") if zero_stage else ("00000",)
    assert files == {
        *(f"optimizer-00-front-{part}.safetensors" for part in parts),
        "optimizer-02-loss-00000.safetensors",
        *(f"model-{stem}.safetensors" for stem in ("00-front", "01-middle", "02-loss")),
        *(f"rank-0000{rank}.safetensors" for rank in range(4)),
        "state.json",
        "plan.json",
        "manifest.json",
    }
    assert (tmp_path / "latest").read_text() == "middle\n"


def save_two(directory: str) -> None:
    rank = dist.get_rank()
    engine = toy.make_engine(rank, make_config(1, "bf16"))
    for step, tag in enumerate(("first", "second")):
        toy.feed(engine, step, 1)
        engine.step()
        save_checkpoint([engine], directory, tag)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    run_kept_ranks(save_two, toy.NUM_RANKS, str(directory))
    return directory


def test_every_parameter_is_saved_once_under_its_name(saved: Path) -> None:
    models = [load_file(path) for path in sorted((saved / "second").glob("model-*.safetensors"))]
    names = [name for model in models for name in model]
    assert sorted(names) == sorted([*toy.SHAPES, "frozen.weight"])
    manifest = read_manifest(saved / "second")
    assert (manifest.num_ranks, manifest.step, manifest.optimizer) == (4, 2, "AdamW")
    for name, file in manifest.files.items():
        assert (saved / "second" / name).stat().st_size == file.sums.num_bytes


def load_and_tell(directory: str, tag: str | None, options: dict[str, Any]) -> str:
    """Return the error of a load on this rank; the engine is of another plan, or none, as told."""
    rank = dist.get_rank()
    more = {"optimizer": options["optimizer"]} if "optimizer" in options else {}
    config = make_config(options.get("zero_stage", 1), options.get("precision", "bf16"), **more)
    if options.get("fewer_stages"):
        plan = toy.make_plan()
        front = dataclasses.replace(plan.stages[0], ranks=(0, 1, 2, 3), blocks=("front", "middle", "head"))
        plan = dataclasses.replace(plan, stages=(front,), edges=())
        names = (*toy.SHAPES, *(() if options.get("smaller") else ("frozen.weight",)))
        module: nn.Module = toy.Holder(names)
        groups = StageGroups.create(plan, timeout_s=60)
        engine = toy.engine_of(module, config, plan=plan, rank=rank, groups=groups)
    else:
        engine = toy.make_engine(rank, config)
    try:
        loaded = load_checkpoint([engine], directory, tag, load_optimizer=options.get("load_optimizer", True))
    except CheckpointError as error:
        return str(error)
    if loaded is None:
        return "nothing"
    return f"loaded {loaded.directory.name}, step {engine.counters.global_steps}"


def tell(directory: Path, tag: str | None = None, **options: Any) -> str:
    texts = run_kept_ranks(load_and_tell, toy.NUM_RANKS, str(directory), tag, options)
    assert len(set(texts)) == 1, "every rank must say the same"
    return texts[0]


def test_another_plan_loads(saved: Path) -> None:
    assert tell(saved, fewer_stages=True) == "loaded second, step 2"
    plan = load(PipelinePlan, saved / "second" / "plan.json")
    assert plan == dataclasses.replace(toy.make_plan(), zero_stage=1)


def test_another_model_is_refused(saved: Path) -> None:
    text = tell(saved, fewer_stages=True, smaller=True)
    assert "has 'frozen.weight', which this run's model does not" in text


def test_another_optimizer_is_refused_before_anything_changes(saved: Path) -> None:
    text = tell(saved, optimizer={"type": "Adagrad", "params": {"lr": 0.1}})
    assert "state of AdamW, this run's optimizer is Adagrad" in text and "load_optimizer_states=False" in text


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_another_zero_stage_and_precision_load(saved: Path, zero_stage: int, precision: str) -> None:
    assert tell(saved, zero_stage=zero_stage, precision=precision) == "loaded second, step 2"


def load_weights_only(directory: str) -> dict[str, Any]:
    engine = toy.make_engine(dist.get_rank(), make_config(1, "bf16"))
    noise = torch.get_rng_state()
    loaded = load_checkpoint([engine], directory, weights_only=True)
    assert loaded is not None
    return {
        "counters": (engine.counters.global_steps, engine.counters.global_samples),
        "same noise": torch.equal(noise, torch.get_rng_state()),
        "client": loaded.client_state,
        "moved": any(not torch.equal(p, toy.initial(n)) for n, p in engine.parameter_state().items()),
    }


def test_weights_only_restores_nothing_else(saved: Path) -> None:
    for rank, found in enumerate(run_kept_ranks(load_weights_only, toy.NUM_RANKS, str(saved))):
        assert found["counters"] == (0, 0) and found["same noise"] and found["client"] == {}
        assert found["moved"] or rank == 2


def change(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


FRONT, SECOND = "optimizer-00-front-00001.safetensors", "model-02-loss.safetensors"


@pytest.mark.parametrize("way", ["no manifest", "no file", "bit", "manifest bit", "state"])
def test_broken_checkpoints_are_named_and_passed_over(saved: Path, tmp_path: Path, way: str) -> None:
    """What breaks a file of tensors in other ways is in tests/checkpoints."""
    directory = shutil.copytree(saved, tmp_path / "copy")
    second = directory / "second"
    said, breaks = {
        "no manifest": ("has no manifest: its save did not finish", (second / "manifest.json").unlink),
        "no file": (f"{FRONT} cannot be read", (second / FRONT).unlink),
        "bit": (f"{SECOND}: the bytes of", lambda: change(second / SECOND, -3)),
        "manifest bit": (
            "manifest.json is not what was written",
            lambda: change(second / "manifest.json", 300),
        ),
        "state": ("state.json is not what was written", lambda: change(second / "state.json", 30)),
    }[way]
    breaks()
    assert said in tell(directory, "second"), "asked for by name it is refused"
    assert tell(directory) == "loaded first, step 1", "else the newest whole one is loaded"


@pytest.mark.parametrize("latest", [None, "third\n", "../second\n", "second\x00\n", "\udcff"])
def test_a_broken_latest_is_passed_over(saved: Path, tmp_path: Path, latest: str | None) -> None:
    directory = shutil.copytree(saved, tmp_path / "copy")
    (directory / "latest").unlink()
    if latest is not None:
        (directory / "latest").write_bytes(latest.encode(errors="surrogateescape"))
    assert tell(directory) == "loaded second, step 2"


def test_where_nothing_was_saved_nothing_is_loaded(saved: Path, tmp_path: Path) -> None:
    assert tell(tmp_path / "later") == "nothing"
    (tmp_path / "runs").mkdir()
    (tmp_path / "data").symlink_to(saved, target_is_directory=True)
    shutil.copytree(saved / "first", tmp_path / "first.tmp-0123456789abcdef")
    (tmp_path / "notes.txt").write_text("no checkpoint")
    assert tell(tmp_path) == "nothing", "what else lies there is no checkpoint"
    assert "is no directory" in tell(tmp_path / "notes.txt")
    assert "is a checkpoint itself; load from" in tell(saved / "first")
    assert "checkpoint" in tell(tmp_path, "first") and "does not exist" in tell(tmp_path, "first")


@pytest.mark.parametrize("left", ["latest", "global_step3", "first"])
def test_what_is_left_of_a_checkpoint_is_no_empty_directory(saved: Path, tmp_path: Path, left: str) -> None:
    if left == "latest":
        (tmp_path / left).write_text("first\n")
    elif left == "first":
        shutil.copytree(saved / left, tmp_path / left)
        change(tmp_path / left / "manifest.json", 300)
    else:
        (tmp_path / left).mkdir()
    assert "no whole checkpoint is in" in tell(tmp_path)


def save_where_one_rank_cannot(directory: str) -> tuple[str, str]:
    rank = dist.get_rank()
    engine = toy.make_engine(rank, make_config())
    save_checkpoint([engine], directory, "good")
    with pytest.MonkeyPatch.context() as patch:
        if rank == 3:
            patch.setattr(engine, "own_weights", mock.Mock(side_effect=OSError("no space left on device")))
        with pytest.raises(CheckpointError) as caught:
            save_checkpoint([engine], directory, "bad")
    with pytest.raises(CheckpointError) as caught_tags:
        save_checkpoint([engine], directory, f"tag{rank}")
    dist.barrier()
    return str(caught.value), str(caught_tags.value)


def test_a_save_that_fails_on_one_rank_leaves_latest_as_it_was(tmp_path: Path) -> None:
    for text, tags in run_kept_ranks(save_where_one_rank_cannot, toy.NUM_RANKS, str(tmp_path)):
        assert "rank 3" in text and "no space left" in text
        assert "different tags" in tags
    assert (tmp_path / "latest").read_text() == "good\n"
    assert {path.name for path in tmp_path.iterdir()} == {"good", "latest"}, "nothing else may stay"


def save_behind(directory: str) -> dict[str, Any]:
    """Save in the background, train on meanwhile, and see what was saved; then let a rank fail."""
    rank = dist.get_rank()
    engine = toy.make_engine(rank, make_config(2, "bf16"))
    toy.feed(engine, 0, 1)
    engine.step()
    wanted = weights(engine)
    background = BackgroundSave(timeout_s=60)
    save_checkpoint([engine], directory, "first", background=background)
    toy.feed(engine, 1, 1)
    engine.step()
    assert background.is_busy
    background.wait(engine)
    assert not background.is_busy
    again = toy.make_engine(rank, make_config(2, "bf16"))
    load_checkpoint([again], directory)
    same = all(torch.equal(value, wanted[name]) for name, value in weights(again).items())

    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(os, "fsync", mock.Mock(side_effect=OSError(28, "No space left on device")))
        save_checkpoint([engine], directory, "second", background=background)
        with pytest.raises(CheckpointError) as caught:
            background.wait(engine)
    dist.barrier()
    return {"same": same, "error": str(caught.value), "is_shared": is_shared(caught.value)}


def test_a_checkpoint_is_written_behind_the_training(tmp_path: Path) -> None:
    for answer in run_kept_ranks(save_behind, toy.NUM_RANKS, str(tmp_path)):
        assert answer["same"], "what was saved is what was there when it was asked for"
        assert "second" in answer["error"] and "No space left" in answer["error"]
        assert answer["is_shared"], "raised on every rank: none failed before the others"
    assert (tmp_path / "latest").read_text() == "first\n"
    assert {path.name for path in tmp_path.iterdir()} == {"first", "latest"}
