"""A plan and its tensors in units in place of samples, and tasks that run the code of their unit's shape.

Whole models run here with all ranks as threads of one process; `tests/integrations/test_units.py` has them on ranks.
"""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpp_plugin.config.reader import read_config
from gpp_plugin.errors import CaptureError, PlanError
from gpp_plugin.integrations.deepspeed.dispatch import setting_of
from gpp_plugin.ir.plan import PipelinePlan, StageEdge
from gpp_plugin.ir.program import InstructionKind
from gpp_plugin.ir.tensors import UNIFORM, SampleRange, TensorSpec, batch_layout
from gpp_plugin.model.model_source import ModelSource
from gpp_plugin.runtime.batches import UnitBatch, batch_checksum, unit_key, without_keys
from gpp_plugin.runtime.messages.routes import payloads_of, specs_of
from gpp_plugin.runtime.rank_programs import make_programs, plan_of_units, spec_of_unit
from gpp_plugin.runtime.rank_runner import RankRunner
from gpp_plugin.runtime.stage_runner import RunnerContext
from gpp_plugin.runtime.unit_patterns import UnitPatterns
from gpp_plugin.schedule.build import build_schedules
from gpp_plugin.schedule.lower import lower_schedules
from gpp_plugin.schedule.program_sets import RankPrograms
from tests.integrations.unit_jobs import Branching
from tests.runtime.memory_stages import Hooks
from tests.runtime.test_tensor_grids import ThreadTransport
from tests.schedule.plans import on_rows, proven, simple_plan, with_in_flight

U = 4


def typical_plan() -> PipelinePlan:
    """Return six units of four samples: two ranks, then three."""
    names = ("hidden", "bias")
    edge = StageEdge(src=0, dst=1, batch_tensors=names[:1], whole_tensors=names[1:], gradient_tensors=names)
    plan = on_rows(simple_plan([2 * U, 3 * U], [], mini_batch=6 * U, backward_us=2.0), [2, 3])
    return dataclasses.replace(plan.with_each(in_flight=[3, 2]), loss_unit=U, edges=(edge,))


def test_a_plan_of_units_has_programs_whose_messages_are_whole_units() -> None:
    plan = plan_of_units(typical_plan())
    assert (plan.mini_batch, plan.loss_unit) == (6, 1)
    assert [stage.local_batch_size for stage in plan.stages] == [1, 1]
    _, programs = proven(plan)
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
    # 1 to 3 samples of 5 to 10 tokens, joined: hidden [samples x tokens, 8], bias [tokens]
    for unit in range(6):
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
                is_sender = kind is InstructionKind.SEND
                payloads = payloads_of(message, is_sender=is_sender, plan=plan, specs=specs)
                shapes = {w.name: w.shape for w in payloads}
                rows = {w.first_row for w in payloads}
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


# ---- whole models on threads ------------------------------------------------------------------------------


class Held:
    """The parameters of one rank."""

    def __init__(self, model: Any, names: Sequence[str]) -> None:
        known: dict[str, Tensor] = {
            **dict(model.named_buffers()),
            **dict(model.named_parameters(remove_duplicate=False)),
        }
        self._tensors = {name: known[name].detach().clone() for name in names}
        for name in names:
            self._tensors[name].requires_grad_(known[name].requires_grad)

    def named_tensors(self) -> dict[str, Tensor]:
        return self._tensors


class Queues(dict[Any, Any]):
    """A queue for each message, made when it is first asked for, whatever thread asks."""

    def __missing__(self, message: Any) -> Any:
        return self.setdefault(message, queue.Queue())


def on_seats(plan: PipelinePlan, seats: int | None) -> PipelinePlan:
    """Return the plan with its ranks put on fewer in turn, and its stages in flight as that asks for."""
    if seats is None:
        return plan
    return with_in_flight(
        plan.with_each(ranks=[tuple(rank % seats for rank in stage.ranks) for stage in plan.stages])
    )


