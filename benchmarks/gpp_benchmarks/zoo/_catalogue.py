"""The catalogue of the zoo: every family by its name."""

from __future__ import annotations

from torch import nn

from gpp_benchmarks.zoo import (
    _detection,
    _encoder_decoder,
    _retrieval,
    _speech,
    _text_models,
    _vision_language,
)
from gpp_benchmarks.zoo._entries import Batch, ZooModel, build_model
from gpp_plugin.errors import ConfigError

_MODELS = (
    *_vision_language.MODELS,
    *_speech.MODELS,
    *_encoder_decoder.MODELS,
    *_retrieval.MODELS,
    *_detection.MODELS,
    *_text_models.MODELS,
)
CATALOGUE: dict[str, ZooModel] = {entry.name: entry for entry in _MODELS}


def build(
    name: str, *, num_samples: int = 2, length: int | None = None, device: str = "cpu"
) -> tuple[nn.Module, Batch]:
    """Return a family's model, in training mode, and a batch for it; the same at every call."""
    if name not in CATALOGUE:
        raise ConfigError(f"no model {name!r} in the zoo; it has {', '.join(CATALOGUE)}")
    entry = CATALOGUE[name]
    return build_model(entry, device=device), entry.batch(num_samples, length or entry.lengths[0])
