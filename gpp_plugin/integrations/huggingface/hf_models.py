"""A HuggingFace model from its configuration alone: on the meta device, with a batch of the right shapes.

For planning a model without its weights; training takes the user's own model and batches.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from gpp_plugin.errors import ConfigError, GppError, first_line
from gpp_plugin.integrations.huggingface.model_inputs import check_sizes, guilty_key, wrong_entry
from gpp_plugin.ir.serialize import read_json
from gpp_plugin.ir.typed_leaves import show
from gpp_plugin.runtime.random_streams import restored_host_streams

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
            f"({type(error).__name__}: {first_line(error)}); mend the entry that is named, or plan the "
            "module with a batch of yours: gpp_plugin.api.plan(model, sample_batch=batch)"
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
    #   Qwen-VL   pixel_values [4 * 1024 patches, 1176], image_grid_thw [4, 3], input_ids [4, 256 + 32]
    #   Whisper   input_features [4, 80 mel bins, 3000 frames], labels [4, 32]
    #   Wav2Vec2  input_values [4, 80000], labels [4, 32]
    #   ViT       pixel_values, labels [4]: a class a sample
    #
    # Configurations do not say everything, such as the order of axes. Where several batches are likely, each is tried
    # on the meta device, and the first one that the model does not refuse is returned.
    taken = inspect.signature(model.forward).parameters
    layouts = [
        {**image, **sound}
        for image in (_image_layouts(model.config, taken, num_samples) if _PIXELS & set(taken) else [{}])
        for sound in (_sound_layouts(model.config, taken, num_samples) if _SOUNDS & set(taken) else [{}])
    ]
    if layouts == [{}]:
        return _with_text(model, taken, {}, num_samples, length)
    on_meta = _on_meta(model)
    refusals = []
    for layout in layouts:
        try:
            batch = _with_text(on_meta, taken, layout, num_samples, length)
            _call_on_meta(on_meta, batch)
        except Exception as error:  # whatever a model's own code does with inputs of other axes
            refusals.append(error)
            continue
        return batch
    raise refusals[0]


_PIXELS = {"pixel_values", "flattened_patches"}
_SOUNDS = {"input_features", "input_values"}
_IMAGE_MARKS = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids", "image_embeds_position_mask")
"""Entries that say which tokens stand for images."""
_READ_BY_PYTHON = {"image_grid_thw", "image_sizes", "spatial_shapes", "image_merge_sizes"}
"""Entries whose numbers decide about shapes."""
_BINS_LAST = ("feature_projection_input_dim", "input_feat_per_channel")
"""Entries of configurations whose models take the bins of a frame beside each other."""
_USUAL_SIDE = 448
"""Pixels, of models that take images of any size."""
_USUAL_FRAMES = 500
"""Frames of sound: five seconds."""
_USUAL_WAVE = 80_000
"""The same five seconds, at 16 kHz."""


def _on_meta(model: Any) -> Any:
    if all(tensor.is_meta for tensor in model.parameters()):
        return model
    with restored_host_streams(), torch.device("meta"):
        return type(model)(model.config).train(model.training)


def _call_on_meta(model: Any, inputs: Mapping[str, Any], method: str = "forward") -> Any:
    """Call a model on the meta device; None where only values could tell.

    Raises:
        Exception: the model's own, of inputs that it cannot take.
    """
    on_meta = {
        key: value.to("meta") if isinstance(value, Tensor) and key not in _READ_BY_PYTHON else value
        for key, value in inputs.items()
    }
    try:
        with restored_host_streams(), torch.no_grad(), torch.device("meta"):
            return (model if method == "forward" else getattr(model, method))(**on_meta)
    except NotImplementedError:
        return None
    except RuntimeError as error:
        if "meta" in str(error):  # .item(), .tolist(), nonzero, a table that Python made
            return None
        raise


def _size_of(configs: Sequence[Any], *names: str, default: Any = None) -> Any:
    """Return the first entry by one of these names that a configuration has."""
    found = (getattr(config, name, None) for name in names for config in configs)
    return next((value for value in found if value is not None), default)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


def _image_layouts(config: Any, taken: Mapping[str, Any], num_samples: int) -> Iterator[dict[str, Any]]:
    """Yield images as a model may want them, the likeliest first."""
    # of an encoder and a decoder, as TrOCR, the encoder sees
    vision = _size_of([config], "vision_config", "encoder", "backbone_config", default=config)
    parts = [vision, config]
    channels = _size_of(parts, "num_channels", "in_channels", "in_chans", default=3)
    patch = _pair(_size_of(parts, "patch_size", default=1))[0]
    side = _size_of(parts, "image_size", "input_size", default=None)
    height, width = _pair(side or (_USUAL_SIDE if patch > 1 else _USUAL_SIDE // 2))
    if patch > min(height, width):
        raise ConfigError(
            f"patch_size: {patch} is larger than image_size, {show(side)}; an image has no patch: lower it"
        )
    merge = _size_of(parts, "spatial_merge_size", default=1)
    rows, columns = (max(merge, pixels // patch // merge * merge) for pixels in (height, width))
    pixels = channels * patch * patch

    def each(*numbers: int) -> Tensor:
        return torch.tensor([numbers] * num_samples)

    if "image_grid_thw" in taken:
        # Qwen-VL: the patches of all images behind each other, and the rows and columns of each image
        grid = {"image_grid_thw": each(1, rows, columns)}
        grid |= {"image_merge_sizes": each(merge)[:, 0]} if "image_merge_sizes" in taken else {}
        count = num_samples * rows * columns
        frames = _size_of(parts, "temporal_patch_size", default=1)
        yield {"pixel_values": torch.zeros(count, pixels * frames), **grid}
        yield {"pixel_values": torch.zeros(count, channels, patch, patch), **grid}
        return
    if "spatial_shapes" in taken:
        # SigLIP 2: the patches of each image
        most = _size_of(parts, "num_patches", default=rows * columns)
        rows = columns = int(most**0.5)
        mask = torch.ones(num_samples, rows * columns, dtype=torch.int64)
        patches = torch.zeros(num_samples, rows * columns, pixels)
        yield {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": each(rows, columns)}
        return
    if "flattened_patches" in taken and "pixel_values" not in taken:
        # Pix2Struct: each patch with its row and column in front
        yield {
            "flattened_patches": torch.ones(
                num_samples, 256, 2 + _size_of(parts, "patch_embed_hidden_size", default=pixels)
            )
        }
        return
    image = torch.ones(num_samples, channels, height, width)  # Idefics leaves out images of zeros
    pinpoints = getattr(config, "image_grid_pinpoints", None)
    if pinpoints:
        # LLaVA-NeXT: the whole image, and its parts
        size = tuple(pinpoints[0])
        tiles = 1 + (size[0] // height) * (size[1] // width)
        yield {"pixel_values": image[:, None].repeat(1, tiles, 1, 1, 1), "image_sizes": each(*size)}
    yield {"pixel_values": image}
    if "image_sizes" in taken:
        yield {"pixel_values": image, "image_sizes": each(height, width)}
    # several images or frames a sample
    yield {"pixel_values": image[:, None].repeat(1, _size_of(parts, "num_frames", default=1), 1, 1, 1)}
    if "aspect_ratio_ids" in taken:
        # Llama 3.2: images, each in tiles
        tiles = _size_of(parts, "max_num_tiles", default=1)
        yield {
            "pixel_values": image[:, None, None].repeat(1, 1, tiles, 1, 1, 1),
            "aspect_ratio_ids": torch.ones(num_samples, 1, dtype=torch.int64),
            "aspect_ratio_mask": torch.ones(num_samples, 1, tiles, dtype=torch.int64),
        }


def _sound_layouts(config: Any, taken: Mapping[str, Any], num_samples: int) -> Iterator[dict[str, Any]]:
    """Yield sound as a model may want it, the likeliest first."""
    parts = [_size_of([config], "audio_config", "encoder_config", "encoder", default=config), config]
    bins = _size_of(
        parts,
        "num_mel_bins",
        "input_feat_per_channel",
        "feature_projection_input_dim",
        "input_dim",
        default=80,
    )
    if "input_values" in taken:
        if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):
            # AST: a spectrogram of one length
            yield {"input_values": torch.zeros(num_samples, config.max_length, bins)}
        yield {"input_values": torch.zeros(num_samples, _USUAL_WAVE)}
        return
    # Whisper's second convolution has stride 2: its 1500 positions are 3000 frames, and no other length is taken
    most = _size_of(parts, "max_source_positions")
    masks = [name for name in ("feature_attention_mask", "input_features_mask") if name in taken]
    is_bins_last = any(hasattr(part, name) for part in parts for name in _BINS_LAST)
    for frames in [_USUAL_FRAMES] if is_bins_last or not most else [2 * most, _USUAL_FRAMES]:
        ones = torch.ones(num_samples, frames, dtype=torch.int64)
        shapes = [(bins, frames), (frames, bins)]
        for shape in reversed(shapes) if is_bins_last else shapes:
            sound = {"input_features": torch.zeros(num_samples, *shape), **dict.fromkeys(masks, ones)}
            yield sound
            if "attention_mask" in taken and _token(config, "audio") is None:
                yield {**sound, "attention_mask": ones}


def _with_text(
    model: Any, taken: Mapping[str, Any], layout: dict[str, Any], num_samples: int, length: int
) -> dict[str, Any]:
    """Return a batch of images and sound with the texts and labels that belong to them."""
    batch = dict(layout)
    if "input_ids" in taken and "input_features" not in layout or _token(model.config, "audio") is not None:
        batch.update(_texts(model, taken, layout, num_samples, length))
    if not batch:
        raise ConfigError(f"{type(model).__name__}: takes {list(taken)}; no example batch can be made up")
    if "return_loss" in taken:
        batch["return_loss"] = True
        return batch
    labels = _labels(model, taken, batch, num_samples, length)
    if not labels and not type(model).__name__.endswith("MAEForPreTraining"):
        raise ConfigError(f"{type(model).__name__}: computes no loss; name a class with a head and labels")
    return {**batch, **labels}


def _token(config: Any, kind: str) -> int | None:
    found: int | None = _size_of([config], f"{kind}_token_id", f"{kind}_token_index")
    return found


def _texts(
    model: Any, taken: Mapping[str, Any], layout: Mapping[str, Any], num_samples: int, length: int
) -> dict[str, Tensor]:
    """Return texts, in which an image or a sound has as many places as the model makes of it."""
    text = model.config.get_text_config(decoder=True)
    ids = torch.full((num_samples, length), min(FIRST_ORDINARY_ID, text.vocab_size - 1))
    # CLIP pools its text at the end token, so each text has one, at its end.
    end = getattr(text, "eos_token_id", None)
    if isinstance(end, int) and end < text.vocab_size:
        ids[:, -1] = int(end)
    for kind, inputs, method in (
        ("image", _PIXELS, "get_image_features"),
        ("audio", _SOUNDS, "get_audio_features"),
    ):
        token = _token(model.config, kind)
        if token is not None and inputs & set(layout):
            places = _count_places(model, layout, text, num_samples, method)
            ids = torch.cat([torch.full((num_samples, places), token), ids], 1)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    token = _token(model.config, "image")
    if token is not None and _PIXELS & set(layout):
        is_image = (ids == token).long()
        batch.update({name: is_image for name in _IMAGE_MARKS if name in taken})
    if "bbox" in taken:
        batch["bbox"] = torch.zeros(*ids.shape, 4, dtype=torch.int64)
    if type(model).__name__.endswith("MultipleChoice"):
        batch = {name: value[:, None].repeat(1, 2, 1) for name, value in batch.items()}
    return batch


def _count_places(model: Any, layout: Mapping[str, Any], text: Any, num_samples: int, method: str) -> int:
    """Return the tokens that stand for a sample's image or sound.

    As many as the model makes features of it on the meta device; by the configuration where only values could tell.
    """
    if hasattr(model, method):
        taken = inspect.signature(getattr(model, method)).parameters
        known = {name: value for name, value in layout.items() if name in taken or "kwargs" in taken}
        features = _call_on_meta(model, known, method)
        features = getattr(features, "pooler_output", features)
        parts = features if isinstance(features, (list, tuple)) else [features]
        if all(isinstance(part, Tensor) for part in parts):
            return sum(part.numel() for part in parts) // text.hidden_size // num_samples
    config = model.config
    if method == "get_audio_features":
        # Qwen2-Audio: a convolution of stride 2 and a pooling by 2
        return (layout["input_features"].shape[-1] // 2 - 2) // 2 + 1
    perceiver = _size_of([config], "perceiver_config", default=config)
    latents = _size_of([perceiver, config], "mm_tokens_per_image", "num_query_tokens", "resampler_n_latents")
    if latents is not None:
        return int(latents)
    vision = _size_of([config], "vision_config", default=config)
    if "image_grid_thw" in layout:
        patches = int(layout["image_grid_thw"][0].prod())
    elif "spatial_shapes" in layout:
        patches = int(layout["spatial_shapes"][0].prod())
    else:
        # (336 / 14)^2 = 576
        patches = (_pair(vision.image_size)[0] // _pair(vision.patch_size)[0]) ** 2
    # several patches are a place, along both axes
    joined = _size_of([vision, config], "spatial_merge_size", "downsample_factor", "scale_factor", default=1)
    ratio = _size_of([vision, config], "downsample_ratio", "pixel_shuffle_ratio", default=1)
    # and one for the class token where it is not left out ("full")
    return int(patches * ratio**2) // joined**2 + int(
        getattr(config, "vision_feature_select_strategy", "default") == "full"
    )


def _labels(
    model: Any, taken: Mapping[str, Any], batch: Mapping[str, Any], num_samples: int, length: int
) -> dict[str, Any]:
    name = type(model).__name__
    one_each = torch.zeros(num_samples, dtype=torch.int64)
    if "start_positions" in taken:
        return {"start_positions": one_each, "end_positions": one_each}
    if "mask_labels" in taken:
        masks = [torch.ones(1, *batch["pixel_values"].shape[-2:]) for _ in range(num_samples)]
        return {
            "mask_labels": masks,
            "class_labels": [torch.zeros(1, dtype=torch.int64) for _ in range(num_samples)],
        }
    if "labels" not in taken:
        return {}
    extra = {"next_sentence_label": one_each} if "next_sentence_label" in taken else {}
    if name.endswith("TokenClassification"):
        return {"labels": torch.zeros_like(batch["input_ids"])}
    if name.endswith(("Classification", "MultipleChoice", "NextSentencePrediction")):
        return {"labels": one_each}
    if name.endswith(("SemanticSegmentation", "DepthEstimation")):
        kind = torch.int64 if name.endswith("Segmentation") else torch.float32
        return {"labels": torch.zeros(num_samples, *batch["pixel_values"].shape[-2:], dtype=kind)}
    if name.endswith("ObjectDetection"):
        box = {"class_labels": torch.zeros(1, dtype=torch.int64), "boxes": torch.full((1, 4), 0.5)}
        return {"labels": [dict(box) for _ in range(num_samples)]}
    if getattr(model.config, "is_encoder_decoder", False) or "input_ids" not in batch:
        return {"labels": torch.full((num_samples, length), FIRST_ORDINARY_ID)}
    return {"labels": batch["input_ids"].clone(), **extra}
