"""Rehearsals on real processes: what the executor runs is the plan, at the plan's times."""

import dataclasses
import json
from unittest import mock

import pytest
import torch.distributed as dist

from gpp_benchmarks._emulated_graphs import branch_links, chain_links, emulated_plan, with_in_flight
from gpp_plugin.cli import main
from gpp_plugin.ir.plan import forward_only_stages
from gpp_plugin.ir.serialize import fingerprint, load, save
from gpp_plugin.ir.tensors import UNIFORM, TensorSpec
from gpp_plugin.ir.timeline import EventKind, Timeline
from gpp_plugin.rehearse.rehearsal import RehearsalSettings, predict_from, programs_of_plan
from gpp_plugin.rehearse.rehearsal_rank import RehearsalRank
from gpp_plugin.schedule.build import build_schedules
from gpp_plugin.schedule.build_graph import lengthened
from gpp_plugin.schedule.gathers import EARLY_BUCKET_ELEMENTS
from gpp_plugin.schedule.orders.async_1f1b import asynchronous_in_flight, windows_of
from gpp_plugin.schedule.program_sets import window_schedules
from gpp_plugin.simulate.predict import num_windows, predict_iteration_us
from gpp_plugin.simulate.timeline_metrics import measured_steady_us, peak_in_flight
from tests.ranks import run_kept_ranks
from tests.schedule.plans import freeze, with_all

FORWARD_US, BACKWARD_US = 1000.0, 2000.0
PLANNED_US = {  # by kind, and whether it is half a forward
    (EventKind.FORWARD, False): FORWARD_US,
    (EventKind.FORWARD, True): FORWARD_US / 2,
    (EventKind.BACKWARD, False): BACKWARD_US,
    (EventKind.INPUT_GRADIENT, False): BACKWARD_US / 2,
    (EventKind.WEIGHT_GRADIENT, False): BACKWARD_US / 2,
}


def plan_of(name, links, **options):
    times = {
        "forward_us": FORWARD_US,
        "backward_us": BACKWARD_US,
        "num_micro_batches": 4,
        "message_bytes": 256,
    }
    return emulated_plan(name, links, **(times | options))


def with_bias(plan):
    """Add a tensor without a batch axis to the first edge; its gradient flows back."""
    bias = TensorSpec(
        name="bias", dtype="float32", shape=(1, 2, 3, 3), num_samples=2, layout=UNIFORM, requires_grad=True
    )
    edge = dataclasses.replace(plan.edges[0], whole_tensors=("bias",), gradient_tensors=("x0", "bias"))
    return dataclasses.replace(plan, edges=(edge, *plan.edges[1:]), tensors=(*plan.tensors, bias))


def frozen_source():
    return freeze(plan_of("frozen source", branch_links(2, 1, has_own_join=True)), {0})


def under(name, **changes):
    return with_in_flight(with_all(plan_of(name, chain_links(3)), **changes))


def sliced():
    return plan_of("sliced", chain_links(3)).with_each(num_sliced=[1, 1, 0])


def tensor_pair():
    """Two tensor ranks that hold what they send as shards, and one that has it whole."""
    plan = plan_of("two tensor ranks, then one", [(0, 1)], degrees={0: 2}, sizes={0: 2, 1: 2})
    stages = (dataclasses.replace(plan.stages[0], tensor=2), plan.stages[1])
    edges = (dataclasses.replace(plan.edges[0], src_shard_axis=1),)
    return with_in_flight(dataclasses.replace(plan, stages=stages, edges=edges))


PLANS = [
    plan_of("chain", chain_links(3)),
    plan_of("branches", branch_links(2, 1, has_own_join=True)),
    with_all(plan_of("two ranks, then one", [(0, 1)], degrees={0: 2}), gradient_bytes=4096),
    with_bias(plan_of("one rank, then two", [(0, 1)], degrees={1: 2}, sizes={0: 4})),
    plan_of("skip", [(0, 1), (1, 2), (0, 2)]),
    frozen_source(),
    under("gpipe", schedule="gpipe"),
    under("zero bubble", schedule="zero_bubble"),
    sliced(),
    tensor_pair(),
]


def rehearse_here(plan, settings):
    rank = RehearsalRank(plan, settings)
    rank.iterate()
    return rank.run()


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.model)
@pytest.mark.parametrize("scale_bytes", [1.0, 0.3])
def test_every_rank_runs_the_plans_tasks_in_order_at_their_times(plan, scale_bytes):
    settings = RehearsalSettings(scale_bytes=scale_bytes)
    timelines = run_kept_ranks(rehearse_here, 3, plan, settings, timeout_s=60)
    assert timelines[1:] == [None, None]
    timeline = timelines[0]
    assert timeline.source == "rehearsed" and timeline.plan == fingerprint(plan)
    frozen = forward_only_stages(plan)
    schedules = build_schedules(plan)
    for rank in range(3):
        stage = plan.stage_of_rank(rank)
        ran = [e for e in timeline.events if e.rank == rank and e.task is not None]
        assert [e.task for e in ran] == list(schedules[stage].tasks)
        for event in ran:
            assert event.end_us - event.start_us >= PLANNED_US[event.kind, event.half is not None]
    for rank, held in peak_in_flight(timeline).items():
        assert held <= plan.stages[plan.stage_of_rank(rank)].in_flight or plan.stage_of_rank(rank) in frozen
    assert timeline.iteration_us >= predict_iteration_us(plan)


