"""A part's costs as functions of lengths: found by measuring at a few, true at others."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from gpp_plugin.config.block import LengthsConfig
from gpp_plugin.ir.profile import Profile
from gpp_plugin.model.graph.captured_part import CapturedPart, whole_part
from gpp_plugin.model.measure_lengths import measure_lengths
from gpp_plugin.profile.measure import profile_blocks


def profile_of(part: CapturedPart, batch: dict[str, Any], analysis: Any, cache: Path) -> Profile:
    captured = part.capture_again(analysis, batch)
    state = dict(part.model.named_parameters()) | dict(part.model.named_buffers())
    return profile_blocks(
        captured,
        part.local_graph(captured),
        model_state=state,
        batch=batch,
        sample_counts=(2,),
        cache_dir=cache,
    )


def test_a_model_that_cannot_be_measured_at_other_lengths_is_planned_for_its_sample(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With 8 places this model cannot run 12 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=8, n_embd=16, n_layer=1, n_head=2))
    ids = torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids.clone()}
    part = whole_part(model, batch)
    analysis = part.capture(batch, is_training=True).analysis
    base = profile_of(part, batch, analysis, tmp_path)
    asked = LengthsConfig(typical=[12, 24], max=32)
    with caplog.at_level(logging.WARNING):
        assert measure_lengths(part, analysis, batch, base, asked, cache_dir=str(tmp_path)) is None
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("lengths:")]
    assert "costs and memory are those of the sample batch" in line and "GPT2LMHeadModel" in line
