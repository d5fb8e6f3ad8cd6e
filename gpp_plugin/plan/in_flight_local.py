"""Micro-batches in flight from the sink (GraphPipe, Table 2)."""

from __future__ import annotations

from gpp_plugin.ir.plan import PipelinePlan


def compute_in_flight(k_x: int, b_x: int, k_y: int, b_y: int, i_y: int) -> int:
    """Return the samples in flight of a stage before one that holds ``i_y`` samples (Table 2)."""
    x, y, m = k_x * b_x, k_y * b_y, max(b_x, b_y)
    if x < y:
        if x < b_y:
            return i_y + b_y
        return i_y + (2 * m if m < x else m)
    if x == y:
        return i_y + (y if m == y else 2 * m)
    if y < b_x:
        return i_y + x - y + b_x
    if m == y:
        return i_y + x
    return i_y + x - y + 2 * m


def plan_in_flight(plan: PipelinePlan) -> tuple[int, ...]:
    """Return the micro-batches in flight of every stage."""
    samples = [0] * len(plan.stages)
    counts = [0] * len(plan.stages)
    successors: dict[int, list[int]] = {}
    for edge in plan.edges:
        successors.setdefault(edge.src, []).append(edge.dst)
    for i in range(len(plan.stages) - 1, -1, -1):
        stage = plan.stages[i]
        need = stage.k * stage.micro_batch_size
        for j in successors.get(i, []):
            other = plan.stages[j]
            need = max(
                need,
                compute_in_flight(
                    stage.k, stage.micro_batch_size, other.k, other.micro_batch_size, samples[j]
                ),
            )
        if stage.schedule == "gpipe":
            need = plan.mini_batch
        counts[i] = min(-(-need // stage.micro_batch_size), plan.num_micro_batches(i))
        samples[i] = counts[i] * stage.micro_batch_size
    return tuple(counts)
