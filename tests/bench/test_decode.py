"""`gpp bench decode`: what ranks send is what the formula says, and what it refuses."""

import json

import pytest

from gpp_plugin.cli import main


@pytest.mark.slow
def test_what_is_sent_is_the_formulas(capsys):
    arguments = ["--ranks", "2", "--batch", "4", "--length", "9", "--steps", "4", "--head-size", "8"]
    assert main(["bench", "decode", *arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["kv_heads"] for row in rows] == [8, 2]
    for row in rows:
        assert row["sent"] == row["formula"] and row["largest_difference"] < 1e-4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "3", "--batch", "4"], "--ranks 3 --batch 4: give at least 2 ranks and a multiple"),
        (["--kv-heads", "3"], "heads must be a multiple of the key-value heads"),
        (["--steps", "0"], "the others at least 1"),
    ],
)
def test_a_wrong_option_takes_one_line(arguments, said, capsys):
    assert main(["bench", "decode", *arguments]) == 1
    assert said in capsys.readouterr().err
