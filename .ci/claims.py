#!/usr/bin/env python3
"""Runs the commands behind README and docs, and compares what they print with what the pages say.

    python .ci/claims.py [--all] [--only TEXT ...] [--list] [--json]

docs/claims.toml has the commands and, of each, what pages claim by it. The cheap ones are run, with ``--all`` the dear
ones too. A claim has a line of its page as it stands there, and checks of the last line of ``command --json``::

    rows[system=gpp].status each == exact      every selected value is the word
    rows[system=gpp].error max <= 1e-12        the largest, least, sum or number of them is within a bound
    rows[models=2].gain max ~ 1.27             rounded as written, it is the number
    exit each == 0                             the command's own exit status

Exit status 1: a claim differs, or its text is not in its page. Only the standard library is used.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CLAIMS = ROOT / "docs" / "claims.toml"
CHECK = re.compile(r"^(?P<path>\S.*?) (?P<of>each|max|min|sum|count) (?P<test>==|~|<=|>=) (?P<value>.+)$")
STEP = re.compile(r"^(?P<name>[^\[\]]+)(?:\[(?P<where>.*)\])?$")
REDUCE: dict[str, Callable[[list[Any]], Any]] = {"max": max, "min": min, "sum": sum, "count": len}
LIMIT_S = 300.0
"""Seconds that any command may take, beside `SLOWER` times the processor seconds that it is said to take."""
SLOWER = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What one line of a page says.

    Args:
        text: as it stands in the page.
        sees: checks of the command's result, all of which hold.
    """

    page: str
    text: str
    sees: tuple[str, ...]

    def is_in_page(self) -> bool:
        """Return whether the page says so still; line breaks count as spaces."""
        return " ".join(self.text.split()) in " ".join((ROOT / self.page).read_text(encoding="utf-8").split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command, and what is claimed by it.

    Args:
        seconds: processor seconds that it takes, of all processes, about.
        is_dear: it is listed, and run by ``--all`` alone.
    """

    run: str
    seconds: float
    is_dear: bool
    claims: tuple[Claim, ...]


def read_claims(path: Path = CLAIMS) -> tuple[Command, ...]:
    """Return the commands and their claims, in the order of the file."""
    return tuple(
        Command(
            run=entry["run"],
            seconds=float(entry["seconds"]),
            is_dear=bool(entry.get("dear", False)),
            claims=tuple(
                Claim(page=claim["page"], text=claim["text"], sees=tuple(claim["sees"]))
                for claim in entry["claim"]
            ),
        )
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["command"]
    )


def select(result: Any, path: str) -> list[Any]:
    """Return the values at a path: ``a.b`` of objects, ``rows[key=value,other=value].key`` of lists of them.

    >>> select({"rows": [{"n": 1, "us": 2.0}, {"n": 2, "us": 3.0}]}, "rows[n=2].us")
    [3.0]
    """
    found = [result]
    for step in re.findall(r"[^.\[\]]+(?:\[[^\]]*\])?", path):
        match = STEP.match(step)
        assert match is not None, path
        found = [value[match["name"]] for value in found if match["name"] in value]
        if found and all(isinstance(value, list) for value in found):
            found = [item for value in found for item in value]
        for condition in filter(None, (match["where"] or "").split(",")):
            key, _, wanted = condition.partition("=")
            found = [item for item in found if str(item.get(key)) == wanted]
    return found


def check(result: Any, line: str) -> tuple[bool, str]:
    """Return whether a check holds, and what was seen.

    >>> check({"rows": [{"gain": 1.2648}]}, "rows.gain max ~ 1.27")
    (False, '1.2648')
    """
    match = CHECK.match(line)
    if match is None:
        raise SystemExit(f"{CLAIMS.name}: {line!r} is no check: PATH each|max|min|sum|count ==|~|<=|>= VALUE")
    values = select(result, match["path"])
    if match["of"] == "each":
        seen = sorted({str(value) for value in values})
        return bool(values) and seen == [match["value"]], ", ".join(seen) or "nothing"
    if not values and match["of"] != "count":
        return False, "nothing"
    if any(value is None for value in values):
        return False, "null"
    found, wanted = REDUCE[match["of"]](values), float(match["value"])
    holds = {
        "==": found == wanted,
        "~": round(found, len(match["value"].partition(".")[2])) == wanted,
        "<=": found <= wanted,
        ">=": found >= wanted,
    }[match["test"]]
    return holds, f"{found:.6g}" if isinstance(found, float) else str(found)


def run_command(command: Command) -> tuple[dict[str, Any], float]:
    """Return the result that a command prints, with its exit status, and the processor seconds of all its processes."""
    words = shlex.split(command.run)
    if words[0] == "gpp":
        words = [sys.executable, "-m", "gpp_plugin", *words[1:], "--json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        done = subprocess.run(
            words,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=LIMIT_S + SLOWER * command.seconds,
            env={"OMP_NUM_THREADS": "1", **os.environ},
        )
    except subprocess.TimeoutExpired as late:
        return {"exit": f"none within {late.timeout:g} s"}, 0.0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    last = done.stdout.rstrip().rpartition("\n")[2]
    result = json.loads(last) if last.startswith("{") else {}
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
    return {**result, "exit": done.returncode}, seconds


def check_command(command: Command) -> list[dict[str, Any]]:
    """Run a command and return a row for each of its checks."""
    print(f"$ {command.run}", file=sys.stderr, flush=True)
    result, seconds = run_command(command)
    rows = []
    for claim in command.claims:
        for line in claim.sees:
            holds, seen = check(result, line)
            rows.append(
                {
                    "page": claim.page, "claim": claim.text, "command": command.run, "check": line, "seen": seen,
                    "ok": holds and claim.is_in_page(), "in_page": claim.is_in_page(), "cpu_s": round(seconds, 1),
                }
            )  # fmt: skip
    return rows


def is_wanted(command: Command, only: Sequence[str]) -> bool:
    """Return whether a command, or a text that it is claimed by, has one of these words in it; all, without any."""
    told = [command.run, *(f"{claim.page} {claim.text}" for claim in command.claims)]
    return not only or any(word in text for word in only for text in told)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return one line a check: the claim, its command, what was seen, and whether it is so."""
    lines = [("claim", "command", "check", "seen", "ok")]
    for row in rows:
        claim = row["claim"] if len(row["claim"]) <= 60 else row["claim"][:57] + "..."
        verdict = "yes" if row["ok"] else "NO" if row["in_page"] else f"NO: not in {row['page']}"
        lines.append((claim.replace(" | ", " "), row["command"], row["check"], row["seen"], verdict))
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    return "\n".join(
        " | ".join([*(cell.ljust(w) for cell, w in zip(line, widths, strict=False)), line[-1]])
        for line in lines
    )


def main() -> int:
    """Run what is asked for; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="run the dear ones too")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="TEXT", help="those with this in command, page or text"
    )
    parser.add_argument("--list", action="store_true", help="print the commands, and run nothing")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON: the rows")
    args = parser.parse_args()
    commands = [command for command in read_claims() if is_wanted(command, args.only)]
    if not commands:
        parser.error(f"--only: no claim has {' or '.join(args.only)} in it; --list prints all")
    if args.list:
        for command in commands:
            tier = "dear " if command.is_dear else "cheap"
            print(f"{tier} {command.seconds:6.0f} s  {len(command.claims)} claims  {command.run}")
        print(f"cheap: {sum(c.seconds for c in commands if not c.is_dear):.0f} processor seconds")
        return 0
    rows = [row for c in commands if args.all or not c.is_dear for row in check_command(c)]
    wrong = [row for row in rows if not row["ok"]]
    print(table(rows))
    spent = sum({row["command"]: row["cpu_s"] for row in rows}.values())
    print(f"{len(rows) - len(wrong)} of {len(rows)} checks hold; {spent:.0f} processor seconds")
    left = [command.run for command in commands if command.is_dear and not args.all]
    if left:
        print(f"not run, as --all does: {len(left)} dear commands (--list prints them)")
    if args.json:
        print(json.dumps({"ok": not wrong, "rows": rows, "not_run": left}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
