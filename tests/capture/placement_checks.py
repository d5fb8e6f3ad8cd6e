"""Runs a captured model stage by stage on fake tensors of one CUDA device, and notes every other device it meets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

from gpp_plugin.capture.captured_graph import CapturedGraph
from gpp_plugin.capture.coarsen import coarsen
from gpp_plugin.model.graph.captured_part import CapturedPart
from gpp_plugin.model.graph.resolve import resolve_module
from gpp_plugin.profile.block_survey import block_codes
from gpp_plugin.runtime.stage_module import StageFunction, build_stage_function
from tests.models import build

FAMILIES = ("gpt2", "clip", "t5", "llava", "whisper", "bert", "llama", "tables")
Codes: TypeAlias = Iterator[tuple[str, StageFunction]]

NUM_DEVICES = 8
NUM_STAGES = 3
SAMPLES = 2


def make_part(name: str, device: torch.device) -> tuple[CapturedPart, dict[str, Any]]:
    """Return a model as a rank on ``device`` has it, and a batch of it on the host."""
    if name == "tables":
        model, batch = Tables().train(), {"ids": torch.zeros(SAMPLES, 4, dtype=torch.long)}
    else:
        model, make_batch = build(name, layers=1, device="meta")
        batch = make_batch(SAMPLES)
        if name == "llama":
            batch["attention_mask"][0, -2:] = 0
    resolved = resolve_module(model, batch, num_ranks=1)
    part = CapturedPart(resolved.stages[0], dtype=None, device=device, granularity="layer", called={})
    return part, part.arguments(batch, {}, SAMPLES)


class Tables(nn.Module):
    """Indexes with what random operands go beyond, which a GPU answers with the end of the process's work."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.Embedding(1, 8)
        self.classes = nn.Linear(8, 1)
        self.allowed = nn.Buffer(torch.ones(1, dtype=torch.bool))

    def forward(self, ids: Tensor) -> Tensor:
        """Return a number; ``ids`` is (samples, positions), zeros."""
        hidden = self.kinds(ids) + self.allowed[ids][..., None]  # a mask of ids
        first = (
            hidden.gather(2, ids[..., None])
            + torch.zeros_like(hidden).scatter(2, ids[..., None], 1.0)[..., :1]
        )
        scores = self.classes(hidden) + first
        chance = nn.functional.binary_cross_entropy(scores.sigmoid(), torch.zeros_like(scores))
        return chance + nn.functional.cross_entropy(scores.flatten(0, 1), ids.flatten())


def written_devices(captured: CapturedGraph) -> list[str]:
    """Return what in the code of a model's stages and blocks names another device than the capture's."""
    found: list[str] = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        for what, function in (*stage_codes(captured), *profiled_codes(captured)):
            found += [f"{what}: {problem}" for problem in _written(function, captured.device)]
    return found


def met_devices(
    captured: CapturedGraph, codes: Callable[[CapturedGraph], Codes], *, with_backward: bool
) -> list[str]:
    """Return what is on another device than the capture's where code of it runs.

    Args:
        codes: `stage_codes` or `profiled_codes`.
        with_backward: run backward too; without it nothing records a gradient.
    """
    found: list[str] = []
    with FakeTensorMode(allow_non_fake_inputs=True), torch.set_grad_enabled(with_backward):
        for what, function in codes(captured):
            found += [f"{what}: {problem}" for problem in _written(function, captured.device)]
            found += [f"{what}: {problem}" for problem in _run(function, captured)]
    return found


def stage_codes(captured: CapturedGraph) -> Codes:
    """Yield the code of three stages."""
    graph = coarsen(captured)
    size = -(-len(graph.blocks) // NUM_STAGES)
    for first in range(0, len(graph.blocks), size):
        blocks = graph.blocks[first : first + size]
        names = {block.name for block in blocks}
        crossing = {
            n for edge in graph.edges if edge.src in names and edge.dst not in names for n in edge.tensors
        }
        ends = {*captured.op_graph.outputs.values(), captured.op_graph.loss}
        nodes = [node for block in blocks for node in block.nodes]
        yield (
            f"stage {first // size}",
            build_stage_function(captured, nodes, [n for n in nodes if n in crossing | ends]),
        )


def profiled_codes(captured: CapturedGraph) -> Codes:
    """Yield the code of every block and of its replicas, as a profile times them."""
    for code in block_codes(captured, coarsen(captured)):
        yield f"block {code.block}", code.function
        if code.replicas is not None:
            yield f"replicas of {code.block}", code.replicas


def _written(function: StageFunction, device: torch.device) -> list[str]:
    """Return the devices in a code's arguments, those of bodies that it calls included, and of its constants."""
    assert function.module is not None
    found = [f"a constant is on {c.device}" for c in function.constants if c.device != device]
    for inner in function.module.modules():
        for node in inner.graph.nodes if isinstance(inner, fx.GraphModule) else ():
            found += _elsewhere(node, (node.args, node.kwargs), device)
    return found


def _elsewhere(node: fx.Node, value: Any, device: torch.device) -> list[str]:
    leaves = torch.utils._pytree.tree_leaves(value)
    devices = [part.device if isinstance(part, Tensor) else part for part in leaves]
    return [
        f"{node.name} ({node.target}): {d}" for d in devices if isinstance(d, torch.device) and d != device
    ]


def _run(function: StageFunction, captured: CapturedGraph) -> list[str]:
    assert function.module is not None
    device = captured.device
    watch = _Watch(function.module, device)
    arguments = _arguments(function, captured)
    try:
        outputs = watch.run(*function.constants, *arguments)
        leaves = [a for a in arguments if a.requires_grad]
        trained = [o for o in outputs if isinstance(o, Tensor) and o.requires_grad]
        if trained and leaves:
            gradients = torch.autograd.grad(
                trained, leaves, [torch.ones_like(o) for o in trained], allow_unused=True
            )
            watch.found += [
                f"a gradient is on {g.device}" for g in gradients if g is not None and g.device != device
            ]
    except RuntimeError as error:
        watch.found.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    return watch.found


def _arguments(function: StageFunction, captured: CapturedGraph) -> Sequence[Tensor]:
    """Return parameters, inputs and received tensors of a stage's code, empty."""
    device = captured.device
    op_graph = captured.op_graph
    parameters = {name: p for p in op_graph.parameters for name in (p.name, *p.aliases)}
    inputs = {spec.name: spec for spec in op_graph.inputs}
    made = {node.name: node.output for node in op_graph.nodes}
    found = []
    for name in function.tensors:
        own = parameters[name]
        empty = torch.empty(own.shape, dtype=getattr(torch, own.dtype), device=device)
        found.append(empty.requires_grad_(torch.is_grad_enabled() and own.requires_grad))
    for name in (*function.batch_inputs, *function.received):
        spec = inputs.get(name) or made[name]
        assert spec is not None
        empty = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
        found.append(empty.requires_grad_(torch.is_grad_enabled() and spec.requires_grad))
    return found


class _Watch(fx.Interpreter):
    """Runs a graph and notes results that are on another device."""

    def __init__(self, module: fx.GraphModule, device: torch.device) -> None:
        super().__init__(module)
        self._device = device
        self.found: list[str] = []

    def run_node(self, n: fx.Node) -> Any:
        """Run one node and look at its result."""
        result = super().run_node(n)
        self.found += _elsewhere(n, result, self._device)
        return result
