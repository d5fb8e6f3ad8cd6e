"""What autograd keeps if a plan is kept to, and how far what was counted is from it.

Source: this project
Tests: tests/integrations/test_memory.py
"""

from __future__ import annotations

from gpp_plugin.ir.memory_report import MemoryCounts
from gpp_plugin.ir.plan import PipelinePlan

TOLERANCE = 0.02
LEAST_BYTES = 1024
"""Differences below this are of single small tensors, whatever share of a small stage they are."""


def expected_counts(plan: PipelinePlan, stage: int) -> MemoryCounts | None:
    """Return what one rank of a stage keeps, swaps and recomputes; None where the plan predicts nothing."""
    if not plan.memory:
        return None
    memory, in_flight = plan.stages[stage].memory, plan.stages[stage].in_flight
    activations = plan.memory[stage].activations
    return MemoryCounts(
        held_bytes=round(activations / in_flight),
        swapped_bytes=memory.swapped_bytes if memory is not None else 0,
        recomputed_bytes=sum(segment.bytes for segment in memory.recomputed) if memory is not None else 0,
        peak_held_bytes=activations,
        stashed_bytes=plan.memory[stage].stashed_weights,
    )


def differences(plan: PipelinePlan, stage: int, counted: MemoryCounts) -> list[str]:
    """Return a phrase for every count that is off by more than `TOLERANCE`; none where nothing is predicted."""
    expected = expected_counts(plan, stage)
    if expected is None:
        return []
    found = []
    for name, what in (
        ("held_bytes", "holds"),
        ("swapped_bytes", "swaps"),
        ("recomputed_bytes", "recomputes"),
        ("peak_held_bytes", "holds at most"),
        ("stashed_bytes", "stashes"),
    ):
        planned, seen = getattr(expected, name), getattr(counted, name)
        if abs(seen - planned) > max(TOLERANCE * planned, LEAST_BYTES):
            of = "" if name in ("peak_held_bytes", "stashed_bytes") else " a micro-batch"
            found.append(f"{what} {seen} bytes{of} where {planned} are planned")
    return found
