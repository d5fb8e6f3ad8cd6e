"""Tensors that wait on the host: same gradients, device memory free in between, back in time, once each."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.plan import MemoryPlan, SwappedTensor
from gpp_plugin.ir.program import Instruction, InstructionKind, RankProgram
from gpp_plugin.ir.schedule import Task, TaskKind
from gpp_plugin.runtime.memory.activation_policy import backwards_after
from gpp_plugin.runtime.memory.counting import MemoryCounter
from gpp_plugin.runtime.memory.recompute import MovingPass, Swap, is_movable
from gpp_plugin.runtime.memory.swap import HostPool, ReturnQueue, SwapLink, SwappedStorage, size_class
from tests.runtime.memory_stages import (
    CPU,
    Trainer,
    assert_same,
    check_plan,
    chunks,
    make_stage,
    memory_plan,
    plan_both,
    plan_swap,
)


@pytest.mark.parametrize(
    ("granularity", "length", "dtype", "start"),
    [("node", 5, torch.float32, 0.5), ("layer", 1, torch.bfloat16, 0.0)],
)
@pytest.mark.parametrize("name", ["clip", "t5", "gpt2"])
def test_gradients_are_those_of_everything_kept(
    name: str, granularity: str, length: int, dtype: torch.dtype, start: float
) -> None:
    stage = make_stage(name, granularity=granularity, dtype=dtype, dropout=0.1, start=start)
    expected = Trainer(stage).train()
    for plan in (plan_swap(stage), plan_both(stage, length)):
        counts = check_plan(stage, plan, expected)
        # a stage that begins inside an attention may find tensors contiguous that the whole model copies
        assert counts.swapped_bytes == pytest.approx(plan.swapped_bytes, rel=0.05 if start else 0.0)


def test_everything_swapped_leaves_masks_only() -> None:
    stage = make_stage("t5", dropout=0.1)
    plan = plan_swap(stage)
    plain, counts = Trainer(stage).count(), Trainer(stage, plan).count()
    assert counts.held_bytes + counts.swapped_bytes == plain.held_bytes
    assert counts.held_bytes < 0.05 * plain.held_bytes
    assert 0 < counts.working_bytes <= 2 * max(t.bytes for t in plan.swapped)


def test_device_storages_are_free_between_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else keeps them: no view, no leaf of a received tensor, no list of the forward."""
    stage = make_stage("t5", dropout=0.1, start=0.5)
    trainer = Trainer(stage, plan_swap(stage))
    moved: dict[int, weakref.ref[Any]] = {}
    received: list[weakref.ref[Any]] = []
    pack, make = MovingPass.pack, Trainer.received

    def watch(self: MovingPass, tensor: Tensor, place: int, action: Any) -> Any:
        if isinstance(action, Swap):
            moved[action.slot] = weakref.ref(tensor.untyped_storage())
        return pack(self, tensor, place, action)

    def give(self: Trainer, micro_batch: int) -> list[Tensor]:
        found = make(self, micro_batch)
        received.extend(weakref.ref(t.untyped_storage()) for t in found)
        return found

    monkeypatch.setattr(MovingPass, "pack", watch)
    monkeypatch.setattr(Trainer, "received", give)
    for micro_batch in range(2):
        trainer.forward(micro_batch)
        assert len(moved) >= len(stage.saved()) and received
        assert all(storage() is None for storage in (*moved.values(), *received))
        trainer.backward(micro_batch)
        moved.clear()
        received.clear()


def test_host_buffers_are_used_again_and_given_back() -> None:
    stage = make_stage("gpt2", granularity="layer", dropout=0.1)
    plan = plan_swap(stage)
    trainer = Trainer(stage, plan)
    pool = trainer.link.pool
    trainer.train(in_flight=2, steps=2)
    total = pool.total_bytes
    assert total >= 2 * plan.swapped_bytes
    trainer.train(in_flight=2, steps=4)
    assert pool.total_bytes == total
    assert sum(size * len(buffers) for size, buffers in pool._free.items()) == total
    trainer.forward(0)
    trainer.compute.clear()  # a mini-batch that fails
    assert sum(size * len(buffers) for size, buffers in pool._free.items()) == total


