"""Runs the stages once, one after the other, each on its own ranks: what they make of which inputs.

A stage gets rows of the sample batch and, for what other stages make, their integers as they are and random
floating-point values of the shapes they announced. No activation travels; shapes are agreed on a CPU group. What
a run leaves behind in the module (statistics, random states) is undone.

Source: this project
Tests: tests/stage_graph/test_equality.py, tests/stage_graph/test_engine.py
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gpp_plugin.capture.tracing.outside import hidden_process_group
from gpp_plugin.capture.tracing.torch_export import Call
from gpp_plugin.errors import CaptureError, ConfigError
from gpp_plugin.ir.analysis import Analysis
from gpp_plugin.ir.tensors import UNIT, TensorSpec
from gpp_plugin.model.graph.captured_part import CapturedPart
from gpp_plugin.model.graph.module_trial import (
    Place,
    Seen,
    Shapes,
    Values,
    at_new_shape,
    call_stage,
    input_specs,
    layout_of,
    spec_of,
    stage_arguments,
    undisturbed,
)
from gpp_plugin.model.graph.resolve import GraphStage, ResolvedGraph
from gpp_plugin.model.graph.user_module import UserModule
from gpp_plugin.runtime.batches import Batch
from gpp_plugin.runtime.random_streams import restored_streams
from gpp_plugin.runtime.ranks.collectives import broadcast_result

logger = logging.getLogger(__name__)

ROW_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""How far rows may be off that are computed with other rows beside them; rounding differs with the shape."""
COARSE_TOLERANCE = 5e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    """What a stage's first rank reports of its runs.

    Args:
        seen: for each number of samples, its outputs.
        mixes: whether a sample's rows depend on other samples.
        traced: of a captured part instead, what tracing it found out, and its outputs.
    """

    seen: tuple[dict[str, Seen], ...] = ()
    values: Values = field(default_factory=dict)
    mixes: bool = False
    traced: tuple[Analysis, dict[str, TensorSpec]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What a first look at all stages found.

    Args:
        coupled: stages that compute on whole loss units.
        values: those outputs that are not floating-point, for inputs of further runs.
        analyses: captured part -> what tracing it found out.
    """

    shapes: Shapes
    coupled: frozenset[str]
    values: Values
    analyses: Mapping[str, Analysis]


class Prober:
    """Runs stages of a graph to learn about them; every method is collective over all ranks.

    Args:
        own: this rank's stages, by name.
    """

    def __init__(
        self, graph: ResolvedGraph, own: Mapping[str, UserModule | CapturedPart], place: Place
    ) -> None:
        self._graph = graph
        self._own = own
        self._place = place

    def _module_of(self, stage: GraphStage) -> nn.Module:
        own = self._own[stage.name]
        assert isinstance(own, UserModule), "a captured part is not run"
        return own.user_module

    def survey(self, batch: Batch, num_samples: int) -> Survey:
        """Find out shapes, layouts and who mixes samples, in training mode, at two numbers of samples.

        Raises:
            ConfigError: a module fails, or its outputs are not what the graph says.
        """
        # Two numbers of samples show how every output depends on them: (2, 5, 8) at 2 samples and (4, 5, 8) at 4 has
        # its samples along axis 0; (10, 8) and (20, 8) has five rows a sample; (5, 8) twice is the same for all.
        counts = num_samples, 2 * num_samples
        inputs = input_specs(batch, num_samples)
        tensors: dict[str, TensorSpec] = {}
        coupled: set[str] = set()
        values: Values = {}
        analyses: dict[str, Analysis] = {}
        for stage in self._graph.stages:
            report = self._broadcast(
                stage,
                lambda s=stage: self._try(s, batch, counts, tensors, values),  # type: ignore[misc]
            )
            if report.traced is not None:
                analyses[stage.name], specs = report.traced
                tensors.update(specs)
                continue
            values.update(report.values)
            # a loss is one number for its unit, so that its stage takes whole units whatever was seen of it
            is_coupled = report.mixes if stage.spec.coupled is None and not stage.losses else stage.is_coupled
            if is_coupled:
                coupled.add(stage.name)
            small, large = report.seen
            _check_gradient(stage, small)
            for node, seen in small.items():
                if node in stage.losses:
                    layout = UNIT
                    _check_loss(stage, node, seen)
                else:
                    layout = layout_of(stage, node, seen, large[node], counts, is_coupled=is_coupled)
                tensors[node] = spec_of(stage, node, seen, layout, num_samples)
        shapes = Shapes(num_samples=num_samples, tensors=tensors, inputs=inputs)
        return Survey(shapes=shapes, coupled=frozenset(coupled), values=values, analyses=analyses)

    def shapes_at(
        self,
        batch: Batch,
        num_samples: int,
        known: Mapping[str, TensorSpec],
        *,
        is_training: bool,
        analyses: Mapping[str, Analysis],
    ) -> tuple[Shapes, dict[str, Analysis]]:
        """Return the tensors that come of batches like this one, layouts being known.

        Args:
            analyses: of captured parts in this mode; those that are missing are traced for the first time.

        Returns:
            The shapes, and the analyses of all captured parts.

        Raises:
            ConfigError: a module fails at these shapes, or an output changes its form.
        """
        # grows stage by stage: a stage is called with what the ones before it were seen to make
        tensors: dict[str, TensorSpec] = {}
        values: Values = {}
        found: dict[str, Analysis] = {}

        def run(stage: GraphStage) -> _Report:
            if stage.is_captured:
                return self._trace(stage, batch, num_samples, tensors, is_training, analyses.get(stage.name))
            return self._run_at(stage, batch, (num_samples,), tensors, values, is_training)

        for stage in self._graph.stages:
            report = self._broadcast(stage, lambda s=stage: run(s))  # type: ignore[misc]
            if report.traced is not None:
                found[stage.name], specs = report.traced
                tensors.update(specs)
                continue
            values.update(report.values)
            for node, seen in report.seen[0].items():
                tensors[node] = at_new_shape(stage, known[node], seen, num_samples)
        shapes = Shapes(num_samples=num_samples, tensors=tensors, inputs=input_specs(batch, num_samples))
        return shapes, found

    def _broadcast(self, stage: GraphStage, run: Callable[[], _Report]) -> _Report:
        """Run a stage on its ranks and return what its first rank reports, on every rank."""
        # a module's ranks run it together, as it may have collectives inside; a captured one is only traced, by one
        # rank, and every rank builds the same names from what that rank broadcasts
        first = stage.spec.ranks[0]
        is_mine = self._place.rank == first if stage.is_captured else self._place.rank in stage.spec.ranks

        report = broadcast_result(
            lambda: run() if is_mine else None,
            source=first,
            what="capture" if stage.is_alone else f"trial of stage {stage.name!r}",
            group=self._place.group,
            stages=self._place.stages,
        )
        assert report is not None, "the first rank runs the stage"
        return report

    def _try(
        self,
        stage: GraphStage,
        batch: Batch,
        counts: tuple[int, int],
        tensors: Mapping[str, TensorSpec],
        values: Values,
    ) -> _Report:
        if stage.is_captured:
            return self._trace(stage, batch, counts[0], tensors, True, None)
        report = self._run_at(stage, batch, counts, tensors, values, True)
        if stage.spec.coupled is not None or stage.losses:
            return report
        # a module that normalises over samples in training does so in no run in evaluation mode
        norms = any(isinstance(part, _BatchNorm) for part in self._module_of(stage).modules())
        mixes = norms or self._mixes_rows(stage, batch, counts, tensors, values)
        return dataclasses.replace(report, mixes=mixes)

    def _trace(
        self,
        stage: GraphStage,
        batch: Batch,
        num_samples: int,
        tensors: Mapping[str, TensorSpec],
        is_training: bool,
        analysis: Analysis | None,
    ) -> _Report:
        """Trace a captured part, anew or at another shape."""
        part = self._own[stage.name]
        assert isinstance(part, CapturedPart)
        arguments = part.arguments(batch, tensors, num_samples)
        if analysis is not None and not stage.is_alone:
            return _Report(traced=(analysis, part.outputs_at(analysis, arguments)))
        if analysis is None:
            captured = part.capture(arguments, is_training=is_training)
            if captured.analysis.means and is_training:
                logger.info("captured by other means than an export: %s", ", ".join(captured.analysis.means))
            for line in captured.op_graph.couplings if is_training else ():
                logger.info("samples are mixed by %s", line)
        else:
            captured = part.capture_again(analysis, arguments)
        if not stage.is_alone and captured.recording is not None:
            raise CaptureError(
                f"stage {stage.name!r}: its Python reads values of the batch, which a captured part of a stage graph "
                "may not; give the whole model as one module, or the stage as a factory: it is run as it is then"
            )
        # nobody reads what the whole model makes
        outputs = {} if stage.is_alone else dict(part.view(captured).outputs)
        return _Report(traced=(captured.analysis, outputs))

    def _run_at(
        self,
        stage: GraphStage,
        batch: Batch,
        counts: Sequence[int],
        tensors: Mapping[str, TensorSpec],
        values: Values,
        is_training: bool,
    ) -> _Report:
        """Run the stage at some numbers of samples; at the first one with a graph, to see what takes a gradient."""
        seen: list[dict[str, Seen]] = []
        produced: Values = {}
        with undisturbed(self._module_of(stage), is_training=is_training, device=self._place.device):
            for count in counts:
                arguments = stage_arguments(
                    stage, batch, count, self._place, tensors=tensors, values=values, largest=counts[-1]
                )
                with nullcontext() if is_training and count == counts[0] else torch.no_grad():
                    outputs = call_stage(stage, self._module_of(stage), arguments)
                seen.append({node: _seen(stage, node, tensor) for node, tensor in outputs.items()})
                shards = {f"{stage.name}.{name}" for name, _ in stage.spec.sharded_outputs}
                produced.update(
                    ((node, count), tensor.cpu())
                    for node, tensor in outputs.items()
                    if not tensor.is_floating_point() and not tensor.is_complex() and node not in shards
                )
        return _Report(seen=tuple(seen), values=produced)

    @torch.no_grad()
    def _mixes_rows(
        self,
        stage: GraphStage,
        batch: Batch,
        counts: tuple[int, int],
        tensors: Mapping[str, TensorSpec],
        values: Values,
    ) -> bool:
        """Return whether the first samples' rows differ when other samples are beside them, without dropout."""
        # In evaluation mode, where dropout cannot make rows differ: rows 0..n-1 of a run on n samples against the same
        # rows of one on 2n, which has others beside them. Attention over the batch, a norm over it, a mean: all differ.
        found = []
        with undisturbed(self._module_of(stage), is_training=False, device=self._place.device):
            for count in counts:
                arguments = stage_arguments(
                    stage, batch, count, self._place, tensors=tensors, values=values, largest=counts[-1]
                )
                found.append(call_stage(stage, self._module_of(stage), arguments))
        alone, together = found
        return any(not _begins_with(together[node], tensor) for node, tensor in alone.items())


def _seen(stage: GraphStage, node: str, tensor: Tensor) -> Seen:
    """Return what is seen of an output: of shards, the whole that they are parts of."""
    axis = dict(stage.spec.sharded_outputs).get(node.rpartition(".")[2])
    shape = list(tensor.shape)
    if axis is not None:
        if axis >= len(shape):
            raise ConfigError(
                f"stage {stage.name!r}: output {node!r} {shape} has no axis {axis} to be cut along; change "
                "sharded_outputs"
            )
        shape[axis] *= stage.spec.tensor
    return Seen(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(shape),
        requires_grad=tensor.requires_grad,
    )


def _check_loss(stage: GraphStage, node: str, seen: Seen) -> None:
    if seen.shape not in ((), (1,)) or not seen.dtype.startswith(("float", "bfloat")):
        raise ConfigError(
            f"stage {stage.name!r}: loss {node!r} is {list(seen.shape)} {seen.dtype}; return one floating-point "
            "number, the mean over the samples"
        )


def _check_gradient(stage: GraphStage, seen: Mapping[str, Seen]) -> None:
    """Refuse losses that no backward starts from."""
    if stage.losses and not any(seen[node].requires_grad for node in stage.losses):
        raise ConfigError(
            f"stage {stage.name!r}: its loss {' + '.join(stage.losses)} needs no gradient, so that nothing before it "
            "would train; remove detach(), item() or torch.no_grad() between its inputs and the loss"
        )


def _begins_with(long: Tensor, short: Tensor) -> bool:
    """Return whether ``short`` is the beginning of ``long`` along every axis, but for rounding."""
    if long.dim() != short.dim() or any(a < b for a, b in zip(long.shape, short.shape, strict=True)):
        return False
    for axis, size in enumerate(short.shape):
        long = long.narrow(axis, 0, size)
    if not long.is_floating_point() and not long.is_complex():
        return torch.equal(long, short)
    wide = long.double() if long.is_floating_point() else long
    difference = float((wide - short.to(wide.dtype)).abs().max()) if long.numel() else 0.0
    scale = float(wide.abs().max()) if long.numel() else 1.0
    return difference <= ROW_TOLERANCE.get(short.dtype, COARSE_TOLERANCE) * max(scale, 1e-30)


# Does a model separate samples that lie in one row? Found out by running the last of them alone.
#
# Samples are distinguished by ``position_ids`` that restart (`gpp_plugin.data.flatten`). A model that ignores them
# simply attends from each sample to those before it, without a word: the loss falls, and is that of another model.
#
#     row      a b c d e     positions 0 1 2 0 1
#     alone          d e     positions       0 1        the same outputs for d and e, if the model takes such rows

POSITIONS, MASK, LABELS, LOGITS, LOSS = "position_ids", "attention_mask", "labels", "logits", "loss"


LARGEST_ERROR = 1e-4
"""Of outputs by their norm: above rounding of other lengths, and far below what attending to others changes."""


_MASKED = 1e18
"""Logits of at least this size are masked ones, -inf or the least number of a type: their squares have no sum."""


def last_sample(arguments: Mapping[str, Any]) -> int | None:
    """Return where the last sample of the first row begins; None where rows are not known to hold several samples."""
    positions = arguments.get(POSITIONS)
    if not isinstance(positions, Tensor) or positions.ndim != 2 or positions.is_floating_point():
        return None
    if arguments.get(MASK) is not None:  # positions beside a mask are those of padded rows
        return None
    begins = (positions[0].diff() < 0).nonzero().flatten()
    return int(begins[-1]) + 1 if len(begins) else None


def mixes_packed_rows(module: nn.Module, arguments: Mapping[str, Any], *, call: Call) -> float | None:
    """Return by how much a sample's outputs differ between a row of several samples and a row of its own.

    None where rows hold one sample each, or nothing can be compared.

    Args:
        module: that may be run without harm (`copy_model`).
        call: how it is called.
    """
    begin = last_sample(arguments)
    if begin is None:
        return None
    length = arguments[POSITIONS].shape[1]
    row = {key: _first_row(value, begin=0, length=length) for key, value in arguments.items()}
    if isinstance(row.get(LABELS), Tensor):  # of the last sample alone, so that losses are of the same tokens
        row[LABELS][:, : begin + 1] = -100
    alone = {key: _first_row(value, begin=begin, length=length) for key, value in row.items()}
    was_training = module.training
    module.eval()  # no dropout
    try:
        with torch.no_grad(), hidden_process_group(), restored_streams(arguments[POSITIONS].device):
            packed, single = (_compared(call(module, inputs)) for inputs in (row, alone))
    finally:
        module.train(was_training)
    if packed is None or single is None:
        return None
    if packed.ndim > 1 and packed.shape[1] == length:
        packed = packed[:, begin:]
    if packed.shape != single.shape:
        return None
    is_number = single.abs() < _MASKED
    if not torch.equal(packed.abs() < _MASKED, is_number):
        return math.inf
    packed, single = packed[is_number], single[is_number]
    return float((packed - single).norm() / single.norm().clamp_min(1e-30))


def _first_row(value: Any, *, begin: int, length: int) -> Any:
    """Return the tokens from ``begin`` on of the first row, of what has a value a token; all else as it is."""
    if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[1] != length:
        return value
    return value[:1, begin:].detach().clone()


def _compared(returned: Any) -> Tensor | None:
    """Return the logits of what a model returned, or its loss."""
    for name in (LOGITS, LOSS):
        value = returned.get(name) if isinstance(returned, Mapping) else getattr(returned, name, None)
        if isinstance(value, Tensor):
            return value.float()
    return None
