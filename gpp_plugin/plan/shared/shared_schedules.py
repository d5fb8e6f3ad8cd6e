"""The schedule of a plan whose ranks hold several stages: the one the user names, or the shortest in simulation.

Stages keep orders of their own, as on ranks of their own; in what turns a rank runs the tasks of its stages is found
for each candidate (`schedule.shared_ranks`). Forwards are not run in halves there.

Source: this project
Tests: tests/plan/test_shared_ranks_plans.py
"""

from __future__ import annotations

from collections.abc import Iterator

from gpp_plugin.errors import PlanInfeasible
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.plan.choose_schedule import GAIN, SPLIT_GAIN
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.costs.part_times import knows_split_times, with_part_times
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.plan.search_report import SearchReport
from gpp_plugin.plan.shared.shared_judge import BUDGET, SharedJudge, under
from gpp_plugin.plan.split_backwards import without_memory_plans
from gpp_plugin.schedule.names import AUTO, KFKB

SPLIT = "zero_bubble"


def schedule_shared(
    plan: PipelinePlan,
    request: PlanRequest,
    *,
    schedule: str = AUTO,
    budget: int = BUDGET,
    report: SearchReport | None = None,
) -> PipelinePlan:
    """Return ``plan``, whose ranks hold several stages, under a schedule, with in-flight counts that fit.

    A plan that swaps or recomputes stays, or runs zero bubble, fitted anew.

    Args:
        budget: tasks of the simulations, after which no further schedule is tried; ``report`` is told.

    Raises:
        PlanInfeasible: nothing that the name stands for fits the ranks' memory and can run.
    """
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    judge = SharedJudge(request, costs, schedule=first_schedule(schedule), budget=budget, report=report)
    is_fitted = any(stage.memory is not None for stage in plan.stages)
    # what swaps or recomputes does so for its order: that stays, or backwards are split and it is fitted anew
    best: PipelinePlan | None = plan if is_fitted and schedule == AUTO else None
    plain = without_memory_plans(plan, costs) if is_fitted else plan
    for name, gain in _names(request, schedule):
        if is_fitted and name != SPLIT:
            continue
        if best is not None and judge.is_spent():
            break
        found = judge.best_counts(under(with_part_times(plain, costs), name, costs))
        if found is not None and (best is None or found.iteration_us < best.iteration_us * (1.0 - gain)):
            best = found
    if best is None:
        rank = max(range(plan.num_ranks), key=lambda rank: len(plan.stages_of_rank(rank)))
        held = ", ".join(plan.stages[i].name for i in plan.stages_of_rank(rank))
        raise PlanInfeasible(
            f"no order of schedule {schedule!r} fits and runs with several stages on a rank (rank {rank} holds "
            f"{held}); use 1f1b, lower micro_batch_sizes, or give stages ranks of their own"
        )
    return best


def _names(request: PlanRequest, schedule: str) -> Iterator[tuple[str, float]]:
    """Yield the schedules to try, and by what part each must be shorter than those before it."""
    if schedule != AUTO:
        yield first_schedule(schedule), 0.0
        return
    yield "1f1b", 0.0
    yield "gpipe", GAIN
    if knows_split_times(request.profile):
        yield SPLIT, SPLIT_GAIN


def first_schedule(schedule: str) -> str:
    """Return the schedule that stages are chosen for, where the user's name stands for several."""
    return {AUTO: "1f1b", KFKB: "2f2b"}.get(schedule, schedule)
