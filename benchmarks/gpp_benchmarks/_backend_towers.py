"""Small models of `gpp bench backends`: towers that only run forwards, and something like LLaVA."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional


def _vit(samples: int) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(**_LAYERS, image_size=96, patch_size=16)
    return ViTModel(config, add_pooling_layer=False), {"pixel_values": torch.randn(samples, 3, 96, 96)}


def _bert(samples: int) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import BertConfig, BertModel

    config = BertConfig(**_LAYERS, vocab_size=512)
    ids = torch.randint(3, 500, (samples, 64))
    return BertModel(config, add_pooling_layer=False), {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
    }


def _resnet(samples: int) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import ResNetConfig, ResNetModel

    config = ResNetConfig(
        embedding_size=32, hidden_sizes=[32, 64, 128, 256], depths=[2, 2, 2, 2], layer_type="basic"
    )
    return ResNetModel(config), {"pixel_values": torch.randn(samples, 3, 96, 96)}


def _clip(samples: int) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    config = CLIPVisionConfig(**_LAYERS, image_size=96, patch_size=16)
    return CLIPVisionModel(config), {"pixel_values": torch.randn(samples, 3, 96, 96)}


def _whisper(samples: int) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(
        d_model=192,
        encoder_layers=4,
        encoder_attention_heads=3,
        encoder_ffn_dim=768,
        num_mel_bins=80,
        max_source_positions=100,
    )
    return WhisperEncoder(config), {"input_features": torch.randn(samples, 80, 200)}


def _amoeba(samples: int) -> tuple[nn.Module, dict[str, Tensor]]:
    return AmoebaLike(channels=24, cells=4), {"pixel_values": torch.randn(samples, 3, 48, 48)}


_LAYERS: dict[str, int] = {
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
}


class AmoebaLike(nn.Module):
    """Cells of five sums of two small operators each, as AmoebaNet has them: many operators, little work in each.

    Args:
        is_frozen: its normalisations are scales and shifts that no batch changes, as where a detector's backbone is.
    """

    def __init__(self, *, channels: int, cells: int, is_frozen: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.cells = nn.ModuleList(_Cell(channels, is_frozen=is_frozen) for _ in range(cells))

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        """Return the last cell's states."""
        before = now = self.stem(pixel_values)
        for cell in self.cells:
            before, now = now, cell(before, now)
        return {"last_hidden_state": now}


class _FrozenNorm(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(channels, 1, 1))
        self.shift = nn.Parameter(torch.zeros(channels, 1, 1))

    def forward(self, states: Tensor) -> Tensor:
        return states * self.scale + self.shift


class _Cell(nn.Module):
    def __init__(self, channels: int, *, is_frozen: bool) -> None:
        super().__init__()

        def entry(kernel: int) -> nn.Module:
            return nn.Sequential(
                nn.ReLU(),
                nn.Conv2d(channels, channels, kernel, padding=kernel // 2, bias=False),
                _FrozenNorm(channels) if is_frozen else nn.BatchNorm2d(channels),
            )

        pool, mean = nn.MaxPool2d(3, 1, 1), nn.AvgPool2d(3, 1, 1)
        pairs = [(entry(1), pool), (mean, entry(3)), (entry(1), entry(3)), (pool, entry(1)), (mean, entry(1))]
        self.pairs = nn.ModuleList(nn.ModuleList(pair) for pair in pairs)
        self.join = nn.Conv2d(3 * channels, channels, 1)

    def forward(self, before: Tensor, now: Tensor) -> Tensor:
        states = [before, now]
        for i, pair in enumerate(self.pairs):
            assert isinstance(pair, nn.ModuleList)
            left, right = pair
            states.append(left(states[i // 2]) + right(states[i // 2 + 1]))
        return self.join(torch.cat(states[-3:], dim=1))


TOWERS: dict[str, Callable[[int], tuple[nn.Module, dict[str, Tensor]]]] = {
    "vit": _vit,
    "bert": _bert,
    "resnet": _resnet,
    "amoeba_like": _amoeba,
    "clip_vision": _clip,
    "whisper_encoder": _whisper,
}


# ---- training behind a frozen tower --------------------------------------------------------------------------

WIDTH, VOCABULARY, TEXT = 96, 256, 24


class LlavaLike(nn.Module):
    """A frozen tower over an image, a projection, and a language model over the image's tokens and a text.

    Args:
        tower: returns states [samples, tokens, ``tower_width``], or maps [samples, ``tower_width``, rows, columns].
        layers: of the language model.
    """

    def __init__(self, tower: nn.Module, *, tower_width: int, layers: int) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=layers,
            num_attention_heads=4, max_position_embeddings=256, use_cache=False,
        )  # fmt: skip
        self.tower = tower.requires_grad_(False)
        self.projection = nn.Linear(tower_width, WIDTH)
        self.language = LlamaForCausalLM(config)

    def forward(self, pixel_values: Tensor, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss of the text's tokens, each from the image and the tokens before it."""
        states = self.tower(pixel_values)["last_hidden_state"]
        if states.ndim == 4:  # maps: a token for each of 6 x 6 cells
            states = functional.adaptive_avg_pool2d(states, 6).flatten(2).transpose(1, 2)
        words = self.language.get_input_embeddings()(input_ids)
        hidden = torch.cat([self.projection(states), words], dim=1)
        logits = self.language(inputs_embeds=hidden).logits[:, -TEXT:-1]
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())}


def _behind_clip() -> LlavaLike:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    layers = {**_LAYERS, "num_hidden_layers": 6}
    return LlavaLike(
        CLIPVisionModel(CLIPVisionConfig(**layers, image_size=96, patch_size=16)), tower_width=192, layers=6
    )


def _behind_convolutions() -> LlavaLike:
    return LlavaLike(AmoebaLike(channels=24, cells=4, is_frozen=True), tower_width=24, layers=6)


FROZEN_TOWERS: dict[str, Callable[[], LlavaLike]] = {
    "clip": _behind_clip,
    "convolutions": _behind_convolutions,
}


def llava_batch(samples: int, seed: int) -> dict[str, Tensor]:
    """Return images [samples, 3, 96, 96], and texts [samples, 24] that are their own labels."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(samples, 3, 96, 96, generator=generator)
    ids = torch.randint(3, VOCABULARY, (samples, TEXT), generator=generator)
    return {"pixel_values": pixels, "input_ids": ids, "labels": ids.clone()}
