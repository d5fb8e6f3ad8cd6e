"""What `gpp` does where its output goes: encodings that lack its characters, readers that go, the columns there are."""

from __future__ import annotations

import codecs
import os
import select
import sys
from collections.abc import Callable
from typing import TextIO

BROKEN_PIPE = 141
"""The exit code where nobody reads any more: 128 + SIGPIPE, what a shell reports of other programs."""

ASCII = {
    **dict.fromkeys("┌┐└┘┼├┤┬┴╭╮╰╯", "+"),
    **dict.fromkeys("│┃╎", "|"),
    **dict.fromkeys("─━╌–—−", "-"),  # noqa: RUF001 - what is to be replaced
    **dict.fromkeys("█▓▒■", "#"),
    **dict.fromkeys("░·•", "."),
    "▼": "v", "▲": "^", "▶": ">", "→": ">", "◀": "<", "←": "<", "…": "~", "×": "x", "µ": "u", "✓": "+", "✗": "x",
    "’": "'", "≤": "<", "≥": ">",
}  # fmt: skip
"""One character each, or pictures would lose their columns."""


def prepare_streams() -> None:
    """Let output that its encoding lacks characters for be drawn in ASCII, instead of failing half-way."""
    codecs.register_error("gpp_ascii", _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        encoding = getattr(stream, "encoding", None) or "utf-8"
        if not codecs.lookup(encoding).name.startswith("utf") and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="gpp_ascii")


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(ASCII.get(char, "?") for char in error.object[error.start : error.end]), error.end


def run_while_read(run: Callable[[], int]) -> int:
    """Return the exit code of ``run``; where standard output's reader has gone (``| head -1``), quietly `BROKEN_PIPE`.

    Raises:
        BrokenPipeError: another pipe broke.
    """
    try:
        try:
            return run()
        finally:  # --help and --version raise SystemExit with their text still in the buffer
            sys.stdout.flush()
    except BrokenPipeError:
        closed = [stream for stream in (sys.stdout, sys.stderr) if _is_closed(stream)]
        if not closed:
            raise
        # the interpreter flushes once more as it ends, and would complain
        for stream in closed:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return BROKEN_PIPE


def _is_closed(stream: TextIO) -> bool:
    """Return whether nobody reads the pipe behind a stream; its buffer, which may be lost by now, is no sign."""
    poll = select.poll()
    try:
        poll.register(stream.fileno(), select.POLLOUT)
    except (OSError, ValueError):  # no file behind it
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))
