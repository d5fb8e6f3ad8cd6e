"""Zero Bubble's Tables 5 and 9: bubble rates of four orders, from the times that the paper gives.

Nothing is fitted: T_F, T_B, T_W and T_comm of each run are in the tables. A bubble rate is 1 - m (T_F + T_B + T_W) over
the longest span of a stage. The paper prints them to four decimals.

Source: Zero Bubble (arXiv 2401.10241), Tables 3, 5 and 9
Tests: tests/bench/test_published.py
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from gpp_benchmarks.published._plans import (
    chain,
    cluster_of,
    interleaved_orders,
    longest_span_us,
    schedules_of,
    stage_of,
)
from gpp_benchmarks.published._rows import GIVEN, Row
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.schedule import Task, TaskKind
from gpp_plugin.schedule.build import build_schedules

# The automatic order of Zero Bubble: forwards early, weight gradients where a stage waits or memory is full.
#
# What it makes shortest is the longest span of a stage, not the time from the first task to the last: the paper's
# optimizer does not wait for all stages, so that a stage may begin the next mini-batch while others end this one. Ours
# does wait (one norm for all), and `schedule.orders.zero_bubble` therefore makes the whole shortest.
#
# Micro-batches go through all stages one after the other, one forward and one input gradient each a round:
#
# 1. Before the first input gradient each stage runs as many forwards as memory allows and as fit into its waiting; with
#    ``is_eager`` one more, which may delay it.
# 2. A round runs a forward on the stages where one is left: on a stage only where the stage behind runs one too; with
#    ``may_skip`` not where it would delay the stage behind and this stage has waited less than the worst.
# 3. Before a forward or an input gradient a stage fills its waiting with whole weight gradients; one more where the
#    waiting left would make it the worst, or always with ``is_greedy``; and as many as memory needs.
#
# All eight combinations are tried. A micro-batch weighs 1 from its forward to its input gradient, then ``kept`` (what
# the weight gradient still needs) to its weight gradient.

_F, _I, _W = TaskKind.FORWARD, TaskKind.INPUT_GRADIENT, TaskKind.WEIGHT_GRADIENT
_ROUNDING = 1e-9


def shortest_span_orders(
    num_stages: int,
    micro_batches: int,
    *,
    times: tuple[float, float, float],
    message: float,
    limit: float,
    kept: float,
) -> list[list[Task]]:
    """Return the order of every stage of the combination whose longest span is shortest.

    Args:
        times: of F, I and W, the same on all stages.
        limit: most that a stage holds, in micro-batches between F and I.
        kept: what a micro-batch weighs between I and W.

    Raises:
        ValueError: no combination holds no more than the limit.
    """
    found = []
    for is_eager, may_skip, is_greedy in itertools.product((False, True), repeat=3):
        run = _Run(num_stages, micro_batches, times, message, limit, kept, is_greedy=is_greedy)
        try:
            span = run.play(is_eager=is_eager, may_skip=may_skip)
        except _MemoryFull:
            continue
        found.append((span, run.orders))
    if not found:
        raise ValueError(f"{limit:g} micro-batches are too few for {num_stages} stages")
    return min(found, key=lambda each: each[0])[1]


class _MemoryFull(Exception):
    """A forward would exceed the limit, and there is no weight gradient to run before it."""


class _Run:
    """Orders in the making: what each stage has run, until when, and what it holds."""

    def __init__(
        self,
        num_stages: int,
        micro_batches: int,
        times: tuple[float, float, float],
        message: float,
        limit: float,
        kept: float,
        *,
        is_greedy: bool,
    ) -> None:
        self.orders: list[list[Task]] = [[] for _ in range(num_stages)]
        self._stages, self._count = num_stages, micro_batches
        self._times = dict(zip((_F, _I, _W), times, strict=True))
        self._message, self._limit, self._kept = message, limit, kept
        self._is_greedy = is_greedy
        self._done = {kind: [0] * num_stages for kind in (_F, _I, _W)}
        self._end: dict[tuple[TaskKind, int, int], float] = {}
        self._now = [0.0] * num_stages
        self._held = [0.0] * num_stages
        self._waited = [0.0] * num_stages

    def play(self, *, is_eager: bool, may_skip: bool) -> float:
        """Run everything and return the longest span."""
        stages, forwards = range(self._stages), self._done[_F]
        for stage in stages:
            self._put(_F, stage)
        for stage, more in enumerate(self._warm_up(is_eager=is_eager)):
            for _ in range(more):
                self._put(_F, stage)
        for stage in reversed(stages):
            self._put(_I, stage)
        for _ in range(1, self._count):
            for stage, runs in enumerate(self._forwards_of_round(may_skip=may_skip)):
                if runs:
                    self._fill_before(_F, stage)
                    self._put(_F, stage)
            for stage in reversed(stages):
                self._fill_before(_I, stage)
                if stage == 0 and forwards[0] == self._count:
                    self._put_weights(0)  # nobody waits for the first stage's input gradients
                self._put(_I, stage)
        for stage in stages:
            self._put_weights(stage)
        first = self._times[_F]
        return max(self._now[stage] - self._end[_F, stage, 0] + first for stage in stages)

    def _warm_up(self, *, is_eager: bool) -> list[int]:
        """Return how many forwards each stage runs between its first one and its first input gradient."""
        forward, gradient = self._times[_F], self._times[_I]
        more = [0] * self._stages
        # from the last stage up: when the first gradient arrives at a stage, were nobody late
        arrives = self._end[_F, self._stages - 1, 0] + gradient + self._message
        for stage in range(self._stages - 2, -1, -1):
            now, held = self._now[stage], self._held[stage]
            while 1 + more[stage] < self._count and held + 1 <= self._limit + _ROUNDING:
                if (now >= arrives) if is_eager else (now + forward > arrives):
                    break
                now, held, more[stage] = now + forward, held + 1, more[stage] + 1
            arrives = max(now, arrives) + gradient + self._message
        for stage in range(1, self._stages):
            # what the stage before has sent by then
            more[stage] = min(more[stage], max(0, more[stage - 1] - 1))
        return more

    def _forwards_of_round(self, *, may_skip: bool) -> list[bool]:
        done, last = self._done[_F], self._stages - 1
        runs = [
            done[stage] < self._count and not (may_skip and stage < last and self._is_skipped(stage))
            for stage in range(self._stages)
        ]
        for stage in range(last - 1, -1, -1):
            runs[stage] = runs[stage] and (runs[stage + 1] or done[stage + 1] == self._count)
        return runs

    def _is_skipped(self, stage: int) -> bool:
        """Return whether a forward of ``stage`` would come too late for the stage behind, which has one waiting."""
        done = self._done
        if done[_F][stage] < done[_F][stage + 1] + 2:
            return False
        needed = self._now[stage + 1] + self._times[_F] + self._times[_I] + self._message
        if self._now[stage] >= needed:
            return True
        held, weights, us = self._held[stage] + 1, done[_I][stage] - done[_W][stage], 0.0
        while held > self._limit + _ROUNDING and weights:
            held, weights, us = held - self._kept, weights - 1, us + self._times[_W]
        is_late = self._now[stage] + self._times[_F] + us > needed
        return is_late and needed - self._now[stage] <= max(self._waited) - self._waited[stage]

    def _fill_before(self, kind: TaskKind, stage: int) -> None:
        more = 1.0 if kind is _F else self._kept - 1.0
        while self._held[stage] + more > self._limit + _ROUNDING:
            if not self._has_weight(stage):
                raise _MemoryFull
            self._put(_W, stage)
        while self._has_weight(stage) and self._times[_W] <= self._wait(kind, stage):
            self._put(_W, stage)
        wait = self._wait(kind, stage)
        is_worst = wait > max(self._waited) - self._waited[stage]
        if self._has_weight(stage) and wait > 0 and (is_worst or self._is_greedy):
            self._put(_W, stage)

    def _has_weight(self, stage: int) -> bool:
        return self._done[_W][stage] < self._done[_I][stage]

    def _wait(self, kind: TaskKind, stage: int) -> float:
        """Return until when from now a stage waits for its next task of a kind."""
        other = stage - 1 if kind is _F else stage + 1
        if not 0 <= other < self._stages:
            return 0.0
        return self._end[kind, other, self._done[kind][stage]] + self._message - self._now[stage]

    def _put_weights(self, stage: int) -> None:
        while self._has_weight(stage):
            self._put(_W, stage)

    def _put(self, kind: TaskKind, stage: int) -> None:
        number = self._done[kind][stage]
        wait = 0.0 if kind is _W else max(0.0, self._wait(kind, stage))
        if self._done[_F][stage]:
            self._waited[stage] += wait
        self._now[stage] += wait + self._times[kind]
        self._end[kind, stage, number] = self._now[stage]
        self._done[kind][stage] += 1
        self._held[stage] += {_F: 1.0, _I: self._kept - 1.0, _W: -self._kept}[kind]
        self.orders[stage].append(Task(stage=stage, kind=kind, micro_batch=number))


SOURCE = "Zero Bubble"
INTERLEAVED_LIMIT = 0.005
SEQUENCE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model of Table 3, and the chunks a rank that its layers (22, 30, 46, 62; embedding and head one more) make."""

    name: str
    hidden: int
    heads: int
    ranks: int
    chunks: int

    @property
    def kept(self) -> float:
        """Return what a weight gradient still needs, of all that a forward keeps: 32sbh of 34sbh + 5bs²a (Table 1)."""
        return 32.0 / (34.0 + 5.0 * self.heads * SEQUENCE / self.hidden)


