"""What messages hold on their way is what plans predict: counted as the recorded runtime runs each plan.

On a recorded rank no transfer is ever done before it is waited for, as on a device whose host runs far ahead of it: the
most that may be held is held.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from unittest import mock

import pytest

from gpp_benchmarks._random_plans import random_draw
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.plan.costs.memory_formula import memory_breakdown, plan_beside_messages
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.plan.request import PlanRequest, rank_limit
from gpp_plugin.runtime.messages.mailbox import Mailbox
from gpp_plugin.schedule.messages import under_way_bytes
from tests.nccl.coverage_counts import Tell
from tests.nccl.recording import Run, made_up_specs, record_job
from tests.plan.test_dawnpiper import BOTH, tight_request
from tests.schedule.plans import chain_plan, simple_plan
from tests.tiers import some


def as_made_up(plan: PipelinePlan) -> PipelinePlan:
    """Return the plan with the bytes of the tensors that recorded ranks send."""
    specs = made_up_specs(plan)

    def of(names: tuple[str, ...]) -> float:
        return float(sum(math.prod(specs[name].shape) * 4 for name in names))

    edges = tuple(
        dataclasses.replace(
            edge,
            bytes_per_sample=of(edge.batch_tensors),
            bytes_fixed=of(edge.whole_tensors),
            gradient_bytes_per_sample=of(tuple(set(edge.batch_tensors) & set(edge.gradient_tensors))),
            gradient_bytes_fixed=of(tuple(set(edge.whole_tensors) & set(edge.gradient_tensors))),
        )
        for edge in plan.edges
    )
    return dataclasses.replace(plan, edges=edges)


def counted(plan: PipelinePlan) -> dict[int, int]:
    """Return by stage the most that messages of one of its ranks held."""
    found: dict[int, int] = {}
    clear = Mailbox.clear

    def note(self: Mailbox) -> None:
        stage = self._program_stage
        found[stage] = max(found.get(stage, 0), self.most_bytes)
        clear(self)

    init = Mailbox.__init__

    def remember(self: Mailbox, *args: object, **given: object) -> None:
        self._program_stage = given["program"].stage  # type: ignore[attr-defined]
        init(self, *args, **given)  # type: ignore[arg-type]

    with mock.patch.multiple(Mailbox, clear=note, __init__=remember):
        record_job(Run(plan=plan))
    return found


@pytest.mark.parametrize(
    "plan", [chain_plan(4, 12), chain_plan(2, 8), simple_plan([1, 1, 1], [(0, 2), (1, 2)], mini_batch=8)]
)
def test_what_chains_and_branches_hold_is_predicted(plan: PipelinePlan) -> None:
    wide = as_made_up(plan)
    largest = max(math.prod(spec.shape) * 4 for spec in made_up_specs(plan).values())
    for stage, found in counted(wide).items():
        assert found <= under_way_bytes(wide, stage) <= found + largest


def test_random_plans_hold_about_what_is_predicted(tell: Tell) -> None:
    """Receives that the one order of all ranks puts ahead of several tasks are in no closed form."""
    ratios = []
    for seed in some(range(3000, 3020), every=3):
        plan = as_made_up(random_draw(seed, most_ranks=8).plan)
        ratios += [found / under_way_bytes(plan, stage) for stage, found in counted(plan).items() if found]
    tell({"counted over predicted": round(statistics.median(ratios), 2), "most": round(max(ratios), 2)})
    assert 0.6 <= statistics.median(ratios) <= 1.0 and max(ratios) < 2.5


def test_a_plan_without_room_for_messages_is_made_again_with_less() -> None:
    request = tight_request(mode="sync", memory_optimization=BOTH)
    asked: list[int | None] = []

    def make(one: PlanRequest) -> PipelinePlan:
        asked.append(one.memory_limit_bytes)
        return make_plan("dawnpiper", one)

    plan = plan_beside_messages(request, make)
    parts = memory_breakdown(plan, request.profile, graph=request.graph, zero_stage=request.zero_stage)
    limits = [min(rank_limit(request, rank) for rank in stage.ranks) for stage in plan.stages]
    fits = all(part.total + part.messages <= limit for part, limit in zip(parts, limits, strict=True))
    assert len(asked) > 1 and all(later < rank_limit(request, 0) for later in asked[1:] if later is not None)
    assert fits or "messages on their way may take" in plan.notes[-1]
