"""Orders of stages that share ranks, found together: interleaved 1F1B on any graph, whole or split backwards.

On ranks of its own a 1F1B stage alternates as soon as it holds ``in_flight`` micro-batches. Where a rank holds several
stages it is the *rank* that alternates, between forwards and backwards of all its stages (Narayanan et al.). Two ranks,
two stages each (0 and 2, 1 and 3), four micro-batches, F and B of one length:

    rank 0   0F0 0F1 2F0 2F1 0F2 .   2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
    rank 1   .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3

Forwards come in groups of micro-batches, as many as there are ranks: each group through one stage of the rank, then
through the next; backwards the same from the last stage to the first. No rule for picking the task that looks most
urgent finds this order, as ranks wait in it although they could run something. But a simulation in which forwards and
backwards take *equal* times does, without waiting: a free rank takes what it did not take last, a forward or a
backward, of the earliest group, and the other kind where that cannot run. For p ranks of v equal stages each and m
micro-batches, m a multiple of p, the orders take m v (F + B) + (p - 1)(F + B), which is the published length, and a
stage holds no more than GraphPipe's Table 2 gives it on a rank of its own (`in_flight`).

So orders are made by several simulations, of three choices: which times (equal ones or the plan's), how many
micro-batches make a group, and whether a rank alternates or prefers backwards; and of a fourth where the plan's edges
say what messages take (`StageEdge.message_us`): whether ranks wait for them. Each is then run with the plan's times,
messages included, and the shortest is taken, and of equals the one of which the fullest rank holds least. Of split
backwards (zero bubble) the weight gradients fill what is left, and go first where a forward waits for the memory they
hold.

The ranks of a stage run its tasks in one order: the first to come to a choice makes it for all. The choices in the
order they were made are the schedules' `turns`, by which `shared_ranks` puts the tasks of each rank into one order.

In V shapes (rank r of p holds stages r and 2p - 1 - r; zero bubble) a rank's memory is what is limited, and
`in_flight_within` finds the counts. With F, I and W of 1 a stage and the memory of V-Min and V-Half (Qi et al. 2024)
the whole mini-batch takes no longer than those papers' spans; with that of 1F1B the last rank idles up to 2 beyond the
p - 1 forwards before its first, where V-ZB's steady state idles nowhere. Counts are peaks of each stage: where two
stages of a rank peak at different times their sum is up to 3 above the requested limit.

Deviations: Megatron's warm-up is a formula of rank and chunk, here it is what equal times make of it; in the group at
the end, where m is no multiple of p, Megatron refuses and this does not.

Source: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2; V shapes, Controllable Memory (arXiv 2405.15362)
Tests: tests/schedule/test_shared_ranks.py
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gpp_plugin.ir.plan import PipelinePlan, on_own_ranks, sends_gradients, stage_task_us
from gpp_plugin.ir.schedule import StageSchedule, Task, TaskKind
from gpp_plugin.plugins import find_schedule
from gpp_plugin.schedule.build_graph import build_task_graph
from gpp_plugin.schedule.checks.order_check import check_shared_rows, has_backwards
from gpp_plugin.schedule.event_loop import Transfers, nominal_durations, nominal_times, run_task_graph
from gpp_plugin.schedule.shared_ranks import SLACK, Network

_F, _B, _I, _W = TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.INPUT_GRADIENT, TaskKind.WEIGHT_GRADIENT


_Found = tuple[float, Sequence[StageSchedule]]
"""How long orders take, and the orders of all stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Policy:
    """What a rank chooses by.

    Args:
        has_equal_times: the simulation's tasks of a stage take equal times, whatever they take in the plan.
        group: samples that go through one stage of a rank before the next.
        alternates: forwards and backwards take turns; else backwards go first.
        has_links: messages take what the plan's edges say; else nothing.
    """

    has_equal_times: bool
    group: int
    alternates: bool
    has_links: bool


def interleaved_schedules(
    plan: PipelinePlan, schedules: Mapping[int, StageSchedule]
) -> dict[int, StageSchedule]:
    """Return the orders of all stages of a plan whose stages share ranks, with turns.

    Args:
        schedules: of all stages, without halves. Those of stages on ranks of their own stay, and of stages whose
            schedule is no 1F1B and no zero bubble; they stay for all where no other orders can run.

    Raises:
        PlanError: stages of different model rows share a rank.
    """
    check_shared_rows(plan)
    free = {index for index in range(len(plan.stages)) if _is_free(plan, index, schedules[index])}
    chosen = [schedules[index] for index in range(len(plan.stages))]
    if not free:
        return dict(schedules)
    setting = _Setting(plan, chosen, free)
    found = list(_orders_under(setting, {}))
    if not found or found[-1][0] > setting.least_us * (1.0 + SLACK):
        found.append((_length(plan, chosen), chosen))
    return dict(enumerate(_shortest(plan, found)))


