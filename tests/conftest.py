"""What all tests share: the environment of what they start, and how they are spread over workers."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator

import pytest

from tests import tiers

MOST_WORKERS = 4
collect_ignore = ["capture/placement_job.py"]  # loads a library as it is imported, for a process of its own
ONE_PROCESS = frozenset({"capture", "library", "nccl", "plan", "profile", "report", "schedule", "simulate"})
"""Folders whose tests start no other process."""

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("COLUMNS", None)  # 80 in workers; tables are as wide as they are, but where a test says else
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else every process started compiles this package anew
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers share the directory of the process that starts them
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="gpp-tests-")  # profiles are of this run
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the workers of ``-n auto``: one a core, but none beside tests that measure a CUDA device."""
    import torch

    return 0 if torch.cuda.is_available() else min(len(os.sched_getaffinity(0)), MOST_WORKERS)


@pytest.fixture(autouse=True)
def _launcher_variables() -> Iterator[None]:
    """Take away what a test's own job of one rank says of itself: what later tests start would take it for theirs."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    before = {name: os.environ.get(name) for name in names}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture
def tell(record_property: Callable[[str, object], None]) -> Callable[[object], None]:
    """Return what tells a line behind all tests: a count that a reader of the run is to see."""
    return lambda line: record_property("told", str(line))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for key, value in report.user_properties:
            if key == "told" and report.when == "call":
                terminalreporter.write_line(f"{report.nodeid}: {value}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put what starts processes first: the others, of a second or less, then keep all workers busy to the end.

    Tests marked `long` are left out, but where they are asked for.
    """
    if not tiers.IS_LONG:
        left_out = [item for item in items if item.get_closest_marker("long")]
        items[:] = [item for item in items if not item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)
    items.sort(key=_starts_no_process)  # stable: modules stay whole


def _starts_no_process(item: pytest.Item) -> bool:
    return not isinstance(item, pytest.Function) or item.path.parent.name in ONE_PROCESS
