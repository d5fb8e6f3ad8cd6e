"""Run torch.export on a meta_copy model, through a wrapper that returns the loss and named outputs."""

from __future__ import annotations

import io
import linecache
import logging
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from types import MappingProxyType
from typing import Any, TypeAlias
from unittest import mock

import torch
from torch import Tensor, nn
from torch._export.utils import _compiling_state_context
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from gpp_plugin.capture.eager.keep_whole import NeedsWholeModule, WholeCalls
from gpp_plugin.capture.eager.trial_run import READS, Untraceable
from gpp_plugin.capture.tracing.carried_state import LeavesState, StateFinder, carried_in, is_number
from gpp_plugin.capture.tracing.meta_copy import MetaCopy, fake_inputs
from gpp_plugin.capture.tracing.outside import TORCHS_OWN, hidden_process_group, noted_accesses, refill
from gpp_plugin.capture.tracing.sample_batches import UnreadRecords, WholeUnit, with_records
from gpp_plugin.capture.tracing.symbolic_sizes import tensors_in
from gpp_plugin.capture.tracing.values import ReadingMode, Recording
from gpp_plugin.errors import CaptureError
from gpp_plugin.garbage import paused_collector
from gpp_plugin.ir.analysis import CarriedState

# Branches on overflow: ``if not isfinite(x).all(): x = clamp(x)`` becomes a choice of values.
#
# Encoders of BART, Marian, LED, the DETR family and others clamp what half precision cannot hold, in a Python branch on
# the values of an activation. While such a model is traced, the branch is entered, and the clamp in it gives
#
#     torch.where(isfinite(x).all(), x, torch.clamp(x, low, high))
#
# which is x to the bit where the branch would not have been entered, and the clamped tensor where it would. A branch
# that holds no clamp of the tensor that it checks is refused.


_CLAMPS = frozenset(("clamp", "clip"))


class OverflowMode(TorchFunctionMode):
    """Enters branches on overflow and makes the clamp in them depend on what they check."""

    def __init__(self) -> None:
        super().__init__()
        # id of a check's tensor -> (it, the tensor that it is of, whether it says that all is well); held, so that
        # ids stay their own
        self._checks: dict[int, tuple[Tensor, Tensor, bool]] = {}
        self._entered: tuple[Tensor, Tensor, bool] | None = None

    def close(self) -> None:
        """Refuse a branch whose clamp did not come.

        Raises:
            CaptureError: there is one.
        """
        if self._entered is not None:
            raise CaptureError(
                "the Python code depends on tensor values: a branch on isfinite() or isinf() does something else than "
                "clamp the tensor that it checks; use torch.where"
            )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch; note checks for overflow, and decide a branch on one."""
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is None:
            return func(*args, **kwargs)
        if name == "__bool__" and id(first) in self._checks and first.dim() == 0:
            self.close()
            self._entered = self._checks[id(first)]
            return not self._entered[2]
        if name in _CLAMPS and self._entered is not None and first is self._entered[1]:
            check, _, is_well = self._entered
            self._entered = None
            return torch.where(check if is_well else ~check, first, func(*args, **kwargs))
        result = func(*args, **kwargs)
        if name in ("isfinite", "isinf") and isinstance(result, Tensor):
            self._checks[id(result)] = result, first, name == "isfinite"
        elif name in ("all", "any") and id(first) in self._checks and len(args) == 1 and not kwargs:
            _, checked, is_well = self._checks[id(first)]
            if is_well == (name == "all"):
                self._checks[id(result)] = result, checked, is_well
        return result


WRAPPED = "model"
"""Attribute of the wrapper that holds the model; the prefix of every exported name."""
LOSS_FUNCTION = "loss_function"
"""Attribute by which HuggingFace models call their loss."""
TALKATIVE = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")
"""What logs a stack, or a hint for torch's developers, beside the exception that it raises."""
CHECKS_OVERFLOW = "checks overflow"
"""Noted of a meta copy: its Python tests whether an activation is finite."""


Call: TypeAlias = Callable[[nn.Module, Mapping[str, Any]], Any]
"""Calls a model with the entries of a batch and returns what it made of them."""


def call_by_key(model: nn.Module, entries: Mapping[str, Any]) -> Any:
    """Call a model whose arguments are called as the batch's entries are."""
    return model(**with_records(entries))


class _Seen:
    """What the wrapper saw of the model's result; export puts plain attributes of a module back."""

    has_loss = False
    recording: Recording | None = None
    checks_overflow = False
    left: Sequence[CarriedState] = ()


