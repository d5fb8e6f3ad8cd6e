"""The largest batch each planner fits on A100-40GB over PCIe 4: the shape of DawnPiper's Tables 1 and 2.

A synchronous pipeline runs as many micro-batches as it has stages, all forwards first (GPipe's schedule, as in the
paper's comparison; --schedule 1f1b for the other); its batch is the mini-batch. An asynchronous one stashes weights
(PipeDream), and its batch is a micro-batch. Memory optimization is held to a slowdown: the longest stage's time per
sample is at most --slowdown times that of the largest plain batch. The plain batch is that of the quickest planner,
one limit for all (--reference fastest), or each planner's own (own). A largest batch may hang on that limit: what fits
at 1.6 times may not at 1.5, for one planner and not for the other. So every ratio is also given at the limits of
--sensitivity, beside the paper's. Each planner has the granularity and the abilities its paper gives it:

    dawnpiper   operators; swap and recompute by tensor
    vpipe       layers; swap and recompute by layer; the partition follows time
    uniform     torchgpipe: layers balanced by time; a stage recomputed whole
    pipedream   layers balanced by time and communication; no memory optimization
    zero_2, zero_3   data parallelism over as many ranks, plain; no pipeline, not counted among the baselines

Costs are derived (`profile.analytic_costs`, `library.analytic_models`), in fp32 with TF32 products and Adam.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from gpp_benchmarks._options import add_choices, add_option
from gpp_plugin.errors import ConfigError
from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.cluster import Cluster
from gpp_plugin.ir.profile import Profile
from gpp_plugin.plan.baselines.chain_costs import zero_memory_bytes
from gpp_plugin.plan.baselines.stock_chain import partition_gpipe, partition_pipedream
from gpp_plugin.plan.baselines.vpipe import partition_vpipe
from gpp_plugin.plan.cluster_files import read_cluster
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.make import layer_bounds
from gpp_plugin.plan.memory.dawnpiper import partition_chain
from gpp_plugin.plan.memory.memory_chain import ChainPlan, OptimizerFactory, Partition
from gpp_plugin.plan.memory.operator_chain import OperatorChain
from gpp_plugin.report.rows_text import format_rows

# DawnPiper's models operator by operator, and the maximum batches it reports (Tables 1 and 2).

MODELS = ("bert_large", "gpt2_770m", "t5_780m", "amoebanet")
HF_MODELS = {
    "bert_large": ("bert-large", 512),
    "gpt2_770m": ("gpt2-762m", 1024),
    "t5_780m": ("t5-large", 128),
}
"""HuggingFace configuration that comes with the package, and tokens of a text. The paper does not give the
lengths: BERT's and GPT-2's are the models' own; T5's is the power of two at which its activations fill the memory
that Table 1 implies."""

SAMPLE_COUNTS = (1, 2, 16, 128)
CAPTURED_SAMPLES = 2

PAPER: dict[tuple[int, str, str, str], tuple[int, int, int, int]] = {
    (4, "sync", "none", "zero_2"): (64, 8, 140, 412),
    (4, "sync", "none", "zero_3"): (64, 8, 132, 404),
    (4, "sync", "none", "uniform"): (52, 8, 144, 280),
    (4, "sync", "none", "vpipe"): (60, 8, 144, 188),
    (4, "sync", "none", "dawnpiper"): (72, 8, 160, 360),
    (4, "sync", "R", "uniform"): (120, 28, 348, 644),
    (4, "sync", "S+R", "vpipe"): (128, 28, 348, 720),
    (4, "sync", "S+R", "dawnpiper"): (160, 32, 424, 1220),
    (8, "sync", "none", "zero_2"): (128, 16, 224, 824),
    (8, "sync", "none", "zero_3"): (128, 16, 208, 808),
    (8, "sync", "none", "uniform"): (88, 16, 256, 480),
    (8, "sync", "none", "vpipe"): (88, 16, 256, 264),
    (8, "sync", "none", "dawnpiper"): (136, 16, 320, 560),
    (8, "sync", "R", "uniform"): (208, 48, 664, 1384),
    (8, "sync", "S+R", "vpipe"): (208, 56, 664, 1424),
    (8, "sync", "S+R", "dawnpiper"): (280, 60, 800, 2180),
    (4, "async", "none", "pipedream"): (16, 2, 40, 70),
    (4, "async", "none", "vpipe"): (16, 2, 40, 48),
    (4, "async", "none", "dawnpiper"): (32, 3, 78, 150),
    (4, "async", "S+R", "vpipe"): (46, 8, 110, 300),
    (4, "async", "S+R", "dawnpiper"): (84, 10, 192, 480),
    (8, "async", "none", "pipedream"): (16, 2, 44, 64),
    (8, "async", "none", "vpipe"): (16, 2, 44, 32),
    (8, "async", "none", "dawnpiper"): (40, 5, 84, 128),
    (8, "async", "S+R", "vpipe"): (58, 16, 144, 214),
    (8, "async", "S+R", "dawnpiper"): (100, 22, 248, 528),
}
"""Maximum batches by (stages, mode, optimization, planner), in the order of `MODELS`: a mini-batch where
synchronous, a micro-batch where asynchronous."""


def paper_batch(model: str, stages: int, mode: str, optimization: str, planner: str) -> int | None:
    """Return the paper's maximum batch, or None where it has none."""
    batches = PAPER.get((stages, mode, optimization, planner))
    return batches[MODELS.index(model)] if batches is not None and model in MODELS else None


