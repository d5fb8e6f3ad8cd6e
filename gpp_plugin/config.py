"""Owns the ``graph_pipeline`` block of the DeepSpeed JSON: the only reader of user configuration.

A wrong configuration is refused with one line per problem: the key path, the value, the nearest right
name, and what to write instead. A key is accepted with a value other than its default only if this
release does what it says.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from gpp_plugin.errors import ConfigError, ReadError, nearest
from gpp_plugin.extensions import (
    BACKEND_WORDS,
    BACKENDS,
    PLANNERS,
    SCHEDULES,
    TRANSPORTS,
    find_schedule,
    named_backends,
    planner_granularity,
)
from gpp_plugin.ir.samples import nearest_divisors
from gpp_plugin.ir.serialize import SMALL_BYTES, parse_json, read_text, shown_path
from gpp_plugin.ir.typed_leaves import MOST_COUNT, show
from gpp_plugin.schedule.names import is_schedule_name, schedule_names

BLOCK = "graph_pipeline"
_WHAT = "a DeepSpeed configuration"
_MOST_COMMENTED = 256 << 10
"""Characters of JSON with comments, whose reader is slow."""

Granularity = Literal["layer", "sub_layer", "node"]
Mode = Literal["sync", "async"]
Recompute = Literal["auto", "off", "full"]
Swap = Literal["auto", "off"]
Colocate = Literal["auto", "off"]
CacheKind = Literal["auto", "data", "sequence"]
LossMean = Literal["units", "tokens"]
UnitOrderName = Literal["balanced", "given"]
Auto = Literal["auto"]
Count = Annotated[int, Field(ge=1, le=MOST_COUNT)]
_PLANNER = "the name of a planner"
_SCHEDULE = "the name of a schedule"
_TRANSPORT = "the name of a transport"
_BACKENDS = '"off", "auto", a list of backends, or {"stage name": "backend", ...}'


_COMPILE = 'true, false, "auto", or {"path of a module": true, ...}'


def _one_of(names: Any) -> str:
    return "one of " + ", ".join(get_args(names))


class _Block(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class MemoryConfig(_Block):
    """How much memory a rank may use, and what may be done to stay below it.

    Args:
        limit_gb: most GB (10^9 bytes) of one rank that a plan may use; "auto" is what the device has,
            on CUDA what is free of it before the first tensor, less a reserve for communicators and fragmentation.
        recompute: "auto" runs forwards again where a plan needs it to fit; "full" runs every block again before its
            backward, whatever memory there is; "off" never does.
        swap: "auto" moves saved tensors to host memory where a plan needs it to fit; "off" never does.
    """

    limit_gb: Auto | Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        default="auto", description='"auto" or a number of GB above 0'
    )
    recompute: Recompute = Field(default="auto", description=_one_of(Recompute))
    swap: Swap = Field(default="auto", description=_one_of(Swap))

    @property
    def optimization(self) -> tuple[str, ...]:
        """Return what a planner may use to fit (`PlanRequest.memory_optimization`)."""
        allowed = {"recompute": self.recompute, "swap": self.swap}
        return tuple(way for way, choice in allowed.items() if choice != "off")


LengthOf = Count | dict[str, Count]
"""How long sequences are: all of them, or those of each key of the batch."""


class LengthsConfig(_Block):
    """How long the sequences of a job are: what to plan for, and what to refuse.

    A length is the last axis of an entry of the batch: of token ids, masks and labels. A number is that of all texts;
    an object gives each its own, ``{"input_ids": 512, "labels": 128}``, and entries that are as long as one of these in
    the sample batch (its mask) go with it.

    Args:
        max: the longest; memory is planned for it, and a longer mini-batch is refused before it runs.
        typical: some of the usual ones, each counted once; the plan is for the mean of their times. None: ``max``.
    """

    max: LengthOf = Field(description='a whole number of at least 1, or {"key of the batch": number, ...}')
    typical: list[LengthOf] = Field(
        default=[], description='a list of numbers, or of objects like that of "max", none of them larger'
    )

    @property
    def planned(self) -> tuple[int | dict[str, int], ...]:
        """Return the lengths whose mean time is planned for."""
        return tuple(self.typical) or (self.max,)


class CheckpointConfig(_Block):
    """How `save_checkpoint` writes and what it keeps.

    Args:
        keep_last: so many of the newest checkpoints stay, of those that the engine named itself (``global_step<n>``);
            null keeps all. Tags of yours are never removed.
        keep_every: of the others those of every so many steps stay as well; null keeps none of them.
        async_save: copies are taken at once, in host memory, and written while training goes on. The checkpoint is
            there, whole, when it is; the next save, load or `destroy` waits for it and says what went wrong.
    """

    keep_last: Count | None = Field(default=None, description="null or a whole number of at least 1")
    keep_every: Count | None = Field(default=None, description="null or a whole number of at least 1")
    async_save: bool = Field(default=False, description="true or false")


class GenerateConfig(_Block):
    """How `engine.generate` keeps the keys and values of attention, and keeps stages busy.

    Args:
        cache: where those of a sequence lie: "data" on the rank that decodes it; "sequence" on all ranks of each stage,
            cut along the sequence (Cache Parallelism), for decoders that attend to all positions. "auto" is "data", but
            "sequence" where whole caches would not fit into ``memory.limit_gb``, or what CUDA has free.
        block: neighbouring positions that lie on one rank, with "sequence".
        micro_batches: in so many parts of the prompts stages generate in turns, so that one computes while others wait
            for its tokens; the tokens stay the same. "auto" is one for each stage's rank, but at most one a prompt.
            Where caches are cut along the sequence it is one.
    """

    cache: CacheKind = Field(default="auto", description=_one_of(CacheKind))
    block: Count = Field(default=16, description="a whole number of at least 1")
    micro_batches: Count | Literal["auto"] = Field(
        default=1, description='a whole number of at least 1, or "auto"'
    )


class GraphPipelineConfig(_Block):
    """The ``graph_pipeline`` block, checked.

    Args:
        enabled: false leaves the job to stock DeepSpeed.
        planner: which planner partitions the model.
        stages: exactly that many stages, or what the planner finds best. More than ranks: ranks hold several.
        virtual_stages: stages that each group of ranks holds: 1, that many (interleaved), or "auto", as many as make
            the step shortest in simulation.
        colocate: "auto" may place the stages of a branch on the ranks of other stages, where the simulated step is
            shorter; "off" does not.
        data_parallel: ranks of each stage, or what the planner finds best.
        tensor_parallel: ranks that compute the same samples of a stage together, each with a part of its heads,
            features and vocabulary: 1, a number for all stages that can be divided so, a number by module path (of the
            stages that hold these modules, with whatever else lands in them; all other stages 1), or "auto", stage by
            stage what makes the step shortest in simulation.
        schedule: order of the tasks of every stage (`schedule.names`); "auto" is the shortest in
            simulation that memory allows.
        micro_batch_sizes: samples a stage takes at a time: for all stages, or by stage name
            ("full" is the whole mini-batch). "auto" is one loss unit a rank, as in DeepSpeed, where the
            mini-batch has several; "search" lets the planner choose any size that divides it.
        granularity: size of the blocks that are never split: a layer, half of one, or an operator ("node"). Where
            it is not given it is a layer; for planner dawnpiper, as in its paper, an operator.
        slicing: whether the first micro-batches' forwards run in halves: "auto" where that is shorter, "on", "off",
            or how many of them.
        memory: what a rank may use, and what may be done to stay below it.
        lengths: how long sequences are, usually and at most; null plans for the sample batch's alone.
        cluster: a file, or a description in place; "auto" is what the ranks find: on CUDA free memory, and NVLink,
            PCIe and network, whose speeds are measured once for a kind of cluster.
        plan: a plan made before or written by hand: a file, or in place.
        profile_dir: where measured costs are kept; null keeps them in the user's cache.
        loss_mean: "units" weighs the losses of a step equally; "tokens" is the sum over all labelled tokens of the
            mini-batch divided by their number, as HuggingFace's Trainer has it in one process, for models that take
            `num_items_in_batch`.
        units: how many items `train_batch` takes from the iterator, each one loss unit as the collator made it, of
            whatever length and number of samples; null takes batches until they hold ``train_batch_size`` samples.
            ``train_micro_batch_size_per_gpu`` is then the samples of a typical unit, which the plan is made for.
        unit_order: in which order the ``units`` of a mini-batch run, and so which rank of a stage runs which of them.
            "balanced" is the one that is shortest by what they are predicted to cost, of their sizes alone, so that
            every rank chooses alike; "given" takes them as they come. Losses and gradients are the same but for the
            rounding of sums; outputs of `eval_batch` come back in the order in which units were given.
        mode: "sync" steps once a mini-batch; "async" after every micro-batch, on each stage, with a pipeline that never
            drains (PipeDream): a gradient is then as many updates old as the stage holds micro-batches beside it.
        vertical_sync: in mode async, a micro-batch uses weights of the same age on every stage.
        p2p: what carries messages between stages: "native", our own transport; "megatron", megatron-core's
            `P2PCommunicator` on the edges that it can carry (`plan.edge_transports`); or that of another package.
        comm_timeout_s: seconds after which a rank gives up on a message over gloo, and on ranks that are stopped, are
            outside of the engine's calls, or wait elsewhere; one that is at work (it captures, compiles, saves) is
            waited for. Given, it is also how long ranks wait for all to join; to connect two of them may take 60 s.
            NCCL waits for ten of the planned mini-batches, 600 s or this, whichever is longest.
        max_skipped_steps: steps running that may be skipped because gradients are not finite, before the job ends with
            an error; null goes on for ever. While a dynamic loss scale sinks (fp16) they are not counted.
        locate_nan: look at what every operator returns, and name the module and micro-batch in which a number that is
            not finite first appears; a step then takes several times as long.
        repeat_steps: "suspicious" runs a mini-batch again before its step where the gradient's norm is far out of the
            usual range of the last hundred steps, or not finite; a number n does so with every n-th step as well. A
            rank that computes something else from the same inputs is named, and nothing is stepped. Checksums of what
            every task is given and makes are kept for it, no sum over ranks begins before the last backward has ended,
            and no frozen branch runs ahead.
        trace_path: where the measured timeline of each mini-batch is written, as a Chrome trace; `{step}` in the name
            makes one file a step; null writes none.
        seed: of the parameters of a model built on the meta device, of dropout and of shuffling.
        weights: safetensors directory for a model built on the meta device.
        verify: before training, the loss and the gradients of what was captured are compared with the module's own on
            the sample batch, in at most a fifth of start-up; false skips that.
        eager: modules, by path, that are not traced but run as they are: each is one block that takes whole loss units.
            ``*`` stands for any one part of a path. Modules whose tracing fails are kept whole without being asked for;
            the log names them.
        loader_workers: processes of each rank that load ``training_data`` ahead; 0 loads in the rank itself. "auto" is
            up to four where ranks compute on CUDA, and none where the cores compute.
        checkpoint: how checkpoints are written, and which of them stay.
        look_ahead: mini-batches that frozen stages run ahead, where these read nothing but the data: 1 lets them run
            the forwards of the next mini-batch while the others train the present one, and takes it one call early from
            whatever `train_batch` reads; 0 does not. "auto" is 1 for ``training_data``, which the engine loads, and 0
            for an iterator of yours. Results are the same.
        generate: where `engine.generate` keeps what attention reads of the tokens so far, and in how many parts of the
            prompts its stages take turns.
        backends: what stages that train nothing (frozen towers, in training and evaluation) run on: "off" is torch's
            operators; "auto" the fastest by measurement of all backends that are installed, a list the fastest of
            those; an object names one for a stage. Results differ by rounding (docs/backends.md).
        compile: whether blocks that train run as compiled code (inductor), each distinct one compiled once: true, those
            of some modules alone (``{"language_model": true}``), or "auto", those that were measured to be faster by
            more than noise. Starting takes tens of seconds longer where nothing is in the compiler's cache.
    """

    enabled: bool = Field(default=True, description="true or false")
    planner: str = Field(default="auto", description=_PLANNER)
    stages: Auto | Count = Field(default="auto", description='"auto" or a whole number of at least 1')
    virtual_stages: Auto | Count = Field(default=1, description='"auto" or a whole number of at least 1')
    colocate: Colocate = Field(default="off", description=_one_of(Colocate))
    data_parallel: Auto | Count = Field(default="auto", description='"auto" or a whole number of at least 1')
    tensor_parallel: Auto | Count | dict[str, Count] = Field(
        default=1,
        description='"auto", a whole number of at least 1, or {"module path": number, ...}',
    )
    schedule: str = Field(default="auto", description=_SCHEDULE)
    micro_batch_sizes: Literal["auto", "search"] | Count | dict[str, Count | Literal["full"]] = Field(
        default="auto",
        description='"auto", "search", a number of samples for all stages, or '
        '{"stage name, or * for all": number or "full", ...}',
    )
    granularity: Granularity = Field(default="layer", description=_one_of(Granularity))
    slicing: Literal["auto", "on", "off"] | Count = Field(
        default="auto", description='"auto", "on", "off" or a number of micro-batches of at least 1'
    )
    memory: MemoryConfig = Field(
        default=MemoryConfig(), description="an object with limit_gb, recompute, swap"
    )
    lengths: LengthsConfig | None = Field(default=None, description="null, or an object with max, typical")
    cluster: str | dict[str, Any] = Field(default="auto", description='"auto", a file name, or an object')
    plan: str | dict[str, Any] | None = Field(default=None, description="null, a file name, or an object")
    profile_dir: str | None = Field(default=None, description="null or a directory name")
    loss_mean: LossMean = Field(default="units", description=_one_of(LossMean))
    units: Count | None = Field(default=None, description="null or a whole number of at least 1")
    unit_order: UnitOrderName = Field(default="balanced", description=_one_of(UnitOrderName))
    mode: Mode = Field(default="sync", description=_one_of(Mode))
    vertical_sync: bool = Field(default=False, description="true or false")
    p2p: str = Field(default="native", description=_TRANSPORT)
    comm_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        default=60.0, description="a number of seconds above 0"
    )
    max_skipped_steps: Count | None = Field(default=20, description="null or a whole number of at least 1")
    locate_nan: bool = Field(default=False, description="true or false")
    repeat_steps: Literal["off", "suspicious"] | Count = Field(
        default="off", description='"off", "suspicious" or a number of steps of at least 1'
    )
    trace_path: str | None = Field(default=None, description="null or a file name")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        default=0, description="a whole number from 0 to 2^63 - 1"
    )
    weights: str | None = Field(default=None, description="null or a directory with safetensors files")
    verify: bool = Field(default=True, description="true or false")
    eager: list[str] = Field(default=[], description='a list of module paths, like ["layers.*.router"]')
    loader_workers: Auto | Annotated[int, Field(ge=0)] = Field(
        default="auto", description='"auto" or a whole number of at least 0'
    )
    checkpoint: CheckpointConfig = Field(
        default=CheckpointConfig(), description="an object with keep_last, keep_every, async_save"
    )
    look_ahead: Auto | Annotated[int, Field(ge=0, le=1)] = Field(default="auto", description='"auto", 0 or 1')
    generate: GenerateConfig = Field(
        default=GenerateConfig(), description="an object with cache, block, micro_batches"
    )
    backends: Literal["off", "auto"] | list[str] | dict[str, str] = Field(
        default="off", description=_BACKENDS
    )

    compile: bool | Auto | dict[str, bool] = Field(default=False, description=_COMPILE)

    @model_validator(mode="before")
    @classmethod
    def _fill_granularity(cls, given: Any) -> Any:
        if isinstance(given, dict) and isinstance(given.get("planner"), str):
            return {"granularity": planner_granularity(given["planner"]), **given}
        return given

    @field_validator("planner")
    @classmethod
    def _is_planner(cls, name: str) -> str:
        if name not in PLANNERS:
            raise ValueError("no such planner")
        PLANNERS.check(name)
        return name

    @field_validator("schedule")
    @classmethod
    def _is_schedule(cls, name: str) -> str:
        if not is_schedule_name(name):
            raise ValueError("no such schedule")
        SCHEDULES.check(name)
        return name

    @field_validator("p2p")
    @classmethod
    def _is_transport(cls, name: str) -> str:
        if name not in TRANSPORTS:
            raise ValueError("no such transport")
        TRANSPORTS.check(name)
        return name

    @field_validator("backends")
    @classmethod
    def _are_backends(cls, given: Any) -> Any:
        for name in named_backends(given):
            if name not in BACKENDS:
                raise ValueError("no such backend")
            BACKENDS.check(name)
        return given


class BatchSizes(NamedTuple):
    """What the configuration says about the mathematics of a step, in samples.

    Args:
        mini_batch: samples of one optimizer step over the whole graph (B).
        loss_unit: samples one loss is computed on (u); the step's loss is the mean over B/u of them.
        gradient_accumulation_steps: as given; divides B/u.
    """

    mini_batch: int
    loss_unit: int
    gradient_accumulation_steps: int | None


def read_config(ds_config: Mapping[str, Any] | str | Path) -> GraphPipelineConfig | None:
    """Return the checked ``graph_pipeline`` block, or None where there is none or it is not enabled.

    Args:
        ds_config: the DeepSpeed configuration: a dict, a file name, or base64 text (as its launcher
            passes it).
    Raises:
        ConfigError: one line per problem, among them a top-level key that looks like a mistyped
            ``graph_pipeline``.
    """
    plain = load_deepspeed_json(ds_config)
    # DeepSpeed ignores keys that it does not know: a block called "graphPipeline" would train without
    # a pipeline, and nobody would be told. So keys near the name are refused, also where the right
    # one is there as well.
    mistyped = [
        f"{key}: unknown key, and DeepSpeed would ignore it; did you mean {BLOCK!r}?"
        for key in plain
        if _looks_like_block(key)
    ]
    if mistyped:
        raise ConfigError("\n".join(mistyped))
    if BLOCK not in plain:
        return None
    block = plain[BLOCK]
    if not isinstance(block, Mapping):
        raise ConfigError(
            f"{BLOCK}: {show(block)} is not an object; write {{}} for the defaults or remove the key"
        )
    try:
        config = GraphPipelineConfig.model_validate({str(key): value for key, value in block.items()})
    except ValidationError as error:
        raise ConfigError("\n".join(_problems(error))) from None
    _check_mode(config)
    _check_repetition(config)
    _check_sharing(config)
    if config.locate_nan and config.backends != "off":
        raise ConfigError(
            f"{BLOCK}.locate_nan: true looks at what every operator returns, and backends {show(config.backends)} run "
            'them out of sight; set backends to "off" while you look'
        )
    if config.compile is not False:
        config = _with_compile(config)
    if config.lengths is not None:
        _check_lengths(config.lengths)
    if config.units is not None:
        _check_units(config)
        config = config.model_copy(update={"slicing": "off"})  # a half of a unit is cut
    return config if config.enabled else None


def _with_compile(config: GraphPipelineConfig) -> GraphPipelineConfig:
    """Return the configuration of a job with compiled stages, which run whole forwards and backwards alone.

    Raises:
        ConfigError: it asks for what looks into a stage's code or cuts its tasks.
    """
    memory = config.memory
    splits = config.schedule in SCHEDULES and find_schedule(config.schedule).splits_backward
    refused = {
        "memory.recompute": (
            "full",
            memory.recompute == "full",
            "what is compiled is not run again in parts",
        ),
        "schedule": (config.schedule, splits, "a compiled backward is not made in two parts"),
        "slicing": (
            config.slicing,
            config.slicing not in ("auto", "off"),
            "halves would be compiled beside the whole",
        ),
        "mode": ("async", config.mode == "async", "its weights change between a forward and its backward"),
        "lengths": ("given", config.lengths is not None, "what is compiled is for one length"),
        "units": (config.units, config.units is not None, "each shape of a unit would be compiled"),
        "locate_nan": (True, config.locate_nan, "operators of compiled code are out of sight"),
        "tensor_parallel": (
            config.tensor_parallel,
            _asks_for_tensor_ranks(config.tensor_parallel),
            "what tensor ranks share out is not compiled",
        ),
        "granularity": ("node", config.granularity == "node", "compiling single operators gains nothing"),
    }
    for key, (value, is_wrong, reason) in refused.items():
        if is_wrong:
            raise ConfigError(
                f"{BLOCK}.compile: {show(config.compile)} does not go with {key} {show(value)}: {reason}; remove "
                "one of them"
            )
    alone = memory.model_copy(update={"recompute": "off", "swap": "off"})
    return config.model_copy(update={"memory": alone, "slicing": "off"})


def _asks_for_tensor_ranks(asked: str | int | Mapping[str, int]) -> bool:
    sizes = asked.values() if isinstance(asked, Mapping) else (asked,)
    return any(size != 1 for size in sizes)


def _check_lengths(lengths: LengthsConfig) -> None:
    """Refuse typical lengths that are longer than the longest, or of other keys."""
    for position, typical in enumerate(lengths.typical):
        path = f"{BLOCK}.lengths.typical[{position}]"
        if isinstance(typical, int) and isinstance(lengths.max, int):
            longer = typical > lengths.max
        elif (
            isinstance(typical, dict)
            and isinstance(lengths.max, dict)
            and typical.keys() == lengths.max.keys()
        ):
            longer = any(size > lengths.max[key] for key, size in typical.items())
        else:
            raise ConfigError(
                f"{path}: {show(typical)} is not of the form of {BLOCK}.lengths.max, {show(lengths.max)}; give "
                "numbers, or objects with the same keys"
            )
        if longer:
            raise ConfigError(
                f"{path}: {show(typical)} is longer than {BLOCK}.lengths.max, {show(lengths.max)}; raise max"
            )


def _check_sharing(config: GraphPipelineConfig) -> None:
    """Refuse ranks of several stages where they cannot run."""
    for key, value, default in (
        ("virtual_stages", config.virtual_stages, 1),
        ("colocate", config.colocate, "off"),
    ):
        if value == default:
            continue
        if config.mode != "sync":
            raise ConfigError(
                f"{BLOCK}.{key}: {show(value)} puts several stages on a rank by the times of mini-batches that end, "
                f'and mode {show(config.mode)} has none; set {key} to {show(default)}, mode to "sync", or say in '
                "plan.stages which ranks each stage has"
            )
        if config.p2p != "native":
            raise ConfigError(
                f"{BLOCK}.{key}: {show(value)} lets a rank hold several stages, which p2p {show(config.p2p)} cannot "
                f'run; set {key} to {show(default)}, or p2p to "native"'
            )


def _check_units(config: GraphPipelineConfig) -> None:
    """Refuse keys that contradict ``units``: nothing is cut below a unit, and each step is of whole ones."""
    wrong = {
        "micro_batch_sizes": (config.micro_batch_sizes, "auto"),
        "slicing": (config.slicing, "auto", "off"),
        "mode": (config.mode, "sync"),
        "p2p": (config.p2p, "native"),
    }
    for key, (value, *allowed) in wrong.items():
        if value not in allowed:
            raise ConfigError(
                f"{BLOCK}.{key}: {show(value)} is not possible with {BLOCK}.units, of which every rank runs one whole "
                f"unit at a time; give {' or '.join(map(show, allowed))}"
            )


def _check_repetition(config: GraphPipelineConfig) -> None:
    """Refuse steps that are run twice where a mini-batch is not all that runs until its step."""
    if config.repeat_steps == "off":
        return
    wrong = {"mode": (config.mode, "sync"), "look_ahead": (config.look_ahead, "auto", 0)}
    for key, (value, *allowed) in wrong.items():
        if value not in allowed:
            raise ConfigError(
                f"{BLOCK}.{key}: {show(value)} is not possible with {BLOCK}.repeat_steps, which runs a whole "
                f"mini-batch again before its step; give {' or '.join(map(show, allowed))}"
            )


def _check_mode(config: GraphPipelineConfig) -> None:
    """Refuse keys that contradict ``mode``."""
    if config.mode == "sync":
        if config.vertical_sync:
            raise ConfigError(
                f"{BLOCK}.vertical_sync: true has no meaning in mode sync, where all stages step at once; set mode to "
                '"async" or remove it'
            )
        return
    if config.look_ahead == 1:
        raise ConfigError(
            f"{BLOCK}.look_ahead: 1 is not possible in mode async, whose pipeline never drains; set mode to "
            '"sync" or remove it'
        )
    if config.loss_mean == "tokens":
        raise ConfigError(
            f'{BLOCK}.loss_mean: "tokens" is a mean over the mini-batch, and in mode async each micro-batch is a step; '
            'set loss_mean to "units", or mode to "sync"'
        )
    sizes = config.micro_batch_sizes
    wrong = {
        "schedule": (config.schedule, "auto", "1f1b"),
        "slicing": (config.slicing, "auto", "off"),
    }
    for key, (value, *allowed) in wrong.items():
        if value not in allowed:
            raise ConfigError(
                f"{BLOCK}.{key}: {show(value)} is not possible in mode async, which runs 1F1B of whole micro-batches; "
                f"give {' or '.join(map(show, allowed))}"
            )
    if sizes != "auto" and not isinstance(sizes, int):
        raise ConfigError(
            f"{BLOCK}.micro_batch_sizes: {show(sizes)} is not possible in mode async, where each micro-batch is one "
            'optimizer step of every stage; give one number, or "auto" for train_micro_batch_size_per_gpu'
        )


def load_deepspeed_json(ds_config: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """Return a DeepSpeed configuration as a dict, from what `deepspeed.initialize` accepts.

    Raises:
        ConfigError: it is neither a dict, nor a readable JSON file, nor base64 of JSON.
    """
    if isinstance(ds_config, Mapping):
        return dict(ds_config)
    if not isinstance(ds_config, (str, os.PathLike)):
        raise ConfigError(f"config: expected a dict or a file name, found {type(ds_config).__name__}")
    try:
        text = read_text(ds_config, what=_WHAT)
    except ReadError:
        decoded = _from_base64(str(ds_config))
        if decoded is None:
            raise
        text = decoded
    name = shown_path(ds_config)
    try:
        plain = parse_json(text, what=_WHAT, max_bytes=SMALL_BYTES)
    except ReadError as error:
        plain = _from_hjson(text) if isinstance(error.__cause__, json.JSONDecodeError) else None
        if plain is None:
            raise ReadError(f"{name}: {error}") from error.__cause__
    if not isinstance(plain, dict):
        raise ReadError(f"{name}: holds a {type(plain).__name__}; a DeepSpeed configuration is an object")
    return plain


def _from_base64(text: str) -> str | None:
    try:
        return base64.urlsafe_b64decode(text).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None


def _from_hjson(text: str) -> Any | None:
    """Read JSON with comments, which DeepSpeed's own reader takes."""
    try:
        # DeepSpeed parses with hjson, so comments and trailing commas are no errors to its users.
        import hjson
    except ImportError:  # comes with deepspeed; without it the strict reader's message stands
        return None
    if len(text) > _MOST_COMMENTED:
        return None
    try:
        plain = hjson.loads(text, object_pairs_hook=dict)
        return parse_json(hjson.dumpsJSON(plain), what=_WHAT)
    except (ValueError, RecursionError):
        return None


