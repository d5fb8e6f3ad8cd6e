"""Modules that read other things than tensors whose rows are samples, and tensors of other kinds than fp32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from gpp_benchmarks.zoo._catalogue import Batch, integers, numbers
from gpp_benchmarks.zoo.plain._entry import CLASSES, SAMPLES, WIDTH, SmallNet, plain, tokens, vectors

INPUTS, TENSORS = "inputs", "tensors"
Loss = dict[str, Tensor]


# ---- batches that are nested, ragged or lack an axis of samples -------------------------------------


class NestedDict(SmallNet):
    """Reads a dict inside the batch."""

    def forward(self, views: dict[str, Tensor], y: Tensor) -> Loss:
        """Return the loss of two views."""
        return self.loss(self.first(views["left"]) + views["right"], y)


def nested_dicts(number: int) -> Batch:
    """Return two views in a dict."""
    batch = vectors(number)
    return {"views": {"left": batch["x"], "right": batch["x"].flip(1)}, "y": batch["y"]}


class ListOfViews(SmallNet):
    """Reads a list of tensors, as multi-crop training does."""

    def forward(self, crops: list[Tensor], y: Tensor) -> Loss:
        """Return the loss of the mean of the crops."""
        return self.loss(torch.stack([self.first(crop) for crop in crops]).mean(0), y)


def crops(number: int) -> Batch:
    """Return three crops in a list."""
    batch = vectors(number)
    return {"crops": [batch["x"], batch["x"] + 1, batch["x"].flip(1)], "y": batch["y"]}


class TupleOutput(SmallNet):
    """Returns a tuple, the loss first."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss and features."""
        hidden = self.first(x)
        return self.loss(hidden, y)["loss"], hidden


class BareLoss(SmallNet):
    """Returns the loss itself."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss."""
        return self.loss(self.first(x), y)["loss"]


@dataclass
class Output:
    """What a module returns."""

    loss: Tensor
    hidden: Tensor


class DataclassOutput(SmallNet):
    """Returns a dataclass."""

    def forward(self, x: Tensor, y: Tensor) -> Output:
        """Return the loss and features."""
        hidden = self.first(x)
        return Output(self.loss(hidden, y)["loss"], hidden)


class OptionalArguments(SmallNet):
    """Has arguments that the batch leaves out, and a string."""

    def forward(self, x: Tensor, y: Tensor, mask: Tensor | None = None, reduction: str = "mean") -> Loss:
        """Return the loss."""
        hidden = self.first(x) if mask is None else self.first(x * mask)
        error = (self.head(self.second(hidden)) - y).square()
        return {"loss": error.mean() if reduction == "mean" else error.sum()}


def with_string(number: int) -> Batch:
    """Return vectors, and how the loss is reduced."""
    return {**vectors(number), "reduction": "mean"}


class ScalarInput(SmallNet):
    """Reads a temperature that has no axis."""

    def forward(self, x: Tensor, y: Tensor, tau: Tensor) -> Loss:
        """Return the loss."""
        return self.loss(F.softmax(self.first(x) / tau, dim=-1), y)


def with_scalar(number: int) -> Batch:
    """Return vectors and a temperature, another one in every unit."""
    return {**vectors(number), "tau": torch.tensor(1.0 + 0.1 * number)}


