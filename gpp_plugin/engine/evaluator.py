"""`eval_batch`: batches of any size on the training plan's stages, in the model's evaluation mode.

A batch's keys and constants decide which graph is captured; its size decides which plans run it
(`runtime.rank_programs`). Both are kept, the last few of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpp_plugin.capture.tracing.sample_batches import count_samples
from gpp_plugin.engine.metrics import share_of_loss
from gpp_plugin.engine.rank_engine import RankEngine
from gpp_plugin.errors import ConfigError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.tensors import LayoutKind
from gpp_plugin.model.model_source import ModelSource
from gpp_plugin.runtime.batches import Batch, UnitBatch, take_samples, units_of
from gpp_plugin.runtime.executor import MiniBatchResult
from gpp_plugin.runtime.rank_programs import (
    EvaluationPart,
    evaluation_plan,
    held_tensors,
    plan_of_units,
    split_evaluation,
)
from gpp_plugin.runtime.rank_runner import RankRunner
from gpp_plugin.runtime.ranks.collectives import Collectives
from gpp_plugin.runtime.ranks.placement_of_ranks import Setting
from gpp_plugin.runtime.stage_module import Reference, StageModule

MAX_GRAPHS = 4
MAX_RUNNERS = 8
"""Plans of different sizes that are kept: whole batches, and the parts of a smaller last one."""

_GraphKey = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Graph:
    """The model captured for evaluation with one set of keys, and the training plan's stages on it."""

    reference: Reference
    plan: PipelinePlan


