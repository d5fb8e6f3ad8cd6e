"""What this job's ranks hold, against what its plan says: counted on the first mini-batch, told to all ranks.

Source: this project
Tests: tests/integrations/test_memory.py
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable

import torch
from torch import Tensor

from gpp_plugin.capture.tracing.sample_batches import count_samples, rows_per_sample
from gpp_plugin.config import GraphPipelineConfig
from gpp_plugin.engine.gradients import StageGradients
from gpp_plugin.engine.setting import Setting
from gpp_plugin.engine.stage_engine import StageEngine
from gpp_plugin.ir.memory_report import ALLOCATOR, COUNTED, HeldBytes, MemoryCounts, MemoryReport, RankMemory
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.plan.costs.memory_breakdown import differences
from gpp_plugin.plan.memory.memory_advice import memory_advice
from gpp_plugin.runtime.batches import (
    Batch,
    UnitBatch,
    shape_key,
    unit_key,
    units_of,
)
from gpp_plugin.runtime.ranks.meeting import Meeting

logger = logging.getLogger(__name__)


class MemoryWatch:
    """Counts one mini-batch, the first of the sample batch's shape, and reports on memory.

    Args:
        sample_batch: what the plan's figures are for.
        reads: keys of the batch that this rank's stage reads.
        meeting: of all ranks.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        *,
        config: GraphPipelineConfig,
        setting: Setting,
        sample_batch: Batch,
        reads: Iterable[str],
        meeting: Meeting,
    ) -> None:
        self._meeting = meeting
        self._plan, self._config, self._setting = plan, config, setting
        self._shape = shape_key(sample_batch, count_samples(sample_batch))
        self._stage = plan.stage_of_rank(setting.rank)
        self._reads = frozenset(reads)
        self._counts: MemoryCounts | None = None
        self._gradients = self._inputs = 0
        self._has_counted = False
        if setting.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(setting.device)  # profiling and loading are over

    def is_due(self, batch: Batch) -> bool:
        """Return whether to count this mini-batch; the same on every rank."""
        if self._has_counted:
            return False
        if isinstance(batch, UnitBatch):
            unit = (self._plan.loss_unit, *self._shape)
            return all(unit_key(each) == unit for each in batch.units)
        return shape_key(batch, self._plan.mini_batch) == self._shape

    def note_gradients(self, gradients: StageGradients) -> None:
        """Look at the gradients there are before the optimizer's step, until they have been seen once."""
        if not self._has_counted:
            self._gradients = max(self._gradients, gradients.held_bytes())

    def compare(self, counts: MemoryCounts | None, batch: Batch) -> None:
        """Take what was counted on this rank, and say on rank 0 how all ranks compare with the plan; collective.

        Args:
            counts: None for a stage without backwards.
            batch: the mini-batch that was run.
        """
        # Told to all ranks though rank 0 alone speaks of it: `memory_report` gives every rank the whole picture.
        self._has_counted = True
        self._counts = counts
        degree = self._plan.stages[self._stage].degree
        are_units = isinstance(batch, UnitBatch)
        self._inputs = sum(
            # a rank holds its units, or its rows of what has a row a sample, and all of what has none (a mask, a table)
            self._bytes_as_read(part[key]) // (degree if rows or are_units else 1)
            for part in units_of(batch)
            for key, rows in rows_per_sample(part).items()
            if key in self._reads
        )
        everyone = self._meeting.gather(counts, "what the first mini-batch kept")
        if self._setting.rank != 0 or not self._plan.memory:
            return
        lines = self._differences(everyone)
        for line in lines:
            logger.warning("memory: %s", line)
        if not lines:
            logger.info("memory: %s", self._agreement(everyone))

    def _bytes_as_read(self, value: Tensor) -> int:
        dtype = self._setting.dtype if value.is_floating_point() else value.dtype
        return value.numel() * dtype.itemsize

    def _agreement(self, everyone: list[MemoryCounts | None]) -> str:
        known = [counts for counts in everyone if counts is not None]
        peak = max((counts.peak_held_bytes for counts in known), default=0)
        swapped = sum(counts.swapped_bytes for counts in known)
        recomputed = sum(counts.recomputed_bytes for counts in known)
        return (
            f"every rank keeps what is planned: at most {peak} bytes of activations on a rank; of a micro-batch "
            f"{swapped} bytes swapped and {recomputed} recomputed on all ranks together"
        )

    def _differences(self, everyone: list[MemoryCounts | None]) -> list[str]:
        lines = []
        for rank, counts in enumerate(everyone):
            stage = self._plan.stage_of_rank(rank)
            found = differences(self._plan, stage, counts) if counts is not None else []
            if found:
                lines.append(f"stage {self._plan.stages[stage].name!r} on rank {rank} {', '.join(found)}")
        return lines

    def report(self, stage_engine: StageEngine, *, ahead: tuple[int, int] = (0, 0)) -> MemoryReport:
        """Return the report of all ranks on every rank; collective.

        Args:
            ahead: bytes of what this rank gets ahead of its mini-batch: at most, and as found between two.

        Raises:
            CommTimeout: not every rank asked for it; nothing that takes long can keep one from it.
        """
        mine = self._mine(stage_engine, *ahead)
        meeting = dataclasses.replace(self._meeting, timeout_s=self._config.comm_timeout_s)
        ranks = meeting.gather(mine, "memory_report(), which every rank calls")
        return MemoryReport(
            measure=ALLOCATOR if self._setting.device.type == "cuda" else COUNTED,
            ranks=tuple(ranks),
            differences=tuple(self._differences([rank.counts for rank in ranks])),
            advice=memory_advice(
                self._plan,
                zero_stage=self._setting.zero_stage,
                allowed=self._config.memory.optimization,
            ),
        )

    def _mine(self, stage_engine: StageEngine, ahead_bytes: int, held_ahead: int) -> RankMemory:
        held = HeldBytes(
            weights=_bytes_of(stage_engine.weight_tensors()),
            gradients=self._gradients,
            optimizer=_optimizer_bytes(stage_engine),
            buffers=self._inputs,
            ahead=held_ahead,
        )
        # On the CPU no allocator counts; what lies there is added up, which misses workspaces of operators.
        peak = 0
        if self._setting.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._setting.device)
        elif self._has_counted:
            peak = held.total + (self._counts.most_bytes if self._counts is not None else 0)
        return RankMemory(
            rank=self._setting.rank,
            stage=self._plan.stages[self._stage].name,
            predicted=self._plan.memory[self._stage] if self._plan.memory else None,
            held=held,
            counts=self._counts,
            measured_peak_bytes=peak,
            ahead_bytes=ahead_bytes,
        )


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of storages, each once."""
    # Views share a storage, and ZeRO's parameters are views of one flat buffer.
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _optimizer_bytes(stage_engine: StageEngine) -> int:
    """Return the bytes of an optimizer's state and of weights that are its own (masters)."""
    weights = {t.untyped_storage().data_ptr() for t in stage_engine.weight_tensors()}
    held = stage_engine.optimizer_tensors()
    return _bytes_of(t for t in held if t.untyped_storage().data_ptr() not in weights)
