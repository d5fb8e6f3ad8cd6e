"""Plans for lengths: the mean of the typical ones' times and the longest one's bytes; memory at any lengths."""

from __future__ import annotations

import dataclasses

import pytest

from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.profile import Profile, SharedStorage
from gpp_plugin.ir.size_formulas import BlockLengths, LengthCosts, SizeConditions, terms_of
from gpp_plugin.ir.tensors import TensorSpec, batch_layout
from gpp_plugin.plan.costs.memory_formula import memory_breakdown, with_breakdown, with_inputs
from gpp_plugin.plan.costs.planned_lengths import SizedPlan, UnitSize, inputs_at, planned_profile, profile_at
from gpp_plugin.plan.explicit_plan import explicit_plan
from gpp_plugin.plan.memory.fitting import recompute_fully
from gpp_plugin.plan.request import PlanRequest
from tests.plan.graphs import chain, keep_inside, make_cluster, make_profile

SAMPLES = 2
IDS = TensorSpec(name="ids", dtype="int64", shape=(SAMPLES, 8), num_samples=SAMPLES, layout=batch_layout())


def saved(length: int) -> int:
    """Bytes a block keeps of a loss unit: two tensors, as long as the text, and the scores of attention."""
    return SAMPLES * (2 * 16 * length + 4 * length * length)


def graph_at(length: int) -> BlockGraph:
    """Three layers; the first one's result is kept by the second."""
    graph = keep_inside(chain(3), saved(length))
    first, *others = graph.blocks
    return dataclasses.replace(
        graph,
        num_samples=SAMPLES,
        blocks=(dataclasses.replace(first, inputs=("ids",)), *others),
        tensors={
            name: dataclasses.replace(spec, shape=(SAMPLES, length, 4), num_samples=SAMPLES)
            for name, spec in graph.tensors.items()
        },
        loss_block="layers.2",
    )


def profile_measured(length: int) -> Profile:
    """What measuring gives at a length: 10 us, 1 us a token and 0.01 us a pair of tokens."""
    forward = 10.0 + length + 0.01 * length * length
    profile = make_profile(graph_at(8), forward, saved=saved(length) / SAMPLES, parameter=64)
    more = {"samples": (SAMPLES,), "optimizer_bytes": 128, "transient_bytes_per_sample": 4.0 * length}
    shared = (SharedStorage(blocks=("layers.0", "layers.1"), bytes_per_sample=16.0 * length),)
    costs = tuple(dataclasses.replace(cost, **more) for cost in profile.costs)
    return dataclasses.replace(profile, source="measured", costs=costs, shared=shared)


def length_costs() -> LengthCosts:
    """The same as polynomials."""
    block = BlockLengths(
        forward_us=(10.0, 1.0, 0.01),
        backward_us=(20.0, 2.0, 0.02),
        saved_bytes=(0.0, 64.0, 8.0),
        transient_bytes=(0.0, 8.0, 0.0),
    )
    return LengthCosts(
        sizes=SizeConditions(symbols={"s0": ("ids", 1)}, shapes={"ids": (str(SAMPLES), "s0")}),
        num_samples=SAMPLES,
        terms=terms_of(1),
        reference=(8,),
        typical=((8,), (16,)),
        longest=(32,),
        fitted=((4,), (6,), (8,)),
        checked=(7,),
        time_error=0.0,
        byte_error=0.0,
        blocks=dict.fromkeys(("layers.0", "layers.1", "layers.2"), block),
        shared=((0.0, 32.0, 0.0),),
        tensors={
            **{f"layers.{i}:inside": (0.0, 64.0, 8.0) for i in range(3)},
            **{f"layers.{i}:out": (0.0, 32.0, 0.0) for i in range(3)},
        },
    )


def make_plan(profile: Profile, *, recompute: bool = False) -> PipelinePlan:
    request = PlanRequest(
        graph=graph_at(8),
        profile=with_inputs(
            profile, graph_at(8), inputs_at([IDS], length_costs(), (32,)), mini_batch=8, dtype="float32"
        ),
        cluster=make_cluster(2, memory=10**6, latency=1.0, bandwidth=1e10, host=1e10),
        num_ranks=2,
        mini_batch=8,
        loss_unit=SAMPLES,
        keep_units=True,
    )
    stages = {
        "stages": [{"modules": ["layers.0", "layers.1"], "ranks": [0]}, {"modules": ["*"], "ranks": [1]}]
    }
    plan = explicit_plan(stages, request)
    plan = recompute_fully(plan, request) if recompute else plan
    return with_breakdown(plan, request)


