"""Evaluation on the stages of a training plan, on one rank without an engine: who runs what, and what is kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpp_plugin.engine.mini_batch_runner import MAX_GRAPHS, MAX_RUNNERS, Evaluator
from gpp_plugin.errors import ConfigError, PlanError
from gpp_plugin.ir.block_graph import Block, BlockEdge, BlockGraph
from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.ir.tensors import UNIFORM, UNIT, batch_layout
from gpp_plugin.runtime.batches import UnitBatch
from gpp_plugin.runtime.rank_programs import evaluation_plan, split_evaluation
from tests.integrations.engine_jobs import B, config_of, make_engine
from tests.models import build
from tests.ranks import run_kept_ranks

NAMES = {"model": "m", "graph": "g", "planner": "p"}


def plan_of(*stages: tuple[tuple[str, ...], tuple[int, ...], int], unit: int = 2) -> PipelinePlan:
    made = tuple(
        Stage(name=f"s{i}", blocks=blocks, ranks=ranks, micro_batch_size=size, in_flight=3)
        for i, (blocks, ranks, size) in enumerate(stages)
    )
    return PipelinePlan(**NAMES, mini_batch=16, loss_unit=unit, stages=made, edges=())


def test_a_batch_of_any_size_runs_in_whole_micro_batches_then_units_then_the_rest() -> None:
    plan = plan_of((("a",), (0, 1), 4), (("b",), (2, 3, 4), 6), unit=5)
    for samples, wanted in (
        (24, [(0, 24, 5, (0, 1))]),
        (29, [(0, 24, 5, (0, 1)), (24, 5, 5, (0,))]),
        (23, [(0, 12, 5, (0, 1)), (12, 10, 5, (0,)), (22, 1, 1, (0,))]),
        (37, [(0, 36, 5, (0, 1)), (36, 1, 1, (0,))]),
    ):
        parts = split_evaluation(plan, samples)
        found = [(p.first_sample, p.plan.mini_batch, p.plan.loss_unit, p.plan.stages[0].ranks) for p in parts]
        assert found == wanted
        for part in parts:
            sizes = [stage.micro_batch_size for stage in part.plan.stages]
            is_whole = part.plan.mini_batch % 12 == 0
            assert sizes == ([4, 6] if is_whole else [part.plan.loss_unit] * 2)


def graph_of(
    *names: str, edges: tuple[tuple[str, str], ...], reads: dict[str, tuple[str, ...]]
) -> BlockGraph:
    return BlockGraph(
        model="m", num_samples=2, loss_block=None, tied={}, tensors={},
        blocks=tuple(Block(name=n, nodes=(n,), parameters=reads.get(n, ())) for n in names),
        edges=tuple(BlockEdge(src=a, dst=b, tensors=()) for a, b in edges),
    )  # fmt: skip


def test_blocks_that_training_skips_run_where_their_parameters_are_behind_what_they_read() -> None:
    plan = plan_of((("a", "loss"), (0,), 2), (("b",), (1,), 2), (("c",), (2,), 2))
    held = [{"w", "head"}, {"head", "v"}, {"head"}]
    reads = {"a": ("w",), "new": ("head", "mean"), "free": (), "first": ("v",)}
    edges = (("a", "b"), ("a", "new"), ("b", "new"), ("new", "free"))
    graph = graph_of("first", "a", "b", "new", "free", reads=reads, edges=edges)
    found = evaluation_plan(plan, graph, parameters={"w", "head", "v"}, held=held)
    assert [stage.blocks for stage in found.stages] == [("a",), ("first", "b", "new", "free"), ()]
    assert [stage.in_flight for stage in found.stages] == [1, 1, 1]
    with pytest.raises(PlanError, match=r"runs new on stage s1, which does not hold \['head'\]"):
        evaluation_plan(plan, graph, parameters={"head"}, held=[{"head"}, set(), set()])


class Job:
    """A job of one rank whose runners return what they are given; a batch's loss is the mean of its first column."""

    def __init__(self, plan: PipelinePlan, *, rank: int = 0, has_loss: bool = True) -> None:
        self.log: list[str] = []
        self.module = nn.Sequential(nn.Linear(1, 1), nn.Dropout())
        self.module[1].eval()
        self.rank = rank
        layouts = {
            "row": batch_layout(), "same": UNIFORM, "unit": UNIT,
        }  # fmt: skip
        nodes = [SimpleNamespace(name=n, output=SimpleNamespace(layout=own)) for n, own in layouts.items()]
        self.op_graph = SimpleNamespace(
            loss="loss" if has_loss else None, parameters=(), nodes=[*nodes, SimpleNamespace(name="x", output=None)],
            outputs={n: n for n in layouts},
        )  # fmt: skip
        block_graph = graph_of("a", edges=(), reads={})
        analysis = SimpleNamespace(op_graph=self.op_graph)
        reference: Any = SimpleNamespace(analysis=analysis, block_graph=block_graph)
        source: Any = SimpleNamespace(
            analyse=lambda batch, outputs: self.log.append(f"capture {sorted(batch)}") or reference,
            unit_rule=lambda reference: None, learn_shapes=lambda reference, batch: None,
            complete_module=lambda module, tensors: self.log.append("complete"),
        )  # fmt: skip
        stages: Any = SimpleNamespace(
            of=lambda stage: SimpleNamespace(weights=None), attached=lambda: self._weights("attached"),
            gathered=lambda: self._weights("gathered"),
        )  # fmt: skip
        collectives: Any = SimpleNamespace(
            sum=lambda value, what: value + 0.0, gather=lambda value, what: [value]
        )
        setting: Any = SimpleNamespace(device=torch.device("cpu"))
        self.evaluator = Evaluator(
            SimpleNamespace(source=source, setting=setting, make=self._make_runner),  # type: ignore[arg-type]
            SimpleNamespace(stages=stages, run=self._run, stand_by=lambda batch: self.log.append("stand by")),  # type: ignore[arg-type]
            plan=plan, reference=reference, modules={0: self.module}, collectives=collectives,  # type: ignore[dict-item]
        )  # fmt: skip

    @contextmanager
    def _weights(self, how: str) -> Iterator[None]:
        self.log.append(how)
        yield

    def _make_runner(self, reference: Any, plan: PipelinePlan) -> Any:
        self.log.append(f"runner of {plan.mini_batch}")
        if self.rank not in plan.stages[0].ranks:
            return None
        return SimpleNamespace(
            stages=(0,), prepare=lambda batch: [SimpleNamespace(tensors=())], sums_losses=False,
            bind=lambda modules, step, weights: None, plan=plan,
            adopt_code=lambda other: self.log.append(f"code of {other.plan.mini_batch}"),
        )  # fmt: skip

    def _run(self, runner: Any, rows: Any) -> Any:
        assert not any(part.training for part in self.module.modules())
        if isinstance(rows, UnitBatch):
            outputs = {"row": [(i, unit["x"]) for i, unit in enumerate(rows.units)]}
            return SimpleNamespace(losses=[(unit["x"].mean(), 1) for unit in rows.units], outputs=outputs)
        x = rows["x"]
        size = max(len(x) // 2, 1)
        halves, firsts = list(x.split(size))[::-1], [*range(0, len(x), size)][::-1]  # in no order
        outputs = {
            "row": list(zip(firsts, halves, strict=True)),
            "same": [(0, torch.tensor([7.0]))],
            "unit": [(first, half[0].sum()) for first, half in zip(firsts, halves, strict=True)],
        }
        losses = [(half[:, 0].mean(), len(half)) for half in halves]
        return SimpleNamespace(losses=losses, outputs={name: outputs[name] for name in self.asked})

    def evaluate(self, batch: Any, *outputs: str, needs_loss: bool = True) -> tuple[float, dict[str, Any]]:
        self.asked = outputs
        return self.evaluator.evaluate([batch], outputs=outputs, needs_loss=needs_loss)[0]


def rows_of(count: int) -> dict[str, Tensor]:
    return {"x": torch.arange(float(count))[:, None] * torch.ones(2)}


PLAN = plan_of((("a",), (0, 1), 4))


def test_losses_and_outputs_of_all_parts_are_those_of_the_batch_and_modes_come_back() -> None:
    job = Job(PLAN)
    loss, outputs = job.evaluate(rows_of(7), "row", "same", "unit")
    assert loss == pytest.approx(3.0), "the mean of 0 to 6, in parts of 4, 2 and 1"
    assert outputs["row"].equal(rows_of(7)["x"]) and outputs["same"].tolist() == [7.0]
    assert outputs["unit"].tolist() == [0.0, 4.0, 8.0, 10.0, 12.0]
    assert [part.training for part in job.module.modules()] == [True, True, False]
    assert job.log == [
        "capture ['x']", "attached", "runner of 4", "complete", "gathered", "runner of 2", "complete", "gathered",
        "runner of 1", "complete",
    ]  # fmt: skip
    job.log.clear()
    assert job.evaluate(rows_of(4), "row", "same", "unit")[0] == pytest.approx(1.5)
    assert job.log == ["attached"]
    idle = Job(PLAN, rank=1)
    assert idle.evaluate(rows_of(6))[0] == pytest.approx(1.5 * 4 / 6)
    assert idle.log[-2:] == ["runner of 2", "stand by"]
    with pytest.raises(ConfigError, match="the model returns no loss"):
        Job(PLAN, has_loss=False).evaluate(rows_of(4))
    assert Job(PLAN, has_loss=False).evaluate(rows_of(4), needs_loss=False)[1] == {}


def evaluate_together(blocks: list[dict[str, Any]]) -> list[list[list[Any]]]:
    """Return losses and outputs of batches one by one, and together; and what is said of batches of two shapes."""
    answers = []
    for block in blocks:
        model, make_batch = build("gpt2", layers=1)
        batches = [make_batch(5 if "units" not in block else 2, seed) for seed in range(4)]
        for number, batch in enumerate(batches):
            batch["labels"][0, : 3 + number] = -100
            if "units" in block:
                batches[number] = {key: value[:, : 6 + number] for key, value in batch.items()}
        engine = make_engine(model, make_batch(B, 0), config_of(block=block))
        alone = [engine.eval_batch(iter([batch]), return_logits=True) for batch in batches]
        together = engine.eval_batches(batches, outputs=("logits",))
        losses = engine.eval_batches(batches)
        if "units" not in block:
            with pytest.raises(ConfigError, match="the 2 batches have 2 different shapes"):
                engine.eval_batches([batches[0], make_batch(3, 0)])
        alone = [(loss, out[0] if isinstance(out, list) else out) for loss, out in alone]
        together = [(loss, out[0] if isinstance(out, list) else out) for loss, out in together]
        answers.append([alone, together, [(loss, None) for loss in losses]])
        engine.destroy()
    return answers


def test_batches_evaluated_together_have_what_each_has_alone() -> None:
    blocks = [
        {"stages": 2, "loss_mean": "tokens"},
        {"stages": 1, "data_parallel": 2},
        {"stages": 2, "units": 4},
    ]
    for rank in run_kept_ranks(evaluate_together, 2, blocks):
        for alone, together, losses in rank:
            assert len({float(loss) for loss, _ in alone}) == 4
            for (loss, out), (loss_2, out_2), (loss_3, _) in zip(alone, together, losses, strict=True):
                assert torch.allclose(loss, loss_2, rtol=1e-6) and torch.allclose(loss, loss_3, rtol=1e-6)
                assert torch.allclose(out, out_2, atol=1e-6)


def test_more_batches_at_once_run_on_the_code_that_one_has() -> None:
    job = Job(PLAN)
    job.asked = ("row",)
    job.evaluator.evaluate([rows_of(6)], outputs=("row",), needs_loss=True)
    job.log.clear()
    found = job.evaluator.evaluate([rows_of(6), rows_of(6)], outputs=("row",), needs_loss=True)
    assert [text for text in job.log if text.startswith(("runner", "code"))] == [
        "runner of 8", "code of 4", "runner of 4", "code of 2",
    ]  # fmt: skip
    assert [loss for loss, _ in found] == [2.5, 2.5]
    assert all(outputs["row"].equal(rows_of(6)["x"]) for _, outputs in found)


def test_many_batches_run_without_an_agreement_between_them() -> None:
    job = Job(plan_of((("a",), (0,), 1), unit=1))
    job.asked, sums = ("row",), []
    collectives: Any = job.evaluator._collectives
    collectives.sum = lambda value, what: sums.append(what) or value + 0.0
    batches = [UnitBatch(units=tuple({"x": torch.full((1, 2), n + i)} for i in (0.0, 0.5))) for n in range(7)]
    found = job.evaluator.evaluate(batches, outputs=("row",), needs_loss=True)
    runners = [text for text in job.log if text.startswith("runner")]
    assert runners == ["runner of 8", "runner of 4", "runner of 2"], "7 are 4, 2 and 1"
    assert [loss for loss, _ in found] == [n + 0.25 for n in range(7)]
    for batch, (_, outputs) in zip(batches, found, strict=True):
        assert all(own.equal(unit["x"]) for own, unit in zip(outputs["row"], batch.units, strict=True))
    assert len(sums) == 1


def test_units_of_their_own_shapes_are_never_joined_and_come_back_in_their_order() -> None:
    units = tuple({"x": torch.full((1, width), float(width))} for width in (3, 1, 2, 5))
    loss, outputs = Job(plan_of((("a",), (0,), 1), unit=1)).evaluate(
        UnitBatch(units=units, given=(2, 0, 3, 1)), "row"
    )
    assert loss == pytest.approx(11 / 4)
    assert [tensor.shape[1] for tensor in outputs["row"]] == [1, 5, 3, 2]


def test_the_last_graphs_and_runners_are_kept() -> None:
    job = Job(PLAN)
    for number in range(MAX_GRAPHS):
        job.evaluate({**rows_of(4), "constant": number})
    job.evaluate({**rows_of(4), "constant": 0})
    job.log.clear()
    job.evaluate({**rows_of(4), "constant": MAX_GRAPHS})
    job.evaluate({**rows_of(4), "constant": 0})
    assert [line for line in job.log if "capture" in line] == ["capture ['constant', 'x']"], (
        "used again lately"
    )
    job.evaluate({**rows_of(4), "constant": 1})
    assert sum("capture" in line for line in job.log) == 2, "the oldest is gone, with its runners"
    assert "runner of 4" in job.log[-3:]
    sizes = Job(PLAN)
    for count in range(1, MAX_RUNNERS + 1):
        sizes.evaluate(rows_of(4 * count))
    sizes.evaluate(rows_of(4))
    sizes.log.clear()
    sizes.evaluate(rows_of(4 * MAX_RUNNERS + 4))
    sizes.evaluate(rows_of(4))
    made = ["attached", f"runner of {4 * MAX_RUNNERS + 4}", "code of 8", "complete", "attached"]
    assert sizes.log == made
    sizes.evaluate(rows_of(8))
    assert "runner of 8" in sizes.log
