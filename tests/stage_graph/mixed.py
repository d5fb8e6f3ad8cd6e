"""A graph of captured and explicit stages: a HuggingFace vision tower, a traced layer, a loss of the user's own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import gpp_plugin
from tests.stage_graph.graphs import B, Maker

SIZE = 8


class Scored(nn.Module):
    """The loss stage."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(SIZE))

    def forward(self, mixed: Tensor, image_hidden: Tensor, target: Tensor) -> Tensor:
        return (((mixed * self.scale + image_hidden).mean(1) - target) ** 2).mean()


def make_tower() -> nn.Module:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    config = CLIPVisionConfig(
        hidden_size=SIZE, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2, image_size=8, patch_size=4
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return CLIPVisionModel(config).double()


def make_layer() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE)).double()


def build_mixed(*, stages: int | str = 2, is_frozen: bool = False) -> gpp_plugin.StageGraph:
    graph = gpp_plugin.StageGraph("mixed")
    graph.capture(
        "vision",
        make_tower().requires_grad_(not is_frozen),
        inputs=["pixel_values"],
        outputs={"last_hidden_state": "image_hidden"},
        ranks=[0, 1],
        stages=stages,
    )
    graph.capture("layer", make_layer(), inputs={"input": "image_hidden"}, outputs=["mixed"], ranks=[2])
    graph.stage(
        "end", Maker(Scored), inputs=["mixed", "vision.image_hidden", "target"], outputs=["loss"], ranks=[3]
    )
    return graph


def mixed_batch(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "pixel_values": torch.randn(B, 3, 8, 8, generator=generator, dtype=torch.float64),
        "target": torch.randn(B, SIZE, generator=generator, dtype=torch.float64),
    }


class WholeMixed(nn.Module):
    """The same in one process."""

    def __init__(self, *, is_frozen: bool = False) -> None:
        super().__init__()
        self.vision, self.layer = make_tower().requires_grad_(not is_frozen), make_layer()
        self.end = Scored().double()

    def forward(self, pixel_values: Tensor, target: Tensor) -> Tensor:
        hidden = self.vision(pixel_values=pixel_values).last_hidden_state
        return self.end(self.layer(hidden), hidden, target)