def _looks_like_block(key: Any) -> bool:
    """Say whether a top-level key other than ``graph_pipeline`` was probably meant to be it."""
    if not isinstance(key, str) or key == BLOCK:
        return False
    words = re.sub(r"([a-z])([A-Z])", r"\1_\2", key).lower()
    # "pipeline-graph" and "GraphPipeline" have the same words; what is left are typing
    # errors, "grpah_pipeline".
    if sorted(re.split(r"[^a-z0-9]+", words)) == sorted(BLOCK.split("_")):
        return True
    letters = re.sub(r"[^a-z0-9]", "", words)
    return difflib.SequenceMatcher(None, letters, BLOCK.replace("_", "")).ratio() >= 0.8


def _problems(error: ValidationError) -> list[str]:
    """Return one line per wrong key; a union's several complaints about one value are one problem."""
    # Pydantic says of {"micro_batch_sizes": {"loss": 0}} once for each form the value may have:
    #
    #   ("micro_batch_sizes", "literal['auto','search']")             not one of them
    #   ("micro_batch_sizes", "constrained-int")                      no whole number
    #   ("micro_batch_sizes", "dict[...]", "loss", "constrained-int") not at least 1
    #   ("micro_batch_sizes", "dict[...]", "loss", "literal['full']") not "full"
    #
    # Without the union's tags these are two paths, the whole and ".loss"; the longer one says where it is.
    lines: dict[str, str] = {}
    for item in error.errors(include_url=False):
        keys, field, choices = _locate(item["loc"])
        path = ".".join([BLOCK, *keys])
        if field is None:
            line = _unknown_key(path, keys, item["input"], choices)
        else:
            line = _wrong_value(path, item["input"], field)
        lines.setdefault(path, line)
    # A union complains about the whole value too, once for each form it may have.
    return [line for path, line in lines.items() if not any(other.startswith(f"{path}.") for other in lines)]


