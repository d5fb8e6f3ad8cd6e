"""Mini-batches for the engine: from the user's iterator, or from a dataset the engine loads itself.

Ranks whose stages read no inputs load nothing. They learn the shape of each mini-batch from a rank that
does: one number a mini-batch, and the shapes themselves only when they are new.
"""

from __future__ import annotations

import copy
import itertools
import logging
import traceback
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from gpp_plugin.capture.tracing.sample_batches import count_samples
from gpp_plugin.data.unit_packing import PackedUnits
from gpp_plugin.engine.checkpoints.state_values import from_json, to_json
from gpp_plugin.engine.data_position import GIVEN
from gpp_plugin.engine.row_loader import (
    Complete,
    RowLoader,
    as_they_are,
    check_keys,
    first_items,
    inputs_of,
    own_inputs,
    repeat,
)
from gpp_plugin.engine.training_steps import different_data
from gpp_plugin.errors import CheckpointError, ConfigError, GppError, RuntimeFailure
from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.runtime.batches import (
    Batch,
    ChooseOrder,
    OwnRows,
    UnitBatch,
    UnitRule,
    arrange_units,
    batch_checksum,
    check_batch,
    collect_mini_batch,
    collect_units,
    collect_whole_units,
    mini_batch_shapes,
    ones_among,
    shape_key,
    unit_key,
)
from gpp_plugin.runtime.ranks.meeting import Meeting
from gpp_plugin.runtime.ranks.waiting import own_name, wait_for

logger = logging.getLogger(__name__)

LOADING_TIMEOUT_S = 600.0
"""How long ranks wait for one that loads data; a failure they hear of at once."""
MAX_TOLD = 256
"""Shapes of mini-batches that ranks without inputs remember; an older one is told again."""


def sample_from_dataset(
    dataset: Any, *, num_samples: int, collate_fn: Callable[[list[Any]], Any] | None
) -> Batch:
    """Return one collated batch of the dataset's first samples, for capture and profiling."""
    collate = collate_fn or default_collate
    if isinstance(dataset, PackedUnits):  # a unit as they will come
        items = [dataset.dataset[index] for index in dataset.typical_unit()]
    elif isinstance(dataset, IterableDataset):
        items = first_items(dataset, num_samples)
    else:
        items = [dataset[index] for index in range(min(num_samples, len(dataset)))]
    if not items:
        raise ConfigError("training_data is empty; capture needs at least one sample of it")
    return check_batch(collate(items))


def inputs_read(plan: PipelinePlan, graph: BlockGraph, stages: Iterable[int]) -> set[str]:
    """Return the keys of the mini-batch that these stages of the plan read."""
    own = {block for stage in stages for block in plan.stages[stage].blocks}
    return {key for block in graph.blocks if block.name in own for key in block.inputs}


def ranks_that_read(plan: PipelinePlan, graph: BlockGraph) -> set[int]:
    """Return the ranks whose stages read anything of the mini-batch."""
    return {
        rank
        for index, stage in enumerate(plan.stages)
        if inputs_read(plan, graph, [index])
        for rank in stage.ranks
    }


_LEAST = -(2**62)
"""Below every checksum, and minus every checksum."""


@dataclass(slots=True)
class _Loading:
    """A mini-batch of the engine's own loader on its way.

    Args:
        batch: where this rank reads inputs; ``error`` what kept it from them.
        facts: a rank that failed (-1: none) and the number of the batch's shape, once ``work`` is done; then the
            largest checksum of a reading rank's shape, and minus the smallest; the same of the content; then whether
            any rank drew random numbers of torch's as it loaded; then for each key whether any rank loaded anything but
            ones.
    """

    facts: Tensor

    batch: OwnRows | UnitBatch | None = None
    error: BaseException | None = None
    work: Any = None


