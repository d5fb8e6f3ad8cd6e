"""From a profiled model and the configuration to a plan: what the keys of the block ask planners for, and together.

Source: this project
Tests: tests/stage_graph/test_part.py, tests/stage_graph/test_captured.py
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from gpp_plugin.capture.tracing.sample_batches import (
    count_samples,
    is_clearly_counted,
    is_counted,
    rows_per_sample,
)
from gpp_plugin.config.block import GraphPipelineConfig
from gpp_plugin.errors import CaptureError, ConfigError, PlanError, PlanInfeasible, ReadError
from gpp_plugin.ir.block_graph import CARRIED, BlockGraph
from gpp_plugin.ir.cluster import Cluster
from gpp_plugin.ir.plan import LOSS_KEY, PipelinePlan
from gpp_plugin.ir.profile import Profile
from gpp_plugin.ir.serialize import MAX_BYTES, read_json
from gpp_plugin.model.graph.graph_job import GraphJob
from gpp_plugin.model.graph.stage_costs import StageCosts
from gpp_plugin.model.graph.stage_graph import StageGraph
from gpp_plugin.plan.choose_schedule import schedule_plan
from gpp_plugin.plan.cluster_files import read_cluster
from gpp_plugin.plan.costs.estimate import finished_plan
from gpp_plugin.plan.costs.memory_formula import plan_beside_messages
from gpp_plugin.plan.explicit_plan import (
    FixedStage,
    explicit_plan,
    fixed_plan,
    names_a_stage,
    resize_stages,
    stage_sizes,
)
from gpp_plugin.plan.memory.fitting import recompute_fully
from gpp_plugin.plan.refine.share_ranks import share_ranks
from gpp_plugin.plan.registry import make_plan, plan_open, request_for
from gpp_plugin.plan.request import PlanRequest, blocks_under, coupled_blocks
from gpp_plugin.plan.tied_blocks import join_tied_blocks
from gpp_plugin.plugins import KFKB, find_schedule, k_of, schedule_label
from gpp_plugin.profile.analytic_costs import default_sample_counts
from gpp_plugin.profile.block_survey import UNSPLITTABLE
from gpp_plugin.profile.job_cluster import JobCluster, find_cluster
from gpp_plugin.profile.machine import read_machine
from gpp_plugin.runtime.batches import Batch
from gpp_plugin.runtime.ranks.placement_of_ranks import Setting
from gpp_plugin.runtime.stage_module import Reference
from gpp_plugin.schedule.build import with_schedule

logger = logging.getLogger(__name__)

PREPARATION_TIMEOUT_S = 1800.0


def plan_profiled(
    graph: BlockGraph,
    profile: Profile,
    *,
    config: GraphPipelineConfig,
    setting: Setting,
    smallest_local_batch: int,
    found: JobCluster | None = None,
    fixed: Sequence[FixedStage] | None = None,
    state: Sequence[str] = (),
) -> PipelinePlan:
    """Return the plan the configuration requests.

    Args:
        found: as of `plan_request`.
        fixed: explicit stages; None leaves them to the planner.
        state: parameters and buffers that a forward reads and writes for the next one.

    Raises:
        ConfigError: keys of the block contradict each other.
        PlanError, PlanInfeasible: no plan satisfies the configuration.
    """
    # Three ways to stages, then one way on: an explicit plan, explicit stages, or the planner's.
    # What the configuration says of the rest (sizes by stage, schedule, slices, recompute) is laid over any of them,
    # but for a saved plan, which has it all and is only checked against it.
    spec = None if config.plan is None else _read_plan(config.plan)
    modules, stages = _wanted_sizes(graph, config, setting.sizes.mini_batch, spec)
    request = plan_request(
        graph, config, setting, profile, modules, smallest_local_batch=smallest_local_batch, found=found
    )

    def make(wanted: PlanRequest) -> PipelinePlan:
        return _planned(graph, wanted, config, spec, fixed, modules, stages, state)

    # explicit stages are no smaller with less memory
    is_free = spec is None and fixed is None
    if spec is not None and _is_saved(spec) and request.is_zero_open:
        request = dataclasses.replace(request, zero_stage=int(spec.get("zero_stage", 0)), is_zero_open=False)

    def finish(wanted: PlanRequest) -> PipelinePlan:
        return finished_plan(plan_beside_messages(wanted, make) if is_free else make(wanted), wanted)

    plan = plan_open(config.planner if is_free else "", request, finish)
    for note in plan.notes:
        logger.info("plan: %s", note)
    _warn_of_copies(plan, graph, state)
    return plan


def _planned(
    graph: BlockGraph,
    request: PlanRequest,
    config: GraphPipelineConfig,
    spec: dict[str, Any] | None,
    fixed: Sequence[FixedStage] | None,
    modules: dict[str, int],
    stages: dict[str, int],
    state: Sequence[str],
) -> PipelinePlan:
    """Return the plan of a request, with what the configuration says of sizes, schedule, slices and recompute."""
    if spec is not None:
        plan = explicit_plan(spec, request)
        _check_agreement(plan, config, spec)
    elif fixed is not None:
        plan = fixed_plan(fixed, request)
    elif state and request.data_parallel is None:
        # also for what follows: stages that are laid on shared ranks are planned anew
        request = dataclasses.replace(request, data_parallel=1)
        plan = _plan_with_state(config, request, state)
    else:
        plan = make_plan(config.planner, request)
    if spec is not None and _is_saved(spec):
        _check_sizes(plan, graph, modules, stages)
    elif stages:
        try:
            plan = resize_stages(plan, request, stages)
        except PlanError as error:
            raise ConfigError(f"graph_pipeline.micro_batch_sizes: {error}") from error
    if spec is None or not _names_its_order(spec):
        plan = schedule_plan(plan, request, schedule=config.schedule, slicing=config.slicing)
        if spec is None and fixed is None:
            plan = share_ranks(plan, request, schedule=config.schedule)
    else:
        _check_slices(plan, config)
    if config.memory.recompute == "full":
        plan = recompute_fully(plan, request)
    return plan


def _plan_with_state(config: GraphPipelineConfig, request: PlanRequest, state: Sequence[str]) -> PipelinePlan:
    """Return a plan with one copy of what a forward leaves for the next one, as one process has.

    Args:
        request: of stages of one rank.

    Raises:
        PlanError: none has; says how to train with copies.
    """
    try:
        return make_plan(config.planner, request)
    except PlanError as error:
        degree, left = divmod(request.num_ranks, request.num_stages or 1)
        copies = ", or let the ranks of a stage keep one each, as with DistributedDataParallel: "
        copies = "" if left else f'{copies}"data_parallel": {degree} in graph_pipeline'
        raise type(error)(
            f"each forward leaves {_listed(state)} for the next one, so that each stage has one rank, and {error}; run "
            f"on {request.num_stages or 'fewer'} ranks{copies}"
        ) from None


def _warn_of_copies(plan: PipelinePlan, graph: BlockGraph, state: Sequence[str]) -> None:
    """Log where ranks that share a stage, at the user's request, each hold what one process has once."""
    held = {block.name: set(block.parameters).intersection(state) for block in graph.blocks}
    for stage in plan.stages:
        own = [name for name in state if any(name in held[block] for block in stage.blocks)]
        if own and stage.degree > 1:
            logger.warning(
                "each of the %d ranks of stage %r keeps %s for its own loss units, as with DistributedDataParallel; "
                "one process keeps it for all of them, as data_parallel 1 does",
                stage.degree,
                stage.name,
                _listed(own),
            )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return names[0].replace(CARRIED, "") + more


