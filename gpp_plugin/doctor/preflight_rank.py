"""One rank of `gpp doctor --gpus`: joins, opens what a plan needs, runs a step of zeros, measures pairs.

python -m gpp_plugin.doctor.preflight_rank SETTINGS_JSON      (or called by `gpp doctor` itself under a launcher)

What moves is what training moves: programs are lowered as the engine lowers them, messages go through the transport
that the engine would make, sums through groups of the same backend. Compute is left out.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from gpp_plugin.ir.cluster import Link, MeasuredCollective
from gpp_plugin.ir.plan import PipelinePlan, Stage, StageEdge
from gpp_plugin.ir.serialize import load
from gpp_plugin.ir.tensors import TensorSpec, batch_layout
from gpp_plugin.launch import emit_event, end_rank
from gpp_plugin.plan.cluster_files import describe_cluster
from gpp_plugin.profile.device_links import PairSpeed, measure_pairs, rounds_of_pairs
from gpp_plugin.profile.device_memory import (
    MeasuredDevice,
    measure_collectives,
    measure_device,
    with_measured,
)
from gpp_plugin.profile.job_cluster import JobCluster, find_cluster, measure_models, shares_of
from gpp_plugin.rehearse.rehearsal import (
    RehearsalSettings,
    make_async_programs,
    programs_of_plan,
    scale_times,
)
from gpp_plugin.rehearse.rehearsal_rank import RehearsalRank
from gpp_plugin.runtime.rank_programs import channels_of
from gpp_plugin.runtime.ranks.collectives import exchange
from gpp_plugin.runtime.ranks.placement_of_ranks import JobPlacement, join_ranks

ALL_PAIRS = 16
"""Up to so many ranks all pairs are measured; of more ranks those that distinguish the levels of links."""

NO_COMPUTE = 1e-9
"""Factor of a plan's times: tasks take none, and their order is the plan's own."""

MICRO_BATCHES = 4
HIDDEN = 1 << 16
GRADIENT_BYTES = 1 << 22


def preflight_plan(num_ranks: int) -> PipelinePlan:
    """Return a plan with a message over every kind of way: to the next stage, past it, between different positions.

    An even number of ranks from four on is in stages of two, so that gradients are summed as well. Six ranks::

        s0 (0, 1) ──► s1 (2, 3) ──► s2 (4, 5)
                └─────────────────────┘
    """
    # 4 micro-batches of 2 samples a rank: 512 KiB a message and 4 MiB of gradients a rank, of no real model
    degree = 2 if num_ranks >= 4 and num_ranks % 2 == 0 else 1
    count, size = num_ranks // degree, 2 * degree
    stages = tuple(
        Stage(
            name=f"s{index}",
            blocks=(f"b{index}",),
            ranks=tuple(range(index * degree, (index + 1) * degree)),
            micro_batch_size=size,
            in_flight=min(count - index, MICRO_BATCHES),
            forward_us=1.0,
            backward_us=2.0,
            gradient_bytes=GRADIENT_BYTES,
        )
        for index in range(count)
    )
    ways = [(index, index + 1) for index in range(count - 1)] + ([(0, count - 1)] if count > 2 else [])
    names = [f"t{src}_{dst}" for src, dst in ways]
    return PipelinePlan(
        model="preflight",
        graph="none",
        planner="none",
        mini_batch=MICRO_BATCHES * size,
        loss_unit=size,
        stages=stages,
        edges=tuple(
            StageEdge(src=src, dst=dst, batch_tensors=(name,), gradient_tensors=(name,))
            for (src, dst), name in zip(ways, names, strict=True)
        ),
        tensors=tuple(
            TensorSpec(
                name=name,
                dtype="float32",
                shape=(2, HIDDEN),
                num_samples=2,
                layout=batch_layout(),
                requires_grad=True,
            )
            for name in names
        ),
    )


def run_rank(*, device: str, plan: str | None, timeout_s: float) -> dict[str, Any] | None:
    """Return what was found on the first rank, None on the others; collective over the launcher's ranks.

    Args:
        device: ``cuda`` or ``cpu``.
        plan: a saved plan; None: `preflight_plan`.
        timeout_s: how long a rank waits for another one, each time.

    Raises:
        CommTimeout: a rank did not come, or a message of it did not; names the rank.
        GppError: a rank could not; the same on every rank.
    """
    # Each step needs the one before, and its errors name ranks: who does not join, who opens no communicator, between
    # which two nothing arrives, which message of the plan does not come.
    began = time.perf_counter()
    torch.set_num_threads(1)
    placement = join_ranks(device, timeout_s=timeout_s)
    num_ranks = len(placement.places)
    limit = datetime.timedelta(seconds=timeout_s)
    group = dist.new_group(backend="gloo", timeout=limit) if num_ranks > 1 else None
    joined_s = time.perf_counter() - began
    found = find_cluster(
        placement,
        group,
        dtype=torch.float32 if device == "cpu" else torch.bfloat16,
        keeps_reserve=True,
        measures_anew=True,
        timeout_s=timeout_s,
    )
    tried = preflight_plan(num_ranks) if plan is None else load(PipelinePlan, plan)
    steps_ms = _run_zeros(tried, placement, group, timeout_s)
    speeds, links = _measure(placement, group, found, timeout_s)
    found = dataclasses.replace(found, cluster=dataclasses.replace(found.cluster, links=links))
    measured = measure_models(placement, group, lambda: measure_device(placement.own_device))
    if placement.rank:
        return None
    return {
        "joined_s": joined_s,
        "seconds": time.perf_counter() - began,
        "steps_ms": steps_ms,
        "channels": len(_channels(tried)),
        "plan": tried.model,
        "stages": len(tried.stages),
        "all_reduce_bytes_per_s": 0.0 if links[-1].all_reduce is None else links[-1].all_reduce.bytes_per_s,
        **_describe(placement, found, speeds, measured),
    }


def _run_zeros(
    plan: PipelinePlan, placement: JobPlacement, group: dist.ProcessGroup | None, timeout_s: float
) -> list[float]:
    """Return the milliseconds of two steps of zeros: the first opens what is opened at first use; collective."""
    rank = RehearsalRank(
        scale_times(plan, NO_COMPUTE),
        RehearsalSettings(comm_timeout_s=timeout_s),
        placement=placement,
        group=group,
    )
    found = []
    for _ in range(2):
        rank.barrier("the beginning of a step of zeros")
        start = time.perf_counter()
        rank.iterate()
        if placement.device_type == "cuda":
            torch.cuda.synchronize(placement.own_device)
        rank.barrier("the end of a step of zeros")
        found.append((time.perf_counter() - start) * 1e3)
    return found


def _measure(
    placement: JobPlacement, group: dist.ProcessGroup | None, found: JobCluster, timeout_s: float
) -> tuple[Sequence[PairSpeed], tuple[Link, ...]]:
    """Return the speeds between pairs of ranks, all of them where they are few, and links with what collectives over
    each level take; collective.
    """
    num_ranks = len(placement.places)
    if group is None:
        return found.speeds, found.cluster.links
    limit = datetime.timedelta(seconds=timeout_s)
    messages = dist.new_group(backend=placement.backend, timeout=limit)
    assert isinstance(messages, dist.ProcessGroup), "every rank is in it"
    links = tuple(_measure_level(link, placement, group, limit) for link in found.cluster.links)
    speeds = [
        speed
        for pairs in (rounds_of_pairs(num_ranks) if num_ranks <= ALL_PAIRS else ())
        for speed in measure_pairs(
            pairs, messages=messages, group=group, device=placement.own_device, timeout_s=timeout_s
        )
    ]
    dist.destroy_process_group(messages)
    return sorted(speeds or found.speeds, key=lambda speed: (speed.first, speed.second)), links


def _measure_level(
    link: Link, placement: JobPlacement, group: dist.ProcessGroup, limit: datetime.timedelta
) -> Link:
    """Return a level with what collectives over all ranks of it take, all its groups at a time; the slowest's."""
    first, num_ranks = placement.rank // link.span * link.span, len(placement.places)
    groups = {
        start: dist.new_group(
            list(range(start, min(start + link.span, num_ranks))), backend=placement.backend, timeout=limit
        )
        for start in range(0, num_ranks, link.span)
    }
    own = groups[first]
    assert isinstance(own, dist.ProcessGroup), "the rank is in it"
    found = exchange(
        lambda: measure_collectives(own, placement.own_device), what="measuring collectives", group=group
    )
    dist.destroy_process_group(own)
    slowest = [
        MeasuredCollective(
            bytes_per_s=min(each.bytes_per_s for each in kind),
            latency_us=max(each.latency_us or 0.0 for each in kind),
        )
        for kind in zip(*found, strict=True)
    ]
    return dataclasses.replace(link, all_reduce=slowest[0], all_gather=slowest[1])


