"""Figures of papers: rows from benchmarks' rows."""

from __future__ import annotations

import pytest

from gpp_benchmarks.figures import _autopipe, _dawnpiper, _graphpipe
from gpp_benchmarks.figures._figure_rows import PICTURE_ONLY, FigureRow, Options
from gpp_benchmarks.figures._graphpipe import table_2_formula


def throughputs(model, devices, **found):
    return [
        {
            "model": model,
            "devices": devices,
            "planner": name,
            "throughput": value,
            "status": "ok" if value else "full",
        }
        for name, value in found.items()
    ]


def rows_of(paper, name, monkeypatch, result, **options):
    monkeypatch.setattr(paper, "run_bench", lambda bench, given: result)
    figure = next(figure for figure in paper.figures() if figure.name == name)
    return list(figure.rows(Options(**options)))


def test_every_condition_of_table_2():
    """The examples of the rule's own test: group x, b_x, group y, b_y, i_y."""
    examples = [
        (2, 1, 4, 1, 4), (2, 2, 4, 1, 4), (8, 1, 4, 2, 4), (4, 1, 2, 2, 2), (8, 2, 4, 1, 4),
        (8, 2, 2, 1, 2), (1, 1, 1, 1, 3), (2, 1, 2, 1, 4), (1, 1, 4, 4, 4), (4, 4, 1, 1, 2),
    ]  # fmt: skip
    assert [table_2_formula(*example)[0] for example in examples] == list(range(1, 11))


def test_throughput_over_rivals(monkeypatch):
    found = {"rows": throughputs("dlrm", 32, graphpipe=30.0, pipedream=20.0, piper=None)}
    rows = rows_of(_graphpipe, "6", monkeypatch, found)
    assert [(row.quantity, row.ours, row.note) for row in rows] == [
        ("over pipedream", 1.5, ""),
        ("over piper", None, "piper: full"),
    ]
    assert "1.25 to 1.61" in rows[0].paper_says and "no strategy" in rows[1].paper_says
    found = {"rows": throughputs("t", 8, graphpipe=190.0, pipedream=95.0, piper=1.0)}
    rows = rows_of(_graphpipe, "A.3", monkeypatch, found)
    assert [row.paper for row in rows][:3] == [187.92, 190.1, 189.5]
    assert rows[3].ours == 2.0 and rows[3].difference == pytest.approx(2.0 / (189.5 / 190.1) - 1.0)


def test_autopipes_tables(monkeypatch):
    rows = [
        {"kind": "table 2", "layers": (5, 7, 6, 6.5), "step_us": 2e3, "over_best": 1.1},
        {
            "kind": "planner", "table": "IV", "planner": "piper", "model": "gpt2_345m", "devices": 8,
            "micro_batch": 32, "mini_batch": 512, "step_us": 3e6, "paper_ms": 18143.6, "degrees": [2, 6],
            "paper_over_autopipe": 1.17, "step_over_autopipe": 1.2, "deviation_over_autopipe": 6.0, "status": "ok",
        },
    ]  # fmt: skip
    _autopipe._autopipe_rows.cache_clear()
    try:
        assert rows_of(_autopipe, "table-II", monkeypatch, {"rows": rows}) == [
            FigureRow(
                case="layers 5 7 6 6.5",
                quantity="step, ms",
                paper_says=PICTURE_ONLY,
                ours=2.0,
                note="1.100 of the best",
            )
        ]
        first, second = rows_of(_autopipe, "table-IV", monkeypatch, {"rows": rows})
        assert (first.paper, first.ours, first.note) == (18143.6, 3e3, "stages of 2-6 GPUs")
        assert (second.paper, second.ours) == (1.17, 1.2)
        (balance,) = rows_of(_autopipe, "13", monkeypatch, {"rows": rows})
        assert balance.ours == 6.0 and "12.7" in balance.paper_says
    finally:
        _autopipe._autopipe_rows.cache_clear()


def test_dawnpipers_batches_and_balance(monkeypatch):
    rows = [
        {
            "model": "t5_780m", "stages": 8, "optimization": "none", "planner": name, "paper": paper,
            "max_batch": 90, "slowdown": 1.0,
        }
        for name, paper in (("dawnpiper", 84), ("pipedream", None))
    ]  # fmt: skip
    balance = [{"planner": "vpipe", "micro_batch": 110, "spread": 0.4, "fits": False}]
    of_limits = {
        "model": "t5_780m", "stages": 8, "optimization": "none", "limits": [1.3, 1.6],
        "micro_batches": {"dawnpiper": [60, 95], "vpipe": [40, 0]},
    }  # fmt: skip
    result = {"rows": rows, "balance": balance, "sensitivity": [of_limits]}
    (batch,) = rows_of(_dawnpiper, "table-2", monkeypatch, result)
    assert (batch.paper, batch.ours) == (84.0, 90.0)
    assert batch.note == "1.00 times the quickest plain time; micro-batches of 60, 95 at 1.3, 1.6 times"
    (spread,) = rows_of(_dawnpiper, "balance", monkeypatch, result)
    assert (spread.paper, spread.ours, spread.note) == (0.358, 0.4, "does not fit")
