"""Memory optimization through the engine: it trains as without, does what is planned, reports it, or refuses."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch

from gpp_plugin.ir.memory_report import COUNTED
from gpp_plugin.ir.plan import PipelinePlan, cost_key
from gpp_plugin.plan.costs.memory_formula import expected_counts
from gpp_plugin.report.plan_text import format_memory_report
from tests.integrations.engine_jobs import (
    B,
    U,
    check_training,
    config_of,
    logged,
    make_engine,
    said_of,
    steps_and_gradients,
)
from tests.models import build
from tests.ranks import run_kept_ranks
from tests.reference import train_reference

LOGGER = "gpp_plugin.engine.memory_watch"


def about_memory(records: list[logging.LogRecord]) -> list[tuple[str, str]]:
    """Return levels and lines of what the package logged about memory."""
    lines = [(record.levelname, record.getMessage()) for record in records]
    return [(level, text) for level, text in lines if text.startswith("memory: ")]


def train_with(
    name: str, blocks: list[dict[str, Any]], dropout: float = 0.0, zero: int = 0
) -> list[dict[str, Any]]:
    """Train two steps of a small model under each block; return losses, gradients and the memory report."""
    answers = []
    for block in blocks:
        model, make_batch = build(name, layers=1 if name == "t5" else 2, dropout=dropout)
        batches = [make_batch(B, seed) for seed in range(2)]
        sharding = {"zero_optimization": {"stage": zero}}
        with logged(LOGGER) as records:
            engine = make_engine(model, batches[0], config_of(block={"stages": 2, **block}, **sharding))
            torch.manual_seed(7 + engine.global_rank)
            losses, gradients = steps_and_gradients(engine, batches)
        answers.append(
            {
                "losses": losses,
                "gradients": gradients,
                "plan": engine.plan,
                "report": engine.memory_report(),
                "lines": about_memory(records),
            }
        )
        engine.destroy()
    return answers


def train_misinformed(name: str, planned: int) -> list[tuple[str, str]]:
    """Train a step after the plan's figure for its fullest stage was changed; return what was logged."""
    model, make_batch = build(name)
    batch = make_batch(B, 0)
    engine = make_engine(model, batch, config_of(block={"planner": "uniform", "stages": 2, "slicing": "off"}))
    memory = list(engine.plan.memory)
    fullest = max(range(len(memory)), key=lambda stage: memory[stage].activations)
    in_flight = engine.plan.stages[fullest].in_flight
    memory[fullest] = dataclasses.replace(memory[fullest], activations=planned * in_flight)
    engine._memory._plan = dataclasses.replace(engine.plan, memory=tuple(memory))
    with logged(LOGGER) as records:
        engine.train_batch(data_iter=iter([batch]))
    return about_memory(records)


def refusal(block: dict[str, Any]) -> str:
    """Return what initialize says of a plan that cannot be."""
    model, make_batch = build("two_branch")
    return said_of(lambda: make_engine(model, make_batch(B, 0), config_of(block={"stages": 2, **block})))


def destroy() -> tuple[int, int, int, str]:
    """Return the process groups before, with and after an engine, and what it says to another step."""
    import torch.distributed as dist

    def count() -> int:
        return len(dist.distributed_c10d._world.pg_map)

    before = count()
    model, make_batch = build("two_branch")
    batch = make_batch(B, 0)
    engine = make_engine(model, batch, config_of(block={"stages": 2}))
    engine.train_batch(data_iter=iter([batch]))
    engine.eval_batch(iter([batch]))
    during = count()
    engine.destroy()
    engine.destroy()
    said = said_of(lambda: engine.train_batch(data_iter=iter([batch])))
    return before, during, count(), said


LIMIT_BYTES = 250_000
"""Less than the 286 kB of the first stage, more than the 232 kB it needs with everything recomputed."""
OFF = {"recompute": "off", "swap": "off"}
STAGES = {"stages": [{"modules": ["encoder"], "ranks": [0]}, {"modules": ["*"], "ranks": [1]}]}
Answers = dict[str, list[dict[str, Any]]]


def block(*, tight: bool = False, **memory: Any) -> dict[str, Any]:
    """Return a block for two stages; the first one's device is ample, or too small to keep all."""
    devices = [
        {"name": "cpu", "memory_gb": memory_gb, "tflops": 0.05, "memory_gb_per_s": 10.0}
        for memory_gb in (LIMIT_BYTES / 1e9 if tight else 1.0, 1.0)
    ]
    links = [{"name": "memory", "gb_per_s": 5.0}]
    return {
        "plan": STAGES, "stages": "auto", "schedule": "1f1b", "slicing": "off", "memory": memory,
        "cluster": {"name": "here", "devices": devices, "links": links},
    }  # fmt: skip


BLOCKS = {
    "plain": block(**OFF),
    "ample": block(),
    "full": block(recompute="full"),
    "recompute": block(tight=True, swap="off"),
    "swap": block(tight=True, recompute="off"),
}


@pytest.fixture(scope="module")
def answers() -> Answers:
    """T5 with dropout: its decoder's stage has shared masks, random operators and a received encoding."""
    per_rank = run_kept_ranks(train_with, 2, "t5", list(BLOCKS.values()), 0.1, timeout_s=280)
    return {name: [found[i] for found in per_rank] for i, name in enumerate(BLOCKS)}


def memory_of(plan: PipelinePlan) -> list[Any]:
    return [stage.memory for stage in plan.stages]


@pytest.mark.parametrize("name", [name for name in BLOCKS if name != "plain"])
def test_losses_and_gradients_are_those_of_the_plain_plan(answers: Answers, name: str) -> None:
    for found, plain in zip(answers[name], answers["plain"], strict=True):
        assert found["losses"] == plain["losses"]
        assert found["gradients"].keys() == plain["gradients"].keys()
        assert all(torch.equal(g, plain["gradients"][key]) for key, g in found["gradients"].items())


