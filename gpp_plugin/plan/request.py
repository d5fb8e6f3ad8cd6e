"""The input of planners: model, costs, cluster, and what the options say; checked before any planner sees it.

`batch_rules` resolves it to the sizes that a stage may have; `SearchReport` is what a planner says of its search. It
imports no planner, so that everything planners are made of may import it.

Source: this project
Tests: tests/plan/test_joined.py, tests/plan/test_plan_command.py, tests/plan/test_auto.py
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gpp_plugin.config.key_names import place_of, setting_of
from gpp_plugin.errors import PlanError
from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.cluster import Cluster
from gpp_plugin.ir.plan import ALONE, LOSS_KEY, ModelGrid
from gpp_plugin.ir.profile import Profile
from gpp_plugin.ir.tensors import LayoutKind, divisors

UNLIMITED = 1 << 62
"""More bytes than any device has: two of them still fit in 64 bits."""


STEP_ERROR = 0.12
"""How far predicted steps are off, by costs that follow from sizes alone: of most rows of `gpp bench published`."""
BAND = 0.022
"""How far they are off where a layer's time is known: the mean of its held-out steps. Plans of the same costs differ by
no more for certain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Everything a planner may look at.

    Args:
        num_ranks: ranks to use; the first ``num_ranks`` devices of the cluster.
        mini_batch: samples of one optimizer step (B); ``loss_unit`` samples of one loss (u).
        num_stages: exactly that many stages, or None: the planner chooses. More than ranks: ranks hold several.
        granularity: of the graph's blocks, one of `GRANULARITIES`: finer ones are what errors may advise.
        micro_batch_sizes: stage or module-path prefix -> micro-batch size of the whole stage;
            ``*`` for all others; None where the planner chooses.
        schedule: ``1f1b`` or ``gpipe``.
        final_schedule: the name of what the finished plan gets, under which planner ``auto`` compares the best ones;
            None: under ``schedule``.
        memory_limit_bytes: what one rank may use, where less than its device has.
        data_parallel: degree of every stage, or None: the planner chooses.
        zero_stage: 0 to 3; what the ranks of a stage share out among themselves.
        is_zero_open: the planner chooses the stage (`registry.plan_open`), ``zero_stage`` is what it begins with.
        is_unit_open: so it is with the loss unit: nobody said one, and the model's loss is as good of any.
        keep_units: every stage the user has not fixed computes one loss unit a rank at a time, as those
            that mix samples must; otherwise the planner chooses any size that divides the mini-batch.
        smallest_local_batch: fewest samples one rank may compute at a time (some models cannot be captured,
            or cannot train, on a single sample).
        max_k: largest k of kFkB the refining planners try.
        mode: ``sync`` or ``async``, as of `PipelinePlan`.
        memory_optimization: what a planner may use to fit: ``recompute``, ``swap``, both or neither.
        vertical_sync: as of `PipelinePlan`.
        virtual_stages: stages that every group of ranks holds (interleaving): 1, exactly that many, or None: as many
            as make the step shortest in simulation.
        colocate: stages of a branch may be placed on the ranks of others where that is shorter.
        tensor_parallel: tensor size of all stages whose blocks tensor ranks can divide; None: the planner chooses,
            stage by stage; a map from module paths to sizes: of stages with those blocks, 1 of all others.
        sequence_parallel: context size, likewise.
        band: by which part a plan may be longer than the shortest one where it is simpler, of fewer stages.
        rank_order: all ranks in the order in which stages take them; None: by their numbers, or, where devices are of
            several speeds, the best of the orders that keep each kind together.
    """

    graph: BlockGraph
    profile: Profile
    cluster: Cluster
    num_ranks: int
    mini_batch: int
    loss_unit: int
    num_stages: int | None = None
    granularity: str = "layer"
    micro_batch_sizes: dict[str, int] | None = None
    schedule: str = "1f1b"
    final_schedule: str | None = None
    memory_limit_bytes: int | None = None
    data_parallel: int | None = None
    zero_stage: int = 0
    is_zero_open: bool = False
    is_unit_open: bool = False
    keep_units: bool = False
    smallest_local_batch: int = 1
    max_k: int = 1
    mode: str = "sync"
    memory_optimization: tuple[str, ...] = ()
    vertical_sync: bool = False
    virtual_stages: int | None = 1
    colocate: bool = False
    band: float = 0.0
    rank_order: tuple[int, ...] | None = None
    tensor_parallel: int | dict[str, int] | None = 1
    sequence_parallel: int | dict[str, int] | None = 1
    rank_limits: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """By rank the bytes that it may use."""
    must_share_ranks: bool = field(init=False, repr=False, compare=False)
    """Only plans whose ranks hold several stages are an answer."""
    may_share_ranks: bool = field(init=False, repr=False, compare=False)
    """Plans whose ranks hold several stages are wanted, or to be tried."""

    def __post_init__(self) -> None:
        most = UNLIMITED if self.memory_limit_bytes is None else self.memory_limit_bytes
        limits = tuple(min(device.memory_bytes, most) for device in self.cluster.devices)
        fixed_ranks = (self.num_stages or 1) * (self.data_parallel or 1)
        must_share = (self.virtual_stages or 1) > 1 or fixed_ranks > self.num_ranks
        object.__setattr__(self, "rank_limits", limits)
        object.__setattr__(self, "must_share_ranks", must_share)
        object.__setattr__(
            self, "may_share_ranks", must_share or self.virtual_stages is None or self.colocate
        )

    @property
    def has_grids(self) -> bool:
        """Return whether it says which stages have context or tensor ranks."""
        return self.tensor_parallel not in (1, None) or self.sequence_parallel not in (1, None)

    @property
    def least_ranks(self) -> int:
        """Return the fewest ranks that its context and tensor sizes need."""
        wanted = self.tensor_parallel, self.sequence_parallel
        return max(max([*each.values(), 1]) if isinstance(each, dict) else each or 1 for each in wanted)


def one_stage_a_rank(request: PlanRequest) -> PlanRequest:
    """Return the request as planners take it, whose stages have ranks of their own."""
    if not request.may_share_ranks:
        return request
    # numbers of stages that are meant for shared ranks say nothing of a plan without
    stages = None if request.must_share_ranks or request.data_parallel is not None else request.num_stages
    if request.must_share_ranks:  # these have neither context nor tensor ranks
        request = dataclasses.replace(request, tensor_parallel=1, sequence_parallel=1)
    return dataclasses.replace(request, num_stages=stages, virtual_stages=1, colocate=False)


def unlimited(request: PlanRequest) -> PlanRequest:
    """Return the request with all the memory in the world, and nothing to be done for it."""
    return dataclasses.replace(
        request,
        memory_limit_bytes=None,
        memory_optimization=(),
        cluster=request.cluster.with_memory(UNLIMITED),
    )


LIMIT_DIGITS = 4


def limit_gb(num_bytes: int) -> str:
    """Return the ``memory.limit_gb`` that allows so many bytes: rounded up, for less would not fit."""
    step = 10 ** max(0, len(str(num_bytes)) - LIMIT_DIGITS)
    return f"{-(-num_bytes // step) * step / 1e9:.9f}".rstrip("0").rstrip(".")


# Which micro-batch sizes, degrees, context and tensor sizes a stage may have: wishes, coupling, divisibility.

MAX_SWEEP = 16
TENSOR_SIZES = (2, 4, 8)
"""Context and tensor sizes above 1 that are tried where the planner chooses; together no more ranks than the last."""
ANY_SIZE = 0
"""Of a way to give stages grids: each the size, along this axis, that is quickest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One of the two axes along which the ranks of a data position divide its work.

    Args:
        key: of the configuration; ``ranks``: what they are called; ``divides``: what its size must divide.
        known, whole: fields of `BlockGraph`: blocks that can be divided, and why others cannot.
    """

    key: str
    ranks: str
    divides: str
    known: str
    whole: str

    def wanted(self, request: PlanRequest) -> int | dict[str, int] | None:
        """Return what the request says of its sizes."""
        found: int | dict[str, int] | None = getattr(request, self.key)
        return found

    def degrees(self, graph: BlockGraph) -> dict[str, tuple[int, ...]]:
        """Return by block that can be divided the sizes it can be."""
        return {each.block: each.degrees for each in getattr(graph, self.known)}

    def why_whole(self, graph: BlockGraph) -> dict[str, str]:
        """Return by block that cannot be divided what is in the way."""
        found: dict[str, str] = getattr(graph, self.whole)
        return found


CONTEXT = Axis(
    key="sequence_parallel",
    ranks="context ranks",
    divides="the query heads",
    known="context",
    whole="uncut",
)
TENSOR = Axis(
    key="tensor_parallel",
    ranks="tensor ranks",
    divides="the heads, features or vocabulary",
    known="sharding",
    whole="undivided",
)
AXES = (CONTEXT, TENSOR)
"""In the order of `ModelGrid`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _SizeRules:
    """Which sizes along one axis a stage may have: `GridRules` of it."""

    sizes: tuple[int, ...] = (1,)
    refused: dict[int, frozenset[str]] = field(default_factory=dict)
    divided: dict[int, frozenset[str]] = field(default_factory=dict)
    is_open: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GridRules:
    """Which context and tensor sizes a stage may have by its blocks.

    Args:
        grids: by increasing number of ranks.
        refused: grid -> blocks that no stage of it may hold.
        divided: grid of several ranks -> sets of blocks, for each axis those of which its ranks hold a part each; a
            stage of it has one of each.
        ways: to give grids to all stages of a plan that is considered: the largest sizes each may have up to these, or
            `ANY_SIZE`. What is mixed otherwise is a move away.
    """

    grids: tuple[ModelGrid, ...] = (ALONE,)
    refused: dict[ModelGrid, frozenset[str]] = field(default_factory=dict)
    divided: dict[ModelGrid, tuple[frozenset[str], ...]] = field(default_factory=dict)
    ways: tuple[ModelGrid, ...] = (ALONE,)

    @property
    def are_explicit(self) -> bool:
        """Return whether the user says which blocks have which size, so that not all may share a stage."""
        return bool(self.refused.get(ALONE))

    def allowed(self, blocks: Iterable[str]) -> list[ModelGrid]:
        """Return the grids of a stage with these blocks, by increasing number of ranks."""
        if len(self.grids) == 1:
            return [ALONE]
        own = frozenset(blocks)
        return [
            grid
            for grid in self.grids
            if own.isdisjoint(self.refused.get(grid, ()))
            and all(not own.isdisjoint(divided) for divided in self.divided.get(grid, ()))
        ]