def sized(*, recompute: bool = False) -> SizedPlan:
    costs, base = length_costs(), profile_measured(8)
    planned = planned_profile(
        [profile_at(base, costs, one) for one in costs.typical], profile_at(base, costs, costs.longest)
    )
    return SizedPlan(
        make_plan(planned, recompute=recompute),
        profile=base,
        costs=costs,
        graph=graph_at(8),
        inputs=[IDS],
        dtype="float32",
        zero_stage=0,
    )


@pytest.mark.parametrize("length", [4, 8, 32, 100])
def test_a_profile_of_another_length_is_what_measuring_gives_there(length: int) -> None:
    found = profile_at(profile_measured(8), length_costs(), (length,))
    wanted = profile_measured(length)
    for one, other in zip(found.costs, wanted.costs, strict=True):
        assert one.forward_us == pytest.approx(other.forward_us)
        assert one.saved_bytes_per_sample == pytest.approx(other.saved_bytes_per_sample)
        assert one.transient_bytes_per_sample == pytest.approx(other.transient_bytes_per_sample)
    assert found.shared[0].bytes_per_sample == pytest.approx(wanted.shared[0].bytes_per_sample)
    assert found.growth.get("layers.0:out", 1.0) == pytest.approx(length / 8)


def test_planned_are_the_typical_times_and_the_longest_bytes() -> None:
    plan = sized().plan
    times = [10.0 + length + 0.01 * length**2 for length in (8, 16)]
    assert plan.stages[1].forward_us == pytest.approx(sum(times) / 2)
    assert plan.memory[1].activations == plan.stages[1].in_flight * saved(32)
    assert plan.memory[0].inputs == 8 * 32 * 8


@pytest.mark.parametrize("recompute", [False, True])
def test_memory_at_a_length_is_that_of_a_plan_for_it(recompute: bool) -> None:
    found = sized(recompute=recompute)
    assert found.at([UnitSize(lengths=(32,), samples=SAMPLES)]).memory == found.plan.memory
    assert any(stage.memory is not None for stage in found.plan.stages) == recompute
    for length in (8, 16):
        here = found.at([UnitSize(lengths=(length,), samples=SAMPLES)])
        wanted = make_plan(profile_at(profile_measured(8), length_costs(), (length,)), recompute=recompute)
        for part, other in zip(here.memory, wanted.memory, strict=True):
            assert part.activations == pytest.approx(other.activations, rel=1e-6)
            assert part.transient == pytest.approx(other.transient, rel=1e-6)
            assert part.working == pytest.approx(other.working, rel=1e-6)
        assert here.memory[0].inputs == 8 * length * 8


def test_of_units_a_stage_holds_the_largest_of_those_in_flight() -> None:
    found = sized()
    alone = {
        length: found.at([UnitSize(lengths=(length,), samples=SAMPLES)]).memory[0] for length in (4, 8, 16)
    }
    units = [UnitSize(lengths=(length,), samples=SAMPLES) for length in (4, 16, 8, 4)]
    memory, in_flight = found.at(units).memory[0], found.plan.stages[0].in_flight
    assert in_flight == 2
    assert memory.activations == (alone[16].activations + alone[8].activations) / 2
    assert memory.transient == alone[16].transient
    assert memory.inputs == 2 * (4 + 16 + 8 + 4) * 8
    more = found.at([UnitSize(lengths=(8,), samples=2 * SAMPLES)]).memory[0]
    assert more.activations == 2 * alone[8].activations


def test_lengths_are_read_off_the_shapes_of_a_batch() -> None:
    found = sized()
    assert found.lengths_of({"ids": (SAMPLES, 21)}) == (21,)
    assert "axis 0 of ids is 3" in str(found.lengths_of({"ids": (3, 21)}))
    assert found.lengths_of({"other": (2, 2)}) == "it has no ids"
    profile = with_inputs(profile_measured(8), graph_at(8), [IDS], mini_batch=8, dtype="float32")
    (first, _) = memory_breakdown(found.plan, profile)
    assert first.inputs == 8 * 8 * 8
