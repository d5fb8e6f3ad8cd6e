"""Modules whose forward leaves something behind for the next one: buffers, counters, queues, averages, codebooks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

from gpp_benchmarks.zoo._catalogue import Batch, numbers
from gpp_benchmarks.zoo.plain._entry import SAMPLES, WIDTH, SmallNet, plain, vectors

KIND = "state"
Loss = dict[str, Tensor]


class DinoCenter(SmallNet):
    """DINO: the teacher's centre is assigned anew in every forward."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1, WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss of centred features."""
        hidden = self.first(x)
        self.center = 0.9 * self.center + 0.1 * hidden.detach().mean(0, keepdim=True)
        return self.loss(hidden - self.center, y)


class KlAnnealing(SmallNet):
    """A VAE's weight of the divergence grows with a Python counter."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return reconstruction plus an annealed penalty."""
        self.step += 1
        hidden = self.first(x)
        beta = min(1.0, self.step / 8)
        return {"loss": self.loss(hidden, y)["loss"] + beta * hidden.square().mean()}


class UpdateCounter(SmallNet):
    """A counter in a buffer, as BatchNorm has one, that the loss reads."""

    updates: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("updates", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return a loss that is warmed up over four calls."""
        self.updates += 1
        return {"loss": self.loss(self.first(x), y)["loss"] * (self.updates / 4).clamp(max=1.0)}


class WarmUpSwitch(SmallNet):
    """Another loss after the first three calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return an absolute error first, then a squared one."""
        self.calls += 1
        hidden = self.first(x)
        if self.calls <= 3:
            return {"loss": (self.head(hidden) - y).abs().mean()}
        return self.loss(hidden, y)


class StatefulRnn(SmallNet):
    """Truncated backpropagation through time: the last hidden state is kept for the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.h: Tensor | None = None

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss of a state that goes on."""
        hidden = torch.tanh(self.first(x) + (self.h if self.h is not None else 0))
        self.h = hidden.detach()
        return self.loss(hidden, y)


class Moco(nn.Module):
    """MoCo: a momentum encoder and a queue of keys with a pointer."""

    queue: Tensor
    pointer: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(WIDTH, 4 * SAMPLES), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _enqueue(self, keys: Tensor) -> None:
        pointer = int(self.pointer)
        self.queue[:, pointer : pointer + len(keys)] = keys.T
        self.pointer[0] = (pointer + len(keys)) % self.queue.shape[1]

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return InfoNCE of queries against their keys and the queue."""
        q = F.normalize(self.projection(self.query(x)), dim=1)
        with torch.no_grad():
            for ours, theirs in zip(self.query.parameters(), self.key.parameters(), strict=True):
                theirs.data = theirs.data * 0.9 + ours.data * 0.1
            k = F.normalize(self.key(y), dim=1)
        positive = (q * k).sum(1, keepdim=True)
        logits = torch.cat([positive, q @ self.queue.clone().detach()], dim=1) / 0.2
        loss = F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))
        self._enqueue(k)
        return {"loss": loss}


class HiddenTeacher(SmallNet):
    """A mean teacher in a list, so that it is no submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = [nn.Linear(WIDTH, WIDTH).requires_grad_(False)]

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss, and the distance to the teacher."""
        teacher = self.teacher[0]
        with torch.no_grad():
            for ours, theirs in zip(self.first.parameters(), teacher.parameters(), strict=True):
                theirs.lerp_(ours, 0.1)
            wanted = teacher(x)
        hidden = self.first(x)
        return {"loss": self.loss(hidden, y)["loss"] + (hidden - wanted).square().mean()}


class VqEma(nn.Module):
    """VQ-VAE: a codebook of moving averages, and the straight-through estimator."""

    codes: Tensor
    counts: Tensor
    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        codes = torch.randn(6, WIDTH)
        self.register_buffer("codes", codes)
        self.register_buffer("counts", torch.ones(6))
        self.register_buffer("sums", codes.clone())

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return reconstruction and commitment."""
        z = self.encoder(x)
        chosen = F.one_hot(torch.cdist(z, self.codes).argmin(1), 6).float()
        with torch.no_grad():
            self.counts.data.mul_(0.8).add_(chosen.sum(0), alpha=0.2)
            self.sums.data.mul_(0.8).add_(chosen.T @ z, alpha=0.2)
            self.codes.data.copy_(self.sums / (self.counts[:, None] + 1e-5))
        q = chosen @ self.codes
        commitment = (z - q.detach()).square().mean()
        return {"loss": (self.decoder(z + (q - z).detach()) - y).square().mean() + 0.25 * commitment}


class MemoryBank(nn.Module):
    """Instance discrimination: features of every sample of the data are kept, by its index."""

    bank: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("bank", torch.randn(12, WIDTH))

    def forward(self, x: Tensor, index: Tensor) -> Loss:
        """Return how well samples are told apart."""
        features = F.normalize(self.head(self.encoder(x)), dim=1)
        loss = F.cross_entropy(features @ self.bank.clone().T, index)
        with torch.no_grad():
            self.bank.index_copy_(0, index, 0.5 * self.bank[index] + 0.5 * features)
        return {"loss": loss}


def indexed(number: int) -> Batch:
    """Return vectors, each with its place in the data."""
    order = torch.randperm(12, generator=torch.Generator().manual_seed(number))
    return {"x": numbers(SAMPLES, WIDTH, seed=10 + number), "index": order[:SAMPLES]}


class ActNorm(SmallNet):
    """Glow: scale and shift are set from the first batch."""

    is_ready: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("is_ready", torch.tensor(False))

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss of normalised features."""
        hidden = self.first(x)
        if not self.is_ready:
            with torch.no_grad():
                self.shift.data.copy_(-hidden.mean(0))
                self.scale.data.copy_(1 / (hidden.std(0) + 1e-3))
                self.is_ready.fill_(True)
        return self.loss(self.scale * (hidden + self.shift), y)


