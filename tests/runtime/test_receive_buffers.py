"""Buffers made ahead: what a receive waits for on a device, and that none is used twice at a time."""

from __future__ import annotations

import contextlib
import itertools

import torch

from gpp_plugin.runtime.messages.mailbox import ReceiveBuffers
from tests.nccl.fake_cuda import CUDA, FakeCuda
from tests.nccl.recording import record_rank

SHAPES = [(((2, 3), torch.float32),), (((4,), torch.int64), ((1,), torch.bool)), (((5,), torch.float32),)] * 2


def test_on_a_cpu_a_buffer_is_made_when_its_receive_is_posted() -> None:
    buffers = ReceiveBuffers(SHAPES, device=torch.device("cpu"), early=2)
    made, beside = buffers.take(1)
    assert isinstance(beside, contextlib.nullcontext)
    assert [(tuple(b.shape), b.dtype) for b in made] == [((4,), torch.int64), ((1,), torch.bool)]


def test_on_a_device_a_receive_waits_for_tasks_of_two_receives_ago() -> None:
    def receive(cuda: FakeCuda) -> None:
        buffers = ReceiveBuffers(SHAPES, device=CUDA, early=2)
        for numbers in (range(6), range(6), (4, 5)):  # a window begins behind what it takes over
            taken = []
            for number in numbers:
                made, beside = buffers.take(number)
                assert [(tuple(b.shape), b.dtype) for b in made] == list(SHAPES[number])
                taken += made
                with beside:
                    assert cuda.stream.number
                cuda.tape.put(0, "task")
            assert len({id(tensor) for tensor in taken}) == len(taken)
            buffers.clear()

    operations = record_rank(1, 0, receive)[0].tape.operations
    tasks = list(itertools.accumulate(each.what == "task" for each in operations))
    waits = [tasks[each.after[0]] for each in operations if each.what == "wait for event" and each.after]
    # not 0 1 2 3 4 5: those of all tasks before
    assert waits == [0, 0, 0, 1, 2, 3, *(6 + n for n in (0, 0, 0, 1, 2, 3)), 12, 12]
    assert len({each.stream for each in operations if each.what == "wait for event"}) == 1
