"""What each rank runs in the tests of recomputed and swapped stages of stage graphs."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gpp_plugin
from tests.integrations.engine_jobs import config_of, make_engine, steps
from tests.stage_graph.graphs import make

WIDTH, ROWS = 16, 16
ORDER = {"schedule": "1f1b", "slicing": "off"}


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
        from gpp_plugin.integrations.megatron.chunks import DropoutStreams

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


def build(kind: str) -> gpp_plugin.StageGraph:
    """A linear layer, the stages of interest, the loss: on two data ranks, or two behind each other (``line``)."""
    middle: list[tuple[str, Any, list[int]]] = {
        "deep": [("deep", make(Deep, "deep").float(), [1, 2])],
        "seeded": [("deep", Seeded, [1, 2])],
        "line": [("deep", make(Deep, "deep").float(), [1]), ("deeper", make(Deep, "deeper").float(), [2])],
    }[kind]
    graph = gpp_plugin.StageGraph(kind)
    graph.stage(
        "start", lambda: make(lambda: nn.Linear(WIDTH, WIDTH), "start").float(), inputs={"input": "x"},
        outputs=["start"], ranks=[0],
    )  # fmt: skip
    before = "start"
    for name, module, ranks in middle:
        graph.stage(name, module, inputs={"hidden": before}, outputs=[name], ranks=ranks)
        before = name
    graph.stage(
        "end", make(Loss, "end").float(), inputs={"hidden": before, "target": "target"}, outputs=["loss"], ranks=[3]
    )  # fmt: skip
    return graph


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randn(ROWS, WIDTH, generator=generator) for key in ("x", "target")}


def train(block: dict[str, Any], kind: str = "deep") -> dict[str, Any]:
    """Two mini-batches, and what mode async leaves under way: losses, weights and buffers, what the plan says and what was counted."""
    config = config_of(
        train_batch_size=ROWS, optimizer={"type": "SGD", "params": {"lr": 0.5}}, block={**ORDER, **block}
    )
    engine = make_engine(build(kind), batch(0), config)
    torch.manual_seed(dist.get_rank())
    losses = steps(engine, [batch(0), batch(1)])
    report = engine.memory_report()
    if engine.plan.mode == "async":
        losses.append(float(engine.flush()))
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
        "optimized": [s.name for s in engine.plan.stages if s.memory is not None],
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
        found["seeded"] = train({"memory": {"recompute": "full"}}, "seeded")
        found["seeded_plain"] = train({"memory": {"recompute": "off"}}, "seeded")
    low, high = (max(found[way]["needs"].values()) for way in ("full", "plain"))
    middle = {"limit_gb": (low + high) / 2e9}
    found["auto"] = train({**sizes, "memory": {"swap": "off", **middle}})
    found["swap"] = train({**sizes, "memory": {"recompute": "off", **middle}})
    try:
        train({**sizes, "memory": {"recompute": "auto", "limit_gb": low / 4e9}})
    except PlanInfeasible as error:
        found["refused"] = str(error)
    late = {"mode": "async"}
    found["async_plain"] = plain = train({**late, "memory": {"recompute": "off", "swap": "off"}}, "line")
    found["async_full"] = train({**late, "memory": {"recompute": "full"}}, "line")
    tight = {"limit_gb": (max(plain["needs"].values()) - 3000) / 1e9}
    found["async_swap"] = train({**late, "memory": {"recompute": "off", **tight}}, "line")
    return found
