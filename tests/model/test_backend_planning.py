"""Stages cut again with what they take on backends: exact costs, never worse by the simulator, once."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping

import pytest

from gpp_plugin.commands.report_command import ReportedPlan, report_page
from gpp_plugin.ir.plan import PipelinePlan, forward_only_stages
from gpp_plugin.ir.profile import PlacedGroup, StageBackend
from gpp_plugin.ir.serialize import dumps, loads
from gpp_plugin.model.backend_planning import blocks_without_gradients, plan_with_backends
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.costs.estimate import evaluate_us
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.report.chrome_trace import chrome_trace
from gpp_plugin.report.plan_text import format_plan
from gpp_plugin.report.timeline_chart import format_timeline
from gpp_plugin.simulate.predict import simulate_plan
from tests.plan.graphs import chain, make_profile, make_request

TOWER = [f"layers.{i}" for i in range(4)]


def request_of(*, tower_us: float = 300.0) -> PlanRequest:
    """Return a chain on four ranks: four blocks that no gradient passes, then four that train."""
    graph = chain(8)
    tensors = {
        name: dataclasses.replace(spec, requires_grad=name.partition(":")[0] not in TOWER)
        for name, spec in graph.tensors.items()
    }
    graph = dataclasses.replace(graph, tensors=tensors, loss_block="layers.7")
    profile = make_profile(graph, {f"layers.{i}": tower_us if i < 4 else 50.0 for i in range(8)})
    costs = [
        dataclasses.replace(cost, backward_us=(0.0,)) if cost.block in TOWER else cost
        for cost in profile.costs
    ]
    return make_request(
        graph, dataclasses.replace(profile, costs=tuple(costs)), ranks=4, mini_batch=12, num_stages=2
    )


def costs_of(request: PlanRequest) -> CostModel:
    return CostModel(request.graph, request.profile, request.cluster)


def with_shares(request: PlanRequest, shares: Mapping[str, float]) -> PlanRequest:
    return dataclasses.replace(request, profile=dataclasses.replace(request.profile, backends=dict(shares)))


def answering(
    request: PlanRequest, share: Callable[[tuple[str, ...]], float], asked: list[tuple[str, ...]]
) -> Callable[[PipelinePlan, int], StageBackend]:
    """Return a measurement by the blocks of what is measured."""

    def measure(plan: PipelinePlan, index: int) -> StageBackend:
        stage = plan.stages[index]
        assert set(stage.blocks) <= set(TOWER), "nothing that trains is measured"
        asked.append(stage.blocks)
        us = share(stage.blocks) * 1000.0
        backend = "swift" if us < 1000.0 else "torch"
        groups = (PlacedGroup(backend=backend),)
        return StageBackend(stage=stage.name, groups=groups, us=us, torch_us=1000.0)

    return measure


def planned(
    request: PlanRequest,
    share: Callable[[tuple[str, ...]], float],
    *,
    is_given: bool = False,
    planner: str = "auto",
) -> tuple[PipelinePlan, PipelinePlan, list[dict[str, float]], list[tuple[str, ...]]]:
    """Return the plan of torch, the one with backends, what was planned again, and what was measured."""
    plan = make_plan(planner, request)
    asked: list[tuple[str, ...]] = []
    calls: list[dict[str, float]] = []

    def plan_again(shares: Mapping[str, float]) -> PipelinePlan:
        calls.append(dict(shares))
        return make_plan(planner, with_shares(request, shares))

    measure = answering(request, share, asked)
    again = None if is_given else plan_again
    found = plan_with_backends(plan, request.graph, costs_of(request), measure=measure, plan_again=again)
    return plan, found, calls, asked


def tower_ranks(plan: PipelinePlan) -> int:
    return len({r for i in forward_only_stages(plan) for r in plan.stages[i].ranks})


def test_a_tower_that_is_faster_gets_fewer_ranks() -> None:
    request = request_of()
    assert blocks_without_gradients(request.graph) == set(TOWER)
    before, found, calls, _ = planned(request, lambda blocks: 0.2)
    assert len(calls) == 1 and set(calls[0].values()) == {0.2} and set(calls[0]) <= set(TOWER)
    assert tower_ranks(found) < tower_ranks(before)
    assert found.iteration_us < before.iteration_us
    (note,) = [note for note in found.notes if note.startswith("with backends")]
    assert "cut again" in note and "became" in note and "on torch" in note
    # its times are those of its own stages, and simulate to what it says
    assert evaluate_us(found, costs_of(request)) == pytest.approx(found.iteration_us)


def test_times_of_given_stages_follow_their_backends() -> None:
    request = request_of()
    before, found, calls, _ = planned(request, lambda blocks: 0.5, is_given=True)
    assert not calls and [s.blocks for s in found.stages] == [s.blocks for s in before.stages]
    for index in forward_only_stages(before):
        assert found.stages[index].forward_us == pytest.approx(before.stages[index].forward_us / 2)


def test_on_torch_nothing_is_planned_again() -> None:
    before, found, calls, _ = planned(request_of(), lambda blocks: 1.0)
    assert found == before and not calls


def test_a_plan_that_turns_out_longer_is_left() -> None:
    """The backend is quick on the first plan's stages alone, as where it does well on whole towers only."""
    request = request_of()
    first = {stage.blocks for stage in make_plan("auto", request).stages}
    before, found, calls, _ = planned(request, lambda blocks: 0.4 if blocks in first else 0.99)
    assert len(calls) == 1
    assert {stage.blocks for stage in found.stages} == first
    assert any("the stages" in note for note in found.notes if note.startswith("with backends"))


