"""docs/claims.toml: what it quotes stands in the pages, its checks are checks, and no number of the pages is without a command."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpp_benchmarks.peers import all_scenarios
from gpp_benchmarks.peers._scenario import DIFFERS, REFUSED, SAME
from gpp_plugin.cli import _make_parser

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "docs/state.md", "docs/benchmarks.md")
COMMAND = re.compile(r"`(?:gpp (?:bench )?[a-z-]+[^`]*|make [^`]+|\.ci/[^`]+|tests/[^`]+\.py)`|`make`")
"""What a reader can run, in backticks; a file of tests is run by `make test ARGS=FILE`."""
NUMBER = re.compile(r"\d+\.\d+|\b\d+ (?:of|%|ms|s|MiB|GiB)\b|\d %|\b(?:exact|deadlock|wrong)\b")
"""What is measured: a decimal number, a number with a unit, a verdict. Versions and ZeRO stages are others."""
VERSION = re.compile(r"(?:Python|torch|DeepSpeed|transformers|megatron-core|Qwen|Apache)[- ]?\d[\d.]*", re.I)


sys.path.insert(0, str(ROOT / ".ci"))
claims: Any = importlib.import_module("claims")
COMMANDS = claims.read_claims()
QUOTES = [" ".join(claim.text.split()) for command in COMMANDS for claim in command.claims]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.run)
def test_a_claim_is_in_its_page_and_its_command_and_checks_are_understood(command: Any) -> None:
    for claim in command.claims:
        assert claim.is_in_page(), f"{claim.page} no longer has: {claim.text}"
        assert claim.sees and all(claims.CHECK.match(line) for line in claim.sees), claim.sees
    program, *arguments = shlex.split(command.run)
    assert program == "gpp", "only gpp commands end with a line of JSON"
    parser, _ = _make_parser([*arguments, "--json"])
    parser.parse_args([*arguments, "--json"])


def test_the_cheap_ones_take_ten_processor_minutes_at_most() -> None:
    assert sum(command.seconds for command in COMMANDS if not command.is_dear) <= 600
    assert len({command.run for command in COMMANDS}) == len(COMMANDS)


def test_each_row_of_what_differs_is_run_or_has_a_test_and_a_reason() -> None:
    scenarios = all_scenarios()
    assert sum(own.peer == "deepspeed" and own.run is not None for own in scenarios) >= 25
    assert (
        len({own.name for own in scenarios})
        == len({(own.peer, own.of, own.what) for own in scenarios})
        == len(scenarios)
    )
    for own in scenarios:
        file, _, name = own.test.partition("::")
        assert own.run or f"def {name}(" in (ROOT / "tests" / file).read_text(), own.test
        assert own.here in (SAME, REFUSED, DIFFERS)
        assert bool(own.why) == (own.here != SAME), own.what


def blocks(page: str) -> list[list[str]]:
    """Return a page's paragraphs and tables, as lines; no fenced code."""
    text = re.sub(r"^```.*?^```$|^<!--.*?-->$", "", (ROOT / page).read_text(), flags=re.M | re.S)
    return [block.strip().split("\n") for block in re.split(r"\n\s*\n", text) if block.strip()]


def unnamed(found: list[list[str]]) -> list[str]:
    """Return lines of tables, and paragraphs beside tables, that have a number and no command.

    A table's command stands in its header, in the row itself, or in the paragraph before or behind it.
    """
    left = []
    for index, block in enumerate(found):
        beside = [found[i] for i in (index - 1, index + 1) if 0 <= i < len(found)]
        prose = [" ".join(other) for other in beside if not other[0].startswith("|")]
        if not block[0].startswith("|"):
            # prose is held to this where numbers are listed: beside a table
            is_near = len(prose) < len(beside) and not block[0].startswith("#")
            units = [" ".join(block)] if is_near else []
        elif any(COMMAND.search(text) for text in (block[0], *prose)):
            continue
        else:
            units = block[2:]
        for unit in units:
            told = VERSION.sub("", unit)
            if NUMBER.search(told) and not COMMAND.search(unit):
                plain = " ".join(unit.split())
                if not any(quote in plain or plain in quote for quote in QUOTES):
                    left.append(plain)
    return left


