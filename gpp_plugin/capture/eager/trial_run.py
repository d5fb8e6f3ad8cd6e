"""Runs a call once on real tensors, beside the tracing that came upon it: what it returns, keeps, writes and draws.

Weights are the model's own, or random ones where it is on the meta device. Arguments that are entries of the batch are
those; of others shapes alone are known, so that they are made up.

Made-up values may be wrong ones: an index beyond its table is an exception on the CPU, and on a GPU an assertion of
the device, after which every call of the process fails. So calls are tried on the CPU. Code that has kernels for
another device alone is tried there, each operator on the CPU first (`CheckedOnCpu`).

Source: this project
Tests: tests/capture/test_eager.py
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from gpp_plugin.capture.eager.opaque_call import Observed, OpaqueCall, ResultSpec
from gpp_plugin.capture.tracing.clean import FlopCount, on_device
from gpp_plugin.capture.tracing.outside import TORCH, watched_generators
from gpp_plugin.capture.tracing.symbolic_sizes import tensors_in
from gpp_plugin.errors import CaptureError, ConfigError, RuntimeFailure, first_line

# Which modules run as they are: those that the user names by path, and those whose tracing fails.

MAX_ATTEMPTS = 12
"""How often a model is traced anew with one more kind of module as it is."""


MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Tables of a module that hold what users register on it."""
HOOK_OPTIONS = (
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
"""Tables that say how hooks are called."""
GLOBAL_HOOKS: Mapping[str, Any] = {
    f"_global{name}": getattr(nn.modules.module, f"_global{name}") for name in MODULE_HOOKS
}
"""Tables of the hooks that torch calls for every module."""
TRACED_HOOKS = ("torch", "transformers", "peft", "accelerate", "deepspeed", "gpp_plugin")
"""Packages whose own hooks compute (weight norms, inputs that take a gradient), which a trace has as operators."""


READS, DEPENDS = "the Python code depends on tensor values", "depends on values"
TAKEN = "taken from a tensor"
"""Words in errors of an export that lacks values (`lacks_values`)."""


class Untraceable(CaptureError):
    """Tracing failed inside a module, or a function, which may run as it is instead.

    Args:
        culprit: its path; "" where that is the whole model.
        lacks_records: it reads a list of dicts, which no values of the batch help with.
        is_of_state: it keeps for the next forward what only Python has.
    """

    def __init__(
        self, message: str, culprit: str, *, lacks_records: bool = False, is_of_state: bool = False
    ) -> None:
        super().__init__(message)
        self.culprit = culprit
        self.lacks_records = lacks_records
        self.is_of_state = is_of_state


def lacks_values(error: CaptureError) -> bool:
    """Return whether a capture failed for want of values."""
    return any(words in str(error) for words in (READS, DEPENDS, TAKEN))


def find_eager_modules(model: nn.Module, eager: Iterable[str]) -> tuple[str, ...]:
    """Return the modules that paths name; ``*`` in one stands for any one part of a path.

    A path may end with a function that is an attribute of a module, such as a HuggingFace model's ``loss_function``.

    Raises:
        ConfigError: a path names nothing of the model's.
    """
    modules = dict(model.named_modules())
    found: dict[str, None] = {}
    for wanted in eager:
        pattern = re.compile(re.escape(wanted).replace(r"\*", r"[^.]+"))
        matches = [path for path in modules if path and pattern.fullmatch(path)]
        owner, _, name = wanted.rpartition(".")
        if not matches and owner in modules and callable(getattr(modules[owner], name, None)):
            matches = [wanted]
        if not matches:
            near = difflib.get_close_matches(wanted, [p for p in modules if p], n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"graph_pipeline.eager: {wanted!r} is no module of {type(model).__name__}{hint}"
            )
        found.update(dict.fromkeys(matches))
    return without_inner(found)


def has_hooks(module: nn.Module) -> bool:
    """Return whether a user has registered hooks on a module, forward or backward: they see what it computes."""
    for hook in [hook for name in MODULE_HOOKS for hook in getattr(module, name).values()]:
        while isinstance(hook, functools.partial):
            hook = hook.func
        origin = str(getattr(hook, "__module__", None) or type(hook).__module__)
        if origin.partition(".")[0] not in TRACED_HOOKS:
            return True
    return False


def with_culprit(model: nn.Module, whole: Sequence[str], culprit: str) -> tuple[str, ...] | None:
    """Return the modules to run as they are after tracing failed in one more; None where nothing is left to try.

    The modules of its class in its place in the other layers fail as it did: ``layers.0.router`` stands for
    ``layers.*.router``. Where one of its class failed in another place before, all modules of the class do.
    """
    if culprit in whole:
        return None
    if not culprit:
        return ("",)
    modules = dict(model.named_modules())
    alike = [culprit]
    if culprit in modules:
        kind, place = type(modules[culprit]), _place(culprit)
        is_known = any(type(modules.get(path)) is kind for path in whole)
        alike = [
            path
            for path, module in modules.items()
            if type(module) is kind and (is_known or _place(path) == place)
        ]
    return without_inner((*whole, *alike))


def without_inner(paths: Iterable[str]) -> tuple[str, ...]:
    """Return paths once each, without those inside another one."""
    unique = list(dict.fromkeys(paths))
    return tuple(p for p in unique if not any(p != other and is_within(p, other) for other in unique))


def is_within(name: str, path: str) -> bool:
    """Return whether a name is that of a module, or of something in it; all are in the model itself, "".

    >>> is_within("tower.norm.weight", "tower"), is_within("towers.norm", "tower")
    (True, False)
    """
    return path in ("", name) or name.startswith(f"{path}.")


def _place(path: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


CPU = torch.device("cpu")


def made_up(shape: Sequence[int], dtype: torch.dtype, *, varied: torch.Generator | None = None) -> Tensor:
    """Return a tensor of values that most code takes, where the shape and the type alone are known.

    Floating numbers between 0.5 and 1.5 have logarithms, roots and quotients without overflow; whole numbers and truth
    values are ones: a table has such a row, a mask leaves something.

    Args:
        varied: draws zeros as well as ones, on its device.
    """
    shape = tuple(shape)
    drawn: Any = {"generator": varied, "device": varied.device if varied is not None else CPU}
    if dtype.is_floating_point or dtype.is_complex:
        # drawn in single precision where the type is less exact, or holds two numbers
        real = torch.float64 if dtype is torch.float64 else torch.float32
        return (torch.rand(shape, dtype=real, **drawn) + 0.5).to(dtype)
    if varied is None:
        return torch.ones(shape, dtype=dtype)
    return (
        torch.rand(shape, **drawn) < 0.5
        if dtype is torch.bool
        else torch.randint(0, 2, shape, dtype=dtype, **drawn)
    )


class CheckedOnCpu(TorchDispatchMode):
    """Runs each operator on copies on the CPU before it runs on the device.

    What the CPU refuses is raised and never reaches the device; what has no kernel for the CPU runs on the device
    alone.

    Args:
        of_type: the type of the device.
        indices_only: check only operators with a whole-number operand, which may be an index.
    """

    def __init__(self, of_type: str, *, indices_only: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._of_type, self._indices_only = of_type, indices_only

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Check and run one operator."""
        kwargs = dict(kwargs or {})
        if self._is_checked((args, kwargs)):
            # Copies: an operator may write into its operands, and runs once more. No mode sees the check (it would
            # count its operations), and generators are as before it.
            with _disable_current_modes(), torch.random.fork_rng(devices=[]):
                copies, named = tree_map(self._copied, on_device((args, kwargs), CPU, of_type=self._of_type))
                with contextlib.suppress(NotImplementedError):  # no kernel for the CPU
                    func(*copies, **named)
        return func(*args, **kwargs)

    def _is_checked(self, arguments: Any) -> bool:
        operands = [tensor for tensor in tensors_in(arguments) if tensor.device.type == self._of_type]
        if not self._indices_only:
            return bool(operands)
        return any(not (t.is_floating_point() or t.is_complex() or t.dtype is torch.bool) for t in operands)

    @staticmethod
    def _copied(leaf: Any) -> Any:
        return leaf.detach().to(CPU, copy=True) if isinstance(leaf, Tensor) else leaf


def refuse_lost_device(error: BaseException) -> None:
    """Raise where an exception says that the device is lost: it is no answer, as every later call fails as well.

    Raises:
        RuntimeFailure: it does.
    """
    lost = error if isinstance(error, torch.AcceleratorError) else error.__cause__
    if isinstance(lost, torch.AcceleratorError):
        raise RuntimeFailure(
            f"the device failed, and nothing runs on it any more: {first_line(lost)}; run again with "
            "CUDA_LAUNCH_BLOCKING=1, which names the operator, or on the CPU, which names the value"
        ) from lost


def observe(call: OpaqueCall, arguments: Sequence[Tensor], requires_grad: Sequence[bool]) -> Observed:
    """Run the call and return what was seen of it; the random generators are as before afterwards.

    Args:
        arguments: real tensors, as its node has them; written into where the code writes.
    """
    # Clones: code may write into an argument, and autograd refuses that of a tensor that only takes a gradient. They
    # are counted neither as saved nor as written, and count no operations, being made before.
    leaves = [a.detach().requires_grad_(takes) for a, takes in zip(arguments, requires_grad, strict=True)]
    operands = [*leaves[: call.num_own], *(leaf.clone() for leaf in leaves[call.num_own :])]
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved.setdefault(
            tensor.untyped_storage()._cdata, tensor
        )  # held, so that no other storage gets its address
        return tensor

    device = arguments[0].device
    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        watched_generators() as drawn,
        undone_writes(dict(enumerate(operands))) as writes,
        FlopCount() as costs,
        saved_tensors_hooks(pack, lambda tensor: tensor),
        writes,
    ):
        results, values = call.run(operands)
    # of tensors saved for backward whose they are; storages of no argument and no result in one sum
    places = {
        tensor.untyped_storage()._cdata: (kind, number)
        for kind, tensors in (("result", results), ("argument", operands))
        for number, tensor in enumerate(tensors)
    }
    keeps = tuple(places[key] for key in saved if key in places)
    inside = sum(t.untyped_storage().nbytes() for key, t in saved.items() if key not in places)
    return Observed(
        results=tuple(
            ResultSpec(
                shape=tuple(r.shape), strides=tuple(r.stride()), dtype=r.dtype, requires_grad=r.requires_grad
            )
            for r in results
        ),
        values=values,
        keeps=(*keeps, ("inside", inside)) if inside else keeps,
        written=tuple(sorted(writes.before)),
        flops=costs.flops,
        is_random=TORCH in drawn,
        draws_outside=bool(drawn.keys() - {TORCH}),
    )


class NotedWrites(TorchDispatchMode):
    """Notes which tensors are written into, through views and `.data` as well, with what they held before."""

    def __init__(self, tensors: Mapping[Any, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._of = {t.untyped_storage().data_ptr(): (key, t) for key, t in tensors.items() if _has_memory(t)}
        self.before: dict[Any, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator."""
        if func._schema.is_mutable:
            for leaf in tree_leaves((args, kwargs)):
                known = self._of.get(leaf.untyped_storage().data_ptr()) if _has_memory(leaf) else None
                if known is not None and known[0] not in self.before:
                    self.before[known[0]] = known[1], known[1].clone()
        return func(*args, **(kwargs or {}))

    def values(self) -> dict[Any, Tensor]:
        """Return what those hold now that were changed."""
        return {key: t.clone() for key, (t, old) in self.before.items() if not torch.equal(t, old)}


def _has_memory(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and value.numel() > 0


@contextlib.contextmanager
def undone_writes(tensors: Mapping[Any, Tensor]) -> Iterator[NotedWrites]:
    """Put back what is written into tensors while the mode that this yields is on: others have their memory too."""
    writes = NotedWrites({key: tensor.detach() for key, tensor in tensors.items()})
    try:
        yield writes
    finally:
        for tensor, old in writes.before.values():
            tensor.copy_(old)
