"""Swap and recompute by brute force: every set of segments, every set of tensors; shares no formula with planners.

A stage runs its blocks in order, forward times f, backward times b, with c micro-batches in flight:

    segments   disjoint intervals of its blocks; one drops the tensors that only its blocks make, keep and read,
               holds what it reads of others and the stage does not keep, and takes its forward once more
    swaps      any tensors that are kept and not dropped; transfers hide behind f + b where forwards and
               backwards take turns, else each way behind its own; what a tensor lacks of FreeTime is waited for
    memory     c (saved - dropped + held - swapped) + largest segment + two largest swapped tensors

Source: this project
Tests: tests/plan/test_joined.py
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence

from gpp_benchmarks._oracle import all_degrees, all_partitions, the_size
from gpp_benchmarks._oracle_costs import (
    block_us,
    least_us,
    limit_of,
    local_samples,
    oracle_plan,
    sample_bytes,
    step_us,
)
from gpp_plugin.ir.block_graph import BlockGraph, SavedTensor
from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.ir.profile import Profile
from gpp_plugin.ir.serialize import fingerprint
from gpp_plugin.plan.request import PlanRequest

Segment = tuple[int, int]
UNITS = 1e6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What one choice adds to a micro-batch, and the bytes one rank then needs."""

    added_us: float
    memory_bytes: float


class StageOracle:
    """All choices of one stage at its number of samples and micro-batches in flight."""

    def __init__(
        self, stage: Stage, graph: BlockGraph, profile: Profile, host_bytes_per_s: float, base_bytes: float
    ) -> None:
        """Take a stage; ``base_bytes`` is its peak without memory optimization."""
        self.in_flight, self.base = stage.in_flight, base_bytes
        self.bytes_per_us = host_bytes_per_s / UNITS
        self.num = len(stage.blocks)
        place = {block: i for i, block in enumerate(stage.blocks)}
        costs, local = {cost.block: cost for cost in profile.costs}, local_samples(stage)
        self.forward = [block_us(costs[block], local)[0] for block in stage.blocks]
        self.backward = [block_us(costs[block], local)[1] for block in stage.blocks]
        # The graph's sizes are of its own number of samples: a tensor has the share of what its first keeper saves at
        # ``local`` samples that it has there.
        charged: dict[str, int] = {}
        for tensor in graph.saved:
            charged[tensor.kept_by[0]] = charged.get(tensor.kept_by[0], 0) + tensor.bytes
        self.tensors: dict[str, tuple[float, set[str]]] = {}
        for tensor in graph.saved:
            if place.keys().isdisjoint(tensor.kept_by):
                continue
            first = costs[tensor.kept_by[0]]
            share = tensor.bytes / charged[tensor.kept_by[0]]
            size = share * (first.saved_bytes_per_sample * local + first.saved_bytes_fixed)
            names = {tensor.name, *tensor.views}
            users = {tensor.made_by, *tensor.kept_by}
            users |= {edge.dst for edge in graph.edges if names & set(edge.tensors)}
            self.tensors[tensor.name] = size, users
        kept = {n for t in graph.saved if t.name in self.tensors for n in (t.name, *t.views)}
        self.reads: list[dict[str, float]] = [{} for _ in stage.blocks]
        self.made_at: dict[str, int] = {}
        for edge in graph.edges:
            for name in edge.tensors:
                if edge.src in place:
                    self.made_at[name] = place[edge.src]
                if edge.dst in place and name not in kept:
                    spec = graph.tensors[name]
                    self.reads[place[edge.dst]][name] = float(local * sample_bytes(spec))
        self._place = place

    def segment_sets(self, start: int = 0) -> Iterator[tuple[Segment, ...]]:
        """Yield every set of disjoint intervals of the stage's blocks from ``start`` on."""
        if start == self.num:
            yield ()
            return
        for rest in self.segment_sets(start + 1):
            yield rest
        for stop in range(start + 1, self.num + 1):
            for rest in self.segment_sets(stop):
                yield ((start, stop), *rest)

    def dropped(self, segment: Segment) -> set[str]:
        """Return the tensors that only blocks of the segment use."""
        blocks = {name for name, i in self._place.items() if segment[0] <= i < segment[1]}
        return {name for name, (_, users) in self.tensors.items() if users <= blocks}

    def held(self, segment: Segment) -> float:
        """Return the bytes of unsaved results from before the segment that it reads."""
        read = {name: size for i in range(*segment) for name, size in self.reads[i].items()}
        return sum(size for name, size in read.items() if self.made_at.get(name, -1) < segment[0])

    def weigh(self, segments: Sequence[Segment], swapped: Sequence[str]) -> Fit:
        """Return what a choice adds and needs."""
        gone = [sum(self.tensors[name][0] for name in self.dropped(segment)) for segment in segments]
        net = sum(gone) - sum(self.held(segment) for segment in segments)
        sizes = [self.tensors[name][0] for name in swapped]
        again = sum(sum(self.forward[a:b]) for a, b in segments)
        forward, backward = sum(self.forward), sum(self.backward)
        transfer = sum(sizes) / self.bytes_per_us
        if self.in_flight > 1:
            waits = max(transfer - forward - backward - again, 0.0)
        else:
            waits = max(transfer - forward, 0.0) + max(transfer - backward - again, 0.0)
        for name, size in zip(swapped, sizes, strict=True):
            after = 1 + max(self._place[user] for user in self.tensors[name][1] if user in self._place)
            gap = sum(self.forward[after:]) + sum(self.backward[after:])
            gap += (self.in_flight - 1) * (forward + backward)
            waits += max(2 * size / self.bytes_per_us - gap, 0.0)
        working = max(gone, default=0.0) + 2 * max(sizes, default=0.0)
        return Fit(
            added_us=again + waits, memory_bytes=self.base - self.in_flight * (net + sum(sizes)) + working
        )

    def best(self, limit: float, ways: Sequence[str]) -> Fit | None:
        """Return the choice that adds least among those that fit, or None."""
        found: Fit | None = None
        for segments in self.segment_sets() if "recompute" in ways else [()]:
            again = sum(sum(self.forward[a:b]) for a, b in segments)
            if found is not None and again >= found.added_us:
                continue
            gone = set().union(*(self.dropped(segment) for segment in segments))
            rest = sorted(set(self.tensors) - gone) if "swap" in ways else []
            for count in range(len(rest) + 1):
                for swapped in itertools.combinations(rest, count):
                    fit = self.weigh(segments, swapped)
                    if fit.memory_bytes <= limit and (found is None or fit.added_us < found.added_us):
                        found = fit
        return found