@dataclass(frozen=True, slots=True)
class Run:
    """One row: times of F, B and W of a micro-batch on a stage and of a message, in ms; bubble rates."""

    model: Model
    micro_batches: int
    times: tuple[float, float, float]
    message: float
    rates: dict[str, float]

    @property
    def case(self) -> str:
        """Return how the row is called."""
        return f"{self.model.name} p {self.model.ranks} m {self.micro_batches}"

    @property
    def work(self) -> float:
        """Return the time of one rank's tasks."""
        return self.micro_batches * sum(self.times)

    def rate(self, span: float) -> float:
        """Return the bubble rate of a span."""
        return 1.0 - self.work / span


_SMALL = Model(name="1.5B", hidden=2304, heads=24, ranks=8, chunks=3)
_MIDDLE = Model(name="6.2B", hidden=4096, heads=32, ranks=8, chunks=4)
_LARGE = Model(name="14.6B", hidden=5120, heads=40, ranks=16, chunks=3)
_LARGEST = Model(name="28.3B", hidden=6144, heads=48, ranks=32, chunks=2)
SCHEDULES = ("1F1B", "ZB-1p", "ZB-2p", "1F1B-I")
_TABLE = (
    (_SMALL, 24, (18.522, 18.086, 9.337), 0.601, (0.2431, 0.1585, 0.0433, 0.1055)),
    (_SMALL, 32, (18.513, 18.086, 9.331), 0.626, (0.1985, 0.1242, 0.0039, 0.0818)),
    (_SMALL, 64, (18.546, 18.097, 9.321), 0.762, (0.1240, 0.0674, 0.0026, 0.0443)),
    (_MIDDLE, 24, (29.718, 29.444, 19.927), 0.527, (0.2347, 0.1323, 0.0029, 0.0808)),
    (_MIDDLE, 32, (29.802, 29.428, 19.530), 0.577, (0.1898, 0.1045, 0.0022, 0.0628)),
    (_MIDDLE, 64, (29.935, 29.621, 19.388), 0.535, (0.1091, 0.0554, 0.0010, 0.0320)),
    (_LARGE, 48, (11.347, 11.248, 8.132), 0.377, (0.2552, 0.1397, 0.0066, 0.1104)),
    (_LARGE, 64, (11.307, 11.254, 8.101), 0.379, (0.2082, 0.1088, 0.0054, 0.0852)),
    (_LARGE, 128, (11.325, 11.308, 8.109), 0.378, (0.1251, 0.0576, 0.0028, 0.0445)),
    (_LARGEST, 96, (10.419, 10.207, 7.715), 0.408, (0.2646, 0.1421, 0.0038, 0.1493)),
    (_LARGEST, 128, (10.408, 10.204, 7.703), 0.408, (0.2168, 0.1106, 0.0029, 0.1164)),
    (_LARGEST, 256, (10.402, 10.248, 7.698), 0.460, (0.1352, 0.0594, 0.0018, 0.0624)),
)
RUNS = tuple(
    Run(model, m, times, message, dict(zip(SCHEDULES, rates, strict=True)))
    for model, m, times, message, rates in _TABLE
)
_WHY_INTERLEAVED = (
    "the published span is p messages shorter than Megatron's order has them one behind the other: with 2pv - 2 - p "
    "in place of 2pv - 2 messages all twelve rows agree to four decimals"
)
_WHY_TWICE = (
    "the longest span of a stage, as the paper's optimizer does not wait for all stages; ours does, so that this order "
    "is the benchmark's own and no schedule of a plan"
)


