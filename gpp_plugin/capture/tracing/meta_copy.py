"""A weightless copy of the user's model that can be traced, recast and switched without harm."""

from __future__ import annotations

import copy
import functools
import itertools
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from gpp_plugin.capture.eager.trial_run import MODULE_HOOKS
from gpp_plugin.capture.tracing.carried_state import described, register_states, without_history
from gpp_plugin.errors import CaptureError
from gpp_plugin.ir.analysis import CarriedState
from gpp_plugin.ir.block_graph import Parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaCopy:
    """The copy, and how its tensors are called.

    Args:
        model: the copy; its parameters and buffers are fake tensors of ``mode``.
        original: the user's model.
        parameters: every parameter and buffer of the user's model, in model order.
        first_names: any name of a parameter or buffer -> its first name.
        noticed: what exports of it were found to need; later ones begin with that.
        carried: what its forward leaves behind for the next one: buffers of the copy.
    """

    model: nn.Module
    original: nn.Module
    mode: FakeTensorMode
    device: torch.device
    dtype: torch.dtype | None
    parameters: tuple[Parameter, ...]
    first_names: dict[str, str]
    noticed: set[str] = field(default_factory=set)
    carried: tuple[CarriedState, ...] = ()


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def tracing_device(device: torch.device) -> torch.device:
    """Return the device to trace on: the wanted one where this build of torch has it, else the CPU.

    Autograd aborts on fake tensors of a device that torch was built without, so that capture for such
    a device traces on the CPU and moves the graph's device arguments afterwards.
    """
    has_device = device.type != "cuda" or torch.cuda.is_available()
    return device if has_device else torch.device("cpu")


def make_meta_copy(
    model: nn.Module,
    *,
    training: bool,
    dtype: torch.dtype | None,
    device: torch.device,
    carried: Sequence[CarriedState] = (),
) -> MetaCopy:
    """Copy ``model`` with fake tensors in place of its parameters and buffers; ties stay ties.

    Args:
        dtype: floating parameters become this type; buffers keep theirs.
        carried: what its forward leaves behind for the next one.

    Raises:
        CaptureError: the model cannot be copied, or has parameters that cannot be trained.
    """
    _check_kinds(model)
    # `copy.deepcopy` looks every object up in ``memo`` by its id before it copies it. With a fake tensor entered for
    # each parameter and buffer, the copy is made around them and no weight is ever copied. A tied parameter is one
    # object under two names, so it is one fake tensor under both.
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    memo: dict[int, Any] = {**without_history(model)}
    where = tracing_device(device)
    with mode:
        for parameter in model.parameters():
            cast = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
            # one whose ranks hold parts of it has a shape, and no memory, between mini-batches (ZeRO 3)
            strides = torch.empty_like(parameter, device="meta").stride()
            empty = torch.empty_strided(parameter.shape, strides, dtype=cast, device=where)
            # the same strides: a weight in channels-last memory decides what convolutions make of it
            memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for buffer in model.buffers():
            memo[id(buffer)] = torch.empty_strided(
                buffer.shape, buffer.stride(), dtype=buffer.dtype, device=where
            )
    # hooks are the user's own, whatever objects they are methods of; methods of the model's modules are the copies'
    for table in (getattr(part, name) for part in model.modules() for name in MODULE_HOOKS):
        memo[id(table)] = table.copy()
    parameters = (*describe_parameters(model, dtype), *described(carried))
    try:
        copied = copy.deepcopy(model, memo)
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__} cannot be copied for tracing ({type(error).__name__}: {error}); "
            "remove attributes that copy.deepcopy refuses (open files, locks, process groups) before capture"
        ) from error
    rebind_hooks(copied, memo)
    with mode:
        register_states(copied, carried, where)
    set_modes(copied, training=training)
    _switch_off_extras(copied)
    first_names = {name: p.name for p in parameters for name in (p.name, *p.aliases)}
    return MetaCopy(
        model=copied,
        original=model,
        mode=mode,
        device=device,
        dtype=dtype,
        parameters=parameters,
        first_names=first_names,
        carried=tuple(carried),
    )


