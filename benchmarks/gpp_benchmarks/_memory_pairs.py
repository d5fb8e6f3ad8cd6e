"""The models and plans of `gpp bench memory`: small HuggingFace models, cut by hand, fitted in several ways."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_LAYERS: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 3,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "clip": {
        "model_type": "clip", "architectures": ["CLIPModel"], "projection_dim": 32,
        "text_config": {
            **_LAYERS, "vocab_size": 128, "max_position_embeddings": 32, "bos_token_id": 0, "pad_token_id": 1,
            "eos_token_id": 127,
        },
        "vision_config": {**_LAYERS, "image_size": 32, "patch_size": 8},
    },
    "t5": {
        "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "vocab_size": 128, "d_model": 64,
        "d_kv": 16, "d_ff": 256, "num_layers": 3, "num_heads": 4, "decoder_start_token_id": 0,
        "dropout_rate": 0.1,
    },
    "gpt2": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 128, "n_positions": 32,
        "n_embd": 64, "n_layer": 4, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2,
    },
    "whisper": {
        "model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "vocab_size": 128,
        "num_mel_bins": 8, "d_model": 64, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256, "max_source_positions": 32,
        "max_target_positions": 32, "decoder_start_token_id": 1, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "suppress_tokens": None, "begin_suppress_tokens": None,
    },
}  # fmt: skip
STAGES: dict[str, tuple[tuple[str, ...], ...]] = {
    "clip": (("vision_model",), ("text_model",), ("*",)),
    "t5": (("encoder",), ("decoder.embed_tokens", "decoder.block.0", "decoder.block.1"), ("*",)),
    "gpt2": (("transformer.wte", "transformer.h.0", "transformer.h.1"), ("*",)),
    "whisper": (
        ("model.encoder.conv1", "model.encoder.conv2", "model.encoder.layers.0"),
        ("model.encoder",),
        ("model.decoder.embed_tokens", "model.decoder.layers.0", "model.decoder.layers.1"),
        ("*",),
    ),
}
"""Two to four stages: branches that meet (CLIP), an encoder read by every decoder layer, chains."""

PLANS: dict[str, dict[str, str]] = {
    "none": {"recompute": "off", "swap": "off"},
    "recompute": {"recompute": "auto", "swap": "off"},
    "swap": {"recompute": "off", "swap": "auto"},
    "both": {"recompute": "auto", "swap": "auto"},
    "full": {"recompute": "full", "swap": "off"},
}
"""What each plan may do (``graph_pipeline.memory``)."""

SHARES = {"recompute": 0.55, "swap": 0.7, "both": 0.6}
"""Of the activations of each stage, what its device has room for: less than all, and more than is left at least.

Beside what is kept, a plan needs what it works with."""

HOST = {"none": 25.0, "recompute": 25.0, "swap": 25.0, "both": 0.05, "full": 25.0}
"""GB/s to host memory; so few for ``both`` that swapping alone is dearer than a mixture."""

LEAST_SHARE = 0.1
"""A stage with less than this share of the largest one's activations has nothing worth fitting (CLIP's loss)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCase:
    """A model under several plans.

    Args:
        loss_unit: samples of one loss, which every stage takes at a time.
    """

    model: str
    plans: tuple[str, ...]
    mini_batch: int = 16
    loss_unit: int = 4
    length: int = 16

    @property
    def num_ranks(self) -> int:
        """Return the number of stages, each on one rank."""
        return len(STAGES[self.model])

    def block(self, plan: str, memory_gb: list[float] | None) -> dict[str, Any]:
        """Return the ``graph_pipeline`` block.

        Args:
            memory_gb: of every rank; None: more than enough.
        """
        devices = [
            {
                "name": "cpu",
                "memory_gb": gb,
                "tflops": 0.05,
                "memory_gb_per_s": 10.0,
                "host_gb_per_s": HOST[plan],
            }
            for gb in memory_gb or [1000.0] * self.num_ranks
        ]
        stages = [{"modules": list(paths), "ranks": [rank]} for rank, paths in enumerate(STAGES[self.model])]
        return {
            "plan": {"stages": stages},
            "schedule": "1f1b",
            "slicing": "off",
            "memory": PLANS[plan],
            "cluster": {"name": "here", "devices": devices, "links": [{"name": "memory", "gb_per_s": 5.0}]},
        }
