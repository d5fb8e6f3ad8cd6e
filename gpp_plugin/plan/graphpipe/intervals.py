"""Every stage the GraphPipe search may form: intervals of a series, with absorbed branches.

A series component has items 0..n-1 (blocks, or parallel components). A stage is an interval of items.
It may also own a join: then it begins with the tails of branches of the parallel item just before its
first item; or a fork: then it ends with the heads of branches of the parallel item after its last.
*Rows* are the ways a stage can begin, *columns* the ways it can end; every cost is a matrix over them
(`stage_table`).

Source: GraphPipe (arXiv 2406.17145), section 5, Algorithm 1
Tests: tests/plan/test_graphpipe.py, tests/plan/test_quality.py, tests/plan/test_search_tree.py
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import networkx as nx
import numpy as np
import numpy.typing as npt

from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.plan import ModelGrid
from gpp_plugin.ir.tensors import LayoutKind
from gpp_plugin.plan.costs.cost_model import CostModel, Floats
from gpp_plugin.plan.memory.fitting import StageFitter
from gpp_plugin.plan.memory.operator_chain import GraphTensors, Savings, savings_of
from gpp_plugin.plan.refine.block_sets import bits, connected_parts
from gpp_plugin.plan.request import BatchRules

# Series-parallel decomposition of a block graph; graphs that have none get one.
#
# A component is a set of blocks. It is *parallel* when it separates into parts without dependencies
# between them, and *series* when it can be cut so that everything before the cut precedes everything
# after it. A graph that is neither (after transitive reduction, so skips and cross-attention do not
# count) contains an N: there the cut is forced where it adds the fewest orderings. Such orderings guide
# the search only; the plan's edges stay those of the model.


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """A node of the series-parallel tree.

    Args:
        kind: ``block``, ``series`` or ``parallel``; ``run``: blocks in a row that are taken as one (`in_runs`).
        blocks: positions of its blocks in the graph, increasing.
        children: in order for a series; none for a block.
    """

    kind: str
    blocks: tuple[int, ...]
    children: tuple[Component, ...] = ()

    def __str__(self) -> str:
        if self.kind == "block":
            return str(self.blocks[0])
        return f"{'S' if self.kind == 'series' else 'P'}({' '.join(map(str, self.children))})"


def decompose(dependencies: nx.DiGraph) -> Component:
    """Return the series-parallel tree of a graph whose nodes are 0..n-1 in a topological order.

    >>> str(decompose(nx.DiGraph([(0, 1), (0, 2), (1, 3), (2, 3)])))
    'S(0 P(1 2) 3)'
    """
    num = dependencies.number_of_nodes()
    before = [0] * num
    for node in range(num):
        for other in dependencies.predecessors(node):
            before[node] |= before[other] | 1 << other
    after = [0] * num
    for node in range(num - 1, -1, -1):
        for other in dependencies.successors(node):
            after[node] |= after[other] | 1 << other
    return _decompose((1 << num) - 1, before, after)


def _decompose(members: int, before: Sequence[int], after: Sequence[int]) -> Component:
    nodes = tuple(bits(members))
    if len(nodes) == 1:
        return Component(kind="block", blocks=nodes)
    related = {node: before[node] | after[node] for node in nodes}
    parts = connected_parts(members, related)
    if len(parts) > 1:
        children = tuple(_decompose(part, before, after) for part in parts)
        return Component(kind="parallel", blocks=nodes, children=children)
    parts = connected_parts(members, {node: ~others for node, others in related.items()})
    if len(parts) == 1:
        prefix = _cheapest_cut(members, nodes, before, after)
        parts = [prefix, members & ~prefix]
    else:
        parts.sort(key=lambda part: (before[next(bits(part))] & members & ~part).bit_count())
    items: list[Component] = []
    for part in parts:
        child = _decompose(part, before, after)
        items.extend(child.children if child.kind == "series" else (child,))
    return Component(kind="series", blocks=nodes, children=tuple(items))


def _cheapest_cut(members: int, nodes: Sequence[int], before: Sequence[int], after: Sequence[int]) -> int:
    """Return the prefix whose completion before all the rest adds the fewest orderings a pair.

    Tried are, for every node: it and what precedes it; everything that does not follow it; and every
    level of the longest paths from the sources.
    """
    level: dict[int, int] = {}
    for node in nodes:
        level[node] = 1 + max((level[other] for other in bits(before[node] & members)), default=-1)
    prefixes = {(before[node] & members) | 1 << node for node in nodes}
    prefixes |= {members & ~(after[node] | 1 << node) for node in nodes}
    for limit in range(max(level.values())):
        prefixes.add(sum(1 << node for node in nodes if level[node] <= limit))
    prefixes -= {0, members}

    def cost(prefix: int) -> tuple[float, int]:
        rest = members & ~prefix
        added = sum((rest & ~after[node]).bit_count() for node in bits(prefix))
        return added / (prefix.bit_count() * rest.bit_count()), prefix

    return min(prefixes, key=cost)


Ints = npt.NDArray[np.int64]
Counts = npt.NDArray[np.float32]
"""Numbers of devices, inf where it cannot be done: whole numbers, exact in single precision up to 2**24."""
Leavings = dict[int, tuple[Ints, Ints, dict[int, tuple[Ints, Ints, Ints]]]]
"""By position: virtual rows or columns, the states they leave over, by kind (which, counts, cuts) of parts."""

MAX_PARTIAL_ITEMS = 12
"""Longest branch whose parts may join another stage; longer ones are left to the refinement."""
MAX_STATES = 512
"""Most ways to choose branches of a parallel item that are enumerated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Absorbed:
    """Branches, or parts of them, of the parallel item at ``position`` that a stage takes in.

    Args:
        kind, count, cut: ``count`` branches of that kind, from item ``cut`` on (a tail) or up to it
            (a head); kind -1 where only whole branches are taken.
        whole: whole branches of every kind.
    """

    position: int
    kind: int
    count: int
    cut: int
    whole: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How states of counted branches fill bins; states are numbered as in `Branches.states`.

    Args:
        layers: states by first kind and its count, in an order in which values can be computed: the kind,
            the states, and what each is with one branch of that kind less.
        taken, left: [bin, state] what of the bin a state has, and the state left then.
        larger: by kind, for every state the one with a branch more of that kind (itself: there is none).
        has_kind: [kind, state] whether the state has branches of the kind.
    """

    layers: list[tuple[int, Ints, Ints]]
    taken: Ints
    left: Ints
    larger: list[Ints]
    has_kind: npt.NDArray[np.bool_]


@dataclass(slots=True)
class Branches:
    """A parallel item: its kinds of structurally equal branches and the states of taking some.

    Args:
        kinds: one series table a kind; ``instances`` the components of each kind.
        states: every way to count branches of each kind; the last is all of them.
        packing: made by `packing` when first requested.
    """

    component: Component
    kinds: list[Series]
    instances: list[list[Component]]
    states: list[tuple[int, ...]]
    packing: Packing | None = None

    @property
    def counts(self) -> tuple[int, ...]:
        """Return the number of branches of each kind."""
        return tuple(len(members) for members in self.instances)

    @property
    def is_uncounted(self) -> bool:
        """Return whether the branches are too many to count: then each is alone, or all share a stage."""
        return len(self.states) == 2 and sum(self.counts) > 1


@dataclass(slots=True)
class Series:
    """A series component with its rows and columns (real ones first).

    Args:
        row_start: first item of the interval of each row; ``column_end`` the item after its last.
        row_extra, column_extra: what a virtual row or column absorbs; None for real ones.
        row_blocks, column_blocks: the absorbed blocks, of representatives of their kinds.
        leavings: of the virtual rows and of the virtual columns; made by `packing`.
    """

    component: Component
    items: tuple[Component, ...]
    branches: dict[int, Branches]
    row_start: list[int]
    column_end: list[int]
    row_extra: list[Absorbed | None]
    column_extra: list[Absorbed | None]
    row_blocks: list[tuple[int, ...]]
    column_blocks: list[tuple[int, ...]]
    bytes_through: Floats
    leavings: tuple[Leavings, Leavings] | None = None

    @property
    def num_items(self) -> int:
        """Return the number of items."""
        return len(self.items)


def build_series(
    graph: BlockGraph,
    costs: CostModel,
    rules: BatchRules,
    component: Component,
    *,
    has_absorption: bool = True,
) -> Series:
    """Return the table of a component; equal branches share one table.

    A parallel component or a single block is a series of one item.

    Args:
        has_absorption: False leaves purely series-parallel plans: no stage owns part of a branch.
    """
    signatures = block_signatures(graph, costs, rules)
    known: dict[object, Series] = {}

    def kinds_of(item: Component) -> Branches:
        grouped: dict[object, list[Component]] = {}
        for child in item.children:
            grouped.setdefault(signature_of(child, signatures), []).append(child)
        for signature, members in grouped.items():
            if signature not in known:
                known[signature] = _build(graph, members[0], kinds_of, has_absorption)
        counts = [len(members) for members in grouped.values()]
        states = [tuple([0] * len(counts)), tuple(counts)]
        if int(np.prod([count + 1 for count in counts])) <= MAX_STATES:
            states = list(itertools.product(*(range(count + 1) for count in counts)))
        # A kind met elsewhere keeps its first table; its own members come first here all the same.
        kinds, instances = [known[signature] for signature in grouped], list(grouped.values())
        return Branches(component=item, kinds=kinds, instances=instances, states=states)

    return _build(graph, component, kinds_of, has_absorption)


def _build(
    graph: BlockGraph, component: Component, kinds_of: Callable[[Component], Branches], has_absorption: bool
) -> Series:
    # Real rows and columns are the items' own starts and ends; after them stand the virtual ones, which take in a part
    # of a parallel item next to the stage. Items 0 block a, 1 parallel (b0 b1 | b0' b1'), 2 block c:
    #
    #     rows      0 1 2   begin at item 0, 1, 2
    #               3 4 5   begin at item 2, with one whole branch of item 1; with b1; with b1 and b1'
    #     columns   0 1 2   end after item 0, 1, 2
    #               3 4 5   end before item 1, with one whole branch of it; with b0; with b0 and b0'
    #
    # Stage {b1, b1', c} is row 5, column 2. A tail needs an item behind the parallel one to be
    # joined to, a head one before it.
    items = component.children if component.kind == "series" else (component,)
    branches = {i: kinds_of(item) for i, item in enumerate(items) if item.kind == "parallel"}
    num = len(items)
    series = Series(
        component=component,
        items=items,
        branches=branches,
        row_start=list(range(num)),
        column_end=list(range(1, num + 1)),
        row_extra=[None] * num,
        column_extra=[None] * num,
        row_blocks=[()] * num,
        column_blocks=[()] * num,
        bytes_through=interval_bytes(graph, [item.blocks for item in items]),
    )
    for position, parallel in branches.items() if has_absorption else ():
        if position + 1 < num:
            for extra, blocks in _absorptions(parallel, position, is_tail=True):
                series.row_start.append(position + 1)
                series.row_extra.append(extra)
                series.row_blocks.append(blocks)
        if position > 0:
            for extra, blocks in _absorptions(parallel, position, is_tail=False):
                series.column_end.append(position)
                series.column_extra.append(extra)
                series.column_blocks.append(blocks)
    return series


def _absorptions(
    parallel: Branches, position: int, *, is_tail: bool
) -> list[tuple[Absorbed, tuple[int, ...]]]:
    """List what a stage next to a parallel item may take in of it, without taking all of it."""
    counts = parallel.counts
    found: dict[Absorbed, tuple[int, ...]] = {}
    full = tuple(counts)
    empty = tuple([0] * len(counts))
    states = set(parallel.states)
    for whole in parallel.states:
        if whole not in (empty, full):
            extra = Absorbed(position=position, kind=-1, count=0, cut=0, whole=whole)
            found[extra] = whole_blocks(parallel, whole)
    for kind, series in enumerate(parallel.kinds):
        if not 1 < series.num_items <= MAX_PARTIAL_ITEMS:
            continue
        for cut, count in itertools.product(range(1, series.num_items), sorted({1, 2, counts[kind]})):
            if count > counts[kind]:
                continue
            others = tuple(0 if k == kind else c for k, c in enumerate(counts))
            for whole in {empty, others}:
                taken = tuple(w + count * (k == kind) for k, w in enumerate(whole))
                if whole not in states or tuple(np.subtract(counts, taken)) not in states:
                    continue  # the branches were too many to count: only none or all can be left over
                part = series.items[cut:] if is_tail else series.items[:cut]
                own = [block for item in part for block in item.blocks]
                extra = Absorbed(position=position, kind=kind, count=count, cut=cut, whole=whole)
                # Blocks of the representative stand for every branch: repeated once for each.
                found[extra] = (*(own * count), *whole_blocks(parallel, whole))
    return list(found.items())


def whole_blocks(parallel: Branches, whole: tuple[int, ...]) -> tuple[int, ...]:
    """Return the blocks of so many whole branches of each kind, those of representatives repeated."""
    return tuple(
        block for kind, count in enumerate(whole) for block in parallel.kinds[kind].component.blocks * count
    )


def signature_of(component: Component, signatures: Sequence[int]) -> object:
    """Return what equal components have in common; ``signatures`` are of the blocks."""
    if component.kind == "block":
        return signatures[component.blocks[0]]
    return component.kind, tuple(signature_of(child, signatures) for child in component.children)


def block_signatures(graph: BlockGraph, costs: CostModel, rules: BatchRules) -> list[int]:
    """Number the blocks so that those with equal costs, outputs and constraints have equal numbers."""
    outputs: dict[str, set[str]] = {}
    for edge in graph.edges:
        outputs.setdefault(edge.src, set()).update(edge.tensors)
    numbers: dict[object, int] = {}
    result = []
    for i, block in enumerate(graph.blocks):
        sizes = sorted(graph.tensors[t].bytes_for(graph.num_samples) for t in outputs.get(block.name, ()))
        key = (
            costs.cost_key(i),
            tuple(sizes),
            block.name in rules.coupled,
            rules.fixed.get(block.name),
            block.name == graph.loss_block,
        )
        result.append(numbers.setdefault(key, len(numbers)))
    return result


# What crosses the boundary of a stage: every tensor once in and once out, however many blocks read it.
#
# Tensors of one value for all samples or for a loss unit are left out: they are small.


def interval_bytes(graph: BlockGraph, items: Sequence[Sequence[int]]) -> Floats:
    """Return [start, stop]: forward bytes a sample that enter or leave the interval of items.

    Args:
        items: the blocks of each, by their numbers in the graph, in an order that the graph allows.
    """
    # On the chain a -> b -> c of 4 bytes a tensor, where c reads a's as well: [1, 2], b alone, has 4 in and 4 out;
    # [1, 3] has 4 in, a's for b and c; what passes b by is no business of b's.
    num = len(items)
    place = {block: i for i, blocks in enumerate(items) for block in blocks}
    first = min(place)
    names = [block.name for block in graph.blocks]
    index = {name: i for i, name in enumerate(names)}
    makers: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    for edge in graph.edges:
        src, dst = index[edge.src], index[edge.dst]
        if src not in place and dst not in place:
            continue
        for tensor in edge.tensors:
            makers[tensor] = place.get(src, -1)
            readers.setdefault(tensor, []).append(place.get(dst, num if dst > first else -1))
    result = np.zeros((num + 1, num + 1))
    for tensor, maker in makers.items():
        spec = graph.tensors[tensor]
        if spec.layout.kind is not LayoutKind.BATCH:
            continue
        size = spec.bytes_for(spec.num_samples) / spec.num_samples
        at = sorted(set(readers[tensor]))
        last = at[-1]
        if maker >= 0 and last > maker:  # leaves every interval that holds the maker and ends by ``last``
            result[: maker + 1, maker + 1 : last + 1] += size
        inside = [r for r in at if 0 <= r < num and r > maker]
        previous = maker
        for reader in inside:  # enters every interval that begins after the maker and holds a reader
            result[previous + 1 : reader + 1, reader + 1 :] += size
            previous = reader
    return result


# Time, memory and free bytes of every stage of a series, at any batch of a rank: matrices over rows and columns.


Bools = npt.NDArray[np.bool_]
NO_LIMIT = 1 << 40


def micro_batches_within(free: Floats, saved: Floats, most: int) -> Floats:
    """Return the largest c whose c s fits into ``free``, at most ``most``; 0 where not even the rest fits.

    A millionth of a micro-batch is allowed for: free bytes are differences of large sums.

    >>> micro_batches_within(np.array([130.0, 80.0, -1.0]), np.array([40.0, 40.0, 40.0]), 9).tolist()
    [3.0, 2.0, 0.0]
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        count = np.where(saved > 0, np.floor(free / saved + 1e-9), most)
    return np.where(free < 0, 0, np.minimum(count, most))


