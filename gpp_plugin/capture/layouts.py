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

import logging
import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import networkx as nx
import torch
from torch import Tensor, fx

from gpp_plugin.capture.eager.opaque_call import OpaqueCall
from gpp_plugin.capture.eager.trial_run import CPU, CheckedOnCpu, made_up
from gpp_plugin.capture.layout_rules import Counted, Fixed, Operand, Rows, State, Whole, rule_layout
from gpp_plugin.capture.tracing.clean import (
    Note,
    module_path,
    on_device,
    placed_body,
    written_arguments,
)
from gpp_plugin.capture.tracing.traced import Traced
from gpp_plugin.errors import first_line

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


# Trials of operators on random operands, on the CPU whatever device the graphs were traced on: random operands may be
# refused (`trial_run` has why).


logger = logging.getLogger(__name__)

MAX_PROBE_BYTES = 1 << 29
"""Operators with larger operands are not run; without a rule they count as mixing samples."""

_MOVEMENT = {
    aten.view.default, aten.reshape.default, aten.transpose.int, aten.permute.default, aten.expand.default,
    aten.slice.Tensor, aten.select.int, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims,
    aten.flatten.using_ints, aten.unflatten.int, aten.cat.default, aten.stack.default, aten.t.default,
    aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int,
    aten.contiguous.default, aten.numpy_T.default, aten.repeat.default, aten.flip.default, aten.roll.default,
}  # fmt: skip
"""Operators that only move elements; they are run on two-byte integers."""


class MixedSamples(Exception):
    """An operator's results on slices are not slices of its result."""


