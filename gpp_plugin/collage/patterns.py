"""Patterns of operators that a backend runs as one: trees of operator names, attributes and wildcards.

    conv = is_op("conv2d")(wildcard(), wildcard()).has_attr({"stride": [1, 1]})
    conv_add_relu = is_op("relu")(is_op("add")(conv, wildcard()))

A pattern is of the operator that makes its result; what a wildcard stands for is outside of the match.

Source: Collage (PACT 2022, arXiv 2111.00655; here by the thesis, section 2.3, listing 1)
Tests: tests/collage/test_patterns.py
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import networkx as nx

from gpp_plugin.errors import ExtensionError, first_line

# Operators of a forward as placements see them: names, attributes, who reads whom; no tensors.


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One call of an operator.

    Args:
        key: unique in its graph.
        name: what is called, without namespace and overload: ``linear`` for ``aten.linear.default``.
        inputs: what it reads, in the order of its arguments: keys of operators, or names of the graph's inputs.
        attr: its other arguments by name, such as ``stride``.
    """

    key: str
    name: str
    inputs: tuple[str, ...]
    attr: Mapping[str, Any] = field(default_factory=dict)


class OperatorGraph:
    """Operators in a topological order; sets of them are integers whose bit i stands for the i-th.

    Bits make "is it convex" three operations on integers, whatever the size of the graph.

    Args:
        operators: each behind those that it reads.
        outputs: keys of operators whose results leave the graph; those that no operator reads leave it anyway.
    """

    def __init__(self, operators: Sequence[Operator], outputs: Iterable[str] = ()) -> None:
        self.operators = tuple(operators)
        self.position = {operator.key: i for i, operator in enumerate(self.operators)}
        self.everything = (1 << len(self.operators)) - 1
        # conv, relu(conv), add(relu, conv) as bits 0, 1, 2: reads is [0, 0b001, 0b011], before the same here, and
        # after is [0b110, 0b100, 0]; add is what leaves.
        self.reads: list[int] = []
        """By position: the operators whose results it reads."""
        self.before: list[int] = []
        """By position: all operators that it depends on, through others as well."""
        for operator in self.operators:
            # names that are no operators are inputs and weights of the whole, there before anything runs
            read = self.mask(key for key in operator.inputs if key in self.position)
            self.reads.append(read)
            self.before.append(functools.reduce(int.__or__, (self.before[i] for i in bits(read)), read))
        self.after = [0] * len(self.operators)
        """By position: all operators that depend on it."""
        for i in reversed(range(len(self.operators))):
            for j in bits(self.reads[i]):
                self.after[j] |= self.after[i] | 1 << i
        leaving = {key for key in outputs if key in self.position}
        self.outputs = self.mask(leaving) | sum(1 << i for i, mask in enumerate(self.after) if not mask)

    def mask(self, keys: Iterable[str]) -> int:
        """Return the set of these operators."""
        return functools.reduce(int.__or__, (1 << self.position[key] for key in keys), 0)

    def keys(self, mask: int) -> tuple[str, ...]:
        """Return the operators of a set, in order."""
        return tuple(self.operators[i].key for i in bits(mask))

    def is_convex(self, mask: int) -> bool:
        """Return whether no path leaves the set and comes back: only then can it run as one."""
        # a -> b -> c: {a, c} is not, since b reads from it and it reads from b
        predecessors = functools.reduce(int.__or__, (self.after[i] for i in bits(mask)), 0)
        successors = functools.reduce(int.__or__, (self.before[i] for i in bits(mask)), 0)
        return not predecessors & successors & ~mask

    def needs(self, mask: int) -> int:
        """Return the operators outside of a set that it reads from."""
        return functools.reduce(int.__or__, (self.reads[i] for i in bits(mask)), 0) & ~mask

    def between(self, source: int, sink: int) -> int:
        """Return all operators on paths from one position to another, both among them."""
        return (self.after[source] | 1 << source) & (self.before[sink] | 1 << sink)

    @functools.cached_property
    def post_dominators(self) -> tuple[int | None, ...]:
        """Return by position the next operator that everything made of its result passes; None: the end."""
        # dominators of the reversed graph, from one end behind all results that leave
        end = len(self.operators)
        graph = nx.DiGraph()
        graph.add_nodes_from(range(end + 1))
        graph.add_edges_from((end, i) for i in bits(self.outputs))
        graph.add_edges_from((i, j) for i, read in enumerate(self.reads) for j in bits(read))
        found = nx.immediate_dominators(graph, end)
        return tuple(None if found[i] == end else found[i] for i in range(end))


