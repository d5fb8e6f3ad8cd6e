"""The plain zoo: small torch modules as people write them, trained on two ranks and in one process.

`gpp bench zoo --family plain` trains each for five steps of SGD, two loss units a step, on two ranks that are kept for
all of them, in two stages where its blocks can be cut; losses, parameters and buffers must be one process's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gpp_benchmarks._ranks import bench_ranks
from gpp_benchmarks.zoo._catalogue import ENDED
from gpp_benchmarks.zoo.plain import _kept_state, _odd_inputs, _python_ways
from gpp_benchmarks.zoo.plain._entry import PlainModel
from gpp_plugin.errors import RuntimeFailure

PLAIN = "plain"
"""The family that all of these are of."""
NUM_RANKS = 2
PLAIN_MODELS: dict[str, PlainModel] = {
    entry.name: entry for entry in (*_kept_state.MODELS, *_python_ways.MODELS, *_odd_inputs.MODELS)
}


def plain_rows(names: Sequence[str], *, timeout_s: float) -> Iterator[dict[str, Any]]:
    """Train modules one after the other on ranks that are kept for all, and yield their rows.

    A module that ends its ranks, or takes longer than ``timeout_s``, is one row; the others go on with new ranks.
    """
    waiting = list(names)
    while waiting:
        under_way = waiting[0]
        try:
            events = bench_ranks(
                "zoo.plain._plain_ranks",
                {"names": waiting, "timeout_s": timeout_s},
                num_ranks=NUM_RANKS,
                timeout_s=timeout_s * (1 + len(waiting)),
                environment=None,
            )
            for event in events:
                if "row" in event:
                    waiting.remove(event["row"]["name"])
                    yield event["row"]
                else:
                    under_way = event["begun"]
        except RuntimeFailure as error:
            if under_way in waiting:
                waiting.remove(under_way)
                line = " ".join(str(error).split())
                yield empty_plain_row(PLAIN_MODELS[under_way]) | {"verdict": ENDED, "line": line[-400:]}


def empty_plain_row(entry: PlainModel) -> dict[str, Any]:
    """Return a row that says which module it is of."""
    return {"name": entry.name, "kind": entry.kind, "verdict": ENDED, "line": "", "cuttable": None}


def plain_line(row: dict[str, Any]) -> str:
    """Return a module's line of the table."""
    cuttable, found = row["cuttable"], [row["line"]] if row["line"] else []
    if cuttable:
        share = cuttable["eager_share"]
        eager = f", {share:.0%} of its operations eager" if cuttable["eager"] else ""
        found.insert(0, f"{cuttable['blocks']} blocks in {cuttable['stages']} stages{eager}")
    if "loss_error" in row:
        errors = ", ".join(f"{what} {row[f'{what}_error']:.0e}" for what in ("loss", "parameter", "buffer"))
        found.insert(1, errors)
    return f"{row['name']:<22} {row['kind']:<8} {row['verdict']:<10} {'; '.join(found)}"
