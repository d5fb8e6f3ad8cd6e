"""How many ranks each of a given set of stages gets: exact, all ranks used, smallest bottleneck."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpp_plugin.plan.batches import BatchRules
from gpp_plugin.plan.costs import CostModel, link_for_span, ring_us
from gpp_plugin.plan.registry import PlanRequest
from gpp_plugin.plan.stages import StageDraft


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    degree: int
    micro_batch_size: int
    us_per_sample: float


class DegreeChooser:
    """Shares the ranks out among stages: exactly all of them, smallest bottleneck time per sample.

    Bisection over the finite set of stage times; whether the degrees can add up to the number of
    ranks is a subset-sum over bit sets. Costs of a stage are kept from call to call.
    """

    def __init__(self, request: PlanRequest, costs: CostModel, rules: BatchRules) -> None:
        self.request, self.costs, self.rules = request, costs, rules
        limits = [device.memory_bytes for device in request.cluster.devices[: request.num_ranks]]
        if request.memory_limit_bytes is not None:
            limits = [min(limit, request.memory_limit_bytes) for limit in limits]
        self.limits = limits
        self._options: dict[tuple[tuple[str, ...], int, int, bool], list[_Option]] = {}
        self._timed: dict[tuple[tuple[str, ...], int], list[_Option]] = {}
        self._sizes: dict[tuple[tuple[str, ...], int], list[int]] = {}

    def choose(
        self, groups: Sequence[Sequence[str]], wish: int, *, ignore_memory: bool = False
    ) -> list[StageDraft] | None:
        """Return one draft a group, or None where no choice uses all ranks within memory.

        Args:
            wish: micro-batch size of every stage that neither coupling nor the user fixes.
        """
        heights = stage_heights(self.costs, groups)
        options = [
            self._stage_options(tuple(group), wish, height, ignore_memory)
            for group, height in zip(groups, heights, strict=True)
        ]
        if not all(options):
            return None
        chosen = _share_out(options, self.request.num_ranks)
        if chosen is None:
            return None
        return [
            StageDraft(blocks=tuple(group), degree=option.degree, micro_batch_size=option.micro_batch_size)
            for group, option in zip(groups, chosen, strict=True)
        ]

    def least_shares(self, group: Sequence[str], wish: int) -> tuple[float, float]:
        """Return the least microseconds a sample of a stage, and the least times its ranks; inf if none."""
        options = self._timed_options(tuple(group), wish)
        slowest = min((option.us_per_sample for option in options), default=float("inf"))
        return slowest, min((o.us_per_sample * o.degree for o in options), default=float("inf"))

    def sizes(self, blocks: tuple[str, ...], degree: int) -> list[int]:
        """Return the micro-batch sizes a stage of that degree may have."""
        key = (blocks, degree)
        if key not in self._sizes:
            found = {self.rules.micro_batch_size(blocks, degree, wish) for wish in self.rules.wishes()}
            self._sizes[key] = sorted(size for size in found if size is not None)
        return self._sizes[key]

    def excess_of(self, memory_bytes: int, ranks: Sequence[int]) -> int:
        """Return by how many bytes a stage exceeds the smallest of its ranks (negative: it fits)."""
        return memory_bytes - min(self.limits[rank] for rank in ranks)

    def _stage_options(
        self, group: tuple[str, ...], wish: int, height: int, ignore_memory: bool
    ) -> list[_Option]:
        key = (group, wish, height, ignore_memory)
        found = self._options.get(key)
        if found is None:
            found = self._options[key] = self._make_options(group, wish, height, ignore_memory)
        return found

    def _make_options(
        self, group: tuple[str, ...], wish: int, height: int, ignore_memory: bool
    ) -> list[_Option]:
        options = self._timed_options(group, wish)
        if ignore_memory:
            return options
        request, rows, limit = self.request, self.costs.indices(group), max(self.limits)
        fitting = []
        for option in options:
            num = request.mini_batch // option.micro_batch_size
            memory = self.costs.stage_memory(
                rows,
                degree=option.degree,
                local=option.micro_batch_size // option.degree,
                in_flight=num if request.schedule == "gpipe" else min(num, height),
            )
            if memory <= limit:
                fitting.append(option)
        return fitting

    def _timed_options(self, group: tuple[str, ...], wish: int) -> list[_Option]:
        """Return every degree of a stage with its time, whatever memory it needs."""
        found = self._timed.get((group, wish))
        if found is not None:
            return found
        request, costs = self.request, self.costs
        rows = costs.indices(group)
        gradient = costs.group_gradient_bytes(rows)
        options = []
        for degree in self.rules.degrees():
            size = self.rules.micro_batch_size(group, degree, wish)
            if size is None:
                continue
            forward, backward = costs.stage_times(rows, size // degree)
            link = link_for_span(request.cluster, degree)
            reduce_us = ring_us(gradient, degree, link) if gradient > 0 else 0.0
            reduces = request.mini_batch // size if costs.zero_stage >= 2 else 1
            us = (forward + backward) / size + reduce_us * reduces / request.mini_batch
            options.append(_Option(degree=degree, micro_batch_size=size, us_per_sample=us))
        self._timed[group, wish] = options
        return options


def choose_degrees(
    request: PlanRequest,
    costs: CostModel,
    rules: BatchRules,
    groups: Sequence[Sequence[str]],
    wish: int,
    *,
    ignore_memory: bool = False,
) -> list[StageDraft] | None:
    """Run `DegreeChooser.choose` once."""
    return DegreeChooser(request, costs, rules).choose(groups, wish, ignore_memory=ignore_memory)


def _share_out(options: Sequence[Sequence[_Option]], num_ranks: int) -> list[_Option] | None:
    times = sorted({option.us_per_sample for stage in options for option in stage})
    floor = max(min(option.us_per_sample for option in stage) for stage in options)
    times = [t for t in times if t >= floor]
    low, high = 0, len(times) - 1
    if not _reachable(options, times[high], num_ranks):
        return None
    while low < high:
        middle = (low + high) // 2
        if _reachable(options, times[middle], num_ranks):
            high = middle
        else:
            low = middle + 1
    prefixes = _reachable(options, times[low], num_ranks)
    chosen: list[_Option] = []
    total = num_ranks
    for i in range(len(options) - 1, -1, -1):
        fitting = [
            option
            for option in options[i]
            if option.us_per_sample <= times[low]
            and option.degree <= total
            and prefixes[i] >> (total - option.degree) & 1
        ]
        best = min(fitting, key=lambda option: option.us_per_sample)
        chosen.append(best)
        total -= best.degree
    return chosen[::-1]


def _reachable(options: Sequence[Sequence[_Option]], limit: float, num_ranks: int) -> list[int]:
    """Return after each stage the bit set of rank totals, or [] where ``num_ranks`` is not one."""
    mask = (1 << (num_ranks + 1)) - 1
    prefixes = [1]
    for stage in options:
        sums = 0
        for option in stage:
            if option.us_per_sample <= limit:
                sums |= prefixes[-1] << option.degree
        prefixes.append(sums & mask)
    return prefixes if prefixes[-1] >> num_ranks & 1 else []


def stage_heights(costs: CostModel, groups: Sequence[Sequence[str]]) -> list[int]:
    """Return for each group the number of stages on its longest path to a sink, itself included."""
    stage_of = [0] * len(costs.index)
    for i, group in enumerate(groups):
        for block in group:
            stage_of[costs.index[block]] = i
    successors: list[set[int]] = [set() for _ in groups]
    waiting: list[int] = [0] * len(groups)
    predecessors: list[list[int]] = [[] for _ in groups]
    for src, dst, _ in costs.block_edges:
        a, b = stage_of[src], stage_of[dst]
        if a != b and b not in successors[a]:
            successors[a].add(b)
            predecessors[b].append(a)
            waiting[a] += 1
    heights = [1] * len(groups)
    ready = [i for i, count in enumerate(waiting) if count == 0]
    while ready:
        stage = ready.pop()
        for other in predecessors[stage]:
            heights[other] = max(heights[other], heights[stage] + 1)
            waiting[other] -= 1
            if waiting[other] == 0:
                ready.append(other)
    return heights
