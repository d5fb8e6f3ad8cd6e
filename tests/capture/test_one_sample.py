"""A batch of one sample is captured as any other: by samples, with the operators of two samples."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpp_plugin.capture.export import capture_model
from gpp_plugin.capture.recapture import recapture
from tests.capture.graphs import assert_is_model


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def batch_of(num_samples: int) -> dict[str, torch.Tensor]:
    """Return tokens and labels, and no mask: the model makes positions of one row, and spreads them over samples."""
    ids = torch.randint(0, 64, (num_samples, 8), generator=torch.Generator().manual_seed(num_samples))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("training", [True, False])
def test_one_sample_without_a_mask(training: bool) -> None:
    model = llama()
    one = capture_model(model, batch_of(1), training=training)
    assert not one.analysis.takes_whole_units and one.op_graph.num_samples == 1
    two = capture_model(model, batch_of(2), training=training)
    assert [node.name for node in one.op_graph.nodes] == [node.name for node in two.op_graph.nodes]
    for capture, count in (
        (one, 1),
        (recapture(model, one.analysis, batch_of(3)), 3),
        (recapture(model, two.analysis, batch_of(1)), 1),
    ):
        assert_is_model(capture, model.train(training), batch_of(count))
