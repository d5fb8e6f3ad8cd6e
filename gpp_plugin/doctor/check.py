"""How a check of `gpp doctor` ended, and what to do about it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from gpp_plugin.report.units import fill_text, format_table


class Status(enum.Enum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    MISSING = "missing"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing looked at.

    Args:
        found: what there is; ``advice`` what to do about it, empty where nothing.
        is_required: without it nothing trains.
    """

    name: str
    status: Status
    found: str
    advice: str = ""
    is_required: bool = True

    @property
    def is_failure(self) -> bool:
        """Return whether training is impossible because of this."""
        return self.is_required and self.status in (Status.MISSING, Status.FAILED)


def print_checks(checks: Sequence[Check]) -> None:
    """Print what was found as a table."""
    rows = [[check.name, check.status.value, check.found] for check in checks]
    print(format_table(["check", "status", "found"], rows, left=3))


def print_advice(checks: Sequence[Check]) -> None:
    """Print what to do, where there is anything."""
    advice = [f"- {check.name}: {check.advice}" for check in checks if check.advice]
    if advice:
        print("\nWhat to do\n" + "\n".join(fill_text(line, indent="  ") for line in advice))