class Trials:
    """Operators of both graphs, tried in step; equal ones are tried once.

    Args:
        small, large: structurally equal exports at ``n`` and ``2n`` samples.
        pairs: the nodes of both by the smaller one's names.
        states: of every operand, filled as operators are classified.
        constants: values, at both sizes, of operands that do not depend on inputs.
        traced_on: the device of both graphs; custom functions without code for the CPU are tried on it.
    """

    def __init__(
        self,
        small: Traced,
        large: Traced,
        pairs: Mapping[str, tuple[Any, Any]],
        *,
        states: Mapping[str, State],
        constants: Mapping[str, tuple[Tensor, Tensor]],
        traced_on: torch.device,
    ) -> None:
        self._small, self._large, self._pairs = small, large, pairs
        self._states, self._constants, self._traced_on = states, constants, traced_on
        self._memo: dict[Any, list[State] | str] = {}
        self._generator = torch.Generator().manual_seed(0)
        self.bodies = tuple(
            {name: placed_body(body, CPU, of_type=traced_on.type) for name, body in traced.attributes.items()}
            for traced in (small, large)
        )
        """What each graph calls, by name, on the CPU."""

    def classify(self, unit: tuple[str, ...], sources: list[fx.Node]) -> list[State] | str:
        """Return the layout of every result of the unit's operators, or why they mix samples.

        Args:
            unit: operators classified as one.
            sources: what they read from outside.
        """
        key = self._key(unit, sources)
        if key not in self._memo:
            total = sum(t.numel() for s in sources for t in tensors_of(self._pairs[s.name][1]))
            total += sum(t.numel() for name in unit for t in tensors_of(self._pairs[name][1]))
            if total * 8 > MAX_PROBE_BYTES:
                self._memo[key] = f"has operands too large to try ({total * 4 >> 20} MiB)"
            else:
                self._memo[key] = self._run_slices(unit, sources)
        return self._memo[key]

    def _key(self, unit: tuple[str, ...], sources: list[fx.Node]) -> Any:
        # Two units are equal if they are the same calls, at both sizes, on operands of the same states, shapes and
        # types: operands are known by their position, not their name, so that the layers of a model are one trial.
        position = {s.name: i for i, s in enumerate(sources)}
        position.update({name: len(sources) + i for i, name in enumerate(unit)})
        rank = lambda n: ("node", position[n.name])  # noqa: E731
        calls = []
        for name in unit:
            for node in self._pairs[name]:
                calls.append(repr((node.target, fx.map_arg(node.args, rank), fx.map_arg(node.kwargs, rank))))
        operands = tuple(
            (
                repr(self._states[s.name]),
                tuple(shape_of(s)),
                str(s.meta["val"].dtype),
                s.name if s.name in self._constants else "",
            )
            if s.op != "get_attr"
            else s.name
            for s in sources
        )
        return tuple(calls), operands

    def _run_slices(self, unit: tuple[str, ...], sources: list[fx.Node]) -> list[State] | str:
        # Of operands for 2n samples the large graph's operator makes the whole result, and the small graph's one makes
        # a part of each slice of n. Three slices, for n = 2:
        #     samples  0 1 2 3      starts 0, 1 and 2; the middle one separates a cut along samples from one that
        #              a a . .      happens to agree on halves (a reduction over pairs of samples)
        #              . b b .
        #              . . c c
        n = self._small.num_samples
        starts = [0, n // 2, n]
        moves = all(self._pairs[name][0].target in _MOVEMENT for name in unit)
        try:
            whole = {s.name: self._operand(s, moves) for s in sources}
            result = self.execute(unit, 1, whole)
            parts = []
            for start in starts:
                sliced = {s.name: self._slice(s, whole[s.name], start) for s in sources}
                parts.append(self.execute(unit, 0, sliced))
        except Exception as error:  # any failure of an operator on random operands
            reason = first_line(error) or type(error).__name__
            logger.debug("operator %s could not be tried: %s", self._pairs[unit[0]][0].target, reason)
            return f"could not be tried on random operands ({reason[:120]})"
        states: list[State] = []
        for name in unit:
            wholes, slices = _as_list(result[name]), [_as_list(part[name]) for part in parts]
            if any(len(each) != len(wholes) for each in slices):
                return "has as many results as there are samples"
            for i, large in enumerate(wholes):
                try:
                    states.append(find_rows(large, [each[i] for each in slices], starts, n))
                except MixedSamples as mixing:
                    return str(mixing)
        return states

    def _operand(self, source: fx.Node, moves: bool) -> Any:
        if source.op == "get_attr":
            return self.bodies[1][str(source.target)]
        if source.name in self._constants:
            return self._constants[source.name][1].clone()
        node = self._pairs[source.name][1]
        shape, dtype = shape_of(node), node.meta["val"].dtype
        # Lower precisions are tried in float32, as their rounding would hide small differences; operators that only
        # move elements in int16, a half or a quarter of the memory.
        if moves and (dtype.is_floating_point or dtype.is_complex):
            return torch.randint(0, 30000, shape, generator=self._generator, dtype=torch.int16)
        if dtype.is_floating_point and dtype is not torch.float64:
            dtype = torch.float32
        return made_up(shape, dtype, varied=self._generator)

    def _slice(self, source: fx.Node, value: Any, start: int) -> Any:
        if not isinstance(value, Tensor):
            return self.bodies[0][str(source.target)]
        if source.name in self._constants:
            return self._constants[source.name][0].clone()
        state = self._states[source.name]
        if not isinstance(state, Rows):
            return value.clone()
        return _take(value, state, start, self._small.num_samples).clone()

    def execute(self, unit: tuple[str, ...], which: int, operands: dict[str, Any]) -> dict[str, Any]:
        """Run the unit's operators of the small (0) or large (1) graph on real tensors."""
        values = dict(operands)
        with torch.no_grad():
            for name in unit:
                node = self._pairs[name][which]
                placed = on_device((node.args, node.kwargs), CPU, of_type=self._traced_on.type)
                args, kwargs = fx.map_arg(placed, lambda n: values[n.name])
                if isinstance(node.target, OpaqueCall):
                    values[name] = self._try_function(node, args)
                else:
                    values[name] = node.target(*args, **kwargs)
        return {name: values[name] for name in unit}

    def _try_function(self, node: fx.Node, arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return a custom function's results, and behind them the gradients of its operands that have samples.

        A backward may mix samples where the forward does not (a gradient divided by its norm).
        """
        sources: Any = node.args
        wanted = [isinstance(self._states[source.name], Rows) for source in sources]
        run: Any = node.target.run_with_gradients  # type: ignore[union-attr]
        try:
            results, gradients = run(arguments, wanted)
        except Exception:
            if self._traced_on.type == "cpu":
                raise
            with CheckedOnCpu(self._traced_on.type):  # kernels of its own for the device
                results, gradients = run([tensor.to(self._traced_on) for tensor in arguments], wanted)
        return tuple(tensor.to(CPU) for tensor in (*results, *gradients))


def tensors_of(node: fx.Node) -> list[Tensor]:
    """Return the (fake) tensors that an operator results in."""
    return [t for t in _as_list(node.meta.get("val")) if isinstance(t, Tensor)]


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of an operator's one tensor."""
    return tuple(node.meta["val"].shape)


def _take(value: Tensor, rows: Rows, start: int, count: int) -> Tensor:
    """Return samples ``start .. start + count`` of a tensor laid out as ``rows``."""
    # Axes of ``split``: those before, outer, samples, rows, those behind. A tensor [3 x 4 x 2, 5] of 4 samples along
    # axis 0 with outer 3 and 2 rows is [3, 4, 2, 5]; samples 1..2 of it are [3, 2, 2, 5], and flat again [12, 5].
    split: Tensor = value.unflatten(rows.axis, (rows.outer, -1, rows.rows))
    return split.narrow(rows.axis + 1, start, count).flatten(rows.axis, rows.axis + 2)


def are_equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two results are equal but for rounding."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    # relative to the largest value: sums over samples come in another order, and near zero that is all there is
    scale = float(a[torch.isfinite(a)].abs().max()) if torch.isfinite(a).any() else 1.0
    return torch.allclose(a, b, rtol=1e-3, atol=1e-4 * max(scale, 1e-6), equal_nan=True)


def find_rows(whole: Tensor, parts: list[Tensor], starts: list[int], n: int) -> State:
    """Return the layout under which the results on slices are slices of the result on all.

    Raises:
        MixedSamples: there is none.
    """
    # The samples are along the one axis that is twice as long for 2n samples as for n. Along it rows of a sample may
    # stand together (outer = 1, [samples x rows]), or samples may stand inside another count (outer = length, [length x
    # samples]); smaller outer first, as those can be cut by one slice. For n = 2 and 8 rows: (4 rows, outer 1),
    # (2, 2), (1, 4).
    shape = parts[0].shape
    if whole.shape == shape:
        if all(are_equal(whole, part) for part in parts):
            return Fixed()
        raise MixedSamples("reduces over the samples")
    axes = [i for i in range(whole.dim()) if whole.dim() == len(shape) and whole.shape[i] != shape[i]]
    if len(axes) != 1 or whole.shape[axes[0]] * n != shape[axes[0]] * 2 * n or shape[axes[0]] % n:
        raise MixedSamples("combines every sample with every other")
    axis, per_sample = axes[0], shape[axes[0]] // n
    for outer in (d for d in range(1, per_sample + 1) if per_sample % d == 0):
        rows = Rows(axis, per_sample // outer, outer)
        if all(are_equal(_take(whole, rows, s, n), part) for s, part in zip(starts, parts, strict=True)):
            return rows
    raise MixedSamples("mixes samples")
