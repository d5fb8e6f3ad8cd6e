"""What lies outside the graph of a model: the process group, generators, a loss that nothing trains."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_plugin.capture.export import capture_model
from gpp_plugin.capture.recapture import recapture
from gpp_plugin.errors import CaptureError
from tests.capture.graphs import Calls, assert_is_model, run_graph
from tests.ranks import run_kept_ranks


def scaled(factor: Callable[[Any], Any] = lambda model: 1.0, **held: Any) -> nn.Module:
    """Return a linear layer whose result is scaled by what ``factor`` makes of the module."""
    return Calls(
        lambda model, x: (model.inner(x) * factor(model)).square().mean(), inner=nn.Linear(4, 4), **held
    )


def wrapped(tower: nn.Module) -> nn.Module:
    """Return a model whose scaled layer is one level down."""
    return Calls(lambda model, x: model.tower(x), tower=tower)


def torch_draw(model: Any) -> Any:
    with torch.utils._python_dispatch._disable_current_modes():
        return torch.rand(4)


def seeded(model: Any) -> Any:
    """Draw the same numbers in every call, as BigBird's random attention does."""
    np.random.seed(7)
    return float(np.random.permutation(5)[0] + 1)


def layer_drop(layerdrop: float) -> nn.Module:
    """Return a layer that is skipped where a drawn number says so, as MusicGen does."""

    def run(model: Any, x: Tensor) -> Any:
        layerdrop_draw = random.uniform(0, 1)
        return model.outer(x if layerdrop_draw < model.layerdrop else model.inner(x)).square().mean()

    return Calls(run, layerdrop=layerdrop, inner=nn.Linear(4, 4), outer=nn.Linear(4, 4))


def states() -> list[Any]:
    return [random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()]


@pytest.mark.parametrize(
    ("make", "what", "source"),
    [
        (lambda: scaled(lambda model: random.gauss(1.0, 0.1)), "Python's random", "random.gauss(1.0, 0.1)"),
        (
            lambda: scaled(lambda model: float(np.random.choice([1.0, 2.0, 3.0]))),
            "numpy.random",
            "np.random.choice([1.0, 2.0, 3.0])",
        ),
        (
            lambda: scaled(lambda model: float(model.noise.normal()), noise=np.random.default_rng(3)),
            "tower.noise",
            "model.noise.normal()",
        ),
        (lambda: scaled(torch_draw), "torch's CPU generator, outside the graph,", "torch.rand(4)"),
        (lambda: layer_drop(0.1), "Python's random", "random.uniform(0, 1)"),
    ],
)
def test_a_number_drawn_outside_the_graph_is_refused_by_module_and_line(
    make: Any, what: str, source: str
) -> None:
    tower = make()
    batch = {"x": torch.randn(4, 4)}
    before = states()
    with pytest.raises(CaptureError) as caught:
        capture_model(wrapped(tower), batch)
    assert states() == before
    text = str(caught.value)
    assert f"tower ({type(tower).__name__}, test_outside.py:" in text
    assert what in text and source in text and '"eager"' in text
    assert "\n" not in text


@pytest.mark.parametrize("make", [lambda: layer_drop(0.0), lambda: scaled(seeded), scaled])
def test_draws_without_effect_are_no_reason(make: Any) -> None:
    model = wrapped(make())
    batch, other = {"x": torch.randn(4, 4)}, {"x": torch.randn(8, 4)}
    before = states()
    found = capture_model(model, batch)
    assert states() == before
    again = recapture(model, found.analysis, other)
    assert states() == before
    assert_is_model(found, model, batch)
    assert [n.name for n in again.op_graph.nodes] == [n.name for n in found.op_graph.nodes]


def test_spec_augment_is_refused_with_the_key_that_switches_it_off() -> None:
    from transformers import HubertConfig, HubertForSequenceClassification

    def make(**sizes: Any) -> nn.Module:
        return HubertForSequenceClassification(
            HubertConfig(
                hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, conv_dim=(8,),
                conv_kernel=(4,), conv_stride=(4,), num_feat_extract_layers=1, num_conv_pos_embeddings=4,
                num_conv_pos_embedding_groups=2, classifier_proj_size=8, vocab_size=12, layerdrop=0.0,
                mask_time_length=2, mask_time_min_masks=1, **sizes,
            )
        )  # fmt: skip

    batch = {"input_values": torch.randn(2, 64), "labels": torch.tensor([0, 1])}
    with pytest.raises(CaptureError, match=r"hubert \(HubertModel, .*mask_time_prob=0"):
        capture_model(make(mask_time_prob=0.5), batch)
    assert capture_model(make(mask_time_prob=0.0), batch).op_graph.loss is not None


class Gatherer(nn.Module):
    """Gathers the features of all ranks where there are ranks, as FLAVA does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        features = self.inner(x)
        if dist.is_available() and dist.is_initialized():
            gathered = [torch.zeros_like(features) for _ in range(dist.get_world_size())]
            dist.all_gather(gathered, features)
            features = torch.cat(gathered).detach()
        return features.square().mean()


def gather_captured() -> tuple[float, float, bool, list[str]]:
    torch.manual_seed(0)
    model, batch = Gatherer(), {"x": torch.randn(4, 4)}
    found = capture_model(model, batch)
    loss = run_graph(found, model, batch)[found.op_graph.loss]
    targets = [node.target for node in found.op_graph.nodes]
    return float(loss), float(model.inner(batch["x"]).square().mean()), dist.is_initialized(), targets


def test_the_model_sees_no_process_group() -> None:
    ((loss, alone, is_there, targets),) = run_kept_ranks(gather_captured, 1)
    assert loss == alone
    assert is_there, "the group is back afterwards"
    assert not [target for target in targets if "gather" in target or "cat" in target]


def test_a_loss_that_needs_no_gradient_is_refused_in_training() -> None:
    batch = {"x": torch.randn(4, 4)}
    detached = Calls(lambda model, x: model.inner(x).detach().square().mean(), inner=nn.Linear(4, 4))
    with pytest.raises(CaptureError, match="loss of Calls needs no gradient.* 2 of its 2 parameters"):
        capture_model(detached, batch)
    with pytest.raises(CaptureError, match="0 of its 2 parameters take one; unfreeze"):
        capture_model(wrapped(scaled()).requires_grad_(False), batch)
    assert capture_model(detached, batch, training=False).op_graph.loss is not None
