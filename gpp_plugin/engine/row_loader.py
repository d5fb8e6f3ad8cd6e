"""The engine's own loading: mini-batches in one order on every rank, of which each rank keeps its own rows.

Padding is the same for all samples of a mini-batch, whoever loads it. So a collator of the user's gets the whole
mini-batch, in a worker process, and the rank's rows are cut out before anything leaves the worker. torch's own
collation stacks tensors of one shape or fails: there a rank fetches its own samples only, and ranks tell each other the
shapes (`Feed`). The first mini-batch is loaded whole by every rank that reads any, and its content compared; from then
on what is compared is its content where a rank has that anyway, else which samples it is of.

With workers, random numbers that a dataset draws depend on the sample's place in the stream alone: a sample is the same
on every rank, with any number of workers.

A loader knows where it is (`RowLoader.position`): a dataset with numbers goes on there without loading what comes
before, a stream by its own ``state_dict``, or by reading on.

Source: this project
Tests: tests/integrations/test_loading.py, tests/integrations/test_data_position.py
"""

from __future__ import annotations

import copy
import gc
import hashlib
import itertools
import logging
import multiprocessing
import os
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from gpp_plugin.capture.mask_values import inputs_of_ones
from gpp_plugin.capture.tracing.sample_batches import count_samples, rows_per_sample
from gpp_plugin.config import GraphPipelineConfig
from gpp_plugin.data.unit_packing import PackedUnits
from gpp_plugin.engine.checkpoints.state_values import from_json, to_json
from gpp_plugin.engine.data_position import (
    SAMPLES,
    STREAM,
    EpochPoint,
    StreamPoint,
)
from gpp_plugin.engine.setting import Setting
from gpp_plugin.errors import CheckpointError, ConfigError, GppError, RuntimeFailure, first_line
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.samples import SampleRange, merged_ranges
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

logger = logging.getLogger(__name__)

_MOST_AHEAD = 4
"""Mini-batches that are taken before they are trained, at most: points in the data are remembered for so many."""
_MOST_SAMPLES = 2**20
"""More than a mini-batch of units has: places in the stream of samples are apart by so many a mini-batch."""
MOST_WORKERS = 4
"""Processes that load for a rank on CUDA unless the configuration says how many."""

Prepare = Callable[[Any], dict[str, Any]]
Complete = Callable[[Sequence[Batch]], list[dict[str, Any]]]


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


def as_they_are(batches: Sequence[Batch]) -> list[dict[str, Any]]:
    """Return the batches of a mini-batch of whose whole the model is told nothing."""
    return [dict(batch) for batch in batches]


def count_workers(asked: int | str, device: torch.device) -> int:
    """Return how many processes load for this rank.

    Args:
        asked: a number, or ``auto``: on CUDA up to four of this rank's cores; none where the cores compute.
    """
    if isinstance(asked, int):
        return asked
    if device.type != "cuda" or multiprocessing.current_process().daemon:  # a daemon may have no children
        return 0
    cores = len(os.sched_getaffinity(0)) // max(torch.cuda.device_count(), 1)
    return min(max(cores - 1, 1), MOST_WORKERS)


def repeat(loader: Iterable[Any], *, is_resumed: bool = False) -> Iterator[Any]:
    """Yield the loader's batches, starting anew when it ends.

    Args:
        is_resumed: it goes on somewhere, maybe at an epoch's end: its first pass may have nothing left.

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


def check_keys(batch: Batch, keys: frozenset[str]) -> None:
    """Refuse a batch of other keys than the model was captured with.

    Raises:
        ConfigError: says which.
    """
    if batch.keys() != keys:
        parts = (("lacks", keys - batch.keys()), ("also has", batch.keys() - keys))
        differ = " and ".join(f"{verb} {sorted(names)}" for verb, names in parts if names)
        raise ConfigError(
            f"a batch {differ}, unlike the one the model was captured with; give train_batch() the same keys as "
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

    @classmethod
    def of(
        cls,
        plan: PipelinePlan,
        rank: int,
        *,
        keys: Iterable[str] | None,
        dtype: torch.dtype | None,
        units: int | None = None,
        inputs: Iterable[str] = (),
        order: ChooseOrder | None = None,
    ) -> Share:
        """Return what a rank of a plan keeps."""
        read = [
            plan.stages[index].samples(micro_batch, rank)
            for index in plan.stages_of_rank(rank)
            for micro_batch in range(plan.num_micro_batches(index))
        ]
        return cls(
            rank=rank,
            mini_batch=plan.mini_batch,
            units=units,
            inputs=frozenset(inputs),
            order=order,
            samples=merged_ranges(read),
            keys=None if keys is None else frozenset(keys),
            dtype=dtype,
        )

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
        kept: list[dict[str, Any]] = []
        for number, unit in enumerate(arranged.units):
            values: dict[str, Any] = mini_batch_shapes(unit)
            for key, value in unit.items() if number in own else ():
                if isinstance(value, Tensor) and (self.keys is None or key in self.keys):
                    values[key] = self._cast(value)
            kept.append(values)
        return replace(arranged, units=tuple(kept), checksum=batch_checksum(arranged))

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """The mini-batch of one call: its number in the stream, and its samples' numbers in the dataset, by unit if it is
    of units.
    """

    number: int
    indices: Sequence[int] | Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """What kept a mini-batch from being loaded, as it crosses from a worker: an exception may not survive that."""

    message: str
    kind: type[GppError]


class _Order:
    """The mini-batches of all epochs, as iterating over the loader again and again gives them.

    Args:
        begin: the point that the first of them comes after.
        began: is told of each epoch as it begins, a point with no lists before it.
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


