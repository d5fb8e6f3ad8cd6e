"""What any stage of one graph takes and needs: times, memory, communication, from a profile and a cluster.

What a stage needs is `memory_formula`, what it takes a sample `us_per_sample`; here the blocks' costs are summed up
and put into them. Arrays are by block, in the order of the graph.

The profile is of the cluster's first device. Where devices are of several speeds, a stage takes what
its slowest rank takes; times without ranks are those of the quickest device, a lower bound of every plan.

Source: PipeDream (SOSP 2019, doi 10.1145/3341301.3359646), section 3.3
Tests: tests/plan/test_memory_breakdown.py, tests/profile/test_measure.py, tests/plan/test_asynchronous.py,
    tests/schedule/test_link_times.py, tests/plan/test_unlike_devices.py
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache, cached_property
from types import MethodType
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np
import numpy.typing as npt

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.block_graph import BlockGraph, BlockSharding
from gpp_plugin.ir.cluster import Cluster, Device, distinct_devices
from gpp_plugin.ir.plan import ALONE, ModelGrid, PipelinePlan, Stage, StageEdge
from gpp_plugin.ir.profile import Profile
from gpp_plugin.ir.step_cost import Buckets, Reductions, StageReductions
from gpp_plugin.ir.tensors import DTYPE_BYTES, TensorSpec
from gpp_plugin.plan.costs.collective_costs import (
    CollectiveCost,
    CollectiveCosts,
    collectives,
    num_reductions,
)
from gpp_plugin.plan.costs.memory_formula import (
    FREE,
    GridPrices,
    boundary_times,
    context_times,
    held_bytes,
    peak_bytes,
    sharded_bytes,
    sharded_graph,
    sharded_profile,
    stashed_bytes,
    sum_times,
    unreduced_bytes,
)
from gpp_plugin.schedule.gathers import EARLY_BUCKET_ELEMENTS
from gpp_plugin.simulate.reductions import early_of_blocks, total_times

# Methods whose results are stored on their instance: each is computed once for each set of arguments.


S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")


def remembered(method: Callable[Concatenate[S, P], R]) -> cached_property[Callable[P, R]]:
    """Return a method that computes each result once; its arguments must be hashable.

    `functools.cache` on a method would hold every instance for ever; here results live as long as their instance. For
    classes that live as long as a search: an instance refers to itself so, and only `gc` frees it.
    """

    def of_instance(instance: Any) -> Callable[P, R]:
        return cast("Callable[P, R]", cache(MethodType(method, instance)))

    return cached_property(of_instance)


# How much longer a device takes than another: what blocks take where a cluster's devices are of several speeds.
#
# A profile says what every block takes on one device, the cluster's first. On another one a block takes as many times
# longer as the roofline model (Williams, Waterman, Patterson, CACM 2009) says of its operations and bytes:
#
#     us(device) = launches x launch_us + max(flops / reached FLOP/s, bytes / bandwidth)
#     time there = time here x us(there) / us(here)
#
#     a block of 64 samples          H100 (495 TFLOP/s, 3.35 TB/s)    A100 (187 TFLOP/s, 2.04 TB/s)
#     product, 10 TFLOP, 1 GB        20.2 ms                          53.5 ms       2.6 times
#     softmax, 1 GFLOP, 10 GB         3.0 ms                           4.9 ms       1.6 times
#
# A stage computes equal samples on each of its ranks, which go on together: it takes what its slowest rank does.

Floats = npt.NDArray[np.float64]


def prefix_sums(values: Floats) -> Floats:
    """Return the sums of the first 0, 1, ... values."""
    return np.concatenate([[0.0], np.cumsum(values)])


def interval_sums(prefix: Floats) -> Floats:
    """Return [start, stop] the sums of intervals, from prefix sums; below the diagonal they mean nothing."""
    return prefix[None, :] - prefix[:, None]


def roofline_us(device: Device, *, flops: Any, num_bytes: Any, launches: Any = 1.0) -> Any:
    """Return microseconds of an operator: launches, then the slower of arithmetic and memory traffic.

    Numbers, or arrays of them.
    """
    flops_per_s, bytes_per_s, launch_us = device.speeds
    return launch_us * launches + np.maximum(flops / flops_per_s, num_bytes / bytes_per_s) * 1e6


class DeviceSpeeds:
    """How many times longer each block of a graph takes on each kind of device than on the first one.

    Args:
        kinds: one device of each speed; the first is what the profile is of.
    """

    def __init__(self, graph: BlockGraph, kinds: Sequence[Device]) -> None:
        self.kinds = tuple(kinds)
        self._flops = np.array([block.flops for block in graph.blocks], dtype=float) / graph.num_samples
        self._launches = np.array([max(1, len(block.nodes)) for block in graph.blocks], dtype=float)
        self._fixed, self._moved = _bytes_of(graph)
        # tensors that cross say that blocks are joined, not what they do
        counted = np.array([block.saved_bytes + block.parameter_bytes for block in graph.blocks])
        self._known = (self._flops > 0) | (counted > 0)

    def factors(self, kind: int, local: float) -> Floats:
        """Return by block the times it takes on a kind of device over that on the first, for ``local`` samples."""
        here, there = self.kinds[0], self.kinds[kind]
        work: dict[str, Any] = {
            "flops": self._flops * local,
            "num_bytes": self._fixed + self._moved * local,
            "launches": self._launches,
        }
        # of a block that nothing is known of, only times: it is taken for a matrix product
        plain = here.speeds[0] / there.speeds[0]
        ratio = roofline_us(there, **work) / np.maximum(roofline_us(here, **work), 1e-12)
        return np.where(self._known, ratio, plain)


def _bytes_of(graph: BlockGraph) -> tuple[Floats, Floats]:
    """Return by block the bytes its forward moves whatever the samples, and for each sample.

    Parameters are read, tensors of other blocks read and written, what is saved for backward written and read.
    """
    touched: dict[str, dict[str, TensorSpec]] = defaultdict(dict)
    for edge in graph.edges:
        for name in edge.tensors:
            touched[edge.src][f"> {name}"] = touched[edge.dst][f"< {name}"] = graph.tensors[name]
    fixed, moved = [], []
    for block in graph.blocks:
        crossing = sum(spec.bytes_for(graph.num_samples) for spec in touched[block.name].values())
        fixed.append(float(block.parameter_bytes))
        moved.append((crossing + 2.0 * block.saved_bytes) / graph.num_samples)
    return np.array(fixed), np.array(moved)


Kinds = tuple[int, ...]
"""Kinds of devices, as numbers in `CostModel.kinds`; none: the quickest."""


class CostModel:
    """Costs of any group of blocks of one graph on one cluster.

    A stage of degree d and micro-batch size b computes b/d samples a rank. Its memory on one rank is `memory_formula`.
    Costs are of stages without context and tensor ranks; those of a stage with some come from `on` or `at_grid`.

    Args:
        grid: context x tensor ranks of the stages that the costs are of; ``prices``: of the collectives of either.
        zero_stage: 1 shares the optimizer state over the stage's ranks, 2 the gradients as well: what one
            backward makes is whole until it is reduced behind it. 3 shares the parameters, whole while tasks run.

    Raises:
        PlanError: the profile lacks a block of the graph.
    """

    def __init__(
        self,
        graph: BlockGraph,
        profile: Profile,
        cluster: Cluster,
        *,
        zero_stage: int = 0,
        grid: ModelGrid = ALONE,
        prices: GridPrices = FREE,
    ) -> None:
        self.grid, self._prices = grid, prices
        self._source = graph, profile
        self._at_grid: dict[tuple[ModelGrid, GridPrices], CostModel] = {}
        self._on_ranks: dict[tuple[ModelGrid, tuple[int, ...]], CostModel] = {}
        self._collectives: dict[tuple[tuple[int, ...], tuple[int, ...]], CollectiveCosts] = {}
        self._sums = sum_times(graph, grid, prices.tensor)
        self._context_sums = context_times(graph, grid, prices.context)
        graph, profile = sharded_graph(graph, grid), sharded_profile(profile, graph, grid)
        costs = profile.by_block()
        missing = [block.name for block in graph.blocks if block.name not in costs]
        if missing:
            raise PlanError(f"the profile has no costs of {missing[:3]}; profile this graph again")
        self.graph = graph
        self.cluster = cluster
        self.zero_stage = zero_stage
        self.index = {block.name: i for i, block in enumerate(graph.blocks)}
        self._costs = [costs[block.name] for block in graph.blocks]
        self.saved_per_sample = np.array([c.saved_bytes_per_sample for c in self._costs], dtype=float)
        self.saved_fixed = np.array([c.saved_bytes_fixed for c in self._costs], dtype=float)
        self.transient_per_sample = np.array([c.transient_bytes_per_sample for c in self._costs], dtype=float)
        self.parameter_bytes = np.array([c.parameter_bytes for c in self._costs], dtype=float)
        self.gradient_bytes = np.array([c.gradient_bytes for c in self._costs], dtype=float)
        self.optimizer_bytes = np.array([c.optimizer_bytes for c in self._costs], dtype=float)
        self.block_edges = [
            (self.index[edge.src], self.index[edge.dst], dict.fromkeys(edge.tensors)) for edge in graph.edges
        ]
        # A block's gradients hold the tied one: it is no larger than the least of them.
        tied = [
            (frozenset(names), min(self.gradient_bytes[self.indices(names)])) for names in graph.tied.values()
        ]
        self._tied = [(blocks, float(num_bytes)) for blocks, num_bytes in tied if num_bytes > 0]
        self.edge_cache: dict[tuple[int, int, tuple[str, ...]], StageEdge] = {}
        self.kinds = distinct_devices(cluster.devices)
        self._kind_of = {device.speeds: kind for kind, device in enumerate(self.kinds)}
        self._speeds = DeviceSpeeds(graph, self.kinds) if len(self.kinds) > 1 else None
        self._on_backends = (
            np.array([profile.backends.get(block.name, 0.0) for block in graph.blocks])
            if profile.backends
            else None
        )
        self._times: dict[tuple[float, int | None], tuple[Floats, Floats, Floats]] = {}
        self._beside = self._sums[0, 4] * np.array([1.0 - c.input_share for c in self._costs])
        self._static = np.stack(
            [
                self.parameter_bytes,
                self.gradient_bytes,
                self.optimizer_bytes,
                self.saved_per_sample,
                self.saved_fixed,
            ]
        )
        self._profile = profile
        self.growth = profile.growth
        # Most gradients of a bucket that is summed beside a backward; where sums are not, all are one.
        each = min((DTYPE_BYTES[t.dtype] for t in graph.tensors.values() if t.requires_grad), default=4)
        self.bucket_bytes = each * EARLY_BUCKET_ELEMENTS if zero_stage + grid.size == 1 else float("inf")
        self.shared = [
            ([self.index[name] for name in storage.blocks], storage.bytes_per_sample, storage.bytes_fixed)
            for storage in profile.shared
        ]
        self.inputs = [
            ([self.index[name] for name in entry.blocks], float(entry.bytes), entry.is_shared_out)
            for entry in profile.inputs
        ]
        self.reader_flags = [
            np.isin(np.arange(len(self.index)), rows).astype(float) for rows, _, _ in self.inputs
        ]
        self._group_bytes: dict[tuple[int, ...], tuple[float, ...]] = {}
        self._group_times: dict[tuple[tuple[int, ...], float, Kinds], tuple[float, float]] = {}
        self._group_reductions: dict[tuple[tuple[int, ...], int, tuple[int, ...]], StageReductions] = {}

    @cached_property
    def _sharding_keys(self) -> dict[str, tuple[BlockSharding, ...]]:
        found: dict[str, tuple[BlockSharding, ...]] = {}
        for each in (*self.graph.sharding, *self.graph.context):
            found[each.block] = (
                *found.get(each.block, ()),
                dataclasses.replace(each, block="", cut_results=()),
            )
        return found

    @property
    def is_mixed(self) -> bool:
        """Return whether devices are of several speeds."""
        return self._speeds is not None

    def kinds_of(self, ranks: Iterable[int] | None) -> Kinds:
        """Return the kinds of devices of these ranks; none where all devices are alike."""
        if self._speeds is None or ranks is None:
            return ()
        devices = self.cluster.devices
        return tuple(sorted({self._kind_of[devices[rank].speeds] for rank in ranks}))

    def block_times(self, local: float, kind: int | None = None) -> tuple[Floats, Floats]:
        """Return forward and backward microseconds of every block for ``local`` samples a rank.

        A block that has a backend takes what it takes there; `stage_times` says what it takes in a stage that trains.

        Args:
            kind: of device; None: of each block the quickest.
        """
        return self._task_times(local, kind)[:2]

    def _task_times(self, local: float, kind: int | None) -> tuple[Floats, Floats, Floats]:
        """Return `block_times` and `hidden_sums`."""
        found = self._times.get((local, kind))
        if found is None:
            forward = np.array([c.forward_us_for(local) for c in self._costs], dtype=float)
            backward = np.array([c.backward_us_for(local) for c in self._costs], dtype=float)
            if self._on_backends is not None:
                forward = np.where(self._on_backends > 0, forward * self._on_backends, forward)
            if self._speeds is not None:
                kinds = range(len(self.kinds)) if kind is None else (kind,)
                factor = np.min([self._speeds.factors(k, local) for k in kinds], axis=0)
                forward, backward = forward * factor, backward * factor
            before, sums = self.tensor_sums(local)
            hidden = np.minimum(_least(self._sums, 5, local), backward * self._beside)
            found = self._times[local, kind] = forward + before, backward + (sums - hidden), hidden
            there, back = self.context_sums(local)
            found = self._times[local, kind] = found[0] + there, found[1] + back, hidden
        return found

    def tensor_sums(self, local: float) -> tuple[Floats, Floats]:
        """Return by block the microseconds of collectives among tensor ranks in a forward, and in a backward."""
        return _least(self._sums, 0, local), _least(self._sums, 2, local)

    def context_sums(self, local: float) -> tuple[Floats, Floats]:
        """Return by block the microseconds of collectives among context ranks in a forward, and in a backward."""
        return _least(self._context_sums, 0, local), _least(self._context_sums, 2, local)

    def hidden_sums(self, local: float, kind: int | None = None) -> Floats:
        """Return by block what of a whole backward's `tensor_sums` its weight gradients hide."""
        return self._task_times(local, kind)[2]

    def at_grid(self, grid: ModelGrid, ranks: Sequence[int] | None = None) -> CostModel:
        """Return the costs of stages of this grid; itself where their blocks are not divided.

        Args:
            ranks: of one stage, data position by data position, as slow as its slowest group; None: the first ones.
        """
        if grid == self.grid or (grid.context == 1 and not self.graph.sharding):
            return self
        # Of ranks 4 to 7 and size 2 the rows are (4, 5) and (6, 7). In nodes of 8 both sum over NVLink; rows (6, 7) and
        # (8, 9) too; but of (7, 8) the stage as a whole takes what its slowest row does, over the network.
        everyone = tuple(range(grid.size) if ranks is None else ranks)
        found = self._on_ranks.get((grid, everyone))
        if found is None:
            prices = self._prices_of(grid, everyone)
            if (grid, prices) not in self._at_grid:
                graph, profile = self._source
                self._at_grid[grid, prices] = CostModel(
                    graph, profile, self.cluster, zero_stage=self.zero_stage, grid=grid, prices=prices
                )
            found = self._on_ranks[grid, everyone] = self._at_grid[grid, prices]
        return found

    def _prices_of(self, grid: ModelGrid, everyone: tuple[int, ...]) -> GridPrices:
        """Return what collectives take in the slowest group of tensor ranks, and of context ranks."""
        # context x tensor 2 x 2 on ranks 0 to 3: tensor groups (0, 1) and (2, 3), context groups (0, 2) and (1, 3)
        found = FREE
        if grid.tensor > 1:
            rows = (everyone[first : first + grid.tensor] for first in range(0, len(everyone), grid.tensor))
            used = (self.collectives(row, everyone) for row in rows)
            found = found._replace(tensor=max(used, key=lambda each: float(each.all_reduce.us(1e6))))
        if grid.context > 1:
            rows = (
                everyone[first + t : first + grid.size : grid.tensor]
                for first in range(0, len(everyone), grid.size)
                for t in range(grid.tensor)
            )
            used = (self.collectives(row, everyone) for row in rows)
            found = found._replace(context=max(used, key=lambda each: float(each.exchange.us(1e6))))
        return found

    def on(self, stage: Stage) -> CostModel:
        """Return the costs of a placed stage by its context and tensor sizes."""
        return self if stage.model_parallel == 1 else self.at_grid(stage.grid, stage.ranks)

    def saved_growth(self, local: float) -> Floats:
        """Return by block the bytes saved at ``local`` samples over those at the samples the graph's sizes refer to.

        What a block saves beside the graph's `SavedTensor`s (masks, which every stage makes itself) grows alike.
        """
        saved = self.saved_per_sample * local + self.saved_fixed
        known = self.saved_per_sample * self.graph.num_samples + self.saved_fixed
        return np.divide(saved, known, out=np.zeros_like(saved), where=known > 0)

    def indices(self, blocks: Iterable[str]) -> list[int]:
        """Return the positions of blocks in the graph."""
        return [self.index[name] for name in blocks]

    def stage_times(
        self, blocks: Sequence[int], local: float, ranks: Sequence[int] | None = None
    ) -> tuple[float, float]:
        """Return forward and backward microseconds of one micro-batch of ``local`` samples a rank.

        Args:
            ranks: those of the stage, the slowest of which counts; None: as quick as any device is.
        """
        return self.times_on(blocks, local, self.kinds_of(ranks))

    def times_on(self, blocks: Sequence[int], local: float, kinds: Kinds) -> tuple[float, float]:
        """Return what `stage_times` does for ranks on these kinds of devices."""
        key = tuple(blocks), local, kinds
        found = self._group_times.get(key)
        if found is None:
            rows = list(blocks)
            each = [self.block_times(local, kind) for kind in kinds or (None,)]
            # with a block that trains, or has no backend, the whole stage runs on torch
            times = self._on_torch(rows)
            before, behind = boundary_times(self.graph, rows, self.grid, self._prices, local)
            found = self._group_times[key] = (
                before + max(float((forward[rows] * times).sum()) for forward, _ in each),
                behind + max(float(backward[rows].sum()) for _, backward in each),
            )
        return found

    def _on_torch(self, rows: Sequence[int]) -> Any:
        """Return by block of a stage how many times what `block_times` says its forward takes."""
        # tower.0 at 0.5, tower.1 at 0.4, head without: {tower.0, tower.1} 1, {tower.1, head} (2.5, 1)
        if self._on_backends is None or (own := self._on_backends[rows]).all():
            return 1.0
        return np.divide(1.0, own, out=np.ones_like(own), where=own > 0)

    def split_times(
        self, blocks: Sequence[int], local: float, ranks: Sequence[int] | None = None
    ) -> tuple[float, float]:
        """Return microseconds of the input gradient and of the weight gradient of one micro-batch, made separately.

        Args:
            ranks: as of `stage_times`.
        """
        found = [self._split_on(blocks, local, kind) for kind in self.kinds_of(ranks) or (None,)]
        return max(first for first, _ in found), max(second for _, second in found)

    def _split_on(self, blocks: Sequence[int], local: float, kind: int | None) -> tuple[float, float]:
        # which are of input gradients, and hide behind nothing
        sums = self.tensor_sums(local)[1] + self.context_sums(local)[1]
        backward = self.block_times(local, kind)[1] - (sums - self.hidden_sums(local, kind))
        second = 0.0
        _, first = boundary_times(self.graph, blocks, self.grid, self._prices, local)
        for block in blocks:
            cost = self._costs[block]
            both = float(backward[block]) * cost.split_factor
            first += both * cost.input_share + float(sums[block])
            second += both * (1.0 - cost.input_share)
        return first, second

    def input_bytes_of(self, counts: Sequence[Floats], degree: int) -> Floats:
        """Return what a rank holds of the mini-batch, for many stages at once.

        Args:
            counts: by input of the mini-batch, by stage, how many of its blocks read it (`reader_flags`).
        """
        held: Floats = np.zeros(())
        for count, (_, num_bytes, is_shared_out) in zip(counts, self.inputs, strict=True):
            held = held + np.where(count > 0.5, num_bytes / (degree if is_shared_out else 1), 0.0)
        return held

    def num_reductions(self, num_micro_batches: int) -> float:
        """Return how many all-reduces of its gradients a stage's reductions in one mini-batch are worth."""
        return num_reductions(num_micro_batches, self.zero_stage)

    def collectives(self, ranks: Sequence[int], beside: Sequence[int] = ()) -> CollectiveCosts:
        """Return what `collective_costs.collectives` does; each group's are worked out once."""
        key = tuple(ranks), tuple(beside)
        if key not in self._collectives:
            self._collectives[key] = collectives(self.cluster, ranks, beside)
        return self._collectives[key]

    def reduction(self, degree: int, grid: ModelGrid = ALONE) -> CollectiveCost:
        """Return what sums gradients of so many data positions once, from the first rank on: of unplaced stages."""
        everyone = range(degree * grid.size)
        return self.collectives(everyone[:: grid.tensor], everyone).reduction(self.zero_stage)

    def reduction_us(self, stage: Stage) -> float:
        """Return microseconds of one all-reduce of a placed stage's gradients, or of what ZeRO has in its place."""
        cost = self.collectives(stage.replicas(0), stage.ranks).reduction(self.zero_stage)
        return float(cost.us(self.group_gradient_bytes(self.indices(stage.blocks))))

    def gather_us(self, blocks: Sequence[int], ranks: Sequence[int], beside: Sequence[int] = ()) -> float:
        """Return microseconds of one gather of a stage's parameters (ZeRO 3)."""
        return float(self.collectives(ranks, beside).gather.us(self.sharded_bytes(blocks, len(ranks))))

    def cost_key(self, block: int) -> tuple[object, ...]:
        """Return everything the profile says of a block but its name: equal keys, equal costs."""
        c = self._costs[block]
        return (
            self._sharding_keys.get(c.block),
            float(self._beside[block]),
            self._profile.backends.get(c.block),
            c.samples,
            c.forward_us,
            c.backward_us,
            c.saved_bytes_per_sample,
            c.saved_bytes_fixed,
            c.parameter_bytes,
            c.gradient_bytes,
            c.optimizer_bytes,
            c.transient_bytes_per_sample,
        )

    def stage_memory(
        self, blocks: Sequence[int], *, degree: int, local: float, in_flight: int, is_optimized: bool = False
    ) -> int:
        """Return the bytes one rank of the stage needs at its peak.

        Args:
            degree: data positions; ZeRO shares out among these and the context ranks of each.
            is_optimized: what is saved may be swapped or recomputed, and so frees no memory for whole gradients
                (`unreduced_bytes`); what swapping and recomputing saves is the caller's to subtract.
        """
        *held, saved, saved_fixed, transient = self._bytes_of(blocks)
        inputs = []
        if self.inputs:
            inputs.append(self._profile.input_bytes([self._costs[row].block for row in blocks], degree))
        each, more = saved * local + saved_fixed, transient * local
        freed = 0.0 if is_optimized else each
        peak = self.peak_bytes(
            held, each, in_flight, degree=degree, transient=more, inputs=inputs, freed=freed
        )
        return int(round(peak))

    def peak_bytes(
        self,
        held: Sequence[Any] | Floats,
        saved: Any,
        in_flight: int,
        *,
        degree: int,
        transient: Any,
        inputs: Iterable[Any] = (),
        freed: Any = None,
    ) -> Any:
        """Return the most bytes one rank needs, of one stage or, as arrays, of many (`memory_formula`).

        Args:
            held: bytes of parameters, of gradients and of optimizer state.
            saved: of one micro-batch.
            inputs: what it holds of the mini-batch, term by term.
            freed: what of ``saved`` frees memory for whole gradients; None: all.
        """
        replicas = degree * self.grid.context
        most = held_bytes(*held, degree=replicas, zero_stage=self.zero_stage)
        for num_bytes in inputs:
            most = most + num_bytes
        freed = saved if freed is None else freed
        most = most + unreduced_bytes(held[1], freed, degree=replicas, zero_stage=self.zero_stage)
        return peak_bytes(most, saved, in_flight, transient=transient)

    def times_of(self, stage: Stage) -> tuple[float, float]:
        """Return `stage_times` of a plan's stage on its ranks."""
        return self.on(stage).stage_times(self.indices(stage.blocks), stage.local_batch_size, stage.ranks)

    def memory_of(self, stage: Stage, in_flight: int) -> int:
        """Return `stage_memory` of a plan's stage that holds so many micro-batches."""
        blocks, local = self.indices(stage.blocks), stage.local_batch_size
        return self.on(stage).stage_memory(blocks, degree=stage.degree, local=local, in_flight=in_flight)

    def sharded_bytes(self, blocks: Sequence[int], replicas: int) -> int:
        """Return the bytes of the blocks' parameters where so many ranks hold parts of them (ZeRO 3); else 0."""
        return int(sharded_bytes(self._bytes_of(blocks)[0], degree=replicas, zero_stage=self.zero_stage))

    def group_gradient_bytes(self, blocks: Sequence[int]) -> float:
        """Return the bytes of the blocks' gradients."""
        return self._bytes_of(blocks)[1]

    def group_saved_bytes(self, blocks: Sequence[int], local: float) -> float:
        """Return the bytes that one micro-batch of ``local`` samples keeps for backward."""
        _, _, _, per_sample, fixed, _ = self._bytes_of(blocks)
        return per_sample * local + fixed

    def pending_bytes(self, blocks: Sequence[int], local: float) -> float:
        """Return what one micro-batch of ``local`` samples holds beside what it saved while it waits for its weight
        gradients.
        """
        return sum(self._costs[block].pending_bytes_per_sample for block in blocks) * local

    def stashed_bytes(self, blocks: Sequence[int], num_versions: int) -> int:
        """Return the bytes of older versions of the blocks' weights: of those that are trained (asynchronous mode)."""
        return int(stashed_bytes(round(self.group_gradient_bytes(blocks)), num_versions))

    def _bytes_of(self, blocks: Sequence[int]) -> tuple[float, ...]:
        """Return sums of parameters, gradients, optimizer, saved a sample, saved; the largest transient."""
        key = tuple(blocks)
        found = self._group_bytes.get(key)
        if found is None:
            rows = list(blocks)
            *held, per_sample, fixed = self._static[:, rows].sum(axis=1).tolist()
            if self._profile.shared or self._profile.tied:
                names = {self._costs[row].block for row in rows}
                more, more_fixed = self._profile.saved_with_others(names)
                per_sample, fixed = per_sample + more, fixed + more_fixed
                again = self._profile.counted_again(names)
                held = [total - twice for total, twice in zip(held, again, strict=True)]
            found = (*held, per_sample, fixed, float(self.transient_per_sample[rows].max(initial=0.0)))
            self._group_bytes[key] = found
        return found

    def update_us(self, blocks: Sequence[int], degree: int, ranks: Sequence[int] | None = None) -> float:
        """Return what an optimizer step takes on the slowest of ``ranks``; None: on the quickest device."""
        _, gradient, optimizer, *_ = self._bytes_of(blocks)
        stepped = (gradient + optimizer) / (degree * self.grid.context if self.zero_stage >= 1 else 1)
        kinds = self.kinds if ranks is None else [self.kinds[kind] for kind in self.kinds_of(ranks) or (0,)]
        return 2e6 * stepped / (max if ranks is None else min)(kind.memory_bytes_per_s for kind in kinds)

    def reduce_times(self, plan: PipelinePlan) -> dict[int, float]:
        """Return by stage what its reductions take in one step, hidden or not (`total_times`)."""
        return total_times(plan, self.reductions(plan))

    def reductions(self, plan: PipelinePlan) -> Reductions:
        """Return what the stages of a plan reduce in one step, and when.

        The gradient of a parameter that several stages hold is summed over all their ranks at the end.
        """
        tied = []
        for number, (blocks, _) in enumerate(self._tied):
            holders = [i for i, stage in enumerate(plan.stages) if not blocks.isdisjoint(stage.blocks)]
            if len(holders) > 1:
                num_bytes = max(self.on(plan.stages[i])._tied[number][1] for i in holders)
                firsts = [rank for i in holders for rank in plan.stages[i].replicas(0)]
                everyone = [rank for i in holders for rank in plan.stages[i].ranks]
                us = float(self.collectives(firsts, everyone).all_reduce.us(num_bytes))
                tied.append((tuple(holders), us))
        return Reductions(stages=tuple(self.on(s)._reductions_of(s) for s in plan.stages), tied=tuple(tied))

    def _reductions_of(self, stage: Stage) -> StageReductions:
        """Return what the ranks of one stage reduce: of the costs of its grid."""
        if stage.num_replicas == 1:
            return StageReductions()
        rows = self.indices(stage.blocks)
        key = tuple(rows), stage.local_batch_size, stage.ranks
        if key not in self._group_reductions:
            gather_us = self.gather_us(rows, stage.replicas(0), stage.ranks)
            self._group_reductions[key] = StageReductions.under(
                self.zero_stage, self.reduction_us(stage), self._early(rows, stage), gather_us
            )
        return self._group_reductions[key]

    def _early(self, rows: Sequence[int], stage: Stage) -> Buckets:
        """Return `StageReductions.early` of a stage's blocks."""
        # a tied gradient is final where the backward ends with it, at the first of its blocks
        sizes = self.gradient_bytes[list(rows)]
        for tie in self._profile.tied:
            for at in [at for at, name in enumerate(stage.blocks) if name in tie.blocks][1:]:
                sizes[at] -= tie.gradient_bytes
        backward = self.block_times(stage.local_batch_size)[1][list(rows)]
        price = self.collectives(stage.replicas(0), stage.ranks).all_reduce
        return early_of_blocks(sizes, backward, self.bucket_bytes, lambda size: float(price.us(size)))


