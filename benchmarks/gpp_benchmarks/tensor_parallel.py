"""What tensor ranks would win: one model on more and more devices, each tensor size forced, and chosen by the planner.

Every row is one number of devices and one mini-batch, on nodes of 8 (the cluster's own). It has three simulated steps:
with tensor size 1 everywhere, with the best size forced on all stages that can be divided, and with a size for each
stage (``auto``). Beside them stands what was modelled when tensor parallelism was asked for, with a tensor group as
one larger device, and why ours differs. The same sizes are planned again under that assumption: all of a stage
divided, sums without latency. Then the sums' latency is added; the rest is what stays whole on every rank. ``most`` is
what no sums, reductions, messages or idle devices at all would win over size 1. ``--slower`` plans the same again with
slower links between nodes. ``--context`` adds what is not built: ring attention over so many tokens, and experts on
ranks of their own (`plan.costs.long_context`).

``--against-megatron`` measures instead: one GPT-2 on two gloo ranks of this machine, one core each, captured and in
parts, and of Megatron-core's own layers; forward and backward, in turn.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from typing import Any

from gpp_benchmarks._options import add_option
from gpp_benchmarks._ranks import bench_ranks
from gpp_plugin.api import make_request, plan_for
from gpp_plugin.commands.command_parser import list_of_numbers
from gpp_plugin.errors import ConfigError, PlanError
from gpp_plugin.ir.block_graph import BlockSharding
from gpp_plugin.ir.cluster import Cluster
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.serialize import fingerprint
from gpp_plugin.ir.tensors import element_bytes
from gpp_plugin.launch import require_modules
from gpp_plugin.library.paper_graphs import MODELS
from gpp_plugin.plan.cluster_files import read_cluster
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.costs.long_context import LayerShape, on_paper
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.report.plan_text import draw_stages, format_on_paper
from gpp_plugin.report.rows_text import format_rows
from gpp_plugin.report.units import fill_text

MODELLED = {
    (8, 8): (2, 1.20),
    (8, 64): (1, 1.00),
    (16, 0): (2, 1.29),
    (32, 0): (4, 1.12),
    (64, 64): (4, 1.34),
    (64, 256): (4, 1.09),
    (128, 0): (4, 1.61),
}
"""Devices and batch -> the best size, and how many times as fast as size 1, of LLaVA-7B at 2,048 tokens; batch 0: of
one that is not told."""
CASES = "8:8,8:64,16:16,16:64,32:32,32:64,64:64,64:256,128:128"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add_option(parser, "--model", "llava-7b", "as of gpp plan")
    add_option(parser, "--cluster", "dgx_h100", "as of gpp plan")
    add_option(
        parser,
        "--cases",
        CASES,
        "numbers of devices and samples of a mini-batch",
        metavar="DEVICES:SAMPLES,...",
    )
    add_option(parser, "--length", 2048, "tokens of a text")
    add_option(parser, "--dtype", "bf16", "what is trained in")
    add_option(parser, "--zero", 1, "ZeRO stage", choices=[0, 1, 2])
    add_option(parser, "--planner", "auto", "one that chooses tensor sizes")
    parser.add_argument(
        "--slower",
        type=list_of_numbers,
        default=[1],
        metavar="N,...",
        help="times by which links between nodes are slower, each planned again (%(default)s)",
    )
    parser.add_argument(
        "--sizes",
        type=list_of_numbers,
        default=[2, 4],
        metavar="N,...",
        help="tensor sizes above 1 that are forced (%(default)s)",
    )
    add_option(parser, "--context", 32768, "tokens of a text for ring attention on paper; 0 leaves it out")
    parser.add_argument(
        "--against-megatron",
        action="store_true",
        help="measure captured tensor ranks beside Megatron-core's layers, and nothing else",
    )
    add_option(
        parser,
        "--shape",
        "512:8:4:128:4",
        "of the model that is measured",
        metavar="HIDDEN:HEADS:LAYERS:LENGTH:SAMPLES",
    )
    add_option(parser, "--rounds", 15, "timed steps of each")
    parser.add_argument("--draw", action="store_true", help="draw each plan that the planner chooses")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Print the table and return its rows."""
    if args.against_megatron:
        return _against_megatron(args)
    # The model is captured once, on one sample: its costs are of the cluster's device, whatever the number of devices.
    cases = _cases(args.cases)
    largest = max(batch for _, batch in cases)
    base = make_request(
        args.model,
        args.cluster,
        num_devices=max(devices for devices, _ in cases),
        mini_batch=largest,
        loss_unit=1,
        dtype=args.dtype,
        zero_stage=args.zero,
        **({} if args.model in MODELS else {"length": args.length}),
    )
    rows = []
    for slower in args.slower:
        for devices, batch in cases:
            cluster = _slower(read_cluster(args.cluster, num_devices=devices, dtype=args.dtype), slower)
            rows.append(_row(args, _with(base, cluster, batch), slower))
    is_modelled = (args.model, args.length) == ("llava-7b", 2048)
    print(format_rows(_shown(row, is_modelled=is_modelled) for row in rows))
    print(
        fill_text(
            "modelled: a tensor group taken for one larger device; batches are told for 8 and 64 devices alone. most: "
            "with nothing sent and no device idle. why: the best of these sizes planned by us under that assumption, "
            "degrees, micro-batches, stages and schedule chosen anew at each; then with each sum's latency; then with "
            "what every rank computes and holds whole (norms, residuals)."
        )
    )
    on_paper = _on_paper(args, base) if args.context else []
    return {"rows": rows, "model": args.model, "length": args.length, "on_paper": on_paper}


