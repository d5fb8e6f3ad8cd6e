"""Steps that are run twice: the same bits where nothing is wrong, and the rank named where something is."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpp_plugin.config.reader import read_config
from gpp_plugin.engine.guards.spikes import LEAST, Spikes
from gpp_plugin.engine.guards.task_digests import _is_close
from gpp_plugin.errors import ConfigError
from tests.ranks import run_kept_ranks

PLAIN = {"schedule": "1f1b", "slicing": "off"}
"""So that tasks have the names that faults happen at."""


class Net(nn.Module):
    """Draws random numbers and writes buffers, as a run that is repeated must not do twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2))
        self.second = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.second(self.first(x)).square().mean()}


def batch_of(seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))}


def engine_of(repeat_steps: Any, **block: Any) -> Any:
    from tests.integrations.engine_jobs import config_of, make_engine

    torch.manual_seed(0)
    return make_engine(Net(), batch_of(0), config_of(block={"repeat_steps": repeat_steps, **PLAIN, **block}))


def train(engine: Any, num_steps: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(5)
    losses = [float(engine.train_batch(iter([batch_of(seed)]))) for seed in range(num_steps)]
    return losses, {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}


def repeat_and_corrupt(block: dict[str, Any], faults: list[dict[str, Any]]) -> list[str]:
    """Check that repetition changes nothing; then let each fault happen, and return what is said of it."""
    from tests.faults import Fault, inject, let_be

    once, twice = train(engine_of("off", **block)), train(engine_of(1, **block))
    assert once[0] == twice[0] and all(
        torch.equal(once[1][name], tensor) for name, tensor in twice[1].items()
    )
    engine = engine_of(1, **block)
    train(engine, 1)
    said = []
    for fault in faults:
        before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        inject(Fault(kind="corrupt", **fault), rank=torch.distributed.get_rank())
        try:
            engine.train_batch(iter([batch_of(9)]))
            said.append("")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        let_be()
        assert all(torch.equal(before[name], p) for name, p in engine.module.named_parameters()), "no step"
        assert engine.global_steps == 1
    engine.train_batch(iter([batch_of(1)]))  # it goes on
    norms = engine.stage_grad_norms
    assert sum(norm**2 for norm in norms.values()) == pytest.approx(engine.get_global_grad_norm() ** 2)
    return [*said, ", ".join(norms)]


def test_the_rank_that_computes_something_else_is_named() -> None:
    faults = [
        {"rank": 0, "at": "instruction:0F1"},
        {"rank": 1, "at": "instruction:1F0", "skip": 1},  # in the second run
        {"rank": 1, "at": "instruction:1B1"},
        {"rank": 0, "at": "instruction:0B0"},
    ]
    for *said, stages in run_kept_ranks(repeat_and_corrupt, 2, {"stages": 2}, faults):
        assert len(stages.split(", ")) == 2
        for fault, text in zip(faults, said, strict=True):
            name = f"rank {fault['rank']} (stage"
            assert text.startswith(
                "RuntimeFailure: step 2 was run twice, as it is its turn, and came out differently"
            ), text
            assert name in text and text.count("(stage") == 1, text


def test_the_replica_is_named() -> None:
    faults = [{"rank": 1, "at": "instruction:0B"}]
    for said, _ in run_kept_ranks(repeat_and_corrupt, 2, {"stages": 1, "data_parallel": 2}, faults):
        assert "rank 1 (stage" in said and "rank 0 (stage" not in said, said


def test_spikes() -> None:
    spikes = Spikes()
    draw = random.Random(0)
    noise = [draw.gauss(0, 1) for _ in range(200)]
    assert not any(spikes.note(2 + each / 10) for each in noise)
    above = spikes.note(4.0)
    assert above is not None and 14 < above < 30
    assert spikes.note(float("nan")) is None and spikes.note(0.0) is None, "below, or no number"
    flat = Spikes()
    assert not any(flat.note(1.0) for _ in range(LEAST)) and flat.note(1.01) is None and flat.note(1.2)


@pytest.mark.parametrize("other", [{"mode": "async"}, {"look_ahead": 1}])
def test_what_cannot_be_repeated_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="is not possible with graph_pipeline.repeat_steps"):
        read_config({"train_batch_size": 8, "graph_pipeline": {"repeat_steps": "suspicious", **other}})


def test_what_is_not_finite_is_near_itself_only() -> None:
    inf, nan = float("inf"), float("nan")
    for first, second in ((1.0, 1.0005), (inf, inf), (-inf, -inf), (nan, nan)):
        assert _is_close(first, second, 1e-3)
    for first, second in ((1.0, 1.1), (inf, 5.0), (5.0, -inf), (inf, -inf), (nan, 5.0), (inf, nan)):
        assert not _is_close(first, second, 1e-3) and not _is_close(second, first, 1e-3)