class _Reader:
    """Makes mini-batches of samples and keeps a rank's share; runs where the samples are loaded.

    Args:
        collate_fn: the user's; None: torch's own.
        prepare: makes of a batch what the model is called with.
        complete: adds to the batches of a mini-batch what the model is told of all of them together.
        keys: what a mini-batch has.
        unit: samples of a loss unit, of a model that takes whole ones: each is collated by itself, and all are kept
            on every rank that reads any, which finds out what Python reads of them.
    """

    def __init__(
        self,
        *,
        collate_fn: Callable[[list[Any]], Any] | None,
        prepare: Prepare,
        complete: Complete,
        share: Share,
        keys: frozenset[str],
        fetches_all: bool,
        unit: int | None,
    ) -> None:
        self._unit = unit
        self._collate = collate_fn or default_collate
        self._prepare = prepare
        self._complete = complete
        self._share = share
        self._keys = keys
        self._fetches_all = fetches_all or collate_fn is not None or unit is not None
        self.rank = share.rank
        self.units = share.units

    def of_units(self, dataset: Any, request: _Request, seed: int) -> UnitBatch:
        """Return this rank's units of a mini-batch, each collated by itself, and the shapes of the others."""
        numbers = [index for unit in request.indices for index in _listed(unit)]
        # a sample's place in the stream is the mini-batch's number, and its own within it: units may be of any size
        first = request.number * _MOST_SAMPLES if self._share.units else 0
        items = iter(self._fetch(dataset, [(n, first + i) for i, n in enumerate(numbers)], seed))
        return self.of_unit_items([[next(items) for _ in _listed(unit)] for unit in request.indices])

    def of_unit_items(self, units: Sequence[list[Any]]) -> UnitBatch:
        """Return a mini-batch of those units whose items are there: with all of them, or with this rank's."""
        whole = self._complete([self._prepare(self._collate(items)) for items in units])
        kept = [own_inputs(unit, self._keys, self._share.inputs) for unit in whole]
        if self._unit is not None:
            arranged = arrange_units(kept, self._share.order)
            return replace(arranged, checksum=batch_checksum(arranged))
        return self._share.keep_units(kept)

    def of_indices(self, dataset: Any, request: _Request, seed: int) -> OwnRows | UnitBatch:
        """Return this rank's share of the mini-batch of some samples of a dataset."""
        share, indices = self._share, cast(Sequence[int], request.indices)
        items: dict[int, Any] = {}

        def fetch(numbers: Iterable[int]) -> None:
            missing = [n for n in numbers if n not in items]
            places = [(indices[n], request.number * share.mini_batch + n) for n in missing]
            items.update(zip(missing, self._fetch(dataset, places, seed), strict=True))

        if self._fetches_all or request.number == 0:
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
        if self._unit is not None:
            firsts = range(0, len(items), self._unit)
            return self.of_unit_items([items[first : first + self._unit] for first in firsts])
        batch = self._whole(items)
        return self._share.cut(batch, checksum=batch_checksum(batch))

    def _whole(self, items: list[Any]) -> dict[str, Any]:
        return collect_mini_batch([self._make(items)], self._share.mini_batch, count_samples)

    def _make(self, items: list[Any]) -> dict[str, Any]:
        (batch,) = self._complete([self._prepare(self._collate(items))])
        check_keys(batch, self._keys)
        return batch

    def _fetch(self, dataset: Any, places: Sequence[tuple[int, int]], seed: int) -> list[Any]:
        """Return samples by (number in the dataset, place in the stream)."""
        is_worker = get_worker_info() is not None
        fetch_many = getattr(dataset, "__getitems__", None)
        which = ""
        found = []
        try:
            if (
                fetch_many is not None and not is_worker
            ):  # as a DataLoader does; these cannot be seeded one by one
                which = f"one of the samples {[index for index, _ in places]}"
                return list(fetch_many([index for index, _ in places]))
            for index, place in places:
                which = f"sample {index}"
                if is_worker:
                    _seed_all(seed, place)
                found.append(dataset[index])
        except Exception as error:  # whatever a dataset raises, all ranks hear which sample it was
            raise RuntimeFailure(
                f"rank {self._share.rank} could not load {which} of training_data: {_told(error)}"
            ) from error
        return found


