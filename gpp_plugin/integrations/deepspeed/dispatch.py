"""What `deepspeed.initialize` does with a `graph_pipeline` block: makes a `GraphPipelineEngine`.

The wrapper is set by `gpp_plugin.import_hook`, which `gpp_plugin` gives this module's `dispatch`. Callers that bound
the function before gpp_plugin was imported (``from deepspeed import initialize``) import gpp_plugin first, or use
`gpp_plugin.initialize`.

    deepspeed.initialize(...) ─► dispatch ─┬─ no enabled block ─► DeepSpeed's own
                                           ├─ planner stock     ─► DeepSpeed's PipelineEngine on our capture
                                           └─ else              ─► GraphPipelineEngine with `DeepSpeedFramework`
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import inspect
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.constants import default_pg_timeout
from deepspeed.monitor.config import get_monitor_config
from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.runtime.pipe.module import PipelineModule
from torch import nn

from gpp_plugin.capture.tracing.sample_batches import count_samples, is_counted, sample_with_lengths
from gpp_plugin.config.block import BLOCK, GraphPipelineConfig
from gpp_plugin.config.reader import batch_arithmetic, check_ranks, load_deepspeed_json, read_config
from gpp_plugin.data import PackedUnits
from gpp_plugin.engine.compatibility import PipelineSurface
from gpp_plugin.engine.engine import GraphPipelineEngine
from gpp_plugin.engine.framework import Monitor, StageReplica
from gpp_plugin.engine.loading.rank_shard import sample_from_dataset
from gpp_plugin.errors import ConfigError, first_line
from gpp_plugin.import_hook import original_initialize
from gpp_plugin.integrations.deepspeed.config_values import (
    DeepSpeedReading,
    derive_stage_config,
    read_deepspeed,
)
from gpp_plugin.integrations.deepspeed.learning_rates import (
    LearningRates,
    StageParameterGroups,
    optimizer_of_whole_weights,
)
from gpp_plugin.integrations.deepspeed.optimizer_bytes import optimizer_bytes, with_usable_adam
from gpp_plugin.integrations.deepspeed.stage_optimizer import (
    FRAMEWORK,
    DeepSpeedOptimizer,
    without_shared_memory_op,
)
from gpp_plugin.integrations.deepspeed.stock_training import make_stock_engine
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.model.graph.stage_graph import StageGraph, UnnamedBatch, named_batch, prepare_batch
from gpp_plugin.model.model_source import ModelSource
from gpp_plugin.plan.baselines.stock_chain import STOCK
from gpp_plugin.plan.edge_transports import NATIVE
from gpp_plugin.runtime.random_streams import MODEL_STREAMS, restored_host_streams
from gpp_plugin.runtime.ranks.agreement import agree_on_job
from gpp_plugin.runtime.ranks.failure_board import HERE
from gpp_plugin.runtime.ranks.job_board import engine_call
from gpp_plugin.runtime.ranks.placement_of_ranks import (
    JOINING_TIMEOUT_S,
    JobPlacement,
    Setting,
    join_ranks,
    telling_before_joining,
)

logger = logging.getLogger(__name__)


class GraphPipelineModule(nn.Module):
    """A model with the sample batch it is captured with, as `PipelineModule` is in stock DeepSpeed.

    Args:
        model: any module whose output has a loss, or a graph of stages.
        sample_batch: one batch as the model will get them; any number of samples. A tuple is as in ``model(*batch)``.
        config: the DeepSpeed configuration, where `deepspeed.initialize` has none.
    """

    def __init__(
        self,
        model: nn.Module | StageGraph,
        *,
        sample_batch: Mapping[str, Any] | Sequence[Any],
        config: Mapping[str, Any] | str | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.sample_batch = dict(sample_batch) if isinstance(sample_batch, Mapping) else sample_batch
        self.config = config

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model itself (before training; afterwards it holds only this rank's stage)."""
        if isinstance(self.model, StageGraph):
            raise ConfigError(f"stage graph {self.model.name!r} is not called; use engine.train_batch()")
        return self.model(*args, **kwargs)


