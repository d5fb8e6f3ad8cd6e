"""Plans where ranks hold several stages, on request or where shorter: interleaving, and branches on ranks of others.

    plans, one stage a rank, of several planners
      1 starts          `StartMaker`: partitions, maps and micro-batch sizes, in the order of a bound on their step
      2 simulated       the first `NUM_STARTS` of them, with in-flight counts that fit their ranks' memory: roughly,
                        then the best `NUM_EXACT` exactly
      3 improved        the best `NUM_IMPROVED` by the moves of all stages (`Refiner.improve`)
      4 refined         the best `NUM_REFINED`: orders that reckon with links, in-flight counts one by one
      5 schedules       the best one under each schedule that is allowed
    the shortest of all, and the plan itself where nothing is shorter; its notes say what was tried

1 to 4 have a budget, from each plan that stages are taken of (`_searches`): the best one and, of planner ``auto``,
GraphPipe's, and the best with one micro-batch size for all stages. What one has simulated all know. Models too large
for that have one search, and a note.

Everything is counted, nothing is timed: the same request gives the same plan on every machine.

Source: Optimus (ATC 2025); Megatron-LM (arXiv 2104.04473), section 2.2; this project
Tests: tests/plan/test_shared_ranks_plans.py
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from gpp_plugin.config.key_names import name_of, setting_of
from gpp_plugin.errors import PlanError, PlanInfeasible
from gpp_plugin.garbage import paused_collector
from gpp_plugin.ir.plan import PipelinePlan, stage_compute_us
from gpp_plugin.plan.baselines.stock_chain import STOCK
from gpp_plugin.plan.choose_schedule import GAIN, SPLIT, first_schedule, schedule_shared
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.costs.memory_formula import complete_plan
from gpp_plugin.plan.make import StageDraft, build_plan
from gpp_plugin.plan.memory.fitting import fitter_for
from gpp_plugin.plan.refine.block_sets import FEW_BLOCKS, Partitioner
from gpp_plugin.plan.refine.plan_evaluator import BUDGET, LEFT_OUT, Drafts, PlanEvaluator
from gpp_plugin.plan.refine.refine import Candidate, Refiner
from gpp_plugin.plan.registry import run_planner
from gpp_plugin.plan.request import BatchRules, PlanRequest, SearchReport, batch_rules, one_stage_a_rank
from gpp_plugin.plan.validate_plan import validate_for
from gpp_plugin.plugins import AUTO

logger = logging.getLogger(__name__)

NUM_STARTS = 40
"""Starts that are simulated, those with the smallest bounds; of each way to share ranks at most ``PER_WAY``, and
of one micro-batch size ``PER_SIZE``."""
PER_WAY, PER_SIZE = 8, 3
NUM_EXACT = 6
"""Of these, how many are simulated with the orders that will run."""
NUM_IMPROVED = 4
NUM_SIZES, NEAR_SIZE = 5, 1.25
"""Micro-batch sizes that are searched alone at most: those whose best start takes up to so many times the shortest."""
MAX_BASELINE_SIZE, MAX_BASES_SIZE = 6_000, 2_000
"""Blocks x ranks up to which there is more than one search, and up to which there are searches from other plans."""
NUM_REFINED = 12
"""Of all that were simulated exactly, how many get the best orders and in-flight counts."""
LARGE_EXACT, LARGE_IMPROVED, LARGE_REFINED, LARGE_GROUPS = 2, 1, 1, 16
"""The same of models too large for several searches, and into how many groups their ranks are divided at most."""
IDLE = 0.02
"""Ranks that compute less than this part of the busiest one's are named."""
NEAR = 1.15
"""Times the shortest start, up to which others are simulated: moves gain as much."""


