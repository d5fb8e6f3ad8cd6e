"""Lowers asynchronous 1F1B: programs of each window that differs from others, and of what drains the pipeline.

A window is a part of a longer schedule (`async_1f1b`), so its task graph is a part of that schedule's: the tasks of
the window, and of the messages those that its tasks send. Two things are added, as nodes of their own:

- after each backward an *update*: the stage's ranks reduce gradients and step together, so it waits for that
  backward on all of them;
- at the end of each rank a node that takes what is for later windows: such a receive stands last in its program.

Then messages are placed as in any other program (`placement`): send and receive of a message are in one window, and
every window finishes by itself even if all ranks run it serially with rendezvous messages.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.program import Direction, Instruction, InstructionKind, Message, RankProgram
from gpp_plugin.ir.samples import SampleRange
from gpp_plugin.ir.schedule import StageSchedule, Task, TaskKind
from gpp_plugin.schedule.async_1f1b import Windows, windows_of
from gpp_plugin.schedule.lower import rank_bodies
from gpp_plugin.schedule.placement import place_messages, safe_placement
from gpp_plugin.schedule.rendezvous import execute_serially
from gpp_plugin.schedule.task_graph import TaskGraph, build_task_graph
from gpp_plugin.simulate.durations import nominal_times, stage_task_us
from gpp_plugin.simulate.event_loop import run_task_graph

Programs = tuple[RankProgram, ...]

UPDATE = (Instruction(kind=InstructionKind.REDUCE_DATA), Instruction(kind=InstructionKind.STEP))
"""What follows each backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPrograms:
    """The programs of all ranks for every window, and for what is left after it.

    Micro-batches count from the last time the pipeline was empty. The last entries serve all later windows:
    ``program_of`` a window says which, and numbers of a later one are greater by a whole number of windows.

    Args:
        steps: by window, from the first; ``drains`` the backwards left after each.
    """

    windows: Windows
    steps: tuple[Programs, ...]
    drains: tuple[Programs, ...]

    @property
    def all(self) -> tuple[RankProgram, ...]:
        """Return every program of every rank."""
        return tuple(program for part in (*self.steps, *self.drains) for program in part)

    def of_rank(self, rank: int) -> RankWindows:
        """Return one rank's programs."""
        steps, drains = (
            tuple(next(p for p in programs if p.rank == rank) for programs in kind)
            for kind in (self.steps, self.drains)
        )
        carried: list[tuple[Message, ...]] = [()]
        for program in steps:
            messages = [*carried[-1], *(m for i in program.instructions for m in i.receives)]
            tasks = {instruction.task for instruction in program.instructions}
            carried.append(tuple(m for m in messages if _reader(m, program.stage) not in tasks))
        return RankWindows(windows=self.windows, steps=steps, drains=drains, carried=tuple(carried))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWindows:
    """The programs of one rank: of `WindowPrograms`.

    Args:
        carried: by window, from the first, the messages received before it for it or later ones; one entry more
            than there are windows, so that the drain after window w finds its own at w.
    """

    windows: Windows
    steps: tuple[RankProgram, ...]
    drains: tuple[RankProgram, ...]
    carried: tuple[tuple[Message, ...], ...]


def _reader(message: Message, stage: int) -> Task:
    is_forward = message.direction is Direction.ACTIVATION
    kind = TaskKind.FORWARD if is_forward else TaskKind.BACKWARD
    return Task(stage=stage, kind=kind, micro_batch=message.dst_micro_batch)


def lower_windows(
    plan: PipelinePlan, *, forward_only_stages: Collection[int] = frozenset()
) -> WindowPrograms:
    """Return the programs of an asynchronous plan.

    Args:
        forward_only_stages: stages that run no backwards and make no steps.

    Raises:
        PlanError: the plan cannot run asynchronously.
    """
    windows = windows_of(plan)
    trained = set(range(len(plan.stages))) - set(forward_only_stages)
    steps, drains = [], []
    for window in range(1, windows.first_steady + 1):
        graph = build_task_graph(
            lengthened(plan, window), window_schedules(windows, window, forward_only_stages)
        )
        here = {t for s in range(len(plan.stages)) for t in windows.tasks(s, window, is_trained=s in trained)}
        left = {t for s in trained for t in windows.drain(s, window)}
        steps.append(_lower_part(graph, here))
        drains.append(_lower_part(graph, left))
    return WindowPrograms(windows=windows, steps=tuple(steps), drains=tuple(drains))


