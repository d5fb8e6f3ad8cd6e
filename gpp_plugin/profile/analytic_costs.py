"""Costs of blocks derived from FLOPs, bytes and a device description; pure Python, for absent devices.

One operator costs a launch and the slower of arithmetic and memory traffic (the roofline model; Williams,
Waterman, Patterson, "Roofline: an insightful visual performance model", CACM 2009):

    time_us = launch_us + 1e6 * max(flops / (efficiency * flops_per_s), bytes / memory_bytes_per_s)

With an `OpGraph` the formula is applied to every operator of the block and the times are added:

    forward    flops = OpNode.flops;      bytes = operands + parameters read + result
    backward   flops = forward flops x g; bytes = forward bytes x g
               g = operands with a gradient (activations or matrix-shaped trainable parameters), 2 at most:
               each operand's gradient of a bilinear operator costs one forward; an operator with at least
               one such operand is launched g times, one without is not run

Without it (paper models that were never captured) a block is one operator with one launch per node:

    forward    bytes = parameters + tensors in + tensors out + 2 x saved_bytes (each written and read)
    backward   g = [a gradient flows in from a producer] + trainable_bytes / parameter_bytes
               (parameter-free blocks: 1 + 1, as in attention scores, where a gradient flows)

A backward in two parts takes as long as whole: what the roofline of its products takes for operands that are
activations is the first part, for parameters the second.

FLOPs and BATCH tensors scale with the samples, parameters and tensors without a batch axis do not; the
quadratic part of in-batch losses is thus linearised around ``BlockGraph.num_samples``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from gpp_plugin.errors import ProfileError
from gpp_plugin.ir.block_graph import Block, BlockGraph, OpGraph, OpNode, Parameter
from gpp_plugin.ir.cluster import Device
from gpp_plugin.ir.profile import BlockCost, Profile, SharedStorage, TiedCost
from gpp_plugin.ir.tensors import LayoutKind, TensorSpec, adam_bytes
from gpp_plugin.plan.costs.cost_model import roofline_us

ADAM_STATE_BYTES = adam_bytes("fp32")
"""Two fp32 moments a parameter; add 4 for the fp32 master copy of mixed precision."""


def default_sample_counts(largest: int) -> tuple[int, ...]:
    """Return 1, a power of two near the root of ``largest``, and ``largest``.

    Times are close to affine in the samples, with a bend where a launch stops to dominate; each further count
    costs one more capture.

    >>> default_sample_counts(64)
    (1, 8, 64)
    >>> default_sample_counts(2)
    (1, 2)

    Raises:
        ValueError: ``largest`` is not positive.
    """
    if largest < 1:
        raise ValueError(f"largest must be at least 1, not {largest}")
    middle = 1 << (largest.bit_length() // 2)
    return tuple(sorted({1, min(middle, largest), largest}))


def validate_sample_counts(sample_counts: Sequence[int]) -> tuple[int, ...]:
    """Return ``sample_counts`` as a tuple.

    Raises:
        ValueError: there are none, not positive, or not increasing.
    """
    counts = tuple(sample_counts)
    if not counts or counts[0] < 1 or any(a >= b for a, b in zip(counts, counts[1:], strict=False)):
        raise ValueError(f"sample_counts must be increasing positive numbers, not {list(counts)}")
    return counts


def analytic_profile(
    block_graph: BlockGraph,
    device: Device,
    *,
    sample_counts: Sequence[int] = (1,),
    optimizer_bytes_per_parameter: float = ADAM_STATE_BYTES,
    element_bytes: int = 4,
    op_graph: OpGraph | None = None,
) -> Profile:
    """Return the costs of every block on a device that need not be present (formula in the module's docstring).

    Args:
        sample_counts: numbers of samples to give times at, increasing.
        optimizer_bytes_per_parameter: optimizer state for each trainable parameter (8: Adam in fp32; 12: Adam
            with an fp32 master copy).
        element_bytes: bytes of one parameter in the training dtype.
        op_graph: the captured operators; without it a block is treated as one operator.

    Raises:
        ProfileError: a block names operators that ``op_graph`` lacks.
        ValueError: ``sample_counts`` is not increasing and positive.
    """
    # There is a time for each of ``counts``. Bytes scale with the samples, from those the graph was captured at: 640
    # bytes saved at 8 samples are 80 a sample. A captured graph's operators are timed one by one, as each pays a
    # launch; of a paper's model only the sums are known.
    counts = validate_sample_counts(sample_counts)
    timer: _OperatorTimer | _BlockTimer = _BlockTimer(device, block_graph)
    if op_graph is not None:
        timer = _OperatorTimer.of(op_graph, device)
    costs = []
    for block in block_graph.blocks:
        times = [timer.time(block, n) for n in counts]
        trainable_parameters = block.trainable_bytes / element_bytes
        costs.append(
            BlockCost(
                block=block.name,
                input_share=timer.input_share(block),
                pending_bytes_per_sample=timer.pending_bytes(block) / block_graph.num_samples,
                samples=counts,
                forward_us=tuple(forward for forward, _ in times),
                backward_us=tuple(backward for _, backward in times),
                saved_bytes_per_sample=block.saved_bytes / block_graph.num_samples,
                parameter_bytes=block.parameter_bytes,
                gradient_bytes=block.trainable_bytes,
                optimizer_bytes=round(trainable_parameters * optimizer_bytes_per_parameter),
                transient_bytes_per_sample=_largest_output(block, block_graph) / block_graph.num_samples,
            )
        )
    shared = tuple(
        SharedStorage(blocks=tensor.kept_by, bytes_per_sample=tensor.bytes / block_graph.num_samples)
        for tensor in block_graph.saved
        if len(tensor.kept_by) > 1
    )
    return Profile(
        graph=block_graph.fingerprint,
        device=device.name,
        source="analytic",
        costs=tuple(costs),
        shared=shared,
        tied=() if op_graph is None else tied_costs(block_graph, op_graph, optimizer_bytes_per_parameter),
    )


def tied_costs(
    block_graph: BlockGraph, op_graph: OpGraph, optimizer_bytes_per_parameter: float
) -> tuple[TiedCost, ...]:
    """Return the parameters that several blocks share."""
    known = {parameter.name: parameter for parameter in op_graph.parameters}
    costs = []
    for name, blocks in block_graph.tied.items():
        parameter = known[name]
        trained = parameter.requires_grad and not parameter.is_buffer
        optimizer = math.prod(parameter.shape) * optimizer_bytes_per_parameter
        costs.append(
            TiedCost(
                blocks=blocks,
                parameter_bytes=parameter.bytes,
                gradient_bytes=parameter.bytes if trained else 0,
                optimizer_bytes=round(optimizer) if trained else 0,
            )
        )
    return tuple(costs)


@dataclass(frozen=True, slots=True)
class _BlockTimer:
    """Times of a block from its totals."""

    device: Device
    graph: BlockGraph

    def _tensors(self, block: Block, end: Literal["src", "dst"]) -> list[TensorSpec]:
        """Return the tensors that leave a block, or that enter it."""
        edges = (edge for edge in self.graph.edges if getattr(edge, end) == block.name)
        return [self.graph.tensors[name] for name in dict.fromkeys(n for edge in edges for n in edge.tensors)]

    def time(self, block: Block, num_samples: int) -> tuple[float, float]:
        # A linear layer of 4 MB weights on 8 samples of 512 x 1024 fp32: 16 MB in, which it saves, and 16 MB out; so
        # 4 + 32 MB and 2 x 16 MB more for what is saved. Its backward: 1 for the input's gradient and 1 for the
        # weight's.
        scale = num_samples / self.graph.num_samples
        tensors_in = self._tensors(block, "dst")
        moved = sum(t.bytes_for(num_samples) for t in (*tensors_in, *self._tensors(block, "src")))
        num_bytes = block.parameter_bytes + moved + 2.0 * block.saved_bytes * scale
        flops = block.flops * scale
        launches = max(1, len(block.nodes))
        forward = roofline_us(self.device, flops=flops, num_bytes=num_bytes, launches=launches)
        needs_input_gradient = any(t.requires_grad for t in tensors_in)
        if block.parameter_bytes:
            factor = float(needs_input_gradient) + block.trainable_bytes / block.parameter_bytes
        else:
            factor = 2.0 * needs_input_gradient
        work = {"flops": flops * factor, "num_bytes": num_bytes * factor, "launches": launches * factor}
        return float(forward), float(roofline_us(self.device, **work)) if factor else 0.0

    def input_share(self, block: Block) -> float:
        """Return the share of activations' gradients in a backward: of 1 + 1 with parameters, all without."""
        needs = any(t.requires_grad for t in self._tensors(block, "dst"))
        weights = block.trainable_bytes / block.parameter_bytes if block.parameter_bytes else 0.0
        return needs / (needs + weights) if weights else 1.0

    def pending_bytes(self, block: Block) -> float:
        """Return the bytes of the gradients that wait for the block's weight gradients: those of its results."""
        if not block.trainable_bytes:
            return 0.0
        return float(sum(t.bytes_for(self.graph.num_samples) for t in self._tensors(block, "src")))


@dataclass(frozen=True, slots=True)
class _OperatorTimer:
    """Times of a block as the sum over its operators."""

    device: Device
    num_samples: int
    nodes: Mapping[str, OpNode]
    parameters: Mapping[str, Parameter]
    inputs: Mapping[str, TensorSpec]

    @classmethod
    def of(cls, graph: OpGraph, device: Device) -> _OperatorTimer:
        parameters = {name: p for p in graph.parameters for name in (p.name, *p.aliases)}
        nodes = {node.name: node for node in graph.nodes}
        return cls(device, graph.num_samples, nodes, parameters, {spec.name: spec for spec in graph.inputs})

    def time(self, block: Block, num_samples: int) -> tuple[float, float]:
        missing = [name for name in block.nodes if name not in self.nodes]
        if missing:
            raise ProfileError(
                f"block {block.name!r} names operators {missing[:3]} that the operator graph of "
                "its model lacks; pass the OpGraph the BlockGraph was made from"
            )
        forward = backward = 0.0
        for name in block.nodes:
            node = self.nodes[name]
            if is_free(node):
                continue
            flops, num_bytes = self._work(node, num_samples)
            forward += roofline_us(self.device, flops=flops, num_bytes=num_bytes)
            backward += sum(self._backward_us(node, num_samples))
        return float(forward), float(backward)

    def input_share(self, block: Block) -> float:
        """Return the share of activations' gradients in a backward at the samples the graph was captured at."""
        nodes = [self.nodes[name] for name in block.nodes]
        times = [self._backward_us(node, self.num_samples) for node in nodes if not is_free(node)]
        of_inputs, of_weights = (sum(column) for column in zip((0.0, 0.0), *times, strict=True))
        return float(of_inputs / (of_inputs + of_weights)) if of_inputs or of_weights else 0.5

    def _work(self, node: OpNode, num_samples: int) -> tuple[float, float]:
        """Return the FLOPs of an operator's forward, and the bytes it moves."""
        has_batch = node.output is None or node.output.layout.kind is not LayoutKind.UNIFORM
        flops = node.flops * (num_samples / self.num_samples if has_batch else 1.0)
        total = float(node.output.bytes_for(num_samples)) if node.output is not None else 0.0
        for name in node.inputs:
            spec = self._spec(name)
            if spec is not None:
                total += spec.bytes_for(num_samples)
            elif name in self.parameters:
                total += self.parameters[name].bytes
        return flops, total

    def _backward_us(self, node: OpNode, num_samples: int) -> tuple[float, float]:
        """Return what an operator's backward takes for gradients of activations, and of parameters."""
        # Of a linear layer's two products one is each; attention's and everything between activations is all input.
        # At most two: attention's three operands share two products each way, and a bias comes for free.
        takes = [operand for operand in node.inputs if self._takes_gradient(operand)]
        factor = min(2, len(takes))
        if not factor:
            return 0.0, 0.0
        flops, num_bytes = self._work(node, num_samples)
        us = roofline_us(self.device, flops=flops * factor, num_bytes=num_bytes * factor, launches=factor)
        weights = min(sum(operand in self.parameters for operand in takes), factor) / factor
        return us * (1.0 - weights), us * weights

    def pending_bytes(self, block: Block) -> float:
        """Return the bytes of the gradients that wait for the block's weight gradients."""
        return pending_bytes((self.nodes[name] for name in block.nodes), self.parameters)

    def _spec(self, name: str) -> TensorSpec | None:
        return self.nodes[name].output if name in self.nodes else self.inputs.get(name)

    def _takes_gradient(self, name: str) -> bool:
        """Return whether the backward computes a gradient for this operand that costs a forward."""
        parameter = self.parameters.get(name)
        if parameter is not None:  # the gradient of a bias is a by-product
            return parameter.requires_grad and not parameter.is_buffer and len(parameter.shape) > 1
        spec = self._spec(name)
        return spec is not None and spec.requires_grad


def pending_bytes(nodes: Iterable[OpNode], parameters: Mapping[str, Parameter]) -> float:
    """Return the bytes of the gradients that operators with trained parameters keep from one part of their backward to
    the other: as large as their results (`runtime.split`).

    Args:
        parameters: by all of their names.
    """
    # linear(x [8, 16], w, b) -> [8, 32]: its weight gradient is made of x, which is saved, and of what arrived, 8 x 32
    trained = {name for name, p in parameters.items() if p.requires_grad and not p.is_buffer}
    return float(
        sum(
            node.output.bytes_for(node.output.num_samples)
            for node in nodes
            if node.output is not None and not is_free(node) and not trained.isdisjoint(node.inputs)
        )
    )


_FREE = frozenset(
    {"view", "_unsafe_view", "reshape", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "slice",
     "select", "alias", "detach", "split", "split_with_sizes", "chunk", "unbind", "narrow"}
)  # fmt: skip


def is_free(node: OpNode) -> bool:
    """Return whether the operator only makes a view, so that no kernel runs."""
    parts = node.target.replace("::", ".").split(".")
    return "getitem" in node.target or any(part in _FREE for part in parts[:2])


def _largest_output(block: Block, graph: BlockGraph) -> int:
    """Return the bytes of the largest tensor that leaves the block: its gradient is held while it runs."""
    names = {name for edge in graph.edges if edge.src == block.name for name in edge.tensors}
    return max((graph.tensors[name].bytes_for(graph.num_samples) for name in names), default=0)
