"""PipeDream's partitioner on the linearised model (Narayanan et al., SOSP 2019, section 3.1).

The DP A[i][m] over prefixes of the chain and numbers of machines minimises the slowest stage or link:
``A[j][m] = min over i, m' of max(A[i][m - m'], link_i, T(i, j, m'))``. Here it runs over suffixes, with
the number of stages so far as a further index, so that memory is checked with a stage's own in-flight
(1F1B with flushes: as many micro-batches as stages from it to the last); PipeDream itself checks none.

Deviations: the model is linearised branch after branch, as GraphPipe's authors did (antichains explode:
6,563 on MMT); one level of the DP instead of one a bandwidth level, with the all-reduce of m' ranks over
the link that joins them; every micro-batch size is tried and the quickest chain is taken.

Source: PipeDream (SOSP 2019, doi 10.1145/3341301.3359646), section 3.1
Tests: tests/plan/test_baselines.py
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.plan.baselines.chain_costs import ChainCosts, best_sequential
from gpp_plugin.plan.batch_rules import batch_rules
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.plan.selection import explain_infeasible


def pipedream_plan(request: PlanRequest) -> PipelinePlan:
    """Return the chain of stages with the smallest bottleneck, each data-parallel on its ranks.

    Raises:
        PlanInfeasible: no chain fits.
    """
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    rules = batch_rules(request)
    chains = [ChainCosts(request, costs, rules, wish) for wish in rules.wishes()]
    bounds = [(chain, found) for chain in chains for found in partition_chain(chain)]
    plan = best_sequential(request, costs, (c.drafts(found) for c, found in bounds), planner="pipedream")
    if plan is None:
        explain_infeasible(request, costs, rules, [[[name] for name in chains[0].order], [chains[0].order]])
    return plan


def partition_chain(chain: ChainCosts) -> Iterator[list[tuple[int, int, int]]]:
    """Yield the best (start, stop, degree) of each stage; one answer, or none."""
    request, num = chain.request, chain.num_blocks
    ranks = request.num_ranks
    most = min(ranks, num) if request.num_stages is None else request.num_stages
    degrees = [
        d for d in chain.rules.degrees() if chain.wish % d == 0 or chain.rules.coupled or chain.rules.fixed
    ]
    times = {d: chain.us_per_sample(d) for d in degrees}
    link = chain.link_us_per_sample(ranks)
    # value[s, i, m]: microseconds a sample of the slowest stage or link of blocks i.. in s stages on exactly m ranks;
    # choice[s, i, m]: where the first of them stops, and its degree. Stages are put in front, from the last one on. For
    # 3 blocks of 10 us and links of none: value[1, 2, 1] = 10, value[1, 1, 1] = 20, and value[2, 0, 2] is the lesser
    # of max(10, 20), cut behind the first block, and max(20, 10), behind the second: 20.
    value = np.full((most + 1, num + 1, ranks + 1), np.inf)
    value[0, num, 0] = 0.0
    choice = np.zeros((most + 1, num + 1, ranks + 1, 2), dtype=int)
    for stages in range(1, most + 1):
        in_flight = min(stages, request.mini_batch // chain.wish) if request.schedule == "1f1b" else (
            request.mini_batch // chain.wish
        )  # fmt: skip
        after = np.maximum(value[stages - 1], link[:, None])
        after[num] = value[stages - 1][num]
        if not np.isfinite(after).any():
            break
        for degree in degrees:
            allowed = np.where(chain.memory(degree, in_flight) <= chain.limit, times[degree], np.inf)
            shifted = np.full_like(after, np.inf)
            shifted[:, degree:] = after[:, : ranks + 1 - degree]
            for start in range(num):
                worst = np.maximum(allowed[start][:, None], shifted)
                stop = worst.argmin(axis=0)
                found = worst[stop, np.arange(ranks + 1)]
                is_better = found < value[stages, start]
                value[stages, start, is_better] = found[is_better]
                choice[stages, start, is_better, 0] = stop[is_better]
                choice[stages, start, is_better, 1] = degree
    final = value[:, 0, ranks]
    if request.num_stages is not None:
        final = np.where(np.arange(most + 1) == request.num_stages, final, np.inf)
    if not np.isfinite(final).any():
        return
    stages, start, left = int(final.argmin()), 0, ranks
    found_bounds = []
    while stages > 0:
        stop, degree = (int(x) for x in choice[stages, start, left])
        found_bounds.append((start, stop, degree))
        stages, start, left = stages - 1, stop, left - degree
    yield found_bounds