class Feed:
    """Gives this rank each mini-batch, or its shape where the rank reads no inputs.

    Args:
        prepare: makes of a batch what the model is called with.
        complete: adds to the batches of a mini-batch what the model is told of all of them together.
        units: items of a mini-batch, each one loss unit; None: a mini-batch is of batches of ``mini_batch`` samples.
        order: chooses in which order units run; None: as they come.
        reads_inputs: whether this rank's stage reads model inputs.
        source: a rank that does.
        all_read: all ranks do.
        group: a CPU group of all ranks, for announcements.
        timeout_s: how long this rank waits for the others' data.
        keys: what the batch the model was captured with has; mini-batches have the same.
        inputs: those of its tensors, some of which a unit may lack.
        rule: how batches become loss units, of a model that takes whole ones.
        loads_ahead: load a mini-batch of the engine's own loader one call before it is needed, so that no rank waits
            for another one to begin the same call.

    Attributes:
        draws: loading the first mini-batch drew random numbers on some rank, from the generator that dropout draws
            from: loaded ahead, both would draw others.
        step: the step that mini-batches are for, in errors.
    """

    def __init__(
        self,
        *,
        prepare: Callable[[Any], dict[str, Any]],
        complete: Complete = as_they_are,
        mini_batch: int,
        units: int | None = None,
        order: ChooseOrder | None = None,
        reads_inputs: bool,
        source: int,
        all_read: bool = False,
        group: dist.ProcessGroup | None,
        keys: Iterable[str],
        timeout_s: float,
        rule: UnitRule | None = None,
        loads_ahead: bool = False,
        inputs: Iterable[str] = (),
    ) -> None:
        self._rule = rule
        self.batch_fn: Callable[[Any], Any] = lambda batch: batch
        self._prepare = prepare
        self._complete = complete
        self._mini_batch = mini_batch
        self._units = units
        self._order = order
        self.reads_inputs = reads_inputs
        self.source = source
        self.rank = 0 if group is None else dist.get_rank()
        self._all_read = all_read
        self._group = group
        self._keys = frozenset(keys)
        self._inputs = frozenset(inputs)
        self._timeout_s = timeout_s
        self._announced: OrderedDict[tuple[Any, ...], int] = OrderedDict()
        self._num_announced = 0
        self._shapes: dict[int, Batch] = {}
        self._has_begun = False
        self._loads_ahead = loads_ahead
        self._ahead: _Loading | None = None
        self.draws = False
        self.step = 0

    def check_packing(self, sampler: Any) -> None:
        """Refuse units that were packed for mini-batches of another number of them.

        Raises:
            ConfigError: says both.
        """
        if isinstance(sampler, PackedUnits) and sampler.units != self._units:
            raise ConfigError(
                f"the loader packs mini-batches of {sampler.units} units, and graph_pipeline.units is {self._units}; "
                f'set "units": {sampler.units}, or give what pack() made as training_data'
            )

    def collect(self, iterator: Iterator[Any]) -> Batch:
        """Take one mini-batch from the user's iterator (every rank has the same stream)."""
        # Batches of any size are joined until they are B samples; constants of the capture are the same in all of them.
        prepared = (self._prepare(self.batch_fn(batch)) for batch in _check_iterator(iterator))
        if self._is_of_units:
            units = self._complete(self._take_units(prepared))
            units = [own_inputs(unit, self._keys, self._inputs) for unit in units]
            return self._with_readings(arrange_units(units, self._order))
        (batch,) = self._complete([collect_mini_batch(prepared, self._mini_batch, count_samples)])
        check_keys(batch, self._keys)
        return batch

    @property
    def _is_of_units(self) -> bool:
        """Return whether mini-batches are lists of units."""
        return self._units is not None or self._rule is not None

    def _take_units(self, batches: Iterator[Batch]) -> list[Batch]:
        """Take the units of a mini-batch: as many as were asked for, or what makes up its samples."""
        if self._units is not None:
            return collect_units(batches, self._units)
        assert self._rule is not None, "without units mini-batches are joined"
        samples = self._rule.num_samples
        return collect_whole_units(batches, self._mini_batch // samples, samples)

    def take(self, iterator: Iterator[Any]) -> Batch:
        """Take one batch of any size from the user's iterator, or the units of a mini-batch, with whatever keys."""
        prepared = (self._prepare(self.batch_fn(batch)) for batch in _check_iterator(iterator))
        # of units as many as there are, up to a mini-batch: an evaluation is of any number
        first = collect_units(prepared, 1)
        more = [check_batch(unit) for unit in itertools.islice(prepared, (self._units or 1) - 1)]
        units = self._complete(first + more)
        if self._units is None:
            return units[0]
        # the unit that has most inputs says what the model is evaluated with; the others may lack some of these
        most = max(units, key=lambda unit: len(inputs_of(unit)))
        keys, inputs = frozenset(most), inputs_of(most)
        return arrange_units([own_inputs(unit, keys, inputs) for unit in units], self._order)

    def load(self, iterator: Iterator[OwnRows | UnitBatch]) -> Batch:
        """Take this rank's rows of a mini-batch of the engine's own loader; without inputs, only learn its shape.

        Raises:
            ConfigError: ranks loaded samples of unlike shapes.
            RuntimeFailure: another rank's data could not be loaded, or did not come in time.
        """
        # Ahead, a rank tells in call k what it loaded for call k + 1: all have told by then, and nobody waits.
        loading = self._ahead or self._begin(iterator)
        self._ahead = None
        batch = self._end(loading)
        if self._loads_ahead and not self.draws:
            self._ahead = self._begin(iterator)
        return batch

    def agree(self, batch: Batch | None, error: Exception | None, *, compares: bool) -> None:
        """Refuse on all ranks, before anything runs, what one was not given, or was given otherwise; collective.

        Args:
            batch: what this rank took from its iterator; None, with the ``error``, where it took nothing.
            compares: the ranks that read inputs look whether they were given the same.

        Raises:
            StopIteration: an iterator ended, here or on another rank.
            RuntimeFailure: another rank took nothing for another reason, or ranks were given different mini-batches.
        """
        # In mode async no rank waits for another one to begin: there `DataAgreement` finds it out a call later.
        if self._group is None or (compares and self._loads_ahead):
            if error is not None:
                raise error
            return
        has_ended = isinstance(error, StopIteration)
        facts = torch.tensor([-1, -1, _LEAST, _LEAST])
        if error is not None:
            facts[int(has_ended)] = self.rank
        elif compares and batch is not None and self.reads_inputs:
            checksum = batch_checksum(batch)
            facts[2:] = torch.tensor([checksum, -checksum])
        self._wait(dist.all_reduce(facts, op=dist.ReduceOp.MAX, group=self._group, async_op=True))
        failed, ended, largest, least = facts.tolist()
        if error is not None and not (has_ended and failed >= 0):
            raise error
        if failed >= 0:
            raise RuntimeFailure(
                f"rank {failed} could not take its mini-batch; see its error. Nothing of it has run on any rank"
            ) from error
        if ended >= 0:
            raise StopIteration(f"the data of rank {ended} ended")
        if largest != -least and largest != _LEAST:
            raise self._different(batch)

    def _different(self, batch: Batch | None) -> RuntimeFailure:
        checksum = 0 if batch is None else batch_checksum(batch)
        return different_data(self.step, checksum=checksum, rank=self.rank)

    def drop_ahead(self) -> None:
        """Forget what was loaded one call ahead, when all ranks have told of it."""
        loading, self._ahead = self._ahead, None
        if loading is not None and loading.work is not None:
            self._wait(loading.work)

    def share_position(self, own: Any) -> Any:
        """Return, on every rank, where the rank that tells shapes is in the engine's own data; collective."""
        return self._meeting().tell(own, source=self.source, what="the position in the data")

    def gather_positions(self, own: Any) -> list[Any]:
        """Return where every rank is in the caller's data; collective."""
        return self._meeting().gather(own, "the position in the data")

    def _meeting(self) -> Meeting:
        return Meeting(group=self._group, who=f"rank {self.rank}", timeout_s=self._timeout_s)

    def _begin(self, iterator: Iterator[OwnRows | UnitBatch]) -> _Loading:
        """Load a mini-batch, and let the other ranks know."""
        loading = _Loading(torch.tensor([-1, -1] + [_LEAST] * 4 + [0] * (1 + len(self._keys))))
        before = None if self._has_begun else torch.get_rng_state()
        self._has_begun, has_drawn = True, False
        if self.reads_inputs:
            try:
                batch = next(iterator)
                has_drawn = before is not None and not torch.equal(before, torch.get_rng_state())
                loading.batch = self._with_readings(batch) if isinstance(batch, UnitBatch) else batch
            except BaseException as caught:  # whatever it is: the other ranks must not wait for this one
                loading.error = caught
        if self._group is None:
            return loading
        if loading.error is not None:
            loading.facts[0] = dist.get_rank()
        elif loading.batch is not None:
            if isinstance(loading.batch, UnitBatch):  # each rank looks at the masks of its own units
                key: tuple[Any, ...] = tuple(unit_key(unit) for unit in loading.batch.units)
                ones: frozenset[str] = frozenset()
            else:
                key = shape_key(loading.batch, self._mini_batch)
                ones = ones_among(loading.batch, self._keys)
            checksum = zlib.crc32(repr(key).encode())
            other = [int(name not in ones) for name in sorted(self._keys)]
            content = batch_checksum(loading.batch)
            told = [checksum, -checksum, content, -content, int(has_drawn), *other]
            loading.facts[2:] = torch.tensor(told)
            if self._is_source():
                loading.facts[1] = self._number_of(key)
        # A maximum of (rank that failed or -1, number of the shape or -1, its checksum, minus that): a failure wins,
        # and the source's number is the only one. Shapes are numbered in the order in which the source first met them:
        # 0 0 1 0 for lengths 16 16 32 16. Of checksums 5 5 6 the two are 6 and -5: not all are equal. A key that is 0
        # holds ones in every row: the ranks of a stage that reads inputs load all rows between them.
        loading.work = dist.all_reduce(loading.facts, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return loading

    def _with_readings(self, batch: UnitBatch) -> UnitBatch:
        """Return the units with what Python reads of each, where the model reads anything; all of them are here."""
        return batch if self._rule is None else self._rule.units(batch)

    def _number_of(self, key: tuple[Any, ...]) -> int:
        """Return the number of a shape, of those that were told lately, or the next one; on the source."""
        number = self._announced.get(key)
        if number is None:
            number = self._announced[key] = self._num_announced
            self._num_announced += 1
            while len(self._announced) > MAX_TOLD:
                self._announced.popitem(last=False)
        return number

    def _end(self, loading: _Loading) -> Batch:
        """Return this rank's batch or its shape, when all ranks have loaded theirs."""
        batch: Batch | None = loading.batch
        if loading.work is not None:
            self._wait(loading.work)
            batch = self._learn_shape(loading)
        if loading.error is not None:
            raise loading.error
        assert batch is not None, "a single rank reads all inputs"
        return batch

    def _learn_shape(self, loading: _Loading) -> Batch | None:
        """Return this rank's batch or its shape; one number a mini-batch travels, a new shape once."""
        failed, index, largest, smallest, content, least, has_drawn, *others = loading.facts.tolist()
        self.draws = self.draws or bool(has_drawn)
        batch = loading.batch
        if failed >= 0:
            if loading.error is None:
                raise RuntimeFailure(f"rank {failed} could not load its mini-batch; see its error")
            return None
        if largest != -smallest:
            raise _unlike_shapes(batch)
        if content != -least:
            raise self._different(batch)
        if not self._all_read and index not in self._shapes:  # a new shape: its source tells it
            self._shapes[index] = self._tell_shapes(batch)
            self._shapes.pop(index - MAX_TOLD, None)  # the oldest, as on the source
        if batch is None:
            return self._shapes[index]
        if isinstance(batch, UnitBatch):
            return batch
        ones = frozenset(key for key, other in zip(sorted(self._keys), others, strict=True) if not other)
        return replace(batch, ones=ones)

    def _tell_shapes(self, batch: Batch | None) -> Batch:
        """Return the shapes of the source's batch, on every rank."""
        own: Batch | None = None
        if self._is_source() and isinstance(batch, UnitBatch):
            own = UnitBatch(units=tuple(mini_batch_shapes(unit) for unit in batch.units))
        elif self._is_source() and batch is not None:
            own = mini_batch_shapes(batch)
        told = self._meeting().tell(own, source=self.source, what=f"a new shape, from rank {self.source}")
        assert told is not None
        return told

    def _is_source(self) -> bool:
        return self.rank == self.source

    def _wait(self, work: Any) -> None:
        assert self._group is not None, "a single rank waits for nobody"
        wait_for(
            work,
            what="the mini-batch that every rank loads",
            who=own_name(),
            group=self._group,
            most_s=self._timeout_s,
        )


_MOST_HELD = 4
"""Iterators without weak references (a list's, ``zip``, ``map``) of which a mini-batch taken ahead is kept."""


@dataclass(slots=True)
class _Taken:
    """A mini-batch taken ahead, or what kept it from being.

    Args:
        source: returns what it was taken from, or None where that is gone, and with it whoever could ask for the rest.
        is_held: the source is kept alive, since nothing would tell when it goes.
    """

    source: Callable[[], Any]
    is_held: bool
    batch: Batch | None = None
    error: BaseException | None = None


class _TakenAhead:
    """Mini-batches taken ahead by what they were taken from: each lives as long as its iterator, and no longer.

    A caller may take turns between any number of iterators, and go back to one it has left. Where an iterator has no
    weak references it is held, and so are only a few of them: of one more nothing is taken ahead, so nothing is lost.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, _Taken] = {}
        self._has_warned = False

    def __bool__(self) -> bool:
        return bool(self._by_id)

    def pop(self, source: Any) -> _Taken | None:
        """Return what was taken of a source, and keep it no longer."""
        return self._by_id.pop(id(source), None)

    def place_for(self, source: Any) -> _Taken | None:
        """Return an empty place for what will be taken of a source; None where there is none."""
        number = id(source)

        def forget(_: Any) -> None:  # before the number is another object's
            self._by_id.pop(number, None)

        try:
            return _Taken(weakref.ref(source, forget), is_held=False)
        except TypeError:
            pass
        if sum(each.is_held for each in self._by_id.values()) < _MOST_HELD:
            return _Taken(lambda: source, is_held=True)
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "look_ahead: mini-batches of %d iterators that were left in their middle are kept, and of one more "
                "(a %s) none is taken ahead; pass the same iterator at every call, or generators: when they are gone, "
                "so is what is kept",
                _MOST_HELD,
                type(source).__name__,
            )
        return None

    def keep(self, taken: _Taken) -> None:
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
        error.add_note(f"raised as the next mini-batch was taken ahead:\n{text}")
    done: set[int] = set()
    seen: BaseException | None = error
    while seen is not None and id(seen) not in done:
        done.add(id(seen))
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__


class TrainingData:
    """What `train_batch` reads when it is called without data: the engine's own loader, or what the user set.

    It knows where training is in them (`position`): behind the mini-batches that `next` has given, whatever was taken
    ahead.

    Args:
        own: this rank's share of ``training_data``; None where there is none.
        peeks_at_iterators: `peek` takes mini-batches from iterators too, and not from the engine's own loader alone.
    """

    def __init__(self, feed: Feed, own: RowLoader | None, *, peeks_at_iterators: bool = False) -> None:
        self.loader: Any = None if own is None else own.loader
        self._feed = feed
        self._own = own
        self._iterator: Iterator[Any] | None = None
        self._peeks_at_iterators = peeks_at_iterators
        self._taken = _TakenAhead()
        self._num_given = 0
        self._given: Any = None
        self._repeats = False
        self._state_before: Any = None
        self._pending: Mapping[str, Any] | None = None
        self._is_unplaced = False  # a checkpoint without a position was loaded, and nobody told so

    def next(self, given: Iterator[Any] | None, *, step: int = 1) -> Batch:
        """Return the mini-batch of ``train_batch(given)``, or its shape where this rank reads no inputs; collective.

        Raises:
            ConfigError: there is no data, or its keys or sizes do not fit.
            RuntimeFailure: a rank could not load its rows, or ranks were given different ones.
            StopIteration: the data ended, here or on another rank.
        """
        self._feed.step = step
        taken = self._taken.pop(self._source(given))
        if given is None:
            self._state_before = None
        if given is None and self._own is not None:  # whose ranks agree as they load
            batch = self._take(None) if taken is None else _result(taken)
            self._num_given += 1
            return batch
        found: Batch | None = None
        failure: Exception | None = None
        try:
            found = self._take(given) if taken is None else _result(taken)
        except Exception as error:  # whatever it is, the other ranks must hear of it
            failure = error
        self._feed.agree(found, failure, compares=True)
        assert found is not None, "a rank without a mini-batch has raised"
        return found

    def take(self, given: Iterator[Any]) -> Batch:
        """Return a batch to evaluate, of any size and keys; collective.

        Raises:
            ConfigError: it is no batch.
            StopIteration: ``given`` ended, here or on another rank.
        """
        found: Batch | None = None
        failure: Exception | None = None
        try:
            found = self._feed.take(given)
        except Exception as error:  # whatever it is, the other ranks must hear of it
            failure = error
        self._feed.agree(found, failure, compares=False)
        assert found is not None, "a rank without a batch has raised"
        return found

    def peek(self, given: Iterator[Any] | None) -> Batch | None:
        """Return the mini-batch that `next` will return for the same source; None where there is none to be had ahead.

        What goes wrong is kept for `next` to raise: the mini-batch before it is trained on all the same.
        """
        source = self._source(given)
        is_own = source is self._own
        if source is None or (self._feed.draws if is_own else not self._peeks_at_iterators):
            return None
        taken = self._taken.place_for(source)
        if taken is None:
            return None
        if source is self._iterator:
            self._state_before = self._given_state()
        try:
            taken.batch = self._take(given)
        except Exception as error:  # the end of an iterator too
            taken.error = error
        self._taken.keep(taken)
        return taken.batch

    def _source(self, given: Iterator[Any] | None) -> Any:
        return given if given is not None else self._own if self._own is not None else self._iterator

    def _take(self, given: Iterator[Any] | None) -> Batch:
        if given is not None:
            return self._feed.collect(given)
        if self._own is None:
            if self._iterator is None:
                raise ConfigError(
                    "train_batch() has no data: pass training_data to deepspeed.initialize, an iterator to "
                    "train_batch(data_iter=...), or call set_dataloader()"
                )
            return self._feed.collect(self._iterator)
        try:
            return self._feed.load(self._own)
        except BaseException:
            self.close()
            raise

    def use_loader(self, loader: Any) -> None:
        """Read ``loader``, the same batches on every rank, from its beginning, or where a loaded checkpoint says.

        Raises:
            ConfigError: it packs mini-batches of another number of units.
        """
        self._feed.check_packing(getattr(loader, "batch_sampler", None))
        self._use(loader, repeats=True)
        self.loader = loader

    def use_iterator(self, iterator: Iterator[Any]) -> None:
        """Read ``iterator``, the same batches on every rank."""
        self._use(iterator, repeats=False)

    def _use(self, given: Any, *, repeats: bool) -> None:
        self.close()
        self._taken.pop(self._source(None))
        self._own, self._given, self._repeats, self._state_before = None, given, repeats, None
        pending, self._pending = self._pending, None
        is_resumed = pending is not None and self._restore_given(pending)
        if self._is_unplaced:
            self._warn_unplaced()
        self._iterator = repeat(given, is_resumed=is_resumed) if repeats else given

    # ---- where training is in the data -------------------------------------------------------------

    def position(self) -> dict[str, Any] | None:
        """Return where training is in the data, in JSON values, the same on every rank; collective.

        Returns:
            None where the data are a caller's without ``state_dict``, or its state is none that JSON holds (a warning).
        """
        if self._own is not None:
            own = self._told(self._own_position) if self._feed.rank == self._feed.source else None
            shared: dict[str, Any] | None = self._feed.share_position(own)
            return shared
        states = self._feed.gather_positions(self._told(self._given_position))
        if any(state is None for state in states):
            return None
        if all(state == states[0] for state in states):
            return {"kind": GIVEN, "states": states[:1]}
        return {"kind": GIVEN, "states": states}

    def _own_position(self) -> dict[str, Any]:
        assert self._own is not None
        return {**self._own.position(self._num_given), "draws": self._feed.draws}

    def _given_position(self) -> Any:
        state = self._given_state() if self._state_before is None else self._state_before
        return None if state is None else to_json(state, path="the loader's state", tensors=None)

    def _given_state(self) -> Any:
        """Return the state of the caller's loader or iterator, None where it has none."""
        if not hasattr(self._given, "load_state_dict") or not hasattr(self._given, "state_dict"):
            return None
        try:
            return copy.deepcopy(self._given.state_dict())
        except (
            AttributeError
        ):  # accelerate's loaders have the method, and a state only where they are asked for one
            return None

    def _told(self, make: Callable[[], Any]) -> Any:
        """Return what ``make`` gives, None and a warning where it is nothing that can be written."""
        try:
            return make()
        except CheckpointError as error:
            logger.warning("the position in the data is not saved: %s", error)
            return None

    def restore(self, position: Mapping[str, Any] | None) -> None:
        """Go on where `position` was asked; collective.

        Args:
            position: None: of a checkpoint that has none; the data are left where they are.

        Raises:
            CheckpointError: it cannot be read.
        """
        warns = self._feed.rank == self._feed.source
        if position is None or (position.get("kind") == GIVEN) != (self._own is None):
            if self._own is None:
                self._is_unplaced = True
                if self._given is not None:
                    self._warn_unplaced()
                return
            if warns:
                logger.warning(
                    "the checkpoint has no position in training_data, which is %s",
                    "read from its beginning" if not self._num_given else "read on where it is",
                )
            self._pending = position
            return
        self._taken.pop(self._source(None))
        if self._own is not None:
            self._feed.drop_ahead()
            self._own.restore(position, warns=warns)
            self._num_given = int(position["mini_batches"])
            self._feed.draws = self._feed.draws or bool(position.get("draws"))
        elif self._given is None:  # for the loader that will be set
            self._pending = position
        else:
            self._pending = position
            self._use(self._given, repeats=self._repeats)

    def _warn_unplaced(self) -> None:
        """Say once that the caller's data are not where the loaded checkpoint was."""
        self._is_unplaced = False
        if self._feed.rank == self._feed.source:
            logger.warning(
                "the checkpoint has no position in the data: the %s is read from where it is, and samples may come "
                "twice; skip what was trained (data with state_dict and load_state_dict are saved and restored)",
                type(self._given).__name__,
            )

    def _restore_given(self, position: Mapping[str, Any]) -> bool:
        """Let the caller's loader or iterator go on; return whether it could."""
        states = position.get("states")
        if not isinstance(states, list) or not states:
            raise CheckpointError(
                "the checkpoint's position in the data holds no state of a loader; load another tag"
            )
        if not hasattr(self._given, "load_state_dict"):
            if self._feed.rank == self._feed.source:
                logger.warning(
                    "the checkpoint has the position of a loader with state_dict, and a %s has no load_state_dict: "
                    "it is read from where it is",
                    type(self._given).__name__,
                )
            return False
        self._given.load_state_dict(
            from_json(states[self._feed.rank if self._feed.rank < len(states) else 0], tensor=None)
        )
        return True

    def apply(self, fn: Callable[[Any], Any]) -> None:
        """Apply ``fn`` to every batch that is loaded or taken from an iterator.

        Raises:
            ConfigError: mini-batches are loaded ahead already.
        """
        if self._taken:
            raise ConfigError(
                "set_batch_fn: a mini-batch is taken ahead already; call it before train_batch()"
            )
        if self._own is not None:
            self._own.apply(fn)
        self._feed.batch_fn = fn

    def close(self) -> None:
        """End what loads ahead."""
        if self._own is not None:
            self._own.close()


def _result(taken: _Taken) -> Batch:
    """Return what was taken ahead, or raise what kept it from being."""
    if taken.error is not None:
        raise taken.error
    assert taken.batch is not None, "what was taken is a mini-batch or an error"
    return taken.batch


def _check_iterator(iterator: Any) -> Iterator[Any]:
    """Refuse what starts anew at every call, a loader or a list: its first batches would be all that is seen."""
    if not isinstance(iterator, Iterator):
        raise ConfigError(
            f"data_iter is a {type(iterator).__name__}, which is no iterator; pass the same iter(...) of it at every "
            "call, or give a loader to set_dataloader()"
        )
    return iterator


def _unlike_shapes(batch: Batch | None) -> ConfigError:
    """Return the error of ranks whose samples of one mini-batch cannot be stacked together."""
    own = {} if batch is None else {k: list(v.shape[1:]) for k, v in batch.items() if isinstance(v, Tensor)}
    here = f" (rank {dist.get_rank()}: {own})" if own else ""
    return ConfigError(
        f"samples of one mini-batch have unlike shapes or dtypes on different ranks{here}; without a collate_fn they "
        "are stacked as they are: give deepspeed.initialize a collate_fn that pads"
    )
