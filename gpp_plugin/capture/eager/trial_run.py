"""Runs a call once on real tensors, beside the tracing that came upon it: what it returns, keeps, writes and draws.

Weights are the model's own, or random ones where it is on the meta device. Arguments that are entries of the batch are
those; of others shapes alone are known, so that they are made up as operators are tried (`layout.trials`): floating
ones between 0.5 and 1.5, all others ones.

Source: this project
Tests: tests/capture/test_eager.py
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from gpp_plugin.capture.eager.opaque_call import Observed, OpaqueCall, ResultSpec
from gpp_plugin.capture.flop_count import FlopCount


def made_up(like: Tensor) -> Tensor:
    """Return a tensor of this shape and type, on the CPU, whose values most code takes."""
    if like.dtype.is_floating_point or like.dtype.is_complex:
        return (torch.rand(like.shape) + 0.5).to(like.dtype)
    return torch.ones(like.shape, dtype=like.dtype)


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
    versions = [tensor._version for tensor in given]
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept.setdefault(
            tensor.untyped_storage()._cdata, tensor
        )  # held, so that no other storage gets its address
        return tensor

    with (
        _watched(arguments[0].device) as drawn,
        FlopCount() as costs,
        saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
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
        written=tuple(i for i, t in enumerate(given) if t._version != versions[i]),
        flops=costs.flops,
        is_random=drawn["torch"],
        draws_outside=drawn["outside"],
    )


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


@contextmanager
def _watched(device: torch.device) -> Any:
    """Give back the states of the generators, and tell afterwards which of them were drawn from."""
    drawn = {"torch": False, "outside": False}
    outside = random.getstate(), numpy.random.get_state()
    on_cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=on_cuda):
        before = torch.get_rng_state()
        try:
            yield drawn
        finally:
            drawn["torch"] = not torch.equal(before, torch.get_rng_state())
            after = numpy.random.get_state()
            is_same = all(numpy.array_equal(a, b) for a, b in zip(outside[1], after, strict=True))
            drawn["outside"] = random.getstate() != outside[0] or not is_same
            random.setstate(outside[0])
            numpy.random.set_state(outside[1])
