"""Steps that are skipped for gradients that are not finite end a job, which says in which module they first appear."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpp_plugin.engine.non_finite import Found, SkippedSteps, first_found
from gpp_plugin.engine.stage_step import StepResult
from gpp_plugin.errors import RuntimeFailure
from tests.integrations.engine_jobs import B, config_of, make_engine, said_of, steps
from tests.models import build
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


def train_to_the_end(locate: bool) -> tuple[int, str, str, bool]:
    """Train on batches of which the third micro-batch breaks; return steps, error, the next one's, and weights."""
    batch = {"x": torch.rand(B, 8, generator=torch.Generator().manual_seed(0))}
    bad = {"x": batch["x"].clone()}
    bad["x"][4, 0] = 100.0
    block = {"stages": 2, "max_skipped_steps": STEPS_ALLOWED, "locate_nan": locate}
    engine = make_engine(Net(breaking=2), batch, config_of(block=block))
    engine.train_batch(iter([batch]))
    before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    done, said = 0, said_of(lambda: engine.train_batch(iter([bad])))
    while not said and done < 2 * STEPS_ALLOWED:
        done, said = done + 1, said_of(lambda: engine.train_batch(iter([bad])))
    is_unchanged = all(torch.equal(before[name], p) for name, p in engine.module.named_parameters())
    return done, said, said_of(lambda: engine.train_batch(iter([batch]))), is_unchanged


def test_steps_that_are_all_skipped_end_the_job_on_every_rank() -> None:
    for done, said, after, is_unchanged in run_kept_ranks(train_to_the_end, 2, False):
        assert done == STEPS_ALLOWED - 1
        assert said.startswith("RuntimeFailure: 3 steps running were skipped (steps 2 to 4)")
        assert "set graph_pipeline.locate_nan to see where" in said
        assert after == "" and is_unchanged


def test_the_module_and_micro_batch_of_the_first_nan_are_named() -> None:
    for _, said, after, is_unchanged in run_kept_ranks(train_to_the_end, 2, True):
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


def skip_one(block: dict[str, Any], config: dict[str, Any], bad: float) -> dict[str, Any]:
    """Train on a batch, one with a number that is not finite, and another; beside a run without the second."""
    answer: dict[str, Any] = {}
    for with_bad in (False, True):
        model, make_batch = build("clip", layers=1)
        engine = make_engine(model, make_batch(B, 0), config_of(block=block, **config))
        losses = steps(engine, [make_batch(B, 0)])
        if with_bad:
            before = {name: value.clone() for name, value in engine.module_state_dict().items()}
            spoiled = make_batch(B, 1)
            spoiled["pixel_values"][5, 0, 0, 0] = bad
            steps(engine, [spoiled])
            after = engine.module_state_dict()
            answer["same"] = all(torch.equal(value, after[name]) for name, value in before.items())
            answer["skipped"] = engine.skipped_steps
        losses += steps(engine, [make_batch(B, seed) for seed in (2, 3)])
        answer[with_bad] = losses
        engine.destroy()
    return answer


IN_PARTS: dict[str, tuple[dict[str, Any], int]] = {
    "ZeRO 3": ({"stages": 1, "data_parallel": 2}, 3),
    "tensor ranks": ({"stages": 1, "tensor_parallel": 2}, 0),
}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("setup", list(IN_PARTS))
def test_ranks_with_parts_of_the_weights_skip_together(setup: str, precision: str, bad: float) -> None:
    block, zero = IN_PARTS[setup]
    config: dict[str, Any] = {"zero_optimization": {"stage": zero}}
    if precision != "fp32":
        config[precision] = {"enabled": True}
    answers = run_kept_ranks(skip_one, 2, block, config, bad)
    for answer in answers:
        assert answer["skipped"] == 1 and answer["same"]
        assert answer[True] == answer[False] == answers[0][True], "as if the mini-batch had not been"


def test_where_numbers_are_first_not_finite_is_the_earliest_forward_of_any_rank() -> None:
    places = (((1, 0), "a backward"), ((0, 3), "3"), ((0, 2), "2"))
    found = [None, *(Found(order=order, place=place) for order, place in places)]
    for told, place in ((found, "2"), (found[:2], "a backward"), (found[:1] * 2, "")):
        collectives: Any = SimpleNamespace(gather=lambda own, what, told=told: told)
        assert first_found(None, collectives) == place