@paused_collector()  # as in `make_plan`
def share_ranks(plan: PipelinePlan, request: PlanRequest, *, schedule: str = "auto") -> PipelinePlan:
    """Return ``plan``, or one whose ranks hold several stages where the request is for it or allows it and it is
    shorter by more than a simulation may be off.

    Args:
        plan: of the same request, scheduled; its ranks hold one stage each.
        schedule: the name the user gives.

    Raises:
        PlanInfeasible: only such a plan would do, and none fits.
    """
    if not request.may_share_ranks or plan.shares_ranks:
        return _with_idle_ranks(plan)
    if any(stage.model_parallel > 1 for stage in plan.stages) or request.has_grids:
        note = "ranks hold one stage each: those with tensor ranks share none"
        return dataclasses.replace(plan, notes=(*plan.notes, note))
    request = dataclasses.replace(request, tensor_parallel=1, sequence_parallel=1)
    if plan.planner == STOCK:
        raise PlanInfeasible(
            f"planner {STOCK!r} makes stages for DeepSpeed's own PipelineEngine, which holds one a rank; use another "
            f"planner, or write {setting_of('virtual_stages', 1)}, {setting_of('colocate', 'off')} and "
            f"{setting_of('stages', request.num_ranks)} or less"
        )
    report = SearchReport()
    setting = _Setting(request, schedule, report)
    searches: list[_Search] = []
    found: list[PipelinePlan] = []
    for wanted, base in _searches(plan, request, searches, report):
        searches.append(_Search(wanted, base, setting))
        report.begin(f"ways to share ranks, search {len(searches)}")
        best = searches[-1].best()
        found += [] if best is None else [best]
    if not found:
        if request.must_share_ranks:
            raise PlanInfeasible(_why_none(request, searches[0].num_starts, report))
        note = f"no way to share ranks {'was found' if report.has_left_out(LEFT_OUT) else 'fits'}"
        return dataclasses.replace(plan, notes=(*plan.notes, note, *report.notes))
    num_tried = setting.evaluator.num_simulated
    report.begin("schedules of the best way to share ranks")
    shared = setting.scheduled(min(found, key=lambda each: each.iteration_us))
    shared = dataclasses.replace(shared, planner=plan.planner)
    gain = plan.iteration_us / shared.iteration_us - 1.0  # 0.1 of 110 us and 100 us
    than = f"{abs(gain):.1%} {'quicker' if gain >= 0 else 'slower'} than one stage a rank"
    tried = f"{len(shared.stages)} stages on {shared.num_ranks} ranks, the best of {num_tried} ways to share ranks"
    if not request.must_share_ranks and shared.iteration_us >= plan.iteration_us * (
        1.0 - max(GAIN, request.band)
    ):
        note = f"ranks of one stage each: {tried}, are {than}"
        return dataclasses.replace(plan, notes=(*plan.notes, note, *report.notes))
    note = f"{tried}: {than}"
    shared = dataclasses.replace(shared, notes=(*shared.notes, *report.notes, note))
    validate_for(shared, request)
    return complete_plan(shared, request.graph, request.profile)


def _with_idle_ranks(plan: PipelinePlan) -> PipelinePlan:
    """Return the plan with a note of the ranks that hardly compute, if any: stages of others may share them."""
    # a loss over all samples of a step takes 1 % of it, and units leave it a rank of its own
    if plan.mode != "sync" or plan.planner == STOCK:
        return plan
    loads = [stage_compute_us(plan, index) for index in range(len(plan.stages))]
    idle = [
        rank
        for load, stage in zip(loads, plan.stages, strict=True)
        for rank in stage.ranks
        if load < IDLE * max(loads)
    ]
    if not idle:
        return plan
    noun = "rank" if len(idle) == 1 else "ranks"
    note = (
        f"{noun} {', '.join(map(str, idle))}: less than {IDLE:.0%} of what the busiest computes; "
        f"{setting_of('colocate', 'auto')} lets stages share ranks"
    )
    return dataclasses.replace(plan, notes=(*plan.notes, note))


