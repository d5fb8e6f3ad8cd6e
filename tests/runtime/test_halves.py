"""Forwards in halves and backwards in two parts, on real models: the gradients of a single process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.block_graph import Block, BlockGraph
from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.runtime.rank_programs import make_programs
from tests.ranks import run_ranks
from tests.runtime import jobs
from tests.runtime.test_equality import check
from tests.tiers import some

SLICED: dict[str, Any] = {"num_sliced": 2}
JOINED: dict[str, Any] = {"num_sliced": 2, "joins_last_slice": True}
SPLIT: dict[str, Any] = {"schedule": "zero_bubble"}


def job(
    model: str, *stages: dict[str, Any], overrides: dict[int, dict[str, Any]], **options: Any
) -> jobs.Job:
    block = {"plan": {"stages": [*stages, {"name": "loss", "modules": ["*"]}]}}
    return {
        "model": model,
        "mini_batch": 8,
        "unit": 2,
        "steps": 2,
        "block": block,
        "overrides": overrides,
        **options,
    }


def stage(*modules: str, **options: Any) -> dict[str, Any]:
    return {"modules": [*modules], **options}


THREE_RANKS = {
    "halves on both branches of a CLIP, the loss split": job(
        "clip",
        stage("text_model"),
        stage("vision_model", micro_batch_size=4),
        overrides={0: SLICED, 1: JOINED, 2: SPLIT},
    ),
    "halves across a skip": job("diamond", stage("stem"), stage("up"), overrides={0: JOINED, 1: SLICED}),
    "halves around an edge without a batch axis": job(
        "shared_bias", stage("bias"), stage("first", micro_batch_size=4), overrides={0: SLICED, 1: JOINED}
    ),
    "split backwards around an edge without a batch axis": job(
        "shared_bias", stage("bias"), stage("first"), overrides={0: SPLIT, 1: SPLIT, 2: SPLIT}
    ),
    "halves and split backwards of a T5": job(
        "t5", stage("encoder"), stage("decoder"), overrides={0: SLICED, 1: SLICED | SPLIT, 2: SPLIT}
    ),
}


def test_halves_and_split_backwards_equal_a_single_process() -> None:
    names = some(THREE_RANKS, every=2)
    tasks = [THREE_RANKS[name] for name in names]
    per_rank = run_ranks(jobs.train, 3, tasks, timeout_s=240)
    for index, (name, one) in enumerate(zip(names, tasks, strict=True)):
        answers = [of_rank[index] for of_rank in per_rank]
        for i, change in one["overrides"].items():
            wanted = (change.get("schedule", "1f1b"), change.get("num_sliced", 0))
            assert answers[0]["schedules"][i] == wanted
        try:
            check(one, answers)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_a_stage_that_mixes_samples_refuses_halves() -> None:
    graph = BlockGraph(
        model="toy", num_samples=2, edges=(), tensors={}, loss_block="loss", tied={},
        blocks=(Block(name="loss", is_coupled=True),),
    )  # fmt: skip
    plan = PipelinePlan(
        model="toy", graph="", planner="explicit", mini_batch=8, loss_unit=2, edges=(),
        stages=(Stage(name="loss", blocks=("loss",), ranks=(0,), micro_batch_size=2, in_flight=1, num_sliced=1),),
    )  # fmt: skip
    reference: Any = SimpleNamespace(analysis=SimpleNamespace(is_training=True), block_graph=graph)
    with pytest.raises(
        PlanError, match=r"stage 'loss': num_sliced is 1, .* mixes samples .* set num_sliced to 0"
    ):
        make_programs(plan, reference)
