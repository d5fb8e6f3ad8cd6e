"""A pytest plugin that notes after each phase of a test which code ran: ``-p tests.mutants.reach_plugin``."""

from collections.abc import Iterator

import pytest

from tests.mutants import import_hook


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    import_hook.note("collection")
    yield
    import_hook.note(f"{item.nodeid} (setup)")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    yield
    import_hook.note(f"{item.nodeid} (call)")
