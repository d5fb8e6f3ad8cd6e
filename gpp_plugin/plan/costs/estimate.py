"""A quick prediction of one step's time, for ranking many candidate plans.

It plays every task of every stage in its order; the ranks of a stage run in lockstep. Messages take turns
at the sender's port and at the receiver's, in the order of the tasks that need them: close to what
`simulate` computes rank by rank and message by message, at a fraction of the cost.

That makes it another algorithm than the event loop, not a copy: it needs no clock common to all stages. A stage runs
on until a message is missing, then the next one does, in any order; each has a clock of its own. What it plays with
is the same: `stage_task_us`, `Link.occupied_us`, `CostModel.reductions`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from gpp_plugin.ir.cluster import Cluster
from gpp_plugin.ir.plan import (
    PipelinePlan,
    Stage,
    StageEdge,
    bytes_by_rank,
    cost_key,
    stage_task_us,
)
from gpp_plugin.ir.schedule import TaskKind
from gpp_plugin.ir.step_cost import (
    EXCHANGES,
    GATHERS,
    REDUCTIONS,
    TENSOR_SUMS,
    CollectiveTime,
    Reductions,
    StageReductions,
    StepCost,
    StepPrices,
)
from gpp_plugin.ir.tensors import element_bytes
from gpp_plugin.ir.timeline import COMPUTE_KINDS, EventKind, Timeline
from gpp_plugin.plan.costs.collective_costs import collectives, gather_times
from gpp_plugin.plan.costs.cost_model import CostModel, us_per_sample
from gpp_plugin.plan.costs.memory_formula import with_breakdown
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.schedule.gathers import EARLY_BUCKET_ELEMENTS
from gpp_plugin.schedule.orders.kfkb import kfkb_schedule
from gpp_plugin.simulate.predict import AsyncPrediction, predict_iteration_us, simulate_step, simulate_windows
from gpp_plugin.simulate.reductions import total_times
from gpp_plugin.simulate.timeline_metrics import start_up_us


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTiming:
    """What the prediction needs of a stage; times of one micro-batch, reduction once a step.

    Args:
        reduce_us: what is left of its last sum behind its last backward (`StageReductions.exposed_us`).
        gather_us: before its first task; ``each_us`` behind each backward, kept from its next task; ``step_us`` when
            all stages are through: its optimizer step, and parameters behind it.
    """

    micro_batch_size: int
    in_flight: int
    k: int
    forward_us: float
    backward_us: float
    reduce_us: float
    gather_us: float = 0.0
    each_us: float = 0.0
    step_us: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeTiming:
    """Messages of an edge; ``out`` the time they hold the sender's port, ``in`` the receiver's.

    Args:
        latency_us: from leaving to arriving.
        forward_out_us, forward_in_us: activations of one micro-batch of the sender, of the receiver.
        backward_out_us, backward_in_us: gradients, likewise (the edge's consumer sends).
        has_gradient: the producer waits for gradients.
    """

    src: int
    dst: int
    latency_us: float = 0.0
    forward_out_us: float = 0.0
    forward_in_us: float = 0.0
    backward_out_us: float = 0.0
    backward_in_us: float = 0.0
    has_gradient: bool = True


@functools.lru_cache(maxsize=4096)
def task_order(num_micro_batches: int, in_flight: int, k: int) -> tuple[int, ...]:
    """Return the kFkB order as numbers: m is the forward of micro-batch m, ~m its backward.

    >>> task_order(4, 2, 1)
    (0, 1, -1, 2, -2, 3, -3, -4)
    """
    schedule = kfkb_schedule(0, num_micro_batches, k=k, num_in_flight=in_flight)
    return tuple(t.micro_batch if t.kind is TaskKind.FORWARD else ~t.micro_batch for t in schedule.tasks)


_Incoming = tuple[int, list[float], float, float]
"""(micro-batch size of the sender, when each of its messages has left, time at the port, latency)."""


def estimate_us(
    mini_batch: int,
    stages: Sequence[StageTiming],
    edges: Sequence[EdgeTiming],
    tied: Sequence[tuple[tuple[int, ...], float]] = (),
) -> float:
    """Return microseconds from the first forward to the end of the step; inf where it would stop.

    Args:
        tied: as of `Reductions`.
    """
    sizes = [s.micro_batch_size for s in stages]
    orders = [task_order(mini_batch // s.micro_batch_size, s.in_flight, s.k) for s in stages]
    # By stage and direction: what a task waits for, and what its messages are added to.
    incoming: tuple[list[list[_Incoming]], ...] = ([[] for _ in stages], [[] for _ in stages])
    sends: tuple[list[list[tuple[list[float], float]]], ...] = ([[] for _ in stages], [[] for _ in stages])
    neighbours: list[list[int]] = [[] for _ in stages]
    for edge in edges:
        sent: list[float] = []
        incoming[0][edge.dst].append((sizes[edge.src], sent, edge.forward_in_us, edge.latency_us))
        sends[0][edge.src].append((sent, edge.forward_out_us))
        if edge.has_gradient:
            returned: list[float] = []
            incoming[1][edge.src].append((sizes[edge.dst], returned, edge.backward_in_us, edge.latency_us))
            sends[1][edge.dst].append((returned, edge.backward_out_us))
        neighbours[edge.src].append(edge.dst)
        neighbours[edge.dst].append(edge.src)
    # A stage runs on from ``heads``, its next task, until a message has not been sent yet; stages that it sent to or
    # freed come up again. Times only ever depend on messages that are there, so the order of visits does not matter.
    # Message m of an edge is the sender's m-th micro-batch: a consumer of other sizes takes the first one that
    # reaches its last sample (sender 2, consumer 3 samples: its task 1 ends at sample 6, message 2).
    heads = [0] * len(stages)
    clocks = [stage.gather_us for stage in stages]
    out_free = [0.0] * len(stages)
    in_free = [0.0] * len(stages)
    waiting = list(range(len(stages)))
    while waiting:
        s = waiting.pop()
        order, size = orders[s], sizes[s]
        begun = head = heads[s]
        last = len(order)
        received, stage_sends = (incoming[0][s], incoming[1][s]), (sends[0][s], sends[1][s])
        durations, held = (stages[s].forward_us, stages[s].backward_us), (0.0, stages[s].each_us)
        clock, in_port, out_port = clocks[s], in_free[s], out_free[s]
        while head < last:
            task = order[head]
            way, end = (0, (task + 1) * size) if task >= 0 else (1, -task * size)
            if received[way]:
                left = _departures(received[way], end)
                if left is None:
                    break
                for departure, hold, latency in left:
                    in_port += hold
                    if departure > in_port:
                        in_port = departure
                    if in_port + latency > clock:
                        clock = in_port + latency
            clock += durations[way]
            for messages, hold in stage_sends[way]:
                out_port = (out_port if out_port > clock else clock) + hold
                messages.append(out_port)
            clock += held[way]
            head += 1
        heads[s], clocks[s], in_free[s], out_free[s] = head, clock, in_port, out_port
        if head > begun:
            waiting.extend(other for other in neighbours[s] if heads[other] < len(orders[other]))
    if any(head < len(order) for head, order in zip(heads, orders, strict=True)):
        return float("inf")
    ends = [clock + stage.reduce_us for clock, stage in zip(clocks, stages, strict=True)]
    for holders, us in tied:
        together = max(ends[i] for i in holders) + us
        for i in holders:
            ends[i] = together
    return max(ends) + max(stage.step_us for stage in stages)


def _departures(incoming: Sequence[_Incoming], end: int) -> list[tuple[float, float, float]] | None:
    """Return when the messages up to sample ``end`` left, earliest first; None where one has not yet."""
    if len(incoming) == 1:
        size, sent, hold, latency = incoming[0]
        need = -(-end // size) - 1
        return [(sent[need], hold, latency)] if len(sent) > need else None
    left = []
    for size, sent, hold, latency in incoming:
        need = -(-end // size) - 1
        if len(sent) <= need:
            return None
        left.append((sent[need], hold, latency))
    left.sort()
    return left


def estimate_plan_us(plan: PipelinePlan, costs: CostModel) -> float:
    """Return the predicted microseconds of one step of a whole plan."""
    reductions, updates = costs.reductions(plan), update_times(plan, costs)
    stages = [
        StageTiming(
            micro_batch_size=stage.micro_batch_size,
            in_flight=stage.in_flight,
            k=stage.k,
            forward_us=stage_task_us(stage, TaskKind.FORWARD),
            backward_us=stage_task_us(stage, TaskKind.BACKWARD),
            # the last sum of those behind each backward is one of them
            reduce_us=own.exposed_us(stage.backward_us) - own.each_us,
            gather_us=own.gather_us,
            each_us=own.each_us,
            step_us=own.step_us + updates[index],
        )
        for index, (stage, own) in enumerate(zip(plan.stages, reductions.stages, strict=True))
    ]
    edges = [_edge_timing(edge, plan.stages[edge.src], plan.stages[edge.dst], costs) for edge in plan.edges]
    us = estimate_us(plan.mini_batch, stages, edges, reductions.tied)
    return max(us, _busiest_adapter_us(plan, edges, costs)) if costs.cluster.has_adapters else us


def _busiest_adapter_us(plan: PipelinePlan, edges: Sequence[EdgeTiming], costs: CostModel) -> float:
    """Return how long messages keep the busiest adapter busy in a mini-batch, those of all stages together.

    Stages are played with clocks of their own, so that they do not wait for each other's messages; no step is shorter
    than this.
    """
    busy: dict[tuple[int, bool], float] = defaultdict(float)
    for edge, timing in zip(plan.edges, edges, strict=True):
        src, dst = plan.stages[edge.src], plan.stages[edge.dst]
        link = costs.cluster.link_between(min(src.ranks[0], dst.ranks[0]), max(src.ranks[-1], dst.ranks[-1]))
        if link.adapters is None:
            continue
        there, back = plan.num_micro_batches(edge.src), plan.num_micro_batches(edge.dst)
        for stage, is_out, us in (
            (src, True, there * timing.forward_out_us),
            (dst, False, back * timing.forward_in_us),
            (dst, True, back * timing.backward_out_us),
            (src, False, there * timing.backward_in_us),
        ):
            for port in {costs.cluster.port(rank, link) for rank in stage.ranks}:
                busy[port, is_out] += us
    return max(busy.values(), default=0.0)


def _edge_timing(edge: StageEdge, src: Stage, dst: Stage, costs: CostModel) -> EdgeTiming:
    low, high = sorted((src, dst), key=lambda stage: stage.ranks[0])
    link = costs.cluster.link_between(low.ranks[0], high.ranks[-1])

    # the ranks of a stage send together, and those that share an adapter one after the other
    shared = {
        stage.ranks: costs.cluster.sharers(stage.ranks, link) if costs.cluster.has_adapters else 1
        for stage in (src, dst)
    }

    # every rank of the receiver gets what it holds of a tensor, the whole or its part: a sender serves so many
    parts = {src.ranks: src.num_parts(edge.src_shard_axis), dst.ranks: dst.num_parts(edge.dst_shard_axis)}
    pieces = max(parts.values())

    def serves(sender: Stage, receiver: Stage) -> float:
        return (
            -(-receiver.model_parallel * pieces // (parts[receiver.ranks] * sender.model_parallel)) / pieces
        )

    def hold(per_sample: float, fixed: float, stage: Stage, times: float) -> float:
        held = link.occupied_us(per_sample * stage.local_batch_size + fixed)
        return float(held * shared[stage.ranks] * times)

    sample, whole = edge.bytes_per_sample, edge.bytes_fixed
    grad_sample, grad_whole = edge.gradient_bytes_per_sample, edge.gradient_bytes_fixed
    return EdgeTiming(
        src=edge.src,
        dst=edge.dst,
        latency_us=0.0 if edge.is_order_only else link.latency_us,
        forward_out_us=hold(sample, whole, src, serves(src, dst)),
        forward_in_us=hold(sample, whole, dst, 1 / parts[dst.ranks]),
        backward_out_us=hold(grad_sample, grad_whole, dst, serves(dst, src)),
        backward_in_us=hold(grad_sample, grad_whole, src, 1 / parts[src.ranks]),
        has_gradient=bool(edge.gradient_tensors),
    )


# The simulator as the evaluator of plans: links shared, reductions as `simulate.reductions` has them.
#
# An asynchronous plan is not simulated: its pipeline never runs dry, so it takes its micro-batches times the slowest
# stage (PipeDream, section 3.1).


def exposed_us(costs: CostModel, reduce_us: Any, backward_us: Any, gradient_bytes: Any) -> Any:
    """Return the least of a stage's reductions that nothing hides, for searches: numbers, or arrays of them.

    A bound of `StageReductions.exposed_us`: a sum in several buckets may hide behind all of the last backward, one in
    a single bucket hides behind nothing. Plans are judged by the sums as they are.

    Args:
        reduce_us: n R, or a sample's share of it; ``backward_us`` of one micro-batch, or the same share.
    """
    return np.where(gradient_bytes > costs.bucket_bytes, np.maximum(reduce_us - backward_us, 0.0), reduce_us)


def update_times(plan: PipelinePlan, costs: CostModel) -> dict[int, float]:
    """Return by stage what its optimizer step takes (`CostModel.update_us`)."""
    return {
        index: costs.on(stage).update_us(costs.indices(stage.blocks), stage.degree, stage.ranks)
        for index, stage in enumerate(plan.stages)
    }


MAX_RANK_TASKS = 60_000
"""Tasks summed over ranks that are simulated one by one; above, the ranks of a stage move as one."""


def evaluate_us(plan: PipelinePlan, costs: CostModel) -> float:
    """Return the predicted microseconds of one step of ``plan``, the optimizer's included: what searches compare.

    Plans of very many ranks are predicted by `estimate`, without contention for links. Not so where a rank holds
    several stages: there each stage would have a clock of its own.
    """
    if plan.mode == "async":
        one = dataclasses.replace(plan, mini_batch=plan.stages[0].micro_batch_size)
        reduce_us, updates = costs.reduce_times(one), update_times(one, costs)
        # Of a micro-batch, where `us_per_sample` says of a sample: every one is followed by its reduction and update.
        slowest = max(
            us_per_sample(
                stage.forward_us + stage.backward_us, 1, reduce_us=reduce_us[index] + updates[index]
            )
            for index, stage in enumerate(plan.stages)
        )
        return float(plan.num_micro_batches(0) * slowest)
    if plan.num_rank_tasks > MAX_RANK_TASKS and not plan.shares_ranks:
        return estimate_plan_us(plan, costs)
    return predict_iteration_us(
        plan,
        cluster=costs.cluster,
        reduce_us=costs.reductions(plan),
        step_us=update_times(plan, costs),
    )


# The ledger of a plan's step (`StepCost`): made here alone, once for a finished plan, and printed everywhere.
#
# Every term is the difference of two simulations, each with one more thing that takes time. A chain of two stages whose
# tasks take 80 us on the busier rank:
#
#     tasks alone                      100 us     compute 80, bubble 20
#     and messages                     112        messages 12
#     and reductions                   130        reductions 18, whatever more of them is hidden
#     and the optimizer's step         141        optimizer 11: the step


def finished_plan(plan: PipelinePlan, request: PlanRequest) -> PipelinePlan:
    """Return a plan with what fills its ranks and what its step costs: the last thing that is done to one."""
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    return with_cost(with_breakdown(plan, request), costs)


def with_cost(plan: PipelinePlan, costs: CostModel) -> PipelinePlan:
    """Return a plan with its `step_cost`; one without a breakdown of memory, not finished, with its time alone."""
    if not plan.memory:
        return dataclasses.replace(plan, iteration_us=evaluate_us(plan, costs))
    cost = step_cost(plan, costs)
    return dataclasses.replace(plan, iteration_us=cost.step_us, cost=cost)


def step_cost(plan: PipelinePlan, costs: CostModel) -> StepCost:
    """Return what a step of a plan costs, and what its ranks hold by the plan's own breakdown of memory."""
    prices = _prices(plan, costs)
    assert prices.reductions is not None
    # tasks alone, and with one more thing each that takes time: messages, reductions, gathers, the optimizer
    steps = [StepPrices(), StepPrices(cluster=prices.cluster)]
    for reductions in (prices.reductions.with_gathers({}), prices.reductions):
        steps.append(StepPrices(cluster=prices.cluster, reductions=reductions))
    ends: list[float] = []
    for number, each in enumerate(steps):
        is_same = number and each == steps[number - 1]  # nothing is gathered, most often
        ends.append(ends[-1] if is_same else _step_us(plan, each))
    played = play_step(plan, prices)
    windows = None if isinstance(played, Timeline) else played
    timeline = played if isinstance(played, Timeline) else played.timeline
    ends.append(timeline.iteration_us if windows is None else windows.steady_us)
    message_us, reduce_us, gather_us, optimizer_us = (max(b - a, 0.0) for a, b in pairwise(ends))
    stage_us = _stage_times(plan, timeline, 1 if windows is None else windows.num_windows)
    busy_us, own = max(
        (sum(stage_us[index] for index in own), own)
        for own in map(plan.stages_of_rank, range(plan.num_ranks))
    )
    parts = {event.stage for event in timeline.events if event.kind is EventKind.INPUT_GRADIENT}
    sums = [np.array(_sum_us(plan.stages[i], costs, i in parts)) * plan.num_micro_batches(i) for i in own]
    sums_us, exposed_us, exchanged_us = map(float, np.sum(sums, axis=0))
    return StepCost(
        plan=cost_key(plan),
        prices=prices,
        step_us=ends[-1],
        compute_us=busy_us - exposed_us - exchanged_us,
        bubble_us=max(ends[-1] - busy_us - message_us - reduce_us - gather_us - optimizer_us, 0.0),
        message_us=message_us,
        collectives=(
            _collective(REDUCTIONS, reduce_us, timeline, EventKind.REDUCE),
            _collective(GATHERS, gather_us, timeline, EventKind.GATHER),
            CollectiveTime(kind=TENSOR_SUMS, total_us=sums_us, exposed_us=exposed_us),
            *(
                [CollectiveTime(kind=EXCHANGES, total_us=exchanged_us, exposed_us=exchanged_us)]
                if exchanged_us
                else []
            ),
        ),
        optimizer_us=optimizer_us,
        start_up_us=start_up_us(timeline) if windows is None else max(windows.fill_us, 0.0),
        drain_us=0.0 if windows is None else max(windows.drain_us, 0.0),
        stage_us=stage_us,
        ranks=bytes_by_rank(plan),
    )


def play_step(plan: PipelinePlan, prices: StepPrices) -> Timeline | AsyncPrediction:
    """Return the timeline that the costs of a plan's step are read off; of mode async that of its windows."""
    updates = {index: us for index, us in enumerate(prices.update_us) if us > 0.0}
    reductions = prices.reductions or Reductions(stages=(StageReductions(),) * len(plan.stages))
    if plan.mode == "sync":
        return simulate_step(plan, cluster=prices.cluster, reductions=reductions, step_us=updates)
    # in windows of one micro-batch, what follows each backward
    once = dataclasses.replace(plan, mini_batch=plan.stages[0].micro_batch_size)
    each = {index: us + updates.get(index, 0.0) for index, us in total_times(once, reductions).items()}
    return simulate_windows(plan, cluster=prices.cluster, update_us=each)


def prices_on(plan: PipelinePlan, cluster: Cluster | None) -> StepPrices:
    """Return what a plan is simulated with on a cluster; None: on its own.

    Of a plan without costs only messages, and gathers of parameters, are known to take time.
    """
    own = StepPrices() if plan.cost is None else plan.cost.prices
    if cluster is None or cluster == own.cluster:
        return own
    gathers = gather_times(plan, cluster)
    if own.cluster is None or own.reductions is None:
        free = Reductions(stages=(StageReductions(),) * len(plan.stages))
        return StepPrices(cluster=cluster, reductions=free.with_gathers(gathers))
    # what is sent is the same: a sum takes as much longer as one of the stage's gradients does
    before = own.cluster

    def longer(num_bytes: int, ranks: Sequence[int], beside: Sequence[int]) -> float:
        here, there = (
            collectives(each, ranks, beside).reduction(plan.zero_stage).us(num_bytes)
            for each in (before, cluster)
        )
        return float(there / here) if here > 0 else 1.0

    bucket = EARLY_BUCKET_ELEMENTS * element_bytes(before.devices[0].dtype)
    stages, updates = [], []
    for index, (stage, each) in enumerate(zip(plan.stages, own.reductions.stages, strict=True)):
        sizes = stage.gradient_bytes, min(bucket, stage.gradient_bytes)
        factor, early = (longer(size, stage.replicas(0), stage.ranks) for size in sizes)
        stages.append(each.times(factor, early, gather_us=gathers.get(index, 0.0)))
        old, new = (min(on.devices[r].memory_bytes_per_s for r in stage.ranks) for on in (before, cluster))
        updates.append(own.update_us[index] * old / new)
    tied = []
    for holders, us in own.reductions.tied:
        ranks = [rank for index in holders for rank in plan.stages[index].ranks]
        tied.append((holders, us * longer(min(plan.stages[i].gradient_bytes for i in holders), ranks, ranks)))
    reductions = Reductions(stages=tuple(stages), tied=tuple(tied))
    return StepPrices(cluster=cluster, reductions=reductions, update_us=tuple(updates))


def _prices(plan: PipelinePlan, costs: CostModel) -> StepPrices:
    cluster = dataclasses.replace(costs.cluster, devices=costs.cluster.devices[: plan.num_ranks])
    updates = tuple(update_times(plan, costs).values())
    return StepPrices(cluster=cluster, reductions=costs.reductions(plan), update_us=updates)


def _step_us(plan: PipelinePlan, prices: StepPrices) -> float:
    played = play_step(plan, prices)
    return played.iteration_us if isinstance(played, Timeline) else played.steady_us


def _stage_times(plan: PipelinePlan, timeline: Timeline, num_steps: int) -> tuple[float, ...]:
    """Return by stage what its first rank computes of it in one of the steps of a timeline."""
    times = [0.0] * len(plan.stages)
    for event in timeline.events:
        if event.kind in COMPUTE_KINDS and event.rank == plan.stages[event.stage].ranks[0]:
            times[event.stage] += (event.end_us - event.start_us) / num_steps
    return tuple(times)


def _collective(kind: str, exposed_us: float, timeline: Timeline, event: EventKind) -> CollectiveTime:
    """Return the costs of a kind of collectives, of the rank with most of them in a timeline."""
    spent: dict[int, float] = defaultdict(float)
    for each in timeline.events:
        if each.kind is event:
            spent[each.rank] += each.end_us - each.start_us
    return CollectiveTime(kind=kind, total_us=max(exposed_us, *spent.values(), 0.0), exposed_us=exposed_us)


def _sum_us(stage: Stage, costs: CostModel, is_split: bool) -> tuple[float, float, float]:
    """Return the microseconds of tensor sums in a forward and a backward, what tasks wait for, and of exchanges.

    Args:
        is_split: its backwards run in two parts, and sum in the first one.
    """
    own, local, rows = costs.on(stage), stage.local_batch_size, costs.indices(stage.blocks)
    total = float(np.add(*own.tensor_sums(local))[rows].sum())
    hidden = [own.hidden_sums(local, kind)[rows].sum() for kind in own.kinds_of(stage.ranks) or (None,)]
    exchanged = float(np.add(*own.context_sums(local))[rows].sum())
    return total, total if is_split else total - float(min(hidden)), exchanged
