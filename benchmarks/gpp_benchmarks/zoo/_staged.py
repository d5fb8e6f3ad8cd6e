"""A plan's stages one behind the other in one process: their loss and gradients, and those of the plain model.

Each stage is the code that a rank would run (`CapturedPart.stage_code`), on the model's own parameters. What crosses a
stage's boundary is detached there, as a message detaches it, and gradients go back only where the plan has them flow.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from gpp_plugin.capture.captured_graph import CapturedGraph, LengthCapture
from gpp_plugin.errors import CaptureError
from gpp_plugin.ir.analysis import Analysis
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.tensors import LayoutKind, TensorSpec
from gpp_plugin.model.graph.captured_part import CapturedPart
from gpp_plugin.model.graph.part_lengths import Lengths
from gpp_plugin.model.graph.resolve import resolve_module
from gpp_plugin.runtime.batches import ones_among
from gpp_plugin.runtime.stage_module import Reference, StageCode

Batch = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What one step without an optimizer leaves: the loss, and the gradients of parameters by their first names."""

    loss: Tensor
    gradients: dict[str, Tensor]


class OnePart(CapturedPart):
    """A whole model that is traced once at every shape, whichever stages are made of it then.

    Ranks trace for themselves; here all stages are in one process, and share what tracing gave.
    """

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        whole = resolve_module(model, batch, num_ranks=1).whole
        assert whole is not None, "it is no graph of stages"
        super().__init__(whole, dtype=None, device=torch.device("cpu"), granularity="layer", called={})
        self._traced: dict[Any, CapturedGraph] = {}
        self._at_lengths: dict[Any, LengthCapture | CaptureError] = {}

    def capture_again(self, analysis: Analysis, arguments: Batch) -> CapturedGraph:
        """Return the module traced at a shape, as it was before if it was."""
        key = tuple((name, _tracing_key(value)) for name, value in sorted(arguments.items()))
        if key not in self._traced:
            self._traced[key] = super().capture_again(analysis, arguments)
        return self._traced[key]

    def capture_for_lengths(self, analysis: Analysis, arguments: Batch, lengths: Lengths) -> LengthCapture:
        """Return the module traced for many lengths, or fail, as it did for another stage."""
        key = (
            tuple((name, _tracing_key(value)) for name, value in sorted(arguments.items())),
            tuple(sorted(lengths.items())),
        )
        if key not in self._at_lengths:
            try:
                self._at_lengths[key] = super().capture_for_lengths(analysis, arguments, lengths)
            except CaptureError as error:
                self._at_lengths[key] = error
        found = self._at_lengths[key]
        if isinstance(found, CaptureError):
            raise found
        return found


def _tracing_key(value: Any) -> object:
    """Return what tracing may depend on: shapes, the values of whole numbers and masks, and constants."""
    if not isinstance(value, Tensor):
        return repr(value)
    is_read = not value.is_floating_point() and value.device.type != "meta"
    return str(value.dtype), tuple(value.shape), tuple(value.flatten().tolist()) if is_read else ()


def train_plain(model: nn.Module, batch: Batch, *, seed: int = 0) -> Trained:
    """Return loss and gradients of the model as it is."""
    with _untouched(model, seed=seed):
        loss: Tensor = model(**batch).loss
        loss.backward()
        return Trained(loss=loss.detach(), gradients=_gradients(model))


def train_staged(
    model: nn.Module, part: CapturedPart, reference: Reference, plan: PipelinePlan, batch: Batch
) -> Trained:
    """Return loss and gradients of a plan's stages, run one behind the other.

    Args:
        plan: of one loss unit; stages of smaller micro-batches run theirs one by one.

    Raises:
        CaptureError: the code of a stage cannot be made at the shapes of the batch.
    """
    codes = [
        part.stage_code(reference, plan, index, batch, stage.micro_batch_size)
        for index, stage in enumerate(plan.stages)
    ]
    with _untouched(model):
        return _run(model, codes, plan, batch)