def count_sums(plan, settings):
    """Return how many sums of several numbers were begun, and how many waited for."""
    rank = RehearsalRank(plan, settings)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sums:
        rank.run()
    calls = [
        each.kwargs.get("async_op", False)
        for each in sums.mock_calls
        if each.args and each.args[0].numel() > 1
    ]
    return calls.count(True), calls.count(False)


@pytest.mark.parametrize(
    ("changes", "begun", "behind"),
    [({}, 3, 0), ({"zero_stage": 1}, 0, 1), ({"bucket": 3}, 0, 1)],
    ids=str,
)
def test_sums_begin_in_the_last_backward_where_the_runtime_has_them_there(changes, begun, behind):
    """Three buckets of 4 Mi numbers, at a thousandth of their size: beside the last backward of ranks 0 and 1."""
    changes = dict(changes)
    num_bytes = 3 * 4 * EARLY_BUCKET_ELEMENTS // changes.pop("bucket", 1)
    plan = with_all(plan_of("two ranks, then one", [(0, 1)], degrees={0: 2}), gradient_bytes=num_bytes)
    settings, plan = RehearsalSettings(scale_bytes=0.001), dataclasses.replace(plan, **changes)
    found = run_kept_ranks(count_sums, 3, plan, settings, timeout_s=60)
    assert found == [(begun, behind), (begun, behind), (0, 0)]


def test_programs_of_a_plan_are_those_the_engine_would_lower():
    for plan in PLANS:
        assert [program.rank for program in programs_of_plan(plan)] == [0, 1, 2]


@pytest.fixture
def plan_file(tmp_path):
    path = tmp_path / "plan.json"
    save(plan_of("pair", [(0, 1)], message_bytes=1024), path)
    return path


def test_the_command_prints_and_writes_what_was_measured(plan_file, tmp_path, capsys):
    out, trace = tmp_path / "timeline.json", tmp_path / "trace.json"
    arguments = ["rehearse", str(plan_file), "--steps", "2", "--scale-time", "2", "--json"]
    assert main([*arguments, "--out", str(out), "--trace-path", str(trace)]) == 0
    text = capsys.readouterr().out
    result = json.loads(text.splitlines()[-1])
    assert result["command"] == "rehearse" and result["num_ranks"] == 2 and result["scale_time"] == 2.0
    # (4 micro-batches + 2 stages - 1) x (2 + 4) ms
    assert result["delays_ms"] == pytest.approx(30.0)
    assert result["iteration_ms"] >= 30.0
    assert result["fastest_ms"] <= result["iteration_ms"] <= result["slowest_ms"]
    assert [row["stage"] for row in result["rows"]] == ["stage0", "loss"]
    assert [(row["in_flight"], row["measured_in_flight"]) for row in result["rows"]] == [(2, 2), (1, 1)]
    assert all(row["measured_forward_ms"] >= row["forward_ms"] == 2.0 for row in result["rows"])
    timeline = load(Timeline, out)
    assert timeline.source == "rehearsed"
    assert main(["report", str(out), "--plan", str(plan_file)]) == 0  # it is the plan's, at other times
    assert "rehearsed: " in capsys.readouterr().out
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"0F0", "1B3", "send stage0 -> loss"} <= names
    assert "mini-batch 2 of 2" in text and "simulated" in text


def asynchronous(plan):
    """Return the plan with a step behind every backward, on the in-flight counts of an endless pipeline."""
    counted = plan.with_each(in_flight=asynchronous_in_flight(plan))
    return dataclasses.replace(counted, mode="async")


@pytest.mark.parametrize(
    "name", ["branches", "two ranks, then one", "frozen source", "two tensor ranks, then one"]
)
def test_an_asynchronous_plan_runs_its_windows_and_steps_behind_each_backward(name):
    plan = asynchronous(next(plan for plan in PLANS if plan.model == name))
    timeline, *others = run_kept_ranks(rehearse_here, 3, plan, RehearsalSettings(), timeout_s=60)
    assert others == [None, None]
    windows, frozen = windows_of(plan), forward_only_stages(plan)
    schedules = window_schedules(windows, num_windows(windows), frozen)
    for rank in range(3):
        stage = plan.stage_of_rank(rank)
        ran = [e for e in timeline.events if e.rank == rank and e.edge < 0]
        assert [e.task for e in ran if e.task is not None] == list(schedules[stage].tasks)
        for event, follower in zip(ran, ran[1:], strict=False):
            if event.kind is EventKind.BACKWARD:
                assert follower.kind is EventKind.REDUCE
            assert (follower.kind is EventKind.STEP) == (event.kind is EventKind.REDUCE)
            if event.task is not None:
                assert event.end_us - event.start_us >= PLANNED_US[event.kind, False]
    longer = lengthened(plan, num_windows(windows))
    assert predict_from(longer, [timeline]) > 0 and measured_steady_us(plan, timeline) > 0