def grid_rules(request: PlanRequest) -> GridRules:
    """Resolve the request's context and tensor sizes to blocks.

    Raises:
        PlanError: a size divides no heads of a block that shall have it, or there are too few ranks or positions; a
            key names no module, or one that has nothing to divide.
    """
    if request.tensor_parallel == request.sequence_parallel == 1:
        return GridRules()
    # Both axes, each by itself (`_size_rules`), then both together: layers of 8 heads on context 4 x tensor 4 would
    # have half a head on each rank, and may not be on that grid.
    context, tensor = (_size_rules(axis, request) for axis in AXES)
    most = TENSOR_SIZES[-1] if context.is_open and tensor.is_open else request.num_ranks
    most = min(most, request.num_ranks)
    grids = [ModelGrid(c, t) for c in context.sizes for t in tensor.sizes if c * t <= most]
    grids.sort(key=lambda grid: (grid.size, grid.tensor))
    shards = TENSOR.degrees(request.graph)
    refused, divided = {}, {}
    for grid in grids:
        unfit = context.refused.get(grid.context, frozenset()) | tensor.refused.get(grid.tensor, frozenset())
        if min(grid) > 1:
            apart = {
                each.block
                for each in request.graph.context
                if grid.tensor in shards.get(each.block, ()) and grid.size not in each.degrees
            }
            both = context.divided[grid.context] & tensor.divided[grid.tensor] & apart
            if both and not context.is_open and not tensor.is_open:
                raise PlanError(
                    f"{place_of(CONTEXT.key)}: {grid.context} beside {setting_of(TENSOR.key, grid.tensor)} does not "
                    f"divide the heads of block {min(both)!r}; make one smaller"
                )
            unfit |= apart
        if unfit:
            refused[grid] = unfit
        if grid.size > 1:
            sets = context.divided.get(grid.context), tensor.divided.get(grid.tensor)
            divided[grid] = tuple(each for each in sets if each is not None)
    return GridRules(grids=tuple(grids), refused=refused, divided=divided, ways=_ways(context, tensor, grids))


