"""What messages between stages take, for orders that reckon with it (`StageEdge.message_us`).

    micro-batches of 8 samples on 2 ranks, then of 8 on 4 ranks, 1 MB a sample: a message holds 2 samples, 2 MB; on a
    link of 25 GB/s with 5 us latency it takes 85 us

Ranks that share a link take turns on it; orders do not know that, the simulator that weighs them does.

Source: this project
Tests: tests/schedule/test_link_times.py
"""

from __future__ import annotations

import dataclasses

from gpp_plugin.ir.cluster import Cluster
from gpp_plugin.ir.plan import PipelinePlan, StageEdge
from gpp_plugin.schedule.event_loop import MessageCosts
from gpp_plugin.schedule.messages import activation_bytes, gradient_bytes

LEAST_SHARE = 0.02
"""Of the shortest forward: messages that take less change no order worth simulating."""


def with_link_times(plan: PipelinePlan, cluster: Cluster) -> PipelinePlan:
    """Return the plan whose edges say what their messages take; as it is where that is next to nothing."""
    costs = MessageCosts(cluster)
    edges = tuple(_with_times(plan, edge, costs) for edge in plan.edges)
    shortest = min((stage.forward_us for stage in plan.stages if stage.forward_us > 0), default=0.0)
    if all(edge.message_us <= LEAST_SHARE * shortest for edge in edges):
        return plan
    return dataclasses.replace(plan, edges=edges)


def _with_times(plan: PipelinePlan, edge: StageEdge, costs: MessageCosts) -> StageEdge:
    if edge.is_order_only:
        return edge
    src, dst = plan.stages[edge.src], plan.stages[edge.dst]
    samples = min(src.local_batch_size, dst.local_batch_size)
    forward, backward = 0.0, 0.0
    # Ranks of both stages that have the same samples: of 2 and 4 ranks 0 with 0 and 1, 1 with 2 and 3. The dearest.
    count = max(src.degree, dst.degree)
    for place in range(count):
        sender = src.data_ranks(0)[place * src.degree // count]
        receiver = dst.data_ranks(0)[place * dst.degree // count]
        forward = max(forward, sum(costs.of(sender, receiver, activation_bytes(edge, samples, True))))
        if edge.gradient_tensors:
            back = costs.of(receiver, sender, gradient_bytes(edge, samples, True))
            backward = max(backward, sum(back))
    return dataclasses.replace(edge, message_us=forward, gradient_us=backward)
