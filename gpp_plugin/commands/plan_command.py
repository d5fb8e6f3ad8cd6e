"""`gpp plan`: makes a plan for a model, without its weights, on a cluster that need not be there."""

from __future__ import annotations

import argparse
import contextlib
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpp_plugin.api import USUAL_LENGTH, format_plan, make_request, plan_for, save
from gpp_plugin.commands.command_parser import list_of, list_of_numbers
from gpp_plugin.commands.width import add_width, columns_of
from gpp_plugin.compare.compare_settings import CHAIN, GRAPH, STOCK
from gpp_plugin.compare.simulated import simulate_modes, simulated_row
from gpp_plugin.errors import ConfigError, PlanError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.serialize import fingerprint, to_plain
from gpp_plugin.ir.tensors import element_bytes
from gpp_plugin.library.named_models import config_names, config_path, layer_shape
from gpp_plugin.library.paper_graphs import MODELS
from gpp_plugin.plan.baselines.stock_chain import STOCK as STOCK_PLANNER
from gpp_plugin.plan.cluster_files import cluster_names
from gpp_plugin.plan.costs.long_context import LayerShape, on_paper
from gpp_plugin.plan.edge_transports import NATIVE
from gpp_plugin.plan.memory.fitting import memory_advice
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.plan.search_report import searching
from gpp_plugin.plugins import PLANNERS, TRANSPORTS
from gpp_plugin.report.plan_text import edge_rows, format_breakdown, format_edges, format_on_paper, stage_rows
from gpp_plugin.report.printable import printable
from gpp_plugin.report.progress import step
from gpp_plugin.report.units import fill_text, format_bytes, format_table
from gpp_plugin.schedule.names import is_schedule_name, schedule_names, unknown_schedule