class _Loaded:
    """A dataset whose items are a rank's shares of mini-batches, or what kept them from being loaded."""

    def __init__(self, dataset: Any, reader: _Reader, seed: int) -> None:
        self._dataset, self._reader, self._seed = dataset, reader, seed

    def __getitem__(self, request: _Request) -> OwnRows | UnitBatch | _Failure:
        reader = self._reader
        read = reader.of_indices if reader.units is None else reader.of_units
        return _guarded(lambda: read(self._dataset, request, self._seed), reader)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passed:
    """A mini-batch of a stream, and the point behind it."""

    found: OwnRows | UnitBatch | _Failure
    point: StreamPoint

    def pin_memory(self) -> _Passed:
        """Return the same with the mini-batch in page-locked memory."""
        return self if isinstance(self.found, _Failure) else replace(self, found=self.found.pin_memory())


class _LoadedStream(IterableDataset[Any]):
    """The same of a dataset that is iterated over, again when it ends.

    Args:
        begin: where to go on.
    """

    def __init__(self, loader: DataLoader[Any], reader: _Reader, *, begin: StreamPoint, seed: int) -> None:
        self._items = DataLoader(
            loader.dataset,
            batch_size=loader.batch_size,
            drop_last=True,
            collate_fn=_as_it_is,
            generator=torch.Generator().manual_seed(seed),
        )
        self._reader = reader
        self._begin = begin
        self._passes = begin.passes
        self._seed = seed

    def __iter__(self) -> Iterator[_Passed]:
        reader, dataset, begin = self._reader, cast(Any, self._items.dataset), self._begin
        items = self._lists()
        with _undisturbed():  # what is only read again draws no numbers that dropout would have had
            if begin.state is not None:
                dataset.load_state_dict(begin.state)
            for _ in range(begin.dropped):
                next(items)
        number = begin.mini_batches

        def read() -> OwnRows | UnitBatch:
            if get_worker_info() is not None:
                _seed_all(self._seed, number * _MOST_SAMPLES)
            if reader.units is None:
                return reader.of_items(next(items))
            return reader.of_unit_items([next(items) for _ in range(reader.units)])

        while True:
            found = _guarded(read, reader)
            number += 1
            # a copy: the dataset goes on, and a worker writes it down on a thread of its own
            state = stream_state(dataset)
            yield _Passed(
                found=found, point=StreamPoint(mini_batches=number, passes=self._passes, state=state)
            )

    def _lists(self) -> Iterator[list[Any]]:
        """Yield the items of a mini-batch, or of a unit, pass after pass; a dataset is told of the second and on."""
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


