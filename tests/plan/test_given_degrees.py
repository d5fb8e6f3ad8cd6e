"""Plans with a given number of ranks a stage, whatever the planners that `auto` compares make of it."""

import random

from gpp_plugin.plan.registry import make_plan
from tests.plan.graphs import chain, make_profile, make_request


def test_no_rivals_plan_with_other_degrees_is_taken():
    # two ranks and a chain, where DAPPLE, which knows no given degree, puts everything on both
    for seed in range(4):
        draw = random.Random(seed)
        graph = chain(3)
        times = {block.name: draw.uniform(20, 200) for block in graph.blocks}
        request = make_request(
            graph,
            make_profile(graph, times),
            num_ranks=2,
            mini_batch=16,
            data_parallel=1,
            micro_batch_sizes={"*": 4},
        )
        plan = make_plan("auto", request)
        assert {stage.degree for stage in plan.stages} == {1}
