"""Loaders of whole mini-batches in one order on every rank, and the states that their sources keep."""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from gpp_plugin.capture.tracing.sample_batches import WholeUnit, count_samples, is_counted, likely_counts
from gpp_plugin.data import PackedUnits
from gpp_plugin.errors import ConfigError
from gpp_plugin.runtime.batches import Batch

# Where training is in its data, as JSON: what a checkpoint keeps so that no sample comes twice and none is left out.
#
#     kind "samples"   a dataset with numbers: the epoch's random state as it began, and how many lists of numbers of it
#                      are trained; the rest follows by drawing the epoch anew, and no sample is loaded for it
#   kind "stream"    an iterable dataset: its own ``state_dict`` after the last mini-batch that was trained, or how many
#                      samples are to be read and dropped
#     kind "given"     a caller's loader or iterator: its own ``state_dict``, as torchdata has it
#
# A mini-batch is of *lists*, what the loader's batch sampler yields: one, or one for each unit where it is of units.
# States are written as those of checkpoints (`to_json`), tensors in place: ranks compare them.
# Positions count mini-batches trained: what workers have prefetched, or a frozen branch has run, does not count.

SAMPLES, STREAM, EXTERNAL = "samples", "stream", "given"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPoint:
    """A point in an epoch of a dataset with numbers.

    Args:
        mini_batches: trained before it, in all epochs.
        lists: of this epoch's that come before it.
        generator: the loader's random state as the epoch began; None: as it is.
        sampler: the batch sampler's own state as the epoch began, where it has one.
    """

    mini_batches: int = 0
    lists: int = 0
    generator: Tensor | None = None
    sampler: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPoint:
    """A point in an iterable dataset.

    Args:
        mini_batches: trained before it, in all passes.
        passes: over the dataset that are complete.
        state: of the dataset; None: it has none, or is at its beginning.
        dropped: lists to be read and dropped from the very beginning, where there is no state.
    """

    mini_batches: int = 0
    passes: int = 0
    state: Any = None
    dropped: int = 0


# What a batch must be: its keys, those that the model was captured with, and its number of samples.


def check_keys(batch: Batch, keys: frozenset[str]) -> None:
    """Refuse a batch of other keys than the model was captured with.

    Raises:
        ConfigError: says which.
    """
    if batch.keys() != keys:
        parts = (("lacks", keys - batch.keys()), ("also has", batch.keys() - keys))
        differ = " and ".join(f"{verb} {sorted(names)}" for verb, names in parts if names)
        raise ConfigError(
            f"a batch {differ}, not as the one the model was captured with; give train_batch() the same keys as "
            "the sample batch (by default the first of training_data)"
        )


def inputs_of(batch: Batch) -> frozenset[str]:
    """Return the keys of a batch's tensors."""
    return frozenset(key for key, value in batch.items() if isinstance(value, Tensor))


def own_inputs(unit: Batch, keys: frozenset[str], inputs: frozenset[str]) -> dict[str, Any]:
    """Return a loss unit with the inputs that it has: it may lack some, or have None for them.

    Args:
        keys: of the batch that the model was captured with; ``inputs`` those of its tensors.

    Raises:
        ConfigError: it has other keys, or lacks what is no tensor.
    """
    own = {key: value for key, value in unit.items() if value is not None or key not in inputs}
    check_keys(own, keys - (inputs - own.keys()))
    return own


def check_count(batch: Batch, *, sizes: Sequence[int]) -> None:
    """Refuse a sample batch that may be of one number of samples or another, where neither is that of the job.

    Args:
        sizes: samples of a loss unit and of a mini-batch.

    Raises:
        ConfigError: says what its tensors have, and how to continue.
    """
    if not is_counted(batch) or count_samples(batch) in sizes:
        return
    counts = likely_counts(batch)
    if len(counts) > 1 and not isinstance(batch, WholeUnit):
        rows = ", ".join(f"{k} {list(v.shape)}" for k, v in batch.items() if isinstance(v, Tensor))
        raise ConfigError(
            f"the sample batch may be of {' or '.join(map(str, counts))} samples ({rows}), and "
            f"train_micro_batch_size_per_gpu is {sizes[0]}: give a sample batch of so many samples, or, where a batch "
            'is one loss unit as it is (a graph, packed texts), set "graph_pipeline": {"units": N}, N batches a '
            "mini-batch"
        )