class ThreadJob:
    """All ranks of a job of units, each a thread.

    Args:
        seats: ranks that those of the plan are put on in turn, so that some hold several stages; None: as planned.
    """

    def __init__(
        self,
        model: Any,
        sample: dict[str, Any],
        ranks: int,
        block: dict[str, Any],
        folder: Path,
        seats: int | None = None,
    ) -> None:
        ds_config = {
            "train_micro_batch_size_per_gpu": 2,
            "graph_pipeline": {"profile_dir": str(folder), **block},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        }
        config = read_config(ds_config)
        assert config is not None
        setting = setting_of(
            ds_config, rank=0, num_ranks=ranks, device=torch.device("cpu"), group=None, optimizer=None
        )
        self.source = ModelSource(model, config=config, setting=setting)
        (sample,) = self.source.complete_batches([sample])
        reference, typical = self.source.prepare_plan(sample)
        self._rule = self.source.unit_rule(reference)
        if self._rule is not None:
            sample = self._rule.sample(sample)
        self.plan = plan_of_units(on_seats(typical, seats))
        programs = make_programs(self.plan, reference)
        self.queues = Queues()
        self.runners, self.held = [], []
        for program in programs:
            transport = ThreadTransport(self.queues)
            shared = RunnerContext(
                source=self.source.stages,
                reference=reference,
                transport=transport,
                device=torch.device("cpu"),
                sums_losses=config.loss_mean == "tokens",
                patterns=UnitPatterns(
                    self.plan,
                    reference,
                    self.source.stages.lacking,
                    program=program,
                    transport=transport,
                    reduces_early=(),
                    reduces_each_backward=False,
                ),
            )
            runner = RankRunner(RankPrograms(plan=self.plan, programs={"whole": program}), shared)
            self.runners.append(runner)
            held: list[Any] = [Held(model, code.tensors) for code in runner.prepare(sample)]
            runner.bind(held, [Hooks()] * len(held), step=Hooks().step if len(held) > 1 else None)
            self.held += held

    def run(self, units: Sequence[dict[str, Any]]) -> tuple[float, dict[str, Tensor]]:
        """Return a mini-batch's loss, and the gradients summed over all ranks."""
        batch = UnitBatch(units=tuple(self.source.complete_batches(units)))
        batch = batch if self._rule is None else self._rule.units(batch)
        for runner in self.runners:  # captures are for one thread
            if runner.has_new_shapes(batch):
                runner.learn_branches(batch)
                runner.make_code(batch)
                runner.note_shapes(batch)
        for held in self.held:
            for tensor in held.named_tensors().values():
                tensor.grad = None
        with ThreadPoolExecutor(len(self.runners)) as pool:
            results = [
                future.result(60) for future in [pool.submit(each.run, batch) for each in self.runners]
            ]
        weight = 1.0 if self.runners[0].sums_losses else 1 / self.plan.mini_batch
        loss = sum(float(value) * weight for result in results for value, _ in result.losses)
        gradients: dict[str, Tensor] = {}
        for held in self.held:
            for name, tensor in held.named_tensors().items():
                if tensor.grad is not None:
                    gradients[name] = (
                        gradients[name] + tensor.grad if name in gradients else tensor.grad.clone()
                    )
        return loss, gradients


def test_a_structure_that_changes_with_the_shape_is_refused_before_anything_runs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    block = {"units": 2, "data_parallel": 2}
    model = Branching()
    job = ThreadJob(model, {"x": torch.randn(2, 4, 8)}, 2, block, tmp_path)
    good, odd = {"x": torch.randn(2, 5, 8)}, {"x": torch.randn(3, 7, 8)}
    for _ in range(2):
        with pytest.raises(CaptureError) as caught:
            job.run([good, odd])
        assert str(caught.value).startswith(
            "the graph changed with the input shapes: operator linear_1 (aten.linear.default) in second is tanh "
            "(aten.tanh.default) at 3 samples; "
        )
    first, _ = job.run([good, good])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 2
    for runner in job.runners:  # the code of known shapes runs on other parameters
        runner.bind([Held(model, code.tensors) for code in runner.prepare(good)], [Hooks()])
    wanted = float(model(**good)["loss"].detach())
    assert job.run([good, good])[0] == pytest.approx(wanted, rel=1e-6) != first
