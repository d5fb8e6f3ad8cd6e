"""The single process of a comparison: trained as the tests' own reference is, its activations counted by hand."""

import copy

import pytest
import torch

from gpp_plugin.compare.compare_rank import PeakMemory, SingleProcess
from gpp_plugin.errors import ConfigError
from tests.models import build
from tests.reference import train_reference

CONFIG = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}}}


@pytest.mark.parametrize("name", ["clip", "t5"])
def test_losses_are_those_of_plain_training(name):
    model, make_batch = build(name)
    batches = [make_batch(8, seed) for seed in range(3)]
    reference = train_reference(model, batches, unit=2)
    trainer = SingleProcess(copy.deepcopy(model).train(), CONFIG, loss_unit=2, device=torch.device("cpu"))
    assert [trainer.train(batch) for batch in batches] == pytest.approx(reference.losses, rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}}, "'Lamb' is none of torch's"),
        ({"optimizer": {"type": "AdamW", "params": {"speed": 1}}}, "do not fit torch's AdamW"),
        ({"optimizer": None}, "optimizer: null is not valid"),
        ({"fp16": {"enabled": True}}, "compare in bf16 or fp32"),
    ],
)
def test_what_it_cannot_train_is_refused(changes, message):
    model, _ = build("gpt2")
    with pytest.raises(ConfigError, match=message):
        SingleProcess(model, {**CONFIG, **changes}, loss_unit=2, device=torch.device("cpu"))


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
