"""The names of schedules as users write them."""

from __future__ import annotations

import re

from gpp_plugin.ir.plan import Stage

SCHEDULE_NAMES = ("auto", "1f1b", "2f2b", "kfkb", "gpipe", "greedy", "zero_bubble")
"""What a user may write; ``2f2b`` stands for any k, ``kfkb`` lets the simulation choose k."""


def k_of(name: str) -> int | None:
    """Return the k of a kFkB's name; None for other names.

    >>> k_of("1f1b"), k_of("4f4b"), k_of("2f3b")
    (1, 4, None)
    """
    found = re.fullmatch(r"([1-9]\d*)f\1b", name)
    return int(found[1]) if found else None


def is_schedule_name(name: str) -> bool:
    """Return whether ``name`` is one of `SCHEDULE_NAMES` or another kFkB."""
    return name in SCHEDULE_NAMES or k_of(name) is not None


def schedule_label(stage: Stage) -> str:
    """Return the name of a stage's schedule."""
    return f"{stage.k}f{stage.k}b" if stage.schedule == "1f1b" else stage.schedule


def planning_schedule(name: str) -> str:
    """Return the schedule that planners assume where the user names this one."""
    return "gpipe" if name == "gpipe" else "1f1b"
