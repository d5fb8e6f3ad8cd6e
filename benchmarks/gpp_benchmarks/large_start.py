"""What starting a job of many ranks takes: groups, requests to the job's store, bytes, sockets; modelled and counted.

The model is of a chain of stages with data-parallel ranks, eight ranks a host, on CPUs, where all groups are gloo's.
Each number of ranks has two rows: every rank reads every other's facts and gloo connects each with each, which is
what torch does by itself; and as this plugin has it. ``store s`` is
how long rank 0's store is at work, at ``--request-us`` for a request and ``--store-gbs`` for bytes; ``turns`` how
many channels of NCCL are opened one after another. With ``--start`` ranks of a tiny model are started here, as many
as asked for, and train two steps; their requests, groups and sockets (those that listen, too) are counted and stand
beside the model's.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpp_benchmarks._options import add_option
from gpp_benchmarks._ranks import bench_ranks
from gpp_plugin.errors import ConfigError, RuntimeFailure
from gpp_plugin.runtime.messages.sockets import MOST_MESHED, opening_rounds
from gpp_plugin.runtime.ranks.placement_of_ranks import packed

# What the start of a job asks of the job's store and of sockets, rank by rank: a model, no process runs.
#
# A start on CPUs, as `runtime/ranks` and `engine/stage_groups.py` have it:
#
#     placement   every rank writes what it sees; rank 0 reads all of it and writes it once more, for all
#     processes   every rank writes its process for the failure board, and reads those of its own host
#     groups      gloo: a group's members write an address each and read those of the members that they connect to
#
# Three groups are of all ranks (the default one, agreements, the stages' world) and two more for messages; then one of
# the rank alone, and for each stage one of its ranks. A graph of stages has three more for each (`StageContext`): of
# its ranks, and twice of each of them alone. A rank outside of a group passes its making by, without a request.
#
# `WAYS` are what ranks did before and do now. Meshed, a group's member connects to all others and reads from each what
# it wrote, 8 bytes for each rank: n x n requests and n x n x 8 n bytes a group. Of a group that connects when it is
# used, a rank connects to its neighbours of the ring and the trees that sums and broadcasts go along, or to the ranks
# that it exchanges messages with.

ADDRESS_BYTES = 154
"""Of a member of a gloo group: its host name and port; 8 more for each member of a meshed group."""

PORT_BYTES = 8

OF_ALL_RANKS = 3
"""Groups of all ranks that sums and broadcasts go along; the two for messages are counted apart."""

FOR_MESSAGES = 2

WAYS = ("each reads all", "rank 0 tells all")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job to start: a chain of stages, each on as many ranks.

    Args:
        num_stages: of the chain, a graph of modules; ranks are theirs in equal parts, in the order of the stages.
        ranks_a_host: processes of one machine.
    """

    num_ranks: int
    num_stages: int
    ranks_a_host: int = 8

    @property
    def degree(self) -> int:
        """Return the ranks of a stage."""
        return self.num_ranks // self.num_stages

    @property
    def channels(self) -> list[tuple[int, int]]:
        """Return (sender, receiver) of every pair of ranks that exchanges messages, forwards and backwards."""
        forwards = [(rank, rank + self.degree) for rank in range(self.num_ranks - self.degree)]
        return [*forwards, *((target, source) for source, target in forwards)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """What is asked of the store, by all ranks together.

    Args:
        requests: each a message to rank 0's process and one back; its one thread answers one after another.
        written, read: bytes of values.
    """

    requests: int
    written: int
    read: int

    def __add__(self, other: Requests) -> Requests:
        return Requests(
            requests=self.requests + other.requests,
            written=self.written + other.written,
            read=self.read + other.read,
        )


def placement_requests(job: Job, *, way: str) -> Requests:
    """Return what it takes all ranks to know where all of them run."""
    facts = [
        {
            "host": f"node{rank // job.ranks_a_host:04}/{rank // job.ranks_a_host:08x}-0000-4000-8000-000000000000",
            "local_rank": rank % job.ranks_a_host,
            "devices": [],
            "names": [],
        }
        for rank in range(job.num_ranks)
    ]
    n, told, of_all = job.num_ranks, sum(len(json.dumps(each)) for each in facts), len(packed(facts))
    if way == WAYS[0]:  # each writes one and waits for and reads n
        return Requests(requests=n + 2 * n * n, written=told, read=n * told)
    # rank 0 waits for n, reads them at once and writes all; the others wait for that and read it
    return Requests(requests=n + 3 + 2 * (n - 1), written=told + of_all, read=told + (n - 1) * of_all)


def process_requests(job: Job, *, way: str) -> Requests:
    """Return what it takes ranks to know the processes that they look after: at most, each looks twice for one."""
    n, seen = job.num_ranks, job.num_ranks if way == WAYS[0] else min(job.ranks_a_host, job.num_ranks)
    size = len('["pid:[4026531836]", 100000, 100000000]')
    return Requests(requests=n + 2 * n * (seen - 1), written=n * size, read=n * (seen - 1) * size)


def group_requests(num_members: int, *, peers: int | None) -> Requests:
    """Return what it takes to make one gloo group.

    Args:
        peers: members that each connects to; None: all of them, when the group is made.
    """
    # A member of a meshed group reads its own address too.
    read = num_members if peers is None else peers
    size = ADDRESS_BYTES + (PORT_BYTES * num_members if peers is None else 0)
    return Requests(
        requests=num_members * (1 + 2 * read), written=num_members * size, read=num_members * read * size
    )


def tree_peers(num_members: int) -> int:
    """Return how many others a member meets at most in rings (two) and in trees, as a root and as a leaf."""
    return min(num_members - 1, 2 + 2 * math.ceil(math.log2(num_members))) if num_members > 1 else 0


def is_meshed(job: Job, *, way: str) -> bool:
    """Return whether gloo connects all members of the job's groups when they are made."""
    return way == WAYS[0] or job.num_ranks <= MOST_MESHED


def groups_of_rank(job: Job) -> tuple[int, int]:
    """Return how many groups a rank makes or passes, and of how many of them it is a member."""
    # Of a rank alone there are three, which nobody else goes through; a stage of one rank is told of as the others are,
    # but for its first group.
    of_stages = job.num_stages if job.degree > 1 else 1
    return OF_ALL_RANKS + FOR_MESSAGES + 3 + job.num_stages + of_stages, OF_ALL_RANKS + FOR_MESSAGES + 5


def all_group_requests(job: Job, *, way: str) -> Requests:
    """Return what it takes to make all groups of the job."""
    n = job.num_ranks
    meshed = is_meshed(job, way=way)
    whole = group_requests(n, peers=None if meshed else tree_peers(n))
    stage = group_requests(job.degree, peers=None if meshed else tree_peers(job.degree))
    alone = group_requests(1, peers=None if meshed else 0)
    met = message_peers(job)
    messages = group_requests(n, peers=None if meshed else met)
    total = Requests(requests=0, written=0, read=0)
    for made, times in (
        (whole, OF_ALL_RANKS),
        (messages, FOR_MESSAGES),
        (stage, 2 * job.num_stages),
        (alone, 3 * n),
    ):
        for _ in range(times):
            total += made
    return total


def message_peers(job: Job) -> int:
    """Return how many ranks a rank exchanges messages with at most."""
    return min(2, job.num_stages - 1)


def sockets_of_rank(job: Job, *, way: str) -> int:
    """Return how many connections of groups a rank has at most."""
    n = job.num_ranks
    if is_meshed(job, way=way):
        return (OF_ALL_RANKS + FOR_MESSAGES) * (n - 1) + 2 * (job.degree - 1)
    return OF_ALL_RANKS * tree_peers(n) + FOR_MESSAGES * message_peers(job) + 2 * tree_peers(job.degree)


def channel_turns(job: Job, *, way: str) -> int:
    """Return how many channels are opened one after another: in a sorted queue, or in rounds (`opening_order`)."""
    if way != WAYS[0]:
        return len(opening_rounds(job.channels))
    turn = [0] * job.num_ranks  # of a rank's last channel so far
    for source, target in sorted(job.channels):
        turn[source] = turn[target] = 1 + max(turn[source], turn[target])
    return max(turn, default=0)


MOST_STAGES = 8
MOST_SECONDS = 1800.0
"""Of ranks started here: each captures the model, many on one core."""

TABLE = ()
"""The tables that are printed have every column (`gpp_plugin.report.rows_text`)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add_option(parser, "--ranks", [64, 256, 1024], "jobs to model")
    parser.add_argument("--stages", type=int, help=f"of the chain (as many as ranks, {MOST_STAGES} at most)")
    parser.add_argument("--start", nargs="*", type=int, default=[], help="jobs to start here (none)")
    add_option(parser, "--request-us", 20.0, "of the store, a request")
    add_option(parser, "--store-gbs", 1.0, "GB a second of the store")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return the rows of the model, and those of the jobs that were started."""
    if args.request_us <= 0 or args.store_gbs <= 0:
        raise ConfigError(
            f"--request-us {args.request_us:g}, --store-gbs {args.store_gbs:g}: give more than 0"
        )
    jobs = [_job(ranks, args.stages) for ranks in args.ranks]
    started = [_job(ranks, args.stages, ranks_a_host=ranks) for ranks in args.start]
    rows = [
        _modelled(job, way=way, request_us=args.request_us, store_gbs=args.store_gbs)
        for job in jobs
        for way in WAYS
    ]
    return {"rows": rows + [row for job in started for row in _counted(job, start(job))]}


def _job(num_ranks: int, num_stages: int | None, *, ranks_a_host: int = 8) -> Job:
    stages = min(MOST_STAGES, num_ranks) if num_stages is None else num_stages
    if num_ranks < 2 or not 2 <= stages <= num_ranks or num_ranks % stages:
        raise ConfigError(
            f"{num_ranks} ranks in {stages} stages: give at least 2 of each, and stages that divide the ranks"
        )
    return Job(num_ranks=num_ranks, num_stages=stages, ranks_a_host=ranks_a_host)


def _modelled(job: Job, *, way: str, request_us: float, store_gbs: float) -> dict[str, Any]:
    placement = placement_requests(job, way=way)
    total = placement + process_requests(job, way=way) + all_group_requests(job, way=way)
    made, member = groups_of_rank(job)
    return {
        "way": way,
        "ranks": job.num_ranks,
        "stages": job.num_stages,
        "groups": made,
        "member_of": member,
        "placement_requests": placement.requests,
        "requests": total.requests,
        "read_mb": total.read / 1e6,
        "store_s": total.requests * request_us / 1e6 + (total.read + total.written) / store_gbs / 1e9,
        "sockets": sockets_of_rank(job, way=way),
        "turns": channel_turns(job, way=way),
    }


def start(job: Job) -> list[dict[str, Any]]:
    """Return what each rank of a job counted that was started here.

    Raises:
        RuntimeFailure: a rank failed, ranks disagree on a loss, or the time ran out.
    """
    settings = {
        "num_ranks": job.num_ranks,
        "num_stages": job.num_stages,
        "degree": job.degree,
        "timeout_s": MOST_SECONDS,
    }
    # one process, which forks the others
    (event,) = bench_ranks("_large_start_ranks", settings, num_ranks=1, timeout_s=MOST_SECONDS)
    found: list[dict[str, Any]] = event["found"]
    if len({tuple(rank["losses"]) for rank in found}) != 1:
        raise RuntimeFailure(f"the ranks do not have one loss: {[rank['losses'] for rank in found]}")
    return found


def _counted(job: Job, ranks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row of what the model says of a job that was started, and one of what was counted."""
    way = WAYS[1]
    model = {
        "placement": placement_requests(job, way=way),
        "processes": process_requests(job, way=way),
        "groups": all_group_requests(job, way=way),
    }
    made, member = groups_of_rank(job)
    shared = {"ranks": job.num_ranks, "stages": job.num_stages, "meshed": is_meshed(job, way=way)}
    counted = {
        name: {kind: sum(rank["counts"][name][kind] for rank in ranks) for kind in ("requests", "read")}
        for name in model
    }
    return [
        {
            "what": "model",
            **shared,
            "groups": made,
            "member_of": member,
            **{f"{name}_requests": each.requests for name, each in model.items()},
            "groups_read_kb": model["groups"].read / 1e3,
            "sockets": sockets_of_rank(job, way=way),
            "ready_s": None,
            "own_mb": None,
        },
        {
            "what": "counted",
            **shared,
            "groups": max(len(rank["groups"]) for rank in ranks) + 1,  # and the default one
            "member_of": max(sum(has for _, has in rank["groups"]) for rank in ranks) + 1,
            **{f"{name}_requests": counted[name]["requests"] for name in model},
            "groups_read_kb": counted["groups"]["read"] / 1e3,
            "sockets": max(rank["sockets"] for rank in ranks),
            "ready_s": max(rank["ready_s"] for rank in ranks),
            "own_mb": max(rank["own_mb"] for rank in ranks),
        },
    ]
