"""Clusters of heterogeneous devices: the order in which stages take ranks, and partitions that suit it.

Stages in their order take consecutive ranks in `PlanRequest.rank_order`. Devices of one kind stay together in it, so a
plan for 4 H100 and 4 A100 gives a contiguous part of the model to either, in one of two orders:

    rank order   0 1 2 3 | 4 5 6 7      H100 first            stages   [.....][.....][....]|[..][..]
                 4 5 6 7 | 0 1 2 3      A100 first                     [..][..]|[.....][.....][....]

Where a partition should be cut then depends on the ranks, which GraphPipe's recursion leaves out: it counts
devices. So beside its partitions, this one is searched and refined too: the model's blocks in a linear order that
finishes a branch before it begins the next, cut into S stages on consecutive ranks,

    best[s][u][i] = least bottleneck of blocks 0..i in s stages on the first u ranks
                  = min over j, d of max(best[s - 1][u - d][j], us(blocks j..i on ranks u - d .. u))

for every S, with times of the slowest of a stage's ranks. What is cut from a linear order is a graph of stages as any
other partition: branches that are cut into separate stages run beside each other.

Source: this project; the recurrence is PipeDream's (SOSP 2019, doi 10.1145/3341301.3359646), section 3.1, over ranks
    that differ
Tests: tests/plan/test_unlike_devices.py, tests/plan/test_node_placement.py
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from gpp_plugin.errors import PlanInfeasible
from gpp_plugin.ir.cluster import distinct_devices
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.plan.costs.cost_model import (
    CostModel,
    Floats,
    full_pipeline_us,
    interval_sums,
    prefix_sums,
    remembered,
    us_per_sample,
)
from gpp_plugin.plan.costs.estimate import MAX_RANK_TASKS, estimate_plan_us, evaluate_us, exposed_us
from gpp_plugin.plan.make import linear_order, with_ranks
from gpp_plugin.plan.request import BatchRules, PlanRequest

# Which stages share a node: a finished plan's stages take their ranks in another order where that is quicker.
#
# Planners give consecutive ranks to stages in their order. What is cheap inside a node and dear between nodes then
# depends on where the borders fall: of four stages a -> b -> c -> d of one rank each, where only b -> c is large, on
# nodes of two,
#
#     in order            | a  b | c  d |        b -> c crosses nodes
#     b and d exchanged   | a  d | c  b |        a -> b and c -> d do
#
# Two stages are exchanged in the order in which ranks are taken: a fixed number of pairs, those whose messages between
# nodes are largest first, predicted quickly (`estimate`); the best of them is simulated, and taken where it is
# quicker. That continues until none is, or the exchanges are used up.

NUM_EXCHANGES = 64
"""Exchanges that are predicted, in all."""
MAX_TASKS = 200_000
"""Simulated tasks of all of them."""
LEAST_GAIN = 1e-3
"""Part of a step that an exchange must save: stages in order are easier to read."""


def exchange_stages(plan: PipelinePlan, request: PlanRequest) -> PipelinePlan:
    """Return a finished plan on other ranks where a step is then shorter, else as it is.

    Nothing is exchanged where all ranks are alike and joined by one level of links, or where stages share ranks.
    """
    # it matters on which ranks a stage is, and few enough tasks are to be simulated
    is_placed = (
        min(link.span for link in request.cluster.links) < request.num_ranks or request.cluster.is_mixed
    )
    if len(plan.stages) < 2 or plan.shares_ranks or not is_placed or plan.num_rank_tasks > MAX_RANK_TASKS:
        return plan
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    first_us = plan.iteration_us or evaluate_us(plan, costs)
    best, best_us = plan, first_us
    tasks = sum(2 * plan.num_micro_batches(i) for i in range(len(plan.stages)))
    left = min(NUM_EXCHANGES, MAX_TASKS // max(tasks, 1))
    before = estimate_plan_us(plan, costs)
    while left > 0:
        found: list[tuple[float, int, PipelinePlan]] = []
        for ranks in itertools.islice(_exchanged(best, costs), left):
            left -= 1
            changed = with_ranks(best, ranks, costs)
            if _fits(changed, request):
                found.append((estimate_plan_us(changed, costs), len(found), changed))
        if not found:
            break
        estimated, _, changed = min(found)
        if estimated > before * (1 - LEAST_GAIN):
            break
        us = evaluate_us(changed, costs)
        if us > best_us * (1 - LEAST_GAIN):
            break
        best, best_us, before = dataclasses.replace(changed, iteration_us=us), us, estimated
    if best is plan:
        return plan
    note = f"stages take ranks in another order than their own, which saves {1 - best_us / first_us:.1%}"
    return dataclasses.replace(best, notes=(*best.notes, note))


def _exchanged(plan: PipelinePlan, costs: CostModel) -> Iterator[list[tuple[int, ...]]]:
    """Yield the ranks of all stages after exchanging two of them, those with most bytes between nodes first."""
    order = sorted(range(len(plan.stages)), key=lambda stage: plan.stages[stage].ranks[0])
    taken = sorted(rank for stage in plan.stages for rank in stage.ranks)
    crossing = _crossing_bytes(plan, costs)
    pairs = itertools.combinations(range(len(order)), 2)
    for i, j in sorted(pairs, key=lambda pair: -max(crossing[order[place]] for place in pair)):
        changed = list(order)
        changed[i], changed[j] = changed[j], changed[i]
        placed: dict[int, tuple[int, ...]] = {}
        start = 0
        for stage in changed:
            size = len(plan.stages[stage].ranks)
            placed[stage] = tuple(taken[start : start + size])
            start += size
        yield [placed[stage] for stage in range(len(order))]


def _crossing_bytes(plan: PipelinePlan, costs: CostModel) -> list[float]:
    """Return by stage the bytes a sample that it exchanges with stages outside its innermost group of ranks."""
    inner = costs.cluster.links[0]
    found = [0.0] * len(plan.stages)
    for edge in plan.edges:
        src, dst = plan.stages[edge.src].ranks, plan.stages[edge.dst].ranks
        if costs.cluster.link_between(min(src[0], dst[0]), max(src[-1], dst[-1])) is not inner:
            for stage in (edge.src, edge.dst):
                found[stage] += edge.bytes_per_sample + edge.gradient_bytes_per_sample
    return found


def _fits(plan: PipelinePlan, request: PlanRequest) -> bool:
    return all(
        stage.memory_bytes <= request.rank_limits[rank] for stage in plan.stages for rank in stage.ranks
    )


MAX_KINDS = 3
"""Up to so many kinds of devices all their orders are tried; of more, from the quickest on and back."""
MAX_STAGES = 12
NUM_STARTS = 8
"""Partitions of the linear order that are predicted and, the best of them, refined."""

Groups = tuple[tuple[str, ...], ...]
Numbers = npt.NDArray[np.int64]


def rank_orders(request: PlanRequest) -> list[tuple[int, ...]]:
    """Return the orders of ranks worth trying: those that keep devices of one kind together."""
    devices = request.cluster.devices[: request.num_ranks]
    kinds = distinct_devices(devices)
    if len(kinds) <= MAX_KINDS:
        orders = list(itertools.permutations(kinds))
    else:
        quickest_first = tuple(sorted(kinds, key=lambda device: -device.speeds[0]))
        orders = [quickest_first, quickest_first[::-1]]
    found = [
        tuple(r for kind in order for r, device in enumerate(devices) if device.speeds == kind.speeds)
        for order in orders
    ]
    return list(dict.fromkeys(found))


def best_over_orders(request: PlanRequest, planner: Callable[[PlanRequest], PipelinePlan]) -> PipelinePlan:
    """Return a planner's quickest plan over all orders of the ranks; its plan where devices are alike.

    Raises:
        PlanInfeasible: it finds none for any order.
    """
    devices = request.cluster.devices[: request.num_ranks]
    if request.rank_order is not None or len(distinct_devices(devices)) == 1:
        return planner(request)
    plans: list[PipelinePlan] = []
    failure: PlanInfeasible | None = None
    for order in rank_orders(request):
        try:
            plans.append(planner(dataclasses.replace(request, rank_order=order)))
        except PlanInfeasible as error:
            failure = failure or error
    if not plans:
        assert failure is not None, "there is an order, and it made a plan or did not"
        raise failure
    best = min(plans, key=lambda plan: (plan.iteration_us, plan.depth))
    return dataclasses.replace(best, notes=(*best.notes, _note(best, request)))


def _note(plan: PipelinePlan, request: PlanRequest) -> str:
    """Return which devices the stages are on, in their order."""
    names = [
        "+".join(dict.fromkeys(request.cluster.devices[rank].name for rank in stage.ranks))
        for stage in plan.stages
    ]
    parts = [f"{len(list(run))} on {name}" for name, run in itertools.groupby(names)]
    return f"devices of several speeds: of {len(names)} stages {', '.join(parts)}"


def ranked_partitions(
    request: PlanRequest, costs: CostModel, rules: BatchRules
) -> Iterator[tuple[Groups, int]]:
    """Yield partitions that suit the ranks in their order, and their micro-batch sizes; those likely to win first."""
    found: list[tuple[float, Groups, int]] = []
    chain = _RankedChain(request, costs, rules)
    for wish in rules.sizes_to_try:
        for num_stages, slowest_us, groups in chain.partitions(wish):
            us = full_pipeline_us(request.mini_batch, wish, num_stages, slowest_us)
            found.append((us, groups, wish))
    found.sort(key=lambda item: item[0])
    seen: set[tuple[Groups, int]] = set()
    for _, groups, wish in found:
        if (groups, wish) not in seen:
            seen.add((groups, wish))
            yield groups, wish
        if len(seen) == NUM_STARTS:
            return


class _RankedChain:
    """The recurrence of the module's docstring, for one order of blocks and one of ranks."""

    def __init__(self, request: PlanRequest, costs: CostModel, rules: BatchRules) -> None:
        self.request, self.costs, self.rules = request, costs, rules
        self.names = linear_order(request.graph)
        self.rows = costs.indices(self.names)
        order = request.rank_order or tuple(range(request.num_ranks))
        self.order = [rank for rank in order if rank < request.num_ranks]
        self._is_coupled = prefix_sums(np.array([name in rules.coupled for name in self.names], dtype=float))
        self._gradient = prefix_sums(costs.gradient_bytes[self.rows])

    def partitions(self, wish: int) -> Iterator[tuple[int, float, Groups]]:
        """Yield for each number of stages that number, the bottleneck in us a sample, and the stages."""
        num, ranks = len(self.names), len(self.order)
        most = min(num, ranks, self.request.num_stages or MAX_STAGES)
        # best[s]: [ranks used, blocks done]; choice[s]: of each (degree, start of the last stage) as one number
        best = [np.full((ranks + 1, num + 1), np.inf)]
        best[0][0, 0] = 0.0
        choices: list[Numbers] = []
        for _ in range(most):
            value = np.full((ranks + 1, num + 1), np.inf)
            choice = np.full((ranks + 1, num + 1), -1, dtype=np.int64)
            for end in range(1, ranks + 1):
                for degree in self.rules.degrees:
                    times = self._times(wish, end - degree, end) if degree <= end else None
                    if times is None:
                        continue
                    before = best[-1][end - degree]
                    slowest = np.maximum(before[:, None], times)  # [start, stop] of the last stage
                    start = slowest.argmin(axis=0)
                    found = slowest[start, np.arange(num + 1)]
                    is_better = found < value[end]
                    value[end][is_better] = found[is_better]
                    choice[end][is_better] = (start + degree * (num + 1))[is_better]
            best.append(value)
            choices.append(choice)
            count = len(choices)
            if np.isfinite(value[ranks, num]) and self.request.num_stages in (None, count):
                yield count, float(value[ranks, num]), self._read(choices)

    def _read(self, choices: Sequence[Numbers]) -> Groups:
        """Return the stages that led to the value of all blocks on all ranks."""
        end, stop, groups = len(self.order), len(self.names), []
        for choice in reversed(choices):
            degree, start = divmod(int(choice[end, stop]), len(self.names) + 1)
            groups.append(tuple(self.names[start:stop]))
            end, stop = end - degree, start
        return tuple(reversed(groups))

    def _times(self, wish: int, start: int, end: int) -> Floats | None:
        """Return [start, stop] us a sample of blocks on the ranks of these places; None where that degree cannot be."""
        kinds = self.costs.kinds_of(self.order[start:end])
        each = [self._times_on(wish, end - start, kind) for kind in kinds]
        tables = [table for table in each if table is not None]
        return np.maximum.reduce(tables) if tables else None

    @remembered
    def _times_on(self, wish: int, degree: int, kind: int) -> Floats | None:
        # A stage takes ``wish`` samples at a time, and one with a block that mixes samples a loss unit a rank.
        unit, mini_batch = self.rules.loss_unit * degree, self.rules.mini_batch
        num = len(self.names)
        us = np.full((num + 1, num + 1), np.inf)
        mixes = interval_sums(self._is_coupled) > 0.5
        for size, mask in ((wish, ~mixes), (unit, mixes)):
            if size % degree or mini_batch % size or size // degree < self.rules.smallest_local:
                continue
            forward, backward = self.costs.block_times(size // degree, kind)
            compute = interval_sums(prefix_sums((forward + backward)[self.rows]))
            reduce_us = exposed_us(
                self.costs,
                self._reduce_us(degree, size),
                interval_sums(prefix_sums(backward[self.rows])) / mini_batch,
                interval_sums(self._gradient),
            )
            us = np.where(mask, us_per_sample(compute, size, reduce_us=reduce_us), us)
        # a stage has a block
        us[np.tril_indices(num + 1)] = np.inf
        return us if np.isfinite(us).any() else None

    def _reduce_us(self, degree: int, size: int) -> Floats:
        """Return [start, stop] us of one sample's share of the gradients' reduction."""
        once = self.costs.reduction(degree).us(interval_sums(self._gradient))
        count = self.costs.num_reductions(self.rules.mini_batch // size)
        shared: Floats = once * count / self.rules.mini_batch
        return shared