LONG_SECONDS = 5.0
"""Planning that takes longer is not done again for a chain, unless it is asked for."""
CHAINED = ("auto", "graphpipe")
"""Planners that make the best chain where they made the plan; `auto` makes it for others."""
OPTION_OF = {
    r"graph_pipeline\.": "",
    r"memory\.limit_gb": "--memory-limit-gb",
    r"memory optimization by recompute and swap": "--memory recompute,swap",
    r"memory optimization by (recompute|swap)": r"--memory \1",
    r"memory\.(recompute|swap) \"auto\"( or \"full\")?": r"--memory \1",
    r"ZeRO stage (\d)": r"--zero \1",
    r"zero_optimization\.stage (\d)": r"--zero \1",
    r"micro_batch_sizes(\['\*'\])?": "--micro-batch",
    r"train_micro_batch_size_per_gpu": "--loss-unit",
    r"train_batch_size": "--mini-batch",
    r"\b(virtual|data|vertical|tensor)_(stages|parallel|sync)\b": r"--\1-\2",
}
"""What a key of the configuration is called on the command line, in the order in which they are looked for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gpp plan`."""
    # A flat list of options, one `add_argument` each in the order of --help, and long for that reason alone;
    # what they mean together is checked in `run` and by the planners.
    models = ", ".join(MODELS)
    clusters = ", ".join(cluster_names())
    parser.add_argument(
        "model",
        help="a HuggingFace config.json or its directory, a configuration that comes with gpp "
        f"({', '.join(config_names())}), or a library model ({models})",
    )
    parser.add_argument("--devices", type=int, help="ranks to plan for (those of the cluster)")
    parser.add_argument(
        "--cluster",
        default="dgx_h100",
        help=f"a file, one of {clusters}, or auto: this machine (%(default)s)",
    )
    parser.add_argument(
        "--planner", default="auto", help=f"one of {', '.join(PLANNERS.names())} (%(default)s)"
    )
    parser.add_argument(
        "--dtype",
        help="what is trained in: bf16, fp16 or fp32; by default the first that the cluster's devices have a speed in",
    )
    parser.add_argument(
        "--mini-batch", type=int, help="samples of one step (64, or 8 a device where that is more)"
    )
    parser.add_argument(
        "--loss-unit",
        type=int,
        help="samples of one loss (the mini-batch; of a HuggingFace model whose loss compares no samples about 4096 "
        "tokens)",
    )
    parser.add_argument("--micro-batch", type=int, help="samples every stage takes at a time")
    parser.add_argument(
        "--stages", type=int, help="exactly that many stages; more than devices: a device holds several"
    )
    parser.add_argument(
        "--virtual-stages",
        type=_virtual_stages,
        default=1,
        metavar="N",
        help="stages that each group of ranks holds, interleaved: a number, or auto, as many as make the simulated "
        "step shortest (%(default)s)",
    )
    parser.add_argument(
        "--colocate",
        choices=["auto", "off"],
        default="off",
        help="auto: a branch may be placed on the ranks of other stages, where the simulated step is shorter "
        "(%(default)s)",
    )
    parser.add_argument("--data-parallel", type=int, help="ranks of every stage")
    parser.add_argument(
        "--tensor-parallel",
        type=_tensor_parallel,
        default=1,
        metavar="N",
        help="ranks that compute the same samples of a stage together: a number for all stages that can be divided; "
        "auto, stage by stage what makes the simulated step shortest; or by module, language_model=4,... (%(default)s)",
    )
    parser.add_argument(
        "--schedule", default="auto", help=f"one of {', '.join(schedule_names())} (%(default)s)"
    )
    parser.add_argument(
        "--slicing",
        type=_slicing,
        default="auto",
        help="run the first forwards in halves: auto, where that is shorter; on; off; or a number of micro-batches "
        "(%(default)s)",
    )
    parser.add_argument(
        "--mode",
        choices=["sync", "async"],
        default="sync",
        help="one update a mini-batch, or one a micro-batch with stashed weights (%(default)s)",
    )
    parser.add_argument(
        "--vertical-sync",
        action="store_true",
        help="with --mode async: a micro-batch uses weights of the same age on every stage",
    )
    parser.add_argument(
        "--memory",
        type=list_of(["recompute", "swap"]),
        default=[],
        metavar="A,...",
        help="recompute, swap or both (recompute,swap): what auto, graphpipe, dawnpiper and vpipe may use to fit",
    )
    parser.add_argument(
        "--p2p",
        choices=TRANSPORTS.names(),
        default="native",
        help="what carries messages: our transport; megatron-core's P2PCommunicator on the edges that it can "
        "carry, which are shown; or that of another package (%(default)s)",
    )
    parser.add_argument(
        "--memory-limit-gb",
        type=float,
        metavar="GB",
        help="most GB (10^9 bytes) of a rank (what the device has)",
    )
    parser.add_argument("--memory-report", action="store_true", help="show what fills each stage's memory")
    parser.add_argument("--zero", type=int, choices=[0, 1, 2, 3], default=0, help="ZeRO stage (%(default)s)")
    parser.add_argument(
        "--granularity",
        choices=["layer", "sub_layer", "node"],
        help="size of a block (layer; node, single operators, for planner dawnpiper)",
    )
    parser.add_argument(
        "--length",
        type=list_of_numbers,
        metavar="N,...",
        help="tokens of a text, for a HuggingFace model; of 512,1024 the mean of their times is planned for (512)",
    )
    parser.add_argument(
        "--max-length",
        type=int,
        help="tokens of the longest text, which memory is planned for (the longest --length)",
    )
    parser.add_argument(
        "--size",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a dimension of a library model, e.g. --size branches=8; may be repeated",
    )
    parser.add_argument(
        "--against",
        type=list_of([STOCK, CHAIN, "none"]),
        metavar="A,...",
        help=f"what the plan is held against in simulation: {STOCK}, DeepSpeed's own 1F1B; {CHAIN}, the best that our "
        f"planner makes of the model in a line; or none ({STOCK},{CHAIN}; without {CHAIN} where planning has taken "
        f"longer than {LONG_SECONDS:g} s)",
    )
    parser.add_argument(
        "--on-paper",
        action="store_true",
        help="show what is not built: context parallelism (ring attention) and expert parallelism of a HuggingFace "
        "model's layer, by ranks, beside tensor ranks",
    )
    parser.add_argument("--out", type=Path, help="write the plan there")
    add_width(parser)


def _slicing(text: str) -> str | int:
    if text in ("auto", "on", "off"):
        return text
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not valid; give auto, on, off or a number of at least 1")


def _virtual_stages(text: str) -> str | int:
    if text == "auto":
        return text
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not valid; give auto or a number of at least 1")


