"""How many micro-batches each stage holds between forward and backward, counted from the sink.

Source: GraphPipe, section 6 and appendix A.1; `table_2` has the number for one pair of stages. A
stage takes the most that any successor asks for. Beyond the paper: over an edge without gradients
a stage does not wait for the successor's backwards, it only keeps the successor fed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.ir.schedule import StageSchedule
from gpp_plugin.schedule.build import build_stage_schedule
from gpp_plugin.schedule.greedy import greedy_schedule
from gpp_plugin.schedule.messages import check_divisibility
from gpp_plugin.schedule.stage_order import sinks_first, stages_behind
from gpp_plugin.schedule.table_2 import compute_in_flight

__all__ = ["compute_in_flight", "plan_in_flight"]


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
