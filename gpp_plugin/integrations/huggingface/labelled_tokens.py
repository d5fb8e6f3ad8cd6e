"""How many labelled tokens a mini-batch has, and whether a model divides its loss by their number when it is told.

HuggingFace's Trainer gives a model ``num_items_in_batch``, the labelled tokens of all batches of an optimizer step: the
model's loss is then the sum over its own tokens divided by that number, and the losses of a step are added up. What is
counted, and which models are told, is decided here as there.

Source: transformers, Trainer.get_batch_samples and Trainer.compute_loss (release 5.23)
Tests: tests/integrations/test_token_mean.py
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gpp_plugin.errors import ConfigError
from gpp_plugin.ir.op_graph import OpGraph

NUM_ITEMS = "num_items_in_batch"
"""What models call the number of labelled tokens."""
LABELS, SHIFTED = "labels", "shift_labels"
UNLABELLED = -100

_REMEDY = 'set graph_pipeline.loss_mean to "units"'


def check_takes_count(model: nn.Module) -> None:
    """Refuse a model that cannot be told how many labelled tokens there are; the test is Trainer's.

    Raises:
        ConfigError: names the model's class.
    """
    parameters = inspect.signature(model.forward).parameters
    accepts = getattr(model, "accepts_loss_kwargs", None)
    if accepts is None:
        accepts = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if not accepts and NUM_ITEMS not in parameters:
        raise ConfigError(
            f'graph_pipeline.loss_mean: "tokens" needs a model whose forward takes {NUM_ITEMS}, and that of '
            f"{type(model).__name__} does not; {_REMEDY}"
        )


def check_divides(model: str, op_graph: OpGraph) -> None:
    """Refuse a captured model that takes the number of labelled tokens and makes nothing of it.

    Raises:
        ConfigError: names the model.
    """
    if not any(NUM_ITEMS in node.inputs for node in op_graph.nodes):
        raise ConfigError(
            f'graph_pipeline.loss_mean: "tokens", but {model} takes {NUM_ITEMS} without dividing its loss by it; '
            f"{_REMEDY}"
        )


def has_labels(batch: Mapping[str, Any]) -> bool:
    """Return whether a batch has labels that are counted."""
    return any(isinstance(batch.get(key), Tensor) for key in (LABELS, SHIFTED))


def check_counted(batch: Mapping[str, Any]) -> None:
    """Refuse a batch whose labelled tokens nobody can count.

    Raises:
        ConfigError: it has no labels.
    """
    if not has_labels(batch):
        raise ConfigError(
            f'graph_pipeline.loss_mean: "tokens" counts {LABELS!r}, which a batch of {sorted(batch)} lacks; give them '
            f"to every batch, or {_REMEDY}"
        )


def count_labelled(model: nn.Module, batches: Sequence[Mapping[str, Any]]) -> Tensor:
    """Return the labelled tokens of batches together, a number in a tensor without axes.

    A decoder that predicts the next token has no use for the first label of each row; labels of an encoder-decoder
    are shifted before it sees them, and each counts.

    Raises:
        ConfigError: none of the labels is a target.
    """
    shifts = _shifts_labels(model)
    total = 0
    for batch in batches:
        if SHIFTED in batch:
            targets = batch[SHIFTED]
        else:
            targets = batch[LABELS][..., 1:] if shifts else batch[LABELS]
        total += int((targets != UNLABELLED).sum())
    if total == 0:
        raise ConfigError(
            f'graph_pipeline.loss_mean: "tokens", and all {LABELS!r} of a mini-batch are {UNLABELLED}: it has no loss; '
            "leave such samples out"
        )
    return torch.tensor(total)


def _shifts_labels(model: nn.Module) -> bool:
    """Return whether the model's loss compares each position with the label of the next one."""
    kind = getattr(model, "loss_type", None)
    if kind is None or getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    return LOSS_MAPPING.get(kind) is ForCausalLMLoss
