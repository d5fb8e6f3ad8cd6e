"""The critical path inside a branch: which stage is the master, and what moving its blocks leads to."""

from __future__ import annotations

from gpp_plugin.plan.auto import master_chain, refine_chains
from gpp_plugin.plan.batch_rules import batch_rules
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.make import StageDraft
from gpp_plugin.plan.refine.refine import Candidate, Refiner
from tests.plan.graphs import make_graph, make_profile, make_request


def _start(groups: list[list[str]]) -> tuple[Refiner, Candidate]:
    """Branches a (six blocks) and b (two) that join in z, every block as long as any other."""
    edges = [(f"a{i}", f"a{i + 1}") for i in range(5)] + [("a5", "z"), ("b0", "b1"), ("b1", "z")]
    graph = make_graph(edges, loss="z")
    request = make_request(graph, make_profile(graph), ranks=len(groups))
    costs = CostModel(request.graph, request.profile, request.cluster)
    refiner = Refiner(request, costs, batch_rules(request), budget=100_000)
    drafts = [StageDraft(blocks=tuple(group), degree=1, micro_batch_size=1) for group in groups]
    return refiner, refiner.from_drafts(drafts, 1)


def test_the_master_is_the_heaviest_stage_and_its_chain_ends_at_the_join() -> None:
    refiner, start = _start([["a0", "a1", "a2"], ["a3", "a4"], ["a5"], ["b0", "b1"], ["z"]])
    found = master_chain(refiner, start)
    assert found is not None
    chain, master = found
    assert [refiner.sets.blocks(mask) for mask in chain] == [("a0", "a1", "a2"), ("a3", "a4"), ("a5",)]
    assert master == 0


def test_steps_that_only_together_help_are_found_inside_a_branch() -> None:
    # 3 | 2 | 1: no single block moved makes the slowest stage quicker; 2 | 2 | 2 does.
    refiner, start = _start([["a0", "a1", "a2"], ["a3", "a4"], ["a5"], ["b0", "b1"], ["z"]])
    best = refine_chains(refiner, start)
    assert {draft.blocks for draft in best.drafts} == {
        ("a0", "a1"),
        ("a2", "a3"),
        ("a4", "a5"),
        ("b0", "b1"),
        ("z",),
    }
    assert best.score[1] < start.score[1]


def test_a_master_without_a_chain_is_left_alone() -> None:
    refiner, start = _start([["a0", "a1", "a2", "a3", "a4", "a5"], ["b0", "b1"], ["z"]])
    assert master_chain(refiner, start) is None
    assert refine_chains(refiner, start) == start
