"""Graphs whose captured part holds the loss, shares a parameter, swaps and recomputes; and what ranks run with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import gpp_plugin
from tests.stage_graph.graphs import B, U, Maker
from tests.stage_graph.jobs import run_in_double, steps

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


def vary_schedules() -> dict[str, Any]:
    """First forwards in halves, and backwards in two parts, with memory as it is and run again."""
    found = {}
    for way, block in {
        "halves": {"schedule": "1f1b", "slicing": 1},
        "halves again": {"schedule": "1f1b", "slicing": 1, "memory": {"recompute": "full"}},
        "parts": {"schedule": "zero_bubble"},
        "parts again": {"schedule": "zero_bubble", "memory": {"recompute": "full"}},
    }.items():
        try:
            found[way] = run_in_double(build_captions("across"), caption_batch(), B, block, count=True)
        except Exception as e:
            found[way] = {"error": repr(e)}
    return found


class Normed(nn.Module):
    """Layers with statistics over the samples, the first one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE), nn.Linear(SIZE, SIZE)
        self.first.requires_grad_(False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.second(torch.tanh(self.norm(self.first(hidden))))


class Sink(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(SIZE))

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        return ((out * self.scale - target) ** 2).mean()


def build_normed() -> gpp_plugin.StageGraph:
    """An explicit stage, a captured part with statistics on two data-parallel ranks, the loss."""
    from tests.stage_graph.graphs import make

    graph = gpp_plugin.StageGraph("normed")
    graph.stage("start", Maker(lambda: nn.Linear(6, SIZE)), inputs={"input": "pixels"}, outputs=["hidden"], ranks=[0])
    graph.capture("body", make(Normed, "body").float(), inputs=["hidden"], outputs=["out"], ranks=[1, 2], stages=1)
    graph.stage("end", Maker(Sink), inputs=["out", "target"], outputs=["loss"], ranks=[3])
    return graph


class WholeNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from tests.stage_graph.graphs import make

        self.start = make(lambda: nn.Linear(6, SIZE), "start")
        self.body, self.end = make(Normed, "body"), make(Sink, "end")

    def forward(self, pixels: Tensor, target: Tensor) -> Tensor:
        return self.end(self.body(self.start(pixels)), target)


def normed_batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "pixels": torch.randn(2 * B, 6, generator=generator, dtype=torch.float64),
        "target": torch.randn(2 * B, SIZE, generator=generator, dtype=torch.float64),
    }


def make_engine(graph: Any, batch: dict[str, Tensor], block: dict[str, Any], **changes: Any) -> Any:
    import deepspeed

    config = {
        "train_batch_size": len(next(iter(batch.values()))),
        "train_micro_batch_size_per_gpu": U,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        "steps_per_print": 1000,
        "graph_pipeline": {"comm_timeout_s": 60, **block},
        **changes,
    }
    wrapped = gpp_plugin.GraphPipelineModule(graph, sample_batch=batch)
    return deepspeed.initialize(model=wrapped, config=config)[0]


def train_engines(directory: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    config = {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.05}
    batches = [caption_batch(seed) for seed in range(3)]
    engine = make_engine(build_captions("across"), batches[0], {"memory": {"recompute": "full"}}, **config)
    first = steps(engine, batches[:2])
    engine.save_checkpoint(directory)
    rest = steps(engine, batches[2:])
    engine.save_pretrained(f"{directory}/export")
    again = make_engine(build_captions("across"), batches[0], {"memory": {"recompute": "full"}}, **config)
    again.load_checkpoint(directory)
    found["across"] = {
        "losses": first + rest,
        "reloaded": steps(again, batches[2:]),
        "norm": engine.get_global_grad_norm(),
        "state": engine.gather_state_dict(),
        "evaluated": engine.eval_batch(iter([caption_batch(7)]), return_logits=True),
        "differences": engine.memory_report().differences,
    }
    engine.destroy(); again.destroy()
    for way, memory, zero in (("plain", {"recompute": "off"}, 0), ("full", {"recompute": "full"}, 2)):
        engine = make_engine(
            build_normed(), normed_batch(0), {"memory": memory}, zero_optimization={"stage": zero}
        )
        found[way] = {
            "losses": steps(engine, [normed_batch(seed) for seed in range(3)]),
            "tensors": {n: t.detach().clone() for n, t in (*engine.module.named_parameters(), *engine.module.named_buffers())},
            "differences": engine.memory_report().differences,
            "memory": [s.memory is not None for s in engine.plan.stages],
        }
        engine.destroy()
    return found


def vary_modes() -> dict[str, Any]:
    from tests.integrations.async_jobs import held_by_stages
    from tests.stage_graph.mixed import build_mixed, mixed_batch

    found: dict[str, Any] = {}
    for way, memory in (("halves", {"recompute": "off"}), ("halves again", {"recompute": "full"})):
        block = {"schedule": "1f1b", "slicing": 1, "memory": memory}
        found[way] = run_in_double(build_mixed(), mixed_batch(), B, block, count=True)
    for way, memory in (("bf16", {"recompute": "off"}), ("bf16 again", {"recompute": "full"})):
        engine = make_engine(build_mixed(), mixed_batch(), {"memory": memory, "schedule": "1f1b", "slicing": "off"}, bf16={"enabled": True})
        found[way] = {
            "losses": steps(engine, [mixed_batch(seed) for seed in range(3)]),
            "tensors": {n: t.detach().clone() for n, t in engine.module.named_parameters()},
            "differences": engine.memory_report().differences,
            "memory": [s.memory is not None for s in engine.plan.stages],
        }
        engine.destroy()
    for way, memory in (("async", {"recompute": "off"}), ("async again", {"recompute": "full"})):
        try:
            engine = make_engine(build_mixed(), mixed_batch(), {"memory": memory, "mode": "async"})
            found[way] = {
                "losses": steps(engine, [mixed_batch(seed) for seed in range(6)]),
                "flushed": float(engine.flush()),
                "stages": held_by_stages(engine),
                "tensors": {n: t.detach().clone() for n, t in engine.module.named_parameters()},
                "memory": [s.memory is not None for s in engine.plan.stages],
            }
            engine.destroy()
        except Exception as e:
            found[way] = {"error": repr(e)}
    return found
