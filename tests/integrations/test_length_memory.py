"""Memory at many lengths: what is predicted is counted, and what is too long is refused."""

from __future__ import annotations

import pytest

from gpp_benchmarks import _length_memory
from tests.ranks import run_kept_ranks

SETTINGS = {"layers": 1, "width": 16, "length": 64, "stages": 2}


@pytest.mark.parametrize(("model", "recompute"), [("gpt2", "full"), ("t5", "off"), ("gpt2", "off")])
def test_what_is_predicted_at_four_lengths_is_counted(model: str, recompute: str) -> None:
    """T5 has two lengths, an encoder's and a decoder's; in the third case stages were planned at the longest."""
    block = {"memory": {"recompute": recompute, "swap": "off"}, "verify": False}
    settings = {**SETTINGS, "model": model, "block": block}
    first, second = run_kept_ranks(_length_memory.measure, 2, settings, timeout_s=200)
    assert [row["ratio"] for row in first["rows"]] == [row["ratio"] for row in second["rows"]]
    lengths = dict.fromkeys(row["lengths"] for row in first["rows"])
    assert len(lengths) == 4 and len(first["rows"]) == 8
    for row in first["rows"]:
        assert row["ratio"] == pytest.approx(1.0, abs=0.02), row
        assert row["held_inputs"] == row["predicted_inputs"]
        assert row["differences"] == []
    longest = [row["predicted_bytes"] for row in first["rows"][-2:]]
    assert longest == first["planned"], "memory is planned for the longest"
    assert "is 64 long, and graph_pipeline.lengths.max is 48" in first["refused"] == second["refused"]
    assert first["steps_after"] == 1, "and the next mini-batch trains"
    assert first["byte_error"] == pytest.approx(0.0, abs=1e-6)
