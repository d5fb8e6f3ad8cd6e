"""Predicts the timeline of a plan: discrete events, every stage in its own order, on the links of a cluster.

Of lowered programs every rank runs its instructions strictly in order (`simulate_programs`). Two ways to post messages:
``asynchronous``, as the runtime does (a message is posted and forgotten, a task waits for those it reads), and
``rendezvous``, the worst case that programs are proven for (a rank continues from a send or a receive only when its
other end has been posted and it has travelled). The tensor ranks of a data position start and end each task together.

The event loop over task graphs (`event_loop`) is no special case of that: there a message needs its sender's task and
its links only, so that an order can be evaluated before there are programs, many times a second; with programs
instructions are waited for as well. Both take task times and message costs from the same place.

Source: this project
Tests: tests/plan/test_asynchronous.py, tests/simulate/test_asynchronous.py, tests/schedule/test_look_ahead.py
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gpp_plugin.errors import ScheduleError
from gpp_plugin.garbage import paused_collector
from gpp_plugin.ir.cluster import Cluster
from gpp_plugin.ir.plan import PipelinePlan, forward_only_stages, frozen_branch
from gpp_plugin.ir.program import Direction, Instruction, InstructionKind, Message, RankProgram
from gpp_plugin.ir.schedule import StageSchedule, Task, TaskKind
from gpp_plugin.ir.serialize import fingerprint
from gpp_plugin.ir.step_cost import Reductions
from gpp_plugin.ir.timeline import EVENT_OF_TASK, Event, EventKind, Timeline
from gpp_plugin.schedule.build import build_schedules
from gpp_plugin.schedule.build_graph import build_task_graph, part_durations
from gpp_plugin.schedule.checks.order_check import OF_STAGE, model_rows
from gpp_plugin.schedule.event_loop import (
    Durations,
    MessageCosts,
    TaskTimes,
    duration_reader,
    message_transfers,
    run_task_graph,
    task_durations,
)
from gpp_plugin.schedule.gathers import stages_that_reduce_early
from gpp_plugin.schedule.lower import lower_schedules
from gpp_plugin.schedule.messages import message_bytes, messages_held_back_by, messages_read
from gpp_plugin.schedule.orders.async_1f1b import Windows, windows_of
from gpp_plugin.schedule.program_sets import joined_windows, prefetch_graphs, window_schedules
from gpp_plugin.schedule.task_graph import TaskGraph, program_grid
from gpp_plugin.simulate.reductions import (
    BetweenTasks,
    ProgramReductions,
    ends_behind,
    last_backwards,
    reductions_of,
    step_events,
    sum_events,
)


def simulate_plan(
    plan: PipelinePlan,
    *,
    cluster: Cluster | None = None,
    durations: Durations | None = None,
    schedules: Sequence[StageSchedule] | None = None,
    share_links: bool = True,
    reduce_us: Mapping[int, float] | Reductions | None = None,
    step_us: Mapping[int, float] | None = None,
) -> Timeline:
    """Return the timeline of one mini-batch when every rank waits only for what its next task needs.

    Args:
        cluster: links; without one messages take no time.
        durations: microseconds of each task; the plan's `Stage.forward_us` and `backward_us` by default.
        schedules: task orders; those the plan names by default.
        share_links: messages of one rank take turns on its link; else each has the full bandwidth.
        reduce_us: what stages reduce, and when (`reductions`); a number of a stage is a sum behind its ranks' tasks,
            which starts on all of them together.
        step_us: by stage, the optimizer step; starts when every rank is done (the norm is global).

    Raises:
        ScheduleError: the orders wait for each other; the text shows the circle in the grid.
        PlanError: the plan does not fit the cluster, or its micro-batches do not divide evenly.
    """
    # Two stages, one micro-batch of 1 us each way, 1 us a message, a reduction of 2 us on stage 0:
    #
    #   us       0    1    2    3    4    5    6    7    8
    #   stage 0  |0F0 |    .    .    .    |0B0 |reduce   |
    #   link     .    |act.|    .    |grad|    .    .
    #   stage 1  .    .    |1F0 |1B0 |    .    .    .
    graph, times, between, behind = _run(plan, cluster, durations, schedules, share_links, reduce_us, step_us)
    with paused_collector():  # it would walk millions of new events again and again: they hold no circles
        events = _task_events(graph, times) + ([] if between is None else between.events(times))
        events += behind + _message_events(graph, times)
    return Timeline(source="predicted", plan=fingerprint(plan), events=tuple(events))


def predict_iteration_us(
    plan: PipelinePlan,
    *,
    cluster: Cluster | None = None,
    durations: Durations | None = None,
    schedules: Sequence[StageSchedule] | None = None,
    share_links: bool = True,
    reduce_us: Mapping[int, float] | Reductions | None = None,
    step_us: Mapping[int, float] | None = None,
) -> float:
    """Return only the time of one mini-batch, as `simulate_plan` predicts it, without making events of tasks."""
    graph, times, between, behind = _run(plan, cluster, durations, schedules, share_links, reduce_us, step_us)
    begin = 0.0 if between is not None else min(times.start, default=0.0)  # where ranks gather first
    ends = _rank_ends(graph, times).values()
    return max([*ends, *(event.end_us for event in behind)], default=0.0) - begin


def _run(
    plan: PipelinePlan,
    cluster: Cluster | None,
    durations: Durations | None,
    schedules: Sequence[StageSchedule] | None,
    share_links: bool,
    reduce_us: Mapping[int, float] | Reductions | None,
    step_us: Mapping[int, float] | None,
) -> tuple[TaskGraph, TaskTimes, BetweenTasks | None, list[Event]]:
    """Return the tasks, their times, what ranks wait for between them, and the events behind them."""
    reductions = reductions_of(plan, reduce_us)
    if schedules is None:
        schedules = build_schedules(plan)
    graph = build_task_graph(plan, schedules)
    each_us = task_durations(graph, durations)
    between = BetweenTasks.of(graph, each_us, reductions)
    times = run_task_graph(
        graph,
        each_us,
        transfers=message_transfers(graph, cluster),
        share_links=share_links,
        waits_us=None if between is None else between.waits_us,
    )
    ends = _rank_ends(graph, times)
    events = sum_events(plan, ends, reductions, last_backwards(graph, times, reductions))
    events += step_events(plan, ends_behind(ends, events), reductions, step_us or {})
    return graph, times, between, events


def _rank_ends(graph: TaskGraph, times: TaskTimes) -> dict[int, float]:
    # Tensor ranks run every task together, so `orders` has one entry a
    # data position; all its members end there.
    return {
        rank: times.end[order[-1]] for lead, order in graph.orders.items() for rank in graph.members[lead]
    }


def _task_events(graph: TaskGraph, times: TaskTimes) -> list[Event]:
    """Return what each rank runs, updates that take time included."""
    events = []
    for node in range(graph.tasks.stop):
        is_update = node < graph.num_updates
        if is_update and times.end[node] == times.start[node]:
            continue
        events += [
            Event(
                rank=rank,
                stage=graph.stage[node],
                kind=EventKind.STEP if is_update else EVENT_OF_TASK[graph.kind[node]],
                start_us=times.start[node],
                end_us=times.end[node],
                micro_batch=-1 if is_update else graph.micro_batch[node],
                half=graph.half[node],
            )
            for rank in graph.members[graph.rank[node]]
        ]
    return events


def _message_events(graph: TaskGraph, times: TaskTimes) -> list[Event]:
    """Return a send and a receive for each message; what passes between two stages of one rank has none."""
    events = []
    # A send and its receive have the same two times: from when the sender's link takes the message up to when
    # it has arrived, waiting for the receiver's link and the latency included.
    for number, (sender, receiver) in enumerate(zip(graph.sender, graph.receiver, strict=True)):
        if sender == receiver:
            continue
        for node, rank, peer, kind in (
            (graph.source[number], sender, receiver, EventKind.SEND),
            (graph.target[number], receiver, sender, EventKind.RECEIVE),
        ):
            events.append(
                Event(
                    rank=rank,
                    stage=graph.stage[node],
                    kind=kind,
                    start_us=times.message_start[number],
                    end_us=times.message_end[number],
                    micro_batch=graph.micro_batch[node],
                    edge=graph.edge[number],
                    bytes=round(graph.num_bytes[number]),
                    half=graph.half[node],
                    peer=peer,
                )
            )
    return events


# Predicts what a plan gains where its frozen branch runs a mini-batch early.
#
# All ranks step together, so a mini-batch takes as long as its steady part (`schedule.program_sets`) from an idle
# start: what the branch made before is there, and what it makes meanwhile nobody waits for but the step.


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchPrediction:
    """Microseconds of a mini-batch by itself, and with its frozen branch a mini-batch early.

    Args:
        stages: names of those that run early.
    """

    stages: tuple[str, ...]
    whole_us: float
    steady_us: float


def predict_prefetch(plan: PipelinePlan, *, cluster: Cluster | None = None) -> PrefetchPrediction | None:
    """Predict a plan with and without frozen-branch prefetch, no reductions or steps; None where nothing runs early.

    Args:
        cluster: links; without one messages take no time.
    """
    branch = frozen_branch(plan)
    if plan.mode != "sync" or not branch:
        return None
    part = prefetch_graphs(plan)["steady"]
    times = run_task_graph(part, part_durations(part), transfers=message_transfers(part, cluster))
    return PrefetchPrediction(
        stages=tuple(plan.stages[index].name for index in sorted(branch)),
        whole_us=predict_iteration_us(plan, cluster=cluster),
        steady_us=max(times.end),
    )


# Predicts an asynchronous plan: windows one after the other, then the drain, and what a window takes once full.
#
# The same event loop as for a mini-batch runs a longer schedule, with an update behind each backward. A window's time
# is read off where windows repeat: how long after the end of one on all ranks the next one ends.


REPEATED = 4
"""Windows simulated beyond those that fill the pipeline; the last one is measured."""


def num_windows(windows: Windows) -> int:
    """Return how many windows are simulated or rehearsed in a row."""
    return windows.first_steady + REPEATED


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncPrediction:
    """What asynchronous training takes, in microseconds.

    Args:
        plan: the plan with all windows of ``timeline`` as one mini-batch.
        num_windows: of the timeline, which begins and ends with an empty pipeline.
        steady_us: of one mini-batch while the pipeline is full.
        fill_us: what the first windows take beyond that; ``drain_us`` what a flush takes.
    """

    plan: PipelinePlan
    timeline: Timeline
    num_windows: int
    steady_us: float
    fill_us: float
    drain_us: float


def simulate_windows(
    plan: PipelinePlan,
    *,
    cluster: Cluster | None = None,
    update_us: Mapping[int, float] | None = None,
) -> AsyncPrediction:
    """Predict an asynchronous plan.

    Args:
        cluster: as for `simulate_plan`.
        update_us: by stage, reduction and step behind each backward; they start on all its ranks together.

    Raises:
        PlanError: the plan cannot run asynchronously, or does not fit the cluster.
    """
    # Two stages, in flight (2, 1), M = 2 micro-batches a window, every task 1 us, no updates:
    #
    #   us       0  1  2  3  4   5  6  7  8   9       22  23  24  25
    #   stage 0  F0 F1 .  B0|F2  B1 F3 B2|F4  B3 ...  F11 B10| .  B11    the drain
    #   stage 1  .  F0 B0 F1 B1| F2 B2 F3 B3| F4 ...  B10 F11 B11|
    #
    # Windows end at 5, 9, 13, ...: steady_us = 4, fill_us = 5 - 4 = 1 and drain_us = 1. A
    # stage's cut lies where its own tasks say (`Windows.tasks`), not at one time: stage 0 is
    # in window 2 while stage 1 still runs 1B1.
    windows = windows_of(plan)
    count = num_windows(windows)
    part = joined_windows(plan, count, forward_only_stages=forward_only_stages(plan))
    each = update_us or {}
    times = run_task_graph(
        part,
        part_durations(part, update_us=lambda stage: each.get(stage, 0.0)),
        transfers=message_transfers(part, cluster),
    )
    ends = _window_ends(part, times, windows, count)
    # Window `first_steady` is the first that repeats, but its start still depends on how the pipeline filled;
    # REPEATED windows later that has worn off, so only the last difference is read.
    steady = ends[count] - ends[count - 1]
    events = _task_events(part, times) + _message_events(part, times)
    return AsyncPrediction(
        plan=part.plan,
        timeline=Timeline(source="predicted", plan=fingerprint(plan), events=tuple(events)),
        num_windows=count,
        steady_us=steady,
        fill_us=ends[count] - count * steady,
        drain_us=ends[count + 1] - ends[count],
    )


def predict_drained_us(
    plan: PipelinePlan, *, cluster: Cluster | None = None, durations: Durations | None = None
) -> float:
    """Return the time of one window from an empty pipeline, and of the drain behind it, to an empty one.

    Several windows of a plan are one of the plan with a longer mini-batch (`lengthened`). Updates take no time here.
    """
    full = drained_graph(plan)
    transfers = message_transfers(full, cluster)
    return max(run_task_graph(full, task_durations(full, durations), transfers=transfers).end)


def drained_graph(plan: PipelinePlan) -> TaskGraph:
    """Return the tasks of one window of an asynchronous plan and of the drain behind it."""
    return build_task_graph(plan, window_schedules(windows_of(plan), 1, forward_only_stages(plan)))


def _window_ends(graph: TaskGraph, times: TaskTimes, windows: Windows, count: int) -> list[float]:
    """Return when each window (from 1; the drain last) ends on the last rank, updates included."""
    ends = [0.0] * (count + 2)
    for node in range(graph.tasks.stop):
        micro_batch = graph.micro_batch[node]
        if graph.kind[node] is TaskKind.BACKWARD:
            micro_batch += windows.in_flight[graph.stage[node]] - 1  # it runs behind that forward
        window = min(micro_batch // windows.micro_batches + 1, count + 1)
        ends[window] = max(ends[window], times.end[node])
    for window in range(1, count + 2):
        # A window without tasks on the slowest rank (the drain of a
        # plan with k = 1) ends with the one before.
        ends[window] = max(ends[window], ends[window - 1])
    return ends


MODES = ("asynchronous", "rendezvous")


def simulate_programs(
    plan: PipelinePlan,
    programs: Sequence[RankProgram],
    *,
    cluster: Cluster | None = None,
    durations: Durations | None = None,
    mode: str = "asynchronous",
    share_links: bool = True,
    reduce_us: Mapping[int, float] | Reductions | None = None,
    step_us: Mapping[int, float] | None = None,
    gather_us: Mapping[int, float] | None = None,
) -> Timeline:
    """Return the timeline of one mini-batch run by these programs.

    Args:
        cluster, durations, share_links, reduce_us, step_us: as for `simulate_plan`.
        mode: ``asynchronous`` or ``rendezvous``.
        gather_us: by stage, what one gather of its parameters takes (ZeRO 3), where ``reduce_us`` does not say.

    Raises:
        ScheduleError: the programs stop; the text shows where each rank stands.
        ValueError: the mode is unknown.
    """
    if mode not in MODES:
        raise ValueError(f"mode {mode!r}; choose one of {MODES}")
    reductions = reductions_of(plan, reduce_us)
    if gather_us is not None:
        reductions = reductions.with_gathers(gather_us)
    if reductions.has_early:
        reductions = reductions.with_early(stages_that_reduce_early(plan, programs))
    run = _ProgramRun(
        plan,
        programs,
        duration_reader(plan, durations),
        MessageCosts(cluster),
        reductions,
        step_us or {},
        is_rendezvous=mode == "rendezvous",
        share_links=share_links,
    )
    run.run()
    return Timeline(source="predicted", plan=fingerprint(plan), events=tuple(run.events))


def simulate_step(
    plan: PipelinePlan,
    *,
    cluster: Cluster | None = None,
    reductions: Reductions,
    step_us: Mapping[int, float] | None = None,
) -> Timeline:
    """Return the timeline of one mini-batch that judges a plan: reductions are where its programs let them be.

    Raises:
        ScheduleError, PlanError: as of `simulate_plan`.
    """
    schedules = build_schedules(plan)
    programs: tuple[RankProgram, ...] = ()
    if reductions.has_early or reductions.is_between_tasks:
        each = any(own.each_us for own in reductions.stages)
        programs = lower_schedules(plan, schedules, reduce_each_backward=each)
    if reductions.is_between_tasks:
        return simulate_programs(plan, programs, cluster=cluster, reduce_us=reductions, step_us=step_us)
    if reductions.has_early:
        reductions = reductions.with_early(stages_that_reduce_early(plan, programs))
    times: dict[str, Any] = {"cluster": cluster, "reduce_us": reductions, "step_us": step_us}
    return simulate_plan(plan, schedules=schedules, **times)


class _Gather(NamedTuple):
    """One gather of a stage's parameters."""

    stage: int
    number: int


