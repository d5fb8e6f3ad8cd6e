"""Saves of one process that die at a given call, in a forked child, and what is left of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gpp_plugin.engine.checkpoints import checkpoint_directory as places
from gpp_plugin.engine.checkpoints.conversion import WholeState, read_checkpoint, write_checkpoint
from gpp_plugin.errors import CheckpointError

CALLS = ("fsync", "rename", "replace", "mkdir", "rmdir", "unlink")
"""Functions of `os` through which a save changes what is on the disk, beside `write`."""


def state_of(number: int) -> WholeState:
    """Return a state whose every tensor says ``number``."""
    weights = {name: torch.full((40, 3), float(number)) for name in ("a", "b", "c")}
    state = {
        name: {"step": torch.tensor(float(number)), "exp_avg": torch.full((40, 3), float(number))}
        for name in weights
    }
    return WholeState(
        weights=weights, optimizer="AdamW", state=state, groups=[(list(weights), {"lr": 0.1})], step=number
    )


def number_in(directory: Path, tag: str) -> int:
    """Return what all tensors of a checkpoint say; every byte of it is checked."""
    state = read_checkpoint(places.directory_of(directory, tag))
    tensors = [*state.weights.values(), *(kept["exp_avg"] for kept in state.state.values())]
    numbers = {float(value) for tensor in tensors for value in tensor.reshape(-1)} | {float(state.step)}
    assert len(numbers) == 1, "a checkpoint of two saves"
    return int(numbers.pop())


def save_and_die(directory: Path, tag: str, number: int, *, at: int, loses_power: bool) -> bool:
    """Save in a child that is killed before its call number ``at``; return whether it was, and not done before."""
    child = os.fork()
    if child == 0:
        try:
            _die_at(directory, at, loses_power)
            write_checkpoint(state_of(number), directory, tag)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def _die_at(directory: Path, at: int, loses_power: bool) -> None:
    synced: set[tuple[int, int]] = set()

    def die() -> None:
        if loses_power:
            lose_unsynced(directory, synced)
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    strike_at(at, die, note_synced=synced.add)


def strike_at(at: int, strike: Callable[[], None], *, note_synced: Callable[[tuple[int, int]], None]) -> None:
    """Call ``strike`` in this process before the call number ``at`` to one of `CALLS` or to a file's ``write``.

    Args:
        note_synced: is told each file that was brought to the disk, by its number and size.
    """
    seen = 0
    sync = os.fsync

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def do(*args: Any, **options: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == at:
                strike()
            return call(*args, **options)

        return do

    def noted(handle: int) -> None:
        sync(handle)
        found = os.fstat(handle)
        note_synced((found.st_ino, found.st_size))

    for name in CALLS:
        setattr(os, name, counted(noted if name == "fsync" else getattr(os, name)))
    opened = Path.open

    def open_counted(path: Path, *args: Any, **options: Any) -> Any:
        stream = opened(path, *args, **options)
        if "w" in (args[0] if args else options.get("mode", "r")):
            stream.write = counted(stream.write)
        return stream

    Path.open = open_counted  # type: ignore[method-assign]


def lose_unsynced(directory: Path, synced: set[tuple[int, int]]) -> None:
    """Cut every file of this save that was not brought to the disk as it is now: what a power cut may leave."""
    for path in directory.rglob("*"):
        found = path.stat()
        is_own = ".tmp-" in str(path) or path.name.startswith(".latest")
        if path.is_file() and is_own and (found.st_ino, found.st_size) not in synced:
            os.truncate(path, found.st_size // 2)


def latest_or_none(directory: Path) -> str | None:
    """Return the tag that `latest` names, None where there is none."""
    try:
        return places.read_latest(directory)
    except CheckpointError:
        return None
