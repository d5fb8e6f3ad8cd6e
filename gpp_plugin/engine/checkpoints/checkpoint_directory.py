"""A directory of checkpoints: names that stay inside it, and directories that appear whole or not at all.

    <dir>/latest                          the tag that is loaded where none is named
    <dir>/<tag>/                          a whole checkpoint
    <dir>/<tag>.tmp-0123456789abcdef/     one that is being written, or was when its job died
    <dir>/<tag>.old-0123456789abcdef/     what a tag named before it was saved again
    <dir>/.owner-0123456789abcdef-...     which process writes them, there before they are and until they are gone

A save writes and syncs a ``.tmp-`` directory and renames it. A tag that is there is moved aside first: killed
between the two renames, the job leaves no ``<tag>``, and its ``.old-`` is what the tag names, for readers and for the
next save, which puts it back. So at any instant the tag names the old checkpoint or the new one, and both are whole.

A save clears what the dead have left, and leaves alone what the living write: several jobs may save in one directory,
and of one tag the last save counts. The name of an owner's file says process and host, its time when it was last alive.

Source: this project
Tests: tests/checkpoints/test_checkpoint_directory.py, tests/checkpoints/test_killed_saves.py
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import BinaryIO

from gpp_plugin.errors import CheckpointError
from gpp_plugin.runtime.ranks.failure_board import RankProcess

LATEST = "latest"
MOST_TAG_CHARACTERS = 200
_SUFFIX = re.compile(r"^(?P<tag>.+)\.(?P<kind>tmp|old)-(?P<owner>[0-9a-f]{16})$")
_OWNER = re.compile(r"^\.owner-(?P<owner>[0-9a-f]{16})-(?P<pid>\d+)-(?P<start>\d*)-(?P<host>[0-9a-f]{16})$")
_OWN_TAG = re.compile(r"^global_step(\d+)$")


# ---- names -----------------------------------------------------------------------------------------------


def check_tag(tag: str, *, where: str = "tag") -> str:
    """Return ``tag``, a name of one directory inside another.

    Args:
        where: what said it, for the error.

    Raises:
        CheckpointError: it would lead elsewhere, or cannot be distinguished from this module's own files.
    """
    wrong = ""
    if not isinstance(tag, str) or not tag:
        wrong = "empty or no string"
    elif len(tag.encode(errors="replace")) > MOST_TAG_CHARACTERS:
        wrong = f"longer than {MOST_TAG_CHARACTERS} bytes"
    elif "/" in tag or "\\" in tag or os.sep in tag:
        wrong = "a path"
    elif not tag.isprintable():
        wrong = "with characters that cannot be printed"
    elif tag.startswith(".") or tag.endswith((".", " ")) or tag.startswith(("~", " ")):
        wrong = "hidden, or not a plain name"
    elif tag == LATEST or _SUFFIX.match(tag):
        wrong = "a name that checkpoints use themselves"
    if wrong:
        raise CheckpointError(
            f"{where} {str(tag)[:100]!r} is {wrong}; give a name of one directory, such as 'global_step100'"
        )
    return tag


def check_inside(directory: Path, path: Path) -> Path:
    """Return ``path`` with its links followed.

    Raises:
        CheckpointError: it lies outside ``directory``: a link leads there.
    """
    root, found = Path(os.path.realpath(directory)), Path(os.path.realpath(path))
    if not found.is_relative_to(root):
        raise CheckpointError(
            f"{path} is a link that leads out of {directory}, to {found}; copy what it means into the directory"
        )
    return found


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading; a pipe would never open.

    Raises:
        OSError: it cannot be read, or is none.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")
    return path.open("rb")


# ---- writing ---------------------------------------------------------------------------------------------


def sync_directory(path: Path) -> None:
    """Bring a directory's names to the disk: a rename or a new file is lost with the power otherwise."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_synced(path: Path, text: str) -> None:
    """Write a new file and bring it to the disk."""
    with path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def begin(directory: Path, tag: str) -> Path:
    """Clear what dead saves left, and return a new directory to write the checkpoint ``tag`` in."""
    directory.mkdir(parents=True, exist_ok=True)
    clear_leftovers(directory)
    owner = secrets.token_hex(8)
    process = RankProcess.own()
    file = directory / f".owner-{owner}-{process.pid}-{process.start}-{_host_of(process)}"
    file.touch()  # says all by its name, as a file is there at once and its content is not
    made = directory / f"{tag}.tmp-{owner}"
    try:
        made.mkdir()
        threading.Thread(target=_beat, args=(file,), name="gpp-save-owner", daemon=True).start()
    except BaseException:
        abandon(made)
        raise
    return made


