"""What micro-batches keep, by storage: views of a rank's own tensors, halves, what several stages share."""

from __future__ import annotations

import torch
from torch import Tensor

from gpp_plugin.runtime.memory.keeper import KeepAll, StageKeeper

ROW = 4 * 4
"""Bytes of a row of four floats."""


def keeper_of() -> StageKeeper:
    """Return a stage that keeps the square of its weight's product: what it receives, and one tensor of its own."""

    def call(weight: Tensor, received: Tensor) -> tuple[Tensor, ...]:
        return ((received * weight).square(),)

    policy = KeepAll(call)
    return StageKeeper(whole=policy, half=policy, leaves=(0,), constants=())


def test_of_a_tensor_handed_over_the_rows_a_stage_was_given_are_its_own() -> None:
    weight = torch.ones(4, requires_grad=True)
    keeper = keeper_of()
    made = torch.ones(8, 4)
    keeper.start_counting()
    keeper.forward(0, None, [weight], [], [made[2:5]])
    counts = keeper.stop_counting()
    assert counts is not None and counts.held_bytes == 3 * ROW + 3 * ROW, "received rows, and their product"


def test_halves_of_a_received_tensor_are_kept_as_one() -> None:
    weight = torch.ones(4, requires_grad=True)
    keeper = keeper_of()
    arrived = torch.ones(6, 4)
    keeper.start_counting()
    keeper.forward(0, 0, [weight], [], [arrived[:2]])
    keeper.forward(0, 1, [weight], [], [arrived[2:]])
    counts = keeper.stop_counting()
    assert counts is not None and counts.held_bytes == 6 * ROW + 2 * ROW + 4 * ROW
