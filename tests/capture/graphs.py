"""Captures of the tiny models, made once; running a captured graph, whole or by block; and holding it to its model."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import nn

from gpp_plugin.capture.captured_graph import CapturedGraph
from gpp_plugin.capture.export import capture_model
from tests.models import build
from tests.reference import assert_near


@functools.cache
def captured(name: str, num_samples: int = 2, training: bool = True, dropout: float = 0.0) -> CapturedGraph:
    model, make_batch = build(name, dropout=dropout)
    return capture_model(model, make_batch(num_samples), training=training)


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def sources(capture: CapturedGraph, model: nn.Module, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensor of each placeholder."""
    own = tensors_of(model)
    found = {name: own[target] for name, target in capture.parameters.items()}
    found.update((name, batch[key]) for name, key in capture.inputs.items())
    found.update(capture.constants)
    return found


def run_nodes(capture: CapturedGraph, names: set[str] | None, values: dict[str, Any]) -> dict[str, Any]:
    """Run the named operators (all if None) in graph order; ``values`` holds what else they read."""
    values = dict(values)
    for node in capture.graph.nodes:
        if node.op == "get_attr":
            values[node.name] = capture.attributes[node.target]
        elif node.op == "call_function" and (names is None or node.name in names):
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: values[n.name])
            values[node.name] = node.target(*args, **kwargs)
    return values


def run_graph(capture: CapturedGraph, model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    return run_nodes(capture, None, sources(capture, model, batch))


def eager_loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    result = model(**batch)
    if isinstance(result, torch.Tensor):
        return result
    return result["loss"]


def assert_is_model(
    capture: CapturedGraph,
    model: nn.Module,
    batch: dict[str, Any],
    *,
    prepared: dict[str, Any] | None = None,
) -> None:
    """Hold the graph on a batch against copies of the eager model: loss, gradients and buffers, but for rounding.

    Args:
        prepared: what the graph reads in place of ``batch``.
    """
    eager, own = copy.deepcopy(model), copy.deepcopy(model)
    state = torch.get_rng_state()
    wanted = eager_loss(eager, batch)
    torch.set_rng_state(state)
    found = run_graph(capture, own, batch if prepared is None else prepared)[capture.op_graph.loss]
    assert_near({"loss": found}, {"loss": wanted})
    if wanted.requires_grad:
        wanted.backward()
        found.backward()
    gradients = [
        {name: p.grad for name, p in each.named_parameters() if p.grad is not None} for each in (own, eager)
    ]
    assert gradients[0].keys() == gradients[1].keys()
    assert_near(*gradients)
    for (name, buffer), expected in zip(own.named_buffers(), eager.buffers(), strict=True):
        assert_near({name: buffer}, {name: expected})
