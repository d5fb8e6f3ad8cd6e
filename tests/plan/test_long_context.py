"""Which rank holds what of a cache, and the volumes of the chapter, as printed and in equal units."""

from __future__ import annotations

import itertools

import pytest

from gpp_plugin.ir.cluster import Device, Link
from gpp_plugin.plan.costs import long_context as cp


@pytest.mark.parametrize(("block", "ranks"), [(1, 2), (2, 3), (16, 4), (5, 1)])
def test_every_position_has_one_owner_and_rooms_suffice(block: int, ranks: int) -> None:
    for row, length in itertools.product(range(5), (0, 1, 15, 16, 17, 40)):
        owners = [cp.owner_of(p, row, block=block, ranks=ranks) for p in range(length)]
        held = [cp.held_positions(length, row, r, block=block, ranks=ranks) for r in range(ranks)]
        assert held == [owners.count(r) for r in range(ranks)]
        assert max(held) <= cp.held_blocks(length, block=block, ranks=ranks) * block


def test_in_equal_units_the_chapter_gains_nothing_and_sending_to_owners_does() -> None:
    n, b, e, h = 4, 512, 4096, 32
    assert cp.printed_elements(n, b, e, h) < cp.printed_tensor_elements(n, b, e)
    assert cp.gathered_elements(n, b, e, h, e) == 6_316_032 > cp.tensor_elements(n, b, e) == 6_291_456
    assert cp.sent_elements(n, b, e, h, e) / cp.tensor_elements(n, b, e) == pytest.approx(0.63, abs=0.005)
    assert cp.sent_elements(n, b, e, h, e // 4) / cp.tensor_elements(n, b, e) == pytest.approx(
        0.53, abs=0.006
    )


def test_a_cut_cache_is_a_part_of_the_whole() -> None:
    one = dict(rows=4, length=64, kv_width=8, itemsize=4, layers=3)
    assert cp.cut_cache_bytes(**one, block=16, ranks=4) * 4 == cp.cache_bytes(**one)


def test_ring_attention_hides_its_sends_in_long_texts_alone() -> None:
    device = Device(name="d", memory_bytes=1, flops_per_s=1e15, memory_bytes_per_s=1e12)
    link = Link(name="l", span=8, bytes_per_s=4.5e11, latency_us=4.0)

    def ring(length: int, ranks: int) -> tuple[float, float]:
        shape = cp.LayerShape(length=length, width=4096, query_width=4096, key_width=4096)
        return cp.ring_attention_us(shape, ranks, device, link)

    assert ring(32768, 4) == (pytest.approx(ring(32768, 1)[0] / 4), 0.0)
    us, unhidden = ring(2048, 4)
    assert unhidden > 0 and us == pytest.approx(ring(2048, 1)[0] / 4 + unhidden)
    assert cp.expert_exchange_us(4096, 4096, 2, 1, link) == 0.0
