"""Programs by name, of pipelines that carry something from one mini-batch to the next.

Names are those of software pipelining. What a pipeline carries is in the numbers of `ProgramSet`, not in classes:

                     programs                                      carried from one to the next
    synchronous      whole                                         nothing
    frozen prefetch  whole | prologue, steady, epilogue            outputs of the frozen branch
    mode async       prologue 1, ..., steady | drain 1, ..., drain messages, saved activations, weight versions

Each is cut out of the task graph of several mini-batches in a row (`cut_graph`): some tasks, and the messages that
these send. What a later program reads is received in the program that sends it, behind the stage's last task. So every
program finishes by itself, even if all ranks run it serially with rendezvous messages.

**Frozen prefetch.** Stages that depend on the mini-batch alone (`frozen_branch`) idle at a mini-batch's end. There they
run their forwards of the next one. Of a frozen stage 0 and a trained stage 1 with two micro-batches each, 2 and 3 are
the next mini-batch's:

    whole     rank 0  F0 F1           step     nothing is prefetched
              rank 1     F0 B0 F1 B1  step
    prologue  rank 0  F2 F3                    the branch alone, before a first mini-batch
    steady    rank 0  F2 F3           step     rank 1 has what F0 and F1 read; while it works, F2's and F3's arrive
              rank 1  F0 B0 F1 B1     step
    epilogue  rank 0                  step     no next mini-batch is known
              rank 1  F0 B0 F1 B1     step

Where a frozen stage shares ranks with trained ones, its forwards of the next mini-batch go where these would idle. What
it makes for a stage of the same rank is transferred at once and kept until the next program.

    rank 0, stages 0 and 1   1F0 1B0 0F2 (idle no more) 1F1 1B1 0F3   step

**Mode async.** The programs are the windows of asynchronous 1F1B (`async_1f1b`): those that differ fill the pipeline,
the last of them repeats, and behind each there is one that drains it. After each backward stands an *update*: the
stage's ranks reduce gradients and step together, so it waits for that backward on all of them. A rank of several stages
has an order of its own for each program (`shared_ranks`), in which updates have their places too.

Source: PipeDream (SOSP 2019, doi 10.1145/3341301.3359646), section 3.2; frozen prefetch: this project
Tests: tests/schedule/test_async.py, tests/schedule/test_look_ahead.py
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from gpp_plugin.ir.plan import PipelinePlan, forward_only_stages, frozen_branch
from gpp_plugin.ir.program import Direction, InstructionKind, Message, RankProgram
from gpp_plugin.ir.schedule import StageSchedule, Task, TaskKind
from gpp_plugin.ir.tensors import SampleRange
from gpp_plugin.schedule.build import build_schedules
from gpp_plugin.schedule.build_graph import (
    build_task_graph,
    cut_graph,
    lengthened,
    part_durations,
    set_orders,
    turns_of,
)
from gpp_plugin.schedule.event_loop import run_task_graph
from gpp_plugin.schedule.gathers import gather_around_tasks
from gpp_plugin.schedule.lower import end_mini_batch, lower_graph
from gpp_plugin.schedule.messages import message_bytes
from gpp_plugin.schedule.orders.async_1f1b import Windows, windows_of
from gpp_plugin.schedule.shared_ranks import merge_chains
from gpp_plugin.schedule.task_graph import TaskGraph

Programs = tuple[RankProgram, ...]

EMPTY = ""
"""In place of the last program's name: nothing is carried."""


# ---- programs by name -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPolicy:
    """Which programs a call of ``train_batch`` runs, and when stages step.

        last program   next mini-batch known   programs of the call
        (empty)        no                      whole
        (empty)        yes                     prologue, steady
        steady         yes                     steady
        steady         no                      epilogue

    Args:
        calls: (last program, whether the next mini-batch is known) -> the programs of a call.
        ends: programs that leave nothing for another one.
        drains: last program -> the program that empties the pipeline; without one, what is carried can be dropped.
        renumbered: (program, next program) between which a mini-batch ends: numbers count from the new one.
        steps_alone: a stage steps after each of its micro-batches; else all stages together, once a mini-batch.

    Attributes:
        can_prefetch: a call makes use of the next mini-batch.
    """

    calls: Mapping[tuple[str, bool], tuple[str, ...]]
    ends: frozenset[str]
    drains: Mapping[str, str] = dataclasses.field(default_factory=dict)
    renumbered: frozenset[tuple[str, str]] = frozenset()
    steps_alone: bool = False
    can_prefetch: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "can_prefetch", any(is_known for _, is_known in self.calls))

    def after(self, name: str) -> str:
        """Return what the last program is once ``name`` was run: itself, or `EMPTY` where it leaves nothing."""
        return EMPTY if name in self.ends else name


