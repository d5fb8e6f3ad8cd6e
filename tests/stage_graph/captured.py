"""Graphs whose captured part holds the loss, shares a parameter, swaps and recomputes; and what ranks run with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import gpp_plugin
from tests.stage_graph.graphs import B, Maker
from tests.stage_graph.jobs import run_in_double

SIZE, WORDS, TOKENS = 8, 11, 4
RANKS = 4


class Words(nn.Module):
    """The words of a caption, each moved by what its image shows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, SIZE)
        self.image = nn.Linear(6, SIZE)

    def forward(self, ids: Tensor, pixels: Tensor) -> Tensor:
        return self.embedding(ids) + torch.tanh(self.image(pixels)).unsqueeze(1)


def make_language(*, dropout: float = 0.0) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=SIZE, n_layer=3, n_head=2, n_positions=8, vocab_size=WORDS, bos_token_id=0, eos_token_id=0,
        embd_pdrop=dropout, attn_pdrop=dropout, resid_pdrop=dropout,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return GPT2LMHeadModel(config).double()


class Captions(nn.Module):
    """A language model that embeds its words itself, so that its first and its last layer share a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.language = make_language()

    def forward(self, ids: Tensor, image: Tensor) -> dict[str, Tensor]:
        embeds = self.language.transformer.wte(ids) + image.unsqueeze(1)
        found = self.language(inputs_embeds=embeds, labels=ids)
        return {"loss": found.loss, "score": (found.logits.mean(-1) ** 2).mean()}


def build_captions(kind: str, *, dropout: float = 0.0) -> gpp_plugin.StageGraph:
    """Return an explicit encoder and a captured language model in two stages, or on two data-parallel ranks.

    Args:
        kind: ``across``: the encoder has the words, the language model's head shares them; ``within``: its own
            first layer does, and it has two losses.
    """
    graph = gpp_plugin.StageGraph(kind, losses=["loss", "score"] if kind == "within" else None)
    if kind == "across":
        graph.stage("words", Maker(Words), inputs=["ids", "pixels"], outputs=["embeds"], ranks=[0, 1])
        graph.capture(
            "language",
            make_language(dropout=dropout),
            inputs={"inputs_embeds": "embeds", "labels": "ids"},
            outputs=["loss", "logits"],
            ranks=[2, 3],
            stages=2,
            reported=["logits"],
        )
        graph.tie("words.embedding.weight", "language.lm_head.weight")
        return graph
    graph.stage(
        "image", Maker(lambda: nn.Linear(6, SIZE)), inputs={"input": "pixels"}, outputs=["image"], ranks=[0]
    )
    graph.capture(
        "captions", Captions(), inputs=["ids", "image"], outputs=["loss", "score"], ranks=[1, 2, 3], stages=3
    )
    return graph


class WholeCaptions(nn.Module):
    """The same in one process."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind
        if kind == "across":
            from tests.stage_graph.graphs import make

            self.words, self.language = make(Words, "words"), make_language()
            self.language.lm_head.weight = self.words.embedding.weight
            self.language.transformer.wte.weight = self.words.embedding.weight
        else:
            from tests.stage_graph.graphs import make

            self.image, self.captions = make(lambda: nn.Linear(6, SIZE), "image"), Captions()

    def forward(self, ids: Tensor, pixels: Tensor) -> Any:
        if self._kind == "across":
            return self.language(inputs_embeds=self.words(ids, pixels), labels=ids)
        found = self.captions(ids, self.image(pixels))
        return {"loss": found["loss"] + found["score"]}


def caption_batch(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(WORDS, (B, TOKENS), generator=generator),
        "pixels": torch.randn(B, 6, generator=generator, dtype=torch.float64),
    }


def train_captions() -> dict[str, Any]:
    """One mini-batch in double precision of each graph, with memory as it is, and run again or swapped."""
    found: dict[str, Any] = {}
    off = {"recompute": "off", "swap": "off"}
    for kind in ("across", "within"):
        ways = {"plain": off, "full": {"recompute": "full"}}
        for way, memory in ways.items():
            found[kind, way] = _run(kind, memory)
        low, high = (max(found[kind, way]["needs"].values()) for way in ("full", "plain"))
        for way in ("recompute", "swap"):
            memory = {**off, way: "auto", "limit_gb": (low + high) / 2e9}
            found[kind, way] = _run(kind, memory)
    return found


def _run(kind: str, memory: dict[str, Any]) -> dict[str, Any]:
    block = {"memory": memory, "schedule": "1f1b", "slicing": "off"}
    return run_in_double(build_captions(kind), caption_batch(), B, block, count=True)
