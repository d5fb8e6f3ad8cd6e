"""The generators that a rank draws from, torch's of the CPU and of its own device: kept, and seeded, for a while.

`torch.manual_seed` seeds the generators of all devices that a process sees, and a fork of the CPU's alone gives none of
them back: what a user's program draws next on its GPU would depend on what was built before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

Streams = tuple[Tensor, Tensor | None]
"""The states of the CPU's generator and of a CUDA device's."""


@contextmanager
def restored_streams(device: torch.device | str) -> Iterator[None]:
    """Let a block draw; the CPU's generator and that of a CUDA ``device`` are as before afterwards."""
    where = torch.device(device)
    with torch.random.fork_rng(devices=[where] if where.type == "cuda" else []):
        yield


def seed_streams_of(device: torch.device | str, seed: int) -> None:
    """Seed the CPU's generator and that of a CUDA ``device``, and no other's."""
    where = torch.device(device)
    torch.default_generator.manual_seed(seed)
    if where.type == "cuda":
        with torch.cuda.device(where):
            torch.cuda.manual_seed(seed)


def streams_of(device: torch.device) -> Streams:
    """Return the states of the CPU's generator and of that of a CUDA ``device``."""
    own = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), own


def are_same(first: Streams, second: Streams) -> bool:
    """Return whether nothing was drawn between the two; of a device that one of them knows nothing of, nothing."""
    return all(a is None or b is None or torch.equal(a, b) for a, b in zip(first, second, strict=True))


def set_streams(device: torch.device, streams: Streams) -> None:
    """Let both draw on from these states."""
    torch.set_rng_state(streams[0])
    if streams[1] is not None:
        torch.cuda.set_rng_state(streams[1], device)
