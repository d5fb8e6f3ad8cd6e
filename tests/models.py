"""Tiny models with random weights, and batches for them: what tests of every layer run on.

``model, make_batch = build("clip")``; ``make_batch(num_samples, seed)`` returns a batch dict.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Batch = dict[str, Any]
MakeBatch = Callable[..., Batch]
Built = tuple[nn.Module, MakeBatch]

VOCABULARY = 64
TEXT_LENGTH = 8


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _token_ids(shape: tuple[int, ...], generator: torch.Generator, *, last: int = 60) -> torch.Tensor:
    return torch.randint(3, last, shape, generator=generator)


def _ragged_mask(num_samples: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Return a right-padded attention mask; every sample keeps at least three tokens."""
    lengths = torch.randint(3, length + 1, (num_samples, 1), generator=generator)
    return (torch.arange(length)[None, :] < lengths).long()


def _sizes(layers: int, dropout: float) -> dict[str, Any]:
    """Return the sizes of an encoder or a decoder, by the keys that most configurations have."""
    return {
        "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
        "num_hidden_layers": layers, "attention_dropout": dropout,
    }  # fmt: skip


def _clip(layers: int, dropout: float) -> Built:
    from transformers import CLIPConfig, CLIPModel

    sizes = _sizes(layers, dropout)
    config = CLIPConfig(
        text_config={
            **sizes, "vocab_size": VOCABULARY, "max_position_embeddings": 16,
            "eos_token_id": 63, "bos_token_id": 62, "pad_token_id": 0,
        },
        vision_config={**sizes, "image_size": 8, "patch_size": 4, "num_channels": 1},
        projection_dim=16,
    )  # fmt: skip

    def make_batch(num_samples: int, seed: int = 0) -> Batch:
        generator = _generator(seed)
        mask = _ragged_mask(num_samples, TEXT_LENGTH, generator)
        ids = _token_ids((num_samples, TEXT_LENGTH), generator) * mask
        ids[torch.arange(num_samples), mask.sum(1) - 1] = 63
        pixels = torch.randn(num_samples, 1, 8, 8, generator=generator)
        return {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels, "return_loss": True}

    return CLIPModel(config), make_batch


def _siglip(layers: int, dropout: float) -> Built:
    from transformers import SiglipConfig, SiglipModel

    sizes = _sizes(layers, dropout)
    config = SiglipConfig(
        text_config={
            **sizes, "vocab_size": VOCABULARY, "max_position_embeddings": TEXT_LENGTH,
            "bos_token_id": 1, "eos_token_id": 2,
        },
        vision_config={**sizes, "image_size": 8, "patch_size": 4, "num_channels": 1},
    )  # fmt: skip

    def make_batch(num_samples: int, seed: int = 0) -> Batch:
        generator = _generator(seed)
        return {
            "input_ids": _token_ids((num_samples, TEXT_LENGTH), generator),
            "pixel_values": torch.randn(num_samples, 1, 8, 8, generator=generator),
            "return_loss": True,
        }

    return SiglipModel(config), make_batch


def _llava(layers: int, dropout: float) -> Built:
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    sizes = _sizes(layers, dropout)
    vision = {**sizes, "model_type": "clip_vision_model", "image_size": 8, "patch_size": 4, "num_channels": 3}
    text = {**sizes, "model_type": "llama", "num_key_value_heads": 2, "vocab_size": VOCABULARY}
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=63, image_token_id=63)

    def make_batch(num_samples: int, seed: int = 0) -> Batch:
        generator = _generator(seed)
        ids = _token_ids((num_samples, TEXT_LENGTH + 4), generator)
        ids[:, 1:5] = 63
        labels = ids.clone()
        labels[:, :5] = -100
        mask = torch.ones_like(ids)
        mask[0, -2:] = 0  # a mask of ones would let eager attention, but not the traced one, skip it
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "pixel_values": torch.randn(num_samples, 3, 8, 8, generator=generator),
            "labels": labels,
        }

    return LlavaForConditionalGeneration(config), make_batch


