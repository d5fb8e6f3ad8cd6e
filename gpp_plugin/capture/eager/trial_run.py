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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from gpp_plugin.capture.eager.opaque_call import Observed, OpaqueCall, ResultSpec
from gpp_plugin.capture.flop_count import FlopCount
from gpp_plugin.capture.tracing.devices import on_device
from gpp_plugin.capture.tracing.outside import TORCH, watched_generators
from gpp_plugin.errors import RuntimeFailure, first_line

CPU = torch.device("cpu")


def made_up(shape: Sequence[int], dtype: torch.dtype, *, varied: torch.Generator | None = None) -> Tensor:
    """Return a tensor of values that most code takes, where the shape and the type alone are known.

    Floating numbers between 0.5 and 1.5 have logarithms, roots and quotients without overflow; whole numbers and truth
    values are ones: a table has such a row, a mask leaves something.

    Args:
        varied: draws zeros as well as ones, on its device.
    """
    where = varied.device if varied is not None else torch.device("cpu")
    if dtype.is_floating_point or dtype.is_complex:
        # drawn in single precision where the type is less exact, or holds two numbers
        real = torch.float64 if dtype is torch.float64 else torch.float32
        return (torch.rand(tuple(shape), generator=varied, device=where, dtype=real) + 0.5).to(dtype)
    if varied is None:
        return torch.ones(tuple(shape), dtype=dtype)
    if dtype is torch.bool:
        return torch.rand(tuple(shape), generator=varied, device=where) < 0.5
    return torch.randint(0, 2, tuple(shape), generator=varied, device=where, dtype=dtype)


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
                given, named = tree_map(self._copied, on_device((args, kwargs), CPU, of_type=self._of_type))
                with contextlib.suppress(NotImplementedError):  # no kernel for the CPU
                    func(*given, **named)
        return func(*args, **kwargs)

    def _is_checked(self, arguments: Any) -> bool:
        operands = [
            leaf
            for leaf in tree_leaves(arguments)
            if isinstance(leaf, Tensor) and leaf.device.type == self._of_type
        ]
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
    # are counted neither as kept nor as written, and count no operations, being made before.
    given = [
        a.detach().requires_grad_(takes)
        if position < call.num_own
        else a.detach().requires_grad_(takes).clone()
        for position, (a, takes) in enumerate(zip(arguments, requires_grad, strict=True))
    ]
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept.setdefault(
            tensor.untyped_storage()._cdata, tensor
        )  # held, so that no other storage gets its address
        return tensor

    device = arguments[0].device
    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        watched_generators() as drawn,
        undone_writes(dict(enumerate(given))) as writes,
        FlopCount() as costs,
        saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        with writes:
            results, values = call.run(given)
    return Observed(
        results=tuple(
            ResultSpec(
                shape=tuple(r.shape), strides=tuple(r.stride()), dtype=r.dtype, requires_grad=r.requires_grad
            )
            for r in results
        ),
        values=values,
        keeps=_kept(kept, given, results),
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


def _kept(
    kept: dict[int, Tensor], arguments: Sequence[Tensor], results: Sequence[Tensor]
) -> tuple[tuple[str, int], ...]:
    """Return what was saved for backward, as `Observed` says it; storages of no argument and no result in one sum."""
    places: dict[int, tuple[str, int]] = {}
    for kind, tensors in (("result", results), ("argument", arguments)):
        for number, tensor in enumerate(tensors):
            places[tensor.untyped_storage()._cdata] = kind, number
    found = [places[key] for key in kept if key in places]
    inside = sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in places)
    return tuple(found) + ((("inside", inside),) if inside else ())
