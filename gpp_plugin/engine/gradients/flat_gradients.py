"""Gradients of one type in one buffer that lasts as long as the job: autograd adds to its views.

    flat    | flags | pad | embed | layer.weight | layer.bias | ... |        views of it are ``parameter.grad``

Where gradients are added up in the parameters' own type, autograd writes into the views itself. In another type (bf16
parameters, fp32 sums) it makes ``parameter.grad`` anew, and `GradientBuffer.accumulate` adds all of them in one call.
So the sums of a stage's ranks are made where gradients lie, and a mini-batch begins with one operation a buffer.

Optimizers distinguish a gradient of zeros from none, so each parameter records whether a loss has reached it. The host
needs no value of the device: each view has a version counter of its own (as ``Tensor.data`` has; views that
autograd tracks would share the buffer's), which autograd raises when it adds to the view.

Source: this project
Tests: tests/integrations/test_gradients.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_plugin.runtime.ranks.waiting import all_reduce

SUMMED = "the sum of the gradients of a stage's ranks"
"""What ranks wait for in it, in errors."""


@dataclass(slots=True, eq=False)
class HeldGradient:
    """The gradient of one parameter in a buffer.

    Args:
        view: the gradient, in the parameter's shape and strides.
        version: of ``view`` when the mini-batch began.
        is_reached: a loss of this mini-batch reached the parameter, on this rank or, as far as is known, another.
    """

    parameter: nn.Parameter
    view: Tensor
    version: int
    is_reached: bool = False


class GradientBuffer:
    """The gradients of some parameters, one after the other.

    Args:
        places: by name, the parameter and the first element of its gradient in the buffer.
        num_elements: of the buffer.
        dtype: in which gradients are added up.
    """

    def __init__(
        self,
        places: Mapping[str, tuple[nn.Parameter, int]],
        *,
        num_elements: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.flat = torch.zeros(num_elements, dtype=dtype, device=device)
        self.held: dict[str, HeldGradient] = {}
        for name, (parameter, first) in places.items():
            view = _view_like(parameter, self.flat, first)
            self.held[name] = HeldGradient(parameter, view, view._version)
        everything = self.held.values()
        self._own = [held for held in everything if held.parameter.dtype == dtype]
        self._other = [held for held in everything if held.parameter.dtype != dtype]
        self.clear()

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all gradients held now: the sums, and what autograd left beside them."""
        beside = [held.parameter.grad for held in self.held.values()]
        return sum(held.view.nbytes for held in self.held.values()) + sum(
            gradient.nbytes
            for gradient, held in zip(beside, self.held.values(), strict=True)
            if gradient is not None and gradient is not held.view
        )

    def is_empty(self) -> bool:
        """Return whether no loss has reached any parameter."""
        return not any(map(_has_gradient, self.held.values()))

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add what autograd left beside the sums, where these are in another type; one call for all parameters."""
        self.add(self._other)

    @torch.no_grad()
    def add(self, some: Sequence[HeldGradient]) -> None:
        """Add to the sums of ``some`` what autograd left beside them."""
        sums, found = [], []
        for held in some:
            gradient = held.parameter.grad
            if gradient is not None and gradient is not held.view:
                sums.append(held.view)
                found.append(gradient)
                held.parameter.grad = None
                held.is_reached = True
        if sums:
            torch._foreach_add_(sums, found)

    @torch.no_grad()
    def take_up(self) -> None:
        """Learn which parameters the losses on this rank have reached; take what somebody put in place of a view."""
        # A parameter's `grad` is the truth: a user, or an optimizer's zero_grad(), may have put another tensor there,
        # or none, and autograd continues from that.
        self.accumulate()
        for held in self._own:
            gradient = held.parameter.grad
            if gradient is held.view:
                held.is_reached |= held.view._version != held.version
                continue
            held.is_reached = gradient is not None
            if gradient is None:
                held.view.zero_()
            else:
                held.view.copy_(gradient)
            held.parameter.grad = held.view

    @torch.no_grad()
    def clear(self) -> None:
        """Begin a mini-batch: all sums are zero, and no parameter is reached."""
        self.flat.zero_()
        for held in self._own:
            if held.parameter.grad is not held.view:
                held.parameter.grad = held.view
            held.version = held.view._version
            held.is_reached = False
        for held in self._other:
            held.parameter.grad = None
            held.is_reached = False


def _has_gradient(held: HeldGradient) -> bool:
    gradient = held.parameter.grad
    if gradient is None:
        return held.is_reached
    return held.is_reached or gradient is not held.view or held.view._version != held.version


def _view_like(parameter: nn.Parameter, flat: Tensor, first: int) -> Tensor:
    """Return the elements from ``first`` on in the parameter's shape, and in its strides if these leave no gaps."""
    strides = torch.empty_like(parameter, device="meta").stride()
    # `data`: a version counter of its own
    return flat.as_strided(parameter.shape, strides, first).data


@dataclass(frozen=True, slots=True, kw_only=True)
class Summand:
    """Gradients that go into a sum over ranks together.

    Args:
        brought: what this rank adds; a tensor of its own, that the sum may be made in.
        take: takes in the sum.
    """

    brought: Tensor
    take: Callable[[Tensor], None]


@torch.no_grad()
def sum_over(group: dist.ProcessGroup | int, brought: Sequence[Iterable[Summand]]) -> None:
    """Sum what stages of this rank bring over the ranks of ``group``; collective over them.

    Args:
        brought: by stage, summands of the same gradients in the same order. A group has a rank once, however many of
            the stages it holds: they are added up here before they are sent, and each takes in the sum.
    """
    for summands in zip(*brought, strict=True):
        total = summands[0].brought
        for other in summands[1:]:
            total.add_(other.brought)
        all_reduce(total, group=group, what="the sum of tied gradients")
        for summand in summands:
            summand.take(total)
