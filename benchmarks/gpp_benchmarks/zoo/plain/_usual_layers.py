"""Modules made of torch's own layers: convolutions, recurrent nets, attention, mixtures, pairs, tied weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpp_benchmarks.zoo.plain._entry import (
    CLASSES,
    WIDTH,
    SmallNet,
    images,
    labelled,
    plain,
    sequences,
    tokens,
    vectors,
)

KIND = "layers"
Loss = dict[str, Tensor]


class Perceptron(nn.Module):
    """A multi-layer perceptron that returns cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 16), nn.GELU(), nn.Dropout(0.0), nn.LayerNorm(16), nn.Linear(16, CLASSES)
        )

    def forward(self, x: Tensor, labels: Tensor) -> Loss:
        """Return cross entropy."""
        return {"loss": F.cross_entropy(self.layers(x), labels)}


class ResidualNet(nn.Module):
    """A convolutional net with BatchNorm and skips."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, pixels: Tensor, labels: Tensor) -> Loss:
        """Return cross entropy."""
        hidden = self.stem(pixels)
        hidden = F.relu(hidden + self.block(hidden), inplace=True)
        return {"loss": F.cross_entropy(self.head(hidden.mean((2, 3))), labels)}


class UNet(nn.Module):
    """Down, up, and a skip between; GroupNorm and InstanceNorm with statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
        self.middle = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1), nn.InstanceNorm2d(8, track_running_stats=True)
        )
        self.up = nn.ConvTranspose2d(16, 3, 2, stride=2)

    def forward(self, pixels: Tensor, labels: Tensor) -> Loss:
        """Return reconstruction of a darkened picture."""
        low = self.down(pixels)
        out = self.up(torch.cat([low, self.middle(low)], dim=1))
        return {"loss": (out - pixels * labels[:, None, None, None]).square().mean()}


class Recurrent(nn.Module):
    """A recurrent layer and a head."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(width, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss of the last output."""
        out, _ = self.layer(x)
        return {"loss": (self.head(out[:, -1]) - y).square().mean()}


def gru() -> nn.Module:
    """Return a GRU of two layers."""
    return Recurrent(nn.GRU(WIDTH, WIDTH, num_layers=2, batch_first=True), WIDTH)


def two_way_lstm() -> nn.Module:
    """Return a bidirectional LSTM."""
    return Recurrent(nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True), 2 * WIDTH)


def elman_rnn() -> nn.Module:
    """Return a plain RNN with ReLU."""
    return Recurrent(nn.RNN(WIDTH, WIDTH, nonlinearity="relu", batch_first=True), WIDTH)


class TransformerEncoder(nn.Module):
    """torch's own encoder layers and positions."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.positions = nn.Parameter(0.1 * torch.randn(1, 6, WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss of means."""
        return {"loss": (self.layers(x + self.positions).mean(1) - y).square().mean()}


class CausalLm(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Loss:
        """Return the loss of next tokens."""
        hidden = self.embed(ids)
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        out, _ = self.attention(hidden, hidden, hidden, attn_mask=mask, need_weights=False)
        logits = self.head(hidden + out)
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())}


class SharedLayers(SmallNet):
    """ALBERT: one layer called three times."""

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss."""
        hidden = x
        for _ in range(3):
            hidden = torch.tanh(self.first(hidden))
        return self.loss(hidden, y)


class TiedAutoencoder(nn.Module):
    """The decoder multiplies by the encoder's weight, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.bias = nn.Linear(WIDTH, 4), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return reconstruction."""
        return {
            "loss": (F.linear(torch.relu(self.encoder(x)), self.encoder.weight.T, self.bias) - y)
            .square()
            .mean()
        }


class Adversaries(nn.Module):
    """A generator and a discriminator in one loss, each detached from the other."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.judge = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the sum of both players' losses."""
        made = self.generator(x)
        judged = F.softplus(-self.judge(y)).mean() + F.softplus(self.judge(made.detach())).mean()
        frozen = {name: p.detach() for name, p in self.judge.named_parameters()}
        fooled = F.softplus(-torch.func.functional_call(self.judge, frozen, (made,))).mean()
        return {"loss": judged + fooled}


