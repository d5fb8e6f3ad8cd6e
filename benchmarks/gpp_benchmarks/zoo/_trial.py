"""One model of the zoo tried: captured, cut into stages, and held against one process; as a row of the table."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gpp_benchmarks.zoo._catalogue import (
    BROKEN,
    EXACT,
    ONE_LENGTH,
    RAW,
    REFUSED,
    WRONG,
    Batch,
    ZooModel,
    build_model,
)
from gpp_benchmarks.zoo._staged import (
    OnePart,
    Trained,
    train_in_double,
    train_one_step_of_rounding_away,
    train_plain,
    train_staged,
    worst_of,
)
from gpp_plugin.api import plan_for
from gpp_plugin.capture.tracing.sample_batches import as_unit, is_counted
from gpp_plugin.errors import GppError, PlanInfeasible
from gpp_plugin.ir.analysis import Analysis
from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.model.graph.stage_graph import prepare_batch
from gpp_plugin.plan.cluster_files import read_cluster
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.profile.analytic_costs import analytic_profile, default_sample_counts
from gpp_plugin.relative_errors import gradient_errors
from gpp_plugin.runtime.stage_module import Reference, make_reference

LOSS_LIMIT = 1e-6
GRADIENT_LIMIT = 2e-6
FP32_STEP = 2.0**-23
SAMPLES = 4
"""Of a loss unit: stages whose operators do not mix samples run it in two micro-batches as well."""
NUM_STAGES = (2, 4)
CLUSTER = "dgx_h100"


def means_of(analysis: Analysis) -> dict[str, Any]:
    """Return by what means an analysis came about.

    ``how`` is "whole", or what tracing took beyond an export (`Analysis.means`); ``eager_leaves`` are modules that run
    as they are, and ``eager_share`` is their share of the operations of a forward.
    """
    nodes = analysis.op_graph.nodes
    flops = sum(node.flops for node in nodes)
    leaves = sum(node.flops for node in nodes if node.target.startswith("eager "))
    return {
        "how": ", ".join(analysis.means) or "whole",
        "eager_leaves": analysis.eager,
        "eager_share": leaves / flops if flops else 0.0,
    }


def empty_row(entry: ZooModel) -> dict[str, Any]:
    """Return a row that says which model it is of, and not yet what became of it."""
    return {
        "name": entry.name, "kind": entry.kind, "model": entry.model, "lengths": list(entry.lengths),
        "length_means": entry.means, "verdict": BROKEN, "line": "", "note": entry.note,
    }  # fmt: skip


def try_model(entry: ZooModel, tell: Callable[[str], None] = lambda phase: None) -> dict[str, Any]:
    """Return a model's row; what fails is in it, and nothing is raised.

    Args:
        tell: told what is going on, so that a process that ends says where it was.
    """
    row = empty_row(entry)
    tell("build")
    try:
        model = build_model(entry)
        row["parameters"] = sum(p.numel() for p in model.parameters())
        first, second = (entry.batch(SAMPLES, length) for length in entry.lengths)
        wanted = [_reproducible(model, batch, draws=entry.draws) for batch in (first, second)]
    except Exception as error:
        return row | {"line": one_line(error)}
    try:
        answers = (
            _Answers(first, _as_given(model, first), wanted[0]),
            _Answers(second, _as_given(model, second), wanted[1]),
        )
        verdict, line = _judge(entry, model, answers, row, tell)
    except Exception as error:
        verdict, line = REFUSED if is_refusal(error) else RAW, one_line(error)
    return row | {"verdict": verdict, "line": line}


def _as_given(model: nn.Module, batch: Batch) -> Batch:
    """Return a batch as the engine captures it: as one whole loss unit where no axis 0 counts its samples."""
    prepared = prepare_batch(model, batch)
    return prepared if is_counted(prepared) else as_unit(prepared, SAMPLES)


@dataclass(frozen=True, slots=True)
class _Answers:
    """A batch, and what one process makes of it.

    Args:
        given: the batch as the engine gives it to a captured model (`prepare_batch`).
    """

    batch: Batch
    given: Batch
    wanted: Trained


def _judge(
    entry: ZooModel,
    model: nn.Module,
    answers: tuple[_Answers, _Answers],
    row: dict[str, Any],
    tell: Callable[[str], None],
) -> tuple[str, str]:
    """Return a model's verdict and why; the row gets what was found on the way.

    Args:
        answers: at the length that is captured, and at another one.
    """
    tell("capture")
    start, cpu = time.perf_counter(), time.process_time()
    part = OnePart(model, answers[0].given)
    captured = part.capture(part.arguments(answers[0].given, {}, SAMPLES), is_training=True)
    row |= {"capture_s": time.perf_counter() - start, "capture_cpu_s": time.process_time() - cpu}
    row["means"] = means_of(captured.analysis)
    reference = make_reference(captured.analysis, part.granularity)
    row["operators"] = len(captured.op_graph.nodes)
    row["blocks"] = len(reference.block_graph.blocks)
    row["coupled_blocks"] = sum(block.is_coupled for block in reference.block_graph.blocks)
    tell("stages")
    plans = _plans(reference)
    if entry.draws:  # half a unit draws other numbers than its half of a whole one's
        plans = [(plan, cut) for plan, cut in plans if cut == 1]
    run = _Runs(model, part, reference, entry.draws)
    row["stages"] = [run.row(plan, cut, answers[0]) for plan, cut in plans]
    worst = _worst(row["stages"])
    if worst is not None:
        return WRONG, worst
    tell("another length")
    try:
        row["other_length"] = [run.row(plan, cut, answers[1]) for plan, cut in plans if cut == 1]
    except GppError as error:
        if not is_refusal(error):
            raise
        return ONE_LENGTH, one_line(error)
    worst = _worst(row["other_length"])
    return (EXACT, "") if worst is None else (WRONG, f"at length {entry.lengths[1]}: {worst}")


def _reproducible(model: nn.Module, batch: Batch, *, draws: bool) -> Trained:
    """Return loss and gradients of the plain model, which are the same twice.

    Args:
        draws: they depend on the seed; of other models they may not.
    """
    first, second = train_plain(model, batch), train_plain(model, batch, seed=0 if draws else 1)
    if not bool(torch.isfinite(first.loss)):
        raise ValueError(f"the loss is {float(first.loss)}")
    errors = gradient_errors(second.gradients, first.gradients)
    if not torch.equal(first.loss, second.loss) or worst_of(errors)[0] > GRADIENT_LIMIT:
        raise ValueError(
            f"the loss is {float(first.loss)} and then {float(second.loss)}: set what is random to 0"
        )
    if not first.gradients:
        raise ValueError("no parameter has a gradient")
    return first


def _plans(reference: Reference) -> list[tuple[PipelinePlan, int]]:
    """Return plans of one loss unit, and into how many micro-batches stages that may cut it do.

    A model too small for so many stages has as many as it has blocks.
    """
    graph = reference.block_graph
    plans = {}
    for num_stages in sorted({min(count, len(graph.blocks)) for count in NUM_STAGES}):
        for count in range(num_stages, 0, -1):
            try:
                plan = plan_for(
                    _request(graph, reference, count), planner="graphpipe", schedule="1f1b", slicing="off"
                )
            except PlanInfeasible:
                continue  # blocks that no planner of the graph can part
            plans[count] = plan
            break
    largest = plans[max(plans)]
    cut = _cut(largest, graph)
    return [*((plan, 1) for plan in plans.values()), *([(cut, 2)] if cut != largest else [])]


def _request(graph: BlockGraph, reference: Reference, num_stages: int) -> PlanRequest:
    cluster = read_cluster(CLUSTER, num_devices=num_stages)
    profile = analytic_profile(
        graph,
        cluster.devices[0],
        sample_counts=default_sample_counts(SAMPLES),
        op_graph=reference.analysis.op_graph,
    )
    return PlanRequest(
        graph=graph, profile=profile, cluster=cluster, num_ranks=num_stages, mini_batch=SAMPLES, loss_unit=SAMPLES,
        num_stages=num_stages, keep_units=True, data_parallel=1,
    )  # fmt: skip


def _cut(plan: PipelinePlan, graph: BlockGraph) -> PipelinePlan:
    """Return the plan with two micro-batches a unit on every stage none of whose blocks mixes samples."""
    coupled = {block.name for block in graph.blocks if block.is_coupled}
    sizes = [s.micro_batch_size if coupled & set(s.blocks) else SAMPLES // 2 for s in plan.stages]
    return plan.with_each(micro_batch_size=sizes)


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs plans of one model against one process.

    Args:
        draws: the loss is of numbers drawn at random, which are others in double precision.
    """

    model: nn.Module
    part: OnePart
    reference: Reference
    draws: bool

    def row(self, plan: PipelinePlan, cut: int, answers: _Answers) -> dict[str, Any]:
        """Return a plan's depth, and how far its loss and gradients are from those of one process."""
        wanted = answers.wanted
        found = train_staged(self.model, self.part, self.reference, plan, answers.given)
        scale = max(abs(float(wanted.loss)), 1e-12)
        loss_error = abs(float(found.loss.double() - wanted.loss.double())) / scale
        errors = gradient_errors(found.gradients, wanted.gradients)
        error, whose = worst_of(errors)
        is_exact = error <= GRADIENT_LIMIT and loss_error <= LOSS_LIMIT
        is_rounding = not is_exact and not self.draws and self._is_rounding(found, answers, errors)
        return {
            "stages": len(plan.stages), "depth": plan.depth, "micro_batches": cut, "loss_error": loss_error,
            "gradient_error": error, "worst_gradient": whose, "is_rounding": is_rounding,
            "is_exact": is_exact or is_rounding,
        }  # fmt: skip

    def _is_rounding(self, found: Trained, answers: _Answers, errors: Mapping[str, float]) -> bool:
        """Return whether one process in single precision is as far from double precision as the stages are.

        What single precision does not reproduce itself (a key projection's bias, whose gradient is zero) is noise. Of
        every tensor that is off, the stages' distance from double precision must be of the size of that noise; or it
        is nothing on both sides, beside the largest gradient. A model that cannot compute in double precision (D-FINE
        makes single ones inside) is held against itself on inputs a step of rounding away: that far it does not
        determine its own answers, and takes the place of the noise.
        """
        wanted = answers.wanted
        exact = train_in_double(self.model, answers.batch)
        if exact is None:
            near = train_one_step_of_rounding_away(self.model, answers.batch)
            spread = gradient_errors(near.gradients, wanted.gradients)
            allowed = max(abs(float(near.loss - wanted.loss)), LOSS_LIMIT * abs(float(wanted.loss)))
            return abs(float(found.loss - wanted.loss)) <= allowed and all(
                error <= max(GRADIENT_LIMIT, 3 * spread.get(name, 0.0)) for name, error in errors.items()
            )
        noise, own = (gradient_errors(each.gradients, exact.gradients) for each in (wanted, found))
        losses = [abs(float(each.loss.double() - exact.loss)) for each in (wanted, found)]
        nothing = FP32_STEP * max(float(gradient.norm()) for gradient in wanted.gradients.values())
        inexact = [name for name, error in errors.items() if not error <= GRADIENT_LIMIT]
        return losses[1] <= max(3 * losses[0], LOSS_LIMIT * abs(float(exact.loss))) and all(
            (noise.get(name, 0.0) > GRADIENT_LIMIT / 4 and own[name] <= 3 * noise[name])
            or all(
                name in each.gradients and float(each.gradients[name].norm()) <= nothing
                for each in (wanted, found)
            )
            for name in inexact
        )


def _worst(rows: list[dict[str, Any]]) -> str | None:
    """Return the first run that differs from one process, as a line."""
    for row in rows:
        if not row["is_exact"]:
            cut = f" in {row['micro_batches']} micro-batches" if row["micro_batches"] > 1 else ""
            return (
                f"{row['stages']} stages{cut}: loss off by {row['loss_error']:.1e}, "
                f"gradients by {row['gradient_error']:.1e} ({row['worst_gradient']})"
            )
    return None


def is_refusal(error: Exception) -> bool:
    """Return whether an error is the plugin's own, in one line."""
    return isinstance(error, GppError) and "\n" not in str(error)


def one_line(error: BaseException) -> str:
    """Return an error as a line; of other kinds than the plugin's with its type."""
    text = " ".join(str(error).split())
    return text if isinstance(error, GppError) else f"{type(error).__name__}: {text}"[:600]
