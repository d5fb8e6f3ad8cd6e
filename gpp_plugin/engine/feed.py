"""Mini-batches for the engine: from the user's iterator, or from a dataset the engine loads itself.

Ranks whose stages read no inputs load nothing. They learn the shape of each mini-batch from a rank that
does: one number a mini-batch, and the shapes themselves only when they are new.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from gpp_plugin.capture.export import count_samples
from gpp_plugin.errors import ConfigError, RuntimeFailure
from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.runtime.batches import Batch, check_batch, collect_mini_batch, shape_key
from gpp_plugin.runtime.ranks.meeting import Meeting

LOADING_TIMEOUT_S = 600.0
"""How long ranks wait for one that loads data; a failure they hear of at once."""


def make_loader(
    dataset: Any,
    *,
    mini_batch: int,
    collate_fn: Callable[[list[Any]], Any] | None,
    seed: int,
) -> DataLoader[Any]:
    """Return a loader of whole mini-batches, in the same shuffled order on every rank.

    Raises:
        ConfigError: the dataset holds fewer samples than one mini-batch.
    """
    collate = collate_fn or default_collate
    # Whole mini-batches: ranks take their rows of them, so that a shuffle is the same everywhere and padding too.
    if isinstance(dataset, IterableDataset):
        return DataLoader(dataset, batch_size=mini_batch, drop_last=True, collate_fn=collate)
    if len(dataset) < mini_batch:
        raise ConfigError(
            f"training_data has {len(dataset)} samples, fewer than train_batch_size={mini_batch}; "
            "lower train_batch_size or give more data"
        )
    return DataLoader(
        dataset,
        batch_size=mini_batch,
        shuffle=True,
        drop_last=True,
        collate_fn=collate,
        generator=torch.Generator().manual_seed(seed),
    )


def sample_from_dataset(
    dataset: Any, *, num_samples: int, collate_fn: Callable[[list[Any]], Any] | None
) -> Batch:
    """Return one collated batch of the dataset's first samples, for capture and profiling."""
    collate = collate_fn or default_collate
    if isinstance(dataset, IterableDataset):
        items = [item for item, _ in zip(dataset, range(num_samples), strict=False)]
    else:
        items = [dataset[index] for index in range(min(num_samples, len(dataset)))]
    if not items:
        raise ConfigError("training_data is empty; capture needs at least one sample of it")
    return check_batch(collate(items))


def inputs_read(plan: PipelinePlan, graph: BlockGraph, stage: int) -> set[str]:
    """Return the keys of the mini-batch that a stage of the plan reads."""
    own = set(plan.stages[stage].blocks)
    return {key for block in graph.blocks if block.name in own for key in block.inputs}


def ranks_that_read(plan: PipelinePlan, graph: BlockGraph) -> set[int]:
    """Return the ranks whose stages read anything of the mini-batch."""
    return {
        rank
        for index, stage in enumerate(plan.stages)
        if inputs_read(plan, graph, index)
        for rank in stage.ranks
    }


