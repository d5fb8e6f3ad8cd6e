"""Which part of a tensor a message brings to a tensor rank, and which parts that rank needs: what the validator counts.

A tensor that the sender's row holds as shards is cut into cells along that axis: the shards themselves, or, where
the receiver's row has shards along the same axis, so many that both ends' shards are whole cells. A tensor that
every sender has whole is one cell.

    2 senders, 3 receivers     cells      0 1 2 3 4 5
                               senders    0 0 0 1 1 1
                               receivers  0 0 1 1 2 2     receiver 1 gets cell 2 of sender 0 and cell 3 of sender 1
"""

from __future__ import annotations

from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.ir.program import Direction, Message


def needed_cells(plan: PipelinePlan, edge_index: int, direction: Direction, rank: int) -> range:
    """Return the cells that a receiving rank needs of each tensor that a message of an edge holds."""
    (senders, sent_axis), (receivers, kept_axis), receiver = _ends(plan, edge_index, direction)
    if sent_axis is None:
        return range(1)
    if sent_axis != kept_axis:
        return range(senders)
    position = receiver.position(rank)[1]
    return range(position * senders, (position + 1) * senders)


def received_cells(plan: PipelinePlan, message: Message) -> range:
    """Return those of them that a message brings; none where its sender has nothing of them."""
    (_, sent_axis), (receivers, kept_axis), _ = _ends(plan, message.edge, message.direction)
    needed = needed_cells(plan, message.edge, message.direction, message.dst_rank)
    if sent_axis is None:
        return needed
    edge = plan.edges[message.edge]
    sender = plan.stages[edge.src if message.direction is Direction.ACTIVATION else edge.dst]
    position = sender.position(message.src_rank)[1]
    count = receivers if sent_axis == kept_axis else 1
    return range(max(needed.start, position * count), min(needed.stop, (position + 1) * count))


def _ends(
    plan: PipelinePlan, edge_index: int, direction: Direction
) -> tuple[tuple[int, int | None], tuple[int, int | None], Stage]:
    """Return size and shard axis of the sender's row and of the receiver's, and the receiving stage."""
    edge = plan.edges[edge_index]
    src, dst = plan.stages[edge.src], plan.stages[edge.dst]
    producer = (src.tensor, edge.src_shard_axis if src.tensor > 1 else None)
    consumer = (dst.tensor, edge.dst_shard_axis if dst.tensor > 1 else None)
    return (producer, consumer, dst) if direction is Direction.ACTIVATION else (consumer, producer, src)
