"""Which micro-batch sizes and degrees a stage may have: the user's wishes, coupling, divisibility."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.plan import LOSS_KEY
from gpp_plugin.ir.tensors import LayoutKind
from gpp_plugin.plan.request import PlanRequest

MAX_SWEEP = 16


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

    def wishes(self) -> list[int]:
        """Return the universal micro-batch sizes worth trying, increasing.

        All divisors of the mini-batch where they are few; otherwise the powers of two among them, the
        multiples of the loss unit by powers of two, and the mini-batch itself.
        """
        if self.universal is not None:
            return [self.universal]
        divisors = _divisors(self.mini_batch)
        if len(divisors) <= MAX_SWEEP:
            return divisors
        kept = [
            d
            for d in divisors
            if d & (d - 1) == 0
            or d == self.mini_batch
            or (d % self.loss_unit == 0 and (d // self.loss_unit) & (d // self.loss_unit - 1) == 0)
        ]
        return kept


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


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
    )


def coupled_blocks(graph: BlockGraph) -> frozenset[str]:
    """Return the blocks that compute on whole loss units wherever they are placed."""
    coupled = {block.name for block in graph.blocks if block.is_coupled}
    for edge in graph.edges:
        if any(graph.tensors[name].layout.kind is LayoutKind.UNIT for name in edge.tensors):
            coupled |= {edge.src, edge.dst}
    return frozenset(coupled)


def blocks_under(graph: BlockGraph, key: str) -> list[str]:
    """Return the blocks a key of the configuration means: a module path prefix, or ``loss``.

    Raises:
        PlanError: no block is under it; the message has the nearest names.
    """
    found = [block.name for block in graph.blocks if is_under(block.name, key)]
    if not found and key == LOSS_KEY and graph.loss_block is not None:
        return [graph.loss_block]
    if not found:
        raise PlanError(f"no module {key!r} in the model{nearest_names(graph, key)}")
    return found


def is_under(block: str, path: str) -> bool:
    """Return whether block (a module path, perhaps with ``#2``) is ``path`` or inside it."""
    return block == path or block.startswith((f"{path}.", f"{path}#"))


def nearest_names(graph: BlockGraph, key: str) -> str:
    """Return ``; the nearest are ...`` with the module paths closest to ``key``."""
    paths: dict[str, None] = {}
    for block in graph.blocks:
        parts = block.name.split("#")[0].split(".")
        paths.update(dict.fromkeys(".".join(parts[:n]) for n in range(1, len(parts) + 1)))
        paths[block.name] = None
    close = difflib.get_close_matches(key, paths, n=3, cutoff=0.4) or list(paths)[:3]
    return f"; the nearest are {', '.join(close)}"
