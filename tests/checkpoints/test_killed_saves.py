"""Whenever a save dies, the tag names the old checkpoint or the new one, whole; the next save clears what is left."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpp_plugin.engine.checkpoints import save_checkpoint
from gpp_plugin.engine.checkpoints.conversion import write_checkpoint
from gpp_plugin.errors import CheckpointError
from gpp_plugin.runtime.ranks.whereabouts import FirstFailure
from tests.checkpoints.killed_saves import latest_or_none, number_in, save_and_die, state_of


@pytest.mark.parametrize("loses_power", [False, True], ids=["killed", "power lost"])
@pytest.mark.parametrize("is_again", [False, True], ids=["fresh tag", "tag saved again"])
def test_old_or_new_exactly(tmp_path: Path, is_again: bool, loses_power: bool) -> None:
    """Once for every call that changes the disk."""
    found = []
    for at in range(1, 1000):
        directory = tmp_path / str(at)
        write_checkpoint(state_of(1), directory, "same" if is_again else "before")
        died = save_and_die(directory, "same", 2, at=at, loses_power=loses_power)
        named = latest_or_none(directory)
        assert named in ("same", "before"), "latest is the old one or the new one, never a part"
        if is_again or named == "same":
            found.append(number_in(directory, "same"))
        else:
            try:
                found.append(number_in(directory, "same"))
            except CheckpointError as error:
                assert "does not exist" in str(error), "not there, or whole"
                found.append(1)
        if not is_again:
            assert number_in(directory, "before") == 1, "another tag is not touched"
        write_checkpoint(state_of(3), directory, "same")
        assert number_in(directory, "same") == 3
        assert sorted(os.listdir(directory)) == sorted(
            {"same", "latest"} | ({"before"} - ({"before"} if is_again else set()))
        )
        if not died:
            break
    assert not died and len(found) > 15
    assert found == sorted(found) and set(found) == {1, 2}, "old until it is new"
    print(f"{len(found)} saves ended at every call: {found.count(1)} old, {found.count(2)} new")


def test_a_full_disk_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(state_of(1), tmp_path, "same")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_checkpoint(state_of(2), tmp_path, "same")
    assert number_in(tmp_path, "same") == 1
    assert sorted(os.listdir(tmp_path)) == ["latest", "same"]


def test_nobody_waits_for_the_part_of_a_dead_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written behind the training: rank 0's thread looks for the others' parts, and Python waits for the thread."""
    gone = FirstFailure(rank=1, stage="text", where="in train_batch", why="its process is gone")
    monkeypatch.setattr(save_checkpoint, "job_board", lambda: SimpleNamespace(first=gone))
    with pytest.raises(
        CheckpointError, match=r"^rank 1 \(stage 'text'\) failed first, in train_batch: its process"
    ):
        save_checkpoint.BackgroundSave(timeout_s=5.0)._await_parts(tmp_path, 2)
