"""A stage's `MemoryPlan` in terms of its operators, checked before anything runs.

Source: this project
Tests: tests/runtime/test_memory_ranks.py, tests/stage_graph/test_part.py, tests/stage_graph/test_captured.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.memory_plan import MemoryPlan

INSIDE = ":inside"
"""Ends the names of what an operator keeps beside operands and results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOperators:
    """What a captured stage is made of, by names that hold at every shape.

    Args:
        blocks: block of the stage -> its operators. Operators of the stage's code that are in none are replicated
            ones, cheap and made of the model's inputs.
        storage_of: operator or received tensor -> the one in whose storage it lies; left out where that is its own.
        local: operator as plans call it -> as the code does; left out where they agree.
        repeated: keys and values that attention repeats for its heads where it has a mask, and the same as they are,
            which it keeps where it has none.
    """

    blocks: Mapping[str, tuple[str, ...]]
    storage_of: Mapping[str, str]
    local: Mapping[str, str] = field(default_factory=dict)
    repeated: Sequence[tuple[str, str]] = ()

    def tensor(self, name: str) -> str:
        """Return what the code calls a tensor of a plan."""
        operator = name.removesuffix(INSIDE)
        return self.local.get(operator, operator) + name.removeprefix(operator)


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryPolicy:
    """What happens to the tensors that autograd keeps, by the names of `SavedTensor`.

    Args:
        segments: operators of each recomputed segment; ``dropped``: the tensors it makes again.
        operators: all operators of the stage's blocks.
        stand_ins: tensor -> those that are kept in its place where attention has no mask, or has one: a plan that
            names either means both.
    """

    segments: tuple[frozenset[str], ...]
    dropped: tuple[frozenset[str], ...]
    swapped: frozenset[str]
    operators: frozenset[str]
    storage_of: Mapping[str, str]
    stand_ins: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @cached_property
    def segment_of(self) -> dict[str, int]:
        """Return the segment of each operator that has one."""
        return {node: i for i, nodes in enumerate(self.segments) for node in nodes}

    def root(self, name: str) -> str:
        """Return the operator, or the stage's input, in whose storage a result lies."""
        return self.storage_of.get(name, name)


def make_policy(stage: str, plan: MemoryPlan, operators: StageOperators) -> MemoryPolicy:
    """Translate a plan's blocks to operators.

    Raises:
        PlanError: a segment has blocks that the stage lacks or that another segment has, or a tensor is to be both
            swapped and made again.
    """
    taken: set[str] = set()
    for segment in plan.recomputed:
        absent = [name for name in segment.blocks if name not in operators.blocks]
        if absent:
            raise PlanError(
                f"stage {stage!r}: a segment to run again has block {absent[0]!r}, which is not one of the stage's; "
                "plan again for this model and granularity"
            )
        twice = [name for name in segment.blocks if name in taken]
        if twice:
            raise PlanError(f"stage {stage!r}: block {twice[0]!r} is in two segments to run again; keep one")
        taken.update(segment.blocks)
    dropped = {name for segment in plan.recomputed for name in segment.tensors}
    both = [tensor.name for tensor in plan.swapped if tensor.name in dropped]
    if both:
        raise PlanError(f"stage {stage!r}: tensor {both[0]!r} is both swapped and made again; choose one")
    return MemoryPolicy(
        segments=tuple(
            frozenset(node for block in segment.blocks for node in operators.blocks[block])
            for segment in plan.recomputed
        ),
        dropped=tuple(frozenset(map(operators.tensor, segment.tensors)) for segment in plan.recomputed),
        swapped=frozenset(operators.tensor(tensor.name) for tensor in plan.swapped),
        operators=frozenset(node for nodes in operators.blocks.values() for node in nodes),
        storage_of=operators.storage_of,
        stand_ins=_stand_ins(operators),
    )


def _stand_ins(operators: StageOperators) -> dict[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {}
    for pair in operators.repeated:
        repeated, source = (operators.storage_of.get(name, name) for name in pair)
        for name, other in ((repeated, source), (source, repeated)):
            found[name] = found.get(name, frozenset()) | {other}
    return found