class PackedSequences(nn.Module):
    """An LSTM on packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, lengths: Tensor, y: Tensor) -> Loss:
        """Return the loss of the mean over real steps."""
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=x.shape[1])
        return {"loss": (self.head(out.sum(1) / lengths[:, None]) - y).square().mean()}


def padded(number: int) -> Batch:
    """Return sequences with their lengths."""
    return {
        "x": numbers(SAMPLES, 6, WIDTH, seed=10 + number),
        "lengths": integers(SAMPLES, first=2, end=7, seed=50 + number),
        "y": numbers(SAMPLES, WIDTH, seed=1000 + number),
    }


class RaggedList(SmallNet):
    """Reads a list of sequences of their own lengths, and pads them itself."""

    def forward(self, texts: list[Tensor], y: Tensor) -> Loss:
        """Return the loss of means."""
        hidden = pad_sequence([self.first(text).mean(0, keepdim=True) for text in texts], batch_first=True)
        return self.loss(hidden[:, 0], y)


def ragged(number: int) -> Batch:
    """Return sequences of 2 to 5 vectors."""
    texts = [numbers(2 + i, WIDTH, seed=10 + number + i) for i in range(SAMPLES)]
    return {"texts": texts, "y": vectors(number)["y"]}


class GraphConvolution(nn.Module):
    """A graph's nodes and its list of edges, two rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, labels: Tensor) -> Loss:
        """Return the loss of nodes' classes."""
        source, target = edge_index
        for layer in (self.first, self.second):
            out = layer(x)
            x = torch.tanh(out + torch.zeros_like(out).index_add(0, target, out[source]))
        return {"loss": F.cross_entropy(x, labels)}


def graphs(number: int) -> Batch:
    """Return a graph of 12 nodes and 20 edges."""
    return {
        "x": numbers(12, WIDTH, seed=10 + number),
        "edge_index": integers(2, 20, first=0, end=12, seed=50 + number),
        "labels": integers(12, first=0, end=CLASSES, seed=1000 + number),
    }


class BagOffsets(nn.Module):
    """An EmbeddingBag reads all texts' tokens in one row, and where each text begins."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(16, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor, offsets: Tensor, y: Tensor) -> Loss:
        """Return the loss of texts."""
        return {"loss": (self.head(self.bag(ids, offsets)) - y).square().mean()}


def bags(number: int) -> Batch:
    """Return four texts of 3, 2, 4 and 1 tokens."""
    return {
        "ids": integers(10, first=0, end=16, seed=10 + number),
        "offsets": torch.tensor([0, 3, 5, 9]),
        "y": vectors(number)["y"],
    }


class FlattenedTexts(nn.Module):
    """Texts one behind the other in one row, with their cumulative lengths, as flash attention reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = (
            nn.Embedding(16, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 16),
        )

    def forward(self, ids: Tensor, cu_seq_lens: Tensor, max_length: int) -> Loss:
        """Return the loss of next tokens, each text seeing its own mean."""
        hidden = torch.tanh(self.body(self.embed(ids[0])))
        text = torch.searchsorted(cu_seq_lens, torch.arange(len(hidden)), right=True) - 1
        sums = hidden.new_zeros(len(cu_seq_lens) - 1, WIDTH).index_add(0, text, hidden)
        hidden = hidden + sums[text] / max_length
        return {"loss": F.cross_entropy(self.head(hidden[:-1]), ids[0, 1:])}


def flattened(number: int) -> Batch:
    """Return texts of 3 and 5 tokens in a row."""
    return {
        "ids": integers(1, 8, first=0, end=16, seed=10 + number),
        "cu_seq_lens": torch.tensor([0, 3, 8]),
        "max_length": 5,
    }


class WritesInput(SmallNet):
    """Normalises its input in place."""

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss."""
        x -= x.mean(1, keepdim=True)
        x.mul_(0.5)
        return self.loss(self.first(x), y)


class MasksLabels(nn.Module):
    """Writes -100 into the labels it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, 16)

    def forward(self, ids: Tensor, labels: Tensor) -> Loss:
        """Return the loss of tokens above 2."""
        labels[labels < 3] = -100
        logits = self.head(torch.tanh(self.embed(ids)))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def labelled_tokens(number: int) -> Batch:
    """Return texts of six tokens and as many labels."""
    return {**tokens(number), "labels": integers(SAMPLES, 6, first=0, end=16, seed=1000 + number)}


