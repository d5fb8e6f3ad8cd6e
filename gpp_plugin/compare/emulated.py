"""Stock, best chain and graph with the compute of every stage replaced by a delay of its measured time.

All pipelines are planned here, on costs measured once in this process; then their processes and messages run in
turns. Delays of many ranks overlap on few cores, which matrix products do not: this shows the schedules of as many
devices as there are ranks.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import torch

from gpp_plugin.compare.alternated_benchmarks import AlternatedBenchmark, Chain, run_alternated
from gpp_plugin.compare.compare_settings import CHAIN, GRAPH, PLAIN, STOCK, CompareSettings
from gpp_plugin.compare.compared_models import BuiltModel, build_model
from gpp_plugin.compare.simulated import best_chain
from gpp_plugin.config.reader import read_config
from gpp_plugin.errors import ConfigError, PlanError
from gpp_plugin.integrations.deepspeed.dispatch import setting_of
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.model.model_source import ModelSource
from gpp_plugin.plan.baselines.stock_chain import cut_bytes, linearise
from gpp_plugin.plan.choose_schedule import schedule_plan
from gpp_plugin.plan.costs.estimate import finished_plan
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.plan.request import PlanRequest, one_stage_a_rank
from gpp_plugin.plugins import PLANNERS
from gpp_plugin.rehearse.rehearsal import scale_times
from gpp_plugin.runtime.stage_module import Reference

Tell = Callable[[str], None]
PIPELINES = (PLAIN, STOCK, CHAIN, GRAPH)
_PEER = "deepspeed"
_CAPTURING = "gpp compare captures the request"
"""A planner's name that no package has: only `captured_request` lends it, for a moment."""


def compare_emulated(settings: CompareSettings, *, scale_time: float, tell: Tell) -> list[dict[str, Any]]:
    """Plan and run the pipelines with emulated compute, and return a row each.

    Args:
        scale_time: factor of every measured time.

    Raises:
        ConfigError: no mode is a pipeline, or none of them can run this.
        RuntimeFailure: a process failed.
    """
    modes = [mode for mode in settings.modes if mode in PIPELINES]
    if not modes or not scale_time > 0:
        raise ConfigError(
            f"emulated compute is of pipelines: give --modes {','.join(PIPELINES)} and a --scale-time above 0"
        )
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # as each rank has
    built = build_model(settings)
    # One folder of measured costs for all modes: each plans on the very numbers the first one measured, as far as
    # they need the same, so they differ by their planners alone.
    planned: dict[str, PipelinePlan | str] = {}
    stock = None
    with tempfile.TemporaryDirectory(prefix="gpp_profiles_") as folder:
        for mode in modes:
            tell(f"{mode}: capturing, measuring and planning")
            try:
                if mode == CHAIN:
                    planned[mode] = scale_times(chain_of(built, settings, folder), scale_time)
                    continue
                reference, plan = _prepare_plan(built, settings, settings.config_of(mode, folder))
            except PlanError as error:
                planned[mode] = str(error)
                continue
            planned[mode] = plan = scale_times(plan, scale_time)
            if mode == STOCK:
                stock = stock_chain(plan, reference)
    if all(isinstance(found, str) for found in planned.values()):
        raise ConfigError(f"no mode can run this; {modes[0]}: {planned[modes[0]]}")
    plans = {mode: plan for mode, plan in planned.items() if isinstance(plan, PipelinePlan)}
    times = _run(plans, stock, settings, tell)
    return [_row(mode, planned[mode], times.get(mode, []), settings) for mode in modes]


def _prepare_plan(
    built: BuiltModel, settings: CompareSettings, config: dict[str, Any]
) -> tuple[Reference, PipelinePlan]:
    block = read_config(config)
    assert block is not None, "config_of enables the block"
    setting = setting_of(config, rank=0, num_ranks=settings.num_ranks, device=torch.device("cpu"), group=None)
    return ModelSource(built.model, config=block, setting=setting).prepare_plan(built.batch_at(0))


def chain_of(built: BuiltModel, settings: CompareSettings, folder: str) -> PipelinePlan:
    """Return the best chain on this machine's measured costs.

    Raises:
        PlanError: there is none.
    """
    block = read_config(settings.config_of(GRAPH, folder))
    assert block is not None, "config_of enables the block"

    def make(request: PlanRequest) -> PipelinePlan:
        plan = make_plan(block.planner, request)
        made = schedule_plan(plan, request, schedule=block.schedule, slicing=block.slicing)
        return finished_plan(made, request)

    return best_chain(one_stage_a_rank(captured_request(built, settings, folder)), make)


