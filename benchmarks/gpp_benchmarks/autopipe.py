"""AutoPipe's comparisons (its Tables II to IV, Figure 13): balance and predicted step of each planner.

Rows of kind ``table 2`` are the paper's seven partitions of GPT-2 345M into four stages. Rows of kind ``search`` have
the heuristic's partition beside the best of all. Rows of kind ``planner`` are what each planner makes of a case of
Table III or IV, the paper's milliseconds beside it. AutoPipe over Megatron-LM's even layers is `gpp bench figures
--paper autopipe`, figures 9 and 10.

As in the paper every rank takes a micro-batch at a time, of 4, 16 or 32 samples, and data parallelism multiplies them.
Transformer layers are checkpointed: a block keeps its input; embedding and head are not run again. Devices are 3090s
with 100 Gb/s between nodes. AutoPipe plans on attention and feed-forward blocks; the others on whole layers, as the
originals do. ``dapple-2`` is DAPPLE asked for two stages, which is what the paper says it always chose; ours may
choose one. Degrees that do not divide the mini-batch (1 and 3 ranks) nobody can have here.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from dataclasses import dataclass
from typing import Any

from gpp_benchmarks._paper import searched
from gpp_plugin.library.analytic_models import profile_model
from gpp_plugin.library.paper_graphs import build_model
from gpp_plugin.plan.baselines.autopipe import search_exact, search_heuristic, simulator_of
from gpp_plugin.plan.baselines.chain_costs import ChainCosts
from gpp_plugin.plan.cluster_files import read_cluster
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.plan.request import PlanRequest, batch_rules
from gpp_plugin.report.rows_text import format_rows


@dataclass(frozen=True, slots=True)
class Case:
    """A model on some devices in the paper's tables.

    Args:
        micro_batch: samples a rank takes at a time.
        paper_ms: by mini-batch, milliseconds an iteration of DAPPLE, Piper and AutoPipe; None: it failed there.
    """

    table: str
    model: str
    devices: int
    micro_batch: int
    paper_ms: dict[int, tuple[float | None, float | None, float | None]]


CASES = (
    Case("III", "gpt2_345m", 4, 4, {
        128: (11091, 6755.6, 6510.5), 256: (19925, 12842, 12852), 512: (39815, 25421, 25737),
    }),
    Case("III", "gpt2_345m", 16, 4, {
        128: (None, 2081.1, 2077.6), 256: (None, 4066.0, 4063.7), 512: (None, 7216.0, 7236.5),
    }),
    Case("IV", "gpt2_345m", 4, 32, {
        512: (27477.3, 30285.9, 27020.9), 1024: (53539.9, 56399.5, 50969.7), 2048: (105635, 108694, 99110.9),
    }),
    Case("IV", "gpt2_345m", 8, 32, {
        512: (15828.6, 18143.6, 15445.3), 1024: (30853.7, 31901.0, 27147.5), 2048: (60898.3, 60397.7, 51217.4),
    }),
    Case("IV", "gpt2_1p3b", 4, 16, {
        512: (None, 67087.2, 62885.0), 1024: (None, 128831, 119788), 2048: (None, 253052, 234781),
    }),
    Case("IV", "gpt2_1p3b", 8, 16, {
        512: (None, 36783.1, 34512.7), 1024: (None, 70017.3, 62869.1), 2048: (None, 137135, 120732),
    }),
)  # fmt: skip
"""Table, model, devices, samples of a micro-batch; by mini-batch the milliseconds of `PAPER_PLANNERS`."""
TWO_STAGES = "dapple-2"
PAPER_PLANNERS = (TWO_STAGES, "piper", "autopipe")
"""Whose milliseconds `Case.paper_ms` are."""
PLANNERS = ("autopipe", "auto", "uniform", "pipedream", "piper", "dapple", TWO_STAGES)
OURS = ("autopipe", "auto")
MEGATRON = (
    ("gpt2_345m", 4, (2, 4, 8, 12)),
    ("gpt2_762m", 4, (2, 4, 9, 12)),
    ("bert_large", 16, (2, 4, 8, 12)),
)
"""Figure 10: model, samples of a micro-batch, numbers of stages."""
TABLE_2 = (
    (5, 7, 6, 6),
    (6, 6.5, 6.5, 5),
    (6, 7, 6, 5),
    (6.5, 6.5, 6.5, 4.5),
    (6.5, 6.5, 6, 5),
    (7, 5.5, 6, 5.5),
    (7, 6.5, 5.5, 5),
)
"""Layers of each stage; the fourth is the best."""
EXACT_LIMIT = 200_000
PAPER = {
    "balance": (2.73, 12.7),
    "step over Megatron-LM": (1.02, 1.30),
    "planner over Megatron-LM": (1.0, 1.25),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--planners", nargs="+", default=list(PLANNERS), help="planners to run")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds a search may take (%(default)s)")
    parser.add_argument("--stages", type=int, default=None, help="ask every planner for that many stages")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return the rows of all kinds: balance and predicted step of each planner over AutoPipe's, beside the paper's."""
    rows = _table_2_rows() + _search_rows()
    for case in CASES:
        for mini_batch in case.paper_ms:
            cell = [_row(args, case, mini_batch, planner) for planner in args.planners]
            rows += _with_ratios(cell)
    planned = [row for row in rows if row["kind"] == "planner"]
    behind = [
        [row["model"], row["devices"], row["micro_batch"], row["mini_batch"], row["planner"]]
        for row in planned
        if row["planner"] not in OURS and (row.get("step_over_autopipe") or 1.0) < 0.995
    ]
    exact = [row["is_optimal"] for row in rows if row["kind"] == "search"]
    summary = {"quicker_than_autopipe": behind, "heuristic_is_optimal": all(exact), "paper": PAPER}
    print(format_rows(rows))
    return {"rows": rows, "summary": summary}


