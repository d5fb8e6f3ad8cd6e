"""Weights of a chunk from those of a whole model at tensor size 1, and back.

Whole states have megatron-core's names of the whole model (``decoder.layers.5.mlp.linear_fc1.weight``), whatever
chunk a layer is in. A sharded tensor is cut along ``partition_dim`` into ``tensor * partition_stride`` pieces, of which
rank t has the pieces t, t + tensor, ...: the stride is 2 where gate and up projection of an MLP lie one behind the
other in a tensor.

Source: Megatron-LM (arXiv 1909.08053)
Tests: tests/integrations/test_megatron.py, tests/integrations/test_megatron_training.py
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_plugin.engine.checkpoints.saved_tensors import cut_shard, join_shards
from gpp_plugin.engine.stage_groups import is_shard
from gpp_plugin.errors import CheckpointError
from gpp_plugin.model.graph.stage_context import StageContext

_LAYER = re.compile(r"^((?:decoder\.)?layers\.)(\d+)\.")
_WORDS, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def full_name(module: nn.Module, name: str) -> str:
    """Return the whole model's name of a chunk's parameter or buffer."""
    first: int = getattr(module, "first_layer", 0)
    return _LAYER.sub(lambda match: f"{match[1]}{int(match[2]) + first}.", name)


def load_full_state(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy this rank's shards of a whole model's weights into its chunk.

    Args:
        module: what a factory of `gpp_plugin.integrations.megatron` built.
        state: weights of the whole model at tensor size 1; others than the chunk's are left alone.

    Raises:
        CheckpointError: a weight is missing or has another shape.
    """
    context = _context_of(module)
    with torch.no_grad():
        for name, own in _tensors(module):
            whole = state.get(full_name(module, name))
            # A tied output layer is stored once, under the name of the embedding.
            if (
                whole is None
                and name == _OUTPUT
                and getattr(module, "share_embeddings_and_output_weights", False)
            ):
                whole = state.get(_WORDS)
            if whole is None:
                raise CheckpointError(
                    f"stage {context.stage!r}: the whole model's weights have no {full_name(module, name)!r}; name "
                    "them as megatron-core does"
                )
            share = shard_of(whole, own, rank=context.tensor_rank, size=context.tensor_size)
            if share.shape != own.shape:
                raise CheckpointError(
                    f"stage {context.stage!r}: {full_name(module, name)!r} is {tuple(whole.shape)}, a share of "
                    f"{tuple(share.shape)}, and the stage has {tuple(own.shape)}; build both of one config"
                )
            own.copy_(share)


def gather_full_state(module: nn.Module, values: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return a chunk's weights as a whole model has them, on the CPU; empty but on tensor rank 0.

    Collective over the tensor group.

    Args:
        module: what a factory of `gpp_plugin.integrations.megatron` built; a stage's is ``engine.module.given``.
        values: other tensors of the parameters' shapes by the chunk's names, such as gradients, in place of weights.
    """
    context = _context_of(module)
    found: dict[str, Tensor] = {}
    for name, own in _tensors(module):
        if values is not None and name not in values:
            continue
        value = (own if values is None else values[name]).detach().contiguous()
        whole = _gather(value, own, context)
        if context.tensor_rank == 0:
            found[full_name(module, name)] = whole.to("cpu", copy=True)
    return found


def shard_of(whole: Tensor, parameter: Tensor, *, rank: int, size: int) -> Tensor:
    """Return the part of ``whole`` that ``rank`` of ``size`` ranks has; all of it where they have duplicates."""
    if size == 1 or not is_shard(parameter):
        return whole
    return cut_shard(whole, rank, size, axis=_axis(parameter), stride=_stride(parameter))


def unshard(shares: list[Tensor], parameter: Tensor) -> Tensor:
    """Return the whole of the shares of all ranks, in order; the reverse of `shard_of`."""
    return join_shards(shares, axis=_axis(parameter), stride=_stride(parameter))


def _context_of(module: nn.Module) -> StageContext:
    context = getattr(module, "context", None)
    if not isinstance(context, StageContext):
        raise TypeError(
            f"{type(module).__name__} is no chunk that gpt_stage or transformer_block_stage built"
        )
    return context


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return parameters and saved buffers; Megatron's extra states hold nothing."""
    return [
        (name, value)
        for name, value in module.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor)
    ]


def _gather(value: Tensor, parameter: Tensor, context: StageContext) -> Tensor:
    if context.tensor_size == 1 or not is_shard(parameter):
        return value
    assert context.tensor_group is not None
    shares = [torch.empty_like(value) for _ in range(context.tensor_size)]
    dist.all_gather(shares, value, group=context.tensor_group)
    return unshard(shares, parameter)


def _axis(parameter: Any) -> int:
    return int(parameter.partition_dim)


def _stride(parameter: Any) -> int:
    return int(parameter.partition_stride)