def _locate(loc: Sequence[int | str]) -> tuple[list[str], FieldInfo | None, list[str]]:
    """Return the key path of a pydantic location without union tags, its field, and its siblings."""
    fields = GraphPipelineConfig.model_fields
    first = str(loc[0])
    field = fields.get(first)
    inner = {"memory": MemoryConfig.model_fields, "lengths": LengthsConfig.model_fields}.get(first)
    if inner is not None and len(loc) > 1:
        siblings = inner
        second = str(loc[1])
        return [first, second], siblings.get(second), list(siblings)
    if first == "micro_batch_sizes" and len(loc) > 2:
        return [first, str(loc[2])], field, []
    return [first], field, list(fields)


def _unknown_key(path: str, keys: Sequence[str], value: Any, known: Iterable[str]) -> str:
    # "limit_gb" written beside "memory" instead of in it is nearer to a key of the memory object than to its
    # own siblings, so that is looked for first, with a stricter likeness.
    names = list(known)
    near = difflib.get_close_matches(keys[-1], names, n=1, cutoff=0.6)
    inner = difflib.get_close_matches(keys[-1].rpartition(".")[2], MemoryConfig.model_fields, n=1, cutoff=0.8)
    if len(keys) == 1 and inner:  # the memory object's keys, written beside it
        return f'{path}: unknown key (value {show(value)}); write "memory": {{"{inner[0]}": {show(value)}}}'
    hint = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(names)}"
    return f"{path}: unknown key (value {show(value)}); {hint}"


