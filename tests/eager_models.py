"""Small models with parts that no tracing sees through: custom backwards, loops on values, lists of dicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 8
Builder = Callable[[], tuple[nn.Module, Callable[..., dict[str, Any]]]]


class Reversal(torch.autograd.Function):
    """Gradient reversal (Ganin and Lempitsky 2015): nothing forward, minus the gradient backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * gradient, None


class UnitGradient(torch.autograd.Function):
    """Divides the gradient by its norm over all samples: a backward that mixes them where the forward does not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm()


reverse = Reversal.apply  # bound before anything is traced, as modules do that define one


class Adversarial(nn.Module):
    """A classifier, and a critic behind gradient reversal that the encoder is to fool."""

    def __init__(self, function: Callable[[Tensor], Tensor] = lambda x: reverse(x, 0.5)) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(3)
        )
        self.classifier = nn.Linear(WIDTH, 1)
        self.critic = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        for layer in self.encoder:
            x = x + layer(x)
        guess = self.critic(self.function(x))
        return {"loss": (self.classifier(x) - y).square().mean() + (guess + y).square().mean()}


class Router(nn.Module):
    """Sends each row to the expert that its values choose: a loop over those who were chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor, *, options: dict[str, Any] | None = None) -> dict[str, Any]:
        self.calls += 1
        weights = self.gate(x).softmax(-1)
        best = weights.argmax(-1)
        out = torch.zeros_like(x)
        for number in best.unique().tolist():
            rows = (best == number).nonzero()[:, 0]
            out = out.index_add(0, rows, self.experts[number](x[rows]) * weights[rows, number, None])
        return {"out": out * self.scale, "weights": weights, "options": options, "count": 2}


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.router = Router()
        self.options = {"number": number, "device": torch.device("cpu")}

    def forward(self, x: Tensor) -> Tensor:
        found = self.router(self.linear(x).tanh(), options=self.options)
        return x + found["out"] * found["count"] + found["weights"].mean()


class Routed(nn.Module):
    """Layers that each hold a module with a loop on values."""

    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(number) for number in range(3))
        self.head = nn.Linear(WIDTH, 1)
        if frozen:
            self.layers[1].router.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (self.head(x) - y).square().mean()


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(number) for number in range(2))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"hidden": x}


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)

    def forward(self, hidden: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.linear(reverse(hidden, 0.5)) + y).square().mean()}


class Parts(nn.Module):
    """Two modules in a row: in one process; in a graph each is a captured part of its own name."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Body()
        self.critic = Critic()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        loss: dict[str, Tensor] = self.critic(self.body(x)["hidden"], y)
        return loss


def as_graph(model: Parts) -> Any:
    """Return the parts as a graph of stages: the first on two ranks, the second on one."""
    import gpp_plugin

    graph = gpp_plugin.StageGraph("parts")
    graph.capture("body", model.body, inputs=["x"], outputs=["hidden"], ranks=[0, 1], stages=2)
    graph.capture("critic", model.critic, inputs=["hidden", "y"], outputs=["loss"], ranks=[2])
    return graph


def vectors(num_samples: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(num_samples, WIDTH, generator=generator),
        "y": torch.randn(num_samples, 1, generator=generator),
    }


def vilt() -> tuple[nn.Module, Callable[..., dict[str, Any]]]:
    from transformers import ViltConfig, ViltForQuestionAnswering

    config = ViltConfig(
        vocab_size=64, image_size=16, patch_size=4, max_position_embeddings=40, hidden_size=16, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=20, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        num_labels=3,
    )  # fmt: skip

    def make_batch(num_samples: int, seed: int = 0) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        return {
            "input_ids": torch.randint(3, 64, (num_samples, 6), generator=generator),
            "attention_mask": torch.ones(num_samples, 6, dtype=torch.long),
            "pixel_values": torch.randn(num_samples, 3, 16, 16, generator=generator),
            "pixel_mask": torch.ones(num_samples, 16, 16, dtype=torch.long),
            "labels": torch.rand(num_samples, 3, generator=generator),
        }

    return ViltForQuestionAnswering(config), make_batch


def texts(num_samples: int, seed: int = 0, *, length: int = 16) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 64, (num_samples, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def reformer() -> tuple[nn.Module, Callable[..., dict[str, Any]]]:
    from transformers import ReformerConfig, ReformerModelWithLMHead

    config = ReformerConfig(
        vocab_size=64, attention_head_size=8, hidden_size=16, feed_forward_size=20, num_attention_heads=2,
        axial_pos_shape=[4, 4], axial_pos_embds_dim=[8, 8], attn_layers=["local", "local"], is_decoder=True,
        local_attn_chunk_length=4, hidden_dropout_prob=0.0, local_attention_probs_dropout_prob=0.0,
    )  # fmt: skip

    def make_batch(num_samples: int, seed: int = 0) -> dict[str, Any]:
        return {k: v for k, v in texts(num_samples, seed).items() if k != "attention_mask"}

    return ReformerModelWithLMHead(config), make_batch


def mixtral() -> tuple[nn.Module, Callable[..., dict[str, Any]]]:
    """A mixture of experts, which balances their load: the loss of a batch depends on where all its tokens go."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=20, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, use_cache=False,
        pad_token_id=0,
    )  # fmt: skip
    return MixtralForCausalLM(config), texts


def detr() -> tuple[nn.Module, Callable[..., dict[str, Any]]]:
    """A detector: its labels are a list of dicts, its loss matches boxes to them by the Hungarian algorithm."""
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], out_features=["stage2"], hidden_act="relu"
    )
    config = DetrConfig(
        use_timm_backbone=False, backbone_config=backbone, d_model=16, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=20, decoder_ffn_dim=20, num_queries=5,
        dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, num_labels=4,
    )  # fmt: skip

    def make_batch(num_samples: int, seed: int = 0) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        return {
            "pixel_values": torch.randn(num_samples, 3, 32, 32, generator=generator),
            "pixel_mask": torch.ones(num_samples, 32, 32, dtype=torch.long),
            "labels": [
                {
                    "class_labels": torch.randint(0, 4, (count,), generator=generator),
                    "boxes": torch.rand(count, 4, generator=generator) * 0.3 + 0.3,
                }
                for count in [1 + (sample + seed) % 3 for sample in range(num_samples)]
            ],
        }

    return DetrForObjectDetection(config), make_batch


MODELS: dict[str, Builder] = {
    "parts": lambda: (Parts(), vectors),
    "detr": detr,
    "mixtral": mixtral,
    "adversarial": lambda: (Adversarial(), vectors),
    "unit gradient": lambda: (Adversarial(UnitGradient.apply), vectors),
    "routed": lambda: (Routed(), vectors),
    "routed, one frozen": lambda: (Routed(frozen=True), vectors),
    "vilt": vilt,
    "reformer": reformer,
}


def build_eager(name: str) -> tuple[nn.Module, Callable[..., dict[str, Any]]]:
    torch.manual_seed(0)
    return MODELS[name]()
