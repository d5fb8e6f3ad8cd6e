"""The lab that tests on devices share, and the report of the numbers they found."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu.lab import DEVICE_VARIABLE, Lab, describe_machine, find_lab, write_report
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
    yield devices


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remember how each test of this folder ended."""
    name = report.nodeid.partition("tests/gpu/")[2]
    if name and (report.when == "call" or report.outcome != "passed"):
        reason = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else ""
        _outcomes[name] = f"{report.outcome} {reason}".strip()


def pytest_sessionfinish() -> None:
    """Write the report where there was a lab."""
    for lab in _labs:
        print(f"\nreport: {write_report(lab, describe_machine(), _outcomes, ROOT / 'build')}")


def pytest_report_header() -> list[str]:
    """Say what runs where."""
    import os

    if os.environ.get(DEVICE_VARIABLE) is None:
        return []
    return [f"{name}: {text}" for name, text in describe_machine().items()]
