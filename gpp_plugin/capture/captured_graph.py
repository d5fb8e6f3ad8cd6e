"""What a capture hands over: the cleaned torch graph, and what its placeholders stand for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gpp_plugin.capture.mask_values import Mask
from gpp_plugin.capture.tracing.traced import Exported
from gpp_plugin.capture.tracing.values import Recording
from gpp_plugin.ir.analysis import Analysis
from gpp_plugin.ir.block_graph import OpGraph, OpNode


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
