"""`gpp plan`: makes a plan for a model, without its weights, on a cluster that need not be there."""

from __future__ import annotations

import argparse
import difflib
import time
from pathlib import Path
from typing import Any

from gpp_plugin.config import usual_granularity
from gpp_plugin.errors import ConfigError
from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.cluster import Cluster
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.profile import Profile
from gpp_plugin.ir.serialize import fingerprint, save, to_plain
from gpp_plugin.plan.clusters import cluster_names, read_cluster
from gpp_plugin.plan.edge_transports import NATIVE, note_edge_transports
from gpp_plugin.plan.inputs import with_inputs
from gpp_plugin.plan.memory_advice import memory_advice
from gpp_plugin.plan.memory_breakdown import with_breakdown
from gpp_plugin.plan.registry import PlanRequest, make_plan, planner_names
from gpp_plugin.plan.schedules import schedule_plan
from gpp_plugin.report.plan_text import edge_rows, format_breakdown, format_edges, format_plan, stage_rows
from gpp_plugin.schedule.names import SCHEDULE_NAMES, is_schedule_name, planning_schedule

CONFIG_DIR = Path(__file__).parent.parent / "models"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gpp plan`."""
    from gpp_plugin.library.graphs import MODELS

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
        "--planner", default="auto", help=f"one of {', '.join(planner_names())} (%(default)s)"
    )
    parser.add_argument("--mini-batch", type=int, default=64, help="samples of one step (%(default)s)")
    parser.add_argument("--loss-unit", type=int, help="samples of one loss (the mini-batch)")
    parser.add_argument("--micro-batch", type=int, help="samples every stage takes at a time")
    parser.add_argument("--stages", type=int, help="exactly that many stages")
    parser.add_argument("--data-parallel", type=int, help="ranks of every stage")
    parser.add_argument(
        "--schedule", default="auto", help=f"one of {', '.join(SCHEDULE_NAMES)} (%(default)s)"
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
        nargs="+",
        choices=["recompute", "swap"],
        default=[],
        help="what auto, graphpipe, dawnpiper and vpipe may use to fit",
    )
    parser.add_argument(
        "--p2p",
        choices=["native", "megatron"],
        default="native",
        help="what carries messages: our transport, or megatron-core's P2PCommunicator on the edges that it can "
        "carry, which are shown (%(default)s)",
    )
    parser.add_argument("--memory-report", action="store_true", help="show what fills each stage's memory")
    parser.add_argument("--zero", type=int, choices=[0, 1, 2], default=0, help="ZeRO stage (%(default)s)")
    parser.add_argument(
        "--granularity",
        choices=["layer", "sub_layer", "node"],
        help="size of a block (layer; node, single operators, for planner dawnpiper)",
    )
    parser.add_argument(
        "--length", type=int, default=512, help="tokens of a text, for a HuggingFace model (%(default)s)"
    )
    parser.add_argument(
        "--size",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a dimension of a library model, e.g. --size branches=8; may be repeated",
    )
    parser.add_argument("--out", type=Path, help="write the plan there")
    parser.add_argument("--width", type=int, default=100, help="columns of the picture (%(default)s)")


def config_names() -> list[str]:
    """Return the names of the HuggingFace configurations that come with the package."""
    return sorted(path.stem for path in CONFIG_DIR.glob("*.json"))


def _slicing(text: str) -> str | int:
    if text in ("auto", "on", "off"):
        return text
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not valid; give auto, on, off or a number of at least 1")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Print the plan and what it is predicted to cost.

    Raises:
        ConfigError: an option is wrong.
        PlanError: no plan meets the options.
    """
    if not is_schedule_name(args.schedule):
        raise ConfigError(
            f"--schedule: no schedule {args.schedule!r}; give one of {', '.join(SCHEDULE_NAMES)}"
        )
    cluster = _cluster(args)
    unit = args.loss_unit or args.mini_batch
    graph, profile = _model(args, cluster, unit)
    request = PlanRequest(
        graph=graph,
        profile=profile,
        cluster=cluster,
        num_ranks=cluster.num_devices,
        mini_batch=args.mini_batch,
        loss_unit=unit,
        num_stages=args.stages,
        micro_batch_sizes={"*": args.micro_batch} if args.micro_batch else None,
        schedule=planning_schedule(args.schedule),
        data_parallel=args.data_parallel,
        zero_stage=args.zero,
        mode=args.mode,
        memory_optimization=tuple(args.memory),
        vertical_sync=args.vertical_sync,
    )
    start = time.perf_counter()
    plan = make_plan(args.planner, request)
    plan = schedule_plan(plan, request, schedule=args.schedule, slicing=args.slicing)
    plan = note_edge_transports(plan, args.p2p)
    seconds = time.perf_counter() - start
    print(format_plan(plan, width=args.width))
    if args.p2p != NATIVE and plan.edges:
        print(f"\n{format_edges(plan, args.p2p)}")
    plan = with_breakdown(plan, request)
    parts = plan.memory
    if args.memory_report:
        print(f"\n{format_breakdown(parts)}")
        for line in memory_advice(plan, zero_stage=args.zero, allowed=request.memory_optimization):
            print(line)
    throughput = plan.mini_batch / plan.iteration_us * 1e6 if plan.iteration_us else 0.0
    print(
        f"\n{len(graph.blocks)} blocks planned on {cluster.name} in {seconds:.2f} s; costs: {profile.source}, of "
        f"{profile.device}; {throughput:.1f} samples/s predicted"
    )
    if args.out is not None:
        save(plan, args.out)
        print(f"plan written to {args.out}")
    return {
        "rows": stage_rows(plan),
        "edges": edge_rows(plan, args.p2p),
        **_figures(plan),
        "seconds": seconds,
        "samples_per_s": throughput,
        "memory": [{**to_plain(part), "total": part.total} for part in parts],
    }


def _cluster(args: argparse.Namespace) -> Cluster:
    if args.cluster != "auto":
        return read_cluster(args.cluster, num_devices=args.devices)
    if args.devices is not None and args.devices < 1:
        raise ConfigError(f"--devices {args.devices}: give at least 1")
    from gpp_plugin.profile.machine import read_machine

    return read_machine(args.devices)


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


def _model(args: argparse.Namespace, cluster: Cluster, unit: int) -> tuple[BlockGraph, Profile]:
    from gpp_plugin.library.graphs import MODELS

    if args.mini_batch < 1 or unit < 1:
        raise ConfigError(f"--mini-batch {args.mini_batch}, --loss-unit {unit}: give at least 1 sample")
    if args.model in MODELS:
        return _library_model(args, cluster)
    if args.size:
        raise ConfigError("--size: is for library models; edit the HuggingFace configuration instead")
    if Path(args.model).exists():
        return _huggingface_model(args, Path(args.model), cluster, unit)
    names = [*config_names(), *MODELS]
    if args.model not in names:
        close = difflib.get_close_matches(args.model, names, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(
            f"model {args.model!r}: no such file, configuration or library model{hint} (known: {', '.join(names)})"
        )
    return _huggingface_model(args, CONFIG_DIR / f"{args.model}.json", cluster, unit)


def _library_model(args: argparse.Namespace, cluster: Cluster) -> tuple[BlockGraph, Profile]:
    from gpp_plugin.library.analytic import profile_model
    from gpp_plugin.library.graphs import build_model

    sizes: dict[str, int | str] = {}
    for text in args.size:
        name, equals, value = text.partition("=")
        if not equals or not value:
            raise ConfigError(f"--size: {text!r} is not NAME=VALUE, e.g. branches=8")
        sizes[name] = int(value) if value.isdecimal() else value
    if args.granularity not in (None, "layer"):
        sizes.setdefault("granularity", args.granularity)
    model = build_model(args.model, **sizes)
    return model.graph, profile_model(model, cluster.devices[0], largest=args.mini_batch)


def _huggingface_model(
    args: argparse.Namespace, config: Path, cluster: Cluster, unit: int
) -> tuple[BlockGraph, Profile]:
    from gpp_plugin.capture.coarsen import coarsen
    from gpp_plugin.capture.export import capture_model
    from gpp_plugin.integrations.hf_models import build_on_meta, make_example_batch, read_hf_config
    from gpp_plugin.profile.analytic import analytic_profile, default_sample_counts

    model = build_on_meta(read_hf_config(config))
    batch = make_example_batch(model, num_samples=unit, length=args.length)
    captured = capture_model(model, batch)
    graph = coarsen(captured, granularity=args.granularity or usual_granularity(args.planner))
    profile = analytic_profile(
        graph,
        cluster.devices[0],
        sample_counts=default_sample_counts(args.mini_batch),
        op_graph=captured.op_graph,
    )
    inputs = captured.op_graph.inputs
    return graph, with_inputs(profile, graph, inputs, mini_batch=args.mini_batch, dtype="float32")
