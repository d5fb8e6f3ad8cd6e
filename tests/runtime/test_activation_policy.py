"""What a stage keeps of its micro-batches and counts, by storage: views, halves, what several stages share; and drops."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from gpp_plugin.ir.memory_report import MemoryCounts
from gpp_plugin.runtime.memory.activation_policy import ActivationPolicy, StageActivations
from gpp_plugin.runtime.memory.counting import HeldTogether, MemoryCounter, Pass
from gpp_plugin.runtime.memory.recompute import Held, Replay
from gpp_plugin.runtime.memory.swap import ReturnQueue, SwapLink, SwappedStorage

CPU = torch.device("cpu")
ROW = 4 * 4
"""Bytes of a row of four floats."""


def activations_of() -> StageActivations:
    """Return a stage that keeps the square of its weight's product: what it receives, and one tensor of its own."""

    def call(weight: Tensor, received: Tensor) -> tuple[Tensor, ...]:
        return ((received * weight).square(),)

    policy = ActivationPolicy(call)
    return StageActivations(whole=policy, half=policy, leaves=(0,), constants=())


def test_of_a_tensor_handed_over_the_rows_a_stage_was_given_are_its_own() -> None:
    weight = torch.ones(4, requires_grad=True)
    activations = activations_of()
    made = torch.ones(8, 4)
    activations.start_counting()
    kept = activations.forward(0, None, [weight], [], [made[2:5]])
    counts = activations.stop_counting()
    assert kept and counts is not None and counts.held_bytes == 3 * ROW + 3 * ROW, (
        "received rows, and their product"
    )


def test_halves_of_a_received_tensor_are_kept_as_one() -> None:
    weight = torch.ones(4, requires_grad=True)
    activations = activations_of()
    arrived = torch.ones(6, 4)
    activations.start_counting()
    made = [
        activations.forward(0, half, [weight], [], [rows])
        for half, rows in enumerate((arrived[:2], arrived[2:]))
    ]
    counts = activations.stop_counting()
    assert made and counts is not None and counts.held_bytes == 6 * ROW + 2 * ROW + 4 * ROW


def test_counts_are_of_one_micro_batch_of_all_at_once_and_of_the_rank() -> None:
    """Two stages: the second keeps rows of what the first made, and a storage of its own; inputs are there anyway."""
    made, own, given, weight = torch.ones(8, 4), torch.ones(2, 4), torch.ones(3, 4), torch.ones(4)
    together = HeldTogether()
    first, second = MemoryCounter([weight], together), MemoryCounter([weight], together)
    for counter, received in ((first, []), (second, [made[:5]])):
        for micro_batch in range(2):
            counter.begin(micro_batch, [given], received)
            for tensor in (weight[:2], given[1:], made[:5], made[:5].view(-1)):
                counter.keep(micro_batch, tensor)
    second.keep(1, own)
    second.swap(0, 10)
    second.swap(1, 30)
    second.make_again(0, 7)
    second.make_again(1, 5)
    for num_bytes in (40, -10, 20, -50):
        second.work(num_bytes)
    assert together.peak == 8 * ROW + 2 * ROW, "what both keep is there once, whole"
    for micro_batch in (1, 0):
        second.end(micro_batch)
    assert second.counts() == MemoryCounts(
        held_bytes=5 * ROW + 2 * ROW,
        swapped_bytes=30,
        recomputed_bytes=7,
        peak_held_bytes=2 * 5 * ROW + 2 * ROW,
        working_bytes=50,
    )
    more = torch.ones(3, 4)
    first.keep(0, more)
    assert together.peak == 8 * ROW + 3 * ROW, "the first still holds its own"
    first.end(0)
    first.end(1)
    for _ in range(2):
        first.begin(2, [])
        first.keep(2, own)
        first.end(2)
    assert together.peak == 8 * ROW + 3 * ROW and first.counts().peak_held_bytes == 2 * 8 * ROW + 3 * ROW
    first.begin(3, [])
    first.keep(3, torch.ones(64, 4))
    assert first.counts().held_bytes == 64 * ROW and together.peak == 64 * ROW, (
        "in flight, and nothing else is left"
    )


def test_what_comes_back_to_the_device_for_nothing_is_counted_until_it_is_gone() -> None:
    """A swapped storage that was asked for and never used; tensors of a segment that no backward asked for."""
    counter, link = MemoryCounter(()), SwapLink(CPU)
    for _ in range(2):
        storage = SwappedStorage(link, torch.ones(8, 4), counter)
        view = storage.view(torch.ones(8, 4))
        storage.bring()
        del storage, view
    assert counter.counts().working_bytes == 8 * ROW
    for _ in range(2):
        replay = Replay(fixed=(), queue=ReturnQueue(), device=CPU, micro_batch=0, counter=counter)
        replay._values[0] = torch.ones(16, 4)
        replay._count()
        del replay
    assert counter.counts().working_bytes == 16 * ROW and counter.counts().recomputed_bytes == 2 * 16 * ROW


def test_what_a_segment_does_not_read_again_is_not_brought_back() -> None:
    queue, link = ReturnQueue(), SwapLink(CPU)
    storage = SwappedStorage(link, torch.ones(8, 4), None)
    replay = Replay(fixed=(), queue=queue, device=CPU, micro_batch=0, counter=None)
    queue.add(storage)
    replay.held["x"] = Held(storage.view(torch.ones(8, 4)), requires_grad=False)
    assert storage.is_due
    replay.plan(None)
    queue.prefetch()
    assert not storage.is_due and storage._data is None and not replay.held


class Noted(ActivationPolicy):
    """Notes which forward's tensors are brought back."""

    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__(lambda received: (received * 2,))
        self._name, self._log = name, log

    def begin(self, *given: Any, **options: Any) -> Pass:
        forward = super().begin(*given, **options)
        number = len(self._log)
        self._log.append(f"{self._name}{number}")
        vars(forward)["prefetch"] = lambda **beside: self._log.append(f"bring {self._name}{number}")
        vars(forward)["call_behind"] = lambda behind: behind()
        return forward


def test_the_half_that_ran_last_comes_back_first_and_nothing_after_a_failure() -> None:
    log: list[str] = []
    link: Any = SimpleNamespace(clear=lambda: log.append("link"))
    following = {(False, 1, None): 0, (True, 0, None): 1}
    activations = StageActivations(
        whole=Noted("whole", log),
        half=Noted("half", log),
        leaves=(),
        constants=(),
        link=link,
        next_backward=following.get,
    )
    for half in (0, 1):
        activations.forward(0, half, [], [], [torch.ones(1)])
    activations.forward(1, None, [], [], [torch.ones(1)])
    assert log == ["half0", "half1", "bring half1", "bring half0", "whole4"], (
        "before the forward it hides behind"
    )
    log.clear()
    activations.begin_backward(0)
    assert log == ["bring half1", "bring half0", "bring whole4"], "that of micro-batch 1 is next"
    activations.end_backward(0)
    log.clear()
    activations.begin_backward(0, is_whole=False)
    activations.begin_weight_gradient(0)
    assert log == ["bring whole4"], "0 is gone"
    activations.clear()
    activations.begin_backward(1)
    assert log == ["bring whole4", "link"]
