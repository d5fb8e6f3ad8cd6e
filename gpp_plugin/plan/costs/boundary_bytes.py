"""What crosses the boundary of a stage: every tensor once in and once out, however many blocks read it.

Tensors of one value for all samples or for a loss unit are left out: they are small.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.tensors import LayoutKind
from gpp_plugin.plan.costs.cost_model import Floats


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
