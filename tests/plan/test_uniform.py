"""Megatron's partition and the requests that no planner can meet."""

import dataclasses

import pytest

from gpp_plugin.errors import PlanError, PlanInfeasible
from gpp_plugin.plan.make import split_by_layers
from gpp_plugin.plan.registry import make_plan
from tests.plan.graphs import chain, make_cluster, make_profile, make_request


def test_layers_are_divided_evenly():
    order = ["embed", *(f"h.{i}.{part}" for i in range(4) for part in ("attn", "mlp")), "ln_f", "head"]
    assert split_by_layers(order, 2) == [
        ["embed", "h.0.attn", "h.0.mlp", "h.1.attn", "h.1.mlp"],
        ["h.2.attn", "h.2.mlp", "h.3.attn", "h.3.mlp", "ln_f", "head"],
    ]


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_uniform_gives_each_stage_the_same_degree(stages):
    plan = make_plan("uniform", make_request(chain(8), ranks=4, num_stages=stages))
    assert [len(s.blocks) for s in plan.stages] == [8 // stages] * stages
    assert {s.degree for s in plan.stages} == {4 // stages}
    assert plan.depth == stages


def test_what_it_may_hold_is_weighed_before_a_size_is_chosen():
    """Two samples at a time are the quickest with the micro-batches of plain 1F1B; one is, with more in flight."""
    cluster = make_cluster(4, latency=300.0)
    request = make_request(chain(8), ranks=4, cluster=cluster, mini_batch=16, data_parallel=1)
    plan = make_plan("uniform", request)
    each = [
        make_plan("uniform", dataclasses.replace(request, micro_batch_sizes={"*": size})).iteration_us
        for size in (1, 2, 4, 8)
    ]
    assert plan.iteration_us == min(each) == each[0] and plan.stages[0].in_flight > 4


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"loss_unit": 3}, PlanError, "does not divide the mini-batch of 16"),
        ({"micro_batch_sizes": {"layer": 2}}, PlanError, "no module 'layer'.*layers"),
        (
            {"ranks": 3, "num_stages": 1},
            PlanInfeasible,
            "3 ranks in 1 stages.*2 or 4 ranks (can be shared out|would work)",
        ),
    ],
)
@pytest.mark.parametrize("planner", ["uniform", "graphpipe", "auto"])
def test_impossible_requests_get_one_line(planner, changes, error, message):
    with pytest.raises(error, match=message) as caught:
        make_plan(planner, make_request(chain(8), **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("granularity", "advice"),
    [
        ("layer", 'write stages 8, or granularity "sub_layer", or granularity "node"'),
        ("sub_layer", 'write stages 8, or granularity "node"'),
        ("node", "write stages 8"),
    ],
)
def test_blocks_are_advised_that_are_finer_than_those_there_are(granularity, advice):
    request = make_request(chain(8), ranks=16, num_stages=9, granularity=granularity)
    with pytest.raises(PlanInfeasible) as caught:
        make_plan("uniform", request)
    assert str(caught.value).endswith(f"9 is more than the 8 blocks of the model; {advice}")


def test_a_model_that_fits_in_no_way_is_told_by_its_bytes_where_degrees_are_shared_out():
    graph = chain(3)
    profile = make_profile(graph, {"layers.0": 10.0, "layers.1": 20.0, "layers.2": 45.0}, parameter=700)
    with pytest.raises(
        PlanInfeasible, match=r"no plan fits: stage .* needs \d+ bytes and rank \d may use 900"
    ):
        make_plan("uniform", make_request(graph, profile, ranks=4, memory_limit_bytes=900))
