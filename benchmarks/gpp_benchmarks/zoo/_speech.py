"""Speech and audio models: recognisers with an encoder and a decoder, CTC, and language models that hear."""

from __future__ import annotations

from collections.abc import Callable
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
    classes,
    integers,
    numbers,
    right_mask,
    text,
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


def frames_and_words(samples: int, length: int) -> Batch:
    """Return ``length`` frames of 16 numbers, and three tokens."""
    return {
        "input_features": numbers(samples, length, 16),
        "attention_mask": torch.ones(samples, length, dtype=torch.int64),
        "labels": _labels(samples, 3),
    }  # fmt: skip


def _spectrum(samples: int, length: int) -> Batch:
    return {"input_values": numbers(samples, length, MELS), "labels": classes(samples)}


def _spoken(samples: int, length: int) -> Batch:
    """Return a text, and the 8 frames of the sound that it becomes."""
    return {
        "input_ids": integers(samples, length), "attention_mask": right_mask(samples, length),
        "labels": numbers(samples, 8, MELS),
        "decoder_attention_mask": torch.ones(samples, 8, dtype=torch.int64),
        "speaker_embeddings": numbers(samples, 16),
    }  # fmt: skip


def hears(
    count: int, *, frames: int = 16, mask: str = "", first: str = "mels"
) -> Callable[[int, int], Batch]:
    """Return what makes texts with ``count`` tokens for a sound of some frames each."""

    def batch(samples: int, length: int) -> Batch:
        shape = (samples, MELS, frames) if first == "mels" else (samples, frames, 2 * MELS)
        found = {**text_with(samples, length, count=count, token=AUDIO), "input_features": numbers(*shape)}
        if mask and first == "mels":
            found[mask] = torch.ones(samples, frames, dtype=torch.int64)
        elif mask:  # of what comes of the frames, which are selected by it
            found[mask] = torch.ones(samples, count, dtype=torch.bool)
        return found

    return batch


def _codes(samples: int, length: int) -> Batch:
    """Return texts that condition four streams of codes."""
    return {
        **{k: v for k, v in text(samples, length).items() if k != "labels"},
        "labels": integers(samples, 6, 2, first=0, end=16, seed=4),
        "decoder_input_ids": integers(samples * 2, 6, first=0, end=16, seed=5),
    }


def _two_speakers(samples: int, length: int) -> Batch:
    """Return what two speakers say, as codes, and what one of them means by it, as text."""
    said, words = integers(samples, 2, length, first=0, end=16, seed=4), integers(samples, length)
    return {
        "input_ids": words, "moshi_audio_codes": said, "text_labels": words.clone(), "audio_labels": said.clone(),
        "user_audio_codes": integers(samples, 2, length, first=0, end=16),
    }  # fmt: skip


def _streams(samples: int, length: int, streams: int = 2) -> Batch:
    ids = integers(samples, length, streams, first=3, end=16)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones(samples, length, dtype=torch.int64),
        "labels": ids.clone(),
    }


def _dialogue(samples: int, length: int) -> Batch:
    codes = integers(samples, 6, 2, first=0, end=12, seed=4)
    return {
        **{k: v for k, v in text(samples, length).items() if k != "labels"}, "decoder_input_ids": codes,
        "decoder_attention_mask": torch.ones(samples, 6, dtype=torch.int64),
        "labels": integers(samples * 2, 6, first=0, end=12, seed=5),
    }  # fmt: skip


def _heard(samples: int, length: int) -> Batch:
    """Return texts with a sound each: 16 frames, four tokens after two strides of two."""
    return {
        **text_with(samples, length, count=4, token=AUDIO),
        "input_features": numbers(samples, MELS, 16),
        "feature_attention_mask": torch.ones(samples, 16, dtype=torch.int64),
    }


_CTC: dict[str, Any] = {
    **LAYERS, **IDS, "vocab_size": VOCABULARY, "conv_dim": [16, 16], "conv_stride": [4, 2], "conv_kernel": [8, 4],
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
    "ctc_zero_infinity": True,
}  # fmt: skip
_SEQ2SEQ: dict[str, Any] = {
    **IDS, "vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "decoder_start_token_id": START,
}  # fmt: skip
_WAVE: dict[str, Any] = {"lengths": (128, 192), "means": "samples of a wave"}
_FRAMES: dict[str, Any] = {"lengths": (16, 24), "means": "frames of sound"}
CONFORMER: dict[str, Any] = {
    **LAYERS, "num_mel_bins": 16, "conv_kernel_size": 3, "subsampling_conv_channels": 8,
    "max_position_embeddings": 64,
}  # fmt: skip
_AUDIO_TOWER: dict[str, Any] = {**LAYERS, "num_mel_bins": MELS, "max_source_positions": 8}
_NO_MASKS = "no random masks of time (mask_time_prob 0)"