def repeat(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the loader's batches, starting anew when it ends.

    Raises:
        ConfigError: the loader yields nothing.
    """
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise ConfigError("the data loader yields no batches; its dataset is smaller than one mini-batch")


@dataclass(slots=True)
class _Loading:
    """A mini-batch of the engine's own loader on its way.

    Args:
        batch: where this rank reads inputs; ``error`` what kept it from them.
        facts: a rank that failed (-1: none) and the number of the batch's shape, once ``work`` is done.
    """

    batch: dict[str, Any] | None = None
    error: BaseException | None = None
    facts: Tensor = field(default_factory=lambda: torch.tensor([-1, -1], dtype=torch.int64))
    work: Any = None


class Feed:
    """Gives this rank each mini-batch, or its shape where the rank reads no inputs.

    Args:
        prepare: makes of a batch what the model is called with.
        reads_inputs: whether this rank's stage reads model inputs.
        source: a rank that does.
        group: a CPU group of all ranks, for announcements.
        timeout_s: how long this rank waits for the others' data.
        keys: what the batch the model was captured with has; mini-batches have the same.
        loads_ahead: load a mini-batch of the engine's own loader one call before it is needed, so that no rank waits
            for another one to begin the same call.
    """

    def __init__(
        self,
        *,
        prepare: Callable[[Any], dict[str, Any]],
        mini_batch: int,
        reads_inputs: bool,
        source: int,
        group: dist.ProcessGroup | None,
        keys: Iterable[str],
        timeout_s: float,
        loads_ahead: bool = False,
    ) -> None:
        self.batch_fn: Callable[[Any], Any] = lambda batch: batch
        self._prepare = prepare
        self._mini_batch = mini_batch
        self.reads_inputs = reads_inputs
        self._source = source
        self._group = group
        self._keys = frozenset(keys)
        self._timeout_s = timeout_s
        self._announced: dict[tuple[Any, ...], int] = {}
        self._shapes: list[dict[str, Any]] = []
        self._loads_ahead = loads_ahead
        self._ahead: _Loading | None = None

    def collect(self, iterator: Iterator[Any]) -> dict[str, Any]:
        """Take one mini-batch from the user's iterator (every rank has the same stream)."""
        # Batches of any size are joined until they are B samples; constants of the capture are the same in all of them.
        prepared = (self._prepare(batch) for batch in _check_iterator(iterator))
        batch = collect_mini_batch(prepared, self._mini_batch, count_samples)
        if batch.keys() != self._keys:
            parts = (("lacks", self._keys - batch.keys()), ("also has", batch.keys() - self._keys))
            differ = " and ".join(f"{verb} {sorted(names)}" for verb, names in parts if names)
            raise ConfigError(
                f"a batch {differ}, unlike the one the model was captured with; give train_batch() the same keys as "
                "the sample batch (by default the first of training_data)"
            )
        return batch

    def mini_batch(
        self, given: Iterator[Any] | None, standing: Iterator[Any] | None, *, is_own: bool
    ) -> dict[str, Any]:
        """Take the mini-batch of ``train_batch(given)``.

        Args:
            standing: what the engine reads where no iterator is given; its own loader if ``is_own``.

        Raises:
            ConfigError: there is neither.
        """
        if given is not None:
            return self.collect(given)
        if standing is None:
            raise ConfigError(
                "train_batch() has no data: pass training_data to deepspeed.initialize, an iterator to "
                "train_batch(data_iter=...), or call set_dataloader()"
            )
        return self.load(standing) if is_own else self.collect(standing)

    def take(self, iterator: Iterator[Any]) -> dict[str, Any]:
        """Take one batch of any size from the user's iterator."""
        return self._prepare(next(_check_iterator(iterator)))

    def load(self, iterator: Iterator[Any]) -> dict[str, Any]:
        """Take one mini-batch of the engine's own loader; without inputs, only learn its shape.

        Raises:
            RuntimeFailure: another rank's data could not be loaded, or did not come in time.
        """
        # Ahead, a rank tells in call k what it loaded for call k + 1: all have told by then, and nobody waits.
        loading = self._ahead or self._begin(iterator)
        self._ahead = None
        batch = self._end(loading)
        if self._loads_ahead:
            self._ahead = self._begin(iterator)
        return batch

    def _begin(self, iterator: Iterator[Any]) -> _Loading:
        """Load a mini-batch, and let the other ranks know."""
        loading = _Loading()
        if self.reads_inputs:
            try:
                loading.batch = self.collect(iterator)
            except BaseException as caught:  # whatever it is: the other ranks must not wait for this one
                loading.error = caught
        if self._group is None:
            return loading
        if loading.error is not None:
            loading.facts[0] = dist.get_rank()
        elif self._is_source():
            assert loading.batch is not None
            key = shape_key(loading.batch, self._mini_batch)
            loading.facts[1] = self._announced.setdefault(key, len(self._announced))
        # A maximum of (rank that failed or -1, number of the shape or -1): a failure wins, and the source's number is
        # the only one. Shapes are numbered in the order in which the source first met them: 0 0 1 0 for lengths
        # 16 16 32 16.
        loading.work = dist.all_reduce(loading.facts, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return loading

    def _end(self, loading: _Loading) -> dict[str, Any]:
        """Return this rank's batch or its shape, when all ranks have loaded theirs."""
        batch = loading.batch
        if loading.work is not None:
            self._wait(loading.work)
            batch = self._learn_shape(loading)
        if loading.error is not None:
            raise loading.error
        assert batch is not None, "a single rank reads all inputs"
        return batch

    def _learn_shape(self, loading: _Loading) -> dict[str, Any] | None:
        """Return this rank's batch or its shape; one number a mini-batch travels, a new shape once."""
        failed, index = loading.facts.tolist()
        batch = loading.batch
        if failed >= 0:
            if loading.error is None:
                raise RuntimeFailure(f"rank {failed} could not load its mini-batch; see its error")
            return None
        if index == len(self._shapes):  # a new shape: its source tells it once
            own = _without_values(batch) if self._is_source() and batch is not None else None
            meeting = Meeting(group=self._group, who=f"rank {dist.get_rank()}", timeout_s=self._timeout_s)
            told = meeting.tell(own, source=self._source, what=f"a new shape, from rank {self._source}")
            assert told is not None
            self._shapes.append(told)
        return batch if batch is not None else self._shapes[index]

    def _is_source(self) -> bool:
        return dist.get_rank() == self._source

    def _wait(self, work: Any) -> None:
        try:
            work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise RuntimeFailure(
                f"rank {dist.get_rank()} waited {self._timeout_s:g} s for the other ranks to load their mini-batch: "
                "one of them is gone, or its data loader is stuck"
            ) from error


class TrainingData:
    """What `train_batch` reads when it is called without data: the engine's own loader, or what the user set.

    Args:
        loader: of ``training_data``; None where there is none.
    """

    def __init__(self, feed: Feed, loader: Any) -> None:
        self.loader = loader
        self._feed = feed
        self._is_own = loader is not None
        self._iterator: Iterator[Any] | None = None

    def next(self, given: Iterator[Any] | None) -> dict[str, Any]:
        """Return the mini-batch of ``train_batch(given)``, or its shape where this rank reads no inputs.

        Raises:
            ConfigError: there is no data, or its keys or sizes do not fit.
        """
        if given is None and self._iterator is None and self.loader is not None:
            self._iterator = repeat(self.loader)
        return self._feed.mini_batch(given, self._iterator, is_own=self._is_own)

    def use_loader(self, loader: Any) -> None:
        """Read ``loader``, the same batches on every rank, from its beginning."""
        self.loader = loader
        self._iterator = None
        self._is_own = False

    def use_iterator(self, iterator: Iterator[Any]) -> None:
        """Read ``iterator``, the same batches on every rank."""
        self._iterator = iterator
        self._is_own = False


def _check_iterator(iterator: Any) -> Iterator[Any]:
    """Refuse what starts anew at every call, a loader or a list: its first batches would be all that is seen."""
    if not isinstance(iterator, Iterator):
        raise ConfigError(
            f"data_iter is a {type(iterator).__name__}, which is no iterator; pass the same iter(...) of it at every "
            "call, or give a loader to set_dataloader()"
        )
    return iterator


def _without_values(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the batch with its tensors on the meta device."""
    return {
        # shapes and dtypes travel, a few hundred bytes, whatever the batch weighs
        key: torch.empty(value.shape, dtype=value.dtype, device="meta")
        if isinstance(value, Tensor)
        else value
        for key, value in batch.items()
    }
