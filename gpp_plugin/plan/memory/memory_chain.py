"""From a partition of operators with its memory optimization to a PipelinePlan, for any planner of the kind.

Source: DawnPiper (arXiv 2505.05856), section 4, Algorithm 1
Tests: tests/plan/test_dawnpiper.py, tests/plan/test_joined.py, tests/plan/test_stage_chain.py
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from gpp_plugin.config.key_names import name_of, setting_of
from gpp_plugin.errors import PlanInfeasible
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.plan.costs.cost_model import CostModel, Floats
from gpp_plugin.plan.costs.estimate import evaluate_us
from gpp_plugin.plan.make import StageDraft, build_plan
from gpp_plugin.plan.memory.capuchin import (
    CAPS,
    LEAST_PRICE,
    PRICES,
    Segments,
    StageChoice,
    StageOptimizer,
    find_segments,
)
from gpp_plugin.plan.memory.operator_chain import (
    GraphTensors,
    OperatorChain,
    PipelineShape,
    TensorChain,
    chain_results,
    chain_tensors,
)
from gpp_plugin.plan.request import PlanRequest, batch_rules, limit_gb

# The blocks of one stage of a graph as a chain, so that what is worked out for chains applies to any stage.
#
# Position 0 stands for all blocks outside that the stage reads from, the last position for all that read from
# it; neither costs anything. In between are the stage's blocks in the order of the graph, which is the order they
# run in. So a tensor that comes from outside, or is read there, begins or ends at a position that no recomputed
# segment contains: it is never dropped, and what a segment reads of it unsaved must be held.
#
# A tensor that blocks of several stages keep is held by each of those stages, charged to the first block there that
# saves it.

MENU = tuple((price, cap) for price in (*PRICES[::2], LEAST_PRICE) for cap in (1.0, *CAPS[:3]))
"""Prices and caps for the blocks of one stage: few, and large."""
LENGTHS = (1, 2, 3, 4, 6, 8)
"""Blocks a segment of equal segments has."""


class WholeStage(TensorChain):
    """A chain that is one stage, of which nothing is cut off.

    Args:
        rows: positions of its blocks in the graph.
        degree: its ranks.
    """

    rows: tuple[int, ...]
    degree: int

    @property
    def whole(self) -> tuple[int, int]:
        """Return the interval of the stage's own operators."""
        return 0, self.num_blocks

    def memory_bytes(
        self, start: int, stop: int, stage: int, shape: PipelineShape, *, is_optimized: bool = False
    ) -> float:
        """Return the peak of the whole stage."""
        assert (start, stop) == self.whole
        return float(
            self.costs.stage_memory(
                self.rows,
                degree=self.degree,
                local=self.local,
                in_flight=shape.in_flight(stage),
                is_optimized=is_optimized,
            )
        )

    def reused_by_gradients(self, start: int, stop: int, less: float) -> float:
        """Return the bytes of the whole stage."""
        if self.costs.zero_stage < 2 or self.degree * self.costs.grid.context == 1:
            return 0.0
        saved = self.costs.group_saved_bytes(self.rows, self.local)
        return min(self.costs.group_gradient_bytes(self.rows), max(saved - less, 0.0))


