"""Plans, timelines, times of a step and memory reports as text, figures and traces."""

import dataclasses
import itertools
import json

import pytest

from gpp_plugin.ir.memory_report import COUNTED, HeldBytes, MemoryCounts, MemoryReport, RankMemory
from gpp_plugin.ir.plan import MemoryBreakdown
from gpp_plugin.ir.timeline import EventKind, Timeline
from gpp_plugin.report.chrome_trace import chrome_trace
from gpp_plugin.report.plan_text import format_memory_report, format_plan, format_saved_in_flight
from gpp_plugin.report.timeline_chart import (
    PHASES,
    PhaseTimes,
    format_messages,
    format_phases,
    format_timeline,
    forward_overlap_us,
    forward_overlaps_us,
    mean_phases,
    summarize_timeline,
)
from gpp_plugin.report.units import format_bytes, format_ms, format_table
from gpp_plugin.simulate.predict import simulate_plan
from tests.report.conftest import event_of

PLAN = """\
CLIPModel: 3 stages in depth 2 on 4 ranks (planner graphpipe), 9.00 ms a step predicted
mini-batch 8 samples, one loss on 8

┌────────────────┐   ┌──────────────┐
│ 0 vision_model │   │ 1 text_model │
│ ranks 0-1      │   │ rank 2       │
└───┬────────────┘   └──┬───────────┘
    │ 2.00 KiB          │ 2.10 KiB
    └───────────┐   ┌───┘
                ▼   ▼
             ┌────────┐
             │ 2 loss │
             │ rank 3 │
             └────────┘

stage           ranks  micro-batches  in flight  fwd ms  bwd ms   load    memory  blocks
0 vision_model    0-1          2 x 4          2    1.00    2.00  100 %  3.00 MiB       2
1 text_model        2          2 x 4          2   0.500    1.00   50 %  1.00 MiB       2
2 loss              3          1 x 8          1   0.250   0.500   12 %         -       2

what its step takes is not in this plan, or the plan was changed since: gpp plan --out writes it

- the loss mixes the samples of a batch"""

NARROW = """\
0 vision_model, ranks 0-1 <- inputs only
1 text_model, rank 2 <- inputs only
2 loss, rank 3 <- 0 vision_model (2.00 KiB), 1 text_model (2.10 KiB)"""

GANTT = """\
measured: 0.600 ms, bubble 45 %, 128 B sent; one column is 0.050 ms
rank 0 vision_model  0011..aabb=#   67 %
rank 1 vision_model  0011..aabb=#   67 %
rank 2 text_model    .01...ab...#   33 %
rank 3 loss          ....0a.....#   17 %
digit: forward of that micro-batch, letter: backward (a is 0), = reduce, # step, . idle"""


def test_plan(plan):
    assert format_plan(plan) == PLAN


def test_a_short_branch_holds_less_than_its_depth(plan):
    assert format_saved_in_flight(plan) == ""
    stages = tuple(
        dataclasses.replace(plan.stages[0], name=name, micro_batch_size=1, in_flight=in_flight, ranks=(rank,))
        for rank, (name, in_flight) in enumerate([("a", 4), ("b", 3), ("c", 2), ("short", 2), ("loss", 1)])
    )
    edges = tuple(
        dataclasses.replace(plan.edges[0], src=src, dst=dst) for src, dst in [(0, 1), (1, 2), (2, 4), (3, 4)]
    )
    deep = dataclasses.replace(plan, stages=stages, edges=edges)
    line = "in flight by what successors need, not by depth: 3 short 2 (not 4)"
    assert format_saved_in_flight(deep) == line
    assert line in format_plan(deep).splitlines()
    links = [(i, i + 1) for i in range(9)] + [(10 + i, 9) for i in range(8)]
    many = dataclasses.replace(
        plan,
        mini_batch=16,
        stages=tuple(
            dataclasses.replace(stages[0], in_flight=2, name=f"s{i}", ranks=(i,)) for i in range(18)
        ),
        edges=tuple(dataclasses.replace(edges[0], src=src, dst=dst) for src, dst in links),
    )
    assert format_saved_in_flight(many).endswith(" and 10 more")


def test_a_plan_too_wide_to_draw_is_listed(plan):
    assert format_plan(plan, width=20).split("\n\n")[1] == NARROW


def test_a_plan_without_predictions_has_no_figures(plan):
    stages = tuple(dataclasses.replace(s, forward_us=0.0, backward_us=0.0) for s in plan.stages)
    text = format_plan(dataclasses.replace(plan, stages=stages, iteration_us=0.0, notes=()))
    assert "predicted" not in text
    assert text.splitlines()[-1].split() == ["2", "loss", "3", "1", "x", "8", "1", "-", "-", "-", "-", "2"]


def test_gantt(plan, timeline):
    assert format_timeline(timeline, plan, width=12) == GANTT


def test_a_column_shows_what_takes_most_of_it(plan):
    events = tuple(
        event_of(EventKind.FORWARD, start, end, micro_batch=micro_batch)
        for micro_batch, (start, end) in enumerate(itertools.pairwise((0, 70, 100, 130, 200)))
    )
    row = format_timeline(Timeline(source="predicted", plan="", events=events), plan, width=2).splitlines()[1]
    assert row == "rank 0 vision_model  03  100 %"


