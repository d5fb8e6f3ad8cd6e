"""A HuggingFace model from its configuration alone: on the meta device, with a batch of the right shapes.

For planning a model without its weights; training takes the user's own model and batches.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from gpp_plugin.errors import ConfigError, GppError, first_line
from gpp_plugin.integrations.huggingface.model_inputs import check_sizes, guilty_key, wrong_entry
from gpp_plugin.ir.serialize import read_json
from gpp_plugin.ir.typed_leaves import show

# 0, 1 and 2 are padding, start and end in most vocabularies: models look for them, so
# made-up texts avoid them.
FIRST_ORDINARY_ID = 3
# what configurations call the positions of a text, and modules the tables of them (not rotary_pos_emb)
_POSITION_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_target_positions",
    "max_encoder_position_embeddings",
    "max_decoder_position_embeddings",
)
_POSITION_TABLE = re.compile(r"^(?!.*rotary).*(pos|wpe)")
_MOST_BYTES = 16 << 20
"""Of a configuration: some list a million labels."""
logger = logging.getLogger(__name__)


def read_hf_config(path: str | Path) -> Any:
    """Return the `transformers` configuration in a directory's ``config.json`` or in a JSON file.

    Raises:
        ConfigError: there is none, or its ``model_type`` is unknown to the installed transformers.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    plain = read_json(file, what="a HuggingFace configuration", max_bytes=_MOST_BYTES, may_be_infinite=True)
    return config_of(plain, file)


def config_of(plain: Any, source: str | Path) -> Any:
    """Return the `transformers` configuration that a ``config.json`` with these entries describes.

    Args:
        source: where they come from, for errors.

    Raises:
        ConfigError: they have no ``model_type``, or one that transformers does not know.
    """
    entries = dict(plain) if isinstance(plain, dict) else {}
    model_type = entries.pop("model_type", None)
    if not isinstance(model_type, str):
        raise ConfigError(f"{source}: has no model_type; give a HuggingFace config.json")
    if model_type not in transformers.CONFIG_MAPPING:
        raise ConfigError(
            f"{source}: transformers {transformers.__version__} has no model_type {show(model_type)}"
        )
    kind = transformers.CONFIG_MAPPING[model_type]
    try:
        config = kind(**entries)
    except Exception as error:  # whatever a model's own code does with wrong entries
        guilty = guilty_key(entries, lambda others: kind(**others))
        raise ConfigError(wrong_entry(source, entries, guilty, error)) from error
    check_sizes(config, source)
    return config


def compares_samples(config: Any) -> bool:
    """Return whether the loss of the model that a configuration describes is over pairs of samples, as CLIP's is."""
    kind = _class_to_train(config)
    return kind is not None and "return_loss" in inspect.signature(kind.forward).parameters


def build_on_meta(config: Any) -> nn.Module:
    """Return the model a configuration describes, in training mode, without weights.

    Raises:
        ConfigError: the configuration names no architecture, or one that transformers does not have.
    """
    with torch.device("meta"):
        return build_model_of(config)


def build_model_of(config: Any) -> nn.Module:
    """Return the model a configuration describes, in training mode, with random weights.

    Raises:
        ConfigError: the configuration names no architecture, or one that transformers does not have.
    """
    kind = _class_to_train(config)
    if kind is None:
        names = getattr(config, "architectures", None)
        raise ConfigError(
            f"architectures: {show(names) if names else 'missing'} in the configuration of a {config.model_type}; "
            'give the class to train, e.g. "architectures": ["GPT2LMHeadModel"]'
        )
    config.use_cache = False
    if getattr(config, "is_encoder_decoder", False) and not hasattr(config, "decoder_start_token_id"):
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    try:
        model: nn.Module = kind(config)
    except Exception as error:  # whatever a model's own code does with wrong sizes
        # what the configuration says that differs from its class
        entries = config.to_diff_dict()
        entries = {k: v for k, v in entries.items() if k not in ("model_type", "transformers_version")}

        def build(others: dict[str, Any]) -> None:
            with torch.device("meta"):
                kind(type(config)(**others))

        guilty = guilty_key(entries, build)
        raise ConfigError(wrong_entry(f"a {config.model_type}", entries, guilty, error)) from error
    return model.train()


def _class_to_train(config: Any) -> Any:
    """Return the model class that a configuration names; None where it names none that transformers has."""
    names = getattr(config, "architectures", None)
    if not isinstance(names, (list, tuple)) or not names or not isinstance(names[0], str):
        return None
    try:
        kind = getattr(transformers, names[0], None)
    except Exception:  # its module needs a package that is not there
        return None
    # a class of models and nothing else that transformers has a name for
    is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    return kind if is_model else None


def make_example_batch(
    model: Any, *, num_samples: int, length: int, is_asked: bool = False
) -> dict[str, Any]:
    """Return a batch with a loss for ``model``: shapes and dtypes as in training, values without meaning.

    Args:
        length: tokens of a text; cut to what the model has positions for, unless it is asked for.
        is_asked: the user named the length: it is refused where the model cannot be trained at it.

    Raises:
        ConfigError: the model wants inputs that cannot be made up from its configuration, takes no text, or has
            positions for shorter texts.
    """
    try:
        most = longest_text(model)
        batch = _example_batch(model, num_samples, length if most is None else min(length, most))
    except GppError:
        raise
    except Exception as error:  # an entry that the model was built without, or one of another type
        raise ConfigError(
            f"{type(model).__name__}: no example batch can be made of its configuration "
            f"({type(error).__name__}: {first_line(error)}); add or mend the entry that is named"
        ) from error
    if is_asked:
        _check_length(model, batch, length, most)
    return batch


