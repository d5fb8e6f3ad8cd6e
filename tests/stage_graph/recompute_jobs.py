"""What each rank runs in the tests of recomputed stages of stage graphs."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gpp_plugin
from tests.stage_graph.graphs import U, make
from tests.stage_graph.jobs import steps

WIDTH, ROWS = 16, 16
DATA_RANKS = 2


class Deep(nn.Module):
    """Layers with statistics over the samples, dropout, and a counter that it reads and writes anew."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 32 * WIDTH), nn.Linear(32 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(32 * WIDTH)
        self.register_buffer("calls", torch.ones(()))

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls = self.calls * 1.25
        inner = nn.functional.dropout(torch.tanh(self.norm(self.first(hidden))), 0.4, self.training)
        return self.second(inner) / self.calls


class Seeded(nn.Module):
    """A layer of a Megatron stage's dropout: one number from torch's generator seeds its streams."""

    def __init__(self, context: Any) -> None:
        super().__init__()
        from gpp_plugin.integrations.megatron.dropout import DropoutStreams

        self.layer = make(lambda: nn.Linear(WIDTH, WIDTH), "seeded").float()
        self.streams = DropoutStreams(3, context)

    def forward(self, hidden: Tensor) -> Tensor:
        with self.streams.of_forward():
            return nn.functional.dropout(torch.tanh(self.layer(hidden)), 0.4, self.training)


class Loss(nn.Module):
    """The mean square of a difference."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        return ((hidden * self.scale - target) ** 2).mean()


def build(*, is_seeded: bool) -> gpp_plugin.StageGraph:
    """Degrees 1, 2 and 1: a linear layer, the stage of interest, the loss."""
    graph = gpp_plugin.StageGraph("recomputed")
    graph.stage(
        "start", make(lambda: nn.Linear(WIDTH, WIDTH), "start").float(), inputs={"input": "x"}, outputs=["hidden"],
        ranks=[0],
    )  # fmt: skip
    graph.stage(
        "deep", Seeded if is_seeded else make(Deep, "deep").float(), inputs=["hidden"], outputs={"deep": "deep"},
        ranks=[1, 2],
    )  # fmt: skip
    graph.stage(
        "end", make(Loss, "end").float(), inputs={"hidden": "deep", "target": "target"}, outputs=["loss"], ranks=[3]
    )  # fmt: skip
    return graph


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randn(ROWS, WIDTH, generator=generator) for key in ("x", "target")}


def train(block: dict[str, Any], *, is_seeded: bool = False) -> dict[str, Any]:
    """Two mini-batches: losses, weights and buffers, what the plan says and what was counted."""
    import deepspeed

    config = {
        "train_batch_size": ROWS,
        "train_micro_batch_size_per_gpu": U,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "steps_per_print": 1000,
        "graph_pipeline": {"comm_timeout_s": 60, "schedule": "1f1b", "slicing": "off", **block},
    }
    wrapped = gpp_plugin.GraphPipelineModule(build(is_seeded=is_seeded), sample_batch=batch(0))
    engine = deepspeed.initialize(model=wrapped, config=config)[0]
    torch.manual_seed(dist.get_rank())
    losses = steps(engine, [batch(0), batch(1)])
    report = engine.memory_report()
    stage = engine.plan.stages[engine.plan.stage_of_rank(dist.get_rank())]
    return {
        "losses": losses,
        "tensors": {n: t.detach().clone() for n, t in (*engine.module.named_parameters(), *engine.module.named_buffers())},
        "drawn": torch.rand(()),
        "counts": [dataclasses.asdict(rank.counts) for rank in report.ranks],
        "predicted": [rank.predicted.activations for rank in report.ranks],
        "differences": report.differences,
        "memory": stage.memory,
        "in_flight": stage.in_flight,
        "needs": {s.name: s.memory_bytes for s in engine.plan.stages},
        "recomputed": [s.name for s in engine.plan.stages if s.memory is not None],
    }  # fmt: skip


def train_variants() -> dict[str, Any]:
    """With and without; at a limit that only recomputing meets, and at one that nothing meets."""
    from gpp_plugin.errors import PlanInfeasible
    from gpp_plugin.integrations.megatron.cpu import on_cpu

    sizes = {"micro_batch_sizes": {"start": 8, "deep": 4, "end": 2}}
    found = {
        "plain": train({**sizes, "memory": {"recompute": "off"}}),
        "full": train({**sizes, "memory": {"recompute": "full"}}),
        "split": train({**sizes, "schedule": "zero_bubble", "memory": {"recompute": "full"}}),
        "split_plain": train({**sizes, "schedule": "zero_bubble", "memory": {"recompute": "off"}}),
    }
    with on_cpu():
        found["seeded"] = train({"memory": {"recompute": "full"}}, is_seeded=True)
        found["seeded_plain"] = train({"memory": {"recompute": "off"}}, is_seeded=True)
    low, high = (max(found[way]["needs"].values()) for way in ("full", "plain"))
    found["auto"] = train({**sizes, "memory": {"recompute": "auto", "limit_gb": (low + high) / 2e9}})
    try:
        train({**sizes, "memory": {"recompute": "auto", "limit_gb": low / 4e9}})
    except PlanInfeasible as error:
        found["refused"] = str(error)
    return found
