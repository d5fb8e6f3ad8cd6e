"""More recognisers of speech, with conformers and newer decoders, and music from text."""

from __future__ import annotations

from typing import Any

import torch

from gpp_benchmarks.zoo._entries import (
    AUDIO,
    HEADS,
    IDS,
    LAYERS,
    PAD,
    START,
    VOCABULARY,
    WIDTH,
    Batch,
    ZooModel,
    integers,
    numbers,
    text,
    text_config,
    text_with,
    uniform,
)
from gpp_benchmarks.zoo._speech import CONFORMER, KIND, frames_and_words, hears

_FRAMES: dict[str, Any] = {"lengths": (64, 96), "means": "frames of sound", "batch": frames_and_words}
_DECODER: dict[str, Any] = {
    **LAYERS,
    "num_key_value_heads": HEADS,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


def _melody(samples: int, length: int) -> Batch:
    """Return texts, the notes of a melody, and two streams of codes."""
    batch = text(samples, length)
    del batch["labels"]
    return {
        **batch, "input_features": uniform(samples, 4, 12),
        "labels": integers(samples, 6, 2, first=0, end=16, seed=4),
        "decoder_input_ids": integers(samples * 2, 6, first=0, end=16, seed=5),
    }  # fmt: skip


MODELS = (
    ZooModel(
        name="parakeet_tdt", kind=KIND, model="ParakeetForTDT", lengths=(64, 96), means="frames of sound",
        batch=lambda samples,
        length: {**frames_and_words(samples, length), "decoder_input_ids": integers(samples, 4, seed=4)},
        config={
            "vocab_size": VOCABULARY, "pad_token_id": PAD, "blank_token_id": PAD,
            "encoder_config": CONFORMER, "decoder_hidden_size": WIDTH,
            "num_decoder_layers": 1, "durations": [0, 1, 2],
        },
    ),
    ZooModel(
        name="canary", kind=KIND, model="CanaryForConditionalGeneration", **_FRAMES,
        config={
            **IDS, "vocab_size": VOCABULARY, "encoder_config": CONFORMER,
            "decoder_config": {**_DECODER, "vocab_size": VOCABULARY},
            "decoder_start_token_id": START,
        },
    ),
    ZooModel(
        name="cohere_asr", kind=KIND, model="CohereAsrForConditionalGeneration", **_FRAMES,
        config={
            **IDS, **_DECODER, "vocab_size": VOCABULARY, "encoder_config": CONFORMER, "decoder_start_token_id": START,
        },
    ),
    ZooModel(
        name="moonshine_streaming", kind=KIND, model="MoonshineStreamingForConditionalGeneration",
        batch=lambda samples,
        length: {"input_values": numbers(samples, length), "labels": integers(samples, 4, seed=4)},
        lengths=(1280, 1920), means="samples of a wave",
        config={
            **IDS, **_DECODER, "vocab_size": VOCABULARY, "decoder_start_token_id": START,
            "encoder_config": {**_DECODER, "sliding_windows": [[4, 1], [4, 0]]},
        },
    ),
    ZooModel(
        name="musicgen_melody", kind=KIND, model="MusicgenMelodyForConditionalGeneration", batch=_melody,
        config={
            "text_encoder": {
                "model_type": "t5", "vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 64,
                "num_layers": 2, "num_heads": HEADS,
            },
            "audio_encoder": {
                "model_type": "encodec", "hidden_size": 8, "num_filters": 4, "codebook_size": 16,
                "codebook_dim": 8, "upsampling_ratios": [2],
                "num_lstm_layers": 1, "num_residual_layers": 1, "audio_channels": 1,
            },
            "decoder": {
                "vocab_size": 16, **LAYERS, "ffn_dim": 64, "num_codebooks": 2,
                "max_position_embeddings": 32, "pad_token_id": 16, "bos_token_id": 16,
            },
            "num_chroma": 12, "chroma_length": 4,
        },
    ),
    ZooModel(
        name="granite_speech_plus", kind=KIND, model="GraniteSpeechPlusForConditionalGeneration",
        batch=hears(6, first="frames", mask="input_features_mask"),
        config={
            "text_config": text_config("granite"), "audio_token_index": AUDIO, "audio_token_id": AUDIO,
            "downsample_rate": 5, "window_size": 15,
            "has_lora_adapter": False,
            "encoder_config": {
                "input_dim": 16, "num_layers": 2, "hidden_dim": WIDTH, "feedforward_mult": 2,
                "num_heads": HEADS, "dim_head": 8, "output_dim": 10,
                "context_size": 8, "max_pos_emb": 16, "conv_kernel_size": 3,
            },
            "projector_config": {
                "model_type": "blip_2_qformer", **LAYERS, "encoder_hidden_size": WIDTH, "vocab_size": VOCABULARY,
            },
        },
    ),
    ZooModel(
        name="fun_asr_nano", kind=KIND, model="FunAsrNanoForConditionalGeneration",
        batch=lambda samples, length: {
            **text_with(samples, length, count=8, token=AUDIO), "input_features": numbers(samples, 8, 56),
            "input_features_mask": torch.ones(samples, 8, dtype=torch.int64),
        },
        config={
            "text_config": text_config("qwen3", head_dim=8), "audio_token_id": AUDIO,
            "audio_config": {
                **LAYERS, "num_mel_bins": 8, "num_stacked_frames": 7, "num_timestamp_prediction_layers": 1,
                "fsmn_kernel_size": 3, "max_position_embeddings": 64,
            },
            "adaptor_config": {**LAYERS, "intermediate_size": 8, "projector_hidden_size": 64},
        },
    ),
)  # fmt: skip