def rebind_hooks(copied: nn.Module, memo: Mapping[int, Any]) -> None:
    """Make hooks of a copy see the copy where they saw the model: as methods of its modules, or in their closure.

    Args:
        memo: of `copy.deepcopy`: the copy of each object, by its id.
    """

    def rebound(hook: Any) -> Any:
        if isinstance(hook, types.MethodType):
            return types.MethodType(hook.__func__, memo.get(id(hook.__self__), hook.__self__))
        if isinstance(hook, functools.partial):
            args = [memo.get(id(arg), arg) for arg in hook.args]
            return functools.partial(rebound(hook.func), *args, **hook.keywords)
        if isinstance(hook, types.FunctionType) and hook.__closure__:
            held = [cell.cell_contents for cell in hook.__closure__]
            cells = tuple(types.CellType(memo.get(id(each), each)) for each in held)
            copied = types.FunctionType(
                hook.__code__, hook.__globals__, hook.__name__, hook.__defaults__, cells
            )
            copied.__kwdefaults__, copied.__module__ = hook.__kwdefaults__, hook.__module__
            return copied
        return hook

    for table in (getattr(part, name) for part in copied.modules() for name in MODULE_HOOKS):
        table.update({key: rebound(hook) for key, hook in table.items()})


def set_modes(model: nn.Module, *, training: bool) -> bool:
    """Put a model in evaluation; in training leave its modules' modes as its user set them.

    A model of which no module is in train mode, as ``from_pretrained`` returns it, is put in train mode whole.

    Returns:
        Whether it was.
    """
    if not training:
        model.eval()
        return False
    is_wholly_in_eval = not any(module.training for module in model.modules())
    if is_wholly_in_eval:
        model.train()
    return is_wholly_in_eval


def fake_inputs(meta_copy: MetaCopy, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the batch's tensors as fake ones; floating ones are cast like the parameters."""
    where = tracing_device(meta_copy.device)
    with meta_copy.mode:
        return {
            key: torch.empty(
                value.shape,
                dtype=meta_copy.dtype if meta_copy.dtype and value.is_floating_point() else value.dtype,
                device=where,
            )
            for key, value in batch.items()
            if isinstance(value, torch.Tensor)
        }


class _NeverDrops(float):
    """A layer-drop probability of 0 that says so when a drawn number is compared with it.

    transformers before 5.23 draws a number for every layer, also at probability 0, and tests in Python
    whether it is less: a branch on a tensor's value, which cannot be exported. No drawn number is less than 0.
    """

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer ``tensor < 0``."""
        if function in (torch.Tensor.__lt__, torch.Tensor.lt):
            return False
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


def _switch_off_extras(model: nn.Module) -> None:
    """Switch off, on the copy, what training a graph does not need: caches, eager checkpointing, layer drop at 0."""
    switch_off_caches(model)
    for module in model.modules():
        # the plan recomputes what it wants: eager checkpointing would put an operator around each layer
        if getattr(module, "gradient_checkpointing", False):
            setattr(module, "gradient_checkpointing", False)  # noqa: B010
        if getattr(module, "layerdrop", None) == 0:
            setattr(module, "layerdrop", _NeverDrops())  # noqa: B010


def switch_off_caches(model: nn.Module) -> None:
    """Make a copy cache nothing for generation."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False


def describe_parameters(model: nn.Module, dtype: torch.dtype | None = None) -> tuple[Parameter, ...]:
    """Return the parameters and buffers of a module; floating parameters as they are in ``dtype``."""
    # By identity: GPT-2's lm_head.weight is transformer.wte.weight, one entry [transformer.wte.weight, lm_head.weight]
    # whose first name is what everything calls it and whose others are aliases.
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    buffers = list(model.named_buffers(remove_duplicate=False))
    buffer_ids = {id(tensor) for _, tensor in buffers}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *buffers):
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    # Buffers that state dicts leave out (position ids, rotary tables): whoever loads weights must make them anew.
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    described = []
    for key, (first, *aliases) in names.items():
        tensor = tensors[key]
        is_buffer = key in buffer_ids
        cast = dtype if dtype is not None and tensor.is_floating_point() and not is_buffer else tensor.dtype
        described.append(
            Parameter(
                name=first,
                shape=tuple(tensor.shape),
                dtype=dtype_name(cast),
                bytes=tensor.numel() * cast.itemsize,
                requires_grad=tensor.requires_grad,
                aliases=tuple(aliases),
                is_buffer=is_buffer,
                is_persistent=not all(name in transient for name in (first, *aliases)),
            )
        )
    return tuple(described)