def zero_bubble_rows(runs: tuple[Run, ...] = RUNS) -> Iterator[Row]:
    """Yield four rows a run: 1F1B, ZB-1p, ZB-2p and interleaved 1F1B."""
    for run in runs:
        split = run.rate(_span(_chain(run, split=True), run))
        fewer = (split, "split backwards, no more held")
        usual = run.rate(_span(_chain(run), run))
        yield _row(run, "1F1B", usual, 0.0, shorter=fewer)
        granted = _chain(run, split=True, in_flight=run.model.ranks)
        yield _row(run, "ZB-1p", run.rate(_span(granted, run)), 0.0)
        yield _row(run, "ZB-2p", _twice(run), 0.0, why=_WHY_TWICE)
        rate, shorter = _interleaved(run)
        yield _row(run, "1F1B-I", rate, INTERLEAVED_LIMIT, shorter=shorter, why=_WHY_INTERLEAVED)


def _row(
    run: Run,
    schedule: str,
    ours: float,
    limit: float,
    *,
    shorter: tuple[float, str] | None = None,
    why: str = "",
) -> Row:
    rate, order = shorter if shorter and shorter[0] < ours - 5e-5 else (None, "")
    return Row(
        source=SOURCE,
        case=run.case,
        quantity=schedule,
        unit="rate",
        published=run.rates[schedule],
        ours=ours,
        known=GIVEN,
        limit=limit,
        shorter=rate,
        shorter_order=order,
        why=why,
    )


