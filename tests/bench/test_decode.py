"""`gpp bench decode`: what ranks send is what the formula says."""

import json

from gpp_plugin.cli import main


def test_what_is_sent_is_the_formulas(capsys):
    arguments = ["--ranks", "2", "--batch", "4", "--length", "9", "--steps", "4", "--head-size", "8"]
    arguments += "--stages 2 --prompts 4 --micro-batches 2 --tokens 3 --row-ms 1".split()
    assert main(["bench", "decode", *arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    caches, generated = rows[:2], rows[2:]
    assert [row["kv_heads"] for row in caches] == [8, 2]
    for row in caches:
        assert row["sent"] == row["formula"] and row["largest_difference"] < 1e-4
    assert [row["way"] for row in generated] == ["one batch", "one after the other", "in turns"]
    assert generated[1]["speedup"] == 1 and all(row["tokens_per_s"] > 0 for row in generated)
