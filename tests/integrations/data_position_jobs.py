"""What ranks do in the tests of positions in the data."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from tests.integrations.loading_jobs import WIDTH, Samples, Streamed, make


class NoisyStream(Streamed):
    """Samples one after the other with noise of three generators added, and no state."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for item in super().__iter__():
            yield {**item, "x": item["x"] + torch.randn(WIDTH) + random.random() + float(np.random.rand())}


def random_states() -> tuple[Any, ...]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def set_random_states(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


def resume(kind: str, directory: str) -> dict[str, Any]:
    """Eight steps straight; four, and four of a fresh engine from a checkpoint in the middle of an epoch; and again."""
    make_dataset: Any = {"samples": Samples, "stream": Streamed}[kind]
    straight = make(make_dataset(), workers=0, stages=2)
    for _ in range(3):
        straight.train_batch()
    straight.save_checkpoint(directory, tag="three")
    losses = [float(straight.train_batch()) for _ in range(4)]
    straight.load_checkpoint(directory)
    back = [float(straight.train_batch()) for _ in range(4)]
    straight.destroy()
    resumed = make(make_dataset(), workers=0, stages=2)
    resumed.load_checkpoint(directory)
    again = [float(resumed.train_batch()) for _ in range(4)]
    resumed.destroy()
    return {"straight": losses, "resumed": again, "rolled back": back}
