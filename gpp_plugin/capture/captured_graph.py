"""What a capture hands over: the cleaned torch graph, and what its placeholders stand for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gpp_plugin.capture.mask_values import Mask, MaskFinder
from gpp_plugin.capture.tracing.symbolic_sizes import SizeTexts, is_open
from gpp_plugin.capture.tracing.traced import Exported
from gpp_plugin.capture.tracing.values import Recording
from gpp_plugin.errors import CaptureError
from gpp_plugin.ir.analysis import Analysis
from gpp_plugin.ir.block_graph import OpGraph, OpNode
from gpp_plugin.ir.size_formulas import compile_formulas
from gpp_plugin.ir.tensors import LayoutKind, TensorSpec, batch_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedGraph:
    """A model as one lifted graph of aten operators, with the loss inside.

    Args:
        graph: placeholders are model inputs, parameters, buffers and lifted constants; then
            ``call_function`` and ``get_attr`` nodes; one output node (the loss, then named outputs).
        attributes: what ``get_attr`` nodes refer to (bodies of higher-order operators).
        inputs: placeholder name -> batch key.
        parameters: placeholder name -> name of the parameter or buffer (the first name of a tied one).
        constants: placeholder name -> tensor the model made while it was traced.
        op_graph: the same graph as data.
        device: where this rank computes it; code made of the graph names this device and no other.
        analysis: what the first capture of the model found out; `recapture` carries it on.
        masks: of attention, that eager models leave out where some inputs hold ones only, by node name.
        recording: what Python read of the batch while it was traced: the graph is of batches that it reads the same of.
        trials: further exports that the analysis was made of, by their numbers of samples: for `recapture`, once each.
    """

    graph: torch.fx.Graph
    attributes: dict[str, Any]
    inputs: dict[str, str]
    parameters: dict[str, str]
    constants: dict[str, torch.Tensor]
    op_graph: OpGraph
    device: torch.device
    analysis: Analysis
    masks: Mapping[str, Mask]
    recording: Recording | None = None
    trials: dict[int, Exported] = field(default_factory=dict, compare=False)

    @property
    def is_training(self) -> bool:
        """Return whether modules were in training mode."""
        return self.analysis.is_training

    @property
    def clusters(self) -> tuple[tuple[str, ...], ...]:
        """Return the groups of nodes that belong together."""
        return self.analysis.clusters

    def replicated_closure(self, nodes: Iterable[str]) -> set[str]:
        """Return ``nodes`` and every replicated node that computing them takes.

        Replicated nodes that write into one storage come as a whole: a reader of the storage has no
        edge from a write into a view of it.
        """
        known = {node.name: node for node in self.op_graph.nodes}
        return set(with_replicated(nodes, known, self.clusters))


def with_replicated(
    names: Iterable[str], nodes: Mapping[str, OpNode], clusters: Iterable[Sequence[str]]
) -> list[str]:
    """Return ``names`` and the replicated operators that computing them takes.

    Args:
        nodes: every operator by name.
        clusters: groups of operators of which a reader of one needs all.
    """
    # Depth first from ``names`` along what they read, through replicated operators alone: the others' results arrive
    # from other stages. Each stage that has a reader gets its own copy of all of it.
    together = {name: tuple(cluster) for cluster in clusters for name in cluster}
    wanted = dict.fromkeys(names)
    pending = list(wanted)
    while pending:
        for source in nodes[pending.pop()].inputs:
            if source in nodes and nodes[source].is_replicable and source not in wanted:
                added = [name for name in together.get(source, (source,)) if name not in wanted]
                wanted.update(dict.fromkeys(added))
                pending.extend(added)
    return list(wanted)


# A model captured for batches of many lengths: what its tensors' sizes are at each of them.


SpecsAt = Callable[..., list[TensorSpec]]
"""Takes a number of samples and the values of the symbols in order, and returns tensors at these sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthCapture:
    """A model as one graph whose sizes may be symbols.

    Args:
        captured: its operators have symbolic sizes in their arguments and shapes; ``op_graph`` is as analysed, with the
            sizes and costs of another batch.
        num_samples: what it was captured for.
        masks: finds attention's masks at any sizes.
    """

    captured: CapturedGraph
    num_samples: int
    masks: MaskFinder

    def texts(self) -> SizeTexts:
        """Return what writes the capture's sizes down."""
        graph, inputs = self.captured.graph, self.captured.inputs
        tensors = {inputs[n.name]: n.meta["val"] for n in graph.nodes if n.name in inputs}
        return SizeTexts(tensors)

    def specs(self, known: Iterable[TensorSpec], nodes: Sequence[str], texts: SizeTexts) -> SpecsAt:
        """Return a function that describes tensors at other lengths.

        Args:
            known: what was analysed of each of them, under the names they will have.
            nodes: of the capture's graph, in the same order.

        Raises:
            CaptureError: a size has no formula, or a batch axis does not hold whole samples.
        """
        # Only those with a symbol are made anew for each length: of a LLaVA the tensors of the text, not the images'.
        by_name = {node.name: node for node in self.captured.graph.nodes}
        pairs = [(spec, by_name[node].meta["val"].shape) for spec, node in zip(known, nodes, strict=True)]
        fixed = [
            None if any(map(is_open, shape)) else resized(spec, tuple(map(int, shape)), self.num_samples)
            for spec, shape in pairs
        ]
        open_shapes = [pair for pair, spec in zip(pairs, fixed, strict=True) if spec is None]
        sizes = dict.fromkeys(texts.text(size) for _, shape in open_shapes for size in shape)
        place = {text: position for position, text in enumerate(sizes)}
        evaluate = compile_formulas(texts.symbols, list(sizes))
        plans = [(spec, [place[texts.text(size)] for size in shape]) for spec, shape in open_shapes]

        # of one shape whatever the samples: [4, 3, 8, 8] are one image each of four samples, or two each of two
        fixed_at = {self.num_samples: fixed}

        def at(samples: int, *symbols: int) -> list[TensorSpec]:
            if samples not in fixed_at:
                fixed_at[samples] = [
                    None if spec is None else resized(spec, spec.shape, samples) for spec in fixed
                ]
            values = evaluate(*symbols)
            made = iter([resized(spec, tuple(values[i] for i in places), samples) for spec, places in plans])
            return [spec if spec is not None else next(made) for spec in fixed_at[samples]]

        return at


def resized(spec: TensorSpec, shape: tuple[int, ...], samples: int) -> TensorSpec:
    """Return a tensor at other sizes, of which the axis of samples is known.

    Raises:
        CaptureError: that axis does not hold whole samples.
    """
    # The rows a sample may be others, where they count tokens: hidden [4 x 7, 32] of 4 samples of 7 tokens, and
    # [4 x 9, 32] of 9, have 7 and 9 rows a sample along axis 0.
    layout = spec.layout
    if layout.kind is LayoutKind.BATCH:
        size = shape[layout.axis] if layout.axis < len(shape) else 0
        if size % samples or len(shape) != len(spec.shape):
            raise CaptureError(
                f"tensor {spec.name} has shape {shape} at {samples} samples and {spec.shape} at "
                f"{spec.num_samples}; its batch axis {layout.axis} does not hold whole samples"
            )
        layout = batch_layout(layout.axis, size // samples)
    return dataclasses.replace(spec, shape=shape, num_samples=samples, layout=layout)
