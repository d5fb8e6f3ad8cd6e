"""What the plugin makes of more than a hundred families of models: captured, by what means, and exact in stages.

Every family is a small configuration with random weights: vision-language, speech and audio, encoder-decoder, pairs,
detection and segmentation, text and images. Each is captured on one loss unit and cut into two and into four stages by
GraphPipe's planner. The stages are run one behind the other in one process, at the captured length and at another one.
The loss must be the plain model's to 1e-6, and every gradient to 2e-6 by the norm of the tensor. Stages that do not
mix samples run a unit in two micro-batches as well. A model has a process of its own and a time limit, so that a crash
or a hang is one row. With --ranks models are trained instead: three steps of AdamW on so many gloo processes, a stage
each, against one process: losses to 1e-6, parameters to 1e-5. A model that is captured and is not what one process
computes makes the command fail.

--family plain has small torch modules as people write them instead: state that forward leaves behind, hooks, functions
of one's own, branches on values, nested and ragged inputs, other kinds of tensors. Each is trained for five steps of
two loss units on two ranks, which are kept for all, against one process: losses, parameters and buffers to 1e-5. What
is refused in a step, and not at the start, is `late`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gpp_benchmarks.zoo._catalogue import CATALOGUE, EXACT, KINDS, ONE_LENGTH, VERDICTS, WRONG, build, find
from gpp_benchmarks.zoo.plain import PLAIN, PLAIN_MODELS, plain_line, plain_rows
from gpp_plugin.errors import ConfigError, nearest

__all__ = ["CATALOGUE", "add_arguments", "build", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--models", nargs="+", metavar="NAME", help="by name (all)")
    parser.add_argument(
        "--family",
        nargs="+",
        choices=(*KINDS, PLAIN),
        help="classes of models (all of transformers); plain: small torch modules, on two ranks",
    )
    parser.add_argument("--first", type=int, metavar="N", help="no more than so many of them")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (%(default)s)")
    parser.add_argument(
        "--timeout", type=float, default=120.0, help="seconds of a model, then it is ended (%(default)g)"
    )
    parser.add_argument(
        "--ranks", type=int, default=0, help="train on so many processes, one model after the other (none)"
    )
    parser.add_argument(
        "--list", action="store_true", help="print names, classes and lengths, and try nothing"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return a row a model, a summary a class, and whether nothing is silently wrong.

    Raises:
        ConfigError: an option is wrong.
    """
    from gpp_benchmarks.zoo._children import rows_of
    from gpp_benchmarks.zoo._on_ranks import rows_on_ranks

    if args.family == [PLAIN]:
        return _run_plain(args)
    if args.jobs < 1 or args.timeout <= 0 or args.ranks < 0:
        raise ConfigError(
            f"--jobs {args.jobs} --timeout {args.timeout:g} --ranks {args.ranks}: give at least one process and a time"
        )
    names = [find(name).name for name in args.models or CATALOGUE]
    names = [name for name in names if not args.family or CATALOGUE[name].kind in args.family][: args.first]
    if not names:
        raise ConfigError(
            f"--models {' '.join(args.models)} --family {' '.join(args.family)}: no model is of both"
        )
    if args.list:
        for name in names:
            entry = CATALOGUE[name]
            print(
                f"{name:<28} {entry.kind:<16} {entry.model:<44} {entry.lengths[0]}, {entry.lengths[1]} {entry.means}",
            )
        return {"models": names}
    start, rows = time.monotonic(), list[dict[str, Any]]()
    tried = (
        rows_on_ranks(names, num_ranks=args.ranks, timeout_s=args.timeout)
        if args.ranks
        else rows_of(names, jobs=args.jobs, timeout_s=args.timeout)
    )
    for row in tried:
        rows.append(row)
        told = f"[{len(rows)}/{len(names)}, {time.monotonic() - start:.0f} s] {row['name']}: {row['verdict']}"
        print(told, file=sys.stderr, flush=True)
    rows.sort(key=lambda row: names.index(row["name"]))
    summary = summarise(rows)
    for row in rows:
        print(_line(row))
    for line in _summary_lines(summary):
        print(line)
    return {**_ended(rows, start), "summary": summary}


