"""The edges of a plan and what carries their messages, as text and as rows."""

from __future__ import annotations

from typing import Any

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.plan.edge_transports import choose_edge_transports, edge_name
from gpp_plugin.report.units import format_table


def edge_rows(plan: PipelinePlan, p2p: str) -> list[dict[str, Any]]:
    """Return one JSON object per edge: its stages, how many tensors, what carries them, and why not megatron.

    Args:
        p2p: as ``graph_pipeline.p2p``.
    """
    return [
        {
            "edge": choice.edge,
            "src": plan.stages[plan.edges[choice.edge].src].name,
            "dst": plan.stages[plan.edges[choice.edge].dst].name,
            "tensors": len(plan.edges[choice.edge].batch_tensors)
            + len(plan.edges[choice.edge].whole_tensors),
            "transport": choice.transport,
            "reason": choice.reason,
        }
        for choice in choose_edge_transports(plan, p2p)
    ]


def format_edges(plan: PipelinePlan, p2p: str) -> str:
    """Return the table of edges: how many tensors a message holds, what carries it, and why not megatron."""
    rows = [
        [edge_name(plan, row["edge"]), str(row["tensors"]), row["transport"], row["reason"] or "-"]
        for row in edge_rows(plan, p2p)
    ]
    return format_table(["edge", "tensors", "over", "because"], rows, left=4)
