"""How many ranks each of a fixed set of stages gets: exact, all ranks used, smallest bottleneck.

A stage's ranks are a grid of data x context x tensor positions. Of the grids of one number of ranks the quickest a
sample counts; as micro-batches of fewer samples on more ranks each fill a pipeline sooner, whole plans are also made
with one context and tensor size as far as stages allow it (`GridRules.ways`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gpp_plugin.ir.plan import ALONE, ModelGrid
from gpp_plugin.plan.costs.collective_costs import stack_lines
from gpp_plugin.plan.costs.cost_model import (
    CostModel,
    Floats,
    Kinds,
    remembered,
    us_per_sample,
)
from gpp_plugin.plan.costs.estimate import exposed_us
from gpp_plugin.plan.make import StageDraft, order_stages
from gpp_plugin.plan.memory.fitting import StageFitter
from gpp_plugin.plan.refine.block_sets import BlockSets, Mask
from gpp_plugin.plan.request import ANY_SIZE, BatchRules, PlanRequest


class Option(NamedTuple):
    """A grid of a stage, and what it costs: times of one micro-batch on a rank, and of a sample in all."""

    degree: int
    micro_batch_size: int
    us_per_sample: float
    forward_us: float
    backward_us: float
    grid: ModelGrid = ALONE

    @property
    def num_ranks(self) -> int:
        """Return the ranks of the grid."""
        return self.degree * self.grid.size


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizing:
    """Degrees and micro-batch sizes of all stages that are alike in coupling and fixed sizes.

    Args:
        forward_us, backward_us: [degree, block] of one micro-batch.
        reduce_us, reduce_us_per_byte: [line, degree] of one sample's share of the gradients' reduction, hidden or not
            (`stack_lines`).
    """

    degrees: list[int]
    sizes: list[int]
    forward_us: Floats
    backward_us: Floats
    samples: Floats
    reduce_us: Floats
    reduce_us_per_byte: Floats


class DegreeChooser:
    """Shares the ranks out among stages: exactly all of them, smallest bottleneck time per sample.

    Bisection over the finite set of stage times; whether the degrees can add up to the number of
    ranks is a subset-sum over bit sets. Where devices are of several speeds it matters which ranks a
    stage gets, and the first stages take the first ranks (`_share_out_in_order`). Costs of a stage are
    cached from call to call.

    Args:
        fitter: makes stages fit that do not, which takes time; None: such stages are left out.
    """

    def __init__(
        self,
        request: PlanRequest,
        costs: CostModel,
        rules: BatchRules,
        sets: BlockSets | None = None,
        fitter: StageFitter | None = None,
    ) -> None:
        self.request, self.costs, self.rules, self.fitter = request, costs, rules, fitter
        self.sets = BlockSets(costs) if sets is None else sets
        self.limits = request.rank_limits[: request.num_ranks]
        self._limit = max(self.limits)
        self._coupled = self.sets.mask_of(sorted(rules.coupled))
        self._fixed = {
            size: self.sets.mask_of([name for name, fixed in rules.fixed.items() if fixed == size])
            for size in sorted(set(rules.fixed.values()))
        }
        self._rank_counts = sorted({degree * grid.size for degree, grid in rules.grids})
        order = request.rank_order or range(request.num_ranks)
        self._order = [rank for rank in order if rank < request.num_ranks]

    def choose(
        self,
        masks: Sequence[Mask],
        wish: int,
        *,
        ignore_memory: bool = False,
        limit_us: float = float("inf"),
        way: ModelGrid | None = None,
    ) -> list[Option] | None:
        """Return one option a stage, or None where no choice uses all ranks within memory and time.

        Args:
            wish: micro-batch size of every stage that neither coupling nor the user fixes.
            limit_us: most microseconds a sample of any stage.
            way: to give stages grids, one of `GridRules.ways`; None: the first.
        """
        way = self.rules.model.ways[0] if way is None else way
        heights = [] if ignore_memory else self.sets.heights(masks)

        def options_of(stage: int, kinds: Kinds, limit: int) -> list[Option]:
            if ignore_memory:
                return self._in_way(self._timed_options(masks[stage], wish, kinds), masks[stage], way)
            return self._stage_options(masks[stage], wish, heights[stage], kinds, limit, way)

        if self.costs.is_mixed:
            return self._share_out_in_order(masks, options_of, limit_us)
        options = [options_of(stage, (), self._limit) for stage in range(len(masks))]
        return _share_out(options, self.request.num_ranks, limit_us) if all(options) else None

    def _share_out_in_order(
        self, masks: Sequence[Mask], options_of: Callable[[int, Kinds, int], list[Option]], limit_us: float
    ) -> list[Option] | None:
        """Return one option a stage where stages take consecutive ranks in the order in which plans place them."""
        # best[u]: (bottleneck, sum of times, options) of the stages so far on the first u ranks. Two stages on a quick
        # device (10 us a sample for either) and two slow ones (30 us, shared by two 15 us):
        #
        #     u                0     1           2               3
        #     no stage         0     -           -               -
        #     first stage      -     10 (d=1)    15 (d=2: slow)  ..
        #     both             -     -           30 (1 + 1)      15 (1 + 2)   <- taken
        num = self.request.num_ranks
        best: dict[int, tuple[float, float, tuple[Option, ...]]] = {0: (0.0, 0.0, ())}
        order = order_stages(self.costs.graph, [self.sets.blocks(mask) for mask in masks], costs=self.costs)
        for place, stage in enumerate(order):
            reached: dict[int, tuple[float, float, tuple[Option, ...]]] = {}
            most = num - (len(masks) - place - 1)  # a rank at least for each stage after it
            for used, (slowest, total, chosen) in best.items():
                for count in self._rank_counts:
                    end = used + count
                    if end > most:
                        break
                    fitting = [o for o in options_of(stage, *self._span(used, end)) if o.num_ranks == count]
                    option = min(fitting, key=lambda o: o.us_per_sample, default=None)
                    if option is None or option.us_per_sample > limit_us:
                        continue
                    key = max(slowest, option.us_per_sample), total + option.us_per_sample
                    if end not in reached or key < reached[end][:2]:
                        reached[end] = (*key, (*chosen, option))
            best = reached
        if num not in best:
            return None
        by_stage = dict(zip(order, best[num][2], strict=True))
        return [by_stage[stage] for stage in range(len(masks))]

    @remembered
    def _span(self, start: int, end: int) -> tuple[Kinds, int]:
        """Return the kinds of devices of some ranks, by their places in the order, and the least memory of one."""
        ranks = self._order[start:end]
        return self.costs.kinds_of(ranks), min(self.limits[rank] for rank in ranks)

    def drafts(self, masks: Sequence[Mask], options: Sequence[Option]) -> list[StageDraft]:
        """Return the drafts of stages with these options."""
        return [
            StageDraft(
                blocks=self.sets.blocks(mask),
                degree=option.degree,
                micro_batch_size=option.micro_batch_size,
                tensor=option.grid.tensor,
                context=option.grid.context,
            )
            for mask, option in zip(masks, options, strict=True)
        ]

    @remembered
    def least_shares(self, mask: Mask, wish: int) -> tuple[float, float]:
        """Return the least microseconds a sample of a stage, and the least times its ranks; inf if none."""
        options = self._timed_options(mask, wish, ())
        slowest = min((option.us_per_sample for option in options), default=float("inf"))
        work = min((o.us_per_sample * o.num_ranks for o in options), default=float("inf"))
        return slowest, work

    @remembered
    def sizes(self, mask: Mask, degree: int) -> list[int]:
        """Return the micro-batch sizes a stage of that degree may have."""
        return self.rules.sizes(self.sets.blocks(mask), degree)

    @remembered
    def grids(self, mask: Mask) -> list[ModelGrid]:
        """Return the context and tensor sizes a stage may have."""
        return self.rules.model.allowed(self.sets.blocks(mask))

    @remembered
    def _grids_in_way(self, mask: Mask, way: ModelGrid) -> list[ModelGrid]:
        """Return the grids with the largest sizes up to ``way``; of one that is `ANY_SIZE` there all."""
        # Of sizes 1, 2, 4 a stage of a vision tower whose heads 4 does not divide has 1 and 2: in way 4 it takes 2, and
        # the decoder's stages beside it 4. In way `ANY_SIZE` each takes what is quickest, which is 1 but for memory,
        # gradients to reduce, and micro-batches that no data-parallel ranks can share.
        found = self.grids(mask)
        for axis, most in enumerate(way):
            if most != ANY_SIZE:
                size = max((each[axis] for each in found if each[axis] <= most), default=0)
                found = [each for each in found if each[axis] == size]
        return found

    def _in_way(self, options: list[Option], mask: Mask, way: ModelGrid) -> list[Option]:
        """Return the options whose grids are of a way."""
        if len(self.rules.model.grids) == 1 or len(grids := self._grids_in_way(mask, way)) == len(
            self.grids(mask)
        ):
            return options
        return [option for option in options if option.grid in grids]

    @remembered
    def _stage_options(
        self, mask: Mask, wish: int, height: int, kinds: Kinds, limit: int, way: ModelGrid
    ) -> list[Option]:
        """Return the grids with which a stage at that height fits ranks of so many bytes, on these devices."""
        request, rows = self.request, self.sets.rows(mask)
        found = []
        for option in self._in_way(self._timed_options(mask, wish, kinds), mask, way):
            own = self.costs.at_grid(option.grid)
            num = request.mini_batch // option.micro_batch_size
            local = option.micro_batch_size // option.degree
            in_flight = num if request.schedule == "gpipe" else min(num, height)
            memory = own.stage_memory(rows, degree=option.degree, local=local, in_flight=in_flight)
            if memory <= limit:
                found.append(option)
            elif self.fitter is not None:
                excess, added_us = self.fitter.on(own).estimate(
                    rows, degree=option.degree, local=local, in_flight=in_flight, limit=limit
                )
                if excess <= 0:
                    found.append(
                        option._replace(
                            us_per_sample=option.us_per_sample + added_us / option.micro_batch_size,
                            backward_us=option.backward_us + added_us,
                        )
                    )
        return found

    @remembered
    def _timed_options(self, mask: Mask, wish: int, kinds: Kinds) -> list[Option]:
        """Return every grid of a stage with its time, whatever memory it needs.

        Args:
            kinds: of the stage's devices; several: the slowest counts; none: the quickest.
        """
        if len(kinds) > 1:
            each = [self._timed_options(mask, wish, (kind,)) for kind in kinds]
            return [
                max(of_degree, key=lambda option: option.us_per_sample)
                for of_degree in zip(*each, strict=True)
            ]
        return [option for grid in self.grids(mask) for option in self._of_grid(mask, wish, kinds, grid)]

    def _of_grid(self, mask: Mask, wish: int, kinds: Kinds, grid: ModelGrid) -> list[Option]:
        """Return every degree of a stage on a grid with its time."""
        costs = self.costs.at_grid(grid)
        fixed = tuple(size for size, blocks in self._fixed.items() if blocks & mask)
        sizing = self._sizing(wish, bool(self._coupled & mask), fixed, kinds, grid)
        rows = np.array(self.sets.rows(mask))
        gradient = costs.group_gradient_bytes(self.sets.rows(mask))
        forward, backward = sizing.forward_us[:, rows].sum(axis=1), sizing.backward_us[:, rows].sum(axis=1)
        us = us_per_sample(forward + backward, sizing.samples)
        if gradient > 0:
            reducing = np.min(sizing.reduce_us + gradient * sizing.reduce_us_per_byte, axis=0)
            us += exposed_us(costs, reducing, backward / self.request.mini_batch, gradient)
        times = us.tolist(), forward.tolist(), backward.tolist()
        return list(map(Option, sizing.degrees, sizing.sizes, *times, itertools.repeat(grid)))

    @remembered
    def _sizing(
        self, wish: int, is_coupled: bool, fixed: tuple[int, ...], kinds: Kinds, grid: ModelGrid
    ) -> _Sizing:
        request, costs = self.request, self.costs.at_grid(grid)
        found = []
        for degree, of_grid in self.rules.grids if len(fixed) < 2 else ():
            size = self.rules.size_of(fixed[0] if fixed else None, is_coupled, degree, wish)
            if of_grid == grid and size is not None:
                found.append((degree, size))
        times = [costs.block_times(size // degree, *kinds) for degree, size in found]
        shape = (len(found), len(costs.index))
        latency, per_byte = stack_lines([costs.reduction(degree, grid) for degree, _ in found])
        steps = np.array([costs.num_reductions(request.mini_batch // size) for _, size in found])
        return _Sizing(
            degrees=[degree for degree, _ in found],
            sizes=[size for _, size in found],
            forward_us=np.array([forward for forward, _ in times]).reshape(shape),
            backward_us=np.array([backward for _, backward in times]).reshape(shape),
            samples=np.array([size for _, size in found], dtype=float),
            reduce_us=latency * steps / request.mini_batch,
            reduce_us_per_byte=per_byte * steps / request.mini_batch,
        )


def choose_degrees(
    request: PlanRequest,
    costs: CostModel,
    rules: BatchRules,
    groups: Sequence[Sequence[str]],
    wish: int,
    *,
    ignore_memory: bool = False,
) -> list[StageDraft] | None:
    """Return one draft a group of blocks, or None where no choice uses all ranks within memory."""
    chooser = DegreeChooser(request, costs, rules)
    masks = [chooser.sets.mask_of(group) for group in groups]
    ways = (chooser.choose(masks, wish, ignore_memory=ignore_memory, way=way) for way in rules.model.ways)
    options = next((found for found in ways if found is not None), None)
    return None if options is None else chooser.drafts(masks, options)


def _share_out(options: Sequence[Sequence[Option]], num_ranks: int, limit_us: float) -> list[Option] | None:
    floor = max(min(option.us_per_sample for option in stage) for stage in options)
    times = sorted(
        {o.us_per_sample for stage in options for o in stage if floor <= o.us_per_sample <= limit_us}
    )
    if not times or not _reachable(options, times[-1], num_ranks):
        return None
    low, high = 0, len(times) - 1
    while low < high:
        middle = (low + high) // 2
        if _reachable(options, times[middle], num_ranks):
            high = middle
        else:
            low = middle + 1
    # What is left over when no stage is slower goes to the stages with most work: a loss gets one rank, not two.
    order = sorted(range(len(options)), key=lambda i: min(o.us_per_sample * o.num_ranks for o in options[i]))
    prefixes = _reachable([options[i] for i in order], times[low], num_ranks)
    chosen: dict[int, Option] = {}
    total = num_ranks
    for place, i in reversed(list(enumerate(order))):
        fitting = [
            option
            for option in options[i]
            if option.us_per_sample <= times[low]
            and option.num_ranks <= total
            and prefixes[place] >> (total - option.num_ranks) & 1
        ]
        chosen[i] = min(fitting, key=lambda option: option.us_per_sample)
        total -= chosen[i].num_ranks
    return [chosen[i] for i in range(len(options))]


def _reachable(options: Sequence[Sequence[Option]], limit: float, num_ranks: int) -> list[int]:
    """Return after each stage the bit set of rank totals, or [] where ``num_ranks`` is not one."""
    mask = (1 << (num_ranks + 1)) - 1
    prefixes = [1]
    for stage in options:
        sums = 0
        for option in stage:
            if option.us_per_sample <= limit:
                sums |= prefixes[-1] << option.num_ranks
        prefixes.append(sums & mask)
    return prefixes if prefixes[-1] >> num_ranks & 1 else []
