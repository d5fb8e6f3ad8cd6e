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

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpp_plugin.config.block import LengthsConfig, PlanOptions
from gpp_plugin.config.key_names import ARGUMENT_NAMES, place_of, use_names
from gpp_plugin.config.reader import check_sizes, read_options
from gpp_plugin.errors import ConfigError
from gpp_plugin.ir import serialize
from gpp_plugin.ir.cluster import Cluster
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.tensors import TRAINING_DTYPES
from gpp_plugin.ir.timeline import Timeline
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
from gpp_plugin.plan.costs.estimate import finished_plan, play_step, prices_on
from gpp_plugin.plan.costs.memory_formula import plan_beside_messages
from gpp_plugin.plan.edge_transports import NATIVE, note_edge_transports
from gpp_plugin.plan.make import StageDraft, build_plan
from gpp_plugin.plan.plan_form import check_form, read_plan, write_plan
from gpp_plugin.plan.refine.share_ranks import share_ranks
from gpp_plugin.plan.registry import make_plan, plan_open, request_for
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.plan.validate_plan import validate_for
from gpp_plugin.rehearse.rehearsal import make_async_programs, programs_of_plan
from gpp_plugin.report import timeline_chart
from gpp_plugin.report.plan_text import format_plan
from gpp_plugin.schedule.build_graph import lengthened
from gpp_plugin.schedule.orders.async_1f1b import windows_of
from gpp_plugin.simulate.predict import (
    AsyncPrediction,
    PrefetchPrediction,
    num_windows,
    predict_prefetch,
)

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


def plan(
    model: str | Path | nn.Module,
    cluster: ClusterSource = "dgx_h100",
    *,
    sample_batch: Mapping[str, Any] | None = None,
    sizes: Mapping[str, int | str] | None = None,
    **options: Any,
) -> PipelinePlan:
    """Return a plan for a model on a cluster that need not be there; the model's weights are neither read nor made.

    Args:
        model: a library model (``mmt``), a HuggingFace configuration (its name in the package, its file or
            directory), or a module, with ``sample_batch``.
        cluster: where it runs; see `ClusterSource`.
        sample_batch: for a module: a batch as it is trained on, samples along axis 0. Its texts take the lengths of the
            options where there are any.
        sizes: for a library model: dimensions that differ from the paper's, e.g. ``{"branches": 8}``.
        options: keys of the ``graph_pipeline`` block that plans depend on (docs/configuration.md), as `planner`,
            ``stages`` or ``memory``; those of an object also by themselves, as ``memory_limit_gb``. Beside them
            ``num_devices``, ``dtype``, ``mini_batch``, ``loss_unit``, ``zero_stage``, ``length`` and ``max_length``
            (`PlanOptions`). None is the default.

    Raises:
        ConfigError: an argument is wrong, or there is no such model or cluster.
        CaptureError: the module cannot be captured.
        PlanError, PlanInfeasible: no plan fulfils the request; the message says what to change.
    """
    request = make_request(model, cluster, sample_batch=sample_batch, sizes=sizes, **options)
    choices = {
        key: options[key] for key in ("planner", "schedule", "slicing", "p2p") if options.get(key) is not None
    }
    return plan_for(request, **choices)


