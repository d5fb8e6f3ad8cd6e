"""Group a captured graph's operators into the blocks that planners place.

Operators group by module path into layers (or parts of layers, or stay single). A group is split where
keeping it whole would close a cycle. What a model's own forward code computes between its modules (the
glue: additions, normalisation, the loss) then joins a neighbour, but only where that makes no block
depend on another that it did not depend on before: independent branches stay independent until they
truly join. Where Python reads values, glue between two blocks joins the first one if fewer tensors cross
then: not some an image, of which every batch has another number, but one of all images. Operators that mix
samples do not join blocks that do not, except that the loss joins the block that makes the logits.

Source: this project
Tests: tests/stage_graph/test_part.py, tests/stage_graph/test_captured.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import networkx as nx

from gpp_plugin.capture.captured_graph import CapturedGraph, with_replicated
from gpp_plugin.capture.find_context import block_contexts
from gpp_plugin.capture.layouts import ordered_units
from gpp_plugin.ir.analysis import Analysis, block_shardings, position_axes, why_uncut, why_undivided
from gpp_plugin.ir.block_graph import (
    GRANULARITIES,
    Block,
    BlockEdge,
    BlockGraph,
    OpGraph,
    OpNode,
    SavedTensor,
)
from gpp_plugin.ir.tensors import TensorSpec

# A graph of operator groups that stays acyclic while groups grow and merge.


@dataclass(slots=True, eq=False)
class Group:
    """Operators in execution order under one key; ``first`` is the position of its first operator."""

    key: Key
    nodes: list[str]
    first: int


class Quotient:
    """Groups of operators and which group reads from which."""

    def __init__(self, nodes: Mapping[str, OpNode], loss: str | None) -> None:
        self._nodes = nodes
        self._loss = loss
        self._position = {name: index for index, name in enumerate(nodes)}
        self._readers: dict[str, list[str]] = {}
        for node in nodes.values():
            for source in node.inputs:
                self._readers.setdefault(source, []).append(node.name)
        self._group_of: dict[str, Group] = {}
        self._graph: nx.DiGraph = nx.DiGraph()

    @property
    def groups(self) -> list[Group]:
        """Return the groups in the order of their first operators."""
        return sorted(self._graph.nodes, key=lambda group: group.first)

    def __contains__(self, group: Group) -> bool:
        return group in self._graph

    def sources(self, group: Group) -> list[Group]:
        """Return the groups that ``group`` reads from."""
        return sorted(self._graph.predecessors(group), key=lambda other: other.first)

    def open(self, key: Key, unit: Sequence[str]) -> Group:
        """Start a group with these operators; all they read from is placed already."""
        # a new group reads others and is read by none yet, so it closes no cycle
        group = Group(key, [], self._position[unit[0]])
        self._graph.add_node(group)
        self._place(group, unit, self._read_by(unit))
        return group

    def extend(self, group: Group, unit: Sequence[str]) -> bool:
        """Add operators to ``group`` unless that closes a cycle; return whether they were added."""
        # A path group -> ... -> source -> group would be a cycle. An edge that is there already closes none, so that
        # descendants are looked up for new ones alone: extending along a layer is the common case and costs nothing.
        sources = self._read_by(unit) - {group}
        new = {source for source in sources if not self._graph.has_edge(source, group)}
        if new and new & nx.descendants(self._graph, group):
            return False
        self._place(group, unit, sources)
        return True

    def merge_into_neighbour(self, group: Group, accepts: Callable[[Group], bool]) -> bool:
        """Merge ``group`` into the neighbour that leaves the fewest bytes on edges, if one may take it.

        A neighbour may if no two other groups become dependent: the one before, if all else the group
        reads comes before that one; the one after, if all else that reads the group comes after it.
        """
        # What merging must not do: glue ``left + right`` into ``left`` makes left wait for right, two branches that ran
        # at the same time until then. It may go into ``head``, behind both, and where left itself reads right.
        #     left ──► glue ──► head        glue into head: left and right stay independent
        #     right ───┘
        # Among several, the fewest bytes on edges; then rather the one before; then the first (a fixed order).
        before, after = set(self._graph.predecessors(group)), set(self._graph.successors(group))
        choices: list[tuple[float, int, int, Group]] = []
        for side, others, reach in ((0, before, nx.ancestors), (1, after, nx.descendants)):
            for other in sorted(others, key=lambda g: g.first):
                if accepts(other) and others - {other} <= reach(self._graph, other):
                    choices.append((self._cut_bytes(group, other), side, other.first, other))
        if not choices:
            return False
        self._merge(group, min(choices, key=lambda choice: choice[:3])[3])
        return True

    def merge_into_reader(self, group: Group, accepts: Callable[[Group], bool]) -> bool:
        """Merge ``group`` into the first group that reads it, if all its other readers come after that."""
        after = set(self._graph.successors(group))
        for other in sorted(after, key=lambda g: g.first):
            if accepts(other) and after - {other} <= nx.descendants(self._graph, other):
                self._merge(group, other)
                return True
        return False

    def readers(self, unit: Sequence[str]) -> set[str]:
        """Return the operators that read what these make, beside themselves."""
        return {reader for name in unit for reader in self._readers.get(name, ())} - set(unit)

    def borders(self) -> list[tuple[Group, Group]]:
        """Return the pairs of groups of which the second reads the first."""
        return sorted(self._graph.edges, key=lambda pair: (pair[0].first, pair[1].first))

    def move_up(self, before: Group, after: Group, nodes: Sequence[str]) -> bool:
        """Move operators that read ``before`` alone into it from ``after``, if fewer tensors are read across then.

        ``after`` keeps some operators, and the loss.
        """
        moved = set(nodes)
        left, grown = set(after.nodes) - moved, set(before.nodes) | moved
        if not moved or not left or self._loss in moved:
            return False
        now, then = (
            sum(1 for name in made if not reading.isdisjoint(self._readers.get(name, ())))
            for made, reading in ((set(before.nodes), set(after.nodes)), (grown, left))
        )
        if then >= now:
            return False
        before.nodes.extend(nodes)
        after.nodes[:] = [name for name in after.nodes if name not in moved]
        after.first = min(self._position[name] for name in after.nodes)
        self._group_of.update((name, before) for name in nodes)
        # who reads the moved ones reads ``before`` now, which ``after``, and so each of them, came behind anyway
        self._graph.remove_edges_from(list(self._graph.out_edges(after)) + list(self._graph.in_edges(after)))
        for name, own in self._group_of.items():
            sources = self._read_by([name]) - {own}
            self._graph.add_edges_from((s, own) for s in sources if after in (s, own) or before in (s, own))
        return True

    def merge_isolated(self) -> None:
        """Merge groups without edges (a counter of steps) into the group of the loss, or the last one."""
        groups = self.groups
        last = next((group for group in groups if self._loss in group.nodes), groups[-1])
        for group in groups:
            if group is not last and self._graph.degree(group) == 0:
                self._merge(group, last)

    def in_order(self) -> list[Group]:
        """Return the groups in a topological order, earliest first operator first."""
        for group in self._graph.nodes:
            group.nodes.sort(key=self._position.__getitem__)
        return list(nx.lexicographical_topological_sort(self._graph, key=lambda group: group.first))

    def _read_by(self, unit: Sequence[str]) -> set[Group]:
        return {
            self._group_of[source]
            for name in unit
            for source in self._nodes[name].inputs
            if source in self._group_of
        }

    def _place(self, group: Group, unit: Sequence[str], sources: set[Group]) -> None:
        group.nodes.extend(unit)
        group.first = min(group.first, *(self._position[name] for name in unit))
        self._group_of.update((name, group) for name in unit)
        self._graph.add_edges_from((source, group) for source in sources if source is not group)

    def _merge(self, group: Group, other: Group) -> None:
        """Put ``group`` into ``other``, which keeps its key unless both are glue."""
        if group.key.is_glue and other.key.is_glue and self._loss in group.nodes:
            other.key = group.key
        self._graph.add_edges_from((s, other) for s in self._graph.predecessors(group) if s is not other)
        self._graph.add_edges_from((other, t) for t in self._graph.successors(group) if t is not other)
        self._graph.remove_node(group)
        other.nodes.extend(group.nodes)
        other.first = min(other.first, group.first)
        self._group_of.update((name, other) for name in group.nodes)

    def _cut_bytes(self, group: Group, other: Group) -> float:
        """Return bytes a sample on the edges of ``group`` once it is part of ``other``."""
        # Each result counts once however many read it, as it is sent once: first what the group makes and someone
        # outside reads, then what it reads from outside and the other one does not get anyway.
        inside = {group, other}
        total = 0.0
        for name in group.nodes:
            readers = [self._group_of[r] for r in self._readers.get(name, ())]
            total += self._bytes(name) if any(r not in inside for r in readers) else 0.0
        read = {s for name in group.nodes for s in self._nodes[name].inputs if s in self._group_of}
        for source in read:
            maker = self._group_of[source]
            by_other = any(self._group_of[r] is other for r in self._readers[source])
            total += self._bytes(source) if maker not in inside and not by_other else 0.0
        return total

    def _bytes(self, name: str) -> float:
        spec = self._nodes[name].output
        return float(spec.bytes_for(1)) if spec is not None else 0.0


LOSS, ROOT = "loss", "forward"
"""Names of blocks made of the model's own forward code: with the loss, and without."""


