"""What a rank keeps of a mini-batch: its own rows, or its own loss units."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gpp_plugin.capture.mask_values import inputs_of_ones
from gpp_plugin.capture.tracing.sample_batches import rows_per_sample
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.samples import SampleRange, merged_ranges
from gpp_plugin.runtime.batches import (
    Batch,
    ChooseOrder,
    OwnRows,
    UnitBatch,
    arrange_units,
    batch_checksum,
    mini_batch_shapes,
)


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
