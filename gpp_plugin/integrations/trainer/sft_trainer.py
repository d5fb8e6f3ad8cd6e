"""`GraphPipelineSFTTrainer`: TRL's trainer for supervised fine-tuning, over a graph of pipeline stages.

Datasets, templates, packing, masks and adapters are SFTTrainer's own. Its loss is not: TRL computes it from hidden
states in a forward of its own making, beside the model. Here the stages compute the loss that the model returns, which
is the same number.

    SFTTrainer                                here
    a fused head, log-probabilities, `nll`    the model's own loss, divided by the labelled tokens of the step
    `dft`, label smoothing                    part of the captured forward
    packed rows, and what kernels read        position ids alone: masks are made of them
    entropy, token accuracy                   of evaluations, on the stage that has the logits
    gradient checkpointing (TRL's default)    `memory.recompute` of the block

Source: trl, SFTTrainer (release 1.16); DFT (Wu et al., 2025, arXiv 2508.05629)
Tests: tests/integrations/test_sft_trainer.py
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, Trainer
from trl import SFTConfig, SFTTrainer

from gpp_plugin.errors import ConfigError
from gpp_plugin.integrations.huggingface.model_inputs import (
    UNLABELLED,
    add_output,
    base_model,
    count_labelled,
    divides_by_items,
)
from gpp_plugin.integrations.trainer.trainer import GraphPipelineTrainer
from gpp_plugin.integrations.trainer.trainer_config import Evaluated

logger = logging.getLogger(__name__)

_OF_KERNELS = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"})
"""Where samples of a packed row begin, for kernels that take no mask; position ids say the same."""
_MASKED = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Kinds of layers that separate the samples of a packed row by a mask."""
_METRICS = "token_metrics"
"""The output that has, for each row, the sums of entropies and of hits over its labelled tokens, and their number."""


class GraphPipelineSFTTrainer(GraphPipelineTrainer, SFTTrainer):
    """Trains as TRL's SFTTrainer does, on texts or images and texts, with the model on a graph of pipeline stages.

    Args:
        prediction_outputs: as of `GraphPipelineTrainer`; None: the logits, as of SFTTrainer.
        passed: as of `GraphPipelineTrainer` and of SFTTrainer (``peft_config``, ``formatting_func``, ...); the
            arguments are an ``SFTConfig``.

    Raises:
        ConfigError: an argument requests what a pipeline cannot do; before the dataset is tokenised.
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *positional: Any,
        prediction_outputs: Sequence[str] | None = None,
        **passed: Any,
    ) -> None:
        if not isinstance(args, SFTConfig):
            raise ConfigError(
                f"GraphPipelineSFTTrainer: args is a {type(args).__name__}; pass trl.SFTConfig(...)"
            )
        # TRL replaces the forward of the object
        before = {} if model is None or isinstance(model, str) else vars(base_model(model))
        forward = before.get("forward")
        names = ("logits",) if prediction_outputs is None else prediction_outputs
        super().__init__(model, args, *positional, prediction_outputs=names, **passed)
        base = base_model(self.model)
        vars(base).pop("forward", None)
        if forward is not None:
            base.forward = forward
        logger.warning(
            "entropy and mean_token_accuracy are logged for evaluations only: in training stages return the loss alone"
        )

    def _check_calls(self, model: Any, own: Any, *positional: Any, **passed: Any) -> None:
        super()._check_calls(model, own, *positional, **passed)
        check_sft_arguments(model, own, passed.get("quantization_config"))
        own.gradient_checkpointing_kwargs = None  # the block recomputes
        if isinstance(model, str):  # "auto" would put all of it on one device
            own.model_init_kwargs = {**(own.model_init_kwargs or {}), "device_map": None}

    # ---- batches and losses --------------------------------------------------------------------------------

    def _entries(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return a batch without what kernels of packed rows read; stages make masks of position ids."""
        return {key: value for key, value in batch.items() if key not in _OF_KERNELS}

    def _sample(self, loader: Any) -> Mapping[str, Any]:
        return self._entries(super()._sample(loader))

    def _units_of(self, loader: Any, sizes: Mapping[str, Any]) -> int | None:
        """Return the loss units of a step: a batch without padding is one row, whose samples are not counted."""
        if self.padding_free:
            return int(self.args.gradient_accumulation_steps)
        return super()._units_of(loader, sizes)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the model's own loss, which stages train: a subclass may return it too."""
        return Trainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)

    def _loss_function(self, sample: Mapping[str, Any]) -> Callable[..., Tensor] | None:
        """Return TRL's loss where the model does not return it."""
        if self.compute_loss_func is not None:
            return self.compute_loss_func
        if self.args.loss_type == "dft":
            return functools.partial(token_loss, focuses=True)
        if self.label_smoother is not None:
            return functools.partial(self.label_smoother, shift_labels=True)
        if self.model_accepts_loss_kwargs and not divides_by_items(self.model, sample):
            return functools.partial(token_loss, focuses=False)
        return None

    def _settle_loss(self, sample: Mapping[str, Any], *, is_training: bool) -> bool:
        divides = super()._settle_loss(sample, is_training=is_training)
        add_output(self.model, _METRICS, token_metrics)
        return divides

    # ---- metrics -------------------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Count the tokens of a batch as TRL does, and train as `GraphPipelineTrainer`."""
        mask = inputs.get("attention_mask")
        self._total_train_tokens += int(inputs["input_ids"].numel() if mask is None else mask.sum())
        return super().training_step(model, inputs, num_items_in_batch)

    def _eval_together(
        self, batches: Sequence[Mapping[str, Any]], names: tuple[str, ...], has_loss: bool
    ) -> list[Evaluated]:
        """Return loss and outputs of each batch; note entropy and accuracy of its labelled tokens."""
        if not has_loss or not hasattr(self._engine, "eval_batches"):
            return super()._eval_together(batches, names, has_loss)
        found: list[Evaluated] = []
        answers = super()._eval_together(batches, (*names, _METRICS), has_loss)
        for batch, (loss, (*values, rows)) in zip(batches, answers, strict=True):
            entropy, hits, count = rows.double().sum(0).tolist()
            if loss is not None and count and self._engine.config.loss_mean == "tokens":
                # Trainer counts the first label of a decoder that names no loss (GPT-2), TRL does not in evaluation
                loss = loss * (int(count_labelled(self.model, [batch])) / count)
            found.append((loss, tuple(values)))
            self._metrics["eval"]["entropy"].append(entropy / count if count else 0.0)
            self._metrics["eval"]["mean_token_accuracy"].append(hits / count if count else 0.0)
        return found

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log with the means of what was noted since the last time, under TRL's names."""
        is_training = "loss" in logs or "train_runtime" in logs
        metrics, prefix = self._metrics["train" if is_training else "eval"], "" if is_training else "eval_"
        logs.update({f"{prefix}{key}": sum(values) / len(values) for key, values in metrics.items()})
        if "train_runtime" not in logs:
            logs[f"{prefix}num_tokens"] = self._total_train_tokens
        metrics.clear()
        Trainer.log(self, logs, start_time)