def test_swapped_parts_of_weights_have_the_bits_of_zero_2() -> None:
    """ZeRO 3 on the encoder's two ranks, which swap; the second stage's one has nothing to gather."""
    placed = block(recompute="off")
    placed["plan"] = {"stages": [{"modules": ["encoder"], "ranks": [0, 1]}, {"modules": ["*"], "ranks": [2]}]}
    first, last = placed["cluster"]["devices"]
    tight = {**first, "memory_gb": 190_000 / 1e9}  # less than the 198 kB without
    placed["cluster"]["devices"] = [tight, tight, last]
    placed["micro_batch_sizes"] = 2
    two, three = (run_kept_ranks(train_with, 3, "t5", [placed], 0.1, zero) for zero in (2, 3))
    assert memory_of(three[0][0]["plan"])[0].swapped
    assert three[0][0]["plan"].stages[0].sharded_bytes and not two[0][0]["plan"].stages[0].sharded_bytes
    for (found,), (wanted,) in zip(three, two, strict=True):
        assert found["losses"] == wanted["losses"] and found["gradients"].keys() == wanted["gradients"].keys()
        assert all(torch.equal(g, wanted["gradients"][key]) for key, g in found["gradients"].items())


def test_where_memory_is_ample_nothing_changes(answers: Answers) -> None:
    plan = answers["ample"][0]["plan"]
    assert memory_of(plan) == memory_of(answers["plain"][0]["plan"]) == [None, None]


def test_each_does_what_it_is_allowed_to(answers: Answers) -> None:
    full = answers["full"][0]["plan"]
    assert all(memory.recomputed and not memory.swapped for memory in memory_of(full))
    assert ("encoder.block.0",) in {segment.blocks for segment in full.stages[0].memory.recomputed}
    recomputed, swapped = (answers[name][0]["plan"] for name in ("recompute", "swap"))
    (again, none), (away, nothing) = memory_of(recomputed), memory_of(swapped)
    assert again.recomputed and not again.swapped and none is None
    assert away.swapped and not away.recomputed and nothing is None
    assert max(plan.stages[0].memory_bytes for plan in (recomputed, swapped)) <= LIMIT_BYTES


@pytest.mark.parametrize("name", BLOCKS)
def test_what_is_planned_is_what_happens(answers: Answers, name: str) -> None:
    first, second = answers[name]
    assert first["report"] == second["report"]
    assert first["report"].measure == COUNTED and first["report"].differences == ()
    plan = first["plan"]  # `engine.plan` has the ledger that commands print
    assert plan.cost.plan == cost_key(plan) and plan.cost.step_us == plan.iteration_us
    assert [rank.predicted.total for rank in first["report"].ranks] == [held.held for held in plan.cost.ranks]
    for rank in first["report"].ranks:
        expected = expected_counts(first["plan"], rank.rank)
        assert expected is not None and rank.counts is not None and rank.predicted is not None
        for field in ("held_bytes", "peak_held_bytes", "swapped_bytes", "recomputed_bytes"):
            assert getattr(rank.counts, field) == pytest.approx(getattr(expected, field), rel=0.02), field
        assert rank.held.weights == rank.predicted.weights
        assert rank.held.gradients == rank.predicted.gradients
        assert rank.held.buffers == rank.predicted.inputs > 0
        assert rank.held.optimizer == pytest.approx(
            rank.predicted.optimizer, rel=0.02
        )  # and its step counters
        assert 0 < rank.measured_peak_bytes <= rank.predicted_peak_bytes
    assert [level for level, _ in first["lines"]] == ["INFO"] and second["lines"] == []
    text = format_memory_report(first["report"])
    assert "encoder" in text and "fullest is stage" in text


@pytest.mark.parametrize(("planned", "level"), [(100, "WARNING"), (1_000_000, "INFO")])
def test_a_rank_that_holds_more_or_less_than_planned_is_named_once(planned: int, level: str) -> None:
    """The plan is told a wrong figure: the engine says which stage is off, on rank 0; less than planned harms nobody."""
    found = run_kept_ranks(train_misinformed, 2, "two_branch", planned, timeout_s=90)
    lines = [(how, line) for how, line in found[0] if "are planned" in line]
    assert [how for how, _ in lines] == [level] and found[1] == []
    assert "' on rank 0 holds" in lines[0][1] and lines[0][1].endswith("00 are planned"), lines


def test_what_fits_nowhere_is_refused_before_the_first_step_on_every_rank() -> None:
    lines = run_kept_ranks(refusal, 2, {"memory": {"limit_gb": 1e-6}}, timeout_s=90)
    assert lines[0] == lines[1]
    assert lines[0].count("\n") == 0 and "bytes" in lines[0] and "too many" in lines[0]


@pytest.mark.parametrize("planner", ["dawnpiper", "uniform"])
def test_single_operators_are_planned_and_trained(planner: str) -> None:
    given = {"planner": planner, "granularity": "node", "slicing": "off"}
    per_rank = run_kept_ranks(train_with, 2, "two_branch", [given], timeout_s=120)
    model, make_batch = build("two_branch")
    reference = train_reference(model, [make_batch(B, seed) for seed in range(2)], unit=U)
    check_training([found for (found,) in per_rank], reference)
    assert all(found["report"].differences == () for (found,) in per_rank)
    assert sum(len(stage.blocks) for stage in per_rank[0][0]["plan"].stages) > 10


def test_a_destroyed_engine_lets_go_of_its_groups_and_trains_no_more() -> None:
    for before, during, after, error in run_kept_ranks(destroy, 2, timeout_s=90):
        assert during > before == after
        assert "its engine was destroyed" in error
