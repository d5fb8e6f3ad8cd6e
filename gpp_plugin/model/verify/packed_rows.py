"""Does a model keep samples apart that lie in one row? Found out by running the last of them alone.

Samples are told apart by ``position_ids`` that begin anew (`gpp_plugin.data.flatten`). A model that makes nothing of
that attends from each sample to those before it, without a word: the loss falls, and is that of another model.

    row      a b c d e     positions 0 1 2 0 1
    alone          d e     positions       0 1        the same outputs for d and e, if the model takes such rows

Source: this project
Tests: tests/stage_graph/test_packed_rows.py
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gpp_plugin.capture.tracing.outside import hidden_process_group
from gpp_plugin.capture.tracing.torch_export import Call
from gpp_plugin.runtime.random_streams import kept_streams

POSITIONS, MASK, LABELS, LOGITS, LOSS = "position_ids", "attention_mask", "labels", "logits", "loss"
LARGEST_ERROR = 1e-4
"""Of outputs by their norm: above rounding of other lengths, and far below what attending to others changes."""

_MASKED = 1e18
"""Logits of at least this size are masked ones, -inf or the least number of a type: their squares have no sum."""


def last_sample(arguments: Mapping[str, Any]) -> int | None:
    """Return where the last sample of the first row begins; None where rows are not known to hold several samples."""
    positions = arguments.get(POSITIONS)
    if not isinstance(positions, Tensor) or positions.ndim != 2 or positions.is_floating_point():
        return None
    if arguments.get(MASK) is not None:  # positions beside a mask are those of padded rows
        return None
    begins = (positions[0].diff() < 0).nonzero().flatten()
    return int(begins[-1]) + 1 if len(begins) else None


def mixes_packed_rows(module: nn.Module, arguments: Mapping[str, Any], *, call: Call) -> float | None:
    """Return by how much a sample's outputs differ between a row of several samples and a row of its own.

    None where rows hold one sample each, or nothing can be compared.

    Args:
        module: that may be run without harm (`make_twin`).
        call: how it is called.
    """
    begin = last_sample(arguments)
    if begin is None:
        return None
    length = arguments[POSITIONS].shape[1]
    row = {key: _first_row(value, begin=0, length=length) for key, value in arguments.items()}
    if isinstance(row.get(LABELS), Tensor):  # of the last sample alone, so that losses are of the same tokens
        row[LABELS][:, : begin + 1] = -100
    alone = {key: _first_row(value, begin=begin, length=length) for key, value in row.items()}
    was_training = module.training
    module.eval()  # no dropout
    try:
        with torch.no_grad(), hidden_process_group(), kept_streams(arguments[POSITIONS].device):
            packed, single = (_compared(call(module, given)) for given in (row, alone))
    finally:
        module.train(was_training)
    if packed is None or single is None:
        return None
    if packed.ndim > 1 and packed.shape[1] == length:
        packed = packed[:, begin:]
    if packed.shape != single.shape:
        return None
    is_number = single.abs() < _MASKED
    if not torch.equal(packed.abs() < _MASKED, is_number):
        return math.inf
    packed, single = packed[is_number], single[is_number]
    return float((packed - single).norm() / single.norm().clamp_min(1e-30))


def _first_row(value: Any, *, begin: int, length: int) -> Any:
    """Return the tokens from ``begin`` on of the first row, of what has a value a token; all else as it is."""
    if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[1] != length:
        return value
    return value[:1, begin:].detach().clone()


def _compared(returned: Any) -> Tensor | None:
    """Return the logits of what a model returned, or its loss."""
    for name in (LOGITS, LOSS):
        value = returned.get(name) if isinstance(returned, Mapping) else getattr(returned, name, None)
        if isinstance(value, Tensor):
            return value.float()
    return None
