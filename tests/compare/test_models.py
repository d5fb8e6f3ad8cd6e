"""Models of a comparison by name: their batches have a loss, differ from step to step and are made again alike."""

import sys

import pytest
import torch

from gpp_plugin.capture.tracing.sample_batches import count_samples
from gpp_plugin.compare.compare_settings import CompareSettings, default_config
from gpp_plugin.compare.compared_models import TINY, build_model, cut_batch
from gpp_plugin.errors import ConfigError

OWN = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x, labels):
        return {"loss": (self.layer(x).squeeze(1) - labels).square().mean()}

def batch_at(step):
    return {"x": torch.full((8, 3), float(step)), "labels": torch.zeros(8)}

def given():
    return Model(), batch_at(1)

def drawn():
    return Model(), batch_at

def short():
    return Model(), lambda step: {"x": torch.zeros(4, 3), "labels": torch.zeros(4)}

def nothing():
    return Model()

def broken():
    return {}["weights"]
"""


def settings(model, **changes):
    return CompareSettings(
        model=model,
        ds_config=default_config(mini_batch=8, loss_unit=2, block={}),
        num_ranks=2,
        **{"length": 16, **changes},
    )


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_model.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("own_model", None)


@pytest.mark.parametrize("name", [*TINY, "two_branch"])
def test_batches_train_the_model(name):
    sizes = {"layers": 1, "hidden": 32, "heads": 2, "inner": 32} if name == "two_branch" else {}
    first, again = (build_model(settings(name, sizes=sizes)) for _ in range(2))
    batch = first.batch_at(0)
    assert count_samples(batch) == 8
    for key, value in batch.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, again.batch_at(0)[key])
    assert any(
        not torch.equal(value, first.batch_at(1)[key])
        for key, value in batch.items()
        if isinstance(value, torch.Tensor)
    )
    losses = [float(built.model(**batch)["loss"].detach()) for built in (first, again)]
    assert losses[0] == losses[1] and losses[0] > 0


@pytest.mark.parametrize(("function", "value"), [("given", 1.0), ("drawn", 5.0)])
def test_a_model_of_ones_own(own, function, value):
    built = build_model(settings(f"own_model:{function}"))
    assert torch.equal(built.batch_at(5)["x"], torch.full((8, 3), value))


def test_a_batch_is_cut_into_loss_units():
    parts = cut_batch({"x": torch.arange(6), "boxes": torch.arange(12), "flag": True}, 2)
    assert [part["x"].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert [part["boxes"].tolist() for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert all(part["flag"] is True for part in parts)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("clip_huge", "no such file or model"),
        ("own_model:absent", "has no attribute 'absent'"),
        ("absent_module:make", "No module named 'absent_module'"),
        ("own_model:nothing", "return the pair"),
        ("own_model:torch", "is a module; name a function"),
        ("own_model:broken", "its function raised KeyError: 'weights'"),
    ],
)
def test_what_is_no_model_is_refused(own, name, message):
    with pytest.raises(ConfigError, match=message):
        build_model(settings(name))


def test_a_batch_of_another_size_is_refused(own):
    with pytest.raises(ConfigError, match="has 4 samples, train_batch_size is 8"):
        build_model(settings("own_model:short")).batch_at(0)
