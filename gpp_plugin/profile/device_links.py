"""What joins the devices of a job: levels of links as the hosts' topology has them, and how fast each turns out to be.

A `Link` joins ``span`` consecutive ranks, so that levels follow from which ranks are on one host, and which devices of
a host have NVLink between all pairs:

    ranks      0 1 2 3 | 4 5 6 7        two hosts of four GPUs, bridges 0-1, 2-3, 4-5, 6-7
    NVLink     0-1 2-3 | 4-5 6-7        span 2
    PCIe       0 .. 3  | 4 .. 7         span 4
    network    0      ..      7         span 8

A level of span s around one of span t is measured between ranks r and r + t, all pairs at the same time: 0-2 and 1-3
for PCIe, 0-4, 1-5, 2-6 and 3-7 for the network. What a host has one of, a network card or a switch of PCIe, its ranks
share then, as the stages of a pipeline do.

Source: this project
Tests: tests/profile/test_device_links.py
"""

from __future__ import annotations

import datetime
import importlib
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gpp_plugin.errors import CommTimeout, first_line
from gpp_plugin.ir.cluster import Link
from gpp_plugin.runtime.ranks.collectives import exchange
from gpp_plugin.runtime.ranks.placement_of_ranks import JobPlacement

NVLINK, PCIE, HOST_MEMORY, NETWORK = "NVLink", "PCIe", "host memory", "network"

Pair = frozenset[str]
"""Two devices, as `RankPlace.device` names them."""

SMI_TIMEOUT_S = 30.0
PINGS = 20
BURST = 4
"""Messages behind each other whose time gives the bandwidth."""
REPEATS = 3
MESSAGE_BYTES = {"nccl": 1 << 26, "gloo": 1 << 22}


# ---- topology ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTopology:
    """What one host says of its devices.

    Args:
        nvlinks: the pairs of devices with NVLink between them.
        source: where that is from; empty where neither NVML nor nvidia-smi answers.
    """

    nvlinks: frozenset[Pair]
    source: str


def read_topology(devices: Sequence[str]) -> HostTopology:
    """Return which of these devices of this host, by their UUIDs, have NVLink between them.

    Read from NVML's Python package, else from ``nvidia-smi``. Torch only shows whether two devices reach each other,
    not by which way, and nothing of devices that this process does not see.
    """
    pairs = [(a, b) for i, a in enumerate(devices) for b in devices[i + 1 :]]
    if not pairs:
        return HostTopology(nvlinks=frozenset(), source="one device")
    for source, read in (("NVML", _read_nvml), ("nvidia-smi", _read_nvidia_smi)):
        found = read(pairs)
        if found is not None:
            return HostTopology(nvlinks=found, source=source)
    return HostTopology(nvlinks=frozenset(), source="")


def _read_nvml(pairs: Sequence[tuple[str, str]]) -> frozenset[Pair] | None:
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # no package, no driver, or a driver that is older than the package
        return None
    try:
        # through a switch or directly: a link's remote end may be the switch, the status of a pair is of the pair
        handles = {name: nvml.nvmlDeviceGetHandleByUUID(name) for pair in pairs for name in pair}
        return frozenset(
            frozenset((a, b))
            for a, b in pairs
            if nvml.nvmlDeviceGetP2PStatus(handles[a], handles[b], nvml.NVML_P2P_CAPS_INDEX_NVLINK)
            == nvml.NVML_P2P_STATUS_OK
        )
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


