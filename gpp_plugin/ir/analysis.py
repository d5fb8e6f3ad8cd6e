"""What one capture of a model found out, as data: made once, on one rank, and carried on by every other.

With it another rank captures at the size of its own stage in one export, and gets the same names,
layouts and blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpp_plugin.ir.op_graph import OpGraph
from gpp_plugin.ir.sharding import Sharding

PREPARED, RECORDED, WHOLE_UNITS = "prepared", "recorded", "whole units"
"""Means of a capture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphNode:
    """One node of the captured torch graph, for graphs of other sizes to be held against.

    Args:
        op: ``placeholder``, ``get_attr``, ``call_function`` or ``output``.
        target: the operator (its name), or the placeholder's name; "" for the others.
        inputs: names of the nodes it reads.
        module: path of the module that called it.
    """

    name: str
    op: str
    target: str
    inputs: tuple[str, ...]
    module: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """A captured model without its torch graph.

    Args:
        nodes: the torch graph's nodes in order.
        is_training: whether modules were in training mode.
        dtype: what floating parameters and inputs were cast to (torch's name of it); None left them.
        device_type: what the graph was captured for, ``cpu`` or ``cuda``; each rank has a device of its own.
        layer_lists: module paths whose children are repeated layers (module lists, long sequentials).
        clusters: groups of nodes that belong together: writers and readers of one storage, operators
            with several results and their parts, tensors that no batch axis can cut.
        unpadded: inputs that held ones only in the first capture's batch; costs are of attention without the masks
            that eager models leave out then.
        eager: modules (and loss functions) that are kept whole and run as they are, by path.
        means: what tracing it took beyond an export: "prepared" where entries of the batch are made ahead on the host,
            "recorded" where Python reads values of the batch, "whole units"
            where no axis is known to hold samples, so that all operators compute on whole loss units.
        sharding: what of it tensor ranks can share out.
    """

    op_graph: OpGraph
    nodes: tuple[GraphNode, ...]
    is_training: bool
    dtype: str | None = None
    device_type: str = "cpu"
    layer_lists: tuple[str, ...] = ()
    clusters: tuple[tuple[str, ...], ...] = ()
    unpadded: tuple[str, ...] = ()
    eager: tuple[str, ...] = ()
    means: tuple[str, ...] = ()
    sharding: Sharding = Sharding()

    @property
    def reads_values(self) -> bool:
        """Return whether Python reads values of the batch."""
        return RECORDED in self.means

    @property
    def takes_whole_units(self) -> bool:
        """Return whether nothing is known of where samples lie."""
        return WHOLE_UNITS in self.means
