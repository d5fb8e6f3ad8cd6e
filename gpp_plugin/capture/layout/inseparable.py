"""Which operators must stay together: shared storage that is written, tuples, uncuttable tensors."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence

import networkx as nx
from torch import fx

from gpp_plugin.capture.annotate import Note, module_path


def find_clusters(
    graph: fx.Graph, notes: Mapping[str, Note], *, uncuttable: Iterable[str] = ()
) -> tuple[tuple[str, ...], ...]:
    """Return the groups of two or more operators that no stage boundary may separate.

    - A storage that is written: everything that touches it up to its last write, since the order of
      reads and writes carries values that no edge shows. Of a buffer, everything that touches it.
    - Writes into the buffers of one module (BatchNorm's statistics and its counter).
    - An operator with several results, and the nodes that pick them apart.
    - The producer and all readers of an ``uncuttable`` tensor (no axis splits by sample).
    - Whatever lies on a path between members, so that contracting groups leaves the graph acyclic.

    Example: a = zeros(4); b = relu(x); a.copy_(b); c = a + 1. ``copy_`` writes the storage of a, so zeros and copy_ are
    together, and c is not: it reads behind the last write. b stays free too; were it relu(a.sum()), the sum would read
    a before the write and be with them, and relu, on the path from the sum to copy_, as well.
    """
    # Three steps. First, undirected: who must be with whom by the rules above (`together`); its components are the
    # groups. Second, directed: which group reads which (`quotient`). Third: groups that reach each other, through
    # whatever lies between, are one strongly connected component there, and become one cluster.
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    order = {node.name: index for index, node in enumerate(nodes)}
    together = nx.Graph()
    together.add_nodes_from(order)
    for members in _storage_groups(graph, nodes, notes):
        together.add_edges_from(zip(members, members[1:], strict=False))
    for node in nodes:
        if node.target is operator.getitem:
            together.add_edge(node.args[0].name, node.name)
    uncut = set(uncuttable)
    for node in nodes:
        if node.name in uncut:
            together.add_edges_from((node.name, user.name) for user in node.users if user.op != "output")
    group = {name: index for index, names in enumerate(nx.connected_components(together)) for name in names}
    quotient = nx.DiGraph()
    quotient.add_nodes_from(group.values())
    for node in nodes:
        for source in node.all_input_nodes:
            if source.name in group and group[source.name] != group[node.name]:
                quotient.add_edge(group[source.name], group[node.name])
    merged = {g: i for i, part in enumerate(nx.strongly_connected_components(quotient)) for g in part}
    clusters: dict[int, list[str]] = {}
    for name in order:
        clusters.setdefault(merged[group[name]], []).append(name)
    return tuple(tuple(names) for names in clusters.values() if len(names) > 1)


def _storage_groups(graph: fx.Graph, nodes: list[fx.Node], notes: Mapping[str, Note]) -> list[list[str]]:
    # ``fixed``: storages of placeholders. A buffer lives longer than the forward: who reads it behind the last write
    # reads the new values, who reads it in the next micro-batch does so before the write; both must stay on one stage.
    fixed = {s for n in graph.nodes if n.op == "placeholder" for s in notes[n.name].storages}
    last_write: dict[int, int] = {}
    for index, node in enumerate(nodes):
        for storage in notes[node.name].writes:
            last_write[storage] = index
    groups = list(_buffer_writers(nodes, notes, fixed).values())
    for storage, last in last_write.items():
        end = len(nodes) if storage in fixed else last + 1
        groups.append(
            [
                node.name
                for node in nodes[:end]
                if storage in notes[node.name].reads or storage in notes[node.name].storages
            ]
        )
    return groups


def ordered_units(
    sources: Mapping[str, Sequence[str]], clusters: Iterable[Sequence[str]]
) -> list[tuple[str, ...]]:
    """Return clusters and single operators in an order where each follows all it reads from.

    Args:
        sources: operator name -> names it reads, in execution order; unknown names are ignored.
        clusters: groups of operators; members outside ``sources`` are ignored.
    """
    # Depth first with a stack of our own (a graph of thousands of operators in a row is deeper than Python's): a unit
    # is taken off once all that its members read is in order. With clusters (b, d) of a, b, c, d where d reads c:
    # a, then (b, d) waits for c, so a, c, (b, d).
    unit_of: dict[str, tuple[str, ...]] = {}
    for names in clusters:
        present = tuple(name for name in names if name in sources)
        unit_of.update((name, present) for name in present)
    ordered: dict[tuple[str, ...], None] = {}
    for first in sources:
        stack = [unit_of.get(first, (first,))]
        while stack:
            unit = stack[-1]
            read = dict.fromkeys(unit_of.get(s, (s,)) for n in unit for s in sources[n] if s in sources)
            waiting = [other for other in read if other not in ordered and other != unit]
            if waiting and unit not in ordered:
                stack.extend(reversed(waiting))
            else:
                ordered.setdefault(stack.pop())
    return list(ordered)


def operator_sources(nodes: Iterable[fx.Node]) -> dict[str, list[str]]:
    """Return the names each operator reads, in execution order."""
    return {node.name: [s.name for s in node.all_input_nodes] for node in nodes}


def _buffer_writers(nodes: list[fx.Node], notes: Mapping[str, Note], fixed: set[int]) -> dict[str, list[str]]:
    writers: dict[str, list[str]] = {}
    for node in nodes:
        if notes[node.name].writes & fixed:
            writers.setdefault(module_path(node), []).append(node.name)
    return writers
