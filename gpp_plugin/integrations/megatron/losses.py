"""Cross entropy over logits that are sharded along the vocabulary.

As megatron-core's `vocab_parallel_cross_entropy` computes it, but for two things: the group is an argument (that one
reads it from `parallel_state`), and gradients keep the logits' precision (the fused one, which takes a group, rounds
them to bfloat16).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def vocab_parallel_cross_entropy(logits: Tensor, target: Tensor, group: Any) -> Tensor:
    """Return the loss of every token.

    Args:
        logits: this rank's share of the vocabulary, in order of ranks, [..., vocabulary / ranks].
        target: token numbers of the whole vocabulary, [...]; a negative one counts as none, its loss means nothing.
        group: the ranks that share the vocabulary.
    """
    from megatron.core.tensor_parallel.mappings import (
        reduce_from_tensor_model_parallel_region as sum_of_ranks,
    )

    logits = logits if logits.dtype == torch.float64 else logits.float()
    with torch.no_grad():
        largest = logits.amax(dim=-1)
        if group.size() > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    logits = logits - largest.unsqueeze(-1)
    own = target - group.rank() * logits.shape[-1]
    is_own = (own >= 0) & (own < logits.shape[-1])
    picked = logits.gather(-1, own.where(is_own, 0).unsqueeze(-1)).squeeze(-1).where(is_own, 0.0)
    both = torch.stack([logits.exp().sum(dim=-1), picked])
    total, picked = sum_of_ranks(both, group).unbind(0)
    return total.log() - picked


def mean_loss(per_token: Tensor, labels: Tensor, loss_mask: Tensor | None) -> Tensor:
    """Return the mean over tokens whose label is not negative and that ``loss_mask`` [as labels], if any, keeps."""
    weights = (labels >= 0).to(per_token.dtype)
    if loss_mask is not None:
        weights = weights * loss_mask
    return (per_token * weights).sum() / weights.sum().clamp(min=1.0)
