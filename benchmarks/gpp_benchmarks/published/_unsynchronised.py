"""The automatic order of Zero Bubble: forwards early, weight gradients where a stage waits or memory is full.

What it makes shortest is the longest span of a stage, not the time from the first task to the last: the paper's
optimizer does not wait for all stages, so that a stage may begin the next mini-batch while others end this one. Ours
does wait (one norm for all), and `schedule.orders.zero_bubble` therefore makes the whole shortest.

Micro-batches go through all stages one after the other, one forward and one input gradient each a round:

1. Before the first input gradient each stage runs as many forwards as memory allows and as fit into its waiting; with
   ``is_eager`` one more, which may delay it.
2. A round runs a forward on the stages where one is left: on a stage only where the stage behind runs one too; with
   ``may_skip`` not where it would delay the stage behind and this stage has waited less than the worst.
3. Before a forward or an input gradient a stage fills its waiting with whole weight gradients; one more where the
   waiting left would make it the worst, or always with ``is_greedy``; and as many as memory needs.

All eight combinations are tried. A micro-batch weighs 1 from its forward to its input gradient, then ``kept`` (what the
weight gradient still needs) to its weight gradient.

Source: Zero Bubble (arXiv 2401.10241), section 3.1
Tests: tests/bench/test_published.py
"""

from __future__ import annotations

import itertools

from gpp_plugin.ir.schedule import Task, TaskKind

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
            more[stage] = min(
                more[stage], max(0, more[stage - 1] - 1)
            )  # what the stage before has sent by then
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