class _Wrapper(nn.Module):
    """Call a meta copy with keyword arguments; return its loss (if any) and the named outputs as a tuple."""

    # Names in the export are those of attributes: "model.layers.0.weight" for `model` here, whatever `call` does
    # between the batch and the model, so that a plain model and a part under other names trace to one graph.

    def __init__(
        self,
        meta_copy: MetaCopy,
        batch: Mapping[str, Any],
        outputs: Sequence[str],
        whole: WholeCalls,
        call: Call,
        reads: Mapping[str, Any] | None,
        *,
        needs_loss: bool,
    ) -> None:
        super().__init__()
        self.model = meta_copy.model
        self._whole = whole
        self._call = call
        self._reads = reads
        self._constants = split_batch(batch)[1]
        self._outputs = tuple(outputs)
        self._needs_loss = needs_loss
        self.seen = _Seen()

    def forward(self, **inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the model on the batch."""
        whole = self._whole
        whole.note_inputs(inputs)
        overflow = OverflowMode() if self.seen.checks_overflow else None
        reading = None
        if self._reads is not None:  # of a unit whose readings are known there may be no values here
            readings = self._reads.readings if isinstance(self._reads, WholeUnit) else None
            values = self._reads if readings is None else None
            reading = ReadingMode(inputs, values, readings or ())
        finder = StateFinder(self.model, [*whole.states_around, *whole.states_inside])
        with (
            _attributes_restored(self.model),
            overflow or nullcontext(),
            reading or nullcontext(),
            _AssignmentMode(
                keeps_numbers=any(t.number for state in whole.states_around for t in state.tensors)
            ),
        ):
            with carried_in(self.model, whole.states_around), noted_accesses(self.model) as first:
                result = self._call(self.model, {**inputs, **self._constants})
            # their calls are one operator each: what hooks on them leave for the forward is in no graph
            for path, name in whole.left_by_hooks:
                if (id(vars(self.model.get_submodule(path))), name) in first:
                    raise Untraceable(
                        f"the forward reads {name}, which a hook has left in {path or 'the model'}", ""
                    )
            self.seen.left = finder.find(
                first, again=lambda: self._call(self.model, {**inputs, **self._constants})
            )
        if reading is not None:
            self.seen.recording = reading.recording()
        if overflow is not None:
            overflow.close()
        self.seen.has_loss, found = loss_and_outputs(
            result, type(self.model).__name__, self._outputs, inputs, needs_loss=self._needs_loss
        )
        return found


def loss_and_outputs(
    result: Any, model: str, outputs: Sequence[str], inputs: Collection[str], *, needs_loss: bool
) -> tuple[bool, tuple[torch.Tensor, ...]]:
    """Return whether there is a loss in what a model returned; the loss, if any, and the named outputs.

    Raises:
        CaptureError: a loss, or an output, is no tensor, or is missing.
    """
    found = result if isinstance(result, torch.Tensor) else _field(result, "loss")
    loss = found if isinstance(found, torch.Tensor) else None
    if loss is None and needs_loss and isinstance(result, (tuple, list)):
        raise CaptureError(
            f"{model} returned a {type(result).__name__} of {len(result)}, which does not say "
            'what is the loss; return the loss, a dict with "loss", or an output with a field loss'
        )
    if loss is None and needs_loss:
        raise CaptureError(
            f"{model} returned no loss for a batch with {sorted(inputs)}; pass what "
            "it computes one from (labels=..., or return_loss=True for contrastive models)"
        )
    if loss is not None and loss.numel() != 1:
        raise CaptureError(
            f"the loss of {model} has shape {tuple(loss.shape)}; return one number (its mean over the batch)"
        )
    if loss is None and not outputs:
        raise CaptureError(
            f"{model} returned no loss and no outputs were requested; pass labels, "
            "or name output fields (outputs=('logits',))"
        )
    named = [_field(result, name) for name in outputs]
    for name, output in zip(outputs, named, strict=True):
        if not isinstance(output, torch.Tensor):
            fields = sorted(result) if isinstance(result, Mapping) else []
            raise CaptureError(
                f"output {name!r} of {model} is {type(output).__name__}, not a tensor; its fields are {fields}"
            )
    first: tuple[torch.Tensor, ...] = () if loss is None else (loss.reshape(()) if loss.dim() else loss,)
    return loss is not None, (*first, *named)


class _AssignmentMode(TorchFunctionMode):
    """Traces ``tensor.data`` as a detached view, and what is put there as a write: both are in the graph.

    Args:
        keeps_numbers: tensors without axes may stand for Python's numbers, which nothing changes in place.
    """

    def __init__(self, *, keeps_numbers: bool = False) -> None:
        super().__init__()
        self._keeps_numbers = keeps_numbers

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch."""
        if func == torch.Tensor.register_hook and isinstance(args[0], FakeTensor):
            raise NeedsWholeModule(
                "the forward registers a hook on a tensor's gradient, which no graph holds; write a custom "
                "autograd.Function, or move that part into a module of its own, which then runs as it is"
            )
        if func == _DATA:
            return args[0].detach()
        if func == _PUT_DATA and args[0].shape == args[1].shape and args[0].dtype == args[1].dtype:
            args[0].detach().copy_(args[1].detach())
            return None
        if self._keeps_numbers and is_number(args[0] if args else None):
            func = getattr(torch.Tensor, _OUT_OF_PLACE.get(getattr(func, "__name__", ""), ""), func)
        # a number that stands for one of Python's, and is a place in a tensor, as a whole number
        if self._keeps_numbers and func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            place = torch.utils._pytree.tree_map(lambda one: one.long() if is_number(one) else one, args[1])
            args = (args[0], place, *args[2:])
        return func(*args, **(kwargs or {}))


_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_PUT_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_OUT_OF_PLACE: Mapping[str, str] = MappingProxyType(
    {f"__i{name}__": f"__{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")}
    | {f"{name}_": name for name in ("add", "sub", "mul", "div", "floor_divide", "remainder", "pow")}
)
"""Operators in place on a number's tensor, and those that make a new one."""


