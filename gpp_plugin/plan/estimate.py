"""A quick prediction of one step's time, for ranking many candidate plans.

It plays every task of every stage in its order, with fixed delays on the edges and no contention for
links: what `simulate` computes, less link sharing. The ranks of a stage run in lockstep.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.schedule import TaskKind
from gpp_plugin.plan.costs import CostModel
from gpp_plugin.schedule.kfkb import kfkb_schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTiming:
    """What the prediction needs of a stage; times of one micro-batch, reduction once a step."""

    micro_batch_size: int
    in_flight: int
    k: int
    forward_us: float
    backward_us: float
    reduce_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeTiming:
    """Delays of an edge: from a forward's end to its consumer, and of the gradient's way back, if any."""

    src: int
    dst: int
    forward_us: float
    backward_us: float
    has_gradient: bool = True


@functools.lru_cache(maxsize=4096)
def task_order(num_micro_batches: int, in_flight: int, k: int) -> tuple[int, ...]:
    """Return the kFkB order as numbers: m is the forward of micro-batch m, ~m its backward.

    >>> task_order(4, 2, 1)
    (0, 1, -1, 2, -2, 3, -3, -4)
    """
    schedule = kfkb_schedule(0, num_micro_batches, k=k, num_in_flight=in_flight)
    return tuple(t.micro_batch if t.kind is TaskKind.FORWARD else ~t.micro_batch for t in schedule.tasks)


def estimate_us(mini_batch: int, stages: Sequence[StageTiming], edges: Sequence[EdgeTiming]) -> float:
    """Return microseconds from the first forward to the last reduction; inf where it would stop."""
    incoming: list[list[tuple[int, float]]] = [[] for _ in stages]
    outgoing: list[list[tuple[int, float]]] = [[] for _ in stages]
    neighbours: list[list[int]] = [[] for _ in stages]
    for edge in edges:
        incoming[edge.dst].append((edge.src, edge.forward_us))
        neighbours[edge.src].append(edge.dst)
        neighbours[edge.dst].append(edge.src)
        if edge.has_gradient:
            outgoing[edge.src].append((edge.dst, edge.backward_us))
    sizes = [s.micro_batch_size for s in stages]
    orders = [task_order(mini_batch // s.micro_batch_size, s.in_flight, s.k) for s in stages]
    heads = [0] * len(stages)
    clocks = [0.0] * len(stages)
    forward_ends: list[list[float]] = [[] for _ in stages]
    backward_ends: list[list[float]] = [[] for _ in stages]
    waiting = list(range(len(stages)))
    while waiting:
        s = waiting.pop()
        order, size, head, clock = orders[s], sizes[s], heads[s], clocks[s]
        begun = head
        while head < len(order):
            task = order[head]
            if task >= 0:
                end, start, is_ready = (task + 1) * size, clock, True
                for other, delay in incoming[s]:
                    need = -(-end // sizes[other]) - 1
                    ends = forward_ends[other]
                    if len(ends) <= need:
                        is_ready = False
                        break
                    if ends[need] + delay > start:
                        start = ends[need] + delay
                if not is_ready:
                    break
                clock = start + stages[s].forward_us
                forward_ends[s].append(clock)
            else:
                end, start, is_ready = -task * size, clock, True
                for other, delay in outgoing[s]:
                    need = -(-end // sizes[other]) - 1
                    ends = backward_ends[other]
                    if len(ends) <= need:
                        is_ready = False
                        break
                    if ends[need] + delay > start:
                        start = ends[need] + delay
                if not is_ready:
                    break
                clock = start + stages[s].backward_us
                backward_ends[s].append(clock)
            head += 1
        heads[s], clocks[s] = head, clock
        if head > begun:
            waiting.extend(other for other in neighbours[s] if heads[other] < len(orders[other]))
    if any(head < len(order) for head, order in zip(heads, orders, strict=True)):
        return float("inf")
    return max(clock + stage.reduce_us for clock, stage in zip(clocks, stages, strict=True))


def estimate_plan_us(plan: PipelinePlan, costs: CostModel) -> float:
    """Return the predicted microseconds of one step of a whole plan."""
    stages = [
        StageTiming(
            micro_batch_size=stage.micro_batch_size,
            in_flight=stage.in_flight,
            k=stage.k,
            forward_us=stage.forward_us,
            backward_us=stage.backward_us,
            reduce_us=costs.stage_all_reduce_us(
                costs.indices(stage.blocks), stage.ranks, plan.num_micro_batches(i)
            ),
        )
        for i, stage in enumerate(plan.stages)
    ]
    edges = [
        EdgeTiming(
            src=edge.src,
            dst=edge.dst,
            forward_us=costs.edge_us(
                edge.bytes_per_sample, edge.bytes_fixed, plan.stages[edge.src], plan.stages[edge.dst]
            ),
            backward_us=costs.edge_us(
                edge.gradient_bytes_per_sample,
                edge.gradient_bytes_fixed,
                plan.stages[edge.dst],
                plan.stages[edge.src],
            ),
            has_gradient=bool(edge.gradient_tensors),
        )
        for edge in plan.edges
    ]
    return estimate_us(plan.mini_batch, stages, edges)
