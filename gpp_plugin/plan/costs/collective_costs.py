"""What an all-reduce, a reduce-scatter, an all-gather or an all-to-all among ranks takes: the one price, by size.

A price is the quickest of a few algorithms. Each is a straight line, microseconds and microseconds a byte, and levels
of the network work at the same time: the slowest one counts. For S bytes on n ranks, N nodes of q ranks each:

    algorithm        bytes inside a node    bytes out of a node        steps one behind the other
    ring             2 (n-1)/n S a rank     2 (n-1)/n S                2 (n-N) inside, 2 (N-1) between nodes
    tree of nodes    2 S a rank             2 S                        2 (q-1) inside, 2 log2 N between nodes
    switch tree      (1 + 1/q) S a rank     S of 2 nodes, else 2 S     one sum in the switch, 2 log2 N between nodes

An all-gather and a reduce-scatter are half a ring's all-reduce. What leaves a node has all adapters whose ranks take
part, or a link of each rank. Tensor positions of a stage that reduce at the same time share them.

In an all-to-all of tensors of S bytes in all each rank has an nth, and sends every other one an nth of that:
(n-1)/n^2 S a rank, of which q (n-q)/n^2 S leave a node of q ranks. It takes as many steps as an all-gather.

    2 x 8 H100, 1 GB     ring          1.875 GB / 370 GB/s in the node, 1.875 / 400 between          5.07 ms
                         switch tree   1.125 GB / 306 GB/s (measured: 476 of bus bandwidth), 1 / 400  3.68 ms

A level may have measured figures (`MeasuredCollective`): the innermost one's are of its rank; further out they scale
what is described above, as measured over all of the level's ranks.

Of NCCL's model it has no protocols: an algorithm is one line. A tree has half as much to send on two nodes only where
a switch makes its sums: runs on two nodes of A100 show no such gain.

Source: NCCL, src/graph/tuning.cc; nccl-tests, doc/PERFORMANCE.md
Tests: tests/plan/test_collectives.py, tests/plan/test_costs.py
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpp_plugin.ir.cluster import Cluster, Link, MeasuredCollective
from gpp_plugin.ir.plan import PipelinePlan

Line = tuple[float, float]
"""Microseconds of a message without bytes, and of a byte."""
Floats = npt.NDArray[np.float64]
SWITCH_GAIN = 1.1
"""An all-reduce of this many times an all-gather's bus bandwidth is summed in a switch; rings differ by less."""


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """What one kind of collective takes: the least of ``lines``; none: nothing, there is one rank."""

    lines: tuple[Line, ...] = ()

    def us(self, num_bytes: Any, count: float = 1.0) -> Any:
        """Return microseconds of ``count`` equal collectives of ``num_bytes`` together, a number or an array.

        >>> CollectiveCost(((4.0, 0.5), (10.0, 0.1))).us(100.0)
        20.0
        """
        each = [latency * count + num_bytes * per_byte for latency, per_byte in self.lines]
        if not isinstance(num_bytes, np.ndarray):
            return min(each) if each and num_bytes > 0 else 0.0
        return np.where(num_bytes > 0, functools.reduce(np.minimum, each), 0.0) if each else 0.0 * num_bytes

    def times(self, factor: float) -> CollectiveCost:
        """Return what so many of them take."""
        return CollectiveCost(
            tuple((latency * factor, per_byte * factor) for latency, per_byte in self.lines)
        )


class CollectiveCosts(NamedTuple):
    """What a group's all-reduce takes, its all-gather, which is as long as its reduce-scatter, and its all-to-all."""

    all_reduce: CollectiveCost = CollectiveCost()
    gather: CollectiveCost = CollectiveCost()
    exchange: CollectiveCost = CollectiveCost()

    def reduction(self, zero_stage: int) -> CollectiveCost:
        """Return what sums gradients once: an all-reduce, or under ZeRO a reduce-scatter and an all-gather."""
        return self.all_reduce if zero_stage == 0 else self.gather.times(2)


def stack_lines(costs: Sequence[CollectiveCost]) -> tuple[Floats, Floats]:
    """Return [line, cost] microseconds, and microseconds a byte; a column's least is `CollectiveCost.us`."""
    most = max((len(cost.lines) for cost in costs), default=1) or 1
    rows = [[*cost.lines, *[cost.lines[0] if cost.lines else (0.0, 0.0)] * most][:most] for cost in costs]
    found = np.array(rows, dtype=float).reshape(len(costs), most, 2)
    return found[:, :, 0].T, found[:, :, 1].T


