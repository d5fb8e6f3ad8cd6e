"""The generators that a rank draws from, torch's of the CPU and of its own device: kept, and seeded, for a while.

`torch.manual_seed` seeds the generators of all devices that a process sees, and a fork of the CPU's alone gives none of
them back: what a user's program draws next on its GPU would depend on what was built before.

The host's generators (Python's, numpy's, torch's of the CPU) are the program's, which loads data by them: datasets,
samplers, collators. Stages of ranks draw unlike amounts. So models draw from others, which take the place of the host's
while a model runs (`MODEL_STREAMS`): every rank's program draws what that of a single process with a GPU draws.

    program   | load |        | load |        | load |         the same on every rank
    model            | step 1 |      | step 2 |                another amount on each

Source: this project
Tests: tests/runtime/test_random_streams.py, tests/integrations/test_loading.py, tests/integrations/test_trainer.py
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

logger = logging.getLogger(__name__)

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


# ---- the host's generators ---------------------------------------------------------------------------

HostStreams = tuple[Tensor, tuple[Any, ...], Any]
"""The states of torch's generator of the CPU, of Python's and of numpy's."""


def host_streams() -> HostStreams:
    """Return the states of the host's generators."""
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def set_host_streams(streams: HostStreams) -> None:
    """Let the host's generators draw on from these states."""
    torch.set_rng_state(streams[0])
    random.setstate(streams[1])
    np.random.set_state(streams[2])


def are_same_on_host(first: HostStreams, second: HostStreams) -> bool:
    """Return whether nothing was drawn on the host between the two."""
    words, others = np.asarray(first[2][1]), np.asarray(second[2][1])
    numpy_same = first[2][2:] == second[2][2:] and np.array_equal(words, others)
    return torch.equal(first[0], second[0]) and first[1] == second[1] and numpy_same


@contextmanager
def restored_host_streams() -> Iterator[None]:
    """Let a block draw; the host's generators are as before afterwards."""
    before = host_streams()
    try:
        yield
    finally:
        set_host_streams(before)


def described_streams(streams: HostStreams) -> dict[str, Any]:
    """Return states of the host's generators as tensors and JSON's values, for a checkpoint."""
    version, words, gauss = streams[1]
    found: dict[str, Any] = {
        "torch": streams[0],
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
    }
    kind, keys, *rest = streams[2]
    if kind == "MT19937":
        found["numpy"] = {"words": torch.tensor(keys.astype("int64")), "rest": rest}
    return found


def streams_described(state: Mapping[str, Any]) -> HostStreams:
    """Return what `described_streams` was given; numpy's generator as it is where a checkpoint has none.

    Raises:
        ValueError, TypeError, KeyError, RuntimeError: a generator does not take it; none of the process was tried.
    """
    facts: Mapping[str, Any] = dict(state["python"])
    gauss = None if facts["gauss"] is None else float(facts["gauss"])
    words = (facts["version"], tuple(facts["words"].tolist()), gauss)
    random.Random().setstate(words)
    torch.Generator().set_state(state["torch"])
    numbers: Any = np.random.get_state()
    if "numpy" in state:
        keys = np.array(state["numpy"]["words"].tolist(), dtype="uint32")
        if not 0 <= state["numpy"]["rest"][0] <= len(keys):  # which numpy does not look at
            raise ValueError(f"numpy's generator has no place {state['numpy']['rest'][0]}")
        numbers = ("MT19937", keys, *state["numpy"]["rest"])
        np.random.RandomState().set_state(numbers)
    return state["torch"], words, numbers