def make_request(
    model: str | Path | nn.Module,
    cluster: ClusterSource = "dgx_h100",
    *,
    sample_batch: Mapping[str, Any] | None = None,
    sizes: Mapping[str, int | str] | None = None,
    **options: Any,
) -> PlanRequest:
    """Return the input of planners: the model as blocks with costs, the cluster, and all limits.

    Args:
        options: as of `plan`; blocks and memory are counted for ``planner`` and ``schedule``.

    Raises:
        ConfigError, CaptureError, PlanError: as `plan`.
    """
    # Costs are those of the first device; `CostModel` says what blocks take on another. A library model brings its
    # costs from a paper's dimensions; anything else is captured on one loss unit, and its costs follow from operator
    # counts at 1, 2, 4 .. mini_batch samples.
    with use_names(ARGUMENT_NAMES):
        config = read_options(options)
        devices = _cluster(cluster, config.num_devices, config.dtype)
        device = devices.devices[0]
        mini_batch, loss_unit = _batch_sizes(model, len(devices.devices), config)
        if _is_library_model(model):
            graph, profile = library_model(
                str(model), sizes or {}, device, mini_batch=mini_batch, granularity=options.get("granularity")
            )
        else:
            if sizes:
                raise ConfigError("sizes: is for library models; edit the model's own configuration instead")
            module, batches = _module_and_batches(model, sample_batch, loss_unit, config)
            graph, profile = captured_model(
                module, batches, device, mini_batch=mini_batch, granularity=config.granularity
            )
        micro = config.micro_batch_sizes
        by_module = micro if isinstance(micro, dict) else {"*": micro} if isinstance(micro, int) else {}
        return request_for(
            config,
            graph=graph,
            profile=profile,
            cluster=devices,
            num_ranks=len(devices.devices),
            mini_batch=mini_batch,
            loss_unit=loss_unit,
            micro_batch_sizes={k: mini_batch if size == "full" else size for k, size in by_module.items()},
            zero_stage=config.zero,
            # a loss that compares samples is of the whole mini-batch
            is_unit_open=config.loss_unit is None and loss_unit < mini_batch,
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

    _check_is_request(request)

    def make(request: PlanRequest) -> PipelinePlan:
        made = schedule_plan(make_plan(planner, request), request, schedule=schedule, slicing=slicing)
        return share_ranks(made, request, schedule=schedule)

    def finish(request: PlanRequest) -> PipelinePlan:
        return finished_plan(note_edge_transports(plan_beside_messages(request, make), p2p), request)

    with use_names(ARGUMENT_NAMES):
        made = plan_open(planner, request, finish)
        check_form(made)  # what would not be read again is a fault of the planner's
        return made


def simulate(plan: PipelinePlan, cluster: ClusterSource | None = None) -> Timeline:
    """Return the predicted timeline of a plan: of one mini-batch, or, in mode ``async``, of several in a row.

    Args:
        cluster: links that messages take; by default those that the plan was made for. A plan that says of none has
            messages, reductions and optimizer steps that take no time.

    Raises:
        ConfigError: the plan has no predicted times, or there is no such cluster.
        PlanError, ScheduleError: the plan does not fit the cluster, or cannot run.
    """
    _check_times(plan)
    found = play_step(plan, prices_on(plan, _links(plan, cluster)))
    return found if isinstance(found, Timeline) else found.timeline


def simulate_async(plan: PipelinePlan, cluster: ClusterSource | None = None) -> AsyncPrediction:
    """Return the same for a plan of mode ``async``, with the time of a mini-batch while the pipeline is full.

    Raises:
        ConfigError, PlanError, ScheduleError: as `simulate`.
    """
    _check_times(plan)
    found = play_step(plan, prices_on(plan, _links(plan, cluster)))
    if isinstance(found, Timeline):
        raise ConfigError(f"mode: the plan's is {plan.mode}; use simulate")
    return found


def simulate_ahead(plan: PipelinePlan, cluster: ClusterSource | None = None) -> PrefetchPrediction | None:
    """Return what a mini-batch takes where frozen stages run the next one's forwards; None where none can.

    Raises:
        ConfigError, PlanError, ScheduleError: as `simulate`.
    """
    _check_times(plan)
    prices = prices_on(plan, _links(plan, cluster))
    ahead = predict_prefetch(plan, cluster=prices.cluster)
    if ahead is None:
        return None
    # reductions and steps come behind the tasks of all ranks, whichever mini-batch these are of
    whole_us = simulate(plan, cluster).iteration_us
    return replace(ahead, whole_us=whole_us, steady_us=ahead.steady_us + whole_us - ahead.whole_us)


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
        tell: called with each line of progress.

    Raises:
        ConfigError: an argument is wrong, or the messages do not fit this machine.
        PlanError, ScheduleError: the plan does not hold what a rehearsal needs, or is unsafe.
        RuntimeFailure: a rank failed.
    """
    from gpp_plugin.rehearse.rehearsal import RehearsalSettings, rehearse_plan

    _check_is_plan(plan)
    with use_names(ARGUMENT_NAMES):
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
        _check_is_request(request)
        validate_for(plan, request)
    else:
        check_form(plan)
    if plan.mode == "async":
        make_async_programs(plan)
    else:
        programs_of_plan(plan)


def format_timeline(
    timeline: Timeline, plan: PipelinePlan, *, width: int = 96, screen: int | None = None
) -> str:
    """Return a timeline as a Gantt picture in text, with each rank's busy share.

    Args:
        plan: the one that was simulated or rehearsed.
        width: columns of the time axis.
        screen: columns of everything, instead.
    """
    _check_kind("timeline", timeline, Timeline, "make one with simulate(plan)")
    _check_is_plan(plan)
    if plan.mode == "async" and timeline.source != "measured":
        plan = lengthened(plan, num_windows(windows_of(plan)))
    return timeline_chart.format_timeline(timeline, plan, width=width, screen=screen)


def save(value: PipelinePlan | Timeline, path: str | Path) -> None:
    """Write a plan or a timeline to a JSON file; a plan that could not be read again is not written.

    Raises:
        GppError: what is wrong with the plan, or no file can be written there.
    """
    _check_kind("value", value, (PipelinePlan, Timeline), "give what plan() or simulate() returns")
    if not isinstance(path, str | Path) or not str(path).strip() or "\0" in str(path):
        raise ConfigError(f"path: {path!r} is no path; give that of a file to write")
    try:
        serialize.output_path(str(path))
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"path: {error}") from None
    if isinstance(value, PipelinePlan):
        write_plan(value, path)
    else:
        serialize.save(value, path)


def load_plan(path: str | Path) -> PipelinePlan:
    """Read a plan that `save` or ``gpp plan --out`` wrote.

    Raises:
        GppError: the file is missing, or no plan of this release; the message names it.
    """
    return read_plan(path)


def _check_kind(name: str, value: object, kinds: type | tuple[type, ...], fix: str) -> None:
    """Refuse an argument of another type."""
    if not isinstance(value, kinds):
        raise ConfigError(f"{name}: {str(value)[:80]!r} is a {type(value).__name__}; {fix}")


def _check_is_plan(value: object) -> None:
    """Refuse what is no plan: mostly the name of a file that holds one."""
    _check_kind("plan", value, PipelinePlan, "read a file with load_plan(path)")


def _check_is_request(value: object) -> None:
    _check_kind("request", value, PlanRequest, "make one with make_request(model, cluster)")


def _check_times(plan: PipelinePlan) -> None:
    _check_is_plan(plan)
    if not any(stage.forward_us for stage in plan.stages):
        raise ConfigError("its stages have no forward_us; make the plan with gpp plan")


def _links(plan: PipelinePlan, cluster: ClusterSource | None) -> Cluster | None:
    return None if cluster is None else _cluster(cluster, plan.num_ranks)


def _is_library_model(model: str | Path | nn.Module) -> bool:
    return isinstance(model, str) and model in MODELS


def _batch_sizes(model: str | Path | nn.Module, num_devices: int, config: PlanOptions) -> tuple[int, int]:
    """Return the samples of a mini-batch and of a loss unit, those that are usual where nothing is said.

    Raises:
        ConfigError: they do not divide, or the model's configuration is none.
    """
    mini_batch, loss_unit = config.mini_batch, config.loss_unit
    if mini_batch is None:
        mini_batch = max(USUAL_MINI_BATCH, SAMPLES_A_DEVICE * num_devices)
        mini_batch = -(-mini_batch // (loss_unit or 1)) * (loss_unit or 1)
    if loss_unit is None and isinstance(model, (str, Path)) and not _is_library_model(model):
        usual, _ = _text_lengths(config)
        loss_unit = usual_loss_unit(
            config_path(model), mini_batch=mini_batch, length=usual[-1], num_devices=num_devices
        )
    loss_unit = loss_unit or mini_batch
    check_sizes(config, mini_batch, loss_unit)
    return mini_batch, loss_unit


def _cluster(source: ClusterSource, num_devices: int | None, dtype: str | None = None) -> Cluster:
    """Return the cluster that ``source`` means, with as many devices as are wanted."""
    if isinstance(source, Cluster):
        if dtype not in (None, source.devices[0].dtype):
            raise ConfigError(
                f"{place_of('dtype')}: {dtype}, and cluster {source.name!r} has speeds in {source.devices[0].dtype}; "
                "give its description instead"
            )
        if num_devices not in (None, len(source.devices)):
            raise ConfigError(
                f"{place_of('num_devices')}: {num_devices}, and cluster {source.name!r} has {len(source.devices)} "
                "devices; give its description instead to add or leave out nodes"
            )
        return source
    if source != "auto":
        return read_cluster(source, num_devices=num_devices, dtype=dtype)
    if num_devices is not None and num_devices > MOST_DEVICES:
        raise ConfigError(
            f"{place_of('num_devices')}: {num_devices} is not valid; give at most {MOST_DEVICES}"
        )
    import torch  # noqa: TID251 - this machine's devices are torch's

    from gpp_plugin.profile.machine import read_machine

    return read_machine(num_devices, dtype=getattr(torch, TRAINING_DTYPES[dtype or USUAL_DTYPE]))


def _text_lengths(config: PlanOptions) -> tuple[list[int], int]:
    """Return the usual lengths of texts, increasing, and the longest.

    Raises:
        ConfigError: it is longer than a batch can be made.
    """
    lengths = config.lengths or LengthsConfig(max=USUAL_LENGTH)
    # lengths by entry of a batch are for training alone
    usual, longest = sorted(one for one in lengths.planned if isinstance(one, int)), lengths.max
    assert isinstance(longest, int) and usual
    if longest > LONGEST_LENGTH:
        raise ConfigError(
            f"{place_of('lengths.max')}: {longest} is not valid; give at most {LONGEST_LENGTH} tokens"
        )
    return usual, longest


def _module_and_batches(
    model: str | Path | nn.Module, batch: Mapping[str, Any] | None, loss_unit: int, config: PlanOptions
) -> tuple[nn.Module, list[Mapping[str, Any]]]:
    """Return the module to capture and loss units for it: of the usual lengths, and last of the longest.

    Raises:
        ConfigError: as `make_request`.
    """
    usual, longest = _text_lengths(config)
    if isinstance(model, (str, Path)):
        path = config_path(model)
        if batch is not None:
            raise ConfigError("sample_batch: is for a module; a configuration's batch is made by length")
        module, batches = huggingface_model(
            path, loss_unit=loss_unit, lengths=[*usual, longest], are_asked=config.lengths is not None
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
    if config.lengths is None:
        return model, [unit, unit]
    texts = [key for keys in length_entries(unit, longest).values() for key in keys]
    return model, [with_lengths(unit, dict.fromkeys(texts, length)) for length in (*usual, longest)]
