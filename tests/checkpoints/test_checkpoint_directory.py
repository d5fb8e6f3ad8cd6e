"""Names that stay inside a directory of checkpoints, and directories that appear whole."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
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


# ---- two jobs in one directory ---------------------------------------------------------------------------

SAVING = """
import sys
from pathlib import Path
from gpp_plugin.engine.checkpoints import checkpoint_directory as places
root, tag = Path(sys.argv[1]), sys.argv[2]
written = places.begin(root, tag)
places.write_synced(written / "file", "theirs")
print(written.name, flush=True)
sys.stdin.readline()
places.finish(root, tag, written, save_latest=False)
"""


@contextlib.contextmanager
def another_job(root: Path, tag: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run another process in the middle of a save; give it and what it writes."""
    with subprocess.Popen(
        [sys.executable, "-c", SAVING, str(root), tag],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def left(root: Path) -> list[str]:
    return sorted(name for name in os.listdir(root) if name != "latest")


@pytest.mark.parametrize("tag", ["other", "same"])
def test_a_save_leaves_that_of_a_living_job_alone_though_it_is_stopped(tag: str, tmp_path: Path) -> None:
    save(tmp_path, "same", "old")
    with another_job(tmp_path, tag) as (process, written):
        os.kill(process.pid, signal.SIGSTOP)
        save(tmp_path, "same", "ours")
        places.clear_leftovers(tmp_path)
        assert (tmp_path / written / "file").read_text() == "theirs"
        assert (tmp_path / "same" / "file").read_text() == "ours"
        os.kill(process.pid, signal.SIGCONT)
        process.communicate("\n", timeout=60)
        assert process.returncode == 0
    assert left(tmp_path) == sorted({"same", tag}), "each has finished, and nothing else is left"
    assert (tmp_path / tag / "file").read_text() == "theirs", "of one tag the last save counts"


def test_what_a_killed_job_left_is_cleared(tmp_path: Path) -> None:
    with another_job(tmp_path, "tag") as (process, written):
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie still has its number
        assert {written} < set(left(tmp_path))
        save(tmp_path, "other", "ours")
        assert left(tmp_path) == ["other"]


@pytest.mark.parametrize(
    ("part", "value", "missed", "is_kept"),
    [
        (4, "0" * 16, 9.0, True),
        (4, "0" * 16, 11.0, False),
        (3, "1", 0.0, False),  # the number is another process's by now
        (None, "", 1000.0, True),  # here it is looked for, and was only stopped
    ],
)
def test_who_is_dead(part: int | None, value: str, missed: float, is_kept: bool, tmp_path: Path) -> None:
    """Another host's process is heard of by the time of its file."""
    written = places.begin(tmp_path, "tag")
    aside = tmp_path / f"same.old-{written.name[-16:]}"
    aside.mkdir()
    (tmp_path / f".latest.{written.name[-16:]}").touch()
    (owner,) = tmp_path.glob(".owner-*")
    if part is not None:
        parts = owner.name.split("-")
        parts[part] = value
        owner = owner.rename(tmp_path / "-".join(parts))
    then = owner.stat().st_mtime - missed * places.BEAT_S
    os.utime(owner, (then, then))
    before = left(tmp_path)
    places.clear_leftovers(tmp_path)
    assert left(tmp_path) == (before if is_kept else ["same"]), "what was moved aside is put back"


def test_a_save_that_is_given_up_leaves_no_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places.abandon(places.begin(tmp_path, "tag"))
    assert left(tmp_path) == []
    monkeypatch.setattr(places, "BEAT_S", 0.01)
    written = places.begin(tmp_path, "tag")
    (owner,) = tmp_path.glob(".owner-*")
    os.utime(owner, (1.0, 1.0))
    beating = [each for each in threading.enumerate() if each.name == "gpp-save-owner"][-1]
    beating.join(0.2)
    assert owner.stat().st_mtime > 1.0, "it says that it is alive"
    places.finish(tmp_path, "tag", written, save_latest=False)
    beating.join(10.0)
    assert not beating.is_alive() and left(tmp_path) == ["tag"]
