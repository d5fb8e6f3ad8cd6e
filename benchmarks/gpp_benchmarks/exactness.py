"""Random plans, schedules and delays against one process: the gradients must be the same.

Every draw is a random DAG of plain linear stages on 2 or 4 ranks, with mixed micro-batches and degrees. Its schedules
are 1F1B, GPipe, kFkB, greedy, sliced, zero-bubble, or a mixture. It goes the way of a real plan: schedules, lowering,
validator, executor, gloo. Three mini-batches run one behind the other, with a step between them and nothing that would
hold a rank back. Gradients must equal those of one process, by the norm of each tensor: to 1e-12 in fp64, to 1e-5 in
fp32. Some draws take differences of large numbers, which fp32 knows to fewer digits. There the bound is four times the
error of one process in fp32, measured in fp64. That error is the largest over the same numbers and numbers one step of
rounding away. A share of draws runs once more with a random delay of 0 to 50 ms before every task and must give the
same bits. As many draws again put several stages on a rank (--shared): round and round, or anywhere. Of both kinds
some are in mode async, against PipeDream's rule in one process, and some run a frozen branch a mini-batch ahead. More
draws go through the validator only, without processes.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from gpp_benchmarks._exactness_ranks import ALL_FAMILIES, FAMILIES, MINI_BATCHES, Case, CaseResult, draw_cases
from gpp_benchmarks._linear_stages import FP32_LIMIT, fp32_limit
from gpp_benchmarks._options import add_option
from gpp_benchmarks._random_plans import check_schedule_draws
from gpp_benchmarks._ranks import bench_ranks
from gpp_plugin.errors import ConfigError

FP64_LIMIT = 1e-12
ERRORS = ("fp64_error", "fp32_error", "fp32_over_rounding")
START_S = 60.0
CASE_S = 30.0
"""Seconds allowed for one case; a hang ends much earlier, by the time limit of messages."""


TABLE = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add_option(parser, "--cases", 300, "draws to run")
    add_option(parser, "--shared", 300, "more of them, with several stages a rank")
    add_option(parser, "--delayed-every", 4, "run every n-th with delays too; 0: none")
    add_option(parser, "--programs", 2000, "draws for the validator")
    add_option(parser, "--ranks", [2, 4], "numbers of ranks")
    add_option(parser, "--seed", 0, "of the first draw")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return a row a family and number of ranks, one for the validator, and whether all is well."""
    if (
        min(args.cases, args.shared) < 0
        or args.programs < 0
        or args.delayed_every < 0
        or not set(args.ranks) <= {2, 3, 4}
    ):
        raise ConfigError(
            f"--cases {args.cases} --shared {args.shared} --programs {args.programs} --delayed-every "
            f"{args.delayed_every} --ranks {args.ranks}: give no negative numbers, and 2 to 4 ranks"
        )
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    for position, num_ranks in enumerate(args.ranks):
        cases: list[Case] = []
        for count, shares_ranks in ((args.cases, False), (args.shared, True)):
            cases += draw_cases(
                len(range(position, count, len(args.ranks))),
                seed=args.seed + position * count,
                delayed_every=args.delayed_every,
                shares_ranks=shares_ranks,
            )
        results = list(_run(cases, num_ranks))
        rows += _rows(results, num_ranks)
        failures += [f"{num_ranks} ranks: {line}" for line in map(_failure, results) if line]
    if args.programs:
        row, invalid = _validate(args.programs, args.seed)
        rows.append(row)
        failures += invalid
    for line in failures:
        print(f"FAILED {line}")
    return {"rows": rows, "summary": _summary(rows), "failures": failures, "ok": not failures}


def _run(cases: list[Case], num_ranks: int) -> Iterator[CaseResult]:
    if not cases:
        return
    print(f"{len(cases)} draws on {num_ranks} ranks", flush=True)
    settings, timeout_s = {"cases": [asdict(case) for case in cases]}, START_S + CASE_S * len(cases)
    events = bench_ranks("_exactness_ranks", settings, num_ranks=num_ranks, timeout_s=timeout_s)
    for done, event in enumerate(events, start=1):
        event.pop("event")
        yield CaseResult(**event)
        if done % max(1, len(cases) // 5) == 0:
            print(f"  {done} of {len(cases)}", flush=True)


def _rows(results: list[CaseResult], num_ranks: int) -> list[dict[str, Any]]:
    of_family: dict[tuple[bool, str], list[CaseResult]] = defaultdict(list)
    for result in results:
        of_family[result.shares_ranks, result.family].append(result)
    return [
        {
            "family": family,
            "ranks": num_ranks,
            "shares_ranks": shares,
            "draws": len(found),
            "mini_batches": MINI_BATCHES,
            "fp64_error": max(r.fp64_error for r in found),
            "fp32_error": max(r.fp32_error for r in found),
            "fp32_over_rounding": max(_over_rounding(r) for r in found),
            "delayed": sum(r.is_equal_delayed is not None for r in found),
            "delayed_equal": sum(r.is_equal_delayed is True for r in found),
        }
        for shares in (False, True)
        for family in ALL_FAMILIES
        if (found := of_family[shares, family])
    ]


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    run = [row for row in rows if "valid" not in row]
    validated = [row for row in rows if "valid" in row]
    return {
        "cases": sum(row["draws"] for row in run),
        "shared": sum(row["draws"] for row in run if row["shares_ranks"]),
        **{key: max((row[key] for row in run), default=None) for key in ERRORS},
        **{key: sum(row[key] for row in run) for key in ("delayed", "delayed_equal")},
        "programs": sum(row["draws"] for row in validated),
        "valid_programs": sum(row["valid"] for row in validated),
    }


def _failure(result: CaseResult) -> str | None:
    where = f"seed {result.seed}, {result.family}{', several stages a rank' if result.shares_ranks else ''}"
    if not result.fp64_error <= FP64_LIMIT:
        return f"{where}: fp64 gradients differ by {result.fp64_error:.1e}, at most {FP64_LIMIT:g} is allowed"
    limit = fp32_limit(result.fp32_rounding)
    if not result.fp32_error <= limit:
        return (
            f"{where}: fp32 gradients differ by {result.fp32_error:.1e}, at most {limit:.1e} is allowed "
            f"(one process in fp32 is {result.fp32_rounding:.1e} off itself in fp64)"
        )
    if result.is_equal_delayed is False:
        return f"{where}: with delays the gradients have other bits"
    return None


def _over_rounding(result: CaseResult) -> float:
    """Return how many times the rounding of one process ours is off it; 0 where it is within `FP32_LIMIT`."""
    if result.fp32_error <= FP32_LIMIT:
        return 0.0
    return result.fp32_error / result.fp32_rounding if result.fp32_rounding else float("inf")


def _validate(num_programs: int, seed: int) -> tuple[dict[str, Any], list[str]]:
    print(f"{num_programs} programs through the validator", flush=True)
    each, rest = divmod(num_programs, len(FAMILIES))
    passed, failures = check_schedule_draws(range(seed, seed + each))
    more, more_failures = check_schedule_draws([seed + each], FAMILIES[:rest])
    count = sum(passed.values()) + sum(more.values())
    row = {"family": "all, validated only", "draws": num_programs, "valid": count}
    return row, [*failures, *more_failures]
