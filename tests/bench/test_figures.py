"""Figures of papers: rows from benchmarks' rows, the text, the picture, and what is refused."""

import argparse
from xml.etree import ElementTree

import pytest

from gpp_benchmarks import figures
from gpp_benchmarks.figures import _autopipe, _dawnpiper, _graphpipe
from gpp_benchmarks.figures._bar_chart import draw_bars
from gpp_benchmarks.figures._figure_rows import PICTURE_ONLY, FigureRow, Options
from gpp_benchmarks.figures._graphpipe import table_2_formula
from gpp_plugin.errors import ConfigError


def arguments(tmp_path, paper, names):
    return argparse.Namespace(
        paper=paper, figure=names, devices=[4, 32], limit=5.0, out=str(tmp_path / "pictures")
    )


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


def test_table_2_is_printed_and_drawn(tmp_path, capsys):
    result = figures.run(arguments(tmp_path, "graphpipe", ["table-2"]))
    shown = capsys.readouterr().out
    assert "row 10" in shown and "why they differ: groups" in shown
    assert len(result["rows"]) == 10
    for row in result["rows"]:
        assert 0 < row["ours"] <= row["paper"]
    assert ElementTree.parse(result["pictures"][0]).getroot().tag.endswith("svg")


def test_every_condition_of_table_2():
    """The examples of the rule's own test: group x, b_x, group y, b_y, i_y."""
    examples = [
        (2, 1, 4, 1, 4), (2, 2, 4, 1, 4), (8, 1, 4, 2, 4), (4, 1, 2, 2, 2), (8, 2, 4, 1, 4),
        (8, 2, 2, 1, 2), (1, 1, 1, 1, 3), (2, 1, 2, 1, 4), (1, 1, 4, 4, 4), (4, 4, 1, 1, 2),
    ]  # fmt: skip
    assert [table_2_formula(*example)[0] for example in examples] == list(range(1, 11))


def test_throughput_over_rivals(monkeypatch):
    rows = rows_of(
        _graphpipe,
        "6",
        monkeypatch,
        {"rows": throughputs("dlrm", 32, graphpipe=30.0, pipedream=20.0, piper=None)},
    )
    assert [(row.quantity, row.ours, row.note) for row in rows] == [
        ("over pipedream", 1.5, ""),
        ("over piper", None, "piper: full"),
    ]
    assert "1.25 to 1.61" in rows[0].paper_says and "no strategy" in rows[1].paper_says
    rows = rows_of(
        _graphpipe,
        "A.3",
        monkeypatch,
        {"rows": throughputs("t", 8, graphpipe=190.0, pipedream=95.0, piper=1.0)},
    )
    assert [row.paper for row in rows][:3] == [187.92, 190.1, 189.5]
    assert rows[3].ours == 2.0 and rows[3].difference == pytest.approx(2.0 / (189.5 / 190.1) - 1.0)


def test_figure_9_takes_both_benches(monkeypatch):
    found = {
        "6": throughputs("mmt", 32, graphpipe=15.0, pipedream=10.0),
        "9": throughputs("mmt at 2", 32, graphpipe=12.0, pipedream=10.0),
    }
    monkeypatch.setattr(_graphpipe, "run_bench", lambda bench, given: {"rows": found[given[1]]})
    figure = next(figure for figure in _graphpipe.figures() if figure.name == "9")
    assert [row.ours for row in figure.rows(Options())] == [1.2, 1.5]


def test_search_times_stand_beside_the_papers(monkeypatch):
    rows = [
        {"model": "mmt", "devices": 8, "planner": name, "cpu_seconds": seconds, "status": status}
        for name, seconds, status in (
            ("graphpipe", 0.5, "ok"), ("pipedream", 2.0, "ok"), ("piper", 5.0, "timeout after 5 s"),
        )
    ]  # fmt: skip
    found = {row.quantity: row for row in rows_of(_graphpipe, "table-1", monkeypatch, {"rows": rows})}
    assert found["pipedream over graphpipe"].ours == 4.0
    assert found["pipedream over graphpipe"].paper == pytest.approx(11.9 / 0.76)
    assert found["piper, s"].ours is None and found["piper, s"].note == "timeout after 5 s"


def test_autopipes_steps_and_start_ups():
    options = Options(limit=30.0)
    rows = list(_autopipe._step_rows("case", options, "gpt2_345m", 4, 4, 8, ("a", "b", "c")))
    planner, slicer, both = (row.ours for row in rows)
    assert planner > 1.0 and both >= planner and slicer > 1.0
    found = _autopipe.systems("gpt2_345m", 4, 4, micro_batches=8, limit=30.0)
    usual = _autopipe.start_up_us(found.even, found.cluster_request)
    chunked = _autopipe._interleaved(4, 4, 30.0)
    assert chunked.num_ranks == 4 and len(chunked.stages) == 8
    for plan in (found.sliced, found.autopipe, chunked):
        assert _autopipe.start_up_us(plan, found.cluster_request) < 0.75 * usual
    failed = list(_autopipe._step_rows("case", options, "gpt2_345m", 40, 4, 8, ("a", "b", "c")))
    assert [row.ours for row in failed] == [None] * 3 and failed[0].note and failed[1].note == "as above"
    two = list(_autopipe._step_rows("case", options, "gpt2_345m", 2, 4, 4, ("a", "b", "c")))
    assert [row.ours == 1.0 for row in two] == [False, True, False] and "stay whole" in two[1].note
    uneven = _autopipe._start_up_note(_autopipe._interleaved(8, 4, 30.0), found.even)
    assert uneven == "24 layers in 16 stages are not even; Megatron-LM refuses"


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


def test_pictures_leave_out_what_is_not_known():
    rows = [
        FigureRow(case="a & b", quantity="x", paper=1.0, ours=100.0),
        FigureRow(case="c", quantity="y", paper_says=PICTURE_ONLY, ours=10.0),
        FigureRow(case="d", quantity="z", paper_says=PICTURE_ONLY),
    ]
    root = ElementTree.fromstring(draw_bars("title", rows, scale="log"))
    bars = [r for r in root.findall("{*}rect") if r.get("height") == "8"]
    assert [float(bar.get("width")) for bar in bars] == pytest.approx([440 / 3, 440, 880 / 3], abs=0.1)
    # where the paper gives a range, or only draws, its words stand in place of a bar
    assert [text.text for text in root.findall("{*}text")].count(PICTURE_ONLY) == 1


def test_unknown_figures_are_refused(tmp_path):
    with pytest.raises(
        ConfigError, match="--figure 99: dawnpiper has none; it has table-1, table-2, balance"
    ):
        figures.run(arguments(tmp_path, "dawnpiper", ["99"]))
    assert [figure.name for figure in figures._chosen("graphpipe", ["7"])] == ["7-left", "7-right"]
    assert [figure.name for figure in figures._chosen("autopipe", ["table-iii"])] == ["table-III"]
