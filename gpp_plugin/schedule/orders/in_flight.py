"""How many micro-batches each stage holds between forward and backward, counted from the sink.

`table_2` has the number for one pair of stages. A stage takes the most that any successor needs.

Edges without gradients count like the others. Less would do for a pair of stages, but where a frozen
stage sends to two branches that join again it could stop all three; this way every order of a graph with
gradients everywhere is also one of this graph.

Source: GraphPipe (arXiv 2406.17145), section 6, Table 2, and appendix A.1
Tests: tests/schedule/test_in_flight.py
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.schedule import StageSchedule
from gpp_plugin.plugins import find_schedule
from gpp_plugin.schedule.build import build_stage_schedule
from gpp_plugin.schedule.messages import check_divisibility
from gpp_plugin.schedule.orders.stage_order import sinks_first
from gpp_plugin.schedule.orders.table_2 import compute_in_flight


def plan_in_flight(plan: PipelinePlan) -> tuple[int, ...]:
    """Return for each stage the micro-batches it holds, from the sinks back to the sources.

    A stage takes the most that any of its successors needs, at most all micro-batches; one whose schedule
    holds all of them (GPipe) takes all, one whose order is known beforehand (greedy) what that comes to.

    Raises:
        PlanError: micro-batches do not divide the mini-batch, or the stages depend on each other in a circle.
    """
    # Why from the sinks: a sink runs its backward right after its forward, so it holds one micro-batch. The stage
    # before it needs that one and one more under way, and so on. On a graph with a short branch, of equal sizes:
    #
    #     a 4 ─► b 3 ─► c 2 ─► loss 1
    #                   s 2 ─────┘
    #
    # Counted from the source s would hold 4, as the other stage without predecessors does; it feeds the loss alone,
    # so it runs F0 F1 B0 F2 B1 ... and what it sends is taken at once.
    samples = [0] * len(plan.stages)
    outgoing: list[list[int]] = [[] for _ in plan.stages]
    for edge in plan.edges:
        outgoing[edge.src].append(edge.dst)
    counts = [0] * len(plan.stages)
    behind = _OrdersBehind(plan)
    for index in sinks_first(plan):
        stage = plan.stages[index]
        check_divisibility(plan, index)
        schedule = find_schedule(stage.schedule)
        free = None if schedule.holds_all else schedule.free_order(plan, index, behind)
        if schedule.holds_all:
            needed = plan.mini_batch
        elif free is not None:
            needed = free.num_in_flight * stage.micro_batch_size
        else:
            needed = stage.k * stage.micro_batch_size
            for other in outgoing[index]:
                size, k_y, b_y = (
                    stage.micro_batch_size,
                    plan.stages[other].k,
                    plan.stages[other].micro_batch_size,
                )
                wanted = compute_in_flight(k_x=stage.k, b_x=size, k_y=k_y, b_y=b_y, i_y=samples[other])
                needed = max(needed, wanted)
        counts[index] = min(-(-needed // stage.micro_batch_size), plan.num_micro_batches(index))
        samples[index] = counts[index] * stage.micro_batch_size
        behind.settle(index, counts[index], free)
    return tuple(counts)


def with_schedule(plan: PipelinePlan, schedule: str, k: int) -> PipelinePlan:
    """Return the plan with one schedule on all stages, and k or a stage's number of micro-batches if that is less."""
    # 4f4b on stages of 8 and of 2 micro-batches: 4f4b and 2f2b
    counts = [plan.num_micro_batches(index) for index in range(len(plan.stages))]
    return plan.with_each(schedule=[schedule] * len(counts), k=[min(k, count) for count in counts])


class _OrdersBehind(Mapping[int, StageSchedule]):
    """The orders of stages whose in-flight counts are known, made when they are first read: few schedules do."""

    def __init__(self, plan: PipelinePlan) -> None:
        self._plan = plan
        self._counts: dict[int, int] = {}
        self._orders: dict[int, StageSchedule] = {}

    def settle(self, index: int, count: int, order: StageSchedule | None) -> None:
        """Add a stage that holds ``count`` micro-batches, with its order where that is known already."""
        self._counts[index] = count
        if order is not None:
            self._orders[index] = order

    def __getitem__(self, index: int) -> StageSchedule:
        if index not in self._counts:
            raise KeyError(index)
        if index not in self._orders:
            counts = [self._counts.get(i, stage.in_flight) for i, stage in enumerate(self._plan.stages)]
            settled = self._plan.with_each(in_flight=counts)
            self._orders[index] = build_stage_schedule(settled, index, self)
        return self._orders[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._counts)

    def __len__(self) -> int:
        return len(self._counts)


def in_flight_from_source(plan: PipelinePlan) -> tuple[int, ...]:
    """Return what each stage would hold if its warm-up were counted from the sources, to compare with.

    So does Megatron-LM where it pipelines several modules: a stage at depth d of a graph of depth p warms up
    with p - d micro-batches, however near the sink it is. A short branch then holds as much as the longest
    one; `plan_in_flight` gives it what its successors need. Where micro-batches differ, all but one of a
    stage's are taken to be of the largest.
    """
    order = plan.digraph()
    depth = [0] * len(plan.stages)
    for index in reversed(sinks_first(plan)):
        depth[index] = max((depth[other] + 1 for other in order.predecessors(index)), default=0)
    largest = max(stage.micro_batch_size for stage in plan.stages)
    behind = [plan.depth - d - 1 for d in depth]
    return tuple(
        min(1 - (-behind[i] * largest // stage.micro_batch_size), plan.num_micro_batches(i))
        for i, stage in enumerate(plan.stages)
    )
