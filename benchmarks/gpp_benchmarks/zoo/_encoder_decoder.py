"""Encoder-decoder models of text, and language models that recompute or route: text to text."""

from __future__ import annotations

from typing import Any

import torch

from gpp_benchmarks.zoo._entries import (
    HEADS,
    IDS,
    PAD,
    START,
    VOCABULARY,
    WIDTH,
    Batch,
    ZooModel,
    integers,
    numbers,
    text_config,
    to_text,
)

KIND = "encoder-decoder"

BART: dict[str, Any] = {
    **IDS, "vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "max_position_embeddings": 64, "decoder_start_token_id": START,
}  # fmt: skip
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": HEADS,
    "decoder_start_token_id": PAD, "pad_token_id": PAD,
}  # fmt: skip

_SERIES: dict[str, Any] = {
    "prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2, 3], "num_time_features": 1,
    "num_static_categorical_features": 0,
    "num_static_real_features": 0, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
}  # fmt: skip


def _series(samples: int, context: int) -> Batch:
    """Return series of a past, three steps longer than what is attended to for their lags, and of a future."""
    past = context + 3
    return {
        "past_values": numbers(samples, past), "past_time_features": numbers(samples, past, 1, seed=3),
        "past_observed_mask": torch.ones(samples, past), "future_values": numbers(samples, 4, seed=4),
        "future_time_features": numbers(samples, 4, 1, seed=5), "future_observed_mask": torch.ones(samples, 4),
    }  # fmt: skip


MODELS = (
    ZooModel(name="bart", kind=KIND, model="BartForConditionalGeneration", batch=to_text, config=BART),
    ZooModel(name="t5", kind=KIND, model="T5ForConditionalGeneration", batch=to_text, config=T5),
    ZooModel(
        name="led", kind=KIND, model="LEDForConditionalGeneration", batch=to_text,
        config={
            **BART, "attention_window": 4, "max_encoder_position_embeddings": 64,
            "max_decoder_position_embeddings": 64,
        },
    ),
    ZooModel(
        name="pegasus_x", kind=KIND, model="PegasusXForConditionalGeneration", batch=to_text,
        config={**BART, "num_global_tokens": 4, "block_size": 4},
    ),
    *(
        ZooModel(name=name, kind=KIND, model=model, batch=to_text, config={**BART, **more})
        for name, model, more in (
            ("mbart", "MBartForConditionalGeneration", {}),
            ("plbart", "PLBartForConditionalGeneration", {}),
            ("mvp", "MvpForConditionalGeneration", {}),
            ("marian", "MarianMTModel", {"max_position_embeddings": 64}),
            ("pegasus", "PegasusForConditionalGeneration", {}),
            ("blenderbot", "BlenderbotForConditionalGeneration", {}),
            ("blenderbot_small", "BlenderbotSmallForConditionalGeneration", {}),
            ("m2m_100", "M2M100ForConditionalGeneration", {}),
            ("bigbird_pegasus", "BigBirdPegasusForConditionalGeneration", {"attention_type": "original_full"}),
            ("nllb_moe", "NllbMoeForConditionalGeneration", {
                "num_experts": 4, "expert_capacity": 16, "encoder_sparse_step": 2, "decoder_sparse_step": 2,
            }),
        )
    ),
    ZooModel(
        name="bigbird_pegasus_sparse", kind=KIND, model="BigBirdPegasusForConditionalGeneration",
        batch=to_text, lengths=(48, 64),
        config={
            **BART, "attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1,
            "max_position_embeddings": 128,
        },
        note="which blocks attend at random is drawn by numpy, from one seed",
    ),
    *(
        ZooModel(name=name, kind=KIND, model=model, batch=to_text, config={**T5, **more})
        for name, model, more in (
            ("mt5", "MT5ForConditionalGeneration", {}),
            ("umt5", "UMT5ForConditionalGeneration", {}),
            (
                "longt5_local", "LongT5ForConditionalGeneration",
                {"local_radius": 3, "encoder_attention_type": "local"},
            ),
            ("longt5_global", "LongT5ForConditionalGeneration", {
                "local_radius": 3, "encoder_attention_type": "transient-global", "global_block_size": 4,
            }),
            ("switch_transformers", "SwitchTransformersForConditionalGeneration", {
                "num_experts": 4, "expert_capacity": 16, "num_sparse_encoder_layers": 1,
                "num_sparse_decoder_layers": 1,
            }),
        )
    ),
    ZooModel(
        name="t5gemma", kind=KIND, model="T5GemmaForConditionalGeneration", batch=to_text,
        config={
            "encoder": {
                **text_config(), "model_type": "t5_gemma_module", "head_dim": 8, "query_pre_attn_scalar": 8,
                "sliding_window": 6,
            },
            "decoder": {
                **text_config(), "model_type": "t5_gemma_module", "head_dim": 8, "query_pre_attn_scalar": 8,
                "sliding_window": 6,
            },
            "vocab_size": VOCABULARY,
        },
    ),
    ZooModel(
        name="prophetnet", kind=KIND, model="ProphetNetForConditionalGeneration", batch=to_text,
        config={
            **IDS, "vocab_size": VOCABULARY, "hidden_size": WIDTH, "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64, "num_encoder_layers": 2,
            "num_decoder_layers": 2, "num_encoder_attention_heads": HEADS,
            "num_decoder_attention_heads": HEADS, "ngram": 2,
            "max_position_embeddings": 64, "num_buckets": 8, "relative_max_distance": 16,
            "decoder_start_token_id": START,
        },
    ),
    ZooModel(
        name="fsmt", kind=KIND, model="FSMTForConditionalGeneration",
        batch=lambda samples,
        length: {**to_text(samples, length), "decoder_input_ids": integers(samples, max(length // 2, 4), seed=5)},
        config={**BART, "langs": ["en", "de"], "src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY},
    ),
    ZooModel(
        name="encoder_decoder", kind=KIND, model="EncoderDecoderModel", batch=to_text,
        config={
            "encoder": {"model_type": "bert", **text_config("bert")},
            "decoder": {"model_type": "bert", **text_config("bert"), "is_decoder": True, "add_cross_attention": True},
            "decoder_start_token_id": START, "pad_token_id": PAD,
        },
    ),
    *(
        ZooModel(
            name=name, kind=KIND, model=model, means="nothing: a past has the length that the model is made for",
            batch=lambda samples, length: _series(samples, 8), config={**_SERIES, **more}, draws=name == "informer",
        )
        for name, model, more in (
            ("time_series_transformer", "TimeSeriesTransformerForPrediction", {}),
            ("informer", "InformerForPrediction", {"attention_type": "prob", "sampling_factor": 2, "distil": False}),
            (
                "autoformer", "AutoformerForPrediction",
                {"label_length": 2, "moving_average": 3, "autocorrelation_factor": 2},
            ),
        )
    ),
)  # fmt: skip