def in_flight_within(plan: PipelinePlan, most_held: Mapping[int, float]) -> tuple[int, ...] | None:
    """Return the in-flight counts with which ranks hold at most so much, or None where no order was found.

    Of stages that share ranks it is the rank's memory that is limited, not that of each stage. The counts are those of
    the shortest order found under these limits; every stage reserves memory for one micro-batch of those behind it.

    Args:
        plan: its in-flight counts are not read.
        most_held: by rank, how many micro-batches it may hold, those of all its stages together.
    """
    every = range(len(plan.stages))
    freed = plan.with_each(in_flight=map(plan.num_micro_batches, every))
    chosen = [_template(freed, index) for index in every]
    found = list(_orders_under(_Setting(freed, chosen, set(every)), most_held))
    return tuple(order.num_in_flight for order in _shortest(freed, found)) if found else None


def _orders_under(setting: _Setting, most_held: Mapping[int, float]) -> Iterator[_Found]:
    """Yield the orders of each policy that runs to its end and is not longer than one before it, up to the first that
    no other can be shorter than.
    """
    best = math.inf
    for policy in _policies(setting):
        run = _Run(setting, policy, most_held)
        if run.run(best * (1.0 + SLACK)):
            best = min(best, run.length)
            yield run.length, run.schedules()
            if run.length <= setting.least_us * (1.0 + SLACK):
                return


def _shortest(plan: PipelinePlan, found: Sequence[_Found]) -> Sequence[StageSchedule]:
    """Return the orders that take least time; of those the ones of which the fullest rank holds least, the first."""
    shortest = min(length for length, _ in found) * (1.0 + SLACK)
    ranks = {rank for stage in plan.stages for rank in stage.ranks}
    indices = [plan.stages_of_rank(rank) for rank in ranks]
    return min(
        (orders for length, orders in found if length <= shortest),
        key=lambda orders: max(sum(orders[i].num_in_flight for i in own) for own in indices),
    )


def _is_free(plan: PipelinePlan, index: int, schedule: StageSchedule) -> bool:
    """Return whether a stage's order may be found anew: it shares a rank, and its schedule leaves that open."""
    stage = plan.stages[index]
    is_shared = any(len(plan.stages_of_rank(rank)) > 1 for rank in stage.ranks)
    return (
        is_shared and stage.k == 1 and find_schedule(stage.schedule).takes_turns and has_backwards(schedule)
    )


def _is_split(plan: PipelinePlan, index: int) -> bool:
    return find_schedule(plan.stages[index].schedule).splits_backward and sends_gradients(plan, index)


def _template(plan: PipelinePlan, index: int) -> StageSchedule:
    """Return all tasks of a stage, in an order that stands for any."""
    every = range(plan.num_micro_batches(index))
    tasks = [Task(stage=index, kind=_F, micro_batch=m) for m in every]
    for m in every:
        kinds = (_I, _W) if _is_split(plan, index) else (_B,)
        tasks += (Task(stage=index, kind=kind, micro_batch=m) for kind in kinds)
    return StageSchedule(stage=index, tasks=tuple(tasks), num_in_flight=len(every))


def _policies(setting: _Setting) -> Iterator[_Policy]:
    """Yield what is tried: groups of as many micro-batches as there are places in the pipeline, of one, of all."""
    plan = setting.plan
    places = len({stage.ranks for stage in plan.stages})
    size = max(stage.micro_batch_size for stage in plan.stages)
    groups = dict.fromkeys((min(places * size, plan.mini_batch), size, plan.mini_batch))
    links = (True, False) if any(setting.late) else (False,)
    for has_links, has_equal_times, group, alternates in itertools.product(
        links, (True, False), groups, (True, False)
    ):
        yield _Policy(
            has_equal_times=has_equal_times, group=group, alternates=alternates, has_links=has_links
        )


def _length(plan: PipelinePlan, schedules: Sequence[StageSchedule]) -> float:
    """Return how long the plan takes with these orders, each message what its edge says."""
    graph = build_task_graph(plan, schedules)
    delays = [graph.delay_us(number) for number in range(len(graph.source))]
    transfers = Transfers(occupied_us=[0.0] * len(delays), latency_us=delays) if any(delays) else None
    times = run_task_graph(graph, nominal_durations(graph), transfers=transfers, share_links=False)
    return max(times.end, default=0.0)


