"""How good plans are: the DP and `auto` against brute force on random graphs; with memory optimization too.

The brute force has times, bytes and (but for stages on fewer ranks, `check_map`) a player of its own. It knows
GraphPipe's Table 2 as in-flight counts (there: all counts), while `auto` may hold more: ratios below 1 are no error.

Each case is told on standard error as it comes. After ``--limit`` seconds no further one begins, and what was not run
is said.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import itertools
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import networkx as nx

from gpp_benchmarks._memory_oracle import MemoryBruteForce, with_saved_tensors
from gpp_benchmarks._options import add_option
from gpp_benchmarks._oracle import (
    all_partitions,
    best_series_parallel,
    best_unlike_us,
    brute_force,
    random_dag,
    random_request,
    random_series_parallel,
    unlike_request,
    without_communication,
)
from gpp_benchmarks._oracle_costs import (
    Groups,
    num_micro_batches,
    oracle_plan,
    stage_reduce_us,
    stage_update_us,
)
from gpp_benchmarks._tensor_oracle import best_tensor_us, tensor_request
from gpp_plugin.errors import PlanError, PlanInfeasible, ScheduleError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.graphpipe.graphpipe import make_search
from gpp_plugin.plan.graphpipe.intervals import build_series, decompose
from gpp_plugin.plan.make import with_link_times
from gpp_plugin.plan.refine.share_ranks import share_ranks
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.plan.request import PlanRequest, batch_rules, unlimited
from gpp_plugin.report.rows_text import format_rows
from gpp_plugin.simulate.predict import predict_iteration_us

TOLERANCE = 1e-6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument(
        "--cases", type=int, default=60, help="random graphs for auto (%(default)s, half of them tight)"
    )
    add_option(parser, "--sp-cases", 500, "random series-parallel graphs for the DP")
    add_option(parser, "--memory-cases", 40, "random graphs too large for their devices' memory")
    parser.add_argument(
        "--map-cases",
        type=int,
        default=0,
        help="random graphs in up to six stages on two to four ranks, against all partitions, maps and in-flight "
        "counts (%(default)s; a case takes seconds)",
    )
    add_option(
        parser,
        "--open-cases",
        0,
        "chains of three blocks and random graphs on two or three ranks, in any number of stages, against all "
        "partitions, sets of ranks and in-flight counts",
    )
    add_option(
        parser,
        "--unlike-cases",
        0,
        "random graphs on devices of two speeds, against all partitions and placements",
    )
    add_option(
        parser,
        "--tensor-cases",
        0,
        "random graphs whose blocks tensor ranks can divide, against all partitions and grids",
    )
    parser.add_argument(
        "--limit",
        type=float,
        help="seconds after which no further case begins; what is left is said (no limit)",
    )
    add_option(parser, "--seed", 0, "of the random graphs")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return one row a case and a summary."""
    cases = _Cases(args)
    rows = [
        *cases.checked("series-parallel", args.sp_cases, check_series_parallel),
        *cases.checked("auto", args.cases, check_auto),
    ]
    joined = cases.checked("joined", args.memory_cases, check_joined)
    maps = cases.checked("map", args.map_cases, check_map)
    opened = cases.checked("open", args.open_cases, check_open)
    unlike = cases.checked("unlike", args.unlike_cases, check_unlike)
    tensor = cases.checked("tensor", args.tensor_cases, check_tensor)
    rows += [*joined, *maps, *opened, *unlike, *tensor]
    found = [row for row in rows if row["kind"] == "auto" and row["best_us"] is not None]
    ratios = [row["us"] / row["best_us"] for row in found if row["us"] is not None]
    missed = sum(row["us"] is None for row in found)
    exact = [row for row in rows if row["kind"] == "series-parallel"]
    summary = {
        "cases": len(found),
        "optimal_fraction": sum(ratio <= 1 + TOLERANCE for ratio in ratios) / len(found) if found else None,
        "worst_ratio": max(ratios, default=None),
        "missed_feasible": missed,
        "series_parallel_cases": len(exact),
        "series_parallel_equal": sum(row["is_equal"] for row in exact),
        **_joined_summary(joined),
        **_ratio_summary("map", maps),
        **_ratio_summary("open", opened),
        **_ratio_summary("unlike", unlike),
        **_ratio_summary("tensor", tensor),
        "not_run": cases.not_run,
    }
    print(format_rows(_summary_rows(summary)))
    for kind, count in cases.not_run.items():
        print(f"{count} {kind} cases were not run: --limit {args.limit:g} s; go on with --seed, or raise it")
    return {"rows": rows, "summary": summary}


