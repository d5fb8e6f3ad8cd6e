"""Segments that run again before their backward (DawnPiper, section 4.3; Chen et al., 2016).

The autograd graph of the forward stays as it is; only what a segment's operators saved is replaced, through
saved-tensor hooks, by a place in its second forward. The first of these places that the backward asks for runs
the segment again, with random states restored and gradients on, and collects what its operators save, all of
it; each tensor is handed out once and then let go of. The graph that the second forward makes is dropped.

Why not `torch.utils.checkpoint`: it drops whatever the segment saves, where a plan drops what nobody outside
uses and keeps the rest; it holds what the segment reads, where that may itself wait on the host; it would update
buffers twice; and it compares the metadata of every saved tensor each time. An `autograd.Function` would besides
cut the graph, so that a backward could not be split inside a segment.

Gradients are those of the plain backward bit by bit: the same kernels make the same saved tensors from the
same values. Autocast needs no restoring: stages refuse it, regions inside a model carry their own setting.

Source: Chen et al. 2016 (arXiv 1604.06174); DawnPiper (arXiv 2505.05856), section 4.3
Tests: tests/runtime/test_recompute.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from gpp_plugin.capture.eager.opaque_call import saving_apart
from gpp_plugin.errors import RuntimeFailure
from gpp_plugin.runtime.memory.counting import MemoryCounter, storage_id
from gpp_plugin.runtime.memory.segments import SegmentCode
from gpp_plugin.runtime.memory.swap import ReturnQueue, SwappedView


@dataclass(frozen=True, slots=True)
class RandomState:
    """State of the generators that a stage draws from."""

    cpu: Tensor
    cuda: Tensor | None
    device: torch.device

    @classmethod
    def take(cls, device: torch.device) -> RandomState:
        """Return the present state."""
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), cuda, device)

    def is_same(self, other: RandomState) -> bool:
        """Return whether nothing was drawn between the two."""
        pairs: list[tuple[Tensor | None, Tensor | None]] = [(self.cpu, other.cpu), (self.cuda, other.cuda)]
        return all(a is None or (b is not None and torch.equal(a, b)) for a, b in pairs)

    def restore(self) -> None:
        """Go back to this state."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)


@dataclass(frozen=True, slots=True)
class Held:
    """What a segment reads from outside: on the device, or on the host."""

    value: Tensor | SwappedView
    requires_grad: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondForward:
    """How a segment makes its tensors again.

    Args:
        places: for every tensor that the code saves, in order, its number among those that the stage's forward
            saves, or None where the first one was kept.
        fixed: argument -> its position among what the pass was given (parameters, inputs).
    """

    code: SegmentCode
    places: tuple[int | None, ...]
    fixed: Mapping[str, int]


class Replay:
    """One segment in one pass of a stage's code; lives as long as autograd holds something that it makes again.

    Args:
        fixed: what is there anyway, in the order of `SecondForward.fixed`.
        queue: brings back values that wait on the host.
    """

    __slots__ = (
        "_counter", "_device", "_fixed", "_has_run", "_micro_batch", "_queue", "_values", "_working_bytes",
        "__weakref__", "_second", "held", "states",
    )  # fmt: skip

    def __init__(
        self,
        *,
        fixed: Sequence[Tensor],
        queue: ReturnQueue,
        device: torch.device,
        micro_batch: int,
        counter: MemoryCounter | None,
    ) -> None:
        self._fixed = fixed
        self._queue = queue
        self._device = device
        self._micro_batch = micro_batch
        self._counter = counter
        self._values: dict[int, Tensor] = {}
        self._has_run = False
        self._working_bytes = 0
        self.held: dict[str, Held] = {}
        self.states: dict[int, RandomState] = {}
        self._second: SecondForward | None = None

    def plan(self, second: SecondForward | None) -> None:
        """Say how to run again, and let go of what that does not read; None: nothing is made again."""
        self._second = second
        wanted = second.code.arguments if second is not None else ()
        for name in [name for name in self.held if name not in wanted]:
            value = self.held.pop(name).value
            if isinstance(value, SwappedView):
                value.storage.forgo()

    def restore(self, run: int) -> None:
        """Draw from now on what the forward drew in a run; called by the segment's code."""
        self.states[run].restore()

    def get(self, place: int) -> Tensor:
        """Return the tensor that the forward saved at a place; runs the segment if it is not at hand.

        A second backward through the same graph (the weight gradients of a split one) runs it again.
        """
        if place not in self._values:
            self._run()
        tensor = self._values.pop(place)
        if not self._values:
            self._count_working(0)
        return tensor

    def __del__(self) -> None:
        self._count_working(0)  # some of what was made again may never have been asked for

    def _run(self) -> None:
        # The second forward saves what the first one did, in the same order: ``places`` says for each which number it
        # had in the stage's forward, None where the first one was kept. With places [0, None, 3] the first and third
        # are collected as 0 and 3, the second is dropped at once. The graph that gradients on builds is never used:
        # without it operators would save nothing.
        second = self._second
        assert second is not None, "a segment's code is known before any backward"
        arguments = [self._argument(name, second) for name in second.code.arguments]
        places = iter(second.places)
        found = self._values

        def collect(tensor: Tensor) -> None:
            place = next(places, _NO_PLACE)
            if place == _NO_PLACE:
                raise RuntimeFailure(_OTHER_TENSORS)
            if place is not None:
                found[place] = tensor.detach()

        before = RandomState.take(self._device) if second.code.is_random else None
        try:
            # what an opaque call saves was kept the first time, and is dropped the second
            hooks = saved_tensors_hooks(collect, _never)
            with torch.enable_grad(), hooks, saving_apart(lambda tensor: None, _never):
                second.code.call(self, *arguments)
        finally:
            if before is not None:
                before.restore()
        if next(places, _NO_PLACE) != _NO_PLACE:
            raise RuntimeFailure(_OTHER_TENSORS)
        self._count()

    def _argument(self, name: str, second: SecondForward) -> Tensor:
        held = self.held.get(name)
        if held is None:
            tensor = self._fixed[second.fixed[name]]
        else:
            value = held.value
            tensor = value.detach() if isinstance(value, Tensor) else self._queue.get(value)
            tensor.requires_grad_(held.requires_grad)
        return tensor.clone() if name in second.code.scratch else tensor

    def _count(self) -> None:
        if self._counter is None:
            return
        sizes = {storage_id(t): t.untyped_storage().nbytes() for t in self._values.values()}
        total = sum(sizes.values())
        if not self._has_run:
            self._counter.make_again(self._micro_batch, total)
            self._has_run = True
        self._count_working(total)

    def _count_working(self, num_bytes: int) -> None:
        if self._counter is not None:
            self._counter.work(num_bytes - self._working_bytes)
            self._working_bytes = num_bytes


_NO_PLACE = -1
_OTHER_TENSORS = (
    "a recomputed segment saved other tensors the second time: one of its operators depends on what no node of the "
    "graph says; leave its blocks out of memory.recompute"
)


def _never(_: object) -> Tensor:
    raise AssertionError("the second forward's graph has no backward")
