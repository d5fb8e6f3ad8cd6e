"""What tensor ranks divide of each block, in numbers: shares of its costs, and the bytes that the ranks sum.

Source: this project
Tests: tests/capture/test_sharding.py
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from gpp_plugin.ir.analysis import ShardedRegion, Sharding, regions_in, without_half_cut
from gpp_plugin.ir.block_graph import Block, BlockGraph, BlockSharding
from gpp_plugin.ir.op_graph import OpGraph, OpNode
from gpp_plugin.ir.plan import PipelinePlan

MAX_DEGREE = 1024
_NUMBER_BYTES = 4


def block_shardings(
    graph: OpGraph, regions: Sequence[ShardedRegion], blocks: Sequence[Block]
) -> tuple[BlockSharding, ...]:
    """Return what is divided of those blocks that hold whole regions.

    Args:
        graph: its sizes are those of the result.
    """
    inside = [region for block in blocks for region in regions_in(regions, block.nodes)]
    kept = without_half_cut(regions, inside)
    owned = {block.name: found for block in blocks if (found := regions_in(kept, block.nodes))}
    sizes = _together(owned)
    return tuple(
        _sharding(graph, block, owned[block.name], sizes[block.name])
        for block in blocks
        if sizes.get(block.name, 1) > 1
    )


def why_undivided(sharding: Sharding, blocks: Iterable[Block], granularity: str) -> dict[str, str]:
    """Return block -> why it is not divided, of those of these with linear operators; names the operator in the way."""
    whole = {each.name: each.reason for each in sharding.whole}
    regions = {name for region in sharding.regions for name in region.operators}
    found = {}
    for block in blocks:
        reasons = [whole[name] for name in block.nodes if name in whole]
        if reasons:
            found[block.name] = reasons[0]
        elif regions_in(sharding.regions, block.nodes):
            found[block.name] = "it shares a parameter with blocks that no number divides along with it"
        elif not regions.isdisjoint(block.nodes):
            found[block.name] = (
                f'operators that go together are in several blocks at granularity "{granularity}"'
            )
    return found


def regions_of_stage(
    graph: BlockGraph, regions: Sequence[ShardedRegion], plan: PipelinePlan, index: int
) -> tuple[ShardedRegion, ...]:
    """Return the regions that a stage's tensor ranks share out: all of a block, if its degrees have the stage's.

    Not those with a parameter that others read whole, here or in a stage of another tensor size: all hold it whole.
    """
    # What stages of this size share out together, as they may hold the same parameter: each keeps what is its own.
    size, nodes = plan.stages[index].tensor, {block.name: block.nodes for block in graph.blocks}
    divided = {own.block for own in graph.sharding if size in own.degrees}
    together = {name for stage in plan.stages if stage.tensor == size for name in stage.blocks}
    inside = [region for name in together & divided for region in regions_in(regions, nodes[name])]
    kept = without_half_cut(regions, inside)
    own = divided.intersection(plan.stages[index].blocks)
    return tuple(
        region for block in graph.blocks if block.name in own for region in regions_in(kept, block.nodes)
    )


def _together(owned: Mapping[str, Sequence[ShardedRegion]]) -> dict[str, int]:
    """Return block -> what its degrees divide; the same for blocks that read the same cut parameter."""
    # Blocks 0 and 5 share a weight: one could be divided by 2 and 4, the other by 2 and 6; both by 2 then, as a stage
    # that holds both cuts the weight once.
    sizes = {block: math.gcd(*(region.size for region in regions)) for block, regions in owned.items()}
    holders: dict[str, list[str]] = {}
    for block, regions in owned.items():
        for region in regions:
            for parameter in region.parameters:
                holders.setdefault(parameter.name, []).append(block)
    is_changing = True
    while is_changing:
        is_changing = False
        for sharing in holders.values():
            common = math.gcd(*(sizes[block] for block in sharing))
            is_changing |= any(sizes[block] != common for block in sharing)
            sizes.update(dict.fromkeys(sharing, common))
    return sizes


def _sharding(graph: OpGraph, block: Block, regions: Sequence[ShardedRegion], size: int) -> BlockSharding:
    operators = {name for region in regions for name in region.operators}
    parts = {result.name for region in regions for result in region.results}
    parts.update(name for region in regions for name in region.losses)
    cut = {parameter.name for region in regions for parameter in region.parameters}
    nodes = {node.name: node for node in graph.nodes}
    own = [nodes[name] for name in block.nodes]
    held = [p for p in graph.parameters if p.name in cut]
    # a storage is kept once, whoever keeps it: of what a region keeps, its own results and what is inside are parts
    kept = {maker: size for node in own for maker, size in node.keeps if maker in parts}
    inside = sum(node.kept_inside_bytes for node in own if node.name in parts)
    summed = [_bytes(graph, name) for region in regions for name in region.sums]
    for name in (name for region in regions for name in region.losses):
        rows = _rows(graph, nodes[name])
        summed += [
            rows * _NUMBER_BYTES,
            2 * rows * _NUMBER_BYTES,
        ]  # the largest logits; sums and the labels' logits
    shared = [_bytes(graph, name) for region in regions for name in region.shared]
    flops = sum(node.flops for node in own if node.name in operators)
    return BlockSharding(
        block=block.name,
        degrees=tuple(d for d in range(2, min(size, MAX_DEGREE) + 1) if size % d == 0),
        flop_share=min(flops / block.flops, 1.0) if block.flops else 0.0,
        parameter_bytes=sum(p.bytes for p in held),
        trainable_bytes=sum(p.bytes for p in held if p.requires_grad),
        saved_share=min((sum(kept.values()) + inside) / block.saved_bytes, 1.0) if block.saved_bytes else 0.0,
        forward_sums=len(summed),
        forward_sum_bytes=sum(summed),
        backward_sums=len(shared),
        backward_sum_bytes=sum(shared),
    )


def _rows(graph: OpGraph, loss: OpNode) -> int:
    """Return how many labels a cross entropy reads."""
    (logits,) = (node.output for node in graph.nodes if node.name == loss.inputs[0])
    assert logits is not None
    return logits.shape_for(graph.num_samples)[0]


def _bytes(graph: OpGraph, name: str) -> int:
    """Return the bytes of an operator's result, an input or a parameter, at the graph's number of samples."""
    for parameter in graph.parameters:
        if name in (parameter.name, *parameter.aliases):
            return parameter.bytes
    specs = [node.output for node in graph.nodes if node.name == name]
    specs += [spec for spec in graph.inputs if spec.name == name]
    spec = specs[0]
    assert spec is not None, f"{name} is one tensor"
    return spec.bytes_for(graph.num_samples)
