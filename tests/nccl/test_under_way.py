"""What messages hold on their way is what plans predict: counted as the recorded runtime runs each plan.

On a recorded rank no transfer is ever done before it is waited for, as on a device whose host runs far ahead of it: the
most that may be held is held.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from unittest import mock

import pytest

from gpp_benchmarks._random_plans import FAMILIES, random_draw
from gpp_plugin.ir.plan import PipelinePlan, forward_only_stages
from gpp_plugin.plan.costs.memory_formula import messages_held, plan_beside_messages, with_breakdown
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.runtime.messages.mailbox import Mailbox
from tests.nccl.coverage_counts import Tell
from tests.nccl.recording import Run, made_up_specs, record_job
from tests.plan.test_dawnpiper import BOTH, tight_request
from tests.schedule.test_async import random_async_plan, shared_async_plan
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


def counted(run: Run) -> dict[int, int]:
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
        record_job(run)
    return found


@pytest.mark.parametrize("first", some(range(0, 60, 12), every=3))
def test_what_random_plans_hold_is_predicted(first: int, tell: Tell) -> None:
    """Under all families of schedules, with several stages on a rank, and tensor ranks that cut what they send."""
    compared = 0
    for seed in some(range(3000 + first, 3012 + first), every=2):
        family = FAMILIES[seed % len(FAMILIES)]
        draw = random_draw(seed, family, most_ranks=8, shares_ranks=seed % 4 == 1)
        plan = as_made_up(draw.plan)
        if forward_only_stages(plan) != draw.forward_only:
            continue  # drawn as well: its times say otherwise
        predicted = messages_held(plan)
        for stage, found in counted(Run(plan=plan, forward_only=draw.forward_only)).items():
            assert found == predicted[stage], (seed, stage)
            compared += found > 0
    tell({"stages": compared})
    assert compared


@pytest.mark.parametrize("make", [random_async_plan, shared_async_plan])
def test_what_windows_hold_is_predicted(make: Callable[[random.Random], PipelinePlan], tell: Tell) -> None:
    """What a window leaves to the next one is held there too: sends that nobody has waited for, gradients not read yet."""
    beyond_alone = 0
    for seed in some(range(14), every=3):
        plan = as_made_up(make(random.Random(seed)))
        frozen = forward_only_stages(plan)
        if any(edge.gradient_tensors and edge.dst in frozen for edge in plan.edges):
            continue  # drawn as well: no loss sends those gradients
        predicted = messages_held(plan)
        deepest = max(stage.in_flight for stage in plan.stages)
        assert counted(Run(plan=plan, forward_only=frozen, steps=deepest)) == dict(enumerate(predicted)), seed
        alone = messages_held(dataclasses.replace(plan, mode="sync"))
        beyond_alone += sum(own > other for own, other in zip(predicted, alone, strict=True))
    tell({"stages that hold more than a mini-batch by itself": beyond_alone})
    assert beyond_alone


def test_a_plan_without_room_for_messages_is_made_again_with_less() -> None:
    request = tight_request(mode="sync", memory_optimization=BOTH)
    asked: list[int | None] = []

    def make(one: PlanRequest) -> PipelinePlan:
        asked.append(one.memory_limit_bytes)
        return make_plan("dawnpiper", one)

    plan = plan_beside_messages(request, make)
    parts = with_breakdown(plan, request).memory
    limits = [min(request.rank_limits[rank] for rank in stage.ranks) for stage in plan.stages]
    fits = all(part.total + part.messages <= limit for part, limit in zip(parts, limits, strict=True))
    assert len(asked) > 1 and all(later < request.rank_limits[0] for later in asked[1:] if later is not None)
    assert fits or "messages on their way may take" in plan.notes[-1]