def dispatch(original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Answer a call of `deepspeed.initialize`: ours if its configuration has an enabled block.

    Args:
        original: DeepSpeed's own function, called unchanged where there is no block.

    Raises:
        ConfigError: the block, or what is passed with it, is wrong.
    """
    # By name, as DeepSpeed would take them: users pass some of them by position.
    call = inspect.signature(original).bind_partial(*args, **kwargs).arguments
    ds_config = _find_config(call)
    block = None if ds_config is None else _read_block(ds_config)
    if block is not None:
        _refuse_accelerate()
        return _initialize_watched(ds_config, block, call)
    if isinstance(call.get("model"), (GraphPipelineModule, StageGraph)):
        raise ConfigError(
            f"{type(call['model']).__name__} needs an enabled graph_pipeline block in the DeepSpeed configuration"
        )
    return original(*args, **kwargs)


def initialize_block(**call: Any) -> Any:
    """Answer a DeepSpeed that finds packages' blocks by entry point (patches/deepspeed-0.19.8/0001).

    Args:
        call: the arguments of `deepspeed.initialize`; ``config`` is a dictionary.

    Returns:
        What `deepspeed.initialize` returns, or None where the block is not enabled.
    """
    block = _read_block(call["config"])
    return None if block is None else _initialize_watched(call["config"], block, call)


def initialize(*args: Any, **kwargs: Any) -> Any:
    """`deepspeed.initialize` as the hook has it, whatever was imported first."""
    return dispatch(original_initialize(deepspeed), args, kwargs)


def _refuse_accelerate() -> None:
    """Refuse a call of accelerate's: it would call forward and backward of the engine, which has whole mini-batches.

    Raises:
        ConfigError: names what runs HuggingFace's training loop on a pipeline.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "accelerate.accelerator":
            raise ConfigError(
                "graph_pipeline: accelerate and transformers.Trainer call forward and backward themselves, and a "
                "pipeline runs whole mini-batches; use gpp_plugin.GraphPipelineTrainer in place of Trainer"
            )
        frame = frame.f_back


def _find_config(call: Mapping[str, Any]) -> Any:
    # In DeepSpeed's own order: the argument, its old name, the command line's; last what a wrapped model brings.
    for key in ("config", "config_params"):
        if call.get(key) is not None:
            return call[key]
    from_args = getattr(call.get("args"), "deepspeed_config", None)
    if from_args is not None:
        return from_args
    model = call.get("model")
    return model.config if isinstance(model, GraphPipelineModule) else None


def _read_block(ds_config: Any) -> GraphPipelineConfig | None:
    """Return the checked block; the ranks that this one will not join hear of what is wrong with it."""
    with telling_before_joining():
        return read_config(ds_config)


def _initialize_watched(ds_config: Any, block: GraphPipelineConfig, call: Mapping[str, Any]) -> Any:
    with engine_call("deepspeed.initialize", is_fatal=lambda: True):
        with telling_before_joining(), HERE.during("configuration"):
            reading = read_deepspeed(load_deepspeed_json(ds_config))
            checked = _checked_arguments(reading.config, block, call)
        MODEL_STREAMS.state = None  # a new engine's model draws on from where the program is
        with restored_host_streams():
            return _initialize(*checked, call, reading)


def _initialize(
    ds_config: dict[str, Any],
    block: GraphPipelineConfig,
    model: Any,
    sample: Any,
    call: Mapping[str, Any],
    reading: DeepSpeedReading,
) -> Any:
    data, collate_fn = call.get("training_data"), call.get("collate_fn")
    # From here on the ranks are joined.
    setting = _make_setting(ds_config, block, model, call)
    if setting.device.type == "cuda":
        # An engine that the caller destroyed and let go of is in circles: its weights and optimizer state go here.
        gc.collect()
    if setting.rank == 0:
        for line in reading.warnings:
            logger.warning("%s", line)
        for line in reading.notes:
            logger.info("%s", line)
    if sample is None:
        sizes = setting.sizes
        count = sizes.mini_batch if block.units is None else sizes.loss_unit
        named = functools.partial(named_batch, model)
        try:
            sample = sample_from_dataset(data, num_samples=count, collate_fn=collate_fn, named=named)
        except UnnamedBatch as error:
            if block.planner == STOCK:
                raise
            begin = functools.partial(_make_engine, ds_config, block, model, call, setting)
            return _UnbegunEngine(error, begin), None, None, None
        if not is_counted(sample):  # of a model that takes whole units; what is captured is one of them
            sample = sample_from_dataset(
                data, num_samples=sizes.loss_unit, collate_fn=collate_fn, named=named
            )
    engine = _make_engine(ds_config, block, model, call, setting, sample)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _make_engine(
    ds_config: dict[str, Any],
    block: GraphPipelineConfig,
    model: Any,
    call: Mapping[str, Any],
    setting: Setting,
    sample: Any,
    *,
    begun: GraphPipelineEngine | None = None,
) -> Any:
    """Return the engine that trains ``model``; where there is one that has not begun, that one; collective."""
    data, collate_fn = call.get("training_data"), call.get("collate_fn")
    sample = prepare_batch(model, sample)
    if block.lengths is not None:
        if block.planner == STOCK:
            raise ConfigError(
                f"{BLOCK}.lengths: planner {STOCK!r} plans for the sample batch alone; remove the key, or choose "
                "another planner"
            )
        if is_counted(sample):  # of flattened patches beside texts it is unknown what else would change
            sample = sample_with_lengths(sample, block.lengths.planned)
    if isinstance(model, StageGraph) or block.planner == STOCK:
        count_samples(sample)  # a batch without a common number of samples is refused here, before any work
    _check_model(model, block)
    optimizer, groups = _optimizer_of(model, call)
    if optimizer is None:
        ds_config, note = with_usable_adam(ds_config, device_type=setting.device.type, group=setting.group)
        if note and setting.rank == 0:
            logger.warning("%s", note)
    if block.mode == "async":
        check_asynchronous_config(ds_config, block)
    # The engine depends neither on DeepSpeed nor on where weights come from: it receives what answers for both.
    framework = DeepSpeedFramework(
        ds_config, optimizer=optimizer, lr_scheduler=_scheduler_of(call), parameter_groups=groups
    )
    whole = framework.of_whole_weights if block.tensor_parallel == "auto" else None
    if whole is not None:
        if setting.rank == 0:
            logger.info("tensor_parallel auto: 1, as optimizer %s needs whole weights", whole)
        block = block.model_copy(update={"tensor_parallel": 1})
    common: dict[str, Any] = {
        "ds_config": ds_config,
        "config": block,
        "setting": setting,
        "sample_batch": sample,
        "training_data": data,
        "collate_fn": collate_fn,
    }
    if block.planner == STOCK:
        assert not isinstance(model, StageGraph), "refused above"
        return make_stock_engine(model=model, **framework.optimizer_options, **common)
    common |= {
        "source": ModelSource(model, config=block, setting=setting),
        "framework": framework.name,
        "make_optimizer": framework.make_optimizer,
        "check_shared_out": framework.check_shared_out,
        "make_monitor": framework.make_monitor,
    }
    if begun is None:
        return GraphPipelineEngine(**common)
    begun.__class__ = GraphPipelineEngine
    GraphPipelineEngine.__init__(begun, **common)
    return begun


class _UnbegunEngine(GraphPipelineEngine):
    """An engine whose training data lacks names, until `set_batch_fn` or `set_dataloader` brings a batch that has them.

    The same object is then an ordinary engine. Everything else it refuses, as its data was.

    Args:
        refusal: why no batch of the data can be captured.
        begin: makes the engine of a sample batch.
    """

    def __init__(self, refusal: UnnamedBatch, begin: Callable[..., Any]) -> None:
        nn.Module.__init__(self)
        self._refusal, self._begin = refusal, begin

    def __getattribute__(self, name: str) -> Any:
        # the third is what a module's own constructor reads; what no engine has is no attribute here, too
        is_open = name in ("set_batch_fn", "set_dataloader", "call_super_init")
        if is_open or name.startswith("_") or not hasattr(GraphPipelineEngine, name):
            return super().__getattribute__(name)
        raise ConfigError(f"engine.{name}: {super().__getattribute__('_refusal')}")

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Begin with what ``fn`` makes of the first samples; collective."""
        self._begin_with(fn(self._refusal.batch), "set_batch_fn")
        self.set_batch_fn(fn)

    def set_dataloader(self, loader: Any) -> None:
        """Begin with the loader's first batch; collective."""
        batches = iter(loader)
        first = next(batches, None)
        if first is None:
            raise ConfigError("set_dataloader: the loader has no batch; give one that has")
        self._begin_with(first, "set_dataloader")
        # what can be iterated once only has given its first batch
        self.set_dataloader(itertools.chain([first], batches) if batches is loader else loader)

    def _begin_with(self, sample: Any, name: str) -> None:
        begin = self._begin
        with engine_call(name, is_fatal=lambda: True), restored_host_streams():
            begin(sample, begun=self)


def _checked_arguments(
    ds_config: dict[str, Any], block: GraphPipelineConfig, call: Mapping[str, Any]
) -> tuple[dict[str, Any], GraphPipelineConfig, Any, Any]:
    """Return configuration, model and sample batch, as a rank has them before it joins the others.

    Raises:
        ConfigError: arguments cannot be combined with a block, or lack what a capture needs.
    """
    model = call.get("model")
    if not isinstance(model, (nn.Module, StageGraph)):
        raise ConfigError(f"deepspeed.initialize: model is a {type(model).__name__}, not a torch.nn.Module")
    if isinstance(model, PipelineSurface):
        raise ConfigError("deepspeed.initialize: model is an engine already; pass the model it was made of")
    if isinstance(model, PipelineModule):
        raise ConfigError(
            "graph_pipeline: the model is a stock PipelineModule, already cut into layers; pass the plain model, "
            "or remove the graph_pipeline block"
        )
    for key in ("mpu", "mesh_param"):
        if call.get(key) is not None:
            raise ConfigError(
                f"deepspeed.initialize: {key} cannot be combined with graph_pipeline; remove it"
            )
    optimizer = call.get("optimizer")
    held = (ds_config.get("zero_optimization") or {}).get("offload_optimizer") or {}
    if isinstance(optimizer, torch.optim.Optimizer) and held.get("device", "none") != "none":
        # what DeepSpeed refuses itself, when all is built
        forced = ds_config.get("zero_force_ds_cpu_optimizer", True)
        if forced and type(optimizer).__name__ != "DeepSpeedCPUAdam":
            raise ConfigError(
                "zero_force_ds_cpu_optimizer: true with offload_optimizer, and the optimizer is "
                f"{type(optimizer).__name__}; set the key to false, or give an optimizer block in the JSON"
            )
    sample: Any = None
    if isinstance(model, GraphPipelineModule):
        sample = model.sample_batch
        model = model.model
    data = call.get("training_data")
    if sample is None and data is None:
        raise ConfigError(
            "graph_pipeline: capture needs a sample batch; pass training_data, or wrap the model: "
            "gpp_plugin.GraphPipelineModule(model, sample_batch=batch)"
        )
    if isinstance(data, PackedUnits):
        ds_config, block = _with_packing(ds_config, block, data)
    return ds_config, block, model, sample


def _with_packing(
    ds_config: dict[str, Any], block: GraphPipelineConfig, data: PackedUnits
) -> tuple[dict[str, Any], GraphPipelineConfig]:
    """Return the configuration of a job whose data is packed: it says how many units a mini-batch has.

    Raises:
        ConfigError: the configuration says otherwise.
    """
    if block.units not in (None, data.units):
        raise ConfigError(
            f"{BLOCK}.units: {block.units}, and training_data is packed for mini-batches of {data.units}; remove the "
            "key, or pack for as many"
        )
    unit_config = {**ds_config, BLOCK: {**ds_config[BLOCK], "units": data.units}}
    size = "train_micro_batch_size_per_gpu"
    if unit_config.get(size, "auto") == "auto":
        unit_config[size] = len(data.typical_unit())
    packed = read_config(unit_config)
    assert packed is not None, "it is enabled"
    return unit_config, packed


def _check_model(model: nn.Module | StageGraph, block: GraphPipelineConfig) -> None:
    """Refuse a planner that cannot cut such a model, and one in parts; warn of checkpointing that has no effect."""
    if isinstance(model, nn.Module) and any(hasattr(p, "ds_id") for p in model.parameters()):
        raise ConfigError(
            "model: DeepSpeed holds its parameters in parts already (deepspeed.zero.Init, which from_pretrained uses "
            "once there are TrainingArguments with ZeRO 3); build it before those, or on the meta device"
        )
    if isinstance(model, StageGraph) and block.planner == STOCK:
        raise ConfigError(
            f"graph_pipeline.planner: {STOCK!r} cuts a captured model into a chain; a stage graph has explicit stages: "
            "remove the key"
        )
    if _checkpoints_activations(model):
        logger.warning(
            "gradient checkpointing of %s has no effect under graph_pipeline; graph_pipeline.memory.recompute is what "
            'does it: "auto" where a plan needs it to fit, "full" for every layer',
            type(model).__name__,
        )


def check_asynchronous_config(ds_config: Mapping[str, Any], config: GraphPipelineConfig) -> None:
    """Refuse what cannot be combined with mode async, before anything is captured.

    Raises:
        ConfigError: names the key and what to do.
    """
    where = f"{BLOCK}.mode: async"
    if config.p2p != NATIVE:
        raise ConfigError(f"{where} sends over our own transport only; remove {BLOCK}.p2p")
    if config.planner == STOCK:
        raise ConfigError(
            f"{where} cannot run planner {STOCK}, DeepSpeed's synchronous pipeline; choose another"
        )
    # Sizes do not matter to what is checked here, the precision.
    derived = derive_stage_config(ds_config, mini_batch=1, degree=1, device_type="cpu")
    if derived.dtype == "float16":
        raise ConfigError(
            f"{where} cannot agree on a loss scale between stages that step alone; use bf16 or fp32"
        )


class DeepSpeedFramework:
    """What the engine needs of a framework, as a DeepSpeed configuration has it.

    Args:
        ds_config: the whole configuration.
        optimizer, lr_scheduler, parameter_groups: of `DeepSpeedOptimizer`, passed in the call and not in the JSON.

    Raises:
        ConfigError: the JSON's optimizer or schedule cannot be made.
    """

    name = FRAMEWORK

    def __init__(
        self,
        ds_config: Mapping[str, Any],
        *,
        optimizer: Callable[..., Any] | None = None,
        lr_scheduler: Callable[..., Any] | None = None,
        parameter_groups: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self._ds_config = ds_config
        if optimizer is None:  # blocks that make none are refused here, before anything is captured
            blocks = ds_config if lr_scheduler is None else {**ds_config, "scheduler": None}
            LearningRates(StageParameterGroups({}, parameter_groups), blocks)
        self.optimizer_options: dict[str, Any] = {
            "optimizer": optimizer,
            "lr_scheduler": lr_scheduler,
            "parameter_groups": parameter_groups,
        }

    @functools.cached_property
    def of_whole_weights(self) -> str | None:
        """Return the name of an optimizer that cannot step parts of weights; None of one that can."""
        own = self.optimizer_options
        block = self._ds_config.get("optimizer")
        return optimizer_of_whole_weights(own["optimizer"], block, own["parameter_groups"])

    def check_shared_out(self, plan: PipelinePlan) -> None:
        """Refuse a plan whose tensor ranks would step parts of weights otherwise than the whole.

        Raises:
            ConfigError: names the optimizer and a stage.
        """
        shared_out = [stage for stage in plan.stages if stage.tensor > 1]
        if shared_out and self.of_whole_weights is not None:
            raise ConfigError(
                f"optimizer {self.of_whole_weights} steps a weight by norms or factors of the whole of it, and the "
                f"{shared_out[0].tensor} tensor ranks of stage {shared_out[0].name!r} would step parts by themselves; "
                f"set {BLOCK}.tensor_parallel to 1 (and plan again), or use AdamW"
            )

    def make_optimizer(self, module: nn.Module, replica: StageReplica) -> DeepSpeedOptimizer:
        """Return a stage's optimizer, with a stock engine behind it where the stage trains anything."""
        return DeepSpeedOptimizer(module, replica, config=self._ds_config, **self.optimizer_options)

    def make_monitor(self) -> Monitor:
        """Return what writes to DeepSpeed's monitors: TensorBoard, CSV, Weights & Biases, Comet.

        Raises:
            ConfigError: one that is enabled is not installed.
        """
        try:
            return MonitorMaster(get_monitor_config(dict(self._ds_config)))
        except ImportError as error:
            name = error.name or "a package"
            raise ConfigError(
                f"a monitor of the configuration needs {name}, which is not installed; pip install {name}, or set its "
                '"enabled" to false'
            ) from error
        except Exception as error:  # whatever a package of a monitor raises where it is broken
            raise ConfigError(
                f"a monitor of the configuration cannot be made: {first_line(error)}; mend what it needs, or set its "
                '"enabled" to false'
            ) from error


def _make_setting(
    ds_config: Mapping[str, Any], block: GraphPipelineConfig, model: Any, call: Mapping[str, Any]
) -> Setting:
    placement = _init_distributed(call, block)
    num_ranks = dist.get_world_size()
    # Small agreements go over gloo whatever moves activations: they must not queue behind those on a device.
    group = dist.new_group(backend="gloo") if num_ranks > 1 else None
    # before anything is worked out of a configuration that another rank does not have
    agree_on_job(
        ds_config,
        block.model_dump(),
        model=model,
        optimizer=call.get("optimizer"),
        scheduler=call.get("lr_scheduler"),
        data=call.get("training_data"),
        group=group,
    )
    check_ranks(block, num_ranks)
    setting = setting_of(
        ds_config,
        rank=dist.get_rank(),
        num_ranks=num_ranks,
        device=placement.own_device,
        group=group,
        placement=placement,
        optimizer=call.get("optimizer"),
    )
    if setting.dtype == torch.float16 and not get_accelerator().is_fp16_supported():
        raise ConfigError(f"fp16.enabled: this device ({setting.device.type}) computes no fp16; use bf16")
    return setting


def setting_of(
    ds_config: Mapping[str, Any],
    *,
    rank: int,
    num_ranks: int,
    device: torch.device,
    group: dist.ProcessGroup | None,
    placement: JobPlacement | None = None,
    optimizer: Any = None,
) -> Setting:
    """Return what a DeepSpeed configuration makes a job of ``num_ranks`` ranks run in.

    Args:
        group: a CPU group of all ranks; None where one process plans alone.
        placement: where the ranks run; None: on this machine's CPU.
        optimizer: the user's own, or what makes it; None: the configuration's.

    Raises:
        ConfigError: sizes do not divide, or a key requests what stages cannot do.
    """
    # Degrees are not known yet: dtype, ZeRO stage and optimizer are the same for any.
    ds_config = read_deepspeed(ds_config).config
    sizes = batch_arithmetic(ds_config, num_ranks)
    stage = derive_stage_config(ds_config, mini_batch=sizes.mini_batch, degree=1, device_type=device.type)
    block = ds_config.get(BLOCK) or {}
    if block.get("zero") == "auto" and num_ranks > 1:  # costs are of the stages that a planner may choose
        stage = dataclasses.replace(stage, zero_stage=max(stage.zero_stage, 1))
    held = optimizer_bytes(ds_config, optimizer, stage, device_type=device.type)
    if held.assumed and rank == 0:
        logger.warning("%s", held.assumed)
    return Setting(
        rank=rank,
        num_ranks=num_ranks,
        device=device,
        dtype=getattr(torch, stage.dtype),
        sizes=sizes,
        zero_stage=stage.zero_stage,
        optimizer_bytes=held.total,
        group=group,
        placement=placement or JobPlacement.on_one_host(num_ranks, rank=rank),
    )


def _init_distributed(call: Mapping[str, Any], block: GraphPipelineConfig) -> JobPlacement:
    """Join the ranks the launcher started, and return where they run; a script started by itself is one rank."""
    # The group is made here and not by DeepSpeed, which binds it to the device of LOCAL_RANK: there may be fewer.
    is_cuda = get_accelerator().device_name() == "cuda"
    # ranks import torch from one disk, on many hosts: only a limit that the user gave says when that takes too long
    has_limit = "comm_timeout_s" in block.model_fields_set
    placement = join_ranks(
        "cuda" if is_cuda else "cpu",
        timeout_s=block.comm_timeout_s if has_limit else JOINING_TIMEOUT_S,
        group_timeout=default_pg_timeout,
        limit_s=block.comm_timeout_s,
    )
    if placement.fall_back and placement.rank == 0:
        logger.warning("%s", placement.fall_back)
    with without_shared_memory_op():
        deepspeed.init_distributed(
            dist_backend=placement.backend, dist_init_required=call.get("dist_init_required")
        )
    return placement


def _checkpoints_activations(model: Any) -> bool:
    """Return whether a HuggingFace model's own checkpointing is on; releases differ in what they call it."""
    name = "is_activation_checkpointing"
    return bool(getattr(model, name if hasattr(type(model), name) else "is_gradient_checkpointing", False))


def _optimizer_of(
    model: nn.Module | StageGraph, call: Mapping[str, Any]
) -> tuple[Callable[..., Any] | None, list[dict[str, Any]] | None]:
    """Return a constructor for each stage's optimizer and the parameter groups by name.

    Raises:
        ConfigError: a group names a tensor that is no parameter of the model.
    """
    optimizer = call.get("optimizer")
    groups = call.get("model_parameters")
    make: Callable[..., Any] | None = None
    if isinstance(optimizer, torch.optim.Optimizer):
        if optimizer.state:
            raise ConfigError(
                "deepspeed.initialize: the optimizer has taken steps already; pass a fresh one or a callable "
                "(parameters -> optimizer), or load a checkpoint"
            )
        # An optimizer of the whole model is taken as a recipe: its class and options make one for each stage.
        kind, defaults = type(optimizer), dict(optimizer.defaults)
        allowed = inspect.signature(kind.__init__).parameters
        options = {key: value for key, value in defaults.items() if key in allowed}
        groups = optimizer.param_groups if groups is None else groups
        make = functools.partial(kind, **options)
    elif callable(optimizer):
        make = optimizer
    elif optimizer is not None:
        raise ConfigError(
            f"deepspeed.initialize: optimizer is a {type(optimizer).__name__}; pass a torch optimizer, a callable "
            "(parameters -> optimizer), or an optimizer block in the JSON"
        )
    return make, _named_groups(model, groups) if groups is not None else None


def _named_groups(model: nn.Module | StageGraph, groups: Any) -> list[dict[str, Any]]:
    # By identity, so that groups made from any of a parameter's names mean the parameter.
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        names.setdefault(id(parameter), name)
    listed = list(groups)
    if not all(isinstance(group, Mapping) for group in listed):
        listed = [{"params": listed}]
    named = []
    for position, group in enumerate(listed):
        members = group["params"]
        tensors = [members] if isinstance(members, torch.Tensor) else list(members)
        # One tensor, a list of them, or of (name, tensor) as `named_parameters` gives.
        tensors = [item[1] if isinstance(item, tuple) else item for item in tensors]
        foreign = [index for index, tensor in enumerate(tensors) if id(tensor) not in names]
        if foreign:
            raise ConfigError(
                f"model_parameters: group {position} has {len(foreign)} tensors that are no parameters of the model "
                f"(first at position {foreign[0]}); build the groups from model.named_parameters() of this model"
            )
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        named.append({"params": [names[id(tensor)] for tensor in tensors], **options})
    return named


def _scheduler_of(call: Mapping[str, Any]) -> Callable[..., Any] | None:
    scheduler = call.get("lr_scheduler")
    # a class is a callable like others: DeepSpeed calls it with the optimizer
    if (
        scheduler is None
        or isinstance(scheduler, type)
        or (callable(scheduler) and not hasattr(scheduler, "step"))
    ):
        return scheduler
    raise ConfigError(
        f"deepspeed.initialize: lr_scheduler is a {type(scheduler).__name__}, bound to an optimizer of the whole "
        "model; pass a callable (optimizer -> scheduler), or a scheduler block in the JSON"
    )