def _whisper(layers: int, dropout: float) -> Built:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=4, d_model=32, encoder_layers=layers, decoder_layers=layers,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
        max_source_positions=8, max_target_positions=16, dropout=dropout, attention_dropout=dropout,
        activation_dropout=0.0, decoder_start_token_id=1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip

    def make_batch(num_samples: int, seed: int = 0) -> Batch:
        generator = _generator(seed)
        labels = _token_ids((num_samples, 6), generator)
        labels[0, -2:] = -100
        return {
            "input_features": torch.randn(num_samples, 4, 16, generator=generator),
            "labels": labels,
        }

    return WhisperForConditionalGeneration(config), make_batch


def _t5(layers: int, dropout: float) -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=layers, num_heads=4,
        decoder_start_token_id=0, dropout_rate=dropout,
    )  # fmt: skip

    def make_batch(num_samples: int, seed: int = 0) -> Batch:
        generator = _generator(seed)
        labels = _token_ids((num_samples, 6), generator)
        labels[0, -2:] = -100
        return {
            "input_ids": _token_ids((num_samples, TEXT_LENGTH), generator),
            "attention_mask": _ragged_mask(num_samples, TEXT_LENGTH, generator),
            "labels": labels,
        }

    return T5ForConditionalGeneration(config), make_batch


def _text_batch(num_samples: int, seed: int = 0) -> Batch:
    ids = _token_ids((num_samples, TEXT_LENGTH), _generator(seed))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def _gpt2(layers: int, dropout: float) -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=32, n_layer=layers, n_head=4,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip

    return GPT2LMHeadModel(config), _text_batch


def _llama(layers: int, dropout: float) -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32, attention_dropout=dropout,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip

    return LlamaForCausalLM(config), _text_batch


def _bert(layers: int, dropout: float) -> Built:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=16,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip

    def make_batch(num_samples: int, seed: int = 0) -> Batch:
        generator = _generator(seed)
        ids = _token_ids((num_samples, TEXT_LENGTH), generator)
        labels = torch.where(torch.rand(ids.shape, generator=generator) < 0.4, ids, -100)
        labels[:, 0] = ids[:, 0]
        mask = _ragged_mask(num_samples, TEXT_LENGTH, generator)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    return BertForMaskedLM(config), make_batch


class Dlrm(nn.Module):
    """A recommendation model: seven embedding branches and a dense one meet in an interaction."""

    def __init__(self, width: int, tables: int = 7) -> None:
        super().__init__()
        self.tables = tables
        self.embeddings = nn.ModuleList(
            nn.Sequential(nn.Embedding(20 + i, width), nn.Linear(width, width), nn.ReLU())
            for i in range(tables)
        )
        self.bottom = nn.Sequential(nn.Linear(4, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 2 * width), nn.ReLU(), nn.Linear(2 * width, 1))

    def forward(self, dense: torch.Tensor, labels: torch.Tensor, **sparse: torch.Tensor) -> torch.Tensor:
        """Return the mean click loss; ``sparse_i`` holds the i-th categorical feature, (samples,)."""
        features = [self.embeddings[i](sparse[f"sparse_{i}"]) for i in range(self.tables)]
        x = self.bottom(dense)
        stacked = torch.stack([x, *features], dim=1)
        products = stacked @ stacked.transpose(1, 2)
        row, column = torch.tril_indices(self.tables + 1, self.tables + 1, offset=-1)
        logits = self.top(torch.cat([x, products[:, row, column]], dim=1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, labels)


def _click_batch(num_samples: int, seed: int = 0) -> Batch:
    generator = _generator(seed)
    sparse = {f"sparse_{i}": torch.randint(0, 20, (num_samples,), generator=generator) for i in range(7)}
    dense = torch.randn(num_samples, 4, generator=generator)
    labels = torch.randint(0, 2, (num_samples,), generator=generator).to(torch.get_default_dtype())
    return {"dense": dense, **sparse, "labels": labels}


class BatchNormMlp(nn.Module):
    """A chain with BatchNorm; returns a dict."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(layers)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the mean cross entropy and the logits."""
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def _class_batch(num_samples: int, seed: int = 0) -> Batch:
    generator = _generator(seed)
    return {
        "x": torch.randn(num_samples, 8, generator=generator),
        "labels": torch.randint(0, 3, (num_samples,), generator=generator),
    }


class TwoBranch(nn.Module):
    """Two branches of unequal length that meet in an add; optionally the first one is frozen."""

    def __init__(self, layers: int, dropout: float, *, frozen: bool = False) -> None:
        super().__init__()
        self.left = nn.Sequential(*(self._layer(dropout) for _ in range(layers)))
        self.right = nn.Sequential(*(self._layer(dropout) for _ in range(layers + 1)))
        self.head = nn.Linear(8, 3)
        if frozen:
            self.left.requires_grad_(False)

    @staticmethod
    def _layer(dropout: float) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Dropout(dropout))

    def forward(self, x: torch.Tensor, y: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the mean cross entropy and the logits."""
        logits = self.head(self.left(x) + self.right(y))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def _two_branch_batch(num_samples: int, seed: int = 0) -> Batch:
    batch = _class_batch(num_samples, seed)
    return {"x": batch["x"], "y": batch["x"].flip(1) * 0.5, "labels": batch["labels"]}


class MultiSink(nn.Module):
    """One trunk, two heads, each with its own loss; the model's loss is their weighted sum."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.classify = nn.Linear(8, 3)
        self.regress = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return cross entropy of one head plus half the squared error of the other."""
        hidden = x
        for layer in self.trunk:
            hidden = torch.tanh(layer(hidden))
        classified = nn.functional.cross_entropy(self.classify(hidden), labels)
        return classified + 0.5 * nn.functional.mse_loss(self.regress(hidden), x)


class SequenceFirst(nn.Module):
    """`nn.MultiheadAttention` with (length, samples, width) tensors: merges length with samples."""

    def __init__(self, layers: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=False) for _ in range(layers)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy; ``x`` is (samples, length, 8)."""
        x = x.transpose(0, 1)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x.mean(0)), labels)