def _searches(
    plan: PipelinePlan, request: PlanRequest, done: Sequence[_Search], report: SearchReport
) -> Iterator[tuple[PlanRequest, PipelinePlan]]:
    """Yield what is searched, one after the other: a request that the whole one contains, and a plan to start from.

    Args:
        plan: the best known whose ranks hold one stage each.
        done: the searches so far, of those yielded before.
    """
    yield request, plan
    if is_large(request):
        report.leave_out(
            f"ways to share ranks beyond one search, and more than {LARGE_GROUPS} groups of ranks (more than "
            f"{MAX_BASELINE_SIZE} blocks x ranks)"
        )
        return
    if len(request.graph.blocks) > FEW_BLOCKS and request.colocate and request.virtual_stages is None:
        # what is not searched thoroughly is also searched with less freedom
        yield dataclasses.replace(request, colocate=False), plan
        yield dataclasses.replace(request, virtual_stages=1), plan
    if plan.planner != "auto":
        return
    if len(request.graph.blocks) * request.num_ranks > MAX_BASES_SIZE:
        report.leave_out(
            f"ways to share ranks from other plans than the best (more than {MAX_BASES_SIZE} blocks x ranks)"
        )
        return
    alone = dataclasses.replace(one_stage_a_rank(request), final_schedule=None)  # as starts are compared
    base = _plan_of("graphpipe", alone)
    if base is not None and {frozenset(s.blocks) for s in base.stages} != {
        frozenset(s.blocks) for s in plan.stages
    }:
        yield request, base
    if request.micro_batch_sizes is not None:
        return
    if request.memory_optimization:
        report.leave_out("one micro-batch size for all stages on shared ranks, with swap or recompute")
        return
    for size in _best_sizes(done):
        sizes = {"*": size}
        base = _plan_of("auto", dataclasses.replace(alone, micro_batch_sizes=sizes))
        if base is not None:
            yield dataclasses.replace(request, micro_batch_sizes=sizes), base


def is_large(request: PlanRequest) -> bool:
    """Return whether there is time for one search only."""
    return len(request.graph.blocks) * request.num_ranks > MAX_BASELINE_SIZE


def _plan_of(planner: str, request: PlanRequest) -> PipelinePlan | None:
    try:
        return run_planner(planner, request)
    except PlanError as error:
        logger.debug("planner %s has no plan to start from: %s", planner, error)
        return None


def _best_sizes(searches: Sequence[_Search]) -> list[int]:
    """Return the micro-batch sizes with which starts were shortest, the largest of each start's stages."""
    best: dict[int, float] = {}
    for search in searches:
        for size, us in search.best_of_sizes.items():
            best[size] = min(best.get(size, us), us)
    near = min(best.values(), default=0.0) * NEAR_SIZE
    return sorted((size for size in best if best[size] <= near), key=lambda size: best[size])[:NUM_SIZES]


def _why_none(request: PlanRequest, num_starts: int, report: SearchReport) -> str:
    wanted = (
        setting_of("virtual_stages", request.virtual_stages)
        if (request.virtual_stages or 1) > 1
        else f"{request.num_stages} stages on {request.num_ranks} ranks"
    )
    if num_starts == 0:
        degree = (
            "" if request.data_parallel is None else f", {setting_of('data_parallel', request.data_parallel)}"
        )
        return (
            f"{wanted}: no way to put them on {request.num_ranks} ranks{degree} divides the mini-batch of "
            f"{request.mini_batch} in loss units of {request.loss_unit}; change {name_of('stages')}, "
            f"{name_of('virtual_stages')}, {name_of('data_parallel')} or {name_of('micro_batch_sizes')}"
        )
    if report.has_left_out(LEFT_OUT):
        return (
            f"{wanted}: none was found that fits, and not all of {num_starts} ways to put them on {request.num_ranks} "
            f"ranks were searched, for want of time: {BUDGET} simulated tasks; raise "
            f"{name_of('micro_batch_sizes')}, lower {name_of('virtual_stages')}, or add ranks"
        )
    return (
        f"{wanted}: none of {num_starts} ways to put them on {request.num_ranks} ranks fits their memory; lower "
        f"{name_of('virtual_stages')} or {name_of('micro_batch_sizes')}, add ranks, or raise "
        f"{name_of('memory.limit_gb')}"
    )


# Which group of ranks holds which stage: the maps that interleaving and its relatives are made of.
#
# Stages are numbered in the plan's order, groups in the order of ranks. Eight stages on four groups:
#
#     stage          0  1  2  3  4  5  6  7
#     round robin    0  1  2  3  0  1  2  3      interleaved 1F1B (Narayanan et al. 2021, section 2.2)
#     back and forth 0  1  2  3  3  2  1  0      the V of ZB-V and V-Half (Qi et al. 2024, arXiv 2405.15362)
#     in a row       0  0  1  1  2  2  3  3      a branch a group: a plan has the stages of one behind each other

Map = tuple[int, ...]
"""By stage, the number of its group."""

