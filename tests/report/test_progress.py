"""Progress: a line on a terminal from the third second on, and nothing anywhere else."""

import io
import os
import pty
import subprocess
import sys
import time

import pytest

from gpp_plugin.report import progress
from gpp_plugin.report.progress import shown_as, step
from tests.waits import run_program

SLOW = """
import time
from gpp_plugin.report import progress
progress.SECONDS = 0.1
def wait():
    end = time.monotonic() + (30 if progress._somebody_looks() else 0.5)
    while progress._SCREEN._num_lines < 2 and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.3)
with progress.step("capture") as tell:
    tell.note("block 3")
    with progress.step("inner") as inner:
        inner.update(1, 4)
        wait()
print("done")
"""


class Terminal(io.StringIO):
    def isatty(self):
        return True


def on_a_terminal(code, **variables):
    """Return standard output of a process, and what it wrote to a terminal as standard error."""
    ours, theirs = pty.openpty()
    environment = {key: value for key, value in os.environ.items() if key not in progress.RANK_VARIABLES}
    streams = {"stdout": subprocess.PIPE, "stderr": theirs, "text": True}
    environment |= {"TERM": "xterm", **variables}
    done = run_program([sys.executable, "-c", code], env=environment, timeout=60, check=True, **streams)
    os.write(theirs, b"END")
    os.close(theirs)
    seen = b""
    while not seen.endswith(b"END"):
        seen += os.read(ours, 65536)
    os.close(ours)
    return done.stdout, seen.removesuffix(b"END").decode()


def test_a_long_step_stands_on_the_terminal_and_standard_output_is_untouched():
    printed, seen = on_a_terminal(SLOW)
    assert printed == "done\n"
    assert "capture: block 3" in seen and "inner" in seen


def test_ranks_but_the_first_and_dumb_terminals_see_nothing():
    for variables in ({"RANK": "1"}, {"TERM": "dumb"}):
        assert on_a_terminal(SLOW, **variables) == ("done\n", "")


def test_short_steps_and_pipes_see_nothing(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with step("capture") as tell:
        tell.update(1, 2)
    assert terminal.getvalue() == ""
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with step("capture"):
        time.sleep(0.05)
    assert sys.stderr.getvalue() == ""


def test_a_shown_function_returns_and_raises_as_it_does():
    @shown_as("load")
    def half(number: int) -> float:
        return 1 / number

    assert half(2) == 0.5 and half.__name__ == "half"
    with pytest.raises(ZeroDivisionError):
        half(0)
