"""Weights and stages are made without disturbing what the caller's program draws, on the CPU or on its GPU."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch

from gpp_plugin.engine.checkpoints.save_checkpoint import random_state, restore_random_state
from gpp_plugin.model.materialize import materialize_parameters
from gpp_plugin.runtime.random_streams import (
    OwnStreams,
    are_same_on_host,
    described_streams,
    host_streams,
    restored_host_streams,
    set_host_streams,
    streams_described,
)
from tests.models import build

LAST = torch.device("cuda", 7)


class CudaStreams:
    """The generators of eight CUDA devices that are not there: one number each, as its state."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.states = {index: 100 + index for index in range(8)}
        self.current = 0
        self.seeded: Counter[int] = Counter()
        owner = self

        class _Current:
            def __init__(self, device: torch.device) -> None:
                self._device = device

            def __enter__(self) -> None:
                self._before, owner.current = owner.current, self._device.index

            def __exit__(self, *_: object) -> None:
                owner.current = self._before

        patch.setattr(torch.cuda, "device", _Current)
        patch.setattr(torch.cuda, "manual_seed", lambda seed: self.seed(self.current, seed))
        patch.setattr(torch.cuda, "manual_seed_all", lambda seed: [self.seed(i, seed) for i in range(8)])
        patch.setattr(torch.cuda, "get_rng_state", lambda device="cuda": self.get(torch.device(device)))
        patch.setattr(
            torch.cuda, "set_rng_state", lambda state, device="cuda": self.set(state, torch.device(device))
        )
        patch.setattr(torch.cuda, "device_count", lambda: 8)

    def seed(self, index: int, seed: int) -> None:
        """Take a seed as a state."""
        self.seeded[index] += 1
        self.states[index] = seed

    def get(self, device: torch.device) -> torch.Tensor:
        """Return a device's state."""
        return torch.tensor([self.states[device.index if device.index is not None else self.current]])

    def set(self, state: torch.Tensor, device: torch.device) -> None:
        """Replace a device's state."""
        assert state.device.type == "cpu"
        self.states[device.index if device.index is not None else self.current] = int(state)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> CudaStreams:
    return CudaStreams(monkeypatch)


@pytest.mark.parametrize("name", ["clip", "two_branch"])
def test_making_weights_leaves_the_generators_of_all_devices(name: str, streams: CudaStreams) -> None:
    """`clip` takes constants from its constructor, which draws as well."""
    model, _ = build(name, device="meta")
    names = [each for each, _ in model.named_parameters()]
    streams.states = {index: 100 + index for index in range(8)}
    streams.seeded.clear()
    host, devices = torch.get_rng_state(), dict(streams.states)
    made = materialize_parameters(model, names, device="cpu", seed=3)
    assert torch.equal(torch.get_rng_state(), host)
    assert streams.states == devices and not streams.seeded
    with torch.device("meta"):  # a caller's default device decides about nothing
        again = materialize_parameters(model, names, device="cpu", seed=3)
    assert all(torch.equal(made[each], again[each]) for each in names)


def test_streams_of_one_device_are_seeded_and_given_back(streams: CudaStreams) -> None:
    from gpp_plugin.runtime.random_streams import restored_streams, seed_streams_of

    host, devices = torch.get_rng_state(), dict(streams.states)
    with restored_streams(LAST):
        seed_streams_of(LAST, 5)
        assert streams.states == {**devices, 7: 5} and streams.seeded == {7: 1}
        assert torch.initial_seed() == 5
    assert streams.states == devices and torch.equal(torch.get_rng_state(), host)


def test_a_checkpoint_of_one_device_is_drawn_on_from_another(streams: CudaStreams) -> None:
    saved = random_state(torch.device("cuda", 3))
    streams.states = dict.fromkeys(range(8), 0)
    with torch.random.fork_rng(devices=[]):
        restore_random_state(torch.device("cpu"), saved)
        restore_random_state(LAST, saved)
    assert streams.states == {**dict.fromkeys(range(7), 0), 7: 103}


def test_models_draw_on_from_generators_of_their_own_and_follow_the_programs_seeds() -> None:
    def model(own: OwnStreams) -> list[float]:
        with own.drawing(), own.drawing():
            return [float(torch.rand(())), random.random(), float(np.random.rand())]

    with restored_host_streams():
        torch.manual_seed(5)
        program = host_streams()
        wanted = [[float(torch.rand(())), random.random(), float(np.random.rand())] for _ in range(3)]
        set_host_streams(program)
        own = OwnStreams(follows_seeds=True)
        assert model(own) == wanted[0] and are_same_on_host(host_streams(), program)
        loaded = torch.rand(2), random.random()  # what the program loads is not what the model draws
        assert model(own) == wanted[1]
        torch.manual_seed(5)
        assert model(own)[0] == wanted[0][0], "seeded anew"
        saved = own.now()
        following = model(own)
        own.state = streams_described(described_streams(saved))
        own.continue_beside(program)
        assert model(own) == following and len(loaded) == 2