MODELS = (
    ZooModel(
        name="whisper", kind=KIND, model="WhisperForConditionalGeneration", batch=_mels_to_text,
        config={
            **_SEQ2SEQ, "num_mel_bins": MELS, "max_source_positions": 8, "max_target_positions": 32,
            "suppress_tokens": None,
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
            **_SEQ2SEQ, "input_feat_per_channel": MELS, "input_channels": 1, "conv_channels": 16,
            "max_source_positions": 32,
            "max_target_positions": 32, "num_conv_layers": 2, "conv_kernel_sizes": [3, 3],
        },
    ),
    ZooModel(
        name="wav2vec2", kind=KIND, model="Wav2Vec2ForCTC", batch=_wave_to_labels, lengths=(128, 192),
        means="samples of a wave",
        config=_CTC, note=_NO_MASKS,
    ),
    ZooModel(
        name="wav2vec2_class", kind=KIND, model="Wav2Vec2ForSequenceClassification", batch=_wave_to_class,
        lengths=(128, 192),
        means="samples of a wave", config={**_CTC, "num_labels": 3}, note=_NO_MASKS,
    ),
    *(
        ZooModel(
            name=name, kind=KIND, model=model, batch=_wave_to_labels, **_WAVE,
            config={**_CTC, **more}, note=_NO_MASKS,
        )
        for name, model, more in (
            ("hubert", "HubertForCTC", {}),
            ("wavlm", "WavLMForCTC", {"num_buckets": 8, "max_bucket_distance": 16}),
            ("unispeech", "UniSpeechForCTC", {}),
            ("unispeech_sat", "UniSpeechSatForCTC", {}),
            ("data2vec_audio", "Data2VecAudioForCTC", {"num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 3}),
            ("sew", "SEWForCTC", {"squeeze_factor": 2}),
            (
                "sew_d", "SEWDForCTC",
                {"squeeze_factor": 2, "position_buckets": 8, "max_position_embeddings": 32, "layer_norm_eps": 1e-5},
            ),
            (
                "wav2vec2_conformer", "Wav2Vec2ConformerForCTC",
                {"conv_depthwise_kernel_size": 3, "max_source_positions": 64},
            ),
        )
    ),
    ZooModel(
        name="wav2vec2_bert", kind=KIND, model="Wav2Vec2BertForCTC", batch=frames_and_words, **_FRAMES,
        note=_NO_MASKS,
        config={
            **LAYERS, **IDS, "vocab_size": VOCABULARY, "feature_projection_input_dim": 16,
            "conv_depthwise_kernel_size": 3, "ctc_zero_infinity": True,
        },
    ),
    ZooModel(
        name="audio_spectrogram_transformer", kind=KIND, model="ASTForAudioClassification",
        batch=lambda samples, length: _spectrum(samples, 16), means="nothing: spectrograms are of one size",
        config={
            **LAYERS, "patch_size": 4, "frequency_stride": 4, "time_stride": 4, "max_length": 16,
            "num_mel_bins": MELS, "num_labels": 3,
        },
    ),
    ZooModel(
        name="whisper_class", kind=KIND, model="WhisperForAudioClassification",
        batch=lambda samples, length: {"input_features": numbers(samples, MELS, 16), "labels": classes(samples)},
        means="nothing: sounds are padded to one length",
        config={
            **_SEQ2SEQ, "num_mel_bins": MELS, "max_source_positions": 8, "classifier_proj_size": 16, "num_labels": 3,
        },
    ),
    ZooModel(
        name="speecht5_to_text", kind=KIND, model="SpeechT5ForSpeechToText", batch=_wave_to_labels, **_WAVE,
        note=_NO_MASKS,
        config={
            **_SEQ2SEQ, "hidden_size": WIDTH, "conv_dim": [16, 16], "conv_stride": [4, 2],
            "conv_kernel": [8, 4], "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2, "max_text_positions": 64, "max_speech_positions": 64,
            "encoder_max_relative_position": 8,
        },
        extra={"mask_time_prob": 0.0},
    ),
    ZooModel(
        name="speecht5_to_speech", kind=KIND, model="SpeechT5ForTextToSpeech", batch=_spoken,
        config={
            **_SEQ2SEQ, "hidden_size": WIDTH, "num_mel_bins": MELS, "speech_decoder_prenet_units": 16,
            "speech_decoder_postnet_units": 16,
            "speech_decoder_postnet_layers": 2, "speaker_embedding_dim": 16, "max_text_positions": 64,
            "max_speech_positions": 64,
            "encoder_max_relative_position": 8, "conv_dim": [16, 16], "conv_stride": [4, 2], "conv_kernel": [8, 4],
        },
        note="the prenet of its decoder draws masks of its own, whatever its configuration says but for a dropout of 0",
    ),
    ZooModel(
        name="seamless_m4t", kind=KIND, model="SeamlessM4TForSpeechToText", batch=frames_and_words, **_FRAMES,
        config={
            **_SEQ2SEQ, "hidden_size": WIDTH, "max_position_embeddings": 64, "speech_encoder_layers": 2,
            "speech_encoder_attention_heads": HEADS,
            "speech_encoder_intermediate_size": 64, "feature_projection_input_dim": 16,
            "conv_depthwise_kernel_size": 3, "adaptor_kernel_size": 4,
            "adaptor_stride": 4, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
            "max_source_positions": 64,
        },
    ),
    ZooModel(
        name="seamless_m4t_text", kind=KIND, model="SeamlessM4TForTextToText",
        batch=lambda samples, length: {**text(samples, length), "labels": _labels(samples, 4)},
        config={**_SEQ2SEQ, "hidden_size": WIDTH, "max_position_embeddings": 64},
    ),
    ZooModel(
        name="seamless_m4t_v2", kind=KIND, model="SeamlessM4Tv2ForSpeechToText", batch=frames_and_words,
        **_FRAMES,
        config={
            **_SEQ2SEQ, "hidden_size": WIDTH, "max_position_embeddings": 64, "speech_encoder_layers": 2,
            "speech_encoder_attention_heads": HEADS,
            "speech_encoder_intermediate_size": 64, "feature_projection_input_dim": 16,
            "conv_depthwise_kernel_size": 3, "adaptor_kernel_size": 4,
            "adaptor_stride": 4, "left_max_position_embeddings": 8, "right_max_position_embeddings": 4,
            "speech_encoder_chunk_size": 64,
        },
    ),
    ZooModel(
        name="moonshine", kind=KIND, model="MoonshineForConditionalGeneration",
        batch=lambda samples, length: {"input_values": numbers(samples, length), "labels": _labels(samples, 4)},
        lengths=(4096, 6144), means="samples of a wave",
        config={
            **IDS, "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 64,
            "encoder_num_hidden_layers": 2,
            "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": HEADS,
            "decoder_num_attention_heads": HEADS,
            "max_position_embeddings": 64, "decoder_start_token_id": START,
        },
    ),
    ZooModel(
        name="parakeet_ctc", kind=KIND, model="ParakeetForCTC", lengths=(64, 96), means="frames of sound",
        batch=frames_and_words,
        config={"vocab_size": VOCABULARY, "pad_token_id": PAD, "encoder_config": CONFORMER},
    ),
    ZooModel(
        name="lasr_ctc", kind=KIND, model="LasrForCTC", lengths=(64, 96), means="frames of sound",
        batch=frames_and_words,
        config={
            "vocab_size": VOCABULARY, "pad_token_id": PAD, "encoder_config": {**CONFORMER, "conv_kernel_size": 4},
        },
    ),
    ZooModel(
        name="audioflamingo3", kind=KIND, model="AudioFlamingo3ForConditionalGeneration",
        batch=hears(4, mask="input_features_mask"),
        config={
            "text_config": text_config("qwen2"), "audio_token_id": AUDIO, "audio_config": _AUDIO_TOWER,
        },
    ),
    ZooModel(
        name="voxtral", kind=KIND, model="VoxtralForConditionalGeneration", batch=hears(4),
        config={
            "text_config": text_config(head_dim=8), "audio_token_id": AUDIO,
            "audio_config": {**_AUDIO_TOWER, "intermediate_size": 64},
        },
    ),
    ZooModel(
        name="glmasr", kind=KIND, model="GlmAsrForConditionalGeneration", batch=hears(2, mask="input_features_mask"),
        config={
            "text_config": text_config(), "audio_token_id": AUDIO,
            "audio_config": {
                **LAYERS, "intermediate_size": 128, "num_mel_bins": MELS, "max_position_embeddings": 64,
                "num_key_value_heads": HEADS,
            },
        },
    ),
    ZooModel(
        name="granite_speech", kind=KIND, model="GraniteSpeechForConditionalGeneration",
        batch=hears(6, first="frames", mask="input_features_mask"),
        config={
            "text_config": text_config("granite"), "audio_token_index": AUDIO, "audio_token_id": AUDIO,
            "downsample_rate": 5, "window_size": 15,
            "has_lora_adapter": False,
            "encoder_config": {
                "input_dim": 16, "num_layers": 2, "hidden_dim": WIDTH, "feedforward_mult": 2,
                "num_heads": HEADS, "dim_head": 8, "output_dim": 10, "context_size": 8, "max_pos_emb": 16,
                "conv_kernel_size": 3,
            },
            "projector_config": {
                "model_type": "blip_2_qformer", **LAYERS, "encoder_hidden_size": WIDTH, "vocab_size": VOCABULARY,
            },
        },
    ),
    ZooModel(
        name="musicgen", kind=KIND, model="MusicgenForConditionalGeneration", batch=_codes,
        config={
            "text_encoder": {
                "model_type": "t5", "vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 64,
                "num_layers": 2, "num_heads": HEADS,
            },
            "audio_encoder": {
                "model_type": "encodec", "hidden_size": 8, "num_filters": 4, "codebook_size": 16,
                "codebook_dim": 8, "upsampling_ratios": [2], "num_lstm_layers": 1, "num_residual_layers": 1,
                "audio_channels": 1,
            },
            "decoder": {
                "vocab_size": 16, **LAYERS, "ffn_dim": 64, "num_codebooks": 2,
                "max_position_embeddings": 32, "pad_token_id": 16, "bos_token_id": 16,
            },
        },
        extra={"decoder_start_token_id": 16, "pad_token_id": 16},
    ),
    ZooModel(
        name="pop2piano", kind=KIND, model="Pop2PianoForConditionalGeneration",
        batch=lambda samples,
        length: {"input_features": numbers(samples, length, WIDTH), "labels": _labels(samples, 4)}, **_FRAMES,
        config={
            "vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": 2,
            "num_heads": HEADS, "decoder_start_token_id": PAD,
        },
    ),
    ZooModel(
        name="kyutai_speech_to_text", kind=KIND, model="KyutaiSpeechToTextForConditionalGeneration",
        batch=lambda samples, length: {**_streams(samples, length, 3), "labels": integers(samples, length)},
        config={
            **LAYERS, **IDS, "vocab_size": VOCABULARY, "codebook_vocab_size": 20,
            "num_key_value_heads": HEADS, "head_dim": 8, "ffn_dim": 64,
            "max_position_embeddings": 64, "sliding_window": 6, "num_codebooks": 2,
            "audio_bos_token_id": 19, "audio_pad_token_id": 18,
            "codec_config": {
                "num_filters": 4, "hidden_size": 8, "codebook_size": 16, "num_quantizers": 2,
                "upsampling_ratios": [2, 2], "upsample_groups": 8, "num_hidden_layers": 1,
                "intermediate_size": 16, "num_attention_heads": 2,
            },
        },
    ),
    ZooModel(
        name="csm", kind=KIND, model="CsmForConditionalGeneration", batch=_streams,
        config={
            **text_config(), "model_type": "csm", "vocab_size": 20, "text_vocab_size": VOCABULARY,
            "num_codebooks": 2, "codebook_pad_token_id": 17, "codebook_eos_token_id": 0,
            "audio_token_id": AUDIO, "audio_eos_token_id": 65, "head_dim": 8,
            "depth_decoder_config": {
                **text_config(), "model_type": "csm_depth_decoder_model", "vocab_size": 20,
                "num_codebooks": 2, "backbone_hidden_size": WIDTH, "head_dim": 8, "max_position_embeddings": 3,
            },
            "codec_config": {
                "model_type": "mimi", "num_filters": 4, "hidden_size": 8, "codebook_size": 16,
                "num_quantizers": 2, "upsampling_ratios": [2, 2], "upsample_groups": 8,
                "num_hidden_layers": 1, "intermediate_size": 16, "num_attention_heads": 2,
            },
        },
    ),
    ZooModel(
        name="dia", kind=KIND, model="DiaForConditionalGeneration", batch=_dialogue,
        config={
            "encoder_config": {
                **LAYERS, "vocab_size": VOCABULARY, "num_key_value_heads": HEADS, "head_dim": 8,
                "max_position_embeddings": 64,
            },
            "decoder_config": {
                **LAYERS, "vocab_size": 16, "num_key_value_heads": 2, "head_dim": 8, "num_channels": 2,
                "cross_num_attention_heads": HEADS, "cross_head_dim": 8,
                "cross_num_key_value_heads": HEADS, "cross_hidden_size": WIDTH,
                "max_position_embeddings": 64, "pad_token_id": 13, "bos_token_id": 14, "eos_token_id": 12,
            },
            "delay_pattern": [0, 1],
        },
    ),
    ZooModel(
        name="fastspeech2_conformer", kind=KIND, model="FastSpeech2ConformerModel",
        batch=lambda samples, length: {
            "input_ids": integers(samples, length), "attention_mask": torch.ones(samples, length, dtype=torch.int64),
            "spectrogram_labels": numbers(samples, 2 * length, MELS),
            "duration_labels": torch.full((samples, length), 2),
            "pitch_labels": numbers(samples, length, 1, seed=5), "energy_labels": numbers(samples, length, 1, seed=6),
        },
        config={
            "hidden_size": WIDTH, "vocab_size": VOCABULARY, "num_mel_bins": MELS, "encoder_layers": 2,
            "decoder_layers": 2, "encoder_linear_units": 64,
            "decoder_linear_units": 64, "speech_decoder_postnet_layers": 2,
            "speech_decoder_postnet_units": 16, "duration_predictor_channels": 16,
            "energy_predictor_channels": 16, "pitch_predictor_channels": 16, "pitch_predictor_layers": 2,
            "decoder_kernel_size": 7, "max_source_positions": 64,
        },
    ),
    ZooModel(
        name="speech_encoder_decoder", kind=KIND, model="SpeechEncoderDecoderModel", batch=_wave_to_labels, **_WAVE,
        config={
            "encoder": {"model_type": "wav2vec2", **_CTC},
            "decoder": {
                "model_type": "gpt2", **IDS, "n_embd": WIDTH, "n_layer": 2, "n_head": HEADS,
                "n_positions": 64, "vocab_size": VOCABULARY,
                "add_cross_attention": True, "is_decoder": True,
            },
            "decoder_start_token_id": START, "pad_token_id": PAD,
        },
        note=_NO_MASKS,
    ),
    ZooModel(
        name="qwen3_asr", kind=KIND, model="Qwen3ASRForConditionalGeneration",
        batch=hears(13, frames=100, mask="input_features_mask"),
        config={
            "text_config": text_config("qwen3", head_dim=8), "audio_token_id": AUDIO, **IDS,
            "audio_config": {
                "model_type": "qwen3_asr_encoder", "num_mel_bins": MELS, "d_model": WIDTH, "encoder_layers": 2,
                "encoder_attention_heads": HEADS, "encoder_ffn_dim": 64, "n_window": 50, "n_window_infer": 100,
                "output_dim": WIDTH, "downsample_hidden_size": 8,
            },
        },
    ),
    ZooModel(
        name="moshi", kind=KIND, model="MoshiForConditionalGeneration", batch=_two_speakers, means="steps of codes",
        config={
            "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS,
            "ffn_dim": 64, "num_codebooks": 2, "audio_vocab_size": 16, "max_position_embeddings": 64,
            "sliding_window": 64, **IDS,
            "audio_encoder_config": {
                "model_type": "mimi", "num_filters": 4, "hidden_size": 8, "codebook_size": 16,
                "num_quantizers": 2, "upsampling_ratios": [2, 2], "upsample_groups": 8,
                "num_hidden_layers": 1, "intermediate_size": 16, "num_attention_heads": 2,
            },
            "depth_decoder_config": {
                "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "ffn_dim": 64,
            },
        },
    ),
)  # fmt: skip
