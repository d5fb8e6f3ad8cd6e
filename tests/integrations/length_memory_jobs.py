"""What ranks run in the tests of memory at many lengths."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from gpp_plugin.errors import BatchRefused
from tests.integrations.engine_jobs import config_of, make_engine
from tests.models import build

SAMPLES = 2
LONGEST = 16


def _texts(make_batch: Any, length: int, samples: int = SAMPLES) -> dict[str, Any]:
    batch = make_batch(samples, length)
    return {
        key: torch.cat([value] * -(-length // value.shape[1]), dim=1)[:, :length].contiguous()
        for key, value in batch.items()
    }


def train_units() -> dict[str, Any]:
    """Train on units of several lengths on ranks that have room for what is planned and no byte more.

    Returns:
        What was refused, by what it was; the steps that were trained; the last report.
    """
    model, make_batch = build("gpt2", layers=1)
    lengths = {"max": LONGEST, "typical": [8, 12]}
    block = {"stages": 2, "units": 2, "lengths": lengths, "verify": False, "schedule": "1f1b"}
    config = config_of(block=block, train_micro_batch_size_per_gpu=SAMPLES)
    del config["train_batch_size"]
    engine = make_engine(model, _texts(make_batch, 6), config)
    sized = engine._memory._sized
    planned = sized.plan.memory
    full = tuple(dataclasses.replace(part, limit=part.total) for part in planned)
    sized.plan = dataclasses.replace(sized.plan, memory=full)
    refused: dict[str, str] = {}

    def train(name: str, units: list[dict[str, Any]]) -> None:
        try:
            engine.train_batch(data_iter=iter(units))
        except BatchRefused as error:
            refused[name] = str(error)

    train("short", [_texts(make_batch, 6), _texts(make_batch, 9)])
    train("as long as planned", [_texts(make_batch, LONGEST), _texts(make_batch, LONGEST)])
    train("more samples", [_texts(make_batch, 6), _texts(make_batch, LONGEST, 2 * SAMPLES)])
    train("longer", [_texts(make_batch, 6), _texts(make_batch, LONGEST + 1)])
    train("short again", [_texts(make_batch, 9), _texts(make_batch, 6)])
    found = {
        "refused": refused,
        "steps": engine.global_steps,
        "planned": [part.total for part in planned],
        "report": engine.memory_report(),
    }
    engine.destroy()
    return found
