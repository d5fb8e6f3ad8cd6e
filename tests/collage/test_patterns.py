"""Patterns, rules and the generator: what they match, what they refuse, and in which words."""

from __future__ import annotations

import random

import pytest

import gpp_plugin
from gpp_plugin.collage.op_placement import (
    BackendPatterns,
    add_backend,
    add_backend_pattern,
    add_backend_pattern_rule,
    find_candidates,
    forget,
    patterns_of,
)
from gpp_plugin.collage.patterns import (
    BasePatternRule,
    Operator,
    OperatorGraph,
    bits,
    check_path,
    generate_groups,
    is_op,
    match_pattern,
    wildcard,
)
from gpp_plugin.errors import ExtensionError
from gpp_plugin.plugins import BACKENDS, Backend


def op(key: str, name: str, *inputs: str, **attr) -> Operator:
    return Operator(key=key, name=name, inputs=inputs, attr=attr)


def residual() -> OperatorGraph:
    """x -> conv -> relu -> add(x) -> norm; the thesis' figure 2.4 with a tail."""
    return OperatorGraph(
        [
            op("c", "conv2d", "x", "w", stride=[1, 1]),
            op("r", "relu", "c"),
            op("a", "add", "r", "x"),
            op("n", "norm", "a"),
        ]
    )


def random_graph(seed: int, size: int) -> OperatorGraph:
    numbers = random.Random(seed)
    operators = []
    for i in range(size):
        read = numbers.sample(range(i), min(i, numbers.randint(0 if i % 3 == 0 else 1, 2)))
        operators.append(op(f"o{i}", numbers.choice("ab"), *(f"o{j}" for j in sorted(read)), "x"))
    return OperatorGraph(operators)


def test_a_pattern_is_of_names_attributes_and_wildcards() -> None:
    graph = residual()
    conv = is_op("conv2d")(wildcard(), wildcard()).has_attr({"stride": [1, 1]})
    whole = is_op("add")(is_op("relu")(conv), wildcard())
    assert graph.keys(match_pattern(whole, graph, "a")) == ("c", "r", "a")
    assert match_pattern(whole, graph, "n") is None
    assert match_pattern(conv.has_attr({"stride": [2, 2]}), graph, "c") is None
    assert match_pattern(conv.has_attr({"groups": 1}), graph, "c") is None
    assert match_pattern(is_op("relu")(wildcard(), wildcard()), graph, "r") is None
    assert str(whole) == "add(relu(conv2d[stride=[1, 1]](*, *)), *)"


def test_a_pattern_whose_inside_is_read_elsewhere_does_not_match() -> None:
    graph = OperatorGraph([op("c", "conv", "x"), op("r", "relu", "c"), op("a", "add", "r", "c")])
    assert match_pattern(is_op("relu")(is_op("conv")), graph, "r") is None
    conv = is_op("conv")  # one pattern used twice is one operator
    assert match_pattern(is_op("add")(is_op("relu")(conv), conv), graph, "a") == 0b111
    leaving = OperatorGraph([op("c", "conv", "x"), op("r", "relu", "c")], outputs=["c"])
    assert match_pattern(is_op("relu")(is_op("conv")), leaving, "r") is None


class Fuses(BasePatternRule):
    """The rule of listing 1: elementwise operators behind a convolution."""

    FUSABLE, ELEMENTWISE = 0, 1

    def op_rule(self, op) -> bool:
        return op.name != "conv2d" or op.attr["stride"] == [1, 1]

    def type_of(self, op) -> int:
        return {"conv2d": 0, "norm": 2}.get(op.name, 1)

    def fusion_rule(self, cur_type, src, sink) -> bool:
        return cur_type == self.FUSABLE and check_path(src, sink, lambda kind: kind == self.ELEMENTWISE)


def test_the_generator_grows_from_each_seed_to_post_dominators() -> None:
    graph = residual()
    found = [graph.keys(mask) for mask in generate_groups(Fuses(), graph, backend="mine")]
    assert found == [("c",), ("c", "r"), ("c", "r", "a"), ("r",), ("a",), ("n",)]


