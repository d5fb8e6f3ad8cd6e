"""What parts of the sequence win at long texts: one model by devices, samples and tokens, the best plan of each kind.

All plans of a case have the same costs, links and memory, and the ZeRO stage that suits them:

    plain     one stage of data-parallel ranks, with recompute where it needs some to fit
    full      the same, every layer run again
    tensor    what `auto` makes with tensor ranks and recompute, without context ranks
    context   the same with context ranks, without tensor ranks
    both      the same with either

`by full` and `by tensor`: how many times as fast `both` is. A dash: no plan of that kind fits, or its ranks cannot
share out the samples.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpp_benchmarks._options import add_option
from gpp_plugin.api import format_plan, make_request, plan_for
from gpp_plugin.commands.command_parser import add_size, read_sizes
from gpp_plugin.errors import ConfigError, PlanError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.library.paper_graphs import MODELS
from gpp_plugin.plan.baselines.data_parallel import best_plain
from gpp_plugin.plan.memory.fitting import recompute_fully
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.report.progress import step
from gpp_plugin.report.units import format_table

PLAIN, FULL, TENSOR, CONTEXT, BOTH = KINDS = ("plain", "full", "tensor", "context", "both")
CASES = ("8:256:4096", "8:32:32768", "8:8:131072", "64:256:4096", "64:32:32768", "64:8:131072")
"""A million tokens a step."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add_option(parser, "--model", "llava-7b", "as of gpp plan")
    add_size(parser)
    add_option(parser, "--cluster", "dgx_h100", "as of gpp plan")
    text = "devices, samples of a step and tokens of a text"
    add_option(parser, "--cases", list(CASES), text, metavar="DEVICES:SAMPLES:TOKENS")
    parser.add_argument(
        "--zero", type=int, choices=[0, 1, 2, 3], help="ZeRO stage (the one that suits each plan)"
    )
    parser.add_argument("--draw", action="store_true", help="draw the plan of both kinds of ranks, too")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Print a line a case as it is planned, and the table; return the rows."""
    if args.size and args.model not in MODELS:
        raise ConfigError("--size: is for library models; edit the HuggingFace configuration instead")
    cases, sizes, rows = [_read_case(text) for text in args.cases], read_sizes(args.size), []
    with step("cases") as progress:
        for case in cases:
            row, plan = compare_kinds(args.model, args.cluster, case, args.zero, sizes)
            rows.append(row)
            progress.update(len(rows), len(cases))
            if args.draw and plan is not None:
                print(f"{format_plan(plan)}\n", flush=True)
    print(format_kinds(rows))
    return {"rows": rows, "model": args.model, "cluster": args.cluster}


def _read_case(text: str) -> tuple[int, int, int]:
    try:
        devices, samples, tokens = map(int, text.split(":"))
    except ValueError:
        raise ConfigError(f"--cases {text!r}: give DEVICES:SAMPLES:TOKENS, like {CASES[1]}") from None
    return devices, samples, tokens


def compare_kinds(
    model: str, cluster: str, case: Sequence[int], zero: int | None, sizes: Mapping[str, int | str]
) -> tuple[dict[str, Any], PipelinePlan | None]:
    """Return a case's row, milliseconds and grids of each kind of plan, and the plan of both kinds of ranks.

    Args:
        sizes: of a library model.
    """
    devices, samples, tokens = case
    request = make_request(
        model,
        cluster,
        num_devices=devices,
        mini_batch=samples,
        loss_unit=1,
        **({"sizes": {**sizes, "length": tokens}} if model in MODELS else {"length": tokens}),
        zero="auto" if zero is None else zero,
        tensor_parallel="auto",
        sequence_parallel="auto",
    )
    request = dataclasses.replace(request, memory_optimization=("recompute",), band=0.0)
    plans: dict[str, PipelinePlan] = {}

    def take(kind: str, make: Callable[[PlanRequest], PipelinePlan], **settings: Any) -> None:
        with contextlib.suppress(PlanError):
            plans[kind] = make(dataclasses.replace(request, **settings))

    take(PLAIN, best_plain, tensor_parallel=1, sequence_parallel=1)
    if PLAIN in plans:
        take(FULL, lambda own: recompute_fully(plans[PLAIN], own), zero_stage=plans[PLAIN].zero_stage)
    take(TENSOR, plan_for, sequence_parallel=1)
    take(CONTEXT, plan_for, tensor_parallel=1)
    take(BOTH, plan_for)
    times = {kind: plan.iteration_us / 1e3 for kind, plan in plans.items()}
    row = {
        "devices": devices,
        "samples": samples,
        "tokens": tokens,
        **{f"{kind}_ms": times.get(kind) for kind in KINDS},
        **{f"{kind}_grids": _grids(plans[kind]) if kind in plans else "" for kind in KINDS},
        **{
            f"by_{kind}": times[kind] / times[BOTH] if {kind, BOTH} <= times.keys() else None
            for kind in KINDS
        },
    }
    return row, plans.get(BOTH)


def _grids(plan: PipelinePlan) -> str:
    """Return each stage's data x context x tensor ranks, and the ZeRO stage."""
    grids = "+".join(f"{stage.degree}x{stage.context}x{stage.tensor}" for stage in plan.stages)
    return f"{grids} Z{plan.zero_stage}"


def format_kinds(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table: a line a case, milliseconds of each kind, and the grids of the plan of both."""
    lines = []
    for row in rows:
        times = ["-" if row[f"{kind}_ms"] is None else f"{row[f'{kind}_ms']:,.0f}" for kind in KINDS]
        gains = ["-" if row[f"by_{kind}"] is None else f"{row[f'by_{kind}']:.2f}" for kind in (FULL, TENSOR)]
        case = [str(row[key]) for key in ("devices", "samples", "tokens")]
        lines.append([*case, *times, *gains, row["both_grids"]])
    heads = ["devices", "samples", "tokens", *(f"{kind} ms" for kind in KINDS), "by full", "by tensor"]
    return format_table([*heads, "both: data x context x tensor"], lines)