def _least(lines: Floats, row: int, local: float) -> Floats:
    """Return by block the least over lines [line, row, block] of microseconds a task, and in the next row a sample."""
    return cast(Floats, np.min(lines[:, row] + lines[:, row + 1] * local, axis=0))


# What stages and pipelines take, in closed form: the one formula of each, for numbers and for numpy arrays alike.
#
# Legend: B samples of a mini-batch, b of a micro-batch, d ranks of a stage, t microseconds of a stage a sample:
#
#     t  =  max(C / b, L)  +  n R / B
#
#     C  forward and backward of one micro-batch on one rank (b/d samples), what memory optimization adds included
#     L  a sample's way over the stage's d links, activations there and gradients back; it overlaps with computing
#     R  one all-reduce of the stage's gradients (`CostModel.reduction`); n such are what its reductions in a
#        mini-batch are worth
#
# Whatever is waited for beside that (filling and draining, messages out of step) is the business of those who play a
# schedule: the event loop (`schedule.event_loop`), exactly, and `estimate`, quickly. They share what tasks take
# (`stage_task_us`), what messages take (`Cluster.transfer_us`, `Link.occupied_us`) and the reductions
# (`CostModel.reductions`, `collective_costs`), and are built apart, so that a test can hold one against the other.


def us_per_sample(compute_us: Any, size: Any, *, reduce_us: Any = 0.0, link_us: Any = None) -> Any:
    """Return t: what a stage takes a sample while the pipeline is full.

    Args:
        compute_us: C; ``size`` is b.
        reduce_us: n R / B.
        link_us: L; None: messages are not counted.

    >>> us_per_sample(80.0, 4, reduce_us=1.5), float(us_per_sample(80.0, 4, link_us=25.0))
    (21.5, 25.0)
    """
    own = compute_us / size
    return (own if link_us is None else np.maximum(own, link_us)) + reduce_us


def pipelined_samples(mini_batch: int, micro_batch_size: int, levels: int, ramp: float = 1.0) -> float:
    """Return as how many samples of its slowest stage a mini-batch counts: its own, and filling ``levels`` stages.

        stage 0  F0 B0 F1 B1 .. ..       B = 2 b, 3 levels: while the last stage computes 2 micro-batches,
        stage 1  .. F0 B0 F1 B1 ..       the ones before it take 2 more to fill and drain
        stage 2  .. .. F0 B0 F1 B1       2 b + (3 - 1) b = 4 b

    Args:
        ramp: part of the slowest stage's time that the others take.

    >>> pipelined_samples(8, 4, 3)
    16.0
    """
    return mini_batch + ramp * (levels - 1) * micro_batch_size


def full_pipeline_us(mini_batch: int, micro_batch_size: int, levels: int, slowest_us: float) -> float:
    """Return (B + (levels - 1) b) t: the step of a pipeline all of whose stages take ``slowest_us`` a sample.

    >>> full_pipeline_us(8, 4, 3, 10.0)
    160.0
    """
    return slowest_us * pipelined_samples(mini_batch, micro_batch_size, levels)
