"""Language models and encoders of text: in one tower, with experts, state spaces or sparse attention."""

from __future__ import annotations

from typing import Any

import torch

from gpp_benchmarks.zoo._entries import (
    HEADS,
    IDS,
    LAYERS,
    VOCABULARY,
    ZooModel,
    classes,
    integers,
    masked_text,
    text,
    text_config,
)

KIND = "text"

BERT: dict[str, Any] = {**LAYERS, **IDS, "vocab_size": VOCABULARY, "max_position_embeddings": 64}

_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
}

_NUMPY = "which blocks attend at random is drawn by numpy, from one seed"

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
    *(
        ZooModel(name=name, kind=KIND, model=model, batch=text, config=text_config(name, **more))
        for name, model, more in (
            ("mistral", "MistralForCausalLM", {"sliding_window": 6}),
            ("qwen2", "Qwen2ForCausalLM", {}),
            ("qwen3", "Qwen3ForCausalLM", {"head_dim": 8}),
            ("qwen2_moe", "Qwen2MoeForCausalLM", {**_EXPERTS, "shared_expert_intermediate_size": 16}),
            ("qwen3_moe", "Qwen3MoeForCausalLM", {**_EXPERTS, "head_dim": 8}),
            ("gemma", "GemmaForCausalLM", {"head_dim": 8}),
            ("gemma2", "Gemma2ForCausalLM", {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6}),
            ("gemma3_text", "Gemma3ForCausalLM", {
                "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6,
                "layer_types": ["sliding_attention", "full_attention"],
            }),
            ("phi", "PhiForCausalLM", {}),
            ("phi3", "Phi3ForCausalLM", {}),
            ("phimoe", "PhimoeForCausalLM", {"num_local_experts": 4}),
            ("olmo", "OlmoForCausalLM", {}),
            ("olmo2", "Olmo2ForCausalLM", {}),
            ("olmoe", "OlmoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2}),
            ("cohere", "CohereForCausalLM", {}),
            ("stablelm", "StableLmForCausalLM", {}),
            ("starcoder2", "Starcoder2ForCausalLM", {}),
            ("granite", "GraniteForCausalLM", {}),
            ("granitemoe", "GraniteMoeForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
            ("gpt_oss", "GptOssForCausalLM", {
                "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6,
                "layer_types": ["sliding_attention", "full_attention"],
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            }),
            ("deepseek_v3", "DeepseekV3ForCausalLM", {
                "moe_intermediate_size": 16, "n_routed_experts": 4, "n_shared_experts": 1,
                "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
                "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8,
                "v_head_dim": 8, "qk_nope_head_dim": 8,
                "num_key_value_heads": HEADS,
            }),
            ("glm4_moe", "Glm4MoeForCausalLM", {
                "head_dim": 8, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_shared_experts": 1,
                "num_experts_per_tok": 2,
                "first_k_dense_replace": 1,
            }),
            ("llama4_text", "Llama4ForCausalLM", {
                "head_dim": 8, "intermediate_size_mlp": 64, "num_local_experts": 2,
                "attention_chunk_size": 8, "interleave_moe_layer_step": 1,
                "attn_temperature_tuning": False,
            }),
            ("lfm2", "Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8}),
            ("jamba", "JambaForCausalLM", {
                "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
                "expert_layer_offset": 1,
                "use_mamba_kernels": False, "mamba_d_state": 4, "mamba_dt_rank": 4,
            }),
            ("bamba", "BambaForCausalLM", {
                "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_expand": 2,
                "mamba_chunk_size": 8, "attn_layer_indices": [1],
            }),
            ("recurrent_gemma", "RecurrentGemmaForCausalLM", {
                "lru_width": 32, "attention_window_size": 6, "block_types": ["recurrent", "attention"], "head_dim": 8,
            }),
            ("nemotron", "NemotronForCausalLM", {}),
            ("persimmon", "PersimmonForCausalLM", {}),
            ("ernie4_5", "Ernie4_5ForCausalLM", {}),
            ("minimax", "MiniMaxForCausalLM", {
                "num_local_experts": 4, "layer_types": ["linear_attention", "full_attention"],
                "head_dim": 8, "block_size": 4,
            }),
            ("jetmoe", "JetMoeForCausalLM", {"num_local_experts": 4, "kv_channels": 8, "num_key_value_heads": 2}),
            ("qwen3_next", "Qwen3NextForCausalLM", {
                **_EXPERTS, "head_dim": 8, "shared_expert_intermediate_size": 16, "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
                "linear_num_key_heads": 2, "linear_num_value_heads": 2,
                "layer_types": ["linear_attention", "full_attention"],
            }),
        )
    ),
    *(
        ZooModel(name=name, kind=KIND, model=model, batch=text, config={**IDS, "vocab_size": VOCABULARY, **more})
        for name, model, more in (
            ("gpt2", "GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": HEADS, "n_positions": 64}),
            (
                "gpt_bigcode", "GPTBigCodeForCausalLM",
                {"n_embd": 32, "n_layer": 2, "n_head": HEADS, "n_positions": 64},
            ),
            (
                "gptj", "GPTJForCausalLM",
                {"n_embd": 32, "n_layer": 2, "n_head": HEADS, "n_positions": 64, "rotary_dim": 4},
            ),
            (
                "codegen", "CodeGenForCausalLM",
                {"n_embd": 32, "n_layer": 2, "n_head": HEADS, "n_positions": 64, "rotary_dim": 4},
            ),
            ("openai", "OpenAIGPTLMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": HEADS, "n_positions": 64}),
            ("ctrl", "CTRLLMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": HEADS, "n_positions": 64, "dff": 64}),
            ("gpt_neo", "GPTNeoForCausalLM", {
                "hidden_size": 32, "num_layers": 2, "num_heads": HEADS,
                "attention_types": [[["global", "local"], 1]], "window_size": 6,
                "max_position_embeddings": 64,
            }),
            ("gpt_neox", "GPTNeoXForCausalLM", {**LAYERS, "max_position_embeddings": 64}),
            (
                "opt", "OPTForCausalLM",
                {**LAYERS, "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
            ),
            ("bloom", "BloomForCausalLM", {"hidden_size": 32, "n_layer": 2, "n_head": HEADS}),
            (
                "falcon", "FalconForCausalLM",
                {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": HEADS},
            ),
            (
                "mpt", "MptForCausalLM",
                {"d_model": 32, "n_layers": 2, "n_heads": HEADS, "max_seq_len": 64, "expansion_ratio": 2},
            ),
            (
                "xglm", "XGLMForCausalLM",
                {
                    "d_model": 32, "num_layers": 2, "attention_heads": HEADS, "ffn_dim": 64,
                    "max_position_embeddings": 64,
                },
            ),
            ("biogpt", "BioGptForCausalLM", {**LAYERS, "max_position_embeddings": 64}),
            ("dbrx", "DbrxForCausalLM", {
                "d_model": 32, "n_heads": HEADS, "n_layers": 2, "max_seq_len": 64,
                "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
                "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
            }),
            (
                "mamba", "MambaForCausalLM",
                {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "use_mambapy": False},
            ),
            ("mamba2", "Mamba2ForCausalLM", {
                "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "num_heads": 8, "head_dim": 8,
                "n_groups": 1, "chunk_size": 8, "expand": 2,
            }),
            (
                "rwkv", "RwkvForCausalLM",
                {
                    "hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32,
                    "intermediate_size": 64, "context_length": 64,
                },
            ),
        )
    ),
    *(
        ZooModel(
            name=name, kind=KIND, model=model, batch=masked_text, config={**BERT, **more}, lengths=lengths, note=note,
        )
        for name, model, lengths, note, more in (
            ("bert", "BertForMaskedLM", (8, 12), "", {}),
            ("roberta", "RobertaForMaskedLM", (8, 12), "", {}),
            ("xlm_roberta", "XLMRobertaForMaskedLM", (8, 12), "", {}),
            ("albert", "AlbertForMaskedLM", (8, 12), "one layer's weights serve all layers", {"embedding_size": 16}),
            ("electra", "ElectraForMaskedLM", (8, 12), "", {"embedding_size": 16}),
            (
                "deberta", "DebertaForMaskedLM", (8, 12), "",
                {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
            ),
            (
                "deberta_v2", "DebertaV2ForMaskedLM", (8, 12), "",
                {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4},
            ),
            ("mpnet", "MPNetForMaskedLM", (8, 12), "", {}),
            (
                "mobilebert", "MobileBertForMaskedLM", (8, 12), "",
                {"embedding_size": 32, "intra_bottleneck_size": 16, "true_hidden_size": 16},
            ),
            ("squeezebert", "SqueezeBertForMaskedLM", (8, 12), "", {"embedding_size": 32}),
            ("convbert", "ConvBertForMaskedLM", (8, 12), "", {"embedding_size": 16, "head_ratio": 2}),
            ("big_bird", "BigBirdForMaskedLM", (8, 12), "", {"attention_type": "original_full"}),
            (
                "big_bird_sparse", "BigBirdForMaskedLM", (48, 64), _NUMPY,
                {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1},
            ),
            (
                "yoso", "YosoForMaskedLM", (8, 12),
                "its hashes are made of random numbers: use_expectation takes their mean", {"use_expectation": True},
            ),
            ("fnet", "FNetForMaskedLM", (8, 12), "", {}),
            ("roformer", "RoFormerForMaskedLM", (8, 12), "", {}),
            ("rembert", "RemBertForMaskedLM", (8, 12), "", {"input_embedding_size": 16, "output_embedding_size": 16}),
            ("ibert", "IBertForMaskedLM", (8, 12), "", {}),
            ("esm", "EsmForMaskedLM", (8, 12), "", {"mask_token_id": 3, "position_embedding_type": "rotary"}),
            (
                "modernbert", "ModernBertForMaskedLM", (8, 12), "",
                {"local_attention": 4, "global_attn_every_n_layers": 2, "reference_compile": False},
            ),
            ("luke", "LukeForMaskedLM", (8, 12), "", {"entity_vocab_size": 8, "entity_emb_size": 16}),
            ("xmod", "XmodForMaskedLM", (8, 12), "", {"languages": ["en_XX"], "default_language": "en_XX"}),
            ("tapas", "TapasForMaskedLM", (8, 12), "", {}),
            ("megatron_bert", "MegatronBertForMaskedLM", (8, 12), "", {}),
        )
    ),
    ZooModel(
        name="distilbert", kind=KIND, model="DistilBertForMaskedLM", batch=masked_text,
        config={
            "vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": HEADS,
            "max_position_embeddings": 64,
        },
    ),
    ZooModel(
        name="xlnet", kind=KIND, model="XLNetLMHeadModel", batch=text,
        config={**IDS, "vocab_size": VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": HEADS, "d_inner": 64},
    ),
    ZooModel(
        name="xlm", kind=KIND, model="XLMWithLMHeadModel", batch=text,
        config={
            "vocab_size": VOCABULARY, "n_words": VOCABULARY, "emb_dim": 32, "n_layers": 2, "n_heads": HEADS,
            "max_position_embeddings": 64, "pad_token_id": 0,
        },
    ),
    ZooModel(
        name="funnel", kind=KIND, model="FunnelForMaskedLM", batch=masked_text,
        config={
            "vocab_size": VOCABULARY, "block_sizes": [1, 1], "num_decoder_layers": 1, "d_model": 32,
            "n_head": HEADS, "d_head": 8, "d_inner": 64,
            "max_position_embeddings": 64,
        },
    ),
    ZooModel(
        name="canine", kind=KIND, model="CanineForTokenClassification", lengths=(16, 32), means="characters",
        batch=lambda samples, length: {**text(samples, length), "labels": integers(samples, length, first=0, end=3)},
        config={
            **LAYERS, **IDS, "max_position_embeddings": 64, "num_hash_functions": 2, "num_hash_buckets": 64,
            "local_transformer_stride": 4,
            "downsampling_rate": 4, "upsampling_kernel_size": 4, "num_labels": 3,
        },
    ),
    ZooModel(
        name="perceiver_text", kind=KIND, model="PerceiverForMaskedLM", batch=lambda samples,
        length: masked_text(samples, 16),
        means="nothing: texts are padded to one length",
        config={
            "vocab_size": VOCABULARY, "num_latents": 4, "d_latents": 32, "d_model": 32, "num_blocks": 1,
            "num_self_attends_per_block": 2,
            "num_self_attention_heads": 2, "num_cross_attention_heads": 2, "max_position_embeddings": 16,
            "qk_channels": 32, "v_channels": 32,
        },
    ),
    ZooModel(
        name="bert_pretraining", kind=KIND, model="BertForPreTraining", config=BERT,
        batch=lambda samples, length: {**masked_text(samples, length), "next_sentence_label": classes(samples, 2)},
    ),
    ZooModel(
        name="nystromformer", kind=KIND, model="NystromformerForMaskedLM",
        means="nothing: a text has as many tokens as there are landmarks",
        config={**BERT, "num_landmarks": 8, "segment_means_seq_len": 8},
        batch=lambda samples, length: masked_text(samples, 8),
        note="with fewer landmarks than tokens it takes no mask",
    ),
    ZooModel(
        name="bert_questions", kind=KIND, model="BertForQuestionAnswering", config=BERT,
        batch=lambda samples, length: {
            **{k: v for k, v in text(samples, length).items() if k != "labels"},
            "start_positions": torch.arange(samples) % 3,
            "end_positions": 3 + torch.arange(samples) % 3,
        },
    ),
    ZooModel(
        name="roberta_choice", kind=KIND, model="RobertaForMultipleChoice", config=BERT,
        batch=lambda samples, length: {
            "input_ids": integers(samples, 3, length),
            "attention_mask": torch.ones(samples, 3, length, dtype=torch.int64), "labels": classes(samples),
        },
    ),
    ZooModel(
        name="llama_class", kind=KIND, model="LlamaForSequenceClassification",
        config={**text_config(), "num_labels": 3},
        batch=lambda samples, length: {**text(samples, length), "labels": classes(samples)},
    ),
)  # fmt: skip