VOCABULARY = 2048
RANKS = 2
START_S, ROUND_S = 180.0, 20.0


def _against_megatron(args: argparse.Namespace) -> dict[str, Any]:
    """Print and return what a step takes, captured and of Megatron-core's own layers, on the same ranks in turn."""
    require_modules("megatron.core", "transformers")
    names = "hidden", "heads", "layers", "length", "samples"
    try:
        shape = dict(zip(names, map(int, args.shape.split(":")), strict=True))
    except ValueError:
        shape = {}
    is_sound = shape and min(*shape.values(), args.rounds) > 0
    if not is_sound or shape["hidden"] % shape["heads"] or shape["heads"] % RANKS:
        raise ConfigError(
            f"--shape {args.shape} --rounds {args.rounds}: give {':'.join(names).upper()}, like 512:8:4:128:4, with "
            f"heads that {RANKS} divides and that divide the width, and at least 1 round"
        )
    settings = {**shape, "vocabulary": VOCABULARY, "rounds": args.rounds}
    timeout_s = START_S + ROUND_S * args.rounds
    (event,) = bench_ranks("_tensor_ranks", settings, num_ranks=RANKS, timeout_s=timeout_s)
    megatron, rows = event["times"]["megatron"], []
    for name, times in event["times"].items():
        wall, cpu = (statistics.median(each[i] for each in times) for i in (0, 1))
        # rounds side by side: what else the machine does falls on both
        ratios = [
            statistics.median(own[i] / other[i] for own, other in zip(times, megatron, strict=True))
            for i in (0, 1)
        ]
        measured = {"ms": wall * 1e3, "cpu_ms": cpu * 1e3, "ratio": ratios[0], "cpu_ratio": ratios[1]}
        rows.append({"name": name, **measured, "parameters": event["parameters"][name]})
    print(format_rows(rows))
    return {"rows": rows, "shape": args.shape, "rounds": args.rounds}


LAYER = {"width": 4096, "query_width": 4096, "key_width": 4096, "chosen_experts": 2}
"""Of the layers of Llama 7B, and of Mixtral's experts, for what is on paper."""


def _on_paper(args: argparse.Namespace, base: PlanRequest) -> list[dict[str, Any]]:
    """Print and return, by ranks, a layer's ring attention beside the same on one rank and on tensor ranks' sums."""
    shape = LayerShape(length=args.context, **LAYER)
    rows = on_paper(
        shape,
        (2, 4, 8),
        base.cluster.devices[0],
        base.cluster.links[0],
        element_bytes=element_bytes(args.dtype),
    )
    print(f"\n{format_on_paper(shape, rows)}")
    return [dataclasses.asdict(row) for row in rows]


def _cases(text: str) -> list[tuple[int, int]]:
    try:
        return [
            (int(devices), int(batch)) for devices, batch in (part.split(":") for part in text.split(","))
        ]
    except ValueError:
        raise ConfigError(f"--cases {text!r}: give DEVICES:SAMPLES,..., like 8:64,16:64") from None


def _slower(cluster: Cluster, times: int) -> Cluster:
    # what was measured of collectives is of the links as they were
    outer = [
        dataclasses.replace(
            link,
            bytes_per_s=link.bytes_per_s / times,
            latency_us=link.latency_us * times,
            all_reduce=None,
            all_gather=None,
        )
        for link in cluster.links[1:]
    ]
    return dataclasses.replace(cluster, links=(cluster.links[0], *outer))


def _with(base: PlanRequest, cluster: Cluster, batch: int) -> PlanRequest:
    share = batch / base.mini_batch  # of what stages hold of the mini-batch itself
    inputs = tuple(
        dataclasses.replace(each, bytes=round(each.bytes * share)) if each.is_shared_out else each
        for each in base.profile.inputs
    )
    return dataclasses.replace(
        base,
        cluster=cluster,
        num_ranks=cluster.num_devices,
        mini_batch=batch,
        profile=dataclasses.replace(base.profile, inputs=inputs),
    )


