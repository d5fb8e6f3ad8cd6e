"""What to do with each tensor that a stage's code saves for backward, in the order in which it saves them.

The code never changes, so neither does that order, at whatever lengths: a `Recipe` is found out in the first pass
(`save_survey`) and followed by position in all others, where nothing is looked up.

Source: this project
Tests: tests/runtime/test_memory_ranks.py
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpp_plugin.errors import RuntimeFailure
from gpp_plugin.runtime.memory.counting import MemoryCounter
from gpp_plugin.runtime.memory.keeper import Packed, Pass, pack_kept
from gpp_plugin.runtime.memory.recompute import Held, RandomState, Replay, SecondForward
from gpp_plugin.runtime.memory.swap import ReturnQueue, SwapLink, SwappedStorage, SwappedView


@dataclass(frozen=True, slots=True)
class Swap:
    """Move it to the host; ``slot`` numbers the storages that one pass moves."""

    slot: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Let a segment make it again."""

    segment: int


Action = Swap | Drop | None
"""None: keep it on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """A value that a segment reads from outside.

    Args:
        slot: where its storage is swapped too.
        is_snapshot: it changes; keep a copy.
    """

    name: str
    slot: int | None
    requires_grad: bool
    is_snapshot: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What to note before a run of a segment."""

    holdings: tuple[Holding, ...]
    is_random: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One pass of a stage's code.

    Args:
        call: the code; takes a `Pass` first.
        entries: by segment and run.
        segments: None where a segment saves nothing that it could make again.
    """

    call: Callable[..., tuple[Tensor, ...]]
    actions: tuple[Action, ...]
    entries: tuple[tuple[Entry, ...], ...]
    segments: tuple[SecondForward | None, ...]


@dataclass(frozen=True, slots=True)
class Again:
    """Stands for a tensor that a segment makes again."""

    replay: Replay
    place: int

    def get(self) -> Tensor:
        """Return the tensor; runs the segment if it is not at hand."""
        return self.replay.get(self.place)


@dataclass(frozen=True, slots=True)
class _Returned:
    """Stands for a tensor on the host."""

    queue: ReturnQueue
    view: SwappedView

    def get(self) -> Tensor:
        """Return the tensor, back on the device."""
        return self.queue.get(self.view)


class MovingPass(Pass):
    """A forward some of whose saved tensors move to the host, or are made again by segments.

    Args:
        fixed: what is there anyway (sizes, constants, parameters, the model's inputs), in the order of the code's
            arguments.
    """

    def __init__(
        self,
        *,
        micro_batch: int,
        fixed: Sequence[Any],
        num_segments: int,
        link: SwapLink,
        counter: MemoryCounter | None,
    ) -> None:
        super().__init__(micro_batch=micro_batch, counter=counter)
        self._link = link
        self._slots: dict[int, SwappedStorage] = {}
        self.queue = ReturnQueue()
        self.replays = [
            Replay(
                fixed=fixed, queue=self.queue, device=link.device, micro_batch=micro_batch, counter=counter
            )
            for _ in range(num_segments)
        ]

    def prefetch(self, *, beside_forward: bool = False) -> None:
        """Bring back what the backward needs first."""
        self.queue.prefetch(beside_forward=beside_forward)

    def call_behind(self, behind: Callable[[], None]) -> None:
        """Call something when the backward uses the last that came back."""
        self.queue.behind = behind

    def pack(self, tensor: Tensor, place: int, action: Action) -> Packed:
        """Do with a saved tensor what its action says, and return what stands for it."""
        if action is None:
            return self.keep(tensor)
        if isinstance(action, Drop):
            return Again(self.replays[action.segment], place)
        return _Returned(self.queue, self.move(tensor, action.slot))

    def move(self, tensor: Tensor, slot: int) -> SwappedView:
        """Return a handle of a tensor on the host; its storage moves when the first of its tensors does."""
        # Every use is noted in the queue, so that a storage that several operators keep comes back for the first of
        # them in backward order, which is the last one here.
        storage = self._slots.get(slot)
        if storage is None:
            storage = self._slots[slot] = SwappedStorage(self._link, tensor, self._counter)
            if self._counter is not None:
                self._counter.swap(self._micro_batch, storage.num_bytes)
        self.queue.add(storage)
        return storage.view(tensor)

    def note(self, segment: int, run: int, entry: Entry, values: Sequence[Tensor]) -> None:
        """Keep what a run of a segment needs to run again."""
        replay = self.replays[segment]
        if entry.is_random:
            replay.states[run] = RandomState.take(self._link.device)
        for holding, value in zip(entry.holdings, values, strict=True):
            replay.held[holding.name] = Held(self._hold(holding, value), holding.requires_grad)

    def _hold(self, holding: Holding, value: Tensor) -> Tensor | SwappedView:
        if holding.slot is not None:
            return self.move(value, holding.slot)
        return value.detach().clone() if holding.is_snapshot else value.detach()

    def finish(self) -> None:
        """End the forward: count what stays on the device for segments, and leave them to autograd."""
        if self._counter is not None:
            for replay in self.replays:
                for held in replay.held.values():
                    if isinstance(held.value, Tensor):
                        self.count(held.value)
        self.replays.clear()


class PlannedPass(MovingPass):
    """A forward that follows a recipe.

    Args:
        constants: what the code takes in front of parameters; ``fixed`` begins with them.
    """

    def __init__(self, recipe: Recipe, *, constants: Sequence[Any], **surroundings: Any) -> None:
        super().__init__(num_segments=len(recipe.segments), **surroundings)
        self._recipe = recipe
        self._constants = constants
        self._saved = itertools.count()
        for replay, second in zip(self.replays, recipe.segments, strict=True):
            replay.plan(second)

    def enter(self, segment: int, run: int, values: tuple[Tensor, ...]) -> None:
        """Note what a segment needs; called by the stage's code."""
        self.note(segment, run, self._recipe.entries[segment][run], values)

    def packer(self) -> Callable[[Tensor], Packed]:
        """Return what does with each saved tensor what the recipe says at its position."""
        # ``actions[place]`` for the saved tensor number ``place``: with [None, Swap(0), Drop(1), Swap(0)] the first
        # stays, the second and fourth are views of one storage that moves once, the third is made again by segment 1.
        actions, is_uncounted, saved = self._recipe.actions, self._counter is None, self._saved

        def pack(tensor: Tensor) -> Packed:
            place = next(saved)
            action = actions[place] if place < len(actions) else None
            if action is None and is_uncounted:  # most of them, and each costs microseconds
                return pack_kept(tensor)
            return self.pack(tensor, place, action)

        return pack

    def run(self, fixed: Sequence[Tensor], received: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the code."""
        return self._recipe.call(self, *self._constants, *fixed, *received)

    def finish(self) -> None:
        """End the forward.

        Raises:
            RuntimeFailure: it saved other tensors than the first time.
        """
        num_saved = next(self._saved)
        if num_saved != len(self._recipe.actions):
            raise RuntimeFailure(
                f"the stage saved {num_saved} tensors for backward, and {len(self._recipe.actions)} the first "
                "time; its operators depend on more than shapes: train without memory.recompute and memory.swap"
            )
        super().finish()


def is_movable(tensor: Tensor, device: torch.device | None = None) -> bool:
    """Return whether a tensor is plain bytes in a storage.

    Args:
        device: the one it must be on: a number that a CUDA stage keeps on the host would come back on the device.
    """
    is_there = device is None or tensor.device.type == device.type
    return is_there and tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()
