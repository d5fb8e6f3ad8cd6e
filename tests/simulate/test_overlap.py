"""The share of what travels that is hidden behind computing: literal timelines, and plans that swap."""

from __future__ import annotations

from gpp_plugin.ir.cluster import Cluster
from gpp_plugin.ir.plan import MemoryPlan, PipelinePlan, SwappedTensor
from gpp_plugin.simulate.predict import simulate_plan
from gpp_plugin.simulate.timeline_metrics import (
    COPIES_BACK,
    COPIES_OUT,
    Travel,
    overlap_of,
    swap_copies,
    timeline_overlap,
)
from tests.schedule.plans import chain_plan, cluster_of, with_all


def cluster(num_devices: int, *, host_us: float, link_us: float = 0.1) -> Cluster:
    """Return devices whose links take so long for a megabyte: to the host, and to each other."""
    return cluster_of(num_devices, bytes_per_s=1e12 / link_us, host_bytes_per_s=1e12 / host_us)


def swapping(plan: PipelinePlan, *megabytes: float) -> PipelinePlan:
    """Return the plan with stages that swap tensors of such sizes, in the order in which forwards keep them."""
    swapped = tuple(
        SwappedTensor(name=f"t{place}", bytes=round(size * 1e6), free_us=float(-place))
        for place, size in enumerate(megabytes)
    )
    memory = MemoryPlan(swapped=swapped, working_bytes=round(2e6 * max(megabytes)))
    return with_all(plan, memory=memory)


def test_what_is_hidden_is_what_the_rank_computes_beside() -> None:
    travels = [
        Travel(kind="messages", rank=0, start_us=0.0, end_us=4.0),
        Travel(kind="messages", rank=1, start_us=0.0, end_us=4.0),
        Travel(kind=COPIES_BACK, rank=0, start_us=2.0, end_us=6.0, needed_us=3.0),
    ]
    messages, copies = overlap_of(travels, {0: [(1.0, 3.0), (3.0, 9.0)]})
    assert (messages.count, messages.travel_us, messages.hidden_us) == (2, 8.0, 3.0)
    assert (copies.travel_us, copies.hidden_us, copies.share) == (4.0, 1.0, 0.25)
    assert overlap_of([], {}) == ()


def test_copies_are_where_the_runtime_asks_for_them() -> None:
    plan = swapping(chain_plan(2, 3, forward_us=4.0, backward_us=4.0), 2.0, 2.0)
    timeline = simulate_plan(plan)
    # rank 0: F0 0-4, F1 4-8, B0 12-16 ...: b0 leaves at 2 and a0 at 4; a0 is asked for when F1 begins
    out, back = (
        [(each.start_us, each.end_us) for each in swap_copies(plan, timeline, cluster(2, host_us=1.0)) if each.rank == 0 and each.kind == kind]
        for kind in (COPIES_OUT, COPIES_BACK)
    )  # fmt: skip
    assert out[:4] == [(2.0, 4.0), (4.0, 6.0), (6.0, 8.0), (8.0, 10.0)]
    assert len(out) == len(back) == 6 and back[0][0] >= 6.0, "it comes back behind its own copy out"


def test_a_quick_link_hides_what_comes_back_and_a_slow_one_does_not() -> None:
    plan = swapping(chain_plan(4, 8, forward_us=10.0, backward_us=20.0, num_bytes=1e6), 1.0, 1.0, 1.0)
    shares = {}
    for host_us in (1.0, 60.0):
        links = cluster(4, host_us=host_us)
        found = timeline_overlap(plan, simulate_plan(plan, cluster=links), links)
        shares[host_us] = {each.kind: each.share for each in found}
    assert set(shares[1.0]) == {"messages", COPIES_OUT, COPIES_BACK}
    # the last stage's forward is directly in front of its own backward: its first copy back hides behind nothing
    assert shares[1.0][COPIES_BACK] > 0.9 > 0.5 > shares[60.0][COPIES_BACK]
