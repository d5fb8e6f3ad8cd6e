"""Tiny models whose Python reads values of the batch, or takes its samples one by one, and batches for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

IMAGE = 63


class Reader(nn.Module):
    """Images in one list of patches, and texts with a token for each: as vision-language models are, in little.

    It reads sizes (``tolist``), a count (``int``), places (``nonzero``, boolean indexing) and whether something is
    padded (``if``); it keeps a tensor in an attribute, and writes into one that it made. Texts without images read less.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16))
        self.tokens = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 64)
        self.positions: Tensor | None = None

    def forward(
        self,
        ids: Tensor,
        mask: Tensor,
        labels: Tensor,
        pixels: Tensor | None = None,
        sizes: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return the mean loss of the labelled tokens; ``sizes`` are the patches of each image."""
        hidden = self.tokens(ids)
        if pixels is not None and sizes is not None:
            self._place_images(hidden, ids == IMAGE, pixels, sizes)
        self.positions = torch.arange(ids.shape[1])
        if not mask.all():
            hidden = hidden * mask[..., None]
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        rows, columns = (labels >= 0).nonzero(as_tuple=True)
        logits = self.head(hidden[rows, columns] + 0.01 * self.positions[columns][:, None])
        return {"loss": nn.functional.cross_entropy(logits, labels[labels >= 0])}

    def _place_images(self, hidden: Tensor, is_image: Tensor, pixels: Tensor, sizes: Tensor) -> None:
        """Write what is made of images into the places of their tokens."""
        images = self.patches(pixels)
        starts = torch.zeros(len(sizes) + 1, dtype=torch.long)
        starts[1:] = sizes.cumsum(0)
        parts = [images[first:last].cumsum(0) for first, last in zip(starts[:-1], starts[1:], strict=True)]
        images = torch.cat(parts) + torch.repeat_interleave(sizes.sqrt(), sizes)[:, None]
        if int(is_image.sum()) != images.shape[0]:
            raise ValueError("as many places as patches")
        hidden[is_image] = images[: is_image.sum()]


def reader_batch(
    sizes: list[list[int]], *, seed: int = 0, length: int = 10, padded: bool = True, labelled: int = 4
) -> dict[str, Any]:
    """Return a unit: for each sample the sizes of its images; seeds move the images' places and change all values."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 60, (len(sizes), length), generator=generator)
    labels = torch.full_like(ids, -1)
    for row, own in enumerate(sizes):
        places = torch.randperm(length, generator=generator)
        ids[row, places[: sum(own)]] = IMAGE
        labels[row, places[-labelled:]] = torch.randint(3, 60, (labelled,), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        mask[:, -1] = 0
    flat = torch.tensor([size for own in sizes for size in own])
    pixels = torch.randn(int(flat.sum()), 6, generator=generator)
    return {"ids": ids, "mask": mask, "pixels": pixels, "sizes": flat, "labels": labels}


class OneByOne(nn.Module):
    """A loop over samples: another graph for every number of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Return a mean over samples of what is made of each."""
        losses = []
        for sample in x:
            for layer in self.layers:
                sample = torch.tanh(layer(sample))
            losses.append(sample.square().sum())
        return torch.stack(losses).mean()