def _times(
    plan: PipelinePlan, schedules: Sequence[StageSchedule], *, are_equal: bool
) -> list[dict[TaskKind, float]]:
    """Return by stage what each kind of task takes in the simulation: all parts of a micro-batch the same, or not."""
    found = []
    for stage, schedule in zip(nominal_times(plan).stages, schedules, strict=True):
        times = {kind: stage_task_us(stage, kind) for kind in TaskKind}
        if are_equal and has_backwards(schedule):
            is_split = any(task.kind is _W for task in schedule.tasks)
            part = (times[_F] + (times[_I] + times[_W] if is_split else times[_B])) / (3 if is_split else 2)
            times = dict.fromkeys(TaskKind, part)
        found.append(times)
    return found


_FORWARD, _BACK, _WEIGHT = range(3)
"""Tasks of a micro-batch in a simulation: its forward, its backward or input gradient, its weight gradient."""
_CODE = {_F: _FORWARD, _B: _BACK, _I: _BACK, _W: _WEIGHT}


@dataclass(slots=True, kw_only=True)
class _Order:
    """The order of one stage in the making, shared by all its ranks.

    Args:
        limit: micro-batches it may hold.
        tasks: what has been chosen, (code, micro-batch); all of it, from the start, where the order is fixed.
        turns: of each of the first of those, when a first rank started it.
        total: how many tasks there will be.
        size: samples of a micro-batch.
        forwards, backwards, weights: chosen so far; ``backwards`` counts B and I, ``weights`` B and W.
    """

    is_free: bool
    is_split: bool
    count: int
    limit: int
    total: int
    size: int
    tasks: list[tuple[int, int]]
    turns: list[int] = field(default_factory=list)
    forwards: int = 0
    backwards: int = 0
    weights: int = 0
    most: int = 0

    @property
    def held(self) -> int:
        """Return the micro-batches held after all that has been chosen."""
        return self.forwards - self.weights

    def choose(self, code: int, micro_batch: int) -> None:
        """Append a task."""
        self.tasks.append((code, micro_batch))
        if code == _FORWARD:
            self.forwards += 1
            self.most = max(self.most, self.forwards - self.weights)
            return
        self.backwards += code == _BACK
        self.weights += code == _WEIGHT or not self.is_split

    def options(self) -> list[tuple[int, int]]:
        """Return what may be chosen next, whatever it waits for."""
        found = []
        if self.forwards < self.count and self.forwards - self.weights < self.limit:
            found.append((_FORWARD, self.forwards))
        if self.backwards < self.forwards:
            found.append((_BACK, self.backwards))
        if self.is_split and self.weights < self.backwards:
            found.append((_WEIGHT, self.weights))
        return found

    def kind(self, code: int) -> TaskKind:
        """Return the kind of a task of a free order."""
        return (_F, _I if self.is_split else _B, _W)[code]


_Nodes = tuple[dict[int, int], dict[int, int], dict[int, int]]
"""By code and micro-batch, the node of a stage's task on one rank."""


@dataclass(slots=True, kw_only=True)
class _Unit:
    """A stage on one of its data positions: where its rank is in the stage's order.

    Args:
        done: tasks that were started.
    """

    stage: int
    order: _Order
    nodes: _Nodes
    done: int = 0


