"""On which device a captured graph computes: every device that is written into it becomes the rank's own.

A graph is captured on one device and its code may run on another of the same type: rank 0 plans on ``cuda:0``, rank 3
computes on ``cuda:3``. What names a device in a graph is an argument (``arange(8, device=cuda:0)``, a cast), in the
graph or in a body that it calls, and where a constant lies that the model made while it was traced.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map


def on_device(value: Any, device: torch.device, *, of_type: str | None = None) -> Any:
    """Return an operator's argument with ``device`` for every device in it that is of its type.

    Args:
        of_type: the type of devices that are replaced; a model may compute something on the CPU on purpose.
    """
    replaced = device.type if of_type is None else of_type

    def change(part: Any) -> Any:
        return device if isinstance(part, torch.device) and part.type == replaced else part

    return tree_map(change, value)


def place_graph(graph: fx.Graph, device: torch.device, *, of_type: str | None = None) -> None:
    """Replace the devices in all arguments of a graph, as `on_device` does."""
    for node in graph.nodes:
        node.args = on_device(node.args, device, of_type=of_type)
        node.kwargs = on_device(node.kwargs, device, of_type=of_type)


def placed_body(body: Any, device: torch.device, *, of_type: str | None = None) -> Any:
    """Return a copy of what a graph calls, with the devices in it, and in bodies inside it, replaced."""
    if not isinstance(body, fx.GraphModule):
        return body
    placed = copy.deepcopy(body)
    for inner in placed.modules():
        if isinstance(inner, fx.GraphModule):
            place_graph(inner.graph, device, of_type=of_type)
            inner.recompile()
    return placed
