"""A step with an encoder on the ranks of an interleaved language model, its tasks where list scheduling finds room.

The language model runs in Megatron's order, rank by rank; the encoder's stages are each a chain of their own in the
order of 1F1B. The encoder of two ranks below is one stage with two replicas (E0 of sample 0 on rank 0, of sample 1 on
rank 1); while the collective before the step runs, only it may:

    rank 0   gather  E0 .   F0 F1 ...   B0 B1 E0'  scatter
    rank 1   gather  E0 .   .  F0 F1 ... B0 B1 E0' scatter

The collective behind the step begins on a rank with its last language task, and the encoder runs beside it.
"""

from __future__ import annotations

import dataclasses

from gpp_benchmarks.published._interleaved import interleaved_orders
from gpp_benchmarks.published._plans import chain, schedules_of
from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.ir.schedule import StageSchedule, Task, TaskKind
from gpp_plugin.schedule.build_graph import build_task_graph
from gpp_plugin.schedule.durations import task_durations
from gpp_plugin.schedule.event_loop import run_task_graph
from gpp_plugin.schedule.orders.kfkb import one_f_one_b_schedule
from gpp_plugin.schedule.shared_ranks import merge_chains
from gpp_plugin.schedule.task_graph import TaskGraph


def colocated_step(
    encoder: tuple[Stage, ...],
    language: tuple[Stage, ...],
    *,
    ranks: int,
    micro_batches: int,
    gather: float,
    scatter: float,
) -> float:
    """Return when the last of all tasks and collectives ends.

    Args:
        encoder: its stages, one behind the other, each with its replicas' ranks, ``in_flight`` micro-batches held; may
            be none.
        language: chunk c of rank r is stage ``c * ranks + r``.
        gather, scatter: the collectives before and behind the language model's tasks.
    """
    first = len(encoder)
    orders = [
        [dataclasses.replace(task, stage=first + task.stage) for task in order]
        for order in interleaved_orders(ranks, micro_batches, len(language) // ranks)
    ]
    gathering = first + len(language)
    forward = Task(stage=gathering, kind=TaskKind.FORWARD, micro_batch=0)
    schedules = (
        *(
            one_f_one_b_schedule(i, micro_batches // stage.micro_batch_size, num_in_flight=stage.in_flight)
            for i, stage in enumerate(encoder)
        ),
        *schedules_of(orders),
        StageSchedule(stage=gathering, tasks=(forward,), num_in_flight=1),
    )
    graph = build_task_graph(_with_gather(encoder, language, ranks, micro_batches, gather), schedules)
    _merge(graph, schedules, orders, first)
    times = run_task_graph(graph, task_durations(graph, None))
    return max(
        end + (scatter if first <= graph.stage[node] < gathering else 0.0)
        for node, end in enumerate(times.end)
    )


def _with_gather(
    encoder: tuple[Stage, ...], language: tuple[Stage, ...], ranks: int, micro_batches: int, gather: float
) -> PipelinePlan:
    """Return both as a chain, and the first collective: a stage of one forward on a rank more, before the language."""
    waiting = dataclasses.replace(
        language[0],
        name="gather",
        ranks=(ranks,),
        micro_batch_size=micro_batches,
        in_flight=1,
        forward_us=gather,
    )
    stages = (*encoder, *language, waiting)
    links = [(index, index + 1) for index in range(len(stages) - 2)]
    plan = chain(stages, micro_batches=micro_batches, links=[*links, (len(stages) - 1, len(encoder))])
    edges = (*plan.edges[:-1], dataclasses.replace(plan.edges[-1], gradient_tensors=()))
    return dataclasses.replace(plan, edges=edges)


def _merge(
    graph: TaskGraph, schedules: tuple[StageSchedule, ...], orders: list[list[Task]], first: int
) -> None:
    """Give each rank one order of its language tasks, as they are, and the tasks of its encoder stages."""
    number = {(str(graph.task(node)), graph.rank[node]): node for node in range(len(graph.stage))}
    plan = graph.plan
    chains = [(rank, [number[str(task), rank] for task in order]) for rank, order in enumerate(orders)]
    alone = [*schedules[:first], schedules[-1]]
    for schedule in alone:
        for rank in plan.stages[schedule.stage].ranks:
            chains.append((rank, [number[str(task), rank] for task in schedule.tasks]))
    graph.replace_chains({})
    for _, nodes in chains:
        graph.add_chain(nodes)
    graph.replace_chains(merge_chains(graph, chains))
