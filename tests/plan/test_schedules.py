"""The schedule of a finished plan: what is asked for, within memory; auto is never slower than planned."""

import dataclasses

import pytest

from gpp_plugin.errors import PlanInfeasible
from gpp_plugin.plan.choose_schedule import schedule_plan
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.costs.memory_formula import memory_breakdown
from gpp_plugin.plan.make import most_pending
from gpp_plugin.plan.refine.share_ranks import share_ranks
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.plan.validate_plan import validate_plan
from gpp_plugin.plugins import schedule_label, schedule_names
from gpp_plugin.schedule.build import build_schedules
from gpp_plugin.simulate.predict import predict_iteration_us
from tests.plan.graphs import GB, chain, costs_of, keep_inside, make_profile, make_request

FOUR = {"num_ranks": 4, "mini_batch": 32, "num_stages": 4, "micro_batch_sizes": {"*": 2}}


def planned(graph, profile=None, **options):
    """Return (plan of four stages, its request)."""
    request = make_request(graph, profile or make_profile(graph), **{**FOUR, **options})
    return make_plan("graphpipe", request), request


def check(plan, request, **limits):
    validate_plan(plan, request.graph, profile=request.profile, cluster=request.cluster, **limits)


@pytest.mark.parametrize("name", [*schedule_names(), "3f3b"])
def test_every_name_gives_a_sound_plan(name):
    plan, request = planned(chain(8))
    made = schedule_plan(plan, request, schedule=name)
    check(made, request)
    labels = {schedule_label(stage) for stage in made.stages}
    assert made.iteration_us > 0.0
    if name not in ("auto", "kfkb"):
        assert labels == {name}
    if name == "kfkb":
        assert all(stage.schedule == "1f1b" and stage.k > 1 for stage in made.stages)


@pytest.mark.parametrize(
    ("name", "ks"), [("2f2b", [2, 2, 2, 1]), ("3f3b", [3, 2, 2, 1]), ("4f4b", [4, 2, 2, 1])]
)
def test_no_k_is_above_a_stages_micro_batches(name, ks):
    sizes = {"*": 16, "layers.0": 2, "layers.7": 32}
    plan, request = planned(chain(8), micro_batch_sizes=sizes)
    counts = [plan.num_micro_batches(index) for index in range(4)]
    assert counts == [16, 2, 2, 1]
    made = schedule_plan(plan, request, schedule=name)
    check(made, request)
    assert [stage.k for stage in made.stages] == ks


def test_nothing_is_sliced_when_slicing_is_off():
    plan, request = planned(chain(8))
    assert any(s.num_sliced for s in schedule_plan(plan, request, schedule="auto").stages)
    assert not any(s.num_sliced for s in schedule_plan(plan, request, slicing="off").stages)


def test_what_does_not_fit_memory_is_refused_and_auto_stays_within():
    graph = chain(8)
    profile = make_profile(graph, saved=0.05 * GB)
    plan, request = planned(graph, profile, memory_limit_bytes=int(0.9 * GB))
    with pytest.raises(PlanInfeasible, match=r"no schedule fits \[4, 4, 4, 4\] micro-batches in flight"):
        schedule_plan(plan, request, schedule="gpipe")
    with pytest.raises(PlanInfeasible, match="holds 10 micro-batches under 4f4b"):
        schedule_plan(plan, request, schedule="4f4b")
    auto = schedule_plan(plan, request, schedule="auto")
    assert max(stage.memory_bytes for stage in auto.stages) <= 0.9 * GB
    assert max(stage.in_flight for stage in auto.stages) == 4


def test_a_plan_of_very_many_tasks_keeps_its_schedule_and_says_so(monkeypatch):
    plan, request = planned(chain(8))
    monkeypatch.setattr("gpp_plugin.plan.choose_schedule.MAX_RANK_TASKS", 100)
    kept = schedule_plan(plan, request, schedule="auto")
    assert kept.stages == plan.stages and "too many to try schedules" in kept.notes[-1]
    assert {s.schedule for s in schedule_plan(plan, request, schedule="gpipe").stages} == {"gpipe"}


SAVED, PENDING = 1000, 300
"""Bytes of a block and a sample."""


def tight(limit: int, ways=("recompute", "swap")):
    """Return a request of a chain whose blocks keep a tensor, and gradients between I and W, in ``limit`` bytes."""
    graph = keep_inside(chain(8), SAVED)
    profile = make_profile(graph, saved=float(SAVED))
    costs = tuple(
        dataclasses.replace(cost, pending_bytes_per_sample=float(PENDING), split_factor=1.01)
        for cost in profile.costs
    )
    profile = dataclasses.replace(profile, costs=costs)
    changes = {**FOUR, "mini_batch": 16, "memory_limit_bytes": limit, "memory_optimization": ways}
    return make_request(graph, profile, **changes)


