"""Starts the processes of a job, each in a group of its own, and lets none outlive its limit.

When one fails, or the time is up, the others are first asked for records (stacks of all threads, what NCCL has launched
and not completed), then ended, with whatever they started. What they said is kept in build/gpu/failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpp_plugin.launch import reserved_port
from tests.gpu.job_rank import ANSWER, ARGUMENTS, DONE_DUMPING

ROOT = Path(__file__).resolve().parents[2]
FAILED = ROOT / "build" / "gpu" / "failed"
LINES_SHOWN = 60
POLL_S = 0.1
DUMP_S = 15.0
"""How long processes may take to write down what they do."""
GRACE_S = 10.0
"""How long the others may say what they saw after the first one failed."""


class JobFailed(AssertionError):
    """A job did not end as it should; the message says how, with the last lines of its processes."""


@dataclass(frozen=True, kw_only=True)
class _Process:
    name: str
    popen: subprocess.Popen[str]
    log: Path


def run_job(
    function: Callable[..., Any],
    num_ranks: int,
    *arguments: Any,
    limit_s: float,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call ``function(*arguments)`` on new ranks, and return what each returned, in rank order.

    Args:
        environment: variables beside those of a launcher.

    Raises:
        JobFailed: a rank raised or died, or did not answer in ``limit_s`` seconds.
    """
    name = f"{function.__module__}:{function.__name__}"
    with _folder() as folder, reserved_port() as port:
        (folder / ARGUMENTS).write_bytes(pickle.dumps(arguments))
        processes = []
        try:
            for rank in range(num_ranks):
                variables = {
                    **records_environment(folder),
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(num_ranks),
                    "LOCAL_WORLD_SIZE": str(num_ranks),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    **(environment or {}),
                }
                command = [sys.executable, "-m", "tests.gpu.job_rank", name, str(folder)]
                processes.append(_start(f"rank {rank}", command, variables, folder / f"rank{rank}.log"))
            return _answers(processes, folder, limit_s)
        finally:
            _end(processes)


def run_program(
    command: Sequence[str], *, limit_s: float, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run ``gpp`` with these words and return the JSON it ends with.

    Raises:
        JobFailed: it ended with an error, or did not end in ``limit_s`` seconds.
    """
    with _folder() as folder:
        # What it starts keeps its logs in the folder for temporary files: here they stay readable after a failure.
        variables = {**records_environment(folder), "TMPDIR": str(folder), **(environment or {})}
        words = [sys.executable, "-m", "gpp_plugin.cli", *command, "--json"]
        process = _start("gpp " + " ".join(command), words, variables, folder / "gpp.log")
        try:
            try:
                code = process.popen.wait(limit_s)
            except subprocess.TimeoutExpired:
                raise _failure([process], folder, f"no end in {limit_s:g} s") from None
            if code not in (0, 1):  # 1: it says itself, in its result, that a bound was not kept
                raise _failure([process], folder, f"exit code {code}")
            last = process.log.read_text(errors="replace").strip().splitlines()[-1:]
            if not last or not last[0].startswith("{"):
                raise _failure([process], folder, "it printed no result")
            return dict(json.loads(last[0]))
        finally:
            _end([process])


def records_environment(folder: Path) -> dict[str, str]:
    """Return the variables that make torch record what is launched on communicators, and NCCL's watchdog keep it."""
    return {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": str(folder / "nccl_trace_"),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN"),
        "PYTHONFAULTHANDLER": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    # Not below the checkout: sockets may lie in it, whose paths the system cuts at 108 characters.
    folder = Path(tempfile.mkdtemp(prefix="gpp_gpu_"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start(name: str, command: Sequence[str], variables: Mapping[str, str], log: Path) -> _Process:
    paths = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    with log.open("wb") as stream:
        popen = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **variables, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdin=subprocess.PIPE,
            stdout=stream,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # its own process group, with all that it starts
        )
    return _Process(name=name, popen=popen, log=log)


def _answers(processes: Sequence[_Process], folder: Path, limit_s: float) -> list[Any]:
    deadline = time.monotonic() + limit_s
    answers: dict[int, Any] = {}
    failed: dict[int, str] = {}
    while len(answers) + len(failed) < len(processes) and time.monotonic() < deadline:
        for rank, process in enumerate(processes):
            if rank in answers or rank in failed:
                continue
            has_ended = process.popen.poll() is not None
            path = folder / ANSWER.format(rank)
            if path.exists():
                is_answer, value = pickle.loads(path.read_bytes())
                (answers if is_answer else failed)[rank] = value
            elif has_ended:
                failed[rank] = f"died with code {process.popen.returncode}"
            if rank in failed:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        time.sleep(POLL_S)
    if len(answers) == len(processes):
        return [answers[rank] for rank in range(len(processes))]
    said = [f"{processes[rank].name}: {text}" for rank, text in sorted(failed.items())]
    silent = [p.name for rank, p in enumerate(processes) if rank not in answers and rank not in failed]
    if silent:
        said.append(f"no answer from {', '.join(silent)} (limit {limit_s:g} s)")
    raise _failure(processes, folder, "\n".join(said))


def _failure(processes: Sequence[_Process], folder: Path, what: str) -> JobFailed:
    """Ask for records, keep what was written, and return the error that shows the ends of it."""
    _ask_for_records(processes, folder)
    _end(processes)
    kept = FAILED / time.strftime("%Y%m%d-%H%M%S") / folder.name
    shutil.copytree(folder, kept, ignore=_unreadable)
    ends = []
    for log in sorted(folder.rglob("*.log")):
        lines = log.read_text(errors="replace").splitlines()[-LINES_SHOWN:]
        ends.append(f"--- {log.relative_to(folder)}\n" + "\n".join(lines))
    return JobFailed("\n".join([what, *ends, f"all of it is in {kept}"]))


def _unreadable(folder: str, names: list[str]) -> list[str]:
    return [
        name
        for name in names
        if not os.path.isfile(path := os.path.join(folder, name)) and not os.path.isdir(path)
    ]


def _ask_for_records(processes: Sequence[_Process], folder: Path) -> None:
    alive = [process for process in processes if process.popen.poll() is None]
    for process in alive:
        with contextlib.suppress(OSError):
            assert process.popen.stdin is not None
            process.popen.stdin.write("dump\n")
            process.popen.stdin.flush()
    ranks = [process.name.removeprefix("rank ") for process in alive if process.name.startswith("rank ")]
    deadline = time.monotonic() + DUMP_S
    while time.monotonic() < deadline and not all(
        (folder / DONE_DUMPING.format(rank)).exists() for rank in ranks
    ):
        time.sleep(POLL_S)
    for process in alive:
        with contextlib.suppress(OSError):
            if f"dumped{process.name.removeprefix('rank ')}" not in os.listdir(folder):
                # A rank whose interpreter hangs prints stacks on the one signal; a program and all its children,
                # which listen to nothing, print them and end on the other.
                is_rank = process.name.startswith("rank ")
                os.killpg(process.popen.pid, signal.SIGUSR1 if is_rank else signal.SIGABRT)
                time.sleep(1.0)


def _end(processes: Sequence[_Process]) -> None:
    for process in processes:
        with contextlib.suppress(OSError):
            assert process.popen.stdin is not None
            process.popen.stdin.close()
    deadline = time.monotonic() + 5.0
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.popen.wait(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.popen.pid, signal.SIGKILL)
        process.popen.wait()
