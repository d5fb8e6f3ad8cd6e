"""Two captures of one model whose operators differ, but not its blocks: one gets the other's names on their borders.

Where Python reads values, another batch may have another graph: three images instead of two in a loop, more windows of
attention, no multiplication by a mask that hides nothing. A plan knows of a model its blocks and the tensors between
them. Where these are the same, the new graph runs under the old plan, its schedules and programs:

    planned   visual.1 -(add_7)-> language.0 -(add_12)-> language.1
    now       visual.1 -(add_9)-> language.0 -(add_14)-> language.1        add_9 is called add_7, add_14 is add_12

Every rank makes the same names of the same two graphs, and both ends of an edge find a tensor by its name, so it does
not matter which of several like tensors of one edge gets which name.

Source: this project
Tests: tests/capture/test_values.py, tests/integrations/test_whole_units.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import fx

from gpp_plugin.capture.tracing.traced import Traced
from gpp_plugin.errors import CaptureError
from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.op_graph import OpGraph

_Kind = tuple[str, tuple[str, ...], str, bool]


def border_names(
    planned: BlockGraph, now: BlockGraph, results: OpGraph, results_now: OpGraph
) -> dict[str, str]:
    """Return operator of the new graph -> what the plan calls its result.

    Args:
        results, results_now: whose losses and named outputs are known by name, too.

    Raises:
        CaptureError: blocks, their parameters, or the tensors between them differ; says which.
    """
    _check_blocks(planned, now)
    old, new = _by_kind(planned), _by_kind(now)
    for kind in old.keys() | new.keys():
        if len(old.get(kind, ())) != len(new.get(kind, ())):
            src, readers, dtype, _ = kind
            raise CaptureError(
                f"{len(new.get(kind, ()))} tensors of {dtype} go from {src} to {', '.join(readers)}, and "
                f"{len(old.get(kind, ()))} in the plan"
            )
    names = {a: b for kind, found in new.items() for a, b in zip(found, old[kind], strict=True)}
    pairs = [(results_now.loss, results.loss)]
    pairs += [(results_now.outputs.get(key), node) for key, node in results.outputs.items()]
    for mine, wanted in pairs:
        if mine is not None and wanted is not None and names.setdefault(mine, wanted) != wanted:
            raise CaptureError(f"result {wanted} is another tensor")
    return names


def with_names(traced: Traced, names: Mapping[str, str]) -> Traced:
    """Return the graph with some operators renamed; others make way."""
    taken = set(names.values())
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in traced.graph.nodes:
        name = names.get(node.name) or (f"{node.name}_now" if node.name in taken else node.name)
        args: Any = fx.map_arg(node.args, lambda n: mapping[n])
        kwargs: Any = fx.map_arg(node.kwargs, lambda n: mapping[n])
        mapping[node] = copied = graph.create_node(node.op, node.target, args, kwargs, name=name)
        copied.meta = dict(node.meta)
    return dataclasses.replace(traced, graph=graph)


def _check_blocks(planned: BlockGraph, now: BlockGraph) -> None:
    old = {block.name: frozenset(block.parameters) for block in planned.blocks}
    new = {block.name: frozenset(block.parameters) for block in now.blocks}
    odd = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    if odd:
        what = (
            "has other parameters"
            if odd[0] in old and odd[0] in new
            else "is new"
            if odd[0] in new
            else "is gone"
        )
        raise CaptureError(f"block {odd[0]} {what}")


def _by_kind(graph: BlockGraph) -> dict[_Kind, list[str]]:
    """Return (block, its readers, type, takes a gradient) -> such tensors, in the order in which they are made."""
    readers: dict[str, list[str]] = {}
    made_by: dict[str, str] = {}
    for edge in graph.edges:
        for name in edge.tensors:
            readers.setdefault(name, []).append(edge.dst)
            made_by[name] = edge.src
    found: dict[_Kind, list[str]] = {}
    for name, spec in graph.tensors.items():
        if name in made_by:
            kind = made_by[name], tuple(sorted(readers[name])), spec.dtype, spec.requires_grad
            found.setdefault(kind, []).append(name)
    return found