def test_views_and_several_keepers_move_one_storage() -> None:
    link, counter = SwapLink(CPU), MemoryCounter(())
    base = torch.arange(12.0)
    views = [base[2:6], base.view(3, 4).t(), base.view(torch.int32)]
    expected = [view.clone() for view in views]
    storage = SwappedStorage(link, base, counter)
    handles = [storage.view(view) for view in views]
    queue = ReturnQueue()
    for _ in handles:
        queue.add(storage)
    del base, views
    tensors = [queue.get(handle) for handle in handles]
    assert [t.stride() for t in tensors] == [t.stride() if i != 1 else (1, 4) for i, t in enumerate(tensors)]
    assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == 1
    assert counter.counts().working_bytes == 48
    assert storage._data is None, "the last use lets go"
    assert torch.equal(queue.get(handles[0]), expected[0]), "a second backward brings it back again"


def test_storages_come_back_ahead_in_backward_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one is on its way while one is in use, as many bytes as the largest has."""
    link = SwapLink(CPU)
    names: dict[int, str] = {}
    log: list[str] = []
    bring = SwappedStorage.bring

    def watch(self: SwappedStorage, **options: bool) -> None:
        log.append(f"bring {names[id(self)]}")
        bring(self, **options)

    monkeypatch.setattr(SwappedStorage, "bring", watch)
    queue = ReturnQueue()
    handles = {}
    for name, size in {"a": 4, "b": 4, "c": 2, "d": 2, "e": 4}.items():
        tensor = torch.zeros(size)
        storage = SwappedStorage(link, tensor, None)
        names[id(storage)] = name
        handles[name] = storage.view(tensor)
        queue.add(storage)
    queue.add(handles["b"].storage)  # read again, behind all others
    queue.prefetch()
    for name in "bedca":
        log.append(f"use {name}")
        queue.get(handles[name])
    assert log == [
        "bring b", "use b", "bring e", "use e", "bring d", "bring c", "use d", "use c", "bring a", "use a",
    ]  # fmt: skip
    log.clear()
    queue = ReturnQueue()
    for name, size in {
        "f": 4,
        "g": 2,
        "h": 1,
        "i": 1,
    }.items():  # the largest is neither the last nor the next
        storage = SwappedStorage(link, torch.zeros(size), None)
        names[id(storage)], handles[name] = name, storage.view(torch.zeros(size))
        queue.add(storage)
    queue.prefetch()
    assert log == ["bring i", "bring h", "bring g"]


F, B = TaskKind.FORWARD, TaskKind.BACKWARD


def test_a_backward_known_to_come_next_is_prepared_during_the_task_before() -> None:
    tasks = [
        Task(kind=k, stage=0, micro_batch=m) for k, m in ((F, 0), (F, 1), (B, 0), (F, 2), (B, 1), (B, 2))
    ]
    program = RankProgram(
        rank=0,
        stages=(0,),
        instructions=tuple(Instruction(kind=InstructionKind.COMPUTE, task=task) for task in tasks),
    )
    following = backwards_after(program)
    assert following == {(False, 1, None): 0, (False, 2, None): 1, (True, 1, None): 2}
    stage = make_stage("gpt2", granularity="layer", dropout=0.1)
    trainer = Trainer(stage, plan_swap(stage), next_backward=following.get)
    trainer.compute.start_counting()
    trainer.forward(0)
    assert trainer.activations is not None and trainer.activations._counter is not None
    assert trainer.activations._counter.counts().working_bytes == 0
    trainer.forward(1)
    counts = trainer.activations._counter.counts()
    assert 0 < counts.working_bytes <= max(t.bytes for t in plan_swap(stage).swapped), (
        "one comes, none is in use"
    )
    plain = Trainer(stage, plan_swap(stage))
    expected, found = plain.train(), Trainer(stage, plan_swap(stage), next_backward=following.get).train()
    assert_same(found, expected)


def test_unknown_tensors_and_double_plans_are_refused() -> None:
    stage = make_stage("gpt2", granularity="layer", dropout=0.1)
    unknown = MemoryPlan(swapped=(SwappedTensor(name="nothing:inside", bytes=1, free_us=0.0),))
    with pytest.raises(PlanError, match="'nothing:inside' is to be swapped, but the stage neither makes"):
        Trainer(stage, unknown)
    plan = memory_plan(stage, chunks(stage, 1))
    name = plan.recomputed[0].tensors[0]
    both = MemoryPlan(recomputed=plan.recomputed, swapped=(SwappedTensor(name=name, bytes=1, free_us=0.0),))
    with pytest.raises(PlanError, match=f"'{name}' is both swapped and made again"):
        Trainer(stage, both)


def test_the_pool_lends_by_class_of_size() -> None:
    pool = HostPool(is_pinned=False)
    first = pool.take(1000)
    assert first.data.numel() == 1024
    pool.give(first)
    assert pool.take(990) is first, "another shape finds it useful"
    assert pool.take(990) is not first
    assert all(n <= size_class(n) <= max(512, n * 9 / 8) for n in range(1, 5000))


def test_swapped_tensors_in_a_split_backward() -> None:
    stage = make_stage("clip", dropout=0.1, start=0.5)
    plan = plan_both(stage, 5)
    assert_same(Trainer(stage, plan).train(is_split=True), Trainer(stage).train(is_split=True))


def test_a_number_on_the_host_does_not_move_with_a_device() -> None:
    assert is_movable(torch.ones(3), CPU) and is_movable(torch.ones(3))
    assert not is_movable(torch.ones(3, device="meta"), CPU)
    assert not is_movable(torch.ones(3, 3).to_sparse(), CPU)
    assert not is_movable(torch.ones(3, dtype=torch.complex64).conj(), CPU)


class Stream:
    """Writes down who waits for what; copies are done at once, events are over when told."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.num_events = name, log, 0

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self.log.append(f"{self.name} waits for {event.name}")

    def record_event(self) -> Event:
        self.num_events += 1
        self.log.append(f"{self.name} copies: {self.name}{self.num_events}")
        return Event(f"{self.name}{self.num_events}")


