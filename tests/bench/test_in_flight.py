"""No stage holds more than its plan says, and a short branch holds what its successors need."""

from __future__ import annotations

import argparse

import pytest

from gpp_benchmarks import in_flight


def test_a_short_branch_holds_as_little_as_its_successors_need() -> None:
    parser = argparse.ArgumentParser()
    in_flight.add_arguments(parser)
    found = in_flight.run(parser.parse_args(["--long", "2", "--hidden", "16", "--micro-batches", "6"]))
    assert found["ok"] and found["stages_above_plan"] == []
    held = {(row["rule"], row["stage"]): row["in_flight"] for row in found["rows"]}
    assert held == {
        ("from sink", "long.0"): 3, ("from source", "long.0"): 3,
        ("from sink", "long.1"): 2, ("from source", "long.1"): 2,
        ("from sink", "short"): 2, ("from source", "short"): 3,
        ("from sink", "head+loss"): 1, ("from source", "head+loss"): 1,
    }  # fmt: skip
    assert found["short_branch_saving"] == pytest.approx(1 / 3)
