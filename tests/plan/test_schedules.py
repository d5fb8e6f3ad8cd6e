"""The schedule of a finished plan: what is asked for, within memory; auto is never slower than planned."""

import dataclasses

import pytest

from gpp_plugin.errors import PlanInfeasible
from gpp_plugin.plan.choose_schedule import schedule_plan
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.plan.validate_plan import validate_plan
from gpp_plugin.schedule.names import schedule_label, schedule_names
from tests.plan.graphs import GB, branches, chain, make_profile, make_request

FOUR = {"num_ranks": 4, "mini_batch": 32, "num_stages": 4, "micro_batch_sizes": {"*": 2}}


def planned(graph, profile=None, **options):
    """Return (plan of four stages, its request)."""
    request = make_request(graph, profile or make_profile(graph), **{**FOUR, **options})
    return make_plan("graphpipe", request), request


def check(plan, request):
    validate_plan(plan, request.graph, profile=request.profile, cluster=request.cluster)


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


@pytest.mark.parametrize("graph", [chain(8), branches(2, 4)], ids=["chain", "branches"])
def test_auto_is_as_quick_as_any_usual_schedule(graph):
    plan, request = planned(graph)
    auto = schedule_plan(plan, request, schedule="auto")
    check(auto, request)
    for name in ("1f1b", "2f2b", "gpipe", "greedy"):
        other = schedule_plan(plan, request, schedule=name)
        assert auto.iteration_us <= other.iteration_us * 1.002, name


@pytest.mark.parametrize(("factor", "wins"), [(1.01, True), (2.0, False)])
def test_auto_splits_backwards_only_where_that_is_measured_to_win(factor, wins):
    graph = chain(8)
    profile = make_profile(graph)
    costs = tuple(dataclasses.replace(cost, split_factor=factor) for cost in profile.costs)
    plan, request = planned(graph, dataclasses.replace(profile, costs=costs), mini_batch=8)
    auto = schedule_plan(plan, request, schedule="auto")
    assert ({stage.schedule for stage in auto.stages} == {"zero_bubble"}) == wins
    assert auto.iteration_us <= schedule_plan(plan, request, schedule="1f1b").iteration_us


def test_nothing_is_sliced_when_slicing_is_off():
    plan, request = planned(chain(8))
    assert any(s.num_sliced for s in schedule_plan(plan, request, schedule="auto").stages)
    assert not any(s.num_sliced for s in schedule_plan(plan, request, slicing="off").stages)


def test_slicing_on_and_by_number():
    plan, request = planned(chain(8))
    assert any(s.num_sliced for s in schedule_plan(plan, request, slicing="on").stages)
    assert max(s.num_sliced for s in schedule_plan(plan, request, slicing=2).stages) == 2
    odd, request = planned(chain(8), micro_batch_sizes={"*": 1})
    unsliced = schedule_plan(odd, request, slicing="on")
    assert not any(s.num_sliced for s in unsliced.stages)
    assert any("nothing sliced" in note for note in unsliced.notes)


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
