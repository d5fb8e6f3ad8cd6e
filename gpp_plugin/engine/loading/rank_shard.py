"""A rank's shares of mini-batches, made where samples are loaded: in this process or in a worker.

Whole mini-batches are collated where a collator of the user's may pad all samples alike; torch's own collation of the
rank's samples alone gives the same rows.

Source: this project
Tests: tests/integrations/test_loading.py, tests/integrations/test_data_position.py
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import logging
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from gpp_plugin.capture.mask_values import inputs_of_ones
from gpp_plugin.capture.tracing.sample_batches import check_batch, rows_per_sample
from gpp_plugin.data import PackedUnits
from gpp_plugin.engine.loading.batch_source import Complete, as_they_are, check_keys, own_inputs
from gpp_plugin.errors import ConfigError, GppError, RuntimeFailure, describe_error
from gpp_plugin.ir.tensors import SampleRange
from gpp_plugin.runtime.batches import (
    Batch,
    ChooseOrder,
    OwnRows,
    UnitBatch,
    arrange_units,
    batch_checksum,
    collect_mini_batch,
    mini_batch_shapes,
)
from gpp_plugin.runtime.random_streams import restored_host_streams

logger = logging.getLogger(__name__)

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


def sample_from_dataset(
    dataset: Any,
    *,
    num_samples: int,
    collate_fn: Callable[[list[Any]], Any] | None,
    named: Callable[[Any], Any] = lambda batch: batch,
) -> Batch:
    """Return one collated batch of the dataset's first samples, for capture and profiling.

    Args:
        named: makes a dict of what is collated.
    """
    collate = collate_fn or default_collate
    if isinstance(dataset, PackedUnits):  # a unit as they will come
        items = [dataset.dataset[index] for index in dataset.typical_unit()]
    elif isinstance(dataset, IterableDataset):
        items = first_items(dataset, num_samples)
    else:
        items = [dataset[index] for index in range(min(num_samples, len(dataset)))]
    if not items:
        raise ConfigError("training_data is empty; capture needs at least one sample of it")
    return check_batch(named(collate(items)))


def check_same_samples(loader: Any) -> None:
    """Refuse a dataset of which ranks read different first samples; collective; the generators draw.

    Raises:
        ConfigError: on every rank.
    """
    if not dist.is_initialized():
        return
    checksum = None
    try:
        checksum = batch_checksum(
            sample_from_dataset(loader.dataset, num_samples=1, collate_fn=loader.collate_fn)
        )
    except Exception:  # whatever it is, the other ranks wait; training reports it
        logger.debug("the first sample of train_dataset cannot be read alone", exc_info=True)
    found: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, checksum)
    if len(different := set(found) - {None}) > 1:
        raise ConfigError(
            f"train_dataset: ranks read {len(different)} different first samples; it was split without a seed, or "
            "transforms draw from a generator that set_seed does not reach: give train_test_split, "
            "albumentations.Compose and the like a seed"
        )


# What a rank keeps of a mini-batch: its own rows, or its own loss units.


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a rank keeps of each mini-batch.

    Args:
        mini_batch: samples of all ranks together.
        units: that they are in, where these have shapes of their own; None where they have one shape.
        samples: those that the rank reads, in order.
        keys: the inputs that it reads; None: all.
        dtype: floating inputs are cast to it; None keeps them.
        inputs: the model's, some of which a unit may lack.
        order: chooses in which order units run; None: as they come.
    """

    rank: int
    mini_batch: int
    samples: tuple[SampleRange, ...]
    keys: frozenset[str] | None
    dtype: torch.dtype | None
    units: int | None = None
    inputs: frozenset[str] = frozenset()
    order: ChooseOrder | None = None

    @property
    def numbers(self) -> list[int]:
        """Return the samples' numbers in the mini-batch."""
        return [n for r in self.samples for n in range(r.first_sample, r.end)]

    def keep_units(self, units: Sequence[Batch]) -> UnitBatch:
        """Return a mini-batch of units as they will run, of which this rank's are there and the shapes of all."""
        assert self.units is not None
        arranged = arrange_units(units, self.order)
        size = self.mini_batch // self.units
        own = {number // size for number in self.numbers}
        own_units: list[dict[str, Any]] = []
        for number, unit in enumerate(arranged.units):
            values: dict[str, Any] = mini_batch_shapes(unit)
            for key, value in unit.items() if number in own else ():
                if isinstance(value, Tensor) and (self.keys is None or key in self.keys):
                    values[key] = self._cast(value)
            own_units.append(values)
        return replace(arranged, units=tuple(own_units), checksum=batch_checksum(arranged))

    def cut(self, batch: Batch, *, checksum: int) -> OwnRows:
        """Return this rank's rows of a whole mini-batch, in storages of their own."""
        rows = rows_per_sample(batch)
        values = {}
        for key, count in rows.items():
            if self.keys is None or key in self.keys:
                values[key] = self._cast(self._own_rows(batch[key], count))
        return OwnRows(
            shapes=mini_batch_shapes(batch),
            held=values,
            samples=self.samples,
            rows={key: rows[key] for key in values},
            checksum=checksum,
            ones=inputs_of_ones(batch),
        )

    def keep(self, batch: Batch, *, checksum: int) -> OwnRows:
        """Return a batch of this rank's samples only, one row each, as its rows of the mini-batch."""
        shapes = mini_batch_shapes(batch)
        for key, value in shapes.items():
            if isinstance(value, Tensor):
                shapes[key] = value.new_empty((self.mini_batch, *value.shape[1:]))
        values = {
            key: self._cast(value)
            for key, value in batch.items()
            if isinstance(value, Tensor) and (self.keys is None or key in self.keys)
        }
        return OwnRows(
            shapes=shapes,
            held=values,
            samples=self.samples,
            rows=dict.fromkeys(values, 1),
            checksum=checksum,
            ones=inputs_of_ones(batch),
        )

    def _own_rows(self, value: Tensor, rows: int) -> Tensor:
        if not rows or len(self.numbers) == self.mini_batch:
            return value
        # joined, so that what leaves a worker is these rows and not the storage that they are views of
        return torch.cat([value.narrow(0, r.first_sample * rows, r.num_samples * rows) for r in self.samples])

    def _cast(self, value: Tensor) -> Tensor:
        return value.to(self.dtype) if self.dtype is not None and value.is_floating_point() else value


Prepare = Callable[[Any], dict[str, Any]]
_MOST_SAMPLES = 2**20
"""More than a mini-batch of units has: the distance of two mini-batches' places in the stream of samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """The mini-batch of one call: its number in the stream, and its samples' numbers in the dataset, by unit if it is
    of units.
    """

    number: int
    indices: Sequence[int] | Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFailure:
    """What prevented the loading of a mini-batch, as it crosses from a worker: an exception may not survive that."""

    message: str
    kind: type[GppError]


class EpochOrder:
    """The mini-batches of all epochs, as iterating over the loader again and again gives them.

    Args:
        begin: the point that the first of them comes after.
        began: is called for each epoch as it begins, a point with no lists before it.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        units: int | None,
        *,
        begin: EpochPoint | None = None,
        began: Callable[[EpochPoint], object] = lambda point: None,
    ) -> None:
        self._loader = loader
        self._units = units
        self._begin = begin or EpochPoint()
        self._began = began

    def __iter__(self) -> Iterator[_Request]:
        point, generator = self._begin, self._loader.generator
        sampler: Any = self._loader.batch_sampler
        if point.generator is not None and generator is not None:
            generator.set_state(point.generator)
        if point.sampler is not None:
            sampler.load_state_dict(point.sampler)
        number, skipped = point.mini_batches, point.lists
        units: list[Sequence[int]] = []
        while True:
            own = sampler_state(sampler)
            state = None if generator is None else generator.get_state()
            self._began(EpochPoint(mini_batches=number, lists=skipped, generator=state, sampler=own))
            # what a DataLoader draws for its workers' seeds as an epoch begins: without it the shuffle would differ
            torch.empty((), dtype=torch.int64).random_(generator=generator)
            units.clear()  # of the last epoch, fewer than a mini-batch
            for indices in itertools.islice(sampler or (), skipped, None):
                units.append(indices)
                if self._units is None:
                    yield _Request(number=number, indices=units.pop())
                    number += 1
                elif len(units) == self._units:
                    yield _Request(number=number, indices=tuple(units))
                    number += 1
                    units.clear()
            skipped = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareReader:
    """Makes mini-batches of samples and keeps a rank's share; runs where the samples are loaded.

    Args:
        collate_fn: the user's; None: torch's own.
        prepare: makes of a batch what the model is called with.
        complete: adds to the batches of a mini-batch what the model receives about all of them together.
        keys: what a mini-batch has.
        needs_whole: something is made of a row that depends on those beside it.
        unit: samples of a loss unit, of a model that takes whole ones: each is collated by itself, and all are returned
            on every rank that reads any, which finds out what Python reads of them.
    """

    collate_fn: Callable[[list[Any]], Any] | None
    prepare: Prepare
    complete: Complete = as_they_are
    share: Share
    keys: frozenset[str]
    needs_whole: bool = False
    unit: int | None = None

    def of_units(self, dataset: Any, request: _Request, seed: int) -> UnitBatch:
        """Return this rank's units of a mini-batch, each collated by itself, and the shapes of the others."""
        numbers = [index for unit in request.indices for index in _listed(unit)]
        # a sample's place in the stream is the mini-batch's number, and its own within it: units may be of any size
        first = request.number * _MOST_SAMPLES if self.share.units else 0
        items = iter(self._fetch(dataset, [(n, first + i) for i, n in enumerate(numbers)], seed))
        return self.of_unit_items([[next(items) for _ in _listed(unit)] for unit in request.indices])

    def of_unit_items(self, units: Sequence[list[Any]]) -> UnitBatch:
        """Return a mini-batch of those units whose items are there: with all of them, or with this rank's."""
        whole = self.complete([self.prepare((self.collate_fn or default_collate)(items)) for items in units])
        own_units = [own_inputs(unit, self.keys, self.share.inputs) for unit in whole]
        if self.unit is not None:
            arranged = arrange_units(own_units, self.share.order)
            return replace(arranged, checksum=batch_checksum(arranged))
        return self.share.keep_units(own_units)

    def of_indices(
        self, dataset: Any, request: _Request, seed: int, *, is_whole: bool = False
    ) -> OwnRows | UnitBatch:
        """Return this rank's share of the mini-batch of some samples of a dataset.

        Args:
            is_whole: all samples are read, as one process does.
        """
        share, indices = self.share, cast(Sequence[int], request.indices)
        items: dict[int, Any] = {}

        def fetch(numbers: Iterable[int]) -> None:
            missing = [n for n in numbers if n not in items]
            places = [(indices[n], request.number * share.mini_batch + n) for n in missing]
            items.update(zip(missing, self._fetch(dataset, places, seed), strict=True))

        needs_whole = self.needs_whole or self.collate_fn is not None or self.unit is not None
        if needs_whole or is_whole or request.number == 0:
            fetch(range(len(indices)))
            return self.of_items([items[n] for n in range(len(indices))])
        checksum = zlib.crc32(repr(list(indices)).encode()) & 0xFFFFF
        fetch(share.numbers)
        if all(_stacks(item) for item in items.values()):
            batch = self._make([items[n] for n in share.numbers])
            if all(not isinstance(v, Tensor) or v.shape[:1] == (len(items),) for v in batch.values()):
                return share.keep(batch, checksum=checksum)
        fetch(range(len(indices)))
        return share.cut(self._whole([items[n] for n in range(len(indices))]), checksum=checksum)

    def of_items(self, items: list[Any]) -> OwnRows | UnitBatch:
        """Return this rank's share of a mini-batch that is there as a whole."""
        if self.unit is not None:
            firsts = range(0, len(items), self.unit)
            return self.of_unit_items([items[first : first + self.unit] for first in firsts])
        batch = self._whole(items)
        return self.share.cut(batch, checksum=batch_checksum(batch))

    def _whole(self, items: list[Any]) -> dict[str, Any]:
        return collect_mini_batch([self._make(items)], self.share.mini_batch)

    def _make(self, items: list[Any]) -> dict[str, Any]:
        (batch,) = self.complete([self.prepare((self.collate_fn or default_collate)(items))])
        check_keys(batch, self.keys)
        return batch

    def _fetch(self, dataset: Any, places: Sequence[tuple[int, int]], seed: int) -> list[Any]:
        """Return samples by (number in the dataset, place in the stream)."""
        is_worker = get_worker_info() is not None
        fetch_many = getattr(dataset, "__getitems__", None)
        which = ""
        found = []
        try:
            # as a DataLoader does; these cannot be seeded one by one
            if fetch_many is not None and not is_worker:
                which = f"one of the samples {[index for index, _ in places]}"
                return list(fetch_many([index for index, _ in places]))
            for index, place in places:
                which = f"sample {index}"
                if is_worker:
                    _seed_all(seed, place)
                found.append(dataset[index])
        except Exception as error:  # whatever a dataset raises, all ranks hear which sample it was
            raise RuntimeFailure(
                f"rank {self.share.rank} could not load {which} of training_data: {describe_error(error)}"
            ) from error
        return found


