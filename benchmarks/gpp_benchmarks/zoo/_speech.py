"""Speech and audio models: recognisers with an encoder and a decoder, CTC, and language models that hear."""

from __future__ import annotations

from typing import Any

import torch

from gpp_benchmarks.zoo._entries import (
    AUDIO,
    HEADS,
    IDS,
    LAYERS,
    START,
    VOCABULARY,
    WIDTH,
    Batch,
    ZooModel,
    classes,
    integers,
    numbers,
    text_config,
    text_with,
)

KIND = "speech"
MELS = 8


def _labels(samples: int, length: int) -> torch.Tensor:
    return integers(samples, length, seed=4)


def _mels_to_text(samples: int, length: int) -> Batch:
    """Return 16 frames of sound, and what is said in ``length`` tokens."""
    return {"input_features": numbers(samples, MELS, 16), "labels": _labels(samples, length)}


def _frames_to_text(samples: int, length: int) -> Batch:
    """Return ``length`` frames of sound, frames first, and four tokens."""
    return {"input_features": numbers(samples, length, MELS), "labels": _labels(samples, 4)}


def _wave_to_labels(samples: int, length: int) -> Batch:
    """Return a wave of ``length`` samples, and three tokens."""
    return {"input_values": numbers(samples, length), "labels": _labels(samples, 3)}


def _wave_to_class(samples: int, length: int) -> Batch:
    return {"input_values": numbers(samples, length), "labels": classes(samples)}


def _heard(samples: int, length: int) -> Batch:
    """Return texts with a sound each: 16 frames, four tokens after two strides of two."""
    return {
        **text_with(samples, length, count=4, token=AUDIO),
        "input_features": numbers(samples, MELS, 16),
        "feature_attention_mask": torch.ones(samples, 16, dtype=torch.int64),
    }


_CTC: dict[str, Any] = {
    **LAYERS, **IDS, "vocab_size": VOCABULARY, "conv_dim": [16, 16], "conv_stride": [4, 2], "conv_kernel": [8, 4],
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "ctc_zero_infinity": True,
}  # fmt: skip
_SEQ2SEQ: dict[str, Any] = {
    **IDS, "vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "decoder_start_token_id": START,
}  # fmt: skip
_NO_MASKS = "no random masks of time (mask_time_prob 0)"

MODELS = (
    ZooModel(
        name="whisper", kind=KIND, model="WhisperForConditionalGeneration", batch=_mels_to_text,
        config={
            **_SEQ2SEQ, "num_mel_bins": MELS, "max_source_positions": 8, "max_target_positions": 32, "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
    ),
    ZooModel(
        name="qwen2_audio", kind=KIND, model="Qwen2AudioForConditionalGeneration", batch=_heard,
        config={
            "text_config": text_config("qwen2"), "audio_token_index": AUDIO, "audio_token_id": AUDIO,
            "audio_config": {
                "model_type": "qwen2_audio_encoder", "num_mel_bins": MELS, "d_model": WIDTH, "encoder_layers": 2,
                "encoder_attention_heads": HEADS, "encoder_ffn_dim": 64, "max_source_positions": 8,
            },
        },
    ),
    ZooModel(
        name="speech_to_text", kind=KIND, model="Speech2TextForConditionalGeneration", batch=_frames_to_text,
        lengths=(16, 24), means="frames of sound",
        config={
            **_SEQ2SEQ, "input_feat_per_channel": MELS, "input_channels": 1, "conv_channels": 16, "max_source_positions": 32,
            "max_target_positions": 32, "num_conv_layers": 2, "conv_kernel_sizes": [3, 3],
        },
    ),
    ZooModel(
        name="wav2vec2", kind=KIND, model="Wav2Vec2ForCTC", batch=_wave_to_labels, lengths=(128, 192), means="samples of a wave",
        config=_CTC, note=_NO_MASKS,
    ),
    ZooModel(
        name="wav2vec2_class", kind=KIND, model="Wav2Vec2ForSequenceClassification", batch=_wave_to_class, lengths=(128, 192),
        means="samples of a wave", config={**_CTC, "num_labels": 3}, note=_NO_MASKS,
    ),
)  # fmt: skip
