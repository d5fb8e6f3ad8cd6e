"""Small models as people write them whose forward leaves something behind for the next one."""

from __future__ import annotations

import itertools
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
        self.begin()

    def begin(self) -> None:
        """Make what forwards keep."""

    def loss(self, hidden: Tensor, y: Tensor) -> Tensor:
        return (self.second(torch.tanh(hidden)) - y).square().mean()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": self.loss(self.first(x), y)}


class Centre(Plain):
    """DINO's centre: a buffer that is assigned."""

    def begin(self) -> None:
        self.register_buffer("centre", torch.zeros(WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x)
        old = self.centre
        self.centre = 0.9 * self.centre + 0.1 * hidden.detach().mean(0)
        return {"loss": self.loss(hidden * self.centre.cos() - old, y)}


class Counter(Plain):
    """A number that grows, and its value before that."""

    def begin(self) -> None:
        self.calls, self.scale = 0, 1.5

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        before = self.calls
        self.calls += 1
        self.scale *= 0.75
        return {"loss": self.loss(self.first(x), y) * self.scale / (self.calls + before)}


class Annealed(Plain):
    """Warm-up and annealing inside the forward, in Python's numbers."""

    def begin(self) -> None:
        self.calls = 3

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        self.calls = self.calls + 1
        weight = min(1.0, self.calls / 10) * 0.5 * (1 + math.cos(math.pi * self.calls / 20))
        return {"loss": self.loss(self.first(x), y) * max(weight, 1 - 0.9**self.calls)}


class Hidden(Plain):
    """Truncated backpropagation through time: nothing before the first call, then what the last one ended with."""

    def begin(self) -> None:
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.first(x))
        if self.hidden is not None:
            hidden = hidden + self.hidden
        self.hidden = hidden.detach()
        return {"loss": self.loss(hidden, y)}


class Moments(Plain):
    """A dict of running moments."""

    def begin(self) -> None:
        self.moments: dict[str, Any] = {"mean": torch.zeros(WIDTH), "square": torch.ones(WIDTH), "count": 0}

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden, old = self.first(x), self.moments
        count = old["count"] + 1
        mean = old["mean"] + (hidden.detach().mean(0) - old["mean"]) / count
        square = 0.9 * old["square"] + 0.1 * hidden.detach().square().mean(0)
        self.moments = {"mean": mean, "square": square, "count": count}
        return {"loss": self.loss((hidden - mean) / square.sqrt(), y)}


class Momentum(Plain):
    """A momentum encoder, whose weights are put in place of the old ones."""

    def begin(self) -> None:
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


class Spectral(Plain):
    """A parametrisation that keeps the vectors of a power iteration."""

    def begin(self) -> None:
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

    def begin(self) -> None:
        self.turn = Alternating()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": self.loss(self.turn(self.first(x)), y)}


class Everything(Branching):
    """A centre, a momentum encoder, what the last call ended with, and how many there were."""

    def begin(self) -> None:
        super().begin()
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

    def begin(self) -> None:
        self.seen: deque[Tensor] = deque(maxlen=3)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        self.seen.append(self.first(x).detach().mean())
        return {"loss": self.loss(self.first(x), y) * sum(self.seen)}


class FirstBatch(Plain):
    """Scales by what the first batch was, for ever."""

    def begin(self) -> None:
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

    def begin(self) -> None:
        self.teachers: Any = [nn.Linear(WIDTH, WIDTH).requires_grad_(False)]

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            for own, other in zip(self.teachers[0].parameters(), self.first.parameters(), strict=True):
                own.lerp_(other, 0.1)
        return {"loss": self.loss(self.first(x) - self.teachers[0](x).detach(), y)}


class Registered(Listed):
    """The same as its refusal says."""

    def begin(self) -> None:
        super().begin()
        self.teachers = nn.ModuleList(self.teachers)


class LateTable(Plain):
    """Registers a buffer in its first forward."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.arange(WIDTH) / WIDTH)
        return {"loss": self.loss(self.first(x) * self.late, y)}


class InPlace(Plain):
    """Averages in a list that is no buffer, written in place."""

    def begin(self) -> None:
        self.averages = [torch.zeros(WIDTH), torch.ones(WIDTH)]

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x)
        with torch.no_grad():
            self.averages[1].lerp_(hidden.mean(0), 0.1)
        return {"loss": self.loss(hidden * self.averages[1], y)}


class Clamped(Plain):
    """A scale that each forward clamps before it reads it, and a buffer that it writes before that."""

    def begin(self) -> None:
        self.scale = nn.Parameter(torch.full((1,), 1.5))
        self.register_buffer("mean", torch.ones(WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x)
        with torch.no_grad():
            self.scale.clamp_(max=1.2)
            self.mean.lerp_(hidden.mean(0), 0.2)
        return {"loss": self.loss(hidden * self.scale * self.mean, y)}


class Auxiliary(Plain):
    """A dict and a list of this forward's own: what hooks have seen, and losses."""

    def begin(self) -> None:
        self.features: dict[str, Tensor] = {}
        self.losses: list[Tensor] = []
        self.first.register_forward_hook(lambda module, given, made: self.features.update(first=made))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        self.losses.clear()
        hidden = self.first(x)
        self.losses.append(self.features["first"].square().mean())
        return {"loss": self.loss(hidden, y) + sum(self.losses)}