def coarsen(captured: CapturedGraph | Analysis, *, granularity: str = "layer") -> BlockGraph:
    """Return the blocks of a captured model, every edge between them, and the tensors on the edges.

    Block names and edge tensors are the same at every number of samples and sequence length.

    Args:
        captured: a capture at any size, or the analysis of the first one.
        granularity: ``layer``; ``sub_layer`` cuts layers into attention and feed-forward parts;
            ``node`` makes every operator a block, except those that must stay together.

    Raises:
        ValueError: ``granularity`` is none of these.
    """
    if granularity not in GRANULARITIES:
        raise ValueError(f"granularity must be one of {GRANULARITIES}, got {granularity!r}")
    # Two graphs of the same operators: the partition follows the first capture's (`Analysis`), so that blocks are the
    # same at all sizes; sizes, costs and saved tensors are those of the capture at hand.
    analysis = captured if isinstance(captured, Analysis) else captured.analysis
    partition = _partition(analysis, granularity)
    graph = _block_graph(captured.op_graph, analysis, partition)
    sharding = block_shardings(captured.op_graph, analysis.sharding, graph.blocks)
    context = block_contexts(captured.op_graph, analysis.sharding, graph.blocks)
    divided, cut = {each.block for each in sharding}, {each.block for each in context if each.flop_share}
    return dataclasses.replace(
        graph,
        saved=_saved_tensors(captured.op_graph, partition),
        sharding=sharding,
        position_axes=position_axes(analysis.sharding, graph.tensors),
        context=context,
        uncut=why_uncut(analysis.sharding, [b for b in graph.blocks if b.name not in cut]),
        undivided=why_undivided(
            analysis.sharding, [b for b in graph.blocks if b.name not in divided], granularity
        ),
    )


