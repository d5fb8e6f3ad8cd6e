"""Piper's partitioner (Tarnawski et al., NeurIPS 2021): a DP over downsets of the model's graph.

A downset is a set of blocks with all their predecessors; a stage is the difference of two. ``F[D][k]`` is
the smallest bottleneck of everything outside D on k devices; the stage next to D on d devices holds
ceil(k / d) micro-batches in flight, Piper's bound. Stages may span branches and are run as a chain.

Where the request has context and tensor sizes, a stage has d data positions of t ranks, Piper's two degrees, and the
sum of all d t is the number of devices; k counts devices, and ceil(k / (d t)) micro-batches are in flight.

Deviations: no recomputation; the degree divides the micro-batch, and so the number of samples a rank takes is whole;
all micro-batch sizes are tried. A stage computes and sends at the same time, as for all planners here; Piper adds both
up. More than ``MAX_DOWNSETS`` downsets are refused: CANDLE-Uno and DLRM have more, for which GraphPipe's authors got no
plan of Piper (section 7). Where stages differ in their micro-batch sizes more are in flight than the bound says: if the
chain does not fit, those of equal degrees are considered. Prefixes of an order are downsets, so PipeDream's bottleneck
bounds Piper's: slower stages are left out, which changes no answer.

Source: Piper (NeurIPS 2021)
Tests: tests/plan/test_baselines.py
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from gpp_plugin.config.key_names import setting_of
from gpp_plugin.errors import PlanInfeasible
from gpp_plugin.ir.plan import ModelGrid, PipelinePlan
from gpp_plugin.ir.tensors import LayoutKind
from gpp_plugin.plan.baselines.chain_costs import ChainCosts, best_sequential, chains_of
from gpp_plugin.plan.costs.collective_costs import boundary_us, link_us_per_byte
from gpp_plugin.plan.costs.cost_model import CostModel, Floats, us_per_sample
from gpp_plugin.plan.costs.estimate import exposed_us
from gpp_plugin.plan.make import StageDraft
from gpp_plugin.plan.request import BatchRules, Ints, PlanRequest, SizeClasses, batch_rules
from gpp_plugin.plan.selection import explain_infeasible

# PipeDream's partitioner on the linearised model (Narayanan et al., SOSP 2019, section 3.1).
#
# The DP A[i][m] over prefixes of the chain and numbers of machines minimises the slowest stage or link:
# ``A[j][m] = min over i, m' of max(A[i][m - m'], T(i, j, m'))``, where T is the slower of computing and of the
# boundary's way over m' links (`boundary_us`, as for all planners here). Here it runs over suffixes, with
# the number of stages so far as a further index, so that memory is checked with a stage's own in-flight
# (1F1B with flushes: as many micro-batches as stages from it to the last); PipeDream itself checks none.
#
# Deviations: the model is linearised branch after branch, as GraphPipe's authors did (antichains explode:
# 6,563 on MMT); one level of the DP instead of one a bandwidth level, with the all-reduce of m' ranks over
# the link that joins them; every micro-batch size is tried and the quickest chain is taken. Where stages differ in
# their micro-batch sizes more are in flight than the DP counts: if its chain does not fit, the next best is taken, of
# other numbers of stages and of equal degrees.

Bounds = tuple[int, int, int]
"""First block, the block after the last, and degree of a stage."""


def pipedream_plan(request: PlanRequest) -> PipelinePlan:
    """Return the chain of stages with the smallest bottleneck, each data-parallel on its ranks.

    Raises:
        PlanInfeasible: no chain fits.
    """
    chains = chains_of(request)
    costs, rules, order = chains[0].costs, chains[0].rules, chains[0].order
    preferences = (map(chain.drafts, partition_chain(chain)) for chain in chains)
    plan = best_sequential(request, costs, preferences, planner="pipedream")
    if plan is None:
        explain_infeasible(request, costs, rules, [[[name] for name in order], [order]])
    return plan


def partition_chain(chain: ChainCosts) -> Iterator[list[Bounds]]:
    """Yield (start, stop, degree) of the stages of the best chain, then those of others that may need less memory."""
    found = list(chain_bottlenecks(chain, chain.rules.degrees))
    if not chain.size_classes.are_alike:
        found += [answer for degree in chain.rules.degrees for answer in chain_bottlenecks(chain, [degree])]
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
            yield float(value[stages, 0, ranks]), _pipedream_partition(choice, stages, ranks)


def _pipedream_partition(choice: npt.NDArray[np.int_], stages: int, ranks: int) -> list[Bounds]:
    """Return the stages of the chain of so many stages on all ranks."""
    start, found = 0, []
    while stages > 0:
        stop, degree = (int(x) for x in choice[stages, start, ranks])
        found.append((start, stop, degree))
        stages, start, ranks = stages - 1, stop, ranks - degree
    return found


MAX_DOWNSETS = 40_000
"""What the released Piper plans at most."""
Bools = npt.NDArray[np.bool_]
ROUNDING = 1e-9
UNBOUNDED = 1e300


def piper_plan(request: PlanRequest) -> PipelinePlan:
    """Return the chain of stages over downsets with the smallest bottleneck.

    Raises:
        PlanInfeasible: the graph has too many downsets, or no chain fits.
    """
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    rules = batch_rules(request)
    if request.num_stages is not None:
        raise PlanInfeasible(
            f"piper chooses the number of stages itself and {request.num_stages} are requested; "
            f"write {setting_of('stages', 'auto')} or take another planner"
        )
    downsets = list_downsets(costs, MAX_DOWNSETS)
    if downsets is None:
        raise PlanInfeasible(
            f"piper cannot plan {request.graph.model!r}: its {len(request.graph.blocks)} blocks have more than "
            f"{MAX_DOWNSETS} downsets (branches multiply); use graphpipe or auto"
        )
    table = Downsets(request, costs, rules, downsets)
    preferences = (_partitions(table, wish) for wish in rules.sizes_to_try)
    plan = best_sequential(request, costs, preferences, planner="piper")
    if plan is None:
        names = [block.name for block in request.graph.blocks]
        explain_infeasible(request, costs, rules, [[[name] for name in names], [names]])
    return plan


def list_downsets(costs: CostModel, limit: int) -> list[int] | None:
    """Return all downsets as bit sets, smaller ones first; None where there are more than ``limit``."""
    num = len(costs.index)
    before = [0] * num
    for src, dst, _ in costs.block_edges:
        before[dst] |= 1 << src
    found = {0}
    layer = [0]
    while layer:
        grown = set()
        for members in layer:
            for block in range(num):
                if not members >> block & 1 and not before[block] & ~members:
                    grown.add(members | 1 << block)
        found |= grown
        if len(found) > limit:
            return None
        layer = list(grown)
    return sorted(found, key=lambda members: (members.bit_count(), members))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Stages:
    """The stages that end in some downsets and begin behind one: all arrays are by the downset at their end.

    Args:
        after: the downsets.
        classes: of their micro-batch sizes.
        held: [3, stage] bytes of parameters, gradients and optimizer state.
        saved: [2, stage] bytes saved for backward, by the sample and beside.
        boundary: bytes a sample, in and out.
        transient: the largest of a block.
        reads: [input, stage] whether one of its blocks reads the input.
    """

    after: Ints
    classes: Ints
    held: Floats
    saved: Floats
    boundary: Floats
    transient: Floats
    reads: Floats


class Downsets:
    """What any stage between two downsets holds and sends, from sums over the downsets' blocks."""

    def __init__(
        self, request: PlanRequest, costs: CostModel, rules: BatchRules, downsets: list[int]
    ) -> None:
        self.request, self.costs, self.rules, self.downsets = request, costs, rules, downsets
        self.names = [block.name for block in request.graph.blocks]
        num = len(self.names)
        self.member = np.array([[m >> block & 1 for block in range(num)] for m in downsets], dtype=float)
        self.limit = min(request.rank_limits[rank] for rank in range(request.num_ranks))
        self.link_us_per_byte = link_us_per_byte(request.cluster, request.num_ranks)
        self.size_classes = SizeClasses(rules, self.names)
        self._flags = self.member @ self.size_classes.flags.T
        self._packed = np.packbits(self.member.astype(np.uint8), axis=1)
        self._counts = self.member.sum(axis=1)
        self._held, self._saved = {}, {}
        for grid in rules.model.grids:
            own = costs.at_grid(grid)
            held = np.stack([own.parameter_bytes, own.gradient_bytes, own.optimizer_bytes])
            self._held[grid] = held @ self.member.T
            self._saved[grid] = np.stack([own.saved_per_sample, own.saved_fixed]) @ self.member.T

        def held_of(blocks: frozenset[str]) -> Floats:
            found: Floats = self.member[:, [name in blocks for name in self.names]].sum(axis=1)
            return found

        self._refused = {grid: held_of(blocks) for grid, blocks in rules.model.refused.items()}
        self._divided = {grid: [held_of(each) for each in sets] for grid, sets in rules.model.divided.items()}
        self._reads = [self.member[:, readers].sum(axis=1) for readers, _, _ in costs.inputs]
        self._transients = sorted({float(x) for x in costs.transient_per_sample if x > 0})
        self._at_least = [
            self.member @ (costs.transient_per_sample >= x).astype(float) for x in self._transients
        ]
        self._find_tensors()

    def _find_tensors(self) -> None:
        """Set [downset, tensor] whether it is made inside, and by how many blocks it is read there."""
        makers: dict[str, int] = {}
        readers: dict[str, set[int]] = {}
        tensors = self.request.graph.tensors
        for src, dst, names in self.costs.block_edges:
            for name in names:
                if tensors[name].layout.kind is LayoutKind.BATCH:
                    makers[name] = src
                    readers.setdefault(name, set()).add(dst)
        specs = [tensors[name] for name in makers]
        self._tensor_bytes = np.array([s.bytes_for(s.num_samples) / s.num_samples for s in specs])
        flags = np.zeros((len(makers), len(self.names)))
        for row, name in enumerate(makers):
            flags[row, list(readers[name])] = 1.0
        self._made = self.member[:, list(makers.values())]
        self._read = self.member @ flags.T
        self._num_readers = flags.sum(axis=1)

    def times_of(self, grid: Grid, size: int) -> tuple[Floats, Floats]:
        """Return [block] microseconds of forward and of backward on one rank of a grid."""
        degree, model = grid
        return self.costs.at_grid(model).block_times(size / degree)

    def _may_have(self, at: int, after: Ints, model: ModelGrid) -> Bools:
        """Return by stage whether it may be of that grid (`GridRules`)."""
        found = np.ones(len(after), dtype=bool)
        if model in self._refused:
            found &= self._refused[model][after] - self._refused[model][at] < 0.5
        for held in self._divided.get(model, ()):
            found &= held[after] - held[at] > 0.5
        return found

    def behind(self, at: int, candidates: Ints, model: ModelGrid) -> _Stages:
        """Return the stages of a grid that begin behind downset ``at`` and end in one of these that holds it."""
        # Supersets: nothing of this downset is missing from them.
        after = candidates[(self._packed[at] & ~self._packed[candidates]).sum(axis=1) == 0]
        after = after[self._counts[after] > self._counts[at]]
        if len(self._held) > 1:
            after = after[self._may_have(at, after, model)]
        read = self._read[after] - self._read[at]
        entering = ((read > 0.5) & (self._made[at] > 0.5)) @ self._tensor_bytes
        made = self._made[after] - self._made[at]
        leaving = ((made > 0.5) & (self._read[after] < self._num_readers - 0.5)) @ self._tensor_bytes
        transient = np.zeros(len(after))
        for size, count in zip(self._transients, self._at_least, strict=True):
            transient[count[after] - count[at] > 0.5] = size
        return _Stages(
            after=after,
            classes=self.size_classes.of((self._flags[after] - self._flags[at]).T),
            held=self._held[model][:, after] - self._held[model][:, [at]],
            saved=self._saved[model][:, after] - self._saved[model][:, [at]],
            boundary=entering + leaving,
            transient=transient,
            reads=np.array([count[after] - count[at] > 0.5 for count in self._reads]),
        )

    def memory(self, stages: _Stages, sizes: Ints, grid: Grid) -> tuple[Floats, Floats]:
        """Return what a rank of each stage needs without what is in flight, and what a micro-batch keeps."""
        degree, model = grid
        local = sizes / degree
        inputs = [
            reads * num_bytes / (degree if is_shared_out else 1)
            for reads, (_, num_bytes, is_shared_out) in zip(stages.reads, self.costs.inputs, strict=True)
        ]
        saved, transient = stages.saved[0] * local + stages.saved[1], stages.transient * local
        peak = self.costs.at_grid(model).peak_bytes(
            stages.held, saved, 0, degree=degree, transient=transient, inputs=inputs
        )
        return peak, saved


