"""Small models as people write them whose forward leaves something behind for the next one."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

WIDTH = 6


def make_batch(num_samples: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, num_samples, WIDTH, generator=generator)
    return {"x": x, "y": y}


class Plain(nn.Module):
    """Two layers and a squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def loss(self, hidden: Tensor, y: Tensor) -> Tensor:
        return (self.second(torch.tanh(hidden)) - y).square().mean()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": self.loss(self.first(x), y)}


class Centre(Plain):
    """DINO's centre: a buffer that is assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x)
        old = self.centre
        self.centre = 0.9 * self.centre + 0.1 * hidden.detach().mean(0)
        return {"loss": self.loss(hidden * self.centre.cos() - old, y)}


class Counter(Plain):
    """A number that grows, and its value before that."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.scale = 0, 1.5

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        before = self.calls
        self.calls += 1
        self.scale *= 0.75
        return {"loss": self.loss(self.first(x), y) * self.scale / (self.calls + before)}


class Annealed(Plain):
    """Warm-up and annealing inside the forward, in Python's numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 3

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        self.calls = self.calls + 1
        weight = min(1.0, self.calls / 10) * 0.5 * (1 + math.cos(math.pi * self.calls / 20))
        return {"loss": self.loss(self.first(x), y) * max(weight, 1 - 0.9**self.calls)}


class Hidden(Plain):
    """Truncated backpropagation through time: nothing before the first call, then what the last one ended with."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.first(x))
        if self.hidden is not None:
            hidden = hidden + self.hidden
        self.hidden = hidden.detach()
        return {"loss": self.loss(hidden, y)}


class Moments(Plain):
    """A dict of running moments."""

    def __init__(self) -> None:
        super().__init__()
        self.moments: dict[str, Any] = {"mean": torch.zeros(WIDTH), "square": torch.ones(WIDTH), "count": 0}

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden, old = self.first(x), self.moments
        count = old["count"] + 1
        mean = old["mean"] + (hidden.detach().mean(0) - old["mean"]) / count
        square = 0.9 * old["square"] + 0.1 * hidden.detach().square().mean(0)
        self.moments = {"mean": mean, "square": square, "count": count}
        return {"loss": self.loss((hidden - mean) / square.sqrt(), y)}


class Queue(Plain):
    """The last keys, in a buffer that is assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.linspace(-1, 1, 8 * WIDTH).reshape(8, WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x)
        against = (hidden @ self.keys.T).logsumexp(1).mean()
        self.keys = torch.cat([hidden.detach(), self.keys])[: len(self.keys)]
        return {"loss": self.loss(hidden, y) + 0.1 * against}


class Momentum(Plain):
    """A momentum encoder, whose weights are put in place of the old ones."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(WIDTH, WIDTH)
        self.teacher.load_state_dict(self.first.state_dict())
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            for own, other in zip(self.teacher.parameters(), self.first.parameters(), strict=True):
                own.data = own.data * 0.9 + other.data * 0.1
            wanted = self.teacher(x)
        hidden = self.first(x)
        return {"loss": self.loss(hidden, y) + (hidden - wanted + 1).square().mean()}


class Codebook(Plain):
    """A codebook of moving averages, written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH))
        self.register_buffer("sizes", torch.ones(4))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x)
        chosen = torch.cdist(hidden.detach(), self.codes).argmin(1)
        codes = self.codes[chosen]
        with torch.no_grad():
            hot = nn.functional.one_hot(chosen, 4).to(hidden.dtype)
            self.sizes.mul_(0.9).add_(hot.sum(0), alpha=0.1)
            self.codes.copy_(0.9 * self.codes + 0.1 * hot.T @ hidden / self.sizes[:, None])
        straight = hidden + (codes - hidden).detach()
        return {"loss": self.loss(straight, y) + (hidden - codes).square().mean()}


class Spectral(Plain):
    """A parametrisation that keeps the vectors of a power iteration."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations.spectral_norm(self.first)


class Alternating(nn.Module):
    """Takes another sign in every second call, and keeps how many there were."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) if self.calls % 2 else -self.layer(x)


class Branching(Plain):
    """A module that no trace follows, with a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = Alternating()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": self.loss(self.turn(self.first(x)), y)}


class Everything(Branching):
    """A centre, a momentum encoder, what the last call ended with, and how many there were."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("centre", torch.zeros(WIDTH))
        self.calls, self.hidden = 0, None

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            for own, other in zip(self.teacher.parameters(), self.first.parameters(), strict=True):
                own.data = own.data * 0.9 + other.data * 0.1
        hidden = self.turn(torch.tanh(self.first(x))) - self.teacher(x).detach()
        hidden = hidden if self.hidden is None else hidden + 0.5 * self.hidden
        self.hidden = hidden.detach()
        self.calls += 1
        loss = self.loss(hidden - self.centre, y) * min(1.0, self.calls / 4)
        self.centre = 0.9 * self.centre + 0.1 * hidden.detach().mean(0)
        return {"loss": loss}


class Stashing(Plain):
    """Keeps what it writes before it reads it, and a table of its own: no state."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x)
        self.balance, self.num_samples = hidden.square().mean(), len(x)
        if not hasattr(self, "table") or self.longest < WIDTH:
            self.table, self.longest = torch.arange(WIDTH) / WIDTH, WIDTH
        return {"loss": self.loss(hidden + self.table, y) + self.balance}


class Growing(Plain):
    """A list that each call makes longer."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: deque[Tensor] = deque(maxlen=3)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        self.seen.append(self.first(x).detach().mean())
        return {"loss": self.loss(self.first(x), y) * sum(self.seen)}


class FirstBatch(Plain):
    """Scales by what the first batch was, for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Tensor | None = None

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x)
        if self.scale is None:
            self.scale = hidden.detach().std()
        return {"loss": self.loss(hidden / self.scale, y)}


class Thawing(Plain):
    """Sets a gradient flag in its forward."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        self.second.bias.requires_grad_(False)
        return {"loss": self.loss(self.first(x), y)}


class Listed(Plain):
    """A mean teacher in a list, so that it is no submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.teachers: Any = [nn.Linear(WIDTH, WIDTH).requires_grad_(False)]

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            for own, other in zip(self.teachers[0].parameters(), self.first.parameters(), strict=True):
                own.lerp_(other, 0.1)
        return {"loss": self.loss(self.first(x) - self.teachers[0](x).detach(), y)}


class Registered(Listed):
    """The same as its refusal says."""

    def __init__(self) -> None:
        super().__init__()
        self.teachers = nn.ModuleList(self.teachers)


class LateTable(Plain):
    """Registers a buffer in its first forward."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.arange(WIDTH) / WIDTH)
        return {"loss": self.loss(self.first(x) * self.late, y)}


CARRIED = (
    Centre,
    Counter,
    Annealed,
    Hidden,
    Moments,
    Queue,
    Momentum,
    Codebook,
    Spectral,
    Branching,
    Stashing,
    Registered,
)
REFUSED = {
    Growing: "the forward keeps seen for the next one, and it holds more, or less, after each forward",
    FirstBatch: "scale",
    Listed: "state teachers",
    LateTable: "the forward registers buffer late; register it in __init__, or call the model once",
    Thawing: "the forward sets requires_grad of second.bias",
}