def _partition(analysis: Analysis, granularity: str) -> list[tuple[str, list[str]]]:
    """Return block names and their operators, in a topological order."""
    graph = analysis.op_graph
    # Replicated operators are in no block: every block that reads them has them (`with_replicated`).
    nodes = {node.name: node for node in graph.nodes if not node.is_replicable}
    units = ordered_units({name: node.inputs for name, node in nodes.items()}, analysis.clusters)
    parameters = {p.name for p in graph.parameters if not p.is_buffer}
    quotient = Quotient(nodes, graph.loss)
    if granularity == "node":
        for unit in units:
            first = nodes[unit[0]]
            name = f"{first.module}:{first.name}" if first.module else first.name
            quotient.open(Key(name), unit)
        quotient.merge_isolated()
        return _named(quotient, graph.loss)
    module_keys = ModuleKeys(analysis.layer_lists)
    keys = {name: module_keys.layer_key(node.module) for name, node in nodes.items()}
    if granularity == "sub_layer":
        keys = sub_layer_keys(module_keys, list(nodes.values()), parameters)
    # ``latest``: by key, the group its operators join. Where joining would close a cycle (a layer that is called twice,
    # with others between), a second group of the key starts, later called ``layers.0#2``. Glue never joins by key: two
    # pieces of a model's own code have nothing to do with each other; `_Merger` finds them neighbours.
    latest: dict[str, Group] = {}
    for unit in units:
        # the key of the costliest member that is not glue, the first such on a tie
        named = [name for name in unit if not keys[name].is_glue] or list(unit)
        key = keys[max(named, key=lambda name: nodes[name].flops)]
        group = latest.get(key.path)
        if key.is_glue or group is None or not quotient.extend(group, unit):
            latest[key.path] = quotient.open(key, unit)
    _Merger(quotient, analysis).run()
    if analysis.reads_values:
        glue = frozenset(name for name, key in keys.items() if key.is_glue)
        for before, after in quotient.borders():
            quotient.move_up(before, after, _leaning(quotient, before, after, units, nodes, glue))
    quotient.merge_isolated()
    return _named(quotient, graph.loss)


