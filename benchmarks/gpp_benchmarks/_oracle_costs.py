"""What a set of stages takes and needs, worked out a second time for the brute-force oracles.

It shares no formula with what it judges (`gpp_plugin.plan`, `gpp_plugin.simulate`, `gpp_plugin.schedule`): planners
and oracles that shared one would agree on its mistakes. Of `gpp_plugin.ir` it reads fields; none of the methods that
reckon something (times at a number of samples, bytes of a tensor, micro-batches of a stage) is called. It knows only
what the oracles' requests hold: one micro-batch size, 1F1B, ZeRO 0, times in proportion to samples, every tensor of
float32, with a gradient and samples along its first axis.

    memory   parameters + gradients + optimizer state + c x (what one micro-batch saves) + the largest transient;
             c is 1 at the sinks and one more than the most of its successors before them, at most all
    time     every rank runs its tasks in order; a message waits for its sender's link out, then for its receiver's
             link in (each holds it for bytes / bandwidth), then takes the latency; the stages' gradients are reduced
             by a ring behind the last backward, then all ranks step: they read gradients and write parameters

The ranks of a stage of c context x t tensor ranks are rows of c t, which run every task as one; times and bytes of such
stages are the caller's (`_tensor_oracle`). Receiver l of a row is sent the whole message by sender l mod (c t) of the
other's.

Two stages of 10 + 20 us, two micro-batches, messages free; stage 0 holds 2, stage 1 holds 1:

    stage 0  F0 F1 .. .. B0 B0 .. B1 B1             tens of us
    stage 1  .. F0 B0 B0 F1 B1 B1                   the step takes 90 us
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence

from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.cluster import Cluster, Link
from gpp_plugin.ir.plan import PipelinePlan, Stage, StageEdge
from gpp_plugin.ir.profile import BlockCost
from gpp_plugin.ir.tensors import TensorSpec
from gpp_plugin.plan.request import PlanRequest

Groups = tuple[tuple[str, ...], ...]

TaskKey = tuple[int, str, int]
"""Rank, ``F`` or ``B``, micro-batch."""
MessageKey = tuple[int, int, int, int]
"""0 for activations and 1 for gradients, the edge, the first sample, the receiver's place in its row: who is ready
first goes first, ties so."""
Sent = tuple[TaskKey, TaskKey, float, int, int]
"""Task that makes it, task that reads it, bytes, rank that sends, rank that receives; tasks of a row are its first
rank's."""