def test_everything_generated_is_convex_and_leaves_by_one_operator() -> None:
    class Everything(BasePatternRule):
        def fusion_rule(self, cur_type, src, sink) -> bool:
            return True

    for seed in range(30):
        graph = random_graph(seed, 9)
        for mask in generate_groups(Everything(), graph, backend="mine"):
            assert graph.is_convex(mask)
            inside = list(bits(mask))
            leaving = {
                i
                for i in inside
                if graph.outputs >> i & 1
                or any(read >> i & 1 and not mask >> j & 1 for j, read in enumerate(graph.reads))
            }
            assert leaving <= {inside[-1]}


def test_a_rule_that_fails_or_names_what_is_not_convex_is_one_line() -> None:
    graph = residual()

    class Fails(BasePatternRule):
        def op_rule(self, op) -> bool:
            return op.attr["dilation"] == 1

    class NotConvex(BasePatternRule):
        def groups(self, graph):
            return [["c", "a"]]

    class Unknown(BasePatternRule):
        def groups(self, graph):
            return [["c", "z"]]

    for rule, text in (
        (Fails(), r"rule Fails of backend 'mine' failed: KeyError: 'dilation'; mend the rule"),
        (NotConvex(), r"rule NotConvex of backend 'mine' names the group \['c', 'a'\], which is not convex"),
        (Unknown(), r"names operators \['z'\] that the graph does not have"),
    ):
        with pytest.raises(ExtensionError, match=text) as caught:
            generate_groups(rule, graph, backend="mine")
        assert "\n" not in str(caught.value)


def test_what_matches_nothing_is_named() -> None:
    own = BackendPatterns(
        backend="mine", patterns=[is_op("gelu")(wildcard()), is_op("relu")], rules=[Fuses()]
    )
    groups, unmatched = find_candidates(residual(), [own])
    assert unmatched == ["pattern gelu(*) of backend 'mine'"]
    assert len(groups) == len(set(groups)) == 6  # relu by itself is a pattern's and the rule's


def test_backends_patterns_and_rules_are_registered_by_name() -> None:
    class Mine(Backend):
        is_graph_library = False
        patterns = (is_op("relu"),)

        def build(self, code):
            raise NotImplementedError

    try:
        gpp_plugin.add_backend("mine", Mine())
        gpp_plugin.add_backend_pattern(backend="mine", pattern=is_op("conv2d")(wildcard()))
        gpp_plugin.add_backend_pattern_rule(backend="mine", pattern_rule=Fuses())
        known = patterns_of("mine")
        assert [str(pattern) for pattern in known.patterns] == ["relu", "conv2d(*)"]
        assert isinstance(known.rules[0], Fuses) and not known.runs_any
        assert "mine" in BACKENDS.names()
        with pytest.raises(ExtensionError, match="there is a backend 'mine' already"):
            add_backend("mine", Mine())
    finally:
        forget("mine")
    assert "mine" not in BACKENDS


def test_what_cannot_be_registered_is_refused() -> None:
    with pytest.raises(
        ExtensionError, match="without build and .*; derive a class from gpp_plugin.plugins.Backend"
    ):
        add_backend("mine", object())
    with pytest.raises(ExtensionError, match="there is a backend 'auto' already"):
        add_backend("auto", object())
    with pytest.raises(
        ExtensionError, match="no backend 'onnxruntim'; did you mean 'onnxruntime'.*add it first"
    ):
        add_backend_pattern("onnxruntim", is_op("relu"))
    with pytest.raises(
        ExtensionError, match=r"Wildcard is no pattern of an operator; begin with is_op\(name\)"
    ):
        add_backend_pattern("torch", wildcard())
    with pytest.raises(ExtensionError, match="type is no rule; give an instance"):
        add_backend_pattern_rule("torch", Fuses)