def _leaning(
    quotient: Quotient,
    before: Group,
    after: Group,
    units: Sequence[Sequence[str]],
    nodes: dict[str, OpNode],
    glue: frozenset[str],
) -> list[str]:
    """Return the glue of a group that depends on nothing but the group before it, its own and the batch.

    The images of a LLaVA-NeXT, of three projected ones:

        before   projector -> split -> a, b, c
        after    a' = [a, newline], b' = [b, newline], c' = [c, newline]; [a', b', c'] -> layer 0

    where a', b', c' and their join lean on the projector, and so does ``newline``, which nothing else reads.
    """
    own, made = set(after.nodes), set(before.nodes)
    mine = [unit for unit in units if own.issuperset(unit) and glue.issuperset(unit)]
    barred: set[str] = set()
    while True:
        leaning: set[str] = set()
        for unit in mine:
            read = {source for name in unit for source in nodes[name].inputs if source in nodes}
            if barred.isdisjoint(unit) and read <= made | leaning | set(unit):
                leaning.update(unit)
        # what reads no group at all leans on this one only where nothing else reads it
        free = {
            name
            for unit in mine
            if leaning.issuperset(unit)
            and not any(source in nodes and source not in unit for n in unit for source in nodes[n].inputs)
            and not leaning.issuperset(quotient.readers(unit))
            for name in unit
        }
        if not free:
            return [name for unit in mine for name in unit if name in leaning]
        barred |= free


LARGE_SHARE = 0.05
"""A module without parameters that takes this share of the model's FLOPs is a block of its own."""


class _Merger:
    """Decides which groups join a neighbour, and which neighbours they may join."""

    def __init__(self, quotient: Quotient, analysis: Analysis) -> None:
        graph = analysis.op_graph
        self._quotient = quotient
        self._clusters = analysis.clusters
        self._nodes = {node.name: node for node in graph.nodes}
        self._parameters = {p.name for p in graph.parameters if not p.is_buffer}
        self._batch = {spec.name for spec in graph.inputs}
        self._loss = graph.loss
        self._flops = sum(node.flops for node in graph.nodes)

    def run(self) -> None:
        """Merge until nothing changes: fixed tensors first, then glue, then the loss."""
        for group in self._quotient.groups:
            if self._is_fixed(group):
                self._quotient.merge_into_reader(group, lambda other: not self._is_coupled(other))
        # The order of rounds: what mixes no samples first finds neighbours that mix none, so that it does not end up in
        # a block of whole loss units by chance; then mixing glue collects; last glue joins glue where nobody took it.
        rounds: list[tuple[bool, Callable[[Group], bool]]] = [
            (False, lambda other: not self._is_coupled(other)),
            (True, self._is_coupled),
            (False, lambda other: other.key.is_glue),
        ]
        is_changing = True
        while is_changing:
            is_changing = False
            for coupled, accepts in rounds:
                for group in self._quotient.groups:
                    is_due = group in self._quotient and self._is_glue(group)
                    if is_due and self._is_coupled(group) == coupled:
                        is_changing |= self._quotient.merge_into_neighbour(group, accepts)
        # A loss without parameters joins the one block that makes what it reads: lm_head, whose logits are a language
        # model's widest tensor. With two sources (the loss of a CLIP) one tower would wait for the other.
        last = next((group for group in self._quotient.groups if self._loss in group.nodes), None)
        if last is not None and not self._has_parameters(last) and len(self._quotient.sources(last)) == 1:
            self._quotient.merge_into_neighbour(last, lambda other: True)

    def _has_parameters(self, group: Group) -> bool:
        return any(s in self._parameters for name in group.nodes for s in self._nodes[name].inputs)

    def _is_glue(self, group: Group) -> bool:
        if group.key.is_glue:
            return True
        flops = sum(self._nodes[name].flops for name in group.nodes)
        return not self._has_parameters(group) and flops < LARGE_SHARE * self._flops

    def _is_coupled(self, group: Group) -> bool:
        return any(self._nodes[name].is_coupling for name in group.nodes)

    def _is_fixed(self, group: Group) -> bool:
        """Return whether the group depends on no sample (position embeddings)."""
        needed = with_replicated(group.nodes, self._nodes, self._clusters)
        reads_batch = any(s in self._batch for name in needed for s in self._nodes[name].inputs)
        is_source = not reads_batch and not self._quotient.sources(group)
        return is_source and not self._is_coupled(group) and self._loss not in group.nodes


