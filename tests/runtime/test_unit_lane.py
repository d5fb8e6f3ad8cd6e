"""A plan and its tensors in units in place of samples, and tasks that run the code of their unit's shape."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.plan import PipelinePlan, Stage, StageEdge
from gpp_plugin.ir.program import InstructionKind
from gpp_plugin.ir.samples import SampleRange
from gpp_plugin.ir.tensors import UNIFORM, TensorSpec, batch_layout
from gpp_plugin.runtime.batches import UnitBatch, batch_checksum, unit_key, without_keys
from gpp_plugin.runtime.messages.wires import specs_of, wires_of
from gpp_plugin.runtime.unit_lane import plan_of_units, spec_of_unit
from gpp_plugin.schedule.build import build_schedules
from gpp_plugin.schedule.checks.validate_programs import validate_programs
from gpp_plugin.schedule.lower import lower_schedules

U = 4


def typical_plan() -> PipelinePlan:
    """Return six units of four samples: two ranks, then three."""
    common: dict[str, Any] = {"forward_us": 1.0, "backward_us": 2.0}
    return PipelinePlan(
        model="two",
        graph="",
        planner="given",
        mini_batch=6 * U,
        loss_unit=U,
        stages=(
            Stage(name="a", blocks=("a",), ranks=(0, 1), micro_batch_size=2 * U, in_flight=3, **common),
            Stage(name="b", blocks=("b",), ranks=(2, 3, 4), micro_batch_size=3 * U, in_flight=2, **common),
        ),
        edges=(
            StageEdge(
                src=0,
                dst=1,
                batch_tensors=("hidden",),
                whole_tensors=("bias",),
                gradient_tensors=("hidden", "bias"),
            ),
        ),
    )


def test_a_plan_of_units_has_programs_whose_messages_are_whole_units() -> None:
    plan = plan_of_units(typical_plan())
    assert (plan.mini_batch, plan.loss_unit) == (6, 1)
    assert [stage.local_batch_size for stage in plan.stages] == [1, 1]
    schedules = build_schedules(plan)
    programs = lower_schedules(plan, schedules)
    validate_programs(plan, schedules, programs)
    for program in programs:
        for message in program.messages(InstructionKind.SEND):
            assert message.samples.num_samples == 1
            assert message.has_whole_tensors


def test_what_cuts_units_is_no_plan_of_units() -> None:
    plan = typical_plan()
    small = dataclasses.replace(plan.stages[0], micro_batch_size=U)
    sliced = dataclasses.replace(plan.stages[0], num_sliced=1)
    for stage, words in ((small, "takes 2 samples"), (sliced, "slices 1 forwards")):
        with pytest.raises(PlanError, match=words):
            plan_of_units(dataclasses.replace(plan, stages=(stage, plan.stages[1])))


def test_each_message_has_the_shape_of_its_own_unit() -> None:
    plan = plan_of_units(typical_plan())
    programs = lower_schedules(plan, build_schedules(plan))
    specs = []
    for unit in range(
        6
    ):  # 1 to 3 samples of 5 to 10 tokens, joined: hidden [samples x tokens, 8], bias [tokens]
        samples, tokens = 1 + unit % 3, 5 + unit
        hidden = TensorSpec(
            name="hidden",
            dtype="float32",
            shape=(samples * tokens, 8),
            num_samples=samples,
            layout=batch_layout(0, tokens),
            requires_grad=True,
        )
        bias = TensorSpec(name="bias", dtype="float32", shape=(tokens,), num_samples=samples, layout=UNIFORM)
        specs.append({spec.name: spec_of_unit(spec) for spec in (hidden, bias)})
    seen = {}
    for program in programs:
        for kind in (InstructionKind.SEND, InstructionKind.RECEIVE):
            for message in program.messages(kind):
                unit = message.samples.first_sample
                shapes = {
                    w.name: w.shape for w in wires_of(message, rank=program.rank, plan=plan, specs=specs)
                }
                rows = {w.first_row for w in wires_of(message, rank=program.rank, plan=plan, specs=specs)}
                assert seen.setdefault(unit, shapes) == shapes
                assert rows == {0}
    assert seen == {u: {"hidden": ((1 + u % 3) * (5 + u), 8), "bias": (5 + u,)} for u in range(6)}
    assert specs_of(specs, SampleRange(first_sample=2, num_samples=1)) is specs[2]
    assert specs_of(specs[0], SampleRange(first_sample=2, num_samples=1)) is specs[0]


def test_units_are_told_apart_by_samples_lengths_and_content() -> None:
    first = {"x": torch.zeros(2, 5), "y": torch.ones(2)}
    for other in ({**first, "x": torch.zeros(2, 6)}, {"x": torch.zeros(3, 5), "y": torch.ones(3)}):
        assert unit_key(first) != unit_key(other)
    assert unit_key(first) == unit_key({"y": torch.zeros(2), "x": torch.ones(2, 5)})
    batch = UnitBatch(units=(first, {**first, "y": torch.zeros(2)}))
    assert batch_checksum(batch) != batch_checksum(UnitBatch(units=batch.units[::-1]))
    assert batch_checksum(dataclasses.replace(batch, checksum=7)) == 7
    assert [sorted(unit) for unit in without_keys(batch, ("y",)).units] == [["x"], ["x"]]
