"""`auto` searches one micro-batch size alone where the search over all used up its budget, and only there."""

import pytest

from gpp_plugin.plan import auto
from gpp_plugin.plan.registry import make_plan
from tests.plan.graphs import branches, make_profile, make_request


@pytest.mark.parametrize(("budget", "is_searched"), [(300, True), (300_000, False)])
def test_one_size_is_searched_where_the_budget_was_used_up(monkeypatch, budget, is_searched):
    graph = branches(3, 4)
    times = {block.name: 40.0 + 17.0 * (i % 5) for i, block in enumerate(graph.blocks)}
    request = make_request(graph, make_profile(graph, times), num_ranks=4, mini_batch=32)
    sizes = []
    search = auto.search_stages

    def watched(asked, *args, **options):
        sizes.append(asked.micro_batch_sizes)
        return search(asked, *args, **options)

    monkeypatch.setattr(auto, "search_stages", watched)
    monkeypatch.setattr(auto, "BUDGET", budget)
    plan = make_plan("auto", request)
    assert plan.iteration_us > 0 and sizes[0] is None
    assert [size for size in sizes if size is not None] == (sizes[1:] if is_searched else [])
    assert (len(sizes) > 1) == is_searched