def _named(quotient: Quotient, loss: str | None) -> list[tuple[str, list[str]]]:
    taken: dict[str, int] = {}
    named = []
    for group in quotient.in_order():
        path = group.key.path or (LOSS if loss in group.nodes else ROOT)
        taken[path] = taken.get(path, 0) + 1
        named.append((path if taken[path] == 1 else f"{path}#{taken[path]}", list(group.nodes)))
    return named


def _block_graph(
    graph: OpGraph, analysis: Analysis, partition: Sequence[tuple[str, list[str]]]
) -> BlockGraph:
    # An edge is a pair of blocks with all tensors between them, each once; ``users`` finds ties: a parameter that two
    # blocks read (an embedding used as output layer), or a replicated buffer, which is left out below.
    nodes = {node.name: node for node in graph.nodes}
    block_of = {name: block for block, names in partition for name in names}
    users: dict[str, list[str]] = {}
    blocks = []
    edges: dict[tuple[str, str], dict[str, None]] = {}
    tensors: dict[str, TensorSpec] = {}
    for block, names in partition:
        needed = with_replicated(names, nodes, analysis.clusters)
        blocks.append(_block(block, names, needed, graph))
        for name in names:
            for source in nodes[name].inputs:
                if block_of.get(source, block) != block:
                    edges.setdefault((block_of[source], block), {}).setdefault(source)
                    spec = nodes[source].output
                    assert spec is not None, f"{source} has several results and crosses into {block}"
                    tensors[source] = spec
        for parameter in blocks[-1].parameters:
            users.setdefault(parameter, []).append(block)
    order = {block: index for index, (block, _) in enumerate(partition)}
    buffers = {p.name for p in graph.parameters if p.is_buffer}
    return BlockGraph(
        model=graph.model,
        num_samples=graph.num_samples,
        blocks=tuple(blocks),
        edges=tuple(
            BlockEdge(src=src, dst=dst, tensors=tuple(names))
            for (src, dst), names in sorted(edges.items(), key=lambda e: (order[e[0][0]], order[e[0][1]]))
        ),
        tensors={name: tensors[name] for name in nodes if name in tensors},
        loss_block=block_of.get(graph.loss) if graph.loss is not None else None,
        tied={name: tuple(by) for name, by in users.items() if len(by) > 1 and name not in buffers},
    )


def _saved_tensors(graph: OpGraph, partition: Sequence[tuple[str, list[str]]]) -> tuple[SavedTensor, ...]:
    """Return what operators keep for backward, by the blocks that make and keep it.

    What replicated operators make or keep is left out (masks): it depends on the inputs only, and every stage has
    its own. What other stages make (`OpGraph.received`) is made by no block here.
    """
    block_of = {name: block for block, names in partition for name in names}
    position = {block: i for i, (block, _) in enumerate(partition)}
    # ``found``: storage -> (block that makes it, blocks that keep it, bytes). linear(h) keeps h for its weight's
    # gradient, and so does the residual's reader in the next block: one storage, saved by both, charged to the first.
    found: dict[str, tuple[str, dict[str, None], int]] = {}
    views: dict[str, list[str]] = {}
    for node in graph.nodes:
        block = block_of.get(node.name)
        if block is None:
            continue
        if node.storage:
            views.setdefault(node.storage, []).append(node.name)
        if node.kept_inside_bytes:
            found[f"{node.name}:inside"] = block, {block: None}, node.kept_inside_bytes
        for maker, num_bytes in node.keeps:
            if maker in block_of or maker in graph.received:
                found.setdefault(maker, (block_of.get(maker, ""), {}, num_bytes))[1][block] = None
    return tuple(
        SavedTensor(
            name=name,
            made_by=maker,
            kept_by=tuple(sorted(blocks, key=position.__getitem__)),
            bytes=num_bytes,
            views=tuple(views.get(name, ())),
        )
        for name, (maker, blocks, num_bytes) in found.items()
    )


