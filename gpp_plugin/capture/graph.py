"""What a capture hands over: the cleaned torch graph, and what its placeholders stand for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from gpp_plugin.ir.op_graph import OpGraph


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
        is_training: whether modules were in training mode.
        layer_lists: module paths whose children are repeated layers (module lists, long sequentials).
        clusters: groups of nodes that belong together: writers and readers of one storage, operators
            with several results and their parts, tensors that no batch axis can cut.
        dtype, device: what `capture_model` was asked for.
        reference: the capture whose analysis this one (`recapture`) carries on.
    """

    graph: torch.fx.Graph
    attributes: dict[str, Any]
    inputs: dict[str, str]
    parameters: dict[str, str]
    constants: dict[str, torch.Tensor]
    op_graph: OpGraph
    is_training: bool
    layer_lists: tuple[str, ...] = ()
    clusters: tuple[tuple[str, ...], ...] = ()
    dtype: torch.dtype | None = None
    device: torch.device = torch.device("cpu")
    reference: CapturedGraph | None = None

    def replicated_closure(self, nodes: Iterable[str]) -> set[str]:
        """Return ``nodes`` and every replicated node that computing them takes.

        Replicated nodes that write into one storage come as a whole: a reader of the storage has no
        edge from a write into a view of it.
        """
        flags = {node.name: node.is_replicable for node in self.op_graph.nodes}
        by_name = {node.name: node for node in self.graph.nodes}
        together = {name: cluster for cluster in self.clusters for name in cluster}
        wanted = set(nodes)
        pending = list(wanted)
        while pending:
            for source in by_name[pending.pop()].all_input_nodes:
                if flags.get(source.name, False) and source.name not in wanted:
                    added = [n for n in together.get(source.name, (source.name,)) if n not in wanted]
                    wanted.update(added)
                    pending.extend(added)
        return wanted
