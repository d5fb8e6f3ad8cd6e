"""Whether a model keeps samples of one row apart is found out by running one of them alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpp_plugin.data import flatten
from gpp_plugin.model.graph.probe import LARGEST_ERROR, last_sample, mixes_packed_rows
from gpp_plugin.model.verification import copy_model
from tests.models import build


def gpt2(**options: Any) -> nn.Module:
    return copy_model(build("gpt2", **options)[0], device=torch.device("cpu"))


def call(module: nn.Module, given: dict[str, Any]) -> Any:
    return module(**given)


def row(lengths: tuple[int, ...] = (5, 4, 6)) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return flatten([{"input_ids": torch.randint(3, 20, (n,), generator=generator)} for n in lengths])


def test_gpt2_keeps_them_apart_where_its_rows_have_positions_and_no_mask() -> None:
    model = gpt2(dropout=0.1)
    given = row()
    before = {key: value.clone() for key, value in given.items()}
    assert mixes_packed_rows(model, given, call=call) < LARGEST_ERROR / 10
    assert model.training
    assert all(torch.equal(given[key], before[key]) for key in given)


@pytest.mark.parametrize("loses", ["mask", "positions"])
def test_a_model_that_makes_nothing_of_positions_mixes_them(loses: str) -> None:
    model = gpt2()

    def forgetful(module: nn.Module, given: dict[str, Any]) -> Any:
        if loses == "positions":
            return module(**{key: value for key, value in given.items() if key != "position_ids"})
        return module(**given, attention_mask=torch.ones_like(given["input_ids"]))

    assert mixes_packed_rows(model, row(), call=forgetful) > 10 * LARGEST_ERROR


def test_a_loss_is_compared_where_there_is_nothing_else() -> None:
    model = gpt2()

    def loss(module: nn.Module, given: dict[str, Any]) -> dict[str, Tensor]:
        return {"loss": module(**given).loss}

    def of_all(module: nn.Module, given: dict[str, Any]) -> dict[str, Tensor]:
        return loss(module, {**given, "attention_mask": torch.ones_like(given["input_ids"])})

    assert mixes_packed_rows(model, row(), call=loss) < LARGEST_ERROR / 10
    assert mixes_packed_rows(model, row(), call=of_all) > LARGEST_ERROR


@pytest.mark.parametrize("least", [float("-inf"), torch.finfo(torch.float32).min])
def test_masked_logits_hide_nothing(least: float) -> None:
    model = gpt2()

    def masked(module: nn.Module, given: dict[str, Any]) -> dict[str, Tensor]:
        logits = module(**given).logits
        return {"logits": logits.masked_fill(torch.arange(logits.shape[-1]) % 3 == 0, least)}

    def of_all(module: nn.Module, given: dict[str, Any]) -> dict[str, Tensor]:
        return masked(module, {**given, "attention_mask": torch.ones_like(given["input_ids"])})

    assert mixes_packed_rows(model, row(), call=masked) < LARGEST_ERROR / 10
    assert mixes_packed_rows(model, row(), call=of_all) > 10 * LARGEST_ERROR


def test_only_rows_that_are_known_to_hold_several_samples_are_looked_at() -> None:
    assert last_sample(row()) == 9
    assert last_sample(row((5,))) is None
    assert last_sample({"input_ids": torch.ones(1, 4)}) is None
    assert last_sample({**row(), "attention_mask": torch.ones(1, 15)}) is None
    assert mixes_packed_rows(nn.Linear(1, 1), row((5,)), call=call) is None


def test_what_has_no_value_a_token_stays_as_it_is() -> None:
    others = {"pixels": torch.ones(3, 7, 2), "scale": torch.ones(15), "name": "a text"}
    calls: list[dict[str, Any]] = []

    def noting(module: nn.Module, given: dict[str, Any]) -> dict[str, Tensor]:
        calls.append(given)
        return {"loss": torch.ones(())}

    assert mixes_packed_rows(nn.Linear(1, 1), {**row(), **others}, call=noting) == 0.0
    for given, length in zip(calls, (15, 6), strict=True):
        assert given["input_ids"].shape == given["position_ids"].shape == (1, length)
        assert all(given[key] is value for key, value in others.items())