class SharesOfDataset:
    """A dataset whose items are a rank's shares of mini-batches, or what prevented their loading.

    Attributes:
        is_whole: every rank reads all samples, as their random numbers depend on those read before.
    """

    def __init__(self, dataset: Any, reader: ShareReader, seed: int) -> None:
        self._dataset, self._reader, self._seed = dataset, reader, seed
        self.is_whole = False

    def __getitem__(self, request: _Request) -> OwnRows | UnitBatch | LoadFailure:
        reader = self._reader

        def load() -> OwnRows | UnitBatch:
            if reader.share.units is not None:
                return reader.of_units(self._dataset, request, self._seed)
            return reader.of_indices(self._dataset, request, self._seed, is_whole=self.is_whole)

        return _guarded(load, reader)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedMiniBatch:
    """A mini-batch of a stream, and the point behind it."""

    found: OwnRows | UnitBatch | LoadFailure
    point: StreamPoint

    def pin_memory(self) -> PassedMiniBatch:
        """Return the same with the mini-batch in page-locked memory."""
        return self if isinstance(self.found, LoadFailure) else replace(self, found=self.found.pin_memory())


class SharesOfStream(IterableDataset[Any]):
    """The same of a dataset that is iterated over, again when it ends.

    Args:
        begin: where to continue.
    """

    def __init__(
        self, loader: DataLoader[Any], reader: ShareReader, *, begin: StreamPoint, seed: int
    ) -> None:
        self._items = DataLoader(
            loader.dataset,
            batch_size=loader.batch_size,
            drop_last=True,
            collate_fn=as_it_is,
            generator=torch.Generator().manual_seed(seed),
        )
        self._reader = reader
        self._begin = begin
        self._passes = begin.passes
        self._seed = seed

    def __iter__(self) -> Iterator[PassedMiniBatch]:
        reader, dataset, begin = self._reader, cast(Any, self._items.dataset), self._begin
        items = self._lists()
        with restored_host_streams():  # what is only read again was drawn before
            if begin.state is not None:
                dataset.load_state_dict(begin.state)
            for _ in range(begin.dropped):
                next(items)
        number = begin.mini_batches

        def read() -> OwnRows | UnitBatch:
            if get_worker_info() is not None:
                _seed_all(self._seed, number * _MOST_SAMPLES)
            if reader.share.units is None:
                return reader.of_items(next(items))
            return reader.of_unit_items([next(items) for _ in range(reader.share.units)])

        while True:
            found = _guarded(read, reader)
            number += 1
            # a copy: the dataset continues, and a worker writes it down on a thread of its own
            state = stream_state(dataset)
            yield PassedMiniBatch(
                found=found, point=StreamPoint(mini_batches=number, passes=self._passes, state=state)
            )

    def _lists(self) -> Iterator[list[Any]]:
        """Yield the items of a mini-batch, or of a unit, pass after pass; a dataset is notified of the second on."""
        dataset, is_resumed = cast(Any, self._items.dataset), self._begin.state is not None
        while True:
            if self._passes and hasattr(dataset, "set_epoch"):
                dataset.set_epoch(self._passes)
            empty, is_resumed = not is_resumed, False
            for items in self._items:
                empty = False
                yield items
            if empty:
                raise ConfigError(
                    "training_data yields fewer samples than one mini-batch needs; give more data"
                )
            self._passes += 1


