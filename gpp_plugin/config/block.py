"""The ``graph_pipeline`` block of the DeepSpeed JSON: its keys, what each may be and what it is by default."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from gpp_plugin.ir.typed_leaves import MOST_COUNT
from gpp_plugin.plugins import (
    BACKENDS,
    PLANNERS,
    SCHEDULES,
    TRANSPORTS,
    named_backends,
    planner_granularity,
)
from gpp_plugin.schedule.names import is_schedule_name

BLOCK = "graph_pipeline"

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
A_PLANNER = "the name of a planner"
A_SCHEDULE = "the name of a schedule"
A_TRANSPORT = "the name of a transport"
SOME_BACKENDS = '"off", "auto", a list of backends, or {"stage name": "backend", ...}'
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
    planner: str = Field(default="auto", description=A_PLANNER)
    stages: Auto | Count = Field(default="auto", description='"auto" or a whole number of at least 1')
    virtual_stages: Auto | Count = Field(default=1, description='"auto" or a whole number of at least 1')
    colocate: Colocate = Field(default="off", description=_one_of(Colocate))
    data_parallel: Auto | Count = Field(default="auto", description='"auto" or a whole number of at least 1')
    tensor_parallel: Auto | Count | dict[str, Count] = Field(
        default=1,
        description='"auto", a whole number of at least 1, or {"module path": number, ...}',
    )
    schedule: str = Field(default="auto", description=A_SCHEDULE)
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
    p2p: str = Field(default="native", description=A_TRANSPORT)
    comm_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        default=60.0, description="a number of seconds above 0"
    )
    max_skipped_steps: Count | None = Field(default=20, description="null or a whole number of at least 1")
    locate_nan: bool = Field(default=False, description="true or false")
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
        default="off", description=SOME_BACKENDS
    )

    compile: bool | Auto | dict[str, bool] = Field(default=False, description=_COMPILE)

    @model_validator(mode="before")
    @classmethod
    def _fill_granularity(cls, given: Any) -> Any:
        if isinstance(given, dict) and isinstance(given.get("planner"), str):
            return {"granularity": planner_granularity(given["planner"]), **given}
        return given

    @field_validator("planner", "schedule", "p2p")
    @classmethod
    def _is_known(cls, name: str, info: ValidationInfo) -> str:
        table = {"planner": PLANNERS, "schedule": SCHEDULES, "p2p": TRANSPORTS}[str(info.field_name)]
        # a schedule may have numbers in its name
        if not (is_schedule_name(name) if table is SCHEDULES else name in table):
            raise ValueError(f"no such {info.field_name}")
        table.check(name)
        return name

    @field_validator("backends")
    @classmethod
    def _are_backends(cls, given: Any) -> Any:
        for name in named_backends(given):
            if name not in BACKENDS:
                raise ValueError("no such backend")
            BACKENDS.check(name)
        return given
