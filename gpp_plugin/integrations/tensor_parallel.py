"""Which parameters of a tensor-parallel stage are shards, by the attributes that Megatron's layers give them.

``tensor_model_parallel``   each tensor rank holds a shard of its own: it counts in the norm on every rank
``sequence_parallel``       each tensor rank's gradient is of its part of the sequence: they are summed

A parameter without the first is a duplicate: the same on all tensor ranks, and counted on the first one only.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn


def is_shard(parameter: nn.Parameter) -> bool:
    """Return whether each tensor rank holds its own shard of ``parameter``."""
    return bool(getattr(parameter, "tensor_model_parallel", False))


def duplicates(parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Return the names of those parameters that all tensor ranks hold alike."""
    return [name for name, parameter in parameters.items() if not is_shard(parameter)]


def sequence_parallel(parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Return the names of those parameters whose gradients are to be summed over the tensor ranks."""
    return [name for name, parameter in parameters.items() if getattr(parameter, "sequence_parallel", False)]