class RowLoader:
    """This rank's share of the mini-batches of a loader, without end; `close` ends its workers.

    Nothing is loaded before the first call of `next`.

    Args:
        loader: of whole mini-batches, made by `make_loader`.
        collate_fn: what it was made with.
        seed: what random numbers of a dataset depend on, in workers.
        workers: processes that load ahead; 0 loads here, when asked.
        pins: rows come in page-locked memory.
        needs_whole: ``complete`` makes something of a row that depends on those beside it.
        unit: as of `make_row_loader`.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        collate_fn: Callable[[list[Any]], Any] | None,
        prepare: Prepare,
        complete: Complete = as_they_are,
        share: Share,
        keys: Iterable[str],
        seed: int,
        workers: int = 0,
        pins: bool = False,
        needs_whole: bool = False,
        unit: int | None = None,
    ) -> None:
        self._unit = unit
        self.loader = loader
        self._collate_fn, self._prepare, self._share = collate_fn, prepare, share
        self._complete = complete
        self._keys, self._seed = frozenset(keys), seed
        is_stream = isinstance(loader.dataset, IterableDataset)
        # two would each have the whole stream
        self._workers = min(workers, 1) if is_stream else workers
        self._pins = pins
        self._needs_whole = needs_whole
        self._iterator: Any = None
        self._is_closed = False
        self.batch_fn: Callable[[Any], Any] | None = None
        self._is_stream = is_stream
        self._taken = 0
        self._begin: EpochPoint | StreamPoint = EpochPoint()
        if (
            is_stream
        ):  # a stream may keep its place in itself: going back to its beginning takes its state there
            self._begin = StreamPoint(state=stream_state(loader.dataset))
        self._points: list[EpochPoint] | list[StreamPoint] = []

    def __iter__(self) -> RowLoader:
        return self

    def __next__(self) -> OwnRows | UnitBatch:
        """Return this rank's share of the next mini-batch.

        Raises:
            GppError: it could not be loaded; names the rank and, where it was one, the sample.
        """
        if self._is_closed:
            raise RuntimeFailure(
                f"rank {self._share.rank} loads no more: its engine was destroyed, or loading failed"
            )
        if self._iterator is None:
            self._iterator = _start(self._make_inner())
        try:
            found = next(self._iterator)
        except (RuntimeError, OSError, EOFError) as error:  # what a dataset raises comes as a `_Failure`
            raise RuntimeFailure(
                f"rank {self._share.rank}: a process that loads training_data is gone ({first_line(error)}); it may "
                "have run out of memory: lower graph_pipeline.loader_workers"
            ) from error
        if isinstance(found, _Passed):
            cast(list[StreamPoint], self._points).append(found.point)
            found = found.found
        if isinstance(found, _Failure):
            raise found.kind(found.message)
        assert isinstance(found, (OwnRows, UnitBatch))
        self._taken += 1
        # of the points remembered the first is the last one from which anything may still be trained
        while len(self._points) > 1 and self._points[1].mini_batches <= self._taken - _MOST_AHEAD:
            self._points.pop(0)
        return found

    # ---- where it is -----------------------------------------------------------------------------

    def position(self, trained: int) -> dict[str, Any]:
        """Return where the data are after ``trained`` mini-batches, of which a few more may be taken already.

        Raises:
            CheckpointError: the stream's state cannot be written as JSON.
        """
        passed = [point for point in self._points if point.mini_batches <= trained]
        point = passed[-1] if passed else self._begin
        units = self._share.units or 1
        common = {"mini_batches": trained, "list_size": self.loader.batch_size}
        if isinstance(point, StreamPoint):
            state = to_json(point.state, path="the stream's state", tensors=None)
            passes = point.passes if state is not None else 0  # without a state it is read from its beginning
            return {
                **common, "kind": STREAM, "lists": trained * units, "passes": passes, "state": state
            }  # fmt: skip
        lists = point.lists + (trained - point.mini_batches) * units
        generator, sampler = point.generator, point.sampler
        if (
            point.generator is None and point.sampler is None
        ):  # nothing has begun: they are as they will be found
            generator = None if self.loader.generator is None else self.loader.generator.get_state()
            sampler = sampler_state(self.loader.batch_sampler)
        return {
            **common,
            "kind": SAMPLES,
            "lists": lists,
            "samples": len(cast(Any, self.loader.dataset)),
            "generator": to_json(generator, path="generator", tensors=None),
            "sampler": to_json(sampler, path="the sampler's state", tensors=None),
        }

    def restore(self, position: Mapping[str, Any], *, warns: bool) -> None:
        """Go on behind the mini-batches that were trained when `position` was asked.

        Args:
            warns: say here what does not fit.

        Raises:
            CheckpointError: it cannot be read.
        """
        try:
            begin = self._stream_point(position) if self._is_stream else self._epoch_point(position)
            problem = self._problem_with(position, begin)
            if isinstance(begin, EpochPoint) and begin.sampler is not None:
                cast(Any, self.loader.batch_sampler).load_state_dict(begin.sampler)
        except (KeyError, TypeError, ValueError, AttributeError, CheckpointError) as error:
            raise CheckpointError(
                f"the checkpoint's position in training_data cannot be read ({type(error).__name__}: {error}); load "
                "another tag"
            ) from error
        if problem and warns:
            logger.warning("%s", problem)
        self._end_iteration()
        self._begin, self._taken = begin, begin.mini_batches
        self._points.clear()

    def _epoch_point(self, position: Mapping[str, Any]) -> EpochPoint:
        """Return where a position is in a dataset with numbers; of another dataset, its beginning."""
        number = int(position["mini_batches"])
        if position["kind"] != SAMPLES or position["samples"] != len(cast(Any, self.loader.dataset)):
            return EpochPoint(mini_batches=number)
        lists, size, own = int(position["lists"]), position["list_size"], self.loader.batch_size
        return EpochPoint(
            mini_batches=number,
            lists=lists if size is None or own is None else lists * int(size) // own,
            generator=from_json(position["generator"], tensor=None),
            sampler=from_json(position["sampler"], tensor=None),
        )

    def _stream_point(self, position: Mapping[str, Any]) -> StreamPoint:
        number = int(position["mini_batches"])
        if position["kind"] != STREAM:
            return StreamPoint(mini_batches=number)
        state = from_json(position["state"], tensor=None)
        if state is not None and hasattr(self.loader.dataset, "load_state_dict"):
            return StreamPoint(mini_batches=number, passes=int(position["passes"]), state=state)
        size = self.loader.batch_size
        assert size is not None, "a stream is not packed"
        return StreamPoint(
            mini_batches=number, dropped=int(position["lists"]) * int(position["list_size"]) // size
        )

    def _problem_with(self, position: Mapping[str, Any], begin: EpochPoint | StreamPoint) -> str:
        """Return what a user should know of going on there; empty where all fits."""
        kind, size = position["kind"], self.loader.batch_size
        if kind != (STREAM if self._is_stream else SAMPLES):
            return f"training_data was another ({kind}) when the checkpoint was saved: it is read from its beginning"
        if isinstance(begin, StreamPoint):
            if not begin.dropped:
                return ""
            return (
                f"training_data is a stream without state_dict: {begin.dropped * (size or 1)} samples of it are read "
                "and dropped to go on where the checkpoint was saved; with state_dict and load_state_dict it would skip"
            )
        have = len(cast(Any, self.loader.dataset))
        if position["samples"] != have:
            return (
                f"training_data has {have} samples and had {position['samples']} when the checkpoint was saved: it is "
                "read from its beginning"
            )
        trained = int(position["lists"]) * int(position["list_size"] or 0)
        if size is not None and trained % size:
            return (
                f"{trained} samples of the epoch are trained, which are no whole number of batches of {size}: "
                f"{trained % size} of them come again; use the train_batch_size of the checkpoint"
            )
        return ""

    # ---- what it reads ---------------------------------------------------------------------------

    def apply(self, fn: Callable[[Any], Any]) -> None:
        """Apply ``fn`` to every batch as it is collated.

        Raises:
            ConfigError: mini-batches are loaded already.
        """
        if self._iterator is not None:
            raise ConfigError(
                "set_batch_fn: mini-batches are loaded ahead already; call it before train_batch()"
            )
        self.batch_fn = fn

    def close(self) -> None:
        """End the workers; nothing is loaded any more."""
        self._is_closed = True
        self._end_iteration()

    def _end_iteration(self) -> None:
        iterator, self._iterator = self._iterator, None
        # An error's traceback may hold the iterator for long, and workers would live as long. torch says that a worker
        # was killed wherever it happens to notice, here too.
        shut_down = getattr(iterator, "_shutdown_workers", None)
        if shut_down is not None:
            with suppress(RuntimeError):
                shut_down()

    def _make_inner(self) -> DataLoader[Any]:
        prepare, batch_fn = self._prepare, self.batch_fn
        reader = _Reader(
            collate_fn=self._collate_fn,
            prepare=prepare if batch_fn is None else lambda batch: prepare(batch_fn(batch)),
            complete=self._complete,
            share=self._share,
            keys=self._keys,
            # a function of the user's may make something else of a row without the others beside it
            fetches_all=batch_fn is not None or self._needs_whole,
            unit=self._unit,
        )
        options: dict[str, Any] = {
            "batch_size": None,
            "collate_fn": _as_it_is,
            "num_workers": self._workers,
            "pin_memory": self._pins,
            # the seeds of workers are drawn from it, and not from the numbers that dropout draws
            "generator": torch.Generator().manual_seed(self._seed),
            # forked, so that a dataset need not be written down: it may be a closure, or hold gigabytes
            "multiprocessing_context": "fork" if self._workers else None,
        }
        loader = self.loader
        if isinstance(loader.dataset, IterableDataset):
            assert isinstance(self._begin, StreamPoint)
            return DataLoader(_LoadedStream(loader, reader, begin=self._begin, seed=self._seed), **options)
        dataset: Any = _Loaded(loader.dataset, reader, self._seed)
        assert isinstance(self._begin, EpochPoint)
        order = _Order(
            loader, self._share.units, begin=self._begin, began=cast(list[EpochPoint], self._points).append
        )
        return DataLoader(dataset, sampler=order, **options)


def _start(loader: DataLoader[Any]) -> Iterator[Any]:
    """Return the loader's iterator; its workers are forked here."""
    # A fork has this process's objects and not its threads. What the garbage collector finds there, a process group of
    # an earlier engine, say, waits for its threads as it is let go of, or falls over them. So garbage is collected
    # before, and the workers' collectors leave alone what was there when they were forked.
    gc.collect()
    gc.freeze()
    try:
        return iter(loader)
    finally:
        gc.unfreeze()