def _partitions(table: Downsets, wish: int) -> Iterator[list[StageDraft]]:
    """Yield the stages of the best chain at one micro-batch size; after it those of equal degrees, best first."""
    best = best_of(table, wish)
    if best is not None:
        yield best[1]
    if not table.size_classes.are_alike:
        equal = [_partition(table, wish, [grid], UNBOUNDED) for grid in table.rules.grids]
        yield from (drafts for _, drafts in sorted((e for e in equal if e is not None), key=lambda e: e[0]))


def best_of(table: Downsets, wish: int) -> tuple[float, list[StageDraft]] | None:
    """Return the smallest bottleneck at one micro-batch size, us a sample, and the stages with it, or None."""
    degrees, grids = table.rules.degrees, table.rules.grids
    chain = ChainCosts(table.request, table.costs, table.rules, wish)
    bound = min((us for us, _ in chain_bottlenecks(chain, degrees)), default=UNBOUNDED)
    # The chain that sets the bound may hold more than Piper's own count of what is in flight allows.
    # It is one of chains without tensor ranks: no better bound, where sizes are forced none at all.
    if table.rules.model.are_explicit:
        bound = UNBOUNDED
    found = _partition(table, wish, grids, bound * (1 + 1e-9))
    return found if found is not None or bound == UNBOUNDED else _partition(table, wish, grids, UNBOUNDED)