class _Cases:
    """Runs cases one after the other, within the limit, and says on standard error what came of each."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._seed = args.seed
        self._end = math.inf if args.limit is None else time.monotonic() + args.limit
        self.not_run: dict[str, int] = {}

    def checked(self, kind: str, count: int, check: Callable[[int], dict[str, Any]]) -> list[dict[str, Any]]:
        """Return a row for each case; of those there is no time for the number is kept."""
        rows: list[dict[str, Any]] = []
        for number in range(count):
            if time.monotonic() >= self._end:
                self.not_run[kind] = count - number
                break
            rows.append(check(self._seed + number))
            print(f"{kind} {number + 1} of {count}{_found_text(rows[-1])}", file=sys.stderr, flush=True)
        return rows


def _found_text(row: dict[str, Any]) -> str:
    """Return the ratio of a row, and its seed where that is above 1."""
    ratio = row.get("ratio")
    if ratio is None:
        return ""
    return f": {ratio:.4f}" + (f" (seed {row['seed']})" if ratio > 1 + TOLERANCE else "")


def _summary_rows(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a line of the table for each kind of cases that was run: ``(what, kind, how many are as good)``."""
    kinds = (
        ("the DP, series-parallel plans", "series_parallel", summary["series_parallel_equal"]),
        ("auto, all partitions", "", round((summary["optimal_fraction"] or 0.0) * summary["cases"])),
        ("graphpipe, partitions and memory (within 1 %)", "joined", summary["joined_within_1_percent"]),
        ("stages on fewer ranks, all maps and counts", "map", summary["map_optimal"]),
        ("any stages on any ranks (within 1 %)", "open", summary["open_within_1_percent"]),
        ("devices of two speeds", "unlike", summary["unlike_optimal"]),
        ("tensor sizes, all partitions and grids", "tensor", summary["tensor_optimal"]),
    )
    names = [(what, f"{kind}_" if kind else "", equal) for what, kind, equal in kinds]
    return [
        {
            "against brute force": what,
            "cases": summary[f"{kind}cases"],
            "equal": equal,
            "worst ratio": summary.get(f"{kind}worst_ratio"),
            "no plan found": summary.get(f"{kind}missed_feasible"),
        }
        for what, kind, equal in names
        if summary[f"{kind}cases"]
    ]