def _ways(context: _SizeRules, tensor: _SizeRules, grids: Sequence[ModelGrid]) -> tuple[ModelGrid, ...]:
    """Return `GridRules.ways`."""
    # context     tensor      ways (context, tensor), 0 is any
    # 1           auto        (1, 0) (1, 2) (1, 4) (1, 8)
    # auto        4           (0, 0) (2, 0) (4, 0) (8, 0)
    # auto        auto        (0, 0) (1, 2) (1, 4) (2, 1) (2, 2) (4, 1) ...
    axes = (context, tensor)
    first = ModelGrid(*(1 if own.sizes == (1,) else ANY_SIZE for own in axes))
    if not any(own.is_open and len(own.sizes) > 1 for own in axes):
        return (first,)
    choices = [own.sizes if own.is_open or own.sizes == (1,) else (ANY_SIZE,) for own in axes]
    largest = max(grid.size for grid in grids)
    more = (ModelGrid(c, t) for c in choices[0] for t in choices[1])
    return (first, *(way for way in more if 1 < max(way) and way.size <= largest))


def _size_rules(axis: Axis, request: PlanRequest) -> _SizeRules:
    """Resolve the sizes along one axis to blocks.

    Raises:
        PlanError: as of `grid_rules`.
    """
    # Layers of 32 heads, a vision tower of 16, an embedding that is not divided:
    #
    #     requested                    sizes     refused                    divided
    #     None, 8 ranks                1 2 4 8   -                          all layers, for every size
    #     4                            1 4       1: all layers              4: all layers
    #     {"language_model": 4}        1 4       1: its layers              4: its layers
    #     {..., "vision": 1}           1 4       the same, and 4: vision    4: its layers
    #
    # What the user does not list (an embedding, a head, a norm) belongs to the stage that it lands in: divided there if
    # its sharding has that size, whole on every rank otherwise, and of size 1 where nothing listed is beside it.
    requested = axis.wanted(request)
    if requested == 1:
        return _SizeRules()
    degrees = axis.degrees(request.graph)
    if requested is None:
        most = min([request.num_ranks, *(_positions(request.graph) if axis is CONTEXT else {}).values()])
        sizes = [n for n in TENSOR_SIZES if n <= most and any(n in own for own in degrees.values())]
        return _SizeRules(
            sizes=(1, *sizes),
            refused={n: frozenset(name for name, own in degrees.items() if n not in own) for n in sizes},
            divided={n: frozenset(name for name, own in degrees.items() if n in own) for n in sizes},
            is_open=True,
        )
    wanted = _wanted_sizes(axis, request, degrees)
    sizes = sorted({1, *wanted.values()})
    return _SizeRules(
        sizes=tuple(sizes),
        refused={n: frozenset(name for name, size in wanted.items() if size != n) for n in sizes},
        divided={n: frozenset(name for name, size in wanted.items() if size == n) for n in sizes if n > 1},
    )


