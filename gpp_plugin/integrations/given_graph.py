"""A graph of stages as the engine's model: `gpp_plugin.stage_graph` behind `ModelSource`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_plugin.config import GraphPipelineConfig
from gpp_plugin.errors import ConfigError, PlanError
from gpp_plugin.integrations.given_export import save_stages
from gpp_plugin.integrations.given_part import cut_part, names_held
from gpp_plugin.integrations.materialize import release_parameters
from gpp_plugin.integrations.model_source import CapturedModel, ModelSource
from gpp_plugin.integrations.module_holder import ModuleHolder
from gpp_plugin.integrations.preparation import PREPARATION_TIMEOUT_S, Setting, plan_profiled, with_batch
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.plan.fixed import FixedStage
from gpp_plugin.profile.analytic import default_sample_counts
from gpp_plugin.profile.machine import describe_device
from gpp_plugin.profile.split_cost import UNSPLITTABLE
from gpp_plugin.runtime.agree import call_on_rank_zero
from gpp_plugin.runtime.batches import Batch, check_batch
from gpp_plugin.runtime.pipeline import Lane
from gpp_plugin.runtime.stage_module import StageModule
from gpp_plugin.runtime.stage_source import Reference, StageSource
from gpp_plugin.stage_graph.costs import Measuring, StageCosts
from gpp_plugin.stage_graph.graph import StageGraph
from gpp_plugin.stage_graph.job import GraphJob
from gpp_plugin.stage_graph.module import GivenModule
from gpp_plugin.stage_graph.resolve import GraphStage
from gpp_plugin.stage_graph.trial import Place


def source_of(model: nn.Module | StageGraph, *, config: GraphPipelineConfig, setting: Setting) -> ModelSource:
    """Return the engine's view of what the user gave as a model."""
    if isinstance(model, StageGraph):
        return GivenGraph(model, config=config, setting=setting)
    return CapturedModel(model, config=config, setting=setting)