def sample_counts(job: GraphJob, config: GraphPipelineConfig, setting: Setting) -> dict[str, Sequence[int]]:
    """Return at which numbers of samples each stage is timed: what its micro-batches may be.

    With units of 8 samples in mini-batches of 64: a captured part at 1, 4, 8 and 32, since into how many stages
    and on how many ranks each follows from the costs; a user's module at 4 and 8, and at what it receives.
    """
    mini_batch, unit = setting.sizes.mini_batch, setting.sizes.loss_unit
    sizes = config.micro_batch_sizes
    # with one loss a mini-batch the planner chooses
    is_searched = sizes == "search" or unit == mini_batch
    searched = sorted({*default_sample_counts(unit), min(mini_batch, 4 * unit)})
    counts: dict[str, Sequence[int]] = {}
    for stage in job.resolved.stages:
        spec = stage.spec
        if job.takes_whole_units(stage.name) if stage.is_captured else stage.name in job.coupled:
            counts[stage.name] = (unit,)
        elif stage.is_captured or is_searched:
            counts[stage.name] = searched
        else:
            requested = sizes.get(stage.name) if isinstance(sizes, dict) else sizes
            requested = mini_batch if requested == "full" else requested
            size = spec.micro_batch_size or (requested if isinstance(requested, int) else None)
            local = unit if size is None else max(size * spec.tensor // len(spec.ranks), 1)
            counts[stage.name] = sorted({max(unit // 2, 1), unit, local})
    return counts


def explicit_stages(
    job: GraphJob,
    costs: StageCosts,
    config: GraphPipelineConfig,
    setting: Setting,
    *,
    device: str,
    smallest_local_batch: int,
    found: JobCluster | None,
) -> list[FixedStage]:
    """Return the stages of a graph: users' modules as they are, captured parts as a planner cuts them on their ranks.

    What these swap and recompute follows when the whole graph says how many micro-batches they hold.

    Raises:
        PlanError, PlanInfeasible: a part cannot be cut so.
    """
    # Example: the part "tower" on ranks 2, 3, 5 of six, in two stages. The planner plans ranks 0..2 of a
    # cluster of those three devices; what it puts on its ranks (0, 1) and (2,) lies on (2, 3) and (5,).
    views = job.views(is_training=True)
    stages: list[FixedStage] = []
    for stage in job.resolved.stages:
        spec, size = stage.spec, stage.spec.micro_batch_size
        number = spec.num_pieces if isinstance(spec.num_pieces, int) else None
        blocks: tuple[str, ...] = (stage.name,)
        if stage.is_captured:
            blocks = tuple(block.name for block in views[stage.name].blocks.blocks)
        if not stage.is_captured or number == 1 or (number is None and len(spec.ranks) == 1):
            whole = FixedStage(
                name=stage.name, blocks=blocks, ranks=spec.ranks, tensor=spec.tensor, micro_batch_size=size
            )
            stages.append(whole)
            continue
        graph = views[stage.name].blocks
        request = plan_request(
            graph,
            config,
            setting,
            costs.profile(graph, device=device, stage=stage.name),
            {} if size is None else {"*": size},
            smallest_local_batch=smallest_local_batch,
            found=found,
        )
        devices = tuple(request.cluster.devices[rank] for rank in spec.ranks)
        request = dataclasses.replace(
            request,
            num_ranks=len(spec.ranks),
            num_stages=number,
            data_parallel=None,
            tensor_parallel=1,
            sequence_parallel=1,
            cluster=dataclasses.replace(request.cluster, devices=devices),
        )
        plan = make_plan(config.planner, request)
        stages += [
            FixedStage(
                name=stage.name,
                is_piece=len(plan.stages) > 1,
                blocks=piece.blocks,
                ranks=tuple(spec.ranks[rank] for rank in piece.ranks),
                micro_batch_size=size,
            )
            for piece in plan.stages
        ]
    return stages


def check_files(modules: Iterable[nn.Module], config: GraphPipelineConfig) -> None:
    """Refuse now what would fail only after the first step, or not be read at all.

    Args:
        modules: those that are captured, whose weights may be files.

    Raises:
        ConfigError: names the key.
    """
    is_meta = any(p.is_meta for module in modules for p in module.parameters())
    if config.weights is not None and not is_meta:
        raise ConfigError(
            f"graph_pipeline.weights: {config.weights!r} would not be read, the model has weights; remove the key, or "
            "build the model under torch.device('meta')"
        )
    if config.trace_path is not None:
        folder = Path(config.trace_path.replace("{step}", "1")).absolute().parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"graph_pipeline.trace_path: {folder} cannot be made ({error.strerror}); name a file in a "
                "directory that can be written"
            ) from error
        if not os.access(folder, os.W_OK):
            raise ConfigError(
                f"graph_pipeline.trace_path: {folder} cannot be written; name another directory"
            )


def _check_agreement(plan: PipelinePlan, config: GraphPipelineConfig, spec: Mapping[str, Any]) -> None:
    """Refuse an explicit plan that other keys of the block contradict: only one of them could hold."""
    degrees = sorted({stage.degree for stage in plan.stages})
    labels = sorted({schedule_label(stage) for stage in plan.stages})
    for key, wanted, has in (
        ("stages", config.stages, [len(plan.stages)]),
        ("data_parallel", config.data_parallel, degrees),
        ("schedule", config.schedule, labels),
    ):
        if key == "schedule" and not _names_its_order(spec):
            continue  # it receives its schedule afterwards
        if key == "schedule" and _runs_k(plan, config.schedule):
            continue
        if wanted != "auto" and has != [wanted]:
            shown = " and ".join(str(value) for value in has)
            raise ConfigError(
                f"graph_pipeline.{key}: {wanted} is requested, graph_pipeline.plan has {shown}; remove one of them"
            )


def _runs_k(plan: PipelinePlan, schedule: str) -> bool:
    """Return whether the plan's stages run the kFkB that is named, each with as many micro-batches as it has."""
    k = max(2, *(stage.k for stage in plan.stages)) if schedule == KFKB else k_of(schedule)
    return k is not None and with_schedule(plan, "1f1b", k) == plan


def _check_sizes(
    plan: PipelinePlan, graph: BlockGraph, modules: Mapping[str, int], stages: Mapping[str, int]
) -> None:
    """Refuse a saved plan that ``micro_batch_sizes`` contradicts."""
    coupled = coupled_blocks(graph)
    under = {key: set(blocks_under(graph, key)) for key in modules if key != "*"}
    try:
        named = stage_sizes(plan, graph, stages)
    except PlanError as error:
        raise ConfigError(f"graph_pipeline.micro_batch_sizes: {error}") from error
    for stage in plan.stages:
        wanted = {size for key, size in modules.items() if not under.get(key, set()).isdisjoint(stage.blocks)}
        wanted |= {size for index, size in named.items() if plan.stages[index] is stage}
        if not wanted and "*" in modules and coupled.isdisjoint(stage.blocks):
            wanted = {modules["*"]}
        for size in sorted(wanted - {stage.micro_batch_size}):
            raise ConfigError(
                f"graph_pipeline.micro_batch_sizes: {size} is requested for stage {stage.name!r}, graph_pipeline.plan "
                f"has {stage.micro_batch_size}; remove one of them"
            )


def _check_slices(plan: PipelinePlan, config: GraphPipelineConfig) -> None:
    """Refuse slices of an explicit plan that ``slicing`` contradicts."""
    sliced = max(stage.num_sliced for stage in plan.stages)
    wanted = config.slicing
    if wanted == "auto" or (wanted == "on" and sliced) or wanted in ({sliced} if sliced else {"off"}):
        return
    has = f"slices {sliced} micro-batches" if sliced else "slices nothing"
    raise ConfigError(f"graph_pipeline.slicing: {wanted}, and graph_pipeline.plan {has}; remove one of them")


def _is_saved(spec: Mapping[str, Any]) -> bool:
    """Return whether an explicit plan is a `PipelinePlan` that was saved, not a list of modules per stage."""
    return not isinstance(spec.get("stages"), list)


def _names_its_order(spec: Mapping[str, Any]) -> bool:
    """Return whether an explicit plan says how its stages order their tasks: a saved one, or one with a ``k``."""
    return _is_saved(spec) or any(isinstance(stage, dict) and "k" in stage for stage in spec["stages"])


def _read_plan(plan: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(plan, dict):
        return plan
    try:
        loaded = read_json(plan, what="a plan", max_bytes=MAX_BYTES)
    except ReadError as error:
        raise ConfigError(f"graph_pipeline.plan: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"graph_pipeline.plan: {plan} holds a {type(loaded).__name__}, not an object")
    return loaded


def plan_request(
    graph: BlockGraph,
    config: GraphPipelineConfig,
    setting: Setting,
    profile: Profile,
    micro_batch_sizes: dict[str, int],
    *,
    smallest_local_batch: int,
    found: JobCluster | None = None,
) -> PlanRequest:
    """Return the planner's request, as the configuration has it.

    Args:
        found: what the job's ranks found of their devices (`look_at_devices`).
    """
    # in mode async every micro-batch is a step: its size is the user's, never a planner's
    is_async = config.mode == "async"
    return request_for(
        config,
        graph=graph,
        profile=profile,
        cluster=_cluster(config, setting) if found is None else found.cluster,
        num_ranks=setting.num_ranks,
        mini_batch=setting.sizes.mini_batch,
        loss_unit=setting.sizes.loss_unit,
        micro_batch_sizes=micro_batch_sizes or ({"*": setting.sizes.loss_unit} if is_async else None),
        zero_stage=config.zero or setting.zero_stage,
        smallest_local_batch=smallest_local_batch,
    )


def _wanted_sizes(
    graph: BlockGraph, config: GraphPipelineConfig, mini_batch: int, spec: Mapping[str, Any] | None
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the micro-batch sizes requested by module (or for all, ``*``), and by the name of a stage.

    Stages are named in a plan by hand, or after what they hold (``vision_model.0-1``).

    Raises:
        ConfigError: a key names nothing in the model.
    """
    sizes = config.micro_batch_sizes
    if isinstance(sizes, int):
        return {"*": sizes}, {}
    by_hand = spec["stages"] if spec is not None and not _is_saved(spec) else []
    named = {stage.get("name") for stage in by_hand if isinstance(stage, dict)} - {LOSS_KEY}
    modules: dict[str, int] = {}
    stages: dict[str, int] = {}
    for key, wanted in sizes.items() if isinstance(sizes, dict) else ():
        size = mini_batch if wanted == "full" else int(wanted)
        try:
            (stages if key in named or names_a_stage(graph, key) else modules)[key] = size
        except PlanError as error:
            raise ConfigError(f"graph_pipeline.micro_batch_sizes.{key}: {error}") from error
    return modules, stages


def look_at_devices(config: GraphPipelineConfig, setting: Setting) -> JobCluster | None:
    """Return what the ranks find of their CUDA devices and links where the configuration leaves it to them.

    Collective over all ranks. None where the cluster is described, and on CPUs, where rank 0 looks when it plans.

    Raises:
        GppError: a rank could not; the same on every rank.
    """
    if config.cluster != "auto" or setting.placement.device_type == "cpu":
        return None
    return find_cluster(
        setting.placement,
        setting.group,
        dtype=setting.dtype,
        keeps_reserve=config.memory.limit_gb == "auto",
        directory=config.profile_dir,
    )


@contextmanager
def with_memory_explained(config: GraphPipelineConfig, found: JobCluster | None) -> Iterator[None]:
    """Add to the error of a plan that does not fit what the automatic limit is made of, where it was measured."""
    try:
        yield
    except PlanInfeasible as error:
        if found is None or config.memory.limit_gb != "auto":
            raise
        kinds = {memory.name: memory.explanation for memory in found.memory}
        raise PlanInfeasible(f"{error}; {'; '.join(kinds.values())}") from error


def _cluster(config: GraphPipelineConfig, setting: Setting) -> Cluster:
    """Return the cluster described in the configuration, or this machine for every rank."""
    if config.cluster != "auto":
        return read_cluster(config.cluster, num_devices=setting.num_ranks)
    return read_machine(
        setting.num_ranks, sharing=setting.placement.own_sharers, device_type="cpu", dtype=setting.dtype
    )


def fewest_samples(costs: StageCosts, counts: Mapping[str, Sequence[int]]) -> int:
    """Return the smallest number of samples that every stage can do."""
    # A block that was tried at 1, 4 and 8 samples and has times from 4 on could not do 1: then 4. One that was never
    # tried at fewer than 8 (it computes on whole units) says nothing of others.
    starts = (
        cost.samples[0]
        for stage, blocks in costs.by_stage.items()
        for cost in blocks
        if cost.samples[0] > counts[stage][0]
    )
    return max(starts, default=1)


def with_stage(model: nn.Module | StageGraph, config: GraphPipelineConfig) -> GraphPipelineConfig:
    """Return the configuration with what a graph's one captured stage says of itself."""
    if isinstance(model, nn.Module) or not model.is_one_capture:
        return config
    (spec,) = model.stages
    changes: dict[str, Any] = {}
    if isinstance(spec.num_pieces, int):
        changes["stages"] = spec.num_pieces
    if spec.micro_batch_size is not None and config.micro_batch_sizes == "auto":
        changes["micro_batch_sizes"] = spec.micro_batch_size
    return config.model_copy(update=changes)


def check_ties(reference: Reference, config: GraphPipelineConfig) -> None:
    """Refuse more stages than blocks that share no trained parameter (mode async)."""
    if isinstance(config.stages, int):
        parameters = reference.analysis.op_graph.parameters
        trained = {p.name for p in parameters if p.requires_grad}
        join_tied_blocks(reference.block_graph, trained).check_stages(config.stages)


def refuse_split(plan: PipelinePlan, costs: StageCosts) -> None:
    """Refuse a schedule that makes backwards in two parts where a stage's cannot be.

    Raises:
        PlanError: names the stage.
    """
    whole = {
        cost.block for own in costs.by_stage.values() for cost in own if cost.split_factor >= UNSPLITTABLE
    }
    for stage in plan.stages:
        if find_schedule(stage.schedule).splits_backward and not whole.isdisjoint(stage.blocks):
            raise PlanError(
                f"stage {stage.name!r}: its backward cannot be made in two parts (it fails, or its gradients are "
                f'others then), which schedule "{stage.schedule}" requests; use "auto"'
            )


@contextmanager
def samples_explained(batch: Batch, config: GraphPipelineConfig) -> Iterator[None]:
    """Let an error of a capture say for how many samples the batch was taken, where that is in doubt."""
    try:
        yield
    except CaptureError as error:
        if (
            config.units is None
            and is_counted(batch)
            and (not is_clearly_counted(batch) or max(rows_per_sample(batch).values()) > 1)
        ):
            rows = ", ".join(f"{k} {list(v.shape)}" for k, v in batch.items() if isinstance(v, Tensor))
            error.args = (
                f"{error}; the batch was taken for {count_samples(batch)} samples ({rows}): where it is one loss unit "
                'as it is (a graph, packed texts), set "graph_pipeline": {"units": N}, N batches a mini-batch',
            )
        raise


def check_config(graph: StageGraph, config: GraphPipelineConfig) -> None:
    """Refuse keys of the block that speak of a captured model.

    Raises:
        ConfigError: names the key.
    """
    # of a graph of one capture all keys hold that hold of a plain model, unless the capture says otherwise itself
    number = len(graph.stages)
    is_plain = graph.is_one_capture
    pieces = graph.stages[0].num_pieces if is_plain else None
    is_explicit = all(stage.num_pieces is None for stage in graph.stages)
    stages_differ = config.stages not in ("auto", number if is_explicit else "auto")
    degrees = {len(stage.ranks) // stage.tensor for stage in graph.stages}
    is_other_degree = config.data_parallel != "auto" and degrees != {config.data_parallel}
    for key, wrong, fix in (
        ("planner", is_explicit and config.planner != "auto", "its stages are explicit; remove the key"),
        (
            "stages",
            stages_differ and not (is_plain and pieces in ("auto", config.stages)),
            f"it has {pieces if is_plain else number}; remove the key",
        ),
        ("loss_mean", config.loss_mean != "units", "its stages count for themselves; remove the key"),
        (
            "units",
            config.units is not None,
            "units of their own shapes are for captured models; remove the key",
        ),
        (
            "compile",
            bool(config.compile) and not is_plain,
            "blocks of one captured model are compiled; remove the key",
        ),
        (
            "lengths",
            config.lengths is not None,
            "what its stages take and hold is found by running them on the sample batch; remove the key",
        ),
        (
            "weights",
            config.weights is not None and not is_plain,
            "factories make its weights; remove the key",
        ),
        (
            "data_parallel",
            not is_plain and is_other_degree,
            "its ranks are explicit; remove the key",
        ),
        (
            "tensor_parallel",
            not is_plain and config.tensor_parallel != 1,
            "its stages say how many tensor ranks they have; remove the key",
        ),
        (
            "sequence_parallel",
            not is_plain and config.sequence_parallel != 1,
            "its stages say how many context ranks they have; remove the key",
        ),
    ):
        if wrong:
            value = getattr(config, key)
            raise ConfigError(f"graph_pipeline.{key}: {value!r} with stage graph {graph.name!r}: {fix}")


def check_shared_out(reference: Reference, config: GraphPipelineConfig) -> None:
    """Refuse tensor ranks, or context ranks, for a model of which nothing can be shared out among them.

    Raises:
        ConfigError: names the operator that is in the way.
    """
    graph = reference.block_graph
    for key, known, reasons, what in (
        ("tensor_parallel", graph.sharding, graph.undivided, "tensor ranks: {}"),
        ("sequence_parallel", graph.context, graph.uncut, "context ranks: {}"),
    ):
        requested = getattr(config, key)
        if requested in (1, "auto") or known:
            continue
        why = next(iter(reasons.values()), "it has no linear operators with an axis of positions")
        raise ConfigError(
            f"graph_pipeline.{key} is {requested!r} and nothing of {graph.model} can be shared out among "
            f'{what.format(why)}; set it to 1, or to "auto" for what can be'
        )