def oracle_plan(request: PlanRequest, groups: Groups, degrees: Sequence[int], size: int) -> PipelinePlan:
    """Return the plan of these stages in micro-batches of ``size``, with its times and bytes.

    Args:
        groups: blocks of each stage, in the order of the graph; the stages depend on each other in no circle.
    """
    assert request.zero_stage == 0 and request.schedule == "1f1b" and request.mode == "sync"
    profile = request.profile
    assert not (profile.shared or profile.tied or profile.inputs), "the oracle does not count these"
    costs = {cost.block: cost for cost in profile.costs}
    order = _branch_after_branch(request.graph, groups)
    edges = _edges(request.graph, [groups[i] for i in order])
    counts = _in_flight(len(order), edges, request.mini_batch // size)
    stages: list[Stage] = []
    # Ranks are given out in the order of the stages: degrees 2, 1, 1 are ranks 0-1, 2 and 3.
    first_rank = 0
    for place, i in enumerate(order):
        own, degree = [costs[name] for name in groups[i]], degrees[i]
        stages.append(
            Stage(
                name=str(place),
                blocks=groups[i],
                ranks=tuple(range(first_rank, first_rank + degree)),
                micro_batch_size=size,
                in_flight=counts[place],
                forward_us=sum(block_us(c, size // degree)[0] for c in own),
                backward_us=sum(block_us(c, size // degree)[1] for c in own),
                memory_bytes=_stage_bytes(own, size // degree, counts[place]),
                gradient_bytes=sum(c.gradient_bytes for c in own),
            )
        )
        first_rank += degree
    return PipelinePlan(
        model=request.graph.model,
        graph=profile.graph,
        planner="brute force",
        mini_batch=request.mini_batch,
        loss_unit=request.loss_unit,
        stages=tuple(stages),
        edges=edges,
    )


def block_us(cost: BlockCost, samples: int) -> tuple[float, float]:
    """Return forward and backward microseconds of ``samples``: as many times what one takes."""
    assert cost.samples == (1,), "the oracle knows times in proportion to samples"
    return cost.forward_us[0] * samples, cost.backward_us[0] * samples


def sample_bytes(spec: TensorSpec) -> int:
    """Return the bytes of one sample of a tensor."""
    assert spec.dtype == "float32" and spec.num_samples == spec.shape[0] == 1
    return 4 * math.prod(spec.shape)


def num_micro_batches(plan: PipelinePlan, stage: Stage) -> int:
    """Return how many micro-batches a stage computes."""
    return plan.mini_batch // stage.micro_batch_size


def local_samples(stage: Stage) -> int:
    """Return the samples of a micro-batch that each rank of a stage computes."""
    return stage.micro_batch_size // len(rows_of(stage))


def rows_of(stage: Stage) -> tuple[int, ...]:
    """Return the first of the ranks of each data position: every rank without context and tensor ranks."""
    return stage.ranks[:: stage.context * stage.tensor]


def _stage_bytes(own: Sequence[BlockCost], local: int, in_flight: int) -> int:
    held = sum(c.parameter_bytes + c.gradient_bytes + c.optimizer_bytes for c in own)
    saved = sum(c.saved_bytes_per_sample * local + c.saved_bytes_fixed for c in own)
    return round(held + in_flight * saved + max(c.transient_bytes_per_sample for c in own) * local)


def fits(plan: PipelinePlan, request: PlanRequest) -> bool:
    """Return whether every stage fits each of its ranks."""
    return all(s.memory_bytes <= limit_of(request, rank) for s in plan.stages for rank in s.ranks)


def limit_of(request: PlanRequest, rank: int) -> int:
    """Return the bytes that ``rank`` may use."""
    limits = [request.cluster.devices[rank].memory_bytes, request.memory_limit_bytes]
    return min(limit for limit in limits if limit is not None)


def least_us(plan: PipelinePlan) -> float:
    """Return how long the busiest stage computes: no step of the plan is shorter."""
    return max(
        (stage.forward_us + stage.backward_us) * num_micro_batches(plan, stage) for stage in plan.stages
    )


def _branch_after_branch(graph: BlockGraph, groups: Groups) -> list[int]:
    """Return the stages in the order plans list them: behind a stage those it makes ready, the first block's first.

    It decides which of two messages that leave a rank at the same time goes first.
    """
    home = {name: i for i, group in enumerate(groups) for name in group}
    place = {block.name: i for i, block in enumerate(graph.blocks)}
    before: dict[int, set[int]] = defaultdict(set)
    for edge in graph.edges:
        if home[edge.src] != home[edge.dst]:
            before[home[edge.dst]].add(home[edge.src])
    begin = [min(place[name] for name in group) for group in groups]
    late_first = sorted(range(len(groups)), key=begin.__getitem__, reverse=True)
    stack = [i for i in late_first if not before[i]]
    order: list[int] = []
    while stack:
        stage = stack.pop()
        order.append(stage)
        stack += [i for i in late_first if stage in before[i] and before[i] <= set(order)]
    assert len(order) == len(groups), "the stages depend on each other in a circle"
    return order


def _edges(graph: BlockGraph, groups: Sequence[Sequence[str]]) -> tuple[StageEdge, ...]:
    """Return what each stage sends each other one: every tensor once, there and as a gradient back."""
    home = {name: i for i, group in enumerate(groups) for name in group}
    between: dict[tuple[int, int], set[str]] = defaultdict(set)
    for edge in graph.edges:
        if home[edge.src] != home[edge.dst]:
            between[home[edge.src], home[edge.dst]].update(edge.tensors)
    found = []
    for (src, dst), names in sorted(between.items()):
        specs = [graph.tensors[name] for name in sorted(names)]
        assert all(spec.requires_grad for spec in specs)
        size = float(sum(map(sample_bytes, specs)))
        found.append(
            StageEdge(
                src=src,
                dst=dst,
                batch_tensors=tuple(sorted(names)),
                gradient_tensors=tuple(sorted(names)),
                bytes_per_sample=size,
                gradient_bytes_per_sample=size,
            )
        )
    return tuple(found)


def _in_flight(num_stages: int, edges: Sequence[StageEdge], num_micro_batches: int) -> list[int]:
    """Return the micro-batches that each stage holds, from the sinks back; stages come in topological order."""
    counts = [1] * num_stages
    for stage in range(num_stages - 1, -1, -1):
        asked = [counts[edge.dst] + 1 for edge in edges if edge.src == stage]
        counts[stage] = min(max(asked, default=1), num_micro_batches)
    return counts


def step_us(plan: PipelinePlan, cluster: Cluster) -> float:
    """Return the microseconds of one step, every rank and every message played by itself."""
    orders = {
        rank: [(rank, way, m) for way, m in _one_f_one_b(num_micro_batches(plan, stage), stage.in_flight)]
        for stage in plan.stages
        for rank in rows_of(stage)
    }
    took = {
        (rank, way): us
        for stage in plan.stages
        for rank in rows_of(stage)
        for way, us in (("F", stage.forward_us), ("B", stage.backward_us))
    }
    ends = _play(orders, took, _messages(plan), cluster)
    through = max(
        max(ends[rank] for rank in rows_of(stage)) + stage_reduce_us(stage, cluster) for stage in plan.stages
    )
    return through + max(stage_update_us(stage, cluster) for stage in plan.stages)


def _one_f_one_b(num: int, in_flight: int) -> list[tuple[str, int]]:
    """Return a stage's order: ``in_flight`` forwards, then a backward and a forward in turn."""
    order = [("F", m) for m in range(min(in_flight, num))]
    for m in range(num):
        order.append(("B", m))
        if m + in_flight < num:
            order.append(("F", m + in_flight))
    return order


def _messages(plan: PipelinePlan) -> dict[MessageKey, Sent]:
    """Return every message's sender, receiver and bytes: sample by sample, then joined where both ends are the same."""

    def owner(stage: Stage, way: str, sample: int) -> TaskKey:
        micro_batch, within = divmod(sample, stage.micro_batch_size)
        return rows_of(stage)[within // local_samples(stage)], way, micro_batch

    found: dict[MessageKey, Sent] = {}
    for number, edge in enumerate(plan.edges):
        assert not edge.bytes_fixed and edge.bytes_per_sample == edge.gradient_bytes_per_sample
        for direction, way in enumerate("FB"):
            ends = (plan.stages[edge.src], plan.stages[edge.dst])
            sender, receiver = ends if way == "F" else ends[::-1]
            samples: dict[tuple[TaskKey, TaskKey], list[int]] = defaultdict(list)
            for sample in range(plan.mini_batch):
                samples[owner(sender, way, sample), owner(receiver, way, sample)].append(sample)
            for (src, dst), sent in samples.items():
                first = sender.ranks.index(src[0]), receiver.ranks.index(dst[0])
                for place in range(receiver.context * receiver.tensor):
                    found[direction, number, sent[0], place] = (
                        src,
                        dst,
                        len(sent) * edge.bytes_per_sample,
                        sender.ranks[first[0] + place % (sender.context * sender.tensor)],
                        receiver.ranks[first[1] + place],
                    )
    return found


def _play(
    orders: dict[int, list[TaskKey]],
    took: dict[tuple[int, str], float],
    messages: dict[MessageKey, Sent],
    cluster: Cluster,
) -> dict[int, float]:
    """Return when each rank ends its last task.

    Events are (time, kind, which): 0 a task ends, 1 a message is ready, 2 it has the sender's link and asks for the
    receiver's. At one time all tasks end before any message moves.

    Args:
        orders: by rank, its tasks; ``took``: by rank and way, their microseconds.
    """
    lacking: dict[TaskKey, int] = defaultdict(int)
    leaving: dict[TaskKey, list[MessageKey]] = defaultdict(list)
    for key, (src, dst, *_) in messages.items():
        lacking[dst] += 1
        leaving[src].append(key)
    position, ready = dict.fromkeys(orders, 0), dict.fromkeys(orders, 0.0)
    out_free: dict[int, float] = defaultdict(float)
    in_free: dict[int, float] = defaultdict(float)
    arrived: dict[TaskKey, float] = defaultdict(float)
    events: list[tuple[float, int, tuple[int, ...]]] = []
    ends = dict.fromkeys(orders, 0.0)

    def start(rank: int) -> None:
        """Start the rank's next task if its messages are there and its last task has ended (``ready``)."""
        if position[rank] < len(orders[rank]) and ready[rank] >= 0.0:
            task = orders[rank][position[rank]]
            if lacking[task] == 0:
                begin = max(ready[rank], arrived[task])
                ready[rank] = -1.0  # busy
                heapq.heappush(events, (begin + took[rank, task[1]], 0, (rank,)))

    for rank in orders:
        start(rank)
    while events:
        now, kind, which = heapq.heappop(events)
        if kind == 0:
            (rank,) = which
            ends[rank] = ready[rank] = now
            for key in leaving[orders[rank][position[rank]]]:
                heapq.heappush(events, (now, 1, key))
            position[rank] += 1
            start(rank)
            continue
        _, dst, size, sender, receiver = messages[which[0], which[1], which[2], which[3]]
        link = _link(cluster, sender, receiver)
        payload = size / link.bytes_per_s * 1e6
        if kind == 1:
            begin = max(now, out_free[sender])
            out_free[sender] = begin + payload
            heapq.heappush(events, (begin, 2, which))
            continue
        in_free[receiver] = max(now, in_free[receiver]) + payload
        arrived[dst] = max(arrived[dst], in_free[receiver] + link.latency_us)
        lacking[dst] -= 1
        if orders[dst[0]][min(position[dst[0]], len(orders[dst[0]]) - 1)] == dst:
            start(dst[0])
    assert all(position[rank] == len(order) for rank, order in orders.items()), "the stages wait in a circle"
    return ends


def _link(cluster: Cluster, rank: int, other: int) -> Link:
    together = (link for link in cluster.links if rank // link.span == other // link.span)
    return next(together, cluster.links[-1])


def stage_reduce_us(stage: Stage, cluster: Cluster) -> float:
    """Return the all-reduce of a stage's gradients."""
    same = stage.ranks[:: stage.tensor]  # they hold the same parameters
    return all_reduce_us(cluster, same, stage.gradient_bytes) if stage.gradient_bytes else 0.0


def stage_update_us(stage: Stage, cluster: Cluster) -> float:
    """Return the step of a stateless optimizer: gradients are read, and parameters of as many bytes written."""
    return (
        max(2 * stage.gradient_bytes / cluster.devices[rank].memory_bytes_per_s for rank in stage.ranks) * 1e6
    )


def all_reduce_us(cluster: Cluster, ranks: Sequence[int], num_bytes: float, *, count: int = 1) -> float:
    """Return the microseconds of ``count`` equal all-reduces on one or two levels whose ranks have links of their own.

    A ring of all ranks: 2 (n - 1) steps, and an n-th of the bytes in each; all ranks of a node send out of it together.
    Or, of several nodes, up and down a tree of them.
    """
    # ranks 0, 1, 2, 3 in nodes of two: a ring takes 2 (2 x inner + outer) latencies, a tree the same; 3/2 of the bytes
    # go through every rank's inner link and, in the ring, over the two links that leave a node
    n = len(ranks)
    if n == 1:
        return 0.0
    inner, outer = cluster.links[0], cluster.links[-1]
    within: dict[int, int] = defaultdict(int)
    for rank in ranks:
        within[rank // inner.span] += 1
    nodes, most = len(within), max(within.values())
    leaving = outer.bytes_per_s * min(within.values()) if nodes > 1 else math.inf
    sent = inner.bytes_per_s if most > 1 else math.inf
    steps = count * ((n - nodes) * inner.latency_us + (nodes - 1) * outer.latency_us)
    ring = 2 * steps + 2e6 * (n - 1) / n * num_bytes / min(sent, leaving)
    if nodes == 1:
        return ring
    depth = 2 * count * ((most - 1) * inner.latency_us + math.ceil(math.log2(nodes)) * outer.latency_us)
    return min(ring, depth + 1e6 * num_bytes * max(min(most - 1, 2) / sent, 2 / leaving))
