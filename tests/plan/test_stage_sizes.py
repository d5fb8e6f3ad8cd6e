"""Micro-batch sizes by the names that a plan gives its stages."""

import pytest

from gpp_plugin.errors import PlanError
from gpp_plugin.plan.explicit.fixed_stages import names_a_stage, resize_stages
from gpp_plugin.plan.registry import make_plan
from tests.plan.graphs import chain, make_graph, make_profile, make_request


def request_of(graph, **options):
    return make_request(graph, make_profile(graph), num_ranks=3, mini_batch=12, num_stages=3, **options)


def test_which_keys_name_stages():
    graph = chain(6, "tower.layers.")
    assert not names_a_stage(graph, "tower")
    assert not names_a_stage(graph, "tower.layers.0")
    assert not names_a_stage(graph, "*")
    assert names_a_stage(graph, "tower.0")
    with pytest.raises(PlanError, match=r"no module or stage 'tovver' in the model; the nearest are tower"):
        names_a_stage(graph, "tovver")
    assert names_a_stage(graph, "tower.0-1") and names_a_stage(graph, "tower.2-5#2")
    with pytest.raises(PlanError, match=r"no module or stage 'tovver.0' in the model; the nearest are tower"):
        names_a_stage(graph, "tovver.0")
    with pytest.raises(PlanError, match=r"no module or stage 'tower.0-1\+heat' in the model"):
        names_a_stage(graph, "tower.0-1+heat")


def test_a_numbered_stage_takes_its_size():
    graph = chain(6)
    request = request_of(graph, micro_batch_sizes={"*": 2})
    plan = make_plan("graphpipe", request)
    assert [stage.name for stage in plan.stages] == ["layers.0-1", "layers.2-3", "layers.4-5"]
    resized = resize_stages(plan, request, {"layers.2-3": 4})
    assert [stage.micro_batch_size for stage in resized.stages] == [2, 4, 2]
    assert resized.stages[1].forward_us == 2 * plan.stages[1].forward_us
    assert [s.in_flight for s in resized.stages] != [s.in_flight for s in plan.stages]


def test_what_a_stage_cannot_take_is_refused():
    graph = make_graph([("a.0", "a.1"), ("a.1", "b.0"), ("b.0", "loss")], loss="loss", coupled=["loss"])
    request = request_of(graph, micro_batch_sizes={"a": 4, "b": 4}, loss_unit=4)
    plan = make_plan("graphpipe", request)
    listed = ", ".join(stage.name for stage in plan.stages)
    with pytest.raises(PlanError) as caught:
        resize_stages(plan, request, {"c.9": 4})
    assert (
        str(caught.value) == f"the plan has no stage 'c.9'; its stages are {listed} ('loss' means 'b+loss')"
    )
    with pytest.raises(PlanError, match="it mixes samples and takes 4 at a time"):
        resize_stages(plan, request, {"loss": 2})
