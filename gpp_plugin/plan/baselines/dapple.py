"""DAPPLE's planner (Fan et al., PPoPP 2021, section 4): splits and placements by estimated latency.

``plan(j, g)`` has placed the first j blocks on the ranks that occupancy g takes; it tries every next
stage [j, j') on m' ranks, placed *fresh* (whole free nodes first), *append* (nodes in use first) or
*scatter* (evenly over nodes), with everything after j' as one last stage on all other ranks. Latency is
T = T_warm-up + T_steady + T_ending around the pivot stage. Memory is not checked (as in the original).

Deviations: the original is off by one between cuts and parameter sums; ends are exclusive here. States
are memoised by (j, occupancy); beyond ``MAX_STATES`` the search is cut off, as it is exponential.

Source: DAPPLE (PPoPP 2021, arXiv 2007.01045), section 4
Tests: tests/plan/test_baselines.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from gpp_plugin.errors import PlanInfeasible
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.plan.baselines.chain_costs import ChainCosts, best_sequential, chains_of
from gpp_plugin.plan.costs.collective_costs import boundary_us
from gpp_plugin.plan.costs.cost_model import prefix_sums
from gpp_plugin.plan.make import StageDraft
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.plan.selection import explain_infeasible

MAX_STATES = 30_000

Placed = tuple[tuple[int, int, tuple[int, ...]], ...]
"""(start, stop, ranks) of each stage."""


def dapple_plan(request: PlanRequest) -> PipelinePlan:
    """Return the chain with the smallest estimated latency.

    Raises:
        PlanInfeasible: the search does not end, or the chain found does not fit (memory is not searched).
    """
    chains = chains_of(request)
    costs, order = chains[0].costs, chains[0].order
    candidates = []
    for search in map(_Search, chains):
        placed = search.run()
        candidates.append(search.drafts(placed) if placed is not None else None)
    plan = best_sequential(request, costs, [[drafts] for drafts in candidates], planner="dapple")
    if plan is None:
        groups = [[draft.blocks for draft in drafts] for drafts in candidates if drafts is not None]
        explain_infeasible(request, costs, chains[0].rules, [*groups, [order]])
    return plan


class _Search:
    def __init__(self, chain: ChainCosts) -> None:
        self.chain, self.request = chain, chain.request
        inner = self.request.cluster.links[0].span
        self.node_size = min(inner, self.request.num_ranks)
        self.num_nodes = -(-self.request.num_ranks // self.node_size)
        self.num_micro_batches = self.request.mini_batch // chain.wish
        self._prefixes: dict[int, tuple[list[float], list[float]]] = {}
        self._gradient: list[float] = prefix_sums(chain.costs.gradient_bytes[chain.rows]).tolist()
        self._seen: dict[tuple[int, tuple[int, ...]], float] = {}
        self._best: tuple[float, Placed] | None = None

    def run(self) -> Placed | None:
        """Return the placement with the smallest latency, or None where none divides the micro-batch."""
        self._extend(0, tuple([0] * self.num_nodes), ())
        return self._best[1] if self._best is not None else None

    def drafts(self, placed: Placed) -> list[StageDraft] | None:
        """Return the drafts of a placement."""
        drafts = self.chain.drafts([(start, stop, len(ranks)) for start, stop, ranks in placed])
        if drafts is None:
            return None
        return [
            dataclasses.replace(draft, ranks=ranks)
            for draft, (_, _, ranks) in zip(drafts, placed, strict=True)
        ]

    def _extend(self, start: int, used: tuple[int, ...], placed: Placed) -> None:
        if len(self._seen) > MAX_STATES:
            raise PlanInfeasible(
                f"dapple cannot plan {self.request.graph.model!r} on {self.request.num_ranks} ranks: more than "
                f"{MAX_STATES} states; use graphpipe or auto"
            )
        stages = self.request.num_stages
        free = self.request.num_ranks - sum(used)
        size = self.node_size
        rest = tuple(rank for rank in range(self.request.num_ranks) if rank % size >= used[rank // size])
        if self._is_divided(start, self.chain.num_blocks, free) and stages in (None, len(placed) + 1):
            whole = (*placed, (start, self.chain.num_blocks, rest))
            latency = self._latency(whole)
            if self._best is None or latency < self._best[0]:
                self._best = latency, whole
        if stages is not None and len(placed) + 1 >= stages:
            return
        for degree in self.chain.rules.degrees:
            if degree >= free:
                break
            for ranks, after in self._placements(degree, used):
                for stop in range(start + 1, self.chain.num_blocks):
                    if not self._is_divided(start, stop, degree):
                        continue
                    grown = (*placed, (start, stop, ranks))
                    left = tuple(r for r in rest if r not in set(ranks))
                    # The original keeps, a state, the prefix whose latency with one last stage is least.
                    latency = self._latency((*grown, (stop, self.chain.num_blocks, left)))
                    key = (stop, tuple(sorted(after)))
                    if latency < self._seen.get(key, float("inf")):
                        self._seen[key] = latency
                        self._extend(stop, after, grown)

    def _is_divided(self, start: int, stop: int, degree: int) -> bool:
        return self.chain.size_of(start, stop, degree) is not None

    def _placements(
        self, degree: int, used: tuple[int, ...]
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Yield (ranks, occupancy after) of fresh, append and scatter placement, without repeats."""
        nodes = range(self.num_nodes)
        fresh = sorted(nodes, key=lambda n: (used[n] > 0, n))
        append = sorted(nodes, key=lambda n: (used[n] == 0, n))
        seen = set()
        for policy, order in (("fresh", fresh), ("append", append), ("scatter", list(nodes))):
            counts = [0] * self.num_nodes
            left = degree
            while left > 0:
                before = left
                for node in order:
                    on_node = min(self.node_size, self.request.num_ranks - node * self.node_size)
                    free = on_node - used[node] - counts[node]
                    take = min(free, left, 1 if policy == "scatter" else left)
                    counts[node] += take
                    left -= take
                if left == before:
                    break
            if left or tuple(counts) in seen:
                continue
            seen.add(tuple(counts))
            ranks = tuple(
                node * self.node_size + used[node] + i for node in nodes for i in range(counts[node])
            )
            yield ranks, tuple(u + c for u, c in zip(used, counts, strict=True))

    def _times(self, start: int, stop: int, degree: int) -> tuple[float, float]:
        size = self.chain.size_of(start, stop, degree)
        assert size is not None
        key = size // degree
        if key not in self._prefixes:
            forward, backward = (prefix_sums(us[self.chain.rows]) for us in self.chain.costs.block_times(key))
            self._prefixes[key] = forward.tolist(), backward.tolist()
        forward_us, backward_us = self._prefixes[key]
        scale = self.chain.wish / size
        return (forward_us[stop] - forward_us[start]) * scale, (
            backward_us[stop] - backward_us[start]
        ) * scale

    def _latency(self, placed: Placed) -> float:
        """Return DAPPLE's T_warm-up + T_steady + T_ending (its equations 1 to 4), links being stages too."""
        forward, backward, reduce = [], [], []
        for i, (start, stop, ranks) in enumerate(placed):
            if not self._is_divided(start, stop, len(ranks)):
                return float("inf")
            forward_us, backward_us = self._times(start, stop, len(ranks))
            if i > 0:
                links = min(len(ranks), len(placed[i - 1][2]))
                hop = boundary_us(self.chain.cut_bytes(start), links, self.chain.link_us_per_byte)
                hop *= self.chain.wish / 2  # one way
                forward.append(hop)
                backward.append(hop)
                reduce.append(0.0)
            forward.append(forward_us)
            backward.append(backward_us)
            price = self.chain.costs.collectives(ranks).reduction(self.chain.costs.zero_stage)
            reduce.append(float(price.us(self._gradient[stop] - self._gradient[start])))
        steady = [(self.num_micro_batches - 1) * (f + b) for f, b in zip(forward, backward, strict=True)]
        pivot = len(placed) * 2 - 2
        for stage in range(pivot - 1, -1, -1):
            between = sum(forward[stage + 1 : pivot]) + sum(backward[stage + 1 : pivot])
            if steady[stage] > steady[pivot] + between:
                pivot = stage
        ending = max(
            (reduce[s] + (sum(backward[s : pivot + 1]) if s <= pivot else -sum(backward[pivot + 1 : s])))
            for s in range(len(forward))
        )
        return sum(forward[: pivot + 1]) + steady[pivot] + ending
