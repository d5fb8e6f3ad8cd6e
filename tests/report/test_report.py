"""Plans and timelines as text, figures and traces."""

import dataclasses
import json

import pytest

from gpp_plugin.ir.timeline import Event, EventKind, Timeline
from gpp_plugin.report.chrome_trace import chrome_trace
from gpp_plugin.report.plan_text import format_plan, format_saved_in_flight
from gpp_plugin.report.summary import forward_overlaps_us, summarize_timeline
from gpp_plugin.report.timeline_chart import format_timeline
from gpp_plugin.report.units import format_bytes, format_ms, format_table
from gpp_plugin.simulate.predict import simulate_plan

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
    def forward(micro_batch, start, end):
        return Event(
            rank=0, stage=0, kind=EventKind.FORWARD, micro_batch=micro_batch, start_us=start, end_us=end
        )

    events = (forward(0, 0, 70), forward(1, 70, 100), forward(2, 100, 130), forward(3, 130, 200))
    row = format_timeline(Timeline(source="predicted", plan="", events=events), plan, width=2).splitlines()[1]
    assert row == "rank 0 vision_model  03  100 %"


def test_summary(plan, timeline):
    summary = summarize_timeline(timeline, plan, overlapping=("vision_model", "text_model"))
    assert summary.iteration_us == 600
    assert summary.busy_us == {0: 400, 1: 400, 2: 200, 3: 100}
    assert summary.bubble_ratio == pytest.approx(1 - 1100 / (4 * 500))
    assert summary.communication_us == {0: 50, 1: 50, 2: 60}
    assert summary.bytes_sent == 128
    assert summary.overlap_us == 100  # text runs from 50 to 150, vision from 0 to 200
    assert summary.same_micro_batch_overlap_us == 100
    assert forward_overlaps_us(timeline, [0, 1]) == {0: 50, 1: 50}
    assert forward_overlaps_us(timeline, [0, 2]) == {0: 0, 1: 0}


def test_trace(plan, timeline):
    trace = json.loads(json.dumps(chrome_trace(timeline, plan)))
    events = trace["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(timeline.events)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {
        0: "rank 0: stage 0 vision_model",
        1: "rank 1: stage 0 vision_model",
        2: "rank 2: stage 1 text_model",
        3: "rank 3: stage 2 loss",
    }
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
        stage = plan.stage_of_rank(rank)
        return Event(
            rank=rank, stage=stage, kind=kind, micro_batch=micro_batch, edge=1, peer=peer, start_us=start, end_us=end
        )  # fmt: skip

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
    assert [format_ms(t) for t in (0, 999, 1000, 99_900, 100_000)] == [
        "0.000",
        "0.999",
        "1.00",
        "99.9",
        "100",
    ]
    assert format_table(["a", "b"], [["x", "10"]], left=2) == "a  b\nx  10"


def test_halves_and_split_backwards(plan):
    def event(kind, micro_batch, start, end, half=None):
        return Event(
            rank=0, stage=0, kind=kind, micro_batch=micro_batch, start_us=start, end_us=end, half=half
        )

    events = (
        event(EventKind.FORWARD, 0, 0, 10, half=0),
        event(EventKind.FORWARD, 0, 10, 20, half=1),
        event(EventKind.FORWARD, 1, 20, 40),
        event(EventKind.INPUT_GRADIENT, 1, 40, 50),
        event(EventKind.WEIGHT_GRADIENT, 1, 60, 70),
        event(EventKind.BACKWARD, 0, 70, 80),
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
    assert summarize_timeline(timeline, plan).busy_us == {0: 70}


@pytest.fixture
def shared(plan):
    """The plan with its text tower on the vision tower's ranks and the loss on one of them."""
    vision, text, loss = plan.stages
    stages = (
        vision,
        dataclasses.replace(text, ranks=(1,)),
        dataclasses.replace(loss, ranks=(1,), memory_bytes=2**19),
    )
    return dataclasses.replace(plan, stages=stages)


def test_a_plan_whose_stages_share_ranks(shared):
    lines = format_plan(shared).splitlines()
    assert "on 2 ranks" in lines[0]
    assert "rank 1 takes turns at 0 vision_model, 1 text_model, 2 loss, 4.50 MiB together" in lines
    # rank 1 computes 6 ms + 3 ms + 0.75 ms
    assert [line.split()[-5:-4] for line in lines if "0-1 " in line and "2 x 4" in line] == [["62"]]


def test_a_timeline_of_a_rank_of_several_stages(shared):
    timeline = simulate_plan(shared)
    rows = format_timeline(timeline, shared, width=20).splitlines()[1:5]
    assert [row.split()[1:3] for row in rows] == [
        ["0", "vision_model"],
        ["1", "vision_model"],
        ["1", "text_model"],
        ["1", "loss"],
    ]
    names = [
        event["args"]["name"]
        for event in chrome_trace(timeline, shared)["traceEvents"]
        if event["name"] == "process_name"
    ]
    assert names == ["rank 0: stage 0 vision_model", "rank 1: stages 0 vision_model, 1 text_model, 2 loss"]
