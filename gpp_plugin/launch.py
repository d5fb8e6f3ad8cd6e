"""Starts the ranks of a job on this machine, listens to rank 0, and ends all of them if one fails.

`free_memory_bytes` is what the machine can still give out. `real_time` makes other programs of the machine wait while
something is measured.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from gpp_plugin.errors import ConfigError, RuntimeFailure

EVENTS_VARIABLE = "GPP_EVENTS_FD"
LOG_LINES_SHOWN = 15
# How often, in s, ranks are looked after that say nothing, and how long a rank may take to
# end when it is told to.
_POLL_S = 0.2
_GRACE_S = 5.0


def emit_event(**event: Any) -> None:
    """Tell the launching process something: one JSON object (for rank 0 of a launched job)."""
    line = json.dumps(event) + "\n"
    os.write(int(os.environ[EVENTS_VARIABLE]), line.encode())


def end_rank() -> None:
    """End this rank's process, well, without the interpreter's own end.

    A thread of gloo that is still there when the interpreter unloads aborts the process ("terminate called
    without an active exception", seen once in some ten runs). Meet the other ranks before.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def require_modules(*names: str) -> None:
    """Refuse what ranks would fail without, before any of them starts; the command line says how to install it.

    Raises:
        ModuleNotFoundError: one of them is not installed.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def run_ranks(
    module: str,
    arguments: Sequence[str],
    *,
    num_ranks: int,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
) -> Iterator[dict[str, Any]]:
    """Run ``python -m module`` once per rank and yield what rank 0 emits, until all have ended.

    The ranks find each other through the usual variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).
    What they print goes to files, shown only if a rank fails.

    Raises:
        RuntimeFailure: a rank failed or the time ran out; the message ends with the rank's last lines.
    """
    # One pipe for events, one file a rank for everything else that it prints:
    #
    #   rank 0..n-1  --write_end (inherited, EVENTS_VARIABLE)-->  read_end --> yielded, a JSON object a line
    #   rank 0..n-1  --stdout, stderr-->  rankN.log                        --> shown only if that rank fails
    #
    # Not stdout for events: libraries print there. All ranks inherit the writing end, and the reading end
    # sees the end of the stream when the last of them has ended, so this process must close its own copy.
    # Only rank 0 writes, so lines do not mix, however long they are.
    read_end, write_end = os.pipe()
    with (
        tempfile.TemporaryDirectory(prefix="gpp_ranks_") as folder,
        os.fdopen(read_end, "rb") as events,
        reserved_port() as port,
    ):
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(num_ranks)]
        common = {
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            EVENTS_VARIABLE: str(write_end),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            **(environment or {}),
        }
        processes = []
        try:
            for rank, log in enumerate(logs):
                variables = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                with log.open("wb") as stream:
                    process = subprocess.Popen(
                        [sys.executable, "-m", module, *arguments],
                        env={**os.environ, **variables},
                        stdout=stream,
                        stderr=subprocess.STDOUT,
                        stdin=subprocess.DEVNULL,
                        pass_fds=(write_end,),
                    )
                processes.append(process)
            os.close(write_end)
            write_end = -1
            yield from _relay(events, processes, logs, timeout_s)
        finally:
            if write_end >= 0:
                os.close(write_end)
            _end(processes)


def _relay(
    events: IO[bytes], processes: list[subprocess.Popen[bytes]], logs: list[Path], timeout_s: float
) -> Iterator[dict[str, Any]]:
    deadline = time.monotonic() + timeout_s
    os.set_blocking(events.fileno(), False)
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(events, selectors.EVENT_READ)
        is_open = True
        # Both must have ended, stream and processes: the writing ends close a moment before a process can be
        # polled as ended. Each round looks for failures, so a rank that dies ends the job within about _POLL_S.
        while is_open or any(process.poll() is None for process in processes):
            if is_open and selector.select(timeout=_POLL_S):
                chunk = os.read(events.fileno(), 65536)
                is_open = bool(chunk)
                # A read may end inside a line: what follows the last newline waits for the next one.
                *lines, pending = (pending + chunk).split(b"\n")
                yield from (json.loads(line) for line in lines)
            elif not is_open:
                time.sleep(_POLL_S)
            _check(processes, logs)
            if time.monotonic() > deadline:
                raise RuntimeFailure(
                    f"the {len(processes)} ranks did not end within {timeout_s:g} s; rank 0 said last:\n"
                    + _last_lines(logs[0])
                )
    _check(processes, logs)


def _check(processes: list[subprocess.Popen[bytes]], logs: list[Path]) -> None:
    failed = [(rank, process.returncode) for rank, process in enumerate(processes) if process.poll()]
    if failed:
        # The rank that failed first is the cause; the others complain about it, later.
        rank, code = min(failed, key=lambda pair: logs[pair[0]].stat().st_mtime)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise RuntimeFailure(f"rank {rank} {how}; it said last:\n{_last_lines(logs[rank])}")


def _last_lines(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:])


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    # All are told first, then waited for: one after the other would give the last of n
    # ranks n times the grace.
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
        if process.poll() is None:
            process.kill()
            process.wait()


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a port that rank 0 can listen on and the system gives to nobody else.

    Ranks import torch for seconds before rank 0 listens; a port that is merely free by now may be taken by then.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as rank 0's listening socket does
        reserved.bind(("", 0))
        port: int = reserved.getsockname()[1]
        yield port


def check_priority() -> None:
    """Refuse real-time priority where this process may not have it.

    Raises:
        ConfigError: says so.
    """
    try:
        with real_time():
            pass
    except OSError as error:
        raise ConfigError(
            f"--real-time: this process may not have real-time priority ({error.strerror}); run it as root, or "
            "on a machine with nothing else to do"
        ) from error


@contextlib.contextmanager
def real_time() -> Iterator[None]:
    """Give all threads of this process, gloo's too, real-time priority for a while."""
    _set_policy(os.SCHED_RR, 1)
    try:
        yield
    finally:
        _set_policy(os.SCHED_OTHER, 0)


def _set_policy(policy: int, priority: int) -> None:
    # sched_setscheduler(2) sets one thread, not a process; threads that come later inherit from the one that
    # starts them. A thread that ends between the listing and the call is no error. SCHED_RR at priority 1,
    # the lowest of the real-time ones: still before every ordinary program, and ranks on one core take turns.
    for name in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setscheduler(int(name), policy, os.sched_param(priority))


def free_memory_bytes() -> float:
    """Return the bytes this machine can still give out, counting what it would drop from its file cache."""
    try:
        # MemFree leaves out the page cache, which a freshly loaded machine is full of; MemAvailable (kernel
        # 3.14 on) counts what of it could be dropped.
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return float(line.split()[1]) * 1024
    except OSError:
        pass
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
