"""The configuration nearest to a request that no plan fits: found by planning, not by rule of thumb.

One thing is changed at a time, in the order in which it costs the user least: ways to save memory, the samples
a rank computes at a time, ZeRO, stages and ranks, and last the memory of a rank. What is suggested has a plan.

Source: this project
Tests: tests/plan/test_joined.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from gpp_plugin.config.key_names import setting_of
from gpp_plugin.plan.request import PlanRequest, rank_limit

HasPlan = Callable[[PlanRequest], bool]

MORE_RANKS = (2,)
"""Times the requested ranks, that are tried."""
LIMIT_STEP = 1.02
MOST_STEPS = 4
NUM_BISECTIONS = 2
MOST_SHOWN = 3
LIMIT_DIGITS = 4


def nearest_that_fits(request: PlanRequest, has_plan: HasPlan, missing_bytes: int) -> str:
    """Return a clause with up to three changes that each make a plan fit, or that none does.

    Args:
        has_plan: plans a changed request.
        missing_bytes: of the worst rank of the plan nearest to fitting.
    """
    found: list[str] = []
    for change in _changes(request, has_plan):
        found.append(change)
        if len(found) == MOST_SHOWN - 1:
            break
    least = _least_limit(request, has_plan, missing_bytes)
    if least is not None:
        found.append(f"{least} bytes a rank ({setting_of('memory.limit_gb', float(limit_gb(least)))})")
    return f"nearest that fits: {', or '.join(found)}" if found else "nothing that was tried fits"


def limit_gb(num_bytes: int) -> str:
    """Return the ``memory.limit_gb`` that allows so many bytes: rounded up, for less would not fit."""
    step = 10 ** max(0, len(str(num_bytes)) - LIMIT_DIGITS)
    return f"{-(-num_bytes // step) * step / 1e9:.9f}".rstrip("0").rstrip(".")


def _changes(request: PlanRequest, has_plan: HasPlan) -> Iterator[str]:
    both = ("recompute", "swap")
    for ways in (("recompute",), both):
        more = tuple(dict.fromkeys((*request.memory_optimization, *ways)))
        if len(more) > len(request.memory_optimization) and has_plan(
            dataclasses.replace(request, memory_optimization=more)
        ):
            yield " and ".join(setting_of(f"memory.{way}", "auto") for way in more)
            break
    sizes = request.micro_batch_sizes or {}
    if "*" in sizes:
        size = _largest(
            sizes["*"], lambda n: has_plan(dataclasses.replace(request, micro_batch_sizes={**sizes, "*": n}))
        )
        if size is not None:
            yield setting_of("micro_batch_sizes", size)
    unit = request.loss_unit
    if request.keep_units or any(block.is_coupled for block in request.graph.blocks):
        size = _largest(unit, lambda n: has_plan(dataclasses.replace(request, loss_unit=n)))
        if size is not None:
            yield setting_of("loss_unit", size)
    most = 0 if request.num_ranks == 1 else 2 if request.mode == "async" else 3
    for stage in range(request.zero_stage + 1, most + 1):
        if has_plan(dataclasses.replace(request, zero_stage=stage)):
            yield setting_of("zero_stage", stage)
            break
    if request.num_stages is not None and has_plan(dataclasses.replace(request, num_stages=None)):
        yield "stages left to the planner"
    for factor in MORE_RANKS if request.num_stages is None else ():
        ranks = round(factor * request.num_ranks)
        if ranks > request.num_ranks and has_plan(with_ranks(request, ranks)):
            yield f"{ranks} ranks"
            break


def _largest(size: int, works: Callable[[int], bool]) -> int | None:
    """Return the largest proper divisor of ``size`` that works, or None; smaller ones work where larger do."""
    divisors = [n for n in range(1, size) if size % n == 0]
    if not divisors or not works(divisors[0]):
        return None
    low, high = 0, len(divisors)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if works(divisors[middle]) else (low, middle)
    return divisors[low]


def with_ranks(request: PlanRequest, num_ranks: int) -> PlanRequest:
    """Return the request for so many ranks, on devices like those there are."""
    devices = request.cluster.devices[: request.num_ranks]
    more = (devices * (num_ranks // len(devices) + 1))[:num_ranks]
    cluster = dataclasses.replace(request.cluster, devices=more)
    return dataclasses.replace(request, num_ranks=num_ranks, cluster=cluster)


def _with_limit(request: PlanRequest, limit: int) -> PlanRequest:
    devices = tuple(
        dataclasses.replace(device, memory_bytes=max(device.memory_bytes, limit))
        for device in request.cluster.devices
    )
    cluster = dataclasses.replace(request.cluster, devices=devices)
    return dataclasses.replace(request, cluster=cluster, memory_limit_bytes=limit)


def _least_limit(request: PlanRequest, has_plan: HasPlan, missing_bytes: int) -> int | None:
    """Return about the least memory of a rank with which there is a plan."""
    low = max(rank_limit(request, rank) for rank in range(request.num_ranks))
    high = low + missing_bytes
    for _ in range(MOST_STEPS):
        if has_plan(_with_limit(request, high)):
            break
        low, high = high, round(high * LIMIT_STEP)
    else:
        return None
    for _ in range(NUM_BISECTIONS):
        middle = (low + high) // 2
        low, high = (low, middle) if has_plan(_with_limit(request, middle)) else (middle, high)
    return high