def finish(directory: Path, tag: str, written: Path, *, save_latest: bool) -> Path:
    """Let ``tag`` name what is in ``written``, whole and synced; then ``latest``. Return the checkpoint's directory."""
    sync_directory(written)
    target, owner = directory / tag, _owner_of(written)
    aside = directory / f"{tag}.old-{owner}"
    while True:
        if os.path.lexists(target):
            _remove(aside)
            with contextlib.suppress(FileNotFoundError):  # another job's save has moved it
                os.rename(target, aside)
        try:
            os.rename(written, target)
            break
        except OSError:
            if not os.path.lexists(target):  # else another job's save of this tag came between
                raise
    sync_directory(directory)
    if save_latest:
        write_latest(directory, tag, owner=owner)
    _remove(aside)
    _release(directory, owner)
    return target


def write_latest(directory: Path, tag: str, *, owner: str = "") -> None:
    """Let ``latest`` name ``tag``, at once."""
    temporary = directory / f".{LATEST}.{owner or secrets.token_hex(8)}"
    write_synced(temporary, f"{tag}\n")
    os.replace(temporary, directory / LATEST)
    sync_directory(directory)


def abandon(written: Path) -> None:
    """Remove what a save that failed has written; what cannot be removed stays for the next one to clear."""
    shutil.rmtree(written, ignore_errors=True)
    with contextlib.suppress(OSError):
        _release(written.parent, _owner_of(written))


def clear_leftovers(directory: Path) -> None:
    """Remove what saves that died have left; a tag that died between its two renames is put back first."""
    paths = sorted(directory.iterdir())
    # listed behind them: an owner's file is there before what it owns
    owners = [match for path in directory.iterdir() if (match := _OWNER.match(path.name))]
    alive = {match["owner"] for match in owners if _is_alive(directory, match)}
    for path in paths:
        match = _SUFFIX.match(path.name)
        if _owner_of(path) in alive:
            continue
        if match is not None and match["kind"] == "old" and not os.path.lexists(directory / match["tag"]):
            with contextlib.suppress(FileNotFoundError):  # another job's save has put it back
                os.rename(path, directory / match["tag"])
        elif match is not None:
            _remove(path)
        elif path.name.startswith(f".{LATEST}."):
            path.unlink(missing_ok=True)
    for match in owners:  # last, so that what they own is never without
        if match["owner"] not in alive:
            _release(directory, match["owner"])


