"""Attempts to run code, or to read or write outside, by file, name, tag, index and link: none succeeds."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpp_plugin.engine.checkpoints import checkpoint_directory as places
from gpp_plugin.engine.checkpoints.checkpoint_files import text_sum
from gpp_plugin.engine.checkpoints.conversion import (
    read_checkpoint,
    read_torch,
    read_universal,
    write_checkpoint,
    write_universal,
)
from gpp_plugin.errors import CheckpointError
from tests.checkpoints.killed_saves import state_of

MODEL = "model-00-whole.safetensors"


class Bomb:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


@pytest.fixture
def bomb(tmp_path: Path) -> Bomb:
    return Bomb(tmp_path / "ran")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_checkpoint(state_of(1), tmp_path / "inside", "tag")


def edit_manifest(target: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest, and make its checksum fit: an attacker can."""
    path = target / "manifest.json"
    plain = json.loads(path.read_text())
    change(plain["manifest"])
    body = json.dumps(plain["manifest"], separators=(",", ":"))
    path.write_text(f'{{"format":2,"checksum":"{text_sum(body)}",\n"manifest":{body}}}\n')


def refused(target: Path, bomb: Bomb) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(target)
    assert not bomb.path.exists(), "code was run"
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "name", ["manifest.json", "state.json", MODEL, "optimizer-00-whole-00000.safetensors"]
)
@pytest.mark.parametrize("way", ["pickle", "torch.save"])
def test_pickles_in_place_of_files(target: Path, bomb: Bomb, name: str, way: str) -> None:
    if way == "pickle":
        (target / name).write_bytes(pickle.dumps(bomb))
    else:
        torch.save({"x": bomb}, target / name)
    assert name in refused(target, bomb)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "..", ".hidden", "a\x00b", ""])
def test_names_of_files_that_lead_outside(target: Path, bomb: Bomb, name: str) -> None:
    shutil.copy(target / MODEL, target.parent / "outside.safetensors")

    def rename(manifest: dict[str, Any]) -> None:
        manifest["files"][name] = manifest["files"].pop(MODEL)

    edit_manifest(target, rename)
    assert "which is none of a checkpoint" in refused(target, bomb)


@pytest.mark.parametrize("name", [MODEL, "state.json", "manifest.json"])
def test_links_that_lead_outside(target: Path, bomb: Bomb, name: str, tmp_path: Path) -> None:
    shutil.move(target / name, tmp_path / "outside")
    (target / name).symlink_to(tmp_path / "outside")
    assert "a link that leads out of" in refused(target, bomb)


@pytest.mark.parametrize("name", [MODEL, "state.json", "manifest.json"])
def test_pipes_are_not_waited_for(target: Path, bomb: Bomb, name: str) -> None:
    (target / name).unlink()
    os.mkfifo(target / name)
    assert "manifest" in refused(target, bomb) or name in refused(target, bomb)
    os.mkfifo(target.parent / "fifo")
    os.replace(target.parent / "fifo", target.parent / "latest")
    with pytest.raises(CheckpointError, match="latest cannot be read"):
        places.read_latest(target.parent)


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest["files"][MODEL]["tensors"]["a"].update(shape=[-4, 3]),
        lambda manifest: manifest["files"][MODEL]["tensors"]["a"].update(shape=[1 << 40, 1 << 40]),
        lambda manifest: manifest["files"][MODEL]["tensors"]["a"].update(start=1 << 50),
        lambda manifest: manifest["files"][MODEL]["tensors"]["a"].update(count="120"),
        lambda manifest: manifest["files"][MODEL]["sums"].update(num_bytes=1 << 60),
        lambda manifest: manifest["numbers"]["a"].update(step={"$eval": "1"}),
        lambda manifest: manifest["numbers"]["a"].update(step={"$tensor": "../../outside"}),
        lambda manifest: manifest["groups"][0].update(options={"lr": {"$scalar": ["object", 1]}}),
        lambda manifest: manifest.update(files=[]),
        lambda manifest: manifest.update(unknown=1),
    ],
)
def test_manifests_that_lie(target: Path, bomb: Bomb, change: Callable[[dict[str, Any]], None]) -> None:
    edit_manifest(target, change)
    refused(target, bomb)


def test_a_deep_manifest(target: Path, bomb: Bomb) -> None:
    (target / "manifest.json").write_text("[" * 100_000)
    assert "manifest.json is not what was written" in refused(target, bomb)


def test_a_tag_that_is_a_link_is_replaced_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "tag").symlink_to(outside)
    write_checkpoint(state_of(1), inside, "tag")
    assert os.listdir(outside) == ["kept"] and not (inside / "tag").is_symlink()
    assert places.read_latest(inside) == "tag"


def test_files_of_torch_run_nothing(tmp_path: Path, bomb: Bomb) -> None:
    torch.save({"module": {"a": torch.zeros(1)}, "optimizer": bomb}, tmp_path / "one.pt")
    (tmp_path / "two.pt").write_bytes(pickle.dumps(bomb, protocol=2))
    for name in ("one.pt", "two.pt"):
        with pytest.raises(CheckpointError, match="cannot be read as tensors and plain values"):
            read_torch(tmp_path / name)
    write_universal(state_of(1), tmp_path / "universal")
    torch.save({"param": bomb}, tmp_path / "universal" / "zero" / "a" / "exp_avg.pt")
    with pytest.raises(CheckpointError, match="cannot be read as tensors and plain values"):
        read_universal(tmp_path / "universal")
    assert not bomb.path.exists()


def test_names_of_parameters_make_no_paths(tmp_path: Path) -> None:
    state = state_of(1)
    state.state["../../outside"] = state.state["a"]
    state.weights["../../outside"] = state.weights["a"]
    with pytest.raises(CheckpointError, match="cannot be the name of a directory"):
        write_universal(state, tmp_path / "x" / "universal")
    assert not (tmp_path / "outside").exists()
