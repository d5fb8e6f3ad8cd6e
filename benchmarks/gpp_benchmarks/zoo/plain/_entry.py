"""What one module of the plain zoo is, and the pieces that many of them are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpp_benchmarks.zoo._catalogue import Batch, integers, numbers

SAMPLES = 4
"""Of a loss unit."""
WIDTH, CLASSES = 8, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainModel:
    """One module as somebody writes it, and its loss units.

    Args:
        name: what is unusual about it.
        kind: the class it is counted in.
        make: builds it, in the modes that it trains in.
        unit: makes the loss unit of a number.
        block: what its ``graph_pipeline`` block says beside the stages.
    """

    name: str
    kind: str
    make: Callable[[], nn.Module]
    unit: Callable[[int], Batch]
    block: Mapping[str, Any]

    def build(self) -> nn.Module:
        """Return the module; the same at every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make()


def plain(
    kind: str, unit: Callable[[int], Batch], *made: Callable[[], nn.Module], **block: Any
) -> tuple[PlainModel, ...]:
    """Return entries of one kind that read the same units, each named after its class or function."""
    return tuple(
        PlainModel(name=_name_of(make), kind=kind, make=make, unit=unit, block=block) for make in made
    )


def _name_of(make: Callable[[], nn.Module]) -> str:
    """Return ``StatefulRnn`` or ``stateful_rnn`` as ``stateful_rnn``."""
    name = make.__name__
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))


class SmallNet(nn.Module):
    """A layer, two more and a head: what most modules of the zoo add one thing to."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH)

    def loss(self, hidden: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return the loss of what comes out of the first layer."""
        return {"loss": (self.head(self.second(hidden)) - y).square().mean()}


# ---- loss units ------------------------------------------------------------------------------------


def vectors(number: int) -> Batch:
    """Return vectors, and vectors to reach."""
    return {"x": numbers(SAMPLES, WIDTH, seed=10 + number), "y": numbers(SAMPLES, WIDTH, seed=1000 + number)}


def tokens(number: int) -> Batch:
    """Return texts of six tokens."""
    return {"ids": integers(SAMPLES, 6, first=0, end=16, seed=10 + number)}


def sequences(number: int) -> Batch:
    """Return sequences of six vectors, and a vector to reach."""
    return {
        "x": numbers(SAMPLES, 6, WIDTH, seed=10 + number),
        "y": numbers(SAMPLES, WIDTH, seed=1000 + number),
    }
