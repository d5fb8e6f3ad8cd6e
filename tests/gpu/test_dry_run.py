"""The suite for devices, without one: its watchdog, and one job of each kind on CPU ranks."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import checks, small_jobs, watched_job
from tests.gpu.job_rank import format_records
from tests.gpu.lab import Lab, write_report
from tests.gpu.test_many_gpus import diamond_on
from tests.gpu.watched_job import JobFailed, run_job, run_program
from tests.ranks import run_kept_ranks
from tests.runtime.test_equality import job

# ---- the watchdog -------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep what jobs leave behind out of the checkout."""
    monkeypatch.setattr(watched_job, "FAILED", tmp_path / "failed")
    return tmp_path / "failed"


def test_no_process_outlives_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "child"
    with pytest.raises(JobFailed, match=r"no answer from rank 0 \(limit 5 s\)"):
        run_job(small_jobs.start_a_child_and_hang, 1, str(path), limit_s=5)
    deadline = time.monotonic() + 10
    while _runs(int(path.read_text())) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _runs(int(path.read_text()))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_hang_shows_what_was_launched_and_where(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_job, "GRACE_S", 1.0)
    with pytest.raises(JobFailed) as caught:
        run_job(small_jobs.wait_for_nothing, 2, limit_s=120)
    said = str(caught.value)
    assert "no answer from rank 0 " in said and "in wait_for_nothing" in said
    assert "ValueError: nothing was sent" in said and list(folder.rglob("rank0.log")), "what was said is kept"
    assert "in recv" in said and "rank 0, records of communicators:" in said
    assert "gloo:barrier" in said, "gloo records collectives; NCCL its messages too"


def test_records_begin_with_what_has_not_completed() -> None:
    entries = [
        {"profiling_name": f"nccl:send {i}", "state": "completed", "p2p_seq_id": i, "input_sizes": [[4]]}
        for i in range(20)
    ]
    entries[3]["state"] = "started"
    lines = format_records(entries).splitlines()
    assert lines[0] == "20 launched, 1 not completed"
    assert lines[1].split()[:3] == ["started", "nccl:send", "3"] and "nccl:send 19" in lines[-1]


def test_a_command_that_is_wrong_is_a_failure() -> None:
    with pytest.raises(JobFailed, match="exit code 2"):
        run_program(["no-such-command"], limit_s=60)


def test_a_command_that_hangs_shows_where_all_its_processes_are() -> None:
    with pytest.raises(JobFailed) as caught:
        run_program(
            ["demo", "--ranks", "2", "--stages", "2"], limit_s=6, environment={"DS_ACCELERATOR": "cpu"}
        )
    assert "no end in 6 s" in str(caught.value) and "(most recent call first)" in str(caught.value)


def test_the_report_holds_each_number_with_its_command(tmp_path: Path) -> None:
    lab = Lab(device="cuda", devices=["0"], test="test_swap")
    lab.record("swap over plain", 1.2, most=1.3, command="gpp bench swap")
    with pytest.raises(AssertionError, match=r"captured over eager: 1.1, at most 1.02"):
        lab.record("captured over eager", 1.1, most=1.02)
    text = write_report(lab, {"torch": "2.12"}, {"test_swap": "passed"}, tmp_path).read_text()
    assert '| swap over plain | 1.2 | 1.3 | `gpp bench swap; make test-gpu ARGS="-k test_swap"` |' in text
    assert "| captured over eager | 1.1 **above** | 1.02 |" in text and "| test_swap | passed |" in text
    assert [n["is_good"] for n in json.loads((tmp_path / "gpu_report.json").read_text())["numbers"]] == [
        True,
        False,
    ]


def test_a_second_run_adds_to_the_report_and_says_what_it_did_not_reach(tmp_path: Path) -> None:
    machine = {"revision": "abc", "devices": "1 x H100"}
    first = Lab(device="cuda", devices=["0"], test="test_swap")
    first.record("swap over plain", 1.2, most=1.3)
    first.record("step, ms", 7.0)
    write_report(first, machine, {"test_swap": "passed", "test_demo": "not reached"}, tmp_path)
    second = Lab(device="cuda", devices=["0"], test="test_swap")
    second.record("swap over plain", 1.1, most=1.3)
    tests = {"test_swap": "not reached", "test_eager": "not reached: 530 s are over"}
    text = write_report(second, machine, tests, tmp_path).read_text()
    assert "| swap over plain | 1.1 |" in text and "| step, ms | 7 |" in text and "1.2" not in text
    assert "| test_swap | passed |" in text and "2 of 3 tests were not reached" in text
    other = write_report(Lab(device="cuda", devices=["0"]), {**machine, "revision": "def"}, {}, tmp_path)
    assert "swap" not in other.read_text(), "another revision begins anew"


def test_nothing_is_begun_when_the_time_is_over_and_what_runs_is_ended() -> None:
    lab = Lab(device="cuda", devices=["0"], seconds=30.0)
    assert lab.has_time()
    lab.began -= 15.0
    assert not lab.has_time()
    limits: list[float] = []

    def hang(*arguments: Any, limit_s: float, environment: Any) -> list[Any]:
        limits.append(limit_s)
        lab.began -= limit_s
        raise JobFailed("no end in time")

    lab.run_ranks = hang
    with pytest.raises(pytest.skip.Exception, match="not reached: 30 s were over within it"):
        lab.run(hang, 1, limit_s=240.0)
    assert limits[0] <= 15.0
    lab.seconds = 1e6
    with pytest.raises(JobFailed):  # a job that has its own limit fails
        lab.run(hang, 1, limit_s=240.0)


# ---- one job of each kind -----------------------------------------------------------------------------------


def run_kept(function: Any, num_ranks: int, *arguments: Any, limit_s: float, environment: Any) -> list[Any]:
    return run_kept_ranks(function, num_ranks, *arguments, timeout_s=limit_s)


@pytest.fixture(scope="module")
def dry() -> Lab:
    """A lab of CPU ranks that the other tests keep, where starting a job takes no time."""
    return Lab(device="cpu", devices=[""] * 4, run_ranks=run_kept, test="dry")


def test_equality(dry: Lab) -> None:
    native, megatron, short = checks.equality(
        dry,
        2,
        [
            {**job("gpt2", stages=2), "steps": 2},
            {**diamond_on(2, 0, "megatron"), "steps": 2},
            {**job("short_edges", plan={"stages": [{"modules": ["stem"]}, {"modules": ["*"]}]}), "steps": 2},
        ],
        "dry",
    )
    assert [answers[0]["transport"] for answers in (native, megatron, short)] == [
        "GlooTransport", "MegatronTransport", "GlooTransport",
    ]  # fmt: skip


def test_memory(dry: Lab) -> None:
    checks.less_memory(dry, 1)
    checks.capped_memory(dry, 2, zero=1)


def test_steps_that_are_looked_at(dry: Lab) -> None:
    checks.no_reads(dry, 2, num_steps=1)
    checks.tracing(dry, 2)
    checks.captured_over_eager(dry, rounds=1)


def test_other_ways_to_run(dry: Lab) -> None:
    checks.evaluation(dry, 2, sizes=(4, 1))
    checks.mode_async(dry, 2, num_batches=4)
    checks.tensor_parallel(dry, 4, "tensor_on_four", 1)


def test_commands_and_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(device="cpu", devices=[""], test="dry")
    checks.bench_swap(lab, "--steps", "1", "--layers", "2")
    assert [n.most for n in lab.numbers if "swap at twice" in n.what] == [checks.MOST_SWAP]
    assert os.environ.get("CUDA_VISIBLE_DEVICES") is None or not lab.numbers[0].is_held
