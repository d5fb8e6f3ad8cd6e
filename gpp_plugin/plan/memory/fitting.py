"""What it costs a stage of a graph to fit its device: the least time of recomputing and swapping (joined planning).

A planner that takes "time plus least cost of fitting" for every stage it considers weighs memory optimization
against another partition, more stages and smaller micro-batches. Three answers, each dearer than the one before:

    `least_added_us`            in closed form, as arrays, for all stages of a search's tables (`savings`)
    `StageFitter.estimate`      one stage, for thousands of candidates: segments of equal length run again,
                                those that save most per microsecond first, and the rest is swapped
    `StageFitter.choose`        one stage of a plan, tensor by tensor (`capuchin`; a user's module: `choose_for_module`)

How many micro-batches a stage holds follows from the graph of stages, not from its place in a chain.

Of a finished plan every layer can run again, whatever memory there is (`recompute_fully`).

Source: this project; full recompute, a module that runs again: Chen et al. 2016 (arXiv 1604.06174)
Tests: tests/plan/test_joined.py, tests/plan/test_stage_chain.py, tests/integrations/test_memory.py,
    tests/plan/test_module_memory.py, tests/runtime/test_module_swap.py, tests/stage_graph/test_recompute.py,
    tests/plan/test_full_recompute.py, tests/stage_graph/test_captured.py
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from gpp_plugin.config.key_names import name_of, setting_of
from gpp_plugin.errors import PlanError, PlanInfeasible
from gpp_plugin.ir.plan import (
    MemoryPlan,
    PipelinePlan,
    RecomputedSegment,
    Stage,
    bytes_by_rank,
    joined_breakdown,
)
from gpp_plugin.ir.profile import ModuleMemory
from gpp_plugin.plan.costs.cost_model import CostModel, remembered
from gpp_plugin.plan.costs.estimate import evaluate_us
from gpp_plugin.plan.costs.memory_formula import memory_breakdown
from gpp_plugin.plan.make import layer_bounds, pending_bytes, splits_backwards, with_part_times
from gpp_plugin.plan.memory.capuchin import Interval, StageChoice, StageOptimizer
from gpp_plugin.plan.memory.memory_chain import LENGTHS, StageChain, WholeStage
from gpp_plugin.plan.memory.operator_chain import (
    GraphTensors,
    HostLink,
    PipelineShape,
    SavedTensors,
    Savings,
    UnsavedResults,
    added_us,
    is_in_turn,
    nearest_to_fitting,
)
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.plan.validate_plan import validate_for

# Swap or recompute of a stage that is a user's own module: one block, of which is known what it keeps and when.
#
# Its storages can wait in host memory, each by itself: Capuchin's choice by FreeTime (`capuchin`), on a chain whose
# operators are the times between the last uses of storages; the backward is taken to use them in the opposite order,
# each after the same share of its time. Or the module runs again as a whole before its backward (Chen et al., 2016),
# one segment that keeps what the stage received and its buffers; that gains nothing with one micro-batch in flight,
# whose backward follows its forward, or where what is saved instead is as large. The quicker of both that fits is
# taken.
#
# Not both at a time: what is left to swap when the module runs again is what it received.


class ModuleChain(WholeStage):
    """A user's module as a chain of the times between the last uses of what it keeps.

    Args:
        row: position of its block in the graph.
        local: samples that one rank computes at a time.
    """

    def __init__(
        self, costs: CostModel, module: ModuleMemory, row: int, local: float, *, degree: int
    ) -> None:
        self.costs, self.local, self.rows, self.degree = costs, local, (row,), degree
        numbers = [i for i, storage in enumerate(module.storages) if storage.is_movable]
        saved = [module.storages[i] for i in numbers]
        uses = sorted({storage.last_use for storage in saved} | {1.0})
        shares = np.diff([0.0, *uses])
        forward_us, backward_us = costs.stage_times((row,), local)
        self.names = [module.block] * len(shares)
        self.set_times(shares * forward_us, shares * backward_us)
        place = {use: i for i, use in enumerate(uses)}
        self.tensors = SavedTensors(
            names=tuple(module.storage_names[i] for i in numbers),
            made=np.zeros(len(saved), dtype=np.int64),
            charged=np.zeros(len(saved), dtype=np.int64),
            last=np.array([place[storage.last_use] for storage in saved], dtype=np.int64),
            bytes=np.array([s.bytes_per_sample * local + s.bytes_fixed for s in saved], dtype=float),
        )
        none = np.zeros(0, dtype=np.int64)
        self.unsaved = UnsavedResults(result=none, made=none, reader=none, bytes=np.zeros(0))
        self.crossing = np.zeros(self.num_blocks + 1)
        self.set_tensor_sums()


def choose_for_module(
    module: ModuleMemory, chain: ModuleChain, shape: PipelineShape, *, recompute: bool, swap: bool
) -> StageChoice:
    """Return the quickest choice that makes a stage fit, or the one nearest to that.

    Args:
        chain: of the module; ``shape``: of this one stage.
        recompute, swap: what may be done.
    """
    local = chain.local
    optimizer = StageOptimizer(chain, shape, recompute=recompute, swap=swap)
    choices = [optimizer.weigh(0, *chain.whole), optimizer.fitted(0, *chain.whole, ())]
    memory = whole_again(
        module, local=local, in_flight=shape.in_flight(0), forward_us=float(chain.forward[-1])
    )
    if recompute and memory is not None:
        less = memory.recomputed_bytes
        need = chain.memory_bytes(*chain.whole, 0, shape, is_optimized=True) + memory.working_bytes
        need -= shape.in_flight(0) * less + chain.reused_by_gradients(*chain.whole, less)
        choices.append(
            StageChoice(
                excess_bytes=max(need - shape.limits[0], 0.0),
                us=choices[0].us + memory.added_us,
                memory_bytes=need,
                memory=memory,
            )
        )
    return min(choices, key=lambda choice: choice.key)


def whole_again(
    module: ModuleMemory, *, local: float, in_flight: int, forward_us: float
) -> MemoryPlan | None:
    """Return the plan of a module that runs again as one segment; None where nothing is gained."""
    dropped = round(module.dropped_bytes_per_sample * local + module.dropped_bytes_fixed)
    held = round(module.held_bytes_per_sample * local + module.held_bytes_fixed)
    if in_flight == 1 or dropped <= held:
        return None
    segment = RecomputedSegment(
        blocks=(module.block,), tensors=(), bytes=dropped, held_bytes=held, recompute_us=forward_us
    )
    return MemoryPlan(recomputed=(segment,), working_bytes=dropped)


# What to change so that more fits: of the fullest stage, by what fills it.

_KINDS = {
    "activations": ("activations", "working", "transient"),
    "weights": ("weights", "gathered", "stashed_weights"),
    "gradients and optimizer state": ("gradients", "optimizer"),
    "the mini-batch": ("inputs",),
}


def memory_advice(plan: PipelinePlan, *, zero_stage: int, allowed: Sequence[str]) -> tuple[str, ...]:
    """Return a line on the fullest rank and what would free memory there; none where nothing is predicted.

    Args:
        allowed: of ``recompute`` and ``swap``, what plans may do already.
    """
    known = [held for held in bytes_by_rank(plan) if held.limit]
    if not known:
        return ()
    fullest = max(known, key=lambda held: held.peak / held.limit)
    own = plan.stages_of_rank(fullest.rank)
    part = joined_breakdown([plan.memory[index] for index in own])
    stage = max((plan.stages[index] for index in own), key=lambda stage: stage.memory_bytes)
    where = f"stage {stage.name!r}" if len(own) == 1 else f"rank {fullest.rank} ({part.stage})"
    bytes_of = {kind: sum(getattr(part, name) for name in names) for kind, names in _KINDS.items()}
    largest = max(bytes_of, key=bytes_of.__getitem__)
    changes = _changes(largest, allowed)
    # stage 3 shares out parameters, on ranks of several stages
    if largest == "gradients and optimizer state" and stage.num_replicas > 1 and zero_stage < 2:
        more = setting_of("zero", zero_stage + 1)
        changes.insert(0, f"{more}: this stage has {stage.num_replicas} ranks to share them out")
    if largest == "weights" and stage.num_replicas > 1 and zero_stage < 3 and plan.shares_ranks:
        changes.insert(
            0, f"{setting_of('zero', 3)}: ranks of several stages then hold one of them whole at a time"
        )
    return (
        f"fullest is {where}: {fullest.peak} of {fullest.limit} bytes "
        f"({100 * fullest.peak / fullest.limit:.0f} %), most of it {largest} ({bytes_of[largest]} bytes); to fit more: "
        f"{', '.join(changes)}",
    )


def _changes(largest: str, allowed: Sequence[str]) -> list[str]:
    if largest == "the mini-batch":
        return [f"a smaller {name_of('mini_batch')}", "more ranks for this stage"]
    if largest != "activations":
        return ["more stages (or fewer blocks in this one)"]
    changes = [f"smaller {name_of('micro_batch_sizes')}"]
    if "recompute" not in allowed:
        changes.append(setting_of("memory.recompute", "auto"))
    if "swap" not in allowed:
        changes.append(setting_of("memory.swap", "auto"))
    return [*changes, "more stages"]


FEW = 8
"""Blocks of a stage up to which the best segments are looked for in an estimate."""
NUM_ESTIMATES = 4
"""Of the estimates of a stage, those that are worked out tensor by tensor."""
SHARES = (0.7, 0.4)
"""Of all that a stage can drop, what one segment may work with."""

Rows = tuple[int, ...]


class _Segment(NamedTuple):
    """Some blocks of one micro-batch as one segment, as of `Savings`."""

    net: float
    dropped: float
    again_us: float
    saved: float
    largest: float
    left: float

    @property
    def worth(self) -> float:
        """Return Capuchin's memory saved per second."""
        return self.net / max(self.again_us, 1e-9)