def with_saved_tensors(rng: random.Random, request: PlanRequest, *, tightness: float) -> PlanRequest:
    """Return the request with what its blocks save as tensors, and memory for ``tightness`` of it all.

    A block keeps tensors of its own, or the result of a block before it, or both.
    """
    graph, costs = request.graph, {cost.block: cost for cost in request.profile.costs}
    before: dict[str, list[str]] = {block.name: [] for block in graph.blocks}
    for edge in graph.edges:
        before[edge.dst].append(edge.src)
    # With a coin, part of what a block saves is the result of one before it, as where it keeps its operand: such a
    # tensor is dropped only by a segment that holds both. A result is kept by one block at most.
    tensors: list[SavedTensor] = []
    taken: set[str] = set()
    for block in graph.blocks:
        whole = int(costs[block.name].saved_bytes_per_sample)
        sources = [name for name in before[block.name] if name not in taken]
        part = 0
        if sources and rng.random() < 0.5:
            source = rng.choice(sources)
            taken.add(source)
            part = rng.randint(1, whole // 2)
            tensors.append(
                SavedTensor(name=f"t{source[1:]}", made_by=source, kept_by=(block.name,), bytes=part)
            )
        tensors.append(
            SavedTensor(
                name=f"{block.name}:inside", made_by=block.name, kept_by=(block.name,), bytes=whole - part
            )
        )
    saved_graph = dataclasses.replace(graph, saved=tuple(tensors))
    local = request.micro_batch_sizes["*"] if request.micro_batch_sizes else 1
    held = sum(c.parameter_bytes + c.gradient_bytes + c.optimizer_bytes for c in costs.values())
    kept = sum(c.saved_bytes_per_sample for c in costs.values()) * local
    device = dataclasses.replace(
        request.cluster.devices[0],
        memory_bytes=round((1.4 * held + kept * tightness) / request.num_ranks),
        host_bytes_per_s=rng.choice([1e4, 1e5, 1e6]) * rng.uniform(1.0, 5.0),
    )
    return dataclasses.replace(
        request,
        graph=saved_graph,
        profile=dataclasses.replace(request.profile, graph=fingerprint(saved_graph)),
        cluster=dataclasses.replace(request.cluster, devices=(device,) * request.num_ranks),
    )


class MemoryBruteForce:
    """Plans of one request with the memory optimization that costs each stage least, by enumeration."""

    def __init__(self, request: PlanRequest) -> None:
        """Take a request of one micro-batch size."""
        self.request = request
        self._known: dict[tuple[object, ...], Fit | None] = {}

    def fitted(self, plan: PipelinePlan) -> PipelinePlan | None:
        """Return the plan with every stage made to fit at the least cost, or None where one cannot."""
        stages = []
        for stage in plan.stages:
            limit = min(limit_of(self.request, rank) for rank in stage.ranks)
            if stage.memory_bytes > limit:
                fit = self._fit(stage, limit)
                if fit is None:
                    return None
                stage = dataclasses.replace(
                    stage, backward_us=stage.backward_us + fit.added_us, memory_bytes=round(fit.memory_bytes)
                )
            stages.append(stage)
        return dataclasses.replace(plan, stages=tuple(stages))

    def _fit(self, stage: Stage, limit: int) -> Fit | None:
        key = stage.blocks, local_samples(stage), stage.in_flight, limit
        if key not in self._known:
            host = min(device.host_bytes_per_s for device in self.request.cluster.devices)
            oracle = StageOracle(
                stage, self.request.graph, self.request.profile, host, float(stage.memory_bytes)
            )
            self._known[key] = oracle.best(limit, self.request.memory_optimization)
        return self._known[key]

    def best_us(self) -> float | None:
        """Return the shortest simulated step of any plan: partition, degrees, memory plans."""
        request, size, best = self.request, the_size(self.request), None
        allowed = [d for d in range(1, request.num_ranks + 1) if size % d == 0]
        for groups in all_partitions(request.graph, request.num_ranks):
            for degrees in all_degrees(len(groups), request.num_ranks, allowed):
                plan = oracle_plan(request, groups, degrees, size)
                us = None if best is not None and least_us(plan) >= best else self.step_us(plan)
                best = us if us is not None and (best is None or us < best) else best
        return best

    def step_us(self, plan: PipelinePlan) -> float | None:
        """Return the step of a finished plan after it is made to fit, or None where it cannot be."""
        fitted = self.fitted(plan)
        return None if fitted is None else step_us(fitted, self.request.cluster)