def _ended(rows: list[dict[str, Any]], start: float) -> dict[str, Any]:
    """Return the rows, the seconds since ``start``, and whether nothing is silently wrong."""
    wrong = [row["name"] for row in rows if row["verdict"] == WRONG]
    return {"rows": rows, "seconds": time.monotonic() - start, "wrong": wrong, "ok": not wrong}


def _run_plain(args: argparse.Namespace) -> dict[str, Any]:
    """Do the same with the plain zoo.

    Raises:
        ConfigError: an option is wrong.
    """
    names = list(args.models or PLAIN_MODELS)[: args.first]
    for name in names:
        if name not in PLAIN_MODELS:
            raise ConfigError(
                f"no module {name!r} in the plain zoo{nearest(name, PLAIN_MODELS)} (gpp bench zoo --family plain "
                f"--list names all {len(PLAIN_MODELS)})"
            )
    if args.list:
        for name in names:
            print(f"{name:<22} {PLAIN_MODELS[name].kind}")
        return {"models": names}
    start, rows = time.monotonic(), list[dict[str, Any]]()
    for row in plain_rows(names, timeout_s=args.timeout):
        rows.append(row)
        print(plain_line(row), flush=True)
    counts = Counter(row["verdict"] for row in rows)
    cut = sum(bool(row["cuttable"]) and row["cuttable"]["stages"] > 1 for row in rows)
    told = ", ".join(f"{verdict} {counts[verdict]}" for verdict in VERDICTS if counts[verdict])
    print(f"{len(rows)} modules: {told}; {cut} in two stages")
    cpu_s = sum(row.get("cpu_s", 0.0) for row in rows)
    return {**_ended(rows, start), "summary": dict(counts), "cpu_s": cpu_s}


def summarise(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return for every class, and for all, how many models met which end."""
    kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in rows)]
    summary = []
    for kind in (*kinds, "all"):
        ends = Counter(row["verdict"] for row in rows if kind in (row["kind"], "all"))
        total = sum(ends.values())
        captured = ends[EXACT] + ends[ONE_LENGTH]
        summary.append(
            {
                "kind": kind,
                "models": total,
                "captured_and_exact": captured,
                "share": captured / total,
                **{verdict.replace(" ", "_"): ends[verdict] for verdict in VERDICTS},
            }
        )
    return summary


def _line(row: Mapping[str, Any]) -> str:
    """Return a model's line of the table."""
    head = f"{row['name']:<28} {row['kind']:<16} {row['verdict']:<20}"
    if "ranks" in row:
        return (
            f"{head} {row['stages']} stages on {row['ranks']} ranks: losses {row['loss_error']:.1e}, "
            f"parameters {row['parameter_error']:.1e}{'; ' if row['line'] else ''}{row['line']}"
        )
    stages = row.get("stages")
    if not stages:
        return f"{head} {row['line']}"
    runs = [*stages, *row.get("other_length", [])]
    depths = ", ".join(f"{r['stages']} in depth {r['depth']}" for r in stages if r["micro_batches"] == 1)
    leaves = row["means"]["eager_leaves"]
    share = (
        f", {row['means']['eager_share']:.0%} of its operations in {len(leaves)} eager leaves"
        if leaves
        else ""
    )
    return (
        f"{head} {row['means']['how']}{share}; {depths or 'one stage'}; loss {max(r['loss_error'] for r in runs):.1e}, "
        f"gradients {max(r['gradient_error'] for r in runs):.1e}; capture {row['capture_s']:.1f} s"
        f"{'; ' if row['line'] else ''}{row['line']}"
    )


def _summary_lines(summary: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"{row['kind']:<16} {row['captured_and_exact']:>4} of {row['models']:>4} captured and exact "
        f"({row['share']:6.1%}), "
        f"{row['exact']} of them at both lengths; refused in one line {row['refused']}, raw errors {row['raw_error']}, "
        f"ended {row['ended']}, silently wrong {row['wrong']}, no model {row['no_model']}"
        for row in summary
    ]
