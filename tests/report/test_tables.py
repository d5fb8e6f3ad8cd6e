"""Tables on narrow screens, and rows of any result as tables."""

import os

import pytest

from gpp_plugin.report.rows_text import format_rows
from gpp_plugin.report.units import format_table, screen_columns

HEADER = ["stage", "ranks", "micro-batches", "fwd ms", "bwd ms", "memory"]
LONG = "0 vision_model.embeddings+vision_model.encoder.layers.0-11"
ROWS = [
    [LONG, "0-3", "8 x 4", "1.25", "2.50", "12.1 GiB"],
    ["1 loss", "4", "8 x 4", "0.01", "0.02", "1.00 GiB"],
]


@pytest.mark.parametrize("width", [30, 40, 60, 80])
def test_a_table_is_cut_into_parts_that_fit_and_lose_nothing(width):
    text = format_table(HEADER, ROWS, width=width)
    assert all(len(line) <= width for line in text.splitlines())
    for cell in (*HEADER, *ROWS[0][1:], *ROWS[1]):
        assert cell in text
    assert all(part.startswith("stage") for part in text.split("\n\n"))


def test_columns_are_those_that_are_said(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    assert screen_columns() == 60
    monkeypatch.setenv("COLUMNS", "wide")
    assert screen_columns() is None  # pytest has no terminal
    monkeypatch.delenv("COLUMNS")
    assert screen_columns() is None
    for columns, seen in ((0, None), (90, 90)):  # a terminal that nobody told its size has none
        monkeypatch.setattr("sys.stdout.fileno", lambda: 1, raising=False)
        monkeypatch.setattr("os.get_terminal_size", lambda *of, size=columns: os.terminal_size((size, 24)))
        assert screen_columns() == seen


def test_rows_of_one_kind_stand_together():
    rows = [
        {"graph": "chain", "ms": 1.0, "order": [1, 2]},
        {"case": "slices", "share": 0.123456, "ok": True},
        {"graph": "tree", "ms": None, "order": []},
    ]
    assert format_rows(rows) == "graph  ms\nchain   1\ntree    -\n\ncase     share   ok\nslices  0.1235  yes"
    assert format_rows(rows[:1], ("ms", "graph", "absent")) == "graph  ms\nchain   1"
    assert format_rows([]) == ""


def test_a_text_that_is_wider_than_the_screen_goes_on_below_itself():
    rows = [
        ["torch", "ok", "2.11.0 on a CPU, which has no bf16 speed worth the name"],
        ["gloo", "ok", "here"],
    ]
    lines = format_table(["check", "status", "found"], rows, left=3, width=40).splitlines()
    assert lines[:4] == ["check  status", "torch  ok", "gloo   ok", ""]
    assert lines[4:] == [
        "check  found",
        "torch  2.11.0 on a CPU, which has no",
        "       bf16 speed worth the name",
        "gloo   here",
    ]
    assert all(len(line) <= 40 for line in lines)