def _sequence_batch(num_samples: int, seed: int = 0) -> Batch:
    x = torch.randn(num_samples, 5, 8, generator=_generator(seed))
    return {**_class_batch(num_samples, seed), "x": x}


_BUILDERS: dict[str, Callable[..., Built]] = {
    "clip": _clip,
    "siglip": _siglip,
    "llava": _llava,
    "whisper": _whisper,
    "t5": _t5,
    "gpt2": _gpt2,
    "llama": _llama,
    "bert": _bert,
    "dlrm": lambda layers, dropout: (Dlrm(width=8), _click_batch),
    "batch_norm_mlp": lambda layers, dropout: (BatchNormMlp(layers), _class_batch),
    "two_branch": lambda layers, dropout: (TwoBranch(layers, dropout), _two_branch_batch),
    "frozen_branch": lambda layers, dropout: (TwoBranch(layers, dropout, frozen=True), _two_branch_batch),
    "multi_sink": lambda layers, dropout: (MultiSink(layers), _class_batch),
    "sequence_first": lambda layers, dropout: (SequenceFirst(layers, dropout), _sequence_batch),
}
MODELS = tuple(_BUILDERS)
"""Names that `build` knows."""


def build(
    name: str,
    *,
    layers: int = 2,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: str = "cpu",
) -> Built:
    """Return a tiny model of that name in training mode and a function that makes its batches.

    Args:
        layers: layers of each tower or branch.
        dtype: of parameters, floating buffers and floating batch entries (float64 for exact tests).
        seed: of the weights; the caller's random state is left as it was.
        device: ``meta`` builds the model without weights.
    """
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        model, plain_batch = _BUILDERS[name](layers=layers, dropout=dropout)
    model = model.to(dtype).train()

    def make_batch(num_samples: int, seed: int = 0) -> Batch:
        batch = plain_batch(num_samples, seed)
        return {key: _cast(value, dtype) for key, value in batch.items()}

    assert torch.get_default_dtype() == before
    return model, make_batch


def _cast(value: Any, dtype: torch.dtype) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if is_float else value


@functools.cache
def captured_once(name: str, num_samples: int, **options: Any) -> Any:
    """Return the capture of a model as `build` makes it, shared by the tests of a process: nobody may change it."""
    from gpp_plugin.capture.export import capture_model

    model, make_batch = build(name, **options)
    return capture_model(model, make_batch(num_samples, 0))
