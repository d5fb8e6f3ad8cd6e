"""Plain single-process training over loss units: what every pipelined run must equal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpp_plugin.relative_errors import least_scale, tensor_error

Batch = dict[str, Any]
NEAR = 2e-6
"""How far two pieces of code for the same mathematics may be apart, of a tensor's norm."""


@dataclass
class ReferenceRun:
    losses: list[float]
    gradients: dict[str, Tensor]  # of the first step
    model: nn.Module  # trained


def units_of(batch: Batch, unit: int) -> list[Batch]:
    """Cut a mini-batch into loss units."""
    total = min(v.shape[0] for v in batch.values() if isinstance(v, Tensor))

    def rows(value: Any, first: int) -> Any:
        if not isinstance(value, (list, Tensor)):
            return value
        per_sample = 1 if isinstance(value, list) else value.shape[0] // total  # a list has one dict a sample
        return value[first * per_sample : (first + unit) * per_sample]

    return [{k: rows(v, first) for k, v in batch.items()} for first in range(0, total, unit)]


def loss_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output["loss"]


def train_reference(
    model: nn.Module,
    batches: Sequence[Batch | Sequence[Batch]],
    *,
    unit: int = 0,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    device: str = "cpu",
) -> ReferenceRun:
    """Train a copy of ``model`` one step a batch, or a list of units; the loss is the mean over units of ``unit`` samples."""
    model = copy.deepcopy(model).train().to(device)
    steps = [units_of(batch, unit) if isinstance(batch, dict) else batch for batch in batches]
    parameters = [p for p in model.parameters() if p.requires_grad]
    make = make_optimizer or (lambda ps: torch.optim.AdamW(ps, lr=1e-3, weight_decay=0.01))
    optimizer = make(parameters)
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for units in steps:
        optimizer.zero_grad()
        total = 0.0
        for part in units:
            part = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in part.items()}
            loss = loss_of(model(**part)) / len(units)
            loss.backward()
            total += float(loss.detach())
        if not gradients:
            named = ((name, p.grad) for name, p in model.named_parameters())
            gradients = {name: grad.detach().cpu().clone() for name, grad in named if grad is not None}
        losses.append(total)
        optimizer.step()
    return ReferenceRun(losses=losses, gradients=gradients, model=model)


def gradient_errors(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, float]:
    """Return ||g - g_ref|| / max(||g_ref||, 1e-3 x the largest gradient tensor's norm) of each in ``found``.

    What is no number is infinitely far off: `max` would pass over it.
    """
    least = least_scale(wanted.values())
    return {name: tensor_error(gradient, wanted[name], least=least) for name, gradient in found.items()}


def assert_near(
    found: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    *,
    exact: Callable[[], dict[str, Tensor]] | None = None,
    slack: float = 1.0,
) -> float:
    """Hold tensors against those that other code made of the same mathematics; return the largest error.

    A captured graph is other code than eager modules, and one partition than another: kernels round by the shapes,
    strides and addresses that they are given, and each processor has its own. Bits are for the same code: two runs, a
    resume, recompute or swap against none.

    Args:
        exact: makes them in double precision. What is off by more than 2e-6 of its norm must be rounding: what is
            wanted is that far from the truth by itself, and what is found at most four times as far.
        slack: 2e-6 is wider by this.
    """
    assert found.keys() <= wanted.keys()
    errors = gradient_errors(found, wanted)
    inexact = {name: error for name, error in errors.items() if error > slack * NEAR}
    if inexact and exact is not None:
        truth = exact()
        noise, ours = gradient_errors({n: wanted[n] for n in inexact}, truth), gradient_errors(found, truth)
        inexact = {
            n: (error, ours[n], noise[n])
            for n, error in inexact.items()
            if noise[n] <= NEAR or ours[n] > 4 * noise[n]
        }
    assert not inexact, f"apart by their norms (and from the truth, as is what is wanted): {inexact}"
    return max(errors.values(), default=0.0)