class StageChain(WholeStage):
    """A stage of any blocks of a graph at one number of samples a rank.

    Args:
        everything: the tensors of the graph.
        rows: positions of the blocks, increasing; at least one.
    """

    def __init__(
        self, everything: GraphTensors, rows: Sequence[int], local: float, *, degree: int = 1
    ) -> None:
        costs = everything.costs
        self.costs, self.local, self.rows, self.degree = costs, local, tuple(rows), degree
        place = {row: 1 + i for i, row in enumerate(rows)}
        self.names = ["", *(costs.graph.blocks[row].name for row in rows), ""]
        forward, backward = costs.block_times(local)
        picked = list(rows)
        self.set_times(_framed(forward[picked]), _framed(backward[picked]))
        entering = list(dict.fromkeys(r for row in rows for r in everything.entering[row]))
        results, sizes = everything.result_sizes(local), everything.sizes(local).copy()
        received: dict[int, list[int]] = {}
        for r in entering:
            received.setdefault(everything.result_tensor[r], []).append(r)
        for t, views in received.items():  # of those received as one view, what is received
            is_outside = t >= 0 and everything.made[t] not in place
            if is_outside and len(views) == 1 and everything.results[views[0]][1] not in place:
                sizes[t] = results[views[0]]
        numbers = dict.fromkeys(t for row in rows for t in everything.saved_in[row])
        self.tensors = chain_tensors(everything, numbers, sizes, place)
        self.unsaved, self.crossing = chain_results(everything, entering, results, place, len(self.names))
        self.set_tensor_sums()

    @property
    def whole(self) -> tuple[int, int]:
        """Return the interval of the stage's own blocks, without what stands for those outside."""
        return 1, self.num_blocks - 1

    def menu(self) -> list[Segments]:
        """Return the segments worth trying: equal ones of some lengths, and the best at several prices."""
        start, stop = self.whole
        equal = []
        for length in LENGTHS:
            if length >= stop - start:
                break
            begins = np.arange(start, stop, length, dtype=np.int64)
            equal.append(Segments(starts=begins, stops=np.minimum(begins + length, stop)))
        return [*equal, *find_segments(self, levels=MENU, layers=False, within=self.whole)]


def _framed(values: Floats) -> Floats:
    return np.concatenate([[0.0], values, [0.0]])


