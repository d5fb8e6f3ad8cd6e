"""What is measured: a block's generated code, and the signature by which identical blocks are known."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpp_plugin.capture.attention import without_choices
from gpp_plugin.capture.captured_graph import CapturedGraph
from gpp_plugin.ir.block_graph import Block, BlockGraph
from gpp_plugin.runtime.stage_module import StageFunction, build_stage_function


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCode:
    """One block ready to run.

    Args:
        replicas: code of the replicated nodes it is the first to read, or None.
        signature: equal for blocks with the same operators, shapes, dtypes and gradient flags.
    """

    block: str
    function: StageFunction
    replicas: StageFunction | None
    signature: str


def block_codes(captured: CapturedGraph, block_graph: BlockGraph) -> list[BlockCode]:
    """Generate the code of every block, in block order.

    Raises:
        CaptureError: a block names nodes that ``captured`` lacks.
    """
    # A replicated operator (a mask) is in no block. Here it is charged to the first block that reads it, in code of its
    # own; on a plan's stages it runs once a stage, which is a little more than once in all.
    owned = {name for block in block_graph.blocks for name in block.nodes}
    has_tensor = {node.name for node in captured.op_graph.nodes if node.output is not None}
    ones = captured.analysis.unpadded
    replicated = {node.name for node in captured.op_graph.nodes if node.is_replicable} - owned
    # ``where(mask, zeros, least)``, replicated, of T5's cross attention: a stage has zeros, once for all its blocks
    captured = dataclasses.replace(
        captured, graph=without_choices(captured.graph, captured.masks, ones, of=replicated)
    )
    made: set[str] = set()
    signer = _Signer(captured)
    codes = []
    for block in block_graph.blocks:
        outputs = _outputs(captured, block_graph, block)
        function = build_stage_function(captured, block.nodes, outputs, with_replicated=False, ones=ones)
        read = replicated.intersection(function.received)  # no mask that attention does without
        new = captured.replicated_closure(read) - owned - made
        made |= new
        replicas = (
            build_stage_function(captured, new, sorted(new & has_tensor), with_replicated=False)
            if new
            else None
        )
        codes.append(
            BlockCode(
                block=block.name,
                function=function,
                replicas=replicas,
                signature=signer.sign(block.nodes, outputs),
            )
        )
    return codes


def _outputs(captured: CapturedGraph, graph: BlockGraph, block: Block) -> list[str]:
    """Return what leaves the block: tensors on its edges, the loss, named outputs; else its last tensor."""
    crossing = {name for edge in graph.edges if edge.src == block.name for name in edge.tensors}
    op_graph = captured.op_graph
    crossing |= {name for name in (op_graph.loss, *op_graph.outputs.values()) if name is not None}
    outputs = [name for name in block.nodes if name in crossing]
    if outputs:
        return outputs
    tensors = {node.name for node in op_graph.nodes if node.output is not None}
    return [name for name in block.nodes if name in tensors][-1:]


def signature_of(captured: CapturedGraph, nodes: Iterable[str], outputs: Sequence[str]) -> str:
    """Return a text that depends on operators, literals, shapes, dtypes and gradient flags, not on names."""
    return _Signer(captured).sign(nodes, outputs)


class _Signer:
    """Signs the blocks of one capture."""

    def __init__(self, captured: CapturedGraph) -> None:
        self._captured = captured
        self._nodes = {node.name: (i, node) for i, node in enumerate(captured.graph.nodes)}
        self._specs = {node.name: node.output for node in captured.op_graph.nodes}
        self._specs.update({spec.name: spec for spec in captured.op_graph.inputs})
        self._parameters = {n: p for p in captured.op_graph.parameters for n in (p.name, *p.aliases)}

    def sign(self, names: Iterable[str], outputs: Sequence[str]) -> str:
        """Return the signature of the block of these nodes."""
        # The text of a block, with numbers for names; hashed. Of linear(h, w, b) with h received:
        #     0 = tensor (8, 16, 32) float32 True
        #     1 = parameter (64, 32) float32 True
        #     2 = parameter (64,) float32 True
        #     3 = tensor (8, 16, 64) float32 True
        #     %3 <- aten.linear.default ((%0, %1, %2), {})
        #     return [3]
        numbers: dict[str, int] = {}
        lines: list[str] = []

        def number(node: torch.fx.Node) -> _Reference:
            if node.name not in numbers:
                numbers[node.name] = len(numbers)
                lines.append(f"{numbers[node.name]} = {self._describe(node)}")
            return _Reference(f"%{numbers[node.name]}")

        for _, node in sorted((self._nodes[name] for name in names), key=lambda entry: entry[0]):
            arguments: Any = torch.fx.node.map_arg((node.args, node.kwargs), number)
            lines.append(f"{number(node)} <- {node.target} {arguments}")
        lines.append(f"return {[numbers[name] for name in outputs]}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def _describe(self, node: torch.fx.Node) -> str:
        captured = self._captured
        if node.name in captured.parameters:
            parameter = self._parameters[captured.parameters[node.name]]
            return f"parameter {parameter.shape} {parameter.dtype} {parameter.requires_grad}"
        if node.name in captured.constants:
            constant = captured.constants[node.name]
            return f"constant {tuple(constant.shape)} {constant.dtype}"
        spec = self._specs.get(captured.inputs.get(node.name, node.name))
        if spec is None:
            return f"{node.op} {node.target}" if node.op == "get_attr" else "several"
        kind = "input" if node.name in captured.inputs else "tensor"
        return f"{kind} {spec.shape} {spec.dtype} {spec.requires_grad}"


class _Reference(str):
    """Prints without quotes, so that a node never looks like a literal."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
