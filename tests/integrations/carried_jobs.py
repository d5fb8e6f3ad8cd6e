"""What each rank runs in the tests of state that a forward leaves for the next one."""

from __future__ import annotations

from typing import Any

import torch

from gpp_plugin.errors import GppError
from tests import carried_models
from tests.integrations.engine_jobs import config_of, make_engine, steps


def train_whole(names: tuple[str, ...], batches: list[dict[str, Any]]) -> dict[str, Any]:
    """Train models that are one block, on one rank."""
    return {name: train_carried(name, batches, "", {}) for name in names}


def train_with_copies(batches: list[dict[str, Any]]) -> dict[str, Any]:
    """Try a stage of two ranks that keeps state, by default and as the refusal says."""
    answer: dict[str, Any] = {}
    for name, block in (("stages", {"stages": 1}), ("advised", {"data_parallel": 2}), ("auto", {})):
        try:
            answer[name] = train_carried("Centre", batches, "", block)["stages"]
        except GppError as error:
            answer[name] = str(error)
    return answer


def train_carried(
    name: str, batches: list[dict[str, Any]], directory: str, block: dict[str, Any]
) -> dict[str, Any]:
    """Train a model on two stages; with a directory, save after two steps, and go on in an engine that loads that."""

    def start(*, verify: bool) -> Any:
        torch.manual_seed(0)
        config = config_of(
            train_batch_size=len(batches[0]["x"]),
            train_micro_batch_size_per_gpu=2,
            optimizer={"type": "SGD", "params": {"lr": 0.1}},
            block={"verify": verify, **block},
        )
        return make_engine(getattr(carried_models, name)(), batches[0], config)

    engine = start(verify=True)
    losses = steps(engine, batches[:2])
    if directory:
        engine.save_checkpoint(directory)
        engine = start(verify=False)
        engine.load_checkpoint(directory)
    losses += steps(engine, batches[2:])
    names = [s.name for s in engine.plan.stages]
    return {"losses": losses, "state": engine.gather_state_dict(), "stages": names}
