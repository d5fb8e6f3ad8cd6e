"""Run torch.export on a shadow model, through a wrapper that returns the loss and named outputs."""

from __future__ import annotations

import io
import linecache
import logging
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import nn

from gpp_plugin.capture.tracing.shadow import Shadow, fake_inputs
from gpp_plugin.capture.tracing.symbolic_sizes import leave_open
from gpp_plugin.errors import CaptureError
from gpp_plugin.garbage import paused_collector

WRAPPED = "model"
"""Attribute of the wrapper that holds the model; the prefix of every exported name."""
TALKATIVE = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")
"""What logs a stack, or a hint for torch's developers, beside the exception that it raises."""


Call: TypeAlias = Callable[[nn.Module, Mapping[str, Any]], Any]
"""Calls a model with the entries of a batch and returns what it made of them."""


def call_by_key(model: nn.Module, entries: Mapping[str, Any]) -> Any:
    """Call a model whose arguments are called as the batch's entries are."""
    return model(**entries)


class _Seen:
    """What the wrapper saw of the model's result; export puts plain attributes of a module back."""

    has_loss = False


class LossWrapper(nn.Module):
    """Call a model with keyword arguments; return its loss (if any) and the named outputs as a tuple."""

    def __init__(
        self,
        model: nn.Module,
        constants: Mapping[str, Any],
        outputs: Sequence[str],
        needs_loss: bool,
        call: Call = call_by_key,
    ) -> None:
        super().__init__()
        self.model = model
        self._call = call
        self._constants = dict(constants)
        self._outputs = tuple(outputs)
        self._needs_loss = needs_loss
        self.seen = _Seen()

    def forward(self, **inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the model on the batch."""
        result = self._call(self.model, {**inputs, **self._constants})
        loss = _find_loss(result)
        if loss is None and self._needs_loss:
            raise CaptureError(
                f"{type(self.model).__name__} returned no loss for a batch with {sorted(inputs)}; pass what "
                "it computes one from (labels=..., or return_loss=True for contrastive models)"
            )
        if loss is not None and loss.numel() != 1:
            raise CaptureError(
                f"the loss of {type(self.model).__name__} has shape {tuple(loss.shape)}; return one number "
                "(its mean over the batch)"
            )
        if loss is None and not self._outputs:
            raise CaptureError(
                f"{type(self.model).__name__} returned no loss and no outputs were asked for; pass labels, "
                "or name output fields (outputs=('logits',))"
            )
        self.seen.has_loss = loss is not None
        named = tuple(_find_output(result, name, type(self.model).__name__) for name in self._outputs)
        return named if loss is None else (loss.reshape(()) if loss.dim() else loss, *named)


def _find_loss(result: Any) -> torch.Tensor | None:
    if isinstance(result, torch.Tensor):
        return result
    found = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    return found if isinstance(found, torch.Tensor) else None


def _find_output(result: Any, name: str, model: str) -> torch.Tensor:
    found = result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)
    if not isinstance(found, torch.Tensor):
        fields = sorted(result) if isinstance(result, Mapping) else []
        raise CaptureError(
            f"output {name!r} of {model} is {type(found).__name__}, not a tensor; its fields are {fields}"
        )
    return found


def split_batch(batch: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Return the keys of tensor entries, and the entries that are constants of the capture.

    Raises:
        CaptureError: an entry holds tensors inside a container.
    """
    keys: list[str] = []
    constants: dict[str, Any] = {}
    for key, value in batch.items():
        if isinstance(value, torch.Tensor):
            keys.append(key)
            continue
        leaves = torch.utils._pytree.tree_leaves(value)
        if any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            raise CaptureError(
                f"batch entry {key!r} is a {type(value).__name__} of tensors; pass one tensor with the "
                "samples along axis 0"
            )
        constants[key] = value
    return keys, constants


def export_model(
    shadow: Shadow,
    batch: Mapping[str, Any],
    *,
    outputs: Sequence[str],
    training: bool,
    call: Call = call_by_key,
    lengths: Mapping[str, Collection[int]] = MappingProxyType({}),
) -> tuple[torch.export.ExportedProgram, bool]:
    """Export the shadow on fake inputs shaped like ``batch``.

    Args:
        lengths: batch key -> axes whose sizes are left open, where the model allows it.

    Returns:
        The program, and whether its first output is a loss.

    Raises:
        CaptureError: the model cannot be exported; names the module, the line and the remedy.
    """
    _, constants = split_batch(batch)
    # Names in the export are those of attributes: "model.layers.0.weight" for `wrapper.model`, whatever `call` does
    # between the batch and the model, so that a plain model and a part under other names trace to one graph.
    # a part of a larger model is trained by what reads its outputs
    wrapper = LossWrapper(shadow.model, constants, outputs, needs_loss=training and not outputs, call=call)
    wrapper.training = training
    try:
        # The collector waits: what a finalizer computes on tensors would be traced as the model's. The engine of an
        # earlier job in this process is such garbage: its operators came into the graph before the inputs.
        with (
            torch.enable_grad(),
            _without_stack_traces(),
            _without_words_of_a_failure(),
            paused_collector(),
        ):
            inputs = fake_inputs(shadow, batch)
            leave_open(inputs, lengths)
            program = torch.export.export(wrapper, (), inputs, strict=False)
    except Exception as error:
        for cause in _causes(error):
            if isinstance(cause, CaptureError):
                raise cause from None
        raise CaptureError(_explain(error, shadow.model)) from error
    return program, wrapper.seen.has_loss


@contextmanager
def _without_stack_traces() -> Iterator[None]:
    """Let no operator note the stack it was traced from: nobody reads them, and they take a quarter of an export."""
    config: Any = torch.fx.config
    before = getattr(config, "do_not_emit_stack_traces", False)
    config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        config.do_not_emit_stack_traces = before


@contextmanager
def _without_words_of_a_failure() -> Iterator[None]:
    """Keep torch from printing stacks and the whole graph so far where an export fails: the error is one line."""
    loggers = [logging.getLogger(name) for name in TALKATIVE]
    before = [logger.disabled for logger in loggers]
    held = io.StringIO()
    try:
        for logger in loggers:
            logger.disabled = True
        with redirect_stderr(held):
            yield
    finally:
        for logger, was_disabled in zip(loggers, before, strict=True):
            logger.disabled = was_disabled
    sys.stderr.write(held.getvalue())


def _causes(error: BaseException) -> list[BaseException]:
    # torch wraps what a model raises several times, as cause or as context; the error itself comes first
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    return chain


def _explain(error: Exception, model: nn.Module) -> str:
    """Return one line: module path, source line, what went wrong, what to change."""
    where = _failing_line(error, model)
    # torch has no error codes: its classes' names and the words of the first line are all there is to go by
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    kind = type(error).__name__
    if any(
        word in kind + text for word in ("DataDependent", "data-dependent", "Could not guard", "is_nonzero")
    ):
        remedy = (
            "the Python code depends on tensor values: use tensor operators (torch.where, masks) instead of "
            "if/while/int() on tensors, or compute it in the data loader"
        )
    elif "dtype" in text or "same type" in text:
        remedy = "the dtypes do not fit: cast the operands, or register the constant as a parameter"
    elif isinstance(error, TypeError):
        remedy = "the batch keys must be arguments of the model's forward"
    else:
        remedy = "torch.export cannot trace this: replace the operator or construct on that line"
    return f"{type(model).__name__} cannot be captured at {where}: {kind}: {text[:300]}; {remedy}"


def _failing_line(error: Exception, model: nn.Module) -> str:
    """Return ``module.path (Class, file.py:12: source)`` of the innermost model frame on the stack."""
    # the innermost frame of the user's code whose `self` is one of the model's modules says both path and line
    paths = {id(module): name for name, module in model.named_modules()}
    torch_root = os.path.dirname(torch.__file__)
    path, owner = "", type(model).__name__
    line = ""
    for failure in reversed(_causes(error)):
        # From the outermost frame inwards: the last module's forward on the way is the innermost one; the last line
        # that is neither torch's nor ours is the user's, or the model library's, that made the failing call.
        for frame, number in traceback.walk_tb(failure.__traceback__):
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and id(module) in paths:
                path, owner = paths[id(module)], type(module).__name__
            file = frame.f_code.co_filename
            if not file.startswith(torch_root) and "/gpp_plugin/capture/" not in file.replace(os.sep, "/"):
                source = linecache.getline(file, number).strip()
                line = f"{os.path.basename(file)}:{number}: {source}"
    return f"{path or 'the model itself'} ({owner}{', ' + line if line else ''})"