def _tensor_parallel(text: str) -> str | int | dict[str, int]:
    if text == "auto":
        return text
    if text.isdecimal() and int(text) > 0:
        return int(text)
    sizes = {name: size for name, _, size in (part.rpartition("=") for part in text.split(","))}
    if all(name and size.isdecimal() and int(size) > 0 for name, size in sizes.items()):
        return {name: int(size) for name, size in sizes.items()}
    raise argparse.ArgumentTypeError(
        f"{text!r} is not valid; give auto, a number of at least 1, or numbers by module, like language_model=4"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Print the plan and what it is predicted to cost.

    Raises:
        ConfigError: an option is wrong.
        PlanError: no plan meets the options.
    """
    # The order in which a job plans too, so that a plan made here is the one that training would make
    # from the same costs: partition (planner), then order and slices (schedule_plan), then transports,
    # then what fills memory.
    #
    #   model --capture or library--> graph, profile --planner--> stages --schedule--> plan --> text, file
    #
    # A HuggingFace model is built on the meta device and its costs are analytic, of the cluster's first
    # device: no weights, no such device, and about the time of one export.
    with _in_options(), step("capture"):
        layer = _layer(args) if args.on_paper else None
        request = _request(args)
    start = time.perf_counter()
    with _in_options(), step("plan") as tell, searching(tell.note):
        plan = _plan(args, request)
    seconds = time.perf_counter() - start
    against, lines = _against(args, request, plan, seconds)
    print(format_plan(plan, width=columns_of(args)))
    if lines:
        print("\n" + "\n".join(lines))
    if args.p2p != NATIVE and plan.edges:
        print(f"\n{format_edges(plan, args.p2p)}")
    parts = plan.memory
    if args.memory_report:
        print(f"\n{format_breakdown(parts)}")
        for line in memory_advice(plan, zero_stage=args.zero, allowed=request.memory_optimization):
            print(fill_text(printable(_as_options(line)), indent="  "))
    papers = [] if layer is None else _on_paper(layer, request)
    # 64 samples in 80,000 us are 800 a second.
    throughput = plan.mini_batch / plan.iteration_us * 1e6 if plan.iteration_us else 0.0
    print()
    print(
        fill_text(
            f"{len(request.graph.blocks)} blocks planned on {request.cluster.name} in {seconds:.2f} s; costs: "
            f"{request.profile.source}, of {request.profile.device} in {_dtype_text(request, args)}; "
            f"{throughput:.1f} samples/s predicted"
        )
    )
    if args.out is not None:
        save(plan, args.out)
        print(f"plan written to {args.out}")
    return {
        "rows": stage_rows(plan),
        "against": against,
        "edges": edge_rows(plan, args.p2p),
        **_figures(plan),
        "dtype": request.cluster.devices[0].dtype,
        "mini_batch": plan.mini_batch,
        "loss_unit": plan.loss_unit,
        "seconds": seconds,
        "samples_per_s": throughput,
        "memory": [{**to_plain(part), "total": part.total} for part in parts],
        "on_paper": papers,
    }


def _layer(args: argparse.Namespace) -> LayerShape:
    """Return a layer of the model at its longest text.

    Raises:
        ConfigError: nothing is known of the model's layers.
    """
    if args.model in MODELS:
        raise ConfigError(f"--on-paper: is for HuggingFace models; {args.model} is a library model")
    return layer_shape(config_path(args.model), length=args.max_length or max(args.length or [USUAL_LENGTH]))


def _on_paper(layer: LayerShape, request: PlanRequest) -> list[dict[str, Any]]:
    """Print and return what context and expert parallelism would take on 2, 4, 8, ... ranks that one link joins."""
    device, link = request.cluster.devices[0], request.cluster.links[0]
    ranks = [2**power for power in range(1, min(request.num_ranks, link.span).bit_length())]
    rows = on_paper(layer, ranks, device, link, element_bytes=element_bytes(device.dtype))
    print(f"\n{format_on_paper(layer, rows)}")
    return [to_plain(row) for row in rows]


def _plan(args: argparse.Namespace, request: PlanRequest) -> PipelinePlan:
    return plan_for(request, planner=args.planner, schedule=args.schedule, slicing=args.slicing, p2p=args.p2p)


def _against(
    args: argparse.Namespace, request: PlanRequest, plan: PipelinePlan, seconds: float
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return rows of what the plan is held against, the plan last, and the lines that show them."""
    # In mode async a step is another thing, and a plan of a single rank, or of DeepSpeed's own, has nothing beside it.
    if plan.mode == "async" or plan.planner == STOCK_PLANNER or request.num_ranks == 1:
        return [], []
    is_long = args.against is None and args.planner in CHAINED and seconds > LONG_SECONDS
    usual = [STOCK] if is_long or args.planner not in CHAINED else [STOCK, CHAIN]
    modes = usual if args.against is None else [mode for mode in args.against if mode != "none"]
    if not modes:
        return [], []

    def make_chain(line: PlanRequest) -> PipelinePlan:
        # a chain of another planner's is no best one
        planner = args.planner if args.planner in CHAINED else "auto"
        schedule = args.schedule if args.planner in CHAINED else "auto"
        return plan_for(line, planner=planner, schedule=schedule, slicing=args.slicing)

    with step("plan what it is held against") as tell, searching(tell.note):
        rows = simulate_modes(request, modes, make_chain, tell=tell.note)
    rows.append(simulated_row(GRAPH, plan, request))
    lines = [format_against(rows)]
    lines += [
        fill_text(f"{row['mode']} cannot run this: {row['refused']}") for row in rows if "refused" in row
    ]
    if is_long:
        lines.append(f"(the best chain takes as long to plan again: --against {STOCK},{CHAIN})")
    return rows, lines


def format_against(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of simulated modes, this plan last: how many times as fast it is as each."""
    us = rows[-1]["iteration_ms"]
    lines = []
    for row in rows:
        name = {STOCK: "stock DeepSpeed 1F1B", CHAIN: "the best chain", GRAPH: "this plan"}[row["mode"]]
        if "refused" in row:
            lines.append([name, *["-"] * 4])
            continue
        fits = "" if row["fits"] else " (too much)"
        ratio = "" if row["mode"] == GRAPH else f"{row['iteration_ms'] / us:.2f} x as fast" if us else "-"
        step_ms = f"{row['iteration_ms']:.1f}"
        lines.append([name, str(row["stages"]), step_ms, format_bytes(row["peak_bytes"]) + fits, ratio])
    return format_table(["simulated", "stages", "ms a step", "fullest rank", "this plan is"], lines)


@contextlib.contextmanager
def _in_options() -> Iterator[None]:
    """Name options of the command line in errors that name keys of the configuration."""
    try:
        yield
    except (ConfigError, PlanError) as error:
        raise type(error)(_as_options(str(error))) from error


def _as_options(text: str) -> str:
    """Return a text with options of the command line for keys of the configuration."""
    for pattern, option in OPTION_OF.items():
        text = re.sub(pattern, option, text)
    return text


def _request(args: argparse.Namespace) -> PlanRequest:
    """Return what the options ask of a planner.

    Raises:
        ConfigError: an option is wrong.
    """
    if not is_schedule_name(args.schedule):
        raise ConfigError(f"--schedule: {unknown_schedule(args.schedule)}")
    limit = args.memory_limit_gb
    if limit is not None and not 0 < limit < float("inf"):
        raise ConfigError(f"--memory-limit-gb {limit:g}: give more than 0")
    if args.devices is not None and args.devices < 1:
        raise ConfigError(f"--devices {args.devices}: give at least 1")
    for option, value in (("--mini-batch", args.mini_batch), ("--loss-unit", args.loss_unit)):
        if value is not None and value < 1:
            raise ConfigError(f"{option} {value}: give at least 1 sample")
    if args.size and args.model not in MODELS:
        raise ConfigError("--size: is for library models; edit the HuggingFace configuration instead")
    if args.model in MODELS and (args.length or args.max_length):
        raise ConfigError(f"--length: is for HuggingFace models; {args.model} has sizes: --size NAME=VALUE")
    return make_request(
        args.model,
        args.cluster,
        planner=args.planner,
        schedule=args.schedule,
        num_devices=args.devices,
        sizes=_sizes(args.size),
        max_length=args.max_length,
        **({"length": args.length} if args.length else {}),
        granularity=args.granularity,
        dtype=args.dtype,
        mini_batch=args.mini_batch,
        loss_unit=args.loss_unit,
        micro_batch_sizes=args.micro_batch or None,
        stages=args.stages,
        virtual_stages=args.virtual_stages,
        colocate=args.colocate,
        data_parallel=args.data_parallel,
        tensor_parallel=args.tensor_parallel,
        memory=args.memory,
        memory_limit_gb=limit,
        zero_stage=args.zero,
        mode=args.mode,
        vertical_sync=args.vertical_sync,
    )


def _dtype_text(request: PlanRequest, args: argparse.Namespace) -> str:
    """Return the type that is trained in, and where it comes from if the user did not say."""
    dtype = request.cluster.devices[0].dtype
    return dtype if args.dtype is not None else f"{dtype} (the cluster's; --dtype says another)"


def _figures(plan: PipelinePlan) -> dict[str, Any]:
    return {
        "model": plan.model,
        "planner": plan.planner,
        "plan": fingerprint(plan),
        "num_stages": len(plan.stages),
        "depth": plan.depth,
        "num_ranks": plan.num_ranks,
        "iteration_us": plan.iteration_us,
    }


def _sizes(texts: list[str]) -> dict[str, int | str]:
    sizes: dict[str, int | str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not value:
            raise ConfigError(f"--size: {text!r} is not NAME=VALUE, e.g. branches=8")
        # Numbers as numbers, the rest as text (granularity=sub_layer); `build_model` knows which it wants.
        sizes[name] = int(value) if value.isdecimal() else value
    return sizes