class BytePixels(nn.Module):
    """Reads bytes and scales them itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, WIDTH)

    def forward(self, pixels: Tensor, keep: Tensor, y: Tensor) -> Loss:
        """Return the loss of kept samples."""
        hidden = torch.relu(self.body(pixels.float() / 255)).mean((2, 3))
        error = (self.head(hidden) - y).square().mean(1)
        return {"loss": (error * keep).sum() / keep.sum().clamp_min(1)}


def byte_images(number: int) -> Batch:
    """Return pictures of bytes, and which of them count."""
    return {
        "pixels": integers(SAMPLES, 3, 8, 8, first=0, end=256, seed=10 + number).to(torch.uint8),
        "keep": torch.tensor([True, True, False, True]),
        "y": vectors(number)["y"],
    }


# ---- other kinds of tensors --------------------------------------------------------------------------


class ComplexWeights(nn.Module):
    """A Fourier layer with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.modes = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.cfloat))

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss of filtered features."""
        hidden = torch.fft.irfft(torch.fft.rfft(self.body(x)) * self.modes, n=WIDTH)
        return {"loss": (self.head(hidden) - y).square().mean()}


class ComplexInput(SmallNet):
    """Reads a spectrum."""

    def forward(self, spectrum: Tensor, y: Tensor) -> Loss:
        """Return the loss of magnitudes and angles."""
        return self.loss(self.first(torch.cat([spectrum.abs(), spectrum.angle()], dim=1)), y)


def spectra(number: int) -> Batch:
    """Return complex spectra."""
    halves = numbers(SAMPLES, WIDTH // 2, 2, seed=10 + number)
    return {"spectrum": torch.view_as_complex(halves), "y": vectors(number)["y"]}


class SparseEmbedding(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(16, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, ids: Tensor) -> Loss:
        """Return the loss of next tokens."""
        logits = self.head(torch.tanh(self.body(self.embed(ids[:, :-1]))))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())}


class SparseAdjacency(SmallNet):
    """Multiplies by a sparse matrix that it keeps as a buffer."""

    mixing: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mixing", torch.eye(WIDTH).roll(1, 0).to_sparse())

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss of mixed features."""
        return self.loss(torch.sparse.mm(self.mixing, self.first(x).T).T, y)


class DoubleModel(SmallNet):
    """All of it in double precision, as physics code is."""

    def __init__(self) -> None:
        super().__init__()
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss."""
        return self.loss(self.first(x.double()), y.double())


class HalfBranch(SmallNet):
    """A branch in bf16 beside single precision."""

    def __init__(self) -> None:
        super().__init__()
        self.half_sized = nn.Linear(WIDTH, WIDTH).bfloat16()

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss of both branches."""
        return self.loss(self.first(x) + self.half_sized(x.bfloat16()).float(), y)


class ByteWeights(SmallNet):
    """Frozen weights in eight bits with their scales."""

    weight: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(WIDTH, WIDTH)
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (weight / scale).round().to(torch.int8))

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss."""
        return self.loss(self.first(x) @ (self.weight.float() * self.scale).T, y)


class NestedTensor(SmallNet):
    """Means of ragged sequences through a nested tensor."""

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss."""
        with_lengths: Any = torch.nested.as_nested_tensor(
            [row[: 2 + i] for i, row in enumerate(self.first(x))]
        )
        return self.loss(with_lengths.to_padded_tensor(0.0, (len(x), WIDTH)), y)


MODELS = (
    *plain(INPUTS, nested_dicts, NestedDict),
    *plain(INPUTS, crops, ListOfViews),
    *plain(INPUTS, vectors, TupleOutput, BareLoss, DataclassOutput, WritesInput),
    *plain(INPUTS, with_string, OptionalArguments),
    *plain(INPUTS, with_scalar, ScalarInput),
    *plain(INPUTS, padded, PackedSequences),
    *plain(INPUTS, ragged, RaggedList),
    *plain(INPUTS, graphs, GraphConvolution),
    *plain(INPUTS, bags, BagOffsets),
    *plain(INPUTS, flattened, FlattenedTexts),
    *plain(INPUTS, labelled_tokens, MasksLabels),
    *plain(INPUTS, byte_images, BytePixels),
    *plain(
        TENSORS, vectors, ComplexWeights, SparseAdjacency, DoubleModel,
        HalfBranch, ByteWeights, NestedTensor,
    ),
    *plain(TENSORS, spectra, ComplexInput),
    *plain(TENSORS, tokens, SparseEmbedding),
)  # fmt: skip
