"""What all tests share: the environment of what they start, their tiers, and how they are spread over workers."""

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import tiers
from tests.processor_time import LIMIT_S, Meter, ProcessorTimes
from tests.waits import LOOK_S, Patience

MOST_WORKERS = 4
ONE_PROCESS = frozenset({"capture", "library", "nccl", "plan", "profile", "report", "schedule", "simulate"})
"""Folders whose tests start no other process."""

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("COLUMNS", None)  # 80 in workers; tables are as wide as they are, but where a test says else
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else every process started compiles this package anew
sys.dont_write_bytecode = False  # else pytest rewrites the asserts of all files anew
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers share the directory of the process that starts them
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="gpp-tests-")  # profiles are of this run
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)


_left_out: set[str] = set()
_counts: Counter[str] = Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier", choices=("test", "all"), default="test", help="all: also what tests/tiers.toml leaves out"
    )
    parser.addoption(
        "--processor-limit",
        type=float,
        default=LIMIT_S,
        metavar="S",
        help="processor seconds that a test of `make test` may take; 0: any (default: %(default)s)",
    )
    parser.addoption(
        "--processor-times", default="", metavar="FILE", help="write the seconds of each test here, as JSON"
    )


def pytest_configure(config: pytest.Config) -> None:
    is_whole = config.getoption("--tier") == "all"
    tiers.set_whole(is_whole)
    limit_s = 0.0 if is_whole else config.getoption("--processor-limit")
    file = config.getoption("--processor-times")
    config.pluginmanager.register(
        ProcessorTimes(limit_s=limit_s, file=file, left_out=_left_out, counts=_counts), "processor times"
    )


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_set_timer(item: Any, settings: Any) -> bool | None:
    """Let a test go on past pytest-timeout's limit while it, or what it started, uses the processor."""
    if settings.method != "signal":
        return None
    from pytest_timeout import timeout_sigalrm

    patience = Patience(settings.timeout, Meter().total_s)  # its own: it interrupts the other

    def look(signum: int, frame: Any) -> None:
        __tracebackhide__ = True
        if patience.is_over():
            signal.setitimer(signal.ITIMER_REAL, 0)
            timeout_sigalrm(item, settings)

    def cancel() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    every_s = max(LOOK_S, settings.timeout / 20)
    item.cancel_timeout = cancel
    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, every_s, every_s)
    return True


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


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Import no other file of this folder to look for doctests: there are none, and some are for ranks."""
    is_other = collection_path.suffix == ".py" and not collection_path.name.startswith("test_")
    return True if is_other and collection_path.name != "__init__.py" else None


def pytest_collection_finish() -> None:
    """Spare the garbage collector what lives to the end: modules and tests."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not of this tier, and put what starts processes first.

    The others, of a second or less, then keep all workers busy to the end.
    """
    kept = tiers.read_kept(tiers.FILE.read_text(encoding="utf-8"))
    is_part = any("::" in argument for argument in config.args)
    names, wrong = tiers.left_out(kept, [item.nodeid for item in items])
    wrong = tiers.missing_files(kept) + ([] if is_part else wrong)  # of a file, a part may lack what is named
    if wrong:
        raise pytest.UsageError("tests/tiers.toml: " + "; ".join(wrong))
    _left_out.update(names)
    _counts.update({"of make test": len(items) - len(names), "of make test-all alone": len(names)})
    if not tiers.is_whole():
        config.hook.pytest_deselected(items=[item for item in items if not _runs(item, config)])
        items[:] = [item for item in items if _runs(item, config)]
    items.sort(key=_starts_no_process)  # stable: modules stay whole


def _runs(item: pytest.Item, config: pytest.Config) -> bool:
    return item.nodeid not in _left_out or tiers.is_named(item.nodeid, config.args)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End ranks that are kept before the tests that start no process: those would look at them again and again."""
    ranks = sys.modules.get("tests.ranks")
    is_last = nextitem is not None and _starts_no_process(nextitem) and not _starts_no_process(item)
    if ranks is not None and is_last:
        ranks.end_kept_ranks()


def _starts_no_process(item: pytest.Item) -> bool:
    return not isinstance(item, pytest.Function) or item.path.parent.name in ONE_PROCESS
