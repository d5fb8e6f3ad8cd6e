"""DawnPiper's tables 1 and 2, and the balance of compute of section 5.4 (its figure 8)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpp_benchmarks.figures._figure_rows import Figure, FigureRow, Options, run_bench

BALANCE = {"dawnpiper": 0.077, "vpipe": 0.358}
"""Section 5.4: how far the shortest stage is below the longest, T5 on eight asynchronous stages."""
_WHY = (
    "costs by analysis on A100-40GB over PCIe 4, memory as planned; the paper's are measured, and it gives neither the "
    "lengths of texts nor what slowdown it allows (ours: 1.5 times the quickest plain batch; notes have other limits)"
)


def figures() -> tuple[Figure, ...]:
    """Return both tables and the balance."""
    return (
        Figure(
            "table-1", "largest mini-batch, synchronous", lambda options: _batches(options, "sync"), why=_WHY
        ),
        Figure(
            "table-2",
            "largest micro-batch, asynchronous",
            lambda options: _batches(options, "async"),
            why=_WHY,
        ),
        Figure(
            "balance",
            "how far the shortest stage is below the longest: T5, eight asynchronous stages",
            _balance,
            why=f"{_WHY}; at 2.5 times vPipe's largest plain micro-batch, which is 110 in the paper",
        ),
    )


def _stages(options: Options) -> list[str]:
    return [str(count) for count in (4, 8) if count <= max(options.devices)]


def _batches(options: Options, mode: str) -> Iterable[FigureRow]:
    result = run_bench("max_batch", ["--modes", mode, "--stages", *_stages(options)])
    by_limit = {
        (row["model"], row["stages"], row["optimization"], planner): (row["limits"], found)
        for row in result["sensitivity"]
        for planner, found in row["micro_batches"].items()
    }
    for row in result["rows"]:
        if row["paper"] is None:
            continue
        notes = [] if row["slowdown"] is None else [f"{row['slowdown']:.2f} times the quickest plain time"]
        key = row["model"], row["stages"], row["optimization"], row["planner"]
        if key in by_limit:
            notes.append(_limits_text(*by_limit[key]))
        yield FigureRow(
            f"{row['model']}, {row['stages']} stages, {row['optimization']}",
            row["planner"],
            paper=float(row["paper"]),
            ours=float(row["max_batch"]),
            note="; ".join(notes),
        )


def _limits_text(limits: Sequence[float], micro_batches: Sequence[int]) -> str:
    """Return how the result hangs on the limit on time.

    >>> _limits_text([1.3, 1.5], [8, 12])
    'micro-batches of 8, 12 at 1.3, 1.5 times'
    """
    sizes, times = (", ".join(f"{each:g}" for each in found) for found in (micro_batches, limits))
    return f"micro-batches of {sizes} at {times} times"


def _balance(options: Options) -> Iterable[FigureRow]:
    result = run_bench("max_batch", ["--models", "t5_780m", "--modes", "async", "--stages", "8"])
    for row in result["balance"]:
        yield FigureRow(
            f"T5, 8 stages x {row['micro_batch']}",
            f"{row['planner']}, 1 - shortest / longest",
            paper=BALANCE[row["planner"]],
            ours=row["spread"],
            note="" if row["fits"] else "does not fit",
        )
