"""Mini-batches for the engine: from the user's iterator, or from a dataset the engine loads itself.

Ranks whose stages read no inputs load nothing. They learn the shape of each mini-batch from a rank that
does: one number a mini-batch, and the shapes themselves only when they are new.
"""

from __future__ import annotations

import itertools
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpp_plugin.capture.tracing.sample_batches import (
    WholeUnit,
    check_batch,
    count_samples,
    is_counted,
    likely_counts,
)
from gpp_plugin.data import PackedUnits
from gpp_plugin.engine.training_steps import different_data
from gpp_plugin.errors import ConfigError, GppError, describe_error
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
    collect_mini_batch,
    collect_units,
    collect_whole_units,
    join_batches,
    mini_batch_shapes,
    ones_among,
    shape_key,
    unit_key,
)
from gpp_plugin.runtime.ranks.collectives import Collectives, own_name, wait_for
from gpp_plugin.runtime.ranks.job_board import shared_error

LOADING_TIMEOUT_S = 600.0
"""How long ranks wait for one that loads data; a failure they hear of at once."""
MAX_KNOWN_SHAPES = 256
"""Shapes of mini-batches that ranks without inputs remember; an older one is broadcast again."""


Complete = Callable[[Sequence[Batch]], list[dict[str, Any]]]
"""Adds to the batches of a mini-batch what the model receives about all of them together."""


def as_they_are(batches: Sequence[Batch]) -> list[dict[str, Any]]:
    """Return the batches of a mini-batch unchanged: the model receives nothing about the whole of it."""
    return [dict(batch) for batch in batches]


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


_LEAST = -(2**62)
"""Below every checksum, and minus every checksum."""


@dataclass(slots=True)
class _Loading:
    """A mini-batch of the engine's own loader on its way.

    Args:
        batch: where this rank reads inputs; ``error`` what prevented it.
        facts: a rank that failed (-1: none) and the number of the batch's shape, once ``work`` is done; then the
            largest checksum of a reading rank's shape, and minus the smallest; the same of the content; then for each
            key whether any rank loaded anything but ones.
    """

    facts: Tensor

    batch: OwnRows | UnitBatch | None = None
    error: BaseException | None = None
    work: Any = None