class StageShapes:
    """What the stages of one series hold, whatever the micro-batch size: shared by all its tables.

    Args:
        rows, columns: [row or column, block]: how often a stage that begins (ends) so holds a block.
        largest: returns [row, column] the largest of values [block] over every stage's blocks.
        through: bytes a sample in and out.
    """

    def __init__(
        self,
        costs: CostModel,
        rows: Floats,
        columns: Floats,
        valid: Bools,
        largest: Callable[[Floats], Floats],
        through: Floats,
    ) -> None:
        self.costs, self._rows, self._columns = costs, rows, columns
        self.valid, self.largest, self.through = valid, largest, through
        self.peak = largest(costs.transient_per_sample)
        self.saved, self.saved_fixed = self.total(costs.saved_per_sample), self.total(costs.saved_fixed)
        for blocks, per_sample, fixed in costs.shared:
            flags = np.zeros((2, len(costs.index)))
            flags[0, blocks[0]], flags[1, blocks[1:]] = 1.0, 1.0
            is_held = (self.total(flags[0]) < 0.5) & (self.total(flags[1]) > 0.5)
            self.saved += is_held * per_sample
            self.saved_fixed += is_held * fixed
        self.parameter, self.gradient = self.total(costs.parameter_bytes), self.total(costs.gradient_bytes)
        self.optimizer = self.total(costs.optimizer_bytes)
        self._times: dict[float, Floats] = {}
        self._backwards: dict[float, Floats] = {}
        self._counts: dict[tuple[float, int, float], Floats] = {}
        self._rooms: dict[tuple[float, int, float], tuple[Floats, Floats]] = {}
        self._savings: dict[float, list[Savings]] = {}
        self._spans: tuple[Floats, Floats] | None = None
        self._at_grid: dict[ModelGrid, StageShapes] = {}

    def at_grid(self, grid: ModelGrid) -> StageShapes:
        """Return the shapes of one of the ranks of the same stages on a grid (`CostModel.at_grid`)."""
        costs = self.costs.at_grid(grid)
        if costs is self.costs:
            return self
        if grid not in self._at_grid:
            self._at_grid[grid] = StageShapes(
                costs, self._rows, self._columns, self.valid, self.largest, self.through
            )
        return self._at_grid[grid]

    def total(self, values: Floats) -> Floats:
        """Return [row, column] the sum of ``values`` [block] over every stage's blocks."""
        return (self._rows @ values)[:, None] + (self._columns @ values)[None, :]

    def times(self, local: float) -> Floats:
        """Return [row, column] microseconds of forward and backward of ``local`` samples."""
        if local not in self._times:
            forward, backward = self.costs.block_times(local)
            self._times[local] = self.total(forward + backward)
        return self._times[local]

    def backward_times(self, local: float) -> Floats:
        """Return [row, column] microseconds of a backward of ``local`` samples."""
        if local not in self._backwards:
            self._backwards[local] = self.total(self.costs.block_times(local)[1])
        return self._backwards[local]

    def micro_batches_that_fit(self, local: float, degree: int, limit: float) -> Floats:
        """Return [row, column] how many micro-batches of ``local`` samples a rank can hold at once."""
        key = self._key(local, degree, limit)
        if key not in self._counts:
            self._counts[key] = micro_batches_within(*self.free_bytes(local, degree, limit), NO_LIMIT)
        return self._counts[key]

    def free_bytes(self, local: float, degree: int, limit: float) -> tuple[Floats, Floats]:
        """Return [row, column] the bytes a rank has for what is saved, and what a micro-batch saves."""
        key = self._key(local, degree, limit)
        if key not in self._rooms:
            held, each = (
                (self.parameter, self.gradient, self.optimizer),
                self.saved * local + self.saved_fixed,
            )
            counts = [self.total(flags) for flags in self.costs.reader_flags]
            inputs = (self.costs.input_bytes_of(counts, degree),)
            peak = self.costs.peak_bytes(
                held, each, 0, degree=degree, transient=self.peak * local, inputs=inputs
            )
            self._rooms[key] = limit - peak, each
        return self._rooms[key]

    def _key(self, local: float, degree: int, limit: float) -> tuple[float, int, float]:
        return local, degree if self.costs.zero_stage or self.costs.inputs else 1, limit

    def savings(self, fitter: StageFitter, local: float) -> list[Savings]:
        """Return what recomputing saves in every stage: all blocks one by one, or the stage as one segment."""
        if local not in self._savings:
            fitter = fitter.on(self.costs)
            single = savings_of(fitter.per_block(local), self.total, self.largest)
            self._savings[local] = [single]
            if fitter.can_recompute:
                dropped, held = self._whole(fitter.everything, local)
                self._savings[local].append(
                    dataclasses.replace(
                        single,
                        net=dropped - held,
                        dropped=dropped,
                        work=dropped,
                        left=0.0,  # what comes from outside, and is small
                        again_us=self.total(self.costs.block_times(local)[0]),
                    )
                )
        return self._savings[local]

    def _whole(self, tensors: GraphTensors, local: float) -> tuple[Floats, Floats]:
        """Return [row, column] what every stage drops and holds as one segment."""
        if self._spans is None:
            self._spans = self._make_spans(tensors)
        inside, entering = self._spans
        dropped = self.total(tensors.single_segments(local)[0])
        dropped = dropped + np.tensordot(tensors.sizes(local)[tensors.spanning], inside, axes=1)
        return dropped, np.tensordot(tensors.result_sizes(local), entering, axes=1)

    def _make_spans(self, tensors: GraphTensors) -> tuple[Floats, Floats]:
        """Return [tensor, row, column] how often the stage has all users, and [result, ...] reads it from outside."""

        def counts(blocks: Iterable[int]) -> Floats:
            flags = np.zeros(len(self.costs.index))
            flags[list(blocks)] = 1.0
            return self.total(flags)

        inside = [
            np.floor(counts(users) / len(users) + 1e-9)
            for users in map(tensors.users.__getitem__, tensors.spanning)
        ]
        entering = []
        for (_, maker, readers), t in zip(tensors.results, tensors.result_tensor, strict=True):
            is_read = (counts(readers) > 0.5) & (counts([maker]) < 0.5)
            if t >= 0:
                is_read &= counts(tensors.savers[t]) < 0.5
            entering.append(is_read.astype(float))
        shape = (0, *self.valid.shape)
        return (
            np.stack(inside) if inside else np.zeros(shape),
            np.stack(entering) if entering else np.zeros(shape),
        )