class GivenGraph:
    """Stages that the user made; what is planned are micro-batches, schedule and memory."""

    def __init__(self, graph: StageGraph, *, config: GraphPipelineConfig, setting: Setting) -> None:
        _check_config(graph, config)
        self._graph = graph
        self._config = config
        self._setting = setting
        self._made: GraphJob | None = None
        self._holder: ModuleHolder | None = None

    @property
    def _job(self) -> GraphJob:
        assert self._made is not None, "prepare_plan comes first"
        return self._made

    @property
    def stages(self) -> StageSource:
        """Return this rank's own stage as the source of its lanes' code."""
        return self._job

    def prepare_batch(self, batch: Any) -> dict[str, Any]:
        """Return the batch as it is."""
        return dict(check_batch(batch))

    def prepare_plan(self, sample_batch: Batch) -> tuple[Reference, PipelinePlan]:
        """Build and run the stages once on their own ranks, and plan on rank 0; collective.

        Raises:
            ConfigError: graph, modules and configuration do not fit together.
            PlanError, PlanInfeasible: no plan meets the configuration.
        """
        setting = self._setting
        place = Place(rank=setting.rank, device=setting.device, dtype=setting.dtype, group=setting.group)
        self._made = job = GraphJob(
            self._graph,
            sample_batch,
            place=place,
            num_ranks=setting.num_ranks,
            loss_unit=setting.sizes.loss_unit,
            seed=self._config.seed,
            timeout_s=self._config.comm_timeout_s,
            granularity=self._config.granularity,
        )
        reference = job.reference()
        counts = self._sample_counts(job)
        costs = job.measure(counts, self._measuring())
        device = describe_device(setting.device, torch.get_num_threads())
        impossible = [
            cost.samples[0]
            for stage, blocks in costs.by_stage.items()
            for cost in blocks
            if cost.samples[0] > counts[stage][0]
        ]

        def make_plan() -> PipelinePlan:
            least = max(impossible, default=1)
            pieces = [
                piece
                for stage in job.resolved.stages
                for piece in self._pieces(job, stage, costs, device=device, least=least)
            ]
            graph = reference.block_graph
            plan = plan_profiled(
                graph,
                with_batch(costs.profile(graph, device=device), graph, reference.analysis.op_graph, setting),
                config=self._config,
                setting=setting,
                smallest_local_batch=least,
                fixed=pieces,
            )
            _refuse_split(plan, costs)
            return plan

        plan = call_on_rank_zero(
            make_plan, PipelinePlan, what="plan", group=setting.group, timeout_s=PREPARATION_TIMEOUT_S
        )
        return reference, plan

    def _measuring(self) -> Measuring:
        is_split = self._config.schedule in ("auto", "zero_bubble") and self._config.mode == "sync"
        return Measuring(
            optimizer_bytes=self._setting.optimizer_bytes,
            cache_dir=self._config.profile_dir,
            with_split=is_split and self._setting.num_ranks > 1,
        )

    def _sample_counts(self, job: GraphJob) -> dict[str, Sequence[int]]:
        """Return at which numbers of samples each stage is timed: what its micro-batches may be."""
        sizes = self._setting.sizes
        unit = sizes.loss_unit
        # with one loss a mini-batch the planner chooses: as for captured models
        is_searched = self._config.micro_batch_sizes == "search" or unit == sizes.mini_batch
        counts: dict[str, Sequence[int]] = {}
        for stage in job.resolved.stages:
            size = stage.spec.micro_batch_size or self._size_asked_for(stage.name)
            if stage.is_captured:  # into how many stages and on how many ranks each follows from the costs
                known = default_sample_counts(unit) if is_searched else (max(unit // 2, 1), unit)
                counts[stage.name] = sorted({*known, size or unit})
                continue
            local = None if size is None else max(size * stage.spec.tensor // len(stage.spec.ranks), 1)
            if stage.name in job.coupled:
                counts[stage.name] = (unit,)
            elif is_searched:
                counts[stage.name] = sorted({*default_sample_counts(unit), min(sizes.mini_batch, 4 * unit)})
            else:
                counts[stage.name] = sorted({max(unit // 2, 1), unit, local or unit})
        return counts

    def _size_asked_for(self, stage: str) -> int | None:
        """Return the micro-batch size that the configuration gives a stage, if it does."""
        sizes = self._config.micro_batch_sizes
        asked = sizes.get(stage) if isinstance(sizes, dict) else sizes
        return (
            self._setting.sizes.mini_batch if asked == "full" else asked if isinstance(asked, int) else None
        )

    def _pieces(
        self, job: GraphJob, stage: GraphStage, costs: StageCosts, *, device: str, least: int
    ) -> list[FixedStage]:
        """Return a stage as it is, or what the planner cuts a captured part into."""
        spec = stage.spec
        if not stage.is_captured:
            return [
                FixedStage(
                    name=stage.name,
                    blocks=(stage.name,),
                    ranks=spec.ranks,
                    tensor=spec.tensor,
                    micro_batch_size=spec.micro_batch_size,
                )
            ]
        graph = job.views(is_training=True)[stage.name].blocks
        return cut_part(
            graph,
            costs.profile(graph, device=device, stage=stage.name),
            name=stage.name,
            ranks=spec.ranks,
            num_stages=spec.num_pieces if isinstance(spec.num_pieces, int) else None,
            micro_batch_size=spec.micro_batch_size,
            config=self._config,
            setting=self._setting,
            smallest_local_batch=least,
        )

    def analyse(self, batch: Batch, outputs: Sequence[str]) -> Reference:
        """Return the graph in evaluation, for batches of these keys; collective.

        Raises:
            ConfigError: an output asked for is none of a stage that runs.
        """
        reference = self._job.evaluation(batch, outputs)
        missing = [name for name in outputs if name not in reference.analysis.op_graph.outputs]
        if missing:
            made = [node.name for node in reference.analysis.op_graph.nodes]
            raise ConfigError(
                f"eval_batch: no one output is called {missing[0]!r} for a batch of {sorted(batch)}; outputs are "
                f"{', '.join(made)}"
            )
        return reference

    def meet(self, reference: Reference, batch: Batch) -> None:
        """Run new shapes through all stages once; collective."""
        self._job.meet(batch, is_training=reference.analysis.is_training)

    def make_module(self, lane: Lane, sample_batch: Batch) -> StageModule:
        """Return this rank's stage and let go of modules that other ranks run."""
        own = self._job.own
        for spec in self._graph.stages:
            if isinstance(spec.make, nn.Module) and self._setting.rank not in spec.ranks:
                release_parameters(spec.make)
        if isinstance(own, GivenModule):
            lane.prepare(sample_batch)
            return own
        part = own.stage
        assert isinstance(part.spec.make, nn.Module)
        self._holder = ModuleHolder(
            part.spec.make,
            config=self._config,
            setting=self._setting,
            prefix=f"{part.name}.",
            called=own.called,
        )
        return self._holder.make_module(lane.reference, names_held(part.name, lane, sample_batch))

    def complete_module(self, module: StageModule, names: Iterable[str]) -> None:
        """Give a captured part what only evaluation reads; a module has what it reads."""
        if self._holder is not None:
            self._holder.complete_module(module, names)

    def share_weights(self, module: StageModule) -> None:
        """Let a captured module see its weights; another stage is the user's own module."""
        if self._holder is not None:
            self._holder.share_weights(module)

    def save_pretrained(
        self,
        directory: str | Path,
        *,
        state: Mapping[str, Tensor],
        plan: PipelinePlan,
        group: dist.ProcessGroup | None,
        timeout_s: float,
    ) -> None:
        """Write a safetensors file a stage, under its module's own names.

        Raises:
            CheckpointError: a rank could not write.
        """
        own = self._job.resolved.stage_of_rank(self._setting.rank).name
        # tied parameters have one name in the graph, and in files each stage's own
        known = {p.name: p.aliases for p in self._job.parameters}
        named = {n: tensor for name, tensor in state.items() for n in (name, *known.get(name, ()))}
        save_stages(directory, name=own, state=named, plan=plan, rank=self._setting.rank, group=group)

    def close(self) -> None:
        """Let go of the groups of stages' contexts."""
        self._job.close()


def _refuse_split(plan: PipelinePlan, costs: StageCosts) -> None:
    """Refuse a schedule that makes backwards in two parts where a stage's cannot be.

    Raises:
        PlanError: names the stage.
    """
    whole = {
        cost.block for own in costs.by_stage.values() for cost in own if cost.split_factor >= UNSPLITTABLE
    }
    for stage in plan.stages:
        if stage.schedule == "zero_bubble" and not whole.isdisjoint(stage.blocks):
            raise PlanError(
                f"stage {stage.name!r}: its backward cannot be made in two parts (it fails, or its gradients are "
                'others then), which schedule "zero_bubble" asks for; use "auto"'
            )


def _check_config(graph: StageGraph, config: GraphPipelineConfig) -> None:
    """Refuse keys of the block that speak of a captured model.

    Raises:
        ConfigError: names the key.
    """
    number = len(graph.stages)
    is_given = all(stage.num_pieces is None for stage in graph.stages)
    for key, value, wrong, fix in (
        (
            "planner",
            config.planner,
            is_given and config.planner != "auto",
            "its stages are given; remove the key",
        ),
        (
            "stages",
            config.stages,
            config.stages not in ("auto", number if is_given else "auto"),
            f"it has {number}; remove the key",
        ),
        ("weights", config.weights, config.weights is not None, "factories make its weights; remove the key"),
        (
            "data_parallel",
            config.data_parallel,
            _is_other_degree(graph, config),
            "its ranks are given; remove the key",
        ),
    ):
        if wrong:
            raise ConfigError(f"graph_pipeline.{key}: {value!r} with stage graph {graph.name!r}: {fix}")


def _is_other_degree(graph: StageGraph, config: GraphPipelineConfig) -> bool:
    degrees = {len(stage.ranks) // stage.tensor for stage in graph.stages}
    return config.data_parallel != "auto" and degrees != {config.data_parallel}