def _run(model: nn.Module, codes: list[StageCode], plan: PipelinePlan, batch: Batch) -> Trained:
    named: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    named.update(model.named_buffers(remove_duplicate=False))
    specs: dict[str, TensorSpec] = {}
    for code in codes:
        specs.update(code.tensors)
    # forwards in the plan's order, which is topological; of every stage its boundary is kept for the way back:
    # leaves that it read, and what it made, on whole loss units
    made: dict[str, Tensor] = {}
    passes: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
    loss = None
    for index, (stage, code) in enumerate(zip(plan.stages, codes, strict=True)):
        choice = code.function.choice
        if choice is not None:
            choice.use(ones_among(batch, choice.inputs))
        flowing = {name for edge in plan.edges if edge.dst == index for name in edge.gradient_tensors}
        leaves = {
            name: made[name].detach().requires_grad_(name in flowing) for name in code.function.received
        }
        parts = [
            code.function.call(
                *(named[name] for name in code.function.tensors),
                *(
                    _rows(batch[key], code.inputs[key], first, stage.micro_batch_size)
                    for key in code.function.batch_inputs
                ),
                *(
                    _rows(leaves[name], specs[name], first, stage.micro_batch_size)
                    for name in code.function.received
                ),
            )
            for first in range(0, plan.mini_batch, stage.micro_batch_size)
        ]
        outputs = {
            name: _joined([part[i] for part in parts], specs.get(name))
            for i, name in enumerate(code.function.outputs)
        }
        if code.loss is not None:
            loss = outputs[code.loss]
        made.update(outputs)
        passes.append((leaves, outputs))
    assert loss is not None, "a plan of a whole model has its loss"
    gradients: dict[str, Tensor] = {}
    for code, (leaves, outputs) in zip(reversed(codes), reversed(passes), strict=True):
        seeds = [
            (tensor, torch.ones_like(tensor) if name == code.loss else gradients[name])
            for name, tensor in outputs.items()
            if tensor.requires_grad and (name == code.loss or name in gradients)
        ]
        if seeds:
            torch.autograd.backward([tensor for tensor, _ in seeds], [seed for _, seed in seeds])
        for name, leaf in leaves.items():
            if leaf.grad is not None:
                gradients[name] = gradients[name] + leaf.grad if name in gradients else leaf.grad
    return Trained(loss=loss.detach(), gradients=_gradients(model))


def _rows(tensor: Tensor, spec: TensorSpec, first: int, count: int) -> Tensor:
    """Return some samples of a tensor of a whole unit; all of it where it has no axis of samples."""
    if spec.layout.kind is not LayoutKind.BATCH:
        return tensor
    rows = spec.layout.rows_per_sample
    if tensor.shape[spec.layout.axis] == rows * count:
        return tensor
    return tensor.narrow(spec.layout.axis, first * rows, count * rows)


def _joined(parts: list[Tensor], spec: TensorSpec | None) -> Tensor:
    """Return a tensor of a whole unit, of what its micro-batches made; the loss has no spec."""
    if len(parts) == 1 or spec is None or spec.layout.kind is not LayoutKind.BATCH:
        return parts[0]
    return torch.cat(parts, spec.layout.axis)


@contextmanager
def _untouched(model: nn.Module, *, seed: int = 0) -> Iterator[None]:
    """Begin without gradients, and undo what a step does to buffers and generators."""
    model.zero_grad(set_to_none=True)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            yield
        finally:
            model.zero_grad(set_to_none=True)
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    if name in buffers and buffer.shape == buffers[name].shape:
                        buffer.copy_(buffers[name])


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def worst_of(errors: Mapping[str, float]) -> tuple[float, str]:
    """Return the largest error, and whose it is."""
    whose = max(errors, key=lambda name: errors[name], default="")
    return errors.get(whose, 0.0), whose


def train_in_double(model: nn.Module, batch: Batch) -> Trained | None:
    """Return what the plain model finds in double precision; None where it cannot compute in it."""
    exact = copy.deepcopy(model).double()
    # labels of detection are lists of dicts of tensors
    rows = tree_map_only(
        Tensor, lambda value: value.double() if value.is_floating_point() else value, dict(batch)
    )
    try:
        return train_plain(exact, rows)
    except RuntimeError:
        return None


def train_one_step_of_rounding_away(model: nn.Module, batch: Batch) -> Trained:
    """Return what the plain model finds where each floating-point input is the next number above or below, or itself.

    That far its answers are not determined: no other order of the same additions need come closer.
    """
    draw = torch.Generator().manual_seed(0)

    def near(value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value
        way = torch.randint(-1, 2, value.shape, generator=draw, dtype=value.dtype)
        return torch.nextafter(value, value + way)

    return train_plain(model, tree_map_only(Tensor, near, dict(batch)))
