"""Models of very many blocks: runs of blocks, then single blocks around the cuts."""

import dataclasses

import networkx as nx
import pytest

from gpp_plugin.plan.graphpipe import graphpipe
from gpp_plugin.plan.graphpipe.graphpipe import around_cuts, in_runs, most_items, path_items
from gpp_plugin.plan.graphpipe.intervals import Component, decompose
from gpp_plugin.plan.registry import make_plan
from tests.plan.graphs import branches, chain, encoder_decoder, make_profile, make_request


def sizes(component: Component) -> list[int]:
    return [len(child.blocks) for child in component.children]


def path(num: int) -> Component:
    return decompose(nx.path_graph(num, create_using=nx.DiGraph))


def test_runs_are_of_equal_weight() -> None:
    assert sizes(in_runs(path(12), [1.0] * 12, most=4)) == [3, 3, 3, 3]
    assert sizes(in_runs(path(6), [5.0, 1.0, 1.0, 1.0, 1.0, 1.0], most=2)) == [1, 5]
    assert in_runs(path(12), [1.0] * 12, most=12) == path(12)


def test_the_drawn_example() -> None:
    stage_of = {block: int(block > 5) for block in range(12)}
    found = around_cuts(path(12), stage_of, [0] * 12, most=6)  # two places on both sides
    assert [child.blocks for child in found.children] == [
        (0, 1, 2, 3),
        (4,),
        (5,),
        (6,),
        (7,),
        (8, 9, 10, 11),
    ]


def test_branches_that_are_alike_are_cut_alike() -> None:
    graph = nx.DiGraph([*nx.utils.pairwise(range(8)), *nx.utils.pairwise(range(8, 16)), (7, 16), (15, 16)])
    stage_of = {block: int(block > 3) for block in range(17)}
    root = decompose(graph)
    found = around_cuts(root, stage_of, [0] * 16 + [1], most=6)
    parallel = next(child for child in found.children if child.kind == "parallel")
    assert len({tuple(sizes(branch)) for branch in parallel.children}) == 1
    assert most_items(found) < most_items(root) and path_items(root) == 9
    assert sorted(block for child in found.children for block in child.blocks) == list(range(17))


@pytest.mark.parametrize("graph", [chain(40), branches(2, 20)], ids=["chain", "two branches"])
def test_plans_of_runs_are_nearly_those_of_blocks(graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same model in twelve items a series at most: its plan is as quick but for a hundredth, and says so."""
    times = {block.name: 1.0 + i % 3 for i, block in enumerate(graph.blocks)}
    request = make_request(graph, make_profile(graph, times), ranks=4, mini_batch=16, loss_unit=1)
    request = dataclasses.replace(request, micro_batch_sizes={"*": 1}, data_parallel=None)
    exact = make_plan("graphpipe", request)
    monkeypatch.setattr(graphpipe, "MOST_ITEMS", 12)
    monkeypatch.setattr(graphpipe, "MOST_AROUND", 18)
    found = make_plan("graphpipe", request)
    assert not any("runs of blocks" in note for note in exact.notes)
    assert any(f"cuts at each of {len(graph.blocks)} blocks" in note for note in found.notes)
    assert found.iteration_us <= 1.01 * exact.iteration_us


def test_what_other_edges_imply_is_left_out_of_the_tree():
    graph = encoder_decoder(3)  # cross-attention to all but the first layer of the decoder
    index = {block.name: i for i, block in enumerate(graph.blocks)}
    tree = decompose(nx.relabel_nodes(graph.dependencies(), index))
    assert str(tree) == "S(P(S(0 1 2 3) 4) 5 6 7 8)"


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
