"""How many micro-batches each stage holds between forward and backward, counted from the sink.

Source: GraphPipe, section 6 and appendix A.1, Table 2 (thesis: Table 3.2). Symbols: stage x feeds stage
y; ``b`` samples a micro-batch, ``k`` of kFkB, ``i`` samples in flight.

Deviations from the paper:

- The result is rounded up to a multiple of ``b_x`` (thesis, Figure 3.5: 7 samples are 4 micro-batches of 2).
- Table 2 is for groups ``k b`` that are multiples of one another. For others (4F4B before 5F5B) its
  result can be too small for x ever to run its first backward; the least number that cannot stop
  the pair, found from both orders of tasks, is a lower bound here.
- The table assumes balanced stages and no latency; the simulator has the last word on time.
- Over an edge without gradients x does not wait for y's backwards, only keeps y fed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.ir.schedule import StageSchedule
from gpp_plugin.schedule.build import build_stage_schedule
from gpp_plugin.schedule.greedy import greedy_schedule
from gpp_plugin.schedule.messages import check_divisibility
from gpp_plugin.schedule.stage_order import sinks_first, stages_behind


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
        _least_samples(k_x=k_x, b_x=b_x, k_y=k_y, b_y=b_y, i_y=i_y),
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


def _least_samples(*, k_x: int, b_x: int, k_y: int, b_y: int, i_y: int) -> int:
    """Return the fewest samples x must hold for the pair not to stop, whatever the times.

    Before its backward of micro-batch i, x has run ``held_x + (i // k_x) k_x`` forwards. The backward
    waits for y's backward of the same samples, before which y has run ``held_y + (j // k_y) k_y``
    forwards, all fed by x. The difference repeats after a common multiple of both groups.
    """
    x, y = k_x * b_x, k_y * b_y
    least = 0
    for group in range(math.lcm(x, y) // x):
        last = (group + 1) * k_x - 1  # the last backward of a group waits for most and has no more forwards
        j = -(-(last + 1) * b_x // b_y) - 1
        least = max(least, i_y + (j // k_y) * y - group * x)
    return least


def plan_in_flight(plan: PipelinePlan) -> tuple[int, ...]:
    """Return for each stage the micro-batches it holds, from the sinks back to the sources.

    A stage takes the most that any of its successors asks for, at most all micro-batches; a GPipe
    stage holds all, a greedy one what its order comes to. A stage that gets no gradients (a frozen
    one) holds a micro-batch until its consumers have run on it, and needs only enough to keep them fed.

    Raises:
        PlanError: micro-batches do not divide the mini-batch, or the stages depend on each other in a circle.
    """
    samples = [0] * len(plan.stages)
    outgoing: list[list[tuple[int, bool]]] = [[] for _ in plan.stages]
    for edge in plan.edges:
        outgoing[edge.src].append((edge.dst, bool(edge.gradient_tensors)))
    counts = [0] * len(plan.stages)
    behind = stages_behind(plan)
    is_simulated = any(stage.schedule == "greedy" for stage in plan.stages)
    schedules: dict[int, StageSchedule] = {}
    for index in sinks_first(plan):
        stage = plan.stages[index]
        check_divisibility(plan, index)
        asked = _needs_of(plan, index, outgoing[index], samples, behind)
        if stage.schedule == "gpipe":
            needed = plan.mini_batch
        elif stage.schedule == "greedy":
            held = greedy_schedule(plan, index, schedules).num_in_flight * stage.micro_batch_size
            # Its order is made for successors that send gradients; the others must be fed in forwards alone.
            fed = [ask for ask, (_, flows) in zip(asked, outgoing[index], strict=True) if not flows]
            needed = max([held, *fed])
        else:
            needed = max([stage.k * stage.micro_batch_size, *asked])
        counts[index] = min(-(-needed // stage.micro_batch_size), plan.num_micro_batches(index))
        samples[index] = counts[index] * stage.micro_batch_size
        if is_simulated:
            stages = list(plan.stages)
            stages[index] = dataclasses.replace(stage, in_flight=counts[index])
            plan = dataclasses.replace(plan, stages=tuple(stages))
            schedules[index] = build_stage_schedule(plan, index, schedules)
    return tuple(counts)


def _needs_of(
    plan: PipelinePlan,
    index: int,
    outgoing: Sequence[tuple[int, bool]],
    samples: Sequence[int],
    behind: Sequence[set[int]],
) -> list[int]:
    """Return the samples that each successor asks of a stage."""
    stage = plan.stages[index]
    has_gradients = any(flows for _, flows in outgoing)
    needs = []
    for other, flows in outgoing:
        successor = plan.stages[other]
        # A frozen stage with a consumer behind another consumer holds its output while the samples
        # travel between the two: as long as if it waited for their backward, to be safe.
        is_behind = any(other in behind[first] for first, _ in outgoing)
        if flows or (is_behind and not has_gradients):
            needs.append(_ask(stage, successor, k_x=stage.k, k_y=successor.k, i_y=samples[other]))
        else:
            needs.append(_ask(stage, successor, k_x=1, k_y=1, i_y=successor.micro_batch_size))
    return needs


def _ask(stage: Stage, successor: Stage, *, k_x: int, k_y: int, i_y: int) -> int:
    return compute_in_flight(
        k_x=k_x, b_x=stage.micro_batch_size, k_y=k_y, b_y=successor.micro_batch_size, i_y=i_y
    )
