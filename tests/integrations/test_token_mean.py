"""The mean over labelled tokens equals one process with HuggingFace's `num_items_in_batch`, whatever the cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gpp_plugin.integrations.huggingface.model_inputs import count_labelled
from tests.integrations import unit_jobs as jobs
from tests.ranks import run_kept_ranks

TWO_BY_TWO = {"stages": 2, "data_parallel": 2}


@pytest.fixture(
    scope="module",
    params=[
        ("llava", 3, 0, "iterator", {"data_parallel": 1}),
        ("gpt2", 4, 1, "iterator", TWO_BY_TWO),
        ("gpt2", 4, 0, "plain", TWO_BY_TWO),
        ("llava", 4, 1, "collated", TWO_BY_TWO),
        ("gpt2", 1, 0, "plain", {}),
        ("gpt2", 2, 1, "plain", {"stages": 1, "data_parallel": 2}),
    ],
    ids=lambda case: "-".join(map(str, case[:4])),
)
def answers(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Return what each rank found: of a model, on some ranks, with a stage of ZeRO and a loader."""
    name, ranks, *others = request.param
    return run_kept_ranks(jobs.token_mean, ranks, name, *others)


def test_losses_and_gradients_equal_one_process(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        assert answer["losses"] == pytest.approx(answer["wanted"], rel=1e-6)
        assert abs(answer["by_units"] / answer["losses"][0] - 1) > 1e-5, "units have as many labels each"
        assert answer["errors"]
        assert max(answer["errors"].values()) < 2e-6


def test_evaluations_equal_one_process(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        assert answer["evaluated"] == pytest.approx(answer["wanted_evaluated"], rel=2e-6)


@pytest.mark.parametrize(
    ("loss_type", "is_encoder_decoder", "expected"),
    [("ForCausalLM", False, 2 + 3 + 1), ("ForCausalLM", True, 3 + 3 + 2), ("ForMaskedLM", False, 3 + 3 + 2)],
)
def test_labels_that_are_targets_are_counted(loss_type: str, is_encoder_decoder: bool, expected: int) -> None:
    """Two rows of a batch, and one of another; of a decoder the first of each is nobody's target."""
    model = nn.Module()
    model.loss_type = loss_type  # type: ignore[assignment]
    model.config = SimpleNamespace(is_encoder_decoder=is_encoder_decoder)  # type: ignore[assignment]
    rows = torch.tensor([[5, 6, -100, 7], [-100, 8, 9, 0]]), torch.tensor([[3, -100, 4]])
    batches = [{"labels": labels} for labels in rows]
    assert int(count_labelled(model, batches)) == expected
    shifted = [*batches, {"labels": rows[1], "shift_labels": torch.tensor([[1, 2, -100]])}]
    assert int(count_labelled(model, shifted)) == expected + 2
