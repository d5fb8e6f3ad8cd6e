"""Stock DeepSpeed beside the graph: the captured model as a chain, run by DeepSpeed's own `PipelineEngine`.

``"planner": "stock_1f1b"`` in the ``graph_pipeline`` block gets a user's script this engine instead of
`GraphPipelineEngine`: the same capture, operators, batches and optimizer; DeepSpeed's chain of stages, its 1F1B
schedule, its messages, its optimizer step.

Source: DeepSpeed 0.19.8, its PipelineEngine
Tests: tests/integrations/test_stock.py, tests/integrations/test_stock_layer.py, tests/plan/test_stock.py,
    tests/plan/test_stock.py
"""

from __future__ import annotations

import copy
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe.module import PipelineModule, TiedLayerSpec
from torch import Tensor, nn

from gpp_plugin.config.block import GraphPipelineConfig
from gpp_plugin.engine.loading.row_loader import make_row_loader
from gpp_plugin.errors import ConfigError, PlanError
from gpp_plugin.integrations.deepspeed.config_values import derive_stage_config
from gpp_plugin.integrations.deepspeed.learning_rates import StageParameterGroups
from gpp_plugin.integrations.deepspeed.stage_optimizer import device_arguments
from gpp_plugin.integrations.deepspeed.stock_engine import (
    ChainLayer,
    ChainRunner,
    ChainSource,
    StockPipelineEngine,
)
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.model.materialize import release_parameters
from gpp_plugin.model.model_source import ModelSource
from gpp_plugin.model.preparation import Setting
from gpp_plugin.plan.baselines.stock_chain import STOCK, linearise
from gpp_plugin.runtime.batches import Batch
from gpp_plugin.runtime.rank_programs import held_tensors, tied_stages
from gpp_plugin.runtime.stage_module import Reference, StageModule

logger = logging.getLogger(__name__)

_BREAKS_DEEPSPEED = ("wall_clock_breakdown", "flops_profiler", "autotuning")
"""Keys with which DeepSpeed's pipeline engine crashes (timers started twice)."""


