"""What `train_batch` reads when it is called without data, and where training is in it."""

from __future__ import annotations

import copy
import logging
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from gpp_plugin.capture.tracing.sample_batches import (
    as_unit,
    count_samples,
    is_clearly_counted,
    is_counted,
    resize_batch,
)
from gpp_plugin.config.block import GraphPipelineConfig
from gpp_plugin.engine.checkpoints.checkpoint_files import from_json, to_json
from gpp_plugin.engine.loading.batch_source import BatchSource, check_count, inputs_of, ranks_that_read
from gpp_plugin.engine.loading.row_loader import EXTERNAL, RowLoader, check_position, trying_position
from gpp_plugin.errors import CheckpointError, ConfigError, GppError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.model.model_source import ModelSource
from gpp_plugin.plan.costs.planned_lengths import UnitOrder, unit_costs
from gpp_plugin.runtime.batches import Batch, UnitBatch, num_elements, unit_key
from gpp_plugin.runtime.random_streams import HostStreams, host_streams
from gpp_plugin.runtime.rank_programs import plan_of_units
from gpp_plugin.runtime.ranks.failure_board import HERE
from gpp_plugin.runtime.ranks.placement_of_ranks import Setting
from gpp_plugin.runtime.stage_module import Reference

T = TypeVar("T")
LOADING = "loading data"
"""Where a rank is in the meantime, to the others."""

# Mini-batches that were taken of iterators before they are trained, each stored as long as its iterator.


_MOST_HELD = 4
"""Iterators without weak references (a list's, ``zip``, ``map``) of which a prefetched mini-batch is stored."""


@dataclass(slots=True)
class Taken:
    """A prefetched mini-batch, or what prevented it.

    Args:
        source: returns what it was taken from, or None where that is gone, and with it whoever could request the rest.
        is_held: the source is kept alive, since nothing would signal its end.
    """

    source: Callable[[], Any]
    is_held: bool
    batch: Batch | None = None
    error: BaseException | None = None


class PrefetchedBatches:
    """Mini-batches prefetched by what they were taken from: each lives as long as its iterator, and no longer.

    A caller may take turns between any number of iterators, and go back to one it has left. Where an iterator has no
    weak references it is held, and so are only a few of them: of one more nothing is prefetched, so nothing is lost.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, Taken] = {}
        self._has_warned = False

    def __bool__(self) -> bool:
        return bool(self._by_id)

    def pop(self, source: Any) -> Taken | None:
        """Return what was taken of a source, and keep it no longer."""
        return self._by_id.pop(id(source), None)

    def place_for(self, source: Any) -> Taken | None:
        """Return an empty place for what will be taken of a source; None where there is none."""
        number = id(source)

        def forget(_: Any) -> None:  # before the number is another object's
            self._by_id.pop(number, None)

        try:
            return Taken(weakref.ref(source, forget), is_held=False)
        except TypeError:
            pass
        if sum(each.is_held for each in self._by_id.values()) < _MOST_HELD:
            return Taken(lambda: source, is_held=True)
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "frozen_prefetch: mini-batches of %d iterators that were left in their middle are stored, and of one "
                "more (a %s) none is prefetched; pass the same iterator at every call, or generators: when they are "
                "gone, so is what is stored",
                _MOST_HELD,
                type(source).__name__,
            )
        return None

    def keep(self, taken: Taken) -> None:
        """Keep what was taken until its turn comes."""
        if taken.error is not None:
            if taken.is_held and isinstance(taken.error, StopIteration):
                return  # it will say so again
            _without_frames(taken.error)
        self._by_id[id(taken.source())] = taken


def _without_frames(error: BaseException) -> None:
    """Let an error hold none of the frames it went through, nor their callers': they keep its iterator alive."""
    if not isinstance(error, GppError | StopIteration):
        text = "".join(traceback.format_tb(error.__traceback__))
        error.add_note(f"raised as the next mini-batch was prefetched:\n{text}")
    done: set[int] = set()
    seen: BaseException | None = error
    while seen is not None and id(seen) not in done:
        done.add(id(seen))
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__


logger = logging.getLogger(__name__)