class Contrastive(nn.Module):
    """A pair of towers, a learned temperature and an in-batch loss."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the symmetric loss."""
        left, right = F.normalize(self.left(x), dim=1), F.normalize(self.right(y), dim=1)
        logits = self.logit_scale.exp() * left @ right.T
        own = torch.arange(len(x))
        return {"loss": (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2}


class DenseExperts(nn.Module):
    """A mixture whose experts all run, and a balancing loss."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleDict({f"e{i}": nn.Linear(WIDTH, WIDTH) for i in range(4)})

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss and the balance."""
        gates = F.softmax(self.router(x), dim=-1)
        out = torch.stack([expert(x) for expert in self.experts.values()], dim=1)
        loss = ((gates[..., None] * out).sum(1) - y).square().mean()
        return {"loss": loss + 0.1 * gates.mean(0).square().sum()}


class RoutedExperts(nn.Module):
    """A mixture that gathers each expert's own tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss of the first-ranked experts."""
        hidden = self.body(x)
        gate, chosen = F.softmax(self.router(hidden), dim=-1).max(-1)
        out = torch.zeros_like(hidden)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().squeeze(1)
            if rows.numel():
                out = out.index_add(0, rows, expert(hidden[rows]) * gate[rows, None])
        return {"loss": (out - y).square().mean()}


class Ctc(nn.Module):
    """torch's CTC loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 6)

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss of the signs of three numbers as labels."""
        scores = F.log_softmax(self.head(torch.relu(self.body(x))), dim=-1).transpose(0, 1)
        labels = 1 + (y[:, :3] > 0).long()
        lengths = torch.full((len(x),), 6), torch.full((len(x),), 3)
        return {"loss": F.ctc_loss(scores, labels, *lengths)}


class HyperNetwork(nn.Module):
    """A net that makes each sample's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.body = nn.Linear(WIDTH, WIDTH * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss."""
        weights = self.maker(x).view(-1, WIDTH, WIDTH)
        return {"loss": (torch.einsum("bij,bj->bi", weights, self.body(x)) - y).square().mean()}


class LowRankAdapter(SmallNet):
    """LoRA written by hand over frozen weights."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.zeros(WIDTH, 2))

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss."""
        return self.loss(self.first(x) + F.linear(F.linear(x, self.down), self.up), y)


class Triplets(nn.Module):
    """A siamese tower and a margin."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.PReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the triplet loss against the next sample."""
        anchor, near = self.tower(x), self.tower(y)
        return {"loss": F.triplet_margin_loss(anchor, near, near.roll(1, 0), margin=2.0)}


class GivenNoise(nn.Module):
    """A VAE whose noise is a part of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return reconstruction and divergence."""
        mean, log_var = self.encoder(x).chunk(2, dim=1)
        made = self.decoder(mean + y * (0.5 * log_var).exp())
        divergence = -0.5 * (1 + log_var - mean.square() - log_var.exp()).mean()
        return {"loss": (made - x).square().mean() + 0.1 * divergence}


class RungeKutta(SmallNet):
    """A neural differential equation in fixed steps."""

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss of where it arrives."""
        state, h = self.first(x), 0.25
        for _ in range(2):
            k1 = self.second(state)
            k2 = self.second(state + h * k1)
            state = state + h * (k1 + k2) / 2
        return {"loss": (self.head(state) - y).square().mean()}


def lazy_layers() -> nn.Module:
    """Return layers whose sizes came of the first batch."""
    model = Perceptron()
    model.layers[0] = nn.LazyLinear(16)
    model(**labelled(0))
    return model


MODELS = (
    *plain(KIND, labelled, Perceptron, lazy_layers),
    *plain(KIND, images, ResidualNet, UNet),
    *plain(KIND, sequences, gru, two_way_lstm, elman_rnn, TransformerEncoder, Ctc),
    *plain(KIND, tokens, CausalLm),
    *plain(
        KIND, vectors, SharedLayers, TiedAutoencoder, Adversaries, Contrastive, DenseExperts, RoutedExperts,
        HyperNetwork, LowRankAdapter, Triplets, GivenNoise, RungeKutta,
    ),
)  # fmt: skip
