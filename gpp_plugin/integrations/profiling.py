"""The profile of a captured model as rank 0 plans with it; other sizes are captured only where it is not stored."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gpp_plugin.capture.export import recapture, resize_batch
from gpp_plugin.capture.graph import CapturedGraph
from gpp_plugin.config import GraphPipelineConfig
from gpp_plugin.errors import CaptureError
from gpp_plugin.integrations.setting import Setting
from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.profile import Profile
from gpp_plugin.profile.analytic import default_sample_counts
from gpp_plugin.profile.measure import BLOCK_REPEATS, NODE_REPEATS, profile_blocks
from gpp_plugin.runtime.batches import Batch
from gpp_plugin.schedule.names import may_split_backward

logger = logging.getLogger(__name__)


class _Captures:
    """The model at the numbers of samples to profile; captured when a profile that is not stored asks for one.

    A model may not allow the smallest ones (BatchNorm trains on no single sample): `impossible` has them then.
    """

    def __init__(
        self, model: nn.Module, sample_batch: Batch, captured: CapturedGraph, counts: Sequence[int]
    ) -> None:
        self._model = model
        self._sample_batch = sample_batch
        self._captures = {captured.op_graph.num_samples: captured}
        self._analysis = captured.analysis
        self.counts = counts
        self.impossible: list[int] = []

    def at(self, count: int) -> CapturedGraph:
        """Return the model at ``count`` samples; all are captured before the first is timed.

        Raises:
            CaptureError: some are not possible.
        """
        for wanted in [n for n in self.counts if n not in self._captures]:
            try:
                resized = resize_batch(self._sample_batch, wanted)
                self._captures[wanted] = recapture(self._model, self._analysis, resized)
            except CaptureError as error:
                logger.info("%d samples at a time are not possible: %s", wanted, error)
                self.impossible.append(wanted)
        if self.impossible:
            raise CaptureError(f"{self.impossible} samples at a time are not possible")
        return self._captures[count]


def profile_model(
    model: nn.Module,
    sample_batch: Batch,
    graph: BlockGraph,
    captured: CapturedGraph,
    config: GraphPipelineConfig,
    setting: Setting,
) -> tuple[Profile, Sequence[int]]:
    """Return the costs of the blocks, and at which numbers of samples a rank may compute.

    Profiled are one sample, the loss unit, and some more; the planner gives no rank fewer samples than the smallest
    that works.

    Raises:
        CaptureError: the model cannot be captured where it must be.
        ProfileError: a block cannot be run.
    """
    unit = setting.sizes.loss_unit
    counts = sorted({*default_sample_counts(unit), min(setting.sizes.mini_batch, 4 * unit)})
    state: dict[str, Any] = dict(model.named_parameters()) | dict(model.named_buffers())
    captures = _Captures(model, sample_batch, captured, counts)

    def profile_at(counts: Sequence[int]) -> Profile:
        return profile_blocks(
            captured,
            graph,
            model_state=state,
            batch=resize_batch(sample_batch, max(counts)),
            capture_at=captures.at,
            sample_counts=counts,
            device=setting.device,
            threads=torch.get_num_threads(),
            repeats=NODE_REPEATS if config.granularity == "node" else BLOCK_REPEATS,
            optimizer_bytes_per_parameter=setting.optimizer_bytes,
            cache_dir=config.profile_dir,
            with_split=may_split_backward(config.schedule) and setting.num_ranks > 1,
            progress=_log_progress,
        )

    try:
        return profile_at(counts), counts
    except CaptureError:
        if not captures.impossible:
            raise
    counts = captures.counts = [n for n in counts if n not in captures.impossible]
    captures.impossible = []
    return profile_at(counts), counts


def _log_progress(done: int, total: int, name: str) -> None:
    logger.info("profiling: %d of %d blocks, %s", done, total, name)
