"""Host time per task beyond compute, beside DeepSpeed's and torch's pipelines and a bare isend/irecv loop.

A chain of tiny linear layers, one a rank, 1F1B over gloo: all forwards, backwards and messages of a mini-batch.
Overhead is the median iteration less the median of pure compute (the same forwards and backwards on all ranks
at once, without messages), over micro-batches x stages. All runtimes run in turn in the same processes and must
leave the same gradients. The optimizer step is left out and has rows of its own. Processor time is that of all
threads of all ranks, beyond pure compute as well: it tells more where the machine is busy with other things.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from gpp_benchmarks._options import add_choices, add_option
from gpp_benchmarks._ranks import bench_ranks
from gpp_plugin.errors import ConfigError

RUNTIMES = ("gpp", "raw", "torch_1f1b", "torch_runtime", "deepspeed")
RIVAL_SHARES = {"torch_1f1b": 1.0, "deepspeed": 0.5}
"""Ours must cost at most this share of theirs."""

Sample = tuple[float, float, float]
"""Seconds: of the slowest rank's iteration, of the processors of all ranks, of the optimizer step."""

START_S = 120.0
ROUND_S = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add_option(parser, "--ranks", [2, 4], "numbers of ranks")
    add_option(parser, "--micro-batches", 32, "of one iteration")
    add_option(parser, "--micro-batch-size", 4, "samples of one")
    add_option(parser, "--width", 64, "of the linear layers")
    add_option(parser, "--rounds", 40, "iterations of each runtime")
    add_choices(parser, "--runtimes", RUNTIMES, "what to compare")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return a row a runtime and number of ranks, and how ours compares."""
    if min(args.ranks) < 2 or args.micro_batches < max(args.ranks) or args.rounds < 1:
        raise ConfigError(
            f"--ranks {args.ranks}, --micro-batches {args.micro_batches}, --rounds {args.rounds}: give at least 2 "
            "ranks, as many micro-batches as ranks, and 1 round"
        )
    rows: list[dict[str, Any]] = []
    verdicts: list[dict[str, Any]] = []
    for num_ranks in args.ranks:
        times = _measure(args, num_ranks)
        found = _rows(times, num_ranks, args.micro_batches)
        for row in found:
            print(_line(row), flush=True)
        rows += found
        verdicts += _verdicts(found, num_ranks)
    for verdict in verdicts:
        print("{ranks} ranks: gpp is {ratio:.2f} x {runtime}, at most {limit:.2f} wanted".format(**verdict))
    return {"rows": rows, "verdicts": verdicts}


def _measure(args: argparse.Namespace, num_ranks: int) -> dict[str, list[Sample]]:
    size = {
        "num_stages": num_ranks,
        "num_micro_batches": args.micro_batches,
        "micro_batch_size": args.micro_batch_size,
        "width": args.width,
    }
    settings = {"size": size, "runtimes": args.runtimes, "rounds": args.rounds}
    print(f"{num_ranks} ranks: {args.rounds} rounds of {', '.join(args.runtimes)}", flush=True)
    times: dict[str, list[Sample]] = {}
    timeout_s = START_S + ROUND_S * args.rounds * num_ranks
    for event in bench_ranks("_overhead_ranks", settings, num_ranks=num_ranks, timeout_s=timeout_s):
        if event["event"] == "times":
            times = event["times"]
        elif event["index"] % max(1, args.rounds // 4) == 0:
            print(f"  round {event['index']} of {args.rounds}", flush=True)
    return times


def _rows(times: dict[str, list[Sample]], num_ranks: int, micro_batches: int) -> list[dict[str, Any]]:
    medians = {
        name: [statistics.median(column) for column in zip(*samples, strict=True)]
        for name, samples in times.items()
    }
    per_task = 1e6 / (micro_batches * num_ranks)
    compute, compute_cpu, _ = medians["compute"]
    rows = [
        {
            "runtime": name,
            "ranks": num_ranks,
            "micro_batches": micro_batches,
            "overhead_us_per_task": (iteration - compute) * per_task,
            "cpu_us_per_task": (cpu - compute_cpu) * per_task,
            "iteration_ms": iteration * 1e3,
        }
        for name, (iteration, cpu, _) in medians.items()
    ]
    steps = [
        {
            "runtime": f"{name}: optimizer step",
            "ranks": num_ranks,
            "micro_batches": micro_batches,
            "step_us": step * 1e6,
        }
        for name, (_, _, step) in medians.items()
        if name != "compute"
    ]
    return [*rows, *steps]


def _line(row: dict[str, Any]) -> str:
    if "step_us" in row:
        return f"  {row['runtime']:<30} {row['step_us']:8.0f} us"
    return (
        f"  {row['runtime']:<30} {row['overhead_us_per_task']:8.1f} us a task, "
        f"{row['cpu_us_per_task']:.1f} us of processors, iteration {row['iteration_ms']:.2f} ms"
    )


def _verdicts(rows: list[dict[str, Any]], num_ranks: int) -> list[dict[str, Any]]:
    costs = {r["runtime"]: r["overhead_us_per_task"] for r in rows if "overhead_us_per_task" in r}
    if "gpp" not in costs:
        return []
    return [
        {
            "ranks": num_ranks,
            "runtime": rival,
            "ratio": costs["gpp"] / costs[rival],
            "limit": share,
            "met": costs["gpp"] <= share * costs[rival],
        }
        for rival, share in RIVAL_SHARES.items()
        if rival in costs
    ]