def _field(result: Any, name: str) -> Any:
    return result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)


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
        if tensors_in(value):
            raise CaptureError(
                f"batch entry {key!r} is a {type(value).__name__} of tensors; pass one tensor with the "
                "samples along axis 0"
            )
        constants[key] = value
    return keys, constants


def export_model(
    meta_copy: MetaCopy,
    batch: Mapping[str, Any],
    *,
    outputs: Sequence[str],
    training: bool,
    whole: WholeCalls,
    call: Call = call_by_key,
    reads: Mapping[str, Any] | None = None,
    lengths: Mapping[str, Collection[int]] = MappingProxyType({}),
) -> tuple[torch.export.ExportedProgram, bool, Recording | None]:
    """Export the meta_copy on fake inputs shaped like ``batch``.

    Args:
        whole: the calls that leave one operator each.
        reads: the batch, where the model's Python may read its values, or the readings of an earlier run.
        lengths: batch key -> axes whose sizes are left open, where the model allows it.

    Returns:
        The program, whether its first output is a loss, and what was read.

    Raises:
        CaptureError: the model cannot be exported; names the module, the line and the remedy.
        Untraceable: it could be if a module of it ran as it is.
        LeavesState: the forward leaves state behind that the meta_copy does not carry.
    """
    # a part of a larger model is trained by what reads its outputs
    needs_loss = training and not outputs
    wrapper = _Wrapper(meta_copy, batch, outputs, whole, call, reads, needs_loss=needs_loss)
    wrapper.training = training
    wrapper.seen.checks_overflow = CHECKS_OVERFLOW in meta_copy.noticed
    program: torch.export.ExportedProgram | None = None
    try:
        program = _export(wrapper, meta_copy, batch, whole, lengths)
    except CaptureError as error:
        if wrapper.seen.checks_overflow or not any(word in str(error) for word in ("isfinite(", "isinf(")):
            raise
    if program is None:  # a branch on overflow: once more, with an answer to it, and so from now on
        meta_copy.noticed.add(CHECKS_OVERFLOW)
        wrapper.seen.checks_overflow = True
        program = _export(wrapper, meta_copy, batch, whole, lengths)
    if wrapper.seen.left:
        raise LeavesState(wrapper.seen.left)
    return program, wrapper.seen.has_loss, wrapper.seen.recording


