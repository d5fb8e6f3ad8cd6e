"""From a model, a sample batch and the configuration to a plan: capture, profile, plan.

Every rank captures (cheap, on fake tensors); rank 0 alone profiles and plans, and tells the others.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from gpp_plugin.capture.export import count_samples, recapture, resize_batch
from gpp_plugin.plan.clusters import local_cluster, read_cluster
from torch import nn

from gpp_plugin.config import BatchSizes, GraphPipelineConfig
from gpp_plugin.ir.cluster import Cluster
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.profile import Profile
from gpp_plugin.plan.explicit import explicit_plan, read_plan
from gpp_plugin.plan.registry import PlanRequest, make_plan
from gpp_plugin.profile.analytic import default_sample_counts
from gpp_plugin.profile.measure import profile_blocks
from gpp_plugin.runtime.agree import call_on_rank_zero
from gpp_plugin.runtime.batches import Batch
from gpp_plugin.runtime.pipeline import Reference, capture_reference

logger = logging.getLogger(__name__)

PROFILE_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a job runs in: ranks, device, precision, sizes.

    Args:
        group: a CPU process group of all ranks for small agreements; None for a single rank.
        dtype: training precision of parameters and floating inputs.
        optimizer_bytes: optimizer state and master copy for each trainable parameter.
    """

    rank: int
    num_ranks: int
    device: torch.device
    dtype: torch.dtype
    sizes: BatchSizes
    zero_stage: int
    optimizer_bytes: float
    group: dist.ProcessGroup | None


def prepare_plan(
    model: nn.Module, sample_batch: Batch, *, config: GraphPipelineConfig, setting: Setting
) -> tuple[Reference, PipelinePlan]:
    """Capture the model and agree on a plan for it; collective over all ranks.

    Raises:
        CaptureError: the model cannot be exported.
        PlanError, PlanInfeasible: no plan meets the configuration.
    """
    reference = capture_reference(
        model,
        sample_batch,
        num_samples=setting.sizes.loss_unit,
        granularity=config.granularity,
        dtype=setting.dtype,
        device=setting.device,
    )
    if setting.rank == 0:
        for line in reference.captured.op_graph.couplings:
            logger.info("samples are mixed by %s", line)
    plan = call_on_rank_zero(
        lambda: _make_plan(model, sample_batch, reference, config, setting),
        PipelinePlan,
        what="plan",
        group=setting.group,
        timeout_s=PROFILE_TIMEOUT_S,
    )
    if setting.rank == 0:
        for note in plan.notes:
            logger.info("plan: %s", note)
    return reference, plan


def _make_plan(
    model: nn.Module,
    sample_batch: Batch,
    reference: Reference,
    config: GraphPipelineConfig,
    setting: Setting,
) -> PipelinePlan:
    if config.plan is not None:
        request = _request(
            reference, config, setting, _profile(model, sample_batch, reference, config, setting)
        )
        return explicit_plan(read_plan(config.plan), request)
    profile = _profile(model, sample_batch, reference, config, setting)
    request = _request(reference, config, setting, profile)
    planner = "graphpipe" if config.planner == "auto" else config.planner
    return make_plan(planner, request)


def _request(
    reference: Reference, config: GraphPipelineConfig, setting: Setting, profile: Profile
) -> PlanRequest:
    mini_batch = setting.sizes.mini_batch
    sizes = config.micro_batch_sizes
    wanted: dict[str, int] | None = None
    if isinstance(sizes, dict):
        wanted = {name: mini_batch if size == "full" else int(size) for name, size in sizes.items()}
    elif isinstance(sizes, int):
        wanted = {"*": sizes}
    limit = config.memory.limit_gb
    return PlanRequest(
        graph=reference.block_graph,
        profile=profile,
        cluster=_cluster(config, setting),
        num_ranks=setting.num_ranks,
        mini_batch=mini_batch,
        loss_unit=setting.sizes.loss_unit,
        num_stages=config.stages if isinstance(config.stages, int) else None,
        micro_batch_sizes=wanted,
        schedule="1f1b" if config.schedule == "auto" else config.schedule,
        memory_limit_bytes=int(limit * 1e9) if isinstance(limit, (int, float)) else None,
        data_parallel=config.data_parallel if isinstance(config.data_parallel, int) else None,
        zero_stage=setting.zero_stage,
    )


def _cluster(config: GraphPipelineConfig, setting: Setting) -> Cluster:
    if config.cluster != "auto":
        return read_cluster(config.cluster, num_devices=setting.num_ranks)
    if setting.device.type == "cuda":
        properties = torch.cuda.get_device_properties(setting.device)
        memory = properties.total_memory * torch.cuda.device_count() // max(local_ranks(setting.num_ranks), 1)
        return local_cluster(
            setting.num_ranks, memory_bytes=min(memory, properties.total_memory), device=properties.name
        )
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return local_cluster(setting.num_ranks, memory_bytes=total // local_ranks(setting.num_ranks))


def local_ranks(num_ranks: int) -> int:
    """Return how many ranks share this machine, as the launcher says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))


def _profile(
    model: nn.Module,
    sample_batch: Batch,
    reference: Reference,
    config: GraphPipelineConfig,
    setting: Setting,
) -> Profile:
    state: dict[str, Any] = dict(model.named_parameters()) | dict(model.named_buffers())
    unit = setting.sizes.loss_unit
    return profile_blocks(
        reference.captured,
        reference.block_graph,
        model_state=state,
        batch=resize_batch(sample_batch, max(unit, count_samples(sample_batch))),
        capture_at=lambda n: recapture(model, reference.captured, resize_batch(sample_batch, n)),
        sample_counts=default_sample_counts(unit),
        device=setting.device,
        threads=torch.get_num_threads(),
        optimizer_bytes_per_parameter=setting.optimizer_bytes,
        cache_dir=config.profile_dir,
        progress=_log_progress,
    )


def _log_progress(done: int, total: int, name: str) -> None:
    logger.info("profiling: %d of %d blocks, %s", done, total, name)
