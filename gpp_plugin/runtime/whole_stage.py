"""A stage that runs again as a whole before its backward: code that is the user's own module (Chen et al., 2016).

It is one segment: what its forward saved is dropped, but for what is there anyway. What it received, the random
state and the module's buffers as they were before the forward are kept instead. The second forward reads the buffers
that the first one read, and leaves them as it found them: statistics are updated once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.memory_plan import MemoryPlan
from gpp_plugin.ir.memory_report import MemoryCounts
from gpp_plugin.runtime.counting import Kept, MemoryCounter, pack_kept, storage_id, unpack_kept
from gpp_plugin.runtime.recompute import Held, RandomState, Replay, SecondForward
from gpp_plugin.runtime.segments import SegmentCode
from gpp_plugin.runtime.stage_module import StageFunction
from gpp_plugin.runtime.swap import ReturnQueue


class WholeStageKeeper:
    """Runs the forwards of a stage that recomputes and whose code is a module.

    Args:
        stage: its name, for messages.
        blocks: all of the stage.
        whole, half: the stage's code for a micro-batch, and for half of it.
        gradient_inputs: received tensors that take a gradient.

    Raises:
        PlanError: the plan swaps, or recomputes only some of the stage.
    """

    def __init__(
        self,
        *,
        stage: str,
        plan: MemoryPlan,
        blocks: tuple[str, ...],
        whole: StageFunction,
        half: StageFunction | None = None,
        gradient_inputs: Sequence[str] = (),
        device: torch.device,
    ) -> None:
        if plan.swapped or [segment.blocks for segment in plan.recomputed] != [blocks] or whole.given is None:
            raise PlanError(
                f"stage {stage!r} runs the user's own module as it is: it can be recomputed as a whole, and then swaps "
                "nothing; change its memory plan"
            )
        self._functions = whole, half
        self._module = whole.given
        self._leaves = tuple(whole.received.index(name) for name in gradient_inputs)
        self._queue = ReturnQueue()
        self._device = device
        self._counter: MemoryCounter | None = None

    def forward(
        self,
        micro_batch: int,
        half: int | None,
        parameters: Sequence[Tensor],
        inputs: Sequence[Tensor],
        received: Sequence[Tensor],
    ) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """Return the leaves of received tensors, and the outputs."""
        function = self._functions[half is not None]
        assert function is not None, "a program with half forwards needs their code"
        counter, fixed = self._counter, (*parameters, *inputs)
        leaves = [received[index].requires_grad_(True) for index in self._leaves]
        buffers = _Buffers(self._module)
        if counter is not None:
            counter.begin(micro_batch, fixed)
            for tensor in (*received, *buffers.values):
                counter.keep(micro_batch, tensor)
        replay = Replay(
            fixed=fixed, queue=self._queue, device=self._device, micro_batch=micro_batch, counter=counter
        )
        replay.states[0] = RandomState.take(self._device)
        there = {storage_id(t) for t in (*fixed, *received) if t.layout is torch.strided}
        places: list[int | None] = []

        def pack(tensor: Tensor) -> Kept | _Dropped:
            is_kept = tensor.layout is not torch.strided or storage_id(tensor) in there
            places.append(None if is_kept else len(places))
            return pack_kept(tensor) if is_kept else _Dropped(replay, len(places) - 1)

        with saved_tensors_hooks(pack, _unpack):
            outputs = function.call(*fixed, *received)
        replay.held.update(
            {
                f"received {i}": Held(tensor.detach(), tensor.requires_grad)
                for i, tensor in enumerate(received)
            }
        )
        replay.plan(_second_forward(function, buffers, len(fixed), tuple(replay.held), places))
        return leaves, outputs

    def begin_backward(self, micro_batch: int) -> None:
        """Do nothing: the backward runs the stage again when it asks for what was dropped."""

    def end_backward(self, micro_batch: int) -> None:
        """Count the micro-batch no longer."""
        if self._counter is not None:
            self._counter.end(micro_batch)

    def start_counting(self) -> None:
        """Count what the forwards from now on keep."""
        self._counter = MemoryCounter(())

    def stop_counting(self) -> MemoryCounts | None:
        """Count no longer, and return what was counted."""
        counter, self._counter = self._counter, None
        return counter.counts() if counter is not None else None

    def clear(self) -> None:
        """Do nothing: the graphs hold all there is."""


@dataclass(frozen=True, slots=True)
class _Dropped:
    """Stands for a saved tensor that is made again."""

    replay: Replay
    place: int


def _unpack(kept: Kept | _Dropped) -> Tensor:
    return kept.replay.get(kept.place) if isinstance(kept, _Dropped) else unpack_kept(kept)


def _second_forward(
    function: StageFunction,
    buffers: _Buffers,
    num_fixed: int,
    received: tuple[str, ...],
    places: Sequence[int | None],
) -> SecondForward:
    fixed = {f"fixed {i}": i for i in range(num_fixed)}

    def call(replay: Replay, *given: Tensor) -> None:
        replay.restore(0)
        with buffers.restored():
            function.call(*given)

    code = SegmentCode(
        call=call, arguments=(*fixed, *received), scratch=frozenset(), nodes=frozenset(), is_random=True
    )
    return SecondForward(code=code, places=tuple(places), fixed=fixed)


class _Buffers:
    """A module's buffers as they are now.

    All of them: operators update statistics without raising a tensor's version, so nothing tells which are written.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._found = {name: (buffer, buffer.detach().clone()) for name, buffer in module.named_buffers()}

    @property
    def values(self) -> list[Tensor]:
        """Return what is held."""
        return [value for _, value in self._found.values()]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Go back to them for a while."""
        present = _Buffers(self._module)
        self._put_back()
        try:
            yield
        finally:
            present._put_back()

    def _put_back(self) -> None:
        for name, (buffer, value) in self._found.items():
            path, _, leaf = name.rpartition(".")
            # through `data`, which leaves the version: others may have saved a buffer, and will find it unchanged
            buffer.data.copy_(value)
            self._module.get_submodule(path)._buffers[leaf] = buffer
