"""kFkB through the planners: k is tried where the request allows it, and taken where it helps."""

from __future__ import annotations

import pytest

from gpp_plugin.plan.registry import make_plan
from tests.plan.graphs import clip, make_cluster, make_profile, make_request


def _plan(planner: str, *, max_k: int, latency: float):
    graph = clip()
    cluster = make_cluster(4, latency=latency)
    request = make_request(graph, make_profile(graph), max_k=max_k, num_stages=4, cluster=cluster)
    return make_plan(planner, request)


@pytest.mark.parametrize("planner", ["graphpipe", "auto"])
@pytest.mark.parametrize("latency", [0.0, 50.0, 400.0])
def test_a_larger_k_never_makes_the_step_longer(planner: str, latency: float) -> None:
    steps = [_plan(planner, max_k=max_k, latency=latency).iteration_us for max_k in (1, 2, 4)]
    assert steps == sorted(steps, reverse=True)


def test_k_hides_slow_links_and_stays_within_what_is_allowed() -> None:
    plain = _plan("auto", max_k=1, latency=400.0)
    assert {stage.k for stage in plain.stages} == {1}
    wider = _plan("auto", max_k=4, latency=400.0)
    assert 1 < max(stage.k for stage in wider.stages) <= 4
    assert wider.iteration_us < plain.iteration_us