def _export(
    wrapper: _Wrapper,
    meta_copy: MetaCopy,
    batch: Mapping[str, Any],
    whole: WholeCalls,
    lengths: Mapping[str, Collection[int]],
) -> torch.export.ExportedProgram:
    try:
        with torch.enable_grad(), _tracing_context(), whole.installed():
            inputs = fake_inputs(meta_copy, batch)
            # what ``Dim.AUTO`` means, marked on the tensors themselves: export has no words for axes of keyword
            # arguments whose names the signature (``**inputs``) does not give
            for key, axes in lengths.items():
                for axis in axes:
                    torch._dynamo.maybe_mark_dynamic(inputs[key], axis)
            return torch.export.export(wrapper, (), inputs, strict=False)
    except Exception as error:
        for cause in _causes(error):
            if isinstance(cause, CaptureError) and not isinstance(cause, (NeedsWholeModule, UnreadRecords)):
                raise cause from None
        lacks_records = any(isinstance(cause, UnreadRecords) for cause in _causes(error))
        culprit = _culprit(error, meta_copy.model)
        raise Untraceable(_explain(error, meta_copy.model), culprit, lacks_records=lacks_records) from error


def run_reading(
    meta_copy: MetaCopy,
    batch: Mapping[str, Any],
    *,
    outputs: Sequence[str],
    whole: WholeCalls,
    call: Call = call_by_key,
) -> Recording:
    """Run the meta_copy on fake inputs, as an export would, and return what its Python read of the batch.

    Args:
        whole: the calls that an export leaves one operator each.

    Raises:
        CaptureError: it fails; names the module and the line.
    """
    wrapper = _Wrapper(meta_copy, batch, outputs, whole, call, dict(batch), needs_loss=False)
    wrapper.training = meta_copy.model.training
    inputs = fake_inputs(meta_copy, batch)
    try:
        with (
            torch.enable_grad(),
            _tracing_context(),
            whole.installed(),
            _compiling_state_context(),  # models ask whether they are being exported, and read less then
            meta_copy.mode,
        ):
            wrapper(**inputs)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(_explain(error, meta_copy.model)) from error
    assert wrapper.seen.recording is not None
    return wrapper.seen.recording


@contextmanager
def _tracing_context() -> Iterator[None]:
    """What a model runs in while it is traced."""
    # The garbage collector waits: what a finalizer computes on tensors would be traced as the model's. The engine of an
    # earlier job in this process once was collected so: its operators came into the graph before the inputs.
    with (
        # no operator notes the stack it was traced from: nothing reads them, and they take a quarter of an export
        mock.patch.object(torch.fx.config, "do_not_emit_stack_traces", True, create=True),
        _without_output_of_a_failure(),
        paused_collector(),
        hidden_process_group(),
        # `torch.distributions` does not check the values of its arguments: a check that passes changes no result
        mock.patch.object(torch.distributions.Distribution, "_validate_args", False),
        _masks_by_broadcasting(),
        _masks_left_out_unpadded(),
        _without_idle_conversions(),
    ):
        yield


@contextmanager
def _attributes_restored(model: nn.Module) -> Iterator[None]:
    """Undo what a forward keeps of tensors in its modules (a cache of positions): export refuses what it finds."""
    before = [(module, dict(vars(module)), set(module._buffers)) for module in model.modules()]
    own = [
        (value, value.copy())
        for _, attributes, _ in before
        for name, value in attributes.items()
        if name not in TORCHS_OWN and type(value) in (dict, list)
    ]
    try:
        yield
    finally:
        for container, content in own:
            refill(container, content)
        for module, attributes, buffers in before:
            for name in module._buffers.keys() - buffers:
                del module._buffers[name]
            now = vars(module)
            for name in [n for n, value in now.items() if value is not attributes.get(n)]:
                # not numbers: one may say what else was done to the module (transformers installs hooks once)
                leaves = torch.utils._pytree.tree_leaves(now[name])
                if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
                    continue
                if name in attributes:
                    now[name] = attributes[name]
                else:
                    del now[name]


@contextmanager
def _masks_by_broadcasting() -> Iterator[None]:
    """Let transformers make masks that models add patterns to by broadcasting: the graph cannot hold `torch.vmap`.

    A pattern is a function of four numbers, (sample, head, query, key). Called with index tensors [B, 1, 1, 1],
    [1, 1, 1, 1], [1, 1, Q, 1] and [1, 1, 1, K] instead, operators on numbers give the same mask [B, 1, Q, K].
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    mapped = getattr(masking, "_vmap_expansion_sdpa", None)
    expand = getattr(masking, "_non_vmap_expansion_sdpa", None)
    if mapped is None or expand is None:
        yield
        return

    def broadcast(pattern: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def mask(*indices: torch.Tensor) -> torch.Tensor:
            return pattern(*expand(*indices)).expand(*(len(index) for index in indices))

        return mask

    with mock.patch.object(masking, "_vmap_expansion_sdpa", broadcast):
        yield


@contextmanager
def _masks_left_out_unpadded() -> Iterator[None]:
    """Make transformers leave out the mask of attention to everything where the batch has no padding mask.

    Eager code does so. In an export transformers reads no padding mask, and makes a mask without one too.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    looks = getattr(masking, "_ignore_bidirectional_mask_sdpa", None)
    if looks is None:
        yield
        return

    def is_left_out(
        padding_mask: torch.Tensor | None, kv_length: int, local_attention_size: int | None = None
    ) -> bool:
        is_local = local_attention_size is not None and kv_length >= local_attention_size
        if padding_mask is None and not is_local:
            return True
        return bool(looks(padding_mask, kv_length, local_attention_size))

    with mock.patch.object(masking, "_ignore_bidirectional_mask_sdpa", is_left_out):
        yield


