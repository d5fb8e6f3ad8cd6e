"""PipeDream's partitioner on the linearised model (Narayanan et al., SOSP 2019, section 3.1).

The DP A[i][m] over prefixes of the chain and numbers of machines minimises the slowest stage or link:
``A[j][m] = min over i, m' of max(A[i][m - m'], T(i, j, m'))``, where T is the slower of computing and of the
boundary's way over m' links (`time_formula.boundary_us`, as for all planners here). Here it runs over suffixes, with
the number of stages so far as a further index, so that memory is checked with a stage's own in-flight
(1F1B with flushes: as many micro-batches as stages from it to the last); PipeDream itself checks none.

Deviations: the model is linearised branch after branch, as GraphPipe's authors did (antichains explode:
6,563 on MMT); one level of the DP instead of one a bandwidth level, with the all-reduce of m' ranks over
the link that joins them; every micro-batch size is tried and the quickest chain is taken. Where stages differ in
their micro-batch sizes more are in flight than the DP counts: if its chain does not fit, the next best is taken, of
other numbers of stages and of equal degrees.

Source: PipeDream (SOSP 2019, doi 10.1145/3341301.3359646), section 3.1
Tests: tests/plan/test_baselines.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.plan.baselines.chain_costs import ChainCosts, best_sequential
from gpp_plugin.plan.batch_rules import batch_rules
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.plan.selection import explain_infeasible

Bounds = tuple[int, int, int]
"""First block, the block after the last, and degree of a stage."""


def pipedream_plan(request: PlanRequest) -> PipelinePlan:
    """Return the chain of stages with the smallest bottleneck, each data-parallel on its ranks.

    Raises:
        PlanInfeasible: no chain fits.
    """
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    rules = batch_rules(request)
    chains = [ChainCosts(request, costs, rules, wish) for wish in rules.wishes()]
    preferences = (map(chain.drafts, partition_chain(chain)) for chain in chains)
    plan = best_sequential(request, costs, preferences, planner="pipedream")
    if plan is None:
        explain_infeasible(request, costs, rules, [[[name] for name in chains[0].order], [chains[0].order]])
    return plan


def partition_chain(chain: ChainCosts) -> Iterator[list[Bounds]]:
    """Yield (start, stop, degree) of the stages of the best chain, then those of others that may need less memory."""
    found = list(chain_bottlenecks(chain, chain.rules.degrees()))
    if not chain.size_classes.are_alike:
        found += [answer for degree in chain.rules.degrees() for answer in chain_bottlenecks(chain, [degree])]
    for _, bounds in sorted(found, key=lambda answer: (answer[0], len(answer[1]))):
        yield bounds


def chain_bottlenecks(chain: ChainCosts, degrees: Sequence[int]) -> Iterator[tuple[float, list[Bounds]]]:
    """Yield for every number of stages the smallest bottleneck, microseconds a sample, and the stages with it."""
    request, num = chain.request, chain.num_blocks
    ranks = request.num_ranks
    most = min(ranks, num) if request.num_stages is None else request.num_stages
    times = {d: us for d in degrees if np.isfinite(us := chain.us_per_sample(d)).any()}
    # value[s, i, m]: microseconds a sample of the slowest stage or link of blocks i.. in s stages on exactly m ranks;
    # choice[s, i, m]: where the first of them stops, and its degree. Stages are put in front, from the last one on. For
    # 3 blocks of 10 us and links of none: value[1, 2, 1] = 10, value[1, 1, 1] = 20, and value[2, 0, 2] is the lesser
    # of max(10, 20), cut behind the first block, and max(20, 10), behind the second: 20.
    value = np.full((most + 1, num + 1, ranks + 1), np.inf)
    value[0, num, 0] = 0.0
    choice = np.zeros((most + 1, num + 1, ranks + 1, 2), dtype=int)
    for stages in range(1, most + 1):
        after = value[stages - 1]
        if not np.isfinite(after).any():
            break
        for degree in times:
            memory = chain.memory(degree, stages if request.schedule == "1f1b" else request.mini_batch)
            allowed = np.where(memory <= chain.limit, times[degree], np.inf)
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
        if np.isfinite(value[stages, 0, ranks]) and request.num_stages in (None, stages):
            yield float(value[stages, 0, ranks]), _read_back(choice, stages, ranks)


def _read_back(choice: npt.NDArray[np.int_], stages: int, ranks: int) -> list[Bounds]:
    """Return the stages of the chain of so many stages on all ranks."""
    start, found = 0, []
    while stages > 0:
        stop, degree = (int(x) for x in choice[stages, start, ranks])
        found.append((start, stop, degree))
        stages, start, ranks = stages - 1, stop, ranks - degree
    return found
