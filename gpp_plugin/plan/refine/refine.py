"""Improves a set of stages by moves that the series-parallel search does not know: the one search of stages.

Moves: a boundary block to another stage (also across branches), two stages merged, one cut in two,
another micro-batch size or k for one stage, ranks from one stage to another. Every candidate is built
and predicted whole; the first that is better is taken. A plan that needs too much memory is worth
less than any that fits, the less the more it exceeds, so the moves also lead to feasible plans.

Stages have ranks of their own, which are shared out anew after every move, or explicit ones, of which each may hold
several stages (`Candidate.plan`). There a moved, merged or cut stage keeps the ranks of what it comes from, and more
moves lead to those of others.

Two parts of the search are left out one at a time, on 113 feasible graphs of `gpp bench plan-quality` (the first 40 of
its auto, heterogeneous and tensor cases). Without micro-batches in excess (`SLACKS`) 50 plans of planner ``auto`` are
longer, up to 16 %, and none is shorter. Without the start of even stages (`Refiner.balance`) 3 plans of planner
``graphpipe`` are longer, one by 41 %, and none is shorter; those of ``auto``, which has other starts too, stay. The
floors of ``test_search_effort_is_worth_its_time`` fail without either.

Source: this project
Tests: tests/plan/test_quality.py
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from gpp_plugin.ir.plan import ALONE, ModelGrid, PipelinePlan
from gpp_plugin.plan.costs.cost_model import CostModel, us_per_sample
from gpp_plugin.plan.make import StageDraft, build_plan
from gpp_plugin.plan.memory.fitting import StageFitter
from gpp_plugin.plan.refine.block_sets import (
    FEW_BLOCKS,
    BlockSets,
    Mask,
    evened_out,
    merged_and_cut,
    regroupings,
    reshape,
    shared_out,
    swaps,
)
from gpp_plugin.plan.refine.degrees import DegreeChooser
from gpp_plugin.plan.refine.plan_evaluator import GLANCE, LOOK, PlanEvaluator, Score
from gpp_plugin.plan.request import BatchRules, PlanRequest, SearchReport

SLACKS = (0.0, 0.5, 1.0)

NOT_WORTH: Score = (float("inf"),) * 3
"""The score of what was found unable to win without being predicted."""

HOPELESS = 1.2
"""Stages whose busiest computes longer than this many times the best step are not predicted."""
ROUNDING = 1e-9
MAX_DISTINCT_PARTS = 24
"""Parts of a model of different tensor sizes up to which stages are shared out among them."""
FEW_RANKS = 4
"""Ranks up to which a stage may move to any set of them; of more, to those of another stage or to all."""
MOVES = "some plans a move away from the best ones"
"""What the refinement leaves out when its budget is spent."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Stages as bit sets of block positions, with what is decided about them, and their score.

    Args:
        wish: the micro-batch size stages have unless something fixes it.
        slack: micro-batches held in excess of Table 2 for each stage on the way to a sink; Table 2
            takes communication to be free, and where it is not every hop on a round trip delays the
            next micro-batch unless another one is there to work on.
        way: to give stages context and tensor sizes (`GridRules.ways`).
        score: (bytes too many, predicted microseconds, unevenness); smaller is better. Of a plan that is there the
            last is the time with orders that a search compares first.
        plan: where the drafts say which ranks the stages have, and ranks may hold several; it fits.
    """

    masks: tuple[Mask, ...]
    wish: int
    drafts: tuple[StageDraft, ...]
    score: Score
    slack: float = 0.0
    way: ModelGrid = ALONE
    plan: PipelinePlan | None = None


class Refiner:
    """Searches around the stages of a plan, within a budget of simulated tasks.

    Args:
        budget: tasks (forward or backward of one micro-batch on one stage) to predict in all.
        fitter: what a stage costs to fit where it does not; None: it then needs too much.
        report: notes where the budget ends the search.
        evaluator: has the budget, and what is known of plans; None: a new one.
    """

    def __init__(
        self,
        request: PlanRequest,
        costs: CostModel,
        rules: BatchRules,
        *,
        budget: int,
        fitter: StageFitter | None = None,
        report: SearchReport | None = None,
        evaluator: PlanEvaluator | None = None,
        sets: BlockSets | None = None,
    ) -> None:
        self.report = SearchReport() if report is None else report
        self.request, self.costs, self.rules, self.fitter = request, costs, rules, fitter
        self.evaluator = PlanEvaluator(request, costs, fitter=fitter) if evaluator is None else evaluator
        self.budget = budget
        self.sets = BlockSets(costs) if sets is None else sets
        self.chooser = DegreeChooser(request, costs, rules, self.sets, fitter)
        self._seen: dict[object, Score] = {}
        self._best_us = float("inf")
        self._cutoff_us = float("inf")

    @property
    def budget(self) -> int:
        """Simulated tasks that are left."""
        return self.evaluator.budget

    @budget.setter
    def budget(self, tasks: int) -> None:
        self.evaluator.budget = tasks

    # ---- candidates -------------------------------------------------------------------------------

    def candidate(
        self, groups: Sequence[Sequence[str]], wish: int, *, slack: float = 0.0, way: ModelGrid | None = None
    ) -> Candidate | None:
        """Return the candidate of these groups of blocks, or None where ranks cannot be shared out."""
        return self.with_masks([self.sets.mask_of(group) for group in groups], wish, slack, way)

    def from_drafts(self, drafts: Sequence[StageDraft], wish: int) -> Candidate:
        """Return the candidate of complete drafts."""
        masks = tuple(self.sets.mask_of(draft.blocks) for draft in drafts)
        way = self.rules.model.ways[0]
        return Candidate(masks=masks, wish=wish, drafts=tuple(drafts), score=self._score(drafts), way=way)

    def with_masks(
        self, masks: Sequence[Mask], wish: int, slack: float = 0.0, way: ModelGrid | None = None
    ) -> Candidate | None:
        """Return the candidate of these stages, or None where it is no plan, cannot win or was met before."""
        if self.request.num_stages not in (None, len(masks)):
            return None
        # on devices of several speeds it matters which of two equal branches is cut
        shape = frozenset(masks) if self.costs.is_mixed else self.sets.shape_of(masks)
        way = self.rules.model.ways[0] if way is None else way
        key = (shape, wish, slack, way)
        if key in self._seen:
            return None
        self.budget -= GLANCE
        drafts = self._drafts(masks, wish, way)
        if drafts is None:
            self._seen[key] = NOT_WORTH
            return None
        if slack > 0:
            heights = self.sets.heights(masks)
            drafts = [
                dataclasses.replace(draft, extra_in_flight=math.ceil((height - 1) * slack))
                for draft, height in zip(drafts, heights, strict=True)
            ]
        score = self._score(drafts)
        self._seen[key] = score
        return Candidate(
            masks=tuple(masks), wish=wish, drafts=tuple(drafts), score=score, slack=slack, way=way
        )

    def _drafts(self, masks: Sequence[Mask], wish: int, way: ModelGrid) -> list[StageDraft] | None:
        """Return the stages with all ranks shared out; None where that is impossible or takes too long."""
        limit = min(HOPELESS * self._best_us, self._cutoff_us)
        limit_us = limit / self.request.mini_batch * (1 + ROUNDING)
        work = 0.0
        for mask in masks:
            slowest, least = self.chooser.least_shares(mask, wish)
            work += least
            if slowest > limit_us or work > limit_us * self.request.num_ranks:
                return None
        options = self.chooser.choose(masks, wish, limit_us=limit_us, way=way)
        if options is None and self._cutoff_us == float("inf"):
            # No plan that fits is known yet: one that needs too much memory leads the way.
            options = self.chooser.choose(masks, wish, ignore_memory=True, limit_us=limit_us, way=way)
        if options is None:
            return None
        times = []
        for mask, o in zip(masks, options, strict=True):
            computing = (o.forward_us + o.backward_us) / o.micro_batch_size
            reducing = (o.us_per_sample - computing) * self.request.mini_batch
            update = self._update_us(mask, o.degree, o.grid)
            times.append((o.forward_us, o.backward_us, o.micro_batch_size, reducing, update))
        return None if self._least_us(masks, times) > limit else self.chooser.drafts(masks, options)

    def _score(self, drafts: Sequence[StageDraft]) -> Score:
        score = self.evaluator.score(drafts)
        if score[0] == 0:
            self._best_us = min(self._best_us, score[1])
        return score

    def placed(self, drafts: Sequence[StageDraft], *, above: float = float("inf")) -> Candidate | None:
        """Return the candidate of stages on explicit ranks; None where nothing fits or it is not shorter.

        Args:
            above: what its time must be below with orders that are quick to find, before better ones are looked for.
        """
        stages = tuple(drafts)
        rough = self.evaluator.evaluated(stages, below_us=self._cutoff_us)
        if rough is None or rough.iteration_us >= above * (1 - ROUNDING):
            return None
        plan = self.evaluator.evaluated(stages, below_us=self._cutoff_us, is_exact=True)
        if plan is None:
            return None
        return Candidate(
            masks=tuple(self.sets.mask_of(draft.blocks) for draft in stages),
            wish=max(draft.micro_batch_size for draft in stages),
            drafts=stages,
            score=(0.0, plan.iteration_us, rough.iteration_us),
            plan=plan,
        )

    def _update_us(self, mask: Mask, degree: int, grid: ModelGrid) -> float:
        return self.costs.at_grid(grid).update_us(self.sets.rows(mask), degree)

    def _least_us(
        self, masks: Sequence[Mask], times: Sequence[tuple[float, float, int, float, float]]
    ) -> float:
        """Return a time no step of these stages is shorter than, messages taken to be free.

        A stage begins after a forward of every stage on a path to it, and its gradients then pass
        through a backward of each.

        Args:
            times: by stage, forward and backward of a micro-batch, its size, the gradients' reduction, and the update.
        """
        heights = self.sets.heights(masks)
        forwards, both = [0.0] * len(masks), [0.0] * len(masks)
        worked = reduced = step = 0.0
        for a in sorted(range(len(masks)), key=lambda i: -heights[i]):
            forward, backward, size, reducing, update = times[a]
            work = (forward + backward) * (self.request.mini_batch // size)
            # Gradients are reduced while those of the stages before it still pass through them.
            worked, reduced = max(worked, both[a] + work), max(reduced, forwards[a] + work + reducing)
            step = max(step, update)
            readers, returning = self.sets.outputs(masks[a])
            for b, mask in enumerate(masks) if readers else ():
                if mask & readers:
                    forwards[b] = max(forwards[b], forwards[a] + forward)
                    both[b] = max(both[b], both[a] + forward + (backward if mask & returning else 0.0))
        # Optimizers step when all stages are through. What is gathered behind that is among the reductions.
        return max(worked + step, reduced if self.costs.zero_stage else reduced + step)

    # ---- search -----------------------------------------------------------------------------------

    def improve(self, start: Candidate, *, least: int = 0) -> Candidate:
        """Return the best candidate reached from ``start`` by taking every move that improves.

        Args:
            least: of the budget, what is left for others.
        """
        best = start
        is_improved = True
        while is_improved and self.budget > least:
            is_improved = False
            # What cannot be quicker than a plan that fits need not be predicted.
            self._cutoff_us = best.score[1] * (1 + ROUNDING) if best.score[0] == 0 else float("inf")
            for found in self._neighbours(best):
                if found is not None and is_better(found.score, best.score):
                    best, is_improved = found, True
                    break
                if self.budget <= least:
                    self.report.leave_out(MOVES)
                    break
        if is_improved:
            self.report.leave_out(MOVES)
        self._cutoff_us = float("inf")
        return best

    def balance(self, start: Candidate) -> Candidate:
        """Return the candidate reached by moves that even out the stages' times per sample, unpredicted.

        The p-norm of the times falls with every move, so plateaus on which several stages are the
        bottleneck (no single move shortens the step) are crossed.
        """
        masks = evened_out(
            self.sets,
            start.masks,
            lambda masks: self._loads(start.wish, masks),
            lambda masks: self._unevenness(masks, start.wish, start.way),
        )
        return self.with_masks(masks, start.wish, start.slack, start.way) or start

    def _unevenness(self, masks: Sequence[Mask], wish: int, way: ModelGrid) -> float:
        options = self.chooser.choose(masks, wish, way=way)
        if options is None:
            return float("inf")
        return sum(((o.forward_us + o.backward_us) / o.micro_batch_size) ** 8 for o in options)

    def _loads(self, wish: int, masks: Sequence[Mask]) -> list[float]:
        options = self.chooser.choose(masks, wish) if self.costs.is_mixed else None
        if options is not None:
            return [(o.forward_us + o.backward_us) / o.micro_batch_size for o in options]
        return [sum(self.costs.stage_times(self.sets.rows(mask), wish)) for mask in masks]

    def _times(self, at: Candidate) -> list[float]:
        """Return what each stage computes a sample, or, where they share ranks, its busiest rank in a step."""
        if at.plan is not None:
            plan, busy = at.plan, [0.0] * at.plan.num_ranks
            for index, stage in enumerate(plan.stages):
                for rank in stage.ranks:
                    busy[rank] += (stage.forward_us + stage.backward_us) * plan.num_micro_batches(index)
            return [max(busy[rank] for rank in draft.ranks or (0,)) for draft in at.drafts]
        if self.costs.is_mixed:  # which depends on where it is
            plan = build_plan(self.request, at.drafts, planner="", costs=self.costs, is_named=False)
            placed = {frozenset(stage.blocks): stage.ranks for stage in plan.stages}
        else:
            placed = {}
        times = []
        for mask, draft in zip(at.masks, at.drafts, strict=True):
            own, local = self.costs.at_grid(draft.grid), draft.micro_batch_size / draft.degree
            ranks = placed.get(frozenset(draft.blocks))
            computing = sum(own.stage_times(self.sets.rows(mask), local, ranks))
            times.append(float(us_per_sample(computing, draft.micro_batch_size)))
        return times

    def _neighbours(self, at: Candidate) -> Iterator[Candidate | None]:
        """Yield the candidates one move away, the most promising kinds first; None for one that is not worth it."""
        slacks = (slack for slack in SLACKS if slack != at.slack and at.plan is None)
        yield from (self.with_masks(at.masks, at.wish, slack, at.way) for slack in slacks)
        masks = list(at.masks)
        times = self._times(at)
        slowest_first = sorted(range(len(masks)), key=lambda i: -times[i])
        quickest_first = sorted(range(len(masks)), key=times.__getitem__)
        yield from self._with_all(at, regroupings(self.sets, masks, slowest_first))
        wishes = self.rules.sizes_to_try
        place = wishes.index(at.wish) if at.wish in wishes else 0
        near = [*wishes[place + 1 : place + 3], *wishes[max(place - 2, 0) : place][::-1]]
        yield from (self._with_wish(at, wish) for wish in near)
        ways = self.rules.model.ways if len(self.rules.model.ways) > 1 and at.plan is None else ()
        yield from (self.with_masks(at.masks, at.wish, at.slack, way) for way in ways)
        for drafts in self._changed_drafts(at):
            yield self._with_drafts(at, drafts)
        is_small = at.plan is None or len(self.sets.names) <= FEW_BLOCKS
        yield from self._with_all(at, swaps(self.sets, masks) if is_small else ())
        yield from self._with_all(at, merged_and_cut(self.sets, masks, quickest_first) if is_small else ())

    def _with_all(self, at: Candidate, partitions: Iterable[list[Mask]]) -> Iterator[Candidate | None]:
        if at.plan is None:
            return (self.with_masks(masks, at.wish, at.slack, at.way) for masks in partitions)
        kept = (masks for masks in partitions if self.request.num_stages in (None, len(masks)))
        found = itertools.chain.from_iterable(self._inherited(at, masks) for masks in kept)
        return (self._with_drafts(at, drafts) for drafts in found)

    def _with_wish(self, at: Candidate, wish: int) -> Candidate | None:
        if at.plan is None:
            return self.with_masks(at.masks, wish, at.slack, at.way)
        drafts = [self._with_blocks(draft, draft.blocks, wish) for draft in at.drafts]
        return self._with_drafts(at, drafts)

    def _with_drafts(self, at: Candidate, drafts: Sequence[StageDraft | None]) -> Candidate | None:
        """Return the candidate of these stages; None where they are no plan, cannot win or were met before."""
        found = [draft for draft in drafts if draft is not None]
        if len(found) < len(drafts):
            return None
        if at.plan is not None:
            self.budget -= LOOK
            return self.placed(found, above=at.score[2]) if self._may_hold(at, found) else None
        key = frozenset(found)
        if key in self._seen or self._least_of(at.masks, found) > self._cutoff_us:
            return None
        self._seen[key] = score = self._score(found)
        return dataclasses.replace(at, drafts=tuple(found), score=score)

    # ---- stages on explicit ranks -------------------------------------------------------------------

    def _may_hold(self, at: Candidate, drafts: Sequence[StageDraft]) -> bool:
        """Return whether all ranks are used and hold no more stages than is requested.

        Of exactly so many virtual stages each keeps its number; of one none is cut, as its parts would be virtual ones.
        """
        held, virtual = _held(drafts), self.request.virtual_stages
        if len(held) < self.request.num_ranks or (virtual == 1 and len(drafts) > len(at.drafts)):
            return False
        return virtual in (None, 1) or held == _held(at.drafts)

    def _inherited(self, at: Candidate, masks: Sequence[Mask]) -> Iterator[list[StageDraft | None]]:
        """Yield stages of these blocks on the ranks of what they come from, and on those of others where one is new.

        Of one that was cut each part may move; of two that were merged the ranks of either will do.
        """
        parents = [
            max(range(len(at.masks)), key=lambda i: ((mask & at.masks[i]).bit_count(), i == place, -i))
            for place, mask in enumerate(masks)
        ]
        drafts = [
            self._with_blocks(at.drafts[parent], self.sets.blocks(mask), at.drafts[parent].micro_batch_size)
            for parent, mask in zip(parents, masks, strict=True)
        ]
        yield drafts
        num_parts = Counter(parents)
        for index, (parent, draft) in enumerate(zip(parents, drafts, strict=True)):
            if draft is None:
                continue
            places = self._places(at) if num_parts[parent] > 1 else []
            for other, mask in enumerate(at.masks):
                if other not in num_parts and mask & masks[index]:
                    places.append(at.drafts[other].ranks or ())
            for ranks in places:
                if ranks != draft.ranks:
                    yield [*drafts[:index], self._on_ranks(draft, ranks), *drafts[index + 1 :]]

    def _with_blocks(self, draft: StageDraft, blocks: tuple[str, ...], wish: int) -> StageDraft | None:
        """Return a stage with other blocks, or another size; None where it may not have that."""
        size = self.rules.micro_batch_size(blocks, draft.degree, wish)
        return None if size is None else dataclasses.replace(draft, blocks=blocks, micro_batch_size=size)

    def _places(self, at: Candidate) -> list[tuple[int, ...]]:
        """Return the sets of ranks that a stage may move to."""
        request = self.request
        everywhere = tuple(range(request.num_ranks))
        places = {draft.ranks for draft in at.drafts if draft.ranks is not None}
        if request.colocate:
            places.add(everywhere)
        if request.data_parallel is None and request.num_ranks <= FEW_RANKS:
            sizes = range(1, request.num_ranks + 1)
            places.update(itertools.chain.from_iterable(itertools.combinations(everywhere, n) for n in sizes))
        return sorted(places)

    def _other_ranks(self, at: Candidate) -> Iterator[list[StageDraft | None]]:
        """Yield what results when a stage moves to the ranks of others, and when two exchange theirs."""
        drafts: list[StageDraft | None] = list(at.drafts)
        for i, draft in enumerate(at.drafts):
            for ranks in self._places(at):
                if ranks != draft.ranks:
                    yield [*drafts[:i], self._on_ranks(draft, ranks), *drafts[i + 1 :]]
        for (i, one), (j, other) in itertools.combinations(enumerate(at.drafts), 2):
            if one.ranks != other.ranks and one.ranks is not None and other.ranks is not None:
                changed = list(drafts)
                changed[i], changed[j] = self._on_ranks(one, other.ranks), self._on_ranks(other, one.ranks)
                yield changed

    def _on_ranks(self, draft: StageDraft, ranks: tuple[int, ...]) -> StageDraft | None:
        """Return a stage on other ranks; None where it has no micro-batch size there."""
        wishes = (draft.micro_batch_size, draft.micro_batch_size // draft.degree * len(ranks))
        sizes = [self.rules.micro_batch_size(draft.blocks, len(ranks), wish) for wish in wishes]
        size = next((size for size in sizes if size is not None), None)
        if size is None:
            return None
        return dataclasses.replace(draft, ranks=ranks, degree=len(ranks), micro_batch_size=size)

    def _least_of(self, masks: Sequence[Mask], drafts: Sequence[StageDraft]) -> float:
        times = []
        for mask, draft in zip(masks, drafts, strict=True):
            local = draft.micro_batch_size / draft.degree
            own = self.costs.at_grid(draft.grid).stage_times(self.sets.rows(mask), local)
            update = self._update_us(mask, draft.degree, draft.grid)
            times.append((*own, draft.micro_batch_size, 0.0, update))
        return self._least_us(masks, times)

    def _changed_drafts(self, at: Candidate) -> Iterator[Sequence[StageDraft | None]]:
        """Yield other micro-batch sizes, k, grids, degrees and ranks for the same stages."""
        drafts = list(at.drafts)
        for i, (mask, draft) in enumerate(zip(at.masks, drafts, strict=True)):
            for size in self.chooser.sizes(mask, draft.degree):
                if size != draft.micro_batch_size and 0.2 < size / draft.micro_batch_size < 5:
                    yield [*drafts[:i], dataclasses.replace(draft, micro_batch_size=size), *drafts[i + 1 :]]
            for k in (draft.k * 2, draft.k // 2):
                if 1 <= k <= self.request.max_k:
                    yield [*drafts[:i], dataclasses.replace(draft, k=k), *drafts[i + 1 :]]
            for changed in self._other_grids(mask, draft) if at.plan is None else ():
                yield [*drafts[:i], changed, *drafts[i + 1 :]]
        if at.plan is not None:
            yield from self._other_ranks(at)
        elif self.rules.data_parallel is None and len(drafts) <= 16:
            yield from self._moved_ranks(at.masks, drafts)

    def _other_grids(self, mask: Mask, draft: StageDraft) -> Iterator[StageDraft]:
        """Yield a stage with its ranks shared out otherwise among data, context and tensor positions."""
        # 4x1 on micro-batches of 4 becomes 2x2 and 1x4 of the nearest sizes that these divide: the same ranks, so that
        # no other stage has to change.
        degrees = self.rules.degrees
        for grid in self.chooser.grids(mask):
            degree, rest = divmod(draft.num_ranks, grid.size)
            if grid != draft.grid and rest == 0 and degree in degrees:
                sizes = self.chooser.sizes(mask, degree)
                if sizes:
                    yield dataclasses.replace(
                        _resized(draft, degree, sizes), tensor=grid.tensor, context=grid.context
                    )

    def _moved_ranks(self, masks: Sequence[Mask], drafts: list[StageDraft]) -> Iterator[list[StageDraft]]:
        degrees = self.rules.degrees
        for (i, giver), (j, taker) in itertools.permutations(enumerate(drafts), 2):
            for less in degrees:
                # a giver of 2x2 that gives one row frees 2 ranks: a taker of 1x2 gets one row more, one of 1x4 none
                more, rest = divmod((giver.degree - less) * giver.grid.size, taker.grid.size)
                more += taker.degree
                if less >= giver.degree or rest or more not in degrees:
                    continue
                sizes = self.chooser.sizes(masks[i], less), self.chooser.sizes(masks[j], more)
                if sizes[0] and sizes[1]:
                    changed = list(drafts)
                    changed[i] = _resized(giver, less, sizes[0])
                    changed[j] = _resized(taker, more, sizes[1])
                    yield changed

    def reshape(self, groups: Sequence[Sequence[str]], count: int) -> list[Mask] | None:
        """Cut the heaviest stages evenly, or merge the lightest, until there are ``count``."""
        masks = [self.sets.mask_of(group) for group in groups]
        return reshape(self.sets, masks, count, self._weight())

    def shared_out(self, count: int) -> Iterator[list[Mask]]:
        """Yield partitions into ``count`` stages along the lines of blocks that have grids of their own."""
        # embed (2) -> merge -> layers (2), and tower -> merge, where only embed and layers have a size: with merge
        # beside the tower, embed is a stage for itself; with merge beside embed and layers, between which it lies, not.
        sizes, sets = self.chooser.grids, self.sets
        free = (ALONE,)
        classes: dict[tuple[ModelGrid, ...], Mask] = {}
        for block in range(len(sets.names)):
            own = tuple(sizes(1 << block))
            classes[own] = classes.get(own, 0) | 1 << block
        filled = dict(classes)
        for own, mask in classes.items():
            inner = sets.between(mask) & filled.get(free, 0) if own != free else 0
            if inner and sizes(mask | inner):
                filled[own] |= inner
                filled[free] &= ~inner
        for each in [classes] if filled == classes else [classes, filled]:
            parts = [part for mask in each.values() for part in sets.parts(mask)]
            if len(parts) <= MAX_DISTINCT_PARTS and sets.is_acyclic(parts):
                yield from shared_out(
                    sets, parts, count, self._weight(), lambda one, other: bool(sizes(one | other))
                )

    def _weight(self) -> Callable[[Mask], float]:
        """Return what sums a stage's work up."""
        forward, backward = self.costs.block_times(self.request.mini_batch / max(self.request.num_ranks, 1))
        weight = forward + backward

        @functools.cache
        def load(mask: Mask) -> float:
            return float(weight[self.sets.flags(mask)].sum())

        return load


def _held(drafts: Sequence[StageDraft]) -> Counter[int]:
    """Return by rank how many stages it holds."""
    return Counter(rank for draft in drafts for rank in draft.ranks or ())


def _resized(draft: StageDraft, degree: int, sizes: Sequence[int]) -> StageDraft:
    size = min(sizes, key=lambda s: abs(s - draft.micro_batch_size))
    return dataclasses.replace(draft, degree=degree, micro_batch_size=size)


def is_better(score: Score, best: Score) -> bool:
    """Return whether a score beats another: fewer bytes too many, then time, then evenness."""
    if score[0] != best[0]:
        return score[0] < best[0]
    tolerance = 1e-9 * best[1]
    if abs(score[1] - best[1]) > tolerance:
        return score[1] < best[1]
    return score[2] < best[2] * (1 - 1e-9)