SYNCHRONOUS = StepPolicy(calls={(EMPTY, False): ("whole",)}, ends=frozenset({"whole"}))
PREFETCH = StepPolicy(
    calls={
        (EMPTY, False): ("whole",),
        (EMPTY, True): ("prologue", "steady"),
        ("steady", True): ("steady",),
        ("steady", False): ("epilogue",),
    },
    ends=frozenset({"whole", "epilogue"}),
    renumbered=frozenset(itertools.product(("prologue", "steady"), ("steady", "epilogue"))),
)


def async_policy(windows: Windows) -> StepPolicy:
    """Return the policy of mode async: the program that repeats comes again and again, and is renumbered."""
    last = windows.first_steady
    names = [async_name(window, last) for window in range(1, last + 1)]
    calls = {
        (before, False): (name,) for before, name in zip((EMPTY, *names), (*names, names[-1]), strict=True)
    }
    drains = {name: async_name(window, last, is_drain=True) for window, name in enumerate(names, start=1)}
    repeats = frozenset({(names[-1], names[-1])})
    return StepPolicy(
        calls=calls, ends=frozenset(drains.values()), drains=drains, renumbered=repeats, steps_alone=True
    )


def async_name(window: int, last: int, *, is_drain: bool = False) -> str:
    """Return the name of a window's program, or of the drain behind it; that of ``last`` repeats."""
    if window == last:
        return "drain" if is_drain else "steady"
    return f"drain {window}" if is_drain else f"prologue {window}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramPlace:
    """Where a stage's program stands among those that run before and after it.

    Args:
        carried: messages received before it that it reads, or passes on.
        first_micro_batch: that of its first forward; its inputs are counted from there.
        is_trained: whether the stage runs backwards, in this program or another one.
        keeps_activations: it leaves micro-batches between forward and backward, and its stages step alone.
    """

    carried: tuple[Message, ...]
    first_micro_batch: int
    is_trained: bool
    keeps_activations: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSet:
    """The programs of all ranks by name.

    With a prefetch, micro-batches of the mini-batch that is trained count from 0 and those of the next one go on from
    there. In mode async they count from the last time the pipeline was empty; those of ``steady`` and ``drain`` may be
    greater by a whole number of mini-batches.

    Args:
        programs: name -> one program a rank.
        policy: which of them a call runs.
        prefetched: the stages of the frozen branch.
        windows: of mode async; None in others.
    """

    plan: PipelinePlan
    programs: Mapping[str, Programs]
    policy: StepPolicy
    prefetched: frozenset[int] = frozenset()
    windows: Windows | None = None

    @property
    def all(self) -> tuple[RankProgram, ...]:
        """Return every program of every rank."""
        return tuple(program for of_ranks in self.programs.values() for program in of_ranks)

    def of_rank(self, rank: int) -> RankPrograms:
        """Return one rank's programs."""
        own = {
            name: next(program for program in of_ranks if program.rank == rank)
            for name, of_ranks in self.programs.items()
        }
        return RankPrograms(
            plan=self.plan, programs=own, policy=self.policy, prefetched=self.prefetched, windows=self.windows
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPrograms:
    """The programs of one rank, or of one of its stages: of a `ProgramSet`."""

    plan: PipelinePlan
    programs: Mapping[str, RankProgram]
    policy: StepPolicy = SYNCHRONOUS
    prefetched: frozenset[int] = frozenset()
    windows: Windows | None = None

    @property
    def main(self) -> RankProgram:
        """Return the program that has every task and message of a mini-batch."""
        return self.programs.get("whole") or self.programs["steady"]

    @property
    def stages(self) -> tuple[int, ...]:
        """Return the stages that the programs are of."""
        return self.main.stages

    def of_stage(self, stage: int) -> RankPrograms:
        """Return what the rank does for one of its stages."""
        return dataclasses.replace(
            self, programs={name: program.of_stage(stage) for name, program in self.programs.items()}
        )

    @property
    def is_prefetched(self) -> bool:
        """Return whether the one stage is of the frozen branch: its tasks in ``steady`` are of the next mini-batch."""
        return self.main.stage in self.prefetched

    @property
    def is_trained(self) -> bool:
        """Return whether any program runs backwards."""
        return any(i.task is not None and i.task.kind is not TaskKind.FORWARD for i in self.main.instructions)

    def place(self, name: str) -> ProgramPlace | None:
        """Return where a program of the one stage stands among the others; None of ``whole``, which is by itself."""
        if name == "whole":
            return None
        first, count = 0, self.plan.num_micro_batches(self.main.stage)
        if self.windows is not None:
            first = (self._window(name)[0] - 1) * count
        elif self.is_prefetched:
            first = count
        return ProgramPlace(
            carried=self.carried(name),
            first_micro_batch=first,
            is_trained=self.is_trained,
            keeps_activations=self.policy.steps_alone,
        )

    def _window(self, name: str) -> tuple[int, bool]:
        """Return the window of a program of mode async, and whether it is the drain behind it."""
        kind, _, number = name.partition(" ")
        assert self.windows is not None
        return int(number) if number else self.windows.first_steady, kind == "drain"

    def carried(self, name: str) -> tuple[Message, ...]:
        """Return the messages received before a program that it reads, or passes on to later ones."""
        if self.windows is not None:
            window, is_drain = self._window(name)
            carried: list[tuple[Message, Task]] = []
            for earlier in range(1, window + is_drain):
                program = self.programs[async_name(earlier, self.windows.first_steady)]
                tasks = {instruction.task for instruction in program.instructions}
                came = [
                    (i.message, _reader(i.message, program.stage_of(i)))
                    for i in program.instructions
                    if i.message is not None and i.kind is InstructionKind.RECEIVE
                ]
                carried = [(m, reader) for m, reader in (*carried, *came) if reader not in tasks]
            return tuple(message for message, _ in carried)
        if name == "prologue":
            return ()
        prologue = self.programs["prologue"]
        return tuple(
            moved_message(self.plan, instruction.message, -1)
            for instruction in prologue.instructions
            if instruction.message is not None
            and instruction.kind is InstructionKind.RECEIVE
            and prologue.stage_of(instruction) not in self.prefetched
        )

    @property
    def most_bytes(self) -> int:
        """Return the most bytes that the rank ever holds of prefetched outputs, each stage by itself added up."""
        return round(sum(self.of_stage(stage)._most_of_stage() for stage in self.stages))

    def _most_of_stage(self) -> float:
        # What is here as the program begins goes with the tasks that read it, while the next mini-batch's comes.
        carried = self.carried("steady")
        if not carried:
            return 0.0
        coming = [
            m
            for m in self.programs["steady"].messages(InstructionKind.RECEIVE)
            if m.samples.first_sample >= self.plan.mini_batch
        ]
        sizes = {m: message_bytes(self.plan, m) for m in (*carried, *coming)}
        unread = set(carried)
        held = most = sum(sizes[m] for m in carried)
        for instruction in self.programs["steady"].instructions:
            message = instruction.message
            if message is not None and instruction.kind is InstructionKind.RECEIVE:
                held += sizes.get(message, 0.0)
                most = max(most, held)
            elif instruction.task is not None:
                read = {m for m in unread if _is_read_by(m, instruction.task)}
                held -= sum(sizes[m] for m in read)
                unread -= read
        return most


def _reader(message: Message, stage: int | None) -> Task:
    assert stage is not None, "a message is of one stage"
    is_forward = message.direction is Direction.ACTIVATION
    kind = TaskKind.FORWARD if is_forward else TaskKind.BACKWARD
    return Task(stage=stage, kind=kind, micro_batch=message.dst_micro_batch)


def _is_read_by(message: Message, task: Task) -> bool:
    half = message.dst_half
    return message.dst_micro_batch == task.micro_batch and (half is None or half == task.half)


# ---- mode async -----------------------------------------------------------------------------------------


def lower_async(plan: PipelinePlan, *, forward_only_stages: Collection[int] = frozenset()) -> ProgramSet:
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
    last = windows.first_steady
    programs: dict[str, Programs] = {}
    for window in range(1, last + 1):
        parts = _window_parts(plan, windows, window, forward_only_stages)
        for part, is_drain in zip(parts, (False, True), strict=True):
            lowered = lower_graph(part, part_durations(part))
            programs[async_name(window, last, is_drain=is_drain)] = lowered
    return ProgramSet(plan=plan, programs=programs, policy=async_policy(windows), windows=windows)


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


# ---- frozen prefetch ------------------------------------------------------------------------------------


def lower_prefetch(
    plan: PipelinePlan, *, tied_stages: Collection[int] = (), reduce_each_backward: bool = False
) -> ProgramSet:
    """Return the programs of a plan whose frozen branch is prefetched, without that of a whole mini-batch.

    Args:
        tied_stages, reduce_each_backward: as for `lower_schedules`.

    Raises:
        ScheduleError, PlanError: the plan's own schedules cannot be lowered.
    """
    trained = set(range(len(plan.stages))) - forward_only_stages(plan)

    programs = {}
    for name, part in prefetch_graphs(plan).items():
        lowered = lower_graph(part, part_durations(part))
        if name != "prologue":  # the only one that does not end a mini-batch
            lowered = end_mini_batch(
                plan, lowered, trained, tied_stages=tied_stages, reduce_each_backward=reduce_each_backward
            )
        programs[name] = gather_around_tasks(plan, lowered)
    return ProgramSet(plan=plan, programs=programs, policy=PREFETCH, prefetched=frozen_branch(plan))


def prefetch_graphs(plan: PipelinePlan) -> dict[str, TaskGraph]:
    """Return the tasks and messages of each part, without what ends a mini-batch: of two mini-batches in a row."""
    branch = frozen_branch(plan)
    counts = [plan.num_micro_batches(stage) for stage in range(len(plan.stages))]
    schedules = build_schedules(plan)
    full = build_task_graph(lengthened(plan, 2), _repeated(plan, schedules, 2), is_merged=False)

    def cut(*, is_branch_in: bool, are_others_in: bool, is_merged: bool = True) -> TaskGraph:
        def is_inside(node: int) -> bool:
            stage = full.stage[node]
            is_next = full.micro_batch[node] >= counts[stage]
            return is_next and is_branch_in if stage in branch else are_others_in and not is_next

        return cut_graph(full, is_inside, has_updates=False, is_merged=is_merged)

    prologue = cut(is_branch_in=True, are_others_in=False)
    steady = cut(is_branch_in=True, are_others_in=True, is_merged=False)
    epilogue = cut(is_branch_in=False, are_others_in=True, is_merged=False)
    if plan.shares_ranks:
        _merge(epilogue, turns_of(epilogue, schedules))
        _merge(steady, _turns_in_gaps(steady, prologue, epilogue))
    return {"prologue": prologue, "steady": steady, "epilogue": epilogue}


def _merge(part: TaskGraph, turns: Sequence[int] | None) -> None:
    set_orders(part, merge_chains(part, part.chains, turns, durations=part_durations(part)))


def _turns_in_gaps(steady: TaskGraph, prologue: TaskGraph, epilogue: TaskGraph) -> list[int]:
    """Return a turn for each node of both parts together: the trained stages' as without the branch.

    The branch's tasks are put where their ranks idle, each into the first gap that holds it, so that none delays a
    trained stage's. On rank 1 of the stages ``0F`` (frozen, on ranks 0 and 1), 1 and 2, one micro-batch each:

        epilogue   rank 0   1F0 .   .   .   1B0 1B0      rank 1   .   2F0 2B0 2B0
        steady     rank 0   1F0 0F1 .   .   1B0 1B0      rank 1   0F1 2F0 2B0 2B0
    """
    durations = part_durations(steady)
    start = [float("inf")] * len(durations)  # ends come last
    number = {_key(steady, node): node for node in steady.tasks}
    busy: dict[int, list[tuple[float, float]]] = {rank: [] for rank in steady.rank}
    times = run_task_graph(epilogue, part_durations(epilogue))
    for node in epilogue.tasks:
        start[number[_key(epilogue, node)]] = times.start[node]
        bisect.insort(busy[epilogue.rank[node]], (times.start[node], times.end[node]))
    # Of the branch's tasks those before come first, and its messages take no time here.
    before: dict[int, list[int]] = {node: [] for node in range(len(prologue.stage))}
    for node, follower in enumerate(prologue.next_on_rank):
        if follower >= 0:
            before[follower].append(node)
    for source, target in zip(prologue.source, prologue.target, strict=True):
        before[target].append(source)
    ends = [0.0] * len(prologue.stage)
    times = run_task_graph(prologue, part_durations(prologue))
    for node in sorted(prologue.tasks, key=lambda node: (times.start[node], times.end[node])):
        own, rank = number[_key(prologue, node)], prologue.rank[node]
        ready = max((ends[other] for other in before[node]), default=0.0)
        start[own] = _first_gap(busy[rank], ready, durations[own])
        ends[node] = start[own] + durations[own]
        bisect.insort(busy[rank], (start[own], ends[node]))
    order = sorted(range(len(start)), key=lambda node: start[node])
    turns = [0] * len(order)
    for turn, node in enumerate(order):
        turns[node] = turn
    return turns


def _first_gap(busy: Sequence[tuple[float, float]], ready: float, us: float) -> float:
    """Return when a rank that is busy at these times, in order, first has so many microseconds from ``ready`` on."""
    now = ready
    for begin, end in busy:
        if begin - now >= us:
            break
        now = max(now, end)
    return now


def _key(graph: TaskGraph, node: int) -> tuple[Task, int]:
    return graph.task(node), graph.rank[node]


def repeated_schedules(plan: PipelinePlan, num_mini_batches: int) -> tuple[StageSchedule, ...]:
    """Return the order of every stage in so many mini-batches, one behind the other; the branch is not held back."""
    schedules = build_schedules(plan)
    return _repeated(plan, schedules, num_mini_batches)


def _repeated(
    plan: PipelinePlan, schedules: Sequence[StageSchedule], num_mini_batches: int
) -> tuple[StageSchedule, ...]:
    branch = frozen_branch(plan)
    repeated = []
    for schedule in schedules:
        count = plan.num_micro_batches(schedule.stage)
        firsts = range(0, num_mini_batches * count, count)
        tasks = [moved_task(task, first) for first in firsts for task in schedule.tasks]
        held = num_mini_batches * count if schedule.stage in branch else schedule.num_in_flight
        repeated.append(
            dataclasses.replace(
                schedule,
                tasks=tuple(tasks),
                num_in_flight=held,
                turns=(),
                joined=tuple(first + m for first in firsts for m in schedule.joined),
            )
        )
    return tuple(repeated)


# ---- numbers of later mini-batches ------------------------------------------------------------------------


def moved_task(task: Task, micro_batches: int) -> Task:
    """Return a task as it is numbered after so many micro-batches more."""
    return dataclasses.replace(task, micro_batch=task.micro_batch + micro_batches)


def moved_message(plan: PipelinePlan, message: Message, mini_batches: int) -> Message:
    """Return a message as it is numbered after so many mini-batches more, each stage with its own micro-batches."""
    edge = plan.edges[message.edge]
    stages = (edge.src, edge.dst) if message.direction is Direction.ACTIVATION else (edge.dst, edge.src)
    at_src, at_dst = (mini_batches * plan.num_micro_batches(stage) for stage in stages)
    samples = message.samples
    moved = SampleRange(
        first_sample=samples.first_sample + mini_batches * plan.mini_batch, num_samples=samples.num_samples
    )
    return dataclasses.replace(
        message,
        src_micro_batch=message.src_micro_batch + at_src,
        dst_micro_batch=message.dst_micro_batch + at_dst,
        samples=moved,
    )
