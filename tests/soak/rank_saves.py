"""Saves of live ranks that are killed, lose their power or run out of disk: the tag names the old checkpoint or the new one.

python -m tests.soak saves                        130 saves, each of a job of its own; the last 30 with weights in parts
python -m tests.soak saves --first 20
python -m tests.soak saves --after 100 --first 6

Before one call of one rank that changes the disk: kill -9 of that rank; the loss of power, where all ranks die and what
no rank has brought to the disk is cut; a full disk. Fresh tags and tags saved again, at once and behind the training. Then
every byte of what is there is read and compared with the weights that were saved.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fault_runs import Ended, run_job

RANKS = 2
SETUPS: dict[str, tuple[str, dict[str, Any], int]] = {
    "two stages": ("two_branch", {"stages": RANKS}, 0),
    "ZeRO 3": ("two_branch", {"stages": 1, "data_parallel": RANKS}, 3),
    "tensor ranks": ("gpt2", {"stages": 1, "tensor_parallel": RANKS}, 0),
}
"""Model, block of the configuration, ZeRO stage."""

PARTED = ("ZeRO 3", "tensor ranks")
IN_PARTS_FROM = 100
"""The cases from here on are of weights that ranks hold in parts."""

KINDS = ("kill", "power", "full disk")
MOST_CALLS = 24
"""A case strikes before a call up to this one; some saves have fewer."""


@dataclass(frozen=True, kw_only=True)
class SaveSettings:
    """One case.

    Args:
        at: before which of the rank's calls that change the disk it strikes.
        is_again: the tag is there already.
        setup: of `SETUPS`.
    """

    directory: str
    kind: str
    rank: int
    at: int
    is_again: bool
    is_behind: bool
    setup: str = "two stages"
    fault: None = None

    @property
    def saved(self) -> Path:
        """Return the directory of the checkpoints."""
        return Path(self.directory) / "saved"


def save_and_strike(settings: SaveSettings) -> None:
    """Save twice on every rank; the second time something happens to one of them."""
    import torch

    from gpp_plugin.errors import CheckpointError

    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    from tests.integrations.engine_jobs import B, config_of, make_engine, steps
    from tests.models import build

    name, own, zero = SETUPS[settings.setup]
    model, make_batch = build(name)
    block = {**own, "checkpoint": {"async_save": settings.is_behind}}
    config = config_of(zero_optimization={"stage": zero}, block=block)
    engine = make_engine(model, make_batch(B, 0), config)
    folder = Path(settings.directory)
    for number, tag in ((1, "same" if settings.is_again else "before"), (2, "same")):
        steps(engine, [make_batch(B, number)])
        state = engine.gather_state_dict()
        if rank == 0:
            torch.save(state, folder / f"expected{number}.pt")
        (folder / f"pid{rank}").write_text(str(os.getpid()))
        if number == 2:
            _prepare(settings, rank)
        try:
            engine.save_checkpoint(settings.saved, tag=tag)
            engine._files.wait()  # what is written behind the training
        except CheckpointError as error:
            assert settings.kind == "full disk" and "No space left" in str(error), error
            steps(engine, [make_batch(B, 3)])  # the job goes on


def _prepare(settings: SaveSettings, rank: int) -> None:
    """Let the case happen to this process's calls; all note what they have brought to the disk."""
    from tests.checkpoints.killed_saves import lose_unsynced, strike_at

    folder = Path(settings.directory)
    noted = os.open(folder / "synced", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def strike() -> None:
        if settings.kind == "full disk":
            raise OSError(28, "No space left on device")
        (folder / "struck").touch()
        if settings.kind == "power":
            for other in range(RANKS):
                if other != rank:
                    os.kill(int((folder / f"pid{other}").read_text()), signal.SIGKILL)
            time.sleep(0.1)
            lines = (folder / "synced").read_text().splitlines()
            synced = {(int(number), int(size)) for number, size in map(str.split, lines)}
            lose_unsynced(settings.saved, synced)
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    strike_at(
        settings.at if rank == settings.rank else -1,
        strike,
        note_synced=lambda found: os.write(noted, f"{found[0]} {found[1]}\n".encode()),
    )


def judge(settings: SaveSettings, ended: list[Ended]) -> tuple[str, str]:
    """Return what the tag names, ``old`` or ``new``, and what is wrong, if anything is."""
    import torch

    from gpp_plugin.engine.checkpoints import checkpoint_directory as places
    from gpp_plugin.engine.checkpoints.conversion import read_checkpoint
    from gpp_plugin.errors import CheckpointError

    if any(each.code is None for each in ended):
        return "", "a rank did not end"
    if settings.kind == "full disk" and any(each.code for each in ended):
        return "", f"a full disk ended the job: {[each.last_line for each in ended]}"
    if not (Path(settings.directory) / "expected2.pt").exists():
        return "", f"the job ended before its second save: {[each.last_line for each in ended]}"
    expected = {
        n: torch.load(Path(settings.directory) / f"expected{n}.pt", weights_only=True) for n in (1, 2)
    }

    def number_of(tag: str) -> int:
        state = read_checkpoint(places.directory_of(settings.saved, tag))  # checks every byte
        same = [
            n for n, own in expected.items() if all(torch.equal(own[k], v) for k, v in state.weights.items())
        ]
        if same != [state.step]:
            raise CheckpointError(f"{tag} says it is of step {state.step} and has the weights of {same}")
        return state.step

    try:
        if places.read_latest(settings.saved) not in ("same", "before"):
            return "", "latest names neither"
        if not settings.is_again and number_of("before") != 1:
            return "", "another tag has changed"
        try:
            found = number_of("same")
        except CheckpointError as error:
            if settings.is_again or "does not exist" not in str(error):
                raise
            found = 1
        places.clear_leftovers(settings.saved)
        left = set(os.listdir(settings.saved)) - {"same", "before", "latest"}
        return ("old" if found == 1 else "new"), (f"{sorted(left)} is left" if left else "")
    except CheckpointError as error:
        return "", str(error)


def cases(count: int) -> list[dict[str, Any]]:
    """Return the cases, the same each time."""
    draw = random.Random(1)
    return [
        {
            "kind": KINDS[number % 3],
            "rank": number // 3 % RANKS,
            "at": draw.randint(1, MOST_CALLS),
            "is_again": bool(number // 6 % 2),
            "is_behind": number // 12 % 3 == 2,
            "setup": "two stages" if number < IN_PARTS_FROM else PARTED[(number + number // 12) % 2],
        }
        for number in range(count)
    ]


def main(arguments: list[str]) -> int:
    """Run the cases; print each and the counts; return 1 where one is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak saves")
    parser.add_argument("--first", type=int, default=130, help="so many cases")
    parser.add_argument("--after", type=int, default=0, help="leave out as many before")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds a job may take")
    options = parser.parse_args(arguments)
    counts = {"old": 0, "new": 0, "": 0}
    for case in cases(options.after + options.first)[options.after :]:
        with tempfile.TemporaryDirectory() as directory:
            settings = SaveSettings(directory=directory, **case)
            ended = run_job(settings, RANKS, limit_s=options.limit, job=save_and_strike)
            found, wrong = judge(settings, ended)
        counts[found if not wrong else ""] += 1
        print(f"  {'WRONG' if wrong else 'ok   '} {case}: {wrong or found}", flush=True)
    print(
        f"{options.first} saves: {counts['old']} old, {counts['new']} new, {counts['']} neither", flush=True
    )
    return int(counts[""] > 0)
