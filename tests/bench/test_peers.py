"""`gpp bench peers`: what counts as the same, and scenarios on ranks beside the peer."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from gpp_benchmarks.peers import add_arguments, run
from gpp_benchmarks.peers._scenario import raised_by, verdict_of
from gpp_plugin.errors import ConfigError


def run_with(*words: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(words))


def refuse() -> None:
    raise ConfigError("grid: use engine.plan")


def fail() -> None:
    raise KeyError("x")


REFUSAL = raised_by(refuse)


@pytest.mark.parametrize(
    ("peer", "here", "verdict", "detail"),
    [
        ({"a": [1.0, 2.0]}, {"a": [1.0, 2.00001]}, "same", ""),
        ({"a": [1.0, 2.0]}, {"a": [1.0, 2.001]}, "differs", "a: 4.5e-04 apart"),
        ({"a": 1.0}, {"a": 1}, "same", ""),
        ({"a": 2}, {"a": 3}, "differs", "a: 2, here 3"),
        ({"a": True}, {"a": 1.5}, "differs", "a: True, here 1.5"),
        ({"a": [1.0]}, {"a": [1.0, 1.0]}, "differs", "a: [1.0], here [1.0, 1.0]"),
        ({"a": [float("nan")]}, {"a": [float("nan")]}, "same", ""),
        ({"a": [1.0]}, {"a": [float("nan")]}, "differs", "a: inf apart"),
        ({"a": [0.0]}, {"a": [1e-4]}, "differs", "a: 1.0e-04 apart"),
        ({"a": {"b": ["x"]}}, {"a": {"b": ["y"]}}, "differs", "a.b[0]: 'x', here 'y'"),
        ({"a": 1}, {}, "differs", "a: 1, here None"),
        ({"a": {}}, {"a": REFUSAL}, "refused", "ConfigError: grid: use engine.plan"),
        ({"a": raised_by(fail)}, {"a": REFUSAL}, "same", ""),
        ({"a": raised_by(fail), "b": 1}, {"a": {}, "b": 2}, "differs", "a: the peer raises KeyError"),
        ({"a": {}, "b": 1}, {"a": REFUSAL, "b": 2}, "refused", "ConfigError: grid: use engine.plan"),
    ],
)
def test_what_counts_as_the_same(peer: Any, here: Any, verdict: str, detail: str) -> None:
    found = verdict_of(peer, here)
    assert (found.verdict, found.detail) == (verdict, detail)


def test_scenarios_are_named_and_a_wrong_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    rows = run_with("--list", "--only", "clipping")["rows"]
    assert [row["name"] for row in rows] == [
        "clipping",
        "no_clipping",
    ] and "no_clipping: " in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--only nothing_like_it: no scenario has such a name; see --list"):
        run_with("--only", "nothing_like_it")


@pytest.mark.parametrize("peer", ["deepspeed", "torch", "files"])
def test_every_scenario_has_the_verdict_of_the_documents(peer: str) -> None:
    found = run_with("--peers", peer)
    assert found["ok"], [row for row in found["rows"] if not row["ok"]]
    assert len(found["rows"]) == {"deepspeed": 61, "torch": 14, "files": 36}[peer]


def test_a_job_goes_on_from_a_converted_checkpoint() -> None:
    found = run_with("--only", "go_on")
    assert found["counts"] == {"same": 2, "refused": 0, "differs": 0} and found["ok"]
    assert all(row["apart"] < 1e-6 for row in found["rows"])