def bits(mask: int) -> Iterable[int]:
    """Return the positions of a set's members, in order.

    >>> list(bits(0b10110))
    [1, 2, 4]
    """
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def run_order(graph: OperatorGraph, groups: Sequence[int]) -> list[int]:
    """Return the order in which disjoint sets can run, by their index; those that wait for each other are left out."""
    order: list[int] = []
    # Two convex groups can wait for each other: with a -> c and b -> d, {a, d} needs b and {b, c} needs a. So
    # being convex is not enough, and an order is looked for.
    done = 0
    waiting = dict(enumerate(groups))
    while True:
        ready = [i for i, group in waiting.items() if not graph.needs(group) & ~done]
        if not ready:
            return order
        # the first in the graph's own order: what was made last is read soonest
        chosen = min(ready, key=lambda i: waiting[i] & -waiting[i])
        done |= waiting.pop(chosen)
        order.append(chosen)


# Rules of what a backend can fuse, and the generator that grows every set of operators that a rule allows.
#
# A rule says of one operator whether the backend runs it (`op_rule`), and of a set whether it runs it as one
# (`fusion_rule`). From each operator that it runs, the seed, the generator continues to the seed's post-dominator, to
# that one's, and so on: all that lies between belongs together, since whatever is made of the seed's result passes
# through.
#
#     conv -> relu -> add -> out       seed conv: {conv}, {conv, relu}, {conv, relu, add}
#          \_________/


@dataclass(frozen=True, slots=True, eq=False)
class RuleOperator:
    """An operator as a rule sees it.

    Args:
        graph, position: where it is.
        types: of the graph's operators by position, as of `BasePatternRule.type_of`.
    """

    graph: OperatorGraph
    position: int
    types: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Return what is called: ``linear``."""
        return self.graph.operators[self.position].name

    @property
    def key(self) -> str:
        """Return its name in the graph."""
        return self.graph.operators[self.position].key

    @property
    def attr(self) -> Mapping[str, Any]:
        """Return its arguments that are no tensors."""
        return self.graph.operators[self.position].attr


class BasePatternRule:
    """A rule to derive from; by itself it runs single operators, of any name.

    Types of operators are small numbers of the rule's own; a group has the least of its operators' (one convolution
    among elementwise operators makes it a convolution's), unless `type_of_group` says otherwise.
    """

    def op_rule(self, op: RuleOperator) -> bool:
        """Return whether the backend runs this operator."""
        return True

    def type_of(self, op: RuleOperator) -> int:
        """Return the type of an operator."""
        return 0

    def type_of_group(self, types: Iterable[int]) -> int:
        """Return the type of a group of operators of these types."""
        return min(types)

    def fusion_rule(self, cur_type: int, src: RuleOperator, sink: RuleOperator) -> bool:
        """Return whether all that lies between ``src`` and ``sink``, a post-dominator of it, runs as one.

        Args:
            cur_type: of the group as it was before ``sink``.
        """
        return False

    def groups(self, graph: OperatorGraph) -> Iterable[Iterable[str]]:
        """Return further groups, as keys of operators, that the backend runs as one, whatever the other rules say."""
        return ()


def check_path(src: RuleOperator, sink: RuleOperator, fchecker: Callable[[int], bool]) -> bool:
    """Return whether every operator behind ``src`` up to ``sink`` has a type that is accepted."""
    inside = src.graph.between(src.position, sink.position) & ~(1 << src.position)
    return all(fchecker(src.types[i]) for i in bits(inside))


def generate_groups(rule: BasePatternRule, graph: OperatorGraph, *, backend: str) -> list[int]:
    """Return the sets of operators that a rule allows, each once; all are convex.

    Raises:
        ExtensionError: the rule fails, or names a group that is not convex.
    """
    name = f"rule {type(rule).__name__} of backend {backend!r}"
    try:
        found = list(dict.fromkeys((*_grown(rule, graph), *_named(rule, graph, name))))
    except ExtensionError:
        raise
    except Exception as error:  # whatever a foreign rule does
        raise ExtensionError(
            f"{name} failed: {type(error).__name__}: {first_line(error)}; mend the rule"
        ) from error
    return found


def _grown(rule: BasePatternRule, graph: OperatorGraph) -> Iterator[int]:
    # Types are read first, since rules read those of other operators (`check_path`); an operator that is
    # tested for its own type sees none yet.
    plain = [RuleOperator(graph, i) for i in range(len(graph.operators))]
    types = tuple(rule.type_of(op) for op in plain)
    operators = [RuleOperator(graph, i, types) for i in range(len(graph.operators))]
    runs = graph.mask(op.key for op in operators if rule.op_rule(op))
    for seed in bits(runs):
        # conv -> relu -> add, with relu's other reader between: the post-dominators of conv are relu's and the other
        # one's join, then what follows it; all between the seed and such an operator is taken at once.
        group = 1 << seed
        yield group
        sink = graph.post_dominators[seed]
        while sink is not None:
            grown = graph.between(seed, sink)
            # one that it cannot run, or that leaves the stage on the way: nothing larger can be allowed either
            if grown & ~runs or grown & graph.outputs & ~(1 << sink):
                break
            kind = rule.type_of_group(types[i] for i in bits(group))
            if not rule.fusion_rule(kind, operators[seed], operators[sink]):
                break
            group = grown
            yield group
            sink = graph.post_dominators[sink]


def _named(rule: BasePatternRule, graph: OperatorGraph, name: str) -> Iterator[int]:
    for keys in rule.groups(graph):
        own = list(keys)
        unknown = [key for key in own if key not in graph.position]
        if unknown or not own:
            raise ExtensionError(
                f"{name} names operators {unknown} that the graph does not have; mend the rule"
            )
        group = graph.mask(own)
        if not graph.is_convex(group):
            raise ExtensionError(
                f"{name} names the group {own}, which is not convex: what it makes is read outside, and read back; "
                "name those operators too"
            )
        yield group


@dataclass(frozen=True, slots=True, eq=False)
class Wildcard:
    """Stands for any tensor: an operator's result, an input or a parameter."""

    def __str__(self) -> str:
        return "*"


@dataclass(frozen=True, slots=True, eq=False)
class OperatorPattern:
    """An operator of some name, whose first tensors match patterns.

    Args:
        name: as of `Operator.name`.
        inputs: of its first tensors; those beyond may be anything. None: all may.
        attr: what its attributes must be.
    """

    name: str
    inputs: tuple[Pattern, ...] | None = None
    attr: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, *inputs: Pattern) -> OperatorPattern:
        """Return the pattern with patterns of what the operator reads."""
        return dataclasses.replace(self, inputs=inputs)

    def has_attr(self, attributes: Mapping[str, Any]) -> OperatorPattern:
        """Return the pattern with attributes that the operator must have."""
        return dataclasses.replace(self, attr={**self.attr, **attributes})

    def __str__(self) -> str:
        inputs = "" if self.inputs is None else f"({', '.join(map(str, self.inputs))})"
        attr = "".join(f"[{name}={value}]" for name, value in self.attr.items())
        return f"{self.name}{attr}{inputs}"


