"""`GraphPipelineSeq2SeqTrainer`: HuggingFace's Seq2SeqTrainer, which evaluates what the model generates.

Its step of prediction is HuggingFace's; in place of the model's `generate` and forward there are the engine's.

Source: transformers, Seq2SeqTrainer (release 5.23)
Tests: tests/soak/generation.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import Seq2SeqTrainer

from gpp_plugin.integrations.trainer.trainer import GraphPipelineTrainer


class GraphPipelineSeq2SeqTrainer(GraphPipelineTrainer, Seq2SeqTrainer):
    """Trains as `GraphPipelineTrainer`; with ``predict_with_generate`` evaluation and prediction generate.

    Args:
        passed: as of `GraphPipelineTrainer`; the arguments are ``Seq2SeqTrainingArguments``.
    """

    def _as_one_process(self, tensors: Any, **_: Any) -> Any:
        """Return all: Seq2SeqTrainer cuts nothing, so that its mean loss counts a short last batch as a whole one."""
        return tensors

    def prediction_step(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[Any, Any, Any]:
        """Return loss, generated tokens and labels of a batch, on every rank."""
        if not self.args.predict_with_generate or prediction_loss_only:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        trainer: Any = self
        own, stand = trainer.model, _Generating(self._engine, trainer.model)
        trainer.model = stand
        try:
            answer: tuple[Any, Any, Any] = Seq2SeqTrainer.prediction_step(
                trainer, stand, inputs, prediction_loss_only, ignore_keys, **gen_kwargs
            )
        finally:
            trainer.model = own
        return answer


class _Generating:
    """What HuggingFace's step of prediction calls on a model: the engine does it; the rest is the model's."""

    def __init__(self, engine: Any, model: Any) -> None:
        self._engine = engine
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> dict[str, Any]:
        return {"loss": self._engine.eval_batch(iter([inputs]))}

    def generate(self, **arguments: Any) -> Any:
        return self._engine.generate(**arguments)
