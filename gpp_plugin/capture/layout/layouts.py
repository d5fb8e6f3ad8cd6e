"""Where the samples of every tensor lie, and which operators mix samples.

The runtime may compute an operator on any slice of samples only if that gives the slice of what it
gives on all of them. That property is checked operator by operator, not assumed: the model is exported
at ``n`` and ``2n`` samples, and each operator (with the arguments each export gave it) runs on random
operands of ``2n`` samples and on slices of ``n`` of them. If some axis of the result makes every slice
agree, that is its batch axis; if all results are equal, it is the same for every sample; otherwise the
operator mixes samples. Operators whose layout follows from a rule (`layout_rules`) are not run, equal
operators are run once, and operators of fixed arguments are fixed. What depends on the number of samples
alone (``arange(samples)``) keeps its real values, so that indexing by it is tried as it will happen.

Source: this project
Tests: tests/capture/test_layouts.py
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import networkx as nx
import torch
from torch import Tensor, fx

from gpp_plugin.capture.annotate import Note, module_path
from gpp_plugin.capture.eager.opaque_call import OpaqueCall
from gpp_plugin.capture.eager.trial_run import CPU
from gpp_plugin.capture.layout.layout_rules import Counted, Fixed, Operand, Rows, State, Whole, rule_layout
from gpp_plugin.capture.layout.trials import MixedSamples, Trials, are_equal, find_rows, shape_of, tensors_of
from gpp_plugin.capture.tracing.clean import written_arguments
from gpp_plugin.capture.tracing.traced import Traced

# Which operators must stay together: shared storage that is written, tuples, uncuttable tensors.


def find_clusters(
    graph: fx.Graph, notes: Mapping[str, Note], *, uncuttable: Iterable[str] = ()
) -> tuple[tuple[str, ...], ...]:
    """Return the groups of two or more operators that no stage boundary may separate.

    - A storage that is written: everything that touches it up to its last write, since the order of
      reads and writes carries values that no edge shows. Of a buffer, everything that touches it.
    - Writes into the buffers of one module (BatchNorm's statistics and its counter).
    - An operator with several results, and the nodes that pick them out.
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
    writers: dict[str, list[str]] = {}
    for node in nodes:
        if notes[node.name].writes & fixed:
            writers.setdefault(module_path(node), []).append(node.name)
    groups = list(writers.values())
    for storage, last in last_write.items():
        end = len(nodes) if storage in fixed else last + 1
        touching = (n.name for n in nodes[:end] if storage in notes[n.name].reads | notes[n.name].storages)
        groups.append(list(touching))
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


aten = torch.ops.aten

MAX_CONSTANT_ELEMENTS = 1 << 26

_MIXING = dict.fromkeys(
    (aten.masked_scatter.default, aten.masked_scatter_.default),
    "takes its values in the order of the mask over all samples",
)
"""Operators that random operands cannot try."""


@dataclass(slots=True, kw_only=True)
class Layouts:
    """What the analysis found, by node name.

    Args:
        states: of every placeholder and operator with one tensor result.
        coupling: operators that must see whole loss units: mixing ones and readers of their results
            that no batch axis cuts.
        reasons: the mixing operators, with a word on why.
    """

    states: dict[str, State] = field(default_factory=dict)
    coupling: set[str] = field(default_factory=set)
    reasons: dict[str, str] = field(default_factory=dict)

    def uncuttable(self) -> list[str]:
        """Return the nodes whose samples lie on an axis that cannot be sliced in one piece."""
        return [n for n, s in self.states.items() if isinstance(s, Rows) and s.outer > 1]


def whole_layouts(traced: Traced) -> Layouts:
    """Return the layouts of a graph that computes on whole loss units, whatever its axes hold."""
    names = [*traced.fakes, *(node.name for node in traced.operators)]
    return Layouts(states=dict.fromkeys(names, Whole()), coupling={node.name for node in traced.operators})


class LayoutAnalysis:
    """Finds the layout of every tensor and the operators that mix samples, in one walk through both graphs in step.

    Args:
        small, large: structurally equal exports at ``n >= 2`` and ``2n`` samples.
        clusters: operators classified as one because they write shared storage.
        input_rows: batch key -> rows a sample along axis 0; 0 for inputs without samples.
        traced_on: the device of both exports; operators are tried on the CPU.
        written: placeholders that operators write into.
    """

    def __init__(
        self,
        small: Traced,
        large: Traced,
        clusters: Sequence[Sequence[str]],
        input_rows: dict[str, int],
        traced_on: torch.device,
        *,
        written: Set[str],
    ) -> None:
        self.small, self.large = small, large
        # Filled in execution order, so that an operator finds the states of all it reads:
        #   found.states   of every tensor; of an operator with several results `Fixed`, its parts' in ``tuples``
        #   constants      values at both sizes of what depends on the number of samples alone, or on nothing
        #   pairs          the same operator of both graphs, by its name in the small one
        self.found = Layouts()
        self.constants: dict[str, tuple[Tensor, Tensor]] = {}
        self.tuples: dict[str, tuple[State, ...]] = {}
        self.pairs = {a.name: (a, b) for a, b in zip(small.graph.nodes, large.graph.nodes, strict=True)}
        self.clusters = clusters
        self.trials = Trials(
            small, large, self.pairs, states=self.found.states, constants=self.constants, traced_on=traced_on
        )
        self.written = written & small.parameters.keys()
        for name in small.fakes:
            rows = input_rows[small.inputs[name]] if name in small.inputs else 0
            self.found.states[name] = Rows(0, rows) if rows else Fixed()
            if name in small.constants:
                self.constants[name] = small.constants[name].to(CPU), large.constants[name].to(CPU)

    def run(self) -> Layouts:
        """Return the layouts: each operator, or cluster of writers, is classified in execution order."""
        writing = [
            names for names in self.clusters if any(written_arguments(self.pairs[n][0]) for n in names)
        ]
        for unit in ordered_units(operator_sources(self.small.operators), writing):
            self._classify(unit)
        return self.found

    def _classify(self, unit: tuple[str, ...]) -> None:
        # From the surest to the costliest: parts of a tuple are classified with it; constants are computed; buffers,
        # operands that are whole and operators known to mix couple; random operators follow their operand; what reads
        # nothing that varies is fixed; rules; and at last trials.
        first = self.pairs[unit[0]][0]
        if len(unit) == 1 and first.target is operator.getitem and first.args[0].name in self.tuples:
            self.found.states[first.name] = self.tuples[first.args[0].name][int(first.args[1])]
            if first.args[0].name in self.found.coupling:
                self.found.coupling.add(first.name)
            return
        sources = self._sources(unit)
        states = [self.found.states[s.name] for s in sources]
        if self._is_constant(unit, sources) and self._evaluate(unit, sources):
            return
        buffers = [s.name for s in sources if s.name in self.written]
        if buffers:
            names = ", ".join(self.small.parameters[name] for name in buffers)
            self._couple(unit, f"updates buffers in place over all samples ({names})")
            return
        if any(isinstance(state, Whole) for state in states):
            self._couple(unit, None)
            return
        if first.target in _MIXING and any(isinstance(state, Rows) for state in states):
            self._couple(unit, _MIXING[first.target])
            return
        # what a module that runs as it is does with other values is unknown
        calls = [self.pairs[name][0].target for name in unit]
        eager = [call for call in calls if isinstance(call, OpaqueCall) and not call.is_function]
        if eager:
            self._couple(unit, f"runs {eager[0].where} as it is, which may mix samples")
            return
        if any(is_random(self.pairs[name][0]) for name in unit):
            self._classify_random(unit, sources)
            return
        if all(isinstance(s, Fixed) for s in states) and self._same_arguments(unit):
            for name in unit:
                self._spread(name, [Fixed()] * len(tensors_of(self.pairs[name][0])))
            return
        self._classify_by_rule_or_trial(unit, sources)

    def _classify_by_rule_or_trial(self, unit: tuple[str, ...], sources: list[fx.Node]) -> None:
        small, large = self.pairs[unit[0]]
        # A result of one shape at n and 2n samples, from operands that have samples, has reduced them: no trial needed.
        value = small.meta.get("val")
        if len(unit) == 1 and isinstance(value, Tensor):
            operands = self._operands(sources)
            rows = self._rule(unit[0], sources)
            if rows is not None:
                self.found.states[unit[0]] = rows
                return
            has_rows = any(isinstance(o.state, Rows) for o in operands.values())
            if has_rows and shape_of(small) == shape_of(large):
                self._couple(unit, "reduces over the samples")
                return
        outcome = self.trials.classify(unit, sources)
        if isinstance(outcome, str):
            self._couple(unit, outcome)
            return
        results = iter(outcome)
        for name in unit:
            self._spread(name, [next(results) for _ in tensors_of(self.pairs[name][0])])

    def _classify_random(self, unit: tuple[str, ...], sources: list[fx.Node]) -> None:
        """Dropout follows its operand, other draws an operand of their shape, or their own shape."""
        node, large = self.pairs[unit[0]]
        operands = list(self._operands(sources).values())
        if len(unit) == 1 and isinstance(node.meta.get("val"), Tensor):
            state: State | None
            if not operands:
                state = _whole_or_rows(shape_of(node), shape_of(large), self.small.num_samples)
            else:
                state = self._rule(unit[0], sources)
                if state is None and len(operands) == 1 and operands[0].shape == shape_of(node):
                    state = operands[0].state
            if isinstance(state, (Rows, Fixed)):
                self.found.states[unit[0]] = state
                return
        self._couple(unit, "draws random numbers whose shape does not follow the samples")

    # ------------------------------------------------------------------ constants

    def _is_constant(self, unit: tuple[str, ...], sources: list[fx.Node]) -> bool:
        members = [self.pairs[name][0] for name in unit]
        if any(is_random(node) or isinstance(node.target, OpaqueCall) for node in members):
            return False
        return all(source.name in self.constants or source.op == "get_attr" for source in sources)

    def _evaluate(self, unit: tuple[str, ...], sources: list[fx.Node]) -> bool:
        """Compute operators of constants for real at both sizes; False if too large to hold."""
        size = sum(t.numel() for name in unit for node in self.pairs[name] for t in tensors_of(node))
        if size > MAX_CONSTANT_ELEMENTS:
            return False
        values: list[dict[str, Any]] = []
        for which in (0, 1):
            known = {s.name: self._known(self.pairs[s.name][which], which) for s in sources}
            values.append(self.trials.execute(unit, which, known))
        for name in unit:
            small, large = values[0][name], values[1][name]
            if isinstance(small, (tuple, list)):
                self.tuples[name] = tuple(
                    self._constant_state(f"{name}_part_{i}", a, b)
                    for i, (a, b) in enumerate(zip(small, large, strict=True))
                )
                self.found.states[name] = Fixed()
            else:
                self.found.states[name] = self._constant_state(name, small, large)
        return True

    def _known(self, node: fx.Node, which: int) -> Any:
        if node.op == "get_attr":
            return self.trials.bodies[which][str(node.target)]
        return self.constants[node.name][which]

    def _constant_state(self, name: str, small: Tensor, large: Tensor) -> State:
        self.constants[name] = (small, large)
        if small.shape == large.shape:
            return Fixed() if are_equal(small, large) else Counted()
        # arange(2n) at 2n samples is no repetition of arange(n): `Counted`. zeros(2n, 5) is, and is like any batch
        # tensor, with the value at n as every slice of it.
        n = self.small.num_samples
        try:
            rows = find_rows(large, [small, small, small], [0, n // 2, n], n)
        except MixedSamples:
            return Counted()
        return rows if isinstance(rows, Rows) and rows.outer == 1 else Counted()

    # ------------------------------------------------------------------ small helpers

    def _sources(self, unit: tuple[str, ...]) -> list[fx.Node]:
        members = set(unit)
        nodes = [s for name in unit for s in self.pairs[name][0].all_input_nodes if s.name not in members]
        for node in nodes:
            if node.op == "get_attr":
                self.found.states.setdefault(node.name, Fixed())
        return list(dict.fromkeys(nodes))

    def _operands(self, sources: list[fx.Node], which: int = 0) -> dict[fx.Node, Operand]:
        tensors = [self.pairs[s.name][which] for s in sources if s.op != "get_attr"]
        return {s: Operand(self.found.states[s.name], shape_of(s)) for s in tensors}

    def _rule(self, name: str, sources: list[fx.Node]) -> Rows | None:
        """Return the layout by rule if it is the same at both sizes and no other axis grows with the samples."""
        # texts [1, 2 samples, 8] expanded to [2 videos, 2 texts, 8]: half the texts make a quarter of it
        n = self.small.num_samples
        found = [
            rule_layout(node, self._operands(sources, which), shape_of(node), n * (1 + which))
            for which, node in enumerate(self.pairs[name])
        ]
        rows = found[0] if found[0] == found[1] else None
        sizes = zip(*(shape_of(node) for node in self.pairs[name]), strict=False)
        grows = {axis for axis, (small, large) in enumerate(sizes) if small != large}
        return rows if rows is not None and grows <= {rows.axis} else None

    def _same_arguments(self, unit: tuple[str, ...]) -> bool:
        plain = lambda n: n.name  # noqa: E731
        return all(
            repr(fx.map_arg((a.args, a.kwargs), plain)) == repr(fx.map_arg((b.args, b.kwargs), plain))
            for a, b in (self.pairs[name] for name in unit)
        )

    def _spread(self, name: str, states: list[State]) -> None:
        is_tensor = isinstance(self.pairs[name][0].meta.get("val"), Tensor)
        self.found.states[name] = states[0] if is_tensor else Fixed()
        if not is_tensor:
            self.tuples[name] = tuple(states)

    def _couple(self, unit: tuple[str, ...], reason: str | None) -> None:
        """Mark the unit as mixing samples; results that scale on one axis may be cut there again."""
        # A result that doubles along one axis may be cut again behind the operator: softmax over the samples mixes
        # them, and still has a row for each.
        for name in unit:
            self.found.coupling.add(name)
            small, large = self.pairs[name]
            states = [
                _whole_or_rows(tuple(a.shape), tuple(b.shape), self.small.num_samples)
                for a, b in zip(tensors_of(small), tensors_of(large), strict=False)
            ]
            self._spread(name, states or [Whole()])
        if reason is not None:
            written = {n: [a.name for a in written_arguments(self.pairs[n][0])] for n in unit}
            culprits = [n for n in unit if not self.written.isdisjoint(written[n])] or [unit[-1]]
            self.found.reasons[culprits[-1]] = reason


def describe_coupling(node: fx.Node, reason: str) -> str:
    """Return the line for the user on an operator that mixes samples."""
    place = module_path(node) or "the model itself"
    return f"{place}: {node.target} ({node.name}) {reason}"


def is_random(node: fx.Node) -> bool:
    """Return whether the operator draws random numbers with these arguments."""
    if isinstance(node.target, OpaqueCall):
        return node.target.is_random
    if node.target is aten.dropout.default or node.target is aten.feature_dropout.default:
        return bool(node.args[2]) and float(node.args[1]) > 0.0  # type: ignore[arg-type]
    if node.target is aten.scaled_dot_product_attention.default:
        rate = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return float(rate) > 0.0  # type: ignore[arg-type]
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _whole_or_rows(small: tuple[int, ...], large: tuple[int, ...], n: int) -> State:
    # [4, 7, 8] at n = 2 and [8, 7, 8] at 4 differ along axis 0 alone, which doubles: 2 rows a sample along it
    axes = [i for i, (a, b) in enumerate(zip(small, large, strict=False)) if a != b]
    if len(small) != len(large) or len(axes) != 1 or small[axes[0]] % n:
        return Whole()
    axis = axes[0]
    return Rows(axis, small[axis] // n) if large[axis] == 2 * small[axis] else Whole()
