"""The command runs and says what a split costs; its numbers are the machine's."""

import json

import pytest

from gpp_plugin.cli import main


def test_a_row_for_each_stage_and_width(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "bench",
                "split-backward",
                "--widths",
                "8",
                "--tokens",
                "4",
                "--layers",
                "1",
                "--repeats",
                "1",
                "--json",
            ]
        )
        == 0
    )
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(row["stage"], row["width"]) for row in result["rows"]] == [("linear", 8), ("transformer", 8)]
    for row in result["rows"]:
        parts = row["input_gradient_us"] + row["weight_gradient_us"]
        assert row["factor"] == pytest.approx(parts / row["backward_us"]) and parts > 0