class StageFitter:
    """Fits stages of one request's graph to their devices; results are cached.

    Args:
        request: its ``memory_optimization`` says what may be done; nothing: no stage is changed.
    """

    def __init__(self, request: PlanRequest, costs: CostModel) -> None:
        self.request, self.costs = request, costs
        self.can_recompute = "recompute" in request.memory_optimization
        self.can_swap = "swap" in request.memory_optimization
        devices = request.cluster.devices[: request.num_ranks]
        self._host_bytes_per_s = min(device.host_bytes_per_s for device in devices)
        self.host = HostLink(bytes_per_us=self._host_bytes_per_s / 1e6 if self.can_swap else 0.0)
        self.everything = GraphTensors(costs)

    @remembered
    def on(self, costs: CostModel) -> StageFitter:
        """Return the fitter of stages of other costs, those of a grid (`CostModel.at_grid`)."""
        return self if costs is self.costs else StageFitter(self.request, costs)

    @property
    def is_active(self) -> bool:
        """Return whether there is anything to swap or recompute."""
        is_known = bool(self.everything.names or self.request.profile.modules)
        return is_known and (self.can_recompute or self.can_swap)

    def is_in_turn(self, in_flight: Any) -> Any:
        """Return whether forwards and backwards of a stage take turns."""
        return is_in_turn(self.request.schedule, in_flight)

    @remembered
    def per_block(self, local: float) -> Savings:
        """Return what every block of the graph could save, run again by itself."""
        dropped, held = self.everything.single_segments(local)
        sizes = self.everything.sizes(local)
        saved, largest, left = np.zeros((3, len(dropped)))
        for t, savers in enumerate(self.everything.savers):
            saved[savers[0]] += sizes[t]
            largest[savers[0]] = max(largest[savers[0]], sizes[t])
            if len(self.everything.users[t]) > 1:
                left[savers[0]] = max(left[savers[0]], sizes[t])
        forward, backward = self.costs.block_times(local)
        net = dropped - held
        is_worth = (net > 0) & self.can_recompute
        return Savings(
            net=np.where(is_worth, net, 0.0),
            dropped=np.where(is_worth, dropped, 0.0),
            work=np.where(is_worth, dropped, 0.0),
            again_us=np.where(is_worth, forward, 0.0),
            saved=saved,
            largest=largest,
            left=np.where(is_worth, left, largest),
            forward_us=forward,
            backward_us=backward,
        )

    def estimate(
        self, rows: Rows, *, degree: int, local: float, in_flight: int, limit: int
    ) -> tuple[float, float]:
        """Return (bytes too many, microseconds added to a backward) of a stage; (0, 0) where it fits as it is."""
        plain = self.costs.stage_memory(rows, degree=degree, local=local, in_flight=in_flight)
        if plain <= limit or not self.is_active:
            return max(float(plain - limit), 0.0), 0.0
        return self._estimate(rows, degree, local, in_flight, limit)

    def _optimized_excess(self, rows: Rows, degree: int, local: float, in_flight: int, limit: int) -> float:
        """Return the bytes too many of a stage that swaps or recomputes, before what that saves."""
        need = self.costs.stage_memory(
            rows, degree=degree, local=local, in_flight=in_flight, is_optimized=True
        )
        return float(need - limit)

    @remembered
    def _estimate(
        self, rows: Rows, degree: int, local: float, in_flight: int, limit: int
    ) -> tuple[float, float]:
        excess = self._optimized_excess(rows, degree, local, in_flight, limit)
        steps, _ = self._steps_of(rows, local)
        in_turn = self.is_in_turn(in_flight)
        us = float(added_us(excess, in_flight, steps, self.host, in_turn).min())
        if us < np.inf:
            return 0.0, us
        return max(nearest_to_fitting(excess, in_flight, steps, self.host), 1.0), 0.0

    @remembered
    def _steps_of(self, rows: Rows, local: float) -> tuple[Savings, list[tuple[Rows, ...]]]:
        """Return a stage's ways to run again, by segments of equal length, more and more of them, or as one.

        The list has the segments of each.
        """
        # ``choices`` are [net, dropped, work, again, left] by step: nothing, then for every segmentation its segments
        # that save anything, the one with most bytes a microsecond first, one more each step, then the stage as one.
        # Of blocks a, b, c in segments {a}, {b}, {c} of worth 1, 3, 2 the steps are {b}, {b, c}, {b, c, a}: net,
        # dropped and again add up, the work is the largest so far.
        whole = self._segment(rows, local)
        forward, backward = self.costs.stage_times(rows, local)
        choices = [np.array([[0.0], [0.0], [0.0], [0.0], [whole.largest]])]
        again_by: list[tuple[Rows, ...]] = [()]
        for cuts in self._segmentations(rows, local, whole.dropped) if self.can_recompute else ():
            covered = set(itertools.chain(*cuts))
            rest = [self._segment((row,), local).largest for row in rows if row not in covered]
            found = [self._segment(cut, local) for cut in cuts]
            ranked = sorted(
                ((part, cut) for part, cut in zip(found, cuts, strict=True) if part.net > 0),
                key=lambda pair: -pair[0].worth,
            )
            if not ranked:
                continue
            parts = [part for part, _ in ranked]
            again_by += itertools.accumulate(((cut,) for _, cut in ranked), operator.add)
            sums = np.array([(p.net, p.again_us, p.dropped) for p in parts]).T
            # The largest tensor left to swap is only known to be smaller once every segment runs again.
            left = np.full(len(parts), whole.largest)
            left[-1] = max(*rest, *(p.left if p.net > 0 else p.largest for p in found), 0.0)
            net, again, dropped = np.cumsum(sums, axis=1)
            choices.append(np.stack([net, dropped, np.maximum.accumulate(sums[2]), again, left]))
        if self.can_recompute:
            choices.append(
                np.array([[whole.net], [whole.dropped], [whole.dropped], [whole.again_us], [whole.left]])
            )
            again_by.append((rows,))
        net, dropped, work, again, left = np.concatenate(choices, axis=1)
        steps = Savings(
            net=net,
            dropped=dropped,
            work=work,
            again_us=again,
            saved=whole.saved,
            largest=whole.largest,
            left=left,
            forward_us=forward,
            backward_us=backward,
        )
        return steps, again_by

    def _segmentations(self, rows: Rows, local: float, dropped: float) -> Iterator[list[Rows]]:
        """Yield ways to cut a stage into segments: equal ones, and for few blocks those that save most."""
        for length in LENGTHS:
            if length > 1 and length >= len(rows):
                break
            yield [rows[i : i + length] for i in range(0, len(rows), length)]
        for share in SHARES if 2 < len(rows) <= FEW else ():
            best: list[tuple[float, list[Rows]]] = [(0.0, [])]
            for stop in range(1, len(rows) + 1):
                best.append(best[-1])
                for start in range(stop):
                    part = self._segment(rows[start:stop], local)
                    if part.dropped <= share * dropped and best[start][0] + part.net > best[stop][0]:
                        best[stop] = best[start][0] + part.net, [*best[start][1], rows[start:stop]]
            yield best[-1][1]

    @remembered
    def _segment(self, rows: Rows, local: float) -> _Segment:
        """Return what these blocks save where they run again as one segment."""
        tensors = self.everything
        sizes, results = tensors.sizes(local), tensors.result_sizes(local)
        inside = set(rows)
        numbers = dict.fromkeys(t for row in rows for t in tensors.saved_in[row])
        saved = largest = left = dropped = held = 0.0
        for t in numbers:
            size = float(sizes[t])
            saved, largest = saved + size, max(largest, size)
            if tensors.users[t] <= inside:
                dropped += size
            else:
                left = max(left, size)
        for r in dict.fromkeys(r for row in rows for r in tensors.entering[row]):
            if tensors.results[r][1] not in inside and tensors.result_tensor[r] not in numbers:
                held += float(results[r])
        return _Segment(
            net=dropped - held,
            dropped=dropped,
            again_us=self.costs.stage_times(rows, local)[0],
            saved=saved,
            largest=largest,
            left=left,
        )

    @remembered
    def choose(self, rows: Rows, *, degree: int, local: float, in_flight: int, limit: int) -> StageChoice:
        """Return the cheapest memory optimization found that makes a stage fit, or the nearest to fitting."""
        module = self.request.profile.module([self.costs.graph.blocks[row].name for row in rows])
        if module is not None:
            whole = ModuleChain(self.costs, module, rows[0], local, degree=degree)
            shape = self._shape(whole, in_flight, limit)
            return choose_for_module(module, whole, shape, recompute=self.can_recompute, swap=self.can_swap)
        chain = StageChain(self.everything, rows, local, degree=degree)
        optimizer = StageOptimizer(
            chain,
            self._shape(chain, in_flight, limit),
            menu=chain.menu() if self.can_recompute else (),
            recompute=self.can_recompute,
            swap=self.can_swap,
        )
        choices = [optimizer.optimize(0, *chain.whole)]
        if choices[0].memory is not None:
            # the segments of the best estimates, as intervals of the stage's chain
            excess = self._optimized_excess(rows, degree, local, in_flight, limit)
            steps, again_by = self._steps_of(rows, local)
            us = added_us(excess, in_flight, steps, self.host, self.is_in_turn(in_flight))
            place = {row: i for i, row in enumerate(rows, 1)}
            for i in np.argsort(us, kind="stable")[:NUM_ESTIMATES].tolist():
                segments = sorted((place[cut[0]], place[cut[-1]] + 1) for cut in again_by[i])
                choices.append(optimizer.fitted(0, *chain.whole, segments))
        return min(choices, key=lambda choice: choice.key)

    def _shape(self, chain: WholeStage, in_flight: int, limit: int) -> PipelineShape:
        """Return the place of one stage, whose plan has whole bytes: rounding must not make it exceed its limit."""
        tensors = chain.tensors
        is_whole = np.abs(tensors.bytes - np.rint(tensors.bytes)).max(initial=0.0) < 1e-6
        margin = 0 if is_whole else in_flight * (len(tensors.names) // 2 + 1)
        return PipelineShape(
            num_stages=1,
            num_micro_batches=in_flight,
            limits=(limit - margin,),
            host_bytes_per_s=self._host_bytes_per_s,
            schedule=self.request.schedule,
            counts=(in_flight,),
        )

    def estimated(self, plan: PipelinePlan) -> PipelinePlan:
        """Return a candidate with what it costs each stage to fit, roughly, and without saying how."""
        return self._with_stages(plan, self._estimated)

    def fitted(self, plan: PipelinePlan) -> PipelinePlan:
        """Return the plan whose stages that do not fit have a memory plan, or are as near to fitting as they get."""
        return self._with_stages(plan, self.fitted_stage)

    def _with_stages(self, plan: PipelinePlan, change: Callable[[Stage], Stage]) -> PipelinePlan:
        if not self.is_active:
            return plan
        return dataclasses.replace(plan, stages=tuple(change(stage) for stage in plan.stages))

    def _limit(self, stage: Stage) -> int:
        return min(self.request.rank_limits[rank] for rank in stage.ranks)

    def _place(self, stage: Stage, limit: int) -> dict[str, Any]:
        return {
            "rows": tuple(self.costs.indices(stage.blocks)),
            "degree": stage.degree,
            "local": stage.local_batch_size,
            "in_flight": stage.in_flight,
            "limit": limit,
        }

    def _estimated(self, stage: Stage) -> Stage:
        limit = self._limit(stage)
        if stage.memory_bytes <= limit:
            return stage
        excess, us = self.on(self.costs.on(stage)).estimate(**self._place(stage, limit))
        us *= self._slower(stage)
        return dataclasses.replace(
            stage, backward_us=stage.backward_us + us, memory_bytes=limit + round(excess)
        )

    def fitted_stage(self, stage: Stage, *, stashed_bytes: int = 0, limit: int | None = None) -> Stage:
        """Return a stage without memory plan with one that makes it fit, if it does not as it is.

        Args:
            stashed_bytes: of its ``memory_bytes``, older versions of its weights (asynchronous mode).
            limit: bytes it may use, where others are on its ranks; by default all that these have.
        """
        if limit is None:
            limit = self._limit(stage)
        if stage.memory_bytes <= limit:
            return stage
        own = self.on(self.costs.on(stage))
        choice = own.choose(**self._place(stage, limit - stashed_bytes))
        memory = choice.memory
        if memory is not None and self.costs.is_mixed:
            slower = self._slower(stage)
            again = (dataclasses.replace(s, recompute_us=s.recompute_us * slower) for s in memory.recomputed)
            memory = dataclasses.replace(memory, recomputed=tuple(again))
        return dataclasses.replace(
            stage,
            backward_us=stage.backward_us + (memory.added_us if memory is not None else 0.0),
            memory_bytes=round(choice.memory_bytes) + stashed_bytes,
            memory=memory,
        )

    def _slower(self, stage: Stage) -> float:
        """Return how many times longer a stage's ranks take for its forwards than the quickest devices.

        What is added is worked out on these; waiting for the host, which does not depend on the device, is
        separate in a finished plan only.
        """
        if not self.costs.is_mixed:
            return 1.0
        rows, local = self.costs.indices(stage.blocks), stage.local_batch_size
        costs = self.costs.on(stage)
        least = costs.stage_times(rows, local)[0]
        return costs.stage_times(rows, local, stage.ranks)[0] / least if least > 0 else 1.0


def fitter_for(request: PlanRequest, costs: CostModel) -> StageFitter | None:
    """Return a fitter where the request allows memory optimization and the graph's tensors are known."""
    fitter = StageFitter(request, costs) if request.memory_optimization else None
    return fitter if fitter is not None and fitter.is_active else None


def levels_to_fit(top: int) -> Sequence[int]:
    """Return the levels at which fitting is worked out: all small ones, fewer of the large ones.

    >>> levels_to_fit(20)
    [1, 2, 3, 4, 6, 8, 12, 16, 20]
    """
    found = [1, 2, 3]
    while found[-1] < top:
        found.append(found[-2] * 2)
    return sorted({level for level in found if level < top} | {top})


# Full recompute: every layer of a finished plan runs its forward again before its backward (Chen et al., 2016).
#
# A stage keeps what enters its layers, and for one layer at a time what is inside. That is the classic checkpointing
# of activations, which costs about a forward more whatever memory there is; `capuchin` recomputes what must be.
#
# A layer that drops nothing is left alone, and so is the last one of a stage with a single micro-batch in flight:
# its backward follows its forward. A stage that is the user's own module runs again as a whole (`recompute_modules`).


def recompute_fully(plan: PipelinePlan, request: PlanRequest) -> PipelinePlan:
    """Return the plan with every layer recomputed, and with swaps only where it needs them to fit beside.

    What the plan swapped or recomputed before is replaced.

    Raises:
        PlanError: it is not known what the model keeps for backward.
        PlanInfeasible: a stage does not fit even so.
    """
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    everything = GraphTensors(costs)
    modules = request.profile.modules
    if not everything.names and not modules:
        raise PlanError(
            f"full recompute needs the operators of {plan.model!r}, which is not captured; write "
            f"{setting_of('memory.recompute', 'auto')} and let its modules checkpoint themselves"
        )
    stages = tuple(
        stage
        if request.profile.module(stage.blocks) is not None
        else _recomputed(stage, plan.num_versions(index), request, everything)
        for index, stage in enumerate(plan.stages)
    )
    plan = dataclasses.replace(plan, stages=stages)
    if modules:
        return recompute_modules(plan, request)
    if splits_backwards(plan):
        plan = with_part_times(plan, costs)
    return dataclasses.replace(plan, iteration_us=evaluate_us(plan, costs))


def _recomputed(stage: Stage, num_versions: int, request: PlanRequest, everything: GraphTensors) -> Stage:
    costs = everything.costs.on(stage)
    if costs is not everything.costs:
        everything = GraphTensors(costs)
    rows, local = costs.indices(stage.blocks), stage.local_batch_size
    chain = StageChain(everything, rows, local, degree=stage.degree)
    stash = costs.stashed_bytes(rows, num_versions)
    limit = min(request.rank_limits[rank] for rank in stage.ranks)
    stash += pending_bytes(stage, costs, stage.pending)  # what is held beside all that is saved
    shape = PipelineShape(
        num_stages=1,
        num_micro_batches=stage.in_flight,
        limits=(limit - stash,),
        host_bytes_per_s=min(costs.cluster.devices[rank].host_bytes_per_s for rank in stage.ranks),
        schedule=request.schedule,
        counts=(stage.in_flight,),
    )
    optimizer = StageOptimizer(chain, shape, recompute=True, swap="swap" in request.memory_optimization)
    choice = optimizer.fitted(0, *chain.whole, _layers(optimizer, chain, stage.in_flight))
    if choice.excess_bytes > 0:
        raise PlanInfeasible(_explain(stage, choice, stash, limit, request))
    added = choice.memory.added_us if choice.memory is not None else 0.0
    return dataclasses.replace(
        stage,
        backward_us=costs.stage_times(rows, local, stage.ranks)[1] + added,
        memory_bytes=round(choice.memory_bytes) + stash,
        memory=choice.memory,
    )


def _layers(optimizer: StageOptimizer, chain: StageChain, in_flight: int) -> Sequence[Interval]:
    """Return the layers of a stage that gain something."""
    start, stop = chain.whole
    bounds = [start + bound for bound in layer_bounds(chain.names[start:stop])]
    layers = list(zip(bounds, bounds[1:], strict=False))
    if in_flight == 1:
        layers.pop()
    weighed = optimizer.weigh(0, start, stop, segments=layers).memory
    segments = () if weighed is None else weighed.recomputed
    return [layer for layer, s in zip(layers, segments, strict=True) if s.bytes > s.held_bytes]


def _explain(stage: Stage, choice: StageChoice, stash: int, limit: int, request: PlanRequest) -> str:
    also = " and swapped" if "swap" in request.memory_optimization else ""
    return (
        f"stage {stage.name!r} needs {choice.memory_bytes + stash:.0f} bytes with every layer recomputed{also}, a rank "
        f"of it may use {limit}: {choice.excess_bytes:.0f} too many with {stage.in_flight} micro-batches of "
        f"{stage.local_batch_size} samples in flight; lower {name_of('micro_batch_sizes')}, or add ranks or "
        "stages"
    )


def recompute_modules(plan: PipelinePlan, request: PlanRequest) -> PipelinePlan:
    """Return the plan with all its modules run again, whatever memory there is.

    Those that gain nothing by it stay as they are.

    Raises:
        PlanInfeasible: a stage does not fit even so.
    """
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    stages = tuple(_run_again(stage, costs, request.profile.module(stage.blocks)) for stage in plan.stages)
    changed = dataclasses.replace(plan, stages=stages)
    parts = memory_breakdown(changed, request.profile, graph=request.graph, zero_stage=request.zero_stage)
    needs = [
        old.memory_bytes if new is old else part.total
        for old, new, part in zip(plan.stages, stages, parts, strict=True)
    ]
    changed = changed.with_each(memory_bytes=needs)
    changed = dataclasses.replace(changed, iteration_us=evaluate_us(changed, costs))
    validate_for(changed, request)
    return changed


def _run_again(stage: Stage, costs: CostModel, module: ModuleMemory | None) -> Stage:
    if module is None:
        return stage
    local = stage.local_batch_size
    memory = whole_again(module, local=local, in_flight=stage.in_flight, forward_us=stage.forward_us)
    if memory is None:
        return stage
    return dataclasses.replace(stage, memory=memory, backward_us=costs.times_of(stage)[1] + memory.added_us)
