"""The engine's parts know no framework: training with another one than DeepSpeed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.integrations import engine_jobs
from tests.integrations import framework_jobs as jobs
from tests.models import build
from tests.ranks import run_ranks
from tests.reference import train_reference
from tests.shared_captures import key_of


def test_captures_are_shared_by_equal_models_alone() -> None:
    """As kept ranks do: what tells two captures apart tells their keys apart, and nothing else does."""

    def key(
        change: Callable[[Any], object] = lambda model: None,
        dropout: float = 0.1,
        seed: int = 0,
        **batch: Tensor,
    ) -> bytes | None:
        model, make_batch = build("gpt2", dropout=dropout, seed=seed)
        change(model)
        return key_of(model, "capture_model", ({**make_batch(2, 1), **batch},), {"training": True})

    assert key() is not None and key() == key(seed=3), "weights are none of it"
    others = [
        key(dropout=0.2),
        key(lambda model: model.transformer.h[0].eval()),
        key(lambda model: model.transformer.wpe.requires_grad_(False)),
        key(lambda model: setattr(model.config, "use_cache", False)),
        key(lambda model: setattr(model.lm_head, "weight", nn.Parameter(model.lm_head.weight.data))),
        key(lambda model: model.register_buffer("more", torch.ones(2))),
        key(attention_mask=torch.ones(2, 8)),
    ]
    with mock.patch.object(nn.Dropout, "forward", lambda self, x: x):
        others.append(key())
    assert len({key(), *others}) == 1 + len(others) and None not in others
    assert key(lambda model: model.register_forward_hook(lambda *given: None)) is None, (
        "nobody knows what it does"
    )


def test_stages_step_together_with_any_framework(tmp_path: Path) -> None:
    model, make_batch = build("two_branch")
    norms: list[float] = []
    batches = [make_batch(engine_jobs.B, step) for step in range(4)]
    sgd = functools.partial(torch.optim.SGD, lr=jobs.RATE)
    clips = engine_jobs.clipping(sgd, jobs.Settings.gradient_clipping, norms)
    losses = train_reference(model, batches, unit=engine_jobs.U, make_optimizer=clips).losses
    answers = run_ranks(jobs.train_without_deepspeed, 2, "sync", str(tmp_path))
    for answer in answers:
        assert answer["losses"] == pytest.approx(losses, rel=1e-5)
        assert answer["norm"] == pytest.approx(norms[-1], rel=1e-4)
        assert answer["again"] == answer["losses"][2:], "a checkpoint is the engine's, whoever steps"
        assert answer["counted"] == (4, 4 * engine_jobs.B)
        assert answer["rule"] == "SGD"
        # a synchronous pipeline holds nothing between calls
        assert answer["flushed"] is None and answer["staleness"] == dict.fromkeys(answer["names"], 0)
    told = [value for name, value, _ in answers[0]["events"] if name == "Train/Samples/train_loss"]
    assert told == pytest.approx([*losses, *losses[2:]], rel=1e-5)
    assert not answers[1]["events"], "monitors are rank 0's"
