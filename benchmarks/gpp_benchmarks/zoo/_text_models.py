"""Language models and encoders of text: in one tower, with experts, state spaces or sparse attention."""

from __future__ import annotations

from typing import Any

from gpp_benchmarks.zoo._entries import IDS, LAYERS, VOCABULARY, ZooModel, masked_text, text, text_config

KIND = "text"

BERT: dict[str, Any] = {**LAYERS, **IDS, "vocab_size": VOCABULARY, "max_position_embeddings": 64}

MODELS = (
    ZooModel(name="llama", kind=KIND, model="LlamaForCausalLM", batch=text, config=text_config()),
    ZooModel(
        name="mixtral", kind=KIND, model="MixtralForCausalLM", batch=text,
        config=text_config("mixtral", num_local_experts=4, num_experts_per_tok=2),
    ),
    ZooModel(
        name="longformer", kind=KIND, model="LongformerForMaskedLM", batch=masked_text,
        config={**BERT, "attention_window": 4},
    ),
    ZooModel(
        name="reformer", kind=KIND, model="ReformerModelWithLMHead", batch=text, lengths=(8, 16),
        config={
            **IDS, "vocab_size": VOCABULARY, "hidden_size": 32, "feed_forward_size": 64, "num_attention_heads": 4,
            "attention_head_size": 8, "attn_layers": ["local", "local"], "is_decoder": True, "axial_pos_embds": False,
            "max_position_embeddings": 64, "local_attn_chunk_length": 4,
        },
    ),
)  # fmt: skip
