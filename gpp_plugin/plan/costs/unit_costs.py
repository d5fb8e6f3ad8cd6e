"""What a loss unit costs, stage by stage, by the sizes of its tensors: known to every rank without a message.

A block takes time with the elements of the batch's entries that drive it: those that it reads itself, or else those
that drive what it reads. A stage takes what its blocks take, weighed by their operations at the sample batch:

    sample unit   pixel_values [4, 3, 32, 32], input_ids [4, 24]        a unit of 4 x 48 tokens and 1 image
    vision tower                                   pixel_values         0.25
    decoder layers                                 input_ids            2
    loss                                           labels               2

A block that grows faster than its lengths, as attention does, is taken to grow as they do.

Source: this project
Tests: tests/plan/test_unit_order.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.plan import PipelinePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCosts:
    """What units cost over what the unit costs that a plan was made for.

    Args:
        stages: of each stage, shares of its time (together 1) and the entries of the batch that drive these.
        typical: elements of each entry in that unit.
    """

    stages: tuple[tuple[tuple[float, tuple[str, ...]], ...], ...]
    typical: Mapping[str, int]

    def factors(self, sizes: Mapping[str, int]) -> list[float]:
        """Return what a unit with these numbers of elements takes on each stage over what a typical one does."""
        return [
            sum((share * self._ratio(keys, sizes) for share, keys in parts), 0.0) for parts in self.stages
        ]

    def _ratio(self, keys: Sequence[str], sizes: Mapping[str, int]) -> float:
        usual = sum(self.typical.get(key, 0) for key in keys)
        return sum(sizes.get(key, 0) for key in keys) / usual if usual else 1.0


def unit_costs(plan: PipelinePlan, graph: BlockGraph, typical: Mapping[str, int]) -> UnitCosts:
    """Return what units cost under a plan.

    Args:
        graph: whose blocks the plan's stages hold.
        typical: elements of each entry of the batch in a unit that the plan was made for.
    """
    driven = _drivers(graph, frozenset(typical))
    flops = {block.name: block.flops for block in graph.blocks}
    stages = []
    for stage in plan.stages:
        shares: dict[tuple[str, ...], float] = {}
        total = sum(flops.get(name, 0.0) for name in stage.blocks)
        for name in stage.blocks:
            keys = driven.get(name, ())
            share = flops.get(name, 0.0) / total if total > 0 else 1.0 / len(stage.blocks)
            shares[keys] = shares.get(keys, 0.0) + share
        stages.append(tuple((share, keys) for keys, share in shares.items() if share > 0))
    return UnitCosts(stages=tuple(stages), typical=dict(typical))


def _drivers(graph: BlockGraph, known: frozenset[str]) -> dict[str, tuple[str, ...]]:
    """Return the entries of the batch that drive each block; blocks are in topological order."""
    sources: dict[str, list[str]] = {}
    for edge in graph.edges:
        sources.setdefault(edge.dst, []).append(edge.src)
    found: dict[str, tuple[str, ...]] = {}
    for block in graph.blocks:
        own = known.intersection(block.inputs)
        before = {key for source in sources.get(block.name, ()) for key in found.get(source, ())}
        found[block.name] = tuple(sorted(own or before))
    return found