FEW = 5
"""Stages of which all maps are tried: 90 at most."""


def round_robin(num_stages: int, num_groups: int) -> Map:
    """Return the map of interleaving.

    >>> round_robin(5, 2)
    (0, 1, 0, 1, 0)
    """
    return tuple(stage % num_groups for stage in range(num_stages))


def back_and_forth(num_stages: int, num_groups: int) -> Map:
    """Return the map that turns around at both ends.

    >>> back_and_forth(6, 2)
    (0, 1, 1, 0, 0, 1)
    """
    there = range(num_groups)
    ways = itertools.cycle((tuple(there), tuple(reversed(there))))
    return tuple(itertools.islice(itertools.chain.from_iterable(ways), num_stages))


def in_a_row(num_stages: int, num_groups: int) -> Map:
    """Return the map of consecutive stages on one group.

    >>> in_a_row(5, 2)
    (0, 0, 0, 1, 1)
    """
    return tuple(stage * num_groups // num_stages for stage in range(num_stages))


def evened_out(loads: Sequence[float], num_groups: int) -> Map:
    """Return the map that gives the heaviest stages first, each to the group with least so far.

    >>> evened_out([3.0, 2.0, 2.0, 1.0], 2)
    (0, 1, 1, 0)
    """
    held = [0.0] * num_groups
    groups = [0] * len(loads)
    for stage in sorted(range(len(loads)), key=lambda stage: (-loads[stage], stage)):
        groups[stage] = min(range(num_groups), key=lambda group: (held[group], group))
        held[groups[stage]] += loads[stage]
    return renamed(groups)


def renamed(groups: Sequence[int]) -> Map:
    """Return the map with groups numbered as they are first met: groups are alike but for their links."""
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(group, len(numbers)) for group in groups)


def usual_maps(loads: Sequence[float], num_groups: int) -> list[Map]:
    """Return the maps that a search starts with, each once: all there are of a few stages.

    Args:
        loads: by stage, its work.
    """
    count = len(loads)
    if count <= FEW:
        return [
            each
            for each in itertools.product(range(num_groups), repeat=count)
            if each == renamed(each) and len(set(each)) == num_groups
        ]
    found = [
        round_robin(count, num_groups),
        back_and_forth(count, num_groups),
        in_a_row(count, num_groups),
        evened_out(loads, num_groups),
    ]
    return [each for each in dict.fromkeys(found) if len(set(each)) == num_groups]


# Where a search for plans of shared ranks starts: interleaved stages, branches on the ranks of others, and both.
#
# N ranks, the first four of eight here, in p groups of d; v stages a group:
#
#     interleaved      v p stages of d ranks each, put on groups by maps (`usual_maps`)
#     colocated        a branch on the ranks of the rest, which is planned on all ranks as p or v p stages:
#                      over all ranks, over those of the first groups or the last, or cut into p stages, one a group


VIRTUAL = (2, 3, 4)
"""Stages a group of ranks that are tried where the number is left open."""
AS_PLANNED = "stages of ranks of their own, some moved to those of others"
BRANCH_SIZES = 3
"""Micro-batch sizes of a branch that are tried beside one of the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Stages with ranks, and what to call their way to share these."""

    drafts: Drafts
    how: str


