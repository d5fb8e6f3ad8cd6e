"""Embedding and cross entropy of a vocabulary that tensor ranks share out.

    tokens [B, T]        each rank looks up those of its own rows, has zeros for the others, and all are summed
    logits [N, V / t]    each rank has its own columns; of each row the ranks agree on
                             the largest logit m                       one maximum
                             sum of exp(logit - m), label's logit      one sum of two numbers
                         loss = log(sum) - (label's logit - m); gradient = exp(logit - m) / sum - [is the label]

Source: Megatron-LM (arXiv 1909.08053), section 3
Tests: tests/runtime/test_shard_graph.py, tests/integrations/test_captured_tensor.py
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpp_plugin.runtime.tensor_parallel.tensor_ranks import RESULT, TensorOperator, TensorRanks

aten = torch.ops.aten


def embedded(first: int) -> TensorOperator:
    """Return an embedding of the tokens of this rank's rows, the first of which is ``first``; zeros for the others."""

    def embed(weight: Tensor, tokens: Tensor, padding: int = -1, *rest: Any) -> Tensor:
        # rows 4 to 7 are rank 1's: token 5 is its row 1; token 2 is looked up at row 0, and what is found set to zero,
        # so that no gradient reaches that row
        place = tokens - first
        is_own = (place >= 0) & (place < weight.shape[0])
        own_padding = padding - first if 0 <= padding - first < weight.shape[0] else -1
        found: Tensor = aten.embedding.default(weight, place.where(is_own, 0), own_padding)
        return found.masked_fill(~is_own.unsqueeze(-1), 0.0)

    return TensorOperator("tensor_embedded", embed)


def cross_entropy(ranks: TensorRanks, first: int) -> TensorOperator:
    """Return a cross entropy of logits of which this rank has the columns from ``first`` on."""

    def loss(
        logits: Tensor,
        target: Tensor,
        weight: None = None,
        reduction: int = 1,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        assert weight is None and not label_smoothing, "such a loss is not shared out"
        found: Tensor = _CrossEntropy.apply(logits, target, ranks, first, ignore_index, reduction == 1)  # type: ignore[no-untyped-call]
        return found

    return TensorOperator("tensor_cross_entropy", loss)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, ranks: TensorRanks, first: int, ignored: int, is_mean: bool
    ) -> Tensor:
        # own [N, V / t], most [N], place [N, 1]: of a label of another rank any column is looked at, and its logit is
        # left out. With 8 classes on 2 ranks and label 5: rank 0 brings 0, rank 1 logit 1 of its own.
        own = logits if logits.dtype == torch.float64 else logits.float()
        most = ranks.sum(own.amax(1), RESULT, op=dist.ReduceOp.MAX)
        shifted = own - most.unsqueeze(1)
        place = target - first
        is_own = (place >= 0) & (place < own.shape[1])
        place = place.where(is_own, 0).unsqueeze(1)
        labelled = shifted.gather(1, place).squeeze(1).where(is_own, 0.0)
        exponentials = shifted.exp()
        total, label = ranks.sum(torch.stack([exponentials.sum(1), labelled]), RESULT)
        is_counted = target != ignored
        losses = (total.log() - label).where(is_counted, 0.0)
        count = is_counted.sum() if is_mean else torch.ones_like(losses.sum())
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(1)), place, is_own, is_counted, count)
        ctx.dtype = logits.dtype
        return (losses.sum() / count).to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        shares, place, is_own, is_counted, count = ctx.saved_tensors
        # shares [N, V / t] are this rank's columns of the softmax; 1 is taken off where the label is
        found = shares.scatter_add(1, place, -is_own.to(shares.dtype).unsqueeze(1))
        scale = (gradient.to(shares.dtype) / count).where(is_counted, 0.0)
        return found.mul_(scale.unsqueeze(1)).to(ctx.dtype), None, None, None, None, None