def make_row_loader(
    dataset: Any,
    *,
    plan: PipelinePlan,
    config: GraphPipelineConfig,
    setting: Setting,
    collate_fn: Callable[[list[Any]], Any] | None,
    prepare: Prepare,
    complete: Complete = as_they_are,
    reads: Iterable[str] | None,
    keys: Iterable[str],
    inputs: Iterable[str] = (),
    unit: int | None = None,
    order: ChooseOrder | None = None,
) -> RowLoader:
    """Return what loads this rank's rows of a dataset, for a plan.

    Args:
        order: as of `Share`.
        reads: the inputs that this rank's stage reads; None: all.
        keys: what a mini-batch has; ``inputs`` those of the model's inputs, some of which a unit may lack.
        unit: samples of a loss unit, where each is collated by itself.

    Raises:
        ConfigError: the dataset holds fewer samples than one mini-batch.
    """
    return RowLoader(
        make_loader(
            dataset, mini_batch=plan.mini_batch, collate_fn=collate_fn, seed=config.seed, units=config.units
        ),
        collate_fn=collate_fn,
        prepare=prepare,
        complete=complete,
        share=Share.of(
            plan,
            setting.rank,
            keys=reads,
            dtype=setting.dtype,
            units=config.units,
            inputs=inputs,
            order=order,
        ),
        keys=keys,
        seed=config.seed,
        workers=count_workers(config.loader_workers, setting.device),
        pins=setting.device.type == "cuda",
        needs_whole=config.loss_mean == "tokens",  # each rank counts those of the whole mini-batch
        unit=unit,
    )


