"""Scenarios rebuilt from peers' own tests, each run with the peer's engine and with this package's, and compared.

    gpp bench peers                      all of them.
    gpp bench peers --peers torch        of torch.distributed.pipelining: its models and its schedules.
    gpp bench peers --peers files        configurations that projects ship, beside one process.
    gpp bench peers --only tied eval     those whose names have one of these texts in them.

A scenario does what a test of the peer does, by calls that both engines have, on gloo ranks: values, types and
exceptions are compared. A row is `same`, `refused` with the line that says so, or `differs` on purpose. Each has the
verdict that docs/porting.md says, or the command ends with 1. Nothing of the peers' tests is copied.
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gpp_benchmarks._options import add_choices, add_option
from gpp_benchmarks._ranks import bench_ranks
from gpp_benchmarks.peers._scenario import RAISED, SCENARIOS, Scenario, Seen, verdict_of
from gpp_plugin.errors import ConfigError, RuntimeFailure

PEERS = ("deepspeed", "torch", "files")
START_S = 120.0


def all_scenarios() -> list[Scenario]:
    """Return every scenario, in the order of the table."""
    for name in ("_deepspeed", "_deepspeed_checkpoints", "_torch", "_files"):
        importlib.import_module(f"gpp_benchmarks.peers.{name}")
    return SCENARIOS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add_choices(parser, "--peers", PEERS, "whose scenarios (all)")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="scenarios whose names have it (all)")
    parser.add_argument("--list", action="store_true", help="only name the scenarios, and run none")
    add_option(parser, "--limit", 60.0, "seconds a scenario may wait for a rank")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return one row a scenario, and whether each has the verdict that the documents have.

    Raises:
        ConfigError: no scenario has such a name.
    """
    chosen = [own for own in all_scenarios() if own.peer in args.peers and _is_asked(own, args.only)]
    if not chosen:
        raise ConfigError(f"--only {' '.join(args.only or ())}: no scenario has such a name; see --list")
    if args.list:
        for own in chosen:
            print(f"{own.peer} {own.of:<12} {own.name}: {own.what}")
        return {"rows": [_facts(own) for own in chosen], "ok": True}
    rows = []
    with tempfile.TemporaryDirectory(prefix="gpp-peers-") as folder:
        for peer in args.peers:
            for ranks in sorted({own.ranks for own in chosen if own.peer == peer and own.ranks}):
                group = [own for own in chosen if (own.peer, own.ranks) == (peer, ranks)]
                print(f"{peer}: {len(group)} scenarios on {ranks} ranks", flush=True)
                seen = [
                    _seen_on(
                        is_peer,
                        group,
                        ranks=1 if is_peer and peer == "files" else ranks,
                        folder=Path(folder),
                        limit_s=args.limit,
                    )
                    for is_peer in (True, False)
                ]
                for own in group:
                    rows.append(_row(own, seen[0][own.name], seen[1][own.name]))
                    print(_line(rows[-1]), flush=True)
    counts = {
        verdict: sum(row["verdict"] == verdict for row in rows) for verdict in ("same", "refused", "differs")
    }
    wrong = [row["name"] for row in rows if not row["ok"]]
    print(
        ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        + f", {len(wrong)} not as documented"
    )
    return {"rows": rows, "counts": counts, "wrong": wrong, "ok": not wrong, "exit": int(bool(wrong))}


def _is_asked(own: Scenario, only: Sequence[str] | None) -> bool:
    return only is None or any(text in own.name for text in only)


def _facts(own: Scenario) -> dict[str, Any]:
    return {
        "peer": own.peer,
        "of": own.of,
        "name": own.name,
        "what": own.what,
        "here": own.here,
        "why": own.why,
    }


def _row(own: Scenario, peer: Seen, here: Seen) -> dict[str, Any]:
    found = verdict_of(peer, here, most=own.most)
    # A scenario whose both sides fail whole shows nothing, unless it is about that.
    is_shown = RAISED not in peer or RAISED not in here
    return {
        **_facts(own),
        "verdict": found.verdict,
        "apart": found.apart,
        "detail": found.detail,
        "ok": found.verdict == own.here and is_shown,
        "peer_raised": peer.get(RAISED, "") and f"{peer[RAISED]}: {peer['line']}",
        "here_raised": here.get(RAISED, "") and f"{here[RAISED]}: {here['line']}",
    }


def _seen_on(
    is_peer: bool, group: Iterable[Scenario], *, ranks: int, folder: Path, limit_s: float
) -> dict[str, Seen]:
    """Return what every scenario shows on one side; what ends its job is left out of the next job."""
    left = [own.name for own in group]
    seen: dict[str, Seen] = {}
    while left:
        settings = {"names": left, "is_peer": is_peer, "folder": str(folder), "limit_s": limit_s}
        current = left[0]
        try:
            timeout_s = START_S + limit_s * len(left)
            for event in bench_ranks("peers._rank", settings, num_ranks=ranks, timeout_s=timeout_s):
                current = event["name"]
                if event["event"] == "seen":
                    seen[current] = event["seen"]
        except RuntimeFailure as failure:
            line = (str(failure).strip().splitlines() or [""])[-1]
            seen.setdefault(current, {RAISED: "RuntimeFailure", "line": f"its job ended: {line}"})
        left = [name for name in left if name not in seen]
    return seen


def _line(row: dict[str, Any]) -> str:
    mark = "" if row["ok"] else f"  EXPECTED {row['here']}"
    apart = f" {row['apart']:.0e}" if row["apart"] else ""
    told = f" ({row['detail']})" if row["detail"] else ""
    both = f" [peer {row['peer_raised']}; here {row['here_raised']}]" if not row["ok"] else ""
    return f"  {row['verdict']:<8} {row['of']}: {row['what']}{apart}{told}{mark}{both}"