@contextmanager
def _without_idle_conversions() -> Iterator[None]:
    """Skip ``module.to(dtype)`` where it changes nothing: traced weights cannot be put in place of others.

    A router that keeps a precision of its own (NLLB-MoE, Switch) says so in every forward.
    """
    original = nn.Module.to

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        wanted = [*args, *kwargs.values()]
        tensors = (*module.parameters(), *module.buffers())
        is_idle = all(isinstance(part, torch.dtype) for part in wanted) and all(
            tensor.dtype in wanted for tensor in tensors if tensor.is_floating_point()
        )
        return module if is_idle else original(module, *args, **kwargs)

    with mock.patch.object(nn.Module, "to", to):
        yield


@contextmanager
def _without_output_of_a_failure() -> Iterator[None]:
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
    if isinstance(error, NeedsWholeModule):
        return f"{type(model).__name__} cannot be captured at {where}: {text[:300]}"
    reads = ("DataDependent", "data-dependent", "Could not guard", "is_nonzero")
    if any(word in kind + text for word in reads):
        remedy = (
            f"{READS}: use tensor operators (torch.where, masks) instead of "
            "if/while/int() on tensors, compute it in the data loader, or move it into a module of its own, which then "
            "runs as it is"
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
    torch_root = os.path.dirname(torch.__file__)
    path, owner = _failing_module(error, model)
    line = ""
    for failure in reversed(_causes(error)):
        # From the outermost frame inwards: the last line that is neither torch's nor ours is the user's, or the model
        # library's, that made the failing call.
        for frame, number in traceback.walk_tb(failure.__traceback__):
            file = frame.f_code.co_filename
            if not file.startswith(torch_root) and "/gpp_plugin/capture/" not in file.replace(os.sep, "/"):
                source = linecache.getline(file, number).strip()
                line = f"{os.path.basename(file)}:{number}: {source}"
    return f"{path or 'the model itself'} ({owner}{', ' + line if line else ''})"


def _failing_module(error: Exception, model: nn.Module) -> tuple[str, str]:
    """Return path and class of the last of the model's modules on the way to a failure."""
    # by their attributes: export calls some modules through proxies, which share those
    paths = {id(vars(module)): name for name, module in model.named_modules()}
    path, owner = "", type(model).__name__
    for failure in reversed(_causes(error)):
        for frame, _ in traceback.walk_tb(failure.__traceback__):
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and id(vars(module)) in paths:
                path, owner = paths[id(vars(module))], type(module).__name__
    return path, owner


def _culprit(error: Exception, model: nn.Module) -> str:
    """Return what may run as it is so that tracing gets past a failure: a module, or a loss function called by one.

    HuggingFace models call ``self.loss_function(...)`` from the forward of the model itself, which cannot run as it
    is.
    """
    path, _ = _failing_module(error, model)
    for cause in _causes(error):
        if isinstance(cause, NeedsWholeModule) and cause.within is not None:
            return _module_around(cause.within, model)
    module = model.get_submodule(path)
    code = getattr(getattr(module, LOSS_FUNCTION, None), "__code__", None)
    frames = (frame for cause in _causes(error) for frame, _ in traceback.walk_tb(cause.__traceback__))
    if code is not None and any(frame.f_code is code for frame in frames):
        return f"{path}.{LOSS_FUNCTION}" if path else LOSS_FUNCTION
    return path


def _module_around(path: str, model: nn.Module) -> str:
    """Return the path of the module that calls another one; a list of modules calls none."""
    while path:
        path = path.rpartition(".")[0]
        if type(model.get_submodule(path)).forward is not nn.ModuleList.forward:
            return path
    return ""
