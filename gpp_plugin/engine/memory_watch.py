"""What this job's ranks hold, against what its plan says: counted on the first mini-batch, gathered on all ranks.

Source: this project
Tests: tests/integrations/test_memory.py
"""

from __future__ import annotations

import dataclasses
import logging
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from gpp_plugin.capture.tracing.sample_batches import (
    count_samples,
    length_entries,
    length_of,
    rows_per_sample,
)
from gpp_plugin.config.block import GraphPipelineConfig
from gpp_plugin.engine.rank_engine import RankEngine, StageEngine
from gpp_plugin.errors import BatchRefused
from gpp_plugin.ir.memory_report import (
    ALLOCATOR,
    COUNTED,
    HeldBytes,
    MemoryCounts,
    MemoryReport,
    RankMemory,
    joined_counts,
)
from gpp_plugin.ir.plan import PipelinePlan, joined_breakdown
from gpp_plugin.plan.costs.memory_formula import differences
from gpp_plugin.plan.costs.planned_lengths import SizedPlan, UnitSize
from gpp_plugin.plan.memory.fitting import memory_advice
from gpp_plugin.runtime.batches import (
    Batch,
    UnitBatch,
    shape_key,
    unit_key,
    units_of,
)
from gpp_plugin.runtime.memory.counting import storage_bytes
from gpp_plugin.runtime.ranks.collectives import Collectives
from gpp_plugin.runtime.ranks.placement_of_ranks import Setting

logger = logging.getLogger(__name__)


MOST_SHORTAGES = 1024
"""Lengths of mini-batches of which it is remembered whether they fit."""
MOST_COUNTED = 8
"""Mini-batches that are counted where lengths are set, each longer than those before."""


