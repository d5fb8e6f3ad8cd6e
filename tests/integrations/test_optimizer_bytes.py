"""Predicted optimizer bytes are those that the real optimizer holds after a step."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpp_plugin.integrations.deepspeed.optimizer_bytes import STATE_TENSORS, OptimizerBytes, optimizer_bytes

OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("Adam", {}),
    ("Adam", {"amsgrad": True}),
    ("AdamW", {}),
    ("NAdam", {}),
    ("RAdam", {}),
    ("Adamax", {}),
    ("Adadelta", {}),
    ("Rprop", {}),
    ("ASGD", {}),
    ("Adagrad", {}),
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("RMSprop", {}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
]


def held(given: Any = None, dtype: str = "float32", zero: int = 0, **config: Any) -> OptimizerBytes:
    return optimizer_bytes(config, given, stage_of(dtype, dtype, zero), device_type="cuda")


def stage_of(dtype: str, accumulation_dtype: str, zero_stage: int = 0) -> Any:
    return SimpleNamespace(dtype=dtype, accumulation_dtype=accumulation_dtype, zero_stage=zero_stage)


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
def test_the_table_is_true_of_torch(name: str, options: dict[str, Any]) -> None:
    kind = getattr(torch.optim, name)
    parameter = torch.nn.Parameter(torch.ones(64, 64))
    optimizer = kind([parameter], **options)
    in_json = held(optimizer={"type": name, "params": options})
    ways = [held(optimizer), held(functools.partial(kind, **options)), held(lambda p: kind(p, **options))]
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = [v for values in optimizer.state.values() for v in values.values() if isinstance(v, torch.Tensor)]
    measured = sum(t.numel() * t.element_size() for t in state if t.numel() == parameter.numel())
    assert measured == in_json.total * parameter.numel()
    assert all(way == in_json for way in ways) and in_json.assumed == ""


def test_masters_and_sums() -> None:
    assert held(dtype="bfloat16").total == 12.0 == held(zero=1).total
    summed = optimizer_bytes({}, None, stage_of("bfloat16", "float32"), device_type="cuda")
    assert (summed.state, summed.master, summed.sums) == (8.0, 4.0, 4.0)
    offload = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
    assert held(dtype="bfloat16", zero=1, **offload).total == 0.0, "they are on the host"


def test_what_is_assumed_of_an_unknown_optimizer_is_said() -> None:
    class Unheard(torch.optim.SGD):
        """Whatever it keeps."""

    def wants_groups(parameters: Any) -> Any:
        raise KeyError("decay")

    for given, name in (
        (Unheard([torch.nn.Parameter(torch.ones(1))], lr=0.1), "Unheard"),
        (wants_groups, "passed"),
    ):
        found = held(given)
        assert found.state == 8.0 and name in found.assumed and "Adam's" in found.assumed
    assert held(optimizer={"type": "Shampoo"}).assumed
    assert "lion" in STATE_TENSORS and held(optimizer={"type": "Lion"}).total == 4.0
