"""Chains: a linear order of the blocks, and contiguous groups of it."""

from __future__ import annotations

from collections.abc import Sequence

from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.samples import even_ranges
from gpp_plugin.plan.make import order_stages


def linear_order(graph: BlockGraph) -> list[str]:
    """Return the blocks in a topological order that finishes a branch before it begins the next."""
    names = [block.name for block in graph.blocks]
    return [names[i] for i in order_stages(graph, [[name] for name in names])]


def layer_of(block: str) -> str | None:
    """Return the numbered layer a block belongs to (``h.3`` of ``h.3.attn``), or None."""
    parts = block.split("#")[0].split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return None


def layer_bounds(names: Sequence[str], num_stages: int = 1) -> list[int]:
    """Return where layers begin, and the number of operators: runs of operators of one numbered module.

    Operators outside such modules form layers of their own between them. Where there are fewer layers than
    stages every operator is one.

    >>> layer_bounds(["embed", "h.0.norm", "h.0.mlp", "h.1.norm", "head", "loss"])
    [0, 1, 3, 4, 6]
    """
    keys = [layer_of(name) for name in names]
    bounds = [i for i in range(len(names)) if i == 0 or keys[i] != keys[i - 1]]
    return [*bounds, len(names)] if len(bounds) >= num_stages else list(range(len(names) + 1))


def split_by_layers(order: Sequence[str], num_stages: int) -> list[list[str]]:
    """Cut the order so that every stage has the same number of layers (Megatron's rule).

    What lies before the first layer belongs to the first stage, what follows a layer to that layer's
    stage. Where the layers do not divide evenly the first stages get one more; where there are fewer
    layers than stages, blocks count as layers.
    """
    layers = list(dict.fromkeys(layer for layer in map(layer_of, order) if layer is not None))
    if len(layers) < num_stages:
        return _even(order, num_stages)
    stage_of_layer = {
        layer: stage for stage, group in enumerate(_even(layers, num_stages)) for layer in group
    }
    groups: list[list[str]] = [[] for _ in range(num_stages)]
    current = 0
    for block in order:
        layer = layer_of(block)
        if layer is not None:
            current = max(current, stage_of_layer[layer])
        groups[current].append(block)
    return groups if all(groups) else _even(order, num_stages)


def _even(items: Sequence[str], num_groups: int) -> list[list[str]]:
    return [[items[place] for place in group] for group in even_ranges(len(items), num_groups)]


def split_by_weight(weights: Sequence[float], num_groups: int) -> tuple[int, ...]:
    """Cut a chain into groups, none empty, with the smallest largest weight (AutoPipe, Algorithm 1; exact).

    >>> split_by_weight([1, 3, 1, 2, 3], 4)
    (0, 1, 2, 4, 5)
    """
    num = len(weights)
    prefix = [0.0]
    for weight in weights:
        prefix.append(prefix[-1] + weight)
    best = [[float("inf")] * (num + 1) for _ in range(num_groups + 1)]
    cut = [[0] * (num + 1) for _ in range(num_groups + 1)]
    best[0][0] = 0.0
    for groups in range(1, num_groups + 1):
        for stop in range(groups, num + 1):
            for start in range(stop - 1, groups - 2, -1):
                last = prefix[stop] - prefix[start]
                if last > best[groups][stop]:
                    break
                value = max(best[groups - 1][start], last)
                if value < best[groups][stop]:
                    best[groups][stop], cut[groups][stop] = value, start
    cuts = [num]
    for groups in range(num_groups, 0, -1):
        cuts.append(cut[groups][cuts[-1]])
    return tuple(reversed(cuts))
