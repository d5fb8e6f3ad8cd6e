"""The batches of HuggingFace's Trainer, as one process would have them, on every rank of a graph of stages.

Every rank reads the same stream: of a mini-batch each takes what its stages read. An epoch has whole mini-batches only:
the samples left over at its end, fewer than one, are left out.

Source: this project
Tests: tests/integrations/test_trainer.py
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler
from transformers import DefaultDataCollator, default_data_collator

from gpp_plugin.engine.loading.mini_batch_loader import first_items, stream_state

logger = logging.getLogger(__name__)


class WholeSteps(BatchSampler):
    """The batches of an epoch, without those at its end that are no whole mini-batch.

    Args:
        step: batches of a mini-batch.

    >>> list(WholeSteps(range(11), 2, step=2))
    [[0, 1], [2, 3], [4, 5], [6, 7]]
    """

    def __init__(self, sampler: Sampler[int], batch_size: int, *, step: int) -> None:
        super().__init__(sampler, batch_size, drop_last=True)
        self._step = step

    def __iter__(self) -> Iterator[list[int]]:
        """Yield lists of samples' numbers."""
        return itertools.islice(super().__iter__(), len(self))

    def __len__(self) -> int:
        """Return the batches of an epoch."""
        return super().__len__() // self._step * self._step


def as_one_process(loader: DataLoader[Any], *, data_seed: int | None) -> DataLoader[Any]:
    """Return what accelerate makes of a loader for a job of one process: the same samples in the same order."""
    prepared: DataLoader[Any] = prepare_data_loader(
        loader,
        num_processes=1,
        process_index=0,
        put_on_device=False,
        dispatch_batches=False,
        use_seedable_sampler=True,
        data_seed=data_seed,
    )
    return prepared


TRIED_SAMPLES = 16
"""Samples that are collated one by one, to see whether a collator pads to the longest."""


def pads_to_longest(collator: Any, loader: Any) -> bool:
    """Return whether batches of one mini-batch may have lengths of their own.

    A collator's ``padding`` says so. One without it (those of language models, a function of the user's) is tried:
    where single samples, taken from all over the dataset, become batches of unlike shapes, it pads.

    Args:
        loader: with the dataset, and what collates its samples: the collator, behind what drops columns.
    """
    padding = getattr(collator, "padding", None)
    # not by isinstance: the collator that makes one row of all samples is derived from the default one
    if padding is not None or type(collator) is DefaultDataCollator or collator is default_data_collator:
        return padding in (True, "longest")
    shapes = set()
    for sample in _some_samples(loader.dataset):
        try:
            batch = loader.collate_fn([sample])
        except Exception:  # it makes batches of several alone; training tells what is wrong with them
            return False
        tensors = batch.items() if isinstance(batch, Mapping) else ()
        shapes.add(tuple((key, tuple(v.shape)) for key, v in tensors if isinstance(v, Tensor)))
    return len(shapes) > 1


def _some_samples(dataset: Any) -> list[Any]:
    """Return samples from all over a dataset, or the first ones of a stream, which is left where it is."""
    if isinstance(dataset, IterableDataset):
        return first_items(dataset, TRIED_SAMPLES)
    count = len(dataset)
    return [dataset[index] for index in range(0, count, max(count // TRIED_SAMPLES, 1))[:TRIED_SAMPLES]]


class StreamLoader:
    """The batches of an iterable dataset, a pass each time it is iterated over, which knows where it is.

    Where the dataset has ``state_dict`` and ``load_state_dict``, it goes on by them; else it reads what was trained on
    once more, and drops it. Its state is that after the last batch that it gave, also where a worker is ahead.

    Args:
        options: of the DataLoader within: workers, pinning.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        *,
        batch_size: int,
        collate_fn: Callable[[list[Any]], Any],
        **options: Any,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.collate_fn = collate_fn
        # two workers would each have the whole stream
        options["num_workers"] = min(options.get("num_workers", 0), 1)
        self._options = options
        self._passes = self._given = 0
        self._state: Any = None
        self._is_resumed = False

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of a pass, or of what is left of it."""
        skipped, state = (self._given, self._state) if self._is_resumed else (0, None)
        self._is_resumed, self._given, self._state = False, skipped, state
        if self._passes and hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self._passes)
        stated = _Stated(
            self.dataset, self.batch_size, state=state, skipped=0 if state is not None else skipped
        )
        # with a generator of its own it draws nothing of what dropout draws from
        inner = DataLoader(
            stated,
            batch_size=None,
            collate_fn=lambda pair: pair,
            generator=torch.Generator().manual_seed(self._passes),
            **self._options,
        )
        for items, after in inner:
            self._given, self._state = self._given + 1, after
            yield self.collate_fn(items)
        self._passes, self._given, self._state = self._passes + 1, 0, None

    def state_dict(self) -> dict[str, Any]:
        """Return where the last batch that was given ends."""
        return {"passes": self._passes, "given": self._given, "state": self._state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on there when iterated over next."""
        self._passes, self._given, self._state = state["passes"], state["given"], state["state"]
        self._is_resumed = True
        if self._given and self._state is None:
            logger.warning(
                "the training stream has no state_dict: %d samples of it are read and dropped to go on where the "
                "checkpoint was saved",
                self._given * self.batch_size,
            )


class _Stated(IterableDataset[Any]):
    """Lists of a dataset's items, each with the dataset's state behind it; the last, shorter one is left out."""

    def __init__(self, dataset: Any, size: int, *, state: Any, skipped: int) -> None:
        self._dataset, self._size, self._start, self._skipped = dataset, size, state, skipped

    def __iter__(self) -> Iterator[tuple[list[Any], Any]]:
        dataset = self._dataset
        if self._start is not None:
            dataset.load_state_dict(self._start)
        items = iter(dataset)
        for _ in range(self._skipped * self._size):
            next(items, None)
        while len(taken := list(itertools.islice(items, self._size))) == self._size:
            # a copy: the dataset goes on, and a worker writes it down on a thread of its own
            yield taken, stream_state(dataset)
