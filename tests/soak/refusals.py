"""What is refused, counted: malformed configurations, clusters, batches, models and plans; attempts to run code.

python -m tests.soak malformed      at least 200, each one line with the key, within 5 s
python -m tests.soak attempts       at least 30, by file, name, tag, index and link: nothing runs, nothing leads outside
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
MOST_SECONDS = 5.0

MALFORMED = {
    "least": 200,
    "tests": ["tests/test_malformed.py", "tests/integrations/test_malformed_models.py"],
}
ATTEMPTS = {
    "least": 30,
    "tests": [
        "tests/checkpoints/test_nothing_runs.py",
        "tests/integrations/test_materialize.py::test_an_index_leads_nowhere_else",
    ],
}
NOT_COUNTED = ("whole", "count")
"""Tests that what is right is accepted, and that cases are counted."""


class Counting:
    """Counts what pytest runs, by test function; a case that is slow is wrong."""

    def __init__(self) -> None:
        self.passed: Counter[str] = Counter()
        self.wrong: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the cases that count."""
        items[:] = [
            item for item in items if not any(word in item.name.split("[")[0] for word in NOT_COUNTED)
        ]

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Take up one result."""
        if report.when == "call" and report.passed and report.duration <= MOST_SECONDS:
            self.passed[report.nodeid.split("::")[1].split("[")[0]] += 1
        elif report.failed or (report.when == "call" and report.duration > MOST_SECONDS):
            self.wrong.append(f"{report.nodeid}: {report.outcome} in {report.duration:.1f} s")


def _count(table: dict[str, Any], arguments: list[str]) -> int:
    argparse.ArgumentParser(prog="python -m tests.soak").parse_args(arguments)  # takes none
    counting = Counting()
    tests = [str(ROOT / name) for name in table["tests"]]
    quiet = ["-p", "no:terminal", "-p", "no:cacheprovider", "-o", "addopts="]
    pytest.main([*tests, *quiet], plugins=[counting])
    for name, count in counting.passed.items():
        print(f"  {count:4d}  {name}")
    total = sum(counting.passed.values())
    for line in counting.wrong:
        print(f"  WRONG {line}")
    print(f"{total} refused as they should be (at least {table['least']}), {len(counting.wrong)} not")
    return int(bool(counting.wrong) or total < table["least"])


def count_malformed(arguments: list[str]) -> int:
    """Run the malformed inputs; return 1 where one is accepted, slow or unclear, or they are too few."""
    return _count(MALFORMED, arguments)


def count_attempts(arguments: list[str]) -> int:
    """Run the attempts to run code, and to read or write outside; return 1 where one succeeds."""
    return _count(ATTEMPTS, arguments)
