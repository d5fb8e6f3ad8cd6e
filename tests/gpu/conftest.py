"""The lab that tests on devices share, and the report of the numbers they found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.lab import DEVICE_VARIABLE, NOT_REACHED, Lab, describe_machine, find_lab, write_report
from tests.gpu.watched_job import ROOT

MISSING = "needs a CUDA device and there is none; on a machine with one: make test-gpu"
_outcomes: dict[str, str] = {}
_labs: list[Lab] = []


@pytest.fixture(scope="session")
def devices() -> Lab:
    """Return the lab of this run."""
    lab = find_lab()
    if lab is None:
        pytest.skip(MISSING)
    _labs.append(lab)
    return lab


@pytest.fixture
def lab(devices: Lab, request: pytest.FixtureRequest) -> Iterator[Lab]:
    """Return the lab, told which test uses it."""
    devices.test = request.node.originalname
    if not devices.has_time():
        pytest.skip(f"{NOT_REACHED}: {devices.seconds:g} s are over")
    yield devices


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remember how each test of this folder ended."""
    name = report.nodeid.partition("tests/gpu/")[2]
    if name and (report.when == "call" or report.outcome != "passed"):
        reason = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else ""
        is_out_of_time = reason.startswith(f"Skipped: {NOT_REACHED}")
        _outcomes[name] = reason[9:] if is_out_of_time else f"{report.outcome} {reason}".strip()
    if report.when == "teardown":
        _write()


def _write() -> Path | None:
    """Write the report where there is a lab: behind every test, as the run may be cut off in the next one."""
    return write_report(_labs[-1], describe_machine(), _outcomes, ROOT / "build") if _labs else None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Say of all tests that they are not reached, until they are."""
    for item in session.items:
        if name := item.nodeid.partition("tests/gpu/")[2]:
            _outcomes.setdefault(name, NOT_REACHED)


def pytest_sessionfinish() -> None:
    """Say where the report is."""
    if path := _write():
        print(f"\nreport: {path}")


def pytest_report_header() -> list[str]:
    """Say what runs where."""
    import os

    if os.environ.get(DEVICE_VARIABLE) is None:
        return []
    return [f"{name}: {text}" for name, text in describe_machine().items()]
