"""What one of t tensor ranks has of each block: the one formula of times, bytes and sums under tensor parallelism.

Legend, of a block at tensor size t (`BlockSharding`):

    time     C ((1 - f) + f / t)  +  n 2 (t - 1) latency  +  2 (t - 1) / t S / bandwidth
    bytes    P ((1 - p) + p / t)      parameters; gradients and optimizer state by the trained share; saved likewise

    C  forward or backward on one device, f the share of its operations that is divided
    n  all-reduces of one task, S bytes they sum at its samples; `ring_us` over the link that joins the tensor ranks

A layer of 100 us with f = 1 that sums 8 MB twice over NVLink (450 GB/s, 3 us): at t = 2 50 + 2 (2 x 3) + 2 x 8.9 us.

Blocks without sharding, and explicit stages, whose costs are of one tensor rank already, stay as they are. The sums of
a backward belong to its input gradient. Saved tensors (`SavedTensor`) shrink as the block that is charged with them.

Source: Megatron-LM (arXiv 1909.08053), section 3; the cost: this project
Tests: tests/plan/test_tensor_sizes.py
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from gpp_plugin.ir.block_graph import BlockGraph, BlockSharding
from gpp_plugin.ir.cluster import Link
from gpp_plugin.ir.profile import BlockCost, Profile


def sharded_by_block(graph: BlockGraph, tensor: int) -> dict[str, BlockSharding]:
    """Return by name the blocks of which ``tensor`` ranks hold a part each."""
    return {each.block: each for each in graph.sharding if tensor in each.degrees} if tensor > 1 else {}


def part(share: float, tensor: int) -> float:
    """Return what one of ``tensor`` ranks has of something of which ``share`` is divided.

    >>> part(0.5, 4)
    0.625
    """
    return (1.0 - share) + share / tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What one tensor rank has of a block: of its operations, parameters, what is trained, and what is saved."""

    flops: float = 1.0
    parameters: float = 1.0
    trained: float = 1.0
    saved: float = 1.0


def parts_by_block(graph: BlockGraph, tensor: int) -> dict[str, Parts]:
    """Return by name what one of ``tensor`` ranks has of each block that they divide."""
    # A block of 100 MB of parameters, 80 of them in matrices that ranks cut, on 4 ranks: 20 + 80 / 4 = 40 MB, a part of
    # 0.4. The share is taken of the block's own bytes and laid on the profile's, which may be of another type. A frozen
    # block has no trained bytes: its share of none is 0, and nothing is divided of what is not there.
    found, sharded = {}, sharded_by_block(graph, tensor)
    for block in graph.blocks:
        own = sharded.get(block.name)
        if own is None:
            continue
        found[block.name] = Parts(
            flops=part(own.flop_share, tensor),
            parameters=part(own.parameter_bytes / max(block.parameter_bytes, 1), tensor),
            trained=part(own.trainable_bytes / max(block.trainable_bytes, 1), tensor),
            saved=part(own.saved_share, tensor),
        )
    return found


WHOLE = Parts()


def sharded_profile(profile: Profile, graph: BlockGraph, tensor: int) -> Profile:
    """Return the costs of one of ``tensor`` ranks, all-reduces left out; what is not of the graph's blocks stays."""
    # What several blocks hold together is charged to the first of them: a tied embedding is held in
    # as many parts wherever it is, and a storage saved by several layers is as small as where it is made. Inputs of the
    # mini-batch stay: every tensor rank of a data position reads the same samples.
    parts = parts_by_block(graph, tensor)
    if not parts:
        return profile
    return dataclasses.replace(
        profile,
        costs=tuple(_cost_of(cost, parts.get(cost.block, WHOLE)) for cost in profile.costs),
        shared=tuple(
            dataclasses.replace(
                storage,
                bytes_per_sample=storage.bytes_per_sample * saved,
                bytes_fixed=storage.bytes_fixed * saved,
            )
            for storage in profile.shared
            for saved in [parts.get(storage.blocks[0], WHOLE).saved]
        ),
        tied=tuple(
            dataclasses.replace(
                tie,
                parameter_bytes=round(tie.parameter_bytes * own.parameters),
                gradient_bytes=round(tie.gradient_bytes * own.trained),
                optimizer_bytes=round(tie.optimizer_bytes * own.trained),
            )
            for tie in profile.tied
            for own in [parts.get(tie.blocks[0], WHOLE)]
        ),
    )


def _cost_of(cost: BlockCost, own: Parts) -> BlockCost:
    if own is WHOLE:
        return cost
    return dataclasses.replace(
        cost,
        forward_us=tuple(us * own.flops for us in cost.forward_us),
        backward_us=tuple(us * own.flops for us in cost.backward_us),
        saved_bytes_per_sample=cost.saved_bytes_per_sample * own.saved,
        saved_bytes_fixed=cost.saved_bytes_fixed * own.saved,
        parameter_bytes=round(cost.parameter_bytes * own.parameters),
        gradient_bytes=round(cost.gradient_bytes * own.trained),
        optimizer_bytes=round(cost.optimizer_bytes * own.trained),
        transient_bytes_per_sample=cost.transient_bytes_per_sample * own.saved,
        pending_bytes_per_sample=cost.pending_bytes_per_sample * own.saved,
    )


def sharded_graph(graph: BlockGraph, tensor: int) -> BlockGraph:
    """Return the graph with the saved tensors as one of ``tensor`` ranks keeps them."""
    parts = parts_by_block(graph, tensor)
    if not parts or not graph.saved:
        return graph
    saved = tuple(
        dataclasses.replace(each, bytes=round(each.bytes * parts.get(each.kept_by[0], WHOLE).saved))
        for each in graph.saved
    )
    return dataclasses.replace(graph, saved=saved)


Floats = npt.NDArray[np.float64]


def sum_times(graph: BlockGraph, tensor: int, link: Link) -> Floats:
    """Return [4, block] microseconds of all-reduces: forward a task, forward a sample, backward a task, a sample.

    ``ring_us`` in two parts: 2 (t - 1) latencies a sum, and 2 (t - 1) / t of the bytes over one link.
    """
    # On 4 ranks and a link of 3 us and 450 GB/s, 2 sums of 8 MB together at one sample: 2 x 6 x 3 = 36 us a task, and
    # 6 / 4 x 8 MB / 450 GB/s = 26.7 us a sample. The first does not grow with a micro-batch, so that small ones are
    # dear on tensor ranks; the second does not shrink with more ranks, so that large sizes win less and less.
    sharded = sharded_by_block(graph, tensor)
    found = np.zeros((4, len(graph.blocks)))
    for i, block in enumerate(graph.blocks):
        own = sharded.get(block.name)
        if own is None:
            continue
        latency = 2 * (tensor - 1) * link.latency_us
        per_byte = 2 * (tensor - 1) / tensor * link.occupied_us(1.0) / graph.num_samples
        found[:, i] = (
            own.forward_sums * latency,
            own.forward_sum_bytes * per_byte,
            own.backward_sums * latency,
            own.backward_sum_bytes * per_byte,
        )
    return found