def _channels(plan: PipelinePlan) -> set[Any]:
    programs = (
        make_async_programs(plan, validate=False).all
        if plan.mode == "async"
        else programs_of_plan(plan, validate=False)
    )
    return channels_of(programs)


def _describe(
    placement: JobPlacement,
    found: JobCluster,
    speeds: Sequence[PairSpeed],
    measured: dict[str, MeasuredDevice],
) -> dict[str, Any]:
    places = placement.places
    cluster = with_measured(found.cluster, measured, dict(enumerate(shares_of(placement))))
    return {
        "backend": placement.backend,
        "fall_back": placement.fall_back,
        "hosts": [[places[ranks[0]].host.split("/")[0], list(ranks)] for ranks in placement.hosts],
        "num_devices": len(placement.devices),
        "device": places[0].name,
        "memory": sorted({each.explanation for each in found.memory}),
        "speeds": {name: device.lines() for name, device in measured.items()},
        "cluster": describe_cluster(dataclasses.replace(cluster, name="measured")),
        "path": str(found.path),
        "pairs": [
            {**dataclasses.asdict(speed), "link": found.cluster.link_between(speed.first, speed.second).name}
            for speed in speeds
        ],
    }


def main() -> None:
    """Run this rank's part; rank 0 reports what was found."""
    found = run_rank(**json.loads(sys.argv[1]))
    if found is not None:
        emit_event(**found)
    end_rank()


if __name__ == "__main__":
    main()
