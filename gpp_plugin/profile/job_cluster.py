"""A job's own machines as a cluster: what ``"cluster": "auto"`` means where ranks train.

On CPUs that is `read_machine`, on rank 0 alone, which shares it out to the ranks of a host. On CUDA the ranks look
together: each at its device's free memory, the first of each model at its speed, pairs of ranks at their links. Links
are measured once for a kind of cluster, and stored beside the profiles.

Source: this project
Tests: tests/profile/test_job_cluster.py
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gpp_plugin import __version__
from gpp_plugin.ir.cluster import Cluster, Link
from gpp_plugin.ir.serialize import write_text_whole
from gpp_plugin.plan.cluster_files import describe_cluster, read_cluster
from gpp_plugin.profile.device_links import (
    HostTopology,
    Level,
    PairSpeed,
    link_levels,
    measure_levels,
    measure_pairs,
    read_topology,
)
from gpp_plugin.profile.device_memory import DeviceMemory, MeasuredCommunicator, measure_memory
from gpp_plugin.profile.machine import (
    CUDA_LINK,
    MeasurementStore,
    default_directory,
    host_bytes,
    make_device,
    processor_name,
    reached_speeds,
)
from gpp_plugin.runtime.ranks.collectives import exchange
from gpp_plugin.runtime.ranks.placement_of_ranks import JobPlacement

logger = logging.getLogger(__name__)

Speeds = TypeVar("Speeds")

OPENING_TIMEOUT_S = 300.0
"""How long ranks wait for each other while they open a first communicator, or measure a link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCluster:
    """What the ranks of a job found.

    Args:
        cluster: its devices' memory is what a plan may use.
        memory: of each rank's CUDA device; empty on CPUs, where ranks share their host's memory.
        speeds: of the pairs of ranks that were measured now; empty where links were stored.
        path: where the description is stored.
    """

    cluster: Cluster
    memory: tuple[DeviceMemory, ...]
    speeds: tuple[PairSpeed, ...]
    path: Path


def find_cluster(
    placement: JobPlacement,
    group: dist.ProcessGroup | None,
    *,
    dtype: torch.dtype,
    keeps_reserve: bool,
    directory: str | Path | None = None,
    measures_anew: bool = False,
    timeout_s: float = OPENING_TIMEOUT_S,
) -> JobCluster:
    """Return a job's devices and links; collective over all ranks of the default group.

    Args:
        group: a CPU group of all ranks; None for a single rank.
        dtype: what the job computes in.
        keeps_reserve: reserve memory for what is made later than the plan; False where the user gave a limit, which
            then only may not exceed what is free.
        directory: where profiles and clusters are stored; None for the default.
        measures_anew: links too that are stored.
        timeout_s: how long a rank waits for another one.

    Raises:
        GppError: a rank could not; the same on every rank.
        CommTimeout: a rank did not come, or its messages did not; says which.
    """
    #   communicator ──► its bytes ──► links over it, unless stored ──► closed ──► free memory ──► speeds
    use_nccl = placement.backend == "nccl" and len(placement.places) > 1
    opened = MeasuredCommunicator.make(placement.own_device, timeout_s) if use_nccl else None
    taken = exchange(lambda: 0 if opened is None else opened.num_bytes, what="opening NCCL", group=group)
    messages = group if opened is None else opened.group
    lost = (
        "the links could not be stored in %s (%s); they will be measured again next time, or set "
        "graph_pipeline.profile_dir to a directory that can be written"
    )
    where = directory or default_directory()
    store = MeasurementStore(where, what="stored links", lost=lost, prefix="cluster-")
    links, speeds, key = _find_links(
        placement, group, messages, store, measures_anew=measures_anew, timeout_s=timeout_s
    )
    if opened is not None:
        opened.close()
    memory: tuple[DeviceMemory, ...] = ()
    if placement.device_type == "cuda":
        memory = measure_memory(placement, group, dtype=dtype, communicator_bytes=max(taken))
        limits = [found.usable_bytes if keeps_reserve else found.share_bytes for found in memory]
    else:
        own_bytes = host_bytes() // placement.own_sharers
        limits = exchange(lambda: own_bytes, what="the hosts' memory", group=group)
    reached = measure_models(placement, group, lambda: reached_speeds(placement.device_type, dtype))
    devices = tuple(
        make_device(place.name, limit, reached[place.name], share=share, dtype=dtype)
        for place, limit, share in zip(placement.places, limits, shares_of(placement), strict=True)
    )
    cluster = Cluster(name="auto", devices=devices, links=links)
    if speeds and placement.rank == 0:
        description = json.dumps(describe_cluster(cluster), indent=2) + "\n"
        store.keep(key, lambda path: write_text_whole(path, description))
    return JobCluster(cluster=cluster, memory=memory, speeds=speeds, path=store.path(key))