def _ratio_summary(kind: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how many plans of these rows are as short as the best there is, and the longest over it.

    Graphs that fit in no way at all are no cases: nothing is missed there.
    """
    feasible = [row for row in rows if row["best_us"] is not None]
    ratios = [row["ratio"] for row in feasible if row["ratio"] is not None]
    return {
        f"{kind}_cases": len(feasible),
        f"{kind}_optimal": sum(ratio <= 1 + TOLERANCE for ratio in ratios),
        f"{kind}_within_1_percent": sum(ratio <= 1.01 for ratio in ratios),
        f"{kind}_within_5_percent": sum(ratio <= 1.05 for ratio in ratios),
        f"{kind}_worst_ratio": max(ratios, default=None),
        f"{kind}_missed_feasible": sum(row["us"] is None for row in feasible),
    }


def _joined_summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how joined plans compare with brute force, with no memory optimization, and with it afterwards."""
    ratios = [row["ratio"] for row in rows if row["ratio"] is not None]
    return {
        "joined_cases": sum(row["best_us"] is not None for row in rows),
        "joined_within_1_percent": sum(ratio <= 1.01 for ratio in ratios),
        "joined_worst_ratio": max(ratios, default=None),
        "joined_missed_feasible": sum(row["us"] is None and row["best_us"] is not None for row in rows),
        "plain_feasible": sum(row["plain_us"] is not None for row in rows),
        "after_feasible": sum(row["after_us"] is not None for row in rows),
        "behind_plain_or_after": [row["seed"] for row in rows if row["is_behind"]],
    }


def check_joined(seed: int, planner: str = "graphpipe") -> dict[str, Any]:
    """Compare joined planning on one chain (even seeds) or graph with brute force over partitions and memory plans.

    Beside it: the plan without memory optimization, and a plan made without a thought of memory and optimized
    afterwards, by brute force. The brute force holds what Table 2 asks for in flight; planners may hold more, to
    hide messages, and be quicker.
    """
    rng = random.Random(7_000_003 * (seed + 1))
    num = rng.randint(4, 7)
    chain = nx.path_graph(num, create_using=nx.DiGraph)
    graph = random_dag(rng, num) if seed % 2 else chain
    request = random_request(rng, graph, ranks=rng.choice([2, 3, 4]), is_tight=False)
    request = with_saved_tensors(rng, request, tightness=rng.uniform(0.3, 1.5))
    begin = time.perf_counter()
    us = _step_us(planner, dataclasses.replace(request, memory_optimization=("recompute", "swap")))
    seconds = time.perf_counter() - begin
    plain = _step_us(planner, request)
    oracle = MemoryBruteForce(dataclasses.replace(request, memory_optimization=("recompute", "swap")))
    best = oracle.best_us()
    free = _plan_of(planner, unlimited(request))
    after = None if free is None else oracle.step_us(free)
    others = [other for other in (plain, after) if other is not None]
    return {
        "kind": "joined",
        "seed": seed,
        "blocks": num,
        "ranks": request.num_ranks,
        "us": us,
        "plain_us": plain,
        "after_us": after,
        "best_us": best,
        "ratio": us / best if us is not None and best is not None else None,
        "is_behind": any(us is None or us > other * (1 + TOLERANCE) for other in others),
        "seconds": round(seconds, 3),
    }


def _step_us(planner: str, request: PlanRequest) -> float | None:
    plan = _plan_of(planner, request)
    return None if plan is None else plan.iteration_us


def _plan_of(planner: str, request: PlanRequest) -> PipelinePlan | None:
    try:
        return make_plan(planner, request)
    except PlanInfeasible:
        return None


def check_series_parallel(seed: int) -> dict[str, Any]:
    """Compare the DP's bottleneck, without absorption, with brute force on one series-parallel graph."""
    rng = random.Random(seed)
    num = rng.randint(2, 8)
    request = without_communication(
        random_request(
            rng, random_series_parallel(rng, num), ranks=rng.randint(1, 4), is_tight=rng.random() < 0.5
        )
    )
    expected, found = best_series_parallel(request), search_bottleneck(request)
    is_equal = expected == found or (
        expected is not None and found is not None and abs(found / expected - 1) < TOLERANCE
    )
    return {
        "kind": "series-parallel",
        "seed": seed,
        "blocks": num,
        "best_us": expected,
        "us": found,
        "is_equal": is_equal,
    }


def search_bottleneck(request: PlanRequest) -> float | None:
    """Return the smallest time a sample for which the DP finds enough devices."""
    costs, rules = CostModel(request.graph, request.profile, request.cluster), batch_rules(request)
    order = {block.name: i for i, block in enumerate(request.graph.blocks)}
    dependencies = nx.relabel_nodes(request.graph.dependencies(), order)
    root = build_series(request.graph, costs, rules, decompose(dependencies), has_absorption=False)
    wish = rules.sizes_to_try[0]
    search = make_search(request, costs, rules, root, wish, len(order))
    for t in search.times():
        if (search.fewest_devices(float(t)) <= request.num_ranks).any():
            return float(t)
    return None


def check_auto(seed: int, planner: str = "auto") -> dict[str, Any]:
    """Compare `auto`, or another planner, with brute force over all DAG partitions of one random graph."""
    rng = random.Random(1_000_003 * (seed + 1))
    num = rng.randint(5, 9)
    request = random_request(rng, random_dag(rng, num), ranks=rng.choice([2, 3, 4]), is_tight=seed % 2 == 1)
    row = _compared("auto", seed, request, brute_force, planner=planner)
    return {**row, "is_tight": seed % 2 == 1}


def check_unlike(seed: int) -> dict[str, Any]:
    """Compare `auto` with brute force on one random graph and devices of two speeds."""
    return _compared("unlike", seed, unlike_request(seed), best_unlike_us)


def check_tensor(seed: int, planner: str = "auto", *, has_context: bool = False) -> dict[str, Any]:
    """Compare `auto`, which chooses context and tensor sizes, with brute force on one random graph."""
    request = tensor_request(seed, has_context=has_context)
    begin = time.process_time()
    whole = _step_us(planner, dataclasses.replace(request, tensor_parallel=1, sequence_parallel=1))
    whole_seconds = time.process_time() - begin
    row = _compared("tensor", seed, request, best_tensor_us, planner=planner)
    return {**row, "whole_us": whole, "whole_seconds": round(whole_seconds, 3)}


def _compared(
    kind: str,
    seed: int,
    request: PlanRequest,
    best_us: Callable[[PlanRequest], float | None],
    *,
    planner: str = "auto",
) -> dict[str, Any]:
    """Return the row of one request: a planner's step, the best one by brute force, and their ratio."""
    begin = time.process_time()
    plan = _plan_of(planner, request)
    seconds = time.process_time() - begin
    us = None if plan is None else plan.iteration_us
    best = best_us(request)
    return {
        "kind": kind,
        "seed": seed,
        "blocks": len(request.graph.blocks),
        "ranks": request.num_ranks,
        **({"tensor": [stage.tensor for stage in plan.stages] if plan else []} if kind == "tensor" else {}),
        "us": us,
        "best_us": best,
        "ratio": us / best if us is not None and best is not None else None,
        "seconds": round(seconds, 3),
    }


# ---- stages on fewer ranks by brute force: every partition, every map of its stages to ranks, every in-flight count
#
# Times, bytes and edges are the oracles' own (`_oracle_costs`). In what order a rank runs the tasks of its stages, and
# how long that takes, is the package's (`schedule.build`, `simulate.predict`): a plan is what these make of it. So what
# is checked is the planner's choice of stages, ranks and counts, not its orders: both are judged by the same simulator.
#
#     first    every map with GraphPipe's Table 2 in flight; those whose bound (`_least_us`) is least before the others,
#              until that alone is as long as the `NUM_COUNTED` best
#     then     of these, from Table 2's counts and from all micro-batches, one stage's count after another, whatever is
#              shorter; and of the best every vector of counts from Table 2's up to all micro-batches
#
# Each with orders that take messages to be free, and with orders that do not.

SIZE, MICRO_BATCHES = 4, 4
MOST_STAGES = 6
NUM_COUNTED = 3


def map_request(seed: int) -> PlanRequest:
    """Return a random graph that is asked for in more stages than ranks: 2 to 4 ranks, up to `MOST_STAGES` stages."""
    rng = random.Random(9_000_011 * (seed + 1))
    ranks = rng.choice([2, 3, 4])
    blocks = rng.randint(ranks + 1, MOST_STAGES)
    request = random_request(rng, random_dag(rng, blocks), ranks=ranks, is_tight=False, micro_batch_size=SIZE)
    return dataclasses.replace(
        request,
        mini_batch=MICRO_BATCHES * SIZE,
        num_stages=rng.randint(ranks + 1, blocks),
        data_parallel=1,
        virtual_stages=None,
    )


def open_request(seed: int) -> PlanRequest:
    """Return a chain of three blocks on two ranks, or a random graph on two or three, in any number of stages.

    Two of three have one rank a stage, the others any number that divides a micro-batch.
    """
    rng = random.Random(13_000_027 * (seed + 1))
    is_chain = seed % 2 == 0
    ranks = 2 if is_chain else rng.choice([2, 2, 3])
    one_rank = rng.random() < 2 / 3
    most = 5 if ranks == 2 or one_rank else 4
    graph = nx.path_graph(3, create_using=nx.DiGraph) if is_chain else random_dag(rng, rng.randint(3, most))
    request = random_request(rng, graph, ranks=ranks, is_tight=False, micro_batch_size=SIZE)
    return dataclasses.replace(
        request,
        mini_batch=MICRO_BATCHES * SIZE,
        data_parallel=1 if one_rank else None,
        virtual_stages=None,
        colocate=not one_rank,
    )


def check_map(seed: int) -> dict[str, Any]:
    """Compare the search for shared ranks with brute force on one random graph in a number of stages."""
    return _check_placed("maps", seed, map_request(seed))


def check_open(seed: int) -> dict[str, Any]:
    """Compare the search for shared ranks with brute force where the number of stages is open too."""
    return _check_placed("open", seed, open_request(seed))


def _check_placed(kind: str, seed: int, request: PlanRequest) -> dict[str, Any]:
    begin = time.process_time()
    try:
        plan = share_ranks(make_plan("auto", request), request, schedule="1f1b")
        us: float | None = plan.iteration_us
    except PlanInfeasible:
        us = None
    seconds = time.process_time() - begin
    best, found = best_map_us(request)
    return {
        "kind": kind,
        "seed": seed,
        "blocks": len(request.graph.blocks),
        "stages": request.num_stages,
        "ranks": request.num_ranks,
        "us": us,
        "best_us": best if best < math.inf else None,
        "ratio": us / best if us is not None and best < math.inf else None,
        "best": None if found is None else _in_words(found),
        "seconds": round(seconds, 3),
        "oracle_seconds": round(time.process_time() - begin - seconds, 3),
    }


def _in_words(plan: PipelinePlan) -> list[str]:
    return [
        f"{' '.join(s.blocks)} on {' '.join(map(str, s.ranks))}, {s.in_flight} in flight" for s in plan.stages
    ]


def best_map_us(request: PlanRequest) -> tuple[float, PipelinePlan | None]:
    """Return the shortest step of all partitions into the stages asked for, on all maps, and its plan."""
    bounded = sorted(
        ((_least_us(plan), number, plan) for number, plan in enumerate(_placed_plans(request))),
        key=lambda item: item[:2],
    )
    kept: list[tuple[float, int, PipelinePlan]] = []  # a heap of the best, the longest of them first
    for bound, number, plan in bounded:
        if len(kept) == NUM_COUNTED and bound >= -kept[0][0]:
            break
        heapq.heappush(kept, (-_mapped_us(plan, request), number, plan))
        if len(kept) > NUM_COUNTED:
            heapq.heappop(kept)
    if not kept:
        return math.inf, None
    moved = [(*_moved_counts(plan, request), plan) for _, _, plan in sorted(kept, key=lambda item: -item[0])]
    best, counted, plan = min(moved, key=lambda each: each[0])
    if best <= _least_us(plan) * (1 + 1e-9):
        return best, plan.with_each(in_flight=counted)
    for counts in itertools.product(*(range(stage.in_flight, MICRO_BATCHES + 1) for stage in plan.stages)):
        us = _mapped_us(plan.with_each(in_flight=counts), request)
        if us < best * (1 - 1e-9):
            best, counted = us, counts
    return best, plan.with_each(in_flight=counted)


def _moved_counts(plan: PipelinePlan, request: PlanRequest) -> tuple[float, tuple[int, ...]]:
    """Return the shortest step that changes of one stage's count after another lead to, and its counts."""
    found = []
    for start in (tuple(stage.in_flight for stage in plan.stages), (MICRO_BATCHES,) * len(plan.stages)):
        counts, best = start, _mapped_us(plan.with_each(in_flight=start), request)
        is_improved = True
        while is_improved:
            is_improved = False
            for i, count in itertools.product(range(len(counts)), range(1, MICRO_BATCHES + 1)):
                changed = (*counts[:i], count, *counts[i + 1 :])
                us = best if changed == counts else _mapped_us(plan.with_each(in_flight=changed), request)
                if us < best * (1 - 1e-9):
                    counts, best, is_improved = changed, us, True
        found.append((best, counts))
    return min(found)


def _placed_plans(request: PlanRequest) -> Iterator[PipelinePlan]:
    """Yield every partition on every map to sets of all ranks; these are alike, and numbered as they are met."""
    most = len(request.graph.blocks) if request.num_stages is None else request.num_stages
    for groups in all_partitions(request.graph, most):
        if request.num_stages in (None, len(groups)):
            yield from _on_all_maps(request, groups)


def _on_all_maps(request: PlanRequest, groups: Groups) -> Iterator[PipelinePlan]:
    degrees = range(1, request.num_ranks + 1) if request.data_parallel is None else [request.data_parallel]
    sets = [
        ranks
        for degree in degrees
        if SIZE % degree == 0
        for ranks in itertools.combinations(range(request.num_ranks), degree)
    ]
    plans: dict[tuple[int, ...], PipelinePlan] = {}
    for placed in itertools.product(sets, repeat=len(groups)):
        if list(dict.fromkeys(itertools.chain(*placed))) != list(range(request.num_ranks)):
            continue
        sizes = tuple(map(len, placed))
        plan = plans.setdefault(sizes, oracle_plan(request, groups, sizes, SIZE))
        ranks_of = dict(zip(groups, placed, strict=True))
        yield plan.with_each(ranks=[ranks_of[stage.blocks] for stage in plan.stages])


def _least_us(plan: PipelinePlan) -> float:
    """Return a time no order is shorter than: a rank's work, what must come before all of it, and after."""
    # Before a stage's first forward one of each stage on a path to it, after its last backward one of each of these:
    # stages come in topological order, 0 -> 1 -> 2 with F 1 and B 2 of each give 2 before stage 2 and 4 after it.
    before, after = [0.0] * len(plan.stages), [0.0] * len(plan.stages)
    for edge in plan.edges:  # sorted by source
        source = plan.stages[edge.src]
        before[edge.dst] = max(before[edge.dst], before[edge.src] + source.forward_us)
        after[edge.dst] = max(after[edge.dst], after[edge.src] + source.backward_us)
    least: dict[int, tuple[float, float, float]] = {}
    for index, stage in enumerate(plan.stages):
        work = (stage.forward_us + stage.backward_us) * num_micro_batches(plan, stage)
        for rank in stage.ranks:
            head, busy, tail = least.get(rank, (math.inf, 0.0, math.inf))
            least[rank] = min(head, before[index]), busy + work, min(tail, after[index])
    return max(sum(parts) for parts in least.values())


def _mapped_us(plan: PipelinePlan, request: PlanRequest) -> float:
    """Return the shorter step of orders that take messages to be free and of orders that do not; inf: it cannot run."""
    best = math.inf
    reduce_us = {i: stage_reduce_us(stage, request.cluster) for i, stage in enumerate(plan.stages)}
    step_us = {i: stage_update_us(stage, request.cluster) for i, stage in enumerate(plan.stages)}
    for each in (plan, with_link_times(plan, request.cluster)):
        try:
            us = predict_iteration_us(each, cluster=request.cluster, reduce_us=reduce_us, step_us=step_us)
            best = min(best, us)
        except (PlanError, ScheduleError):
            continue
    return best