class Ring(Plain):
    """A queue in a buffer, and the next place in it as a number."""

    def begin(self) -> None:
        self.register_buffer("queue", torch.zeros(3, WIDTH))
        self.place = 0

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x)
        loss = self.loss(hidden - self.queue.mean(0), y)
        self.queue[self.place] = hidden.detach().mean(0)
        self.place = (self.place + 1) % 3
        return {"loss": loss}


class FromFirstBatch(Plain):
    """Glow's act norm: a flag in a buffer, and parameters that the first batch sets through `.data`."""

    def begin(self) -> None:
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("is_ready", torch.tensor(False))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x)
        if not self.is_ready:
            self.shift.data = -hidden.detach().mean(0)
            self.is_ready.fill_(True)
        return {"loss": self.loss(hidden + self.shift, y)}


class Baseline(Plain):
    """An average of the loss that Python has as a number."""

    def begin(self) -> None:
        self.average = 0.0

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        loss = self.loss(self.first(x), y)
        self.average = 0.9 * self.average + 0.1 * loss.item()
        return {"loss": loss / (1 + self.average)}


class WarmingUp(Plain):
    """Another loss in the first calls."""

    def begin(self) -> None:
        self.calls = 0

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        hidden = self.first(x)
        return {"loss": self.loss(hidden if self.calls > 1 else hidden.detach() * 2, y)}


class Slotted:
    """A counter in a slot."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class Helped(Plain):
    """Counts in an object of its own."""

    def begin(self) -> None:
        self.helper = Slotted()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        self.helper.calls += 1
        return {"loss": self.loss(self.first(x), y) / self.helper.calls}


class Ticking(Plain):
    """Counts by an iterator."""

    def begin(self) -> None:
        self.ticks = itertools.count(1)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": self.loss(self.first(x), y) / next(self.ticks)}


class OfClass(Plain):
    """Counts on its class."""

    calls = 0

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        type(self).calls += 1
        return {"loss": self.loss(self.first(x), y) / self.calls}


class Enclosed(Plain):
    """A mean teacher in the closure of a function."""

    def begin(self) -> None:
        teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.teacher_of = lambda: teacher

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            self.teacher_of().weight.lerp_(self.first.weight, 0.1)
        return {"loss": self.loss(self.first(x) - self.teacher_of()(x).detach(), y)}


class Overlapping(Plain):
    """Two buffers in one memory."""

    def begin(self) -> None:
        rows = torch.zeros(2, WIDTH)
        self.register_buffer("row", rows[0])
        self.register_buffer("rows", rows)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x)
        self.row.lerp_(hidden.detach().mean(0), 0.1)
        return {"loss": self.loss(hidden - self.rows.sum(0), y)}


class _Counted(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        _Counted.calls += 1
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class CountingFunction(Plain):
    """A custom function that counts its calls."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": self.loss(_Counted.apply(self.first(x)), y)}


class WatchedGradient(Plain):
    """Keeps the size of an activation's gradient, by a hook on that."""

    def begin(self) -> None:
        self.register_buffer("size", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x)
        hidden.register_hook(lambda gradient: self.size.copy_(gradient.norm()))
        return {"loss": self.loss(hidden / (1 + self.size), y)}


class _Leaving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: Tensor) -> Tensor:
        ctx.size = size
        return x / (1 + size)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0] / (1 + ctx.size)
        ctx.size.add_(0.5)
        return gradient, None


class LeftByBackward(Plain):
    """A custom function whose backward writes a buffer."""

    def begin(self) -> None:
        self.register_buffer("size", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": self.loss(_Leaving.apply(self.first(x), self.size), y)}


WHOLE = (FromFirstBatch, Baseline, WarmingUp)
"""Whose own Python reads what it keeps, so that they run as one block."""
CARRIED = (
    InPlace,
    Clamped,
    Auxiliary,
    Ring,
    *WHOLE,
    Centre,
    Counter,
    Annealed,
    Hidden,
    Moments,
    Momentum,
    Spectral,
    Branching,
    Stashing,
    Registered,
)
REFUSED = {
    Growing: "the forward keeps seen for the next one, and it holds more, or less, after each forward",
    FirstBatch: "scale",
    Listed: "the forward keeps teachers for the next one, and it holds a Linear, so it cannot be state of a stage; "
    "register it, in a list as nn.ModuleList",
    LateTable: "the forward registers buffer late; register it in __init__, or call the model once",
    Helped: "the forward keeps helper for the next one, and it holds a Slotted",
    Ticking: "the forward keeps ticks for the next one",
    OfClass: "the forward keeps calls for the next one, and it is of its class",
    Enclosed: "the forward writes into a tensor [6, 6] that none of its modules holds",
    Overlapping: "row and rows are two tensors in the same memory",
    CountingFunction: "_Counted keeps calls on its class",
    WatchedGradient: "registers a hook on a tensor's gradient, which no graph holds",
    LeftByBackward: "state size",
    Thawing: "the forward sets requires_grad of second.bias",
}