def _wrong_value(path: str, value: Any, field: FieldInfo | None) -> str:
    expected = field.description if field is not None else None
    if expected == _PLANNER:
        expected = "one of " + ", ".join(PLANNERS.names())
    if expected == _SCHEDULE:
        expected = "one of " + ", ".join(schedule_names())
    if expected == _TRANSPORT:
        expected = "one of " + ", ".join(TRANSPORTS.names())
    if path.startswith(f"{BLOCK}.backends"):
        return _wrong_backends(path, value)
    if path.startswith(f"{BLOCK}.micro_batch_sizes."):
        expected = 'a whole number of samples of at least 1, or "full"'
    if (
        path == f"{BLOCK}.eager" and isinstance(value, str) and value
    ):  # one path, where a list of them is asked for
        return f"{path}: {show(value)} is not valid; give a list: {show([value])}"
    words = [
        word for word in re.findall(r"\w+", (expected or "").removeprefix("one of ")) if not word.isdigit()
    ]
    near = difflib.get_close_matches(value.lower(), words, n=1, cutoff=0.6) if isinstance(value, str) else []
    hint = f"; did you mean {near[0]!r}?" if near and near[0] != value else ""
    return f"{path}: {show(value)} is not valid; give {expected}{hint}"


def _wrong_backends(path: str, value: Any) -> str:
    """Return what is wrong with what stages are to run on: the first name that is none, or the whole."""
    names = BACKENDS.names()
    if isinstance(value, str) and value in names:
        return f"{path}: {show(value)} is not valid; give a list: {show([value])}"
    wrong = next((n for n in named_backends(value) if isinstance(n, str) and n not in BACKENDS), None)
    if wrong is not None:
        return f"{path}: no backend {show(wrong)}{nearest(wrong, names)}; give one of {', '.join(names)}"
    hint = nearest(value, (*BACKEND_WORDS, *names)) if isinstance(value, str) else ""
    return f"{path}: {show(value)} is not valid; give {_BACKENDS}{hint}"