class _Read(NamedTuple):
    """The end of the task that reads a message: what a stage without backwards is held back by."""

    message: Message


_Awaited = Message | _Gather | _Read


class _ProgramRun:
    """The state of one simulation: where each rank stands, which messages are posted, sent, arrived."""

    def __init__(
        self,
        plan: PipelinePlan,
        programs: Sequence[RankProgram],
        duration: Callable[[Task, int], float],
        costs: MessageCosts,
        reductions: Reductions,
        step_us: Mapping[int, float],
        *,
        is_rendezvous: bool,
        share_links: bool,
    ) -> None:
        # Four kinds of events on the heap, by (time in us, step, order of pushing):
        #
        #   0  a task, gather, reduction or step ends    -> the rank continues with its next instruction
        #   1  a message is posted (_leave)      -> takes the sender's link when that is free
        #   2  it leaves (_enter)                -> takes the receiver's link when that is free
        #   3  it has arrived (_arrive)          -> the rank that waits for it may go on
        #
        # With rendezvous a message needs both ends posted, and both ranks wait for it. Rank 0 sends at 1 us a
        # message of 2 us that rank 1, busy until 4 us, receives: asynchronous, rank 0 continues at 1 and rank 1
        # at 4; rendezvous, the message travels from 4 to 6 and both go on at 6.
        self.events: list[Event] = []
        self._plan = plan
        self._programs = {program.rank: program for program in programs}
        self._costs, self._duration = costs, duration
        self._collectives = ProgramReductions(plan, self._programs, reductions, step_us)
        self._num_ends = 2 if is_rendezvous else 1
        self._is_rendezvous = is_rendezvous
        self._share_links = share_links
        # Of each rank: the instruction it stands at, which messages it still waits for there, and which each of its
        # tasks reads.
        self._position = dict.fromkeys(self._programs, 0)
        self._missing: dict[int, set[_Awaited]] = {rank: set() for rank in self._programs}
        self._reads = {rank: messages_read(program) for rank, program in self._programs.items()}
        self._holds = {rank: messages_held_back_by(plan, program) for rank, program in self._programs.items()}
        # Of each message: how many of its ends are posted, its bytes, and when it left, in us.
        self._posted: dict[Message, int] = {}
        self._bytes: dict[Message, float] = {}
        self._started: dict[Message, float] = {}
        self._arrived: set[_Awaited] = set()
        # Of each rank and stage: the gather that was begun last, behind which the rank continues, and how many were.
        self._gathering: dict[tuple[int, int], _Gather] = {}
        self._num_gathers: dict[tuple[int, int], int] = defaultdict(int)
        # Of each rank's link, or adapter that ranks share, in us: when it is free again, out and in.
        self._out_free: dict[int, float] = defaultdict(float)
        self._in_free: dict[int, float] = defaultdict(float)
        # Who has come to a gather or a reduction (kind, stage) or to the step (kind, -1: all stages), and when.
        self._barriers: dict[tuple[InstructionKind, int], dict[int, float]] = {}
        # The ranks that run a data position's tasks together; without context and tensor ranks just (rank,).
        self._rows = {rank: (rank,) for rank in self._programs} | model_rows(plan)
        self._waiting: dict[tuple[int, ...], list[int]] = {}
        # (time, priority, tie-break, what): a task's end before a message's steps at the same time.
        self._heap: list[tuple[float, int, int, int | Message | _Gather]] = []
        self._num_pushed = 0

    def run(self) -> None:
        """Run every program to its end."""
        for rank in self._programs:
            self._advance(rank, 0.0)
        while self._heap:
            now, step, _, what = heapq.heappop(self._heap)
            if isinstance(what, int):
                self._let_go(what, now)
                self._position[what] += 1
                self._advance(what, now)
            elif isinstance(what, _Gather):
                self._finish_gather(what, now)
            elif step == 1:
                self._leave(what, now)
            elif step == 2:
                self._enter(what, now)
            else:
                self._arrive(what, now)
        # Nothing moves any more. Programs that are not at their end wait for each other: with rendezvous this
        # is how a deadlock shows, and the first rank's instruction is where to look.
        stuck = {r: p for r, p in self._position.items() if p < len(self._programs[r].instructions)}
        if stuck:
            rank = min(stuck)
            where = self._programs[rank].instructions[stuck[rank]]
            raise ScheduleError(
                f"{len(stuck)} ranks wait for each other; rank {rank} stands at {where}; "
                "lower the schedules anew\n" + program_grid(self._programs.values(), positions=stuck)
            )

    def _push(self, time: float, step: int, what: int | Message | _Gather) -> None:
        heapq.heappush(self._heap, (time, step, self._num_pushed, what))
        self._num_pushed += 1

    def _advance(self, rank: int, now: float) -> None:
        """Start the instruction that ``rank`` has come to."""
        program = self._programs[rank]
        while self._position[rank] < len(program.instructions):
            instruction = program.instructions[self._position[rank]]
            task, message = instruction.task, instruction.message
            if message is not None and message.is_local_transfer:
                self._arrived.add(message)
                awaited: list[_Awaited] = []
            elif message is not None:
                self._post(instruction.kind, message, now)
                awaited = [message] if self._is_rendezvous else []
            else:
                awaited = [] if task is None or self._is_rendezvous else self._awaited(rank, task)
            self._missing[rank] = {message for message in awaited if message not in self._arrived}
            if self._missing[rank]:
                return
            if task is not None:
                self._compute(program, task, now)
                return
            if message is None and instruction.kind is not InstructionKind.FREE:
                self._join(program, instruction, now)
                if instruction.kind is not InstructionKind.GATHER or self._is_rendezvous:
                    return
            self._position[rank] += 1

    def _awaited(self, rank: int, task: Task) -> list[_Awaited]:
        """Return what a task waits for: the messages it reads, and the gather of its stage's parameters."""
        begun = self._gathering.get((rank, task.stage))
        held = map(_Read, self._holds[rank].get(task, []))
        return [*self._reads[rank].get(task, []), *(() if begun is None else (begun,)), *held]

    def _let_go(self, rank: int, now: float) -> None:
        """A rank's task has ended, if it is one: stages without backwards that wait for what it read go on."""
        task = self._programs[rank].instructions[self._position[rank]].task
        for message in () if task is None else self._reads[rank].get(task, ()):
            self._arrived.add(_Read(message))
            self._found(_Read(message), message.src_rank, now)

    def _found(self, awaited: _Awaited, rank: int, now: float) -> None:
        """What a rank may wait for is there."""
        if awaited in self._missing[rank]:
            self._missing[rank].remove(awaited)
            if not self._missing[rank]:
                self._advance(rank, now)

    def _compute(self, program: RankProgram, task: Task, now: float) -> None:
        """Run the task when the last of its tensor ranks has come to it, as long as the slowest takes."""
        row = self._rows[program.rank]
        here = self._waiting.setdefault(row, [])
        here.append(program.rank)
        if len(here) < len(row):
            return
        del self._waiting[row]
        end = now + max(self._duration(task, rank) for rank in row)
        kind = EVENT_OF_TASK[task.kind]
        for rank in row:
            self._note(rank, task.stage, kind, now, end, micro_batch=task.micro_batch, half=task.half)
            self._push(end, 0, rank)
            self._collectives.note(rank, task, now, end)

    def _post(self, kind: InstructionKind, message: Message, now: float) -> None:
        # Asynchronous: a message may have arrived before its receiver comes here. Receives need no posting then;
        # `_num_ends` is 1, the sender's.
        if kind is InstructionKind.SEND or self._is_rendezvous:
            self._posted[message] = self._posted.get(message, 0) + 1
            if self._posted[message] == self._num_ends:
                self._push(now, 1, message)

    def _leave(self, message: Message, now: float) -> None:
        """The message is ready: it takes the sender's link when that is free."""
        self._bytes[message] = message_bytes(self._plan, message)
        occupied, _ = self._costs.of(*message.channel, self._bytes[message])
        port, _ = self._costs.ports(*message.channel)
        begin = max(now, self._out_free[port]) if self._share_links else now
        self._out_free[port] = begin + occupied
        self._started[message] = begin
        self._push(begin, 2, message)

    def _enter(self, message: Message, now: float) -> None:
        """The message takes the receiver's link when that is free."""
        occupied, latency = self._costs.of(*message.channel, self._bytes[message])
        _, port = self._costs.ports(*message.channel)
        begin = max(now, self._in_free[port]) if self._share_links else now
        self._in_free[port] = begin + occupied
        self._push(begin + occupied + latency, 3, message)

    def _arrive(self, message: Message, now: float) -> None:
        self._arrived.add(message)
        start, num_bytes = self._started[message], round(self._bytes[message])
        edge = self._plan.edges[message.edge]
        ends = (edge.src, edge.dst) if message.direction is Direction.ACTIVATION else (edge.dst, edge.src)
        for stage, rank, micro_batch, half, kind in (
            (ends[0], message.src_rank, message.src_micro_batch, message.src_half, EventKind.SEND),
            (ends[1], message.dst_rank, message.dst_micro_batch, message.dst_half, EventKind.RECEIVE),
        ):
            self._note(
                rank,
                stage,
                kind,
                start,
                now,
                micro_batch=micro_batch,
                half=half,
                edge=message.edge,
                bytes=num_bytes,
                peer=message.dst_rank if kind is EventKind.SEND else message.src_rank,
            )
            if message in self._missing[rank]:
                self._missing[rank].remove(message)
                if not self._missing[rank]:
                    self._position[rank] += (
                        self._is_rendezvous
                    )  # from the message, not from the task that reads it
                    self._advance(rank, now)

    def _join(self, program: RankProgram, instruction: Instruction, now: float) -> None:
        """Wait for the ranks that take part in a gather, a reduction or the step, then run it together."""
        kind = instruction.kind
        behind = program.instructions[self._position[program.rank] + 1 :]
        if kind is InstructionKind.REDUCE_TIED and any(i.kind is kind for i in behind):
            self._push(now, 0, program.rank)  # the last one is for all stages of the rank
            return
        stage = program.stage_of(instruction) if kind in OF_STAGE else None
        members = [
            other.rank
            for other in self._programs.values()
            if stage in (None, *other.stages)
            and any(i.kind is kind and stage in (None, other.stage_of(i)) for i in other.instructions)
        ]
        present = self._barriers.setdefault((kind, -1 if stage is None else stage), {})
        present[program.rank] = now
        begun: _Gather | None = None  # the rank continues beside it
        if stage is not None and kind is InstructionKind.GATHER and not self._is_rendezvous:
            begun = _Gather(stage, self._num_gathers[program.rank, stage])
            self._gathering[program.rank, stage] = begun
            self._num_gathers[program.rank, stage] += 1
        if len(present) < len(members):
            return
        del self._barriers[kind, -1 if stage is None else stage]
        is_last = not any(i.kind is kind and stage == program.stage_of(i) for i in behind)
        found, ends = self._collectives.run(kind, stage, present, now, is_last=is_last)
        self.events += found
        if begun is not None:
            self._push(max(ends.values()), 3, begun)
            return
        for rank, end in ends.items():
            self._push(end, 0, rank)

    def _finish_gather(self, gather: _Gather, now: float) -> None:
        """The parameters are there: tasks of the stage that wait for them go on."""
        self._arrived.add(gather)
        for rank in self._plan.stages[gather.stage].ranks:
            self._found(gather, rank, now)

    def _note(self, rank: int, stage: int, kind: EventKind, start: float, end: float, **more: Any) -> None:
        self.events.append(Event(rank=rank, stage=stage, kind=kind, start_us=start, end_us=end, **more))