class TrainingData:
    """What `train_batch` reads when it is called without data: the engine's own loader, or what the user set.

    It has training's position in them (`position`): behind the mini-batches that `next` has returned, whatever was
    prefetched.

    Args:
        own: this rank's share of ``training_data``; None where there is none.
        peeks_at_iterators: `peek` takes mini-batches from iterators too, and not from the engine's own loader alone.
    """

    def __init__(
        self, batches: BatchSource, own: RowLoader | None, *, peeks_at_iterators: bool = False
    ) -> None:
        self.loader: Any = None if own is None else own.loader
        self._batch_source = batches
        self._own = own
        self._iterator: Iterator[Any] | None = None
        self._peeks_at_iterators = peeks_at_iterators
        self._taken = PrefetchedBatches()
        self._num_returned = 0
        self._external: Any = None
        self._repeats = False
        self._state_before: Any = None
        self._streams_before: HostStreams | None = None
        self._pending: Mapping[str, Any] | None = None
        self._is_unplaced = False  # a checkpoint without a position was loaded, and no rank reported so

    def next(
        self, data_iter: Iterator[Any] | None, *, step: int = 1, refusal: Exception | None = None
    ) -> Batch:
        """Return the mini-batch of ``train_batch(data_iter)``, or its shape on ranks without inputs; collective.

        Args:
            refusal: why this rank will not run it, reported to all ranks like wrong data; nothing is taken then.

        Raises:
            ConfigError: there is no data, or its keys or sizes do not fit.
            RuntimeFailure: a rank could not load its rows, or ranks have different ones.
            StopIteration: the data ended, here or on another rank.
        """
        self._batch_source.step = step
        self._batch_source.refusal = refusal
        taken = self._taken.pop(self._source(data_iter)) if refusal is None else None
        self._streams_before = None
        if data_iter is None:
            self._state_before = None
        if data_iter is None and self._own is not None:  # whose ranks agree as they load
            batch = self._take(None) if taken is None else _result(taken)
            self._num_returned += 1
            return batch
        return self._agreed(lambda: self._take(data_iter) if taken is None else _result(taken), compares=True)

    @HERE.during(LOADING)
    def take(
        self, data_iter: Iterator[Any], *, count: int | None = None, refusal: Exception | None = None
    ) -> Batch:
        """Return a batch to evaluate, of any size and keys; collective.

        Args:
            count, refusal: as of `BatchSource.take` and `next`.

        Raises:
            ConfigError: it is no batch.
            StopIteration: ``data_iter`` ended, here or on another rank.
        """
        self._batch_source.refusal = refusal
        return self._agreed(lambda: self._batch_source.take(data_iter, count), compares=False)

    @HERE.during(LOADING)
    def take_each(self, batches: Sequence[Any], *, refusal: Exception | None = None) -> list[Batch]:
        """Return batches to evaluate together, each a loss unit or of one shape with the others; collective.

        Raises:
            ConfigError: one is no batch, or they have several shapes.
        """
        source = self._batch_source
        source.refusal = refusal

        def take() -> list[Batch]:
            given = iter(batches)
            taken = [source.take(given, 1) for _ in batches]
            shapes = {unit_key(each) for each in taken if not isinstance(each, UnitBatch)}
            if len(shapes) > 1:
                raise ConfigError(
                    f"eval_batches: the {len(batches)} batches have {len(shapes)} different shapes; give those of one "
                    "shape, or call eval_batch for each"
                )
            return taken

        return self._agreed(take, compares=False)

    def _agreed(self, take: Callable[[], T], *, compares: bool) -> T:
        """Return what every rank could take; collective; raises as of `BatchSource.agree`."""
        found: T | None = None
        failure: Exception | None = None
        try:
            found = take()
        except Exception as error:  # whatever it is, the other ranks must hear of it
            failure = error
        batch = found if isinstance(found, Mapping) else None
        self._batch_source.agree(batch, failure, compares=compares)
        assert found is not None, "a rank without a batch has raised"
        return found

    def peek(self, data_iter: Iterator[Any] | None) -> Batch | None:
        """Return the mini-batch that `next` will return for the same source; None where there is none to prefetch.

        An error is stored for `next` to raise: the mini-batch before it is trained on all the same.
        """
        source = self._source(data_iter)
        if source is None or not (source is self._own or self._peeks_at_iterators):
            return None
        taken = self._taken.place_for(source)
        if taken is None:
            return None
        self._streams_before = host_streams()
        if source is self._iterator:
            self._state_before = self._external_state()
        try:
            taken.batch = self._take(data_iter)
        except Exception as error:  # the end of an iterator too
            taken.error = error
        self._taken.keep(taken)
        return taken.batch

    def _source(self, data_iter: Iterator[Any] | None) -> Any:
        return data_iter if data_iter is not None else self._own if self._own is not None else self._iterator

    @HERE.during(LOADING)
    def _take(self, data_iter: Iterator[Any] | None) -> Batch:
        if data_iter is not None:
            return self._batch_source.collect(data_iter)
        if self._own is None:
            if self._iterator is None:
                raise ConfigError(
                    "train_batch() has no data: pass training_data to deepspeed.initialize, an iterator to "
                    "train_batch(data_iter=...), or call set_dataloader()"
                )
            return self._batch_source.collect(self._iterator)
        try:
            if self._own.streams.state is None:
                source = self._batch_source.source
                self._own.streams.state = self._batch_source.collectives.broadcast(
                    host_streams(), source=source, what="the generators that loading draws from"
                )
            return self._batch_source.load(self._own)
        except BaseException:
            self.close()
            raise

    def use_loader(self, loader: Any) -> None:
        """Read ``loader``, the same batches on every rank, from its beginning, or where a loaded checkpoint says.

        Raises:
            ConfigError: it packs mini-batches of another number of units.
        """
        self._batch_source.check_packing(getattr(loader, "batch_sampler", None))
        self._use(loader, repeats=True)
        self.loader = loader

    def use_iterator(self, iterator: Iterator[Any]) -> None:
        """Read ``iterator``, the same batches on every rank."""
        self._use(iterator, repeats=False)

    def resize(self, mini_batch: int, make_own: Callable[[], RowLoader]) -> None:
        """Give mini-batches of so many samples from now on, which continue where training is; collective.

        Args:
            make_own: makes the share of ``training_data`` that this rank has of them; called where there is one.

        Raises:
            ConfigError: one of the old size is taken of a caller's iterator.
        """
        if self._own is None and self._taken:
            raise ConfigError(
                "set_train_batch_size: a mini-batch is prefetched from the iterator already; set "
                "graph_pipeline.frozen_prefetch to 0"
            )
        if (before := self._own) is None:
            self._batch_source.resize(mini_batch)
            return
        position = self.position()
        before.close()
        self._own = make_own()
        self._own.batch_fn, self.loader = before.batch_fn, self._own.loader
        self._batch_source.resize(mini_batch)
        self.restore(position)

    def _use(self, data_iter: Any, *, repeats: bool) -> None:
        self.close()
        self._taken.pop(self._source(None))
        self._own, self._external, self._repeats, self._state_before = None, data_iter, repeats, None
        pending, self._pending = self._pending, None
        is_resumed = pending is not None and self._restore_external(pending)
        if self._is_unplaced:
            self._warn_unplaced()
        self._iterator = repeat(data_iter, is_resumed=is_resumed) if repeats else data_iter

    # ---- where training is in the data -------------------------------------------------------------

    def program_streams(self) -> HostStreams:
        """Return the generators of the program as they were behind the last mini-batch that `next` has returned."""
        return self._streams_before or host_streams()

    def position(self) -> dict[str, Any] | None:
        """Return where training is in the data, in JSON values, the same on every rank; collective.

        Returns:
            None where the data are a caller's without ``state_dict``, or its state is none that JSON holds (a warning).
        """
        if (loader := self._own) is not None:
            source, own = self._batch_source, None
            if source.rank == source.source:
                own = self._attempt(lambda: loader.position(self._num_returned))
            shared: dict[str, Any] | None = source.collectives.broadcast(
                own, source=source.source, what="the position in the data"
            )
            return shared
        states = self._batch_source.collectives.gather(
            self._attempt(self._external_position), "the position in the data"
        )
        if any(state is None for state in states):
            return None
        if all(state == states[0] for state in states):
            return {"kind": EXTERNAL, "states": states[:1]}
        return {"kind": EXTERNAL, "states": states}

    def _external_position(self) -> Any:
        state = self._external_state() if self._state_before is None else self._state_before
        return None if state is None else to_json(state, path="the loader's state", tensors=None)

    def _external_state(self) -> Any:
        """Return the state of the caller's loader or iterator, None where it has none."""
        if not hasattr(self._external, "load_state_dict") or not hasattr(self._external, "state_dict"):
            return None
        try:
            return copy.deepcopy(self._external.state_dict())
        except AttributeError:
            # accelerate's loaders have the method, and a state only where it was configured
            return None

    def _attempt(self, make: Callable[[], Any]) -> Any:
        """Return what ``make`` gives, None and a warning where it is nothing that can be written."""
        try:
            return make()
        except CheckpointError as error:
            logger.warning("the position in the data is not saved: %s", error)
            return None

    def restore(self, position: Mapping[str, Any] | None) -> None:
        """Continue where `position` was read; collective.

        Args:
            position: None: of a checkpoint that has none; the data are left where they are.

        Raises:
            CheckpointError: it cannot be read.
        """
        warns = self._batch_source.rank == self._batch_source.source
        if position is not None:
            check_position(position)
        if position is None or (position.get("kind") == EXTERNAL) != (self._own is None):
            if self._own is None:
                self._is_unplaced = True
                if self._external is not None:
                    self._warn_unplaced()
                return
            if warns:
                logger.warning(
                    "the checkpoint has no position in training_data, which is %s",
                    "read from its beginning" if not self._num_returned else "read on where it is",
                )
            self._pending = position
            return
        self._taken.pop(self._source(None))
        if self._own is not None:
            self._batch_source.drop_prefetched()
            self._own.restore(position, warns=warns)
            self._num_returned = position["mini_batches"]
        else:
            self._pending = position
            if self._external is not None:  # else it is for the loader that will be set
                self._use(self._external, repeats=self._repeats)

    def _warn_unplaced(self) -> None:
        """Say once that the caller's data are not where the loaded checkpoint was."""
        self._is_unplaced = False
        if self._batch_source.rank == self._batch_source.source:
            logger.warning(
                "the checkpoint has no position in the data: the %s is read from where it is, and samples may come "
                "twice; skip what was trained (data with state_dict and load_state_dict are saved and restored)",
                type(self._external).__name__,
            )

    def _restore_external(self, position: Mapping[str, Any]) -> bool:
        """Let the caller's loader or iterator continue; return whether it could."""
        if position["kind"] != EXTERNAL:
            raise CheckpointError(
                "the checkpoint's position in the data holds no state of a loader; load another tag"
            )
        states = position["states"]
        if not hasattr(self._external, "load_state_dict"):
            if self._batch_source.rank == self._batch_source.source:
                logger.warning(
                    "the checkpoint has the position of a loader with state_dict, and a %s has no load_state_dict: "
                    "it is read from where it is",
                    type(self._external).__name__,
                )
            return False
        rank = self._batch_source.rank
        with trying_position(f"the {type(self._external).__name__} takes no such position in the data"):
            self._external.load_state_dict(from_json(states[rank if rank < len(states) else 0], tensor=None))
        return True

    def apply(self, fn: Callable[[Any], Any]) -> None:
        """Apply ``fn`` to every batch that is loaded or taken from an iterator.

        Raises:
            ConfigError: mini-batches are prefetched already.
        """
        if self._taken:
            raise ConfigError(
                "set_batch_fn: a mini-batch is prefetched already; call it before train_batch()"
            )
        if self._own is not None:
            self._own.apply(fn)
        self._batch_source.batch_fn = fn

    def close(self) -> None:
        """End what prefetches."""
        if self._own is not None:
            self._own.close()