def operator_graph(model: str, cluster: Cluster) -> tuple[BlockGraph, Profile]:
    """Return the operators of a model and what they cost on the cluster's devices, by analysis.

    Raises:
        CaptureError: the installed transformers makes a model that cannot be captured.
    """
    if model not in HF_MODELS:
        from gpp_plugin.library.analytic_models import profile_model
        from gpp_plugin.library.paper_graphs import build_model

        library_model = build_model(model)
        largest = 4 * max(SAMPLE_COUNTS)
        return library_model.graph, profile_model(library_model, cluster.devices[0], largest=largest)
    from gpp_plugin.capture.coarsen import coarsen
    from gpp_plugin.capture.export import capture_model
    from gpp_plugin.integrations.huggingface.hf_models import (
        build_on_meta,
        make_example_batch,
        read_hf_config,
    )
    from gpp_plugin.library.named_models import CONFIG_DIR
    from gpp_plugin.profile.analytic_costs import analytic_profile

    name, length = HF_MODELS[model]
    module = build_on_meta(read_hf_config(CONFIG_DIR / f"{name}.json"))
    captured = capture_model(module, make_example_batch(module, num_samples=CAPTURED_SAMPLES, length=length))
    graph = coarsen(captured, granularity="node")
    profile = analytic_profile(
        graph, cluster.devices[0], sample_counts=SAMPLE_COUNTS, op_graph=captured.op_graph
    )
    return graph, profile


PLANNERS: dict[str, tuple[Partition, dict[str, tuple[str, ...]]]] = {
    "dawnpiper": (partition_chain, {"none": (), "R": ("recompute",), "S+R": ("recompute", "swap")}),
    "vpipe": (partition_vpipe, {"none": (), "R": ("recompute",), "S+R": ("recompute", "swap")}),
    "pipedream": (partition_pipedream, {"none": (), "R": (), "S+R": ()}),
    "uniform": (partition_gpipe, {"none": (), "R": ("recompute",), "S+R": ("recompute",)}),
}
OPTIMIZATIONS = ("none", "R", "S+R")
RATIO_OF = ("dawnpiper", "vpipe")
CLIFF = 1.5
"""A cell whose ratio changes by more than this factor between limits says more of the limit than of the planners."""
FINEST = 256
"""Batches are exact up to here, and to one part in as many beyond."""
BALANCE_BATCH, PAPER_SPREAD = 2.5, 0.077
"""Section 5.4: stage times at 2.5 times the micro-batch that vPipe fits without memory optimization, and how far
the shortest is below the longest on T5 in eight asynchronous stages."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add_choices(parser, "--models", MODELS, "what to plan")
    add_option(parser, "--stages", [4, 8], "numbers of stages")
    add_option(parser, "--modes", ["sync", "async"], "modes to search", choices=["sync", "async"])
    add_option(parser, "--cluster", "a100_pcie", "a cluster description")
    add_option(parser, "--slowdown", 1.5, "most time per sample")
    add_option(
        parser,
        "--sensitivity",
        [1.3, 1.4, 1.5, 1.6, 1.8, 2.0],
        "further limits at which ratios are given",
        nargs="*",
    )
    add_option(
        parser,
        "--reference",
        "fastest",
        "the plain batch that time is compared with",
        choices=["fastest", "own"],
    )
    add_option(parser, "--schedule", "gpipe", "of sync", choices=["gpipe", "1f1b"])


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return one row a model, number of stages, mode, optimization and planner; ratios in the summary."""
    if not args.slowdown >= 1.0 or min(args.stages) < 1:
        raise ConfigError(
            f"--slowdown {args.slowdown:g} --stages {args.stages}: give a slowdown, and stages, of at least 1"
        )
    if not all(limit >= 1.0 for limit in args.sensitivity):
        raise ConfigError(f"--sensitivity {args.sensitivity}: give limits of at least 1")
    limits = sorted({args.slowdown, *args.sensitivity}) if args.sensitivity else []
    rows: list[dict[str, Any]] = []
    sensitivity: list[dict[str, Any]] = []
    balance: list[dict[str, Any]] = []
    for model in args.models:
        _report(f"{model}: operators")
        cluster = read_cluster(args.cluster, num_devices=max(args.stages))
        graph, profile = operator_graph(model, cluster)
        costs = CostModel(graph, profile, cluster)
        for stages in args.stages:
            for mode in args.modes:
                _report(f"{model}: {stages} stages, {mode}")
                cell = Cell(
                    graph, profile, cluster, model, stages, mode, args.schedule, args.slowdown, args.reference
                )
                found = cell.rows()
                for row in found:
                    _report(f"  {row['optimization']:5} {row['planner']:10} {_cell_text(row)}")
                rows += found
                more = cell.sensitivity(limits)
                for row in more:
                    _report(f"  {row['optimization']:5} over vpipe {_by_limit_text(row)}")
                sensitivity += more
                if mode == "async":
                    balance += cell.balance()
            if "sync" in args.modes:
                rows += zero_rows(costs, model, stages)
    summary = {**summarize(rows), "by_limit": over_limits(sensitivity)}
    print(format_rows(rows))
    print("\nmean ratio of dawnpiper over vpipe, and the paper's:")
    print(format_rows(summary["ratios"]))
    print(f"behind a baseline: {summary['behind'] or 'nowhere'}")
    print("\nlargest batch over vPipe's at each limit on the time a sample, and the paper's:")
    print(format_rows(_by_limit(row) for row in [*sensitivity, *summary["by_limit"]]))
    print(f"\nstage times apart, asynchronous, at {BALANCE_BATCH} x vPipe's plain micro-batch, S+R:")
    print(format_rows(balance))
    return {"rows": rows, "sensitivity": sensitivity, "balance": balance, "summary": summary}


