"""Measured costs of single operators, for refinements that move a cut by nodes (DawnPiper, section 4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpp_plugin.capture.graph import CapturedGraph
from gpp_plugin.ir.block_graph import Block, BlockEdge, BlockGraph
from gpp_plugin.ir.op_graph import OpGraph, OpNode
from gpp_plugin.ir.profile import Profile
from gpp_plugin.profile.analytic import ADAM_STATE_BYTES
from gpp_plugin.profile.measure import Progress, profile_blocks


def node_graph(op_graph: OpGraph) -> BlockGraph:
    """Return a BlockGraph with one block an operator, named after it.

    An operator with several results and the getitem nodes that read them make one block. Replicated nodes are
    in no block.
    """
    owner: dict[str, str] = {}
    members: dict[str, list[OpNode]] = {}
    by_name = {node.name: node for node in op_graph.nodes}
    for node in op_graph.nodes:
        if node.is_replicable:
            continue
        source = by_name.get(node.inputs[0]) if node.inputs and "getitem" in node.target else None
        home = owner[source.name] if source is not None and source.name in owner else node.name
        owner[node.name] = home
        members.setdefault(home, []).append(node)
    parameters = {name: p for p in op_graph.parameters for name in (p.name, *p.aliases)}
    crossing: dict[tuple[str, str], dict[str, None]] = {}
    tensors = {}
    for node in op_graph.nodes:
        for name in node.inputs if node.name in owner else ():
            producer = by_name.get(name)
            if producer is None or name not in owner or owner[name] == owner[node.name]:
                continue
            if producer.output is not None:
                crossing.setdefault((owner[name], owner[node.name]), {})[name] = None
                tensors[name] = producer.output
    return BlockGraph(
        model=op_graph.model,
        num_samples=op_graph.num_samples,
        blocks=tuple(_node_block(home, nodes, parameters) for home, nodes in members.items()),
        edges=tuple(BlockEdge(src=s, dst=d, tensors=tuple(names)) for (s, d), names in crossing.items()),
        tensors=tensors,
        loss_block=owner.get(op_graph.loss) if op_graph.loss is not None else None,
        tied={},
    )


def _node_block(name: str, nodes: Sequence[OpNode], parameters: Mapping[str, Any]) -> Block:
    read = [parameters[n] for n in dict.fromkeys(n for node in nodes for n in node.inputs) if n in parameters]
    trained = [p for p in read if p.requires_grad and not p.is_buffer]
    return Block(
        name=name,
        nodes=tuple(node.name for node in nodes),
        parameters=tuple(p.name for p in read),
        parameter_bytes=sum(p.bytes for p in read),
        trainable_bytes=sum(p.bytes for p in trained),
        flops=sum(node.flops for node in nodes),
        saved_bytes=sum(node.saved_bytes for node in nodes),
        is_coupled=any(node.is_coupling for node in nodes),
        is_trainable=bool(trained),
    )


def profile_nodes(
    captured: CapturedGraph,
    *,
    model_state: Mapping[str, Tensor],
    batch: Mapping[str, Any],
    capture_at: Callable[[int], CapturedGraph] | None = None,
    sample_counts: Sequence[int] | None = None,
    device: torch.device | str | None = None,
    threads: int | None = None,
    repeats: int = 7,
    optimizer_bytes_per_parameter: float = ADAM_STATE_BYTES,
    cache_dir: str | Path | None = None,
    use_cache: bool = True,
    progress: Progress | None = None,
) -> Profile:
    """Measure every operator; `BlockCost.block` is the node's name. Arguments and errors as `profile_blocks`."""
    return profile_blocks(
        captured,
        node_graph(captured.op_graph),
        model_state=model_state,
        batch=batch,
        capture_at=capture_at,
        sample_counts=sample_counts,
        device=device,
        threads=threads,
        repeats=repeats,
        optimizer_bytes_per_parameter=optimizer_bytes_per_parameter,
        cache_dir=cache_dir,
        use_cache=use_cache,
        progress=progress,
    )
