"""A memory report as text: what is predicted to fill each rank, what was found there, and what to change.

Source: this project
Tests: tests/integrations/test_memory.py
"""

from __future__ import annotations

from dataclasses import fields

from gpp_plugin.ir.memory_report import MemoryCounts, MemoryReport, RankMemory
from gpp_plugin.report.units import format_bytes, format_table

_PARTS = ("weights", "gradients", "optimizer")


def format_memory_report(report: MemoryReport) -> str:
    """Return the table of ranks, ``predicted / measured`` where both are known, and the lines below it."""
    header = ["rank", "stage", *_PARTS, "gathered", "stashed", "activations", "working"]
    header += ["transient", "buffers", "messages", "ahead", "swapped", "recomputed", "peak", "of"]
    table = format_table(header, [_row(rank) for rank in report.ranks], left=2)
    lines = [
        table,
        f"predicted / measured; measured is {report.measure}; swapped and recomputed: a micro-batch",
    ]
    lines += [f"predicted for {report.lengths}"] if report.lengths else []
    return "\n".join([*lines, *report.differences, *report.advice])


def _row(rank: RankMemory) -> list[str]:
    # A cell is "predicted / measured", of the plan's parts on the left and of what was found on the right, so far as
    # both know it: what a stage needs in passing (transient) is predicted alone, what really went to the host
    # measured alone.
    predicted, counts, held = rank.predicted, rank.counts, rank.held
    counted = counts or MemoryCounts(held_bytes=0, swapped_bytes=0, recomputed_bytes=0, peak_held_bytes=0)
    planned = {} if predicted is None else {f.name: getattr(predicted, f.name) for f in fields(predicted)}
    return [
        str(rank.rank),
        rank.stage,
        *(_pair(planned.get(name), getattr(held, name)) for name in _PARTS),
        _pair(planned.get("gathered"), held.gathered),
        _pair(planned.get("stashed_weights"), counted.stashed_bytes),
        _pair(planned.get("activations"), counted.peak_held_bytes),
        _pair(planned.get("working"), counted.working_bytes),
        _pair(planned.get("transient"), None),
        _pair(planned.get("inputs"), held.buffers),
        _pair(planned.get("messages"), held.messages),
        _pair(rank.ahead_bytes, held.ahead),
        _pair(None, counted.swapped_bytes),
        _pair(None, counted.recomputed_bytes),
        _pair(rank.predicted_peak_bytes or None, rank.measured_peak_bytes),
        format_bytes(predicted.limit) if predicted is not None and predicted.limit else "-",
    ]


def _pair(predicted: int | None, measured: int | None) -> str:
    known = [format_bytes(value) for value in (predicted, measured) if value is not None]
    return " / ".join(known) if predicted or measured else "-"
