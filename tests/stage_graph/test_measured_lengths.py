"""A part's costs as functions of lengths: found by measuring at a few, true at others."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from gpp_plugin.capture.tracing.sample_batches import with_lengths
from gpp_plugin.ir.profile import Profile
from gpp_plugin.model.graph.captured_part import CapturedPart, whole_part
from gpp_plugin.model.measure_lengths import LengthsToMeasure, measure_lengths
from gpp_plugin.plan.costs.planned_lengths import inputs_at, profile_at
from gpp_plugin.profile.measure import profile_blocks
from tests.models import build


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


def test_bytes_at_a_length_that_was_not_measured_are_those_of_a_profile_there(tmp_path: Path) -> None:
    model, make_batch = build("gpt2", layers=1)
    batch = make_batch(2, 0)
    part = whole_part(model, batch)
    analysis = part.capture(batch, is_training=True).analysis
    base = profile_of(part, batch, analysis, tmp_path)
    asked = LengthsToMeasure(typical=(8,), longest=16)
    costs = measure_lengths(part, analysis, batch, base, asked, cache_dir=str(tmp_path))
    assert costs is not None
    assert costs.sizes.symbols == {"s0": ("input_ids", 1)}, "the mask and the labels are as long"
    assert costs.fitted == ((4,), (6,), (8,)) and costs.reference == (8,) and costs.longest == (16,)
    longest = with_lengths(batch, dict.fromkeys(("input_ids", "attention_mask", "labels"), 16))
    wanted = profile_of(part, longest, analysis, tmp_path)
    found = profile_at(base, costs, (16,))
    for one, other in zip(found.costs, wanted.costs, strict=True):
        assert one.saved_bytes_per_sample == pytest.approx(other.saved_bytes_per_sample, rel=1e-9)
        assert one.saved_bytes_fixed == pytest.approx(other.saved_bytes_fixed, abs=1e-6)
    assert [s.blocks for s in found.shared] == [s.blocks for s in wanted.shared]
    assert [s.bytes_per_sample for s in found.shared] == pytest.approx(
        [s.bytes_per_sample for s in wanted.shared]
    )
    shapes = {spec.name: spec.shape for spec in inputs_at(analysis.op_graph.inputs, costs, (16,))}
    assert shapes == dict.fromkeys(("input_ids", "attention_mask", "labels"), (2, 16))


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
    asked = LengthsToMeasure(typical=(12, 24), longest=32)
    with caplog.at_level(logging.WARNING):
        assert measure_lengths(part, analysis, batch, base, asked, cache_dir=str(tmp_path)) is None
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("lengths:")]
    assert "costs and memory are those of the sample batch" in line and "GPT2LMHeadModel" in line