def _check_length(model: Any, batch: Mapping[str, Any], length: int, most: int | None) -> None:
    labels = batch.get("labels")
    if "input_ids" not in batch and (labels is None or labels.ndim < 2):
        raise ConfigError(f"length: {type(model).__name__} takes no text ({', '.join(batch)}); leave it out")
    places = (
        batch["input_ids"].shape[1] - min(length, most or length) if "input_ids" in batch else 0
    )  # of an image
    if most is not None and length + places > most:
        raise ConfigError(
            f"length: {length} is beyond the {most - places} positions that {type(model).__name__} has embeddings "
            f"for; give at most {most - places}, or a configuration with more"
        )
    known = max(_position_counts(model), default=length)
    if length > known:
        logger.warning(
            "length: %d is beyond the %d positions in the configuration of %s, which computes its positions; it is "
            "planned as asked",
            length,
            known,
            type(model).__name__,
        )


def _position_counts(model: Any) -> set[int]:
    """Return the numbers of positions that the configuration of the model's text names."""
    text = model.config.get_text_config()
    found = (getattr(text, name, None) for name in _POSITION_KEYS)
    return {count for count in found if isinstance(count, int) and count > 0}


def longest_text(model: Any) -> int | None:
    """Return the tokens of the longest text that the model's tables of positions have rows for.

    None where it has none, since its positions are computed (rotary, ALiBi) or relative: any length can be trained.
    """
    #     GPT-2      wpe.weight [1024, 768]                 n_positions 1024              1024
    #     OPT        embed_positions.weight [2050, 768]     max_position_embeddings 2048  2048: two rows come first
    #     RoBERTa    position_embeddings.weight [514, 768]  ... 514, padding_idx 1        512: counts from 2
    #     Llama      none                                   max_position_embeddings 4096  None
    counts = _position_counts(model)
    found = []
    for name, module in model.named_modules():
        for leaf, table in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if not _POSITION_TABLE.search(f"{name}.{leaf}") or table.ndim < 2:
                continue
            padding = getattr(module, "padding_idx", None)
            for count in counts & set(range(table.shape[0] - 2, table.shape[0] + 1)):
                skipped = 0 if padding is None or count < table.shape[0] else padding + 1
                found.append(count - skipped)
    return min(found, default=None)


def _example_batch(model: Any, num_samples: int, length: int) -> dict[str, Any]:
    # What the forward takes says what kind of model it is; sizes come from its configuration. For
    # 4 samples, length 32:
    #
    #   GPT-2     input_ids, attention_mask, labels [4, 32]
    #   CLIP      the same without labels, return_loss=True, pixel_values [4, 3 channels, 224, 224]
    #   LLaVA     input_ids [4, 576 + 32]: an image's places, then words
    #   Whisper   input_features [4, 80 mel bins, 3000 frames], labels [4, 32]
    #   ViT       pixel_values, labels [4]: a class a sample
    known = inspect.signature(model.forward).parameters
    config = model.config
    text = config.get_text_config()
    batch: dict[str, Any] = {}
    if "pixel_values" in known:
        batch["pixel_values"] = _pixels(config, num_samples)
    if "input_features" in known:
        # Whisper's second convolution has stride 2: its 1500 positions are 3000 frames, and no
        # other length is taken.
        frames = 2 * config.max_source_positions
        batch["input_features"] = torch.zeros(num_samples, config.num_mel_bins, frames)
    elif "input_ids" in known:
        batch["input_ids"] = _token_ids(config, text, num_samples, length)
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    if not batch:
        raise ConfigError(f"{type(model).__name__}: takes {list(known)}; no example batch can be made up")
    if "return_loss" in known:
        batch["return_loss"] = True
    elif "labels" in known:
        batch["labels"] = _labels(model, batch, num_samples, length)
    else:
        raise ConfigError(f"{type(model).__name__}: computes no loss; name a class with a head and labels")
    return batch


def _pixels(config: Any, num_samples: int) -> Tensor:
    # of an encoder and a decoder, as TrOCR, the encoder sees
    vision = getattr(config, "vision_config", None) or getattr(config, "encoder", config)
    size = vision.image_size
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    patch = getattr(vision, "patch_size", 1)
    if isinstance(patch, int) and patch > min(height, width):
        raise ConfigError(
            f"patch_size: {patch} is larger than image_size, {show(size)}; an image has no patch: lower it"
        )
    return torch.zeros(num_samples, vision.num_channels, height, width)


def _token_ids(config: Any, text: Any, num_samples: int, length: int) -> Tensor:
    image_token: Any = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", None)
    num_images = 0
    if image_token is not None:
        vision = config.vision_config
        # A patch is a place: (336 / 14)^2 = 576, and one for the class token where it is
        # not left out ("full").
        num_images = (vision.image_size // vision.patch_size) ** 2
        num_images += int(getattr(config, "vision_feature_select_strategy", "default") == "full")
    ids = torch.full((num_samples, num_images + length), min(FIRST_ORDINARY_ID, text.vocab_size - 1))
    if num_images:
        ids[:, :num_images] = image_token
    # CLIP pools its text at the end token, so each text has one, at its end.
    end = getattr(text, "eos_token_id", None)
    if isinstance(end, int) and end < text.vocab_size:
        ids[:, -1] = int(end)
    return ids


def _labels(model: Any, batch: dict[str, Any], num_samples: int, length: int) -> Tensor:
    if type(model).__name__.endswith("Classification"):
        return torch.zeros(num_samples, dtype=torch.int64)
    if getattr(model.config, "is_encoder_decoder", False) or "input_ids" not in batch:
        return torch.full((num_samples, length), FIRST_ORDINARY_ID)
    labels: Tensor = batch["input_ids"].clone()
    return labels