def _read_nvidia_smi(pairs: Sequence[tuple[str, str]]) -> frozenset[Pair] | None:
    try:
        listed, matrix = (
            subprocess.run(
                ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=True
            ).stdout
            for arguments in (["--query-gpu=index,uuid", "--format=csv,noheader"], ["topo", "-m"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    index = {uuid.strip(): int(number) for number, uuid in (r.split(",") for r in listed.splitlines() if r)}
    joined = parse_topology(matrix)
    if joined is None or not index.keys() >= {name for pair in pairs for name in pair}:
        return None
    return frozenset(frozenset((a, b)) for a, b in pairs if frozenset((index[a], index[b])) in joined)


def parse_topology(text: str) -> frozenset[frozenset[int]] | None:
    """Return the pairs of GPUs, by index, that ``nvidia-smi topo -m`` joins by NVLink; None where it is no matrix.

    >>> sorted(map(sorted, parse_topology("      GPU0 GPU1 GPU2 NIC0\\nGPU0   X NV4 SYS PIX\\nGPU1 NV4 X PHB PIX\\n"
    ...     "GPU2 SYS PHB X SYS\\nNIC0 PIX PIX SYS X") or ()))
    [[0, 1]]
    """
    # the header is underlined by escapes on some drivers; columns after the GPUs are network cards and affinities
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    rows = [line.split() for line in lines if re.match(r"GPU\d+\s", line)]
    columns = [int(number) for number in re.findall(r"\bGPU(\d+)\b", next(iter(lines), ""))]
    if not rows or len(rows) != len(columns) or any(len(row) <= len(columns) for row in rows):
        return None
    return frozenset(
        frozenset((int(row[0][3:]), other))
        for row in rows
        for other, kind in zip(columns, row[1 : len(columns) + 1], strict=True)
        if kind.startswith("NV")
    )


# ---- levels --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A level of links: ``name`` joins ``span`` consecutive ranks."""

    name: str
    span: int


def link_levels(
    placement: JobPlacement, topologies: Sequence[HostTopology]
) -> tuple[tuple[Level, ...], tuple[str, ...]]:
    """Return the levels from the innermost to the outermost, which joins all ranks, and what is to be said of them.

    Args:
        topologies: of the hosts, in the order of `JobPlacement.hosts`.
    """
    # Three answers: ranks that are no blocks of hosts (one level, and why), ranks that talk through host memory, and
    # devices joined as their topology says. Between hosts there is one level more.
    num_ranks, hosts = len(placement.places), placement.hosts
    if not placement.is_consecutive:
        shown = "; ".join(f"{placement.places[r[0]].host.split('/')[0]}: {list(r)}" for r in hosts)
        return (Level(name=NETWORK, span=num_ranks),), (
            f"hosts do not hold equally many consecutive ranks ({shown}), and a link joins consecutive ones: every "
            "message is counted as one between hosts; start the ranks host by host, as many on each",
        )
    per_host = len(hosts[0])
    notes: list[str] = []
    levels: list[Level] = []
    if placement.backend == "gloo":
        levels += [Level(name=HOST_MEMORY, span=per_host)] if per_host > 1 else []
    else:
        nvlinks = frozenset[Pair]().union(*(topology.nvlinks for topology in topologies))
        island = _island(placement, nvlinks)
        if any(not topology.source for topology in topologies):
            notes.append(
                "neither NVML nor nvidia-smi says how the devices of a host are joined: all links within a host are "
                f"counted as {PCIE} and measured as one; pip install nvidia-ml-py"
            )
        if nvlinks and island == 1:
            notes.append(
                f"there is NVLink between {len(nvlinks)} pairs of devices, and no equal blocks of consecutive ranks "
                f"have it between all their pairs: all links within a host are counted as {PCIE}"
            )
        levels += [Level(name=NVLINK, span=island)] if island > 1 else []
        if per_host > island or per_host == 1 == len(hosts):
            levels.append(Level(name=PCIE, span=per_host))
    levels += [Level(name=NETWORK, span=num_ranks)] if len(hosts) > 1 else []
    return tuple(levels), tuple(notes)


def _island(placement: JobPlacement, nvlinks: Collection[Pair]) -> int:
    """Return the largest number of consecutive ranks of which all blocks have NVLink between all pairs; 1: none."""
    names = [place.device for place in placement.places]
    per_host = len(placement.hosts[0])

    def is_joined(block: Sequence[str]) -> bool:
        return all(frozenset((a, b)) in nvlinks for i, a in enumerate(block) for b in block[i + 1 :])

    for size in range(per_host, 1, -1):
        if per_host % size == 0 and all(is_joined(names[i : i + size]) for i in range(0, len(names), size)):
            return size
    return 1


def level_pairs(levels: Sequence[Level], index: int, placement: JobPlacement) -> tuple[tuple[int, int], ...]:
    """Return the pairs of ranks between which a level is measured, all at the same time."""
    # spans 2, 4: at level 1 ranks 0 and 1 pair with 2 and 3; 4 and 5 with 6 and 7
    span, num_ranks = levels[index].span, len(placement.places)
    if not placement.is_consecutive:
        first, second = placement.hosts[:2]
        return tuple((min(pair), max(pair)) for pair in zip(first, second, strict=False))
    inner = levels[index - 1].span if index else 1
    return tuple(
        (rank, rank + inner)
        for rank in range(num_ranks - inner)
        if (rank % span) // inner % 2 == 0 and rank // span == (rank + inner) // span
    )


# ---- measuring -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSpeed:
    """What was measured between two ranks, from ``first`` to ``second``."""

    first: int
    second: int
    bytes_per_s: float
    latency_us: float


def measure_levels(
    levels: Sequence[Level],
    measure: Callable[[Sequence[tuple[int, int]]], Sequence[PairSpeed]],
    placement: JobPlacement,
) -> tuple[Link, ...]:
    """Return each level as a link: the bandwidth of its slowest pair, the latency of its median one.

    Args:
        measure: measures pairs of ranks, each rank in one of them at most; `measure_pairs`.
    """
    links = []
    for index, level in enumerate(levels):
        found = measure(level_pairs(levels, index, placement))
        links.append(
            Link(
                name=level.name,
                span=level.span,
                bytes_per_s=min(speed.bytes_per_s for speed in found),
                latency_us=statistics.median(speed.latency_us for speed in found),
            )
        )
    return tuple(links)


def measure_pairs(
    pairs: Sequence[tuple[int, int]],
    *,
    messages: dist.ProcessGroup,
    group: dist.ProcessGroup | None,
    device: torch.device,
    timeout_s: float,
) -> tuple[PairSpeed, ...]:
    """Return what is measured between pairs of ranks, all at the same time; collective over all ranks.

    Args:
        pairs: ranks, each in one pair at most.
        messages: a group of all ranks over which is measured: NCCL's, with tensors on ``device``, or gloo's, with
            tensors in host memory.
        group: a CPU group of all ranks, for the results.
        timeout_s: how long a rank waits for one message of its pair.

    Raises:
        CommTimeout: a message of a pair did not come; says which pair.
    """
    rank = dist.get_rank()
    own = next((pair for pair in pairs if rank in pair), None)

    found = exchange(
        lambda: None if own is None else _Probe(own, messages, device, timeout_s).measure(),
        what="measuring links",
        group=group,
    )
    return tuple(speed for speed in (found[first] for first, _ in pairs) if speed is not None)


class _Probe:
    """One end of a pair that is measured; the first one looks at the clock."""

    #   latency     first  ping --->   <--- pong   ping --->   <--- pong ...    half the time of a round trip
    #   bandwidth   first  block ---> block ---> block ---> block --->   <--- pong
    #
    # Over gloo each message is waited for before the next one. NCCL's are put into the device's queue behind each other
    # and waited for together: what a host needs to notice that one has arrived is no part of the link.
    def __init__(
        self, pair: tuple[int, int], group: dist.ProcessGroup, device: torch.device, timeout_s: float
    ) -> None:
        self._pair = pair
        self._is_first = dist.get_rank() == pair[0]
        self._peer = pair[1] if self._is_first else pair[0]
        self._group = group
        self._backend = "nccl" if "nccl" in dist.get_backend_config(group) else "gloo"
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._queued: list[dist.Work] = []
        where = device if self._backend == "nccl" else torch.device("cpu")
        self._small = torch.zeros(1, device=where)
        self._block = torch.zeros(MESSAGE_BYTES[self._backend], dtype=torch.uint8, device=where)

    def measure(self) -> PairSpeed:
        """Return the speeds; what the second rank of the pair returns is not looked at.

        Raises:
            CommTimeout: the other rank did not answer.
        """
        try:
            self._seconds(self._block, 1, trips=1)  # connects
            trips = [self._seconds(self._small, 1, trips=PINGS) / PINGS for _ in range(REPEATS)]
            bursts = [self._seconds(self._block, BURST, trips=1) for _ in range(REPEATS)]
        except RuntimeError as error:
            raise CommTimeout(
                f"rank {dist.get_rank()} waited {self._timeout.total_seconds():g} s for rank {self._peer}, with which "
                f"it measures their link over {self._backend}: {first_line(error)}; look at rank {self._peer}'s "
                "output, and for what keeps messages between the two from arriving (a firewall, NCCL_SOCKET_IFNAME)"
            ) from error
        latency = statistics.median(trips) / 2
        burst_s = max(min(bursts) - latency, 1e-9)  # less the answer's way back
        bytes_per_s = BURST * self._block.numel() / burst_s
        first, second = self._pair
        return PairSpeed(first=first, second=second, bytes_per_s=bytes_per_s, latency_us=latency * 1e6)

    def _seconds(self, there: torch.Tensor, count: int, *, trips: int) -> float:
        """Move ``count`` tensors from the first rank to the second and one small one back, ``trips`` times."""
        start = time.perf_counter()
        for _ in range(trips):
            for _ in range(count):
                self._move(there, is_sender=self._is_first)
            self._move(self._small, is_sender=not self._is_first)
        while self._queued:
            work = self._queued.pop(0)
            # NCCL's own wait with a limit sleeps a millisecond at a time: a hundred times what is measured
            while not work.is_completed():
                if time.perf_counter() - start > self._timeout.total_seconds():
                    raise RuntimeError("nothing came")
        return time.perf_counter() - start

    def _move(self, tensor: torch.Tensor, *, is_sender: bool) -> None:
        move = dist.isend if is_sender else dist.irecv
        work = move(tensor, self._peer, self._group)
        assert work is not None, "both ranks are in the group"
        if self._backend == "gloo":
            work.wait(self._timeout)
        else:
            self._queued.append(work)


def rounds_of_pairs(num_ranks: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return all pairs of ranks in rounds in which each rank is in one pair at most.

    >>> rounds_of_pairs(4)
    (((0, 3), (1, 2)), ((0, 2), (1, 3)), ((0, 1), (2, 3)))
    """
    # a round-robin tournament: one player stays, the others move on by one; an odd one out pairs with nobody
    players = [*range(num_ranks), *([-1] if num_ranks % 2 else [])]
    half = len(players) // 2
    rounds = []
    for _ in range(len(players) - 1):
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        rounds.append(tuple(sorted((min(p), max(p)) for p in pairs if -1 not in p)))
        players = [players[0], players[-1], *players[1:-1]]
    return tuple(rounds)