def _block(block: str, names: list[str], needed: list[str], graph: OpGraph) -> Block:
    wanted = set(needed)
    members = [node for node in graph.nodes if node.name in wanted]
    read = {source for node in members for source in node.inputs}
    own = [p for p in graph.parameters if p.name in read]
    return Block(
        name=block,
        nodes=tuple(names),
        parameters=tuple(p.name for p in own),
        inputs=tuple(spec.name for spec in graph.inputs if spec.name in read),
        parameter_bytes=sum(p.bytes for p in own),
        trainable_bytes=sum(p.bytes for p in own if p.requires_grad),
        flops=sum(node.flops for node in members),
        saved_bytes=sum(node.saved_bytes for node in members),
        is_coupled=any(node.is_coupling for node in members),
        is_trainable=any(p.requires_grad for p in own),
    )


# From the module tree to the keys blocks are grouped by: layers, parts of layers, top-level components.


_ATTENTION = ("scaled_dot_product_attention", "softmax", "flex_attention", "bmm")
"""Operators, by name, that only the attention part of a layer has."""
_MATRIX = ("linear", "conv", "matmul", "mm", "bmm", "addmm", "einsum", "embedding")


@dataclass(frozen=True, slots=True)
class Key:
    """Group an operator belongs to; ``is_glue`` where a module holding layers called it itself."""

    path: str
    is_glue: bool = False


class ModuleKeys:
    """Keys of module paths, by which containers hold repeated layers."""

    def __init__(self, layer_lists: Sequence[str]) -> None:
        self._lists = frozenset(layer_lists)
        outermost = [p for p in layer_lists if not any(o != p and _is_under(p, o) for o in layer_lists)]
        # Every module on the way to a layer list is a namespace: its own code is glue, its other children are
        # components. Lists vision.layers and text.layers: "", vision and text are; vision.embeddings is a component.
        self._namespaces = {""}
        for path in outermost:
            parts = path.split(".") if path else []
            self._namespaces.update(".".join(parts[:i]) for i in range(len(parts) + 1))

    def layer_key(self, path: str) -> Key:
        """Return the layer, or top-level component, or the module whose own code it is."""
        # vision.layers.3.mlp.fc1 with list vision.layers: the first list on the way ends the key behind its child's
        # number, vision.layers.3. head.dense with namespace "" alone: one component below it, head.
        parts = path.split(".") if path else []
        deepest = 0
        for i in range(len(parts) + 1):
            prefix = ".".join(parts[:i])
            if prefix in self._lists and i < len(parts):
                return Key(".".join(parts[: i + 1]))
            if prefix in self._namespaces:
                deepest = i
        if deepest == len(parts):
            return Key(path, is_glue=True)
        return Key(".".join(parts[: deepest + 1]))

    def is_layer(self, path: str) -> bool:
        """Return whether ``path`` is an element of a layer list."""
        return path.rpartition(".")[0] in self._lists and path != ""

    def child(self, layer: str, path: str) -> str:
        """Return the part of ``layer`` that ``path`` lies in, "" for the layer's own code.

        Elements of a list inside the layer are parts of their own.
        """
        rest = path[len(layer) + 1 :].split(".") if len(path) > len(layer) else []
        depth = 1
        while len(rest) > depth and ".".join([layer, *rest[:depth]]) in self._lists:
            depth += 1
        return ".".join(rest[:depth])


def _is_under(path: str, ancestor: str) -> bool:
    return ancestor == "" or path.startswith(f"{ancestor}.")


