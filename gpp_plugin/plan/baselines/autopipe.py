"""AutoPipe's planner: balanced stages of a chain by the critical path (AutoPipe, section III-B).

Legend: f_i, b_i are forward and backward of stage i, m the micro-batches, p the stages. The *master
stage* is the one the critical path runs through in the steady phase, the one closest to the last stage
where several paths are equally long.

- Start: Algorithm 1, the partition with the smallest largest f + b (exact DP; time[0][0] = 0, which the
  listing forgets).
- Step 2 shifts work after the master stage i so that for every s > i: sum_{i<j<=s} (f_j + b_j) <=
  (s - i) b_i. Only s = p - 1 binds physically (what follows the master in the cool-down); the others are
  carried, as the paper has them, where they can be satisfied.
- Step 3 moves the master's first block to stage i - 1 or its last to stage i + 1, with and without
  Algorithm 1 on the stages before it, and continues with every partition whose master is not later.

Deviations: the simulator is exact (the paper approximates the warm-up, adds communication after the
maximum and fails for m < p). The heuristic explores all partitions it reaches, each once. `search_exact`
is a branch and bound over all partitions with the bound fill + m (f_i + b_i) + drain + the wait for the first
backward, and is used where ``MAX_EXACT`` nodes suffice.

Source: AutoPipe (IEEE CLUSTER 2022), section III-B, Algorithm 1
Tests: tests/plan/test_autopipe.py
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from gpp_plugin.errors import PlanInfeasible
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.plan.baselines.chain_costs import ChainCosts, chains_of, even_stage_counts
from gpp_plugin.plan.costs.collective_costs import boundary_us
from gpp_plugin.plan.costs.cost_model import prefix_sums, remembered
from gpp_plugin.plan.costs.estimate import task_order
from gpp_plugin.plan.make import StageDraft, split_by_weight
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.plan.selection import best_plan, explain_infeasible

MAX_EXACT = 20_000
MAX_HEURISTIC = 120
NUM_SEARCHED = 3
SETTLED = 8
"""Micro-batches a stage after which the steady phase repeats itself."""

Cuts = tuple[int, ...]
"""First block of every stage, and the number of blocks last: p + 1 numbers."""


class ChainSimulator:
    """Exact 1F1B of a chain of blocks at any cuts; communication takes ``comm_us`` a hop and overlaps.

    A special case of the event loop (`schedule.event_loop`) on links without bytes, which the tests hold it to. It is
    there because a search needs thousands of cuts with their critical path: from the times of the blocks alone,
    without a plan, a task graph and a timeline, which take about twenty times as long.
    """

    def __init__(
        self, forward: Sequence[float], backward: Sequence[float], *, micro_batches: int, comm_us: float = 0.0
    ) -> None:
        self.forward, self.backward = list(forward), list(backward)
        self.micro_batches, self.comm_us = micro_batches, comm_us
        self._f: list[float] = prefix_sums(np.array(self.forward)).tolist()
        self._b: list[float] = prefix_sums(np.array(self.backward)).tolist()

    def stage_times(self, cuts: Cuts) -> tuple[list[float], list[float]]:
        """Return forward and backward microseconds of every stage."""
        pairs = list(zip(cuts, cuts[1:], strict=False))
        return [self._f[e] - self._f[s] for s, e in pairs], [self._b[e] - self._b[s] for s, e in pairs]

    @remembered
    def run(self, cuts: Cuts) -> tuple[float, int]:
        """Return the time of one step and the master stage."""
        p = len(cuts) - 1
        settled = SETTLED * p
        if self.micro_batches <= settled + p:
            return self._run(cuts, self.micro_batches)
        # In the steady phase further micro-batches take the same time, to a part in a thousand.
        before, master = self._run(cuts, settled)
        after, _ = self._run(cuts, settled + p)
        return after + (after - before) / p * (self.micro_batches - settled - p), master

    def _run(self, cuts: Cuts, m: int) -> tuple[float, int]:
        f, b = self.stage_times(cuts)
        p, comm = len(f), self.comm_us
        # Stage i runs its order on from ``heads[i]`` until what it waits for, one hop away, has not run. ``ends`` are
        # [way][stage][micro-batch], way 0 forwards and 1 backwards; ``clocks`` when each stage is free.
        orders = [task_order(m, min(p - i, m), 1) for i in range(p)]
        ends: tuple[list[list[float]], ...] = ([[] for _ in range(p)], [[] for _ in range(p)])
        # For the critical path: which task was waited for. Tasks are (way, stage, micro-batch).
        cause: dict[tuple[int, int, int], tuple[int, int, int] | None] = {}
        heads, clocks = [0] * p, [0.0] * p
        previous: list[tuple[int, int, int] | None] = [None] * p
        waiting = list(range(p))
        while waiting:
            s = waiting.pop()
            moved = False
            while heads[s] < len(orders[s]):
                task = orders[s][heads[s]]
                way, j = (0, task) if task >= 0 else (1, ~task)
                other = s - 1 if way == 0 else s + 1
                start, why = clocks[s], previous[s]
                if 0 <= other < p:
                    if len(ends[way][other]) <= j:
                        break
                    arrival = ends[way][other][j] + comm
                    # Of equally long paths the one closest to the last stage is taken.
                    if arrival > start + 1e-9 or (abs(arrival - start) <= 1e-9 and other > s):
                        start, why = max(arrival, start), (way, other, j)
                clocks[s] = start + (f[s] if way == 0 else b[s])
                ends[way][s].append(clocks[s])
                cause[way, s, j] = why
                previous[s] = (way, s, j)
                heads[s] += 1
                moved = True
            if moved:
                waiting.extend(o for o in (s - 1, s + 1) if 0 <= o < p and heads[o] < len(orders[o]))
        last = max(range(p), key=lambda s: (clocks[s], s))
        # the master has most steps of the critical path in the steady phase, the later of equals
        steps, at = [0] * p, previous[last]
        while at is not None:
            way, stage, j = at
            is_steady = j >= p - 1 - stage if way == 0 else j <= m - (p - stage)
            steps[stage] += is_steady
            at = cause[at]
        return clocks[last], max(range(p), key=lambda s: (steps[s], s))


def search_heuristic(simulator: ChainSimulator, num_stages: int) -> tuple[float, Cuts]:
    """Return time and cuts of the best partition the master-stage heuristic visits."""
    weights = [f + b for f, b in zip(simulator.forward, simulator.backward, strict=True)]
    start = split_by_weight(weights, num_stages)
    seen: set[Cuts] = set()
    time, master = simulator.run(start)
    best = time, start
    queue: list[tuple[float, Cuts, int]] = [(time, start, master)]
    while queue and len(seen) < MAX_HEURISTIC:
        _, cuts, master = heapq.heappop(queue)
        if cuts in seen:
            continue
        seen.add(cuts)
        for found in _shifted(simulator, weights, cuts, master):
            if found in seen:
                continue
            time, new_master = simulator.run(found)
            best = min(best, (time, found))
            if new_master <= master:
                heapq.heappush(queue, (time, found, new_master))
    return best


def _shifted(simulator: ChainSimulator, weights: Sequence[float], cuts: Cuts, master: int) -> Iterator[Cuts]:
    """Yield the partitions of steps 2 and 3 around a master stage."""
    eased = _ease_cool_down(simulator, cuts, master)
    if eased != cuts:
        yield eased
    p = len(cuts) - 1
    if master > 0 and cuts[master + 1] - cuts[master] > 1:
        moved = (*cuts[:master], cuts[master] + 1, *cuts[master + 1 :])
        yield moved
        yield _rebalance_first(weights, moved, master)
    if master < p - 1 and cuts[master + 1] - cuts[master] > 1:
        moved = (*cuts[: master + 1], cuts[master + 1] - 1, *cuts[master + 2 :])
        yield moved
        yield _rebalance_first(weights, moved, master + 1)


def _rebalance_first(weights: Sequence[float], cuts: Cuts, count: int) -> Cuts:
    """Return the cuts with Algorithm 1 applied to the first ``count`` stages."""
    if count < 2:
        return cuts
    head = split_by_weight(weights[: cuts[count]], count)
    return (*head[:-1], *cuts[count:])


def _ease_cool_down(simulator: ChainSimulator, cuts: Cuts, master: int) -> Cuts:
    """Return the cuts with stages after the master made lighter towards its equation (1), front first."""
    p = len(cuts) - 1
    changed = list(cuts)
    forward, backward = simulator.stage_times(cuts)
    budget = backward[master]
    for stage in range(master + 1, p - 1):
        allowed = (stage - master) * budget
        while changed[stage + 1] - changed[stage] > 1:
            f, b = simulator.stage_times(tuple(changed))
            if sum(f[master + 1 : stage + 1]) + sum(b[master + 1 : stage + 1]) <= allowed:
                break
            changed[stage + 1] -= 1
    return tuple(changed)


def search_exact(
    simulator: ChainSimulator, num_stages: int, *, limit: int = MAX_EXACT
) -> tuple[float, Cuts] | None:
    """Return time and cuts of the best partition of all, or None where ``limit`` nodes do not suffice.

    Depth first from the first stage; a node is left where the stages so far, or the best that can follow
    (`_least_after`), take no less than the best partition known.
    """
    best = search_heuristic(simulator, num_stages)
    num = len(simulator.forward)
    bound = _stage_bound(simulator, num_stages)
    after = _least_after(bound, num, num_stages)
    nodes = 0
    stack: list[Cuts] = [(0,)]
    while stack:
        cuts = stack.pop()
        nodes += 1
        if nodes > limit:
            return None
        stage, start = len(cuts) - 1, cuts[-1]
        if stage == num_stages:
            best = min(best, (simulator.run(cuts)[0], cuts))
            continue
        is_last = stage == num_stages - 1
        found = []
        for stop in [num] if is_last else range(start + 1, num - (num_stages - stage) + 2):
            least = max(bound(stage, start, stop), after[stage + 1][stop])
            if least < best[0] * (1 - 1e-12):
                found.append((least, (*cuts, stop)))
        stack.extend(more for _, more in sorted(found, reverse=True))
    return best


def _stage_bound(simulator: ChainSimulator, num_stages: int) -> Callable[[int, int, int], float]:
    """Return the least time of a step in which stage ``stage`` holds blocks ``start`` up to ``stop``.

    Its first forward comes after those of the stages before it, which also run the last backward after it.
    Between them it computes all the time; but its first backward waits for the round trip through the
    stages after it, during which it has only its warm-up's forwards to do.
    """
    f, b, m, comm = simulator._f, simulator._b, simulator.micro_batches, simulator.comm_us

    def bound(stage: int, start: int, stop: int) -> float:
        forward, backward = f[stop] - f[start], b[stop] - b[start]
        later = num_stages - 1 - stage
        round_trip = f[-1] - f[stop] + b[-1] - b[stop] + 2 * later * comm
        waits = max(round_trip - min(later, m - 1) * forward, 0.0)
        return f[start] + b[start] + 2 * stage * comm + m * (forward + backward) + waits

    return bound


def _least_after(bound: Callable[[int, int, int], float], num: int, num_stages: int) -> list[list[float]]:
    """Return [stage, start]: the least largest bound of stages ``stage`` on, over the blocks from ``start``."""
    least = [[float("inf")] * (num + 1) for _ in range(num_stages + 1)]
    least[num_stages][num] = 0.0
    for stage in range(num_stages - 1, -1, -1):
        for start in range(stage, num):
            for stop in range(start + 1, num + 1):
                later = least[stage + 1][stop]
                if later < least[stage][start]:
                    least[stage][start] = min(least[stage][start], max(bound(stage, start, stop), later))
    return least


def autopipe_plan(request: PlanRequest) -> PipelinePlan:
    """Return the balanced chain: every number of stages that divides the ranks, every micro-batch size.

    Raises:
        PlanInfeasible: no chain fits.
    """
    counts = even_stage_counts(request)
    if all(request.num_ranks % count for count in counts):
        raise PlanInfeasible(
            f"autopipe gives every stage the same number of ranks: {request.num_ranks} ranks in {counts[0]} stages "
            "do not divide; change stages or the number of ranks, or take another planner"
        )
    chains = chains_of(request)
    costs, order = chains[0].costs, chains[0].order
    starts: list[tuple[float, int, int, ChainCosts]] = []
    for chain in chains:
        for count in counts:
            degree = request.num_ranks // count
            if count > len(order) or request.num_ranks % count:
                continue
            if _size_of(chain, degree) % degree == 0:
                simulator = simulator_of(chain, degree)
                weights = [f + b for f, b in zip(simulator.forward, simulator.backward, strict=True)]
                starts.append((simulator.run(split_by_weight(weights, count))[0], count, chain.wish, chain))
    starts.sort(key=lambda start: start[:3])
    # Algorithm 1 ranks the numbers of stages and sizes; the heuristic works on the best of them.
    candidates = [
        drafts
        for i, (_, count, _, chain) in enumerate(starts)
        if (drafts := _drafts_for(chain, count, is_searched=i < NUM_SEARCHED)) is not None
    ]
    plan = best_plan(request, costs, candidates, planner="autopipe", may_hold_more=True)
    if plan is None:
        explain_infeasible(request, costs, chains[0].rules, [[[name] for name in order], [order]])
    return plan


def _drafts_for(chain: ChainCosts, count: int, *, is_searched: bool) -> list[StageDraft] | None:
    degree = chain.request.num_ranks // count
    simulator = simulator_of(chain, degree)
    if is_searched:
        found = search_exact(simulator, count, limit=MAX_EXACT // 20)
        cuts = found[1] if found is not None else search_heuristic(simulator, count)[1]
    else:
        cuts = split_by_weight(
            [f + b for f, b in zip(simulator.forward, simulator.backward, strict=True)], count
        )
    return chain.drafts([(start, stop, degree) for start, stop in zip(cuts, cuts[1:], strict=False)])


def _size_of(chain: ChainCosts, degree: int) -> int:
    """Return the micro-batch size of most stages: a loss unit a rank where all blocks take whole ones."""
    are_all_coupled = chain.rules.coupled.issuperset(chain.order)
    return chain.rules.loss_unit * degree if are_all_coupled else chain.wish


def simulator_of(chain: ChainCosts, degree: int) -> ChainSimulator:
    """Return the simulator of a chain at one degree, with the mean hop between blocks as communication."""
    size = _size_of(chain, degree)
    forward, backward = chain.costs.block_times(size / degree)
    cuts = [chain.cut_bytes(at) for at in range(1, chain.num_blocks)]
    # a message travels one way: half of a boundary's time
    hop_us = [boundary_us(cut, degree, chain.link_us_per_byte) / 2 * size for cut in cuts]
    return ChainSimulator(
        [float(forward[row]) for row in chain.rows],
        [float(backward[row]) for row in chain.rows],
        micro_batches=max(chain.request.mini_batch // size, 1),
        comm_us=statistics.fmean(hop_us) if hop_us else 0.0,
    )
