"""Full recompute: which layers run again, what is held for them, what does not fit even so."""

from __future__ import annotations

import dataclasses

import pytest

from gpp_plugin.errors import PlanError, PlanInfeasible
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.serialize import fingerprint
from gpp_plugin.plan.costs.memory_formula import with_breakdown
from gpp_plugin.plan.explicit_plan import explicit_plan
from gpp_plugin.plan.memory.fitting import memory_advice, recompute_fully
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.plan.validate_plan import validate_plan
from tests.plan.graphs import keep_inside, make_cluster, make_graph, make_profile, make_request

KEPT, RESULT = 100, 4
TWO_STAGES = {
    "stages": [{"modules": ["h.0", "h.1"], "ranks": [0]}, {"modules": ["h.2", "h.3"], "ranks": [1]}]
}
NAMES = [f"h.{i}.{part}" for i in range(4) for part in ("attention", "mlp")]


def layers(*, memory: int = 10**6, ways: tuple[str, ...] = ("recompute",)) -> PlanRequest:
    """Four layers of two blocks, each of which keeps 100 bytes of its own and hands on 4 that nobody keeps.

    The first layer's result is read by the last two layers as well.
    """
    readers = [*zip(NAMES, NAMES[1:], strict=False), (NAMES[1], NAMES[4]), (NAMES[1], NAMES[6])]
    graph = keep_inside(make_graph(readers, names=NAMES, loss=NAMES[-1]), KEPT)
    return make_request(
        graph,
        make_profile(graph, 10.0, saved=float(KEPT)),
        cluster=make_cluster(2, memory=memory),
        num_ranks=2,
        mini_batch=4,
        micro_batch_sizes={"*": 1},
        memory_optimization=ways,
    )


def planned(request: PlanRequest) -> PipelinePlan:
    return explicit_plan(TWO_STAGES, request)


def test_every_layer_runs_again_but_the_last_where_that_gains_nothing() -> None:
    request = layers()
    plain = planned(request)
    full = recompute_fully(plain, request)
    validate_plan(full, request.graph, profile=request.profile, cluster=request.cluster)
    first, second = full.stages
    assert (first.in_flight, second.in_flight) == (2, 1)
    assert first.memory is not None and second.memory is not None
    assert [s.blocks for s in first.memory.recomputed] == [tuple(NAMES[:2]), tuple(NAMES[2:4])]
    assert [s.blocks for s in second.memory.recomputed] == [tuple(NAMES[4:6])]
    assert [(s.bytes, s.held_bytes) for s in first.memory.recomputed] == [(200, 0), (200, RESULT)]
    assert first.memory_bytes == 2 * RESULT + 2 * KEPT
    # two results of the first stage arrive: the first layer's, which the last layer reads too, and the second's
    assert [(s.bytes, s.held_bytes) for s in second.memory.recomputed] == [(200, 2 * RESULT)]
    assert second.memory_bytes == 2 * RESULT + 2 * KEPT + 2 * KEPT
    # what is kept of a layer's last operator is its own: that runs again, too
    assert [s.recompute_us for s in first.memory.recomputed] == [20.0, 20.0]
    assert first.backward_us == plain.stages[0].backward_us + 40.0
    assert full.iteration_us > plain.iteration_us


def test_an_asynchronous_plan_takes_as_much_longer_as_its_slowest_stage() -> None:
    request = dataclasses.replace(layers(), mode="async")
    plain = planned(request)
    full = recompute_fully(plain, request)
    for plan in (plain, full):
        assert plan.iteration_us == 4 * max(stage.forward_us + stage.backward_us for stage in plan.stages)
    assert full.iteration_us > plain.iteration_us


def test_a_result_that_several_layers_hold_counts_once() -> None:
    request = dataclasses.replace(
        layers(), num_ranks=1, cluster=make_cluster(1, memory=10**6), schedule="gpipe"
    )
    plan = explicit_plan({"stages": [{"modules": ["*"], "ranks": [0]}]}, request)
    (stage,) = recompute_fully(plan, request).stages
    assert stage.memory is not None and stage.in_flight == 4
    # h.1 holds h.0's result for all; h.2 and h.3 hold their predecessors' besides
    assert [s.held_bytes for s in stage.memory.recomputed] == [0, RESULT, RESULT, RESULT]


def test_what_does_not_fit_even_so_says_by_how_much() -> None:
    request = layers(memory=10**6)
    plan = planned(request)
    small = layers(memory=150)
    with pytest.raises(
        PlanInfeasible, match=r"stage 'h.0-1' needs 208 bytes with every layer recomputed, .* 58 too"
    ):
        recompute_fully(plan, small)


def test_stages_whose_operators_are_not_known_are_refused() -> None:
    request = layers()
    graph = dataclasses.replace(request.graph, saved=())
    profile = dataclasses.replace(request.profile, graph=fingerprint(graph))
    request = dataclasses.replace(request, graph=graph, profile=profile)
    with pytest.raises(PlanError, match="full recompute needs the operators of 'test'"):
        recompute_fully(planned(request), request)


def test_a_plan_by_hand_is_made_to_fit() -> None:
    """800 bytes of activations in flight on the first stage; 500 are allowed."""
    roomy, tight = planned(layers()), planned(layers(memory=500))
    assert roomy.stages[0].memory_bytes == 800 and all(stage.memory is None for stage in roomy.stages)
    assert tight.stages[0].memory is not None and tight.stages[0].memory_bytes <= 500
    with pytest.raises(PlanInfeasible, match="300 bytes too many"):
        planned(layers(memory=500, ways=()))


def test_advice_is_on_the_fullest_stage_and_what_fills_it() -> None:
    request = layers(memory=1000, ways=())
    plan = with_breakdown(planned(request), request)
    (line,) = memory_advice(plan, zero_stage=0, allowed=())
    assert line == (
        "fullest is stage 'h.0-1': 840 of 1000 bytes (84 %), most of it activations (800 bytes); to fit more: smaller "
        'micro_batch_sizes, memory.recompute "auto", memory.swap "auto", more stages'
    )
    assert "memory." not in memory_advice(plan, zero_stage=0, allowed=("recompute", "swap"))[0]
    assert memory_advice(dataclasses.replace(plan, memory=()), zero_stage=0, allowed=()) == ()
    heavy = tuple(dataclasses.replace(part, inputs=2 * part.total) for part in plan.memory)
    (line,) = memory_advice(dataclasses.replace(plan, memory=heavy), zero_stage=0, allowed=())
    assert "most of it the mini-batch" in line and "train_batch_size" in line
