"""The cases with known answers that other modules do not hold: branch grouping, more in flight than asked for."""

import functools
import random

from gpp_benchmarks._paper import paper_request
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.make import StageDraft, build_plan
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.schedule.orders.in_flight import plan_in_flight
from gpp_plugin.simulate.predict import simulate_plan
from tests.plan.graphs import chain, make_profile, make_request


def first_and_rest_us(request, costs, size):
    """The paper's Algorithm 1 with a parallel part cut into its first branch and the rest, taken literally.

    The smallest bottleneck a sample: a stage of any part, or the first branch (a chain of stages) beside the
    rest, with the ranks shared out; the head is a stage of its own, or all is one stage.
    """
    names = [block.name for block in request.graph.blocks]
    branches = [[i for i, name in enumerate(names) if name.startswith(f"branch{b}.")] for b in range(7)]
    degrees = [d for d in range(1, request.num_ranks + 1) if size % d == 0]

    def stage(rows, degree):
        if degree not in degrees:
            return float("inf")
        return sum(costs.stage_times(rows, size // degree)) / size

    @functools.cache
    def alone(branch, start, ranks):
        rows = branches[branch]
        cuts = [
            max(stage(rows[start:stop], d), alone(branch, stop, ranks - d))
            for stop in range(start + 1, len(rows))
            for d in range(1, ranks)
        ]
        return min([stage(rows[start:], ranks), *cuts])

    @functools.cache
    def together(first, ranks):
        whole = stage([row for rows in branches[first:] for row in rows], ranks)
        if first == len(branches) - 1:
            return min(whole, alone(first, 0, ranks))
        return min(
            [whole, *(max(alone(first, 0, d), together(first + 1, ranks - d)) for d in range(1, ranks))]
        )

    head, every = [names.index("head")], list(range(len(names)))
    ends = [max(together(0, request.num_ranks - d), stage(head, d)) for d in range(1, request.num_ranks)]
    return min([stage(every, request.num_ranks), *ends])


def test_candle_uno_groups_branches_instead_of_first_and_rest():
    """Without data parallelism at 4 devices: two branches a stage and a little, against five and more."""
    request = paper_request("candle_uno", 4, micro_batch_size=1)
    costs = CostModel(request.graph, request.profile, request.cluster)
    plan = make_plan("graphpipe", request)
    found = max((s.forward_us + s.backward_us) / s.micro_batch_size for s in plan.stages)
    assert found / first_and_rest_us(request, costs, 1) <= 0.71


def test_more_in_flight_than_asked_for_never_makes_stages_wait_for_each_other() -> None:
    draw, lifted = random.Random(0), 0
    for _ in range(200):
        num = draw.randint(2, 6)
        sizes = [draw.choice((1, 2, 3, 4, 6, 12)) for _ in range(num)]
        extra = sorted((draw.randint(0, num) for _ in range(num)), reverse=True)
        request = make_request(chain(num), make_profile(chain(num)), ranks=num, mini_batch=24)
        costs = CostModel(request.graph, request.profile, request.cluster)
        drafts = [
            StageDraft(blocks=(block.name,), degree=1, micro_batch_size=size, extra_in_flight=more)
            for block, size, more in zip(request.graph.blocks, sizes, extra, strict=True)
        ]
        plan = build_plan(request, drafts, planner="", costs=costs)
        bare = plan_in_flight(plan)
        lifted += any(
            stage.in_flight > min(count + more, 24 // stage.micro_batch_size)
            for stage, count, more in zip(plan.stages, bare, extra, strict=True)
        )
        simulate_plan(plan, cluster=request.cluster)  # raises where they do
    assert lifted > 3
