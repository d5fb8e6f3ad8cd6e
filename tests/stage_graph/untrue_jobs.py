"""What ranks run in the tests of verification."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gpp_plugin.errors import CaptureError
from gpp_plugin.model.graph.stage_graph import StageGraph
from tests.integrations.engine_jobs import B, config_of, make_engine
from tests.stage_graph.untrue_models import make_batch


class Tower(nn.Module):
    """A captured part without a loss; ``is_reversed``: its graph makes another gradient."""

    def __init__(self, *, is_reversed: bool) -> None:
        super().__init__()
        self.layer, self.is_reversed = nn.Linear(8, 8), is_reversed

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.layer(x))
        if self.is_reversed and torch.compiler.is_exporting():
            hidden = 2 * hidden.detach() - hidden
        return {"hidden": hidden}


class End(nn.Module):
    """A captured part that reads the tower's result, with the loss."""

    def __init__(self, *, is_reversed: bool) -> None:
        super().__init__()
        self.head, self.is_reversed = nn.Linear(8, 3), is_reversed

    def forward(self, hidden: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if self.is_reversed and torch.compiler.is_exporting():
            hidden = 2 * hidden.detach() - hidden
        return {"loss": nn.functional.cross_entropy(self.head(hidden), labels)}


def start_parts(wrong: Sequence[str]) -> str:
    """Start a graph of two captured parts; return what it was refused for."""
    torch.manual_seed(1)
    graph = StageGraph()
    tower, end = Tower(is_reversed="tower" in wrong), End(is_reversed="end" in wrong)
    graph.capture("tower", tower, inputs=["x"], outputs=["hidden"], ranks=[0])
    graph.capture("end", end, inputs=["hidden", "labels"], outputs=["loss"], ranks=[1])
    try:
        make_engine(graph, make_batch(B), config_of(block={"verify": True}))
    except CaptureError as error:
        return str(error)
    return ""
