"""What each rank runs in the tests of models that take whole loss units."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from gpp_benchmarks.zoo._catalogue import CATALOGUE, IMAGE, build_model
from tests.integrations.engine_jobs import make_engine, said_of
from tests.reading_models import Reader, reader_batch
from tests.runtime.jobs import make_config, use_device

TWO, TURNED = [[2, 1], [1, 2]], [[1, 2], [2, 1]]
"""Sizes of a unit's images, which Python reads."""


def build_reader() -> Reader:
    torch.manual_seed(0)
    return Reader()


def refused() -> list[str]:
    """Return what is said of mini-batches that do not fit, and train a good one of unlike units behind them."""
    use_device("cpu")
    job = {"model": "reader", "mini_batch": 4, "unit": 2, "block": {"stages": 2}}
    good = [reader_batch(TWO, seed=seed, padded=True) for seed in (0, 1)]
    engine = make_engine(build_reader(), good[0], make_config(job))
    five = {key: torch.ones(5, 3, dtype=torch.long) for key in good[0]}
    said = [
        said_of(functools.partial(engine.train_batch, iter(units))) for units in ([five, good[0]], good[:1])
    ]
    said.append(str(float(engine.train_batch(iter([good[0], reader_batch([[1, 1], [1, 1]])])))))
    return said


def windows(num_stages: int) -> dict[str, Any]:
    """Train in mode async, where every unit is a step; a mini-batch of unlike units is refused before."""
    use_device("cpu")
    sample = reader_batch(TWO, seed=9)
    job = {"mini_batch": 4, "unit": 2, "block": {"mode": "async", "stages": num_stages}}
    engine = make_engine(build_reader(), sample, make_config(job))
    said = said_of(lambda: engine.train_batch(iter([reader_batch(TWO), reader_batch(TURNED)])))
    steps = [
        [reader_batch(sizes, seed=2 * step + unit) for unit in range(2)]
        for step, sizes in enumerate((TWO, TURNED, TWO))
    ]
    losses = [float(engine.train_batch(iter(units))) for units in steps]
    last = engine.flush()
    return {"said": said, "losses": losses, "last": None if last is None else float(last), "steps": steps}


# ---- families -----------------------------------------------------------------------------------------------


def family(name: str) -> Any:
    """Return a small LLaVA-NeXT."""
    entry = CATALOGUE[name]
    config = {**entry.config, "image_grid_pinpoints": [[8, 8], [8, 16], [16, 8]]}
    return build_model(dataclasses.replace(entry, config=config))


def _tiles(shape: tuple[int, int], generator: torch.Generator) -> tuple[int, dict[str, torch.Tensor]]:
    """Return an image as LLaVA-NeXT takes it: the whole in 8 x 8, and tiles of that size, filled up to three."""
    rows, columns = shape[0] // 4, shape[1] // 4
    tiles = torch.zeros(1, 3, 3, 8, 8)
    count = 1 + rows * columns // 4
    tiles[:, :count] = torch.randn(1, count, 3, 8, 8, generator=generator)
    # four patches of the whole, and of the tiles one a patch and one a row
    return 4 + rows * (columns + 1), {"pixel_values": tiles, "image_sizes": torch.tensor([list(shape)])}


def family_unit(images: list[list[tuple[int, int]]], *, length: int, seed: int) -> dict[str, Any]:
    """Return a unit of texts, each with some images of its own sizes in front, padded to one length.

    Args:
        images: of each sample.
        length: words of each.
    """
    generator = torch.Generator().manual_seed(seed)
    ids, labels, found = [], [], []
    for own in images:
        row, wanted = [1], [-100]
        for shape in own:
            count, entries = _tiles(shape, generator)
            found.append(entries)
            row += [IMAGE] * count
        words = torch.randint(3, 60, (length,), generator=generator).tolist()
        wanted += [-100] * (len(row) - 1) + words
        ids.append(torch.tensor(row + words))
        labels.append(torch.tensor(wanted))
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
        **{key: torch.cat([entries[key] for entries in found]) for key in found[0]},
    }


def family_units(name: str, seed: int) -> list[dict[str, Any]]:
    """Return three units of unlike images, lengths and numbers of samples; their order and words change with seeds."""
    small, wide, tall = (8, 8), (8, 16), (16, 8)
    kinds: list[tuple[list[list[tuple[int, int]]], int]] = [
        ([[small], [small]], 6),
        ([[wide, small], [tall]], 5),
        ([[tall], [small], [small, wide]], 7),
    ]
    turned = [*kinds[seed % 3 :], *kinds[: seed % 3]]
    return [
        family_unit(images, length=length, seed=10 * seed + number)
        for number, (images, length) in enumerate(turned)
    ]