class MemoryWatch:
    """Counts mini-batches, reports on memory, and refuses mini-batches that do not fit.

    Where lengths are set a mini-batch is counted if it is longer than those counted before; else one is, the first of
    the sample batch's shape.

    Args:
        sample_batch: what the plan's figures are for.
        reads: of each of this rank's stages, the keys of the batch that it reads.
        collectives: of all ranks.
        sized: what the plan's stages hold at other lengths, where it is known.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        *,
        config: GraphPipelineConfig,
        setting: Setting,
        sample_batch: Batch,
        reads: Sequence[Collection[str]],
        collectives: Collectives,
        sized: SizedPlan | None = None,
    ) -> None:
        self._collectives = collectives
        self._sized = sized
        lengths = config.lengths
        self._longest = None if lengths is None else lengths.max
        self._anchors = () if lengths is None else tuple(length_entries(sample_batch, lengths.max))
        self._sample = _in_words(sample_batch)
        self._shortages: OrderedDict[tuple[UnitSize, ...], tuple[str, int]] = OrderedDict()
        self._counted: tuple[UnitSize, ...] | None = None
        self._num_counted = 0
        self._plan, self._config, self._setting = plan, config, setting
        self._shape = shape_key(sample_batch, count_samples(sample_batch))
        self._stages = plan.stages_of_rank(setting.rank)
        self._reads = [frozenset(keys) for keys in reads]
        self._counts: dict[int, MemoryCounts] = {}
        self._inputs = self._most_bytes = self._messages = 0
        self._has_counted = False
        if setting.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(setting.device)  # profiling and loading are over

    def is_due(self, batch: Batch) -> bool:
        """Return whether to count this mini-batch; the same on every rank."""
        if self._sized is not None:
            return self._is_longest(self._sized, batch)
        if self._has_counted:
            return False
        if isinstance(batch, UnitBatch):
            unit = (self._plan.loss_unit, *self._shape)
            return all(unit_key(each) == unit for each in batch.units)
        return shape_key(batch, self._plan.mini_batch) == self._shape

    def _is_longest(self, sized: SizedPlan, batch: Batch) -> bool:
        """Return whether more is held of this mini-batch than of all that were counted."""
        # in mode async micro-batches of the call before are under way, whose forwards were not counted
        most = 1 if self._config.mode == "async" else MOST_COUNTED
        if self._num_counted >= most:
            return False
        sizes = self._sizes_of(sized, batch)
        # of units of several shapes those of the first alone would be counted
        if isinstance(sizes, str) or len(set(sizes)) > 1:
            return False
        if self._counted is None:
            return True
        here, known = (sized.at(units[:1]).memory for units in (sizes, self._counted))
        return sum(part.activations for part in here) > sum(part.activations for part in known)

    def _sizes_of(self, sized: SizedPlan, batch: Batch) -> tuple[UnitSize, ...] | str:
        """Return the lengths and samples of a mini-batch's units, one where all are alike; or why they have none."""
        found = []
        wanted, samples = sized.costs.sizes.shapes, sized.costs.num_samples
        for unit in units_of(batch):
            count = count_samples(unit)
            shapes = {k: tuple(v.shape) for k, v in unit.items() if isinstance(v, Tensor)}
            for key, shape in shapes.items():
                # rows are those of the samples that costs are of; one row beside all samples stays one
                rows = shape[0] * samples // count if shape else 0
                if shape and key in wanted and str(rows) == wanted[key][0]:
                    shapes[key] = (rows, *shape[1:])
            lengths = sized.lengths_of(shapes)
            if isinstance(lengths, str):
                return lengths
            found.append(
                UnitSize(lengths=lengths, samples=count if isinstance(batch, UnitBatch) else samples)
            )
        return tuple(found)

    def check(self, batch: Batch) -> None:
        """Refuse a mini-batch that is too long; the same on every rank, without a message.

        Raises:
            BatchRefused: says which stage lacks how many bytes, or which length is longer than planned for.
        """
        if (line := self.refusal(batch)) is not None:
            raise BatchRefused(line)

    def refusal(self, batch: Batch) -> str | None:
        """Return why a mini-batch is not run; None where it is."""
        longer = self._longer(batch)
        units = "" if self._sized is None else self._sizes_of(self._sized, batch)
        shortage, missing = "", 0
        if self._sized is not None and not isinstance(units, str):
            shortage, missing = self._shortage(self._sized, units)
        if longer is None and missing <= 0:
            return None
        why = "; ".join(reason for reason in (longer, shortage) if reason)
        return (
            f"this mini-batch is not run: {why}; shorten it or leave it out, or raise graph_pipeline.lengths.max, for "
            "which a plan is then made (more stages, smaller units, memory.recompute)"
        )

    def _longer(self, batch: Batch) -> str | None:
        """Return which length is longer than planned for."""
        if self._longest is None:
            return None
        for unit in units_of(batch):
            for anchor in self._anchors:
                value, most = unit.get(anchor), length_of(self._longest, anchor)
                if isinstance(value, Tensor) and value.shape[-1] > most:
                    return f"{anchor} is {value.shape[-1]} long, and graph_pipeline.lengths.max is {most}"
        return None

    def _shortage(self, sized: SizedPlan, units: tuple[UnitSize, ...]) -> tuple[str, int]:
        """Return in words which stage has the least memory left for these units, and the bytes it lacks, if any."""
        found = self._shortages.get(units)
        if found is None:
            longest = max(units, key=lambda unit: (unit.lengths, unit.samples))
            part = max(sized.at(units).memory, key=lambda part: part.total - (part.limit or part.total))
            missing = part.total - part.limit if part.limit else 0
            text = (
                f"at {sized.costs.in_words(longest.lengths)} stage {part.stage!r} needs {part.total} bytes a rank and "
                f"may use {part.limit or 'any number'}{f', {missing} bytes are missing' if missing > 0 else ''}"
            )
            found = self._shortages[units] = text, missing
            while len(self._shortages) > MOST_SHORTAGES:
                self._shortages.popitem(last=False)
        return found

    def compare(
        self, counts: Mapping[int, MemoryCounts], batch: Batch, *, most_bytes: int, message_bytes: int
    ) -> None:
        """Take what was counted on this rank, and say on rank 0 how all ranks compare with the plan; collective.

        Args:
            counts: of this rank's stages with backwards, by their index in the plan.
            batch: the mini-batch that was run.
            most_bytes: no less than all of these stages saved at once.
            message_bytes: most that messages under way took.
        """
        # Gathered on all ranks though rank 0 alone logs it: `memory_report` gives every rank the whole picture.
        self._has_counted = True
        self._counts = dict(counts)
        self._most_bytes, self._messages = most_bytes, message_bytes
        if self._sized is not None:
            sizes = self._sizes_of(self._sized, batch)
            assert not isinstance(sizes, str), "it was due"
            self._counted = sizes[:1]
            self._num_counted += 1
        self._inputs = sum(
            self._bytes_read(batch, keys, s) for s, keys in zip(self._stages, self._reads, strict=True)
        )
        everyone = self._collectives.gather(self._counts, "what the first mini-batch saved")
        if self._setting.rank != 0 or not self._plan.memory:
            return
        more = self._differences(everyone, only_more=True)
        for line in more:
            logger.warning("memory: %s", line)
        for line in self._differences(everyone):
            if line not in more:
                logger.info("memory: %s", line)
        if not more:
            logger.info("memory: %s", self._agreement(everyone))

    def _bytes_read(self, batch: Batch, keys: Collection[str], stage: int) -> int:
        """Return the bytes of the mini-batch that a stage reads on this rank."""
        # a rank holds its units, or its rows of what has a row a sample, and all of what has none (a mask, a table)
        degree = self._plan.stages[stage].degree
        are_units = isinstance(batch, UnitBatch)
        return sum(
            self._bytes_as_read(part[key]) // (degree if rows or are_units else 1)
            for part in units_of(batch)
            for key, rows in rows_per_sample(part).items()
            if key in keys
        )

    def _at_counted(self) -> PipelinePlan:
        """Return the plan with the memory of what was counted."""
        return self._plan if self._sized is None or self._counted is None else self._sized.at(self._counted)

    def _lengths(self) -> str:
        """Return what the predicted figures are of."""
        if self._sized is None:
            return f"batches like the sample: {self._sample}"
        costs = self._sized.costs
        planned = f"planned for {' and '.join(costs.in_words(one) for one in costs.typical)}"
        most = f"at most {costs.in_words(costs.longest)}"
        if self._counted is None:
            return f"{costs.in_words(costs.longest)}; {planned}, {most}"
        return f"{costs.in_words(self._counted[0].lengths)}; {planned}, {most}"

    def _bytes_as_read(self, value: Tensor) -> int:
        dtype = self._setting.dtype if value.is_floating_point() else value.dtype
        return value.numel() * dtype.itemsize

    def _agreement(self, everyone: list[dict[int, MemoryCounts]]) -> str:
        known = [joined for of_rank in everyone if (joined := joined_counts(list(of_rank.values())))]
        peak = max((counts.peak_held_bytes for counts in known), default=0)
        swapped = sum(counts.swapped_bytes for counts in known)
        recomputed = sum(counts.recomputed_bytes for counts in known)
        return (
            f"no rank keeps more than is planned: at most {peak} bytes of activations on a rank; of a micro-batch "
            f"{swapped} bytes swapped and {recomputed} recomputed on all ranks together"
        )

    def _differences(self, everyone: list[dict[int, MemoryCounts]], *, only_more: bool = False) -> list[str]:
        lines = []
        for rank, of_rank in enumerate(everyone):
            for stage, counts in of_rank.items():
                found = differences(self._at_counted(), stage, counts, only_more=only_more)
                if found:
                    lines.append(f"stage {self._plan.stages[stage].name!r} on rank {rank} {', '.join(found)}")
        return lines

    def report(self, stages: RankEngine, *, ahead: tuple[int, int] = (0, 0)) -> MemoryReport:
        """Return the report of all ranks on every rank; collective.

        Args:
            ahead: bytes of messages this rank received early: at most, and as found between two mini-batches.

        Raises:
            CommTimeout: not every rank requested it; nothing that takes long can keep one from it.
        """
        mine = self._mine(stages, *ahead), self._counts
        collectives = dataclasses.replace(self._collectives, timeout_s=self._config.comm_timeout_s)
        everyone = collectives.gather(mine, "memory_report(), which every rank calls")
        return MemoryReport(
            measure=ALLOCATOR if self._setting.device.type == "cuda" else COUNTED,
            ranks=tuple(rank for rank, _ in everyone),
            differences=tuple(self._differences([counts for _, counts in everyone])),
            advice=memory_advice(
                self._plan,
                zero_stage=self._setting.zero_stage,
                allowed=self._config.memory.optimization,
            ),
            lengths=self._lengths(),
        )

    def free_for_caches(self, stages: RankEngine) -> int | None:
        """Return the bytes that this rank has for caches: of `memory.limit_gb`, else of what CUDA has free.

        None on a CPU without a limit, whose memory other processes share.
        """
        limit_gb, device = self._config.memory.limit_gb, self._setting.device
        if isinstance(limit_gb, (int, float)):
            held = storage_bytes(
                tensor
                for stage in stages.stages
                for tensor in (*stage.weight_tensors(), *stage.updater.own_tensors())
            )
            return int(limit_gb * 1e9) - held
        if device.type != "cuda":
            return None
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] // self._setting.placement.own_sharers + idle

    def _mine(self, stages: RankEngine, prefetched_bytes: int, held_prefetched: int) -> RankMemory:
        counts = joined_counts(list(self._counts.values()))
        held = HeldBytes(
            weights=storage_bytes(t for stage in stages.stages for t in stage.weight_tensors()),
            gradients=stages.gradient_bytes,
            optimizer=sum(_optimizer_bytes(stage) for stage in stages.stages),
            buffers=self._inputs,
            gathered=stages.whole_bytes.most,
            messages=self._messages,
            ahead=held_prefetched,
        )
        # On the CPU no allocator counts; what lies there is added up, which misses workspaces of operators.
        peak = 0
        if self._setting.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._setting.device)
        elif self._has_counted:
            peak = held.total + self._most_bytes
        planned = self._at_counted().memory
        return RankMemory(
            rank=self._setting.rank,
            stage=self._plan.names_on_rank(self._setting.rank),
            predicted=joined_breakdown([planned[stage] for stage in self._stages]) if planned else None,
            held=held,
            counts=counts,
            measured_peak_bytes=peak,
            prefetched_bytes=prefetched_bytes,
        )


def _in_words(batch: Batch) -> str:
    """Return the shapes of a batch as text."""
    shapes = ((key, value.shape) for key, value in batch.items() if isinstance(value, Tensor) and value.ndim)
    return ", ".join(f"{key} {list(shape)}" for key, shape in shapes)


def _optimizer_bytes(stage_engine: StageEngine) -> int:
    """Return the bytes of an optimizer's state and of weights that are its own (masters)."""
    weights = {t.untyped_storage().data_ptr() for t in stage_engine.weight_tensors()}
    held = stage_engine.updater.own_tensors()
    return storage_bytes(t for t in held if t.untyped_storage().data_ptr() not in weights)
