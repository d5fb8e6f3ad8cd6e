"""Runs the ranks of a `fault_job` as a launcher would, and says how each of them ended, when, and what it said last.

By default ranks are forked from a process that has imported what they need. ``way`` starts interpreters instead:

    plain        one process a rank
    torchrun     `torchrun --standalone`
    deepspeed    DeepSpeed's launcher
    hosts        one process a rank on two hosts: name spaces for network, processes and host name, joined by a switch (as root)
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpp_plugin.launch import reserved_port
from tests.fault_job import train
from tests.faults import LINK, STRUCK
from tests.processor_time import Family
from tests.ranks import _CONTEXT, _start_server
from tests.waits import Patience

ROOT = Path(__file__).parent.parent
ADDRESSES = tuple(f"10.213.9.{number}" for number in range(1, 9))
"""Of the hosts that `hosts` makes."""
LAUNCHERS_GRACE_S = 30.0
"""How long torchrun leaves ranks that do not end by a TERM, until it kills them."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How one rank ended.

    Args:
        code: None where it had to be killed; of a rank that a launcher has started, the launcher's.
        seconds: after the fault has struck, or the first rank ended; without those in which it was ready to run and a
            busy machine ran others.
    """

    code: int | None
    said: str
    seconds: float

    @property
    def last_line(self) -> str:
        """Return the last line of its output that is not torch's or Python's clearing up."""
        lines = [line for line in self.said.strip().splitlines() if line.strip()]
        return lines[-1] if lines else ""


def run_job(
    settings: Any,
    num_ranks: int,
    *,
    limit_s: float = 120.0,
    job: Callable[[Any], None] = train,
    way: str = "",
) -> list[Ended]:
    """Run the job, and return how each rank ended; those that live at the limit are killed.

    A rank that is stopped, or sleeps, is killed when all others have ended; a launcher gets its time to do so.

    Args:
        settings: what ``job`` is called with on every rank; has a ``directory`` and a ``fault``.
    """
    directory = Path(settings.directory)
    with contextlib.ExitStack() as stack:
        if way:
            started = stack.enter_context(interpreters(way, job, settings, num_ranks))
        else:
            started = stack.enter_context(forked_ranks(job, settings, num_ranks))
        begin = time.time()
        patience = Patience(limit_s, Family(*started.roots).used_s)
        kind = settings.fault["kind"] if settings.fault else ""
        stays = {settings.fault["rank"]} if kind in ("stop", "sleep") else set()
        if getattr(settings, "rank_zero_only", "") and not settings.others_go_on:
            stays = set(range(1, num_ranks))
        ended: dict[int, float] = {}
        struck, delays = directory / STRUCK, [_Delay() for _ in range(num_ranks)]
        while not patience.is_over():
            for rank in set(range(num_ranks)) - set(ended):
                delays[rank].read(started.pid(rank), is_counted=struck.exists() or bool(ended))
                if started.has_ended(rank):
                    ended[rank] = time.time()
            if set(range(num_ranks)) - set(ended) <= stays:
                break
            time.sleep(0.05)
        codes = started.codes(ended)
    first = struck.stat().st_mtime if struck.exists() else min(ended.values(), default=begin)
    files = [directory / f"rank{rank}.txt" for rank in range(num_ranks)]
    return [
        Ended(
            code=codes.get(rank) if rank in ended else None,
            said=files[rank].read_text(errors="replace") if files[rank].exists() else "",
            seconds=ended.get(rank, time.time()) - first - delays[rank].seconds,
        )
        for rank in range(num_ranks)
    ]


class _Delay:
    """Seconds for which a process's first thread has waited for a processor, since they count."""

    def __init__(self) -> None:
        self.seconds, self._before = 0.0, None

    def read(self, pid: int | None, *, is_counted: bool) -> None:
        """Look at a process; None: it is not known."""
        with contextlib.suppress(OSError, IndexError):  # it has ended
            now = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
            if is_counted and self._before is not None:
                self.seconds += now - self._before
            self._before: float | None = now


@dataclass(frozen=True, kw_only=True)
class Started:
    """Ranks that run.

    Args:
        roots: processes that have started them, or are them.
        pid: called with a rank, returns its process as it is known here.
        has_ended: called with a rank.
        codes: called with the ranks that have ended; returns what they ended with.
    """

    roots: list[int]
    pid: Callable[[int], int | None]
    has_ended: Callable[[int], bool]
    codes: Callable[[Any], dict[int, int | None]]