class StartMaker:
    """Makes starts for one request from a plan whose ranks hold one stage each.

    Args:
        plan: the best such plan known.
        most_groups: of equal size, into which ranks are divided.
    """

    def __init__(
        self,
        request: PlanRequest,
        rules: BatchRules,
        partitioner: Partitioner,
        plan: PipelinePlan,
        *,
        most_groups: int | None = None,
    ) -> None:
        self._most_groups = request.num_ranks if most_groups is None else most_groups
        self._request, self._rules, self._partitioner = request, rules, partitioner
        self._plan = plan
        self._groups = [stage.blocks for stage in plan.stages]
        self._num_blocks = len(request.graph.blocks)

    def starts(self) -> Iterator[Start]:
        """Yield all starts the request allows."""
        request = self._request
        if not request.must_share_ranks:
            drafts = (dataclasses.replace(StageDraft.of(s), ranks=s.ranks) for s in self._plan.stages)
            yield Start(drafts=tuple(drafts), how=AS_PLANNED)
        if request.virtual_stages != 1 or request.must_share_ranks:
            for degree, count in self._counts():
                yield from self.interleaved(degree, count)
        if request.colocate and request.num_stages is None:
            for branch in self._partitioner.branches():
                yield from self.colocated(branch)

    def _counts(self) -> Iterator[tuple[int, int]]:
        """Yield (ranks of a group, stages in all) that are requested or worth trying."""
        # 8 ranks, virtual stages "auto": groups of 1, 2 and 4 with 2, 3 and 4 stages each: (1, 16), (1, 24) ...
        request = self._request
        for degree in self._degrees():
            groups = request.num_ranks // degree
            if request.num_stages is not None:
                is_even = request.num_stages == (request.virtual_stages or 0) * groups
                if request.num_stages > groups and (is_even or request.virtual_stages in (None, 1)):
                    yield degree, request.num_stages
                continue
            virtual = VIRTUAL if request.virtual_stages in (None, 1) else (request.virtual_stages,)
            for each in virtual:
                if each is not None and each * groups <= self._num_blocks:
                    yield degree, each * groups

    def _degrees(self) -> list[int]:
        """Return the sizes of groups, equal ones, that make at least two groups; all ranks as one where none do."""
        total = self._request.num_ranks
        fitting = [degree for degree in self._rules.degrees if total % degree == 0]
        fitting = [degree for degree in fitting if total // degree <= self._most_groups] or fitting
        return [degree for degree in fitting if degree < total] or fitting

    def interleaved(self, degree: int, count: int) -> Iterator[Start]:
        """Yield starts of ``count`` stages of ``degree`` ranks each."""
        groups = self._request.num_ranks // degree
        for parts in self._partitioner.partitions(self._groups, count):
            loads = [self._load(part) for part in parts]
            for placed in usual_maps(loads, groups):
                for wish in self._wishes(degree):
                    drafts = self.on_groups(parts, placed, degree, wish)
                    if drafts is not None:
                        how = f"{count} stages on {_counted(groups, 'group')} of {_counted(degree, 'rank')}"
                        yield Start(drafts=drafts, how=how)

    def colocated(self, branch: Sequence[str]) -> Iterator[Start]:
        """Yield starts with a branch on the ranks of the rest."""
        own = frozenset(branch)
        rest = [tuple(name for name in group if name not in own) for group in self._groups]
        rest = [group for group in rest if group]
        left = sum(map(len, rest))
        virtual = self._request.virtual_stages
        for degree in self._degrees():
            groups = self._request.num_ranks // degree
            for each in (1, 2) if virtual is None else (virtual,):
                if each * groups > left:
                    continue
                for parts in self._partitioner.partitions(rest, each * groups):
                    trunk = parts, round_robin(len(parts), groups)
                    for wish in self._wishes(degree):
                        yield from self._with_branch(branch, trunk, degree, wish)

    def _with_branch(
        self, branch: Sequence[str], trunk: tuple[tuple[tuple[str, ...], ...], Map], degree: int, wish: int
    ) -> Iterator[Start]:
        """Yield a trunk on all groups with the branch on some of them."""
        parts, placed = trunk
        total = self._request.num_ranks
        stages = self.on_groups(parts, placed, degree, wish)
        if stages is None:
            return
        groups = total // degree
        spans = {(0, total): "all ranks"}
        for num in {1, groups // 2} - {0, groups}:
            spans[0, num * degree] = f"the first {num * degree} ranks"
            spans[total - num * degree, total] = f"the last {num * degree} ranks"
        first = branch[0]
        for (begin, end), where in spans.items():
            # the least sizes that its ranks and the rest's divide, and larger ones
            sizes = [size for size in self._rules.sizes(branch, end - begin) if size >= wish]
            for size in sizes[:BRANCH_SIZES]:
                draft = StageDraft(
                    blocks=tuple(branch),
                    degree=end - begin,
                    micro_batch_size=size,
                    ranks=tuple(range(begin, end)),
                )
                yield Start(drafts=(draft, *stages), how=f"{first} and what follows on {where}")
        if 1 < groups <= len(branch):
            for pieces in self._partitioner.partitions([branch], groups):
                cut = self.on_groups(pieces, round_robin(groups, groups), degree, wish)
                if cut is not None:
                    yield Start(
                        drafts=(*cut, *stages), how=f"{first} and what follows, a stage on each group"
                    )

    def on_groups(
        self, parts: Sequence[tuple[str, ...]], placed: Map, degree: int, wish: int
    ) -> Drafts | None:
        """Return stages of ``degree`` ranks each on the groups of a map; None where a stage has no micro-batch size."""
        drafts = []
        for part, group in zip(parts, placed, strict=True):
            size = self._rules.micro_batch_size(part, degree, wish)
            if size is None:
                return None
            ranks = tuple(range(group * degree, (group + 1) * degree))
            drafts.append(StageDraft(blocks=part, degree=degree, micro_batch_size=size, ranks=ranks))
        return tuple(drafts)

    def _wishes(self, degree: int) -> list[int]:
        """Return micro-batch sizes of stages of ``degree`` ranks."""
        return [wish for wish in self._rules.sizes_to_try if wish % degree == 0] or self._rules.sizes_to_try

    def _load(self, part: Sequence[str]) -> float:
        return self._partitioner.load(self._partitioner.sets.mask_of(part))


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


class _Setting:
    """What all searches for a request have in common: costs, partitions, and what has been simulated."""

    def __init__(self, request: PlanRequest, schedule: str, report: SearchReport) -> None:
        self.request, self.report, self._schedule = request, report, schedule
        self.costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
        self.evaluator = PlanEvaluator(
            request,
            self.costs,
            schedule=first_schedule(schedule),
            fitter=fitter_for(request, self.costs),
            report=report,
        )
        self._partitioners: dict[int, Partitioner] = {}

    def partitioner(self, local: int) -> Partitioner:
        """Return what cuts blocks weighed at so many samples."""
        return self._partitioners.setdefault(local, Partitioner(self.costs, local))

    def scheduled(self, plan: PipelinePlan) -> PipelinePlan:
        """Return the plan under the shortest schedule of those that the user's name allows."""
        if any(stage.memory is not None for stage in plan.stages) and self._schedule not in (AUTO, SPLIT):
            return plan
        if is_large(self.request) and self._schedule == first_schedule(self._schedule):
            return plan  # which has it
        budget = BUDGET // 4 if is_large(self.request) else BUDGET
        scheduled = schedule_shared(
            plan, self.request, schedule=self._schedule, budget=budget, report=self.report
        )
        return min(plan, scheduled, key=lambda each: each.iteration_us)


_Found = tuple[PipelinePlan, Drafts]
"""A plan with its time, and the stages it is made of."""


def _shortest_first(found: Iterable[_Found]) -> list[_Found]:
    return sorted(found, key=lambda each: each[0].iteration_us)


def _found(candidates: Iterable[Candidate]) -> list[_Found]:
    return [(each.plan, each.drafts) for each in candidates if each.plan is not None]


class _Search:
    """Looks for the shortest plan of one request whose ranks hold several stages.

    Args:
        plan: one of the same request whose ranks hold one stage each, from which starts are made.
    """

    def __init__(self, request: PlanRequest, plan: PipelinePlan, setting: _Setting) -> None:
        self._request, self._plan = request, plan
        self._costs, self._evaluator = setting.costs, setting.evaluator
        self._rules: BatchRules = batch_rules(request)
        self._partitioner = setting.partitioner(max(stage.local_batch_size for stage in plan.stages))
        self._refiner = Refiner(
            request,
            setting.costs,
            self._rules,
            budget=BUDGET,
            evaluator=setting.evaluator,
            sets=self._partitioner.sets,
        )
        self._is_small, self._is_large = len(request.graph.blocks) <= FEW_BLOCKS, is_large(request)
        self._numbers = (NUM_STARTS, NUM_EXACT, NUM_IMPROVED, NUM_REFINED)
        most_groups = None
        if self._is_large:
            self._numbers = (NUM_STARTS, LARGE_EXACT, LARGE_IMPROVED, LARGE_REFINED)
            most_groups, self._evaluator.budget = LARGE_GROUPS, BUDGET // 2
        self._makers = StartMaker(request, self._rules, self._partitioner, plan, most_groups=most_groups)
        self.num_starts = 0
        self.best_of_sizes: dict[int, float] = {}

    def best(self) -> PipelinePlan | None:
        """Return the shortest plan found, named; None where none fits."""
        _, num_exact, num_improved, num_refined = self._numbers
        found = self._simulated_starts()
        exact: list[Candidate] = []
        for _, drafts in found[:num_exact]:
            if not exact:  # one of those that fit is taken, also where finding them has spent the budget
                self._evaluator.budget = max(self._evaluator.budget, 1)
            candidate = self._refiner.placed(drafts)
            exact += [] if candidate is None else [candidate]
        if not exact:
            return None
        exact.sort(key=lambda each: each.score)
        for timed, drafts in [*found, *_found(exact)]:
            size = max(draft.micro_batch_size for draft in drafts)
            self.best_of_sizes[size] = min(self.best_of_sizes.get(size, math.inf), timed.iteration_us)
        share = self._evaluator.budget // num_improved
        improved = [
            self._refiner.improve(each, least=self._evaluator.budget - share) for each in exact[:num_improved]
        ]
        # of few tasks all were simulated exactly, and what is not shortest with the usual counts may be with others
        near = _shortest_first([*_found(improved), *(found if self._is_small else _found(exact))])
        near = [each for each in near if each[0].iteration_us <= near[0][0].iteration_us * NEAR][:num_refined]
        self._evaluator.budget = BUDGET // 4 if self._is_large else BUDGET
        return self._named(
            *_shortest_first((self._evaluator.refined(plan), drafts) for plan, drafts in near)[0]
        )

    def _simulated_starts(self) -> list[_Found]:
        """Return the starts that fit with their rough times, the shortest first."""
        found: list[_Found] = []
        for start in self._chosen_starts():
            if self._is_large and self._evaluator.budget < BUDGET // 4:
                break  # what is left is for the best of them
            below = min((plan.iteration_us for plan, _ in found), default=math.inf)
            plan = self._evaluator.evaluated(start.drafts, below_us=below * NEAR)
            if plan is not None:
                found.append((plan, start.drafts))
        return _shortest_first(found)

    def _named(self, plan: PipelinePlan, drafts: Drafts) -> PipelinePlan:
        """Return the plan of these stages with their names."""
        named = build_plan(self._request, drafts, planner=self._plan.planner, costs=self._costs)
        stages = plan.with_each(name=[other.name for other in named.stages]).stages
        # its edges say what its orders reckon with
        return dataclasses.replace(named, stages=stages, edges=plan.edges, iteration_us=plan.iteration_us)

    def _chosen_starts(self) -> list[Start]:
        """Return the starts to simulate, those with the smallest bound first, a few of each way to share ranks."""
        # Bounds are found when they are needed: a heap has starts by what their busiest ranks compute, which is no
        # more than their bounds, and once more by these. What comes off by its bound is the next.
        distinct: dict[frozenset[StageDraft], Start] = {}
        for start in self._makers.starts():
            distinct.setdefault(frozenset(start.drafts), start)
        self.num_starts = len(distinct)
        waiting = [
            (self._evaluator.busiest_us(start.drafts), number, start, False)
            for number, start in enumerate(distinct.values())
        ]
        heapq.heapify(waiting)
        chosen: list[Start] = []
        taken: Counter[str] = Counter()
        met: Counter[tuple[str, int]] = Counter()
        most = self._numbers[0]
        while waiting and len(chosen) < most + 1:
            bound, number, start, is_bound = heapq.heappop(waiting)
            size = max(draft.micro_batch_size for draft in start.drafts)
            is_wanted = taken[start.how] < PER_WAY and met[start.how, size] < PER_SIZE
            if not (self._is_small or is_wanted or start.how == AS_PLANNED):
                continue
            if not is_bound:
                bound = max(bound, self._evaluator.least_us(self._evaluator.plan_of(start.drafts)))
                heapq.heappush(waiting, (bound, number, start, True))
                continue
            chosen.append(start)
            taken[start.how] += 1
            met[start.how, size] += 1
        # what moves make of the stages without shared ranks is never worse than those
        if not any(start.how == AS_PLANNED for start in chosen):
            chosen += [start for _, _, start, _ in waiting if start.how == AS_PLANNED]
        chosen.sort(key=lambda start: start.how != AS_PLANNED)
        return chosen[:most]
