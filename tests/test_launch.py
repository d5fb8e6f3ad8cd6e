"""Launching ranks: events arrive, failures name the rank and its last words, nobody is left behind."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from gpp_plugin.errors import RuntimeFailure
from gpp_plugin.launch import run_ranks
from tests.fault_job import FaultSettings, train
from tests.fault_runs import interpreters
from tests.processor_time import Family
from tests.waits import Patience


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Return a function that makes a module of the given text and runs it on ranks."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))

    def run(text, *arguments, num_ranks=2, timeout_s=30.0, **options):
        (tmp_path / "launched_job.py").write_text(
            "import os, sys, time\nfrom gpp_plugin.launch import emit_event\n" + text
        )
        return run_ranks("launched_job", arguments, num_ranks=num_ranks, timeout_s=timeout_s, **options)

    return run


def has_ended(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_events_come_in_order_with_the_usual_variables(job):
    text = """
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "EXTRA")
if os.environ["RANK"] == "0":
    emit_event(variables=[os.environ[name] for name in names], arguments=sys.argv[1:])
    for step in range(2000):
        emit_event(step=step)
"""
    events = list(job(text, "a b", num_ranks=3, environment={"EXTRA": "x"}))
    assert events[0] == {"variables": ["0", "3", "0", "3", "x"], "arguments": ["a b"]}
    assert [event["step"] for event in events[1:]] == list(range(2000))


def test_a_failed_rank_is_named_and_the_others_are_ended(job):
    text = """
if os.environ["RANK"] == "0":
    time.sleep(600)
time.sleep(0.5)
print("something about the cause")
sys.exit(3)
"""
    with pytest.raises(RuntimeFailure) as raised:
        list(job(text))
    assert str(raised.value) == "rank 1 ended with exit code 3; it said last:\nsomething about the cause"


def test_ranks_that_hang_are_ended_after_the_time(job):
    text = """
if os.environ["RANK"] == "0":
    emit_event(pid=os.getpid())
    print("waiting for ever", flush=True)
time.sleep(60)
"""
    pids = []
    with pytest.raises(RuntimeFailure) as raised:
        for event in job(text, timeout_s=3.0):
            pids.append(event["pid"])
    assert str(raised.value) == "the 2 ranks did not end within 3 s; rank 0 said last:\nwaiting for ever"
    assert len(pids) == 1 and has_ended(pids[0])


def test_leaving_early_ends_the_ranks(job):
    events = job("emit_event(pid=os.getpid())\ntime.sleep(60)\n", num_ranks=1)
    pid = next(events)["pid"]
    assert not has_ended(pid)
    events.close()
    assert has_ended(pid)


def test_the_port_is_kept_for_rank_0(job):
    text = """
import socket
port = int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    other = socket.socket()
    try:
        other.bind(("", port))
        emit_event(is_free_for_others=True)
    except OSError:
        emit_event(is_free_for_others=False)
    server = socket.create_server(("", port))  # sets SO_REUSEADDR, as torch's store does
    emit_event(address=server.getsockname())
"""
    (other, own) = job(text)
    assert other == {"is_free_for_others": False}
    assert own["address"][0] == "0.0.0.0"


def listening(root):
    """Return the addresses at which processes listen that one has started, that one apart: by process."""
    with contextlib.suppress(psutil.Error):
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                found = [each.laddr.ip for each in process.net_connections("tcp") if each.status == "LISTEN"]
                yield process.pid, found


@pytest.mark.parametrize("way", ["torchrun", "deepspeed", "plain", "gpp"])
def test_on_one_machine_all_that_ranks_listen_at_is_loopback(way, tmp_path):
    seen = {}
    with contextlib.ExitStack() as stack:
        if way == "gpp":
            program = [Path(sys.executable).parent / "gpp", "doctor", "--gpus", "2", "--cpu"]
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            roots = [stack.enter_context(subprocess.Popen(program, **quiet)).pid]
        else:
            settings = FaultSettings(directory=str(tmp_path), block={"stages": 2}, steps=2)
            roots = stack.enter_context(interpreters(way, train, settings, 2)).roots
        patience = Patience(120.0, Family(*roots).used_s)
        processes = [psutil.Process(root) for root in roots]
        while any(each.is_running() and each.status() != "zombie" for each in processes):
            assert not patience.is_over()
            for process in processes:
                for pid, addresses in listening(process):
                    seen.setdefault(pid, set()).update(addresses)
            time.sleep(0.05)
    if way == "torchrun":
        del seen[roots[0]]  # its own store (docs/several_nodes.md)
    assert len([pid for pid in seen if seen[pid]]) >= 2, seen
    assert set.union(*seen.values()) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, seen