def test_it_is_never_worse_by_the_simulator() -> None:
    for seed in range(8):
        draw = random.Random(seed)
        request = request_of(tower_us=draw.choice([60.0, 120.0, 300.0]))
        shares: dict[tuple[str, ...], float] = {}

        def share(
            blocks: tuple[str, ...], shares: dict[tuple[str, ...], float] = shares, draw: random.Random = draw
        ) -> float:
            return shares.setdefault(blocks, draw.choice([0.2, 0.5, 0.8, 1.0]))

        plan, found, calls, asked = planned(request, share, planner="graphpipe")
        measure = answering(request, share, asked)
        kept = plan_with_backends(plan, request.graph, costs_of(request), measure=measure, plan_again=None)
        assert found.iteration_us <= kept.iteration_us * (1 + 1e-9) and len(calls) <= 1


def test_a_stage_that_trains_too_takes_what_it_takes_on_torch() -> None:
    request = request_of()
    plain, costs = costs_of(request), costs_of(with_shares(request, dict.fromkeys(TOWER, 0.25)))
    assert costs.stage_times([0, 1], 4)[0] == pytest.approx(0.25 * plain.stage_times([0, 1], 4)[0])
    assert costs.stage_times([3, 4], 4) == pytest.approx(plain.stage_times([3, 4], 4))
    assert costs.stage_times([0, 1], 4)[1] == plain.stage_times([0, 1], 4)[1]
    assert costs.cost_key(0) != plain.cost_key(0) and costs.cost_key(5) == plain.cost_key(5)


def test_what_no_gradient_passes_in_a_stage_that_trains_is_measured_apart() -> None:
    request = dataclasses.replace(request_of(), num_stages=1)
    *_, calls, asked = planned(request, lambda blocks: 0.5)
    assert asked[0] == tuple(TOWER)
    assert calls == [dict.fromkeys(TOWER, 0.5)]


def test_reports_say_what_a_forward_runs_on() -> None:
    plan = make_plan("auto", request_of())
    assert "runs on" not in format_plan(plan)
    stages = [
        dataclasses.replace(stage, backend="openvino" if index == 0 else "")
        for index, stage in enumerate(plan.stages)
    ]
    placed = dataclasses.replace(plan, stages=tuple(stages))
    text = format_plan(placed)
    assert "runs on" in text and "on openvino" in text
    timeline = simulate_plan(placed)
    name = f"rank 0 {stages[0].name} on openvino"
    assert name in format_timeline(timeline, placed)
    shown = [e for e in chrome_trace(timeline, placed)["traceEvents"] if "backend" in e.get("args", {})]
    assert {(e["cat"], e["args"]["backend"]) for e in shown} == {("forward", "openvino")}
    page = report_page([ReportedPlan(name="p", plan=placed, timelines=[("predicted", timeline)])])
    assert f"{stages[0].name} on openvino" in page and "runs on openvino" in page
    assert loads(PipelinePlan, dumps(placed)) == placed