def _with_ratios(cell: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of a case with their steps and deviations over AutoPipe's, here and in the paper."""
    ours = next((row for row in cell if row["planner"] == "autopipe" and row["step_us"]), None)
    paper = next((row["paper_ms"] for row in cell if row["planner"] == "autopipe"), None)
    for row in cell:
        row["paper_over_autopipe"] = row["paper_ms"] / paper if paper and row["paper_ms"] else None
        if ours is not None and row["step_us"] is not None:
            row["step_over_autopipe"] = row["step_us"] / ours["step_us"]
            spread = ours["deviation_us"]
            row["deviation_over_autopipe"] = row["deviation_us"] / spread if spread else None
    return cell


def _table_2_rows() -> list[dict[str, Any]]:
    """Return the predicted step of every partition of Table II: 4 stages, 8 micro-batches of 4."""
    chain = _chain("gpt2_345m", 4, 4, 32)
    simulator = simulator_of(chain, 1)
    rows: list[dict[str, Any]] = []
    for layers in TABLE_2:
        # A layer is two blocks; the embedding is before the first, the head after the last.
        ends = list(itertools.accumulate(int(2 * count) for count in layers))
        cuts = (0, *(1 + end for end in ends[:-1]), chain.num_blocks)
        forward, backward = simulator.stage_times(cuts)
        times = [f + b for f, b in zip(forward, backward, strict=True)]
        rows.append(
            {
                "kind": "table 2",
                "layers": layers,
                "step_us": simulator.run(cuts)[0],
                "deviation_us": statistics.pstdev(times),
            }
        )
    best = min(row["step_us"] for row in rows)
    return [{**row, "over_best": row["step_us"] / best} for row in rows]


def _search_rows() -> list[dict[str, Any]]:
    """Return for 4 and 8 stages and every case of as many devices what heuristic and exact search find."""
    rows = []
    for case in CASES:
        if case.devices not in (4, 8):
            continue
        mini_batch = min(case.paper_ms)
        simulator = simulator_of(_chain(case.model, case.devices, case.micro_batch, mini_batch), 1)
        begin = time.process_time()
        heuristic = search_heuristic(simulator, case.devices)
        middle = time.process_time()
        exact = search_exact(simulator, case.devices, limit=EXACT_LIMIT)
        rows.append(
            {
                "kind": "search",
                "model": case.model,
                "stages": case.devices,
                "micro_batch": case.micro_batch,
                "heuristic_us": heuristic[0],
                "exact_us": exact[0] if exact else None,
                "is_optimal": exact is not None and heuristic[0] <= exact[0] * (1 + 1e-9),
                "heuristic_cpu_seconds": middle - begin,
                "exact_cpu_seconds": time.process_time() - middle,
            }
        )
    return rows


def paper_case(
    model: str, devices: int, micro_batch: int, mini_batch: int, granularity: str, num_stages: int | None
) -> PlanRequest:
    """Return the request of a case: every rank takes ``micro_batch`` samples at a time, whatever its stage's degree."""
    library_model = build_model(model, granularity=granularity)
    cluster = read_cluster("rtx3090_100g", num_devices=devices)
    return PlanRequest(
        graph=library_model.graph,
        profile=profile_model(library_model, cluster.devices[0], largest=micro_batch, recompute=True),
        cluster=cluster,
        num_ranks=devices,
        mini_batch=mini_batch,
        loss_unit=micro_batch,
        keep_units=True,
        num_stages=num_stages,
    )


def _chain(model: str, devices: int, micro_batch: int, mini_batch: int) -> ChainCosts:
    request = paper_case(model, devices, micro_batch, mini_batch, "sub_layer", None)
    costs = CostModel(request.graph, request.profile, request.cluster)
    return ChainCosts(request, costs, batch_rules(request), micro_batch)


def _row(args: argparse.Namespace, case: Case, mini_batch: int, planner: str) -> dict[str, Any]:
    granularity = "sub_layer" if planner in OURS else "layer"
    stages = 2 if planner == TWO_STAGES else args.stages
    request = paper_case(case.model, case.devices, case.micro_batch, mini_batch, granularity, stages)
    paper = dict(zip(PAPER_PLANNERS, case.paper_ms[mini_batch], strict=True))
    row: dict[str, Any] = {
        "kind": "planner",
        "table": case.table,
        "model": case.model,
        "devices": case.devices,
        "micro_batch": case.micro_batch,
        "mini_batch": mini_batch,
        "planner": planner,
        "granularity": granularity,
        "stages": None,
        "degrees": None,
        "deviation_us": None,
        "step_us": None,
        "step_over_autopipe": None,
        "deviation_over_autopipe": None,
        "paper_ms": paper.get(planner),
        "status": "",
    }
    name = "dapple" if planner == TWO_STAGES else planner
    plan, row["status"] = searched(args.limit, lambda: make_plan(name, request))
    if plan is None:
        return row
    times = [(s.forward_us + s.backward_us) / s.micro_batch_size for s in plan.stages]
    row["stages"] = len(plan.stages)
    row["degrees"] = [stage.degree for stage in plan.stages]
    row["deviation_us"] = statistics.pstdev(times)
    row["step_us"] = plan.iteration_us
    return row
