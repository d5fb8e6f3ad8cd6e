"""Steps that are skipped for gradients that are not finite end a job, which says in which module they first appear."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpp_plugin.engine.metrics import Found, SkippedSteps, first_found
from gpp_plugin.engine.stage_step import StepResult
from gpp_plugin.errors import RuntimeFailure
from tests.integrations.engine_jobs import B, config_of, make_engine, said_of
from tests.ranks import run_kept_ranks

STEPS_ALLOWED = 3


class Layer(nn.Module):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        # the root of what is below 0 in the samples that are marked by a large first number
        return torch.sqrt(x.clamp(min=1e-3) - 1e6 * (x[:, :1] > 50).float()) if self.breaks else torch.relu(x)


class Net(nn.Module):
    def __init__(self, breaking: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(i == breaking) for i in range(4)])
        with torch.no_grad():
            for layer in self.layers:
                layer.linear.weight.copy_(torch.eye(8))
                layer.linear.bias.zero_()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().mean()}


def train_to_the_end() -> tuple[int, str, str, bool]:
    """Train on batches of which the third micro-batch breaks; return steps, error, the next one's, and weights."""
    batch = {"x": torch.rand(B, 8, generator=torch.Generator().manual_seed(0))}
    bad = {"x": batch["x"].clone()}
    bad["x"][4, 0] = 100.0
    block = {"stages": 2, "max_skipped_steps": STEPS_ALLOWED, "locate_nan": True}
    engine = make_engine(Net(breaking=2), batch, config_of(block=block))
    engine.train_batch(iter([batch]))
    before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    done, said = 0, said_of(lambda: engine.train_batch(iter([bad])))
    while not said and done < 2 * STEPS_ALLOWED:
        done, said = done + 1, said_of(lambda: engine.train_batch(iter([bad])))
    is_unchanged = all(torch.equal(before[name], p) for name, p in engine.module.named_parameters())
    return done, said, said_of(lambda: engine.train_batch(iter([batch]))), is_unchanged


def test_the_module_and_micro_batch_of_the_first_nan_are_named() -> None:
    for done, said, after, is_unchanged in run_kept_ranks(train_to_the_end, 2):
        assert done == STEPS_ALLOWED - 1 and "3 steps running were skipped (steps 2 to 4)" in said
        assert "module layers.2" in said and "(operator sqrt" in said, said
        assert "in micro-batch 2" in said
        assert after == "" and is_unchanged


def step_of(overflow: bool, scale: float = 1.0) -> StepResult:
    return StepResult(loss_scale=scale, overflow=overflow, grad_norm=0.0, learning_rates=())


def test_only_skipped_steps_running_count_and_none_while_the_loss_scale_sinks() -> None:
    skipped = SkippedSteps(3)
    number = itertools.count(1)
    for overflow in (True, True, False, True, True):  # of two running each
        skipped.count(step_of(overflow), number=next(number))
    with pytest.raises(RuntimeFailure, match=r"3 steps running were skipped \(steps 4 to 6\)"):
        skipped.count(step_of(True), number=next(number))
    for _ in range(2):
        skipped.count(step_of(True), number=next(number))
    with pytest.raises(RuntimeFailure, match=r"\(steps 7 to 9\): .*since: layers.1; lower"):
        skipped.count(step_of(True), number=next(number), where="layers.1")
    sinking = SkippedSteps(2)
    # the first is not lower than one before it: it counts, and the others do not
    for scale in (8.0, 4.0, 2.0, 1.0):
        sinking.count(step_of(True, scale), number=next(number))
    with pytest.raises(RuntimeFailure, match=r"2 steps running were skipped \(steps 13 to 14\)"):
        sinking.count(step_of(True, 1.0), number=next(number))
    for _ in range(100):
        SkippedSteps(None).count(step_of(True), number=next(number))


def test_where_numbers_are_first_not_finite_is_the_earliest_forward_of_any_rank() -> None:
    places = (((1, 0), "a backward"), ((0, 3), "3"), ((0, 2), "2"))
    found = [None, *(Found(order=order, place=place) for order, place in places)]
    for told, place in ((found, "2"), (found[:2], "a backward"), (found[:1] * 2, "")):
        collectives: Any = SimpleNamespace(gather=lambda own, what, told=told: told)
        assert first_found(None, collectives) == place
