"""The trace of a real mini-batch: every task and message with its stage, micro-batch, kind and bytes."""

from __future__ import annotations

import json
from pathlib import Path

from tests.ranks import run_ranks
from tests.runtime import jobs
from tests.runtime.test_halves import SLICED, SPLIT


def test_a_trace_shows_tasks_and_messages(tmp_path: Path) -> None:
    one = jobs.by_hand("diamond", "stem", "up", steps=1, overrides={0: SLICED, 1: SPLIT})
    one["block"]["trace_path"] = str(tmp_path / "step{step}.json")
    run_ranks(jobs.train, 3, [one], timeout_s=240)
    trace = json.loads((tmp_path / "step1.json").read_text())["traceEvents"]
    events = [event for event in trace if event["ph"] == "X"]
    names = {event["name"] for event in events if event["pid"] == 0}
    assert {"0F0a", "0F0b", "0F1a", "0F1b", "0F2", "0F3", "0B0", "0B1", "0B2", "0B3", "step"} <= names
    names = {event["name"] for event in events if event["pid"] == 1}
    assert {f"1{kind}{i}" for kind in "FIW" for i in range(4)} <= names
    assert all(event["args"]["stage"] and event["args"]["kind"] == event["cat"] for event in events)
    moved = {}
    for kind in ("send", "receive"):
        found = [event for event in events if event["cat"] == kind]
        assert all(event["args"]["bytes"] > 0 and event["args"]["micro_batch"] in range(4) for event in found)
        moved[kind] = sorted((event["args"]["edge"], event["args"]["bytes"]) for event in found)
    assert moved["send"] == moved["receive"]
    for end in "sf":
        assert len([event for event in trace if event["ph"] == end]) == len(moved["send"])
