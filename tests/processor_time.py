"""Counts the processor seconds of each test and of what tests share, with all processes that they start.

Of the process of the tests and all its descendants: ranks, those that are kept, commands. A process that outlives its
parent is counted where it was seen before.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 5.0
"""What the call of a test of `make test` may take, on the processor that does `_a_fixed_work` in `FIXED_WORK_S`."""
FIXED_WORK_S = 0.026
NOISE = 2.0
"""By so much do the seconds of one test differ from run to run. The fixed work stays in the processor's caches, and does
not feel what neighbours do to caches and memory: of three runs of the same tests two took 1.6 times the seconds of the
third, a test that starts interpreters three times, and the fixed work 1.0."""
NUM_SHOWN = 20
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


def slowness() -> float:
    """Return how many times as long this processor takes for the same work as that of `LIMIT_S`; at least 1."""
    return max(min(_a_fixed_work() for _ in range(5)) / FIXED_WORK_S, 1.0)


def _a_fixed_work() -> float:
    start, table = time.process_time(), dict[int, int]()
    for number in range(300_000):
        table[number % 1009] = table.get(number % 1009, 0) + number
    return time.process_time() - start


class Family:
    """Some processes and all that they start."""

    def __init__(self, *roots: int) -> None:
        self._members = set(roots)
        self._strangers: set[int] = set()

    def used_s(self, *, without: int = 0) -> float:
        """Return the processor seconds of all of them but one, with those that ended and were waited for."""
        alive = {int(name) for name in os.listdir("/proc") if name.isdecimal()}
        self._strangers &= alive  # asked once: this is called several times a test
        self._members &= alive
        parents, seconds = {}, {}
        for pid in alive - self._strangers:
            with contextlib.suppress(OSError):  # it has ended meanwhile
                parents[pid], seconds[pid] = _read(pid)
        found = self._members
        while found:
            found = {pid for pid, parent in parents.items() if parent in found} - self._members
            self._members |= found
        self._strangers |= parents.keys() - self._members
        return sum(seconds.get(pid, 0.0) for pid in self._members if pid != without)


def _read(pid: int) -> tuple[int, float]:
    """Return the parent of a process, and its seconds with those of the children it has waited for."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return int(fields[1]), sum(map(int, fields[11:15])) * _TICK_S


class Meter:
    """The processor seconds of this process and of all below it; what is counted apart is in no test."""

    def __init__(self) -> None:
        self._below: Family | None = None
        self._pid = 0
        self._apart_s = 0.0
        self.rows: list[tuple[str, float]] = []
        """What was counted apart since the last report took it away."""

    def total_s(self) -> float:
        """Return all of it since the process began."""
        own = time.process_time()
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        return own + ended.ru_utime + ended.ru_stime + self._living_s()

    def of_tests_s(self) -> float:
        """Return what is not counted apart."""
        return self.total_s() - self._apart_s

    @contextlib.contextmanager
    def apart(self, name: str) -> Iterator[None]:
        """Count what happens within under a name of its own; what is counted apart within this is not in it."""
        before = self.of_tests_s()
        try:
            yield
        finally:
            seconds = self.of_tests_s() - before
            self._apart_s += seconds
            self.rows.append((name, seconds))

    def _living_s(self) -> float:
        if self._pid != os.getpid():  # a fork counts for itself
            self._pid, self._below = os.getpid(), None
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # most tests have none, and pay for this call alone
            return 0.0
        if self._below is None:
            self._below = Family(os.getpid())
        return self._below.used_s(without=os.getpid())


METER = Meter()