def _guarded(
    load: Callable[[], OwnRows | UnitBatch], reader: ShareReader
) -> OwnRows | UnitBatch | LoadFailure:
    """Return what was loaded; what prevented that is raised here, and returned in a worker.

    Raises:
        GppError: in one line, which names the rank.
    """
    try:
        return load()
    except Exception as error:  # whatever datasets and collators raise
        failure = LoadFailure(
            message=f"rank {reader.share.rank} could not load its mini-batch: {describe_error(error)}",
            kind=RuntimeFailure,
        )
        if isinstance(error, GppError):
            failure = LoadFailure(message=str(error), kind=type(error))
        if get_worker_info() is not None:
            return failure
        if isinstance(error, GppError):
            raise
        raise failure.kind(failure.message) from error


def _listed(unit: int | Sequence[int]) -> Sequence[int]:
    return [unit] if isinstance(unit, int) else unit


def as_it_is(items: Any) -> Any:
    """Return the items: collation is done where they are read."""
    return items


def _stacks(item: Any) -> bool:
    """Return whether torch's own collation makes of such items one row each, of one shape, or fails."""
    if not isinstance(item, Mapping | list | tuple):
        return False
    return all(
        type(value) in (int, float) or isinstance(value, (Tensor, np.ndarray))
        for value in (item.values() if isinstance(item, Mapping) else item)
    )


def _seed_all(seed: int, place: int) -> None:
    """Let what a dataset draws depend on the sample's place in the stream and on nothing else."""
    number = int.from_bytes(hashlib.blake2b(f"{seed}/{place}".encode(), digest_size=8).digest(), "big")
    torch.default_generator.manual_seed(number >> 1)
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)