class _Setting:
    """What all simulations of a plan have in common: the nodes of each stage on its ranks, and who waits for whom."""

    def __init__(self, plan: PipelinePlan, schedules: Sequence[StageSchedule], free: set[int]) -> None:
        # Who sends what to whom is read off the task graph of the plan on ranks of its own, without its orders: a node
        # then waits for messages alone, and for what holds forward-only stages back.
        self.plan = plan
        self.schedules = schedules
        self.free = free
        self.templates = [_template(plan, i) if i in free else schedules[i] for i in range(len(schedules))]
        separate = on_own_ranks(plan)
        graph = build_task_graph(separate, self.templates)
        self.num_waits = list(graph.num_waits)
        for follower in graph.next_on_rank:
            if follower >= 0:
                self.num_waits[follower] -= 1
        self.durations = nominal_durations(graph)
        # Of each rank its stages with their nodes by task; of each node its rank, and what it takes in simulations.
        self.nodes: dict[int, dict[int, _Nodes]] = {}
        self.rank_of = [0] * len(self.num_waits)
        times = {are_equal: _times(plan, self.templates, are_equal=are_equal) for are_equal in (True, False)}
        self.times = {are_equal: [0.0] * len(self.num_waits) for are_equal in times}
        for index, template in enumerate(self.templates):
            ends = zip(plan.stages[index].data_ranks(0), separate.stages[index].data_ranks(0), strict=True)
            for rank, own in ends:
                row = graph.orders[own]
                nodes: _Nodes = ({}, {}, {})
                for task, node in zip(template.tasks, row, strict=True):
                    nodes[_CODE[task.kind]][task.micro_batch] = node
                    self.rank_of[node] = rank
                    for are_equal, of_stages in times.items():
                        self.times[are_equal][node] = of_stages[index][task.kind]
                self.nodes.setdefault(rank, {})[index] = nodes
        # What waits for a node: at once, and after so many microseconds. Between two stages of a rank nothing travels.
        self.after: list[list[int]] = [list(graph.unlocks.get(n, ())) for n in range(len(self.num_waits))]
        self.late: list[list[tuple[int, float]]] = [[] for _ in self.num_waits]
        for number, (source, target) in enumerate(zip(graph.source, graph.target, strict=True)):
            us = graph.delay_us(number) if self.rank_of[source] != self.rank_of[target] else 0.0
            if us > 0.0:
                self.late[source].append((target, us))
            else:
                self.after[source].append(target)
        network = self._network()
        self.least_us = network.least_us()
        # Of each node what must come after its end, of each rank the least of that and all its work: what a run that
        # has come so far is going to take at least.
        self.tails, _ = network.reversed().longest_starts()
        self.work, self.least_tail = dict.fromkeys(self.nodes, 0.0), dict.fromkeys(self.nodes, math.inf)
        for rank, us, tail in zip(self.rank_of, self.durations, self.tails, strict=False):
            self.work[rank] += us
            self.least_tail[rank] = min(self.least_tail[rank], tail)

    def _network(self) -> Network:
        """Return what waits for what in any order: messages, and each backward for its own forward."""
        after, num_before = [list(others) for others in self.after], list(self.num_waits)
        for own in self.nodes.values():
            for nodes in own.values():
                for code, before in ((_BACK, _FORWARD), (_WEIGHT, _BACK)):
                    for micro_batch, node in nodes[code].items():
                        first = nodes[before].get(micro_batch)
                        if first is not None:
                            after[first].append(node)
                            num_before[node] += 1
        network = Network(rank=self.rank_of, durations=self.durations, after=after, num_before=num_before)
        late = [(node, other, us) for node, others in enumerate(self.late) for other, us in others]
        return network.with_messages(late)