def overlapping(model: nn.Module) -> list[tuple[str, str]]:
    """Return pairs of parameters and buffers, each an object of its own, that have memory in common."""
    spans: dict[int, tuple[int, int, str]] = {}
    tensors: list[tuple[str, torch.Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        if tensor.layout is torch.strided and tensor.device.type in ("cpu", "cuda") and tensor.numel():
            axes = zip(tensor.shape, tensor.stride(), strict=True)
            reach = sum((size - 1) * stride for size, stride in axes)
            first = tensor.data_ptr()
            spans[id(tensor)] = first, first + (reach + 1) * tensor.element_size(), name
    ordered = sorted(spans.values())
    return [(one, other) for (_, end, one), (begin, _, other) in itertools.pairwise(ordered) if begin < end]


def check_float_types(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Refuse double precision beside other types, as its user has a model: once it trains, ranks hold their own stages'
    parameters in the job's type and the rest as it was.

    Args:
        dtype: of floating parameters in this job.

    Raises:
        CaptureError: names the first parameter, how many there are, and what to do.
    """
    floating = [(name, p.dtype) for name, p in model.named_parameters() if p.is_floating_point()]
    doubles = [name for name, kind in floating if kind is torch.float64 and dtype not in (None, kind)]
    if len(doubles) < len(floating):  # a whole model in double precision becomes one of the job's
        fix = (
            f"this job has {dtype_name(dtype or torch.float32)} for all of them: convert the model, model.float(), "
            "and let its forward cast by x.to(weight.dtype)"
        )
        _refuse(model, "float64", doubles, fix)


def _check_kinds(model: nn.Module) -> None:
    """Refuse tensors of kinds that stages do not train, before anything is done with them.

    Raises:
        CaptureError: names the first of a kind, how many there are, and what to do.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{type(model).__name__}: {name or 'the model'} is TorchScript, which is not traced; use the module "
                "that it was made of by torch.jit.script or torch.jit.trace"
            )
    own = dict(model.named_parameters())
    everything: dict[str, torch.Tensor] = {**own, **dict(model.named_buffers())}
    # what is only read may be complex, or of whole numbers; it is the steps and their sums that are of real ones
    kinds = {
        "complex": (
            [name for name, p in own.items() if p.requires_grad and p.is_complex()],
            "keep two real numbers for each, nn.Parameter(torch.view_as_real(w)), and read torch.view_as_complex of "
            "them in forward",
        ),
        "sparse": (
            [name for name, tensor in everything.items() if tensor.layout is not torch.strided],
            "register it dense, .to_dense(), and multiply by @; or keep its indices and values as two buffers, for "
            "index_add in forward",
        ),
        "quantized": (
            [name for name, tensor in everything.items() if tensor.is_quantized],
            "keep whole numbers and their scale as two buffers, w.int_repr() and w.q_scale(), and multiply them in "
            "forward",
        ),
    }
    for kind, (names, fix) in kinds.items():
        _refuse(model, kind, names, fix)


def _refuse(model: nn.Module, kind: str, names: Sequence[str], fix: str) -> None:
    if names:
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise CaptureError(
            f"{type(model).__name__}: {names[0]}{others}: {kind} tensors are not trained; {fix}"
        )
