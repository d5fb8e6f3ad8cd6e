"""The single process of a comparison trains as the tests' own reference does."""

import copy

import pytest
import torch

from gpp_plugin.compare.single_process import SingleProcess
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
