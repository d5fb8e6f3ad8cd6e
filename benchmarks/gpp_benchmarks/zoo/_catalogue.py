"""The catalogue of the zoo: every family by its name."""

from __future__ import annotations

from torch import nn

from gpp_benchmarks.zoo import (
    _detection,
    _encoder_decoder,
    _image_models,
    _image_text,
    _multimodal,
    _recognisers,
    _retrieval,
    _speech,
    _text_models,
    _vision_language,
)
from gpp_benchmarks.zoo._entries import Batch, ZooModel, build_model
from gpp_plugin.errors import ConfigError, nearest

MODELS = (
    *_vision_language.MODELS,
    *_image_text.MODELS,
    *_multimodal.MODELS,
    *_speech.MODELS,
    *_recognisers.MODELS,
    *_encoder_decoder.MODELS,
    *_retrieval.MODELS,
    *_detection.MODELS,
    *_text_models.MODELS,
    *_image_models.MODELS,
)
CATALOGUE: dict[str, ZooModel] = {entry.name: entry for entry in MODELS}


KINDS = tuple(dict.fromkeys(entry.kind for entry in MODELS))


def find(name: str) -> ZooModel:
    """Return a family by its name.

    Raises:
        ConfigError: there is none.
    """
    if name not in CATALOGUE:
        raise ConfigError(
            f"no model {name!r} in the zoo{nearest(name, CATALOGUE)} (gpp bench zoo --list names all {len(CATALOGUE)})"
        )
    return CATALOGUE[name]


def build(
    name: str, *, num_samples: int = 2, length: int | None = None, device: str = "cpu"
) -> tuple[nn.Module, Batch]:
    """Return a family's model, in training mode, and a batch for it; the same at every call."""
    entry = find(name)
    return build_model(entry, device=device), entry.batch(num_samples, length or entry.lengths[0])
