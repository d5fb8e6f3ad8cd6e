"""A user's model in any of its forms, as the engine sees it: `ModelSource`.

A plain module is a stage graph of one captured part (`gpp_plugin.model.graph.graph_job`); beyond this class the engine,
evaluation and checkpoints know no difference.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_plugin.backends.measured_backends import BackendLog
from gpp_plugin.capture.tracing.meta_copy import set_modes
from gpp_plugin.config.block import GraphPipelineConfig
from gpp_plugin.errors import ConfigError
from gpp_plugin.integrations.huggingface import hf_weights
from gpp_plugin.integrations.huggingface.model_inputs import (
    NUM_ITEMS,
    check_counted,
    check_divides,
    check_takes_count,
    count_labelled,
    has_labels,
)
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.profile import Profile
from gpp_plugin.ir.size_formulas import LengthCosts
from gpp_plugin.ir.tensors import TensorSpec
from gpp_plugin.model.backend_planning import (
    CompiledBlocks,
    StageTrials,
    measure_compiled,
    plan_with_backends,
)
from gpp_plugin.model.generation.generator import GeneratedModel, Generator
from gpp_plugin.model.graph.captured_part import CapturedPart
from gpp_plugin.model.graph.graph_job import GraphJob
from gpp_plugin.model.graph.module_cost import Measuring
from gpp_plugin.model.graph.module_trial import Place
from gpp_plugin.model.graph.resolve import GraphStage
from gpp_plugin.model.graph.stage_costs import StageCosts
from gpp_plugin.model.graph.stage_graph import StageGraph, prepare_batch
from gpp_plugin.model.graph.user_module import UserModule, save_stages
from gpp_plugin.model.materialize import ModuleHolder, release_parameters, separate_copies
from gpp_plugin.model.preparation import (
    PREPARATION_TIMEOUT_S,
    Setting,
    check_config,
    check_files,
    check_shared_out,
    check_ties,
    explicit_stages,
    fewest_samples,
    look_at_devices,
    plan_profiled,
    plan_request,
    refuse_split,
    sample_counts,
    samples_explained,
    with_memory_explained,
    with_stage,
)
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.costs.memory_formula import with_inputs
from gpp_plugin.plan.costs.planned_lengths import SizedPlan, inputs_at, planned_profile, profile_at
from gpp_plugin.plan.explicit_plan import FixedStage
from gpp_plugin.plugins import may_split_backward
from gpp_plugin.profile.job_cluster import JobCluster
from gpp_plugin.profile.machine import describe_device
from gpp_plugin.report.progress import searching, shown_as, step
from gpp_plugin.runtime.batches import Batch, UnitRule
from gpp_plugin.runtime.rank_programs import held_tensors
from gpp_plugin.runtime.rank_runner import RankRunner
from gpp_plugin.runtime.ranks import collectives
from gpp_plugin.runtime.ranks.collectives import Collectives
from gpp_plugin.runtime.stage_module import (
    Reference,
    StageModule,
    WatchedModule,
    joined_module,
)
from gpp_plugin.runtime.tensor_ranks import describe_whole, parameter_shards

logger = logging.getLogger(__name__)


class ModelSource:
    """What the engine needs of its model: a plain module, or a graph of stages.

    Args:
        model: of captured modules, `make_modules` leaves the parameters of this rank's stages only.

    Raises:
        ConfigError: the configuration contradicts a stage graph.
    """

    def __init__(
        self, model: nn.Module | StageGraph, *, config: GraphPipelineConfig, setting: Setting
    ) -> None:
        if isinstance(model, StageGraph):
            check_config(model, config)
        elif config.loss_mean == "tokens":
            check_takes_count(model)
        _settle_modes(model, warns=setting.rank == 0)
        self._model = model
        self._config = with_stage(model, config)
        self._setting = setting
        self._made: GraphJob | None = None
        self._lengths: LengthCosts | None = None
        self._profile: Profile | None = None
        self._planned_with: tuple[StageCosts, int, JobCluster | None] | None = None
        self._held: list[tuple[ModuleHolder, tuple[StageModule, ...]]] = []

    @property
    def _job(self) -> GraphJob:
        assert self._made is not None, "prepare_plan comes first"
        return self._made

    @property
    def stages(self) -> GraphJob:
        """Return this rank's own stages as the source of their code."""
        return self._job

    def prepare_batch(self, batch: Any) -> dict[str, Any]:
        """Return a batch as the model is called with it."""
        return prepare_batch(self._model, batch)

    def complete_batches(self, batches: Sequence[Batch]) -> list[dict[str, Any]]:
        """Return the batches of a mini-batch with what the model receives about all of them: its labelled tokens.

        Those without labels, which an evaluation may do without, stay as they are.
        """
        model = self._model
        if self._config.loss_mean == "units" or isinstance(model, StageGraph) or not has_labels(batches[0]):
            return [dict(batch) for batch in batches]
        count = count_labelled(model, batches)
        return [{**batch, NUM_ITEMS: count} for batch in batches]

    # ---- planning ------------------------------------------------------------------------------

    def prepare_plan(self, sample_batch: Batch) -> tuple[Reference, PipelinePlan]:
        """Agree on what the model is and on a plan for it; collective over all ranks.

        Captured parts are traced and profiled on their first rank, which of a plain model is rank 0, others are
        built, run and timed on their own ranks; rank 0 plans.

        Raises:
            CaptureError: a module cannot be exported, or its capture is not the module.
            ConfigError: graph, modules and configuration do not fit together.
            PlanError, PlanInfeasible: no plan satisfies the configuration.
        """
        setting, config = self._setting, self._config
        self._check_files()
        if config.loss_mean == "tokens":
            check_counted(sample_batch)
        machines = look_at_devices(config, setting)  # while nothing of the model is on them
        place = Place(
            rank=setting.rank,
            device=setting.device,
            dtype=setting.dtype,
            group=setting.group,
            backend=setting.placement.backend,
        )
        with samples_explained(sample_batch, config):
            self._made = job = GraphJob(
                self._model,
                sample_batch,
                place=place,
                num_ranks=setting.num_ranks,
                loss_unit=setting.sizes.loss_unit,
                seed=config.seed,
                timeout_s=collectives.collective_timeout_s(None, config.comm_timeout_s),
                granularity=config.granularity,
                eager=config.eager,
            )
        # From here a plain model and a graph differ in one thing: the planner's answer is the plan, or it cuts the
        # parts, and the stages that come of it and the user's are planned together.
        with step("capture"):
            reference = job.reference()
        if job.whole is not None:
            check_shared_out(reference, config)
        if config.loss_mean == "tokens":
            check_divides(type(self._model).__name__, reference.analysis.op_graph)
        if job.whole is not None and config.mode == "async" and config.plan is None:
            check_ties(reference, config)  # before minutes of measuring
        counts = sample_counts(job, config, setting)
        costs = self._measured(counts)
        self._profile = costs.profile(reference.block_graph, device="")

        def make_plan() -> PipelinePlan:
            compiled = self._compiled(reference, sample_batch)
            own = costs.with_blocks(compiled.scaled)
            least = fewest_samples(own, counts)
            self._planned_with = own, least, machines
            with step("plan") as shown, searching(shown.note), with_memory_explained(config, machines):
                plan = self._plan(reference, own, least=least, found=machines)
            plan = self._with_backends(plan, reference, own, sample_batch, least=least, found=machines)
            refuse_split(plan, own)
            return compiled.noted(plan)

        plan = collectives.call_on_rank_zero(
            make_plan, PipelinePlan, what="plan", group=setting.group, timeout_s=PREPARATION_TIMEOUT_S
        )
        if plan.zero_stage != setting.zero_stage:  # it was the planner's to choose
            self._setting = setting = dataclasses.replace(setting, zero_stage=plan.zero_stage)
        job.set_timeout(collectives.collective_timeout_s(plan, config.comm_timeout_s))
        for line in describe_whole(reference, plan) if setting.rank == 0 else ():
            logger.info("%s", line)
        return reference, plan

    def plan_again(self, reference: Reference, plan: PipelinePlan, setting: Setting) -> PipelinePlan:
        """Return a plan of the same stages on the same ranks for mini-batches of another size; collective.

        Args:
            setting: has that size.

        Raises:
            PlanError, PlanInfeasible: there is none; nothing has changed.
        """
        before, self._setting = self._setting, setting

        def make_plan() -> PipelinePlan:
            assert self._planned_with is not None, "rank 0 has planned"
            costs, least, machines = self._planned_with
            fixed = [
                FixedStage(
                    name=stage.name,
                    blocks=stage.blocks,
                    ranks=stage.ranks,
                    tensor=stage.tensor,
                    context=stage.context,
                )
                for stage in plan.stages
            ]
            with with_memory_explained(self._config, machines):
                made = self._plan(reference, costs, least=least, found=machines, fixed=fixed)
            stages = [
                dataclasses.replace(new, backend=old.backend, compiled=old.compiled)
                for new, old in zip(made.stages, plan.stages, strict=True)
            ]
            return dataclasses.replace(made, stages=tuple(stages))

        try:
            return collectives.call_on_rank_zero(
                make_plan, PipelinePlan, what="plan", group=before.group, timeout_s=PREPARATION_TIMEOUT_S
            )
        except BaseException:
            self._setting = before
            raise

    def _compiled(self, reference: Reference, sample_batch: Batch) -> CompiledBlocks:
        """Return what the model's blocks cost compiled, and which of them are; on rank 0.

        Raises:
            ConfigError: a path names no module, or the model computes on whole units of its own.
        """
        requested, whole = self._config.compile, self._job.whole
        if not requested or whole is None:
            return CompiledBlocks()
        if self._job.takes_whole_units(whole.name):
            raise ConfigError(
                f"graph_pipeline.compile: {requested!r}: the model's Python reads values, so each loss unit may be "
                "other code; remove the key"
            )
        part = self._job.owns[whole.name]
        assert isinstance(part, CapturedPart), "a plain model is captured"
        analysis = reference.analysis
        arguments = part.arguments(sample_batch, {}, analysis.op_graph.num_samples)
        return measure_compiled(
            part.clone().capture_again(analysis, arguments),
            reference.block_graph,
            state=dict(part.model.named_parameters()) | dict(part.model.named_buffers()),
            batch=sample_batch,
            requested=requested,
            log=BackendLog(self._config.profile_dir),
        )

    def _measured(self, counts: Mapping[str, Sequence[int]]) -> StageCosts:
        """Return what the stages cost, and take down what they cost at other lengths; refuse a wrong capture."""
        config = self._config
        # a profile is of use in both modes: in mode async, too, the parts of a backward are timed
        may_split = may_split_backward(config.schedule) and self._setting.num_ranks > 1 and not config.compile
        measuring = Measuring(
            optimizer_bytes=self._setting.optimizer_bytes,
            cache_dir=config.profile_dir,
            with_split=may_split,
        )
        with step("profile"):
            costs = self._job.measure(counts, measuring)
        if config.verify:
            with step("verify the capture"):
                self._job.verify(costs)
        lengths = config.lengths
        if lengths is not None:
            with step("profile other lengths"):
                self._lengths = self._job.measure_lengths(costs, lengths, cache_dir=config.profile_dir)
        return costs

    def _with_backends(
        self,
        plan: PipelinePlan,
        reference: Reference,
        costs: StageCosts,
        sample_batch: Batch,
        *,
        least: int,
        found: JobCluster | None,
    ) -> PipelinePlan:
        """Return the plan, cut again where what stages take on backends makes another one shorter; on rank 0.

        Backends that are named for stages are not measured, and stages of a graph lie where the user put them: then
        the plan stays as it is, as it does where the model computes on whole units of its own.
        """
        requested, whole = self._config.backends, self._job.whole
        if requested == "off" or isinstance(requested, Mapping) or whole is None:
            return plan
        if self._job.takes_whole_units(whole.name) or self._config.units is not None:
            return plan
        # rank 0 alone cannot run what ranks compute together
        if any(stage.model_parallel > 1 for stage in plan.stages):
            return plan
        part = self._job.owns[whole.name]
        assert isinstance(part, CapturedPart), "a plain model is captured"
        graph = reference.block_graph
        profile = self._planned_profile(reference, costs)
        request = plan_request(
            graph, self._config, self._setting, profile, {}, smallest_local_batch=least, found=found
        )
        on_torch = CostModel(graph, profile, request.cluster, zero_stage=request.zero_stage)
        log = BackendLog(self._config.profile_dir)
        trials = StageTrials(part, reference, sample_batch, requested=requested, log=log)

        def plan_again(shares: Mapping[str, float]) -> PipelinePlan:
            with step("plan with backends") as shown, searching(shown.note):
                return self._plan(reference, costs, least=least, found=found, shares=shares)

        with step("measure backends"):
            return plan_with_backends(
                plan,
                graph,
                on_torch,
                measure=trials.measure,
                plan_again=plan_again if self._config.plan is None else None,
            )

    def _planned_profile(self, reference: Reference, costs: StageCosts) -> Profile:
        """Return the costs that plans are made with: at the lengths that are planned for."""
        graph = reference.block_graph
        device = describe_device(self._setting.device, torch.get_num_threads())
        profile = costs.profile(graph, device=device)
        if (lengths := self._lengths) is None:
            return profile
        return planned_profile(
            [profile_at(profile, lengths, one) for one in lengths.typical],
            profile_at(profile, lengths, lengths.longest),
        )

    def _plan(
        self,
        reference: Reference,
        costs: StageCosts,
        *,
        least: int,
        found: JobCluster | None,
        shares: Mapping[str, float] | None = None,
        fixed: Sequence[FixedStage] | None = None,
    ) -> PipelinePlan:
        """Return the plan; on rank 0.

        Args:
            least: the smallest number of samples that every stage can do.
            found: as of `plan_profiled`.
            shares: `Profile.backends`; None: all on torch.
            fixed: the stages that there are already; None: as the configuration says.
        """
        graph = reference.block_graph
        device = describe_device(self._setting.device, torch.get_num_threads())
        profile = dataclasses.replace(self._planned_profile(reference, costs), backends=dict(shares or {}))
        inputs: Sequence[TensorSpec] = reference.analysis.op_graph.inputs
        if (lengths := self._lengths) is not None:
            inputs = inputs_at(inputs, lengths, lengths.longest)
        pieces, config, dtype = fixed, self._config, str(self._setting.dtype).removeprefix("torch.")
        if fixed is not None:  # their ZeRO stage is chosen, too
            config = config.model_copy(update={"plan": None, "zero": None})
        elif self._job.whole is None:
            pieces = explicit_stages(
                self._job,
                costs,
                self._config,
                self._setting,
                device=device,
                smallest_local_batch=least,
                found=found,
            )
        return plan_profiled(
            graph,
            with_inputs(profile, graph, inputs, mini_batch=self._setting.sizes.mini_batch, dtype=dtype),
            config=config,
            setting=self._setting,
            smallest_local_batch=least,
            found=found,
            fixed=pieces,
            state=[p.name for p in reference.analysis.op_graph.parameters if p.is_state],
        )

    def _check_files(self) -> None:
        """Refuse now, on all ranks, what would fail after the first step; rank 0 looks."""

        def look() -> None:
            if self._setting.rank == 0:
                check_files(_captured(self._model), self._config)

        collectives.exchange(look, what="a look at the files", group=self._setting.group)

    def sized_plan(self, reference: Reference, plan: PipelinePlan) -> SizedPlan | None:
        """Return what the plan's stages hold at any lengths; None where that is known of the sample batch's alone."""
        lengths = self._lengths
        if lengths is None or not plan.memory:
            return None
        assert self._profile is not None, "it was planned"
        return SizedPlan(
            plan,
            profile=self._profile,
            costs=lengths,
            graph=reference.block_graph,
            inputs=reference.analysis.op_graph.inputs,
            dtype=str(self._setting.dtype).removeprefix("torch."),
            zero_stage=self._setting.zero_stage,
        )

    def unit_rule(self, reference: Reference) -> UnitRule | None:
        """Return how batches become loss units, where the model takes whole ones."""
        return self._job.unit_rule(reference)

    # ---- running -------------------------------------------------------------------------------

    def analyse(self, batch: Batch, outputs: Sequence[str]) -> Reference:
        """Agree on the model in evaluation, for batches of these keys; collective over all ranks.

        Raises:
            CaptureError: a module cannot be exported.
            ConfigError: an output requested is none of a stage that runs.
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

    def learn_shapes(self, reference: Reference, batch: Batch) -> None:
        """Learn the shapes that come of a batch like this one before it runs.

        Collective over all ranks, but of a plain model: each rank captures its new shapes alone.
        """
        self._job.learn_shapes(batch, is_training=reference.analysis.is_training)

    @shown_as("materialise")
    def make_modules(self, runner: RankRunner, sample_batch: Batch) -> tuple[StageModule, ...]:
        """Return this rank's stages in the plan's order and let go of what other ranks run."""
        for spec in self._model.stages if isinstance(self._model, StageGraph) else ():
            if isinstance(spec.make, nn.Module) and self._setting.rank not in spec.ranks:
                release_parameters(spec.make)
        functions = runner.prepare(sample_batch)
        made: dict[int, StageModule] = {}
        # of captured parts: stage of the plan -> what it holds
        held: dict[str, dict[int, tuple[str, ...]]] = {}
        for stage, function in zip(runner.stages, functions, strict=True):
            own = self._job.owns[self._job.owner(runner.plan, stage)]
            if isinstance(own, UserModule):
                made[stage] = own
            else:
                held.setdefault(own.stage.name, {})[stage] = own.names_held(
                    runner.reference, runner.plan, stage, function
                )
        for name, of_stages in held.items():
            part = self._job.owns[name]
            assert isinstance(part, CapturedPart)
            holder = ModuleHolder(
                part.model,
                config=self._config,
                setting=self._setting,
                prefix=part.stage.prefix,
                called=part.called,
            )
            modules = holder.make_modules(runner.reference, runner.plan, of_stages)
            made.update(zip(of_stages, modules, strict=True))
            self._held.append((holder, modules))
        stages = tuple(made[stage] for stage in runner.stages)
        separate_copies(stages)
        return stages

    def complete_module(self, module: StageModule, names: Iterable[str]) -> None:
        """Give a captured stage what only evaluation reads (a mask's buffer, say); a user's has what it reads."""
        for holder, modules in self._held:
            if any(module is own for own in modules):
                holder.complete_module(module, names)

    def share_weights(self, modules: Sequence[StageModule]) -> None:
        """Let a captured module see the weights that training changes; another stage is the user's own module."""
        for holder, own in self._held:
            holder.share_weights([module for module in modules if any(module is each for each in own)])

    def watched(self) -> list[WatchedModule]:
        """Return the captured modules as their user holds them."""
        return [
            WatchedModule(
                module=part.model,
                prefix=part.stage.prefix,
                eager=self._job.eager_in(name),
                trace=functools.partial(self._job.trace_again, name),
            )
            for name, part in self._job.owns.items()
            if isinstance(part, CapturedPart)
        ]

    @property
    def is_plain(self) -> bool:
        """Return whether it is one module, whose weights' names and shapes are the same on every rank."""
        return self._job.whole is not None

    def whole_parameters(self, plan: PipelinePlan, reference: Reference) -> frozenset[str]:
        """Return the parameters of which it is known that tensor ranks hold them whole."""
        if not self.is_plain:
            return frozenset()
        cut = {n for index in range(len(plan.stages)) for n in parameter_shards(reference, plan, index)}
        return frozenset(p.name for p in reference.analysis.op_graph.parameters) - cut

    def join_groups(
        self,
        plan: PipelinePlan,
        reference: Reference,
        groups: Mapping[str, Sequence[dist.ProcessGroup | int]],
    ) -> None:
        """Let the code of captured stages use the process groups of the ranks that compute the same samples.

        Args:
            groups: of tensor ranks, context ranks and both (`TensorLinks.of`), by stage.
        """
        for index, stage in enumerate(plan.stages):
            if self.is_plain and stage.model_parallel > 1 and self._setting.rank in stage.ranks:
                own = {kind: of_stage[index] for kind, of_stage in groups.items()}
                self._job.links.join(stage, own, parameter_shards(reference, plan, index))

    def save_pretrained(
        self,
        directory: str | Path,
        *,
        states: Mapping[int, Mapping[str, Tensor]],
        plan: PipelinePlan,
        group: dist.ProcessGroup | None,
        timeout_s: float,
    ) -> None:
        """Write the weights for use without this package; collective over all ranks.

        Of a plain model sharded safetensors under HuggingFace names, one shard a stage; of a graph a file a stage,
        under its module's own names.

        Args:
            states: this rank's stages, by their index in the plan.

        Raises:
            CheckpointError: a rank could not write.
        """
        rank, whole = self._setting.rank, self._job.whole
        if whole is None:
            # tied parameters have one name in the graph, and in files each stage's own
            known = {p.name: p.aliases for p in self._job.parameters}
            named = {
                index: (
                    self._job.owner(plan, index),
                    {n: tensor for name, tensor in state.items() for n in (name, *known.get(name, ()))},
                )
                for index, state in states.items()
            }
            save_stages(directory, states=named, plan=plan, rank=rank, group=group)
            return
        hf_weights.save_pretrained(
            directory,
            model=_module_of(whole),
            states={index: state for index, state in states.items() if plan.stages[index].ranks[0] == rank},
            num_stages=len(plan.stages),
            group=group,
            timeout=timeout_s,
        )

    def make_generator(
        self,
        plan: PipelinePlan,
        reference: Reference,
        stages: Sequence[nn.Module],
        *,
        collectives: Collectives,
        free_bytes: Callable[[], int | None],
    ) -> Generator:
        """Return what generates with the weights of this rank's stages and those of the others.

        Args:
            free_bytes: returns the bytes that are free for caches on this rank; None where unknown, on all ranks alike.

        Raises:
            ConfigError: the model is a graph of several stages written down.
        """
        whole = self._job.whole
        if whole is None or not whole.is_captured:
            raise ConfigError(
                "engine.generate: the model is a graph of stages written down, which has no `generate` and no decode "
                "step; give deepspeed.initialize the one HuggingFace model, or generate from engine.save_pretrained()"
            )
        # Names are those of the analysis, the same on all ranks: of a tied parameter the first, others are aliases.
        parameters = reference.analysis.op_graph.parameters
        live = joined_module(stages)
        model = _module_of(whole)
        device = self._setting.device

        def buffers() -> dict[str, Tensor]:
            return self._held[0][0].all_buffers(dict(live.named_buffers()), device)

        # by stage: what joins the parts of its parameters, and these
        own = zip(plan.stages_of_rank(self._setting.rank), stages, strict=True)
        links = [
            (self._job.links.of(plan.stages[at]), dict(module.named_parameters(remove_duplicate=False)))
            for at, module in own
            if plan.stages[at].tensor > 1
        ]
        parts = [(ranks, held[n], shard) for ranks, held in links for n, shard in (ranks.parts or {}).items()]

        generated = GeneratedModel(
            module=model,
            held=held_tensors(plan, reference),
            names={alias: p.name for p in parameters for alias in p.aliases},
            live=lambda: dict(live.named_parameters(remove_duplicate=False)),
            buffers=buffers,
            join=lambda: {shard.name: ranks.join(part, shard) for ranks, part, shard in parts},
            joined_bytes=sum(part.nbytes * ranks.size for ranks, part, _ in parts),
        )
        return Generator(
            generated,
            plan=plan,
            config=self._config.generate,
            setting=self._setting,
            collectives=collectives,
            free_bytes=free_bytes,
        )

    def close(self) -> None:
        """Release the groups of stages' contexts; the model trains no more."""
        self._job.close()


def _module_of(stage: GraphStage) -> nn.Module:
    assert isinstance(stage.spec.make, nn.Module), "what is captured is a module"
    return stage.spec.make


def _settle_modes(model: nn.Module | StageGraph, *, warns: bool) -> None:
    """Put a model in train mode that is wholly in eval mode; else leave modes, and say which are in eval mode."""
    for module in _captured(model):
        was_in_eval = set_modes(module, training=True)
        evaluated = [name or "the model itself" for name, part in module.named_modules() if not part.training]
        if was_in_eval and warns:
            logger.warning(
                "%s was in eval mode, as from_pretrained returns a model, and is put in train mode; for parts in eval "
                "mode call model.train() first and then eval() of those",
                type(module).__name__,
            )
        elif evaluated and warns:
            logger.info(
                "%s: %d of its modules are in eval mode and stay so, the first %s",
                *(type(module).__name__, len(evaluated), evaluated[0]),
            )


def _captured(model: nn.Module | StageGraph) -> list[nn.Module]:
    """Return the modules that are captured: a plain model, or those of a graph."""
    if isinstance(model, nn.Module):
        return [model]
    return [s.make for s in model.stages if s.num_pieces is not None and isinstance(s.make, nn.Module)]
