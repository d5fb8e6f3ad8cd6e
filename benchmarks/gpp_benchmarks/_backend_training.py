"""Training behind a frozen tower that runs on torch, or on a backend: the rows of `gpp bench backends --training`.

Three ways of the same ten steps on 4 ranks, run in turn:

    torch             "backends": "off"
    same stages       the stages of the first, the tower on the fastest backend
    stages cut again  "backends": "auto": measured, planned again with what the tower takes

As many stages as are asked for: in one, the tower would be in a stage that trains, which stays on torch.

Losses are held against one process that trains the model as it is.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpp_benchmarks._ranks import bench_ranks
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
                "turns": turns,
                "settling": SETTLING,
            }
            events = bench_ranks(
                "_backend_ranks",
                settings,
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
    return [
        {"tower": tower, **way_times(way, runs), "loss_error": error, **told_of_start(runs[0])}
        for way, runs, error in runs_of_ways(events)
    ]


def runs_of_ways(events: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[Mapping[str, Any]], float]]:
    """Yield each way that was run, its runs, and the largest error of their losses against one process."""
    (eager,) = (event["losses"] for event in events if event["way"] == "eager")
    for way in dict.fromkeys(event["way"] for event in events if event["way"] != "eager"):
        runs = [event for event in events if event["way"] == way]
        yield way, runs, max(loss_difference(run["losses"], eager) for run in runs)


def way_times(way: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the steps of a way took, and what its plan says."""
    return {
        "way": way,
        "measured_ms": statistics.median(ms for run in runs for ms in run["step_ms"]),
        "busy_ms": statistics.median(ms for run in runs for ms in run["busy_ms"]),
        "simulated_ms": runs[0]["simulated_us"] / 1e3,
    }


def told_of_start(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is told of how a way began."""
    return {key: run[key] for key in ("start_s", "stages", "notes")}


def way_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a row a way of training, and below each its stages and what is to be known of it."""
    hidden = ("model", "tower", "backend", "worst", "stages")
    columns = [key for key in rows[0] if key not in hidden]
    texts = [fill_text(f"{row['way']}: {row['stages']}", indent="  ") for row in rows]
    texts += [fill_text(f"- {note}", indent="  ") for row in rows for note in row["notes"]]
    return "\n".join([format_rows(rows, columns), *texts, ""])