def captured_request(built: BuiltModel, settings: CompareSettings, folder: str) -> PlanRequest:
    """Return the request to the graph's planner: the captured model with its measured costs, and all limits.

    Raises:
        PlanError: the configuration contradicts itself.
    """
    requests: list[PlanRequest] = []

    def capture(request: PlanRequest) -> PipelinePlan:
        requests.append(request)
        raise PlanError(_CAPTURING)  # no plan is wanted here

    config = settings.config_of(GRAPH, folder)
    with PLANNERS.lent(_CAPTURING, capture):
        config["graph_pipeline"] = {**config["graph_pipeline"], "planner": _CAPTURING}
        config["graph_pipeline"].pop("plan", None)
        try:
            _prepare_plan(built, settings, config)
        except PlanError:
            if not requests:
                raise
    return requests[0]


def _run(
    planned: dict[str, PipelinePlan], stock: Chain | None, settings: CompareSettings, tell: Tell
) -> dict[str, list[float]]:
    """Return the times of every step in ms; the modes take turns where they need the same number of ranks."""
    # By number of ranks: {4: {"plans": {"graph": ...}, "chain": ..., "runtimes": ...}} where both need 4, so
    # that they alternate; {4: {"plans": ...}, 2: {"chain": ..., ...}} where stock is a chain of 2 replicated
    # twice, of which one replica is run: replicas only synchronise at the reduction, which is left out for all.
    by_ranks: dict[int, dict[str, Any]] = {}
    for mode in (PLAIN, CHAIN, GRAPH):
        if mode in planned:
            by_ranks.setdefault(planned[mode].num_ranks, {}).setdefault("plans", {})[mode] = planned[mode]
    if stock is not None:
        by_ranks.setdefault(stock.num_stages, {}).update(chain=stock, runtimes=(_PEER,))
    seconds = sum(plan.iteration_us for plan in planned.values()) / 1e6
    times: dict[str, list[float]] = {}
    for num_ranks, parts in by_ranks.items():
        benchmark = AlternatedBenchmark(name="step", **{"plans": {}, **parts})
        outcomes = run_alternated(
            [benchmark], num_ranks=num_ranks, rounds=settings.steps, seconds=seconds, tell=tell
        )
        found = outcomes["step"].times_ms
        times.update({STOCK if name == _PEER else name: each for name, each in found.items()})
    return times


def stock_chain(plan: PipelinePlan, reference: Reference) -> Chain | None:
    """Return one replica of the stock pipeline as a chain of delays; None where it is a single stage."""
    if len(plan.stages) < 2:
        return None
    graph = reference.block_graph
    specs = {spec.name: spec for spec in reference.analysis.op_graph.inputs} | graph.tensors
    cuts = [stage.after for stage in linearise(plan, graph) if stage.after is not None]
    return Chain(
        forward_us=tuple(stage.forward_us for stage in plan.stages),
        backward_us=tuple(stage.backward_us for stage in plan.stages),
        # Bytes of one micro-batch: what a chain sends at a cut is everything made before it and read after
        # it, also what only passes through a stage (CLIP's image embedding through the text tower).
        boundary_bytes=tuple(cut_bytes(cut, specs, plan.loss_unit) for cut in cuts),
        num_micro_batches=plan.num_micro_batches(0),
    )


def _row(
    mode: str, plan: PipelinePlan | str, times_ms: list[float], settings: CompareSettings
) -> dict[str, Any]:
    row: dict[str, Any] = {"mode": mode, "how": "emulated", "ranks": settings.num_ranks}
    if isinstance(plan, str):
        return {**row, "refused": plan}
    if not times_ms:
        return {**row, "refused": "the plan is a single stage: there is no pipeline to emulate"}
    iteration_ms = statistics.median(times_ms)
    # Rank-microseconds of compute in a mini-batch: 8 micro-batches of 3 + 6 us on a stage of 2 ranks are 144.
    # The bubble is the share of all ranks' measured time that is not one of them.
    counts = [plan.num_micro_batches(i) for i in range(len(plan.stages))]
    pairs = zip(counts, plan.stages, strict=True)
    busy_us = [count * (s.forward_us + s.backward_us) * len(s.ranks) for count, s in pairs]
    return {
        **row,
        "stages": len(plan.stages),
        "depth": len(plan.stages) if mode in (STOCK, CHAIN) else plan.depth,
        "micro_batches": counts,
        "iteration_ms": iteration_ms,
        "predicted_ms": plan.iteration_us / 1e3,
        "bubble": 1.0 - sum(busy_us) / 1e3 / (plan.num_ranks * iteration_ms),
        "stage_ms": [(s.forward_us / 1e3, s.backward_us / 1e3) for s in plan.stages],
        "stage_names": [s.name for s in plan.stages],
        "notes": list(plan.notes),
    }
