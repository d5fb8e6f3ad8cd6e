"""Forwards of a model and of modules in it, captured in evaluation as stages are, to measure backends on.

Source: this project
Tests: tests/backends/test_backend_commands.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gpp_plugin.backends.forward_code import ForwardCode, forward_code
from gpp_plugin.capture.captured_graph import CapturedGraph
from gpp_plugin.capture.export import capture_model
from gpp_plugin.errors import ConfigError, nearest
from gpp_plugin.runtime.stage_module import StageFunction, build_stage_function

WHOLE = "(whole)"
"""The name of the part that is the model itself."""


def use_threads(count: int | None) -> int:
    """Let torch, and so all backends, compute on so many threads; None: as many as it does. Returns how many."""
    if count is not None:
        torch.set_num_threads(count)
    return torch.get_num_threads()


@torch.no_grad()
def part_codes(
    model: nn.Module, batch: Mapping[str, Any], parts: Sequence[str] = (), *, outputs: Sequence[str] = ()
) -> list[ForwardCode]:
    """Return the forward of a model in evaluation, or of each of some modules of it, on a batch.

    Args:
        parts: paths of modules, like ``vision_model``; none: the whole model.
        outputs: of the model, where it has no loss.

    Raises:
        ConfigError: a path names no module, or one that computes nothing.
        CaptureError: the model cannot be captured.
    """
    captured = capture_model(model.eval(), batch, training=False, outputs=outputs)
    graph = captured.op_graph
    generator = _Generator(captured, model, batch)
    leaving = [name for name in (graph.loss, *graph.outputs.values()) if name is not None]
    if not parts:
        return [generator.code(WHOLE, [node.name for node in graph.nodes], leaving)]
    codes = []
    for path in parts:
        # what a module made of inputs alone (masks) is replicated: each reader computes it again
        own = [
            node.name
            for node in graph.nodes
            if (node.module == path or node.module.startswith(f"{path}.")) and not node.is_replicable
        ]
        if not own:
            # every module on the way to one that calls an operator: vision_model of vision_model.encoder.layers.0
            paths = {node.module for node in graph.nodes if node.module}
            modules = sorted({one.rsplit(".", n)[0] for one in paths for n in range(one.count(".") + 1)})
            raise ConfigError(
                f"--part {path!r}: no module of the model computes anything by that name{nearest(path, modules)}"
            )
        # what leaves the module: tensors that operators outside of it read, and those that the model returns
        inside = set(own)
        read = {
            name for node in graph.nodes if node.name not in inside for name in node.inputs if name in inside
        }
        tensors = {node.name for node in graph.nodes if node.output is not None}
        made = [name for name in own if name in tensors and (name in read or name in leaving)]
        codes.append(generator.code(path, own, made))
    return codes


class _Generator:
    """Generates code of operators of a captured model, with the model's weights and values of a batch."""

    def __init__(self, captured: CapturedGraph, model: nn.Module, batch: Mapping[str, Any]) -> None:
        self._captured = captured
        self._weights: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self._weights.update(model.named_buffers(remove_duplicate=False))
        self._batch = batch

    def code(self, name: str, nodes: Sequence[str], outputs: Sequence[str]) -> ForwardCode:
        """Return the code of some operators."""
        function, parameters, inputs = self._generate(nodes, outputs)
        received: tuple[Tensor, ...] = ()
        if function.received:
            # of visual_projection: pixels -> ... -> pooled, which it reads; the text tower and the loss do not run
            before, *operands = self._generate(self._ancestors(function.received), function.received)
            received = before.call(*operands[0], *operands[1])
        return forward_code(name, function, parameters, (*inputs, *received))

    def _generate(
        self, nodes: Sequence[str], outputs: Sequence[str]
    ) -> tuple[StageFunction, list[Tensor], list[Tensor]]:
        """Return code, and the weights and entries of the batch that it takes."""
        function = build_stage_function(self._captured, nodes, outputs, ones=self._captured.analysis.unpadded)
        weights = [self._weights[name].detach() for name in function.tensors]
        return function, weights, [self._batch[key] for key in function.batch_inputs]

    def _ancestors(self, names: Sequence[str]) -> list[str]:
        """Return all operators that these depend on, and themselves; a loss behind them may be costly."""
        known = {node.name: node for node in self._captured.op_graph.nodes}
        needed, waiting = set(), list(names)
        while waiting:
            name = waiting.pop()
            if name in known and name not in needed:
                needed.add(name)
                waiting += known[name].inputs
        return [name for name in known if name in needed]
