"""`gpp bench NAME --figure FILE`: what is drawn of rows, what is refused, and pictures where matplotlib is installed."""

import sys

import pytest

from gpp_plugin import cli
from gpp_plugin.errors import ConfigError
from gpp_plugin.report.rows_text import BARS, LINES, PAIRS, RowsChart, check_figure, draw_rows, points_of

CURVES = RowsChart(
    kind=LINES, x=("devices",), y="seconds", series=("planner",), panels=("model",), y_label="s", is_log=True
)
ROWS = [
    {"model": model, "devices": devices, "planner": planner, "seconds": seconds}
    for model in ("mmt", "dlrm")
    for planner, factor in (("auto", 1.0), ("piper", 30.0))
    for devices, seconds in ((8, factor), (4, factor / 2), (16, None))
]


def test_rows_without_a_number_or_a_key_are_left_out():
    zero = {"model": "mmt", "devices": 4, "planner": "none", "seconds": 0.0}
    panels = points_of([*ROWS, zero, {"summary": 1}], CURVES)
    assert panels["mmt"] == {"auto": [(8, 1.0), (4, 0.5)], "piper": [(8, 30.0), (4, 15.0)]}
    bars = RowsChart(kind=BARS, x=("graph", "ranks"), y="ms", series=("runtime",), y_label="ms")
    rows = [{"graph": "t5", "ranks": 8, "runtime": "gpp", "ms": 3}]
    assert points_of(rows, bars) == {"": {"gpp": [("t5, 8", 3)]}}


def test_without_matplotlib_one_line_says_so_before_anything_runs(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["bench", "published", "--figure", str(tmp_path / "a.png")]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert "pip install 'gpp_plugin[plots]'" in printed.err


@pytest.mark.parametrize(("name", "why"), [("a.jpeg", "ends in .png"), ("no/a.png", "no directory")])
def test_files_that_cannot_be(name, why, tmp_path):
    with pytest.raises(ConfigError, match=why):
        check_figure(str(tmp_path / name))


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_pictures_are_drawn(suffix, tmp_path):
    pytest.importorskip("matplotlib")
    path = check_figure(str(tmp_path / f"curves{suffix}"))
    draw_rows(ROWS, CURVES, path, title="search")
    pairs = RowsChart(kind=PAIRS, x=("a",), y="b", y_label="ours")
    draw_rows([{"a": 1.0, "b": 1.1}, {"a": 2, "b": 2}], pairs, tmp_path / f"pairs{suffix}", title="pairs")
    bars = RowsChart(kind=BARS, x=("model",), y="seconds", series=("planner",), y_label="s")
    draw_rows(ROWS, bars, tmp_path / f"bars{suffix}", title="bars")
    sizes = [file.stat().st_size for file in tmp_path.iterdir()]
    assert len(sizes) == 3 and min(sizes) > 2000
    if suffix == ".svg":
        assert "<svg" in path.read_text()
    with pytest.raises(ConfigError, match="no row has numbers of seconds"):
        draw_rows([{}], CURVES, path, title="nothing")
