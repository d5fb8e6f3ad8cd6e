"""Plans that know what stages without gradients take on backends: measured, cut again once, judged by simulation.

A plan is made with the times of torch's operators. Then rank 0 measures the stages of it that train nothing, and what
of its other stages no gradient passes, on the backends that are asked for; the planner is asked once more with these
times, and what it answers is measured in turn. Both plans are simulated with what their own stages took, and the second
one is taken if its step is shorter by more than noise. So it is never worse than the first by the simulator, and as
nothing is planned a third time, nothing goes to and fro.

    plan 1   tower 8 ms on 2 ranks | head            tower measured: 0.4 of what torch takes
    plan 2   tower on 1 rank | head on 3 ranks       made with 0.4 for the tower's blocks, measured: 0.42
    1 and 2 simulated with 0.4 and 0.42: the shorter step

Source: this project; selection by measurement after Collage (PACT 2022, arXiv 2111.00655)
Tests: tests/model/test_backend_planning.py, tests/integrations/test_backend_training.py
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gpp_plugin.backends.job_backends import code_of_stage
from gpp_plugin.backends.measured_backends import BackendLog
from gpp_plugin.backends.stage_backends import Asked, choose_backend
from gpp_plugin.errors import CaptureError, PlanError, first_line
from gpp_plugin.ir.backend_costs import StageBackend
from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.model.graph.captured_part import CapturedPart
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.costs.judge import judge_us
from gpp_plugin.plan.make import stage_edges
from gpp_plugin.report.plan_text import format_ranks
from gpp_plugin.report.units import format_ms
from gpp_plugin.runtime.batches import Batch
from gpp_plugin.runtime.random_streams import kept_streams
from gpp_plugin.runtime.stage_source import Reference
from gpp_plugin.schedule.orders.forward_only import forward_only_stages

logger = logging.getLogger(__name__)

LEAST_GAIN = 1.02
"""How many times as long as the plan cut again the plan before must take by the simulator: less is noise."""

Measure = Callable[[PipelinePlan, int], StageBackend | None]
"""Returns what a stage of a plan takes on its backends; None where it cannot be asked."""


class StageTrials:
    """Measures stages of plans that are not run yet, on the rank that has the capture.

    Args:
        part: the model; what is tried of it leaves no trace in it.
        batch: the sample batch.
    """

    def __init__(
        self, part: CapturedPart, reference: Reference, batch: Batch, *, asked: Asked, log: BackendLog
    ) -> None:
        self._part = part.apart()
        self._reference = reference
        self._batch = batch
        self._asked = asked
        self._log = log
        self._state: dict[str, Tensor] = dict(part.model.named_parameters(remove_duplicate=False))
        self._state.update(part.model.named_buffers(remove_duplicate=False))
        self._dtypes = {p.name: p.dtype for p in reference.analysis.op_graph.parameters}

    @torch.no_grad()
    def measure(self, plan: PipelinePlan, index: int) -> StageBackend | None:
        """Return what a stage takes on its backends, at its own number of samples; None: it cannot be captured so."""
        stage, device = plan.stages[index], self._part.device
        samples = stage.local_batch_size
        try:
            code = self._part.stage_code(
                self._reference, plan, index, self._batch, samples, keeps_capture=True
            )
        except CaptureError as error:
            logger.info("stage %s is not measured on backends: %s", stage.name, first_line(error))
            return None
        if code.function.module is None and code.function.choice is None:
            return None
        weights = [self._weight(name) for name in code.function.tensors]
        with kept_streams(device):
            return choose_backend(
                self._asked,
                stage.name,
                lambda: code_of_stage(stage.name, code, weights, self._batch, samples, device),
                self._log,
            )

    def _weight(self, name: str) -> Tensor:
        """Return a weight as the stage will have it; one that is loaded later, random: time does not depend on it."""
        tensor, dtype = self._state[name], getattr(torch, self._dtypes[name])
        device = self._part.device
        if not tensor.is_meta:
            return tensor.detach().to(device=device, dtype=dtype)
        if not dtype.is_floating_point:
            return torch.zeros(tensor.shape, device=device, dtype=dtype)
        generator = torch.Generator().manual_seed(0)
        return torch.randn(tensor.shape, generator=generator).mul_(0.02).to(device=device, dtype=dtype)


def plan_with_backends(
    plan: PipelinePlan,
    graph: BlockGraph,
    costs: CostModel,
    *,
    measure: Measure,
    plan_again: Callable[[Mapping[str, float]], PipelinePlan] | None,
) -> PipelinePlan:
    """Return the plan with what its stages take on backends, or another one, cut for that, whose step is shorter.

    Args:
        plan: made with the times of torch's operators.
        costs: those times.
        plan_again: returns the plan with other times of some blocks' forwards, block -> times what torch takes
            (`Profile.backends`); None: the stages are given.
    """
    frozen = blocks_without_gradients(graph)
    found = {index: measure(plan, index) for index in sorted(forward_only_stages(plan))}
    before = _timed(plan, costs, {index: one for index, one in found.items() if share_of(one) != 1.0})
    if plan_again is None:
        return before
    shares = {
        block: share
        for index, one in found.items()
        for block in plan.stages[index].blocks
        if (share := share_of(one)) != 1.0 and block in frozen
    }
    shares |= _shares_within(plan, graph, frozen, measure)
    if not shares:
        return before
    try:
        again = plan_again(shares)
    except PlanError as error:
        logger.info("stages are not cut again for their backends: %s", first_line(error))
        return before
    if _cut_of(again) == _cut_of(plan):
        return _noted(
            before, f"{_step_text(before, plan)}; cut again with these times, the stages are the same"
        )
    after = _timed(again, costs, {i: measure(again, i) for i in sorted(forward_only_stages(again))})
    if after.iteration_us * LEAST_GAIN > before.iteration_us:
        text = f"{_step_text(before, plan)}; cut again it would be {format_ms(after.iteration_us)} ms: the stages stay"
        return _noted(before, text)
    return _noted(
        after,
        f"{_step_text(after, plan)}, {format_ms(before.iteration_us)} ms in the stages it would have on torch; "
        f"cut again: {_cut_text(plan)} became {_cut_text(after)}",
    )


def blocks_without_gradients(graph: BlockGraph) -> frozenset[str]:
    """Return the blocks that send no tensor whose gradient flows back, and yield no loss."""
    trained = {
        edge.src for edge in graph.edges if any(graph.tensors[name].requires_grad for name in edge.tensors)
    }
    return frozenset(block.name for block in graph.blocks) - trained - set(graph.loss_blocks)


def share_of(chosen: StageBackend | None) -> float:
    """Return how many times what torch takes a stage takes on its backend; 1 on torch, or where it was not measured."""
    if chosen is None or chosen.is_torch or not chosen.us or not chosen.torch_us:
        return 1.0
    return chosen.us / chosen.torch_us


def _shares_within(
    plan: PipelinePlan, graph: BlockGraph, frozen: frozenset[str], measure: Measure
) -> dict[str, float]:
    """Return the shares of blocks that train nothing and lie in stages that do: what they would take by themselves."""
    # Stages {t0, t1} and {t2, head}: t2 is measured as if it were a stage, {t0, t1}, {t2}, {head}; the edges between
    # those say which of t2's tensors leave it. Such a plan is never run, so that it need not have an order.
    forward_only = forward_only_stages(plan)
    parts: list[tuple[int, tuple[str, ...]]] = []
    for index, stage in enumerate(plan.stages):
        own = tuple(block for block in stage.blocks if block in frozen)
        rest = tuple(block for block in stage.blocks if block not in frozen)
        is_mixed = bool(own and rest) and index not in forward_only
        parts += [(index, blocks) for blocks in ((own, rest) if is_mixed else (stage.blocks,))]
    if len(parts) == len(plan.stages):
        return {}
    apart = dataclasses.replace(
        plan,
        stages=tuple(
            dataclasses.replace(plan.stages[index], blocks=blocks, memory=None) for index, blocks in parts
        ),
        edges=stage_edges(graph, [blocks for _, blocks in parts]),
        memory=(),
    )
    sending = {edge.src for edge in apart.edges}
    shares: dict[str, float] = {}
    for position, (index, blocks) in enumerate(parts):
        if index in forward_only or not frozen.issuperset(blocks) or position not in sending:
            continue
        share = share_of(measure(apart, position))
        shares |= dict.fromkeys(blocks, share) if share != 1.0 else {}
    return shares


def _timed(plan: PipelinePlan, costs: CostModel, found: Mapping[int, StageBackend | None]) -> PipelinePlan:
    """Return the plan with what its forward-only stages were measured to take, and its step simulated with that."""
    stages = list(plan.stages)
    for index, one in found.items():
        stage, share = stages[index], share_of(one)
        rows, local = costs.indices(stage.blocks), stage.local_batch_size
        # all plans from torch's times: those that a planner was told for the blocks were of other stages
        changes: dict[str, Any] = {
            "forward_us": share * costs.on(stage).stage_times(rows, local, stage.ranks)[0]
        }
        if stage.half_forward_us:
            changes["half_forward_us"] = share * costs.on(stage).stage_times(rows, local / 2, stage.ranks)[0]
        stages[index] = dataclasses.replace(stage, **changes)
    timed = dataclasses.replace(plan, stages=tuple(stages))
    if timed == plan:
        return plan
    return dataclasses.replace(timed, iteration_us=judge_us(timed, costs))


def _cut_of(plan: PipelinePlan) -> list[tuple[tuple[str, ...], tuple[int, ...], int]]:
    return [(stage.blocks, stage.ranks, stage.micro_batch_size) for stage in plan.stages]


def _noted(plan: PipelinePlan, text: str) -> PipelinePlan:
    return dataclasses.replace(plan, notes=(*plan.notes, f"with backends {text}"))


def _step_text(plan: PipelinePlan, on_torch: PipelinePlan) -> str:
    return f"a step takes {format_ms(plan.iteration_us)} ms simulated, on torch {format_ms(on_torch.iteration_us)}"


def _cut_text(plan: PipelinePlan) -> str:
    parts: Sequence[str] = [f"{stage.name} ({format_ranks(stage)})" for stage in plan.stages]
    return ", ".join(parts)