def lengthened(plan: PipelinePlan, num_windows: int) -> PipelinePlan:
    """Return ``plan`` with the samples of so many windows as one mini-batch."""
    return dataclasses.replace(plan, mini_batch=plan.mini_batch * num_windows)


def window_schedules(
    windows: Windows, num_windows: int, forward_only_stages: Collection[int] = frozenset()
) -> tuple[StageSchedule, ...]:
    """Return the order of every stage in so many windows and the drain after them."""
    schedules = []
    for stage, held in enumerate(windows.in_flight):
        is_trained = stage not in forward_only_stages
        tasks = [
            task
            for window in range(1, num_windows + 1)
            for task in windows.tasks(stage, window, is_trained=is_trained)
        ]
        tasks += windows.drain(stage, num_windows, is_trained=is_trained)
        most = min(held, num_windows * windows.micro_batches)
        schedules.append(StageSchedule(stage=stage, tasks=tuple(tasks), num_in_flight=most))
    return tuple(schedules)


def shift_message(message: Message, micro_batches: int, samples: int) -> Message:
    """Return a message as a later or earlier window numbers it."""
    return dataclasses.replace(
        message,
        src_micro_batch=message.src_micro_batch + micro_batches,
        dst_micro_batch=message.dst_micro_batch + micro_batches,
        samples=SampleRange(
            first_sample=message.samples.first_sample + samples, num_samples=message.samples.num_samples
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PartGraph:
    """A part of a task graph, with updates and ends.

    Args:
        graph: updates come first (their number is ``num_updates``), then tasks, then one end a rank.
        num_tasks: how many tasks there are.
        origin: of each task, the node in the whole graph.
    """

    graph: TaskGraph
    num_updates: int
    num_tasks: int
    origin: list[int]

    def instructions(self, node: int) -> tuple[Instruction, ...]:
        """Return what a node does in a program."""
        if node < self.num_updates:
            return UPDATE
        if node < self.num_updates + self.num_tasks:
            return (_compute(self.graph.task(node)),)
        return ()


@functools.lru_cache(maxsize=4096)
def _compute(task: Task) -> Instruction:
    return Instruction(kind=InstructionKind.COMPUTE, task=task)


def _lower_part(full: TaskGraph, tasks: Collection[Task]) -> Programs:
    inside = [full.task(node) in tasks for node in range(len(full.stage))]
    part = cut_graph(full, inside.__getitem__)
    times = run_task_graph(part.graph, part_durations(part))
    for place in (place_messages, safe_placement):
        bodies = rank_bodies(part.graph, place(part.graph, times), part.instructions)
        programs = tuple(
            RankProgram(rank=rank, stage=full.plan.stage_of_rank(rank), instructions=tuple(bodies[rank]))
            for rank in sorted(bodies)
        )
        # late receives are proven safe without reductions; with them the order they come from still is
        if not execute_serially(full.plan, {program.rank: program for program in programs}).stuck:
            break
    return programs


def part_durations(part: PartGraph, *, update_us: Callable[[int], float] = lambda stage: 0.0) -> list[float]:
    """Return the microseconds of each node; a plan without times has them by the number of samples.

    Args:
        update_us: of one update of a stage.
    """
    graph = part.graph
    stages = nominal_times(graph.plan).stages
    updates = [update_us(graph.stage[node]) for node in range(part.num_updates)]
    tasks = range(part.num_updates, part.num_updates + part.num_tasks)
    times = [stage_task_us(stages[graph.stage[node]], graph.kind[node]) for node in tasks]
    return [*updates, *times, *[0.0] * (len(graph.stage) - part.num_updates - part.num_tasks)]


def cut_graph(full: TaskGraph, is_inside: Callable[[int], bool]) -> PartGraph:
    """Return the part of ``full`` with these nodes, and updates and ends.

    Nodes wait for nothing outside: it happened before, or it is waited for at the end.
    """
    rows = {lead: [node for node in order if is_inside(node)] for lead, order in full.orders.items()}
    trained = [node for row in rows.values() for node in row if full.kind[node] is TaskKind.BACKWARD]
    tasks = [node for row in rows.values() for node in row]
    update = {node: number for number, node in enumerate(trained)}
    number = {node: len(update) + at for at, node in enumerate(tasks)}
    end = {lead: len(update) + len(tasks) + at for at, lead in enumerate(rows)}
    graph = _empty_part(full, trained, tasks, rows)
    for lead, row in rows.items():
        order = [n for node in row for n in (number[node], update.get(node, -1)) if n >= 0]
        graph.orders[lead] = [*order, end[lead]]
        for node, follower in zip(graph.orders[lead], graph.orders[lead][1:], strict=False):
            graph.next_on_rank[node] = follower
            graph.num_waits[follower] += 1
    num_activations = _add_messages(graph, full, number, end)
    _add_unlocks(graph, full, number, update)
    return PartGraph(
        graph=dataclasses.replace(graph, num_activations=num_activations),
        num_updates=len(update),
        num_tasks=len(tasks),
        origin=tasks,
    )


def _empty_part(
    full: TaskGraph, trained: Sequence[int], tasks: Sequence[int], rows: dict[int, list[int]]
) -> TaskGraph:
    """Return a graph of these nodes without orders, messages and waits."""
    nodes = [*trained, *tasks]
    leads = list(rows)
    stage_of = {lead: full.stage[order[0]] for lead, order in full.orders.items() if order}
    count = len(nodes) + len(leads)
    return TaskGraph(
        plan=full.plan,
        orders={},
        members=full.members,
        groups=(),
        stage=[full.stage[node] for node in nodes] + [stage_of[lead] for lead in leads],
        rank=[full.rank[node] for node in nodes] + leads,
        micro_batch=[full.micro_batch[node] for node in nodes] + [-1] * len(leads),
        kind=[full.kind[node] for node in nodes] + [TaskKind.FORWARD] * len(leads),
        half=[None] * count,
        num_waits=[0] * count,
        next_on_rank=[-1] * count,
        first_message=[-1] * count,
    )


def _add_messages(graph: TaskGraph, full: TaskGraph, number: dict[int, int], end: dict[int, int]) -> int:
    """Add what the part's tasks send; return how many of these messages hold activations."""
    num_activations = 0
    for message, (source, target) in enumerate(zip(full.source, full.target, strict=True)):
        if source not in number:
            continue
        sender = number[source]
        receiver = number[target] if target in number else end[full.rank[target]]
        graph.next_message.append(graph.first_message[sender])
        graph.first_message[sender] = len(graph.source)
        graph.source.append(sender)
        graph.target.append(receiver)
        graph.num_waits[receiver] += 1
        graph.num_bytes.append(full.num_bytes[message])
        graph.edge.append(full.edge[message])
        graph.sender.append(full.sender[message])
        graph.receiver.append(full.receiver[message])
        graph.overlaps.append(full.overlaps[message])
        graph.pairs.append(full.pairs[message])
        num_activations += message < full.num_activations
    return num_activations


def _add_unlocks(graph: TaskGraph, full: TaskGraph, number: dict[int, int], update: dict[int, int]) -> None:
    """Let updates wait for their stage's backwards on all ranks, and forward-only stages for their consumers."""
    together: dict[tuple[int, int], list[int]] = {}
    for node in update:
        together.setdefault((full.stage[node], full.micro_batch[node]), []).append(node)
    pairs = [
        (number[node], update[other])
        for nodes in together.values()
        for node in nodes
        for other in nodes
        if node != other
    ]
    pairs += [
        (number[node], number[locked])
        for node, freed in full.unlocks.items()
        for locked in freed
        if node in number and locked in number
    ]
    for node, locked in pairs:
        graph.unlocks.setdefault(node, []).append(locked)
        graph.num_waits[locked] += 1