def check_axes(batch: Batch, mini_batch: int) -> None:
    """Refuse a sample batch with a number that has no axis where several batches will be joined to a mini-batch.

    Raises:
        ConfigError: names the entry, and how to continue.
    """
    scalars = [key for key, value in batch.items() if isinstance(value, Tensor) and not value.dim()]
    if not scalars or (samples := count_samples(batch)) >= mini_batch:
        return
    key, number = scalars[0], mini_batch // samples
    raise ConfigError(
        f"batch entry {key!r} is a tensor without an axis, and {number} batches of {samples} samples are joined along "
        f"axis 0 to a mini-batch of {mini_batch}, in which it may have {number} values: let each be a loss unit of its "
        f'own, "graph_pipeline": {{"units": {number}}}, give it a row a sample ([{samples}, 1]), or, where it never '
        "changes, give a Python number"
    )


MOST_WORKERS = 4
"""Processes that load for a rank on CUDA unless the configuration says how many."""


def make_loader(
    dataset: Any,
    *,
    mini_batch: int,
    collate_fn: Callable[[list[Any]], Any] | None,
    seed: int,
    units: int | None = None,
) -> DataLoader[Any]:
    """Return a loader of whole mini-batches, or of their units, in the same shuffled order on every rank.

    Args:
        mini_batch: samples of a mini-batch.
        units: of a mini-batch, of equal numbers of samples; those that `pack` made have their own.

    Raises:
        ConfigError: the dataset holds fewer samples than one mini-batch.
    """
    collate = collate_fn or default_collate
    if isinstance(dataset, PackedUnits):
        own = torch.Generator().manual_seed(seed)
        return DataLoader(dataset.dataset, batch_sampler=dataset, collate_fn=collate, generator=own)
    mini_batch, whole = mini_batch // (units or 1), mini_batch
    # Whole mini-batches: ranks take their rows of them, so that a shuffle is the same everywhere and padding too.
    # What a loader draws as an epoch begins comes from its own generator, not from the numbers that dropout draws.
    generator = torch.Generator().manual_seed(seed)
    if isinstance(dataset, IterableDataset):
        return DataLoader(
            dataset, batch_size=mini_batch, drop_last=True, collate_fn=collate, generator=generator
        )
    if len(dataset) < whole:
        raise ConfigError(
            f"training_data has {len(dataset)} samples, fewer than train_batch_size={whole}; "
            "lower train_batch_size or give more data"
        )
    return DataLoader(
        dataset,
        batch_size=mini_batch,
        shuffle=True,
        drop_last=True,
        collate_fn=collate,
        generator=generator,
    )


def count_workers(requested: int | str, device: torch.device) -> int:
    """Return how many processes load for this rank.

    Args:
        requested: a number, or ``auto``: on CUDA up to four of this rank's cores; none where the cores compute.
    """
    if isinstance(requested, int):
        return requested
    if device.type != "cuda" or multiprocessing.current_process().daemon:  # a daemon may have no children
        return 0
    cores = len(os.sched_getaffinity(0)) // max(torch.cuda.device_count(), 1)
    return min(max(cores - 1, 1), MOST_WORKERS)


def repeat(loader: Iterable[Any], *, is_resumed: bool = False) -> Iterator[Any]:
    """Yield the loader's batches, starting anew when it ends.

    Args:
        is_resumed: it continues somewhere, maybe at an epoch's end: its first pass may have nothing left.

    Raises:
        ConfigError: the loader yields nothing.
    """
    while True:
        empty, is_resumed = not is_resumed, False
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise ConfigError("the data loader yields no batches; its dataset is smaller than one mini-batch")


def sampler_state(sampler: Any) -> Mapping[str, Any] | None:
    """Return a batch sampler's own state; None where it has none."""
    state: Mapping[str, Any] | None = sampler.state_dict() if hasattr(sampler, "state_dict") else None
    return state


def stream_state(dataset: Any) -> Any:
    """Return a copy of a stream's own state; None where it has none."""
    if not hasattr(dataset, "state_dict") or not hasattr(dataset, "load_state_dict"):
        return None
    return copy.deepcopy(dataset.state_dict())


def first_items(stream: Any, count: int) -> list[Any]:
    """Return the first items of a stream, at most ``count``; one that keeps its place in itself is put back."""
    state = stream_state(stream)
    items = list(itertools.islice(stream, count))
    if state is not None:
        stream.load_state_dict(state)
    return items
