"""The names of schedules as users write them: those that are registered, any kFkB, and what stands for several."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gpp_plugin.errors import nearest
from gpp_plugin.plugins import SCHEDULES, find_schedule

if TYPE_CHECKING:  # `config` imports this file, and loads without what a plan is made of
    from gpp_plugin.ir.plan import Stage

AUTO = "auto"
KFKB = "kfkb"


def schedule_names() -> tuple[str, ...]:
    """Return what a user may write; ``2f2b`` stands for any k, with ``kfkb`` the simulation chooses k."""
    first, *others = SCHEDULES.names()
    return (AUTO, first, "2f2b", KFKB, *others)


def k_of(name: str) -> int | None:
    """Return the k of a kFkB's name; None for other names.

    >>> k_of("1f1b"), k_of("4f4b"), k_of("2f3b")
    (1, 4, None)
    """
    found = re.fullmatch(r"([1-9]\d*)f\1b", name)
    return int(found[1]) if found else None


def is_schedule_name(name: str) -> bool:
    """Return whether ``name`` is one of `schedule_names` or another kFkB."""
    return name in (AUTO, KFKB) or k_of(name) is not None or name in SCHEDULES


def unknown_schedule(name: str) -> str:
    """Return what to say of a name that is no schedule: the nearest, and all there are."""
    return f"no schedule {name!r}{nearest(name, schedule_names())}; give one of {', '.join(schedule_names())}"


def schedule_label(stage: Stage) -> str:
    """Return the name of a stage's schedule."""
    return f"{stage.k}f{stage.k}b" if stage.schedule == "1f1b" else stage.schedule


def planning_schedule(name: str) -> str:
    """Return the schedule by which planners count memory where the user names this one."""
    return "gpipe" if name in SCHEDULES and find_schedule(name).holds_all else "1f1b"


def may_split_backward(name: str) -> bool:
    """Return whether a plan for which the user names this schedule may run backwards in two parts."""
    return name == AUTO or (name in SCHEDULES and find_schedule(name).splits_backward)
