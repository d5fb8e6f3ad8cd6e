"""Which parameters of a tensor-parallel stage are shards, by the attributes that Megatron's layers give them.

``tensor_model_parallel``   each tensor rank holds a shard of its own: it counts in the norm on every rank
``sequence_parallel``       each tensor rank's gradient is of its part of the sequence: they are summed

A parameter without the first is a duplicate: the same on all tensor ranks, and counted on the first one only.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_plugin.errors import ConfigError
from gpp_plugin.integrations.gradients import StageGradients

LARGEST_DIFFERENCE = 1e-2
"""Between a duplicate's gradient norms on two tensor ranks, over the larger one; parts of a sum differ by more."""


def is_shard(parameter: Tensor) -> bool:
    """Return whether each tensor rank holds its own shard of ``parameter``."""
    return bool(getattr(parameter, "tensor_model_parallel", False))


def duplicates(parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Return the names of those parameters that all tensor ranks hold alike."""
    return [name for name, parameter in parameters.items() if not is_shard(parameter)]


def sequence_parallel(parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Return the names of those parameters whose gradients are to be summed over the tensor ranks."""
    return [name for name, parameter in parameters.items() if getattr(parameter, "sequence_parallel", False)]


def check_duplicates(
    gradients: StageGradients, *, stage: str, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Refuse a duplicate whose gradient is not the same on all tensor ranks; collective over them, before a step.

    It would make the copies drift apart and the norm wrong, without a sign of it in the loss.

    Raises:
        ConfigError: names the parameter.
    """
    names = duplicates(gradients.parameters)
    own = gradients.norms(names).to(device)
    bounds = torch.cat([own, -own])
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    most, least = bounds.cpu().chunk(2)
    for name, high, low in zip(names, most.tolist(), (-least).tolist(), strict=True):
        if high - low > LARGEST_DIFFERENCE * high:
            raise ConfigError(
                f"stage {stage!r}: the gradient of {name!r} differs between tensor ranks ({low:.3g}, {high:.3g}), "
                "which hold it alike; set parameter.tensor_model_parallel = True on a shard, and "
                "parameter.sequence_parallel = True where each rank's gradient is a part of the sum"
            )