class Event:
    def __init__(self, name: str) -> None:
        self.name, self.is_over = name, False

    def query(self) -> bool:
        return self.is_over


def test_copies_wait_for_compute_and_compute_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of events that CUDA needs, without CUDA."""
    log: list[str] = []
    compute = Stream("compute", log)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    link = SwapLink(CPU)
    link._out, link._back = Stream("out", log), Stream("back", log)  # type: ignore[assignment]
    first, second = torch.arange(4.0), torch.arange(4.0) + 4
    storage = SwappedStorage(link, first, None)
    freed = weakref.ref(first.untyped_storage())
    view = storage.view(first)
    del first
    assert freed() is not None, "the copy is on its way"
    assert log == ["out waits for compute", "out copies: out1"]
    log.clear()
    other = SwappedStorage(link, second, None)
    assert log == ["out waits for compute", "out copies: out2", "compute waits for out1"]
    assert freed() is None, "no more than the largest one's bytes are on their way"
    log.clear()
    queue = ReturnQueue()
    queue.add(storage)
    queue.prefetch()
    assert log == [
        "compute waits for out2",
        "back waits for compute",
        "back waits for out1",
        "back copies: back1",
    ]
    assert not link._leaving, "what has left makes room for what comes back"
    log.clear()
    assert torch.equal(queue.get(view), torch.arange(4.0))
    assert log == ["compute waits for back1"]
    log.clear()
    queue, storage, view = ReturnQueue(), None, None  # type: ignore[assignment]
    SwappedStorage(link, second, None)
    assert log[:2] == ["out waits for compute", "out waits for back1"], "its buffer is used again"
    link.clear()
    assert not link._leaving
    asked = other.view(second)
    other.bring()
    log.clear()
    del other, asked
    assert log == ["compute waits for back2"], (
        "what was asked for and never used is not freed before it is there"
    )
