"""What searches say of themselves: progress where they are long, and notes of what they left out."""

import logging

import pytest

from gpp_plugin.plan import auto
from gpp_plugin.plan.refine.refine import MOVES
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.plan.search_report import SearchReport, searching
from tests.plan.graphs import branches, chain, make_request


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
    logger, phases = logging.getLogger("gpp_plugin.plan.search_report"), []
    with caplog.at_level(level, logger=logger.name):
        with searching(phases.append):
            SearchReport().begin("a phase")
        assert (logger.level, logger.propagate) == (level, True)
    assert phases == ["a phase"]
    assert [record.getMessage() for record in caplog.records] == phases * (level == logging.DEBUG)
