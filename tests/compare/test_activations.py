"""Bytes held for backward, counted by hand on a chain whose saved tensors are known."""

import torch

from gpp_plugin.compare.single_process import PeakMemory


def test_each_storage_counts_once_and_as_long_as_it_is_held():
    weight = torch.ones(4, 4, requires_grad=True)
    features = torch.ones(8, 4)
    memory = PeakMemory(torch.device("cpu"))
    with memory.watch([weight]):
        for _ in range(3):
            hidden = (features @ weight).relu()  # saves features (128 bytes) and the result (128 bytes)
            loss = hidden.square().sum()  # saves the result of relu again
            assert memory.peak_bytes == 256
            loss.backward()
    assert memory.measure == "saved tensors"
    assert torch.equal(weight.grad, torch.full((4, 4), 3 * 2 * 4.0 * 8))


def test_two_micro_batches_in_flight_hold_twice_as_much():
    weight = torch.ones(4, 4, requires_grad=True)
    memory = PeakMemory(torch.device("cpu"))
    with memory.watch([weight]):
        losses = [(torch.ones(8, 4) @ weight).sum() for _ in range(2)]
        for loss in losses:
            loss.backward()
        del losses, loss
        (torch.ones(8, 4) @ weight).sum().backward()
    assert memory.peak_bytes == 2 * 128
