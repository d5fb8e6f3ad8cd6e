"""From a plan to the micro-batches each stage holds, and to its task order, made by the schedule that the stage names.

In-flight counts are counted from the sink. A stage takes the most that any successor needs; how many that is for one
pair of stages, x that feeds y, is GraphPipe's Table 2 (Table 3.2 of the thesis is the same). Symbols: ``b`` samples a
micro-batch, ``k`` of kFkB, ``i`` samples in flight.

Deviations from the paper:

- The result is rounded up to a multiple of ``b_x`` (thesis, Figure 3.5: 7 samples are 4 micro-batches of 2).
- Table 2 is for groups ``k b`` that are multiples of one another. For others (4F4B before 5F5B) its
  result can be too small for x ever to run its first backward; the least number that cannot stop
  the pair, found from both orders of tasks, is a lower bound here.
- The table assumes balanced stages and no latency; the simulator has the last word on time.
- Edges without gradients count like the others. Less would do for a pair of stages, but where a frozen
  stage sends to two branches that join again it could stop all three; this way every order of a graph with
  gradients everywhere is also one of this graph.

Source: GraphPipe (arXiv 2406.17145), section 6, Table 2, and appendix A.1
Tests: tests/schedule/test_in_flight.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from gpp_plugin.errors import ScheduleError
from gpp_plugin.ir.plan import PipelinePlan, Stage, sinks_first
from gpp_plugin.ir.plan import forward_only_stages as stages_without_backwards
from gpp_plugin.ir.schedule import StageSchedule
from gpp_plugin.plugins import SCHEDULES, find_schedule
from gpp_plugin.schedule.checks.order_check import check_divisibility
from gpp_plugin.schedule.orders.gpipe import forward_only_schedule
from gpp_plugin.schedule.orders.interleaved import interleaved_schedules
from gpp_plugin.schedule.orders.slicer import halve_forwards


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


def compute_in_flight(*, k_x: int, b_x: int, k_y: int, b_y: int, i_y: int) -> int:
    """Return the samples stage x holds so that its successor y never waits for it (Table 2).

    Args:
        k_x, k_y: the k of each stage's kFkB; 1 is 1F1B.
        b_x, b_y: samples a micro-batch.
        i_y: samples in flight in y.

    Raises:
        ValueError: an argument is below 1.

    >>> compute_in_flight(k_x=1, b_x=1, k_y=1, b_y=2, i_y=8)
    10
    """
    if min(k_x, b_x, k_y, b_y, i_y) < 1:
        raise ValueError(f"k, b and i must be positive: k_x={k_x} b_x={b_x} k_y={k_y} b_y={b_y} i_y={i_y}")
    samples = max(
        _table_2(k_x=k_x, b_x=b_x, k_y=k_y, b_y=b_y, i_y=i_y),
        least_samples(k_x=k_x, b_x=b_x, k_y=k_y, b_y=b_y, i_y=i_y),
    )
    return -(-samples // b_x) * b_x


def _table_2(*, k_x: int, b_x: int, k_y: int, b_y: int, i_y: int) -> int:
    x, y, larger = k_x * b_x, k_y * b_y, max(b_x, b_y)
    if x < y and larger < x:  # row 1
        return i_y + 2 * larger
    if x < y and larger == x:  # row 2
        return i_y + larger
    if x < y:  # row 9: b_x <= x < b_y <= y
        return i_y + b_y
    if x == y:  # rows 7 and 8
        return i_y + y if larger == y else i_y + 2 * larger
    if y < larger:  # row 10: b_y <= y < b_x <= x
        return i_y + x - y + b_x
    if y == larger:  # rows 4 and 6
        return i_y + x
    return i_y + x - y + 2 * larger  # rows 3 and 5


def least_samples(*, k_x: int, b_x: int, k_y: int, b_y: int, i_y: int) -> int:
    """Return the fewest samples x must hold for the pair not to stop, whatever the times.

    Before its backward of micro-batch i, x has run ``held_x + (i // k_x) k_x`` forwards. The backward
    waits for y's backward of the same samples, before which y has run ``held_y + (j // k_y) k_y``
    forwards, all fed by x. The difference repeats after a common multiple of both groups.
    """
    # An example: 4F4B before 5F5B, one sample a micro-batch, y holding 5. To end x's first group of backwards (i = 3)
    # y must have run its backward 3, in its own first group, before which it ran 5 forwards: x must have sent 5. x's
    # second group (i = 7) needs y's second group: 5 + 5 forwards, of which x has made 4 between its groups, so 6. The
    # third (i = 11) needs 5 + 10 - 8 = 7, the fourth (i = 15) 5 + 15 - 12 = 8, the fifth (i = 19) 5 + 15 - 16 = 4;
    # after 20 micro-batches, a multiple of both groups, it repeats. So x holds at least 8, where the table says less.
    x, y = k_x * b_x, k_y * b_y
    least = 0
    for group in range(math.lcm(x, y) // x):
        last = (group + 1) * k_x - 1  # the last backward of a group waits for most and has no more forwards
        j = -(-(last + 1) * b_x // b_y) - 1
        least = max(least, i_y + (j // k_y) * y - group * x)
    return least


def build_schedules(
    plan: PipelinePlan, *, forward_only_stages: frozenset[int] | None = None
) -> tuple[StageSchedule, ...]:
    """Return the task order of every stage, from its ``schedule``, ``k`` and ``in_flight``.

    Args:
        forward_only_stages: indices of stages that run no backwards; None: those of the plan through which no gradient
            flows (`ir.plan.forward_only_stages`), as in training.

    Raises:
        ScheduleError: a schedule is unknown, or does not fit the stage's ``in_flight``.
        PlanError: micro-batches do not divide the mini-batch, ranks do not divide a micro-batch, or the
            stages depend on each other in a circle.
    """
    # From the sinks, because a greedy order is made against the orders of the stages behind. Zero bubble orders its
    # stages together, so they have 1F1B until all others are known; stages that share ranks take turns; halves are
    # laid over whatever order came out.
    built: dict[int, StageSchedule] = {}
    if forward_only_stages is None:
        forward_only_stages = stages_without_backwards(plan)
    for index in sinks_first(plan):
        if index in forward_only_stages:
            held = _checked_stage(plan, index).in_flight
            built[index] = forward_only_schedule(index, plan.num_micro_batches(index), num_in_flight=held)
        else:
            built[index] = build_stage_schedule(plan, index, built)
    trained = [index for index in range(len(plan.stages)) if index not in forward_only_stages]
    for name in dict.fromkeys(plan.stages[index].schedule for index in trained):
        own = [index for index in trained if plan.stages[index].schedule == name]
        try:
            built.update(find_schedule(name).together(plan, own, built))
        except ValueError as error:
            raise ScheduleError(str(error)) from error
    if plan.shares_ranks:
        built = interleaved_schedules(plan, built)
    return with_slices(plan, [built[index] for index in range(len(plan.stages))])


def with_slices(plan: PipelinePlan, schedules: Sequence[StageSchedule]) -> tuple[StageSchedule, ...]:
    """Return ``schedules``, all of whole forwards, with the first forwards of each stage in halves as the plan says.

    Raises:
        ScheduleError: a stage's samples cannot be halved.
    """
    sliced = list(schedules)
    for number, stage in enumerate(plan.stages):
        count, samples = stage.num_sliced, stage.local_batch_size
        if count < 0 or (count and samples % 2):
            raise ScheduleError(
                f"stage {stage.name!r}: num_sliced is {count} with {samples} samples a rank; "
                "only even numbers of samples run in halves: set it to 0"
            )
        if count:
            sliced[number] = halve_forwards(schedules[number], count, joins_last=stage.joins_last_slice)
    return tuple(sliced)


def build_stage_schedule(
    plan: PipelinePlan, index: int, behind: Mapping[int, StageSchedule]
) -> StageSchedule:
    """Return the order of one stage without halves, from the schedules of at least all stages behind it.

    Raises:
        ScheduleError: its schedule is unknown, or does not fit its ``in_flight``.
        PlanError: micro-batches do not divide the mini-batch, or ranks a micro-batch.
    """
    stage = _checked_stage(plan, index)
    if stage.schedule not in SCHEDULES:
        raise ScheduleError(
            f"stage {stage.name!r}: no schedule {stage.schedule!r}; the schedules are {sorted(SCHEDULES.names())}"
        )
    try:
        return find_schedule(stage.schedule).order(plan, index, behind)
    except ValueError as error:
        raise ScheduleError(f"stage {stage.name!r}: {error}") from error


def _checked_stage(plan: PipelinePlan, index: int) -> Stage:
    check_divisibility(plan, index)
    stage = plan.stages[index]
    if stage.in_flight < 1:
        raise ScheduleError(f"stage {stage.name!r}: in_flight is {stage.in_flight}; at least 1 is needed")
    return stage


def forward_schedules(plan: PipelinePlan) -> tuple[StageSchedule, ...]:
    """Return the order of every stage in evaluation: forwards only.

    Nothing is saved for a backward there, so `Stage.in_flight` has no meaning; a stage runs in front of
    its consumers as far as 1F1B would if gradients came back over every edge, which cannot stop.

    Raises:
        PlanError: micro-batches do not divide the mini-batch, or ranks a micro-batch.
    """
    samples = [0] * len(plan.stages)
    schedules: dict[int, StageSchedule] = {}
    for index in sinks_first(plan):
        check_divisibility(plan, index)
        size = plan.stages[index].micro_batch_size
        wanted = [
            compute_in_flight(
                k_x=1, b_x=size, k_y=1, b_y=plan.stages[edge.dst].micro_batch_size, i_y=samples[edge.dst]
            )
            for edge in plan.edges
            if edge.src == index
        ]
        samples[index] = min(max([size, *wanted]), plan.mini_batch)
        schedules[index] = forward_only_schedule(
            index, plan.num_micro_batches(index), num_in_flight=samples[index] // size
        )
    return tuple(schedules[index] for index in range(len(plan.stages)))