class Cell:
    """One model on one number of stages in one mode: every planner's largest batch."""

    def __init__(
        self,
        graph: BlockGraph,
        profile: Profile,
        cluster: Cluster,
        model: str,
        stages: int,
        mode: str,
        schedule: str,
        slowdown: float,
        reference: str = "fastest",
        limit: int | None = None,
    ) -> None:
        self._sources = graph, profile, cluster
        self._costs = CostModel(graph, profile, cluster)
        self.model, self.stages, self.mode = model, stages, mode
        self.schedule = schedule if mode == "sync" else "1f1b"
        self.slowdown, self.reference = slowdown, reference
        self._limits = [limit or device.memory_bytes for device in cluster.devices[:stages]]
        self._plain: dict[str, ChainPlan | None] = {}
        self._plans: dict[tuple[str, str, int], ChainPlan] = {}
        """By planner, optimization and micro-batch: a limit on time asks for many of those that another one did."""

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each optimization and planner."""
        return [self._row(optimization, name) for optimization in OPTIMIZATIONS for name in PLANNERS]

    def sensitivity(self, limits: Sequence[float]) -> list[dict[str, Any]]:
        """Return a row for each optimization that takes time: dawnpiper's batch over vPipe's at each limit on it."""
        rows = []
        for optimization in OPTIMIZATIONS[1:] if limits else ():
            batches = {
                name: [self._found(optimization, name, limit) for limit in limits] for name in RATIO_OF
            }
            local = {name: [round(f.local) if f else 0 for f in found] for name, found in batches.items()}
            ours, theirs = (local[name] for name in RATIO_OF)
            published = [paper_batch(self.model, self.stages, self.mode, optimization, n) for n in RATIO_OF]
            ratios = [a / b if b else None for a, b in zip(ours, theirs, strict=True)]
            known = [ratio for ratio in ratios if ratio is not None]
            rows.append(
                {
                    **self._name(optimization),
                    "limits": list(limits),
                    "over_vpipe": ratios,
                    "micro_batches": local,
                    "paper": published[0] / published[1] if published[0] and published[1] else None,
                    "is_cliff": bool(known) and max(known) > CLIFF * min(known),
                }
            )
        return rows

    def _found(self, optimization: str, name: str, slowdown: float) -> ChainPlan | None:
        """Return the planner's largest batch within ``slowdown`` times the quickest plain one's time a sample."""
        plain = self._largest_plain(name)
        if not PLANNERS[name][1][optimization]:
            return plain
        is_own = self.reference == "own" and plain is not None
        allowed = slowdown * (plain.us_per_sample if plain and is_own else self._fastest_us())
        return self._largest(name, optimization, allowed, round(plain.local) if plain is not None else 1)

    def _largest_plain(self, name: str) -> ChainPlan | None:
        if name not in self._plain:
            self._plain[name] = self._largest(name, "none", float("inf"), 1)
        return self._plain[name]

    def _fastest_us(self) -> float:
        """Return the least time a sample of any planner's largest plain batch; no limit where nothing fits plainly."""
        plain = [self._largest_plain(name) for name in PLANNERS]
        return min((found.us_per_sample for found in plain if found is not None), default=math.inf)

    def _factory(self, name: str, optimization: str, costs: CostModel | None = None) -> OptimizerFactory:
        return OptimizerFactory(
            costs if costs is not None else self._costs,
            limits=self._limits,
            mode=self.mode,
            schedule=self.schedule,
            memory_optimization=PLANNERS[name][1][optimization],
        )

    def _largest(self, name: str, optimization: str, most_us: float, start: int) -> ChainPlan | None:
        """Return the plan with the largest micro-batch that fits and takes at most ``most_us`` a sample."""
        factory, partition = self._factory(name, optimization), PLANNERS[name][0]

        def plan_at(batch: int) -> ChainPlan | None:
            key = name, optimization, batch
            if key not in self._plans:
                self._plans[key] = partition(factory.at(batch, self.stages))
            found = self._plans[key]
            return found if found.fits and found.us_per_sample <= most_us else None

        return largest(plan_at, start)

    def _row(self, optimization: str, name: str) -> dict[str, Any]:
        found = self._found(optimization, name, self.slowdown)
        micro_batch = round(found.local) if found is not None else 0
        times = [stage.us for stage in found.stages] if found is not None else []
        return {
            **self._name(optimization),
            "planner": name,
            "max_batch": micro_batch * (self.stages if self.mode == "sync" else 1),
            "micro_batch": micro_batch,
            "slowdown": found.us_per_sample / self._fastest_us() if found is not None else None,
            "spread": 1 - min(times) / max(times) if times else None,
            "plan_cpu_s": self._plan_seconds(name, optimization, micro_batch) if micro_batch else None,
            "paper": paper_batch(self.model, self.stages, self.mode, optimization, name),
        }

    def _name(self, optimization: str) -> dict[str, Any]:
        return {"model": self.model, "stages": self.stages, "mode": self.mode, "optimization": optimization}

    def _plan_seconds(self, name: str, optimization: str, micro_batch: int) -> float:
        """Return the CPU seconds of one plan from the profile on, nothing kept from others."""
        begin = time.process_time()
        factory = self._factory(name, optimization, CostModel(*self._sources))
        PLANNERS[name][0](factory.at(micro_batch, self.stages))
        return time.process_time() - begin

    def balance(self) -> list[dict[str, Any]]:
        """Return the stage times of both planners of memory at 2.5 times vPipe's largest plain micro-batch."""
        plain = self._largest_plain("vpipe")
        micro_batch = round(BALANCE_BATCH * round(plain.local)) if plain is not None else 0
        result = []
        for name in RATIO_OF if micro_batch else ():
            found = PLANNERS[name][0](self._factory(name, "S+R").at(micro_batch, self.stages))
            times = [stage.us for stage in found.stages]
            result.append(
                {
                    "model": self.model,
                    "stages": self.stages,
                    "planner": name,
                    "micro_batch": micro_batch,
                    "fits": found.fits,
                    "stage_ms": [us / 1e3 for us in times],
                    "stage_gb": [stage.memory_bytes / 1e9 for stage in found.stages],
                    "spread": 1 - min(times) / max(times),
                }
            )
        return result


