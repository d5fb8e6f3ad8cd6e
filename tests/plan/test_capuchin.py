"""Swap and recompute of one stage: closed forms, and every choice weighed again."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from gpp_plugin.plan.memory.capuchin import (
    LEVELS,
    LevelSums,
    Segments,
    StageOptimizer,
    find_segments,
    segment_costs,
)
from gpp_plugin.plan.memory.operator_chain import PipelineShape
from tests.plan.graphs import make_cluster
from tests.plan.operator_chains import factory, operator_chain, random_chain

BOTH = ("recompute", "swap")


def optimizer(
    *, limit: int, ways: tuple[str, ...], host: float = 1e6, stages: int = 1, saved: float = 100.0, num: int = 10,
    mode: str = "sync",
) -> StageOptimizer:  # fmt: skip
    """Ten operators of 10 us forward and 20 backward that keep 100 bytes each of their own."""
    graph, profile = operator_chain([10.0] * num, saved=saved, backward_ratio=2.0)
    cluster = make_cluster(stages, host=host)
    made = factory(graph, profile, [limit] * stages, cluster, memory_optimization=ways, mode=mode)
    return made.at(1, stages)


def test_swapping_hides_while_the_link_keeps_up():
    """Two hundred bytes beyond the limit and the two buffers of 100: four tensors go, 400 us at 1 byte/us."""
    fast = optimizer(limit=800, ways=("swap",), host=1e8).optimize(0, 0, 10)
    assert fast.memory is not None and len(fast.memory.swapped) == 4
    assert (fast.us, fast.memory_bytes) == (300.0, 800.0)
    assert [t.name for t in fast.memory.swapped] == [f"o{i}:inside" for i in range(4)], "most FreeTime first"
    slow = optimizer(limit=800, ways=("swap",)).optimize(0, 0, 10)
    assert slow.memory is not None
    # One micro-batch: 400 us out hide behind 100 us of forward, 400 us in behind 200 us of backward.
    exposed = (400 - 100) + (400 - 200)
    late = sum(max(0.0, -t.free_us) for t in slow.memory.swapped)
    assert slow.memory.swap_us == pytest.approx(exposed + late)


def test_free_time_is_what_lies_between_the_two_uses():
    """After operator 3: six forwards of 10 us, six backwards of 20; two transfers of 100 us."""
    o = optimizer(limit=800, ways=("swap",))
    assert o.free_us(0, 0, 10, np.array([3])) == pytest.approx([6 * 10 + 6 * 20 - 2 * 100])


def test_recomputing_one_segment_keeps_one_copy_to_work_with():
    """Operators keep their operand: of a segment of five, the four made inside are dropped; four run again."""
    graph, profile = operator_chain([10.0] * 10, saved=100.0, kept_inside=False, backward_ratio=2.0)
    o = factory(graph, profile, [10_000], memory_optimization=("recompute",)).at(1, 1)
    found = o.weigh(0, 0, 10, segments=[(2, 7)])
    assert found.memory is not None
    (segment,) = found.memory.recomputed
    assert segment.blocks == tuple(f"o{i}" for i in range(2, 7))
    assert segment.tensors == ("o2", "o3", "o4", "o5")
    assert (segment.bytes, segment.held_bytes, segment.recompute_us) == (400, 0, 40.0)
    assert found.memory_bytes == 1000 - 400 + 400
    assert found.us == 340.0


def test_what_a_segment_reads_and_nobody_keeps_is_held_for_it():
    graph, profile = operator_chain([10.0] * 6, saved=[0, 0, 100, 0, 0, 0], output=40)
    o = factory(graph, profile, [10_000]).at(1, 1)
    found = o.weigh(0, 0, 6, segments=[(2, 3)])
    assert found.memory is not None
    (segment,) = found.memory.recomputed
    assert (segment.bytes, segment.held_bytes, segment.recompute_us) == (100, 40, 10.0)


def test_the_cheaper_of_both_is_taken():
    """Recomputing costs 1/10 us a byte: a link of 0.1 bytes/us is worse, one of 1000 hides all."""
    for host, way in ((1e5, "recomputed"), (1e9, "swapped")):
        choice = optimizer(limit=3000, ways=BOTH, host=host, stages=4, num=20).optimize(0, 0, 10)
        assert choice.excess_bytes == 0 and choice.memory is not None
        sizes = {"recomputed": choice.memory.recomputed_bytes, "swapped": choice.memory.swapped_bytes}
        assert sizes[way] == max(sizes.values())


@pytest.mark.parametrize("seed", range(20))
def test_choices_fit_and_are_what_their_lists_say(seed):
    """Random stages: bytes and times are counted again from what is swapped and made again."""
    rng = random.Random(seed)
    graph, profile = random_chain(rng, 60)
    cluster = make_cluster(3)
    need = sum(c.saved_bytes_per_sample for c in profile.costs)
    limit = int(need * rng.uniform(0.5, 1.2)) + 1
    o = factory(graph, profile, [limit] * 3, cluster, memory_optimization=BOTH).at(1, 3)
    start, stop = sorted(rng.sample(range(61), 2))
    size = dict(zip(o.chain.tensors.names, o.chain.tensors.bytes.tolist(), strict=True))
    costs = profile.costs[start:stop]
    forward, backward = sum(c.forward_us[0] for c in costs), sum(c.backward_us[0] for c in costs)
    for stage in range(3):
        excess, us = o.estimate(stage, start, stop)
        choice = o.optimize(stage, start, stop)
        count = 3 - stage
        kept, working, again, swap = sum(c.saved_bytes_per_sample for c in costs), 0.0, 0.0, 0.0
        if choice.memory is not None:
            gone = [name for segment in choice.memory.recomputed for name in segment.tensors]
            out = [tensor.name for tensor in choice.memory.swapped]
            assert len({*gone, *out}) == len(gone) + len(out), "each at most once"
            for segment in choice.memory.recomputed:
                assert segment.bytes == sum(size[name] for name in segment.tensors)
                kept += segment.held_bytes
            kept -= sum(size[name] for name in (*gone, *out))
            working = max((segment.bytes for segment in choice.memory.recomputed), default=0)
            working += 2 * max((size[name] for name in out), default=0)
            again = sum(segment.recompute_us for segment in choice.memory.recomputed)
            transfer = sum(size[name] for name in out) / o.host.bytes_per_us
            hides = forward, backward + again
            swap = (
                max(transfer - sum(hides), 0.0) if count > 1 else sum(max(transfer - us, 0.0) for us in hides)
            )
            assert choice.memory.swap_us == pytest.approx(swap) and choice.memory.working_bytes == working
        held = sum(c.parameter_bytes + c.gradient_bytes for c in costs)
        assert choice.memory_bytes == pytest.approx(held + count * kept + working)
        assert choice.us == pytest.approx(forward + backward + again + swap)
        assert choice.excess_bytes == pytest.approx(max(choice.memory_bytes - limit, 0.0))
        if excess == 0 and choice.excess_bytes == 0:
            assert forward + backward - 1e-6 <= us


def best_segments(chain, price: float, cap: float) -> float:
    """Return the most that disjoint segments of a short chain are worth, each at the costs that the menu has too."""
    num = chain.num_blocks
    worth = {}
    for a, b in itertools.combinations(range(num + 1), 2):
        cost = segment_costs(chain, Segments(starts=np.array([a]), stops=np.array([b])))
        if cost.dropped[0] <= cap:
            worth[a, b] = float(cost.dropped[0] - cost.held[0] - price * cost.time_us[0])
    best = [0.0] * (num + 1)
    for stop in range(1, num + 1):
        best[stop] = max(best[stop - 1], *(best[a] + worth.get((a, stop), 0.0) for a in range(stop)))
    return best[num]


def test_the_menu_has_the_best_segments_at_every_price():
    for seed in range(5):
        graph, profile = random_chain(random.Random(seed), 14)
        chain = factory(graph, profile, [1]).at(1, 1).chain
        levels = find_segments(chain)
        total, unit = chain.tensor_bytes[-1], chain.tensor_bytes[-1] / chain.forward[-1]
        for price, cap in LEVELS:
            exact = best_segments(chain, price * unit, cap * total)
            found = [0.0]
            for level in levels:
                cost = segment_costs(chain, level)
                if cost.dropped.max(initial=0.0) <= cap * total:
                    found.append(float((cost.dropped - cost.held - price * unit * cost.time_us).sum()))
            assert max(found) == pytest.approx(exact)


def test_sums_of_levels_are_those_of_their_segments_in_any_stage():
    """Where stages begin and end between segments; inside one, what is held is an upper bound."""
    for seed in range(4):
        graph, profile = random_chain(random.Random(seed), 40)
        chain = factory(graph, profile, [1]).at(1, 1).chain
        levels = find_segments(chain)
        costs = [segment_costs(chain, level) for level in levels]
        sums = LevelSums(chain, levels, costs)
        for start, stop in itertools.combinations(range(0, 41, 4), 2):
            net, time = sums.net_bytes(start, stop), sums.time_us(start, stop)
            for k, level in enumerate(levels):
                begins, ends = np.maximum(level.starts, start), np.minimum(level.stops, stop)
                inside = begins < ends
                if np.any((level.starts < start) & (level.stops > stop)):
                    continue
                exact = segment_costs(chain, Segments(starts=begins[inside], stops=ends[inside]))
                assert net[k] <= exact.dropped.sum() + 1e-6
                assert time[k] >= exact.time_us.sum() - 1e-6
                if np.array_equal(begins[inside], level.starts[inside]) and np.array_equal(
                    ends[inside], level.stops[inside]
                ):
                    assert net[k] == pytest.approx(max((exact.dropped - exact.held).sum(), 0.0))
                    assert time[k] == pytest.approx(exact.time_us.sum())


def test_in_flight_and_versions():
    def shape(**changes: object) -> PipelineShape:
        values: dict[str, object] = {
            "num_stages": 4, "num_micro_batches": 3, "limits": (1,) * 4, "host_bytes_per_s": 1.0
        }  # fmt: skip
        return PipelineShape(**{**values, **changes})  # type: ignore[arg-type]

    def of(s: PipelineShape) -> list[tuple[int, int]]:
        return [(s.in_flight(i), s.versions(i)) for i in range(4)]

    assert of(shape()) == [(3, 1), (3, 1), (2, 1), (1, 1)]
    assert of(shape(schedule="gpipe")) == [(3, 1)] * 4
    assert of(shape(mode="async")) == [(4, 4), (3, 3), (2, 2), (1, 1)]
