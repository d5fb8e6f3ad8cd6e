"""Whenever a save dies, the tag names the old checkpoint or the new one, whole; the next save clears what is left."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpp_plugin.engine.checkpoints import save_checkpoint
from gpp_plugin.engine.checkpoints.conversion import write_checkpoint
from gpp_plugin.errors import CheckpointError
from gpp_plugin.ir.serialize import to_plain
from gpp_plugin.runtime.ranks.failure_board import FirstFailure, SeenRank
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


@pytest.mark.parametrize("first", [1, 2], ids=["that failed", "that ended since another failed"])
def test_nobody_waits_for_the_part_of_a_dead_rank(
    first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written behind the training: rank 0's thread looks for the others' parts, and Python waits for the thread."""
    gone = FirstFailure(rank=first, stage="text", where="in train_batch", why="its process is gone")
    for rank in (0, 2):
        (tmp_path / save_checkpoint._PART.format(rank=rank)).touch()
    board = SimpleNamespace(
        first=gone, look=lambda ranks: [SeenRank(rank=r, state="dead", facts={}) for r in ranks]
    )
    monkeypatch.setattr(save_checkpoint, "job_board", lambda: board)
    with pytest.raises(
        CheckpointError, match=rf"^rank {first} \(stage 'text'\) failed first, in train_batch: its process"
    ):
        save_checkpoint.BackgroundSave(timeout_s=5.0)._await_parts(tmp_path, 3)


def test_the_part_of_a_rank_that_still_writes_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = FirstFailure(rank=1, stage="text", where="in train_batch", why="ValueError")
    written = json.dumps(to_plain(save_checkpoint.WrittenPart(files={}, optimizer="", numbers={}, groups=())))
    asked = []

    def look(ranks: list[int]) -> list[SeenRank]:
        asked.append(ranks)
        if len(asked) == 3:  # it writes its part and ends, just before it is looked at
            (tmp_path / save_checkpoint._PART.format(rank=1)).write_text(written)
        return [SeenRank(rank=1, state="alive" if len(asked) < 3 else "ended", facts={})]

    (tmp_path / save_checkpoint._PART.format(rank=0)).write_text(written)
    monkeypatch.setattr(save_checkpoint, "job_board", lambda: SimpleNamespace(first=failure, look=look))
    parts = save_checkpoint.BackgroundSave(timeout_s=5.0)._await_parts(tmp_path, 2)
    assert len(parts) == 2 and asked == [[1]] * 3
