"""What to change so that more fits: of the fullest stage, by what fills it.

Source: this project
Tests: tests/integrations/test_memory.py
"""

from __future__ import annotations

from collections.abc import Sequence

from gpp_plugin.ir.plan import PipelinePlan

_KINDS = {
    "activations": ("activations", "working", "transient"),
    "weights": ("weights", "gathered", "stashed_weights"),
    "gradients and optimizer state": ("gradients", "optimizer"),
    "the mini-batch": ("inputs",),
}


def memory_advice(plan: PipelinePlan, *, zero_stage: int, allowed: Sequence[str]) -> tuple[str, ...]:
    """Return a line on the fullest stage and what would make room there; none where nothing is predicted.

    Args:
        allowed: of ``recompute`` and ``swap``, what plans may do already.
    """
    known = [i for i, part in enumerate(plan.memory) if part.limit]
    if not known:
        return ()
    fullest = max(known, key=lambda i: plan.memory[i].total / plan.memory[i].limit)
    part, stage = plan.memory[fullest], plan.stages[fullest]
    bytes_of = {kind: sum(getattr(part, name) for name in names) for kind, names in _KINDS.items()}
    largest = max(bytes_of, key=bytes_of.__getitem__)
    changes = _changes(largest, allowed)
    if largest == "gradients and optimizer state":
        changes.insert(0, _zero(zero_stage, stage.degree))
    if largest == "weights" and stage.degree > 1 and zero_stage < 3 and plan.shares_ranks:
        changes.insert(
            0, "zero_optimization.stage 3: ranks of several stages then hold one of them whole at a time"
        )
    return (
        f"fullest is stage {stage.name!r}: {part.total} of {part.limit} bytes "
        f"({100 * part.total / part.limit:.0f} %), most of it {largest} ({bytes_of[largest]} bytes); to fit more: "
        f"{', '.join(change for change in changes if change)}",
    )


def _changes(largest: str, allowed: Sequence[str]) -> list[str]:
    if largest == "the mini-batch":
        return ["a smaller train_batch_size", "more ranks for this stage"]
    if largest != "activations":
        return ["more stages (or fewer blocks in this one)"]
    changes = ["smaller micro_batch_sizes"]
    if "recompute" not in allowed:
        changes.append('memory.recompute "auto" or "full"')
    if "swap" not in allowed:
        changes.append('memory.swap "auto"')
    return [*changes, "more stages"]


def _zero(zero_stage: int, degree: int) -> str:
    if degree == 1 or zero_stage >= 2:  # stage 3 shares out parameters, on ranks of several stages
        return ""
    return f"zero_optimization.stage {zero_stage + 1}: this stage has {degree} ranks to share them out"