class Evaluator:
    """Evaluates batches on the stages of a training plan; every method is collective over all ranks.

    Args:
        source: the model as the user gave it.
        plan, reference: of training.
        modules: the parameters of this rank's stages, by their index in the plan; ``stages`` trains them.
        make_runner: returns this rank's runner for a plan, or None where the plan leaves it idle; collective.
        run: runs a batch; ``stand_by`` is called where a plan leaves this rank idle.
        collectives: of all ranks; those that a plan leaves idle wait here for the others.
    """

    def __init__(
        self,
        *,
        source: ModelSource,
        setting: Setting,
        plan: PipelinePlan,
        reference: Reference,
        modules: Mapping[int, StageModule],
        stages: RankEngine,
        make_runner: Callable[[Reference, PipelinePlan], RankRunner | None],
        run: Callable[[RankRunner, Batch], MiniBatchResult],
        stand_by: Callable[[Batch], None],
        collectives: Collectives,
    ) -> None:
        self._source = source
        self._setting = setting
        self._collectives = collectives
        self._plan = plan
        self._reference = reference
        self._modules = dict(modules)
        self._stages = stages
        self._make_runner = make_runner
        self._run = run
        self._stand_by = stand_by
        self._graphs: OrderedDict[_GraphKey, _Graph] = OrderedDict()
        self._runners: OrderedDict[tuple[_GraphKey, int, int], RankRunner | None] = OrderedDict()

    @torch.no_grad()
    def evaluate(
        self, batch: Batch, *, outputs: tuple[str, ...], needs_loss: bool
    ) -> tuple[float, dict[str, Any]]:
        """Return the mean loss of the batch and the named outputs of all its samples, on every rank.

        Raises:
            ConfigError: ``needs_loss``, and the model returns none for such a batch.
            CommTimeout: a rank did not finish.
        """
        with _in_evaluation(self._modules.values()):
            return self._evaluate(batch, outputs=outputs, needs_loss=needs_loss)

    def _evaluate(
        self, batch: Batch, *, outputs: tuple[str, ...], needs_loss: bool
    ) -> tuple[float, dict[str, Any]]:
        are_units = isinstance(batch, UnitBatch)
        typical = max(units_of(batch), key=len)  # units may lack inputs that others have
        key = (outputs, *((name, _constant(typical[name])) for name in sorted(typical)))
        graph = self._graph(key, typical, outputs)
        if needs_loss and graph.reference.analysis.op_graph.loss is None:
            raise ConfigError(
                f"eval_batch: the model returns no loss for a batch of {sorted(batch)}; give labels, or pass "
                "compute_loss=False"
            )
        rule = self._source.unit_rule(graph.reference)
        if rule is not None:
            batch = rule.units(batch) if isinstance(batch, UnitBatch) else rule.evaluated(batch)
        self._source.learn_shapes(graph.reference, typical)
        parts = _parts(graph.plan, batch)
        total = 0.0
        collected: dict[str, list[tuple[int, Tensor]]] = {name: [] for name in outputs}
        # Training's micro-batches do not divide any batch: with ones of 8 and a loss unit of 4, 21 samples run as 16, 4
        # and 1. Each part has a plan, and so a runner, of its own; ranks that a part leaves idle go on to the next.
        for part, rows in parts:
            with self._weights_for(part.plan):
                runner = self._runner(key, graph.reference, part.plan, rows)
                if runner is None:
                    self._stand_by(rows)
                    continue
                result = self._run(runner, rows)
            total += share_of_loss(result.losses, _count(batch), is_sum=runner.sums_losses)
            for name, pieces in result.outputs.items():
                collected[name] += [(part.first_sample + first, piece) for first, piece in pieces]
        # Losses come weighted by their samples of all: the sum over parts and ranks is the batch's.
        whole = self._collectives.sum(torch.tensor([total], dtype=torch.float64), "the loss of an evaluation")
        given = batch if are_units else None
        return float(whole), self._gather(collected, graph.reference, given)

    def close(self) -> None:
        """Release all runners."""
        self._runners.clear()

    def _weights_for(self, plan: PipelinePlan) -> AbstractContextManager[None]:
        """Let a plan's programs gather weights that ranks hold in parts; where it leaves some idle, gather all."""
        is_whole = all(own.ranks == of.ranks for own, of in zip(plan.stages, self._plan.stages, strict=True))
        return self._stages.attached() if is_whole else self._stages.gathered()

    def _graph(self, key: _GraphKey, batch: Batch, outputs: tuple[str, ...]) -> _Graph:
        found = self._graphs.get(key)
        if found is not None:
            self._graphs.move_to_end(key)
            return found
        reference = self._source.analyse(batch, outputs)
        parameters = {p.name for p in reference.analysis.op_graph.parameters if not p.is_buffer}
        held = [parameters.intersection(names) for names in held_tensors(self._plan, self._reference)]
        # Evaluation may read what training skips: blocks that no stage has go where their parameters are held.
        plan = evaluation_plan(self._plan, reference.block_graph, parameters=parameters, held=held)
        if len(self._graphs) >= MAX_GRAPHS:
            oldest, _ = self._graphs.popitem(last=False)
            for runner_key in [other for other in self._runners if other[0] == oldest]:
                del self._runners[runner_key]
        self._graphs[key] = _Graph(reference=reference, plan=plan)
        return self._graphs[key]

    def _runner(
        self, key: _GraphKey, reference: Reference, plan: PipelinePlan, batch: Batch
    ) -> RankRunner | None:
        runner_key = (key, plan.mini_batch, plan.loss_unit)
        if runner_key in self._runners:
            self._runners.move_to_end(runner_key)
            return self._runners[runner_key]
        if len(self._runners) >= MAX_RUNNERS:
            self._runners.popitem(last=False)
        runner = self._make_runner(reference, plan)
        if runner is not None:
            # of a smaller part the first data positions run alone, and of this rank's stages perhaps not all
            modules = [self._modules[stage] for stage in runner.stages]
            for module, function in zip(modules, runner.prepare(batch), strict=True):
                self._source.complete_module(module, function.tensors)
            runner.bind(modules, None, weights=[self._stages.of(stage).weights for stage in runner.stages])
        self._runners[runner_key] = runner
        return runner

    def _gather(
        self, collected: Mapping[str, list[tuple[int, Tensor]]], reference: Reference, units: Batch | None
    ) -> dict[str, Any]:
        """Return the named outputs of all samples on every rank, in the order of samples.

        Those with a batch axis are joined along it; what is the same for every sample is returned once; what
        each loss unit has one of is joined along axis 0, or stacked where it has no axes. Of units with shapes of
        their own nothing is joined: they are a list, in the order in which the user gave them.
        """
        if not collected:
            return {}
        # Each rank brings pieces with the number of their first sample; sorted by it they are the batch again.
        own = {name: [(first, piece.cpu()) for first, piece in pieces] for name, pieces in collected.items()}
        slots = self._collectives.gather(own, "the outputs of an evaluation")
        layouts = {node.name: node.output.layout for node in reference.analysis.op_graph.nodes if node.output}
        joined: dict[str, Any] = {}
        for name in collected:
            layout = layouts[reference.analysis.op_graph.outputs[name]]
            pieces = sorted((pair for slot in slots for pair in slot[name]), key=lambda pair: pair[0])
            tensors = [piece for _, piece in pieces]
            if isinstance(units, UnitBatch):
                given = units.given or range(len(tensors))
                by_number = dict(zip(given, tensors, strict=True))
                joined[name] = [by_number[n].to(self._setting.device) for n in range(len(tensors))]
                continue
            if layout.kind is LayoutKind.UNIFORM:
                whole = tensors[0]
            elif layout.kind is LayoutKind.BATCH:
                whole = torch.cat(tensors, dim=layout.axis)
            else:
                whole = torch.cat(tensors) if tensors[0].ndim else torch.stack(tensors)
            joined[name] = whole.to(self._setting.device)
        return joined


@contextmanager
def _in_evaluation(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put stages in evaluation while the context lasts: users' modules run as they are; then each mode is as before."""
    stages = list(modules)
    before = [(part, part.training) for module in stages for part in module.modules()]
    try:
        for module in stages:
            module.eval()
        yield
    finally:
        for part, training in before:
            part.training = training


def _count(batch: Batch) -> int:
    """Return what a batch's loss is the mean over, losses being of so many: its samples, or its units."""
    return len(batch.units) if isinstance(batch, UnitBatch) else count_samples(batch)


def _parts(plan: PipelinePlan, batch: Batch) -> list[tuple[EvaluationPart, Batch]]:
    """Return the plans that together run a batch, each with what it runs of it; units are never taken apart."""
    if isinstance(batch, UnitBatch):  # a unit is the sample of its plan's arithmetic
        units = batch.units
        return [
            (part, UnitBatch(units=units[part.first_sample : part.first_sample + part.plan.mini_batch]))
            for part in split_evaluation(plan_of_units(plan), len(units))
        ]
    count = count_samples(batch)
    return [
        (part, take_samples(batch, part.first_sample, part.plan.mini_batch, count))
        for part in split_evaluation(plan, count)
    ]


def _constant(value: Any) -> str | None:
    """Return what the captured graph depends on beyond a batch's keys: its entries that are no tensors."""
    return None if isinstance(value, Tensor) else repr(value)
