"""Where a search for plans of shared ranks starts: interleaved stages, branches on the ranks of others, and both.

N ranks, the first four of eight here, in p groups of d; v stages a group:

    interleaved      v p stages of d ranks each, put on groups by the maps of `maps`
    colocated        a branch on the ranks of the rest, which is planned on all ranks as p or v p stages:
                     over all ranks, over those of the first groups or the last, or cut into p stages, one a group

Source: Optimus (ATC 2025); Megatron-LM (arXiv 2104.04473), section 2.2
Tests: tests/plan/test_shared_ranks_plans.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.plan.batch_rules import BatchRules
from gpp_plugin.plan.make import StageDraft
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.plan.shared.partitions import Map, Partitioner, round_robin, usual_maps
from gpp_plugin.plan.shared.shared_evaluator import Drafts

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
            yield Start(drafts=drafts_of(self._plan), how=AS_PLANNED)
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
        fitting = [degree for degree in self._rules.degrees() if total % degree == 0]
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
            for size in self._branch_sizes(branch, end - begin, wish):
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

    def _branch_sizes(self, branch: Sequence[str], degree: int, wish: int) -> list[int]:
        """Return micro-batch sizes of a branch: the least that its ranks and the rest's divide, and larger ones."""
        found = []
        for other in self._rules.wishes():
            size = self._rules.micro_batch_size(branch, degree, other)
            if size is not None and size >= wish:
                found.append(size)
        return sorted(set(found))[:BRANCH_SIZES]

    def _wishes(self, degree: int) -> list[int]:
        """Return micro-batch sizes of stages of ``degree`` ranks."""
        return [wish for wish in self._rules.wishes() if wish % degree == 0] or self._rules.wishes()

    def _load(self, part: Sequence[str]) -> float:
        return self._partitioner.load(self._partitioner.sets.mask_of(part))


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def drafts_of(plan: PipelinePlan) -> Drafts:
    """Return the stages of a plan, on their ranks."""
    drafts = (StageDraft.of(stage) for stage in plan.stages)
    return tuple(
        dataclasses.replace(draft, ranks=stage.ranks)
        for draft, stage in zip(drafts, plan.stages, strict=True)
    )
