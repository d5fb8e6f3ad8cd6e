"""Plans of published pipelines, and how long their ranks are at it under a given order of each rank.

Source: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2
Tests: tests/bench/test_published.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpp_plugin.ir.cluster import Cluster, Device, Link
from gpp_plugin.ir.plan import PipelinePlan, Stage, StageEdge
from gpp_plugin.ir.schedule import StageSchedule, Task, TaskKind
from gpp_plugin.schedule.build_graph import build_task_graph
from gpp_plugin.schedule.checks.order_check import LAST_KINDS
from gpp_plugin.schedule.event_loop import message_transfers, run_task_graph, task_durations

# The interleaved order of Megatron-LM: each rank holds several chunks of the model and takes micro-batches in groups.
#
# Two ranks, two chunks a rank (stages 0 and 2 on rank 0, 1 and 3 on rank 1), four micro-batches, groups of two; a
# group goes through all chunks before the next one begins:
#
#     rank 0   0F0 0F1 2F0 2F1  0F2 2B0  0F3 2B1  2F2 0B0  2F3 0B1  2B2 2B3 0B2 0B3
#
# A rank warms up with two forwards for each rank behind it and a group for each chunk but the last; then a forward and
# a backward in turn. Our own scheduler finds orders of this length by itself (`schedule.orders.interleaved`); this is
# the published one, task by task.


def interleaved_orders(num_ranks: int, micro_batches: int, chunks: int) -> list[list[Task]]:
    """Return the order of every rank; chunk c of rank r is stage ``c * num_ranks + r``.

    The number of micro-batches must be a multiple of that of ranks.

    >>> " ".join(map(str, interleaved_orders(2, 4, 2)[0][:6]))
    '0F0 0F1 2F0 2F1 0F2 2B0'
    """
    # (micro-batch, chunk) of every forward of a rank, in order; backwards go through the chunks the other way
    turns = [
        (first + offset, chunk)
        for first in range(0, micro_batches, num_ranks)
        for chunk in range(chunks)
        for offset in range(num_ranks)
    ]
    orders = []
    for rank in range(num_ranks):
        forwards = [
            Task(stage=chunk * num_ranks + rank, kind=TaskKind.FORWARD, micro_batch=m) for m, chunk in turns
        ]
        backwards = [
            Task(stage=(chunks - 1 - chunk) * num_ranks + rank, kind=TaskKind.BACKWARD, micro_batch=m)
            for m, chunk in turns
        ]
        warm_up = min(len(turns), 2 * (num_ranks - 1 - rank) + (chunks - 1) * num_ranks)
        order = forwards[:warm_up]
        for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
            order += (forward, backward)
        orders.append(order + backwards[len(turns) - warm_up :])
    return orders


RankOrder = Sequence[Task]
"""The tasks of all stages of one rank, in the order in which it runs them."""


def chain(
    stages: Sequence[Stage], *, micro_batches: int, links: Sequence[tuple[int, int]] = ()
) -> PipelinePlan:
    """Return stages of one sample a micro-batch, one behind the other, or joined by ``links``."""
    pairs = links or [(index, index + 1) for index in range(len(stages) - 1)]
    edges = tuple(
        StageEdge(src=src, dst=dst, batch_tensors=(f"t{src}",), gradient_tensors=(f"t{src}",))
        for src, dst in pairs
    )
    return PipelinePlan(
        model="published",
        graph="none",
        planner="published",
        mini_batch=micro_batches,
        loss_unit=1,
        stages=tuple(stages),
        edges=edges,
    )


def stage_of(
    index: int, rank: int, times: tuple[float, float, float], *, in_flight: int, schedule: str = "1f1b"
) -> Stage:
    """Return one stage on one rank.

    Args:
        times: microseconds of a forward, of an input gradient and of a weight gradient.
    """
    forward_us, input_us, weight_us = times
    return Stage(
        name=f"s{index}",
        blocks=(f"b{index}",),
        ranks=(rank,),
        micro_batch_size=1,
        in_flight=in_flight,
        schedule=schedule,
        forward_us=forward_us,
        backward_us=input_us + weight_us,
        input_gradient_us=input_us,
        weight_gradient_us=weight_us,
    )


def cluster_of(num_ranks: int, message_us: float) -> Cluster:
    """Return ranks between which every message takes the same time, whatever its size."""
    device = Device(name="any", memory_bytes=1, flops_per_s=1.0, memory_bytes_per_s=1.0)
    link = Link(name="any", span=num_ranks, bytes_per_s=1e30, latency_us=message_us)
    return Cluster(name="published", devices=(device,) * num_ranks, links=(link,))


def schedules_of(orders: Sequence[RankOrder]) -> tuple[StageSchedule, ...]:
    """Return each stage's part of the orders of all ranks, stages in the order of their indices."""
    tasks: dict[int, list[Task]] = {}
    for order in orders:
        for task in order:
            tasks.setdefault(task.stage, []).append(task)
    return tuple(
        StageSchedule(stage=stage, tasks=tuple(tasks[stage]), num_in_flight=most_held(tasks[stage]))
        for stage in sorted(tasks)
    )


def most_held(tasks: RankOrder) -> int:
    """Return the most micro-batches a rank holds, of all its stages together, from F to B or W."""
    held = most = 0
    for task in tasks:
        held += (task.kind is TaskKind.FORWARD) - (task.kind in LAST_KINDS)
        most = max(most, held)
    return most


def longest_span_us(
    plan: PipelinePlan,
    schedules: Sequence[StageSchedule],
    *,
    cluster: Cluster | None = None,
    orders: Mapping[int, RankOrder] | None = None,
) -> float:
    """Return the longest time between a rank's first task and its last one.

    Args:
        orders: of each rank; those that list scheduling finds from the schedules by default.
    """
    graph = build_task_graph(plan, schedules)
    if orders is not None:
        number = {str(graph.task(node)): node for node in range(len(graph.stage))}
        graph.replace_chains({rank: [number[str(t)] for t in order] for rank, order in orders.items()})
    transfers = message_transfers(graph, cluster)
    times = run_task_graph(graph, task_durations(graph, None), transfers=transfers)
    return max(times.end[order[-1]] - times.start[order[0]] for order in graph.orders.values())