def _result(taken: Taken) -> Batch:
    """Return what was prefetched, or raise what prevented it."""
    if taken.error is not None:
        raise taken.error
    assert taken.batch is not None, "what was taken is a mini-batch or an error"
    return taken.batch


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


def sample_unit(batch: Batch, source: ModelSource, config: GraphPipelineConfig, setting: Setting) -> Batch:
    """Return one unit of a sample batch, as the plan is made for it.

    Raises:
        ConfigError: its entries do not say how many samples it holds, and samples are counted.
    """
    unit, is_whole = setting.sizes.loss_unit, False
    if config.units is None:  # what has no count of samples is refused when it is known why
        check_count(batch, sizes=(unit, setting.sizes.mini_batch))
    elif is_counted(batch):
        # a graph of 12 nodes and two rows of edges: nothing of it is to be repeated or cut
        is_whole = count_samples(batch) != unit and not is_clearly_counted(batch)
        batch = batch if is_whole else resize_batch(batch, unit)
    (batch,) = source.complete_batches([batch])
    return as_unit(batch, unit) if is_whole else batch


def make_batch_source(
    source: ModelSource,
    plan: PipelinePlan,
    reference: Reference,
    sample_batch: Batch,
    *,
    config: GraphPipelineConfig,
    setting: Setting,
    timeout_s: float,
) -> BatchSource:
    """Return what gives a rank its mini-batches: the ranks that read none learn shapes from one that does.

    Args:
        sample_batch: what the model was captured with.
        timeout_s: how long ranks wait for others' data.
    """
    order: UnitOrder | None = None
    if config.units is not None and config.unit_order == "balanced":
        costs = unit_costs(plan, reference.block_graph, num_elements(sample_batch))
        order = UnitOrder(plan_of_units(plan), costs)
    reading = ranks_that_read(plan, reference.block_graph)
    return BatchSource(
        prepare=source.prepare_batch,
        complete=source.complete_batches,
        mini_batch=plan.mini_batch,
        units=config.units,
        order=order,
        reads_inputs=setting.rank in reading,
        source=min(reading),
        all_read=len(reading) == setting.num_ranks,
        group=setting.group,
        keys=sample_batch,
        inputs=inputs_of(sample_batch),
        timeout_s=timeout_s,
        rule=source.unit_rule(reference),
        prefetches=config.mode == "async",
    )
