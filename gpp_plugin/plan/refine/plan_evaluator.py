"""What the stages of a candidate take, on ranks of their own or on shared ones: what every search compares.

Stages on ranks of their own are predicted (`estimate`). Where ranks hold several, in-flight counts are found that fit
their memory, then the plan is simulated. That means finding the order of each rank's tasks, so it is dear. Before it
stands a bound that no order can beat: a rank cannot begin before the first micro-batch has come to one of its stages
(head), it computes all of their tasks (load), and after its last one at least the gradients of one of them travel on
(tail).

    rank 0   [ stage 0 ][ stage 2 ]            head 0,          tail 0
    rank 1       [ stage 1 ][ stage 3 ]        head F of 0,     tail B of 0 (its last task may be stage 1's)

Source: interleaving, Megatron-LM (arXiv 2104.04473), section 2.2; controllable memory (arXiv 2405.15362); this project
Tests: tests/plan/test_shared_ranks_plans.py, tests/plan/test_quality.py
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from gpp_plugin.errors import PlanError, ScheduleError
from gpp_plugin.ir.cluster import Cluster
from gpp_plugin.ir.plan import PipelinePlan, Stage, on_own_ranks, rank_bytes
from gpp_plugin.plan.costs.cost_model import CostModel, remembered
from gpp_plugin.plan.costs.estimate import estimate_plan_us, update_times
from gpp_plugin.plan.make import (
    StageDraft,
    build_plan,
    pending_bytes,
    splits_backwards,
    with_link_times,
    with_part_times,
    with_pending,
)
from gpp_plugin.plan.memory.fitting import StageFitter
from gpp_plugin.plan.request import PlanRequest, SearchReport
from gpp_plugin.plugins import find_schedule, k_of
from gpp_plugin.schedule.build import build_schedules, plan_in_flight, with_schedule
from gpp_plugin.simulate.predict import predict_iteration_us

# A smaller plan that takes as long: ranks that hold the same stages side by side become one.
#
# Two stages of four ranks each, micro-batches of eight, are simulated as two stages of one rank each, micro-batches of
# two: the same tasks, the same bytes a message, a quarter of the nodes. It is exact where ranks side by side do the
# same at the same times; what differs (a link that only some of them share) is left to the last judgement of the whole
# plan.


def collapsed(plan: PipelinePlan, cluster: Cluster) -> tuple[PipelinePlan, Cluster]:
    """Return the plan with sets of ranks that hold the same stages as one, and the cluster of these; as large as
    possible, and the plan as it is where that is not.
    """
    # Of a tower on ranks 0 to 7 and a trunk of stages on (0, 1), (2, 3), (4, 5) and (6, 7) four pairs of ranks hold the
    # same stages: width 2, ranks 0 to 3, the tower's micro-batch of 8 becomes 4 and the trunk's of 2 becomes 1.
    holders = holders_of(plan)
    width = math.gcd(*holders.values(), plan.mini_batch, *(stage.micro_batch_size for stage in plan.stages))
    while width > 1:
        found = _with_width(plan, cluster, width)
        if found is not None:
            return found
        width = max(other for other in range(1, width) if width % other == 0)
    return plan, cluster


def holders_of(plan: PipelinePlan) -> dict[tuple[int, ...], int]:
    """Return the sets of stages that ranks hold, and how many ranks hold each.

    As `PipelinePlan.stages_of_rank` of every rank, in one walk over the stages: of thousands of ranks that counts.
    """
    held: dict[int, list[int]] = defaultdict(list)
    for index, stage in enumerate(plan.stages):
        for rank in stage.ranks:
            held[rank].append(index)
    return dict(Counter(tuple(own) for own in held.values()))


def _with_width(plan: PipelinePlan, cluster: Cluster, width: int) -> tuple[PipelinePlan, Cluster] | None:
    """Return the same with ``width`` ranks as one; None where they do not lie side by side, or tensors are sharded."""
    number: dict[tuple[int, ...], int] = {}
    for first in range(0, plan.num_ranks, width):
        number[tuple(range(first, first + width))] = len(number)
    stages = []
    for stage in plan.stages:
        parts = [stage.ranks[i : i + width] for i in range(0, len(stage.ranks), width)]
        if stage.model_parallel > 1 or any(part not in number for part in parts):
            return None
        ranks = tuple(number[part] for part in parts)
        stages.append(
            dataclasses.replace(stage, ranks=ranks, micro_batch_size=stage.micro_batch_size // width)
        )
    if any(link.span % width and width % link.span for link in cluster.links):
        return None
    # Of micro-batches of 16 and 8 on ranks 0 and 1, samples 4 to 7 are rank 0's, then rank 1's: they travel.
    for src, dst in ((plan.stages[edge.src], plan.stages[edge.dst]) for edge in plan.edges):
        if src.local_batch_size != dst.local_batch_size and not set(src.ranks).isdisjoint(dst.ranks):
            return None
    # a level of fewer ranks than are one now joins none any more
    links = tuple(
        dataclasses.replace(link, span=link.span // width) for link in cluster.links if link.span % width == 0
    )
    small = dataclasses.replace(
        cluster, devices=cluster.devices[: plan.num_ranks : width], links=links or cluster.links[-1:]
    )
    return (
        dataclasses.replace(plan, mini_batch=plan.mini_batch // width, loss_unit=1, stages=tuple(stages)),
        small,
    )


logger = logging.getLogger(__name__)

Drafts = tuple[StageDraft, ...]
"""Stages with ranks."""

BUDGET = 60_000
"""Simulated tasks of a search."""
EXACT_TASKS = 160
"""Up to so many a plan is simulated exactly at once: as fast as that is with more of them roughly."""
EXACT_COST = 6
"""Finding the orders of stages together takes about so many times what turns of fixed orders take."""
LEFT_OUT = "some ways to share ranks"
"""What is not searched when the budget is spent."""
FACTORS = (1.0, 1.5, 2.0)
"""Times Table 2's in-flight counts that are tried in the end, where memory allows."""