# In this order because DeepSpeed's constructor takes everything at once and changes what it receives:
#
#   plan, code         as for the graph; the code says which tensors this stage reads
#   tensors            only these become real; 0-d ones get an axis, which its broadcast and clipping need
#   module             parameters of several stages become DeepSpeed's TiedLayerSpec, the others a layer's
#   engine             casts buffers to its own dtype (undone by `_put_back`), may move parameters
#   bind, use          only now: the layer's code computes with the tensors that the engine left in place
#
# A chain of 2 stages with a tied embedding is laid out for DeepSpeed as [tied0, layer | tied0, layer]: a
# stage's part is bounded by `_ChainModule._bounds`, [0, 2, 4].
def make_stock_engine(
    *,
    model: nn.Module,
    ds_config: Mapping[str, Any],
    config: GraphPipelineConfig,
    setting: Setting,
    sample_batch: Batch,
    optimizer: Callable[..., Any] | None = None,
    parameter_groups: Sequence[Mapping[str, Any]] | None = None,
    lr_scheduler: Callable[..., Any] | None = None,
    training_data: Any = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> StockPipelineEngine:
    """Capture, profile and cut the model into a chain, and return DeepSpeed's engine on it; collective.

    The arguments are those of `GraphPipelineEngine`; as there the model keeps only what its rank needs.

    Raises:
        GppError: model, configuration or plan do not fit, or are beyond what DeepSpeed's pipeline can do.
    """
    _check_config(config, setting)
    planned = ModelSource(model, config=config, setting=setting)
    reference, plan = planned.prepare_plan(sample_batch)
    if reference.analysis.takes_whole_units:
        raise ConfigError(
            f"planner {STOCK!r}: {type(model).__name__} takes whole loss units, for Python reads values of them or its "
            "structure differs with the samples, which DeepSpeed's pipeline cannot; choose another planner"
        )
    check_stock_plan(plan, setting)
    engine_config = _deepspeed_config(ds_config, plan, setting)
    source = ChainSource(model=model, planned=planned, config=config, setting=setting)
    runner = ChainRunner(source, reference, plan)
    code = runner.code_for(sample_batch)
    tied = {name: f"tied{i}" for i, name in enumerate(tied_stages(plan, reference))}
    tensors, spare = _stage_tensors(runner, code.function.tensors)
    scalars = [name for name, tensor in tensors.items() if tensor.ndim == 0]
    # DeepSpeed fails to broadcast or clip a parameter without a dimension
    tensors |= {name: tensors[name].reshape(1) for name in scalars}
    known = {p.name: p for p in reference.analysis.op_graph.parameters}
    # what only this stage holds, as a module that DeepSpeed's engine finds parameters and buffers in
    alone = {name: tensor for name, tensor in tensors.items() if name not in tied}
    own = StageModule(
        tensors=alone,
        parameters=[name for name in alone if not known[name].is_buffer],
        frozen=frozenset(name for name in alone if not known[name].requires_grad),
        persistent=frozenset(name for name in alone if known[name].is_persistent),
    )
    layer = ChainLayer(module=own, comm_dtype=_comm_dtype(plan, reference, setting), device=setting.device)
    # From here on the user's model holds buffers only: its parameters are this layer's, or other ranks'.
    release_parameters(model, keep=(p.name for p in known.values() if p.is_buffer))
    with _local_rank_of(setting.device):
        tied_tensors = {key: tensors.get(name) for name, key in tied.items()}
        module = _ChainModule(plan, reference, layer, tied=tied_tensors)
    trained = dict(layer.stage.named_parameters())
    trained.update({name: module.tied_modules[key].weight for name, key in tied.items() if name in tensors})
    groups = StageParameterGroups({n: p for n, p in trained.items() if p.requires_grad}, parameter_groups)
    parameters = groups.optimizer_input(trained) or [layer.add_unused()]
    buffers = dict(layer.stage.named_buffers())
    engine = StockPipelineEngine(
        args=device_arguments(setting.device),
        model=module,
        optimizer=optimizer,
        model_parameters=parameters,
        lr_scheduler=lr_scheduler,
        mpu=module.mpu(),
        config=engine_config,
        config_class=DeepSpeedConfig(engine_config, module.mpu()),
    )
    _put_back(layer.stage, buffers)
    layer.bind({**trained, **buffers}, scalars=scalars)
    layer.use(code)
    engine.attach(runner, layer, spare=spare, sample_batch=sample_batch)
    if training_data is not None:
        load = functools.partial(make_row_loader, training_data, plan=plan, config=config, setting=setting)
        engine.use_rows(functools.partial(load, collate_fn=collate_fn, reads=None))
    if setting.rank == 0 and engine.carried:
        logger.info(
            "%s: DeepSpeed cannot send int64 or tensors without a gradient between stages; %s travel as the bits of "
            "floats, packed into one tensor (exact for every value)",
            STOCK,
            ", ".join(engine.carried),
        )
    return engine


@contextmanager
def _local_rank_of(device: torch.device) -> Iterator[None]:
    """Let LOCAL_RANK be the number of the rank's device: DeepSpeed's module moves itself to that one."""
    before = os.environ["LOCAL_RANK"]
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    try:
        yield
    finally:
        os.environ["LOCAL_RANK"] = before


def _stage_tensors(runner: ChainRunner, read: Sequence[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return what this rank's stage trains with, and what rests on the last stage for exports.

    Args:
        read: names that the stage's code reads.
    """
    held = held_tensors(runner.plan, runner.reference)[runner.stage_index]
    is_last = runner.stage_index == len(runner.plan.stages) - 1
    tensors = runner.source.materialise([*dict.fromkeys((*read, *held))])
    spare = {name: tensors.pop(name) for name in held if is_last and name not in runner.used}
    return tensors, spare


def check_stock_plan(plan: PipelinePlan, setting: Setting) -> None:
    """Refuse a plan (one the user gives) that DeepSpeed's pipeline cannot run.

    Raises:
        PlanError: degrees, micro-batches or ranks are not those of a chain of equals.
    """
    # DeepSpeed numbers ranks stage by stage, as many for each: 8 ranks in 4 stages are (0 1)(2 3)(4 5)(6 7),
    # and each rank takes a loss unit at a time, so a stage's micro-batch is u * 2.
    degree = setting.num_ranks // len(plan.stages)
    shared = next((r for r in range(plan.num_ranks) if len(plan.stages_of_rank(r)) > 1), None)
    if shared is not None:
        raise PlanError(
            f"{STOCK}: rank {shared} holds the stages {plan.names_on_rank(shared)}; DeepSpeed's pipeline has one a "
            "rank; remove graph_pipeline.plan or choose another planner"
        )
    for index, stage in enumerate(plan.stages):
        if stage.model_parallel > 1:
            raise PlanError(
                f"{STOCK}: stage {stage.name} has {stage.model_parallel} tensor or context ranks a sample; DeepSpeed's "
                "pipeline has none; remove graph_pipeline.plan or choose another planner"
            )
        ranks = tuple(range(index * degree, (index + 1) * degree))
        if stage.ranks != ranks or stage.micro_batch_size != plan.loss_unit * degree:
            raise PlanError(
                f"{STOCK}: stage {stage.name} runs {stage.micro_batch_size} samples on the ranks {list(stage.ranks)}; "
                f"DeepSpeed's pipeline needs {plan.loss_unit * degree} samples on {list(ranks)} there; remove "
                "graph_pipeline.plan or choose another planner"
            )


def _check_config(config: GraphPipelineConfig, setting: Setting) -> None:
    """Refuse what DeepSpeed's pipeline cannot do before any work.

    Raises:
        ConfigError: as it says.
    """
    if setting.zero_stage >= 2:
        raise ConfigError(
            f"zero_optimization.stage: {setting.zero_stage} is incompatible with DeepSpeed's pipeline; use 0 or 1 to "
            f"compare with {STOCK}"
        )
    wrong = {
        f"schedule: {config.schedule!r}, but {STOCK} runs 1F1B": config.schedule not in ("auto", "1f1b"),
        f"units: {config.units}, but {STOCK} runs micro-batches of one shape": config.units is not None,
        f"loss_mean: {config.loss_mean!r}, but {STOCK} takes the mean of losses": config.loss_mean != "units",
        f"memory.recompute: {STOCK} keeps what backward needs": config.memory.recompute == "full",
    }
    for line, is_so in wrong.items():
        if is_so:
            raise ConfigError(f"graph_pipeline.{line}; remove it")
    if config.trace_path is not None:
        logger.warning(
            "graph_pipeline.trace_path: DeepSpeed's engine records no timeline; nothing is written"
        )


def _deepspeed_config(ds_config: Mapping[str, Any], plan: PipelinePlan, setting: Setting) -> dict[str, Any]:
    """Return the user's configuration as DeepSpeed's engine gets it, without what breaks it."""
    plain = {key: copy.deepcopy(value) for key, value in ds_config.items() if key != "graph_pipeline"}
    for key in _BREAKS_DEEPSPEED:
        if plain.pop(key, None):
            logger.warning("%s: removed for %s, DeepSpeed's pipeline engine crashes with it", key, STOCK)
    if not plain.get("steps_per_print"):
        plain["steps_per_print"] = None
    degree = plan.stages[0].degree
    # DeepSpeed's B = u * accumulation * degree, which ours need not be: 64 samples, u = 4, degree
    # 2 accumulate 8 times.
    plain["train_batch_size"] = plan.mini_batch
    plain["train_micro_batch_size_per_gpu"] = plan.loss_unit
    plain["gradient_clipping"] = float(ds_config.get("gradient_clipping") or 0.0)
    plain["gradient_accumulation_steps"] = plan.mini_batch // (plan.loss_unit * degree)
    derived = derive_stage_config(
        ds_config, mini_batch=plan.mini_batch, degree=degree, device_type=setting.device.type
    )
    if "optimizer" in derived.deepspeed:
        plain["optimizer"] = derived.deepspeed["optimizer"]
    return plain


def _comm_dtype(plan: PipelinePlan, reference: Reference, setting: Setting) -> torch.dtype:
    """Return the one dtype of everything that travels: one that holds all tensors with a gradient exactly."""
    specs = reference.block_graph.tensors
    cuts = [stage.after for stage in linearise(plan, reference.block_graph) if stage.after is not None]
    # bf16 activations beside fp32 logits travel as fp32, both exactly; DeepSpeed has one
    # buffer dtype a position.
    dtypes = {getattr(torch, specs[name].dtype) for cut in cuts for name in cut.differentiable}
    return functools.reduce(torch.promote_types, sorted(dtypes, key=str)) if dtypes else setting.dtype


def _put_back(module: StageModule, buffers: Mapping[str, Tensor]) -> None:
    """Undo DeepSpeed's cast of buffers: the captured operators expect them as they were."""
    for name, tensor in buffers.items():
        *path, leaf = name.split(".")
        module.get_submodule(".".join(path))._buffers[leaf] = tensor


class _Tied(nn.Module):
    """Holds a parameter that several stages use."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(tensor)


class _ChainModule(PipelineModule):
    """DeepSpeed's module with the plan's cuts: a layer a stage, behind one for each tied parameter it uses.

    Args:
        layer: this rank's.
        tied: DeepSpeed's key of every tied parameter -> its tensor, None where this rank does not use it.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        reference: Reference,
        layer: ChainLayer,
        *,
        tied: Mapping[str, Tensor | None],
    ) -> None:
        users = list(tied_stages(plan, reference).values())
        layers: list[Any] = []
        self._bounds = [0]
        for index, _ in enumerate(plan.stages):
            for (key, tensor), stages in zip(tied.items(), users, strict=True):
                if index in stages:
                    spec = TiedLayerSpec(
                        key,
                        _Tied,
                        tensor,
                        forward_fn=lambda module, inputs: inputs,
                        tied_weight_attr="weight",
                    )
                    layers.append(spec)
            layers.append(layer)
            self._bounds.append(len(layers))
        with torch.no_grad():  # DeepSpeed broadcasts tied parameters in place
            super().__init__(layers=layers, num_stages=len(plan.stages), partition_method="given")

    def _partition_layers(self, method: str = "given") -> None:
        self.parts = self._bounds
        self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])
