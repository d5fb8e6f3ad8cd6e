"""What is counted on ranks is what was predicted; where there is no CUDA device one line says so."""

from __future__ import annotations

import argparse

import pytest
import torch

from gpp_benchmarks import memory
from gpp_plugin.cli import main


def test_counted_bytes_are_the_predicted_ones() -> None:
    parser = argparse.ArgumentParser()
    memory.add_arguments(parser)
    found = memory.run(parser.parse_args(["--models", "gpt2", "--plans", "none", "both", "full"]))
    assert found["ok"] and found["pairs"] == 3 and found["worst"] <= 0.02 and found["refused"] == []
    assert [(row["plan"], row["rank"]) for row in found["rows"]] == [
        (plan, rank) for plan in ("none", "both", "full") for rank in (0, 1)
    ]
    for row in found["rows"]:
        assert row["ratio"] == row["counted_bytes"] / row["predicted_bytes"]
        assert (row["swapped_bytes"] + row["recomputed_bytes"] > 0) == (row["plan"] != "none")


@pytest.mark.parametrize("bench", [["swap"], ["memory", "--device", "cuda"]])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device_one_line_says_so(bench: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *bench]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "needs a CUDA device and finds none" in lines[0]