def held_bytes(plan, stage: int, costs: CostModel) -> int:
    """The most that an order keeps at a time, played task by task, beside what is held all the time."""
    planned, own = plan.stages[stage], costs.indices(plan.stages[stage].blocks)
    saved = costs.group_saved_bytes(own, planned.local_batch_size)
    if planned.memory is not None:
        saved -= planned.memory.swapped_bytes + planned.memory.recomputed_bytes
    waiting = costs.pending_bytes(own, planned.local_batch_size)
    held = most = 0.0
    for task in build_schedules(plan)[stage].tasks:
        held += {"F": saved, "B": -saved, "I": waiting, "W": -saved - waiting}[task.kind.value]
        most = max(most, held)
    return round(most)


@pytest.mark.parametrize("limit", [1 << 40, 15_000, 11_000, 9_000])
def test_memory_holds_what_its_order_keeps(limit):
    request = tight(limit)
    costs = costs_of(request)
    plan = schedule_plan(make_plan("graphpipe", request), request, schedule="zero_bubble", slicing="off")
    assert {stage.schedule for stage in plan.stages} == {"zero_bubble"}
    check(plan, request, memory_limit_bytes=limit)
    parts = memory_breakdown(plan, request.profile)
    for index, (stage, schedule) in enumerate(zip(plan.stages, build_schedules(plan), strict=True)):
        working = stage.memory.working_bytes if stage.memory is not None else 0
        assert stage.pending == most_pending(schedule)
        assert held_bytes(plan, index, costs) + working <= stage.memory_bytes <= limit
        assert stage.memory_bytes == parts[index].total
    assert any(stage.pending > 1 for stage in plan.stages[1:])
    assert (limit < 1 << 40) == any(stage.memory is not None for stage in plan.stages)


def test_a_plan_that_counts_too_little_for_what_is_pending_is_refused():
    request = tight(1 << 40)
    plan = schedule_plan(make_plan("graphpipe", request), request, schedule="zero_bubble", slicing="off")
    need = max(stage.memory_bytes for stage in plan.stages)
    with pytest.raises(PlanInfeasible, match="too many"):
        check(plan, request, memory_limit_bytes=need - 100)


@pytest.mark.parametrize("limit", [13_000, 11_000, 9_000])
@pytest.mark.parametrize("ways", [("recompute",), ("recompute", "swap")], ids="-".join)
def test_auto_takes_the_shorter_of_both_where_stages_recompute(limit, ways):
    request = tight(limit, ways)
    made = make_plan("graphpipe", request)
    assert any(stage.memory is not None for stage in made.stages)
    auto = schedule_plan(made, request, slicing="off")
    split = schedule_plan(made, request, schedule="zero_bubble", slicing="off")
    best = min(made.iteration_us, split.iteration_us)
    assert auto.iteration_us <= best * 1.021 and auto.iteration_us <= made.iteration_us * (1 + 1e-9)
    for plan in (auto, split):
        assert plan.iteration_us == pytest.approx(predict_iteration_us(plan, cluster=request.cluster))
        assert max(stage.memory_bytes for stage in plan.stages) <= limit
    # the first stage's backward is whole; others run segments again in both parts
    for stage in split.stages:
        if stage.memory is not None and stage.memory.recomputed and not stage.memory.swapped:
            plain = sum(200.0 * stage.local_batch_size for _ in stage.blocks) * 1.01
            parts = stage.input_gradient_us + stage.weight_gradient_us
            assert parts == pytest.approx(plain + 2 * stage.memory.recompute_us)


def test_zero_bubble_wins_where_a_little_recomputing_makes_it_fit():
    # 8 micro-batches on 4 stages: the bubble is a quarter, and the first stage alone is over its limit, whose backward
    # stays whole
    request = tight(15_500)
    made = make_plan("graphpipe", request)
    assert any(stage.memory is not None for stage in made.stages)
    auto = schedule_plan(made, request, slicing="off")
    assert {stage.schedule for stage in auto.stages} == {"zero_bubble"}
    assert auto.iteration_us < made.iteration_us * 0.98


@pytest.mark.parametrize("limit", [9_000, 16_000])
def test_shared_ranks_that_recompute_may_split_too(limit):
    request = dataclasses.replace(tight(limit), num_stages=None, num_ranks=2, virtual_stages=2)
    made = make_plan("graphpipe", request)
    shared = share_ranks(schedule_plan(made, request), request)
    costs = costs_of(request)
    for rank in range(2):
        assert sum(shared.stages[i].memory_bytes for i in shared.stages_of_rank(rank)) <= limit
    for index, (stage, schedule) in enumerate(zip(shared.stages, build_schedules(shared), strict=True)):
        assert stage.pending == most_pending(schedule)
        assert held_bytes(shared, index, costs) <= stage.memory_bytes
    whole = share_ranks(schedule_plan(made, request, schedule="1f1b"), request, schedule="1f1b")
    assert shared.iteration_us <= whole.iteration_us * (1 + 1e-9)
