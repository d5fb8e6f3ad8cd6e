"""The ``graph_pipeline`` block of the DeepSpeed JSON: its keys, what each may be and what it is by default.

It is the one schema of options. The command line and `gpp_plugin.api` take the same keys under names that follow from
these (`config.key_names`), with the same values and the same errors.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from gpp_plugin.config.key_names import BLOCK as BLOCK
from gpp_plugin.config.key_names import Registered, named_schema
from gpp_plugin.ir.tensors import TRAINING_DTYPES
from gpp_plugin.ir.typed_leaves import MOST_COUNT
from gpp_plugin.plugins import (
    BACKENDS,
    PLANNERS,
    SCHEDULES,
    TRANSPORTS,
    is_schedule_name,
    planner_granularity,
    schedule_names,
)

RENAMED_KEYS = {"look_ahead": "frozen_prefetch"}
"""Keys of earlier releases that are still read, with one line of advice."""
REMOVED_KEYS = {
    "repeat_steps": "steps are no longer run twice; remove the key. Rank 0 logs losses far above the usual range",
}
"""Keys of earlier releases that are refused, each with what to do instead."""
Auto = Literal["auto"]
Count = Annotated[int, Field(ge=1, le=MOST_COUNT)]
MEMORY_WAYS = ("recompute", "swap")
"""What may be done to stay below a memory limit, each a key of ``memory``."""


_BACKENDS = Registered(BACKENDS.names, BACKENDS.__contains__, BACKENDS.check)
PlannerName = Annotated[
    str, AfterValidator(Registered(PLANNERS.names, PLANNERS.__contains__, PLANNERS.check))
]
ScheduleName = Annotated[
    str, AfterValidator(Registered(schedule_names, is_schedule_name, SCHEDULES.check, is_open=True))
]
TransportName = Annotated[
    str, AfterValidator(Registered(TRANSPORTS.names, TRANSPORTS.__contains__, TRANSPORTS.check))
]
BackendName = Annotated[str, AfterValidator(_BACKENDS)]


def _key(default: Any, values: str = "", **extra: Any) -> Any:
    """Return a field.

    Args:
        values: possible values, as an error says them, where they do not follow from the type.
        extra: ``option``, ``argument`` and ``json`` are its names where they do not follow from its own
            (`config.key_names`); ``inner`` are possible values of an entry; ``plans`` marks what plans depend on,
            or lists the values that are possible without a job.
    """
    return Field(default=default, description=values or None, json_schema_extra=extra)


class _Block(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class MemoryConfig(_Block):
    """How much memory a rank may use, and what may be done to stay below it.

    Args:
        limit_gb: most GB (10^9 bytes) of one rank that a plan may use. "auto" is the memory of the device; on CUDA what
            is free before the first tensor, less a reserve for communicators and fragmentation.
        recompute: "auto" runs forwards again where a plan needs it to fit. "full", in training, runs every block again
            before its backward, whatever memory there is. "off" never does.
        swap: "auto" moves saved tensors to host memory where a plan needs it to fit. "off" never does.
    """

    limit_gb: Auto | Annotated[float, Field(gt=0, allow_inf_nan=False)] = _key(
        "auto", '"auto" or a number of GB above 0', plans=True
    )
    recompute: Literal["auto", "off", "full"] = _key("auto", plans=("auto", "off"))
    swap: Literal["auto", "off"] = _key("auto", plans=True)

    @model_validator(mode="before")
    @classmethod
    def _read_ways(cls, value: Any) -> Any:
        """Read a list of what may be done to fit; the rest is off."""
        if isinstance(value, list) and all(way in MEMORY_WAYS for way in value):
            return {way: "auto" if way in value else "off" for way in MEMORY_WAYS}
        return value

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
        max: tokens of the longest text; memory is planned for it, and a longer mini-batch is refused before it runs. By
            default the longest of ``typical``.
        typical: tokens of usual texts, each counted once; the plan is for the mean of their times. By default ``max``.
    """

    max: LengthOf = _key(
        None,
        'a whole number of at least 1, or {"key of the batch": number, ...}',
        option="--max-length",
        argument="max_length",
        plans=True,
    )
    typical: list[LengthOf] = _key(
        [],
        'a number, a list of numbers, or of objects like that of "max", none of them larger',
        option="--length",
        argument="length",
        plans=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_max(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        typical = value.get("typical", [])
        typical = typical if isinstance(typical, list) else [typical]
        # what cannot be compared, or is below 1, is refused for itself
        numbers = [one for one in typical if isinstance(one, int)]
        longest = max(1, *numbers) if numbers else None
        return {"max": longest, **value, "typical": typical}

    @property
    def planned(self) -> tuple[int | dict[str, int], ...]:
        """Return the lengths whose mean time is planned for."""
        return tuple(self.typical) or (self.max,)


class CheckpointConfig(_Block):
    """How `save_checkpoint` writes and what it keeps.

    Args:
        keep_last: number of the newest checkpoints that stay, of those that the engine named itself
            (``global_step<n>``). null is all. Tags of yours are never removed.
        keep_every: of the others, those at multiples of this step stay as well. null is none of them.
        async_save: copy to host memory at once, and write while training continues. The next save, load or `destroy`
            waits for the checkpoint and raises what went wrong.
    """

    keep_last: Count | None = _key(None)
    keep_every: Count | None = _key(None)
    async_save: bool = _key(False)


class GenerateConfig(_Block):
    """How `engine.generate` stores the keys and values of attention, and overlaps stages.

    Args:
        cache: "data" has the cache of a sequence on the rank that decodes it. "sequence" shards it along the sequence
            over all ranks of each stage (Cache Parallelism), for decoders that attend to all positions. "auto" is
            "data", or "sequence" if whole caches do not fit into ``memory.limit_gb`` or CUDA's free memory.
        block: neighbouring positions on one rank, with "sequence".
        micro_batches: groups of prompts that stages generate in turns, so that one computes while others wait for its
            tokens. Tokens stay the same. "auto" is one for each stage's rank, but at most one a prompt. With
            sequence-sharded caches it is 1.
    """

    cache: Literal["auto", "data", "sequence"] = _key("auto")
    block: Count = _key(16)
    micro_batches: Count | Auto = _key(1)


class GraphPipelineConfig(_Block):
    """The ``graph_pipeline`` block, checked.

    Args:
        enabled: false leaves the job to DeepSpeed's own engine.
        planner: which planner partitions the model.
        stages: exactly that many stages, or the planner's choice. With more stages than ranks a rank holds several.
        virtual_stages: stages of each group of ranks: 1, a larger number (interleaved), or "auto", the number with the
            shortest simulated step.
        colocate: "auto" may place the stages of a branch on the ranks of other stages, where the simulated step is
            shorter. "off" does not.
        data_parallel: ranks of each stage, or the planner's choice.
        tensor_parallel: ranks that compute the same samples of a stage together. Each has a part of its heads, features
            and vocabulary. A number holds for all stages that can be divided so. A number by module path holds for the
            stages with these modules; all others have 1. "auto" is stage by stage the size with the shortest simulated
            step.
        sequence_parallel: ranks that compute the same samples of a stage together, with all weights. Each has a part of
            the positions, and in attention all positions of a part of the heads (DeepSpeed-Ulysses). Values are those
            of `tensor_parallel`; the ranks of a stage are data x sequence x tensor. DeepSpeed's
            ``sequence_parallel_size``, and a block ``sequence_parallel`` with its ``size``, mean the same.
        zero: "auto" is the ZeRO stage with the shortest step, where ``zero_optimization`` names none. null is the stage
            that is named there, or 0.
        schedule: order of the tasks of every stage. "auto" is the one with the shortest simulated step that memory
            allows.
        micro_batch_sizes: samples of a stage's micro-batch: for all stages, or by stage name. "full" is the whole
            mini-batch. "auto" is one loss unit a rank, as in DeepSpeed, where the mini-batch has several. "search" is
            the planner's choice of any size that divides the mini-batch.
        granularity: size of the blocks that are never split: a layer, half of one, or an operator ("node"). The default
            is a layer; for planner dawnpiper, as in its paper, an operator.
        slicing: run the forwards of the first micro-batches in halves: "auto" where that is shorter, "on", "off", or a
            number of micro-batches.
        memory: memory of a rank, and what may be done to stay below it: an object, or a list of ``recompute`` and
            ``swap``, which may then be used.
        lengths: tokens of texts, usually and at most. null is the sample batch's length alone.
        cluster: a file, a description in place, or the name of one that comes with the package. "auto" is what the
            ranks find. On CUDA they find free memory, NVLink, PCIe and network; speeds of links are measured once for a
            kind of cluster.
        plan: a saved plan, or one written by hand: a file, or in place.
        profile_dir: directory of measured costs. null is the user's cache.
        loss_mean: "units" weighs the losses of a step equally. "tokens" is the sum over all labelled tokens of the
            mini-batch divided by their number, as in HuggingFace's Trainer. It is for models that take
            `num_items_in_batch`.
        units: items that `train_batch` takes from the iterator. Each is one loss unit as the collator made it, of any
            length and number of samples. ``train_micro_batch_size_per_gpu`` is then the samples of a typical unit; the
            plan is for that. null takes batches until they hold ``train_batch_size`` samples.
        unit_order: order of the ``units`` of a mini-batch, and so which rank of a stage runs which of them. "balanced"
            has the shortest predicted step; sizes alone decide, so that all ranks choose alike. "given" is the
            iterator's order. Losses and gradients differ by the rounding of sums alone. Outputs of `eval_batch` come in
            the iterator's order.
        mode: "sync" steps once a mini-batch. "async" steps after every micro-batch, on each stage, and its pipeline
            never drains (PipeDream). A gradient is then as many updates old as the stage holds other micro-batches.
        vertical_sync: in mode async, a micro-batch uses weights of the same age on every stage.
        p2p: transport of messages between stages: "native" is our own; "megatron" is megatron-core's `P2PCommunicator`
            on the edges that it can carry; other packages may add more.
        comm_timeout_s: seconds after which a rank gives up on a message over gloo. It also gives up on ranks that are
            stopped, are outside of the engine's calls, or wait elsewhere. A rank at work (it captures, compiles, saves)
            is waited for. Where the key is there, ranks also wait that long for all to join; to connect two of them may
            take 60 s. NCCL waits for ten of the planned mini-batches, 600 s or this, whichever is longest.
        max_skipped_steps: consecutive steps that may be skipped because gradients are not finite, before the job ends
            with an error. null is no limit. Steps while a dynamic loss scale sinks (fp16) do not count.
        locate_nan: check the output of every operator, and name the module and micro-batch in which a number that is
            not finite first appears. A step then takes several times as long.
        trace_path: file of the measured timeline of each mini-batch, a Chrome trace. `{step}` in the name makes one
            file a step. null writes none.
        seed: of the parameters of a model built on the meta device, of dropout and of shuffling.
        weights: safetensors directory for a model built on the meta device.
        verify: before training, compare loss and gradients of the captured model with the module's own on the sample
            batch, in at most a fifth of start-up.
        eager: modules, by path, that run as they are and are not traced. Each is one block that takes whole loss units.
            ``*`` stands for any one part of a path. Modules whose tracing fails are eager too; the log names them.
        loader_workers: processes of each rank that prefetch ``training_data``. 0 loads in the rank itself. "auto" is up
            to four where ranks compute on CUDA, and none on CPUs.
        checkpoint: how checkpoints are written, and which of them stay.
        frozen_prefetch: 1 runs the forwards of the next mini-batch on frozen stages that read nothing but the data,
            while the others train the present one. That takes a mini-batch one call early from whatever `train_batch`
            reads. 0 does not. "auto" is 1 for ``training_data``, which the engine loads, and 0 for an iterator of
            yours. Results are the same.
        generate: where `engine.generate` has the keys and values of attention, and in how many groups of prompts its
            stages take turns.
        backends: backends of stages that train nothing (frozen towers, in training and evaluation). "off" is torch's
            operators. "auto" is the fastest of all installed backends, a list the fastest of those, by measurement. An
            object names one for a stage. Results differ by rounding (docs/backends.md).
        compile: run blocks that train as compiled code (inductor), each distinct one compiled once. Give true, some
            modules alone (``{"language_model": true}``), or "auto" for those that measured faster by more than noise.
            Without the compiler's cache the start takes tens of seconds longer.
    """

    enabled: bool = _key(True)
    planner: PlannerName = _key("auto", plans=True)
    stages: Auto | Count = _key("auto", plans=True)
    virtual_stages: Auto | Count = _key(1, plans=True)
    colocate: Literal["auto", "off"] = _key("off", plans=True)
    data_parallel: Auto | Count = _key("auto", plans=True)
    tensor_parallel: Auto | Count | dict[str, Count] = _key(
        1,
        '"auto", a whole number of at least 1, or {"module path": number, ...}',
        inner="a whole number of at least 1",
        plans=True,
    )
    sequence_parallel: Auto | Count | dict[str, Count] = _key(
        1,
        '"auto", a whole number of at least 1, or {"module path": number, ...}',
        inner="a whole number of at least 1",
        plans=True,
    )
    zero: Auto | None = _key(None, 'null or "auto"')
    schedule: ScheduleName = _key("auto", plans=True)
    micro_batch_sizes: Literal["auto", "search"] | Count | dict[str, Count | Literal["full"]] = _key(
        "auto",
        '"auto", "search", a number of samples for all stages, or '
        '{"stage name, or * for all": number or "full", ...}',
        option="--micro-batch",
        inner='a whole number of samples of at least 1, or "full"',
        plans=True,
    )
    granularity: Literal["layer", "sub_layer", "node"] = _key("layer", plans=True)
    slicing: Literal["auto", "on", "off"] | Count = _key(
        "auto", '"auto", "on", "off" or a number of micro-batches of at least 1', plans=True
    )
    memory: MemoryConfig = _key(
        MemoryConfig(), "an object with limit_gb, recompute, swap, or a list of recompute, swap", plans=True
    )
    lengths: LengthsConfig | None = _key(None)
    cluster: str | dict[str, Any] = _key("auto", '"auto", a file name, or an object', plans=True)
    plan: str | dict[str, Any] | None = _key(None, "null, a file name, or an object")
    profile_dir: str | None = _key(None, "null or a directory name")
    loss_mean: Literal["units", "tokens"] = _key("units")
    units: Count | None = _key(None)
    unit_order: Literal["balanced", "given"] = _key("balanced")
    mode: Literal["sync", "async"] = _key("sync", plans=True)
    vertical_sync: bool = _key(False, plans=True)
    p2p: TransportName = _key("native", plans=True)
    comm_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = _key(
        60.0, "a number of seconds above 0"
    )
    max_skipped_steps: Count | None = _key(20)
    locate_nan: bool = _key(False)
    trace_path: str | None = _key(None, "null or a file name")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = _key(0, "a whole number from 0 to 2^63 - 1")
    weights: str | None = _key(None, "null or a directory with safetensors files")
    verify: bool = _key(True)
    eager: list[str] = _key([], 'a list of module paths, like ["layers.*.router"]')
    loader_workers: Auto | Annotated[int, Field(ge=0)] = _key("auto")
    checkpoint: CheckpointConfig = _key(CheckpointConfig())
    frozen_prefetch: Auto | Annotated[int, Field(ge=0, le=1)] = _key("auto", '"auto", 0 or 1')
    generate: GenerateConfig = _key(GenerateConfig())
    backends: Literal["off", "auto"] | list[BackendName] | dict[str, BackendName] = _key(
        "off", '"off", "auto", a list of backends, or {"stage name": "backend", ...}', inner=_BACKENDS
    )
    compile: bool | Auto | dict[str, bool] = _key(
        False, 'true, false, "auto", or {"path of a module": true, ...}'
    )

    @property
    def look_ahead(self) -> str | int:
        """Return ``frozen_prefetch`` by its former name."""
        return self.frozen_prefetch

    @model_validator(mode="before")
    @classmethod
    def _fill_granularity(cls, keys: Any) -> Any:
        if isinstance(keys, dict) and isinstance(keys.get("planner"), str):
            return {"granularity": planner_granularity(keys["planner"]), **keys}
        return keys


@named_schema
class PlanOptions(GraphPipelineConfig):
    """All that plans depend on where there is no job: the block, and what a job has beside it.

    Args:
        num_devices: ranks to plan for; by default those of the cluster.
        dtype: what is trained in; by default the first that the cluster's devices have a speed in.
        mini_batch: samples of one optimizer step; by default 64, or 8 a device where that is more.
        loss_unit: samples of one loss; by default the mini-batch, or of a HuggingFace model whose loss does not compare
            samples about 4096 tokens.
        zero: ZeRO stage; "auto" is the one with the shortest step, ``"zero": "auto"`` in the block.
    """

    num_devices: Count | None = _key(
        None, "a whole number of at least 1", option="--devices", json="the number of ranks", plans=True
    )
    dtype: Literal["bf16", "fp16", "fp32"] | None = _key(
        None, f"one of {', '.join(TRAINING_DTYPES)}", json="bf16 or fp16", plans=True
    )
    mini_batch: Count | None = _key(None, "a whole number of at least 1", json="train_batch_size", plans=True)
    loss_unit: Count | None = _key(
        None, "a whole number of at least 1", json="train_micro_batch_size_per_gpu", plans=True
    )
    zero: Literal[0, 1, 2, 3, "auto"] = _key(  # type: ignore[assignment]  # without a job there is no other place
        0, argument="zero_stage", json="zero_optimization.stage", plans=True
    )


PLAN_DEFAULTS = {
    "cluster": "dgx_h100",
    "micro_batch_sizes": "search",
    "memory.recompute": "off",
    "memory.swap": "off",
}
"""Where plans without a job differ from the block: nothing is done to fit, and all micro-batch sizes are searched."""
