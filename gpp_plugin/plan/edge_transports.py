"""Which edges of a plan go over megatron-core's `P2PCommunicator`, and why the others do not.

A communicator serves two ranks and moves one floating-point tensor a call, of a shape both ends know beforehand. An
edge uses it where all of its messages are such: one tensor, and every rank of either stage has one peer. What
an edge carries and between whom is the plan's, so the choice is the same on all ranks and before any of them runs.

Source: this project
Tests: tests/plan/test_edge_transports.py, tests/integrations/test_megatron_p2p.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpp_plugin.config.key_names import place_of, setting_of
from gpp_plugin.errors import PlanError
from gpp_plugin.ir.plan import PipelinePlan, StageEdge
from gpp_plugin.ir.tensors import TensorSpec

NATIVE, MEGATRON = "native", "megatron"
FLOATING = ("float64", "float32", "float16", "bfloat16")
_NOTE = "p2p megatron: "


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeTransport:
    """What carries the messages of one edge.

    Args:
        edge: index into `PipelinePlan.edges`.
        transport: ``native``, ``megatron`` or that of another package.
        reason: why it is not ``megatron`` where that was requested; else empty.
    """

    edge: int
    transport: str
    reason: str = ""


def choose_edge_transports(
    plan: PipelinePlan, p2p: str, *, specs: Mapping[str, TensorSpec] | None = None
) -> tuple[EdgeTransport, ...]:
    """Return what carries each edge of ``plan``, in the order of its edges.

    Args:
        p2p: the configuration's ``graph_pipeline.p2p``. Only ``megatron`` leaves edges to our own transport; that of
            another package carries all of them, or refuses the plan.
        specs: the tensors of its edges by name; the plan's own if None.

    Raises:
        PlanError: an edge names a tensor that is not described.
    """
    if p2p != MEGATRON:
        return tuple(EdgeTransport(edge=index, transport=p2p) for index in range(len(plan.edges)))
    if specs is None:
        specs = {spec.name: spec for spec in plan.tensors}
    reasons = [_why_native(plan, index, edge, specs) for index, edge in enumerate(plan.edges)]
    return tuple(
        EdgeTransport(edge=index, transport=NATIVE if reason else MEGATRON, reason=reason)
        for index, reason in enumerate(reasons)
    )


def _why_native(plan: PipelinePlan, index: int, edge: StageEdge, specs: Mapping[str, TensorSpec]) -> str:
    """Return why an edge needs our own transport, or nothing where it does not."""
    names = (*edge.batch_tensors, *edge.whole_tensors)
    if len(names) != 1:
        return f"{len(names)} tensors a message"
    spec = specs.get(names[0])
    if spec is None:
        raise PlanError(
            f"edge {index} sends {names[0]!r}, whose type and shape the plan does not hold; plan anew"
        )
    if spec.dtype not in FLOATING:
        return f"{spec.name} is {spec.dtype}"
    source, target = plan.stages[edge.src], plan.stages[edge.dst]
    for stage in (source, target):
        if stage.model_parallel > 1:
            return f"stage {stage.name} is {'tensor' if stage.context == 1 else 'context'}-parallel"
    if source.degree != target.degree:
        return f"{source.degree} to {target.degree} ranks"
    if source.degree > 1 and source.micro_batch_size != target.micro_batch_size:
        return (
            f"micro-batches of {source.micro_batch_size} and {target.micro_batch_size} samples over "
            f"{source.degree} ranks"
        )
    return ""


def note_edge_transports(plan: PipelinePlan, p2p: str) -> PipelinePlan:
    """Return the plan with a note on what carries its edges, where that is not our own transport for all.

    Raises:
        PlanError: ranks hold several stages, and megatron-core's communicator, which has one a rank, is requested.
    """
    if p2p == MEGATRON and plan.shares_ranks:
        raise PlanError(
            f"{place_of('p2p')}: P2PCommunicator runs one stage a rank, and the plan puts several on one; write "
            f"{setting_of('p2p', NATIVE)}, or {setting_of('virtual_stages', 1)} and {setting_of('colocate', 'off')}"
        )
    notes = tuple(note for note in plan.notes if not note.startswith(_NOTE))  # of a plan that was saved
    if p2p == MEGATRON and plan.edges:
        notes = (*notes, _NOTE + describe_edge_transports(plan, choose_edge_transports(plan, p2p)))
    return plan if notes == plan.notes else dataclasses.replace(plan, notes=notes)


def describe_edge_transports(plan: PipelinePlan, chosen: Sequence[EdgeTransport]) -> str:
    """Return one line: how many edges go over P2PCommunicator, and which do not and why."""
    native = [choice for choice in chosen if choice.transport == NATIVE]
    line = f"{len(chosen) - len(native)} of {len(chosen)} edges over P2PCommunicator"
    if not native:
        return line
    parts = [f"{plan.edge_name(choice.edge)} ({choice.reason})" for choice in native]
    return f"{line}; native: {', '.join(parts)}"
