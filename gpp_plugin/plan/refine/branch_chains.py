"""AutoPipe's refinement inside the branches of a stage graph: block boundaries along the master stage's chain.

The simulator's critical path closest to the sinks gives the *master stage*: the one it runs through most in
the steady phase (AutoPipe, section III-B). Its *chain* are the stages before and after it that follow each
other without a fork or join between them. As on AutoPipe's own chains, the master's first block may go to the
stage before it and its last to the one after it, with and without Algorithm 1 (`split_by_weight`) on the
stages on that side, and the stages after the master may be made lighter; Algorithm 1 on the whole chain is
tried as well. Partitions are followed in the order of their predicted times, better than the start or not:
steps that only together help are found, which `Refiner.improve` cannot.

Deviation: masters that move towards the sink are followed too; on a graph the sink may be on another branch.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.timeline import EventKind
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.linear_order import split_by_weight
from gpp_plugin.plan.make import build_plan
from gpp_plugin.plan.refine.block_sets import Mask, bits
from gpp_plugin.plan.refine.refine import Candidate, Refiner, is_better
from gpp_plugin.simulate.predict import simulate_plan
from gpp_plugin.simulate.timeline_metrics import critical_path

MAX_ROUNDS = 12
MAX_RANK_TASKS = 8_000
"""Plans with more tasks, summed over ranks, are left as they are: their critical path takes too long."""


def refine_chains(refiner: Refiner, start: Candidate, *, rounds: int = MAX_ROUNDS) -> Candidate:
    """Return the best candidate reached from ``start`` by moves along the chains of master stages.

    Args:
        rounds: how many partitions are simulated for their master stage.
    """
    best, number = start, 0
    queue = [(start.score, number, start)]
    while queue and rounds > 0 and refiner.budget > 0:
        rounds -= 1
        _, _, at = heapq.heappop(queue)
        found = master_chain(refiner, at)
        if found is None:
            continue
        for masks in _shifted(refiner, at.masks, *found):
            candidate = refiner.with_masks(masks, at.wish, at.slack, at.way)
            if candidate is None:
                continue
            best = candidate if is_better(candidate.score, best.score) else best
            number += 1
            heapq.heappush(queue, (candidate.score, number, candidate))
    return best


def master_chain(refiner: Refiner, at: Candidate) -> tuple[list[Mask], int] | None:
    """Return the stages of the master's chain, source first, and its place; None where it has no neighbour."""
    request, costs = refiner.request, refiner.costs
    plan = build_plan(request, at.drafts, planner="", costs=costs, is_named=False)
    if (
        sum(2 * plan.num_micro_batches(i) * stage.degree for i, stage in enumerate(plan.stages))
        > MAX_RANK_TASKS
    ):
        refiner.report.leave_out("cuts along the critical path of plans with very many tasks")
        return None
    after: list[set[int]] = [set() for _ in plan.stages]
    before: list[set[int]] = [set() for _ in plan.stages]
    for edge in plan.edges:
        after[edge.src].add(edge.dst)
        before[edge.dst].add(edge.src)
    master = master_stage(plan, costs)
    chain = [master]
    while len(before[chain[0]]) == 1 and len(after[min(before[chain[0]])]) == 1:
        chain.insert(0, min(before[chain[0]]))
    while len(after[chain[-1]]) == 1 and len(before[min(after[chain[-1]])]) == 1:
        chain.append(min(after[chain[-1]]))
    if len(chain) == 1:
        return None
    masks = [sum(1 << row for row in costs.indices(plan.stages[i].blocks)) for i in chain]
    return masks, chain.index(master)


def master_stage(plan: PipelinePlan, costs: CostModel) -> int:
    """Return the stage with most tasks of the critical path in the steady phase, the later of equals."""
    timeline = simulate_plan(plan, cluster=costs.cluster, reduce_us=costs.reduce_times(plan))
    steps: Counter[int] = Counter()
    path = critical_path(plan, timeline)
    for event in path:
        stage = plan.stages[event.stage]
        if event.kind is EventKind.FORWARD:
            steps[event.stage] += event.micro_batch >= stage.in_flight - 1
        else:
            steps[event.stage] += event.micro_batch <= plan.num_micro_batches(event.stage) - stage.in_flight
    return max(steps, key=lambda i: (steps[i], i))


def _shifted(refiner: Refiner, masks: Sequence[Mask], chain: list[Mask], master: int) -> Iterator[list[Mask]]:
    """Yield the partitions that moves along the chain lead to; other stages stay."""
    others = [mask for mask in masks if mask not in chain]
    order = [row for mask in chain for row in bits(mask)]
    cuts = [0]
    for mask in chain:
        cuts.append(cuts[-1] + mask.bit_count())
    forward, backward = refiner.costs.block_times(refiner.request.mini_batch / refiner.request.num_ranks)
    weights = [float(forward[row] + backward[row]) for row in order]
    tried = set()
    for moved in _moved_cuts(weights, cuts, master):
        if moved == cuts or tuple(moved) in tried:
            continue
        tried.add(tuple(moved))
        stages = [sum(1 << row for row in order[a:b]) for a, b in zip(moved, moved[1:], strict=False)]
        if all(stages) and refiner.sets.is_acyclic([*others, *stages]):
            yield [*others, *stages]


def _moved_cuts(weights: Sequence[float], cuts: list[int], master: int) -> Iterator[list[int]]:
    last = len(cuts) - 2

    def balanced(first: int, stop: int, bounds: list[int]) -> list[int]:
        """Return the bounds with Algorithm 1 on stages ``first`` up to ``stop``."""
        if stop - first < 2:
            return bounds
        low, high = bounds[first], bounds[stop]
        found = split_by_weight(weights[low:high], stop - first)
        return [*bounds[:first], *(low + start for start, _ in found), *bounds[stop:]]

    yield balanced(0, last + 1, cuts)
    is_divisible = cuts[master + 1] - cuts[master] > 1
    if is_divisible and master > 0:
        moved = [*cuts[:master], cuts[master] + 1, *cuts[master + 1 :]]
        yield moved
        yield balanced(0, master, moved)
    if is_divisible and master < last:
        moved = [*cuts[: master + 1], cuts[master + 1] - 1, *cuts[master + 2 :]]
        yield moved
        yield balanced(master + 1, last + 1, moved)
        yield balanced(0, master + 1, moved)
    for stage in range(master + 1, last):  # step 2: what follows the master gets lighter, front first
        if cuts[stage + 1] - cuts[stage] > 1:
            yield [*cuts[: stage + 1], cuts[stage + 1] - 1, *cuts[stage + 2 :]]
