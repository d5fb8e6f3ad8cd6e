"""What may be done to make stages fit, and in closed form about the least that it adds; numbers or arrays.

Source: this project
Tests: tests/plan/test_joined.py, tests/plan/test_stage_chain.py
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Savings:
    """What may be done about one micro-batch of a stage, in bytes and microseconds; numbers or arrays.

    Args:
        net: dropped less held instead; ``dropped``; ``work``: back in memory while it runs again.
        again_us: of the second forwards.
        kept: bytes of all its saved tensors; ``largest`` of them; ``left``: largest of those not dropped.
        forward_us, backward_us: without memory optimization.
    """

    net: Any
    dropped: Any
    work: Any
    again_us: Any
    kept: Any
    largest: Any
    left: Any
    forward_us: Any
    backward_us: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLink:
    """Whether and how quickly tensors leave.

    Args:
        bytes_per_us: each way; 0: nothing is swapped.
    """

    bytes_per_us: float

    def exposed_us(self, num_bytes: Any, forward_us: Any, backward_us: Any, in_turn: Any) -> Any:
        """Return what transfers of ``num_bytes`` each way take beyond the compute they hide behind."""
        transfer = num_bytes / self.bytes_per_us
        if in_turn is True:  # one stage of thousands: numpy would work out both
            return np.maximum(transfer - forward_us - backward_us, 0.0)
        apart = np.maximum(transfer - forward_us, 0.0) + np.maximum(transfer - backward_us, 0.0)
        if in_turn is False:
            return apart
        return np.where(in_turn, np.maximum(transfer - forward_us - backward_us, 0.0), apart)

    def hidden_bytes(self, forward_us: Any, backward_us: Any, in_turn: Any) -> Any:
        """Return the bytes of one micro-batch whose transfers hide."""
        if in_turn is True:
            return self.bytes_per_us * (forward_us + backward_us)
        apart = np.minimum(forward_us, backward_us)
        return self.bytes_per_us * np.where(in_turn, forward_us + backward_us, apart)


def is_in_turn(schedule: str, in_flight: Any) -> Any:
    """Return whether forwards and backwards of a stage take turns, so that both ways of a link are busy at a time.

    Otherwise tensors leave during forwards only and come back during backwards only: under GPipe's schedule, and
    where one micro-batch is in flight.

        1F1B, two in flight    F0 F1 B0 F2 B1 F3     out of F2 and in for B1 hide behind F2 and B1 together
        GPipe                  F0 F1 F2 B2 B1 B0     all go out behind F, all come in behind B
    """
    return (in_flight > 1) & (schedule != "gpipe")


def lacking_bytes(excess: Any, count: Any, savings: Savings) -> Any:
    """Return how many bytes are too many after recomputing, before any swap; negative: it fits.

    Every micro-batch in flight drops ``net``; one at a time works with what it has made again.
    """
    return excess + savings.work - count * savings.net


def nearest_to_fitting(excess: float, count: int, savings: Savings, host: HostLink) -> float:
    """Return the least bytes that any choice leaves too many: recomputing alone, or with all the rest swapped."""
    needs = lacking_bytes(excess, count, savings)
    if host.bytes_per_us:
        # Two of the largest left are in device memory at a time: one in use, one on its way.
        swapped = needs + 2 * savings.left - count * (savings.kept - savings.dropped)
        needs = np.minimum(needs, swapped)
    return float(needs.min())


def added_us(excess: Any, count: Any, savings: Savings, host: HostLink, in_turn: Any) -> Any:
    """Return what a choice of segments adds, and the swaps that it still needs; inf where it does not fit.

    Args:
        excess: bytes too many without memory optimization, with ``count`` micro-batches in flight.
        in_turn: whether forwards and backwards take turns.
    """
    s = savings
    needs = lacking_bytes(excess, count, s)
    plain = np.where(needs <= 0, s.again_us, np.inf)
    return np.minimum(plain, swapping_us(needs, count, s, host, in_turn)) if host.bytes_per_us else plain


def swapping_us(needs: Any, count: Any, savings: Savings, host: HostLink, in_turn: Any) -> Any:
    """Return what a choice of segments adds with the swaps it still needs; inf where not enough is left to swap.

    Args:
        needs: `lacking_bytes` of the choice.
    """
    s = savings
    wanted = np.maximum(needs + 2 * s.left, 0.0) / count
    exposed = host.exposed_us(wanted, s.forward_us, s.backward_us + s.again_us, in_turn)
    return np.where(wanted <= s.kept - s.dropped, s.again_us + exposed, np.inf)


def least_added_us(excess: Any, count: Any, savings: Savings, host: HostLink, in_turn: Any) -> Any:
    """Return about the least that fitting adds, as arrays; 0 where it fits, inf where nothing makes it.

    Blocks are taken as divisible: as large a part as is needed is recomputed, alone or beside what the link
    takes for nothing; or nothing or everything is, and the rest swapped.

    Args:
        savings: of recomputing every block.
    """
    s = savings
    none = dataclasses.replace(s, net=0.0, dropped=0.0, work=0.0, again_us=0.0, left=s.largest)
    with np.errstate(divide="ignore", invalid="ignore"):
        least = np.minimum(
            added_us(excess, count, none, host, in_turn), added_us(excess, count, s, host, in_turn)
        )
        needs = excess + s.work
        parts = [needs]
        if host.bytes_per_us:
            hidden = np.minimum(host.hidden_bytes(s.forward_us, s.backward_us, in_turn), s.kept - s.dropped)
            parts.append(np.maximum(needs + 2 * s.largest - count * np.maximum(hidden, 0.0), 0.0))
        for lacking in parts:
            share = lacking / (count * s.net)
            least = np.minimum(least, np.where((s.net > 0) & (share <= 1.0), share * s.again_us, np.inf))
    return np.where(excess <= 0, 0.0, least)


def savings_of(block: Savings, total: Any, peak: Any) -> Savings:
    """Return the savings of many stages from those of blocks.

    Args:
        total, peak: sum and largest, over every stage's blocks, of values by block.
    """
    return Savings(
        net=total(block.net),
        dropped=total(block.dropped),
        work=peak(block.work),
        again_us=total(block.again_us),
        kept=total(block.kept),
        largest=peak(block.largest),
        left=peak(block.left),
        forward_us=total(block.forward_us),
        backward_us=total(block.backward_us),
    )
