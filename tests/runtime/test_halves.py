"""Forwards in halves and backwards in two parts, on real models: the gradients of a single process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.block_graph import Block, BlockGraph
from gpp_plugin.runtime.rank_programs import make_programs
from tests.runtime.jobs import by_hand
from tests.runtime.test_equality import check_each
from tests.schedule.plans import simple_plan
from tests.tiers import some

SLICED: dict[str, Any] = {"num_sliced": 2}
JOINED: dict[str, Any] = {"num_sliced": 2, "joins_last_slice": True}
SPLIT: dict[str, Any] = {"schedule": "zero_bubble"}


FOUR = {"micro_batch_size": 4}

# model, its stages but the loss, and what is changed of each
THREE_RANKS: dict[str, tuple[str, tuple[Any, ...], dict[int, dict[str, Any]]]] = {
    "halves on both branches of a CLIP, the loss split": (
        "clip", ("text_model", {"modules": ["vision_model"], **FOUR}), {0: SLICED, 1: JOINED, 2: SPLIT},
    ),
    "halves across a skip": ("diamond", ("stem", "up"), {0: JOINED, 1: SLICED}),
    "halves around an edge without a batch axis": (
        "shared_bias", ("bias", {"modules": ["first"], **FOUR}), {0: SLICED, 1: JOINED},
    ),
    "split backwards around an edge without a batch axis": (
        "shared_bias", ("bias", "first"), {0: SPLIT, 1: SPLIT, 2: SPLIT},
    ),
    "halves and split backwards of a T5": (
        "t5", ("encoder", "decoder"), {0: SLICED, 1: SLICED | SPLIT, 2: SPLIT},
    ),
}  # fmt: skip


def test_halves_and_split_backwards_equal_a_single_process() -> None:
    named = {}
    for name in some(THREE_RANKS, every=2):
        model, stages, overrides = THREE_RANKS[name]
        named[name] = by_hand(model, *stages, steps=2, overrides=overrides)
    for one, answers in zip(named.values(), check_each(named, 3), strict=True):
        for i, change in one["overrides"].items():
            wanted = (change.get("schedule", "1f1b"), change.get("num_sliced", 0))
            assert answers[0]["schedules"][i] == wanted


def test_a_stage_that_mixes_samples_refuses_halves() -> None:
    graph = BlockGraph(
        model="toy", num_samples=2, edges=(), tensors={}, loss_block="loss", tied={},
        blocks=(Block(name="loss", is_coupled=True),),
    )  # fmt: skip
    plan = simple_plan([2], [], mini_batch=8).with_each(name=["loss"], blocks=[("loss",)], num_sliced=[1])
    reference: Any = SimpleNamespace(analysis=SimpleNamespace(is_training=True), block_graph=graph)
    with pytest.raises(
        PlanError, match=r"stage 'loss': num_sliced is 1, .* mixes samples .* set num_sliced to 0"
    ):
        make_programs(plan, reference)