def _chain(run: Run, *, split: bool = False, in_flight: int | None = None) -> PipelinePlan:
    """Return equal stages under 1F1B, or with split backwards, each holding what 1F1B does or ``in_flight``."""
    ranks, schedule = run.model.ranks, "zero_bubble" if split else "1f1b"
    stages = [
        stage_of(index, index, run.times, in_flight=in_flight or ranks - index, schedule=schedule)
        for index in range(ranks)
    ]
    return chain(stages, micro_batches=run.micro_batches)


def _span(plan: PipelinePlan, run: Run) -> float:
    cluster = cluster_of(run.model.ranks, run.message)
    return longest_span_us(plan, build_schedules(plan), cluster=cluster)


def _twice(run: Run) -> float:
    """Return the rate of the paper's automatic order, which holds twice as much as 1F1B on the first stage."""
    ranks = run.model.ranks
    limits = {"limit": 2.0 * ranks, "kept": run.model.kept}
    orders = shortest_span_orders(ranks, run.micro_batches, times=run.times, message=run.message, **limits)
    plan = _chain(run, split=True, in_flight=run.micro_batches)
    cluster = cluster_of(ranks, run.message)
    return run.rate(longest_span_us(plan, schedules_of(orders), cluster=cluster))


def _interleaved(run: Run) -> tuple[float, tuple[float, str]]:
    """Return the rate of Megatron's order, and of our scheduler's with split backwards at the same in-flight counts."""
    model = run.model
    orders = interleaved_orders(model.ranks, run.micro_batches, model.chunks)
    schedules = schedules_of(orders)
    forward, gradient, weight = (time / model.chunks for time in run.times)
    times = forward, gradient, weight
    cluster = cluster_of(model.ranks, run.message)
    whole, split = (
        chain(
            [
                stage_of(i, i % model.ranks, times, in_flight=schedule.num_in_flight, schedule=name)
                for i, schedule in enumerate(schedules)
            ],
            micro_batches=run.micro_batches,
        )
        for name in ("1f1b", "zero_bubble")
    )
    usual = longest_span_us(whole, schedules, cluster=cluster, orders=dict(enumerate(orders)))
    shorter = longest_span_us(split, build_schedules(split), cluster=cluster)
    return run.rate(usual), (run.rate(shorter), "split backwards in chunks, no more held")
