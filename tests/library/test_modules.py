"""The papers' models have the parameters and block names of their analytic graphs."""

import pytest
import torch

from gpp_plugin.library.paper_graphs import build_model
from gpp_plugin.library.paper_modules import MODULES, make_batch

SMALL = {
    "mmt": {"branches": 2, "layers": 2, "hidden": 16, "heads": 2, "inner": 32},
    "candle_uno": {"branches": 3, "layers": 2, "hidden": 16},
    "two_branch": {"layers": 1, "hidden": 16, "heads": 2, "inner": 16},
    "dlrm": {
        "dense": 2, "sparse": 2, "layers": 2, "hidden": 16, "top_layers": 2, "entries": 50, "embedding": 4, "bag": 3,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_parameters_are_those_of_the_analytic_graph(name):
    model, graph = MODULES[name](**SMALL[name]), build_model(name, **SMALL[name])
    count = sum(p.numel() for p in model.parameters())
    assert sum(s.parameters for s in graph.specs) == pytest.approx(count, rel=0.05)


@pytest.mark.parametrize("name", MODULES)
def test_blocks_are_modules(name):
    model, graph = MODULES[name](**SMALL[name]), build_model(name, **SMALL[name])
    modules = {path for path, _ in model.named_modules()}
    assert {block.name for block in graph.graph.blocks} <= modules


def test_other_models_need_their_own_batch():
    with pytest.raises(ValueError, match="not a model of this file"):
        make_batch(torch.nn.Linear(1, 1), 2)