def collectives(cluster: Cluster, ranks: Iterable[int], beside: Iterable[int] = ()) -> CollectiveCosts:
    """Return what collectives of ``ranks`` take.

    Args:
        beside: all ranks that run one like it at the same time, such as the other tensor positions of a stage.
    """
    ranks = tuple(sorted(set(ranks)))
    described = _described(cluster, ranks, frozenset(beside) | frozenset(ranks))
    top = _levels(cluster, ranks)[-1:]
    if not top or top[0].number == 0:
        return described
    link = cluster.links[top[0].number]
    if link.all_reduce is None and link.all_gather is None:
        return described
    whole = _described(cluster, tuple(range(link.span)), frozenset(range(link.span)))
    half = (link.span - 1) / link.span
    return CollectiveCosts(
        _scaled(described.all_reduce, whole.all_reduce, link.all_reduce, 2 * half),
        _scaled(described.gather, whole.gather, link.all_gather, half),
        _scaled(described.exchange, whole.gather, link.all_gather, half),
    )


def gather_times(plan: PipelinePlan, cluster: Cluster) -> dict[int, float]:
    """Return by stage the microseconds of one gather of its parameters, where its ranks hold parts of them."""
    return {
        index: float(collectives(cluster, stage.replicas(0), stage.ranks).gather.us(stage.sharded_bytes))
        for index, stage in enumerate(plan.stages)
        if stage.gathered_bytes
    }


class _Level(NamedTuple):
    """A level that divides a group of ranks: the groups of the level inside that it joins, by group of its own."""

    number: int
    steps: int
    """Of a ring that goes round once, those on this level."""
    widest: int
    """The most groups of the level inside that one of its groups joins."""


def _levels(cluster: Cluster, ranks: Sequence[int]) -> list[_Level]:
    """Return the levels that messages among ranks take, from the innermost."""
    # Ranks 0, 1, 8, 9 in nodes of 8: two steps of a ring are inside nodes, one is between them. Ranks 0 and 8: one
    # step, between nodes.
    found, inner = [], tuple(ranks)
    for number, link in enumerate(cluster.links):
        counts = Counter(
            each * (cluster.links[number - 1].span if number else 1) // link.span for each in inner
        )
        if len(inner) > len(counts):
            found.append(_Level(number, len(inner) - len(counts), max(counts.values())))
        inner = tuple(sorted(counts))
    return found