def test_summary(timeline):
    summary = summarize_timeline(timeline)
    assert summary.iteration_us == 600
    assert summary.busy_us == {0: 400, 1: 400, 2: 200, 3: 100}
    assert summary.bubble_ratio == pytest.approx(1 - 1100 / (4 * 500))
    assert summary.communication_us == {0: 50, 1: 50, 2: 60}
    assert summary.bytes_sent == 128
    assert forward_overlap_us(timeline, [0, 1]) == 100  # text runs from 50 to 150, vision from 0 to 200
    assert forward_overlaps_us(timeline, [0, 1]) == {0: 50, 1: 50}
    assert forward_overlaps_us(timeline, [0, 2]) == {0: 0, 1: 0}


def test_trace(plan, timeline):
    trace = json.loads(json.dumps(chrome_trace(timeline, plan)))
    events = trace["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(timeline.events)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    stages = ("0 vision_model", "0 vision_model", "1 text_model", "2 loss")
    assert names == {rank: f"rank {rank}: stage {stage}" for rank, stage in enumerate(stages)}
    assert next(event for event in complete if event["name"] == "2B0") == {
        "ph": "X", "name": "2B0", "cat": "backward", "pid": 3, "tid": 0, "ts": 250, "dur": 50,
        "args": {"stage": "loss", "kind": "backward", "bytes": 0, "micro_batch": 0},
    }  # fmt: skip
    sends = [event for event in complete if event["cat"] == "send"]
    assert [event["name"] for event in sends] == ["send text_model -> loss"] * 2
    assert [event["args"]["bytes"] for event in sends] == [64, 64]


def test_events_of_one_track_of_a_trace_do_not_overlap(plan, timeline):
    ends = {}
    for event in chrome_trace(timeline, plan)["traceEvents"]:
        if event["ph"] == "X":
            track = (event["pid"], event["tid"])
            assert event["ts"] >= ends.get(track, 0)
            ends[track] = event["ts"] + event["dur"]
    assert len({tid for pid, tid in ends if pid == 2}) == 3  # compute, and two sends at once


def test_arrows_of_a_trace_lead_from_each_send_to_its_receive(plan):
    """Two micro-batches of the text branch make one of the loss; the second is sent while the first is waited for."""

    def message(kind, rank, peer, micro_batch, start, end):
        where = {"rank": rank, "stage": plan.stage_of_rank(rank), "edge": 1, "peer": peer}
        return event_of(kind, start, end, micro_batch=micro_batch, **where)

    send, receive = EventKind.SEND, EventKind.RECEIVE
    events = (
        message(receive, 3, 2, 0, 0, 40),
        message(send, 2, 3, 0, 10, 12),
        message(send, 2, 3, 1, 30, 32),
        message(receive, 3, 2, 0, 40, 45),
        message(send, 3, 2, 0, 60, 61),
        message(receive, 2, 3, 1, 50, 70),
    )
    trace = chrome_trace(Timeline(source="measured", plan="", events=events), plan)["traceEvents"]
    arrows = {}
    for event in trace:
        if event["ph"] in "sf":
            arrows.setdefault(event["id"], []).append((event["ph"], event["pid"], round(event["ts"])))
    assert sorted(arrows.values()) == [
        [("s", 2, 10), ("f", 3, 40)],
        [("s", 2, 30), ("f", 3, 45)],
        [("s", 3, 60), ("f", 2, 70)],
    ]
    names = [event["name"] for event in trace if event["ph"] == "X" and event["pid"] == 3]
    assert names == ["receive text_model -> loss"] * 2 + ["send gradient loss -> text_model"]


def test_units():
    assert [format_bytes(n) for n in (0, 1023, 1024, 99.9 * 1024, 1010 * 1024, 2**50)] == [
        "0 B", "1023 B", "1.00 KiB", "99.9 KiB", "0.99 MiB", "1048576 GiB"
    ]  # fmt: skip
    shown = [format_ms(t) for t in (0, 999, 1000, 99_900, 100_000)]
    assert shown == ["0.000", "0.999", "1.00", "99.9", "100"]
    assert format_table(["a", "b"], [["x", "10"]], left=2) == "a  b\nx  10"


def test_halves_and_split_backwards(plan):
    events = (
        event_of(EventKind.FORWARD, 0, 10, micro_batch=0, half=0),
        event_of(EventKind.FORWARD, 10, 20, micro_batch=0, half=1),
        event_of(EventKind.FORWARD, 20, 40, micro_batch=1),
        event_of(EventKind.INPUT_GRADIENT, 40, 50, micro_batch=1),
        event_of(EventKind.WEIGHT_GRADIENT, 60, 70, micro_batch=1),
        event_of(EventKind.BACKWARD, 70, 80, micro_batch=0),
    )
    timeline = Timeline(source="predicted", plan="", events=events)
    assert timeline.bubble_ratio() == pytest.approx(1 / 8)
    _, row, *legend = format_timeline(timeline, plan, width=8).splitlines()
    assert row == "rank 0 vision_model  0011b.Ba   88 %"
    assert legend[-1] == "where a backward is split: letter: input gradient, capital: weight gradient"
    shown = [e for e in chrome_trace(timeline, plan)["traceEvents"] if e["ph"] == "X"]
    assert [e["name"] for e in shown] == ["0F0a", "0F0b", "0F1", "0I1", "0W1", "0B0"]
    assert [e["cat"] for e in shown[3:5]] == ["input_gradient", "weight_gradient"]
    assert [e["args"].get("half") for e in shown[:3]] == [0, 1, None]
    assert {e["tid"] for e in shown} == {0}
    assert summarize_timeline(timeline).busy_us == {0: 70}


def test_stages_that_share_ranks_in_a_plan_and_a_timeline(plan):
    """The text tower is on the vision tower's ranks and the loss on one of them."""
    vision, text, loss = plan.stages
    text, loss = (
        dataclasses.replace(text, ranks=(1,)),
        dataclasses.replace(loss, ranks=(1,), memory_bytes=2**19),
    )
    shared = dataclasses.replace(plan, stages=(vision, text, loss))
    lines = format_plan(shared).splitlines()
    assert "on 2 ranks" in lines[0]
    assert "rank 1 takes turns at 0 vision_model, 1 text_model, 2 loss, 4.50 MiB together" in lines
    # rank 1 computes 6 ms + 3 ms + 0.75 ms
    assert [line.split()[-5:-4] for line in lines if "0-1 " in line and "2 x 4" in line] == [["62"]]
    timeline = simulate_plan(shared)
    rows = format_timeline(timeline, shared, width=20).splitlines()[1:5]
    shown = [" ".join(row.split()[1:3]) for row in rows]
    assert shown == ["0 vision_model", "1 vision_model", "1 text_model", "1 loss"]
    events = chrome_trace(timeline, shared)["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["rank 0: stage 0 vision_model", "rank 1: stages 0 vision_model, 1 text_model, 2 loss"]


def by_rank(timeline, total_us, steps):
    found = {}
    for rank in sorted({event.rank for event in timeline.events}):
        found[rank] = PhaseTimes()
        for _ in range(steps):
            found[rank].add([event for event in timeline.events if event.rank == rank], total_us)
    return found


def test_phases_add_up_to_the_step(timeline):
    ranks = by_rank(timeline, 700.0, steps=3)
    assert ranks[0].a_step() == {
        "forward": 200, "backward": 200, "waiting": 0, "sending": 0, "gather": 0, "reduce": 50, "step": 50, "other": 200,
    }  # fmt: skip
    assert all(sum(times.a_step().values()) == pytest.approx(700) for times in ranks.values())
    assert mean_phases(list(ranks.values()))["forward"] == (200 + 200 + 100 + 50) / 4


def test_tables_of_phases_and_messages(plan, timeline):
    ranks = by_rank(timeline, 700.0, steps=2)
    lines = format_phases(ranks, plan).splitlines()
    assert lines[0].split() == ["rank", "stage", *PHASES, "total", "ms"]
    assert lines[3].split() == "2 text_model 0.100 0.100 0.000 0.060 0.000 0.000 0.050 0.390 0.700".split()
    lines = format_messages(ranks, plan).splitlines()
    assert [line.split("  ")[0] for line in lines[1:]] == ["gradients within stages", "text_model -> loss"]
    assert lines[2].split()[-7:] == ["2", "128", "B", "64", "B", "0.060", "0.030"]


def test_memory_predicted_and_measured_stand_side_by_side():
    kib = 1024
    part = MemoryBreakdown(
        stage="text", weights=kib, stashed_weights=0, gradients=kib, optimizer=2 * kib, activations=4 * kib, working=0,
        transient=kib, inputs=100, limit=16 * kib,
    )  # fmt: skip
    counts = MemoryCounts(held_bytes=2 * kib, swapped_bytes=512, recomputed_bytes=0, peak_held_bytes=4 * kib)
    held = HeldBytes(weights=kib, gradients=kib, optimizer=2 * kib, buffers=100)
    known = RankMemory(
        rank=0, stage="text", predicted=part, held=held, counts=counts, measured_peak_bytes=8 * kib + 100
    )
    unknown = RankMemory(rank=1, stage="given", predicted=None, held=held, counts=None, measured_peak_bytes=0)
    report = MemoryReport(
        measure=COUNTED, ranks=(known, unknown), differences=("stage 'x' is off",), advice=("use less",)
    )
    assert known.predicted_peak_bytes == 9 * kib + 100 and unknown.predicted_peak_bytes == 0
    lines = format_memory_report(report).splitlines()
    assert [line.split("  ")[0] for line in lines[:3]] == ["rank", "0", "1"]
    assert "4.00 KiB / 4.00 KiB" in lines[1] and "9.10 KiB / 8.10 KiB" in lines[1] and "512 B" in lines[1]
    assert "16.0 KiB" in lines[1] and "/" not in lines[2].replace("0 B / 0 B", "")
    assert COUNTED in lines[3] and lines[4:] == ["stage 'x' is off", "use less"]
