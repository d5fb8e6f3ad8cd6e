"""Models with edges that have broken other pipelines, each small enough to cut by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = dict[str, Any]
WIDTH = 16


class Swappable(nn.Module):
    """Two branches of equal shapes whose results enter asymmetrically: swapping them changes the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.right = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, a: Tensor, b: Tensor, target: Tensor) -> dict[str, Tensor]:
        right = self.right(b)  # called in the order right, left
        left = self.left(a)
        return {"loss": ((self.head(left - 2.0 * right).squeeze(-1) - target) ** 2).mean()}


class Diamond(nn.Module):
    """One tensor read by three later stages, one of them far away (a skip)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.down = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid())
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, a: Tensor, target: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.stem(a))
        joined = self.up(h) * self.down(h) + h
        return {"loss": ((self.head(joined).squeeze(-1) - target) ** 2).mean()}


class _Stem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 2 * WIDTH)
        self.score = nn.Linear(WIDTH, 4)

    def forward(self, a: Tensor) -> tuple[Tensor, ...]:
        both = self.project(a)
        view = both[:, :WIDTH]  # a view of a larger storage, not contiguous
        turned = both[:, WIDTH:].reshape(-1, 4, WIDTH // 4).transpose(1, 2)
        scores = self.score(a)
        choice = scores.argmax(-1)
        mask = scores > 0.0
        weight = scores.softmax(-1).detach()
        return view, turned, choice, mask, weight, both.mean(-1).to(torch.bfloat16), a.double().sum(-1) * 0.1


class _Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, view: Tensor, turned: Tensor, mask: Tensor) -> Tensor:
        flat = turned.transpose(1, 2).reshape(-1, WIDTH)
        return torch.tanh(self.mix(view)) + flat * mask.any(-1, keepdim=True)


class _Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, WIDTH)
        self.out = nn.Linear(WIDTH, 4)

    def forward(
        self, h: Tensor, choice: Tensor, mask: Tensor, weight: Tensor, low: Tensor, high: Tensor
    ) -> Tensor:
        logits = self.out(h + self.table(choice)).masked_fill(mask, 0.5) * weight
        return logits + low.float()[:, None] + high.float()[:, None]


class OddEdges(nn.Module):
    """Views, int64, bool, bf16, fp64 and no-gradient floats across three stages."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _Stem()
        self.middle = _Middle()
        self.head = _Head()

    def forward(self, a: Tensor, labels: Tensor) -> dict[str, Tensor]:
        view, turned, choice, mask, weight, low, high = self.stem(a)
        h = self.middle(view, turned, mask)
        logits = self.head(h, choice, mask, weight, low, high)
        return {"loss": functional.cross_entropy(logits, labels)}


class ShortEdges(nn.Module):
    """An int16 tensor between two stages, which NCCL has no type for."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Embedding(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, a: Tensor, target: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.stem(a))
        choice = h.argmax(-1).to(torch.int16)
        joined = h + self.table(choice.long())
        return {"loss": ((self.head(joined).squeeze(-1) - target) ** 2).mean()}


class _Interaction(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.einsum("bi,bj->bij", a, b).flatten(1).sin()


class NoParameters(nn.Module):
    """A stage that only computes: no optimizer there, but gradients pass through."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, 8)
        self.right = nn.Linear(WIDTH, 8)
        self.interaction = _Interaction()
        self.head = nn.Linear(64, 1)

    def forward(self, a: Tensor, b: Tensor, target: Tensor) -> dict[str, Tensor]:
        crossed = self.interaction(self.left(a), self.right(b))
        return {"loss": ((self.head(crossed).squeeze(-1) - target) ** 2).mean()}


class SharedBias(nn.Module):
    """A tensor without a batch axis, made from parameters on one stage, read on two others."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Sequential(nn.Embedding(WIDTH, 8), nn.Linear(8, WIDTH))
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, a: Tensor, target: Tensor) -> dict[str, Tensor]:
        bias = self.bias(torch.arange(WIDTH, device=a.device))
        h = torch.tanh(self.first(a) @ bias)
        h = torch.tanh(self.second(h) @ bias.t())
        return {"loss": ((self.head(h).squeeze(-1) - target) ** 2).mean()}


class Frozen(nn.Module):
    """A frozen tower before a trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.adapter = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)
        self.tower.requires_grad_(False)

    def forward(self, a: Tensor, target: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.adapter(self.tower(a)))
        return {"loss": ((self.head(h).squeeze(-1) - target) ** 2).mean()}


class Detached(nn.Module):
    """A trainable tower that no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, a: Tensor, target: Tensor) -> dict[str, Tensor]:
        h = self.tower(a).detach()
        return {"loss": ((self.head(h).squeeze(-1) - target) ** 2).mean()}


class Bags(nn.Module):
    """Several rows of an input belong to one sample, how many changes from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, bags: Tensor, target: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.each(bags)).reshape(target.shape[0], -1, WIDTH).mean(1)
        return {"loss": ((self.head(h).squeeze(-1) - target) ** 2).mean()}


class EvaluationHead(nn.Module):
    """A head and outputs of other layouts that only evaluation makes, and a buffer that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.classify = nn.Linear(WIDTH, 4)
        self.extra = nn.Linear(WIDTH, 3)
        self.register_buffer("table", torch.arange(5.0))

    def forward(self, a: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        h = torch.tanh(self.stem(a))
        answer = {"logits": self.classify(h)}
        if not self.training:
            answer["extra"] = self.extra(h)
            answer["turned"] = h.t() * 2.0
            answer["norm"] = self.extra.weight.square().sum()
        if labels is not None:
            answer["loss"] = functional.cross_entropy(answer["logits"], labels)
        return answer


_MODELS: dict[str, type[nn.Module]] = {
    "swappable": Swappable,
    "diamond": Diamond,
    "odd_edges": OddEdges,
    "short_edges": ShortEdges,
    "no_parameters": NoParameters,
    "shared_bias": SharedBias,
    "frozen": Frozen,
    "detached": Detached,
    "bags": Bags,
    "evaluation_head": EvaluationHead,
}


def build_odd(name: str) -> tuple[nn.Module, Callable[[int, int], Batch]] | None:
    """Return the model of that name with seeded weights and its batches, or None."""
    if name not in _MODELS:
        return None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _MODELS[name]()
    keys = model.forward.__code__.co_varnames[1 : model.forward.__code__.co_argcount]

    def make_batch(num_samples: int, seed: int = 0) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        every = {
            "a": torch.randn(num_samples, WIDTH, generator=generator),
            "b": torch.randn(num_samples, WIDTH, generator=generator),
            "bags": torch.randn(num_samples * (seed + 1), WIDTH, generator=generator),
            "target": torch.randn(num_samples, generator=generator),
            "labels": torch.randint(0, 4, (num_samples,), generator=generator),
        }
        return {key: every[key] for key in keys}

    return model, make_batch
