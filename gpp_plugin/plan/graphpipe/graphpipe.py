"""GraphPipe's partitioner: a graph of stages, degrees and micro-batch sizes (section 5, Algorithm 1).

Jeon et al., "GraphPipe: Improving Performance and Scalability of DNN Training with Graph Pipeline Parallelism".

From the planner to the recursion:

    graphpipe_plan                   the planner
      1 search_stages                partitions evaluated by a quick prediction, the best of them refined
        2 find_partitions            for every micro-batch size: the frontier of (time a sample, depth)
          3 fewest_devices           the recursion of Algorithm 1 (`stage_search`): devices by depth, within a time

Legend: t is the bottleneck time a sample (the paper's TPS), B the mini-batch, b the micro-batch size,
level the in-flight of a stage in micro-batches (depth from the sink).

Deviations, each with its reason:

- Devices are the value of the DP and (level, t) its bounds (`stage_search`): the paper's c_f and c_b
  cannot both mean what Algorithm 2 and the top-level call say.
- t is bisected over the finite set of stage times, so that the result is exact.
- The whole frontier of (t, depth) is collected and ranked by (B + (depth - 1) b) t, then by prediction: the
  bottleneck alone ignores bubbles.
- Branches are grouped by bin packing (the paper leaves ParallelDecompose open), a join's or fork's
  stage may own parts of branches, and `refine` moves blocks across branches.
- Ranks left over by the DP are shared out (`degrees`): a plan uses all ranks.

Source: GraphPipe (arXiv 2406.17145), section 5, Algorithm 1
Tests: tests/plan/test_graphpipe.py, tests/plan/test_quality.py, tests/plan/test_search_tree.py
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import networkx as nx
import numpy as np

from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.plan.baselines.data_parallel import plain_candidates
from gpp_plugin.plan.costs.cost_model import (
    CostModel,
    full_pipeline_us,
    pipelined_samples,
)
from gpp_plugin.plan.graphpipe.intervals import (
    Component,
    Series,
    StageShapes,
    block_signatures,
    build_series,
    decompose,
    signature_of,
)
from gpp_plugin.plan.graphpipe.stage_search import StageSearch, read_groups
from gpp_plugin.plan.graphpipe.stage_table import TableMaker
from gpp_plugin.plan.heterogeneous_devices import ranked_partitions
from gpp_plugin.plan.memory.fitting import StageFitter, fitter_for, levels_to_fit
from gpp_plugin.plan.refine.plan_evaluator import PlanEvaluator, Score
from gpp_plugin.plan.refine.refine import MOVES, Candidate, Refiner
from gpp_plugin.plan.request import BatchRules, PlanRequest, SearchReport, batch_rules
from gpp_plugin.plan.selection import evaluated_plans, explain_infeasible, join_memory

SLACK = 1.06
"""Partitions that may end within this factor of the best step known are refined: refinement gains as much."""
OPTIMISM = 2.2
"""First only plans within this factor of perfectly shared work are searched; then those that may beat the
best found, or all."""
RAMP = 0.35
"""Stages on the way to a sink take at least this part of the bottleneck's time, so many levels more cost at
least that; few plans have much lighter stages in their depth."""
REFINE_BUDGET = 20
"""Simulated tasks, times the cube of the ranks, up to ``MAX_BUDGET``: at most a tenth of a second."""
MAX_BUDGET = 40_000
NUM_REFINED_TIGHT = 6
MAX_RANKED_SIZE = 400_000
"""Blocks squared x ranks up to which partitions on consecutive ranks are tried too where devices are alike."""
MAX_CLOSER_LOOKS = 3
"""Searches around the cuts that the one before found, as long as each wins at least ``WORTH_LOOKING``."""
WORTH_LOOKING = 1e-3

Groups = tuple[tuple[str, ...], ...]
Evaluator = Callable[[Groups, int], float]
"""Predicts the microseconds of a step of these stages at a micro-batch size; inf where they are no plan."""


Partition = tuple[float, Groups]
"""A point of the frontier, stages within a time and a depth: its predicted step, or (B + (depth - 1) b) t where nothing
is predicted, and the stages."""


@dataclass(slots=True)
class _Incumbent:
    """The best step known while the frontiers are walked."""

    us: float


def graphpipe_plan(request: PlanRequest) -> PipelinePlan:
    """Partition the model into a graph of stages, each with the memory optimization it runs with.

    `search_stages` refines what `find_partitions` finds, which calls `StageSearch.fewest_devices`, the recursion.

    Raises:
        PlanInfeasible: no plan fits; the message names stage, need, limit and the nearest request that fits.
    """
    report = SearchReport()
    plan, nearest = _with_memory(request, report)
    if plan is None:
        explain_graph(request, nearest)
    return dataclasses.replace(plan, notes=(*plan.notes, *report.notes))


def _with_memory(request: PlanRequest, report: SearchReport) -> tuple[PipelinePlan | None, list[Candidate]]:
    """Return the quickest plan, stages that are made to fit among it, and all candidates; None where none fits."""
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    rules = batch_rules(request)
    trees = SearchTrees(request.graph, costs, report)

    def search(changed: PlanRequest, fitter: StageFitter | None) -> list[Candidate]:
        # Where memory is short there is more to weigh, and more to win.
        if fitter is None:
            budget = min(REFINE_BUDGET * request.num_ranks**3, MAX_BUDGET)
            return search_stages(changed, costs, rules, trees, budget=budget)
        return search_stages(
            changed, costs, rules, trees, budget=MAX_BUDGET, num_refined=NUM_REFINED_TIGHT, fitter=fitter
        )

    plain = Refiner(request, costs, rules, budget=MAX_BUDGET, report=report)
    candidates = [*plain_candidates(plain), *search(request, None)[:1]]
    fitter = fitter_for(request, costs)
    if fitter is not None:
        refiner = Refiner(request, costs, rules, budget=MAX_BUDGET, fitter=fitter, report=report)
        candidates += plain_candidates(refiner)
        candidates = [*candidates, *join_memory(request, costs, candidates, search, refiner)]
    plans = evaluated_plans(request, costs, candidates, fitter, planner="graphpipe")
    return next(iter(plans), None), sorted(candidates, key=lambda candidate: candidate.score)


def explain_graph(request: PlanRequest, nearest: Sequence[Candidate]) -> NoReturn:
    """Say why there is no plan, and what would have one.

    Raises:
        PlanInfeasible: always.
    """
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    names = [block.name for block in request.graph.blocks]
    found = [[draft.blocks for draft in candidate.drafts] for candidate in nearest[:3]]
    explain_infeasible(
        request,
        costs,
        batch_rules(request),
        [*found, [[name] for name in names], [names]],
        tried=[candidate.drafts for candidate in nearest],
        fitter=fitter_for(request, costs),
        has_plan=lambda changed: _with_memory(changed, SearchReport())[0] is not None,
    )


def search_stages(
    request: PlanRequest,
    costs: CostModel,
    rules: BatchRules,
    trees: SearchTrees,
    *,
    budget: int,
    num_refined: int = 2,
    is_thorough: bool = False,
    fitter: StageFitter | None = None,
    worth_us: float = float("inf"),
) -> list[Candidate]:
    """Return candidates, best first: the frontier's partitions with all ranks shared out, then refined.

    Args:
        trees: of the request's graph.
        budget: tasks that may be predicted in the refinement.
        num_refined: how many of the best are refined.
        is_thorough: also start from plans for every number of stages.
        fitter: makes stages fit that do not; None: such stages are left out.
        worth_us: the longest step of candidates that are refined, beside the best one.
    """
    report = trees.report
    evaluator = PlanEvaluator(request, costs, fitter=fitter, scores=trees.scores)
    refiner = Refiner(request, costs, rules, budget=budget, fitter=fitter, report=report, evaluator=evaluator)
    counts = _stage_counts(request, rules)
    candidates: list[Candidate] = []
    if counts is None:

        def predict(groups: Groups, wish: int) -> float:
            best = float("inf")
            for way in rules.model.ways:
                for slack in (1.0, 0.0):  # micro-batches in excess hide communication; they need memory
                    found = refiner.candidate(groups, wish, slack=slack, way=way)
                    if found is not None:
                        candidates.append(found)
                        if found.score[0] == 0:
                            best = min(best, found.score[1])
                            if fitter is None:
                                break
            return best

        find_partitions(request, costs, rules, trees, predict, fitter=fitter)
        refiner.budget = budget
    # The recursion counts devices: it does not see that some are slower, or which of them share a node.
    if costs.is_mixed or (is_thorough and _spans_nodes(request)):
        starts = (refiner.candidate(*start) for start in ranked_partitions(request, costs, rules))
        candidates.extend(start for start in starts if start is not None)
    if is_thorough or not any(candidate.score[0] == 0 for candidate in candidates):
        candidates.extend(_with_counts(refiner, trees, counts))
    candidates.sort(key=lambda candidate: candidate.score)
    if not candidates or candidates[0].score[0] > 0:
        refiner.budget = max(budget, MAX_BUDGET)  # a plan that fits is worth more than a quick answer
    refined: list[Candidate] = []
    for candidate in candidates[:num_refined]:
        if refined and candidate.score[1] > worth_us:
            refined.append(candidate)
            continue
        if refiner.budget <= 0:
            report.leave_out(MOVES)
            refined.append(candidate)
            continue
        report.begin(f"moves from a plan of {len(candidate.drafts)} stages")
        refined.append(refiner.improve(candidate))
        balanced = refiner.balance(candidate)
        if balanced is not candidate:
            refined.append(refiner.improve(balanced))
    return sorted([*refined, *candidates[num_refined:]], key=lambda candidate: candidate.score)


def _spans_nodes(request: PlanRequest) -> bool:
    """Return whether links inside a node are others than between nodes, and the request is small enough to look."""
    blocks = len(request.graph.blocks)
    is_small = blocks * blocks * request.num_ranks <= MAX_RANKED_SIZE
    return is_small and min(link.span for link in request.cluster.links) < request.num_ranks


def _stage_counts(request: PlanRequest, rules: BatchRules) -> list[int] | None:
    """Return the numbers of stages that the request leaves open, or None where it leaves all."""
    if request.num_stages is not None:
        return [request.num_stages]
    if request.data_parallel is not None:
        grids = sorted({request.data_parallel * grid.size for grid in rules.model.grids})
        if rules.model.are_explicit:  # of sizes 1 and 2 six ranks of degree 1 are in 3 to 6 stages
            most = min(request.num_ranks // grids[0], len(request.graph.blocks))
            return list(range(max(request.num_ranks // grids[-1], 1), most + 1))
        return [request.num_ranks // ranks for ranks in grids if request.num_ranks % ranks == 0]
    return None


def _with_counts(refiner: Refiner, trees: SearchTrees, counts: Sequence[int] | None) -> Iterator[Candidate]:
    """Yield candidates with explicit numbers of stages: planned on that many ranks, one a stage."""
    request, costs, rules = refiner.request, refiner.costs, refiner.rules
    largest = min(request.num_ranks, len(request.graph.blocks))
    # Any number may be the one whose degrees add up or whose stages fit: powers of two, then all ranks.
    open_counts = sorted({1 << n for n in range(largest.bit_length())} | {largest, (largest + 1) // 2})
    sizes = sorted(rules.sizes_to_try, key=lambda size: _lower_bound(request, costs, rules, size))
    for count in counts if counts is not None else open_counts:
        if count > len(request.graph.blocks):
            continue
        trees.report.begin(f"plans of {count} stages")
        smaller = dataclasses.replace(
            request,
            num_ranks=count,
            data_parallel=1,
            num_stages=None,
            micro_batch_sizes=None,
            tensor_parallel=1,
            sequence_parallel=1,
        )
        partitions = find_partitions(smaller, costs, batch_rules(smaller), trees, fitter=refiner.fitter)
        groupings = {groups for _, groups in sorted(partitions, key=lambda partition: partition[0])[:6]}
        groupings.add((tuple(block.name for block in request.graph.blocks),))
        shapes = [refiner.reshape(groups, count) for groups in sorted(groupings)]
        if rules.model.are_explicit:  # one rank a stage has no sizes, and few of its cuts may be
            shapes.extend(refiner.shared_out(count))
        for masks in shapes:
            for wish, way in itertools.product(sizes, rules.model.ways) if masks is not None else ():
                assert masks is not None
                found = refiner.with_masks(masks, wish, way=way)
                if found is not None:
                    yield found


def find_partitions(
    request: PlanRequest,
    costs: CostModel,
    rules: BatchRules,
    trees: SearchTrees,
    predict: Evaluator | None = None,
    fitter: StageFitter | None = None,
) -> list[Partition]:
    """Return the frontiers of (time a sample, depth) over all micro-batch sizes that may win.

    A model of very many blocks is searched in runs of blocks, then with single blocks around the best partition's cuts.

    Args:
        predict: judges each point as it is found, so that what cannot beat it is not searched.
        fitter: as for `search_stages`.
    """
    found = _frontiers(request, costs, rules, trees.tree(rules), trees.report, predict, fitter)
    for _ in range(MAX_CLOSER_LOOKS if trees.is_in_runs and found else 0):
        best_us, groups = min(found, key=lambda partition: partition[0])
        tree = trees.around_cuts(rules, groups)
        found += _frontiers(request, costs, rules, tree, trees.report, predict, fitter, known_us=best_us)
        if min(us for us, _ in found) > best_us * (1 - WORTH_LOOKING):
            break
    return found


def _frontiers(
    request: PlanRequest,
    costs: CostModel,
    rules: BatchRules,
    tree: SearchTree,
    report: SearchReport,
    predict: Evaluator | None,
    fitter: StageFitter | None,
    known_us: float = float("inf"),
) -> list[Partition]:
    """Return the frontiers of one tree, of partitions that may be as good as a step of ``known_us``."""
    names = [block.name for block in request.graph.blocks]
    bounds = {wish: _lower_bound(request, costs, rules, wish) for wish in rules.sizes_to_try}
    ramp = 1.0 if predict is None else RAMP
    searches: dict[tuple[int, int], StageSearch] = {}
    makers: dict[tuple[int, tuple[int, ...]], TableMaker] = {}
    found: dict[tuple[Groups, int], float] = {}
    best = _Incumbent(us=min(known_us, min(bounds.values()) * OPTIMISM / SLACK))
    optimism = 1
    # First only what perfectly shared work would do within OPTIMISM of the best bound is searched. If nothing as good
    # turns up, the limit is raised to what was found or by the same factor again, then lifted.
    while True:
        limit = best.us
        # Sizes likely to win first: what they reach limits the search of the others.
        for wish in sorted(bounds, key=lambda wish: bounds[wish] * (1 + wish / request.mini_batch)):
            if bounds[wish] > best.us * SLACK:
                continue
            report.begin(f"stages of {request.num_ranks} ranks, micro-batches of {wish} samples")
            # the most levels with which perfectly shared work might still end within the best step known
            deepest = tree.longest
            if bounds[wish] > 0 and best.us != float("inf"):
                spare = (best.us * SLACK / bounds[wish] - 1) * request.mini_batch / (ramp * wish)
                deepest = min(deepest, 1 + int(spare))
            if (wish, deepest) not in searches:
                searches[wish, deepest] = make_search(
                    request, costs, rules, tree.root, wish, deepest, tree.shapes, fitter, makers
                )
            search = searches[wish, deepest]
            for levels, score in _frontier(request, search, wish, best, bounds[wish], ramp):
                groups = tuple(tuple(names[i] for i in sorted(g)) for g in read_groups(search, levels))
                if (groups, wish) not in found:
                    us = score if predict is None else predict(groups, wish)
                    best.us = min(best.us, us)
                    found[groups, wish] = us
        best.us = min(found.values(), default=float("inf"))
        if best.us <= limit * SLACK or limit >= known_us:
            return [(us, groups) for (groups, _), us in found.items() if us <= best.us * SLACK]
        best.us = min(best.us, known_us, limit * OPTIMISM if optimism < 2 else float("inf"))
        optimism += 1


def _lower_bound(request: PlanRequest, costs: CostModel, rules: BatchRules, wish: int) -> float:
    """Return a lower bound of the time of plans at this micro-batch size: all work, shared out perfectly."""
    is_fixed = np.array(
        [block.name in rules.coupled or block.name in rules.fixed for block in request.graph.blocks]
    )
    unit = np.add(*costs.block_times(request.loss_unit))[is_fixed] / request.loss_unit
    sizes = {wish, wish / min(wish, request.num_ranks)}
    free = min(float((np.add(*costs.block_times(local))[~is_fixed] / local).sum()) for local in sizes)
    # What the user fixes may be quicker than at one loss unit: no bound from it.
    total = free + (float(unit.sum()) if not rules.fixed else 0.0)
    return total * request.mini_batch / request.num_ranks


def make_search(
    request: PlanRequest,
    costs: CostModel,
    rules: BatchRules,
    root: Series,
    wish: int,
    longest: int,
    shapes: dict[int, StageShapes] | None = None,
    fitter: StageFitter | None = None,
    makers: dict[tuple[int, tuple[int, ...]], TableMaker] | None = None,
) -> StageSearch:
    """Return the search at one micro-batch size.

    Args:
        longest: most stages on a path.
        shapes: carried from one micro-batch size of the same tree to the next (`TableMaker`).
        fitter: as for `search_stages`.
        makers: of tables of the same request, by micro-batch size and levels to fit at; filled.
    """
    # Levels count micro-batches of ``wish`` samples, one a stage on the longest path. A stage that takes more samples
    # at a time (it mixes them, or the user fixes its size) holds up its predecessors by that many more: with 64
    # samples after stages of 8, two of its own are 16 levels beside those of the path.
    largest = max([request.loss_unit * rules.degrees[-1] if rules.coupled else 1, *rules.fixed.values()])
    extra = -(-2 * min(largest, request.mini_batch) // wish) if largest > wish else 0
    top = min(longest, request.num_ranks) + min(extra, request.mini_batch // wish + 1, 2 * longest + 16)
    to_fit = tuple(levels_to_fit(top)) if fitter is not None else ()
    makers, shapes = {} if makers is None else makers, {} if shapes is None else shapes
    if (wish, to_fit) not in makers:
        makers[wish, to_fit] = TableMaker(
            request, costs, rules, wish=wish, shapes=shapes, fitter=fitter, levels=to_fit
        )
    return StageSearch(root, makers[wish, to_fit], top)


def _frontier(
    request: PlanRequest, search: StageSearch, wish: int, best: _Incumbent, bound_us: float, ramp: float
) -> Iterator[tuple[int, float]]:
    """Yield points of ever shallower solutions that may be among the best: (levels, score).

    The score is (B + (levels - 1) b) t, the time of a pipeline all of whose stages take t. The search holds each
    point's stages when it is yielded.

    The frontier falls: the fewer levels, the more time. For ``cap`` levels at most it is bisected over the sorted
    times of all stages, so the result is exact:

        levels allowed (cap)   6        5        4   3
        times                  10 11 12 14 15 18 20 31      us a sample
        fits the ranks         -  -  x  x  x  x  x  x       with at most 6 levels: t = 12 is the first point, and
                                                            takes 5; the next requests at most 4, from 14 on

    Args:
        best: the caller lowers it between two points.
        bound_us: a step is never shorter.
        ramp: part of the bottleneck's time that every level costs (`RAMP`).
    """
    times = search.times()  # us a sample, increasing, each once
    ranks, mini_batch = request.num_ranks, request.mini_batch
    known: dict[
        int, int | None
    ] = {}  # by index of a time, the fewest levels; None: more than were of interest
    last_requested = -1

    def levels_at(index: int, *, is_last: bool = False) -> int | None:
        """Return the fewest levels at which the ranks suffice for times up to that one, or None.

        Args:
            is_last: search again if another time was requested since: the search then holds this one's stages.
        """
        nonlocal last_requested
        if index not in known or (is_last and last_requested != index):
            fewest = search.fewest_devices(float(times[index]), most_levels=cap, enough=ranks)
            allowed = (fewest <= ranks).nonzero()[0]
            known[index], last_requested = int(allowed[0]) if allowed.size else None, index
        return known[index]

    def last_within(levels: int) -> int:
        """Return the last time with which so many levels may still be among the best."""
        slowest = best.us * SLACK / pipelined_samples(mini_batch, wish, levels, ramp)
        return int(times.searchsorted(slowest, side="right")) - 1

    low = int(times.searchsorted(bound_us * (1 - 1e-9) / mini_batch))
    cap = search.max_level
    fewest = levels_at(last_within(1)) if last_within(1) >= low else None
    while fewest is not None and cap >= fewest:
        # The more time, the fewer levels: what is known of other times bounds those still to be requested.
        low = max([low, *(1 + i for i, levels in known.items() if levels is None or levels > cap)])
        high = last_within(cap)
        levels = levels_at(high) if high >= low else None
        if levels is None or levels > cap:
            low = max(low, high + 1)
            cap -= max(1, cap // 6)
            continue
        high = min([high, *(i for i, levels in known.items() if levels is not None and levels <= cap)])
        while low < high:
            middle = (low + high) // 2
            found = levels_at(middle)
            if found is not None and found <= cap:
                high = middle
            else:
                low = middle + 1
        levels = levels_at(high, is_last=True)
        assert levels is not None
        yield levels, full_pipeline_us(mini_batch, wish, levels, float(times[high]))
        # Of deep solutions only some depths stay: neighbours differ by less than the prediction errs.
        cap = levels - max(1, levels // 6)


# The trees of series and parallel components that one model's searches go through, each made once.
#
# A planner searches many times: for several numbers of stages, within memory and without a limit. What differs are
# ranks, micro-batch sizes and times; the tree, and what its stages hold, is the same. Long series are in runs.
#
# Long series in fewer items: runs of blocks searched as one, and single blocks where stages were cut.
#
# The search's tables grow with the square of a series' items. A model of thousands of blocks is searched twice: first
# in runs of about equal time, then with single blocks around the cuts found and everything between them in one piece:
#
#     blocks        a b c d e f g h i j k l
#     runs          (a b c) (d e f) (g h i) (j k l)        say it is best to cut behind f
#     around cuts   (a b c d) e f g h (i j k l)            now the cut may be behind e, f or g as well
#
# Branches that are alike stay alike: each is cut up as the cuts in any of them ask.

MOST_ITEMS = 256
"""Longer series are searched in runs. The tables of more items take seconds, for each micro-batch size."""
MOST_AROUND = 384
"""Items of the second search, those between cuts included."""


def most_items(component: Component) -> int:
    """Return the number of items of the longest series."""
    own = len(component.children) if component.kind == "series" else 1
    return max([own, *(most_items(child) for child in component.children)])


def path_items(component: Component) -> int:
    """Return the most items on a path: stages on one are no more."""
    if component.kind == "series":
        return sum(path_items(child) for child in component.children)
    return max(map(path_items, component.children)) if component.kind == "parallel" else 1


def in_runs(component: Component, weights: Sequence[float], *, most: int = MOST_ITEMS) -> Component:
    """Return the component with runs of blocks of about equal weight as one item, at most about ``most`` a series.

    Args:
        weights: by block.
    """
    if component.kind not in ("series", "parallel"):
        return component
    children = tuple(in_runs(child, weights, most=most) for child in component.children)
    if component.kind == "parallel" or len(children) <= most:
        return Component(kind=component.kind, blocks=component.blocks, children=children)
    total = sum(weights[block] for child in children if child.kind == "block" for block in child.blocks)
    target = total / most
    begins, run = set(), 0.0
    for i, child in enumerate(children):
        weight = sum(weights[block] for block in child.blocks)
        # nearer to the target without it than with it
        if child.kind != "block" or run == 0.0 or run + weight / 2 > target:
            begins.add(i)
            run = 0.0
        run = run + weight if child.kind == "block" else 0.0
    return _joined(component, children, begins)


def around_cuts(
    component: Component, stage_of: Mapping[int, int], signatures: Sequence[int], *, most: int = MOST_AROUND
) -> Component:
    """Return the component with single blocks on both sides of every cut, and the others in one run each.

    Args:
        stage_of: by block, the number of its stage.
        signatures: by block; equal branches are those whose blocks have equal ones, in order.
    """
    return _around([component], stage_of, signatures, most)[0]


def _around(
    alike: Sequence[Component], stage_of: Mapping[int, int], signatures: Sequence[int], most: int
) -> list[Component]:
    """Return equal components, cut up alike."""
    first = alike[0]
    if first.kind not in ("series", "parallel"):
        return list(alike)
    places: list[list[Component]] = [[] for _ in alike]
    if first.kind == "parallel":
        # Children need not come in the same order: all that are alike, of all these components, go together.
        by_key: dict[object, list[tuple[int, int]]] = {}
        for n, component in enumerate(alike):
            for i, child in enumerate(component.children):
                by_key.setdefault(signature_of(child, signatures), []).append((n, i))
        made: dict[tuple[int, int], Component] = {}
        for where in by_key.values():
            members = [alike[n].children[i] for n, i in where]
            made.update(zip(where, _around(members, stage_of, signatures, most), strict=True))
        places = [[made[n, i] for i in range(len(component.children))] for n, component in enumerate(alike)]
    else:
        for siblings in zip(*(component.children for component in alike), strict=True):
            for place, child in zip(places, _around(siblings, stage_of, signatures, most), strict=True):
                place.append(child)
    children = [tuple(place) for place in places]
    if first.kind == "parallel" or len(children[0]) <= most:
        return [
            Component(kind=c.kind, blocks=c.blocks, children=own)
            for c, own in zip(alike, children, strict=True)
        ]
    begins = set().union(*(_begins(own, stage_of, most // len(alike)) for own in children))
    return [_joined(c, own, begins) for c, own in zip(alike, children, strict=True)]


def _begins(items: Sequence[Component], stage_of: Mapping[int, int], most: int) -> set[int]:
    """Return where items begin that are not joined to the one before: all within a window around each cut."""
    cuts = [
        i
        for i, (a, b) in enumerate(itertools.pairwise(items), start=1)
        if not (a.kind == b.kind == "block" and stage_of[a.blocks[0]] == stage_of[b.blocks[0]])
    ]
    # each cut has a window of w places on both sides and a run behind it
    window = max(1, (most // max(len(cuts), 1) - 1) // 2)
    return {place for cut in cuts for place in range(cut - window, cut + window + 1)} | {0}


def _joined(component: Component, items: Sequence[Component], begins: set[int]) -> Component:
    """Return the series with items joined to the one before them but where ``begins`` says so; blocks only."""
    runs: list[list[Component]] = []
    for i, item in enumerate(items):
        if i in begins or not runs or item.kind != "block" or runs[-1][-1].kind != "block":
            runs.append([])
        runs[-1].append(item)
    children = tuple(run[0] if len(run) == 1 else _run(run) for run in runs)
    return Component(kind="series", blocks=component.blocks, children=children)


def _run(items: Sequence[Component]) -> Component:
    blocks = tuple(sorted(block for item in items for block in item.blocks))
    return Component(kind="run", blocks=blocks, children=tuple(items))


@dataclass(slots=True, kw_only=True)
class SearchTree:
    """A model as series and parallel components of block numbers.

    Args:
        longest: most stages on a path.
        shapes: of its series and parallel items by id, filled as they are met.
    """

    root: Series
    longest: int
    shapes: dict[int, StageShapes] = field(default_factory=dict)


class SearchTrees:
    """The trees of one model, and the scores of its stages: what several searches of one request share.

    Args:
        costs: of the graph, on its cluster.
        report: notes what trees leave out.
    """

    def __init__(self, graph: BlockGraph, costs: CostModel, report: SearchReport) -> None:
        self.graph, self.costs, self.report = graph, costs, report
        numbers = {block.name: i for i, block in enumerate(graph.blocks)}
        dependencies = nx.relabel_nodes(graph.dependencies(), numbers)
        self.is_chain = all(
            dependencies.in_degree(node) <= 1 and dependencies.out_degree(node) <= 1 for node in dependencies
        )
        self._component = decompose(dependencies)
        self._longest = int(nx.dag_longest_path_length(dependencies, weight=None, default_weight=1)) + 1
        self._trees: dict[object, SearchTree] = {}
        self.scores: dict[object, Score] = {}

    @property
    def is_in_runs(self) -> bool:
        """Return whether the model is too long for each block to be an item."""
        return most_items(self._component) > MOST_ITEMS

    def tree(self, rules: BatchRules) -> SearchTree:
        """Return the whole model's tree: blocks in runs where there are very many."""
        key = rules.coupled, tuple(sorted(rules.fixed.items()))
        if key not in self._trees:
            component = self._component
            if self.is_in_runs:
                self.report.leave_out(
                    f"cuts at each of {len(self.graph.blocks)} blocks: runs of blocks were searched, then single "
                    "blocks around the cuts"
                )
                weights = np.add(*self.costs.block_times(rules.loss_unit))
                component = in_runs(component, weights.tolist())
            self._trees[key] = self._make(component, rules)
        return self._trees[key]

    def around_cuts(self, rules: BatchRules, groups: Sequence[Sequence[str]]) -> SearchTree:
        """Return the tree with single blocks where stages of ``groups`` border on each other, and runs elsewhere."""
        stage_of = {block: i for i, names in enumerate(groups) for block in self.costs.indices(names)}
        signatures = block_signatures(self.graph, self.costs, rules)
        return self._make(around_cuts(self._component, stage_of, signatures), rules)

    def _make(self, component: Component, rules: BatchRules) -> SearchTree:
        root = build_series(self.graph, self.costs, rules, component)
        if _has_uncounted(root):
            self.report.leave_out(
                "which of very many branches share a stage: each was taken alone, or all together"
            )
        return SearchTree(
            root=root,
            longest=min(self._longest, path_items(component)),
        )


def _has_uncounted(series: Series) -> bool:
    return any(
        branches.is_uncounted or any(map(_has_uncounted, branches.kinds))
        for branches in series.branches.values()
    )
