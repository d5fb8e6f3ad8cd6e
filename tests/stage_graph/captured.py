"""Graphs whose captured part holds the loss, or shares a parameter, or mixes samples; and the same in one process."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import gpp_plugin
from tests.stage_graph.graphs import B, Maker, make

SIZE, WORDS, TOKENS = 8, 11, 4


class Words(nn.Module):
    """The words of a caption, each moved by what its image shows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, SIZE)
        self.image = nn.Linear(6, SIZE)

    def forward(self, ids: Tensor, pixels: Tensor) -> Tensor:
        return self.embedding(ids) + torch.tanh(self.image(pixels)).unsqueeze(1)


def make_language() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=SIZE, n_layer=3, n_head=2, n_positions=8, vocab_size=WORDS, bos_token_id=0, eos_token_id=0,
        embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return GPT2LMHeadModel(config).double()


class Captions(nn.Module):
    """A language model that embeds its words itself, so that its first and its last layer share a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.language = make_language()

    def forward(self, ids: Tensor, words: Tensor, image: Tensor) -> dict[str, Tensor]:
        embeds = self.language.transformer.wte(words) + image.unsqueeze(1)
        found = self.language(inputs_embeds=embeds, labels=ids)
        return {"loss": found.loss, "score": (found.logits.mean(-1) ** 2).mean()}


def build_across() -> gpp_plugin.StageGraph:
    """An encoder on two data-parallel ranks; a captured language model, loss and all, that shares its words."""
    graph = gpp_plugin.StageGraph("across")
    graph.stage("words", Maker(Words), inputs=["ids", "pixels"], outputs=["embeds"], ranks=[0, 1])
    graph.capture(
        "language",
        make_language(),
        inputs={"inputs_embeds": "embeds", "labels": "labels"},
        outputs=["loss", "logits"],
        ranks=[2, 3],
        stages=2,
        reported=["logits"],
    )
    graph.tie("words.embedding.weight", "language.lm_head.weight")
    return graph


def build_within() -> gpp_plugin.StageGraph:
    """A language model of two losses in three stages, the first and the last of which share a parameter."""
    graph = gpp_plugin.StageGraph("within", losses=["loss", "score"])
    image = Maker(lambda: nn.Linear(6, SIZE))
    graph.stage("image", image, inputs={"input": "pixels"}, outputs=["image"], ranks=[0])
    graph.capture(
        "captions",
        Captions(),
        inputs={"ids": "ids", "words": "ids", "image": "image"},
        outputs=["loss", "score"],
        ranks=[1, 2, 3],
        stages=3,
    )
    return graph


class Nearest(nn.Module):
    """The mixture of a table's rows that each token is like."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, SIZE)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.softmax(hidden @ self.table.weight.T, -1) @ self.table.weight


class Guess(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(SIZE, WORDS, bias=False)

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def build_among() -> gpp_plugin.StageGraph:
    """One parameter of two captured parts, the second on two data-parallel ranks, and of the explicit loss."""
    graph = gpp_plugin.StageGraph("among")
    graph.capture("words", make(Words, "words"), inputs=["ids", "pixels"], outputs=["embeds"], ranks=[0])
    nearest = make(Nearest, "nearest")
    graph.capture("nearest", nearest, inputs={"hidden": "embeds"}, outputs=["near"], ranks=[1, 2], stages=1)
    graph.stage(
        "guess", Maker(Guess), inputs={"hidden": "near", "labels": "labels"}, outputs=["loss"], ranks=[3]
    )
    graph.tie("words.embedding.weight", "nearest.table.weight")
    graph.tie("nearest.table.weight", "guess.head.weight")
    return graph


def caption_batch(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS, (B, TOKENS), generator=generator)
    pixels = torch.randn(B, 6, generator=generator, dtype=torch.float64)
    return {"ids": ids, "pixels": pixels, "labels": ids.clone()}


class Normed(nn.Module):
    """Layers with statistics over the samples, the first one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(SIZE, SIZE).requires_grad_(False), nn.BatchNorm1d(SIZE)
        self.second = nn.Linear(SIZE, SIZE)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.second(torch.tanh(self.norm(self.first(hidden))))


class Distance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(SIZE))

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        return ((out * self.scale - target) ** 2).mean()


def build_normed() -> gpp_plugin.StageGraph:
    """A captured part on two data-parallel ranks, between explicit stages."""
    graph = gpp_plugin.StageGraph("normed")
    start = Maker(lambda: nn.Linear(6, SIZE))
    graph.stage("start", start, inputs={"input": "pixels"}, outputs=["hidden"], ranks=[0])
    body = make(Normed, "body").float()
    graph.capture("body", body, inputs=["hidden"], outputs=["out"], ranks=[1, 2], stages=1)
    graph.stage("end", Maker(Distance), inputs=["out", "target"], outputs=["loss"], ranks=[3])
    return graph


def normed_batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "pixels": torch.randn(2 * B, 6, generator=generator),
        "target": torch.randn(2 * B, SIZE, generator=generator),
    }


class Rows(nn.Module):
    """Rows of any length, made wider."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE))

    def forward(self, rows: Tensor) -> Tensor:
        made: Tensor = self.layers(rows)
        return made


class Compared(nn.Module):
    """How far rows are from what they should be."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, 6)

    def forward(self, hidden: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.layer(hidden) - target).square().mean()}


def build_lengths() -> gpp_plugin.StageGraph:
    """Two captured parts that read rows of any length."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        rows, compared = Rows(), Compared()
    graph = gpp_plugin.StageGraph("lengths", losses=["loss"])
    graph.capture("rows", rows, inputs=["rows"], outputs=["hidden"], ranks=[0])
    graph.capture("compared", compared, inputs=["hidden", "target"], outputs=["loss"], ranks=[1])
    return graph


def lengths_batch(length: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(length)
    return {key: torch.randn(B, length, 6, generator=draw) for key in ("rows", "target")}


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


def build_mixed() -> gpp_plugin.StageGraph:
    """A HuggingFace vision tower and a traced layer, both captured, and a loss of the user's own."""
    graph = gpp_plugin.StageGraph("mixed")
    graph.capture(
        "vision",
        make_tower(),
        inputs=["pixel_values"],
        outputs={"last_hidden_state": "image_hidden"},
        ranks=[0, 1],
        stages=2,
    )
    layer = make(lambda: nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE)), "layer")
    graph.capture("layer", layer, inputs={"input": "image_hidden"}, outputs=["mixed"], ranks=[2])
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
