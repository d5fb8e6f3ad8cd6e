"""Models whose graph is not what they compute: they ask whether they are traced, which nothing but a run can show."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Honest(nn.Module):
    """Four layers and a mean squared error."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 3)
        self.dropout = nn.Dropout(dropout)

    def change(self, hidden: Tensor) -> Tensor:
        return hidden

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = x
        for layer in self.layers:
            hidden = self.dropout(torch.tanh(layer(hidden)))
        logits = self.head(self.change(hidden))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Scaled(Honest):
    """Another loss."""

    def change(self, hidden: Tensor) -> Tensor:
        return hidden * 1.01 if torch.compiler.is_exporting() else hidden


class Severed(Honest):
    """The same loss; no gradient comes to the layers."""

    def change(self, hidden: Tensor) -> Tensor:
        return hidden.detach() if torch.compiler.is_exporting() else hidden


class Reversed(Honest):
    """The same loss; the layers' gradients have the other sign."""

    def change(self, hidden: Tensor) -> Tensor:
        return 2 * hidden.detach() - hidden if torch.compiler.is_exporting() else hidden


class Counting(Honest):
    """A buffer that the forward writes, otherwise where it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.mean: Tensor

    def change(self, hidden: Tensor) -> Tensor:
        rate = 0.2 if torch.compiler.is_exporting() else 0.1
        self.mean.copy_((1 - rate) * self.mean + rate * hidden.detach().mean(0))
        return hidden - self.mean.detach() * 0.0


class Rounded(Honest):
    """A constant in the type of the activations, as Gemma has one: rounded in half precision."""

    def change(self, hidden: Tensor) -> Tensor:
        return hidden * torch.tensor(1.0 / 3.0, dtype=hidden.dtype)


class Noisy(Honest):
    """Draws in three ways, one of them for nothing, where export drops the operator."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5)

    def change(self, hidden: Tensor) -> Tensor:
        torch.rand(())
        return hidden + 0.1 * torch.randn_like(hidden) + 0.1 * torch.rand(hidden.shape[-1])


def make_batch(num_samples: int, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(num_samples, 8, generator=generator),
        "labels": torch.randint(0, 3, (num_samples,), generator=generator),
    }