class _Run:
    """One simulation of all ranks under one policy."""

    def __init__(self, setting: _Setting, policy: _Policy, most_held: Mapping[int, float]) -> None:
        self._setting = setting
        self._plan = setting.plan
        self._policy = policy
        self._most_held = most_held
        self._times = setting.times[policy.has_equal_times]
        self._waits = list(setting.num_waits)
        self._orders = [self._order(index, template) for index, template in enumerate(setting.templates)]
        self._units = {
            rank: [_Unit(stage=index, order=self._orders[index], nodes=nodes) for index, nodes in own.items()]
            for rank, own in setting.nodes.items()
        }
        self._is_forward_next = dict.fromkeys(self._units, True)
        self.length = 0.0
        """How long ranks take that run their tasks in this order, with the plan's times."""
        self._until, self._left = dict.fromkeys(self._units, 0.0), dict(setting.work)
        self._arrival = [0.0] * len(setting.after)

    def _order(self, index: int, template: StageSchedule) -> _Order:
        is_free = index in self._setting.free
        return _Order(
            is_free=is_free,
            is_split=is_free and _is_split(self._plan, index),
            count=self._plan.num_micro_batches(index),
            limit=self._plan.stages[index].in_flight,
            total=len(template.tasks),
            size=self._plan.stages[index].micro_batch_size,
            tasks=[] if is_free else [(_CODE[task.kind], task.micro_batch) for task in template.tasks],
        )

    def run(self, most_us: float) -> bool:
        """Run as far as possible; return whether that is to the end, which is no later than ``most_us``."""
        # As in `shared_ranks`, all tasks that end at one time end before any rank chooses. Two clocks run: that of the
        # simulation (``now``), in which tasks may take equal times, and the plan's (`_finish_bound`).
        rank_of, times, waits = self._setting.rank_of, self._times, self._waits
        after, late = self._setting.after, self._setting.late
        ends: list[tuple[float, int]] = []
        busy = dict.fromkeys(self._units, False)
        free = list(self._units)
        number, now = 0, 0.0
        while True:
            for rank in free:
                found = None if busy[rank] else self._next(rank)
                if found is None:
                    continue
                unit, code, micro_batch = found
                if unit.done == len(unit.order.tasks):
                    unit.order.choose(code, micro_batch)
                if unit.done == len(unit.order.turns):
                    unit.order.turns.append(number)
                    number += 1
                unit.done += 1
                if code != _WEIGHT:
                    self._is_forward_next[rank] = code != _FORWARD
                busy[rank] = True
                node = unit.nodes[code][micro_batch]
                if self._finish_bound(node) > most_us:
                    return False
                heapq.heappush(ends, (now + times[node], node))
            if not ends:
                break
            now = ends[0][0]
            free = []
            while ends and ends[0][0] <= now:
                node = heapq.heappop(ends)[1]
                if node < 0:  # a message has come: to the node of this number, counted from -1 downwards
                    reached = [-1 - node]
                else:
                    busy[rank_of[node]] = False
                    free.append(rank_of[node])
                    reached = after[node]
                    for other, us in late[node]:
                        heapq.heappush(ends, (now + us * self._policy.has_links, -1 - other))
                for other in reached:
                    waits[other] -= 1
                    free.append(rank_of[other])
        return all(unit.done == unit.order.total for units in self._units.values() for unit in units)

    def _finish_bound(self, node: int) -> float:
        """Let the node's rank run it, with the plan's times; return what the whole takes at least."""
        # A rank that has run until 70 and has tasks of 30 left, behind the least of which 20 must follow elsewhere,
        # makes it 120.
        setting = self._setting
        rank, us = setting.rank_of[node], setting.durations[node]
        end = self._until[rank] = max(self._until[rank], self._arrival[node]) + us
        self._left[rank] -= us
        self.length = max(self.length, end)
        arrival = self._arrival
        for other in setting.after[node]:
            if arrival[other] < end:
                arrival[other] = end
        for other, late_us in setting.late[node]:
            arrival[other] = max(arrival[other], end + late_us)
        return end + max(setting.tails[node], self._left[rank] + setting.least_tail[rank])

    def schedules(self) -> list[StageSchedule]:
        """Return the orders that a run to the end has made."""
        made = []
        for index, (order, schedule) in enumerate(zip(self._orders, self._setting.schedules, strict=True)):
            turns = tuple(order.turns)
            if not order.is_free:
                made.append(dataclasses.replace(schedule, turns=turns))
                continue
            tasks = tuple(Task(stage=index, kind=order.kind(code), micro_batch=m) for code, m in order.tasks)
            made.append(StageSchedule(stage=index, tasks=tasks, num_in_flight=order.most, turns=turns))
        return made

    def _next(self, rank: int) -> tuple[_Unit, int, int] | None:
        """Return what a free rank begins now, if anything."""
        best: tuple[_Unit, int, int] | None = None
        best_key: tuple[int, int, int, int] | None = None
        waits = self._waits
        for unit in self._units[rank]:
            order, nodes, done = unit.order, unit.nodes, unit.done
            is_fixed = done < len(order.tasks)
            if is_fixed:
                options = [order.tasks[done]]
            elif order.is_free:
                options = order.options()
            else:
                continue
            for code, micro_batch in options:
                if waits[nodes[code][micro_batch]]:
                    continue
                if code == _FORWARD and not is_fixed and not self._fits(rank, unit):
                    continue
                key = self._key(rank, unit, code, micro_batch)
                if best_key is None or key < best_key:
                    best_key, best = key, (unit, code, micro_batch)
        return best

    def _fits(self, rank: int, unit: _Unit) -> bool:
        """Return whether a rank may hold one more micro-batch of a stage, and still one of each stage behind."""
        if rank not in self._most_held:
            return True
        others = self._units[rank]
        held = sum(other.order.held for other in others)
        reserved = sum(
            other.stage > unit.stage and other.order.held == 0 and other.order.forwards < other.order.count
            for other in others
        )
        return held + reserved + 1 <= self._most_held[rank]

    def _key(self, rank: int, unit: _Unit, code: int, micro_batch: int) -> tuple[int, int, int, int]:
        """Return what a rank compares: whether its kind is due, its group, how far along it is."""
        order = unit.order
        group = micro_batch * order.size // self._policy.group
        is_forward_due = self._policy.alternates and self._is_forward_next[rank]
        if code == _WEIGHT:
            is_wanted = order.is_free and order.held >= order.limit and order.forwards < order.count
            is_waiting = is_wanted and not self._waits[unit.nodes[_FORWARD][order.forwards]]
            return (0 if is_waiting and is_forward_due else 2, group, -unit.stage, micro_batch)
        is_forward = code == _FORWARD
        return (
            0 if is_forward == is_forward_due else 1,
            group,
            unit.stage if is_forward else -unit.stage,
            micro_batch,
        )