def series_shapes(series: Series, costs: CostModel) -> StageShapes:
    """Return the shapes of a series' intervals."""
    num, num_blocks = series.num_items, len(costs.index)
    start, end = np.array(series.row_start), np.array(series.column_end)
    valid = end[None, :] > start[:, None]
    prefix = np.concatenate(
        [
            np.zeros((1, num_blocks)),
            np.cumsum(_block_counts([item.blocks for item in series.items], num_blocks), axis=0),
        ]
    )
    through = series.bytes_through[start[:, None], np.where(valid, end[None, :], start[:, None])]

    def largest(values: Floats) -> Floats:
        items = np.array([values[list(item.blocks)].max(initial=0.0) for item in series.items])
        peak = np.zeros((num + 1, num + 1))
        for i in range(num):
            peak[i, i + 1 :] = np.maximum.accumulate(items[i:])
        row = np.array([values[list(blocks)].max(initial=0.0) for blocks in series.row_blocks])
        column = np.array([values[list(blocks)].max(initial=0.0) for blocks in series.column_blocks])
        return np.maximum(peak[np.ix_(start, end)], np.maximum(row[:, None], column[None, :]))

    return StageShapes(
        costs,
        _block_counts(series.row_blocks, num_blocks) - prefix[start],
        _block_counts(series.column_blocks, num_blocks) + prefix[end],
        valid,
        largest,
        through,
    )


def bin_shapes(parallel: Branches, costs: CostModel) -> StageShapes:
    """Return the shapes of stages that hold whole branches: one row, one column a state."""
    num_blocks = len(costs.index)
    columns = [whole_blocks(parallel, state) for state in parallel.states]
    per_kind = np.array([kind.bytes_through[0, kind.num_items] for kind in parallel.kinds])
    return StageShapes(
        costs,
        np.zeros((1, num_blocks)),
        _block_counts(columns, num_blocks),
        np.array([[len(blocks) > 0 for blocks in columns]]),
        lambda values: np.array([[values[list(blocks)].max(initial=0.0) for blocks in columns]]),
        (np.array(parallel.states, dtype=float) @ per_kind)[None, :],
    )


def _block_counts(groups: Sequence[Sequence[int]], num_blocks: int) -> Floats:
    counts = np.zeros((len(groups), num_blocks))
    for i, blocks in enumerate(groups):
        np.add.at(counts[i], list(blocks), 1.0)
    return counts
