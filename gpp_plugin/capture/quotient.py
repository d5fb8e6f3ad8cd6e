"""A graph of operator groups that stays acyclic while groups grow and merge."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import networkx as nx

from gpp_plugin.capture.keys import Key
from gpp_plugin.ir.op_graph import OpNode


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
        for other in sorted(before, key=lambda g: g.first):
            if accepts(other) and before - {other} <= nx.ancestors(self._graph, other):
                choices.append((self._cut_bytes(group, other), 0, other.first, other))
        for other in sorted(after, key=lambda g: g.first):
            if accepts(other) and after - {other} <= nx.descendants(self._graph, other):
                choices.append((self._cut_bytes(group, other), 1, other.first, other))
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
