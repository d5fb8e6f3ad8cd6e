"""Names that stay inside a directory of checkpoints, and directories that appear whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpp_plugin.engine.checkpoints import checkpoint_directory as places
from gpp_plugin.errors import CheckpointError

OUTSIDE = [
    "",
    "..",
    "a/b",
    "a\\b",
    "a\x00b",
    "\x1b[2J",
    ".hidden",
    "latest",
    "x.tmp-0123456789abcdef",
    "a" * 201,
    " ",
    "a.",
    "\u202egnp.exe",
]


@pytest.mark.parametrize("tag", OUTSIDE)
def test_tags_that_lead_elsewhere_are_refused(tag: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="give a name of one directory"):
        places.check_tag(tag)
    (tmp_path / "latest").write_bytes(f"{tag}\n".encode())
    with pytest.raises(CheckpointError):
        places.read_latest(tmp_path)


@pytest.mark.parametrize("tag", ["global_step100", "best", "epoch 3", "größe", "a..b", "2026-01-02T03:04"])
def test_plain_names_are_tags(tag: str, tmp_path: Path) -> None:
    assert places.check_tag(tag) == tag
    written = places.begin(tmp_path, tag)
    places.finish(tmp_path, tag, written, save_latest=True)
    assert places.read_latest(tmp_path) == tag
    assert places.directory_of(tmp_path, tag) == tmp_path / tag


def test_links_that_lead_outside_are_refused(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (outside / "tag").write_text("inner\n")
    (root / "inner").mkdir()
    (root / "link").symlink_to(outside)
    (root / "best").symlink_to("inner")
    with pytest.raises(CheckpointError, match="is a link that leads out of"):
        places.directory_of(root, "link")
    assert places.directory_of(root, "best").name == "best", "a link that stays inside is as good as a name"
    (root / "latest").symlink_to(outside / "tag")
    with pytest.raises(CheckpointError, match="is a link that leads out of"):
        places.read_latest(root)
    places.write_latest(root, "inner")
    assert (outside / "tag").read_text() == "inner\n" and places.read_latest(root) == "inner"
    assert not (root / "latest").is_symlink()


def save(root: Path, tag: str, text: str, **options: bool) -> None:
    written = places.begin(root, tag)
    places.write_synced(written / "file", text)
    places.finish(root, tag, written, **{"save_latest": True, **options})


def test_a_tag_is_saved_again(tmp_path: Path) -> None:
    save(tmp_path, "same", "old")
    save(tmp_path, "same", "new", save_latest=False)
    assert (tmp_path / "same" / "file").read_text() == "new"
    assert sorted(os.listdir(tmp_path)) == ["latest", "same"]


def test_leftovers_are_cleared_and_a_tag_between_two_renames_is_put_back(tmp_path: Path) -> None:
    save(tmp_path, "one", "old")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    root = tmp_path / "root"
    save(root, "one", "old")
    os.rename(root / "one", root / "one.old-0123456789abcdef")
    (root / "one.tmp-0123456789abcdef").mkdir()
    (root / "two.tmp-0123456789abcdef").symlink_to(outside)
    (root / ".latest.0123").touch()
    assert (places.directory_of(root, "one") / "file").read_text() == "old"
    assert places.tags_in(root) == ["one"]
    places.clear_leftovers(root)
    assert sorted(os.listdir(root)) == ["latest", "one"]
    assert (outside / "kept").exists(), "a link is removed, not what it leads to"


def test_retention() -> None:
    tags = [f"global_step{step}" for step in (100, 20, 60, 80, 40)] + ["best", "global_stepx"]

    def gone(**keep: int | None) -> list[str]:
        return places.outdated(tags, **{"keep_last": None, "keep_every": None, **keep})

    assert gone() == gone(keep_every=50) == []
    assert gone(keep_last=2) == ["global_step20", "global_step40", "global_step60"]
    assert gone(keep_last=2, keep_every=40) == ["global_step20", "global_step60"]
    assert gone(keep_last=9) == []
