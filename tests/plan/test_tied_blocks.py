"""Blocks that share a parameter are planned as one in mode async: which, at what cost, and what is refused."""

import dataclasses

import pytest

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.profile import InputCost, TiedCost
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.plan.tied_blocks import join_tied_blocks, joined_request
from tests.plan.graphs import make_graph, make_profile, make_request

T5 = [("e.words", "e.0"), ("e.0", "e.1"), ("d.words", "d.0"), ("e.1", "d.0"), ("d.0", "d.1"), ("d.1", "head")]
LLAVA = [("v.0", "v.1"), ("words", "t.0"), ("v.1", "t.0"), ("t.0", "t.1"), ("t.1", "head")]


def request_of(edges, tied, *, stages=None, ranks=4, gradient=500, **changes):
    """Return an asynchronous request: blocks of 1,000 bytes of parameters, half of those the tied ones."""
    graph = dataclasses.replace(make_graph(edges, loss="head"), tied={"w": tied})
    profile = make_profile(graph, saved=100.0, parameter=1_000)
    tie = TiedCost(blocks=tied, parameter_bytes=500, gradient_bytes=gradient, optimizer_bytes=0)
    batch = InputCost(blocks=(edges[0][0], "head"), bytes=64, is_shared_out=True)
    profile = dataclasses.replace(profile, tied=(tie,), inputs=(batch,))
    values = {"mode": "async", "mini_batch": 16, "num_stages": stages, "micro_batch_sizes": {"*": 4}}
    return make_request(graph, profile, ranks=ranks, **{**values, **changes})


def test_blocks_between_those_that_share_join_them():
    words = join_tied_blocks(request_of(T5, ("e.words", "d.words")).graph)
    assert words.members["e.words"] == ("e.words", "d.words") and len(words.members) == 6
    text = join_tied_blocks(request_of(LLAVA, ("words", "head")).graph)
    assert text.members == {"v.0": ("v.0",), "v.1": ("v.1",), "words": ("words", "t.0", "t.1", "head")}
    assert len(join_tied_blocks(request_of(T5, ("e.words", "head")).graph).members) == 2
    assert len(join_tied_blocks(request_of(T5, ("e.words", "head")).graph, trained=()).members) == 7


def test_joined_blocks_cost_what_their_blocks_do_and_hold_the_parameter_once():
    request = request_of(LLAVA, ("words", "head"))
    joint, _ = joined_request(request)
    cost = joint.profile.by_block()["words"]
    assert (cost.parameter_bytes, cost.gradient_bytes) == (3_500, 3_500)
    assert (cost.saved_bytes_per_sample, cost.forward_us_for(2)) == (400.0, 800.0)
    assert [block.name for block in joint.graph.blocks] == ["v.0", "v.1", "words"]
    assert [(edge.src, edge.dst) for edge in joint.graph.edges] == [("v.0", "v.1"), ("v.1", "words")]
    assert joint.graph.tied == {} and joint.profile.tied == ()
    assert joint.profile.inputs[0].blocks == ("v.0", "words")


@pytest.mark.parametrize("planner", ["uniform", "graphpipe", "auto"])
def test_planners_keep_a_shared_parameter_in_one_stage(planner):
    for edges, tied, stages in ((T5, ("e.words", "d.words"), 4), (LLAVA, ("words", "head"), 2)):
        request = request_of(edges, tied, stages=stages)
        plan = make_plan(planner, request)
        assert len({i for i, stage in enumerate(plan.stages) if not set(tied).isdisjoint(stage.blocks)}) == 1
        assert {block for stage in plan.stages for block in stage.blocks} == {
            b.name for b in request.graph.blocks
        }
        assert "w must be in mode async" in plan.notes[-1]
        separate = make_plan(planner, request_of(edges, tied, stages=stages, mode="sync"))
        assert "mode async" not in " ".join(separate.notes)


def test_a_chain_tied_at_its_ends_is_one_stage():
    chain = [("words", "t.0"), ("t.0", "t.1"), ("t.1", "head")]
    said = (
        "parameter 'w' .*'words' to 'head', 4 of 4 blocks with those between, which leaves 1 for the 2 requested "
        "stages; untie it .*tie_word_embeddings=False"
    )
    with pytest.raises(PlanError, match=said):
        make_plan("auto", request_of(chain, ("words", "head"), stages=2))
    assert len(make_plan("auto", request_of(chain, ("words", "head"))).stages) == 1
    # a parameter that is not trained may be anywhere
    assert (
        len(make_plan("auto", request_of(chain, ("words", "head"), stages=2, gradient=0, ranks=2)).stages)
        == 2
    )
