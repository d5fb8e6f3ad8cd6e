"""Improves a set of stages by moves that the series-parallel search does not know.

Moves: a boundary block to another stage (also across branches), two stages merged, one cut in two,
another micro-batch size or k for one stage, ranks from one stage to another. Every candidate is built
and predicted whole; the first that is better is taken. A plan that needs too much memory is worth
less than any that fits, the less the more it exceeds, so the moves also lead to feasible plans.

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
from collections.abc import Callable, Iterator, Sequence

from gpp_plugin.plan.costs.cost_model import CostModel, us_per_sample
from gpp_plugin.plan.costs.estimate import estimate_plan_us
from gpp_plugin.plan.make import StageDraft, build_plan
from gpp_plugin.plan.memory.fitting import StageFitter
from gpp_plugin.plan.refine.block_sets import (
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
from gpp_plugin.plan.request import BatchRules, PlanRequest, SearchReport

SLACKS = (0.0, 0.5, 1.0)

Score = tuple[float, float, float]
NOT_WORTH: Score = (float("inf"),) * 3
"""The score of what was found unable to win without being predicted."""

HOPELESS = 1.2
"""Stages whose busiest computes longer than this many times the best step are not predicted."""
OVERHEAD = 200
"""Simulated tasks that cost as much as building a candidate does; ``GLANCE`` as looking at one's bound."""
GLANCE = 40
ROUNDING = 1e-9
MAX_DISTINCT_PARTS = 24
"""Parts of a model of different tensor sizes up to which stages are shared out among them."""
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
        way: to give stages tensor sizes (`TensorRules.ways`).
        score: (bytes too many, predicted microseconds, unevenness); smaller is better.
    """

    masks: tuple[Mask, ...]
    wish: int
    drafts: tuple[StageDraft, ...]
    score: Score
    slack: float = 0.0
    way: int = 1


class Refiner:
    """Searches around the stages of a plan, within a budget of simulated tasks.

    Args:
        budget: tasks (forward or backward of one micro-batch on one stage) to predict in all.
        fitter: what a stage costs to fit where it does not; None: it then needs too much.
        report: notes where the budget ends the search.
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
    ) -> None:
        self.report = SearchReport() if report is None else report
        self.request, self.costs, self.rules, self.fitter = request, costs, rules, fitter
        self.num_stages = request.num_stages
        self.budget = budget
        self.sets = BlockSets(costs)
        self.chooser = DegreeChooser(request, costs, rules, self.sets, fitter)
        self._seen: dict[object, Score] = {}
        self._best_us = float("inf")
        self._cutoff_us = float("inf")

    # ---- candidates -------------------------------------------------------------------------------

    def candidate(
        self, groups: Sequence[Sequence[str]], wish: int, *, slack: float = 0.0, way: int | None = None
    ) -> Candidate | None:
        """Return the candidate of these groups of blocks, or None where ranks cannot be shared out."""
        return self.with_masks([self.sets.mask_of(group) for group in groups], wish, slack, way)

    def from_drafts(self, drafts: Sequence[StageDraft], wish: int) -> Candidate:
        """Return the candidate of complete drafts."""
        masks = tuple(self.sets.mask_of(draft.blocks) for draft in drafts)
        way = self.rules.tensors.ways[0]
        return Candidate(masks=masks, wish=wish, drafts=tuple(drafts), score=self._score(drafts), way=way)

    def with_masks(
        self, masks: Sequence[Mask], wish: int, slack: float = 0.0, way: int | None = None
    ) -> Candidate | None:
        """Return the candidate of these stages, or None where it is no plan, cannot win or was met before."""
        if self.num_stages is not None and len(masks) != self.num_stages:
            return None
        # on devices of several speeds it matters which of two equal branches is cut
        shape = frozenset(masks) if self.costs.is_mixed else self.sets.shape_of(masks)
        way = self.rules.tensors.ways[0] if way is None else way
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

    def _drafts(self, masks: Sequence[Mask], wish: int, way: int) -> list[StageDraft] | None:
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
        for o in options:
            computing = (o.forward_us + o.backward_us) / o.micro_batch_size
            reducing = (o.us_per_sample - computing) * self.request.mini_batch
            times.append((o.forward_us, o.backward_us, o.micro_batch_size, reducing))
        return None if self._least_us(masks, times) > limit else self.chooser.drafts(masks, options)

    def _score(self, drafts: Sequence[StageDraft]) -> Score:
        plan = build_plan(self.request, drafts, planner="", costs=self.costs, is_named=False)
        if self.fitter is not None:
            plan = self.fitter.estimated(plan)
        self.budget -= OVERHEAD + 2 * sum(plan.mini_batch // draft.micro_batch_size for draft in drafts)
        times = [(s.forward_us + s.backward_us) / s.micro_batch_size for s in plan.stages]
        excess = sum(max(0, self.chooser.excess_of(stage.memory_bytes, stage.ranks)) for stage in plan.stages)
        us = estimate_plan_us(plan, self.costs)
        if excess == 0:
            self._best_us = min(self._best_us, us)
        return float(excess), us, sum(t * t for t in times)

    def _least_us(self, masks: Sequence[Mask], times: Sequence[tuple[float, float, int, float]]) -> float:
        """Return a time no step of these stages is shorter than, messages taken to be free.

        A stage begins after a forward of every stage on a path to it, and its gradients then pass
        through a backward of each.

        Args:
            times: by stage, forward and backward of a micro-batch, its size, and the gradients' reduction.
        """
        heights = self.sets.heights(masks)
        forwards, both = [0.0] * len(masks), [0.0] * len(masks)
        least = 0.0
        for a in sorted(range(len(masks)), key=lambda i: -heights[i]):
            forward, backward, size, reducing = times[a]
            work = (forward + backward) * (self.request.mini_batch // size)
            # Gradients are reduced while those of the stages before it still pass through them.
            least = max(least, both[a] + work, forwards[a] + work + reducing)
            readers, returning = self.sets.outputs(masks[a])
            for b, mask in enumerate(masks) if readers else ():
                if mask & readers:
                    forwards[b] = max(forwards[b], forwards[a] + forward)
                    both[b] = max(both[b], both[a] + forward + (backward if mask & returning else 0.0))
        return least

    # ---- search -----------------------------------------------------------------------------------

    def improve(self, start: Candidate) -> Candidate:
        """Return the best candidate reached from ``start`` by taking every move that improves."""
        best = start
        is_improved = True
        while is_improved and self.budget > 0:
            is_improved = False
            # What cannot be quicker than a plan that fits need not be predicted.
            self._cutoff_us = best.score[1] * (1 + ROUNDING) if best.score[0] == 0 else float("inf")
            for found in self._neighbours(best):
                if is_better(found.score, best.score):
                    best, is_improved = found, True
                    break
                if self.budget <= 0:
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

    def _unevenness(self, masks: Sequence[Mask], wish: int, way: int) -> float:
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
        """Return what each stage computes a sample."""
        if self.costs.is_mixed:  # which depends on where it is
            plan = build_plan(self.request, at.drafts, planner="", costs=self.costs, is_named=False)
            placed = {frozenset(stage.blocks): stage.ranks for stage in plan.stages}
        else:
            placed = {}
        times = []
        for mask, draft in zip(at.masks, at.drafts, strict=True):
            own, local = self.costs.at_tensor(draft.tensor), draft.micro_batch_size / draft.degree
            ranks = placed.get(frozenset(draft.blocks))
            computing = sum(own.stage_times(self.sets.rows(mask), local, ranks))
            times.append(float(us_per_sample(computing, draft.micro_batch_size)))
        return times

    def _neighbours(self, at: Candidate) -> Iterator[Candidate]:
        """Yield the candidates one move away, the most promising kinds first."""
        slacks = (slack for slack in SLACKS if slack != at.slack)
        yield from filter(None, (self.with_masks(at.masks, at.wish, slack, at.way) for slack in slacks))
        masks = list(at.masks)
        times = self._times(at)
        slowest_first = sorted(range(len(masks)), key=lambda i: -times[i])
        quickest_first = sorted(range(len(masks)), key=times.__getitem__)
        yield from self._with_all(at, regroupings(self.sets, masks, slowest_first))
        wishes = self.rules.wishes
        place = wishes.index(at.wish) if at.wish in wishes else 0
        near = [*wishes[place + 1 : place + 3], *wishes[max(place - 2, 0) : place][::-1]]
        yield from filter(None, (self.with_masks(at.masks, wish, at.slack, at.way) for wish in near))
        ways = self.rules.tensors.ways if len(self.rules.tensors.ways) > 1 else ()
        yield from filter(None, (self.with_masks(at.masks, at.wish, at.slack, way) for way in ways))
        for drafts in self._changed_drafts(at):
            key = frozenset(drafts)
            if key not in self._seen and self._least_of(at.masks, drafts) <= self._cutoff_us:
                self._seen[key] = score = self._score(drafts)
                yield dataclasses.replace(at, drafts=tuple(drafts), score=score)
        yield from self._with_all(at, swaps(self.sets, masks))
        yield from self._with_all(at, merged_and_cut(self.sets, masks, quickest_first))

    def _with_all(self, at: Candidate, partitions: Iterator[list[Mask]]) -> Iterator[Candidate]:
        return filter(None, (self.with_masks(masks, at.wish, at.slack, at.way) for masks in partitions))

    def _least_of(self, masks: Sequence[Mask], drafts: Sequence[StageDraft]) -> float:
        times = []
        for mask, draft in zip(masks, drafts, strict=True):
            local = draft.micro_batch_size / draft.degree
            own = self.costs.at_tensor(draft.tensor).stage_times(self.sets.rows(mask), local)
            times.append((*own, draft.micro_batch_size, 0.0))
        return self._least_us(masks, times)

    def _changed_drafts(self, at: Candidate) -> Iterator[list[StageDraft]]:
        """Yield other micro-batch sizes, k, tensor sizes and degrees for the same stages."""
        drafts = list(at.drafts)
        for i, (mask, draft) in enumerate(zip(at.masks, drafts, strict=True)):
            for size in self.chooser.sizes(mask, draft.degree):
                if size != draft.micro_batch_size and 0.2 < size / draft.micro_batch_size < 5:
                    yield [*drafts[:i], dataclasses.replace(draft, micro_batch_size=size), *drafts[i + 1 :]]
            for k in (draft.k * 2, draft.k // 2):
                if 1 <= k <= self.request.max_k:
                    yield [*drafts[:i], dataclasses.replace(draft, k=k), *drafts[i + 1 :]]
            for changed in self._other_grids(mask, draft):
                yield [*drafts[:i], changed, *drafts[i + 1 :]]
        if self.rules.data_parallel is None and len(drafts) <= 16:
            yield from self._moved_ranks(at.masks, drafts)

    def _other_grids(self, mask: Mask, draft: StageDraft) -> Iterator[StageDraft]:
        """Yield a stage with its ranks shared out otherwise among data and tensor positions."""
        # 4x1 on micro-batches of 4 becomes 2x2 and 1x4 of the nearest sizes that these divide: the same ranks, so that
        # no other stage has to change.
        degrees, num_ranks = self.rules.degrees, draft.degree * draft.tensor
        for tensor in self.chooser.tensor_sizes(mask):
            if tensor != draft.tensor and num_ranks % tensor == 0 and num_ranks // tensor in degrees:
                sizes = self.chooser.sizes(mask, num_ranks // tensor)
                if sizes:
                    resized = _resized(draft, num_ranks // tensor, sizes)
                    yield dataclasses.replace(resized, tensor=tensor)

    def _moved_ranks(self, masks: Sequence[Mask], drafts: list[StageDraft]) -> Iterator[list[StageDraft]]:
        degrees = self.rules.degrees
        for (i, giver), (j, taker) in itertools.permutations(enumerate(drafts), 2):
            for less in degrees:
                # a giver of 2x2 that gives one row frees 2 ranks: a taker of 1x2 gets one row more, one of 1x4 none
                more, rest = divmod((giver.degree - less) * giver.tensor, taker.tensor)
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
        """Yield partitions into ``count`` stages along the lines of blocks that have tensor sizes of their own."""
        # embed (2) -> merge -> layers (2), and tower -> merge, where only embed and layers have a size: with merge
        # beside the tower, embed is a stage for itself; with merge beside embed and layers, between which it lies, not.
        sizes, sets = self.chooser.tensor_sizes, self.sets
        classes: dict[tuple[int, ...], Mask] = {}
        for block in range(len(sets.names)):
            own = tuple(sizes(1 << block))
            classes[own] = classes.get(own, 0) | 1 << block
        filled = dict(classes)
        for own, mask in classes.items():
            inner = sets.between(mask) & filled.get((1,), 0) if own != (1,) else 0
            if inner and sizes(mask | inner):
                filled[own] |= inner
                filled[1,] &= ~inner
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
