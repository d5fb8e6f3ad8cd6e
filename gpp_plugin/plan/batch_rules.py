"""Which micro-batch sizes, degrees and tensor sizes a stage may have: the user's wishes, coupling, divisibility."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field

from gpp_plugin.config.key_names import place_of
from gpp_plugin.errors import PlanError
from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.plan import LOSS_KEY
from gpp_plugin.ir.samples import divisors
from gpp_plugin.ir.tensors import LayoutKind
from gpp_plugin.plan.request import PlanRequest

MAX_SWEEP = 16
TENSOR_SIZES = (2, 4, 8)
"""Tensor sizes above 1 that are tried where the planner chooses."""
ANY_SIZE = 0
"""A way to give stages tensor sizes: each whichever is quickest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRules:
    """Which tensor sizes a stage may have by its blocks.

    Args:
        sizes: increasing.
        refused: tensor size -> blocks that no stage of it may hold.
        divided: tensor size above 1 -> blocks of which its ranks hold a part each; a stage of it has one.
        ways: to give sizes to all stages of a plan that is considered: the largest each may have up to this one, or
            `ANY_SIZE`. What is mixed otherwise is a move away.
    """

    sizes: tuple[int, ...] = (1,)
    refused: dict[int, frozenset[str]] = field(default_factory=dict)
    divided: dict[int, frozenset[str]] = field(default_factory=dict)
    ways: tuple[int, ...] = (1,)

    @property
    def are_explicit(self) -> bool:
        """Return whether the user says which blocks have which size, so that not all may share a stage."""
        return bool(self.refused.get(1))

    def allowed(self, blocks: Iterable[str]) -> list[int]:
        """Return the tensor sizes of a stage with these blocks, increasing."""
        if self.sizes == (1,):
            return [1]
        own = frozenset(blocks)
        return [
            size
            for size in self.sizes
            if own.isdisjoint(self.refused.get(size, ()))
            and (size == 1 or not own.isdisjoint(self.divided.get(size, ())))
        ]


def tensor_rules(request: PlanRequest) -> TensorRules:
    """Resolve the request's tensor sizes to blocks.

    Raises:
        PlanError: a size divides no heads of a block that shall have it, or there are too few ranks; a key names no
            module, or one that has nothing to divide.
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
    # its sharding has that size, whole on every tensor rank otherwise, and of size 1 where nothing listed is beside it.
    requested, graph = request.tensor_parallel, request.graph
    if requested == 1:
        return TensorRules()
    degrees = {each.block: each.degrees for each in graph.sharding}
    if requested is None:
        sizes = [
            n for n in TENSOR_SIZES if n <= request.num_ranks and any(n in own for own in degrees.values())
        ]
        return TensorRules(
            sizes=(1, *sizes),
            refused={n: frozenset(name for name, own in degrees.items() if n not in own) for n in sizes},
            divided={n: frozenset(name for name, own in degrees.items() if n in own) for n in sizes},
            ways=(ANY_SIZE, *sizes) if sizes else (1,),
        )
    wanted = _wanted_sizes(request, degrees)
    sizes = sorted({1, *wanted.values()})
    return TensorRules(
        sizes=tuple(sizes),
        refused={n: frozenset(name for name, size in wanted.items() if size != n) for n in sizes},
        divided={n: frozenset(name for name, size in wanted.items() if size == n) for n in sizes if n > 1},
        ways=(ANY_SIZE,),
    )


def _wanted_sizes(request: PlanRequest, degrees: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """Return by block the tensor size that the user wants of its stage; blocks that are under no key have none.

    Nor have those that cannot be divided, but for a size of 1.

    Args:
        degrees: by block that can be divided, the sizes it can be.
    """
    requested, graph = request.tensor_parallel, request.graph
    wanted: dict[str, int] = {}
    by_name = requested if isinstance(requested, dict) else {"": requested or 1}
    for key, size in sorted(by_name.items(), key=lambda item: len(item[0])):
        where = place_of("tensor_parallel", *([key] if key else []))
        if not 1 <= size <= request.num_ranks:
            raise PlanError(
                f"{where}: {size} is more than the {request.num_ranks} ranks there are; give 1 to {request.num_ranks}"
            )
        blocks = blocks_under(graph, key) if key else [block.name for block in graph.blocks]
        own = [name for name in blocks if name in degrees]
        if size > 1 and not own:
            why = next((f" ({graph.undivided[name]})" for name in blocks if name in graph.undivided), "")
            raise PlanError(
                f"{where}: {size}, and nothing of {_some(blocks)} can be divided among tensor ranks{why}; give 1, or "
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
                    f"{where}: {size} does not divide the heads, features or vocabulary of block {name!r}; "
                    f"give {possible}"
                )
            wanted[name] = size
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
        universal: the size of all other stages that are not coupled, as the user wants it.
    """

    mini_batch: int
    loss_unit: int
    num_ranks: int
    data_parallel: int | None
    coupled: frozenset[str]
    fixed: dict[str, int]
    universal: int | None
    smallest_local: int = 1
    tensors: TensorRules = field(default_factory=TensorRules)

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

    def size_of(self, fixed: int | None, is_coupled: bool, degree: int, wish: int) -> int | None:
        """Return the micro-batch size of a stage whose blocks are fixed to one (None: to none), and coupled or not."""
        unit = self.loss_unit * degree if is_coupled else None
        size = fixed if fixed is not None else unit if unit is not None else wish
        if (unit is not None and size != unit) or size % degree or self.mini_batch % size:
            return None
        if size // degree < self.smallest_local:
            return None
        return size

    def degrees(self) -> list[int]:
        """Return the data-parallel degrees that can divide a micro-batch, increasing."""
        if self.data_parallel is not None:
            return [self.data_parallel]
        return [d for d in range(1, self.num_ranks + 1) if self.mini_batch % d == 0]

    def grids(self) -> list[tuple[int, int]]:
        """Return data-parallel degrees with tensor sizes that the ranks are enough for, fewest ranks first."""
        found = [
            (d, t) for t in self.tensors.sizes for d in self.degrees() if d * t <= self.num_ranks or t == 1
        ]
        return sorted(found, key=lambda grid: (grid[0] * grid[1], grid[1]))

    def wishes(self) -> list[int]:
        """Return the universal micro-batch sizes worth trying, increasing.

        All divisors of the mini-batch where they are few; otherwise the powers of two among them, the
        multiples of the loss unit by powers of two, and the mini-batch itself.
        """
        if self.universal is not None:
            return [self.universal]
        every = divisors(self.mini_batch)
        if len(every) <= MAX_SWEEP:
            return every
        return [
            d
            for d in every
            if d & (d - 1) == 0
            or d == self.mini_batch
            or (d % self.loss_unit == 0 and (d // self.loss_unit) & (d // self.loss_unit - 1) == 0)
        ]


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
    return BatchRules(
        mini_batch=request.mini_batch,
        loss_unit=request.loss_unit,
        num_ranks=request.num_ranks,
        data_parallel=request.data_parallel,
        coupled=coupled,
        fixed=fixed,
        universal=universal,
        smallest_local=request.smallest_local_batch,
        tensors=tensor_rules(request),
    )


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