Pattern = OperatorPattern | Wildcard


def is_op(name: str) -> OperatorPattern:
    """Return the pattern of an operator of that name, whatever it reads.

    >>> str(is_op("relu")(is_op("conv2d").has_attr({"groups": 1})))
    'relu(conv2d[groups=1])'
    """
    return OperatorPattern(name)


def wildcard() -> Wildcard:
    """Return the pattern of any tensor."""
    return Wildcard()


def match_pattern(pattern: OperatorPattern, graph: OperatorGraph, key: str) -> int | None:
    """Return the set of operators that match a pattern whose result the operator ``key`` makes; None: they do not.

    What it makes on the way must not be read elsewhere, and the set must be convex: else it could not run as one.
    """
    found: dict[int, str] = {}  # id of a pattern -> what it stands for: one used twice is the same operator
    if not _matches(pattern, graph, key, found):
        return None
    # What the pattern's inside makes is gone when it runs as one: no other operator may read it, nor the graph's
    # caller.
    mask = graph.mask(set(found.values()))
    inner = mask & ~graph.mask([key])
    if inner & graph.outputs or not graph.is_convex(mask):
        return None
    for i, read in enumerate(graph.reads):
        if read & inner and not mask >> i & 1:
            return None
    return mask


def _matches(pattern: Pattern, graph: OperatorGraph, key: str, found: dict[int, str]) -> bool:
    if isinstance(pattern, Wildcard):
        return True
    if id(pattern) in found:  # add(relu(conv), conv) with one conv: both places are the same operator
        return found[id(pattern)] == key
    if key not in graph.position:
        return False
    operator = graph.operators[graph.position[key]]
    if operator.name != pattern.name or any(
        name not in operator.attr or operator.attr[name] != value for name, value in pattern.attr.items()
    ):
        return False
    found[id(pattern)] = key
    inputs = pattern.inputs or ()
    return len(inputs) <= len(operator.inputs) and all(
        _matches(inner, graph, read, found) for inner, read in zip(inputs, operator.inputs, strict=False)
    )