def _positions(graph: BlockGraph) -> dict[str, int]:
    """Return by tensor that context ranks have in parts, and that blocks send each other, how many positions it has."""
    return {name: graph.tensors[name].shape[axis] for name, axis in graph.position_axes.items()}


def _wanted_sizes(axis: Axis, request: PlanRequest, degrees: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """Return by block the size that the user wants of its stage; blocks that are under no key have none.

    Nor have those that cannot be divided, but for a size of 1.

    Args:
        degrees: by block that can be divided, the sizes it can be.
    """
    requested, graph = axis.wanted(request), request.graph
    wanted: dict[str, int] = {}
    positions = _positions(graph) if axis is CONTEXT else {}
    by_name = requested if isinstance(requested, dict) else {"": requested or 1}
    for key, size in sorted(by_name.items(), key=lambda item: len(item[0])):
        where = place_of(axis.key, *([key] if key else []))
        if not 1 <= size <= request.num_ranks:
            raise PlanError(
                f"{where}: {size} is more than the {request.num_ranks} ranks there are; give 1 to {request.num_ranks}"
            )
        blocks = blocks_under(graph, key) if key else [block.name for block in graph.blocks]
        own = [name for name in blocks if name in degrees]
        if size > 1 and not own:
            known = axis.why_whole(graph)
            why = next((f" ({known[name]})" for name in blocks if name in known), "")
            raise PlanError(
                f"{where}: {size}, and nothing of {_some(blocks)} can be divided among {axis.ranks}{why}; give 1, or "
                '"auto" for what can be'
            )
        if size == 1:
            wanted.update(dict.fromkeys(blocks, 1))
            continue
        for name in blocks:
            wanted.pop(name, None)  # what a longer key says holds, also of blocks that cannot be divided
        for name in own:
            if size not in degrees[name]:
                possible = ", ".join(map(str, (1, *degrees[name])))
                raise PlanError(
                    f"{where}: {size} does not divide {axis.divides} of block {name!r}; give {possible}"
                )
            wanted[name] = size
        few = [(name, number) for name, number in positions.items() if number < size]
        if few and own:
            name, number = few[0]
            raise PlanError(
                f"{where}: {size} is more than the {number} positions of {name!r}; give 1 to {number}, or longer texts"
            )
    return wanted


def _some(blocks: list[str]) -> str:
    return f"block {blocks[0]!r}" + (f" and {len(blocks) - 1} more" if len(blocks) > 1 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRules:
    """What `PlanRequest` and the graph say of micro-batch sizes, resolved to blocks.

    Args:
        coupled: blocks that compute on whole loss units: those that mix samples, those at either end of
            a tensor with one value a unit, and all others where the request keeps units.
        fixed: block -> micro-batch size of its stage, as the user wants it.
        smallest_local: fewest samples one rank may compute at a time.
        sizes_to_try: those worth it for all other stages that are not coupled, increasing; the user's alone, if any.
        degrees: data-parallel degrees that can divide a micro-batch, increasing.
        grids: these degrees with context and tensor sizes that the ranks are enough for, fewest ranks first.
    """

    mini_batch: int
    loss_unit: int
    num_ranks: int
    data_parallel: int | None
    coupled: frozenset[str]
    fixed: dict[str, int]
    sizes_to_try: list[int]
    degrees: list[int]
    grids: list[tuple[int, ModelGrid]]
    smallest_local: int = 1
    model: GridRules = field(default_factory=GridRules)

    def micro_batch_size(self, blocks: Iterable[str], degree: int, wish: int) -> int | None:
        """Return the micro-batch size of a stage of ``degree`` ranks, or None where there is none.

        Args:
            wish: the size it shall have unless it is coupled or the user has fixed it.
        """
        names = list(blocks) if self.fixed or self.coupled else []
        sizes = {self.fixed[name] for name in names if name in self.fixed} if self.fixed else set()
        if len(sizes) > 1:
            return None
        is_coupled = not self.coupled.isdisjoint(names)
        return self.size_of(sizes.pop() if sizes else None, is_coupled, degree, wish)

    def sizes(self, blocks: Iterable[str], degree: int) -> list[int]:
        """Return the micro-batch sizes that a stage of these blocks may have on so many ranks, increasing."""
        names = list(blocks)
        found = {self.micro_batch_size(names, degree, wish) for wish in self.sizes_to_try}
        return sorted(size for size in found if size is not None)

    def wishes(self) -> list[int]:
        """Return `sizes_to_try`, as planners of plugins call it."""
        return self.sizes_to_try

    def size_of(self, fixed: int | None, is_coupled: bool, degree: int, wish: int) -> int | None:
        """Return the micro-batch size of a stage whose blocks are fixed to one (None: to none), and coupled or not."""
        unit = self.loss_unit * degree if is_coupled else None
        size = fixed if fixed is not None else unit if unit is not None else wish
        if (unit is not None and size != unit) or size % degree or self.mini_batch % size:
            return None
        if size // degree < self.smallest_local:
            return None
        return size


def batch_rules(request: PlanRequest) -> BatchRules:
    """Resolve the request's micro-batch sizes to blocks.

    Raises:
        PlanError: a key names neither a module of the model, nor ``loss``, nor ``*``.
    """
    graph = request.graph
    fixed: dict[str, int] = {}
    wanted = dict(request.micro_batch_sizes or {})
    universal = wanted.pop("*", None)
    for key, size in sorted(wanted.items(), key=lambda item: len(item[0])):
        for name in blocks_under(graph, key):
            fixed[name] = size
    coupled = coupled_blocks(graph)
    if request.keep_units and universal is None:
        coupled |= {block.name for block in graph.blocks if block.name not in fixed}
        universal = request.loss_unit
    degrees = [d for d in range(1, request.num_ranks + 1) if request.mini_batch % d == 0]
    if request.data_parallel is not None:
        degrees = [request.data_parallel]
    model = grid_rules(request)
    grids = [(d, g) for g in model.grids for d in degrees if d * g.size <= request.num_ranks or g.size == 1]
    return BatchRules(
        mini_batch=request.mini_batch,
        loss_unit=request.loss_unit,
        num_ranks=request.num_ranks,
        data_parallel=request.data_parallel,
        coupled=coupled,
        fixed=fixed,
        sizes_to_try=usual_sizes(request) if universal is None else [universal],
        degrees=degrees,
        grids=sorted(grids, key=lambda grid: (grid[0] * grid[1].size, grid[1].size, grid[1].tensor)),
        smallest_local=request.smallest_local_batch,
        model=model,
    )


def usual_sizes(request: PlanRequest) -> list[int]:
    """Return the micro-batch sizes worth trying where the user wants none, increasing.

    All divisors of the mini-batch where they are few; otherwise the powers of two among them, the
    multiples of the loss unit by powers of two, and the mini-batch itself.
    """
    every, unit = divisors(request.mini_batch), request.loss_unit
    if len(every) <= MAX_SWEEP:
        return every
    return [
        d
        for d in every
        if d & (d - 1) == 0
        or d == request.mini_batch
        or (d % unit == 0 and (d // unit) & (d // unit - 1) == 0)
    ]


def coupled_blocks(graph: BlockGraph) -> frozenset[str]:
    """Return the blocks that compute on whole loss units wherever they are placed."""
    coupled = {block.name for block in graph.blocks if block.is_coupled}
    for edge in graph.edges:
        if any(graph.tensors[name].layout.kind is LayoutKind.UNIT for name in edge.tensors):
            coupled |= {edge.src, edge.dst}
    return frozenset(coupled)


def blocks_under(graph: BlockGraph, key: str) -> list[str]:
    """Return the blocks a key of the configuration means: those of a module, by its path or the end of it, or ``loss``.

    Raises:
        PlanError: no block is under it, or blocks of several modules are; the message has the nearest names.
    """
    # "language_model" is "model.language_model" where no other module's path ends so; "0" would be many.
    found = [block.name for block in graph.blocks if is_under(block.name, key)]
    if not found and key == LOSS_KEY and graph.loss_block is not None:
        return [graph.loss_block]
    if not found:
        ends = [path for path in _module_paths(graph) if path.endswith(f".{key}")]
        outermost = [path for path in ends if not any(path.startswith(f"{other}.") for other in ends)]
        if len(outermost) > 1:
            raise PlanError(
                f"{key!r} is the end of {len(outermost)} modules' paths, {', '.join(outermost[:3])}; give one"
            )
        found = [block.name for block in graph.blocks for path in outermost if is_under(block.name, path)]
    if not found:
        raise PlanError(f"no module {key!r} in the model{nearest_names(graph, key)}")
    return found


def is_under(block: str, path: str) -> bool:
    """Return whether block (a module path, perhaps with ``#2``) is ``path`` or inside it."""
    return block == path or block.startswith((f"{path}.", f"{path}#"))


def nearest_names(graph: BlockGraph, key: str) -> str:
    """Return ``; the nearest are ...`` with the module paths closest to ``key``."""
    paths = _module_paths(graph)
    close = difflib.get_close_matches(key, paths, n=3, cutoff=0.4) or paths[:3]
    return f"; the nearest are {', '.join(close)}"


def _module_paths(graph: BlockGraph) -> list[str]:
    """Return the paths of all modules that blocks are in, and the blocks' names."""
    paths: dict[str, None] = {}
    for block in graph.blocks:
        parts = block.name.split("#")[0].split(".")
        paths.update(dict.fromkeys(".".join(parts[:n]) for n in range(1, len(parts) + 1)))
        paths[block.name] = None
    return list(paths)


# The micro-batch sizes of many stages at once: what `BatchRules.micro_batch_size` says, for arrays of stages.
#
# Stages are alike where they hold coupled blocks or none, and blocks that the user fixes to one and the same size or
# to none. Each such class has one size a degree.

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class SizeClasses:
    """The classes of one request.

    Args:
        names: of the blocks, in the order of the last axis of `flags`.
    """

    def __init__(self, rules: BatchRules, names: Sequence[str]) -> None:
        self.rules = rules
        self._fixed = sorted(set(rules.fixed.values()))
        rows = [[name in rules.coupled for name in names]]
        rows += [[rules.fixed.get(name) == size for name in names] for size in self._fixed]
        self.flags: Floats = np.array(rows, dtype=float)
        """[flag, block]: coupled, then fixed to the first of the sizes, to the second, ..."""

    def of(self, counts: Floats) -> Ints:
        """Return [...] the class of each stage.

        Args:
            counts: [flag, ...] how many of a stage's blocks have the flag.
        """
        # coupled 1, fixed to 8, and to 32:    none  coupled  8     8 and coupled  32    8 and 32
        # class                                0     1        2     3              4     -1, which has no size
        held = counts > 0.5
        sizes = np.arange(1, len(self._fixed) + 1).reshape(-1, *(1,) * (counts.ndim - 1))
        classes = 2 * (held[1:] * sizes).sum(axis=0) + held[0]
        found: Ints = np.where(held[1:].sum(axis=0) > 1, -1, classes).astype(np.int64)
        return found

    def sizes(self, classes: Ints, degree: int, wish: int) -> Ints:
        """Return [...] the micro-batch size of stages of these classes on ``degree`` ranks, 0 where there is none."""
        table = [
            self.rules.size_of(fixed, is_coupled, degree, wish) or 0
            for fixed in (None, *self._fixed)
            for is_coupled in (False, True)
        ]
        found: Ints = np.array([*table, 0])[classes]
        return found

    @property
    def are_alike(self) -> bool:
        """Return whether all stages of a plan have the same size, whatever their degrees."""
        return not self.rules.coupled and not self.rules.fixed


# What a planner says of its own search: where it is, and what it left out for want of time.
#
# Limits on time are counts (tasks simulated, items of a table), so that a request gives the same plan on any machine.
# Where one is met, the plan's notes say what was not searched.

logger = logging.getLogger(__name__)


REJECTED, LEFT_OUT = "rejected: ", "not searched, for want of time: "
"""What notes of a plan begin with: stages that were evaluated and not taken, and what was not searched."""


class SearchReport:
    """Collects what one planner's search rejects, and what it leaves out."""

    def __init__(self) -> None:
        self._left_out: dict[str, None] = {}
        self._rejected: dict[str, None] = {}

    def begin(self, phase: str) -> None:
        """Publish what is searched now (`report.progress.searching`)."""
        logger.debug("%s", phase)

    def leave_out(self, what: str) -> None:
        """Take down what is not searched; once, however often it is met."""
        self._left_out[what] = None

    def reject(self, what: str, why: str) -> None:
        """Note what was evaluated and not taken, and why."""
        self._rejected[f"{REJECTED}{what}: {why}"] = None

    def has_left_out(self, what: str) -> bool:
        """Return whether that was not searched."""
        return what in self._left_out

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what was rejected and left out, as the notes of a plan."""
        left_out = (f"{LEFT_OUT}{'; '.join(self._left_out)}",) if self._left_out else ()
        return (*self._rejected, *left_out)