def _described(cluster: Cluster, ranks: Sequence[int], beside: frozenset[int]) -> CollectiveCosts:
    """Return what the algorithms take, with the innermost level's figures as measured."""
    levels, n = _levels(cluster, ranks), len(ranks)
    if not levels:
        return CollectiveCosts()
    share = (n - 1) / n
    ring_us = gather_us = 0.0
    ring = gather = 0.0  # microseconds of a byte that every rank, or every node, sends
    exchange = 0.0  # and of a byte of the whole tensors of an all-to-all
    tree_us = tree = switch_us = switch = 0.0
    has_switch = False
    for level in levels:
        link = cluster.links[level.number]
        if level.number == 0:
            inside = _Innermost.of(cluster)
            ring_us, gather_us = level.steps * inside.reduce_step_us, level.steps * inside.gather_step_us
            ring, gather = inside.reduce_us_per_byte, inside.gather_us_per_byte
            exchange = share / n * gather
            tree_us, tree = 2 * (level.widest - 1) * inside.reduce_step_us, min(level.widest - 1, 2) * ring
            has_switch = inside.switch_us_per_byte > 0
            switch_us, switch = inside.switch_us, (1 + 1 / level.widest) * inside.switch_us_per_byte
            continue
        sent = 1e6 / _bytes_per_s_out(cluster, level.number, ranks, beside)
        ring_us, gather_us = (us + level.steps * link.latency_us for us in (ring_us, gather_us))
        ring, gather = max(ring, sent), max(gather, sent)
        span = cluster.links[level.number - 1].span
        leaving = max(q * (n - q) for q in Counter(rank // span for rank in ranks).values())
        exchange = max(exchange, leaving / n**2 * sent)
        turns = 2 * math.ceil(math.log2(level.widest)) * link.latency_us
        tree_us, tree = tree_us + turns, max(tree, 2 * sent)
        switch_us, switch = switch_us + turns, max(switch, min(level.widest - 1, 2) * sent)
    lines: list[Line] = [(2 * ring_us, 2 * share * ring)]
    if levels[-1].number > 0:
        lines.append((tree_us, tree))
    if has_switch:
        lines.append((switch_us, switch))
    return CollectiveCosts(
        CollectiveCost(_useful(lines)),
        CollectiveCost(((gather_us, share * gather),)),
        CollectiveCost(((gather_us, exchange),)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Innermost:
    """Steps and bytes of a rank on the innermost level, in microseconds."""

    reduce_step_us: float
    gather_step_us: float
    reduce_us_per_byte: float
    gather_us_per_byte: float
    switch_us: float
    switch_us_per_byte: float

    @classmethod
    def of(cls, cluster: Cluster) -> _Innermost:
        # 8 ranks at 476 GB/s take S / 272 GB/s. If a switch makes the sums, a rank sends it its S and an eighth of the
        # sums back meanwhile: 1.125 S at 306 GB/s.
        link = cluster.links[0]
        sum_, gather, n = link.all_reduce, link.all_gather, link.span
        rate = link.bytes_per_s if gather is None else gather.bytes_per_s
        is_switch = sum_ is not None and sum_.bytes_per_s > SWITCH_GAIN * rate and n > 1
        reduced = rate if sum_ is None or is_switch else sum_.bytes_per_s
        step = gather_step = link.latency_us
        if gather is not None and gather.latency_us is not None and n > 1:
            gather_step = gather.latency_us / (n - 1)
        known = None if sum_ is None else sum_.latency_us
        if known is not None and not is_switch and n > 1:
            step = known / (2 * (n - 1))
        in_switch = (n + 1) / (2 * (n - 1)) * sum_.bytes_per_s if sum_ is not None and is_switch else math.inf
        return cls(
            reduce_step_us=step,
            gather_step_us=gather_step,
            reduce_us_per_byte=1e6 / reduced,
            gather_us_per_byte=1e6 / rate,
            switch_us=2 * step if known is None else known,
            switch_us_per_byte=1e6 / in_switch,
        )


def _bytes_per_s_out(cluster: Cluster, number: int, ranks: Sequence[int], beside: frozenset[int]) -> float:
    """Return what leaves the narrowest group of the level inside: through its ranks' links, or their adapters."""
    link, inner = cluster.links[number], cluster.links[number - 1].span
    own, all_ = (Counter(rank // inner for rank in group) for group in (ranks, beside))
    ports = Counter(node for node, _ in {(rank // inner, cluster.port(rank, link)) for rank in beside})
    return min(link.bytes_per_s * ports[node] * count / all_[node] for node, count in own.items())


def _useful(lines: Sequence[Line]) -> tuple[Line, ...]:
    """Return the lines that no other one is below at every size, from the least latency on."""
    found: list[Line] = []
    for line in sorted(lines):
        if not found or line[1] < found[-1][1]:
            found.append(line)
    return tuple(found)


def _scaled(
    own: CollectiveCost, whole: CollectiveCost, measured: MeasuredCollective | None, sent: float
) -> CollectiveCost:
    """Return a price that is to what was measured as its description to that of all the level's ranks.

    Args:
        sent: the part of the bytes that bus bandwidth counts.
    """
    if measured is None:
        return own
    bytes_ = 1e6 * sent / measured.bytes_per_s / min(per_byte for _, per_byte in whole.lines)
    least = min(latency for latency, _ in whole.lines)
    once = 1.0 if measured.latency_us is None or least == 0 else measured.latency_us / least
    return CollectiveCost(tuple((latency * once, per_byte * bytes_) for latency, per_byte in own.lines))


def link_us_per_byte(cluster: Cluster, num_ranks: int) -> float:
    """Return microseconds of a byte on the level that joins ``num_ranks`` aligned consecutive ranks."""
    return float(link_for_span(cluster, num_ranks).occupied_us(1.0))


def link_for_span(cluster: Cluster, num_ranks: int) -> Link:
    """Return the level that joins ``num_ranks`` aligned consecutive ranks."""
    for link in cluster.links:
        if num_ranks <= link.span:
            return link
    return cluster.links[-1]


def num_reductions(num_micro_batches: int, zero_stage: int) -> float:
    """Return n: how many all-reduces of its gradients a stage's reductions in one mini-batch are worth.

    ZeRO 0 takes one; ZeRO 1 a reduce-scatter and an all-gather of parameters, which is as much; ZeRO 2 a
    reduce-scatter, half an all-reduce, behind each backward, and an all-gather, the other half of one. So does ZeRO 3
    where it gathers once a mini-batch (`total_times`).

    >>> num_reductions(4, 0), num_reductions(4, 2)
    (1.0, 2.5)
    """
    return (num_micro_batches + 1) / 2 if zero_stage >= 2 else 1.0


def boundary_us(num_bytes: Any, degree: int, us_per_byte: float) -> Any:
    """Return L: the activations of a sample that enter or leave a stage, and their gradients back, over its d links.

    One formula for every planner. The released PipeDream multiplies the bandwidth by a stage's replicas, the released
    Piper divides the bytes by its degree.

    Args:
        num_bytes: of a sample's activations, in and out.
        us_per_byte: of one rank's link.

    >>> boundary_us(100.0, 4, 0.5)
    25.0
    """
    return num_bytes * (2 * us_per_byte / degree)
