"""Plain single-process training over loss units: what every pipelined run must equal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpp_plugin.relative_errors import least_scale, tensor_error

Batch = dict[str, Any]


@dataclass
class ReferenceRun:
    losses: list[float]
    gradients: dict[str, Tensor]  # of the first step


def units_of(batch: Batch, unit: int) -> list[Batch]:
    """Cut a mini-batch into loss units."""
    total = min(v.shape[0] for v in batch.values() if isinstance(v, Tensor))

    def rows(value: Any, first: int) -> Any:
        if isinstance(value, list):  # one dict a sample
            return value[first : first + unit]
        if not isinstance(value, Tensor):
            return value
        per_sample = value.shape[0] // total
        return value[first * per_sample : (first + unit) * per_sample]

    return [{k: rows(v, first) for k, v in batch.items()} for first in range(0, total, unit)]


def loss_of(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    return output["loss"]


def train_reference(
    model: nn.Module,
    batches: Sequence[Batch],
    *,
    unit: int,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    device: str = "cpu",
) -> ReferenceRun:
    """Train a copy of ``model`` one step a batch; the loss is the mean over units of ``unit`` samples."""
    model = copy.deepcopy(model).train().to(device)
    batches = [{k: v.to(device) if isinstance(v, Tensor) else v for k, v in b.items()} for b in batches]
    parameters = [p for p in model.parameters() if p.requires_grad]
    make = make_optimizer or (lambda ps: torch.optim.AdamW(ps, lr=1e-3, weight_decay=0.01))
    optimizer = make(parameters)
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for batch in batches:
        units = units_of(batch, unit)
        optimizer.zero_grad()
        total = 0.0
        for part in units:
            loss = loss_of(model(**part)) / len(units)
            loss.backward()
            total += float(loss.detach())
        if not gradients:
            gradients = {
                name: p.grad.detach().cpu().clone()
                for name, p in model.named_parameters()
                if p.grad is not None
            }
        losses.append(total)
        optimizer.step()
    return ReferenceRun(losses=losses, gradients=gradients)


def gradient_errors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """Return ||g - g_ref|| / max(||g_ref||, 1e-3 x the largest gradient tensor's norm) of each in ``found``.

    What is no number is infinitely far off: `max` would pass over it.
    """
    least = least_scale(wanted.values())
    return {name: tensor_error(gradient, wanted[name], least=least) for name, gradient in found.items()}