GraphPipelineSFTTrainer._own_losses = (GraphPipelineSFTTrainer.compute_loss,)


def check_sft_arguments(model: Any, args: Any, quantization: Any = None) -> None:
    """Refuse what a pipeline cannot do of an ``SFTConfig`` and a model.

    Args:
        model: an object, or a name to load it by.
        quantization: the ``quantization_config`` of the trainer.

    Raises:
        ConfigError: names the argument, and what to do instead.
    """
    who = "GraphPipelineSFTTrainer"
    init: Mapping[str, Any] = args.model_init_kwargs or {}
    if args.activation_offloading:
        raise ConfigError(
            f'{who}: activation_offloading is not possible with stages; set "memory": {{"swap": "auto"}} in the '
            "graph_pipeline block"
        )
    if (args.gradient_checkpointing_kwargs or {}).get("selective"):
        raise ConfigError(
            f"{who}: gradient_checkpointing_kwargs={{'selective': True}} is not possible with stages; leave it out, "
            'and set "memory": {"recompute": "auto"} in the graph_pipeline block'
        )
    is_quantised = any(getattr(model, f"is_loaded_in_{bits}bit", False) for bits in (4, 8))
    if quantization is not None or init.get("quantization_config") is not None or is_quantised:
        raise ConfigError(
            f"{who}: quantization_config is not possible: stages hold weights in float types; leave it out, and set "
            "bf16=True"
        )
    if model is None:
        raise ConfigError(f"{who}: model is missing; pass one, or the name of one")
    if isinstance(model, str):
        config = AutoConfig.from_pretrained(model, trust_remote_code=args.trust_remote_code)
    else:
        config = model.config
    text = config.get_text_config()
    weight = args.router_aux_loss_coef
    weight = getattr(text, "router_aux_loss_coef", 0.0) if weight is None else weight
    if hasattr(text, "output_router_logits") and weight:
        raise ConfigError(
            f"{who}: router_aux_loss_coef is {weight}: the loss that balances experts is a mean over batches, and the "
            "loss of tokens a sum; set router_aux_loss_coef=0.0"
        )
    # rows of several samples: what separates them must be an operator's input, not a number that the host reads
    if not (args.padding_free or (args.packing and args.packing_strategy != "wrapped")):
        return
    attention = init.get("attn_implementation") or getattr(config, "_attn_implementation", None) or "sdpa"
    if "flash" in str(attention):
        raise ConfigError(
            f"{who}: packed rows with attn_implementation={attention!r}: its kernel reads on the host where samples "
            "begin; load the model with attn_implementation='sdpa'"
        )
    odd = sorted(set(getattr(text, "layer_types", None) or ()) - _MASKED)
    if odd:
        raise ConfigError(
            f"{who}: packed rows with layers of type {odd[0]!r}, which have no mask to separate samples; set "
            "packing=False and padding_free=False"
        )


def token_loss(
    outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None, *, focuses: bool
) -> Tensor:
    """Return the mean loss of labelled tokens.

    Args:
        focuses: each token's loss is weighted by its probability, which has no gradient (DFT).
    """
    targets = labels[:, 1:]
    log_probs = torch.log_softmax(outputs["logits"][:, :-1].float(), dim=-1)
    chosen = log_probs.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    losses = -chosen * chosen.exp().detach() if focuses else -chosen
    is_labelled = targets != UNLABELLED
    count = is_labelled.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    return losses.masked_fill(~is_labelled, 0.0).sum() / count


def token_metrics(outputs: Mapping[str, Any], labels: Tensor) -> Tensor:
    """Return what entropy and accuracy are made of, for each row.

    Returns:
        [rows, 3]: the sums of entropies and of hits over the row's labelled tokens, and their number.
    """
    targets = labels[:, 1:]
    is_labelled = targets != UNLABELLED
    log_probs = torch.log_softmax(outputs["logits"][:, :-1].detach().float(), dim=-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1).masked_fill(~is_labelled, 0.0)
    hits = (log_probs.argmax(-1) == targets) & is_labelled
    return torch.stack([entropy.sum(1), hits.sum(1).float(), is_labelled.sum(1).float()], dim=1)
