"""Small graphs of stages in fp64 on gpp and three peers: exact, wrong by how much, deadlock, or refused.

Chain, two encoders, uneven depth, skip, diamond, two sinks, data-parallel 2 to 1, 1 to 2 and 2 to 3, a micro-batch size
per module, tensor-parallel 2 beside 1, int and bool edges. Every gradient is compared with one process, by the norm of
whole tensors. DeepSpeed and torch know chains only: a graph is put in a line for them, as their users do by hand;
Megatron-core's multi-module communicator runs as released and with patches/. Every cell is a job of its own.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from gpp_benchmarks._options import add_choices, add_option
from gpp_benchmarks._ranks import ON_CPU, bench_ranks
from gpp_plugin.errors import ConfigError, RuntimeFailure

SYSTEMS = ("gpp", "deepspeed", "torch", "megatron", "megatron_patched")
START_S = 120.0
EXACT = 1e-12
LONGEST_REASON = 160


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add_choices(parser, "--systems", SYSTEMS, "runtimes (all)")
    parser.add_argument("--topologies", nargs="+", default=None, help="names of graphs (all)")
    add_option(parser, "--rounds", 20, "timed steps of each cell")
    add_option(parser, "--limit", 20.0, "seconds after which a cell is a deadlock")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return one row a graph and system.

    Raises:
        ConfigError: an option is wrong.
    """
    from gpp_benchmarks._topology_models import topologies

    known = {topology.name: topology.num_ranks for topology in topologies()}
    wanted = list(known) if args.topologies is None else args.topologies
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ConfigError(f"--topologies: no graph {unknown[0]!r}; the graphs are {', '.join(known)}")
    if args.rounds < 1 or args.limit <= 0:
        raise ConfigError("--rounds and --limit must be above 0")
    rows = []
    for name in wanted:
        print(f"{name} ({known[name]} ranks)", flush=True)
        for system in args.systems:
            row = _cell(name, system, known[name], args)
            rows.append(row)
            print(_line(row), flush=True)
    return {"rows": rows, "exact_below": EXACT}


def _cell(topology: str, system: str, num_ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    row = {
        "topology": topology,
        "system": system,
        "status": "deadlock",
        "max_relative_gradient_error": None,
        "iteration_ms": None,
        "detail": f"no end within {args.limit:g} s",
    }
    environment = dict(ON_CPU)
    if system == "megatron_patched":
        from gpp_plugin.doctor.checks import patched_package

        with patched_package("megatron-core") as folder:
            paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
            environment["PYTHONPATH"] = os.pathsep.join(paths)
            return row | _outcome(topology, system, num_ranks, args, environment)
    return row | _outcome(topology, system, num_ranks, args, environment)


def _outcome(
    topology: str, system: str, num_ranks: int, args: argparse.Namespace, environment: dict[str, str]
) -> dict[str, Any]:
    settings = {"topology": topology, "system": system, "rounds": args.rounds, "limit_s": args.limit}
    try:
        options: dict[str, Any] = {"num_ranks": num_ranks, "timeout_s": START_S + args.limit}
        for event in bench_ranks("_topology_ranks", settings, **options, environment=environment):
            if event["event"] == "refused":
                return {"status": "refused", "detail": " ".join(event["reason"].split())[:LONGEST_REASON]}
            if event["event"] == "deadlock":
                return {}
            if event["event"] == "done":
                error, seconds = event["error"], event["iteration_s"]
                return {
                    "status": "exact" if error <= EXACT else "wrong",
                    "max_relative_gradient_error": error,
                    "iteration_ms": None if seconds is None else seconds * 1e3,
                    "detail": "",
                }
    except RuntimeFailure as failure:
        return {"status": "refused", "detail": " ".join(str(failure).split())[-LONGEST_REASON:]}
    return {}


def _line(row: dict[str, Any]) -> str:
    error, time_ms = row["max_relative_gradient_error"], row["iteration_ms"]
    shown = "" if error is None else f" {error:.1e}"
    shown += "" if time_ms is None else f" {time_ms:.2f} ms"
    return f"  {row['system']:<18} {row['status']:<9}{shown} {row['detail']}".rstrip()
