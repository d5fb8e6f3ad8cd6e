"""Datasets, and what ranks do with them, in the tests of loading."""

from __future__ import annotations

import functools
import multiprocessing
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from gpp_plugin import GraphPipelineModule
from gpp_plugin.engine.loading.batch_source import BatchSource
from gpp_plugin.engine.loading.rank_shard import Share, ShareReader
from gpp_plugin.engine.loading.row_loader import RowLoader, make_loader
from gpp_plugin.engine.loading.training_data import repeat
from gpp_plugin.ir.tensors import SampleRange
from tests.integrations.engine_jobs import B, config_of, said_of
from tests.models import build

WIDTH, ROWS = 8, 6


class Samples(Dataset[dict[str, Any]]):
    """20 samples of one shape; ``fetched`` are the numbers asked for in this process.

    Args:
        extra: what every sample has besides, by its number.
        broken: a sample that cannot be read.
    """

    def __init__(self, *, extra: Any = None, broken: int | None = None) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(20, WIDTH, generator=generator)
        self.fetched: list[int] = []
        self._extra, self._broken = extra, broken

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.fetched.append(index)
        if index == self._broken:
            raise OSError("the disk is gone\nand more lines")
        item = {"x": self.x[index], "labels": index % 3}
        return {**item, **(self._extra(index) if self._extra is not None else {})}


class Noisy(Samples):
    """Samples with noise of three generators added, as augmentations have it; ``drawn`` are their sums."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[float] = []

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = super().__getitem__(index)
        noise = torch.randn(WIDTH) + random.random() + float(np.random.rand())
        self.drawn.append(float(noise.sum()))
        return {**item, "x": item["x"] + noise}


class Lengths(Samples):
    """Samples of 2 or 4 rows of their own length, which no stacking takes."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = super().__getitem__(index)
        return {**item, "x": item["x"][: 4 if index % 10 == 0 else 2]}


class Streamed(IterableDataset[dict[str, Any]]):
    """The same samples, one after the other."""

    def __init__(self) -> None:
        self.samples = Samples()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self.samples[index] for index in range(20))


def pad(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Collate samples of any length: zeros up to the longest."""
    return {
        "x": nn.utils.rnn.pad_sequence([item["x"] for item in items], batch_first=True),
        "labels": torch.tensor([item["labels"] for item in items]),
    }


class Classes(nn.Module):
    """A model of rows of any length."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(1, WIDTH)
        self.second = nn.Linear(WIDTH, 3)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the mean cross entropy; padding changes it."""
        hidden = self.dropout(torch.tanh(self.first(x[..., None])).mean(1))
        return {"loss": nn.functional.cross_entropy(self.second(hidden), labels)}


def row_loader(
    dataset: Any,
    *,
    rank: int = 3,
    mini_batch: int = ROWS,
    units: int | None = None,
    part: Any = None,
    held: Any = None,
    dtype: Any = None,
    collate_fn: Any = None,
    prepare: Any = lambda batch: batch,
    keys: tuple[str, ...] = ("x", "labels"),
    workers: int = 0,
) -> RowLoader:
    """Return what loads a rank's part of mini-batches; the whole of each without ``part``."""
    ranges = ((0, mini_batch),) if part is None else part
    samples = tuple(SampleRange(first_sample=first, num_samples=count) for first, count in ranges)
    return RowLoader(
        make_loader(dataset, mini_batch=mini_batch, collate_fn=collate_fn, seed=1, units=units),
        ShareReader(
            collate_fn=collate_fn,
            prepare=prepare,
            share=Share(
                rank=rank, mini_batch=mini_batch, units=units, samples=samples, keys=held, dtype=dtype
            ),
            keys=frozenset(keys),
        ),
        seed=1,
        workers=workers,
    )


def batch_source(**changes: Any) -> BatchSource:
    """Return what brings mini-batches to one rank."""
    given = {"mini_batch": ROWS, "keys": ("x", "labels"), **changes}
    return BatchSource(
        prepare=lambda batch: batch, reads_inputs=True, source=0, group=None, timeout_s=1.0, **given
    )


def make(dataset: Any, *, workers: int, stages: int, **given: Any) -> Any:
    """Return an engine that loads the dataset itself; its ranks may have children."""
    import deepspeed

    multiprocessing.current_process()._config["daemon"] = False
    torch.manual_seed(0)
    block = {"loader_workers": workers, "stages": stages}
    return deepspeed.initialize(
        model=Classes(), config=config_of(block=block), training_data=dataset, **given
    )[0]


def run(engine: Any, steps: int, batches: Iterator[Any] | None = None) -> list[Any]:
    """Return the loss and all gradients of each step."""
    engine.retain_gradients()
    found = []
    for _ in range(steps):
        loss = float(engine.train_batch(batches))
        found.append((loss, {name: g.clone() for name, g in engine.gradients.items()}))
    return found


def feed(engine: Any, loader: Any, way: str) -> list[float]:
    """Train five steps over two epochs on data that come in some way, with an evaluation of such data between them.

    The engine's own loader has generators of its own, which such an evaluation does not draw from.
    """
    held_out = torch.utils.data.DataLoader(Noisy(), batch_size=5)
    losses: list[float] = []
    if way == "loader":
        engine.set_dataloader(loader)
    stream = repeat(loader)
    for step in range(5):
        given = {"iterator": stream, "batch": iter([next(stream)]) if way == "batch" else None}.get(way)
        losses.append(float(engine.train_batch(given)))
        if step == 2 and way != "own":
            losses.append(float(engine.eval_batch(iter(held_out))))
    return losses


class Alone:
    """One process, with an engine's calls: plain training whose draws on the host are those of its data."""

    def __init__(self, model: nn.Module, loader: Any) -> None:
        self.model, self.stream = model, repeat(loader)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)

    def set_dataloader(self, loader: Any) -> None:
        self.stream = repeat(loader)

    def train_batch(self, batches: Iterator[Any] | None) -> float:
        loss = self.model(**next(self.stream if batches is None else batches))["loss"]
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss)

    @torch.no_grad()
    def eval_batch(self, batches: Iterator[Any]) -> float:
        return float(self.model(**next(batches))["loss"])


