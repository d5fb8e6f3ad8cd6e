"""What searches say of themselves: progress where they are long, and notes of what they left out."""

from __future__ import annotations

import logging
import random

import pytest

from gpp_plugin.plan import auto
from gpp_plugin.plan.refine.refine import MOVES
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.plan.request import SearchReport
from gpp_plugin.report.progress import searching
from tests.plan.graphs import branches, chain, clip, make_cluster, make_profile, make_request


def test_each_thing_left_out_is_noted_once() -> None:
    report = SearchReport()
    assert report.notes == ()
    for what in ("a", "b", "a"):
        report.leave_out(what)
    assert report.notes == ("not searched, for want of time: a; b",)


def test_a_search_that_ends_says_nothing() -> None:
    notes = make_plan("auto", make_request(chain(4), ranks=2)).notes
    assert not any(note.startswith("not searched") for note in notes)


def test_auto_notes_a_budget_spent_and_rivals_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "BUDGET", 300)
    monkeypatch.setattr(auto, "MAX_BASELINE_SIZE", 10)
    note = make_plan("auto", make_request(branches(3, 3), ranks=4)).notes[-1]
    assert note.startswith("not searched") and MOVES in note
    assert "uniform, pipedream, autopipe plan (more than 10 blocks x ranks)" in note


def test_branches_too_many_to_count_are_noted() -> None:
    note = make_plan("graphpipe", make_request(branches(600, 1), ranks=2)).notes[-1]
    assert "very many branches" in note


def test_searches_tell_where_they_are() -> None:
    phases: list[str] = []
    with searching(phases.append):
        make_plan("auto", make_request(chain(4), ranks=2))
    assert any(phase.startswith("stages of 2 ranks, micro-batches of") for phase in phases)
    assert "planner pipedream" in phases
    told = len(phases)
    SearchReport().begin("nobody listens")
    assert len(phases) == told


@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO])
def test_who_has_turned_the_messages_on_reads_them_and_nobody_else(
    level: int, caplog: pytest.LogCaptureFixture
) -> None:
    logger, phases = logging.getLogger("gpp_plugin.plan.request"), []
    with caplog.at_level(level, logger=logger.name):
        with searching(phases.append):
            SearchReport().begin("a phase")
        assert (logger.level, logger.propagate) == (level, True)
    assert phases == ["a phase"]
    assert [record.getMessage() for record in caplog.records] == phases * (level == logging.DEBUG)


def test_no_rivals_plan_with_other_degrees_is_taken():
    # two ranks and a chain, where DAPPLE, which knows no given degree, puts everything on both
    for seed in range(4):
        draw = random.Random(seed)
        graph = chain(3)
        times = {block.name: draw.uniform(20, 200) for block in graph.blocks}
        request = make_request(
            graph,
            make_profile(graph, times),
            num_ranks=2,
            mini_batch=16,
            data_parallel=1,
            micro_batch_sizes={"*": 4},
        )
        plan = make_plan("auto", request)
        assert {stage.degree for stage in plan.stages} == {1}


def _plan(planner: str, *, max_k: int, latency: float):
    graph = clip()
    cluster = make_cluster(4, latency=latency)
    request = make_request(graph, make_profile(graph), max_k=max_k, num_stages=4, cluster=cluster)
    return make_plan(planner, request)


@pytest.mark.parametrize("planner", ["graphpipe", "auto"])
@pytest.mark.parametrize("latency", [0.0, 50.0, 400.0])
def test_a_larger_k_never_makes_the_step_longer(planner: str, latency: float) -> None:
    steps = [_plan(planner, max_k=max_k, latency=latency).iteration_us for max_k in (1, 2, 4)]
    assert steps == sorted(steps, reverse=True)


def test_k_hides_slow_links_and_stays_within_what_is_allowed() -> None:
    plain = _plan("auto", max_k=1, latency=400.0)
    assert {stage.k for stage in plain.stages} == {1}
    wider = _plan("auto", max_k=4, latency=400.0)
    assert 1 < max(stage.k for stage in wider.stages) <= 4
    assert wider.iteration_us < plain.iteration_us


@pytest.mark.parametrize(("budget", "is_searched"), [(300, True), (300_000, False)])
def test_one_size_is_searched_where_the_budget_was_used_up(monkeypatch, budget, is_searched):
    graph = branches(3, 4)
    times = {block.name: 40.0 + 17.0 * (i % 5) for i, block in enumerate(graph.blocks)}
    request = make_request(graph, make_profile(graph, times), num_ranks=4, mini_batch=32)
    sizes = []
    search = auto.search_stages

    def watched(asked, *args, **options):
        sizes.append(asked.micro_batch_sizes)
        return search(asked, *args, **options)

    monkeypatch.setattr(auto, "search_stages", watched)
    monkeypatch.setattr(auto, "BUDGET", budget)
    plan = make_plan("auto", request)
    assert plan.iteration_us > 0 and sizes[0] is None
    assert [size for size in sizes if size is not None] == (sizes[1:] if is_searched else [])
    assert (len(sizes) > 1) == is_searched