def sub_layer_keys(keys: ModuleKeys, nodes: Sequence[OpNode], parameters: set[str]) -> dict[str, Key]:
    """Return the key of each operator when layers are cut into attention and feed-forward parts.

    Children of a layer with matrix products are its parts; those without attention that follow each
    other are one part (``fc1`` and ``fc2``). Norms go with the only part that reads them, else with the
    part before; activations, dropout and residual additions go with the part before.
    """
    # First as for whole layers; then each layer by itself, as what belongs to its parts shows only in its own code.
    result: dict[str, Key] = {}
    layers: dict[str, list[OpNode]] = {}
    for node in nodes:
        key = keys.layer_key(node.module)
        result[node.name] = key
        if not key.is_glue and keys.is_layer(key.path):
            layers.setdefault(key.path, []).append(node)
    for layer, members in layers.items():
        for name, part in _layer_parts(keys, layer, members, parameters).items():
            result[name] = Key(f"{layer}.{part}")
    return result


def _layer_parts(
    keys: ModuleKeys, layer: str, nodes: Sequence[OpNode], parameters: set[str]
) -> dict[str, str]:
    """Return the part of each of a layer's operators; nothing if it has fewer than two parts."""
    child = {node.name: keys.child(layer, node.module) for node in nodes}
    part_of = _matrix_parts(nodes, child)
    if len(set(part_of.values())) < 2:
        return {}
    units = _light_units(nodes, child, part_of)
    placed = {node.name: part_of[child[node.name]] for node in nodes if child[node.name] in part_of}
    by_name = {node.name: node for node in nodes}
    for members in units:
        part = _place(members, by_name, placed, parameters)
        placed.update((name, part) for name in members)
    return placed


def _matrix_parts(nodes: Sequence[OpNode], child: Mapping[str, str]) -> dict[str, str]:
    # ``order``: the layer's children with matrix products, as they run -> whether they hold attention. A GPT-2 layer
    # gives {attn: True, mlp: False}; a Whisper layer, whose fc1 and fc2 are its own, {self_attn: True, fc1: False,
    # fc2: False}, of which fc2 joins fc1: a cut between the two would send the widest tensor of the layer.
    order: dict[str, bool] = {}
    for node in nodes:
        operator = node.target.split(".")[1] if node.target.startswith("aten.") else ""
        is_attention = any(operator.startswith(name) for name in _ATTENTION)
        if child[node.name] and (is_attention or operator.rstrip("123d_").startswith(_MATRIX)):
            order[child[node.name]] = order.get(child[node.name], False) or is_attention
    part_of: dict[str, str] = {}
    previous = ""
    for name, is_attention in order.items():
        is_listed = "." in name or "." in previous  # elements of a list inside the layer stay separate
        joins = previous and not is_attention and not order[previous] and not is_listed
        part_of[name] = part_of[previous] if joins else name
        previous = name
    return part_of


def _light_units(
    nodes: Sequence[OpNode], child: Mapping[str, str], part_of: Mapping[str, str]
) -> list[list[str]]:
    """Return the layer's other operators: a module's run of operators together, own code one by one."""
    units: list[list[str]] = []
    last = ""
    for node in nodes:
        name = child[node.name]
        if name in part_of:
            last = ""
            continue
        if name and name == last:
            units[-1].append(node.name)
        else:
            units.append([node.name])
        last = name
    return units


def _place(
    members: Iterable[str], by_name: Mapping[str, OpNode], placed: Mapping[str, str], parameters: set[str]
) -> str:
    # A norm has parameters and, with residual additions behind the parts, one reader (the part): it moves there with
    # its weights. Anything else stays where its operand is made: sending the operand or the result costs the same.
    own = set(members)
    readers = {n.name for n in by_name.values() if n.name not in own and own & set(n.inputs)}
    before = [s for name in own for s in by_name[name].inputs if s in placed and s not in own]
    order = {name: index for index, name in enumerate(by_name)}
    has_parameters = any(s in parameters for name in own for s in by_name[name].inputs)
    reading = {placed.get(reader) for reader in readers}
    if has_parameters and len(reading) == 1 and None not in reading:
        return str(reading.pop())
    if before:
        return placed[max(before, key=order.__getitem__)]
    following = [r for r in readers if r in placed] or [n for n in placed if n not in own]
    return placed[min(following, key=order.__getitem__)]
