"""Encoder-decoder models of text, and language models that recompute or route: text to text."""

from __future__ import annotations

from typing import Any

from gpp_benchmarks.zoo._entries import (
    HEADS,
    IDS,
    PAD,
    START,
    VOCABULARY,
    WIDTH,
    ZooModel,
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

MODELS = (
    ZooModel(name="bart", kind=KIND, model="BartForConditionalGeneration", batch=to_text, config=BART),
    ZooModel(name="t5", kind=KIND, model="T5ForConditionalGeneration", batch=to_text, config=T5),
    ZooModel(
        name="led", kind=KIND, model="LEDForConditionalGeneration", batch=to_text,
        config={**BART, "attention_window": 4, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64},
    ),
    ZooModel(
        name="pegasus_x", kind=KIND, model="PegasusXForConditionalGeneration", batch=to_text,
        config={**BART, "num_global_tokens": 4, "block_size": 4},
    ),
)  # fmt: skip
