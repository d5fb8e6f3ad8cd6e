"""The windows of asynchronous 1F1B as task graphs: each that differs from others, and what drains the pipeline.

A window is a part of a longer schedule (`async_1f1b`), so its task graph is a part of that schedule's: the tasks of
the window, and of the messages those that its tasks send. Two things are added, as nodes of their own:

- after each backward an *update*: the stage's ranks reduce gradients and step together, so it waits for that
  backward on all of them;
- at the end of each stage on a rank a node that takes what is for later windows: such a receive stands behind the
  stage's last task.

A rank of several stages has an order of its own for each window (`shared_ranks`), in which updates have their places
too: two stages that share two ranks are updated in one order on both.

Such a graph is lowered as any other (`lower`): send and receive of a message are in one window, and every window
finishes by itself even if all ranks run it serially with rendezvous messages.

Source: PipeDream (SOSP 2019, doi 10.1145/3341301.3359646), section 3.2
Tests: tests/schedule/test_async.py
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.program import Direction, InstructionKind, Message, RankProgram
from gpp_plugin.ir.samples import SampleRange
from gpp_plugin.ir.schedule import StageSchedule, Task, TaskKind
from gpp_plugin.schedule.build_graph import build_task_graph
from gpp_plugin.schedule.durations import nominal_times, stage_task_us
from gpp_plugin.schedule.lower import lower_graph
from gpp_plugin.schedule.orders.async_1f1b import Windows, windows_of
from gpp_plugin.schedule.shared_ranks import merge_chains
from gpp_plugin.schedule.task_graph import TaskGraph

Programs = tuple[RankProgram, ...]


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
        return RankWindows(windows=self.windows, steps=steps, drains=drains)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWindows:
    """The programs of one rank, or of one of its stages: of `WindowPrograms`."""

    windows: Windows
    steps: tuple[RankProgram, ...]
    drains: tuple[RankProgram, ...]

    @property
    def stages(self) -> tuple[int, ...]:
        """Return the stages that the programs are of."""
        return self.steps[0].stages

    def of_stage(self, stage: int) -> RankWindows:
        """Return what the rank does for one of its stages."""
        steps, drains = (tuple(p.of_stage(stage) for p in programs) for programs in (self.steps, self.drains))
        return RankWindows(windows=self.windows, steps=steps, drains=drains)

    @property
    def carried(self) -> tuple[tuple[Message, ...], ...]:
        """Return, by window, from the first, the messages received before it for it or later ones.

        One entry more than there are windows, so that the drain after window w finds its own at w.
        """
        carried: list[list[tuple[Message, Task]]] = [[]]
        for program in self.steps:
            tasks = {instruction.task for instruction in program.instructions}
            came = [
                (i.message, _reader(i.message, program.stage_of(i)))
                for i in program.instructions
                if i.message is not None and i.kind is InstructionKind.RECEIVE
            ]
            carried.append([(m, reader) for m, reader in (*carried[-1], *came) if reader not in tasks])
        return tuple(tuple(message for message, _ in of_window) for of_window in carried)


def _reader(message: Message, stage: int | None) -> Task:
    assert stage is not None, "a message is of one stage"
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
    # Window w is cut out of the schedule of w windows and the drain behind them. With k of 3, 2, 1 and two
    # micro-batches a window, windows 1 and 2 differ and 3 is 2 shifted, so two are lowered, and the drain behind
    # each:
    #
    #     stage 0   F0 F1      | F2 B0 F3 B1   | drain B2 B3
    #     stage 1   F0 F1 B0   | F2 B1 F3 B2   | drain B3
    #     stage 2   F0 B0 F1 B1| F2 B2 F3 B3   | drain -
    windows = windows_of(plan)
    steps: list[Programs] = []
    drains: list[Programs] = []
    for window in range(1, windows.first_steady + 1):
        for programs, part in zip(
            (steps, drains), _window_parts(plan, windows, window, forward_only_stages), strict=True
        ):
            programs.append(lower_graph(part, part_durations(part)))
    return WindowPrograms(windows=windows, steps=tuple(steps), drains=tuple(drains))


def _window_parts(
    plan: PipelinePlan, windows: Windows, window: int, forward_only_stages: Collection[int]
) -> tuple[TaskGraph, TaskGraph]:
    """Return the graphs of a window, and of the drain behind it."""
    full = build_task_graph(
        lengthened(plan, window), window_schedules(windows, window, forward_only_stages), is_merged=False
    )
    stages = range(len(plan.stages))
    trained = set(stages) - set(forward_only_stages)
    here = {t for s in stages for t in windows.tasks(s, window, is_trained=s in trained)}
    left = {t for s in trained for t in windows.drain(s, window)}

    def part(tasks: Collection[Task]) -> TaskGraph:
        inside = [full.task(node) in tasks for node in range(len(full.stage))]
        return cut_graph(full, inside.__getitem__)

    return part(here), part(left)


def joined_windows(
    plan: PipelinePlan, num_windows: int, *, forward_only_stages: Collection[int] = frozenset()
) -> TaskGraph:
    """Return the graph of so many windows and the drain behind them, each rank in the order of its programs."""
    windows = windows_of(plan)
    full = build_task_graph(
        lengthened(plan, num_windows),
        window_schedules(windows, num_windows, forward_only_stages),
        is_merged=False,
    )
    # Everything is inside: the cut is only taken for the update nodes that it puts behind each backward.
    joined = cut_graph(full, lambda node: True, is_merged=False)
    if not plan.shares_ranks:
        return joined
    number = {_name(joined, node): node for node in range(joined.tasks.stop)}
    orders: dict[int, list[int]] = {}
    parts = [_window_parts(plan, windows, w, forward_only_stages) for w in range(1, windows.first_steady + 1)]
    last = windows.program_of(num_windows)
    for window in range(1, num_windows + 2):
        is_drain = window > num_windows
        program = last if is_drain else windows.program_of(window)
        later = ((num_windows if is_drain else window) - program) * windows.micro_batches
        part = parts[program - 1][is_drain]
        for rank, order in part.orders.items():
            names = (_name(part, node, later) for node in order if node < part.tasks.stop)
            orders.setdefault(rank, []).extend(number[name] for name in names)
    set_orders(joined, orders)
    return joined


def _name(graph: TaskGraph, node: int, later: int = 0) -> tuple[int, int, TaskKind, int, bool]:
    """Return what tells a task or an update from all others: micro-batches ``later`` than the graph has it."""
    micro_batch = graph.micro_batch[node] + later
    return graph.rank[node], graph.stage[node], graph.kind[node], micro_batch, node < graph.num_updates


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


def shift_message(
    message: Message, micro_batches: int, samples: int, *, at_dst: int | None = None
) -> Message:
    """Return a message as a later or earlier window numbers it.

    Args:
        micro_batches: of the sender; ``at_dst`` those of the receiver, where they are others.
    """
    return dataclasses.replace(
        message,
        src_micro_batch=message.src_micro_batch + micro_batches,
        dst_micro_batch=message.dst_micro_batch + (micro_batches if at_dst is None else at_dst),
        samples=SampleRange(
            first_sample=message.samples.first_sample + samples, num_samples=message.samples.num_samples
        ),
    )


def part_durations(graph: TaskGraph, *, update_us: Callable[[int], float] = lambda stage: 0.0) -> list[float]:
    """Return the microseconds of each node of a part; a plan without times has them by the number of samples.

    Args:
        update_us: of one update of a stage.
    """
    stages = nominal_times(graph.plan).stages
    updates = [update_us(graph.stage[node]) for node in range(graph.num_updates)]
    times = [
        stage_task_us(stages[graph.stage[node]], graph.kind[node], graph.half[node]) for node in graph.tasks
    ]
    return [*updates, *times, *[0.0] * graph.num_ends]


def cut_graph(
    full: TaskGraph, is_inside: Callable[[int], bool], *, has_updates: bool = True, is_merged: bool = True
) -> TaskGraph:
    """Return the part of ``full`` with these nodes, and updates and ends.

    Args:
        has_updates: there is one behind each backward.
        is_merged: ranks of several stages have one order; else chains alone.

    Nodes wait for nothing outside: it happened before, or it is waited for at the end. Window 2 of two stages of one
    rank each that hold 2 and 1 micro-batches, with U an update and E an end:

        rank 0   F2 B1 U F3 B2 U E         updates 0 and 1, tasks 4..7, end 12
        rank 1   F2 B2 U F3 B3 U E         updates 2 and 3, tasks 8..11, end 13

    The gradient for rank 0's B1 was sent in window 1, so it is no message of this part: the rank has it. Those of B2
    and B3 are sent here; the one is for B2 on rank 0, the other for window 3, so it goes to rank 0's end.
    """
    rows = [(lead, [node for node in chain if is_inside(node)]) for lead, chain in full.chains if chain]
    owners = [(lead, full.stage[chain[0]]) for lead, chain in full.chains if chain]
    tasks = [node for _, row in rows for node in row]
    trained = [node for node in tasks if has_updates and full.kind[node] is TaskKind.BACKWARD]
    # From nodes of the whole graph to those of the part, in which updates come first, then tasks, then ends.
    update = {node: at for at, node in enumerate(trained)}
    number = {node: len(trained) + at for at, node in enumerate(tasks)}
    end = {owner: len(trained) + len(tasks) + at for at, owner in enumerate(owners)}
    graph = _empty_part(full, trained, tasks, owners)
    for (lead, row), owner in zip(rows, owners, strict=True):
        pairs = ((number[node], update.get(node)) for node in row)
        graph.chains.append((lead, [*(n for pair in pairs for n in pair if n is not None), end[owner]]))
        graph.add_chain(graph.chains[-1][1])
    for message, (source, target) in enumerate(zip(full.source, full.target, strict=True)):
        if source in number:
            graph.add_message(
                number[source],
                number[target] if target in number else end[full.rank[target], full.stage[target]],
                full.num_bytes[message],
                full.edge[message],
                full.overlaps[message],
                full.pairs[message],
            )
    for node, locked in _unlocks(full, number, update):
        graph.add_unlock(node, locked)
    if not full.plan.shares_ranks:
        graph.orders.update(graph.chains)
    elif is_merged:
        merged = merge_chains(graph, graph.chains, durations=part_durations(graph))
        set_orders(graph, merged)
    return graph


def set_orders(graph: TaskGraph, orders: Mapping[int, list[int]]) -> None:
    """Let ranks of several stages run their nodes in these orders, which contain the part's chains.

    An update meets when each of its stage's ranks has done all that stands before it, and not its backward alone: tasks
    of other stages may stand between the two.
    """
    graph.replace_chains(orders)
    before = {node: earlier for order in orders.values() for earlier, node in itertools.pairwise(order)}
    for nodes in _meetings(graph, range(graph.num_updates)):
        for node in nodes:
            for other in nodes:
                if other != node:
                    graph.add_unlock(before[node], other)


def _meetings(graph: TaskGraph, nodes: Iterable[int]) -> Iterable[list[int]]:
    """Return those of nodes together that are of one stage and micro-batch."""
    together: dict[tuple[int, int], list[int]] = {}
    for node in nodes:
        together.setdefault((graph.stage[node], graph.micro_batch[node]), []).append(node)
    return together.values()


def _empty_part(
    full: TaskGraph, trained: Sequence[int], tasks: Sequence[int], owners: Sequence[tuple[int, int]]
) -> TaskGraph:
    """Return a graph of these nodes without orders, messages and waits.

    Args:
        owners: of each end its rank, the first of tensor ranks, and its stage.
    """
    nodes = [*trained, *tasks]
    count = len(nodes) + len(owners)
    inside = frozenset(tasks)
    return TaskGraph(
        plan=full.plan,
        orders={},
        members=full.members,
        groups=(),
        stage=[full.stage[node] for node in nodes] + [stage for _, stage in owners],
        rank=[full.rank[node] for node in nodes] + [lead for lead, _ in owners],
        micro_batch=[full.micro_batch[node] for node in nodes] + [-1] * len(owners),
        kind=[full.kind[node] for node in nodes] + [TaskKind.FORWARD] * len(owners),
        half=[full.half[node] for node in nodes] + [None] * len(owners),
        num_waits=[0] * count,
        next_on_rank=[-1] * count,
        first_message=[-1] * count,
        num_activations=sum(source in inside for source in full.source[: full.num_activations]),
        num_updates=len(trained),
        num_ends=len(owners),
    )


def _unlocks(
    full: TaskGraph, number: Mapping[int, int], update: Mapping[int, int]
) -> Iterator[tuple[int, int]]:
    """Yield (node, what waits for its end): updates for their stage's backwards on all other ranks, which they meet,
    and tasks of forward-only stages for their consumers.
    """
    for nodes in _meetings(full, update):
        yield from ((number[node], update[other]) for node in nodes for other in nodes if node != other)
    for node, freed in full.unlocks.items():
        yield from ((number[node], number[n]) for n in freed if node in number and n in number)