def _row(args: argparse.Namespace, request: PlanRequest, slower: int) -> dict[str, Any]:
    """Return what tensor sizes do to one request's simulated step."""
    whole, whole_s = _planned(args, request, 1)
    steps = {1: whole.iteration_us} if whole is not None else {}
    for size in args.sizes:
        forced, _ = _planned(args, request, size)
        if forced is not None:
            steps[size] = forced.iteration_us
    chosen, seconds = _planned(args, request, None)
    larger = {
        with_latency: _larger_device(args, request, whole_us=steps.get(1), with_latency=with_latency)
        for with_latency in (False, True)
    }
    best = min(steps, key=steps.__getitem__, default=None)
    if args.draw and chosen is not None:
        print(f"{request.num_ranks} devices, {request.mini_batch} samples\n{draw_stages(chosen)}\n")
    told = (request.num_ranks, request.mini_batch), (request.num_ranks, 0)
    modelled = next((MODELLED[key] for key in told if key in MODELLED), None)
    return {
        "devices": request.num_ranks,
        "mini_batch": request.mini_batch,
        "slower": slower,
        "modelled": modelled,
        "forced_us": steps,
        "best": best,
        "gain": _gain(steps.get(1), steps.get(best or 1)),
        "most_gain": _gain(steps.get(1), _work_us(request)),
        "larger_device_gain": _gain(steps.get(1), larger[False]),
        "with_latency_gain": _gain(steps.get(1), larger[True]),
        "auto": [] if chosen is None else [(stage.degree, stage.tensor) for stage in chosen.stages],
        "auto_us": None if chosen is None else chosen.iteration_us,
        "auto_gain": _gain(steps.get(1), None if chosen is None else chosen.iteration_us),
        "seconds": seconds,
        "seconds_at_1": whole_s,
    }


def _work_us(request: PlanRequest) -> float:
    """Return the microseconds of a step if all devices had the same share of the operations and nothing else to do."""
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    local = max(request.mini_batch / request.num_ranks, 1.0)
    forward, backward = costs.block_times(local)
    return float((forward + backward).sum()) / local * request.mini_batch / request.num_ranks


def _larger_device(
    args: argparse.Namespace, request: PlanRequest, *, whole_us: float | None, with_latency: bool
) -> float | None:
    """Return the shortest step of all sizes, 1 among them, where t tensor ranks are one device of t times everything.

    Args:
        whole_us: the step of size 1, of which nothing is divided.
        with_latency: each sum takes its latency as well, not its bytes alone.
    """
    graph = request.graph
    own = {each.block: each for each in graph.sharding}
    degrees = tuple(sorted({n for each in graph.sharding for n in each.degrees}))
    sharding = []
    for block in graph.blocks:
        sums = own.get(block.name)
        sharding.append(
            BlockSharding(
                block=block.name,
                degrees=degrees,
                flop_share=1.0,
                parameter_bytes=block.parameter_bytes,
                trainable_bytes=block.trainable_bytes,
                saved_share=1.0,
                forward_sums=sums.forward_sums if sums and with_latency else 0,
                forward_sum_bytes=sums.forward_sum_bytes if sums else 0,
                backward_sums=sums.backward_sums if sums and with_latency else 0,
                backward_sum_bytes=sums.backward_sum_bytes if sums else 0,
            )
        )
    divided = dataclasses.replace(graph, sharding=tuple(sharding))
    profile = dataclasses.replace(request.profile, graph=fingerprint(divided))
    ideal = dataclasses.replace(request, graph=divided, profile=profile)
    plans = [_planned(args, ideal, size)[0] for size in args.sizes]
    found = [plan.iteration_us for plan in plans if plan is not None]
    return min(found if whole_us is None else [whole_us, *found], default=None)


def _planned(
    args: argparse.Namespace, request: PlanRequest, size: int | None
) -> tuple[PipelinePlan | None, float]:
    """Return the plan with a tensor size (None: chosen), or None where there is none, and processor seconds."""
    begin = time.process_time()
    try:
        plan = plan_for(dataclasses.replace(request, tensor_parallel=size), planner=args.planner)
    except PlanError:
        plan = None
    return plan, time.process_time() - begin


def _gain(whole: float | None, us: float | None) -> float | None:
    return whole / us if whole is not None and us else None


def _shown(row: dict[str, Any], *, is_modelled: bool) -> dict[str, Any]:
    """Return what the table shows of a row: numbers as they are, and why the modelled gain is not ours."""
    size, times = row["modelled"] if is_modelled and row["modelled"] is not None else (None, None)
    numbers = {key: value for key, value in row.items() if key not in ("modelled", "auto_us")}
    return {
        "auto": " ".join(f"{degree}x{tensor}" for degree, tensor in row["auto"]) or "none fits",
        "why": _why(row, times),
        **{key: value for key, value in numbers.items() if key not in ("auto", "forced_us")},
        "modelled_size": size,
        "modelled_gain": times,
    }


def _why(row: dict[str, Any], modelled: float | None) -> str:
    """Return how the gain that was modelled becomes ours, a cause a step: those that change it."""
    causes = (
        ("as one larger device", row["larger_device_gain"]),
        ("with latency", row["with_latency_gain"]),
        ("with what is whole", row["gain"]),
    )
    parts, before = [], modelled
    for cause, gain in causes:
        if gain is None:
            parts.append(f"{cause} none fits")
        elif before is None or abs(gain - before) >= 0.005:
            parts.append(f"{cause} {gain:.2f}")
        before = gain or before
    return ", ".join(parts) or "as modelled"
