"""A job under torchrun's elastic agents that loses a host goes on, on the ranks that are left, where it was saved last."""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpp_plugin.launch import reserved_port
from tests.processor_time import Family
from tests.ranks import run_kept_ranks
from tests.waits import Patience, communicate

ROOT = Path(__file__).parent.parent.parent
STEPS = 16
LIMIT_S = 200
QUICK = "last_call_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=3"
"""How long torchrun waits for a host that may come, and for one that is silent; its own numbers are 30 s and 15 s."""


def command(nodes: str, ranks: int, directory: Path, *options: str) -> list[str]:
    program = str(Path(sys.executable).parent / "torchrun")
    job = ["examples/train_elastically.py", "--steps", str(STEPS), "--every", "4", "--save", str(directory)]
    return [program, "--nnodes", nodes, "--nproc-per-node", str(ranks), *options, *job]


@contextlib.contextmanager
def agent(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run an agent of torchrun's with its ranks in a session of their own, which ends with the block."""
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill an agent and its ranks, as a host that loses its power does."""
    for pid in ranks_of(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.kill()
    process.wait()


def ranks_of(agent: int) -> list[int]:
    """Return an agent's ranks, which have sessions of their own."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(agent)], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


def losses(log: Path) -> dict[int, list[str]]:
    """Return the losses of each step, of all starts that came to it."""
    found: dict[int, list[str]] = {}
    for step, loss in re.findall(r"^step (\d+)  loss (\S+)$", log.read_text(), re.MULTILINE):
        found.setdefault(int(step), []).append(loss)
    return found


def go_on(directory: str) -> list[float]:
    """Train as the example does, from a directory's last checkpoint; return the losses."""
    import deepspeed

    example = runpy.run_path(str(ROOT / "examples" / "train_elastically.py"))
    torch.manual_seed(0)
    engine = deepspeed.initialize(
        model=example["TwoViews"](), config=example["CONFIG"], training_data=example["make_dataset"]()
    )[0]
    assert engine.resume(directory) == {}
    return [float(engine.train_batch()) for _ in range(engine.global_steps, STEPS)]


def test_a_job_that_loses_a_host_goes_on_without_it(tmp_path: Path) -> None:
    saved, kept, log = tmp_path / "saved", tmp_path / "kept", tmp_path / "log.txt"
    with reserved_port() as port:
        collectives = ["--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", f"127.0.0.1:{port}"]
        # the one that does not have torchrun's own store is lost
        ways = [[*collectives, "--rdzv-conf", f"{QUICK},is_host={n}", "--max-restarts", "1"] for n in (1, 0)]
        with agent(command("1:2", 2, saved, *ways[0]), log) as first:
            with agent(command("1:2", 1, saved, *ways[1]), tmp_path / "second.txt") as second:
                family = Family(first.pid, second.pid)
                patience = Patience(LIMIT_S, family.used_s)
                while max(losses(log), default=0) < 6:
                    assert first.poll() is None and not patience.is_over(), log.read_text()[-4000:]
                    time.sleep(0.02)
                end(second)
                lost_after = max(losses(log))
            shutil.copytree(saved, kept)
            communicate(first, limit_s=LIMIT_S)
            assert first.returncode == 0, log.read_text()[-4000:]
    said = log.read_text()
    starts = re.findall(r"^start (\d): (\d) ranks, (.*)$", said, re.MULTILINE)
    assert starts[0] == ("0", "3", "from the beginning") and len(starts) == 2, said[-4000:]
    number, ranks, come = starts[1]
    assert (number, ranks) == ("1", "2") and come.startswith("from step "), "on the ranks that are left"
    last_saved = int(come.split()[-1])
    assert last_saved >= 4 and last_saved % 4 == 0 and lost_after - last_saved <= 5, (
        "from the last checkpoint"
    )
    assert "rank 2" in said and "failed first" in said, "the rank that was lost is named"
    # a job of two ranks that nothing happened to, from the same checkpoint
    found = losses(log)
    assert set(found) == set(range(1, STEPS + 1))
    for step, loss in enumerate(run_kept_ranks(go_on, 2, str(kept))[0], start=last_saved + 1):
        assert float(found[step][-1]) == pytest.approx(loss, rel=1e-6), step