def train_on_noise(way: str, block: dict[str, Any]) -> dict[str, Any]:
    """Train on data that draw, without dropout and with it, and in one process; return losses and what was drawn."""
    import deepspeed

    answers: dict[str, Any] = {}
    for name, dropout in (("alone", 0.0), ("ranks", 0.0), ("dropout", 0.5)):
        dataset = Noisy()
        torch.manual_seed(0)
        model = Classes(dropout)
        random.seed(1)
        np.random.seed(2)
        if way == "own":
            loader = make_loader(dataset, mini_batch=B, collate_fn=None, seed=0)
        else:
            loader = torch.utils.data.DataLoader(dataset, batch_size=B, shuffle=True, drop_last=True)
        if name == "alone":
            engine: Any = Alone(model, loader)
        else:
            given = {"training_data": dataset} if way == "own" else {}
            sample = {"x": torch.zeros(B, WIDTH), "labels": torch.zeros(B, dtype=torch.long)}
            wrapped = model if given else GraphPipelineModule(model, sample_batch=sample)
            engine = deepspeed.initialize(model=wrapped, config=config_of(block=block), **given)[0]
        dataset.drawn.clear()
        answers[name] = feed(engine, loader, way), list(dataset.drawn)
    return answers


def train_with_and_without_workers(stages: int, kind: str) -> dict[str, Any]:
    """Five steps over two epochs and a half: as given batches, loaded here, loaded by workers."""
    dataset: Any = {"fixed": Samples, "padded": Lengths, "streamed": Streamed}[kind]()
    collate = {"collate_fn": pad} if kind == "padded" else {}
    answers: dict[str, Any] = {}
    for workers in (None, 0, 2):
        engine = make(dataset, workers=workers or 0, stages=stages, **collate)
        getattr(dataset, "fetched", []).clear()
        batches = repeat(engine.training_dataloader) if workers is None else None
        answers[str(workers)] = run(engine, 5, batches)
        answers[f"fetched {workers}"] = len(getattr(dataset, "fetched", []))
        answers["reads"] = engine._batch_source.reads_inputs
        answers[f"children {workers}"] = len(multiprocessing.active_children())
        engine.destroy()
        answers[f"children after {workers}"] = len(multiprocessing.active_children())
    return answers


