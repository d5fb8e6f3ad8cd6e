"""Captures of the tiny models, made once; running a captured graph, whole or by block; and holding it to its model."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gpp_plugin.capture.captured_graph import CapturedGraph
from gpp_plugin.capture.export import capture_model
from gpp_plugin.model.verification import Comparison, compare_capture, copy_model, in_float32
from tests.models import build
from tests.reference import assert_near, loss_of


class Calls(nn.Module):
    """A module whose forward is a function of it and its inputs, and that holds what is named: modules, tensors, values."""

    def __init__(self, function: Callable[..., Any], **held: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


@functools.cache
def captured(name: str, num_samples: int = 2, training: bool = True, dropout: float = 0.0) -> CapturedGraph:
    model, make_batch = build(name, dropout=dropout)
    return capture_model(model, make_batch(num_samples), training=training)


@contextmanager
def counted_exports() -> Iterator[list[None]]:
    """Note each call of `torch.export.export`."""
    calls: list[None] = []
    export = torch.export.export

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return export(*args, **kwargs)

    torch.export.export = counting
    try:
        yield calls
    finally:
        torch.export.export = export


def compared(model: nn.Module, batch: dict[str, Any], dtype: torch.dtype | None = None) -> Comparison:
    """Compare a capture with a copy of its module, as before training; with ``dtype`` both in float32."""
    captured = in_float32(capture_model(model, batch, dtype=dtype))
    twin = copy_model(model, device=torch.device("cpu"), dtype=torch.float32 if dtype is not None else None)
    return compare_capture(captured, twin, batch, call=lambda module, entries: module(**entries))


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


def assert_is_model(
    capture: CapturedGraph,
    model: nn.Module,
    batch: dict[str, Any],
    *,
    prepared: dict[str, Any] | None = None,
) -> None:
    """Hold the graph on a batch against copies of the eager model: loss, gradients and buffers, but for rounding.

    Args:
        prepared: what the graph reads in place of ``batch``, which the model may write into.
    """
    eager, own = copy.deepcopy(model), copy.deepcopy(model)
    state = torch.get_rng_state()
    wanted = loss_of(eager(**copy.deepcopy(batch)))
    torch.set_rng_state(state)
    found = run_graph(capture, own, batch if prepared is None else prepared)[capture.op_graph.loss]
    assert_near({"loss": found}, {"loss": wanted})
    if wanted.requires_grad:
        wanted.backward()
        found.backward()
    gradients, others = (
        {name: p.grad for name, p in each.named_parameters() if p.grad is not None} for each in (own, eager)
    )
    assert gradients.keys() == others.keys()
    assert all(gradient.layout is torch.strided for gradient in gradients.values())
    assert_near(gradients, {n: each.to_dense() if each.is_sparse else each for n, each in others.items()})
    for (name, buffer), expected in zip(own.named_buffers(), eager.buffers(), strict=True):
        pair = [torch.view_as_real(each) if each.is_complex() else each for each in (buffer, expected)]
        assert_near({name: pair[0]}, {name: pair[1]})