BOTH = ("recompute", "swap")
MOST_STAGES_TRIED = 4
"""Times the requested stages, up to which an infeasible request is searched for enough."""
LIMIT_STEP = 1.02
"""By which a limit grows until it is one that a plan is found for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainPlan:
    """The stages of one micro-batch size.

    Args:
        cuts: where each stage begins, and the number of blocks: one more than there are stages.
    """

    cuts: tuple[int, ...]
    stages: tuple[StageChoice, ...]
    local: float

    @property
    def key(self) -> tuple[float, float]:
        """Return the most bytes a stage has too many, and the time of the longest."""
        return max(s.excess_bytes for s in self.stages), max(s.us for s in self.stages)

    @property
    def fits(self) -> bool:
        """Return whether every stage fits its device."""
        return self.key[0] <= 0

    @property
    def us_per_sample(self) -> float:
        """Return the time of the longest stage for one sample."""
        return self.key[1] / self.local


Partition = Callable[[StageOptimizer], ChainPlan]


def optimized(optimizer: StageOptimizer, cuts: Sequence[int]) -> ChainPlan:
    """Return the stages between these cuts, each with the memory optimization that makes it fit."""
    return ChainPlan(
        cuts=tuple(cuts),
        stages=tuple(
            optimizer.optimize(stage, begin, end)
            for stage, (begin, end) in enumerate(zip(cuts, cuts[1:], strict=False))
        ),
        local=optimizer.chain.local,
    )


class OptimizerFactory:
    """Optimizers of one model on one cluster at any number of samples; they share the menu of segments.

    Args:
        memory_optimization: ``recompute``, ``swap``, both or neither.
        degree: ranks of every stage.
    """

    def __init__(
        self,
        costs: CostModel,
        *,
        limits: Sequence[int],
        mode: str = "sync",
        schedule: str = "1f1b",
        memory_optimization: Sequence[str] = (),
        degree: int = 1,
        vertical_sync: bool = False,
    ) -> None:
        self._costs, self._degree = costs, degree
        self._ways = tuple(memory_optimization)
        self._menu: list[Segments] | None = None
        self._shape = PipelineShape(
            num_stages=len(limits),
            num_micro_batches=1,
            limits=tuple(limits),
            host_bytes_per_s=min(device.host_bytes_per_s for device in costs.cluster.devices),
            link_bytes_per_s=min(link.bytes_per_s for link in costs.cluster.links),
            mode=mode,
            schedule=schedule,
            vertical_sync=vertical_sync,
        )

    def at(self, local: float, num_micro_batches: int, *, is_cautious: bool = False) -> StageOptimizer:
        """Return what stages cost at ``local`` samples a rank."""
        chain = OperatorChain(self._costs, local, degree=self._degree)
        if "recompute" in self._ways and self._menu is None:
            self._menu = find_segments(chain)
        shape = dataclasses.replace(self._shape, num_micro_batches=num_micro_batches)
        return StageOptimizer(
            chain,
            shape,
            menu=self._menu or (),
            recompute="recompute" in self._ways,
            swap="swap" in self._ways,
            is_cautious=is_cautious,
        )

    def best(self, partition: Partition, local: float, num_micro_batches: int) -> ChainPlan:
        """Return what ``partition`` makes at ``local`` samples a rank, and cautiously where that does not fit."""
        found = partition(self.at(local, num_micro_batches))
        if found.fits or self._costs.zero_stage < 2 or self._degree == 1:
            return found
        other = partition(self.at(local, num_micro_batches, is_cautious=True))
        return min(found, other, key=lambda plan: plan.key)


def plan_chain(request: PlanRequest, partition: Partition, *, planner: str) -> PipelinePlan:
    """Return the quickest plan that ``partition`` makes over the micro-batch sizes the request allows.

    Every stage has one micro-batch size and one degree. An asynchronous plan takes as many micro-batches
    times its longest stage; a synchronous one is simulated.

    Raises:
        PlanInfeasible: none fits; the message has the bytes missing and the nearest request that fits.
    """
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    rules = batch_rules(request)
    num_stages, degree = _stages_and_degree(request)
    # the least memory of the consecutive ranks of every stage
    limits = [
        min(request.rank_limits[rank] for rank in range(i * degree, (i + 1) * degree))
        for i in range(num_stages)
    ]
    make_factory = functools.partial(
        OptimizerFactory,
        costs,
        mode=request.mode,
        schedule=request.schedule,
        degree=degree,
        vertical_sync=request.vertical_sync,
    )
    factory = make_factory(limits=limits, memory_optimization=request.memory_optimization)
    # A chain has one degree and one micro-batch size, so that sizes are tried one by one. What fits is compared by its
    # simulated step: the partition's own measure, the longest stage, does not know how long the pipeline takes to fill.
    best: PipelinePlan | None = None
    nearest: tuple[ChainPlan, int] | None = None
    # those that every stage may run, whatever it holds
    names = [*sorted(rules.coupled)[:1], *rules.fixed, request.graph.blocks[0].name]
    for size in rules.sizes_to_try:
        if any(rules.micro_batch_size([name], degree, size) != size for name in names):
            continue
        found = factory.best(partition, size / degree, request.mini_batch // size)
        if not found.fits:
            if nearest is None or found.key < nearest[0].key:
                nearest = found, size
            continue
        plan = _to_plan(request, costs, found, size, degree, planner)
        if best is None or plan.iteration_us < best.iteration_us:
            best = plan
    if best is not None:
        return best
    if nearest is None:
        raise PlanInfeasible(
            f"{planner}: {degree} ranks a stage share no micro-batch of {request.mini_batch} samples with loss units "
            f"of {request.loss_unit}; change {name_of('micro_batch_sizes')}, "
            f"{name_of('data_parallel')} or {name_of('loss_unit')}"
        )
    found, size = nearest

    def has_plan(ways: Sequence[str], num_stages: int, limit: int) -> bool:
        factory = make_factory(limits=[limit] * num_stages, memory_optimization=ways)
        return factory.best(partition, size / degree, request.mini_batch // size).fits

    _explain(request, found, size, limits, degree, has_plan)


def _stages_and_degree(request: PlanRequest) -> tuple[int, int]:
    if request.data_parallel is not None:
        return request.num_ranks // request.data_parallel, request.data_parallel
    num_stages = request.num_stages or min(request.num_ranks, len(request.graph.blocks))
    if request.num_ranks % num_stages:
        raise PlanInfeasible(
            f"{request.num_ranks} ranks do not share out evenly to {num_stages} stages of a chain; choose a divisor"
        )
    return num_stages, request.num_ranks // num_stages


def _to_plan(
    request: PlanRequest, costs: CostModel, found: ChainPlan, size: int, degree: int, planner: str
) -> PipelinePlan:
    names = [block.name for block in request.graph.blocks]
    groups = [tuple(names[a:b]) for a, b in zip(found.cuts, found.cuts[1:], strict=False)]
    ranks = [tuple(range(i * degree, (i + 1) * degree)) for i in range(len(groups))]
    drafts = [
        StageDraft(blocks=group, degree=degree, micro_batch_size=size, ranks=place)
        for group, place in zip(groups, ranks, strict=True)
    ]
    plan = build_plan(request, drafts, planner=planner, costs=costs)
    of_blocks = {group: i for i, group in enumerate(groups)}
    stages = []
    for stage in plan.stages:
        place = of_blocks[stage.blocks]
        choice = found.stages[place]
        added = choice.memory.added_us if choice.memory is not None else 0.0
        stages.append(
            dataclasses.replace(
                stage,
                backward_us=stage.backward_us + added,
                in_flight=len(groups) - place if request.mode == "async" else stage.in_flight,
                memory_bytes=round(choice.memory_bytes),
                memory=choice.memory,
            )
        )
    plan = dataclasses.replace(
        plan, stages=tuple(stages), mode=request.mode, vertical_sync=request.vertical_sync
    )
    return dataclasses.replace(plan, iteration_us=evaluate_us(plan, costs))


def _explain(
    request: PlanRequest,
    found: ChainPlan,
    size: int,
    limits: Sequence[int],
    degree: int,
    has_plan: Callable[[Sequence[str], int, int], bool],
) -> NoReturn:
    """Refuse, with the nearest changes that fit: more ways to save memory, or more stages; or more memory."""
    # In this order, since each costs the user less than the next: another way to save memory, more ranks, more memory.
    # The number of stages is bisected between one that is known not to do and one that does.
    ways, least, num_stages = request.memory_optimization, min(limits), len(limits)
    enough = round(max(stage.memory_bytes for stage in found.stages)) + 1
    while not has_plan(ways, num_stages, enough):
        enough = round(enough * LIMIT_STEP)
    memory = f"with {enough} bytes a rank ({setting_of('memory.limit_gb', float(limit_gb(enough)))})"
    larger = (more for more in (("recompute",), ("swap",), BOTH) if set(more) > set(ways))
    helpful = next((more for more in larger if has_plan(more, num_stages, least)), None)
    low, high = num_stages, min(MOST_STAGES_TRIED * num_stages, len(request.graph.blocks))
    if helpful is not None:
        ways_text = " and ".join(setting_of(f"memory.{way}", "auto") for way in helpful)
        fix = f"it fits with {ways_text}, or {memory}"
    elif not has_plan(ways, high, least):
        fix = f"it does not fit in {high} stages either; it does {memory}"
    else:
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if has_plan(ways, middle, least) else (middle, high)
        fix = f"it fits on {high * degree} ranks in {high} stages, or {memory}"
    lacking = ", ".join(
        f"stage {i} {choice.memory_bytes:.0f} of {limit} ({choice.excess_bytes:.0f} too many)"
        for i, (choice, limit) in enumerate(zip(found.stages, limits, strict=True))
        if choice.excess_bytes > 0
    )
    used = " and ".join(request.memory_optimization) or "no memory optimization"
    raise PlanInfeasible(
        f"no plan of {len(limits)} stages fits with {used}, the nearest with micro-batches of {size}: bytes needed a "
        f"rank: {lacking}; {fix}"
    )
