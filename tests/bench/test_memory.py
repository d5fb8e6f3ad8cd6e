"""Where there is no CUDA device one line says so."""

from __future__ import annotations

import pytest
import torch

from gpp_plugin.cli import main


@pytest.mark.parametrize("bench", [["swap"], ["memory", "--device", "cuda"]])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device_one_line_says_so(bench: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *bench]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "needs a CUDA device and finds none" in lines[0]