class ProcessorTimes:
    """Fails a test of the default tier that takes too long, and tells what was dearest.

    Args:
        limit_s: of the call of one test; 0: none.
        file: where all counts go, as JSON; empty: nowhere.
        left_out: the node ids of what `make test` leaves out, as soon as tests are collected.
        counts: number of tests by tier, from then on.
    """

    def __init__(self, *, limit_s: float, file: str, left_out: set[str], counts: Counter[str]) -> None:
        self._limit_s = limit_s
        self._file = file
        self._left_out = left_out
        self._counts = counts
        self._since = METER.of_tests_s()
        self._tests: dict[str, dict[str, Any]] = defaultdict(dict)
        self._shared: dict[str, list[float]] = defaultdict(list)
        self._totals: dict[str, float] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self) -> None:
        """Begin with the first test: what all files import is none of its set-up."""
        self._since = METER.of_tests_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: pytest.FixtureRequest) -> Iterator[None]:
        """Count what several tests share once, under the name of the fixture."""
        if fixturedef.scope == "function":
            return (yield)
        index = f"[{request.param_index}]" if hasattr(request, "param") else ""
        where = fixturedef.baseid or "tests"
        with METER.apart(f"{where}::{fixturedef.argname}{index}"):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
        """Add the seconds since the last report to this one."""
        report = yield
        now = METER.of_tests_s()
        report.processor_s, self._since = now - self._since, now
        report.processor_apart, METER.rows = METER.rows, []
        report.tier = "test-all" if item.nodeid in self._left_out else "test"
        # what takes longer because the processor is slower, or shared with others, is no fault of the test
        is_judged = call.when == "call" and report.passed and report.tier == "test"
        is_above = is_judged and 0 < self._limit_s < report.processor_s
        if is_above and report.processor_s > self._limit_s * slowness() * NOISE:
            report.outcome = "failed"
            report.longrepr = (
                f"{item.nodeid} took {report.processor_s:.1f} processor seconds of {self._limit_s:g} that a test of "
                "`make test` may take: make it smaller, or leave it to `make test-all` in tests/tiers.toml"
            )
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect what the workers report."""
        row = self._tests[report.nodeid]
        row["tier"] = getattr(report, "tier", "test")
        row[str(report.when)] = round(getattr(report, "processor_s", 0.0), 4)
        if report.when == "call" or report.outcome != "passed":
            row["outcome"] = report.outcome
        for name, seconds in getattr(report, "processor_apart", ()):
            self._shared[name].append(seconds)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Tell the process that started this worker what only the worker knows."""
        output = getattr(session.config, "workeroutput", None)
        if output is None:
            self._totals["this process"] = METER.total_s()
        else:
            output["processor_total_s"] = METER.total_s()
            output["tests_by_tier"] = dict(self._counts)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take what a worker told at its end."""
        told = getattr(node, "workeroutput", {})
        self._totals[node.gateway.id] = told.get("processor_total_s", 0.0)
        self._counts.update(
            {key: n for key, n in told.get("tests_by_tier", {}).items() if key not in self._counts}
        )

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Write the table, and the file that was asked for."""
        if (
            "this process" in self._totals and len(self._totals) > 1
        ):  # without the workers, which it has waited for
            self._totals["this process"] = time.process_time()
        total = sum(self._totals.values())
        tests = {name: row for name, row in self._tests.items() if sum(_seconds(row)) > 0}
        shared = {name: sum(seconds) for name, seconds in self._shared.items()}
        if self._file:
            Path(self._file).write_text(
                json.dumps(
                    {
                        "limit_s": self._limit_s,
                        "total_s": round(total, 2),
                        "processes": {name: round(seconds, 2) for name, seconds in self._totals.items()},
                        "tests_by_tier": self._counts,
                        "tests": self._tests,
                        "shared": {
                            name: {"times": len(self._shared[name]), "seconds": round(seconds, 4)}
                            for name, seconds in shared.items()
                        },
                    },
                    indent=1,
                ),
                encoding="utf-8",
            )
        write = terminalreporter.write_line
        in_tests = sum(sum(_seconds(row)) for row in tests.values())
        counts = ", ".join(f"{number} {tier}" for tier, number in sorted(self._counts.items()))
        terminalreporter.section("processor seconds, with all processes that tests start")
        write(
            f"{total:.0f} s in all: {in_tests:.0f} in tests, {sum(shared.values()):.0f} in what they share, the rest "
            f"in starts, imports and collection; tests: {counts or 'none'}"
        )
        for title, rows in (
            ("the dearest tests, with their own set-up", {n: sum(_seconds(r)) for n, r in tests.items()}),
            ("the dearest of what tests share, each time it is made", shared),
        ):
            write(f"{title}:")
            for name in sorted(rows, key=lambda name: -rows[name])[:NUM_SHOWN]:
                times = len(self._shared.get(name, ()))
                write(f"{rows[name]:8.2f} s  {name}{f' ({times} times)' if times > 1 else ''}")


def _seconds(row: dict[str, Any]) -> list[float]:
    return [row.get(phase, 0.0) for phase in ("setup", "call", "teardown")]