class OwnStreams:
    """Generators that take the place of the host's for a while; they begin as those are at their first use.

    Args:
        follows_seeds: they begin anew where the program has seeded torch since.

    Attributes:
        state: of these generators, outside of their use; None before the first.
    """

    def __init__(self, *, follows_seeds: bool = False) -> None:
        self.state: HostStreams | None = None
        self._follows_seeds = follows_seeds
        self._left: Tensor | None = None  # torch's state of the program as it was last given back
        self._is_drawing = False

    def now(self) -> HostStreams:
        """Return their states, which before their first use are the host's."""
        return host_streams() if self.state is None else self.state

    def continue_beside(self, program: HostStreams) -> None:
        """Let the program draw on from these states, which are no seed that these generators would follow."""
        set_host_streams(program)
        self._left = program[0]

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Let a block draw from these generators, and give the program's back; it may be inside of another one."""
        if self._is_drawing:
            yield
            return
        program = host_streams()
        if self.state is not None and not self._is_seeded_anew(program[0]):
            set_host_streams(self.state)
        self._is_drawing = True
        try:
            yield
        finally:
            self._is_drawing = False
            self.state, self._left = host_streams(), program[0]
            set_host_streams(program)

    def _is_seeded_anew(self, program: Tensor) -> bool:
        """Return whether ``program`` is what `torch.manual_seed` leaves, and was another one before."""
        if not self._follows_seeds or self._left is None or torch.equal(program, self._left):
            return False
        return torch.equal(program, torch.Generator().manual_seed(torch.initial_seed()).get_state())


MODEL_STREAMS = OwnStreams(follows_seeds=True)
"""What models of this process draw from on the host, as `torch.default_generator` is what its program draws from."""


class AheadStreams:
    """What the program drew from before the batch that is fetched one early, as accelerate's loaders fetch it.

    Attributes:
        number: of the last batch that was fetched, in its epoch.
        before: the generators before that.
    """

    def __init__(self) -> None:
        self.number = -1
        self.before = host_streams()
        self._resumed: list[HostStreams] = []

    def resume(self, *streams: HostStreams) -> None:
        """Let each of the next batches draw from one of these."""
        self._resumed = list(streams)

    def fetch(self, number: int) -> None:
        """Note that a batch is fetched next."""
        if self._resumed:
            set_host_streams(self._resumed.pop(0))
        self.number, self.before = number, host_streams()


class WorkerStreams:
    """What workers that load have drawn, batch by batch, so that a resumed training draws the same behind it.

    Worker k of n loads batches k, k + n, and so on. Each gives its generators along with a batch. After batch 3 a
    checkpoint has those of worker 0 behind batch 2 and those of worker 1 behind batch 1: the first worker that is
    started then loads batch 3, in place of worker 1.

    Args:
        collate: makes a batch of samples.
        num_workers: of the loader.
        seed: seeds a worker of a number, from what torch has seeded it with.
    """

    def __init__(
        self, collate: Callable[[list[Any]], Any], num_workers: int, *, seed: Callable[[int], Any]
    ) -> None:
        self._collate, self._num_workers, self._seed = collate, num_workers, seed
        self._states: dict[int, Any] = {}
        self._number = self._first = 0
        self._base: int | None = None

    def __call__(self, samples: list[Any]) -> Any:
        """Return a batch; in a worker with its generators, and the seed that all workers count from."""
        batch, info = self._collate(samples), get_worker_info()
        return batch if info is None else (batch, described_streams(host_streams()), info.seed - info.id)

    def start(self, worker: int) -> None:
        """Seed a worker, or let it continue."""
        number = (worker + self._first) % self._num_workers
        if self._base is not None:
            torch.manual_seed(self._base + number)
        self._seed(worker)
        if number in self._states:
            set_host_streams(streams_described(self._states[number]))

    def take(self, loaded: Any, *, is_last: bool) -> Any:
        """Return the batch that is trained next, and note what was drawn for it; the last of an epoch ends it."""
        batch, state, base = loaded
        self._states[self._number % self._num_workers] = state
        self._number, self._base = self._number + 1, base if self._base is None else self._base
        if is_last:
            self._states, self._number, self._first, self._base = {}, 0, 0, None
        return batch

    def state(self) -> dict[str, Any]:
        """Return it in JSON values."""
        states = {str(worker): state for worker, state in self._states.items()}
        return {"states": states, "number": self._number, "base": self._base, "workers": self._num_workers}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue there when the loader is started."""
        if state["workers"] != self._num_workers:
            logger.warning(
                "the checkpoint was saved with %d workers, and there are %d: what they draw is not what it would be",
                state["workers"],
                self._num_workers,
            )
            return
        self._states = {int(worker): found for worker, found in state["states"].items()}
        self._number, self._base = state["number"], state["base"]
        self._first = self._number % self._num_workers
