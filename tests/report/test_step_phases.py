"""Times of a step by phase and by message, of one rank and of many."""

import pytest

from gpp_plugin.report.timeline_chart import (
    PHASES,
    PhaseTimes,
    format_messages,
    format_phases,
    mean_phases,
)


def by_rank(timeline, total_us, steps=1):
    found = {}
    for rank in sorted({event.rank for event in timeline.events}):
        found[rank] = PhaseTimes()
        for _ in range(steps):
            found[rank].add([event for event in timeline.events if event.rank == rank], total_us)
    return found


def test_phases_add_up_to_the_step(timeline):
    ranks = by_rank(timeline, 700.0, steps=3)
    first = ranks[0].a_step()
    assert first == {
        "forward": 200, "backward": 200, "waiting": 0, "sending": 0, "gather": 0, "reduce": 50, "step": 50, "other": 200,
    }  # fmt: skip
    assert all(sum(times.a_step().values()) == pytest.approx(700) for times in ranks.values())
    assert mean_phases(list(ranks.values()))["forward"] == (200 + 200 + 100 + 50) / 4


def test_tables(plan, timeline):
    ranks = by_rank(timeline, 700.0, steps=2)
    lines = format_phases(ranks, plan).splitlines()
    assert lines[0].split() == ["rank", "stage", *PHASES, "total", "ms"]
    assert lines[3].split() == [
        "2",
        "text_model",
        *"0.100 0.100 0.000 0.060 0.000 0.000 0.050 0.390 0.700".split(),
    ]
    lines = format_messages(ranks, plan).splitlines()
    assert [line.split("  ")[0] for line in lines[1:]] == ["gradients within stages", "text_model -> loss"]
    assert lines[2].split()[-7:] == ["2", "128", "B", "64", "B", "0.060", "0.030"]
