"""A pytest plugin that notes what each test reached, its time and its outcome, and can order tests.

    pytest -p tests.mutants.reach_plugin

Where `GPP_REACH` names a folder a process appends there what ran (`import_hook.note`), and to ``times-PID.jsonl`` a row
``[test, seconds of its set-up, seconds of its call, passed]`` a test. Where `GPP_ORDER` names a file of node ids the tests run in its order.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutants import import_hook

SETUP_S = pytest.StashKey[float]()
SETUP, CALL = " (setup)", " (call)"


def pytest_sessionstart() -> None:
    import_hook.come_first()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "GPP_ORDER" in os.environ:
        places = {name: at for at, name in enumerate(Path(os.environ["GPP_ORDER"]).read_text().splitlines())}
        items[:] = sorted(
            (each for each in items if each.nodeid in places), key=lambda each: places[each.nodeid]
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    import_hook.note("before")
    start = time.monotonic()
    yield
    item.stash[SETUP_S] = time.monotonic() - start
    import_hook.note(item.nodeid + SETUP)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    start, passed = time.monotonic(), False
    try:
        yield
        passed = True
    finally:
        import_hook.note(item.nodeid + CALL)
        if "GPP_REACH" in os.environ:
            path = Path(os.environ["GPP_REACH"], f"times-{os.getpid()}.jsonl")
            with path.open("a") as file:
                file.write(
                    json.dumps([item.nodeid, item.stash[SETUP_S], time.monotonic() - start, passed]) + "\n"
                )