class RewardBaseline(SmallNet):
    """A moving average of the loss in a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.average = 0.0

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss over its average."""
        loss = self.loss(self.first(x), y)["loss"]
        self.average = 0.9 * self.average + 0.1 * loss.item()
        return {"loss": loss / (1 + self.average)}


class TensorAverage(SmallNet):
    """An average in a plain tensor attribute that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.average = torch.zeros(WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss of features without their average."""
        hidden = self.first(x)
        self.average = 0.8 * self.average + 0.2 * hidden.detach().mean(0)
        return self.loss(hidden - self.average, y)


class KeptAttention(SmallNet):
    """Keeps its last activations for whoever looks at them; no later call reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss."""
        hidden = F.softmax(self.first(x), dim=-1)
        self.last = hidden.detach()
        return self.loss(hidden, y)


class CachedMask(SmallNet):
    """Makes a mask at the first call and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: Tensor | None = None

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss of masked features."""
        if self.mask is None or self.mask.shape[-1] != x.shape[-1]:
            self.mask = (torch.arange(x.shape[-1]) % 3 > 0).float()
        return self.loss(self.first(x) * self.mask, y)


class LazyBuffer(SmallNet):
    """Registers a table as a buffer where it is first called."""

    table: Tensor

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss of rotated features."""
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.cos(torch.arange(WIDTH).float()), persistent=False)
        return self.loss(self.first(x) * self.table, y)


class RouterBias(nn.Module):
    """DeepSeek-V3's balance without a loss: a bias of each expert moves by the sign of its load."""

    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("bias", torch.zeros(4))

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss of two experts a sample."""
        hidden = self.body(x)
        scores = torch.sigmoid(self.router(hidden))
        chosen = (scores + self.bias).topk(2).indices
        with torch.no_grad():
            load = F.one_hot(chosen, 4).sum((0, 1)).float()
            self.bias += 0.1 * torch.sign(load.mean() - load)
        gates = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
        out = sum(gates[:, i : i + 1] * expert(hidden) for i, expert in enumerate(self.experts))
        return {"loss": (out - y).square().mean()}


class FakeQuantized(SmallNet):
    """Quantisation-aware training: an observer's moving extremes and the rounding they give."""

    def __init__(self) -> None:
        super().__init__()
        self.quantize: Any = FakeQuantize(
            observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255, dtype=torch.quint8
        )

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss of rounded features."""
        return self.loss(self.quantize(self.first(x)), y)


class SpectralNorm(SmallNet):
    """Spectral norm as a parametrisation: a power iteration a forward."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.first)

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss."""
        return self.loss(self.first(x), y)


class HookedSpectralNorm(SmallNet):
    """The older spectral norm, whose hook sets the weight."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.spectral_norm(self.first)

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss."""
        return self.loss(self.first(x), y)


class BatchNorm(SmallNet):
    """BatchNorm and its running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss."""
        return self.loss(self.norm(self.first(x)), y)


class FrozenBatchNorm(BatchNorm):
    """A frozen tower whose BatchNorm is in eval, beside parts that train."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.running_mean = torch.randn(WIDTH)
        self.first.requires_grad_(False)
        self.norm.requires_grad_(False).eval()


class CallLog(SmallNet):
    """Notes what it was called with, in lists and sets that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []
        self.kinds: set[str] = set()

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss."""
        self.shapes.append(tuple(x.shape))
        self.kinds.add(str(x.dtype))
        return self.loss(self.first(x), y)


MODELS = (
    *plain(
        KIND, vectors, DinoCenter, KlAnnealing, UpdateCounter, WarmUpSwitch, StatefulRnn,
        Moco, HiddenTeacher, VqEma, ActNorm, RewardBaseline,
        TensorAverage, KeptAttention, CachedMask, LazyBuffer, RouterBias, FakeQuantized, SpectralNorm,
        HookedSpectralNorm, BatchNorm, FrozenBatchNorm, CallLog,
    ),
    *plain(KIND, indexed, MemoryBank),
)  # fmt: skip