def _guarded(load: Callable[[], OwnRows | UnitBatch], reader: _Reader) -> OwnRows | UnitBatch | _Failure:
    """Return what was loaded; what kept it from being is raised here, and returned in a worker.

    Raises:
        GppError: in one line, which names the rank.
    """
    try:
        return load()
    except Exception as error:  # whatever datasets and collators raise
        failure = _failure(error, reader.rank)
        if get_worker_info() is not None:
            return failure
        if isinstance(error, GppError):
            raise
        raise failure.kind(failure.message) from error


def _failure(error: Exception, rank: int) -> _Failure:
    if isinstance(error, GppError):
        return _Failure(message=str(error), kind=type(error))
    return _Failure(message=f"rank {rank} could not load its mini-batch: {_told(error)}", kind=RuntimeFailure)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def _listed(unit: int | Sequence[int]) -> Sequence[int]:
    return [unit] if isinstance(unit, int) else unit


def _as_it_is(items: Any) -> Any:
    return items


def _stacks(item: Any) -> bool:
    """Return whether torch's own collation makes of such items one row each, of one shape, or fails."""
    return isinstance(item, Mapping) and all(
        type(value) in (int, float) or isinstance(value, (Tensor, np.ndarray)) for value in item.values()
    )


def _seed_all(seed: int, place: int) -> None:
    """Let what a dataset draws depend on the sample's place in the stream and on nothing else."""
    number = int.from_bytes(hashlib.blake2b(f"{seed}/{place}".encode(), digest_size=8).digest(), "big")
    torch.default_generator.manual_seed(number >> 1)
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Leave the process' random numbers as they were, whatever is drawn."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
