"""Stock DeepSpeed beside the graph: the captured model as a chain, run by DeepSpeed's own `PipelineEngine`.

``"planner": "stock_1f1b"`` in the ``graph_pipeline`` block gets a user's script this engine instead of
`GraphPipelineEngine`: the same capture, operators, batches and optimizer; DeepSpeed's chain of stages, its 1F1B
schedule, its messages, its optimizer step. What is added to DeepSpeed's engine here: batches are dicts, and tensors
to which no gradient flows get one of zeros, which DeepSpeed would otherwise refuse to send.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe import schedule as ds_schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule, TiedLayerSpec
from torch import Tensor, nn

from gpp_plugin.capture.coarsen import coarsen
from gpp_plugin.capture.export import count_samples, recapture, resize_batch
from gpp_plugin.config import GraphPipelineConfig
from gpp_plugin.errors import ConfigError, PlanError
from gpp_plugin.integrations import huggingface
from gpp_plugin.integrations.data import Feed, make_loader, repeat
from gpp_plugin.integrations.learning_rates import StageParameterGroups
from gpp_plugin.integrations.preparation import Setting, analyse, prepare_plan
from gpp_plugin.integrations.stage_config import derive_stage_config
from gpp_plugin.integrations.stock_layer import ChainCode, ChainLayer, at_least_1d
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.tensors import TensorSpec
from gpp_plugin.plan.linearise import ChainStage, linearise
from gpp_plugin.plan.stock import STOCK
from gpp_plugin.runtime.batches import Batch, shape_key, slice_batch
from gpp_plugin.runtime.evaluation import evaluation_plan
from gpp_plugin.runtime.materialize import materialize_parameters, release_parameters
from gpp_plugin.runtime.pipeline import MAX_SHAPES, Reference, held_tensors, tied_stages
from gpp_plugin.runtime.stage_module import StageModule, build_stage_function

logger = logging.getLogger(__name__)

LOADING_TIMEOUT_S = 600.0
"""How long a rank waits for others to load a mini-batch."""

_BREAKS_DEEPSPEED = ("wall_clock_breakdown", "flops_profiler", "autotuning")
"""Keys with which DeepSpeed's pipeline engine crashes (timers started twice)."""


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
    reference, plan = prepare_plan(model, sample_batch, config=config, setting=setting)
    check_stock_plan(plan, setting)
    engine_config = _deepspeed_config(ds_config, plan, setting)
    source = _Source(model=model, config=config, setting=setting)
    lane = _ChainLane(source, reference, plan)
    code = lane.code_for(sample_batch)
    stage = plan.stage_of_rank(setting.rank)
    tied = {name: f"tied{i}" for i, name in enumerate(tied_stages(plan, reference))}
    held = held_tensors(plan, reference)
    unused = [name for name in held[-1] if name not in lane.used] if stage == len(plan.stages) - 1 else []
    tensors = source.materialise([*dict.fromkeys((*code.function.tensors, *held[stage]))])
    spare = {name: tensors.pop(name) for name in unused}
    scalars = [name for name, tensor in tensors.items() if tensor.ndim == 0]
    tensors = {name: at_least_1d(tensor) for name, tensor in tensors.items()}
    known = {p.name: p for p in reference.analysis.op_graph.parameters}
    own = {name: tensor for name, tensor in tensors.items() if name not in tied}
    layer = ChainLayer(
        module=StageModule(
            tensors=own,
            parameters=[name for name in own if not known[name].is_buffer],
            frozen=frozenset(name for name in own if not known[name].requires_grad),
            persistent=frozenset(name for name in own if known[name].is_persistent),
        ),
        wire_dtype=_wire_dtype(plan, reference, setting),
        device=setting.device,
    )
    release_parameters(model, keep=(p.name for p in known.values() if p.is_buffer))
    module = _ChainModule(plan, reference, layer, tied={key: tensors.get(name) for name, key in tied.items()})
    trained = dict(layer.stage.named_parameters())
    trained.update({name: module.tied_modules[key].weight for name, key in tied.items() if name in tensors})
    groups = StageParameterGroups({n: p for n, p in trained.items() if p.requires_grad}, parameter_groups)
    parameters = groups.optimizer_input(trained) or [layer.unused]
    buffers = dict(layer.stage.named_buffers())
    engine = StockPipelineEngine(
        args=None,
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
    engine.attach(lane, layer, spare=spare, sample_batch=sample_batch)
    if training_data is not None:
        engine.training_dataloader = make_loader(
            training_data, mini_batch=plan.mini_batch, collate_fn=collate_fn, seed=config.seed
        )
        engine.set_dataloader(engine.training_dataloader)
    if setting.rank == 0:
        _log_carried(lane)
    return engine


def check_stock_plan(plan: PipelinePlan, setting: Setting) -> None:
    """Refuse a plan (one the user gives) that DeepSpeed's pipeline cannot run.

    Raises:
        PlanError: degrees, micro-batches or ranks are not those of a chain of equals.
    """
    degree = setting.num_ranks // len(plan.stages)
    for index, stage in enumerate(plan.stages):
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
    if config.schedule not in ("auto", "1f1b"):
        raise ConfigError(f"graph_pipeline.schedule: {config.schedule!r}, but {STOCK} runs 1F1B; remove it")
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


def _wire_dtype(plan: PipelinePlan, reference: Reference, setting: Setting) -> torch.dtype:
    """Return the one dtype of everything that travels.

    Raises:
        PlanError: tensors with a gradient have several.
    """
    specs = reference.block_graph.tensors
    cuts = [stage.after for stage in linearise(plan, reference.block_graph) if stage.after is not None]
    names = {name for cut in cuts for name in cut.differentiable}
    dtypes = sorted({specs[name].dtype for name in names})
    if len(dtypes) > 1:
        odd = sorted(name for name in names if specs[name].dtype == dtypes[-1])
        raise PlanError(
            f"{STOCK}: tensors of {' and '.join(dtypes)} with a gradient cross its stages (e.g. {odd[0]}), and "
            "DeepSpeed's receive buffers hold one dtype; train in fp32, or change stages"
        )
    dtype: torch.dtype = getattr(torch, dtypes[0]) if dtypes else setting.dtype
    return dtype


def _put_back(module: StageModule, buffers: Mapping[str, Tensor]) -> None:
    """Undo DeepSpeed's cast of buffers: the captured operators expect them as they were."""
    for name, tensor in buffers.items():
        *path, leaf = name.split(".")
        module.get_submodule(".".join(path))._buffers[leaf] = tensor


def _log_carried(lane: _ChainLane) -> None:
    cuts = [stage.after for stage in lane.chain if stage.after is not None]
    carried = sorted({name for cut in cuts for name in (*cut.constant, *cut.inputs)})
    if carried:
        logger.info(
            "%s: DeepSpeed cannot send int64 or tensors without a gradient between stages; %s travel as the bits of "
            "floats, packed into one tensor (exact for every value)",
            STOCK,
            ", ".join(carried),
        )


class _Tied(nn.Module):
    """Holds a parameter that several stages use."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(tensor)


def _pass(module: nn.Module, inputs: Any) -> Any:
    return inputs


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
                    layers.append(
                        TiedLayerSpec(key, _Tied, tensor, forward_fn=_pass, tied_weight_attr="weight")
                    )
            layers.append(layer)
            self._bounds.append(len(layers))
        super().__init__(layers=layers, num_stages=len(plan.stages), partition_method="given")

    def _partition_layers(self, method: str = "given") -> None:
        self.parts = self._bounds
        self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """Where captures and parameters come from."""

    model: nn.Module
    config: GraphPipelineConfig
    setting: Setting

    def materialise(self, names: Sequence[str]) -> dict[str, Tensor]:
        return materialize_parameters(
            self.model,
            names,
            device=self.setting.device,
            dtype=self.setting.dtype,
            seed=self.config.seed,
            weights=self.config.weights,
        )


class _ChainLane:
    """This rank's stage of the chain in one mode, training or evaluation: its code by shape."""

    def __init__(self, source: _Source, reference: Reference, plan: PipelinePlan) -> None:
        self.source, self.reference, self.plan = source, reference, plan
        self.stage_index = plan.stage_of_rank(source.setting.rank)
        self.chain: tuple[ChainStage, ...] = linearise(plan, reference.block_graph)
        self.used = {name for block in reference.block_graph.blocks for name in block.parameters}
        self._codes: dict[tuple[Any, ...], ChainCode] = {}

    def code_for(self, batch: Batch) -> ChainCode:
        """Return the stage's code for batches of this shape; captured when it is new."""
        key = shape_key(batch, count_samples(batch))
        if key not in self._codes:
            while len(self._codes) >= MAX_SHAPES:
                del self._codes[next(iter(self._codes))]
            self._codes[key] = self._make_code(batch)
        return self._codes[key]

    def _make_code(self, batch: Batch) -> ChainCode:
        unit = resize_batch(batch, self.plan.loss_unit)
        captured = recapture(self.source.model, self.reference.analysis, unit)
        graph = coarsen(captured, granularity=self.reference.granularity)
        blocks = {block.name: block for block in graph.blocks}
        nodes = [n for name in self.plan.stages[self.stage_index].blocks for n in blocks[name].nodes]
        chain, loss = self.chain[self.stage_index], str(captured.op_graph.loss)
        outputs = chain.makes if chain.after is not None else (loss,)
        specs: dict[str, TensorSpec] = {spec.name: spec for spec in captured.op_graph.inputs}
        specs.update(graph.tensors)
        return ChainCode(
            chain=chain, function=build_stage_function(captured, nodes, outputs), specs=specs, loss=loss
        )

    def micro_batches(self, batch: Batch, code: ChainCode, count: int) -> list[tuple[Tensor, ...]]:
        """Return what this rank loads of each micro-batch."""
        setting = self.source.setting
        return slice_batch(
            batch,
            code.chain.loads,
            stage=self.plan.stages[self.stage_index],
            rank=setting.rank,
            num_micro_batches=count,
            specs=code.specs,
            device=setting.device,
            dtype=setting.dtype,
        )


class _Handed:
    """What DeepSpeed's engine iterates over: one micro-batch's inputs to the first stage, or past DeepSpeed's
    labels to the last stage's layer, which runs next.
    """

    def __init__(self, layer: ChainLayer, micro_batches: Sequence[tuple[Tensor, ...]]) -> None:
        self._layer, self._rest = layer, iter(micro_batches)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> tuple[tuple[Tensor, ...], tuple[()]]:
        self._layer.own_inputs = next(self._rest)
        return self._layer.own_inputs, ()


class StockPipelineEngine(PipelineEngine):
    """DeepSpeed's `PipelineEngine` for batches that are dicts; made by `make_stock_engine`.

    ``plan`` is the chain in force.
    """

    plan: PipelinePlan

    def attach(
        self, lane: _ChainLane, layer: ChainLayer, *, spare: Mapping[str, Tensor], sample_batch: Batch
    ) -> None:
        """Take what DeepSpeed's constructor knows nothing of.

        Args:
            spare: parameters that training does not use, for exports.
        """
        setting = lane.source.setting
        self.plan = lane.plan
        self._lane, self._layer, self._spare = lane, layer, dict(spare)
        self._evaluation: dict[tuple[str, ...], _ChainLane] = {}
        self._code = lane.code_for(sample_batch)
        self._batches: Iterator[Any] | None = None
        self._owns_loader = False
        self._feed = Feed(
            model=lane.source.model,
            mini_batch=lane.plan.mini_batch,
            reads_inputs=self.is_first_stage() or self.is_last_stage(),
            source=0,
            group=setting.group,
            keys=sample_batch,
            timeout_s=max(lane.source.config.comm_timeout_s, LOADING_TIMEOUT_S),
        )

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Run one optimizer step on ``train_batch_size`` samples, as `GraphPipelineEngine.train_batch`."""
        if self.optimizer is None:
            raise ConfigError(
                "optimizer: missing, train_batch() would change no weights; add an optimizer block to the DeepSpeed "
                "configuration, or pass optimizer= to deepspeed.initialize"
            )
        batch = self._take_mini_batch(data_iter)
        code = self._use(self._lane, batch)
        self.set_dataiterator(_Handed(self._layer, self._lane.micro_batches(batch, code, self.micro_batches)))
        loss: Tensor = super().train_batch()
        return loss

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Evaluate one batch from ``data_iter`` and return its mean loss.

        Raises:
            ConfigError: outputs are asked for, or DeepSpeed's micro-batches do not divide the batch.
        """
        if return_logits or not compute_loss or reduce_output != "avg" or num_micro_batches is not None:
            raise ConfigError(
                f"eval_batch: {STOCK} evaluates the mean loss only; use another planner for the model's outputs"
            )
        batch = self._feed.take(data_iter)
        samples = count_samples(batch)
        size = self.plan.stages[0].micro_batch_size
        if samples % size:
            raise ConfigError(
                f"eval_batch: DeepSpeed's micro-batches of {size} samples do not divide the {samples} of the batch; "
                f"drop {samples % size} samples or use another planner"
            )
        lane = self._evaluation_lane(batch)
        code = self._use(lane, batch)
        count = samples // size
        handed = _Handed(self._layer, lane.micro_batches(batch, code, count))
        return super().eval_batch(handed, bcast_loss=bcast_loss, num_micro_batches=count)

    def set_dataloader(self, loader: Any) -> None:
        """Use ``loader`` (the same batches on every rank) when `train_batch` is called without data."""
        self._owns_loader = loader is self.training_dataloader
        self._batches = repeat(loader)

    def set_dataiterator(self, iterator: Any) -> None:
        """Use ``iterator`` when `train_batch` is called without data."""
        if iterator is None or isinstance(iterator, _Handed):  # from DeepSpeed's own loop
            self.data_iterator = iterator
        else:
            self._batches, self._owns_loader = iterator, False

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Apply ``fn`` to every batch that is taken from an iterator; it returns a dict of tensors."""
        self._feed.batch_fn = fn

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write the model as HuggingFace files, as `GraphPipelineEngine.save_pretrained` does."""
        persistent = {p.name for p in self._lane.reference.analysis.op_graph.parameters if p.is_persistent}
        state = {n: t.detach() for n, t in self._layer.named_values().items() if n in persistent}
        setting = self._lane.source.setting
        huggingface.save_pretrained(
            save_directory,
            model=self._lane.source.model,
            state={**state, **self._spare},
            stage_index=self.stage_id,
            num_stages=self.num_stages,
            is_writer=self.plan.stages[self.stage_id].ranks[0] == self.global_rank,
            group=setting.group,
        )

    def _take_mini_batch(self, data_iter: Iterator[Any] | None) -> dict[str, Any]:
        if data_iter is not None:
            return self._feed.collect(data_iter)
        if self._batches is None:
            raise ConfigError(
                "train_batch() has no data: pass training_data to deepspeed.initialize, an iterator to "
                "train_batch(data_iter=...), or call set_dataloader()"
            )
        return self._feed.load(self._batches) if self._owns_loader else self._feed.collect(self._batches)

    def _use(self, lane: _ChainLane, batch: Batch) -> ChainCode:
        """Let the layer run at this batch's shape; DeepSpeed exchanges shapes anew where it has changed."""
        code = lane.code_for(batch)
        if code is not self._code:
            missing = [name for name in code.function.tensors if name not in self._layer.tensors]
            if missing:  # what only evaluation reads (a mask's buffer, say)
                self._layer.bind({**self._layer.tensors, **lane.source.materialise(missing)})
            self._layer.use(code)
            self.reset_activation_shape()
            self._code = code
        return code

    def _evaluation_lane(self, batch: Batch) -> _ChainLane:
        key = tuple(sorted(batch))
        if key not in self._evaluation:
            source, training = self._lane.source, self._lane.reference
            reference = analyse(
                source.model, batch, config=source.config, setting=source.setting, is_training=False
            )
            if reference.analysis.op_graph.loss is None:
                raise ConfigError(
                    f"eval_batch: the model returns no loss for a batch of {sorted(batch)}; give labels"
                )
            parameters = {p.name for p in reference.analysis.op_graph.parameters if not p.is_buffer}
            held = [parameters.intersection(names) for names in held_tensors(self.plan, training)]
            plan = evaluation_plan(self.plan, reference.block_graph, parameters=parameters, held=held)
            self._evaluation[key] = _ChainLane(source, reference, plan)
        return self._evaluation[key]

    def _exec_send_grads(self, buffer_id: int) -> None:
        """Send zeros for received tensors that no gradient reached; DeepSpeed asserts there is one."""
        inputs = self.pipe_buffers["inputs"][buffer_id]
        for tensor in inputs:
            if tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
        super()._exec_send_grads(buffer_id)

    _INSTRUCTION_MAP = {**PipelineEngine._INSTRUCTION_MAP, ds_schedule.SendGrad: _exec_send_grads}
