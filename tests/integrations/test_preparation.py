"""Planning on rank 0: how often a model is exported before the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpp_plugin.capture.tracing import traced
from gpp_plugin.capture.tracing.sample_batches import count_samples
from gpp_plugin.config.reader import read_config
from gpp_plugin.integrations.deepspeed.dispatch import setting_of
from gpp_plugin.ir.profile import Profile
from gpp_plugin.ir.serialize import load
from gpp_plugin.model.model_source import ModelSource
from tests.integrations.engine_jobs import B, U, config_of
from tests.models import build


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return what will list the number of samples of each export."""
    made: list[int] = []
    export_model = traced.export_model

    def note_and_export(meta_copy: Any, batch: Any, **how: Any) -> Any:
        made.append(count_samples(batch))
        return export_model(meta_copy, batch, **how)

    monkeypatch.setattr(traced, "export_model", note_and_export)
    return made


def start(model: nn.Module, batch: dict[str, Any], config: dict[str, Any]) -> tuple[ModelSource, Any, Any]:
    block = read_config(config)
    assert block is not None
    setting = setting_of(config, rank=0, num_ranks=2, device=torch.device("cpu"), group=None)
    source = ModelSource(model, config=block, setting=setting)
    return source, *source.prepare_plan(batch)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("two_branch", (1, U, B)),
        pytest.param("batch_norm_mlp", (U, B), id="a model that takes no single sample"),
    ],
)
def test_a_second_start_exports_for_the_analysis_only(
    name: str, sizes: tuple[int, ...], exports: list[int], tmp_path: Path
) -> None:
    model, make_batch = build(name)
    batch = make_batch(B)
    config = config_of(block={"stages": 2, "profile_dir": str(tmp_path)})
    analysis = [U, 2 * U]
    _, _, first = start(model, batch, config)
    assert exports == [*analysis, 1, B]
    (stored,) = tmp_path.glob("*.json")
    assert {cost.samples for cost in load(Profile, stored).costs} == {sizes}
    exports.clear()

    source, reference, plan = start(model, batch, config)
    assert plan == first
    tries_again = [] if 1 in sizes else [1, B]
    assert exports == [*analysis, *tries_again]
    exports.clear()

    source.stages.stage_code(reference, plan, 0, batch, U)
    assert not exports, "rank 0 has captured the model at one loss unit"
    source.stages.stage_code(reference, plan, 0, batch, U)
    assert exports == [U]


def test_profiles_take_what_was_exported_for_the_analysis(exports: list[int], tmp_path: Path) -> None:
    model, make_batch = build("two_branch")
    sizes = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4}
    start(model, make_batch(16), config_of(**sizes, block={"stages": 2, "profile_dir": str(tmp_path)}))
    (stored,) = tmp_path.glob("*.json")
    assert {cost.samples for cost in load(Profile, stored).costs} == {(1, 2, 4, 16)}
    assert exports == [4, 2, 1, 16], "at 2 samples once, for both"
