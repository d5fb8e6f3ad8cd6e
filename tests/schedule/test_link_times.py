"""Orders that know what messages take: shorter where links are slow, the same where nothing is said."""

import dataclasses
import random

import pytest

from gpp_plugin.ir.cluster import Link
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.plan.make import with_link_times
from gpp_plugin.schedule.build import build_schedules
from gpp_plugin.schedule.lower import lower_schedules
from gpp_plugin.simulate.predict import predict_iteration_us
from tests.schedule.plans import cluster_of, on_ranks, simple_plan

SLOW = dataclasses.replace(
    cluster_of(8),
    links=(
        Link(name="node", span=2, bytes_per_s=1e9, latency_us=5.0),
        Link(name="net", span=8, bytes_per_s=1e8, latency_us=20.0),
    ),
)


def pipeline(
    ranks, edges, times, *, count: int, schedule: str, sample_bytes: float, more: int = 0
) -> PipelinePlan:
    """Return stages of one sample a micro-batch on these ranks, with ``more`` micro-batches than Table 2 in flight."""
    plan = simple_plan(
        [1] * len(times),
        sorted(edges),
        mini_batch=count,
        schedule=schedule,
        forward_us=times,
        backward_us=[2 * us for us in times],
        num_bytes=sample_bytes,
    )
    counts = [min(stage.in_flight + more, count) for stage in plan.stages]
    return on_ranks(plan.with_each(in_flight=counts), *ranks)


def line(count):
    return [(i, i + 1) for i in range(count - 1)]


CASES = {
    "zero bubble, 4 ranks": pipeline(
        range(4), line(4), [100.0] * 4, count=8, schedule="zero_bubble", sample_bytes=6000.0, more=2
    ),
    "zero bubble, two branches": pipeline(
        range(5), [(0, 1), (1, 4), (2, 3), (3, 4)], [100.0, 80.0, 60.0, 120.0, 50.0],
        count=8, schedule="zero_bubble", sample_bytes=6000.0, more=2,
    ),
    "interleaved, 4 ranks": pipeline(
        [0, 1, 2, 3] * 2, line(8), [50.0] * 8, count=8, schedule="1f1b", sample_bytes=4000.0, more=2
    ),
    "uneven on 3 ranks": pipeline(
        [0, 1, 2, 0, 1], line(5), [90.0, 40.0, 100.0, 30.0, 60.0], count=6, schedule="1f1b", sample_bytes=5000.0, more=1
    ),
}  # fmt: skip


def test_orders_with_the_links_times_run_take_no_longer_and_hide_slow_links_better():
    gains = {}
    for case, plan in CASES.items():
        linked = with_link_times(plan, SLOW)
        assert any(edge.message_us > 0 for edge in linked.edges)
        lower_schedules(linked, build_schedules(linked))  # which proves the programs
        unaware, aware = (predict_iteration_us(each, cluster=SLOW) for each in (plan, linked))
        assert aware <= unaware * 1.002, f"{case}: the simulator decides where they do"
        gains[case] = unaware / aware - 1
    assert max(gains.values()) > 0.01, gains


@pytest.mark.parametrize("seed", range(12))
def test_random_orders_with_links_are_whole_and_within_their_counts(seed):
    draw = random.Random(seed)
    count = draw.randint(3, 6)
    ranks = [draw.randrange(3) for _ in range(count)]
    ranks[:3] = [0, 1, 2]
    edges = sorted({(draw.randrange(b), b) for b in range(1, count)} | {(count - 2, count - 1)})
    plan = pipeline(
        ranks,
        edges,
        [draw.uniform(20, 150) for _ in range(count)],
        count=draw.choice([4, 6]),
        schedule=draw.choice(["1f1b", "zero_bubble"]),
        sample_bytes=draw.uniform(0, 9000),
        more=draw.randint(0, 2),
    )
    linked = with_link_times(plan, SLOW)
    schedules = build_schedules(linked)
    for stage, schedule in zip(linked.stages, schedules, strict=True):
        assert schedule.num_in_flight <= stage.in_flight
    lower_schedules(linked, schedules)