def _remove(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def forget(directory: Path, tags: Iterable[str]) -> None:
    """Remove checkpoints; killed on the way, each is there whole or is a leftover."""
    for tag in tags:
        leftover = directory / f"{tag}.tmp-{secrets.token_hex(8)}"
        with contextlib.suppress(FileNotFoundError):  # another job's retention has removed it
            os.rename(directory / tag, leftover)
            _remove(leftover)


def outdated(tags: Collection[str], *, keep_last: int | None, keep_every: int | None) -> list[str]:
    """Return which checkpoints retention releases, oldest first; only those whose tags the engine made itself.

    Args:
        keep_last: so many of the newest stay; None: all.
        keep_every: those of every so many steps stay as well; None: none.

    >>> outdated(["global_step1", "global_step2", "best", "global_step3"], keep_last=1, keep_every=2)
    ['global_step1']
    """
    if keep_last is None:
        return []
    own = {int(match[1]): tag for tag in tags if (match := _OWN_TAG.match(tag))}
    steps = sorted(own)
    old = steps[: max(len(steps) - keep_last, 0)]
    return [own[step] for step in old if keep_every is None or step % keep_every]


def is_own_tag(tag: str) -> bool:
    """Return whether a tag is as the engine makes it where none is given."""
    return _OWN_TAG.match(tag) is not None


def is_unfinished(name: str) -> bool:
    """Return whether a directory's name is that of a save that did not finish."""
    match = _SUFFIX.match(name)
    return match is not None and match["kind"] == "tmp"


# ---- owners of what is unfinished ------------------------------------------------------------------------

BEAT_S = 6.0
"""How often a process that saves says that it is alive, for other hosts; on its own host it is looked for."""
MOST_MISSED = 10


def _owner_of(path: Path) -> str:
    """Return who owns what a save has not finished: the end of its name."""
    return path.name[-16:]


def _release(directory: Path, owner: str) -> None:
    for path in directory.glob(f".owner-{owner}-*"):
        path.unlink(missing_ok=True)


def _beat(file: Path) -> None:
    """Say that this process is alive as long as the owner's file is there; by the clock of the file system."""
    while True:
        time.sleep(BEAT_S)
        try:
            os.utime(file)
        except FileNotFoundError:
            return
        except OSError:
            continue  # a file server that is away for a while


def _is_alive(directory: Path, owner: re.Match[str]) -> bool:
    """Return whether an owner may still write: on this host its process is there, on others it is heard of."""
    # A stopped process is there and will go on. One of this number that began at another time is another process.
    own = RankProcess.own()
    if own.space and owner["host"] == _host_of(own):
        return RankProcess(own.space, int(owner["pid"]), owner["start"]).state() != "dead"
    try:
        beat = (directory / owner[0]).stat().st_mtime
        with tempfile.TemporaryFile(dir=directory) as probe:
            return os.fstat(probe.fileno()).st_mtime - beat <= MOST_MISSED * BEAT_S
    except FileNotFoundError:
        return False


def _host_of(process: RankProcess) -> str:
    """Return what all processes have that see each other's numbers, and no others, for the name of a file."""
    return hashlib.blake2b(process.space.encode(), digest_size=8).hexdigest()


# ---- finding ---------------------------------------------------------------------------------------------


def read_latest(directory: Path) -> str:
    """Return the tag that ``latest`` names.

    Raises:
        CheckpointError: it is not there, or names nothing inside the directory.
    """
    path = directory / LATEST
    try:
        check_inside(directory, path)
        with open_regular(path) as stream:
            text = stream.read(4096).decode()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not text; a tag is expected") from error
    return check_tag(text.removesuffix("\n"), where=f"{path} holds the tag, which")


def directory_of(directory: Path, tag: str) -> Path:
    """Return where the checkpoint ``tag`` lies: of a save that died between its two renames, what was there before.

    Raises:
        CheckpointError: there is none, or it lies outside the directory.
    """
    target = directory / check_tag(tag)
    if not os.path.lexists(target) and directory.is_dir():
        moved = [
            path
            for path in sorted(directory.iterdir())
            if (match := _SUFFIX.match(path.name)) and (match["tag"], match["kind"]) == (tag, "old")
        ]
        target = moved[0] if moved else target
    check_inside(directory, target)
    if not target.is_dir():
        raise CheckpointError(f"checkpoint {directory / tag} does not exist; load another tag")
    return target


def tags_in(directory: Path) -> list[str]:
    """Return the names of the checkpoints there may be, those that were moved aside among them."""
    if not directory.is_dir():
        return []
    found = set()
    for path in directory.iterdir():
        match = _SUFFIX.match(path.name)
        tag = path.name if match is None else match["tag"] if match["kind"] == "old" else ""
        try:
            if tag and path.is_dir():
                found.add(check_tag(tag))
        except CheckpointError:
            continue
    return sorted(found)