@contextlib.contextmanager
def forked_ranks(job: Callable[[Any], None], settings: Any, num_ranks: int) -> Iterator[Started]:
    """Start ranks from the process that has imported what they need; kill those that are left behind the block."""
    _start_server()
    with reserved_port() as port:
        processes = [
            _CONTEXT.Process(target=_fork_rank, args=(job, settings, rank, num_ranks, port), daemon=True)
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        try:
            yield Started(
                roots=[process.pid for process in processes if process.pid],
                pid=lambda rank: processes[rank].pid,
                has_ended=lambda rank: processes[rank].exitcode is not None,
                codes=lambda ended: {rank: processes[rank].exitcode for rank in ended},
            )
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join(timeout=5)


@contextlib.contextmanager
def interpreters(way: str, job: Callable[[Any], None], settings: Any, num_ranks: int) -> Iterator[Started]:
    """Start ranks as a user does; kill all that is left behind the block."""
    directory = Path(settings.directory)
    given = directory / "job.pickle"
    given.write_bytes(pickle.dumps((job, settings)))
    tools = Path(sys.executable).parent
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    program = [sys.executable, "-m", "tests.fault_runs", str(given)]
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(reserved_port())
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        commands = [program] * num_ranks
        if way == "torchrun":
            commands = [[str(tools / way), "--standalone", "--nproc-per-node", str(num_ranks), *program[1:]]]
        elif way == "deepspeed":
            options = ["--num_gpus", str(num_ranks), "--master_port", str(port), "--module", *program[2:]]
            commands = [[str(tools / way), *options]]
        elif way == "hosts":
            environment |= {"MASTER_ADDR": ADDRESSES[0], "GLOO_SOCKET_IFNAME": LINK}
            inside = stack.enter_context(hosts(2))
            commands = [[*inside[rank * 2 // num_ranks], *program] for rank in range(num_ranks)]
        has_launcher = len(commands) < num_ranks
        processes = []
        for rank, command in enumerate(commands):
            numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
            processes.append(
                subprocess.Popen(
                    command,
                    env={**environment, **({} if has_launcher else numbers)},
                    cwd=ROOT,
                    start_new_session=True,
                    stdout=(directory / f"launcher{rank}.txt").open("wb"),
                    stderr=subprocess.STDOUT,
                )  # fmt: skip
            )

        def pid(rank: int) -> int | None:
            with contextlib.suppress(OSError, ValueError, IndexError):  # not yet, or no more
                if way == "hosts":
                    return int(children(processes[rank].pid)[0])
                return int((directory / f"rank{rank}.pid").read_text())
            return None

        def has_ended(rank: int) -> bool:
            if not has_launcher:
                return processes[rank].poll() is not None
            own = pid(rank)
            return processes[0].poll() is not None or (own is not None and not Path(f"/proc/{own}").exists())

        def codes(ended: Any) -> dict[int, int | None]:
            if has_launcher:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    processes[0].wait(LAUNCHERS_GRACE_S + 15.0)
            return {rank: processes[0 if has_launcher else rank].poll() for rank in ended}

        try:
            yield Started(roots=[each.pid for each in processes], pid=pid, has_ended=has_ended, codes=codes)
        finally:
            left = [int(file.read_text()) for file in directory.glob("rank*.pid")] if way != "hosts" else []
            for pid in (*left, *(each.pid for each in processes)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            for process in processes:
                process.wait()


def can_make_hosts() -> bool:
    """Return whether `hosts` can."""
    return os.geteuid() == 0 and all(shutil.which(name) for name in ("unshare", "nsenter", "ip"))


@contextlib.contextmanager
def hosts(number: int) -> Iterator[list[list[str]]]:
    """Make hosts that a switch joins; return how a command begins that runs in each of them.

    A host whose ``LINK`` is set down is lost to the others: no packet comes or goes, and no connection is told.
    """
    spaces = ["unshare", "--net", "--pid", "--uts", "--mount", "--fork", "--mount-proc"]
    holders = [
        subprocess.Popen([*spaces, "sleep", "3600"]) for _ in range(number + 1)
    ]  # the last one is the switch
    try:
        firsts = []
        for holder in holders:
            while not children(holder.pid):
                time.sleep(0.01)
            firsts.append(children(holder.pid)[0])
        inside = [["nsenter", "--all", "--target", first] for first in firsts[:-1]]
        switch = ["nsenter", "--net", "--target", firsts[-1]]  # it sees the others' processes
        made = ["ip link add switch type bridge", "ip link set switch up"]
        for host, first in enumerate(firsts[:-1]):
            other = f"netns /proc/{first}/ns/net name {LINK}"
            made += [
                f"ip link add port{host} type veth peer {other}",
                f"ip link set port{host} master switch up",
            ]
        lines = [(switch, line) for line in made]
        for host, command in enumerate(inside):
            lines += [
                (command, f"hostname host{host}"),
                (command, "ip link set lo up"),
                (command, f"ip address add {ADDRESSES[host]}/24 dev {LINK}"),
                (command, f"ip link set {LINK} up"),
            ]
        for command, line in lines:
            subprocess.run([*command, *line.split()], check=True)
        yield inside
    finally:
        for holder in holders:  # with it goes the first process of its name space, and so all others
            for child in children(holder.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(child), 9)
            holder.kill()
            holder.wait()


def children(pid: int) -> list[str]:
    """Return the processes that the first thread of one has started and not waited for."""
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def _fork_rank(job: Callable[[Any], None], settings: Any, rank: int, num_ranks: int, port: int) -> None:
    """Run one rank as Python runs a script: what is not caught is printed, and what is to be done at the end is done."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    code = 0
    try:
        _run_rank(job, settings)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    ctypes.pythonapi.Py_Exit(code)  # the interpreter's own end, with all destructors


def _run_rank(job: Callable[[Any], None], settings: Any) -> None:
    """Do the job, and write into a file of the rank's own."""
    own = Path(settings.directory) / f"rank{os.environ['RANK']}"
    out = os.open(own.with_suffix(".txt"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)
    own.with_suffix(".pid").write_text(str(os.getpid()))
    os.environ[STRUCK] = str(Path(settings.directory) / STRUCK)
    job(settings)


def _await_others(directory: Path) -> None:
    """Wait until all ranks have started: interpreters of a busy machine come later than a short limit."""
    import deepspeed  # noqa: F401

    (directory / f"rank{os.environ['RANK']}.started").touch()
    while len(list(directory.glob("*.started"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.05)


if __name__ == "__main__":
    file = next(each for each in sys.argv[1:] if not each.startswith("--local_rank"))  # deepspeed's
    _await_others(Path(file).parent)
    _run_rank(*pickle.loads(Path(file).read_bytes()))
