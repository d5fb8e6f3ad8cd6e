"""Where a rank is, and what is said of one that failed: what ranks publish to each other, in facts and in words.

`HERE` is this process's; calls, phases and instructions set its attributes, which costs a step no more than that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpp_plugin.errors import first_line

SILENT_S = 4.0
"""After how long without a beat a rank of another host is taken to be gone or stopped."""

OUTSIDE = "outside of the engine's calls"


class RankStatus:
    """What this process does now; read by the thread that publishes it to the others.

    Attributes:
        stage: of this rank, once it is known.
        call: what the user called (``train_batch``); empty between calls.
        number: how many calls there were.
        doing: what part of it (``capture``).
        instruction: of the rank's program, while it runs.
        waits_for: what the other ranks are waited for; empty while this rank works.
        last_error: what the last call raised that the job may survive.
    """

    def __init__(self) -> None:
        self.stage = ""
        self.call = ""
        self.number = 0
        self.doing = ""
        self.instruction: Any = None
        self.waits_for = ""
        self.last_error = ""

    @contextlib.contextmanager
    def during(self, doing: str) -> Iterator[None]:
        """Say what part of a call a block is."""
        before, self.doing = self.doing, doing
        try:
            yield
        finally:
            self.doing = before

    def facts(self) -> dict[str, Any]:
        """Return what is published to the others."""
        instruction = self.instruction  # another thread may set it to None meanwhile
        return {
            "stage": self.stage,
            "call": self.call,
            "number": self.number,
            "doing": self.doing,
            "at": "" if instruction is None else str(instruction),
            "waits_for": self.waits_for,
            "last_error": self.last_error,
        }


HERE = RankStatus()
"""A process is one rank of one job."""


def place_of(facts: Mapping[str, Any]) -> str:
    """Return where a rank is, in words.

    >>> place_of({"call": "train_batch", "at": "2F0"}), place_of({"call": "", "last_error": "StopIteration"})
    ('in train_batch at 2F0', "outside of the engine's calls (its last call raised StopIteration)")
    """
    if not facts.get("call"):
        raised = facts.get("last_error")
        return OUTSIDE + (f" (its last call raised {raised})" if raised else "")
    place = f"in {facts['call']}"
    if facts.get("at"):
        place += f" at {facts['at']}"
    elif facts.get("doing"):
        place += f", {facts['doing']}"
    return place + (f", waiting for {facts['waits_for']}" if facts.get("waits_for") else "")


def name_of(rank: int, stage: str) -> str:
    """Return a rank with its stage, for errors."""
    return f"rank {rank} (stage {stage!r})" if stage else f"rank {rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstFailure:
    """The first failure of a job.

    Args:
        where: `place_of` the rank.
        why: one line.
    """

    rank: int
    stage: str
    where: str
    why: str

    def __str__(self) -> str:
        return f"{name_of(self.rank, self.stage)} failed first, {self.where}: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRank:
    """What is known of another rank.

    Args:
        state: ``alive``, ``dead``, ``ended`` as it should, ``stopped``, or ``silent``: of another host, not heard of.
        facts: as of `RankStatus.facts`, at its last beat; empty where it was never heard of.
    """

    rank: int
    state: str
    facts: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Return the rank with its stage."""
        return name_of(self.rank, self.facts.get("stage", ""))

    @property
    def why(self) -> str:
        """Return what is wrong with it, as a failure's reason."""
        return {
            "dead": "its process is gone without a word (killed, out of memory, or ended by a signal)",
            "ended": "its process has ended",
            "stopped": "its process is stopped (SIGSTOP, or a debugger)",
            "silent": f"nothing was heard of it for {SILENT_S:g} s (killed, stopped, or its host is gone)",
        }.get(self.state, "it did not come")


def failure_of(seen: SeenRank) -> FirstFailure:
    """Return what is wrong with another rank as the failure of the job."""
    return FirstFailure(
        rank=seen.rank,
        stage=seen.facts.get("stage", ""),
        where=f"last heard of {place_of(seen.facts)}" if seen.facts else "never heard of",
        why=seen.why,
    )


def describe_error(error: BaseException) -> str:
    """Return an exception in one line: its kind and what it says."""
    kind, text = type(error).__name__, first_line(error)
    return f"{kind}: {text}" if text else kind
