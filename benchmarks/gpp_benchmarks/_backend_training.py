"""Training behind a frozen tower that runs on torch, or on a backend: the rows of `gpp bench backends --training`.

Three ways of the same ten steps on 4 ranks, run in turn:

    torch             "backends": "off"
    same stages       the stages of the first, the tower on the fastest backend
    stages cut again  "backends": "auto": measured, planned again with what the tower takes

As many stages as are asked for: in one, the tower would be in a stage that trains, which stays on torch.

Losses are held against one process that trains the model as it is.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from gpp_plugin.launch import run_ranks
from gpp_plugin.relative_errors import loss_difference
from gpp_plugin.report.rows_text import format_rows
from gpp_plugin.report.units import fill_text

NUM_RANKS = 4
SETTLING = 2
"""Steps at the beginning of a run that are not timed: shapes are compiled, backends built."""
TIMEOUT_S = 1800.0
TOLERANCE = 1e-5


def train_behind_towers(
    towers: Sequence[str], *, backends: Sequence[str], num_steps: int, turns: int, stages: int
) -> dict[str, Any]:
    """Return a row a tower and way; prints a table for each tower.

    Raises:
        RuntimeFailure: a rank failed.
    """
    rows: list[dict[str, Any]] = []
    for tower in towers:
        with tempfile.TemporaryDirectory(prefix="gpp_backends_", ignore_cleanup_errors=True) as folder:
            settings = {
                "tower": tower,
                "backends": list(backends),
                "steps": num_steps,
                "folder": folder,
                "stages": stages,
            }
            events = run_ranks(
                "gpp_benchmarks._backend_ranks",
                [json.dumps({**settings, "turns": turns, "settling": SETTLING})],
                num_ranks=NUM_RANKS,
                timeout_s=TIMEOUT_S,
                environment={"OMP_NUM_THREADS": "1"},
            )
            found = list(events)
        own = _rows(tower, found)
        print(f"behind {tower}\n{way_table(own)}", flush=True)
        rows += own
    print(
        fill_text(
            "measured: median of all steps but the first two of a run; simulated: of the plan, for a processor a rank. "
            "Where ranks share processors a step takes the work of all of them, which fewer ranks do not lessen"
        )
    )
    return {"rows": rows, "ok": all(row["loss_error"] <= TOLERANCE for row in rows)}


def _rows(tower: str, events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    eager = next(event["losses"] for event in events if event["way"] == "eager")
    ways: dict[str, list[Mapping[str, Any]]] = {}
    for event in events:
        if event["way"] != "eager":
            ways.setdefault(event["way"], []).append(event)
    rows = []
    for way, runs in ways.items():
        error = max(loss_difference(run["losses"], eager) for run in runs)
        first = runs[0]
        rows.append(
            {
                "tower": tower,
                "way": way,
                "measured_ms": statistics.median(ms for run in runs for ms in run["step_ms"]),
                "busy_ms": statistics.median(ms for run in runs for ms in run["busy_ms"]),
                "simulated_ms": first["simulated_us"] / 1e3,
                "loss_error": error,
                "start_s": first["start_s"],
                "stages": first["stages"],
                "notes": first["notes"],
            }
        )
    return rows


def way_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a row a way of training, and below each its stages and what is to be known of it."""
    hidden = ("model", "tower", "backend", "worst", "stages")
    columns = [key for key in rows[0] if key not in hidden]
    texts = [fill_text(f"{row['way']}: {row['stages']}", indent="  ") for row in rows]
    texts += [fill_text(f"- {note}", indent="  ") for row in rows for note in row["notes"]]
    return "\n".join([format_rows(rows, columns), *texts, ""])
