"""The search for the largest batch, and a small table from end to end."""

from __future__ import annotations

import pytest

from gpp_benchmarks.max_batch import (
    MODELS,
    PAPER,
    PLANNERS,
    Cell,
    largest,
    over_limits,
    paper_batch,
    summarize,
    zero_rows,
)
from gpp_plugin.library.analytic_models import profile_model
from gpp_plugin.library.paper_graphs import build_model
from gpp_plugin.plan.cluster_files import read_cluster
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.memory.memory_chain import ChainPlan


@pytest.mark.parametrize("start", [1, 3, 64])
@pytest.mark.parametrize("limit", [0, 1, 2, 7, 64, 250])
def test_the_largest_batch_is_found_from_anywhere(start, limit):
    def plan_at(batch: int) -> ChainPlan | None:
        return ChainPlan(cuts=(0, 1), stages=(), local=batch) if batch <= limit else None

    found = largest(plan_at, start)
    assert (found.local if found is not None else 0) == limit


@pytest.fixture(scope="module")
def rows():
    model = build_model("amoebanet", layers=3, filters=16, image=32)
    cluster = read_cluster("a100_pcie", num_devices=2)
    profile = profile_model(model, cluster.devices[0], largest=64)
    small = CostModel(model.graph, profile, cluster)
    cell = Cell(model.graph, profile, cluster, "amoebanet", 2, "async", "gpipe", 1.5, limit=2 * 10**8)
    assert cell.sensitivity([1.2, 1.5])
    return cell.rows() + zero_rows(small, "amoebanet", 2)


def test_a_ratio_that_hangs_on_the_limit_is_a_cliff():
    kind = {"mode": "sync", "optimization": "S+R", "limits": [1.5, 1.6], "stages": 8}
    (mean,) = over_limits(
        [
            {**kind, "model": "a", "over_vpipe": [8.0, 1.0], "paper": 1.5, "is_cliff": True},
            {**kind, "model": "b", "over_vpipe": [2.0, 1.0], "paper": None, "is_cliff": False},
        ]
    )
    (none_fits,) = over_limits(
        [
            {**kind, "model": name, "over_vpipe": ratios, "paper": None, "is_cliff": False}
            for name, ratios in {"a": [0.0, 1.0], "b": [4.0, None]}.items()
        ]
    )
    assert none_fits["over_vpipe"] == [0.0, 1.0] and none_fits["paper"] is None
    assert mean["over_vpipe"] == pytest.approx([4.0, 1.0]) and mean["paper"] == pytest.approx(1.5)
    assert mean["cliffs"] == [["a", 8]]


def test_dawnpiper_is_nowhere_behind_and_nobody_is_slower_than_allowed(rows):
    summary = summarize(rows)
    assert summary["behind"] == []
    assert {(r["optimization"], r["planner"]) for r in rows if r["planner"] in PLANNERS} == {
        (opt, name) for opt in ("none", "R", "S+R") for name in PLANNERS
    }
    for row in rows:
        if row["optimization"] != "none" and PLANNERS[row["planner"]][1][row["optimization"]]:
            assert row["slowdown"] is None or row["slowdown"] <= 1.5
        if row["planner"] in PLANNERS:
            assert row["max_batch"] == row["micro_batch"]


def test_the_papers_figures():
    """Section 5.2: 1.33 and 1.29 over vPipe with both; 2.14 and 2.73 asynchronous without; 1.61, 1.82 with."""

    def mean(stages: int, mode: str, optimization: str) -> float:
        ours, theirs = (PAPER[stages, mode, optimization, name] for name in ("dawnpiper", "vpipe"))
        return sum(a / b for a, b in zip(ours, theirs, strict=True)) / len(MODELS)

    assert [round(mean(s, "sync", "S+R"), 2) for s in (4, 8)] == [1.33, 1.29]
    assert [round(mean(s, "async", "none"), 2) for s in (4, 8)] == [2.14, 2.73]
    assert [round(mean(s, "async", "S+R"), 2) for s in (4, 8)] == [1.61, 1.82]
    assert paper_batch("gpt2_770m", 8, "sync", "S+R", "vpipe") == 56
    assert paper_batch("gpt2_770m", 8, "async", "R", "vpipe") is None
