"""Buffers made ahead: what a receive waits for on a device, and that none is used twice at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gpp_plugin.runtime.messages.mailbox import ReceiveBuffers

SHAPES = [(((2, 3), torch.float32),), (((4,), torch.int64), ((1,), torch.bool)), (((5,), torch.float32),)] * 2


def test_on_a_cpu_a_buffer_is_made_when_its_receive_is_posted() -> None:
    buffers = ReceiveBuffers(SHAPES, device=torch.device("cpu"), early=2)
    made, beside = buffers.take(1)
    assert isinstance(beside, contextlib.nullcontext)
    assert [(tuple(b.shape), b.dtype) for b in made] == [((4,), torch.int64), ((1,), torch.bool)]


class Device:
    """Two streams in order of what the host does; `empty` counts what was allocated."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.current = "compute"

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        device = self

        class Event:
            def record(self, stream: str) -> None:
                assert stream == "compute"
                self.at = sum(entry == "task" for entry in device.log)

        class Stream:
            def __init__(self, of: torch.device, priority: int) -> None:
                assert priority < 0

            def wait_event(self, event: Event) -> None:
                device.log.append(("waits for tasks before", event.at))

        @contextlib.contextmanager
        def stream(side: Stream) -> Iterator[None]:
            device.current = "side"
            yield
            device.current = "compute"

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "stream", stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda of: device.current)
        empty = torch.empty

        def made(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            assert self.current == "compute"
            return empty(shape, dtype=dtype)

        monkeypatch.setattr(torch, "empty", made)


def test_on_a_device_a_receive_waits_for_tasks_of_two_receives_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    device.install(monkeypatch)
    buffers = ReceiveBuffers(SHAPES, device=torch.device("cuda:0"), early=2)
    for _ in range(2):  # a mini-batch, and another one
        device.log.clear()
        taken = []
        for number in range(len(SHAPES)):
            made, beside = buffers.take(number)
            assert len(made) == len(SHAPES[number])
            taken += made
            with beside:
                assert device.current == "side"
            device.log.append("task")
        waits = [entry[1] for entry in device.log if entry != "task"]
        assert waits == [0, 0, 0, 1, 2, 3]  # not 0 1 2 3 4 5: those of all tasks before
        assert len({id(tensor) for tensor in taken}) == len(taken)
        buffers.clear()


def test_the_numbers_of_a_window_begin_behind_what_it_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    Device().install(monkeypatch)
    buffers = ReceiveBuffers(SHAPES, device=torch.device("cuda:0"), early=2)
    made, _ = buffers.take(4)
    assert [tuple(b.shape) for b in made] == [(4,), (1,)]
    made, _ = buffers.take(5)
    assert [tuple(b.shape) for b in made] == [(5,)]