def train_on_tuples() -> dict[str, list[Any]]:
    """Three steps on dicts, and on the same samples as tuples in ways that a script may have them."""
    import deepspeed

    import gpp_plugin

    samples = Samples()
    dicts = [samples[index] for index in range(20)]
    pairs = [(item["x"], item["labels"]) for item in dicts]
    turned = [(None if index else "first", item["labels"], item["x"]) for index, item in enumerate(dicts)]
    answers: dict[str, list[Any]] = {}
    for kind, data in (("dicts", dicts), ("pairs", pairs), ("turned", turned)):
        torch.manual_seed(0)
        model: nn.Module = Classes()
        more: dict[str, Any] = {}
        if kind == "turned":  # nothing of the data is looked at before the function is set
            model = gpp_plugin.GraphPipelineModule(
                model, sample_batch=(samples.x[:B], torch.zeros(B, dtype=torch.long))
            )
            more["collate_fn"] = list
        engine = deepspeed.initialize(
            model=model, config=config_of(block={"stages": 2}), training_data=data, **more
        )[0]
        if kind == "turned":
            engine.set_batch_fn(
                lambda items: {
                    "x": torch.stack([i[2] for i in items]),
                    "labels": torch.tensor([i[1] for i in items]),
                }
            )
        answers[kind] = run(engine, 3)
        if kind == "pairs":  # as an iterator has them, and a bare function of the user's
            batches = [(samples.x[:B], torch.arange(B) % 3), [samples.x[:B], torch.arange(B) % 3]]
            answers["iterators"] = [float(engine.eval_batch(iter([batch]))) for batch in batches]
        if kind == "dicts":
            batch = {"x": samples.x[:B], "labels": torch.arange(B) % 3}
            answers["evaluated"] = [float(engine.eval_batch(iter([batch]))) for _ in range(2)]
        engine.destroy()
    return answers


def begin_late(way: str) -> dict[str, Any]:
    """Two steps of an engine whose training data fits no positions of ``forward`` until a call says what does.

    ``wanted`` are those of an engine whose data has names from the start.
    """
    import deepspeed

    samples = Samples()
    items = [samples[index] for index in range(20)]
    turned = [(0.0, item["labels"], item["x"]) for item in items]
    rows = [{"x": samples.x[n : n + B], "labels": torch.arange(n, n + B) % 3} for n in (0, B)]
    answer: dict[str, Any] = {}
    for kind, data in (("wanted", items), ("losses", turned)):
        torch.manual_seed(0)
        config = config_of(block={"stages": 2})
        engine, *given = deepspeed.initialize(model=Classes(), config=config, training_data=data)
        if kind == "losses":
            answer["given"] = given
            names = ("train_batch", "optimizer")
            answer["said"] = [said_of(functools.partial(getattr, engine, name)) for name in names]
            answer["wrong"] = said_of(functools.partial(engine.set_batch_fn, list))
        if way != "set_batch_fn":
            engine.set_dataloader(rows if way == "loader" else iter(rows))
        elif kind == "losses":
            engine.set_batch_fn(lambda batch: {"x": batch[2], "labels": batch[1]})
        answer[kind] = [float(engine.train_batch()) for _ in range(2)]
        answer["kind"], answer["optimizer"] = type(engine).__name__, engine.optimizer is not None
        engine.destroy()
    return answer


def tell_of_ones() -> dict[str, Any]:
    """Masks of ones but for one row, which one rank loads; say what is so, what each rank is told, and what it has."""
    import deepspeed

    model, make_batch = build("gpt2")
    batch = make_batch(3 * B, 0)
    batch["attention_mask"][5, 0] = 0
    rows = [{key: value[i] for key, value in batch.items()} for i in range(3 * B)]
    wanted = [
        bool((whole["attention_mask"] == 1).all())
        for whole in make_loader(rows, mini_batch=B, collate_fn=None, seed=0)
    ]
    config = config_of(block={"stages": 1})
    engine = deepspeed.initialize(model=model, config=config, training_data=rows)[0]
    found = [engine._data.next(None) for _ in range(3)]
    return {
        "wanted": wanted,
        "told": [own.ones == {"attention_mask"} for own in found],
        "own": [bool((own.held["attention_mask"] == 1).all()) for own in found],
    }