def largest(plan_at: Callable[[int], ChainPlan | None], start: int) -> ChainPlan | None:
    """Return the plan of the largest batch that has one: doubled from ``start`` while it does, then bisected."""
    best = plan_at(start)
    if best is None:
        return largest(plan_at, 1) if start > 1 else None
    low, high = start, 2 * start
    while (found := plan_at(high)) is not None:
        best, low, high = found, high, 2 * high
    while high - low > max(1, low // FINEST):
        middle = (low + high) // 2
        found = plan_at(middle)
        if found is None:
            high = middle
        else:
            best, low = found, middle
    return best


def zero_rows(costs: CostModel, model: str, stages: int) -> list[dict[str, Any]]:
    """Return the largest mini-batches of ZeRO-2 and ZeRO-3 on as many ranks, without memory optimization."""
    rows = []
    limit = costs.cluster.devices[0].memory_bytes
    bounds = layer_bounds([block.name for block in costs.graph.blocks])
    for zero_stage in (2, 3):
        batch = 0
        for step in (1024, 256, 64, 16, 4, 1):
            while (
                zero_memory_bytes(
                    OperatorChain(costs, batch + step), num_ranks=stages, zero_stage=zero_stage, bounds=bounds
                )
                <= limit
            ):
                batch += step
        name = f"zero_{zero_stage}"
        rows.append(
            {
                "model": model, "stages": stages, "mode": "sync", "optimization": "none", "planner": name,
                "max_batch": batch * stages, "micro_batch": batch, "slowdown": None, "spread": None,
                "plan_cpu_s": None, "paper": paper_batch(model, stages, "sync", "none", name),
            }
        )  # fmt: skip
    return rows


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return mean ratios of dawnpiper over vPipe beside the paper's, and the cells where it is behind."""
    ratios, behind = [], []
    cells = _cells(rows)
    for cell, batches in cells.items():
        ours = batches.get("dawnpiper", {}).get("max_batch", 0)
        behind += [
            [*cell, name] for name, row in batches.items() if name in PLANNERS and row["max_batch"] > ours
        ]
    names = "stages", "mode", "optimization"
    for key in dict.fromkeys(cell[1:] for cell in cells):
        pairs = [
            (batches["dawnpiper"], batches["vpipe"])
            for cell, batches in cells.items()
            if cell[1:] == key and "vpipe" in batches and batches["vpipe"]["max_batch"]
        ]
        published = [(a["paper"], b["paper"]) for a, b in pairs if a["paper"] and b["paper"]]
        if pairs:
            ratios.append(
                {
                    **dict(zip(names, key, strict=True)),
                    "over_vpipe": statistics.mean(a["max_batch"] / b["max_batch"] for a, b in pairs),
                    "paper": statistics.mean(a / b for a, b in published) if published else None,
                }
            )
    seconds = [r["plan_cpu_s"] for r in rows if r["planner"] == "dawnpiper" and r["plan_cpu_s"]]
    return {"ratios": ratios, "behind": behind, "longest_plan_cpu_s": max(seconds, default=None)}


def over_limits(sensitivity: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return by mode and optimization the geometric means over models and stages at each limit, and the cliffs."""
    result = []
    for mode, optimization in dict.fromkeys((row["mode"], row["optimization"]) for row in sensitivity):
        rows = [r for r in sensitivity if (r["mode"], r["optimization"]) == (mode, optimization)]
        by_limit = zip(*(row["over_vpipe"] for row in rows), strict=True)
        published = [row["paper"] for row in rows if row["paper"]]
        result.append(
            {
                "mode": mode,
                "optimization": optimization,
                "limits": rows[0]["limits"],
                "over_vpipe": [
                    _mean([ratio for ratio in ratios if ratio is not None]) for ratios in by_limit
                ],
                "paper": _mean(published),
                "cliffs": [[row["model"], row["stages"]] for row in rows if row["is_cliff"]],
            }
        )
    return result


def _mean(ratios: list[float]) -> float | None:
    """Return the geometric mean: 0 where one of them is, which is where ours fits nothing."""
    if not ratios:
        return None
    return statistics.geometric_mean(ratios) if min(ratios) > 0 else 0.0


def _cells(rows: list[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, dict[str, Any]]]:
    cells: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        cell = row["model"], row["stages"], row["mode"], row["optimization"]
        cells.setdefault(cell, {})[row["planner"]] = row
    return cells


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _by_limit(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of the table of limits; a mean over models and stages has its cliffs counted."""
    names: dict[str, Any] = {
        key: row[key] for key in ("model", "stages", "mode", "optimization") if key in row
    }
    ratios = dict(zip((f"{limit:g}x" for limit in row["limits"]), row["over_vpipe"], strict=True))
    cliffs = {"is_cliff": row["is_cliff"]} if "is_cliff" in row else {"cliffs": len(row["cliffs"])}
    return {**names, **ratios, "paper": row["paper"], **cliffs}


def _by_limit_text(row: dict[str, Any]) -> str:
    texts = ["-" if ratio is None else f"{ratio:.2f}" for ratio in (*row["over_vpipe"], row["paper"])]
    found = ", ".join(f"{limit:g}x {text}" for limit, text in zip(row["limits"], texts[:-1], strict=True))
    return f"{found} [{texts[-1]}]"


def _cell_text(row: dict[str, Any]) -> str:
    slowdown = f" {row['slowdown']:.2f}x" if row["slowdown"] else ""
    paper = f" [{row['paper']}]" if row["paper"] else ""
    return f"{row['max_batch']}{slowdown}{paper}"
