"""The series-parallel decomposition, on graphs whose tree is known."""

import networkx as nx
import pytest

from gpp_plugin.plan.graphpipe.intervals import decompose
from tests.plan.graphs import branches, chain, diamond, encoder_decoder


def tree_of(graph) -> str:
    index = {block.name: i for i, block in enumerate(graph.blocks)}
    return str(decompose(nx.relabel_nodes(graph.dependencies(), index)))


@pytest.mark.parametrize(
    ("graph", "tree"),
    [
        (chain(4), "S(0 1 2 3)"),
        (diamond(), "S(0 P(1 2) 3)"),
        (branches(3, 2, None), "P(S(0 1) S(2 3) S(4 5))"),
        (branches(2, 2), "S(P(S(0 1) S(2 3)) 4)"),
        (encoder_decoder(3), "S(P(S(0 1 2 3) 4) 5 6 7 8)"),  # cross-attention to later layers is implied
    ],
)
def test_known_trees(graph, tree):
    assert tree_of(graph) == tree


def test_every_tree_orders_what_the_graph_orders():
    """On random graphs: blocks of a later series child never precede those of an earlier one."""
    import random

    rng = random.Random(0)
    for _ in range(100):
        num = rng.randint(2, 10)
        graph = nx.DiGraph()
        graph.add_nodes_from(range(num))
        graph.add_edges_from((a, b) for a in range(num) for b in range(a + 1, num) if rng.random() < 0.3)
        closure = nx.transitive_closure(graph)

        def check(component, closure=closure):
            assert sorted(b for child in component.children for b in child.blocks) == list(
                component.blocks
            ) or (not component.children)
            for i, first in enumerate(component.children):
                for second in component.children[i + 1 :]:
                    pairs = [(a, b) for a in first.blocks for b in second.blocks]
                    if component.kind == "series":
                        assert not any(closure.has_edge(b, a) for a, b in pairs)
                    else:
                        assert not any(closure.has_edge(b, a) or closure.has_edge(a, b) for a, b in pairs)
                check(first)

        check(decompose(graph))
