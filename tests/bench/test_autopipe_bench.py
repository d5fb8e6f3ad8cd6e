"""`gpp bench autopipe`: the paper's cases, so many samples a rank, with the rivals it names."""

from __future__ import annotations

import argparse

import pytest

from gpp_benchmarks.autopipe import (
    CASES,
    TWO_STAGES,
    _row,
    _with_ratios,
)

ARGUMENTS = argparse.Namespace(limit=60.0, stages=None)


def test_a_case_has_the_papers_ratio_beside_ours():
    case = next(
        case for case in CASES if (case.model, case.devices, case.micro_batch) == ("gpt2_345m", 4, 32)
    )
    cell = _with_ratios(
        [_row(ARGUMENTS, case, 512, name) for name in ("autopipe", "piper", TWO_STAGES, "uniform")]
    )
    by_planner = {row["planner"]: row for row in cell}
    assert by_planner["piper"]["paper_over_autopipe"] == pytest.approx(30285.9 / 27020.9)
    # 1.12 in the paper; where sums run beside backwards Piper's data parallelism is the quicker of the two
    assert by_planner["piper"]["step_over_autopipe"] == pytest.approx(0.885, abs=0.02)
    assert by_planner["uniform"]["paper_ms"] is None
    # two stages, as in the paper, and a step near the one it measured
    assert by_planner["autopipe"]["degrees"] == by_planner[TWO_STAGES]["degrees"] == [2, 2]
    assert by_planner["autopipe"]["step_us"] / 1e3 == pytest.approx(
        by_planner["autopipe"]["paper_ms"], rel=0.1
    )