def _partition(
    table: Downsets, wish: int, grids: Sequence[Grid], most_us: float
) -> tuple[float, list[StageDraft]] | None:
    """Return the smallest bottleneck, if at most ``most_us``, and the stages with it, or None where no chain fits."""
    ranks, mini_batch, num = table.request.num_ranks, table.request.mini_batch, len(table.downsets)
    works = _works(table, wish, grids)
    if not works:
        return None
    # value[at, k]: the slowest stage or link of what is not in downset ``at``, on exactly k ranks; the whole model is
    # value[0, ranks], nothing left is value[-1, 0] = 0. A stage is a downset less a smaller one, so from large to small
    # each row needs only rows done before. choice[at, k] is (the larger downset, the stage's data and tensor ranks).
    # On the chain a -> b the downsets are {}, {a}, {a, b}: value[1] is b alone, value[0] is ab, or a before b.
    value = np.full((num, ranks + 1), np.inf)
    value[-1, 0] = 0.0
    choice = np.zeros((num, ranks + 1, 4), dtype=np.int64)
    each = [np.add(*table.times_of(grid, size)) * (grid[0] * grid[1].size / size) for grid, size in works]
    work = table.member @ np.min(each, axis=0)
    for at in range(num - 2, -1, -1):
        fewest, largest = _rank_window(work, at, ranks, most_us)
        if fewest > largest:
            continue
        for degree, model in reversed(grids):  # of equal bottlenecks that with fewer stages
            own = degree * model.size
            stages = table.behind(at, _candidates(work, at, own, largest - own, most_us), model)
            rest = value[stages.after]
            if not np.isfinite(rest[:, : largest - own + 1]).any():
                continue
            sizes = table.size_classes.sizes(stages.classes, degree, wish)
            us = _times(table, stages, at, sizes, (degree, model), works)
            held, saved = table.memory(stages, sizes, (degree, model))
            most = mini_batch // np.maximum(sizes, 1)
            for k in range(max(fewest, own), largest + 1):
                fits = held + np.minimum(-(-k // own), most) * saved <= table.limit
                worst = np.where(fits, np.maximum(us, rest[:, k - own]), np.inf)
                best = int(worst.argmin())
                if worst[best] < value[at, k]:
                    value[at, k] = worst[best]
                    choice[at, k] = stages.after[best], degree, *model
    if not np.isfinite(value[0, ranks]):
        return None
    return float(value[0, ranks]), list(_read_back(table, choice, ranks, wish))


def _rank_window(work: Floats, at: int, ranks: int, most_us: float) -> tuple[int, int]:
    """Return the fewest and the most ranks that what is not in downset ``at`` have where no stage exceeds ``most_us``.

    Args:
        work: [downset] microseconds a sample of its blocks on one rank, at the size and degree that are best for each.
    """
    # 8 ranks, 80 us in all, most_us 11: behind a downset of 30 us are 50 us, for at least 5 ranks (4.5) and at most 5,
    # as the 30 us before need 3 (2.7).
    rest, before = work[-1] - work[at], work[at]
    fewest = max(math.ceil(rest / most_us - ROUNDING), 1)
    return (ranks if at == 0 else fewest), ranks - max(math.ceil(before / most_us - ROUNDING), 0)


def _candidates(work: Floats, at: int, own_ranks: int, ranks_left: int, most_us: float) -> Ints:
    """Return the downsets in which a stage of so many ranks may end: neither it nor what is left takes too long."""
    if ranks_left < 0:
        return np.zeros(0, dtype=np.int64)
    own, rest = work[at + 1 :] - work[at], work[-1] - work[at + 1 :]
    slack = 1 + ROUNDING
    return (
        at + 1 + np.flatnonzero((own <= most_us * own_ranks * slack) & (rest <= most_us * ranks_left * slack))
    )


Grid = tuple[int, ModelGrid]
"""Data ranks of a stage, and the ranks of each."""
_Works = dict[tuple[Grid, int], tuple[Floats, Floats]]
"""By grid and micro-batch size: [downset] microseconds of its blocks' forwards, and of their backwards."""


def _works(table: Downsets, wish: int, grids: Sequence[Grid]) -> _Works:
    classes = np.arange(-1, 2 * len(table.size_classes.flags))
    return {
        (grid, size): (table.member @ forward, table.member @ backward)
        for grid in grids
        for size in map(int, np.unique(table.size_classes.sizes(classes, grid[0], wish)))
        if size > 0
        for forward, backward in (table.times_of(grid, size),)
    }


def _times(table: Downsets, stages: _Stages, at: int, sizes: Ints, grid: Grid, works: _Works) -> Floats:
    """Return what each stage takes a sample; inf where it has no micro-batch size."""
    mini_batch, (degree, model) = table.request.mini_batch, grid
    link_us = boundary_us(stages.boundary, degree * model.context, table.link_us_per_byte)
    reduce_us = table.costs.reduction(degree, model).us(stages.held[1])
    us = np.full(len(sizes), np.inf)
    for size in map(int, np.unique(sizes[sizes > 0])):
        forward, backward = (us[stages.after] - us[at] for us in works[grid, size])
        reducing = reduce_us * table.costs.num_reductions(mini_batch // size)
        behind = exposed_us(table.costs.at_grid(model), reducing, backward, stages.held[1])
        time = us_per_sample(forward + backward, size, reduce_us=behind / mini_batch, link_us=link_us)
        us[sizes == size] = time[sizes == size]
    return us


def _read_back(table: Downsets, choice: Ints, ranks: int, wish: int) -> Iterator[StageDraft]:
    at, left = 0, ranks
    while left > 0:
        after, degree, *sizes = (int(x) for x in choice[at, left])
        model = ModelGrid(*sizes)
        stage = table.downsets[after] & ~table.downsets[at]
        blocks = tuple(name for i, name in enumerate(table.names) if stage >> i & 1)
        size = table.rules.micro_batch_size(blocks, degree, wish)
        assert size is not None, "only stages with a size have a time"
        yield StageDraft(
            blocks=blocks, degree=degree, micro_batch_size=size, tensor=model.tensor, context=model.context
        )
        at, left = after, left - degree * model.size
