"""`gpp bench frozen-ahead`: both kinds run on real processes, and a mini-batch ahead takes no longer than planned."""

from __future__ import annotations

import argparse

import pytest

from gpp_benchmarks import frozen_ahead


def test_a_row_a_plan() -> None:
    args = argparse.Namespace(rounds=2, scale_time=0.5, ranks=[2])
    rows = frozen_ahead.run(args)["rows"]
    assert [row["simulated"] for row in rows] == pytest.approx([260 / 240, 500 / 480, 300 / 240, 540 / 480])
    for row, planned in zip(rows, (120.0, 240.0, 120.0, 240.0), strict=True):
        assert row["ahead_ms"] >= planned, "delays are as long as they are"
        assert row["whole_ms"] >= planned * row["simulated"]
        assert row["faster"] == row["whole_ms"] / row["ahead_ms"]
