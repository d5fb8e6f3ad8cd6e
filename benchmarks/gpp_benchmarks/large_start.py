"""What starting a job of many ranks takes: groups, requests to the job's store, bytes, sockets; modelled and counted.

The model (`benchmarks/gpp_benchmarks/_start_traffic.py`) is of a chain of stages with data-parallel ranks, eight
ranks a host, on CPUs, where all groups are gloo's. Each number of ranks has two rows: every rank reads every other's
facts and gloo connects each with each, which is what torch does by itself; and as this plugin has it. ``store s`` is
how long rank 0's store is at work, at ``--request-us`` for a request and ``--store-gbs`` for bytes; ``turns`` how
many channels of NCCL are opened one after another. With ``--start`` ranks of a tiny model are started here, as many
as asked for, and train two steps; their requests, groups and sockets (those that listen, too) are counted and stand
beside the model's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from gpp_benchmarks._start_traffic import (
    WAYS,
    Job,
    all_group_requests,
    channel_turns,
    groups_of_rank,
    is_meshed,
    placement_requests,
    process_requests,
    sockets_of_rank,
)
from gpp_plugin.errors import ConfigError, RuntimeFailure
from gpp_plugin.launch import run_ranks

MOST_STAGES = 8
MOST_SECONDS = 1800.0
"""Of ranks started here: each captures the model, many on one core."""

TABLE = ()
"""The tables that are printed have every column (`gpp_plugin.report.rows_text`)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument(
        "--ranks", nargs="+", type=int, default=[64, 256, 1024], help="jobs to model (%(default)s)"
    )
    parser.add_argument("--stages", type=int, help=f"of the chain (as many as ranks, {MOST_STAGES} at most)")
    parser.add_argument("--start", nargs="*", type=int, default=[], help="jobs to start here (none)")
    parser.add_argument(
        "--request-us", type=float, default=20.0, help="of the store, a request (%(default)s)"
    )
    parser.add_argument("--store-gbs", type=float, default=1.0, help="GB a second of the store (%(default)s)")


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
    found: list[dict[str, Any]] = []
    for event in run_ranks(
        "gpp_benchmarks._large_start_ranks",
        [json.dumps(settings)],
        num_ranks=1,  # which forks the others
        timeout_s=MOST_SECONDS,
        environment={"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
    ):
        found = event["found"]
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
