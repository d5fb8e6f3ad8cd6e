"""Zero bubble on a DAG: split backwards, weight gradients where a stage would wait, never more in flight.

This is ZB-H1 of Qi et al. for stage graphs: the input gradient (I) is sent to the stages before at once, the weight
gradient (W) comes later, where there is nothing else to do or the memory of its micro-batch is needed. Three stages,
four micro-batches, F = I = W and B = I + W, with the same 3, 2 and 1 micro-batches in flight:

    1F1B         rank 0  F0  F1  F2  .   .   .   .   B0  B0  F3  B1  B1  .   B2  B2  .   B3  B3
                 rank 1  .   F0  F1  .   .   B0  B0  F2  B1  B1  F3  B2  B2  .   B3  B3  .   .
                 rank 2  .   .   F0  B0  B0  F1  B1  B1  F2  B2  B2  F3  B3  B3  .   .   .   .
    zero bubble  rank 0  F0  F1  F2  .   .   B0  B0  F3  B1  B1  .   B2  B2  .   B3  B3
                 rank 1  .   F0  F1  .   I0  W0  F2  I1  W1  F3  I2  W2  .   I3  W3  .
                 rank 2  .   .   F0  I0  W0  F1  I1  W1  F2  I2  W2  F3  I3  W3  .   .

Orders come from a simulation of all stages together (list scheduling): whenever a stage is free it takes an
input gradient, else a forward, else a weight gradient, whichever can start; stages of other schedules keep
their order. At most ``in_flight`` micro-batches are held, from forward to W. It cannot stop where 1F1B with
those counts does not: what can run stays so until it is run, and 1F1B allows less at every point.

Two choices are open, so that each is tried and the shortest simulation wins: whether a weight gradient runs
before an input gradient when a forward waits only for memory, and whether a stage waits a little for what
arrives soon rather than begin a weight gradient. Two fixed orders are tried too: 1F1B with W right behind I, so that
the result is never slower than 1F1B but for what splitting costs, and ZB-H1 itself: 1F1B at the least counts that
cannot stop, with W as many micro-batches behind I as the limit allows beyond those. List scheduling is no optimum:
what starts now may keep a stage busy when something better arrives.

Deviations: every stage has its own limit (ZB-H1 grants all stages that of the first); a stage that sends no gradient,
as the first one, runs whole backwards, as no stage waits for its input gradient; messages take what the plan's edges
say (`StageEdge.message_us`), nothing where they say nothing, so that the order depends on the plan alone (the simulator
decides with links that are shared whether it pays); the ranks of a stage move together, as in Table 2, so that counts
below Table 2's (which the greedy schedule may find, seeing single ranks) can be too few and are refused.

Source: Zero Bubble (arXiv 2401.10241), section 2
Tests: tests/schedule/test_zero_bubble.py
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gpp_plugin.ir.plan import PipelinePlan, sends_gradients, stage_task_us
from gpp_plugin.ir.schedule import StageSchedule, Task, TaskKind
from gpp_plugin.plugins import Schedule
from gpp_plugin.schedule.build import plan_in_flight
from gpp_plugin.schedule.checks.order_check import LAST_KINDS, has_backwards
from gpp_plugin.schedule.event_loop import nominal_times
from gpp_plugin.schedule.messages import gradient_kinds
from gpp_plugin.schedule.orders.kfkb import one_f_one_b_schedule

_F, _B, _I, _W = TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.INPUT_GRADIENT, TaskKind.WEIGHT_GRADIENT

POLICIES = ((False, 0.0), (False, 0.5), (True, 0.0), (True, 0.5))
"""(whether W runs first for a forward that waits for memory, most waiting before a W over its time)."""


def zero_bubble_schedules(
    plan: PipelinePlan, stages: Iterable[int], others: Mapping[int, StageSchedule]
) -> dict[int, StageSchedule]:
    """Return the orders of ``stages``, simulated together with the fixed orders of all other stages.

    Args:
        stages: indices; each holds at most its ``in_flight`` micro-batches.
        others: schedules of all other stages, without halves.

    Raises:
        ValueError: with these ``in_flight`` no order can run.
    """
    # Six simulations, the fixed orders last: one must win by more than rounding, so ties keep the freer order. Where
    # messages take time the order that is found without them is a fixed one too.
    wanted = sorted(stages)
    timed = nominal_times(plan)
    runs = [
        _ListRun(timed, wanted, others, is_weight_first=is_weight_first, patience=patience)
        for is_weight_first, patience in POLICIES
    ]
    best = min(runs, key=lambda run: run.run())
    limits = [stage.in_flight for stage in plan.stages]
    orders = [
        {index: _delayed_1f1b(plan, index, counts[index]) for index in wanted}
        for counts in (limits, [min(pair) for pair in zip(plan_in_flight(plan), limits, strict=True)])
    ]
    if any(edge.message_us or edge.gradient_us for edge in plan.edges):
        edges = tuple(dataclasses.replace(edge, message_us=0.0, gradient_us=0.0) for edge in plan.edges)
        orders.append(zero_bubble_schedules(dataclasses.replace(plan, edges=edges), wanted, others))
    for fixed in orders:
        run = _ListRun(timed, (), {**others, **fixed})
        try:
            run.run()
        except ValueError:  # beside others' orders the least counts may be too few
            continue
        if run.ended_us < best.ended_us * (1.0 - 1e-9):
            best = run
    return {index: _schedule_of(index, best.orders[index]) for index in wanted}


def _delayed_1f1b(plan: PipelinePlan, stage: int, count: int) -> StageSchedule:
    """Return 1F1B that holds ``count`` from F to I, and as many more from I to W as the stage's limit allows.

    Count 2, limit 3, so that W is one I late, and what is held after each task:

        F0  F1  I0  F2  I1  W0  F3  I2  W1  I3  W2  W3
        1   2   2   3   3   2   3   3   2   2   1   0
    """
    limit, num_micro_batches = plan.stages[stage].in_flight, plan.num_micro_batches(stage)
    if not sends_gradients(plan, stage):
        return one_f_one_b_schedule(stage, num_micro_batches, num_in_flight=limit)
    delay = limit - count
    tasks: list[Task] = []
    for task in one_f_one_b_schedule(stage, num_micro_batches, num_in_flight=count).tasks:
        if task.kind is _F:
            tasks.append(task)
            continue
        tasks.append(dataclasses.replace(task, kind=_I))
        if task.micro_batch >= delay:
            tasks.append(Task(stage=stage, kind=_W, micro_batch=task.micro_batch - delay))
    late = range(max(0, num_micro_batches - delay), num_micro_batches)
    tasks += (Task(stage=stage, kind=_W, micro_batch=micro_batch) for micro_batch in late)
    return StageSchedule(stage=stage, tasks=tuple(tasks), num_in_flight=limit)


def _schedule_of(stage: int, order: list[tuple[TaskKind, int]]) -> StageSchedule:
    held = most = 0
    for kind, _ in order:
        held += (kind is _F) - (kind in LAST_KINDS)
        most = max(most, held)
    tasks = tuple(Task(stage=stage, kind=kind, micro_batch=m) for kind, m in order)
    return StageSchedule(stage=stage, tasks=tasks, num_in_flight=most)


@dataclass(slots=True, kw_only=True, eq=False)
class _Arrivals:
    """What a stage receives from another one.

    Args:
        state: the other stage.
        group: samples of which only the first one of each such group comes from it (1: all of them).
        us: what a message takes.
        receiver: the stage itself.
        due_us: when each message of it arrives, of those that were sent; ``arrived``: how many are there.
    """

    state: _State
    group: int
    receiver: _State
    us: float = 0.0
    due_us: list[float] = field(default_factory=list)
    arrived: int = 0


@dataclass(slots=True, kw_only=True)
class _State:
    """One stage in the simulation: what it is, how far it is, what it runs.

    Args:
        order: fixed tasks; None where the simulation chooses.
        limit: micro-batches it may hold.
        inputs, gradients: what it receives activations and gradients from.
        consumers: what must have taken its activations before it frees them.
        forward_to, backward_to: what its forwards and its backwards are sent by, of other stages.
        watchers: stages that may be able to go on when this one ends a task.
        forwards, backwards, weights: ended so far; ``backwards`` counts B and I.
        ends_us: of the running task; None while it waits.
    """

    index: int
    size: int
    count: int
    limit: int
    order: list[tuple[TaskKind, int]] | None
    is_trained: bool
    is_split: bool
    times_us: dict[TaskKind, float]
    inputs: list[_Arrivals] = field(default_factory=list)
    gradients: list[_Arrivals] = field(default_factory=list)
    consumers: list[tuple[_State, int]] = field(default_factory=list)
    forward_to: list[_Arrivals] = field(default_factory=list)
    backward_to: list[_Arrivals] = field(default_factory=list)
    watchers: list[_State] = field(default_factory=list)
    forwards: int = 0
    backwards: int = 0
    weights: int = 0
    next_in_order: int = 0
    running: TaskKind | None = None
    ends_us: float = 0.0

    def can_run(self, *, is_forward: bool) -> bool:
        """Return whether there is a forward, or a backward, left whose messages have all arrived."""
        done, most = (self.forwards, self.count) if is_forward else (self.backwards, self.forwards)
        needs, end = self.inputs if is_forward else self.gradients, (done + 1) * self.size
        return done < most and all(a.arrived * a.state.size >= _needed(end, a.group) for a in needs)


class _ListRun:
    """One simulation under one policy; `orders` are the tasks each stage ran, `ended_us` when the last one ended."""

    def __init__(
        self,
        plan: PipelinePlan,
        chosen: Iterable[int],
        others: Mapping[int, StageSchedule],
        *,
        is_weight_first: bool = False,
        patience: float = 0.0,
    ) -> None:
        # Each stage is a state machine that runs its forwards in order, its input gradients in order and its weight
        # gradients in order; only which kind comes next is open. So three counts say how far it is, and whether a
        # task may start is a comparison of counts with those of the stages that send to it (`_State.can_run`):
        #
        #     stage 0  forwards 3, backwards 1        stage 1's F2 needs ``forwards >= 3`` of stage 0: it may start
        #     stage 1  forwards 2, backwards 1        stage 0's I1 needs ``backwards >= 2`` of stage 1: it waits
        #
        # (with equal micro-batches; else both sides are multiplied to samples).
        self.orders: list[list[tuple[TaskKind, int]]] = [[] for _ in plan.stages]
        self.ended_us = 0.0
        self._plan = plan
        self._is_weight_first = is_weight_first
        self._patience = patience
        free = set(chosen)
        self._states = [
            _State(
                index=index,
                size=stage.micro_batch_size,
                count=plan.num_micro_batches(index),
                limit=stage.in_flight if index in free else others[index].num_in_flight,
                order=None if index in free else [(t.kind, t.micro_batch) for t in others[index].tasks],
                is_trained=index in free or has_backwards(others[index]),
                is_split=sends_gradients(plan, index),
                times_us={kind: stage_task_us(stage, kind) for kind in TaskKind},
            )
            for index, stage in enumerate(plan.stages)
        ]
        for edge in plan.edges:
            src, dst = self._states[edge.src], self._states[edge.dst]
            # Tensors without a batch axis come with the consumer's first sample only; their gradients are complete with
            # the micro-batch that has this sample, as all others are.
            group = 1 if edge.batch_tensors else plan.stages[edge.dst].local_batch_size
            dst.inputs.append(_Arrivals(state=src, group=group, receiver=dst, us=edge.message_us))
            src.forward_to.append(dst.inputs[-1])
            src.consumers.append((dst, group))
            if any(gradient_kinds(edge)) and src.is_trained and dst.is_trained:
                src.gradients.append(_Arrivals(state=dst, group=1, receiver=src, us=edge.gradient_us))
                dst.backward_to.append(src.gradients[-1])
            src.watchers.append(dst)
            dst.watchers.append(src)

    def run(self) -> float:
        """Run all tasks and return when the last one ends, which `ended_us` keeps.

        Raises:
            ValueError: it stops.
        """
        # Time moves from one end of a task, or of a message that takes time, to the next. All that end at one time end
        # before any stage chooses, so the choice does not depend on the order of stages; only those that something
        # ended for choose again. An event is a time and a stage's number, or -1, -2, ... for messages on their way.
        now = 0.0
        events: list[tuple[float, int]] = []
        on_their_way: list[_Arrivals] = []
        free = self._states
        while True:
            for state in free:
                if state.running is None:
                    kind = self._next_task(state, now)
                    if kind is not None:
                        self._start(state, kind, now)
                        heapq.heappush(events, (state.ends_us, state.index))
            if not events:
                break
            now = events[0][0]
            touched: dict[int, _State] = {}
            while events and events[0][0] == now:
                number = heapq.heappop(events)[1]
                if number < 0:
                    arrivals = on_their_way[-1 - number]
                    arrivals.arrived += 1
                    touched[arrivals.receiver.index] = arrivals.receiver
                    continue
                state = self._states[number]
                for arrivals in self._end(state):
                    arrivals.due_us.append(now + arrivals.us)
                    if arrivals.us > 0.0:
                        on_their_way.append(arrivals)
                        heapq.heappush(events, (arrivals.due_us[-1], -len(on_their_way)))
                    else:
                        arrivals.arrived += 1
                touched[state.index] = state
                touched.update((other.index, other) for other in state.watchers)
            free = [touched[index] for index in sorted(touched)]
        stuck = [s for s in self._states if s.forwards < s.count or (s.is_trained and s.backwards < s.count)]
        if stuck:
            names = ", ".join(f"{self._plan.stages[s.index].name!r} (now {s.limit})" for s in stuck)
            raise ValueError(f"no order can run with these in_flight; raise in_flight of {names}")
        self.ended_us = now
        return now

    def _start(self, state: _State, kind: TaskKind, now: float) -> None:
        done = state.forwards if kind is _F else state.weights if kind is _W else state.backwards
        self.orders[state.index].append((kind, done))
        state.running = kind
        state.ends_us = now + state.times_us[kind]

    def _end(self, state: _State) -> list[_Arrivals]:
        """End what a stage runs, and return what it is sent by."""
        kind, state.running = state.running, None
        if kind is _F:
            state.forwards += 1
            return state.forward_to
        if kind is _W:
            state.weights += 1
            return []
        state.backwards += 1
        state.weights += kind is _B
        return state.backward_to

    def _next_task(self, state: _State, now: float) -> TaskKind | None:
        """Return what a free stage begins now, if anything."""
        if state.order is not None:
            return self._next_in_order(state)
        # The rule, in order: I, because the stage before waits for it; F, because the stage behind does; W, because
        # no stage waits for it, where the stage would idle. A W frees the micro-batch's memory, so a stage that is
        # full and has a forward waiting must run one:
        #
        #     limit 2   F0  F1  I0  (F2 is here, 2 held)  W0  F2  I1  ...
        #
        # With patience a stage that could only run W waits instead, if an I or F will be there before so much of W's
        # time has passed: the W would delay what the others wait for.
        may_forward, may_backward = state.can_run(is_forward=True), state.can_run(is_forward=False)
        is_full = state.forwards - state.weights >= state.limit
        if not state.is_split:  # no stage waits for its backwards
            if may_forward and not is_full:
                return _F
            return _B if may_backward else None
        has_weight = state.weights < state.backwards
        if has_weight and is_full and may_forward and self._is_weight_first:
            return _W
        if may_backward:
            return _I
        if may_forward and not is_full:
            return _F
        if has_weight and (
            (is_full and may_forward)
            or self._arrival_us(state, is_full=is_full) - now >= self._patience * state.times_us[_W]
        ):
            return _W
        return None

    def _next_in_order(self, state: _State) -> TaskKind | None:
        assert state.order is not None
        if state.next_in_order == len(state.order):
            return None
        kind = state.order[state.next_in_order][0]
        if kind is not _W and not state.can_run(is_forward=kind is _F):
            return None
        if kind is _F and not (state.is_trained or _is_released(state)):
            return None
        state.next_in_order += 1
        return kind

    def _arrival_us(self, state: _State, *, is_full: bool) -> float:
        """Return when running tasks of other stages let a forward or an input gradient start; inf if none does."""
        arrival = float("inf")
        if not is_full and state.forwards < state.count:
            arrival = _ready_us(state.inputs, (state.forwards + 1) * state.size, is_forward=True)
        if state.backwards < state.forwards:
            end = (state.backwards + 1) * state.size
            arrival = min(arrival, _ready_us(state.gradients, end, is_forward=False))
        return arrival


def _is_released(state: _State) -> bool:
    """Return whether consumers have taken what a stage without backwards must free before its next forward."""
    end = (state.forwards - state.limit + 1) * state.size
    return end <= 0 or all(
        other.forwards * other.size >= _needed(end, group) for other, group in state.consumers
    )


def _needed(end: int, group: int) -> int:
    """Return up to which sample a stage must be done for a task that takes samples up to ``end``."""
    return (end - 1) // group * group + 1


def _ready_us(arrivals_of: list[_Arrivals], end: int, *, is_forward: bool) -> float:
    """Return when all that feeds a task is there if each stage only ends what it runs; else inf."""
    latest = 0.0
    for arrivals in arrivals_of:
        other = arrivals.state
        count = -(-_needed(end, arrivals.group) // other.size)  # messages of it that the task waits for
        if arrivals.arrived >= count:
            continue
        if len(arrivals.due_us) >= count:
            latest = max(latest, arrivals.due_us[count - 1])
            continue
        is_on_it = other.running is _F if is_forward else other.running in (_B, _I)
        if not is_on_it or len(arrivals.due_us) + 1 < count:
            return float("inf")
        latest = max(latest, other.ends_us + arrivals.us)
    return latest


class ZeroBubble(Schedule):
    """Zero bubble as a stage's schedule: all its stages are ordered together, once the others have their orders."""

    takes_turns = True
    splits_backward = True

    def order(self, plan: PipelinePlan, index: int, behind: Mapping[int, StageSchedule]) -> StageSchedule:
        """Return 1F1B: it stands for the stage until `together` has all stages."""
        return one_f_one_b_schedule(
            index, plan.num_micro_batches(index), num_in_flight=plan.stages[index].in_flight
        )

    def together(
        self, plan: PipelinePlan, stages: Sequence[int], built: Mapping[int, StageSchedule]
    ) -> Mapping[int, StageSchedule]:
        """Return the orders of ``stages`` from one simulation of the whole plan."""
        return zero_bubble_schedules(plan, stages, built)


ZERO_BUBBLE = ZeroBubble()
