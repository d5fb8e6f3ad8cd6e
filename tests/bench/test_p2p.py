"""`gpp bench p2p`: its rows, on few messages, and what it refuses."""

import importlib.util
import json

import pytest

from gpp_benchmarks.p2p import num_messages
from gpp_plugin.cli import main


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
def test_every_system_sends_every_size(capsys):
    arguments = ["--bytes", "1024", "262144", "--messages", "4", "--rounds", "2"]
    assert main(["bench", "p2p", *arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(row["system"], row["bytes"]) for row in rows] == [
        (system, size) for size in (1024, 262144) for system in ("native", "megatron", "bare")
    ]
    for row in rows:
        bare = next(r for r in rows if (r["system"], r["bytes"]) == ("bare", row["bytes"]))
        assert row["ratio_to_bare"] == pytest.approx(row["us_per_message"] / bare["us_per_message"])
        assert 0 < row["fastest_us"] <= row["us_per_message"] <= row["slowest_us"]


def test_large_messages_are_fewer():
    assert [num_messages(size, 400) for size in (1 << 10, 1 << 16, 1 << 22, 1 << 30)] == [400, 244, 4, 1]
