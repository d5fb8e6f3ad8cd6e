"""What each DeepSpeed patch mends, as a program: runs every scenario with the DeepSpeed that it is given.

``python deepspeed_scenarios.py OUT`` imports DeepSpeed once, forks the ranks of each scenario, and writes
{scenario: "ok" or what went wrong} as JSON. Which DeepSpeed it is, PYTHONPATH says.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.config import DeepSpeedConfig
from torch import Tensor, nn

from tests.patches.forked_ranks import outcome_of

WIDTH = 8
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
}


class Layer(nn.Module):
    """A linear layer that hands an int64 mask on beside its activations."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, both: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        mask, hidden = both
        return mask, self.linear(hidden) * mask


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.linear(x).square().mean()}


def engine_of(layers: list[nn.Module], loss_fn: Callable[..., Tensor], num_stages: int, **more: Any) -> Any:
    model = PipelineModule(layers=layers, loss_fn=loss_fn, num_stages=num_stages, partition_method="uniform")
    return deepspeed.initialize(model=model, config={**CONFIG, **more})[0]


def buffers_by_dtype(rank: int) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = [Layer() for _ in range(3)]
    plain = copy.deepcopy(nn.Sequential(*layers))
    inputs = (torch.ones(2, WIDTH, dtype=torch.int64), torch.ones(2, WIDTH))
    plain(inputs)[1].square().mean().backward()
    expected = [(p - p.grad) for p in plain[rank].parameters() if p.grad is not None]
    sgd = {"type": "SGD", "params": {"lr": 1.0}}
    engine = engine_of(layers, lambda out, label: out[1].square().mean(), 3, optimizer=sgd)
    engine.train_batch(iter([(inputs, torch.zeros(2))] * 2))
    for wanted, found in zip(expected, layers[rank].parameters(), strict=True):
        assert torch.allclose(wanted, found, atol=1e-6), "a gradient was lost in an int64 buffer"


def timers(rank: int) -> None:
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    engine = engine_of(layers, lambda out, label: out.square().mean(), 2, wall_clock_breakdown=True)
    for _ in range(2):
        engine.train_batch(iter([(torch.ones(2, WIDTH), torch.zeros(2))] * 2))


def latest(rank: int) -> None:
    model = nn.Linear(WIDTH, WIDTH)
    config = {**CONFIG, "gradient_accumulation_steps": 1}
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    folder = Path(os.environ["SCENARIO_DIR"])
    if rank == 1:

        def die(*args: object, **kwargs: object) -> None:
            time.sleep(1.0)
            os._exit(0)

        engine._save_checkpoint = die
    try:
        engine.save_checkpoint(str(folder), tag="torn")
    except RuntimeError:  # the other rank is gone
        pass
    assert not (folder / "latest").exists(), "'latest' names a checkpoint that rank 1 has not finished"


def dispatch(rank: int) -> None:
    assert "gpp_plugin" not in sys.modules
    engine = deepspeed.initialize(
        model=Plain(),
        config={
            **CONFIG,
            "gradient_accumulation_steps": 1,
            "train_batch_size": 2,
            "graph_pipeline": {"stages": 1},
        },
        training_data=[{"x": torch.ones(WIDTH)}] * 4,
    )[0]
    assert type(engine).__name__ == "GraphPipelineEngine", f"initialize made a {type(engine).__name__}"
    engine.train_batch()


def unknown_keys(rank: int) -> None:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("DeepSpeed").addHandler(handler)

    def warnings_of(**more: object) -> list[str]:
        records.clear()
        DeepSpeedConfig({**CONFIG, **more})
        return [text for text in records if "top-level key" in text]

    known = {"zero_optimization": {"stage": 1}, "fp16": {"enabled": False}, "flops_profiler": {}, "aio": {}}
    more_known = {
        "activation_checkpointing": {},
        "scheduler": {"type": "WarmupLR", "params": {}},
        "autotuning": {},
    }
    assert not warnings_of(**known, **more_known, graph_pipeline={}, sequence_parallel_size=1), records
    found = warnings_of(zero_optimisation={"stage": 1})
    assert found, "nothing is said of 'zero_optimisation'"
    assert "zero_optimization" in found[0], found


SCENARIOS: dict[str, tuple[Callable[[int], None], int]] = {
    "0001": (dispatch, 1),
    "0002": (buffers_by_dtype, 3),
    "0003": (timers, 2),
    "0004": (latest, 2),
    "0005": (unknown_keys, 1),
}


def join_and_run(function: Callable[[int], None], rank: int) -> None:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a minute's compile, for inference only
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    function(rank)


if __name__ == "__main__":
    outcome = {"deepspeed": deepspeed.__path__[0]}
    for number, (function, num_ranks) in SCENARIOS.items():
        with tempfile.TemporaryDirectory() as folder:
            os.environ["SCENARIO_DIR"] = folder
            outcome[number] = outcome_of(functools.partial(join_and_run, function), num_ranks)
    Path(sys.argv[1]).write_text(json.dumps(outcome))