def shares_of(placement: JobPlacement) -> tuple[float, ...]:
    """Return each rank's part of its device."""
    return tuple(1 / dataclasses.replace(placement, rank=r).own_sharers for r in range(len(placement.places)))


def _find_links(
    placement: JobPlacement,
    group: dist.ProcessGroup | None,
    messages: dist.ProcessGroup | None,
    store: MeasurementStore,
    *,
    measures_anew: bool,
    timeout_s: float,
) -> tuple[tuple[Link, ...], tuple[PairSpeed, ...], Mapping[str, Any]]:
    """Return the links, the speeds of the pairs that were measured for them, and what both depend on; collective."""
    # The first rank of each host reads its topology. Levels follow from it, and from them the key: stored links were
    # measured between the same kinds of devices, joined in the same way.
    reads = placement.own_local_rank == 0 and placement.backend == "nccl"
    own = [place.device for place in placement.places if place.host == placement.own_place.host]

    def look() -> tuple[str, HostTopology | None]:
        return processor_name(), read_topology(own) if reads else None

    found = exchange(look, what="the topology of the hosts", group=group)
    unknown = HostTopology(nvlinks=frozenset(), source="")
    levels, notes = link_levels(placement, [found[ranks[0]][1] or unknown for ranks in placement.hosts])
    key = cluster_key(placement, [found[ranks[0]][0] for ranks in placement.hosts], levels)
    if placement.rank == 0:
        for note in notes:
            logger.warning("cluster: %s", note)
    if messages is None:
        return (dataclasses.replace(CUDA_LINK, latency_us=0.0),), (), key

    def read() -> tuple[Link, ...] | None:
        if measures_anew or placement.rank:
            return None
        found = store.look_up(key, lambda path: read_cluster(path, num_devices=len(placement.places)).links)
        if found is not None:
            line = "cluster: using the links measured before, %s; remove the file to measure them again"
            logger.info(line, store.path(key))
        return found

    stored = exchange(read, what="the stored links", group=group)[0]
    if stored is not None:
        return stored, (), key
    measured: list[PairSpeed] = []

    def measure(pairs: Sequence[tuple[int, int]]) -> Sequence[PairSpeed]:
        device = placement.own_device
        speeds = measure_pairs(pairs, messages=messages, group=group, device=device, timeout_s=timeout_s)
        measured.extend(speeds)
        return speeds

    links = measure_levels(levels, measure, placement)
    if placement.rank == 0:
        for link in links:
            logger.info(
                "cluster: %s joins %d ranks: %.1f GB/s a rank, %.1f us", link.name, link.span, link.bytes_per_s / 1e9,
                link.latency_us,
            )  # fmt: skip
    return links, tuple(measured), key


def cluster_key(
    placement: JobPlacement, processors: Sequence[str], levels: Sequence[Level]
) -> Mapping[str, Any]:
    """Return what the speeds of links depend on: kinds of hosts and devices and how they are joined, no host's name.

    Args:
        processors: of the hosts, in their order.
    """
    names = [[placement.places[rank].name for rank in ranks] for ranks in placement.hosts]
    return {
        "release": __version__,
        "hosts": [list(pair) for pair in zip(processors, names, strict=True)],
        "ranks": [list(ranks) for ranks in placement.hosts],
        "levels": [[level.name, level.span] for level in levels],
        "backend": placement.backend,
    }


def measure_models(
    placement: JobPlacement, group: dist.ProcessGroup | None, measure: Callable[[], Speeds]
) -> dict[str, Speeds]:
    """Return what devices of each model reach, measured by the first rank of each; collective."""
    names = [place.name for place in placement.places]
    is_first = names.index(placement.own_place.name) == placement.rank
    found = exchange(lambda: measure() if is_first else None, what="the speed of the devices", group=group)
    return {name: speeds for name, speeds in zip(names, found, strict=True) if speeds is not None}
