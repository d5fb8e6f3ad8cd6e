"""The engine's own loading: mini-batches in one order on every rank, of which each rank keeps its own rows.

Padding is the same for all samples of a mini-batch, whoever loads it. So a collator of the user's gets the whole
mini-batch, in a worker process, and the rank's rows are cut out before anything leaves the worker. torch's own
collation stacks tensors of one shape or fails: there a rank fetches its own samples only, and ranks exchange the
shapes (`BatchSource`). The first mini-batch is loaded whole by every rank that reads any, and compared; from then
on what is compared is its content where a rank has that anyway, else which samples it is of.

What a dataset draws comes from generators of the loader's own, which begin as a reading rank's program has them at the
first mini-batch. Where a dataset draws, each rank that reads inputs loads all samples in order, and so draws what
one process draws. With workers these numbers depend on the sample's place in the stream alone: a sample is the same on
every rank, with any number of workers.

A loader has a position (`RowLoader.position`): a dataset with numbers continues there without loading what comes
before, a stream by its own ``state_dict``, or by reading on.

Source: this project
Tests: tests/integrations/test_loading.py, tests/integrations/test_data_position.py
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from gpp_plugin.config.block import GraphPipelineConfig
from gpp_plugin.data import PackedUnits
from gpp_plugin.engine.checkpoints.checkpoint_files import CONTENT_ERRORS, from_json, to_json
from gpp_plugin.engine.loading.batch_source import BatchSource
from gpp_plugin.engine.loading.rank_shard import (
    EpochOrder,
    EpochPoint,
    LoadFailure,
    PassedMiniBatch,
    Share,
    ShareReader,
    SharesOfDataset,
    SharesOfStream,
    StreamPoint,
    as_it_is,
    sampler_state,
    stream_state,
)
from gpp_plugin.errors import CheckpointError, ConfigError, RuntimeFailure, first_line
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.serialize import from_plain
from gpp_plugin.ir.tensors import merged_ranges
from gpp_plugin.ir.typed_leaves import Bytes, Count, Index, OneOf
from gpp_plugin.runtime.batches import OwnRows, UnitBatch
from gpp_plugin.runtime.random_streams import (
    HostStreams,
    OwnStreams,
    are_same_on_host,
    described_streams,
    streams_described,
)
from gpp_plugin.runtime.ranks.placement_of_ranks import Setting

logger = logging.getLogger(__name__)

SAMPLES, STREAM, EXTERNAL = "samples", "stream", "given"
"""Kinds of positions in the data (`rank_shard`); the last is of a caller's."""
_HAS = {
    SAMPLES: {"mini_batches", "lists", "list_size", "samples", "generator", "sampler"},
    STREAM: {"mini_batches", "lists", "list_size", "passes", "state"},
    EXTERNAL: {"states"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Position:
    """A position in the data as a checkpoint holds it: types and ranges; `_HAS` says which values a kind has."""

    kind: Annotated[str, OneOf(tuple(_HAS))]
    mini_batches: Index = 0
    lists: Bytes = 0
    list_size: Count | None = None
    samples: Bytes = 0
    passes: Index = 0
    draws: bool = False
    random: Any = None
    generator: Any = None
    sampler: Any = None
    state: Any = None
    states: tuple[Any, ...] = ()


@contextmanager
def trying_position(problem: str) -> Iterator[None]:
    """Refuse a checkpoint's position in the data that breaks what takes it, whoever that is.

    Args:
        problem: who cannot do what, for the error.

    Raises:
        CheckpointError: the problem, and what was raised.
    """
    try:
        yield
    except (*CONTENT_ERRORS, CheckpointError) as error:
        raise CheckpointError(
            f"{problem} ({type(error).__name__}: {first_line(error)}); load another tag"
        ) from error


def check_position(position: Any) -> None:
    """Refuse a position that a checkpoint's file does not hold so, with all states in it.

    Raises:
        CheckpointError: says which value.
    """
    with trying_position("the checkpoint's position in training_data cannot be read"):
        found: _Position = from_plain(_Position, position)
        if absent := sorted(_HAS[found.kind] - position.keys()):
            raise CheckpointError(f"no {absent[0]}")
        if found.kind == EXTERNAL and not found.states:
            raise CheckpointError("no state of a loader")
        generator = from_json(found.generator, tensor=None)
        if generator is not None:
            torch.Generator().set_state(generator)
        for state in (found.sampler, found.state, *found.states):
            from_json(state, tensor=None)
        _streams_of(found.random)


def _streams_of(described: Any) -> HostStreams | None:
    return None if described is None else streams_described(from_json(described, tensor=None))


_MAX_PREFETCHED = 4
"""Mini-batches that are taken before they are trained, at most: points in the data are remembered for so many."""


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


class RowLoader:
    """This rank's share of the mini-batches of a loader, without end; `close` ends its workers.

    Nothing is loaded before the first call of `next`.

    Args:
        loader: of whole mini-batches, made by `make_loader` with the reader's ``collate_fn``.
        reader: what is made of samples.
        seed: what random numbers of a dataset depend on, in workers.
        workers: processes that prefetch; 0 loads here, on demand.
        pins: rows come in page-locked memory.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        reader: ShareReader,
        *,
        seed: int,
        workers: int = 0,
        pins: bool = False,
    ) -> None:
        self.loader = loader
        self._reader, self._share = reader, reader.share
        self._seed = seed
        is_stream = isinstance(loader.dataset, IterableDataset)
        # two would each have the whole stream
        self._workers = min(workers, 1) if is_stream else workers
        self._pins = pins
        self._iterator: Any = None
        self._is_closed = False
        self.batch_fn: Callable[[Any], Any] | None = None
        self._is_stream = is_stream
        self._taken = 0
        self._begin: EpochPoint | StreamPoint = EpochPoint()
        # a stream may keep its place in itself: going back to its beginning takes its state there
        if is_stream:
            self._begin = StreamPoint(state=stream_state(loader.dataset))
        self._points: list[EpochPoint] | list[StreamPoint] = []
        self.streams = OwnStreams()
        self._draws = False
        self._shares: SharesOfDataset | None = None
        # behind each of the last mini-batches, by how many there are
        self._drawn: deque[tuple[int, HostStreams]] = deque(maxlen=_MAX_PREFETCHED + 1)

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
        before = self.streams.now()
        try:
            with self.streams.drawing():
                if self._iterator is None:
                    self._iterator = _start(self._make_inner())
                found = next(self._iterator)
        except (RuntimeError, OSError, EOFError) as error:  # what a dataset raises comes as a `LoadFailure`
            raise RuntimeFailure(
                f"rank {self._share.rank}: a process that loads training_data is gone ({first_line(error)}); it may "
                "have run out of memory: lower graph_pipeline.loader_workers"
            ) from error
        if isinstance(found, PassedMiniBatch):
            cast(list[StreamPoint], self._points).append(found.point)
            found = found.found
        if isinstance(found, LoadFailure):
            raise found.kind(found.message)
        assert isinstance(found, (OwnRows, UnitBatch))
        self._taken += 1
        if self._taken == 1:  # which every rank has loaded as a whole
            self._draws = not are_same_on_host(before, self.streams.now())
        if self._draws:
            self._drawn.append((self._taken, self.streams.now()))
            if self._shares is not None:
                self._shares.is_whole = True
        # of the points remembered the first is the last one from which anything may still be trained
        while len(self._points) > 1 and self._points[1].mini_batches <= self._taken - _MAX_PREFETCHED:
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
        drawn = next((streams for number, streams in self._drawn if number == trained), None)
        common = {
            "mini_batches": trained,
            "list_size": self.loader.batch_size,
            "draws": self._draws,
            "random": drawn and to_json(described_streams(drawn), path="random", tensors=None),
        }
        if isinstance(point, StreamPoint):
            state = to_json(point.state, path="the stream's state", tensors=None)
            passes = point.passes if state is not None else 0  # without a state it is read from its beginning
            return {
                **common, "kind": STREAM, "lists": trained * units, "passes": passes, "state": state
            }  # fmt: skip
        lists = point.lists + (trained - point.mini_batches) * units
        generator, sampler = point.generator, point.sampler
        # nothing has begun: they are as they will be found
        if point.generator is None and point.sampler is None:
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
        """Continue behind the mini-batches that were trained when `position` was read.

        Args:
            warns: say here what does not fit.

        Raises:
            CheckpointError: it cannot be read.
        """
        check_position(position)
        begin = self._stream_point(position) if self._is_stream else self._epoch_point(position)
        problem = self._problem_with(position, begin)
        if isinstance(begin, EpochPoint) and begin.sampler is not None:
            with trying_position("the batch sampler takes no such position in training_data"):
                cast(Any, self.loader.batch_sampler).load_state_dict(begin.sampler)
        if problem and warns:
            logger.warning("%s", problem)
        self._end_iteration()
        self._begin, self._taken = begin, begin.mini_batches
        self._points.clear()
        self._drawn.clear()
        self._draws = bool(position.get("draws"))
        if (drawn := _streams_of(position.get("random"))) is not None:
            self.streams.state = drawn
            self._drawn.append((self._taken, drawn))

    def _epoch_point(self, position: Mapping[str, Any]) -> EpochPoint:
        """Return where a position is in a dataset with numbers; of another dataset, its beginning."""
        number = position["mini_batches"]
        if position["kind"] != SAMPLES or position["samples"] != len(cast(Any, self.loader.dataset)):
            return EpochPoint(mini_batches=number)
        lists, size, own = position["lists"], position["list_size"], self.loader.batch_size
        return EpochPoint(
            mini_batches=number,
            lists=lists if size is None or own is None else lists * size // own,
            generator=from_json(position["generator"], tensor=None),
            sampler=from_json(position["sampler"], tensor=None),
        )

    def _stream_point(self, position: Mapping[str, Any]) -> StreamPoint:
        number = position["mini_batches"]
        if position["kind"] != STREAM:
            return StreamPoint(mini_batches=number)
        state = from_json(position["state"], tensor=None)
        if state is not None and hasattr(self.loader.dataset, "load_state_dict"):
            return StreamPoint(mini_batches=number, passes=position["passes"], state=state)
        size = self.loader.batch_size
        assert size is not None, "a stream is not packed"
        return StreamPoint(mini_batches=number, dropped=position["lists"] * position["list_size"] // size)

    def _problem_with(self, position: Mapping[str, Any], begin: EpochPoint | StreamPoint) -> str:
        """Return what a user should expect of continuing there; empty where all fits."""
        kind, size = position["kind"], self.loader.batch_size
        if kind != (STREAM if self._is_stream else SAMPLES):
            return f"training_data was another ({kind}) when the checkpoint was saved: it is read from its beginning"
        if isinstance(begin, StreamPoint):
            if not begin.dropped:
                return ""
            return (
                f"training_data is a stream without state_dict: {begin.dropped * (size or 1)} samples of it are read "
                "and dropped to continue where the checkpoint was saved; state_dict and load_state_dict would skip"
            )
        have = len(cast(Any, self.loader.dataset))
        if position["samples"] != have:
            return (
                f"training_data has {have} samples and had {position['samples']} when the checkpoint was saved: it is "
                "read from its beginning"
            )
        trained = position["lists"] * (position["list_size"] or 0)
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
                "set_batch_fn: mini-batches are prefetched already; call it before train_batch()"
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
        reader, batch_fn = self._reader, self.batch_fn
        if batch_fn is not None:
            prepare = reader.prepare
            # a function of the user's may make something else of a row without the others beside it
            reader = replace(reader, prepare=lambda batch: prepare(batch_fn(batch)), needs_whole=True)
        options: dict[str, Any] = {
            "batch_size": None,
            "collate_fn": as_it_is,
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
            return DataLoader(SharesOfStream(loader, reader, begin=self._begin, seed=self._seed), **options)
        dataset: Any = SharesOfDataset(loader.dataset, reader, self._seed)
        dataset.is_whole, self._shares = self._draws, dataset
        assert isinstance(self._begin, EpochPoint)
        order = EpochOrder(
            loader, self._share.units, begin=self._begin, began=cast(list[EpochPoint], self._points).append
        )
        return DataLoader(dataset, sampler=order, **options)


def make_row_loader(
    dataset: Any,
    source: BatchSource,
    *,
    plan: PipelinePlan,
    config: GraphPipelineConfig,
    setting: Setting,
    collate_fn: Callable[[list[Any]], Any] | None,
    reads: Iterable[str] | None,
) -> RowLoader:
    """Return what loads this rank's rows of a dataset, for a plan.

    Args:
        source: makes the same of batches that come from elsewhere.
        reads: the inputs that this rank's stage reads; None: all.

    Raises:
        ConfigError: the dataset holds fewer samples than one mini-batch.
    """
    loader = make_loader(
        dataset, mini_batch=plan.mini_batch, collate_fn=collate_fn, seed=config.seed, units=config.units
    )
    samples = [
        plan.stages[index].samples(micro_batch, setting.rank)
        for index in plan.stages_of_rank(setting.rank)
        for micro_batch in range(plan.num_micro_batches(index))
    ]
    share = Share(
        rank=setting.rank,
        mini_batch=plan.mini_batch,
        samples=merged_ranges(samples),  # those that the rank's stages read
        keys=None if reads is None else frozenset(reads),
        dtype=setting.dtype,
        units=config.units,
        inputs=source.inputs,
        order=source.order,
    )
    reader = ShareReader(
        collate_fn=collate_fn,
        prepare=source.prepare,
        complete=source.complete,
        share=share,
        keys=source.keys,
        needs_whole=config.loss_mean == "tokens",  # each rank counts those of the whole mini-batch
        unit=None if source.rule is None else source.rule.num_samples,
    )
    return RowLoader(
        loader,
        reader,
        seed=config.seed,
        workers=count_workers(config.loader_workers, setting.device),
        pins=setting.device.type == "cuda",
    )


def _start(loader: DataLoader[Any]) -> Iterator[Any]:
    """Return the loader's iterator; its workers are forked here."""
    # A fork has this process's objects and not its threads. What the gc finds there, a process group of
    # an earlier engine, say, waits for its threads as it is released, or falls over them. So dead objects are collected
    # before, and the workers' collectors leave alone what was there when they were forked.
    gc.collect()
    gc.freeze()
    try:
        return iter(loader)
    finally:
        gc.unfreeze()
