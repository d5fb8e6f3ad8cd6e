"""Swap or recompute of a stage that is a user's own module: one block, of which is known what it keeps and when.

Its storages can wait in host memory, each by itself: Capuchin's choice by FreeTime (`capuchin`), on a chain whose
operators are the times between the last uses of storages; the backward is taken to use them in the opposite order,
each after the same share of its time. Or the module runs again as a whole before its backward (Chen et al., 2016), one
segment that keeps what the stage received and its buffers; that gains nothing with one micro-batch in flight, whose
backward follows its forward, or where what is saved instead is as large. The quicker of both that fits is taken.

Not both at a time: what is left to swap when the module runs again is what it received.

Source: Chen et al. 2016 (arXiv 1604.06174); Capuchin (ASPLOS 2020, doi 10.1145/3373376.3378505)
Tests: tests/plan/test_full_recompute.py, tests/stage_graph/test_captured.py, tests/plan/test_module_memory.py,
    tests/runtime/test_module_swap.py, tests/stage_graph/test_recompute.py
"""

from __future__ import annotations

import dataclasses

import numpy as np

from gpp_plugin.ir.memory_plan import MemoryPlan, RecomputedSegment
from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.ir.profile import ModuleMemory
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.costs.estimate import evaluate_us
from gpp_plugin.plan.costs.memory_formula import memory_breakdown
from gpp_plugin.plan.memory.capuchin import StageChoice, StageOptimizer
from gpp_plugin.plan.memory.graph_tensors import SavedTensors, UnsavedResults
from gpp_plugin.plan.memory.memory_chain import WholeStage
from gpp_plugin.plan.memory.operator_chain import PipelineShape
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.plan.validate_request import validate_for


class ModuleChain(WholeStage):
    """A user's module as a chain of the times between the last uses of what it keeps.

    Args:
        row: position of its block in the graph.
        local: samples that one rank computes at a time.
    """

    def __init__(
        self, costs: CostModel, module: ModuleMemory, row: int, local: float, *, degree: int
    ) -> None:
        self.costs, self.local, self.rows, self.degree = costs, local, (row,), degree
        numbers = [i for i, storage in enumerate(module.storages) if storage.is_movable]
        saved = [module.storages[i] for i in numbers]
        uses = sorted({storage.last_use for storage in saved} | {1.0})
        shares = np.diff([0.0, *uses])
        forward_us, backward_us = costs.stage_times((row,), local)
        self.names = [module.block] * len(shares)
        self.set_times(shares * forward_us, shares * backward_us)
        place = {use: i for i, use in enumerate(uses)}
        self.tensors = SavedTensors(
            names=tuple(module.storage_names[i] for i in numbers),
            made=np.zeros(len(saved), dtype=np.int64),
            charged=np.zeros(len(saved), dtype=np.int64),
            last=np.array([place[storage.last_use] for storage in saved], dtype=np.int64),
            bytes=np.array([s.bytes_per_sample * local + s.bytes_fixed for s in saved], dtype=float),
        )
        none = np.zeros(0, dtype=np.int64)
        self.unsaved = UnsavedResults(result=none, made=none, reader=none, bytes=np.zeros(0))
        self.crossing = np.zeros(self.num_blocks + 1)
        self.set_tensor_sums()


def choose_for_module(
    module: ModuleMemory, chain: ModuleChain, shape: PipelineShape, *, recompute: bool, swap: bool
) -> StageChoice:
    """Return the quickest choice that makes a stage fit, or the one nearest to that.

    Args:
        chain: of the module; ``shape``: of this one stage.
        recompute, swap: what may be done.
    """
    local = chain.local
    optimizer = StageOptimizer(chain, shape, recompute=recompute, swap=swap)
    choices = [optimizer.weigh(0, *chain.whole), optimizer.fitted(0, *chain.whole, ())]
    memory = whole_again(
        module, local=local, in_flight=shape.in_flight(0), forward_us=float(chain.forward[-1])
    )
    if recompute and memory is not None:
        less = memory.recomputed_bytes
        need = chain.memory_bytes(*chain.whole, 0, shape, is_optimized=True) + memory.working_bytes
        need -= shape.in_flight(0) * less + chain.reused_by_gradients(*chain.whole, less)
        choices.append(
            StageChoice(
                excess_bytes=max(need - shape.limits[0], 0.0),
                us=choices[0].us + memory.added_us,
                memory_bytes=need,
                memory=memory,
            )
        )
    return min(choices, key=lambda choice: choice.key)


def whole_again(
    module: ModuleMemory, *, local: float, in_flight: int, forward_us: float
) -> MemoryPlan | None:
    """Return the plan of a module that runs again as one segment; None where nothing is gained."""
    dropped = round(module.dropped_bytes_per_sample * local + module.dropped_bytes_fixed)
    held = round(module.held_bytes_per_sample * local + module.held_bytes_fixed)
    if in_flight == 1 or dropped <= held:
        return None
    segment = RecomputedSegment(
        blocks=(module.block,), tensors=(), bytes=dropped, held_bytes=held, recompute_us=forward_us
    )
    return MemoryPlan(recomputed=(segment,), working_bytes=dropped)


def recompute_modules(plan: PipelinePlan, request: PlanRequest) -> PipelinePlan:
    """Return the plan with all its modules run again, whatever memory there is.

    Those that gain nothing by it stay as they are.

    Raises:
        PlanInfeasible: a stage does not fit even so.
    """
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    stages = tuple(_run_again(stage, costs, request.profile.module(stage.blocks)) for stage in plan.stages)
    changed = dataclasses.replace(plan, stages=stages)
    parts = memory_breakdown(changed, request.profile, graph=request.graph, zero_stage=request.zero_stage)
    needs = [
        old.memory_bytes if new is old else part.total
        for old, new, part in zip(plan.stages, stages, parts, strict=True)
    ]
    changed = changed.with_each(memory_bytes=needs)
    changed = dataclasses.replace(changed, iteration_us=evaluate_us(changed, costs))
    validate_for(changed, request)
    return changed


def _run_again(stage: Stage, costs: CostModel, module: ModuleMemory | None) -> Stage:
    if module is None:
        return stage
    local = stage.local_batch_size
    memory = whole_again(module, local=local, in_flight=stage.in_flight, forward_us=stage.forward_us)
    if memory is None:
        return stage
    backward_us = costs.on(stage).stage_times(costs.indices(stage.blocks), local, stage.ranks)[1]
    return dataclasses.replace(stage, memory=memory, backward_us=backward_us + memory.added_us)