class BatchSource:
    """Gives this rank each mini-batch, or its shape where the rank reads no inputs.

    Args:
        prepare: makes of a batch what the model is called with.
        complete: adds to the batches of a mini-batch what the model receives about all of them together.
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
        prefetches: load a mini-batch of the engine's own loader one call before it is needed, so that no rank waits
            for another one to begin the same call.

    Attributes:
        step: the step that mini-batches are for, in errors.
        refusal: why this rank will run no mini-batch now; raised in place of taking one, and reported like wrong data.
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
        prefetches: bool = False,
        inputs: Iterable[str] = (),
    ) -> None:
        self.rule = rule
        self.batch_fn: Callable[[Any], Any] = lambda batch: batch
        self.prepare = prepare
        self.complete = complete
        self._mini_batch = mini_batch
        self._units = units
        self.order = order
        self.reads_inputs = reads_inputs
        self.source = source
        self.rank = 0 if group is None else dist.get_rank()
        self._all_read = all_read
        self._group = group
        self.collectives = Collectives(group=group, who=f"rank {self.rank}", timeout_s=timeout_s)
        self.keys = frozenset(keys)
        self.inputs = frozenset(inputs)
        self._timeout_s = timeout_s
        self._announced: OrderedDict[tuple[Any, ...], int] = OrderedDict()
        self._num_announced = 0
        self._shapes: dict[int, Batch] = {}
        self._prefetches = prefetches
        self._prefetched: _Loading | None = None
        self.step = 0
        self.refusal: Exception | None = None

    def resize(self, mini_batch: int) -> None:
        """Give mini-batches of so many samples from now on; shapes are announced anew."""
        self.drop_prefetched()
        self._mini_batch = mini_batch
        self._announced.clear()
        self._shapes.clear()

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
        self._refuse()
        prepared = (self.prepare(self.batch_fn(batch)) for batch in _check_iterator(iterator))
        taken: list[Batch] | None = None
        if self._units is not None:
            taken = collect_units(prepared, self._units)
        elif self.rule is not None:
            samples = self.rule.num_samples
            taken = collect_whole_units(prepared, self._mini_batch // samples, samples)
        if taken is not None:
            units = self.complete(taken)
            units = [own_inputs(unit, self.keys, self.inputs) for unit in units]
            return self._with_readings(arrange_units(units, self.order))
        (batch,) = self.complete([collect_mini_batch(prepared, self._mini_batch)])
        check_keys(batch, self.keys)
        return batch

    def _refuse(self) -> None:
        if self.refusal is not None:
            raise self.refusal

    def take(self, iterator: Iterator[Any], count: int | None = None) -> Batch:
        """Take one batch of any size from the user's iterator, or the units of a mini-batch, with whatever keys.

        Args:
            count: so many batches as one, or so many units.
        """
        self._refuse()
        prepared = (self.prepare(self.batch_fn(batch)) for batch in _check_iterator(iterator))
        taken = collect_units(prepared, count or 1, "num_micro_batches")
        if self._units is None:
            return self.complete(taken if len(taken) == 1 else [join_batches(taken)])[0]
        if count is None:  # of units as many as there are, up to a mini-batch: an evaluation is of any number
            taken += [check_batch(unit) for unit in itertools.islice(prepared, self._units - 1)]
        units = self.complete(taken)
        # the unit that has most inputs says what the model is evaluated with; the others may lack some of these
        most = max(units, key=lambda unit: len(inputs_of(unit)))
        keys, inputs = frozenset(most), inputs_of(most)
        return arrange_units([own_inputs(unit, keys, inputs) for unit in units], self.order)

    def load(self, iterator: Iterator[OwnRows | UnitBatch]) -> Batch:
        """Take this rank's rows of a mini-batch of the engine's own loader; without inputs, only learn its shape.

        Raises:
            ConfigError: ranks loaded samples of different shapes.
            RuntimeFailure: another rank's data could not be loaded, or did not come in time.
        """
        # With prefetch, a rank reports in call k what it loaded for call k + 1, so nobody waits for a report.
        self._refuse()
        loading = self._prefetched or self._begin(iterator)
        self._prefetched = None
        batch = self._end(loading)
        if self._prefetches:
            self._prefetched = self._begin(iterator)
        return batch

    def agree(self, batch: Batch | None, error: Exception | None, *, compares: bool) -> None:
        """Refuse on all ranks, before anything runs, what one lacks, or has otherwise; collective.

        Args:
            batch: what this rank took from its iterator; None, with the ``error``, where it took nothing.
            compares: the ranks that read inputs check whether they have the same.

        Raises:
            StopIteration: an iterator ended, here or on another rank.
            RuntimeFailure: another rank took nothing, with its error; or ranks have different mini-batches.
        """
        # In mode async no rank waits for another one to begin: there `DataCheck` finds it out a call later.
        if self._group is None or (compares and self._prefetches):
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
        if failed >= 0:
            failure = self._failure_of(failed, None if has_ended else error)
            if failure is not error:
                raise failure from error
        if error is not None:
            raise error
        if ended >= 0:
            raise StopIteration(f"the data of rank {ended} ended")
        if largest != -least and largest != _LEAST:
            raise self._different(batch)

    def _failure_of(self, failed: int, own: BaseException | None) -> BaseException:
        """Return this rank's own error, or what it raises for that of the rank that ``failed``; collective."""
        why = describe_error(own) if own is not None else ""
        why = self.collectives.broadcast(why, source=failed, what="the error of another rank's data")
        if own is not None:
            return own
        return shared_error(
            "RuntimeFailure", f"rank {failed} has no mini-batch, and nothing of it has run: {why}"
        )

    def _different(self, batch: Batch | None) -> GppError:
        checksum = 0 if batch is None else batch_checksum(batch)
        return different_data(self.step, checksum=checksum, rank=self.rank)

    def drop_prefetched(self) -> None:
        """Drop what was loaded one call early, when all ranks have reported it."""
        loading, self._prefetched = self._prefetched, None
        if loading is not None and loading.work is not None:
            self._wait(loading.work)

    def _begin(self, iterator: Iterator[OwnRows | UnitBatch]) -> _Loading:
        """Load a mini-batch, and let the other ranks know."""
        loading = _Loading(torch.tensor([-1, -1] + [_LEAST] * 4 + [0] * len(self.keys)))
        if self.reads_inputs:
            try:
                batch = next(iterator)
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
                ones = ones_among(loading.batch, self.keys)
            checksum = zlib.crc32(repr(key).encode())
            other = [int(name not in ones) for name in sorted(self.keys)]
            content = batch_checksum(loading.batch)
            reported = [checksum, -checksum, content, -content, *other]
            loading.facts[2:] = torch.tensor(reported)
            if self.rank == self.source:
                loading.facts[1] = self._number_of(key)
        # A maximum of (rank that failed or -1, number of the shape or -1, its checksum, minus that): a failure wins,
        # and the source's number is the only one. Shapes are numbered in the order in which the source first met them:
        # 0 0 1 0 for lengths 16 16 32 16. Of checksums 5 5 6 the two are 6 and -5: not all are equal. A key that is 0
        # holds ones in every row: the ranks of a stage that reads inputs load all rows between them.
        loading.work = dist.all_reduce(loading.facts, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return loading

    def _with_readings(self, batch: UnitBatch) -> UnitBatch:
        """Return the units with what Python reads of each, where the model reads anything; all of them are here."""
        return batch if self.rule is None else self.rule.units(batch)

    def _number_of(self, key: tuple[Any, ...]) -> int:
        """Return the number of a shape, of those that were broadcast lately, or the next one; on the source."""
        number = self._announced.get(key)
        if number is None:
            number = self._announced[key] = self._num_announced
            self._num_announced += 1
            while len(self._announced) > MAX_KNOWN_SHAPES:
                self._announced.popitem(last=False)
        return number

    def _end(self, loading: _Loading) -> Batch:
        """Return this rank's batch or its shape, when all ranks have loaded theirs."""
        batch: Batch | None = loading.batch
        if loading.work is not None:
            self._wait(loading.work)
            batch = self._learn_shape(loading)
        elif loading.error is not None:
            raise loading.error
        assert batch is not None, "a single rank reads all inputs"
        return batch

    def _learn_shape(self, loading: _Loading) -> Batch | None:
        """Return this rank's batch or its shape; one number a mini-batch travels, a new shape once."""
        failed, index, largest, smallest, content, least, *others = loading.facts.tolist()
        batch = loading.batch
        if failed >= 0:
            raise self._failure_of(failed, loading.error)
        if largest != -smallest:
            raise _shape_mismatch(batch)
        if content != -least:
            raise self._different(batch)
        if not self._all_read and index not in self._shapes:  # a new shape: its source broadcasts it
            self._shapes[index] = self._broadcast_shapes(batch)
            self._shapes.pop(index - MAX_KNOWN_SHAPES, None)  # the oldest, as on the source
        if batch is None:
            return self._shapes[index]
        if isinstance(batch, UnitBatch):
            return batch
        ones = frozenset(key for key, other in zip(sorted(self.keys), others, strict=True) if not other)
        return replace(batch, ones=ones)

    def _broadcast_shapes(self, batch: Batch | None) -> Batch:
        """Return the shapes of the source's batch, on every rank."""
        own: Batch | None = None
        if self.rank != self.source:
            batch = None
        if isinstance(batch, UnitBatch):
            own = UnitBatch(units=tuple(mini_batch_shapes(unit) for unit in batch.units))
        elif batch is not None:
            own = mini_batch_shapes(batch)
        reported = self.collectives.broadcast(
            own, source=self.source, what=f"a new shape, from rank {self.source}"
        )
        assert reported is not None
        return reported

    def _wait(self, work: Any) -> None:
        assert self._group is not None, "a single rank waits for nobody"
        wait_for(
            work,
            what="the mini-batch that every rank loads",
            who=own_name(),
            group=self._group,
            most_s=self._timeout_s,
        )


def _shape_mismatch(batch: Batch | None) -> ConfigError:
    """Return the error of ranks whose samples of one mini-batch cannot be stacked together."""
    own = {} if batch is None else {k: list(v.shape[1:]) for k, v in batch.items() if isinstance(v, Tensor)}
    here = f" (rank {dist.get_rank()}: {own})" if own else ""
    return ConfigError(
        f"samples of one mini-batch have different shapes or dtypes on different ranks{here}; without a collate_fn "
        "they are stacked as they are: give deepspeed.initialize a collate_fn that pads"
    )


def _check_iterator(iterator: Any) -> Iterator[Any]:
    """Refuse what starts anew at every call, a loader or a list: its first batches would be all that is seen."""
    if not isinstance(iterator, Iterator):
        raise ConfigError(
            f"data_iter is a {type(iterator).__name__}, which is no iterator; pass the same iter(...) of it at every "
            "call, or give a loader to set_dataloader()"
        )
    return iterator
