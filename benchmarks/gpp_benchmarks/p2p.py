"""What a message costs between two ranks on gloo: our transport, megatron-core's P2PCommunicator, bare isend/irecv.

Two ranks send one float tensor back and forth; a message takes half a round trip, from the call that sends to the end
of the wait, the receive posted beforehand. Every receive has a fresh buffer in all systems, as a stage that keeps its
input needs one. All systems run in turn in the same processes, round by round; medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

from gpp_plugin.errors import ConfigError
from gpp_plugin.launch import check_priority, run_ranks

SYSTEMS = ("native", "megatron", "bare")
START_S = 120.0
SECONDS_PER_MB = 0.05
SECONDS_PER_MESSAGE = 0.01


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="(all)")
    parser.add_argument(
        "--bytes", nargs="+", type=int, default=[1 << 10, 1 << 22], help="of a message (1 KB and 4 MB)"
    )
    parser.add_argument(
        "--messages", type=int, default=400, help="of 1 KB, each way, a round; fewer large ones (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=15, help="of each system (%(default)s)")
    parser.add_argument(
        "--real-time",
        action="store_true",
        help="real-time priority while messages are sent, for a machine with other work (needs root)",
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return a row a system and size.

    Raises:
        ConfigError: an option is wrong, or megatron-core is not installed.
        RuntimeFailure: a rank failed.
    """
    if min(args.messages, args.rounds) < 1 or any(size < 4 or size % 4 for size in args.bytes):
        raise ConfigError(
            f"--messages {args.messages} --rounds {args.rounds} --bytes {args.bytes}: give at least 1 message and "
            "round, and multiples of 4 bytes"
        )
    if "bare" not in args.systems:
        raise ConfigError(f"--systems {' '.join(args.systems)}: add bare, which the others are compared with")
    if "megatron" in args.systems:
        import torch

        from gpp_plugin.integrations.megatron.p2p import check_megatron_p2p

        check_megatron_p2p(torch.device("cpu"))
    if args.real_time:
        check_priority()
    sizes = [{"bytes": size, "messages": num_messages(size, args.messages)} for size in args.bytes]
    settings = {
        "systems": args.systems,
        "sizes": sizes,
        "rounds": args.rounds,
        "is_real_time": args.real_time,
    }
    seconds = sum(
        s["messages"] * (SECONDS_PER_MESSAGE + SECONDS_PER_MB * s["bytes"] / 1e6) * len(args.systems)
        for s in sizes
    )
    rows: list[dict[str, Any]] = []
    for event in run_ranks(
        "gpp_benchmarks._p2p_ranks",
        [json.dumps(settings)],
        num_ranks=2,
        timeout_s=START_S + seconds * (args.rounds + 1),
        environment={"DS_ACCELERATOR": "cpu"},
    ):
        found = _rows(event["bytes"], event["messages"], event["us"])
        rows += found
        for row in found:
            print(_line(row), flush=True)
    return {"rows": rows}


def num_messages(size: int, most: int) -> int:
    """Return how many messages of ``size`` bytes a round sends each way: fewer, the longer one takes."""
    return max(1, min(most, round(most * 40_000 / size)))


def _rows(size: int, messages: int, times_us: dict[str, list[float]]) -> list[dict[str, Any]]:
    bare = statistics.median(times_us["bare"])
    return [
        {
            "system": system,
            "bytes": size,
            "us_per_message": statistics.median(times),
            "ratio_to_bare": statistics.median(times) / bare,
            "fastest_us": min(times),
            "slowest_us": max(times),
            "messages": messages,
        }
        for system, times in times_us.items()
    ]


def _line(row: dict[str, Any]) -> str:
    return (
        "{bytes:>9} bytes  {system:<9} {us_per_message:9.1f} us a message ({fastest_us:.1f} to {slowest_us:.1f}), "
        "{ratio_to_bare:.2f} x bare"
    ).format(**row)