Score = tuple[float, float, float]
"""(bytes too many, predicted microseconds, what decides between equal ones); smaller is better."""

OVERHEAD = 200
"""Simulated tasks that cost as much as building a candidate does; ``GLANCE`` as looking at one's bound, and ``LOOK``
where its ranks are fixed."""
GLANCE, LOOK = 40, 4


def memory_excess(request: PlanRequest, plan: PipelinePlan) -> tuple[int, Stage, int]:
    """Return by how many bytes the worst rank exceeds its device (negative: fits), its largest stage, and which."""
    needs: dict[int, list[tuple[int, int]]] = {}
    largest: dict[int, Stage] = {}
    for stage in plan.stages:
        for rank in stage.ranks:
            needs.setdefault(rank, []).append((stage.memory_bytes, stage.gathered_bytes))
            if rank not in largest or stage.memory_bytes > largest[rank].memory_bytes:
                largest[rank] = stage
    over = [
        (int(rank_bytes(peaks)) - request.rank_limits[rank], largest[rank], rank)
        for rank, peaks in needs.items()
    ]
    return max(over, key=lambda item: item[0])


class PlanEvaluator:
    """Evaluates plans of one request, within a budget of simulated tasks; results are cached.

    Args:
        schedule: of all stages of the plans that are made.
        budget: tasks of all simulations together.
        fitter: what a stage costs to fit where it does not; None: it then needs too much.
        scores: those of stages without a fitter that were found under the same costs; filled.
    """

    def __init__(
        self,
        request: PlanRequest,
        costs: CostModel,
        *,
        schedule: str = "1f1b",
        budget: int = BUDGET,
        fitter: StageFitter | None = None,
        report: SearchReport | None = None,
        scores: dict[object, Score] | None = None,
    ) -> None:
        self.request, self.costs, self.budget = request, costs, budget
        self._scores = {} if scores is None or fitter is not None else scores
        self.num_simulated = 0
        self._schedule = schedule
        self._fitter = fitter
        self._report = SearchReport() if report is None else report
        self._known: dict[tuple[frozenset[StageDraft], bool], PipelinePlan | None] = {}
        self._refined: dict[tuple[Stage, ...], PipelinePlan] = {}

    def score(self, drafts: Sequence[StageDraft]) -> Score:
        """Return the score of stages on ranks of their own, within Table 2's in-flight counts and their excess."""
        mini_batch, limits = self.request.mini_batch, self.request.rank_limits
        # what was scored before costs as much, so that a search finds the same whatever came before it
        self.budget -= OVERHEAD + 2 * sum(mini_batch // draft.micro_batch_size for draft in drafts)
        key = limits, tuple(drafts)
        if key not in self._scores:
            plan = build_plan(self.request, drafts, planner="", costs=self.costs, is_named=False)
            if self._fitter is not None:
                plan = self._fitter.estimated(plan)
            times = [(s.forward_us + s.backward_us) / s.micro_batch_size for s in plan.stages]
            excess = sum(max(0, s.memory_bytes - min(limits[rank] for rank in s.ranks)) for s in plan.stages)
            us = estimate_plan_us(plan, self.costs)
            self._scores[key] = float(excess), us, sum(t * t for t in times)
        return self._scores[key]

    def plan_of(self, drafts: Drafts) -> PipelinePlan:
        """Return the plan of these stages under its schedule, unnamed and unjudged, with the usual in-flight counts."""
        plan = build_plan(self.request, drafts, planner="", costs=self.costs, is_named=False)
        return plan if self._schedule == self.request.schedule else under(plan, self._schedule, self.costs)

    def busiest_us(self, drafts: Drafts) -> float:
        """Return how long the busiest rank of these stages computes: no more than `least_us`, and quick."""
        # Few of a start's sets of ranks are wide (a branch on all ranks); the others are groups, equal or disjoint.
        held: dict[tuple[int, ...], float] = {}
        for draft in drafts:
            if draft.ranks is not None:
                ranks = draft.ranks if self.costs.is_mixed else None
                us = self._stage_us(draft.blocks, draft.micro_batch_size / draft.degree, ranks)
                us *= self.request.mini_batch // draft.micro_batch_size
                held[draft.ranks] = held.get(draft.ranks, 0.0) + us
        narrow = min(map(len, held), default=0)
        wide = [ranks for ranks in held if len(ranks) > narrow]
        loads = (
            us + sum(held[other] for other in wide if other != ranks and ranks[0] in other)
            for ranks, us in held.items()
        )
        return max(loads, default=0.0)

    @remembered
    def _stage_us(self, blocks: tuple[str, ...], local: float, ranks: tuple[int, ...] | None) -> float:
        return sum(self.costs.stage_times(self.costs.indices(blocks), local, ranks))

    def least_us(self, plan: PipelinePlan) -> float:
        """Return a time that no step of the plan is shorter than, messages taken to be free."""
        heads, tails = _heads_and_tails(plan)
        stages = self.costs.reductions(plan).stages
        behind = [
            own.least_behind_us(stage.backward_us, plan.num_micro_batches(i))
            for i, (stage, own) in enumerate(zip(plan.stages, stages, strict=True))
        ]
        # when all ranks are through, each updates its stages and gathers their parameters
        steps = [
            us + own.step_us for us, own in zip(update_times(plan, self.costs).values(), stages, strict=True)
        ]
        least = step = 0.0
        for own in holders_of(plan):
            load = sum(
                (plan.stages[i].forward_us + plan.stages[i].backward_us) * plan.num_micro_batches(i)
                for i in own
            )
            after = max(min(tails[i] for i in own), min(behind[i] for i in own))
            least = max(least, min(heads[i] for i in own) + load + after)
            step = max(step, sum(steps[i] for i in own))
        return least + step

    def evaluated(
        self, drafts: Drafts, *, below_us: float = math.inf, is_exact: bool = False
    ) -> PipelinePlan | None:
        """Return the plan of these stages with in-flight counts that fit, and its time.

        None where nothing fits, it cannot run, or it cannot be shorter than ``below_us``.

        Args:
            is_exact: the time of the orders that will run. Else each stage keeps the order it has on ranks of its own,
                which is what a search compares: quicker to find, and never shorter.
        """
        key = frozenset(drafts), is_exact
        if key in self._known:
            return self._known[key]
        if self.is_spent() or self.busiest_us(drafts) >= below_us:
            return None
        plan = self.plan_of(drafts)
        self.budget -= plan.num_ranks + len(plan.stages)  # which has taken its time too
        if self.least_us(plan) >= below_us:
            return None
        is_small = plan.num_rank_tasks <= EXACT_TASKS  # which is simulated exactly at once
        best = self._best(self._fitting(plan, FACTORS if is_small else FACTORS[:1]), is_exact=is_exact)
        self._known[key] = best
        if is_small:
            self._known[key[0], not is_exact] = best
        return best

    def best_counts(self, plan: PipelinePlan) -> PipelinePlan | None:
        """Return the plan with the in-flight counts of the shortest step that fits; None where nothing does."""
        best = self._best(self._fitting(plan, FACTORS), is_exact=True)
        return None if best is None else self.refined(best)

    def is_spent(self) -> bool:
        """Return whether the budget is; what is not searched for that reason is taken down."""
        if self.budget <= 0:
            self._report.leave_out(LEFT_OUT)
        return self.budget <= 0

    def refined(self, best: PipelinePlan) -> PipelinePlan:
        """Return a timed plan with orders that reckon with the links where those are shorter, and, if it has few tasks,
        with what raising or lowering one in-flight count after another gains; as it is where the budget is spent.
        """
        key = best.stages
        if key not in self._refined:
            if self.is_spent():
                return best
            linked = with_link_times(best, self.costs.cluster)
            timed = None if linked is best else self._timed(linked, is_exact=True)
            if timed is not None and timed.iteration_us < best.iteration_us * (1 - 1e-9):
                best = timed
            is_small = best.num_rank_tasks <= EXACT_TASKS
            self._refined[key] = self._with_moved_counts(best) if is_small else best
        return self._refined[key]

    def _with_moved_counts(self, best: PipelinePlan) -> PipelinePlan:
        """Return the plan after every change of one in-flight count that makes its step shorter."""
        if any(stage.memory is not None for stage in best.stages):
            return best
        is_improved = True
        while is_improved:
            is_improved = False
            for index, step in itertools.product(range(len(best.stages)), (1, -1)):
                if self.is_spent():
                    return best
                counts = [stage.in_flight for stage in best.stages]
                counts[index] += step
                if not 1 <= counts[index] <= best.num_micro_batches(index):
                    continue
                changed = with_counts(best, counts, self.costs)
                if memory_excess(self.request, changed)[0] > 0:
                    continue
                timed = self._timed(changed, is_exact=True)
                if timed is not None and timed.iteration_us < best.iteration_us * (1 - 1e-9):
                    best, is_improved = timed, True
        return best

    def _best(self, plans: Iterator[PipelinePlan], *, is_exact: bool) -> PipelinePlan | None:
        best: PipelinePlan | None = None
        for fitted in plans:
            if best is not None and self.is_spent():
                break
            timed = self._timed(fitted, is_exact=is_exact)
            if timed is not None and (best is None or timed.iteration_us < best.iteration_us * (1 - 1e-9)):
                best = timed
        return best

    def _timed(self, plan: PipelinePlan, *, is_exact: bool) -> PipelinePlan | None:
        """Return a plan with its simulated time; None where it cannot run."""
        small, cluster = collapsed(plan, self.costs.cluster)
        tasks = small.num_rank_tasks
        is_exact = is_exact or tasks <= EXACT_TASKS
        self.budget -= tasks * (EXACT_COST if is_exact and plan.shares_ranks else 1)
        self.num_simulated += 1
        try:
            built = None
            if not is_exact or splits_backwards(plan):
                built = build_schedules(small if is_exact else on_own_ranks(small))
            if built is not None and splits_backwards(plan):
                plan = with_pending(plan, self.costs, built)
                if memory_excess(self.request, plan)[0] > 0:
                    return None
            us = predict_iteration_us(
                small,
                cluster=cluster,
                schedules=built,
                reduce_us=self.costs.reductions(plan),
                step_us=update_times(plan, self.costs),
            )
        except (ScheduleError, PlanError) as error:
            logger.debug("stages on shared ranks: %s", error)
            return None
        return dataclasses.replace(plan, iteration_us=us)

    def _fitting(self, plan: PipelinePlan, factors: Sequence[float]) -> Iterator[PipelinePlan]:
        """Yield the plan with in-flight counts and memory plans that fit, those that hold least first."""
        seen = set()
        for factor in factors:
            counts = tuple(
                min(math.ceil(stage.in_flight * factor), plan.num_micro_batches(i))
                for i, stage in enumerate(plan.stages)
            )
            if counts in seen:
                continue
            seen.add(counts)
            more = with_counts(plan, counts, self.costs)
            if memory_excess(self.request, more)[0] <= 0:
                yield more
                continue
            if factor > factors[0]:
                return
            fitted = self._optimized(more)
            if fitted is not None:
                yield fitted
            fewer = self._with_fewer(more)
            if fewer is not None:
                yield fewer

    def _with_fewer(self, plan: PipelinePlan) -> PipelinePlan | None:
        """Return the plan with fewer micro-batches in flight, on the stages that hold most; None where that is not
        enough.
        """
        while True:
            excess, _, rank = memory_excess(self.request, plan)
            if excess <= 0:
                return plan
            own = [i for i in plan.stages_of_rank(rank) if plan.stages[i].in_flight > 1]
            if not own:
                return None
            worst = max(own, key=lambda i: (self._saved_bytes(plan.stages[i]), -i))
            counts = [stage.in_flight - (i == worst) for i, stage in enumerate(plan.stages)]
            plan = with_counts(plan, counts, self.costs)

    def _saved_bytes(self, stage: Stage) -> float:
        rows = self.costs.indices(stage.blocks)
        return stage.in_flight * self.costs.on(stage).group_saved_bytes(rows, stage.local_batch_size)

    def _optimized(self, plan: PipelinePlan) -> PipelinePlan | None:
        """Return the plan with stages that swap and recompute, each within its share of its ranks' memory."""
        if self._fitter is None:
            return None
        totals = [
            sum(plan.stages[i].memory_bytes for i in plan.stages_of_rank(rank))
            for rank in range(plan.num_ranks)
        ]
        stages = []
        for stage in plan.stages:
            # a rank of 80 GB whose stages need 60 and 40: they get 48 and 32
            limit = min(
                self.request.rank_limits[rank] * min(stage.memory_bytes / totals[rank], 1.0)
                for rank in stage.ranks
            )
            is_over = any(totals[rank] > self.request.rank_limits[rank] for rank in stage.ranks)
            if find_schedule(stage.schedule).splits_backward:
                limit -= pending_bytes(stage, self.costs, stage.in_flight)
            stages.append(self._fitter.fitted_stage(stage, limit=int(limit)) if is_over else stage)
        changed = dataclasses.replace(plan, stages=tuple(stages))
        if splits_backwards(changed):
            changed = with_part_times(changed, self.costs)
        return changed if memory_excess(self.request, changed)[0] <= 0 else None


def under(plan: PipelinePlan, schedule: str, costs: CostModel) -> PipelinePlan:
    """Return the plan with one schedule on all stages, and its in-flight counts."""
    k = k_of(schedule)
    changed = with_schedule(plan, schedule if k is None else "1f1b", k or 1)
    return with_counts(changed, plan_in_flight(changed), costs)


def with_counts(plan: PipelinePlan, counts: Sequence[int], costs: CostModel) -> PipelinePlan:
    """Return the plan with these in-flight counts and the memory they lead to."""
    stages = []
    for stage, count in zip(plan.stages, counts, strict=True):
        if count == stage.in_flight:
            stages.append(stage)
            continue
        memory = costs.memory_of(stage, count)
        stages.append(dataclasses.replace(stage, in_flight=count, pending=0, memory_bytes=memory))
    return dataclasses.replace(plan, stages=tuple(stages))


def _heads_and_tails(plan: PipelinePlan) -> tuple[list[float], list[float]]:
    """Return by stage when its first forward can begin, and what its last backward leaves others to do."""
    # A stage of micro-batches of 8 behind one of 2 waits for four forwards of that; after its last backward that one
    # has four backwards to go. A stage of 2 behind one of 8 waits for one, and leaves one.
    heads, tails = [0.0] * len(plan.stages), [0.0] * len(plan.stages)
    for edge in plan.edges:  # sorted by source, and sources come first in a plan
        src, dst = plan.stages[edge.src], plan.stages[edge.dst]
        rounds = -(-dst.micro_batch_size // src.micro_batch_size)
        heads[edge.dst] = max(heads[edge.dst], heads[edge.src] + rounds * src.forward_us)
        if edge.gradient_tensors:
            back = src.backward_us
            if find_schedule(src.schedule).splits_backward:
                is_known = src.input_gradient_us + src.weight_gradient_us > 0
                back = src.input_gradient_us if is_known else back / 2
            tails[edge.dst] = max(tails[edge.dst], tails[edge.src] + rounds * back)
    return heads, tails
