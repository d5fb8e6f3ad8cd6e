"""Improves a set of stages by moves that the series-parallel search does not know.

Moves: a boundary block to another stage (also across branches), two stages merged, one cut in two,
another micro-batch size or k for one stage, ranks from one stage to another. Every candidate is built
and predicted whole; the first that is better is taken. A plan that needs too much memory is worth
less than any that fits, the less the more it exceeds, so the moves also lead to feasible plans.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from gpp_plugin.plan.batches import BatchRules
from gpp_plugin.plan.costs import CostModel
from gpp_plugin.plan.degrees import DegreeChooser, stage_heights
from gpp_plugin.plan.estimate import estimate_plan_us
from gpp_plugin.plan.registry import PlanRequest
from gpp_plugin.plan.stages import StageDraft, build_plan

SLACKS = (0.0, 0.5, 1.0)

Mask = int
Score = tuple[float, float, float]

HOPELESS = 1.2
"""Stages whose busiest computes longer than this many times the best step are not predicted."""
OVERHEAD = 100
"""Simulated tasks that cost as much as building a candidate does."""
MAX_CROSS_BLOCKS = 40
"""Up to so many blocks a block may move to any stage; beyond, to stages next to it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Stages as bit sets of block positions, with what is decided about them, and their score.

    Args:
        wish: the micro-batch size stages have unless something fixes it.
        slack: micro-batches held in excess of Table 2 for each stage on the way to a sink; Table 2
            takes communication to be free, and where it is not every hop on a round trip delays the
            next micro-batch unless another one is there to work on.
        score: (bytes too many, predicted microseconds, unevenness); smaller is better.
    """

    masks: tuple[Mask, ...]
    wish: int
    drafts: tuple[StageDraft, ...]
    score: Score
    slack: float = 0.0


class Refiner:
    """Searches around given stages, within a budget of simulated tasks.

    Args:
        num_stages: keep exactly that many, or None.
        budget: tasks (forward or backward of one micro-batch on one stage) to predict in all.
    """

    def __init__(
        self,
        request: PlanRequest,
        costs: CostModel,
        rules: BatchRules,
        *,
        budget: int,
    ) -> None:
        self.request, self.costs, self.rules = request, costs, rules
        self.num_stages = request.num_stages
        self.budget = budget
        self.names = [block.name for block in request.graph.blocks]
        num = len(self.names)
        self.before, self.after = [0] * num, [0] * num
        for src, dst, _ in costs.block_edges:
            self.after[src] |= 1 << dst
            self.before[dst] |= 1 << src
        self.chooser = DegreeChooser(request, costs, rules)
        tensors = request.graph.tensors
        self._edges = [
            (src, dst, any(tensors[name].requires_grad for name in names))
            for src, dst, names in costs.block_edges
        ]
        self._seen: dict[object, Score] = {}
        self._best_us = float("inf")
        self._cutoff_us = float("inf")
        self._shares: dict[tuple[Mask, int], tuple[float, float]] = {}

    # ---- candidates -------------------------------------------------------------------------------

    def candidate(
        self, groups: Sequence[Sequence[str]], wish: int, *, slack: float = 0.0
    ) -> Candidate | None:
        """Return the candidate of these groups of blocks, or None where ranks cannot be shared out."""
        masks = [sum(1 << self.costs.index[name] for name in group) for group in groups]
        return self.with_masks(masks, wish, slack)

    def from_drafts(self, drafts: Sequence[StageDraft], wish: int) -> Candidate:
        """Return the candidate of complete drafts."""
        masks = tuple(sum(1 << self.costs.index[name] for name in draft.blocks) for draft in drafts)
        return Candidate(masks=masks, wish=wish, drafts=tuple(drafts), score=self._score(drafts))

    def with_masks(self, masks: Sequence[Mask], wish: int, slack: float = 0.0) -> Candidate | None:
        """Return the candidate of these stages, or None where it is no plan or was met before."""
        if self.num_stages is not None and len(masks) != self.num_stages:
            return None
        key = (frozenset(masks), wish, slack)
        if key in self._seen:
            return None
        self.budget -= OVERHEAD
        limit = min(HOPELESS * self._best_us, self._cutoff_us)
        if limit < float("inf") and self._least_shared_us(masks, wish) > limit:
            self._seen[key] = (float("inf"),) * 3
            return None
        groups = [self._names_of(mask) for mask in masks]
        drafts = self.chooser.choose(groups, wish) or self.chooser.choose(groups, wish, ignore_memory=True)
        if drafts is None:
            self._seen[key] = (float("inf"),) * 3
            return None
        if self._least_us(drafts) > limit:
            self._seen[key] = (float("inf"),) * 3
            return None
        if slack > 0:
            drafts = self._with_slack(drafts, slack)
        score = self._score(drafts)
        self._seen[key] = score
        return Candidate(masks=tuple(masks), wish=wish, drafts=tuple(drafts), score=score, slack=slack)

    def _with_slack(self, drafts: Sequence[StageDraft], slack: float) -> list[StageDraft]:
        heights = stage_heights(self.costs, [draft.blocks for draft in drafts])
        return [
            dataclasses.replace(draft, extra_in_flight=math.ceil((height - 1) * slack))
            for draft, height in zip(drafts, heights, strict=True)
        ]

    def _names_of(self, mask: Mask) -> list[str]:
        return [self.names[i] for i in bits(mask)]

    def _score(self, drafts: Sequence[StageDraft]) -> Score:
        plan = build_plan(self.request, drafts, planner="", costs=self.costs, is_named=False)
        self.budget -= OVERHEAD + 2 * sum(plan.num_micro_batches(i) for i in range(len(plan.stages)))
        times = [(s.forward_us + s.backward_us) / s.micro_batch_size for s in plan.stages]
        excess = sum(max(0, self.chooser.excess_of(stage.memory_bytes, stage.ranks)) for stage in plan.stages)
        us = estimate_plan_us(plan, self.costs)
        if excess == 0:
            self._best_us = min(self._best_us, us)
        return float(excess), us, sum(t * t for t in times)

    # ---- search -----------------------------------------------------------------------------------

    def improve(self, start: Candidate) -> Candidate:
        """Return the best candidate reached from ``start`` by taking every move that improves."""
        best = start
        is_improved = True
        while is_improved and self.budget > 0:
            is_improved = False
            # What cannot be quicker than a plan that fits need not be predicted.
            self._cutoff_us = best.score[1] * (1 + 1e-9) if best.score[0] == 0 else float("inf")
            for found in self._neighbours(best):
                if is_better(found.score, best.score):
                    best, is_improved = found, True
                    break
                if self.budget <= 0:
                    break
        self._cutoff_us = float("inf")
        return best

    def _least_shared_us(self, masks: Sequence[Mask], wish: int) -> float:
        """Return a time no step of these stages is shorter than, however the ranks are shared out."""
        slowest = work = 0.0
        for mask in masks:
            found = self._shares.get((mask, wish))
            if found is None:
                found = self._shares[mask, wish] = self.chooser.least_shares(self._names_of(mask), wish)
            slowest, work = max(slowest, found[0]), work + found[1]
        return max(slowest, work / self.request.num_ranks) * self.request.mini_batch

    def _least_us(self, drafts: Sequence[StageDraft]) -> float:
        """Return a time no step of these stages is shorter than, messages taken to be free.

        A stage begins after a forward of every stage on a path to it, and its gradients then pass
        through a backward of each.
        """
        stage_of = [0] * len(self.names)
        work, once = [], []
        for i, draft in enumerate(drafts):
            rows = self.costs.indices(draft.blocks)
            for row in rows:
                stage_of[row] = i
            forward, backward = self.costs.stage_times(rows, draft.micro_batch_size / draft.degree)
            work.append((forward + backward) * (self.request.mini_batch // draft.micro_batch_size))
            once.append((forward, backward))
        links: dict[tuple[int, int], float] = {}
        for src, dst, has_gradient in self._edges:
            a, b = stage_of[src], stage_of[dst]
            if a != b:
                ramp = once[a][0] + (once[a][1] if has_gradient else 0.0)
                links[a, b] = max(links.get((a, b), 0.0), ramp)
        before = [0.0] * len(drafts)
        is_changed = True
        while is_changed:  # few rounds: drafts come in nearly the order of the graph
            is_changed = False
            for (a, b), ramp in links.items():
                if before[a] + ramp > before[b]:
                    before[b], is_changed = before[a] + ramp, True
        return max(ramp + own for ramp, own in zip(before, work, strict=True))

    def balance(self, start: Candidate, *, rounds: int = 64) -> Candidate:
        """Return the candidate reached by moves that even out the stages' times per sample, unpredicted.

        The p-norm of the times falls with every move, so plateaus on which several stages are the
        bottleneck (no single move shortens the step) are crossed.
        """
        masks, best = list(start.masks), self._unevenness(start.masks, start.wish)
        for _ in range(rounds):
            heaviest = max(range(len(masks)), key=lambda i: self._load(start.wish, masks[i]))
            options = [
                (self._unevenness(changed, start.wish), n, changed)
                for n, changed in enumerate(self._moves_from(masks, heaviest))
            ]
            if not options or min(options)[0] >= best * (1 - 1e-12):
                break
            best, _, masks = min(options)
        return self.with_masks(masks, start.wish, start.slack) or start

    def _unevenness(self, masks: Sequence[Mask], wish: int) -> float:
        drafts = self.chooser.choose([self._names_of(mask) for mask in masks], wish)
        if drafts is None:
            return float("inf")
        total = 0.0
        for mask, draft in zip(masks, drafts, strict=True):
            total += self._us_per_sample(mask, draft) ** 8
        return total

    def _load(self, wish: int, mask: Mask) -> float:
        forward, backward = self.costs.stage_times(list(bits(mask)), wish)
        return forward + backward

    def _us_per_sample(self, mask: Mask, draft: StageDraft) -> float:
        local = draft.micro_batch_size / draft.degree
        forward, backward = self.costs.stage_times(list(bits(mask)), local)
        return (forward + backward) / draft.micro_batch_size

    def _neighbours(self, at: Candidate) -> Iterator[Candidate]:
        """Yield the candidates one move away, the most promising kinds first."""
        for slack in SLACKS:
            if slack != at.slack:
                found = self.with_masks(at.masks, at.wish, slack)
                if found is not None:
                    yield found
        for masks in self._regroupings(at):
            found = self.with_masks(masks, at.wish, at.slack)
            if found is not None:
                yield found
        wishes = self.rules.wishes()
        place = wishes.index(at.wish) if at.wish in wishes else 0
        for wish in [*wishes[place + 1 : place + 3], *wishes[max(place - 2, 0) : place][::-1]]:
            found = self.with_masks(at.masks, wish, at.slack)
            if found is not None:
                yield found
        for drafts in self._changed_drafts(at):
            key = frozenset(drafts)
            if key not in self._seen and self._least_us(drafts) <= self._cutoff_us:
                self._seen[key] = score = self._score(drafts)
                yield dataclasses.replace(at, drafts=tuple(drafts), score=score)
        for masks in itertools.chain(self._swaps(list(at.masks)), self._merged_and_cut(at)):
            found = self.with_masks(masks, at.wish, at.slack)
            if found is not None:
                yield found

    def _regroupings(self, at: Candidate) -> Iterator[list[Mask]]:
        masks = list(at.masks)
        order = sorted(range(len(masks)), key=lambda i: -self._us_per_sample(masks[i], at.drafts[i]))
        for i in order:
            yield from self._moves_from(masks, i)
        for i in order:
            for block_mask in self._cuts(masks[i]):
                rest = masks[:i] + masks[i + 1 :]
                yield [*rest, block_mask, masks[i] & ~block_mask]
        for i in order[::-1]:
            for j in range(len(masks)):
                if i < j and self._can_merge(masks, i, j):
                    yield self._merged(masks, i, j)

    def _moves_from(self, masks: list[Mask], i: int) -> Iterator[list[Mask]]:
        """Yield what results when a boundary block of stage ``i`` moves to another stage."""
        own = masks[i]
        if own & (own - 1) == 0:
            return
        is_small = len(self.names) <= MAX_CROSS_BLOCKS
        for block in bits(own):
            is_first, is_last = not self.before[block] & own, not self.after[block] & own
            if not (is_first or is_last):
                continue
            near = self.before[block] | self.after[block]
            for j, other in enumerate(masks):
                if j == i or not (is_small or near & other):
                    continue
                changed = list(masks)
                changed[i] = own & ~(1 << block)
                changed[j] = other | 1 << block
                if self.is_acyclic(changed):
                    yield changed

    def _swaps(self, masks: list[Mask]) -> Iterator[list[Mask]]:
        """Yield what results when two boundary blocks of different stages change places."""
        if len(self.names) > MAX_CROSS_BLOCKS:
            return
        edge_blocks = [self._boundary(mask) for mask in masks]
        for i, j in itertools.combinations(range(len(masks)), 2):
            for a, b in itertools.product(edge_blocks[i], edge_blocks[j]):
                changed = list(masks)
                changed[i] = masks[i] & ~(1 << a) | 1 << b
                changed[j] = masks[j] & ~(1 << b) | 1 << a
                if self.is_acyclic(changed):
                    yield changed

    def _boundary(self, mask: Mask) -> list[int]:
        return [block for block in bits(mask) if not (self.before[block] & mask and self.after[block] & mask)]

    def _cuts(self, mask: Mask) -> list[Mask]:
        """Return prefixes of a stage: of its topological order, and of each of its branches."""
        members = list(bits(mask))
        if len(members) < 2:
            return []
        prefix, prefixes = 0, []
        for block in members[:-1]:
            prefix |= 1 << block
            prefixes.append(prefix)
        for part in self._parts(mask):
            if part != mask:
                prefixes.append(part)
        if len(members) <= MAX_CROSS_BLOCKS:
            for block in members:
                ancestors = self._reach(block, mask, self.before)
                descendants = self._reach(block, mask, self.after)
                prefixes.extend((ancestors, mask & ~descendants))
        return [p for p in dict.fromkeys(prefixes) if p and p != mask]

    def _reach(self, block: int, within: Mask, neighbours: list[Mask]) -> Mask:
        reached = frontier = 1 << block
        while frontier:
            low = frontier & -frontier
            frontier ^= low
            fresh = neighbours[low.bit_length() - 1] & within & ~reached
            reached |= fresh
            frontier |= fresh
        return reached

    def _parts(self, mask: Mask) -> list[Mask]:
        parts, rest = [], mask
        both = [a | b for a, b in zip(self.before, self.after, strict=True)]
        while rest:
            part = self._reach((rest & -rest).bit_length() - 1, mask, both)
            parts.append(part)
            rest &= ~part
        return parts

    def _merged_and_cut(self, at: Candidate) -> Iterator[list[Mask]]:
        """Yield what results when two stages are merged and another is cut, their number kept."""
        masks = list(at.masks)
        order = sorted(range(len(masks)), key=lambda i: self._us_per_sample(masks[i], at.drafts[i]))
        for i in order:
            for j in order:
                if i >= j or not self._can_merge(masks, i, j):
                    continue
                merged = self._merged(masks, i, j)
                for k, mask in enumerate(merged):
                    for prefix in self._cuts(mask):
                        yield [*merged[:k], *merged[k + 1 :], prefix, mask & ~prefix]

    @staticmethod
    def _merged(masks: list[Mask], i: int, j: int) -> list[Mask]:
        return [mask for n, mask in enumerate(masks) if n not in (i, j)] + [masks[i] | masks[j]]

    def _can_merge(self, masks: list[Mask], i: int, j: int) -> bool:
        return self.is_acyclic(self._merged(masks, i, j))

    def is_acyclic(self, masks: Sequence[Mask]) -> bool:
        """Return whether the stages' graph has no circle (and so every stage is convex)."""
        inputs = []
        for mask in masks:
            found = 0
            for block in bits(mask):
                found |= self.before[block]
            inputs.append(found & ~mask)
        done, waiting = 0, list(range(len(masks)))
        while waiting:
            rest = [i for i in waiting if inputs[i] & ~done]
            if len(rest) == len(waiting):
                return False
            for i in waiting:
                if not inputs[i] & ~done:
                    done |= masks[i]
            waiting = rest
        return True

    def _changed_drafts(self, at: Candidate) -> Iterator[list[StageDraft]]:
        """Yield other micro-batch sizes, k and degrees for the same stages."""
        drafts = list(at.drafts)
        for i, draft in enumerate(drafts):
            for size in self.chooser.sizes(draft.blocks, draft.degree):
                if size != draft.micro_batch_size and 0.2 < size / draft.micro_batch_size < 5:
                    yield [*drafts[:i], dataclasses.replace(draft, micro_batch_size=size), *drafts[i + 1 :]]
            for k in (draft.k * 2, draft.k // 2):
                if 1 <= k <= self.request.max_k:
                    yield [*drafts[:i], dataclasses.replace(draft, k=k), *drafts[i + 1 :]]
        if self.rules.data_parallel is None and len(drafts) <= 16:
            yield from self._moved_ranks(drafts)

    def _moved_ranks(self, drafts: list[StageDraft]) -> Iterator[list[StageDraft]]:
        degrees = self.rules.degrees()
        for i, giver in enumerate(drafts):
            for j, taker in enumerate(drafts):
                if i == j:
                    continue
                for less in degrees:
                    more = taker.degree + giver.degree - less
                    if less >= giver.degree or more not in degrees:
                        continue
                    sizes = self.chooser.sizes(giver.blocks, less), self.chooser.sizes(taker.blocks, more)
                    if sizes[0] and sizes[1]:
                        changed = list(drafts)
                        changed[i] = _resized(giver, less, sizes[0])
                        changed[j] = _resized(taker, more, sizes[1])
                        yield changed

    # ---- to a given number of stages ----------------------------------------------------------------

    def reshape(self, groups: Sequence[Sequence[str]], count: int) -> list[Mask] | None:
        """Cut the heaviest stages evenly, or merge the lightest, until there are ``count``."""
        masks = [sum(1 << self.costs.index[name] for name in group) for group in groups]
        forward, backward = self.costs.block_times(self.request.mini_batch / max(self.request.num_ranks, 1))
        weight = forward + backward
        loads: dict[Mask, float] = {}

        def load(mask: Mask) -> float:
            if mask not in loads:
                loads[mask] = float(weight[list(bits(mask))].sum())
            return loads[mask]

        while len(masks) < count:
            for i in sorted(range(len(masks)), key=lambda i: -load(masks[i])):
                mask = masks[i]
                options = [(max(load(prefix), load(mask & ~prefix)), prefix) for prefix in self._cuts(mask)]
                if options:
                    break
            else:
                return None
            prefix = min(options)[1]
            del masks[i]
            masks += [prefix, mask & ~prefix]
        while len(masks) > count:
            pairs = [
                (load(masks[i] | masks[j]), i, j)
                for i in range(len(masks))
                for j in range(i + 1, len(masks))
                if self._can_merge(masks, i, j)
            ]
            if not pairs:
                return None
            _, i, j = min(pairs)
            masks = self._merged(masks, i, j)
        return masks


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


def bits(mask: Mask) -> Iterator[int]:
    """Yield the positions of the set bits, increasing."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
