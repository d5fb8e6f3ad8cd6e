"""Runs a call once on real tensors, beside the tracing that came upon it: what it returns, keeps, writes and draws.

Weights are the model's own, or random ones where it is on the meta device. Arguments that are entries of the batch are
those; of others shapes alone are known, so that they are made up.

Source: this project
Tests: tests/capture/test_eager.py
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gpp_plugin.capture.eager.opaque_call import Observed, OpaqueCall, ResultSpec
from gpp_plugin.capture.flop_count import FlopCount
from gpp_plugin.capture.tracing.outside import TORCH, watched_generators


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
            for leaf in pytree.tree_leaves((args, kwargs)):
                known = self._of.get(leaf.untyped_storage().data_ptr()) if _has_memory(leaf) else None
                if known is not None and known[0] not in self.before:
                    self.before[known[0]] = known[1], known[1].clone()
        return func(*args, **(kwargs or {}))

    def values(self) -> dict[Any, Tensor]:
        """Return what those hold now that were changed."""
        return {key: t.clone() for key, (t, old) in self.before.items() if not torch.equal(t, old)}


def _has_memory(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and value.numel() > 0


@contextmanager
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
