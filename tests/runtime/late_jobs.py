"""A stage whose last backward of a mini-batch ends late; importable by the ranks that run it."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

B, U, WIDTH = 8, 2, 4


class Late(nn.Module):
    """A layer whose backward of the last micro-batch takes ``seconds``, once these are set."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.seconds = 0.0
        self._count = 0

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.layer(x)
        if self.seconds:
            hidden.register_hook(self._wait)
        return hidden

    def _wait(self, gradient: Tensor) -> None:
        self._count += 1
        if self._count == B // U:
            time.sleep(self.seconds)


class Loss(nn.Module):
    """The mean square of a layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(hidden).square().mean()


def end_late(comm_timeout_s: float, late_s: float) -> dict[str, Any]:
    """Train a mini-batch whose first stage ends ``late_s`` after the second one asks for the norm."""
    import deepspeed

    import gpp_plugin

    torch.manual_seed(0)
    late = Late()
    graph = gpp_plugin.StageGraph(name="late")
    graph.stage("body", late, inputs={"x": "x"}, outputs=["hidden"], ranks=[0])
    graph.stage("head", Loss(), inputs={"hidden": "hidden"}, outputs=["loss"], ranks=[1])
    batch = {"x": torch.randn(B, WIDTH)}
    config = {
        "train_batch_size": B,
        "train_micro_batch_size_per_gpu": U,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "graph_pipeline": {"comm_timeout_s": comm_timeout_s, "schedule": "1f1b", "slicing": "off"},
    }
    wrapped = gpp_plugin.GraphPipelineModule(graph, sample_batch=batch)
    engine = deepspeed.initialize(model=wrapped, config=config)[0]
    late.seconds = late_s
    start = time.perf_counter()
    losses = [float(engine.train_batch(data_iter=iter([batch])))]
    seconds = time.perf_counter() - start
    engine.destroy()
    return {"losses": losses, "seconds": seconds}
