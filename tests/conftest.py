"""What all tests share: the environment of what they start, and how they are spread over workers."""

import atexit
import os
import shutil
import tempfile

import pytest

MOST_WORKERS = 4
ONE_PROCESS = frozenset({"capture", "library", "plan", "profile", "report", "schedule", "simulate"})
"""Folders whose tests start no other process."""

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else every process started compiles this package anew
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers share the directory of the process that starts them
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="gpp-tests-")  # profiles are of this run
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the workers of ``-n auto``: one a core, but none beside tests that measure a CUDA device."""
    import torch

    return 0 if torch.cuda.is_available() else min(len(os.sched_getaffinity(0)), MOST_WORKERS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what starts processes first: the others, of a second or less, then keep all workers busy to the end."""
    items.sort(key=_starts_no_process)  # stable: modules stay whole


def _starts_no_process(item: pytest.Item) -> bool:
    return not isinstance(item, pytest.Function) or item.path.parent.name in ONE_PROCESS
