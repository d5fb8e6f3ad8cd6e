"""The Python API: plan a model for a cluster, predict and rehearse the plan, check it, and print what came out.

Usable in a notebook, without ranks and mostly without devices; the ``gpp`` commands are these calls::

    >>> from gpp_plugin.api import format_timeline, plan, simulate
    >>> made = plan("mmt", "summit", num_devices=4, sizes={"branches": 2})
    >>> made.num_ranks
    4
    >>> timeline = simulate(made, "summit")
    >>> print(format_timeline(timeline, made, width=60).splitlines()[0].split()[0])
    predicted:

Training is `deepspeed.initialize`; a plan saved here is what its ``graph_pipeline.plan`` may name, and `engine.plan`
is a `PipelinePlan` that every function here takes. `PlanRequest`, `StageDraft` and `build_plan` are what a planner of
another package is written with (`gpp_plugin.plugins`). Names and arguments in ``__all__`` are kept between releases;
arguments are added with defaults. Failures are `gpp_plugin.errors.GppError`, one line with the fix.

Nothing of the top-level package is called like a function of this module: ``gpp_plugin.plan`` is the package with the
planners, whether or not this module was imported, ``gpp_plugin.api.plan`` always the function.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from gpp_plugin.errors import ConfigError, PlanError
from gpp_plugin.ir.cluster import Cluster
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.serialize import save
from gpp_plugin.ir.tensors import TRAINING_DTYPES
from gpp_plugin.ir.timeline import Timeline
from gpp_plugin.ir.typed_leaves import MOST_COUNT
from gpp_plugin.library.named_models import (
    captured_model,
    config_path,
    huggingface_model,
    library_model,
    usual_loss_unit,
)
from gpp_plugin.library.paper_graphs import MODELS
from gpp_plugin.plan.choose_schedule import schedule_plan
from gpp_plugin.plan.cluster_files import MOST_DEVICES, USUAL_DTYPE, read_cluster
from gpp_plugin.plan.costs.cost_model import gather_times
from gpp_plugin.plan.costs.memory_formula import plan_beside_messages, with_breakdown
from gpp_plugin.plan.edge_transports import NATIVE, note_edge_transports
from gpp_plugin.plan.make import StageDraft, build_plan
from gpp_plugin.plan.plan_form import check_form, read_plan
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.plan.shared.share_ranks import share_ranks
from gpp_plugin.plan.validate_request import validate_for
from gpp_plugin.plugins import planner_granularity
from gpp_plugin.rehearse.rehearsal import make_windows, programs_of_plan
from gpp_plugin.report import timeline_chart
from gpp_plugin.report.plan_text import format_plan
from gpp_plugin.schedule.names import is_schedule_name, planning_schedule, unknown_schedule
from gpp_plugin.schedule.orders.async_1f1b import windows_of
from gpp_plugin.schedule.windows import lengthened
from gpp_plugin.simulate.async_prediction import (
    AheadPrediction,
    AsyncPrediction,
    num_windows,
    predict_ahead,
    simulate_windows,
)
from gpp_plugin.simulate.predict import simulate_plan
from gpp_plugin.simulate.program_times import simulate_programs

if TYPE_CHECKING:  # only a module and a rehearsal need torch
    from torch import nn  # noqa: TID251 - for its type only

    from gpp_plugin.rehearse.rehearsal import Rehearsal

__all__ = [
    "PipelinePlan",
    "PlanRequest",
    "StageDraft",
    "Timeline",
    "build_plan",
    "format_plan",
    "format_timeline",
    "load_plan",
    "make_request",
    "plan",
    "plan_for",
    "rehearse",
    "save",
    "simulate",
    "simulate_ahead",
    "simulate_async",
    "validate",
]

USUAL_MINI_BATCH = 64
SAMPLES_A_DEVICE = 8
"""Of the usual mini-batch on many devices."""
USUAL_LENGTH = 512
LONGEST_LENGTH = 1 << 20
"""Tokens of a text: batches of that many are made to plan with."""

ClusterSource = Cluster | str | Path | dict[str, Any]
"""A cluster, or what describes one: the name of a description that comes with the package, a JSON file, its content
(`plan.cluster_files`), or ``auto``: this machine."""


class RequestOptions(TypedDict, total=False):
    """What `make_request` and `plan` take by name beside the model and the cluster.

    Args:
        num_devices: ranks to plan for; by default those of the cluster.
        sample_batch: for a module: a batch as it is trained on, samples along axis 0.
        sizes: for a library model: dimensions that differ from the paper's, e.g. ``{"branches": 8}``.
        length: for a HuggingFace configuration: tokens of a text, 512 by default. Several are the usual ones: the mean
            of their times is planned for. A module's sample batch takes them, and ``max_length``, where they are given.
        max_length: the longest text, which memory is planned for; the longest of ``length`` by default.
        granularity: ``layer``, ``sub_layer`` or ``node``; the planner's usual blocks by default.
        dtype: what it is trained in: ``bf16``, ``fp16`` or ``fp32``; by default the first that the cluster's devices
            have a speed in.
        mini_batch: samples of one optimizer step; 64 by default, or 8 a device where that is more.
        loss_unit: samples of one loss; by default the mini-batch, or of a HuggingFace configuration whose loss does not
            compare samples about 4096 tokens.
        micro_batch_sizes: samples of every stage's micro-batch, or by module path as in the configuration; the planner
            chooses by default.
        stages: exactly that many; the planner chooses by default. More than devices: each holds several.
        virtual_stages: stages that each group of ranks holds: 1 by default, or ``auto``, whatever is shortest.
        colocate: ``auto`` may put the stages of a branch on the ranks of others; ``off`` (the default) does not.
        data_parallel: ranks of every stage; the planner chooses by default.
        tensor_parallel: ranks that compute the same samples of a stage together: 1 by default, a number for all stages
            that can be divided so, by module path (all others 1), or ``auto``, stage by stage whatever is shortest.
        memory: what may be used to fit: ``recompute``, ``swap``, both or (the default) neither.
        memory_limit_gb: most GB of one rank; what the device has by default.
        zero_stage: 0 (the default) to 3.
        mode: ``sync`` (the default) or ``async``.
        vertical_sync: in mode ``async``.
    """

    num_devices: int | None
    sample_batch: Mapping[str, Any] | None
    sizes: Mapping[str, int | str]
    length: int | Sequence[int]
    max_length: int | None
    granularity: str | None
    dtype: str | None
    mini_batch: int | None
    loss_unit: int | None
    micro_batch_sizes: int | Mapping[str, int] | None
    stages: int | None
    virtual_stages: int | str
    colocate: str
    data_parallel: int | None
    tensor_parallel: int | str | Mapping[str, int]
    memory: Collection[str]
    memory_limit_gb: float | None
    zero_stage: int
    mode: str
    vertical_sync: bool


def plan(
    model: str | Path | nn.Module,
    cluster: ClusterSource = "dgx_h100",
    *,
    planner: str = "auto",
    schedule: str = "auto",
    slicing: str | int = "auto",
    p2p: str = NATIVE,
    **options: Unpack[RequestOptions],
) -> PipelinePlan:
    """Return a plan for a model on a cluster that need not be there; the model's weights are neither read nor made.

    Args:
        model: a library model (``mmt``), a HuggingFace configuration (its name in the package, its file or
            directory), or a module, with ``sample_batch``.
        cluster: what it runs on; see `ClusterSource`.
        planner: its name, as in the configuration; so are ``schedule``, ``slicing`` and ``p2p``.
        options: see `RequestOptions`.

    Raises:
        ConfigError: an argument is wrong, or there is no such model or cluster.
        CaptureError: the module cannot be captured.
        PlanError, PlanInfeasible: no plan meets the request; the message says what to change.
    """
    if not is_schedule_name(schedule):
        raise PlanError(unknown_schedule(schedule))
    request = make_request(model, cluster, planner=planner, schedule=schedule, **options)
    return plan_for(request, planner=planner, schedule=schedule, slicing=slicing, p2p=p2p)


def make_request(
    model: str | Path | nn.Module,
    cluster: ClusterSource = "dgx_h100",
    *,
    planner: str = "auto",
    schedule: str = "auto",
    **options: Unpack[RequestOptions],
) -> PlanRequest:
    """Return what `plan` asks its planner: the model as blocks with costs, the cluster, and all limits.

    Args:
        planner, schedule: those that will be used; blocks and memory are counted for them.

    Raises:
        ConfigError, CaptureError, PlanError: as `plan`.
    """
    # Costs are those of the first device; `CostModel` says what blocks take on another. A library model brings its
    # costs from a paper's dimensions; anything else is captured on one loss unit, and its costs follow from operator
    # counts at 1, 2, 4 .. mini_batch samples.
    devices = _cluster(cluster, options.get("num_devices"), options.get("dtype"))
    device = devices.devices[0]
    mini_batch, loss_unit = _batch_sizes(model, devices.num_devices, options)
    granularity = options.get("granularity")
    sizes = options.get("sizes") or {}
    if _is_library_model(model):
        graph, profile = library_model(
            str(model), sizes, device, mini_batch=mini_batch, granularity=granularity
        )
    else:
        if sizes:
            raise ConfigError("sizes: is for library models; edit the model's own configuration instead")
        module, batches = _module_and_batches(model, loss_unit, options)
        graph, profile = captured_model(
            module,
            batches,
            device,
            mini_batch=mini_batch,
            granularity=granularity or planner_granularity(planner),
        )
    micro = options.get("micro_batch_sizes")
    virtual, colocate = options.get("virtual_stages", 1), options.get("colocate", "off")
    if isinstance(virtual, str) and virtual != "auto":
        raise ConfigError(f'virtual_stages {virtual!r}: give "auto" or a number of at least 1')
    if colocate not in ("auto", "off"):
        raise ConfigError(f'colocate {colocate!r}: give "auto" or "off"')
    tensor = options.get("tensor_parallel", 1)
    if isinstance(tensor, str) and tensor != "auto":
        raise ConfigError(
            f'tensor_parallel {tensor!r}: give "auto", a number of at least 1, or numbers by module'
        )
    limit = options.get("memory_limit_gb")
    return PlanRequest(
        graph=graph,
        profile=profile,
        cluster=devices,
        num_ranks=devices.num_devices,
        mini_batch=mini_batch,
        loss_unit=loss_unit,
        num_stages=options.get("stages"),
        granularity=granularity or planner_granularity(planner),
        micro_batch_sizes={"*": micro} if isinstance(micro, int) else dict(micro) if micro else None,
        schedule=planning_schedule(schedule),
        memory_limit_bytes=None if limit is None else int(limit * 1e9),
        data_parallel=options.get("data_parallel"),
        zero_stage=options.get("zero_stage", 0),
        mode=options.get("mode", "sync"),
        memory_optimization=tuple(options.get("memory", ())),
        vertical_sync=options.get("vertical_sync", False),
        virtual_stages=None if isinstance(virtual, str) else virtual,
        colocate=colocate == "auto",
        tensor_parallel=None
        if isinstance(tensor, str)
        else tensor
        if isinstance(tensor, int)
        else dict(tensor),
    )


def plan_for(
    request: PlanRequest,
    *,
    planner: str = "auto",
    schedule: str = "auto",
    slicing: str | int = "auto",
    p2p: str = NATIVE,
) -> PipelinePlan:
    """Return the plan that a planner makes of a request, under its schedule and with what fills its memory.

    Raises:
        PlanError, PlanInfeasible: as `plan`.
    """

    def make(asked: PlanRequest) -> PipelinePlan:
        made = schedule_plan(make_plan(planner, asked), asked, schedule=schedule, slicing=slicing)
        return share_ranks(made, asked, schedule=schedule)

    made = plan_beside_messages(request, make)
    return with_breakdown(note_edge_transports(made, p2p), request)


def simulate(plan: PipelinePlan, cluster: ClusterSource | None = None) -> Timeline:
    """Return the predicted timeline of a plan: of one mini-batch, or, in mode ``async``, of several in a row.

    Args:
        cluster: links that messages take; without one they take no time.

    Raises:
        ConfigError: the plan has no predicted times, or there is no such cluster.
        PlanError, ScheduleError: the plan does not fit the cluster, or cannot run.
    """
    _check_times(plan)
    if plan.mode == "async":
        return simulate_async(plan, cluster).timeline
    links = _links(plan, cluster)
    if not any(stage.gathered_bytes for stage in plan.stages):
        return simulate_plan(plan, cluster=links)
    # where gathers stand is the programs' alone to say
    programs = programs_of_plan(plan, validate=False)
    gather_us = None if links is None else gather_times(plan, links)
    return simulate_programs(plan, programs, cluster=links, gather_us=gather_us)


def simulate_async(plan: PipelinePlan, cluster: ClusterSource | None = None) -> AsyncPrediction:
    """Return the same for a plan of mode ``async``, with the time of a mini-batch while the pipeline is full.

    Raises:
        ConfigError, PlanError, ScheduleError: as `simulate`.
    """
    _check_times(plan)
    return simulate_windows(plan, cluster=_links(plan, cluster))


def simulate_ahead(plan: PipelinePlan, cluster: ClusterSource | None = None) -> AheadPrediction | None:
    """Return what a mini-batch takes where frozen stages run the next one's forwards; None where none can.

    Raises:
        ConfigError, PlanError, ScheduleError: as `simulate`.
    """
    _check_times(plan)
    return predict_ahead(plan, cluster=_links(plan, cluster))


def rehearse(
    plan: PipelinePlan,
    *,
    steps: int = 5,
    scale_time: float = 1.0,
    scale_bytes: float = 1.0,
    timeout_s: float | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Rehearsal:
    """Run a plan's processes and messages on this machine, with delays in place of compute; return what was measured.

    It starts one process a rank and ends them; ``rehearsal.median_timeline`` is what they did in a mini-batch.

    Args:
        steps: mini-batches to measure; one more runs before them.
        scale_time: factor of every task's duration; ``scale_bytes`` of every message.
        timeout_s: longest wait for a message; by the plan's own times where None.
        tell: told what is going on, a line at a time.

    Raises:
        ConfigError: an argument is wrong, or the messages do not fit this machine.
        PlanError, ScheduleError: the plan does not hold what a rehearsal needs, or is unsafe.
        RuntimeFailure: a rank failed.
    """
    from gpp_plugin.rehearse.rehearsal import rehearse_plan
    from gpp_plugin.rehearse.rehearsal_settings import RehearsalSettings

    _check_is_plan(plan)
    settings = RehearsalSettings(
        steps=steps, scale_time=scale_time, scale_bytes=scale_bytes, comm_timeout_s=timeout_s
    )
    return rehearse_plan(plan, settings, tell=tell)


def validate(plan: PipelinePlan, request: PlanRequest | None = None) -> None:
    """Refuse a plan that could not run: prove its programs, and hold it against what it was made for.

    The tasks and messages of all ranks are made as for training, and shown to be whole, in order, within the plan's
    in-flight counts, and to finish even if every rank ran serially with rendezvous messages.

    Args:
        request: of the model and cluster it is for (`make_request`): then blocks, edges and memory are checked too.

    Raises:
        PlanError, PlanInfeasible: what is malformed, or needs more memory than there is.
        ScheduleError: its programs would deadlock, reorder messages or hold too much; with the grid of tasks.
    """
    _check_is_plan(plan)
    if request is not None:
        validate_for(plan, request)
    else:
        check_form(plan)
    if plan.mode == "async":
        make_windows(plan)
    else:
        programs_of_plan(plan)


def format_timeline(
    timeline: Timeline, plan: PipelinePlan, *, width: int = 96, screen: int | None = None
) -> str:
    """Return a timeline as a Gantt picture in text, with each rank's busy share.

    Args:
        plan: as it was given to `simulate` or `rehearse`.
        width: columns of the time axis.
        screen: columns of everything, instead.
    """
    if plan.mode == "async" and timeline.source != "measured":
        plan = lengthened(plan, num_windows(windows_of(plan)))
    return timeline_chart.format_timeline(timeline, plan, width=width, screen=screen)


def load_plan(path: str | Path) -> PipelinePlan:
    """Read a plan that `save` or ``gpp plan --out`` wrote.

    Raises:
        GppError: the file is missing, or no plan of this release; the message names it.
    """
    return read_plan(path)


def _check_is_plan(given: object) -> None:
    """Refuse what is no plan: mostly the name of a file that holds one."""
    if not isinstance(given, PipelinePlan):
        raise ConfigError(f"plan: {given!r} is a {type(given).__name__}; read a file with load_plan(path)")


def _check_times(plan: PipelinePlan) -> None:
    _check_is_plan(plan)
    if not any(stage.forward_us for stage in plan.stages):
        raise ConfigError("its stages have no forward_us; make the plan with gpp plan")


def _links(plan: PipelinePlan, cluster: ClusterSource | None) -> Cluster | None:
    return None if cluster is None else _cluster(cluster, plan.num_ranks)


def _is_library_model(model: str | Path | nn.Module) -> bool:
    return isinstance(model, str) and model in MODELS


def _batch_sizes(model: str | Path | nn.Module, num_devices: int, options: RequestOptions) -> tuple[int, int]:
    """Return the samples of a mini-batch and of a loss unit, those that are usual where nothing is said.

    Raises:
        ConfigError: one of them is below 1, or the model's configuration is none.
    """
    mini_batch, loss_unit = options.get("mini_batch"), options.get("loss_unit")
    if mini_batch is None:
        mini_batch = max(USUAL_MINI_BATCH, SAMPLES_A_DEVICE * num_devices)
        if loss_unit is not None and loss_unit > 0:
            mini_batch = -(-mini_batch // loss_unit) * loss_unit
    if not 1 <= mini_batch <= MOST_COUNT or (loss_unit is not None and loss_unit < 1):
        raise ConfigError(
            f"mini_batch {mini_batch}, loss_unit {loss_unit}: give at least 1 sample and at most {MOST_COUNT}"
        )
    if loss_unit is None and isinstance(model, (str, Path)) and not _is_library_model(model):
        usual, _ = _text_lengths(options)
        loss_unit = usual_loss_unit(
            config_path(model), mini_batch=mini_batch, length=usual[-1], num_devices=num_devices
        )
    return mini_batch, loss_unit or mini_batch


def _cluster(source: ClusterSource, num_devices: int | None, dtype: str | None = None) -> Cluster:
    """Return the cluster that ``source`` means, with as many devices as are wanted."""
    if isinstance(source, Cluster):
        if dtype not in (None, source.devices[0].dtype):
            raise ConfigError(
                f"dtype {dtype}: cluster {source.name!r} has speeds in {source.devices[0].dtype}; give its description "
                "instead"
            )
        if num_devices not in (None, source.num_devices):
            raise ConfigError(
                f"num_devices {num_devices}: cluster {source.name!r} has {source.num_devices} devices; give its "
                "description instead to add or leave out nodes"
            )
        return source
    if source != "auto":
        return read_cluster(source, num_devices=num_devices, dtype=dtype)
    if num_devices is not None and not 1 <= num_devices <= MOST_DEVICES:
        raise ConfigError(f"num_devices {num_devices}: give at least 1 and at most {MOST_DEVICES}")
    from gpp_plugin.profile.machine import read_machine

    if dtype is not None and dtype not in TRAINING_DTYPES:
        raise ConfigError(f"dtype {dtype!r}: is not known; give one of {', '.join(TRAINING_DTYPES)}")
    import torch  # noqa: TID251 - this machine's devices are torch's

    return read_machine(num_devices, dtype=getattr(torch, TRAINING_DTYPES[dtype or USUAL_DTYPE]))


def _text_lengths(options: RequestOptions) -> tuple[list[int], int]:
    """Return the usual lengths of texts, increasing, and the longest.

    Raises:
        ConfigError: there is none, or one is below 1.
    """
    given = options.get("length", USUAL_LENGTH)
    usual = [given] if isinstance(given, int) else sorted(given)
    longest = options.get("max_length") or max(usual, default=0)
    if not usual or usual[0] < 1 or not usual[-1] <= longest <= LONGEST_LENGTH:
        raise ConfigError(
            f"length {usual}, max_length {longest}: give lengths of 1 to {LONGEST_LENGTH} tokens, and no max_length "
            "below them"
        )
    return usual, longest


def _module_and_batches(
    model: str | Path | nn.Module, loss_unit: int, options: RequestOptions
) -> tuple[nn.Module, list[Mapping[str, Any]]]:
    """Return the module to capture and loss units for it: of the usual lengths, and last of the longest.

    Raises:
        ConfigError: as `make_request`.
    """
    given = options.get("length", USUAL_LENGTH)
    usual, longest = _text_lengths(options)
    batch = options.get("sample_batch")
    if isinstance(model, (str, Path)):
        path = config_path(model)
        if batch is not None:
            raise ConfigError("sample_batch: is for a module; a configuration's batch is made by length")
        asked = "length" in options or options.get("max_length") is not None
        module, batches = huggingface_model(
            path, loss_unit=loss_unit, lengths=[*usual, longest], are_asked=asked
        )
        return module, list(batches)
    if not callable(getattr(model, "forward", None)):
        raise ConfigError(
            f"model: a {type(model).__name__} is neither a module nor the name or path of a model; give one of these"
        )
    if batch is None:
        raise ConfigError(
            f"sample_batch: missing; a {type(model).__name__} is captured on a batch as it is trained on, a dict of "
            "tensors with the samples along axis 0"
        )
    from gpp_plugin.capture.tracing.sample_batches import (
        as_unit,
        is_counted,
        length_entries,
        resize_batch,
        with_lengths,
    )
    from gpp_plugin.model.graph.stage_graph import prepare_batch

    prepared = prepare_batch(model, batch)
    unit = resize_batch(prepared, loss_unit) if is_counted(prepared) else as_unit(prepared, loss_unit)
    if isinstance(given, int) and options.get("max_length") is None:
        return model, [unit, unit]
    texts = [key for keys in length_entries(unit, longest).values() for key in keys]
    return model, [with_lengths(unit, dict.fromkeys(texts, length)) for length in (*usual, longest)]