@pytest.mark.parametrize("page", PAGES)
def test_every_number_and_verdict_names_its_command(page: str) -> None:
    assert not unnamed(blocks(page))


def test_a_number_without_a_command_is_found() -> None:
    table = "| a | b |\n|---|---|\n| x | 1.27 |\n| y | `gpp bench overhead`: 3.5 ms |\n| z | not run |".split(
        "\n"
    )
    assert unnamed([table]) == ["| x | 1.27 |"]
    assert unnamed([["`gpp bench overhead`:"], table]) == []
    assert unnamed([["It takes 3.5 ms."], table]) == ["It takes 3.5 ms.", "| x | 1.27 |"]
    assert unnamed([["| with torch 2.13 | runs |"]]) == []


RESULT = {
    "rows": [
        {"system": "gpp", "status": "exact", "error": 1e-16, "gain": 1.2648},
        {"system": "torch", "status": "refused", "error": None, "gain": 1.5},
        {"system": "int and bool", "status": "exact", "error": 0.0, "gain": 1.0},
    ],
    "summary": {"ok": True, "names": ["a", "b", "c"]},
    "exit": 0,
}


@pytest.mark.parametrize(
    ("line", "holds", "seen"),
    [
        ("rows[system=gpp].status each == exact", True, "exact"),
        ("rows.status each == exact", False, "exact, refused"),
        ("rows[system=int and bool].status each == exact", True, "exact"),
        ("rows[system=jax].status each == exact", False, "nothing"),
        ("rows[system=gpp,status=exact] count == 1", True, "1"),
        ("rows[status=deadlock] count == 0", True, "0"),
        ("rows[status=exact].error max <= 1e-12", True, "1e-16"),
        ("rows.error max <= 1e-12", False, "null"),
        ("rows[system=jax].error max <= 1e-12", False, "nothing"),
        ("rows[system=gpp].gain max ~ 1.26", True, "1.2648"),
        ("rows[system=gpp].gain max ~ 1.27", False, "1.2648"),
        ("rows.gain min >= 1", True, "1"),
        ("rows.gain min >= 1.1", False, "1"),
        ("summary.names count == 3", True, "3"),
        ("summary.ok each == True", True, "True"),
        ("exit each == 0", True, "0"),
    ],
)
def test_checks(line: str, holds: bool, seen: str) -> None:
    assert claims.check(RESULT, line) == (holds, seen)


def test_what_is_no_check_is_refused() -> None:
    with pytest.raises(SystemExit, match="is no check"):
        claims.check(RESULT, "rows.status is exact")


@pytest.mark.parametrize(
    ("text", "status", "exit_code"),
    [("It is exact.", "exact", 0), ("It is exact.", "wrong", 1), ("It is quick.", "exact", 1)],
)
def test_a_claim_that_differs_fails_the_run(
    text: str,
    status: str,
    exit_code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "page.md").write_text("It is\nexact.\n")
    claim = claims.Claim(page="page.md", text=text, sees=("rows.status each == exact",))
    cheap = claims.Command(run="gpp bench overhead", seconds=1.0, is_dear=False, claims=(claim,))
    dear = claims.Command(run="gpp bench zoo", seconds=999.0, is_dear=True, claims=(claim,))
    ran: list[list[str]] = []

    def run(words: list[str], **_: Any) -> SimpleNamespace:
        ran.append(words[2:])
        return SimpleNamespace(stdout="told\n" + json.dumps({"rows": [{"status": status}]}), returncode=0)

    monkeypatch.setattr(claims, "ROOT", tmp_path)
    monkeypatch.setattr(claims, "read_claims", lambda: (cheap, dear))
    monkeypatch.setattr(claims.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["claims.py", "--json"])
    assert claims.main() == exit_code
    assert ran == [["gpp_plugin", "bench", "overhead", "--json"]]
    out = capsys.readouterr().out
    told = json.loads(out.splitlines()[-1])
    assert (told["ok"], told["not_run"]) == (exit_code == 0, ["gpp bench zoo"])
    assert f"{1 - exit_code} of 1 checks hold" in out
    monkeypatch.setattr(sys, "argv", ["claims.py", "--only", "zoo", "--list"])
    assert claims.main() == 0 and "dear     999 s  1 claims  gpp bench zoo" in capsys.readouterr().out