def check_ranks(config: GraphPipelineConfig, num_ranks: int) -> None:
    """Refuse a block that asks for more ranks than there are.

    Raises:
        ConfigError: a data-parallel degree above the ranks.
    """
    # What no plan could have; whether the rest can be used is the planner's. A rank may hold several stages, so their
    # number is no bound where they share ranks: 8 stages of 2 ranks are two on each of 4 groups of 8 ranks.
    degree = config.data_parallel
    if isinstance(degree, int) and degree > num_ranks:
        raise ConfigError(
            f"{BLOCK}.data_parallel: {degree} ranks is more than the {num_ranks} there are; lower it or start more"
        )


def batch_arithmetic(ds_config: Mapping[str, Any] | str | Path, num_ranks: int) -> BatchSizes:
    """Return mini-batch, loss unit and accumulation steps as the configuration gives or implies them.

    ``train_batch_size`` is B. ``train_micro_batch_size_per_gpu`` is the loss unit u; where it is missing,
    u is B / ``gradient_accumulation_steps``, or B where that is missing too. B may be left out only where
    the data-parallel degree is known (one rank, or ``graph_pipeline.data_parallel`` given).

    Raises:
        ConfigError: a size is no positive whole number, does not divide, or contradicts
            ``graph_pipeline.micro_batch_sizes``.
    """
    # B = train_batch_size, u = train_micro_batch_size_per_gpu, s = gradient_accumulation_steps; a step's loss
    # is the mean of B / u losses of u samples each, on however many ranks (DeepSpeed's B = u * s * ranks is
    # not required, since stages may have different numbers of ranks).
    #
    #   given             B    u    s        given                                B    u
    #   B=64              64   64   -        B=64, loss: "full"                   64   64
    #   B=64 u=4          64   4    -        u=4 s=2, one rank                    8    4
    #   B=64 s=4          64   16   4        u=4 s=2, data_parallel=2             16   4
    #   B=64 u=4 s=3      refused: 3 does not divide the 16 losses
    plain = load_deepspeed_json(ds_config)
    config = read_config(plain) or GraphPipelineConfig()
    mini_batch = _size(plain, "train_batch_size")
    unit = _size(plain, "train_micro_batch_size_per_gpu")
    steps = _size(plain, "gradient_accumulation_steps")
    if config.units is not None:
        return _units_arithmetic(config.units, mini_batch, unit, steps)
    if mini_batch is None:
        mini_batch = _implied_mini_batch(unit, steps, num_ranks, config)
    full_loss = isinstance(config.micro_batch_sizes, dict) and config.micro_batch_sizes.get("loss") == "full"
    if full_loss:
        _check_full_loss(mini_batch, unit, steps)
        unit = mini_batch
    if unit is None:
        if mini_batch % (steps or 1):
            raise ConfigError(
                f"gradient_accumulation_steps: {steps} does not divide train_batch_size {mini_batch}; "
                f"{_divisors_to_give(mini_batch, steps or 1)}"
            )
        unit = mini_batch // (steps or 1)
    if mini_batch % unit:
        raise ConfigError(
            f"train_micro_batch_size_per_gpu: {unit} (the samples of one loss) does not divide "
            f"train_batch_size {mini_batch}; {_divisors_to_give(mini_batch, unit)}"
        )
    if steps is not None and (mini_batch // unit) % steps:
        raise ConfigError(
            f"gradient_accumulation_steps: {steps} does not divide the {mini_batch // unit} losses of a step "
            f"(train_batch_size {mini_batch} / train_micro_batch_size_per_gpu {unit}); remove it"
        )
    _check_micro_batches_divide(config, mini_batch)
    return BatchSizes(mini_batch, unit, steps)


def _units_arithmetic(units: int, mini_batch: int | None, unit: int | None, steps: int | None) -> BatchSizes:
    """Return the sizes of a mini-batch of ``units`` typical units."""
    # units=8 and u=4: B=32, which need not be given; units=8 and B=32: u=4
    if unit is None and mini_batch is None:
        raise ConfigError(
            f"train_micro_batch_size_per_gpu: missing; give the samples of a typical one of the {units} "
            f"{BLOCK}.units, which the plan is made for"
        )
    if unit is None and mini_batch is not None:
        unit = mini_batch // units
    assert unit is not None
    if mini_batch not in (None, units * unit) or not unit:
        raise ConfigError(
            f"train_batch_size: {mini_batch} is not {BLOCK}.units={units} times train_micro_batch_size_per_gpu; remove "
            "it, since units may have any number of samples"
        )
    if steps is not None and units % steps:
        raise ConfigError(
            f"gradient_accumulation_steps: {steps} does not divide {BLOCK}.units={units}; remove it"
        )
    return BatchSizes(units * unit, unit, steps)


def _size(plain: Mapping[str, Any], key: str) -> int | None:
    value = plain.get(key)
    if value is None or value == "auto":
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_COUNT:
        most = "" if not isinstance(value, int) or value < 1 else f", at most {MOST_COUNT}"
        raise ConfigError(
            f"{key}: {show(value)} is not valid; give a whole number of samples of at least 1{most}"
        )
    return value


def _implied_mini_batch(
    unit: int | None, steps: int | None, num_ranks: int, config: GraphPipelineConfig
) -> int:
    degree = 1 if num_ranks == 1 else config.data_parallel
    if unit is not None and isinstance(degree, int):
        return unit * (steps or 1) * degree
    raise ConfigError(
        "train_batch_size: missing; give the samples of one optimizer step over the whole graph "
        "(stages may have different numbers of ranks, so it does not follow from the other sizes)"
    )


def _check_full_loss(mini_batch: int, unit: int | None, steps: int | None) -> None:
    path = f'{BLOCK}.micro_batch_sizes.loss: "full" computes one loss on all {mini_batch} samples'
    if unit is not None and unit != mini_batch:
        raise ConfigError(
            f"{path}, but train_micro_batch_size_per_gpu asks for losses of {unit} samples; "
            f"remove it or set it to {mini_batch}"
        )
    if steps is not None and steps != 1:
        raise ConfigError(
            f"{path}, but gradient_accumulation_steps asks for {steps} losses a step; remove it"
        )


def _check_micro_batches_divide(config: GraphPipelineConfig, mini_batch: int) -> None:
    sizes = config.micro_batch_sizes
    named = sizes.items() if isinstance(sizes, dict) else [("", sizes)]
    lines = [
        f"{BLOCK}.micro_batch_sizes{'.' if name else ''}{name}: {size} does not divide train_batch_size "
        f"{mini_batch}; {_divisors_to_give(mini_batch, size)}"
        for name, size in named
        if isinstance(size, int) and mini_batch % size
    ]
    if lines:
        raise ConfigError("\n".join(lines))


def _divisors_to_give(number: int, wanted: int) -> str:
    return "give " + " or ".join(map(str, nearest_divisors(number, wanted)))
