"""The command runs and holds captured code against eager modules; its times are the machine's, its bytes are not."""

import json

import pytest

from gpp_plugin.cli import main

SMALL = ["--width", "16", "--layers", "1", "--length", "16", "--samples", "2", "--repeats", "1"]


def test_saved_bytes_are_eagers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "attention", "--families", "gpt2", "llama", "vit", *SMALL, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    found = [(row["family"], row["padding"], row["is_called_alike"]) for row in rows]
    assert found == [
        ("gpt2", "none", True),
        ("gpt2", "left", True),
        ("llama", "none", True),
        ("llama", "left", True),
        ("vit", "none", True),
    ]
    for row in rows:
        assert row["code_saved_bytes"] <= 1.03 * row["eager_saved_bytes"], row
        assert row["time_ratio"] == pytest.approx(row["code_ms"] / row["eager_ms"])  # of one pair of steps
        assert row.get("masked_saved_bytes", 1e9) > row["code_saved_bytes"]


def test_a_width_that_heads_do_not_divide_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "attention", "--width", "6"]) == 1
    assert "--width 6" in capsys.readouterr().err
