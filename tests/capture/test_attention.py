"""Captured attention is called as eager models call it, with and without padding, family by family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gpp_benchmarks._attention_models import FAMILIES, PADDINGS, Size, build_family
from gpp_plugin.capture.export import capture_model
from tests.capture.attention_calls import OneStage, recorded_attention
from tests.capture.graphs import Calls

SIZE = Size(layers=1)
CASES = [(name, at) for name, family in FAMILIES.items() for at in ("none", "left")[: 1 + family.is_padded]]


@pytest.mark.parametrize(("name", "captured_at"), CASES)
def test_calls_losses_and_gradients_equal_eagers(name: str, captured_at: str) -> None:
    # captured with one padding, run with each: what attention is called with, the loss, every gradient
    model, make_batch = build_family(name, SIZE)
    stage = OneStage(model, make_batch(captured_at))
    for padding in PADDINGS if FAMILIES[name].is_padded else ("none",):
        batch = make_batch(padding)
        own, own_gradients, found = stage.run(stage.code(batch), batch)
        model.zero_grad()
        with recorded_attention() as wanted:
            loss = model(**batch).loss
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert found == wanted and wanted, padding
        torch.testing.assert_close(own, loss.detach(), rtol=1e-6, atol=1e-6)
        assert own_gradients.keys() == gradients.keys()
        for key, gradient in gradients.items():
            assert (own_gradients[key] - gradient).norm() <= 1e-6 * max(gradient.norm(), 1e-2), (padding, key)


def own_mask(model: Any, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Return a loss of x [samples, 6, 4] and keep [samples, 6]: of one attention whose mask the model makes itself."""
    length = x.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
    if model.make == "causal":
        mask = mask & keep.bool()[:, None, :]
    elif model.make == "all":
        mask = keep.bool()[:, None, :].expand(-1, length, -1)
    elif model.make == "window":
        mask = mask.triu(-2) & keep.bool()[:, None, :]
    elif model.make == "written":
        mask = mask.clone()
        mask[0, 1] = True
    elif model.make == "own values":
        mask = mask & (x.mean(2) > -9.0)[:, None, :]
    q = model.linear(x)
    if model.make == "float":
        mask = torch.zeros_like(mask, dtype=x.dtype).masked_fill(~mask, -1e9)
    return torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask).square().mean()


@pytest.mark.parametrize(
    ("make", "found"),
    [
        ("constant", [(frozenset(), True)]),
        ("causal", [(frozenset({"keep"}), True)]),
        ("all", [(frozenset({"keep"}), False)]),
        ("window", []),
        ("written", []),
        ("own values", []),
        ("float", []),
    ],
)
def test_masks_are_known_by_their_values(make: str, found: list[tuple[frozenset[str], bool]]) -> None:
    batch = {"x": torch.randn(2, 6, 4), "keep": torch.ones(2, 6, dtype=torch.int64)}
    captured = capture_model(Calls(own_mask, linear=nn.Linear(4, 4), make=make), batch)
    assert [(mask.inputs, mask.is_causal) for mask in captured.masks.values()] == found
    assert captured.analysis.unpadded == tuple(sorted({key for inputs, _ in found for key in inputs}))


def test_a_padded_sample_plans_with_masks() -> None:
    model, make_batch = build_family("llama", SIZE)
    saved = {}
    for padding in ("none", "left"):
        captured = capture_model(model, make_batch(padding))
        saved[padding] = sum(node.saved_bytes for node in captured.op_graph.nodes)
        assert captured.analysis.unpadded == (("attention_mask",) if padding == "none" else ())
    assert saved["none"] < saved["left"]
