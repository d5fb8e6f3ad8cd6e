"""DeepSpeed's `PipelineEngine` for a captured chain: dict batches in, the stage's code by shape, a timeline out.

Two things of DeepSpeed's engine are changed. Batches are dicts of a whole mini-batch, the same stream on every rank;
and received tensors that no gradient reaches get one of zeros, where DeepSpeed fails on an assertion.

Source: DeepSpeed 0.19.8, its PipelineEngine
Tests: tests/integrations/test_stock.py, tests/integrations/test_stock_layer.py, tests/plan/test_stock.py,
    tests/plan/test_stock.py
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import deepspeed
import torch
from deepspeed.runtime.pipe import schedule as ds_schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule
from torch import Tensor, nn

from gpp_plugin.capture.coarsen import coarsen
from gpp_plugin.capture.recapture import recapture
from gpp_plugin.capture.tracing.sample_batches import count_samples, resize_batch
from gpp_plugin.config.block import GraphPipelineConfig
from gpp_plugin.engine.compatibility import check_directory
from gpp_plugin.engine.loading.batch_source import LOADING_TIMEOUT_S, BatchSource
from gpp_plugin.engine.loading.row_loader import RowLoader
from gpp_plugin.engine.loading.training_data import TrainingData
from gpp_plugin.engine.metrics import keep_timeline
from gpp_plugin.errors import ConfigError
from gpp_plugin.integrations.deepspeed.config_values import NO_OPTIMIZER
from gpp_plugin.integrations.deepspeed.stage_optimizer import without_shared_memory_op
from gpp_plugin.integrations.huggingface import hf_weights
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.tensors import TensorSpec
from gpp_plugin.ir.timeline import Event, EventKind, Timeline
from gpp_plugin.model.graph.stage_graph import prepare_batch
from gpp_plugin.model.materialize import materialize_for
from gpp_plugin.model.model_source import ModelSource
from gpp_plugin.model.preparation import Setting
from gpp_plugin.plan.baselines.stock_chain import STOCK, ChainStage, Cut, linearise
from gpp_plugin.runtime.batches import Batch, InputLink, InputRows, ones_among, shape_key
from gpp_plugin.runtime.random_streams import MODEL_STREAMS
from gpp_plugin.runtime.rank_programs import evaluation_plan, held_tensors
from gpp_plugin.runtime.ranks.collectives import Collectives
from gpp_plugin.runtime.recorder import start_clock
from gpp_plugin.runtime.stage_module import Reference, StageFunction, StageModule, build_stage_function
from gpp_plugin.runtime.stage_runner import MAX_SHAPES

# One stage of a captured model as a layer for DeepSpeed's `PipelineModule`: a tuple of tensors in, one out.
#
# Stock DeepSpeed sends every element of the tuple, expects a gradient for each floating one, and keeps one buffer a
# position for activations and gradients, whatever their dtype. So what has a gradient travels in one dtype, wide
# enough for all of it; everything else (token ids, masks, inputs of later stages) is packed into a single tensor of
# that dtype by its bits, which is exact for every value, and gets a gradient that nobody reads.

Boundary = tuple[Tensor, ...]
Specs = Mapping[str, TensorSpec]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainCode:
    """A stage's code at one shape.

    Args:
        chain: what the stage reads, makes and passes on.
        specs: of what crosses the cuts around it: tensors by node name, inputs by batch key.
        loss: node name of the loss, which the last stage returns.
    """

    chain: ChainStage
    function: StageFunction
    specs: Mapping[str, TensorSpec]
    loss: str


class ChainLayer(nn.Module):
    """The layer of one stage.

    Args:
        module: its own parameters and buffers.
        comm_dtype: of everything that travels.
        device: where it computes.
    """

    def __init__(self, *, module: StageModule, comm_dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.stage = module
        self.own_inputs: Boundary = ()
        self._comm_dtype = comm_dtype
        self.tensors: dict[str, Tensor] = {}
        self._code: ChainCode | None = None
        self._scalars: set[str] = set()
        self._arguments: list[tuple[Tensor, bool]] = []
        self._device = device
        self._anchor = torch.zeros(1, requires_grad=True, device=device)

    def add_unused(self) -> nn.Parameter:
        """Return a parameter that nothing uses, for a stage that trains none.

        DeepSpeed runs a backward on every stage, and has no optimizer without a parameter.
        """
        self.unused = nn.Parameter(torch.zeros(1, device=self._device))
        return self.unused

    def bind(self, tensors: Mapping[str, Tensor], *, scalars: Iterable[str] = ()) -> None:
        """Compute with these parameters and buffers from the next `use` on.

        Args:
            scalars: names of those that were made one-dimensional.
        """
        self.tensors = dict(tensors)
        self._scalars |= set(scalars)

    def use(self, code: ChainCode) -> None:
        """Run this code from now on (another shape, or evaluation)."""
        self._code = code
        self._arguments = [(self.tensors[name], name in self._scalars) for name in code.function.tensors]

    def named_values(self) -> dict[str, Tensor]:
        """Return parameters and buffers by name, in the shapes the model has them in."""
        return {
            name: tensor.view(()) if name in self._scalars else tensor
            for name, tensor in self.tensors.items()
        }

    def forward(self, received: Boundary) -> Boundary | Tensor:
        """Return what later stages need of one micro-batch, or its loss."""
        code = self._code
        assert code is not None, "a layer runs after it received code"
        chain = code.chain
        values: dict[str, Tensor] = {}
        inputs: dict[str, Tensor] = {}
        if chain.before is None:
            inputs.update(zip(chain.loads, received, strict=True))
        else:
            self._unpack(chain.before, code.specs, received, values, inputs)
            inputs.update(zip(chain.loads, self.own_inputs, strict=True))
        if code.function.choice is not None:
            code.function.choice.use(ones_among(inputs, code.function.choice.inputs))
        made = code.function.call(
            *(tensor.view(()) if is_scalar else tensor for tensor, is_scalar in self._arguments),
            *(inputs[key] for key in code.function.batch_inputs),
            *(values[name] for name in code.function.received),
        )
        values.update(zip(code.function.outputs, made, strict=True))
        if chain.after is None:
            return values[code.loss]
        return self._pack(chain.after, code.specs, values, inputs)

    def _pack(
        self, cut: Cut, specs: Specs, values: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
    ) -> Boundary:
        # What crosses a cut, for hidden [4, 16, 64] (samples, tokens, width) in bf16, token ids and a
        # mask for later stages:
        #
        #   position 0   hidden, as bf16                                             gets a gradient
        #   position 1   ids int64 [4, 16] -> 4 x 64 = 256 elements of bf16,
        #                mask bool [4, 16] -> int16 -> 64 elements, joined: [320]    gets zeros
        #
        # One tensor for all constants, since each position costs a message each way and a buffer
        # for each micro-batch.
        payloads = [values[name].to(self._comm_dtype).contiguous() for name in _sent(cut, specs)]
        constants = [*(values[name] for name in cut.constant), *(inputs[key] for key in cut.inputs)]
        bits = [to_bits(tensor, self._comm_dtype) for tensor in constants]
        if any(part.numel() for part in bits):
            payloads.append(_Anchored.apply(torch.cat(bits), self._anchor))  # type: ignore[no-untyped-call]
        return tuple(payloads)

    def _unpack(
        self,
        cut: Cut,
        specs: Specs,
        received: Boundary,
        values: dict[str, Tensor],
        inputs: dict[str, Tensor],
    ) -> None:
        sent = _sent(cut, specs)
        for name, payload in zip(sent, received, strict=False):
            values[name] = payload.to(_dtype_of(specs[name]))
        for name in set(cut.differentiable).difference(sent):
            values[name] = torch.empty(specs[name].shape, dtype=_dtype_of(specs[name]), device=self._device)
        nothing = torch.empty(0, dtype=self._comm_dtype, device=self._device)
        # In the order of `_pack`: constants, then inputs, each as many elements as its spec says.
        packed = received[-1].detach() if len(received) > len(sent) else nothing
        first = 0
        for target, names in ((values, cut.constant), (inputs, cut.inputs)):
            for name in names:
                count = bits_length(specs[name], self._comm_dtype)
                target[name] = from_bits(packed[first : first + count], specs[name])
                first += count


def _dtype_of(spec: TensorSpec) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype


def _sent(cut: Cut, specs: Specs) -> list[str]:
    """Return the differentiable tensors that have elements: nothing travels for the others."""
    return [name for name in cut.differentiable if math.prod(specs[name].shape)]


class _Anchored(torch.autograd.Function):
    """Let DeepSpeed call backward on a tensor that has no gradient."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, anchor: Tensor) -> Tensor:
        return packed.view_as(packed)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


def to_bits(tensor: Tensor, comm_dtype: torch.dtype) -> Tensor:
    """Return the bits of a tensor without a gradient as a flat tensor of ``comm_dtype``."""
    # A view, no rounding: bits that are no number (NaN patterns) arrive as they were, as
    # nobody computes with them.
    flat = tensor.detach().to(_carrier(tensor.dtype, comm_dtype)).reshape(-1).contiguous()
    return flat.view(comm_dtype)


def from_bits(bits: Tensor, spec: TensorSpec) -> Tensor:
    """Return the tensor that `to_bits` made these of."""
    dtype = _dtype_of(spec)
    # A slice may start at any element; a view as a wider type wants its storage aligned, hence the copy.
    carried = bits.clone().view(_carrier(dtype, bits.dtype))
    return carried.to(dtype).view(spec.shape)


def bits_length(spec: TensorSpec, comm_dtype: torch.dtype) -> int:
    """Return how many elements of ``comm_dtype`` the bits of a tensor take."""
    carrier = _carrier(_dtype_of(spec), comm_dtype)
    return math.prod(spec.shape) * carrier.itemsize // comm_dtype.itemsize


def _carrier(dtype: torch.dtype, comm_dtype: torch.dtype) -> torch.dtype:
    """Return a type that holds every value of ``dtype`` and is no narrower than a payload's element."""
    # By width, over payloads of bf16 (2 bytes): bool -> int16, 1 element; int64 stays, 4 elements; float32
    # stays, 2. Over fp32: bool -> int32, 1 element; bf16 -> float32, 1 element, exactly.
    if dtype.itemsize >= comm_dtype.itemsize:
        return dtype
    if dtype.is_floating_point:
        return torch.float64 if comm_dtype.itemsize == 8 else torch.float32
    return {2: torch.int16, 4: torch.int32, 8: torch.int64}[comm_dtype.itemsize]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainSource:
    """Where captures and parameters come from.

    Args:
        planned: the model as it was planned, which evaluation captures.
    """

    model: nn.Module
    planned: ModelSource
    config: GraphPipelineConfig
    setting: Setting

    def materialise(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return real tensors for these parameters and buffers."""
        return materialize_for(self.model, names, setting=self.setting, config=self.config)


class ChainRunner:
    """This rank's stage of the chain in one mode, training or evaluation: its code by shape.

    ``used`` are the names of what any stage reads.
    """

    def __init__(self, source: ChainSource, reference: Reference, plan: PipelinePlan) -> None:
        self.source, self.reference, self.plan = source, reference, plan
        self.stage_index = plan.stage_of_rank(source.setting.rank)
        self.chain: tuple[ChainStage, ...] = linearise(plan, reference.block_graph)
        self.used = {name for block in reference.block_graph.blocks for name in block.parameters}
        self._codes: dict[tuple[Any, ...], ChainCode] = {}
        self._input_link = InputLink(source.setting.device)

    def code_for(self, batch: Batch) -> ChainCode:
        """Return the stage's code for batches of this shape; captured when it is new."""
        key = shape_key(batch, count_samples(batch))
        if key not in self._codes:
            # Dictionaries keep the order of insertion: the oldest shape is dropped first.
            while len(self._codes) >= MAX_SHAPES:
                del self._codes[next(iter(self._codes))]
            self._codes[key] = self._make_code(batch)
        return self._codes[key]

    def _make_code(self, batch: Batch) -> ChainCode:
        # Captured at one loss unit, which is what each rank of a chain computes at a time.
        unit = resize_batch(batch, self.plan.loss_unit)
        device = self.source.setting.device
        captured = recapture(self.source.model, self.reference.analysis, unit, device=device)
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

    def carried(self) -> tuple[str, ...]:
        """Return what crosses cuts without a gradient: batch keys and node names."""
        cuts = [stage.after for stage in self.chain if stage.after is not None]
        return tuple(sorted({name for cut in cuts for name in (*cut.inputs, *cut.constant)}))

    def micro_batches(self, batch: Batch, code: ChainCode, count: int) -> InputRows:
        """Return what this rank loads of each micro-batch."""
        setting = self.source.setting
        stage = self.plan.stages[self.stage_index]
        return self._input_link.slice_batch(
            batch,
            code.chain.loads,
            samples=[stage.samples(micro_batch, setting.rank) for micro_batch in range(count)],
            specs=code.specs,
            dtype=setting.dtype,
        )


class BoundIterator:
    """What DeepSpeed's engine iterates over: one micro-batch's inputs to the first stage, or past DeepSpeed's
    labels to the last stage's layer, which runs next.
    """

    def __init__(self, layer: ChainLayer, micro_batches: Sequence[tuple[Tensor, ...]]) -> None:
        self._layer, self._rest = layer, iter(micro_batches)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> tuple[tuple[Tensor, ...], tuple[()]]:
        # The last stage needs inputs of its own (labels), and DeepSpeed would give them to the loss function,
        # which the captured graph does not have: the loss is inside it. So they go to the layer by the side,
        # and DeepSpeed sees an empty tuple of labels. Its engine takes a micro-batch right before the forward
        # that uses it, so the layer's ``own_inputs`` are always those of the forward that comes next:
        #
        #   stage 0   next() -> (ids,)        forward(ids)          sends
        #   stage 1   receives                next() -> own_inputs  forward(received) reads own_inputs
        self._layer.own_inputs = next(self._rest)
        return self._layer.own_inputs, ()


class StockPipelineEngine(PipelineEngine):
    """DeepSpeed's `PipelineEngine` for batches that are dicts; made by `stock.make_stock_engine`.

    ``plan`` is the chain in force, ``carried`` names what travels between its stages as the bits of floats. With
    ``record_timelines`` each `train_batch` leaves ``last_timeline`` on rank 0.
    """

    plan: PipelinePlan
    carried: tuple[str, ...]

    def attach(
        self, runner: ChainRunner, layer: ChainLayer, *, spare: Mapping[str, Tensor], sample_batch: Batch
    ) -> None:
        """Take what DeepSpeed's constructor has no argument for.

        Args:
            spare: parameters that training does not use, for exports.
        """
        setting = runner.source.setting
        self.plan = runner.plan
        self.carried = runner.carried()
        self._runner, self._layer, self._spare = runner, layer, dict(spare)
        self._evaluation: dict[tuple[str, ...], ChainRunner] = {}
        self._code = runner.code_for(sample_batch)
        self.record_timelines = runner.source.config.trace_path is not None
        self.last_timeline: Timeline | None = None
        self._events: list[Event] | None = None
        timeout_s = max(runner.source.config.comm_timeout_s, LOADING_TIMEOUT_S)
        self._collectives = Collectives(
            group=setting.group,
            who=f"rank {setting.rank}, stage {runner.plan.stages[runner.stage_index].name!r}",
            timeout_s=timeout_s,
        )
        self._batch_source = BatchSource(
            prepare=functools.partial(prepare_batch, runner.source.model),
            mini_batch=runner.plan.mini_batch,
            reads_inputs=self.is_first_stage() or self.is_last_stage(),
            source=0,
            group=setting.group,
            keys=sample_batch,
            timeout_s=timeout_s,
        )
        self._data = TrainingData(self._batch_source, None)

    def use_rows(self, make: Callable[[BatchSource], RowLoader]) -> None:
        """Read this rank's share of a dataset when `train_batch` is called without data."""
        own = make(self._batch_source)
        self._data = TrainingData(self._batch_source, own)
        self.training_dataloader = own.loader

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Run one optimizer step on ``train_batch_size`` samples, as `GraphPipelineEngine.train_batch`."""
        if self.optimizer is None:
            raise ConfigError(NO_OPTIMIZER)
        batch = self._data.next(data_iter)
        code = self._use(self._runner, batch)
        rows = self._runner.micro_batches(batch, code, self.micro_batches)
        self.set_dataiterator(BoundIterator(self._layer, rows))
        # DeepSpeed has no timeline; `_timed` wraps the instructions of its schedule. The clock
        # agrees over ranks first.
        clock = start_clock(self._collectives) if self.record_timelines else None
        self._events = [] if clock is not None else None
        try:
            with MODEL_STREAMS.drawing(), rows:
                loss: Tensor = super().train_batch()
        except BaseException:  # messages may be under way: nothing more will be trained on
            self._data.close()
            raise
        if clock is not None:
            source = self._runner.source
            self.last_timeline = keep_timeline(
                self._events or [],
                clock,
                plan=self.plan,
                collectives=self._collectives,
                path=source.config.trace_path,
                step=self.global_steps,
            )
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
            ConfigError: outputs are requested, or DeepSpeed's micro-batches do not divide the batch.
        """
        if return_logits or not compute_loss or reduce_output != "avg" or num_micro_batches is not None:
            raise ConfigError(
                f"eval_batch: {STOCK} evaluates the mean loss only; use another planner for the model's outputs"
            )
        batch = self._batch_source.take(data_iter)
        samples = count_samples(batch)
        size = self.plan.stages[0].micro_batch_size
        if samples % size:
            raise ConfigError(
                f"eval_batch: DeepSpeed's micro-batches of {size} samples do not divide the {samples} of the batch; "
                f"drop {samples % size} samples or use another planner"
            )
        runner = self._evaluation_runner(batch)
        code = self._use(runner, batch)
        count = samples // size
        with MODEL_STREAMS.drawing(), runner.micro_batches(batch, code, count) as rows:
            rows_iterator = BoundIterator(self._layer, rows)
            return super().eval_batch(rows_iterator, bcast_loss=bcast_loss, num_micro_batches=count)

    def set_dataloader(self, loader: Any) -> None:
        """Use ``loader`` (the same batches on every rank) when `train_batch` is called without data."""
        self._data.use_loader(loader)

    def set_dataiterator(self, iterator: Any) -> None:
        """Use ``iterator`` when `train_batch` is called without data."""
        if iterator is None or isinstance(iterator, BoundIterator):  # from DeepSpeed's own loop
            self.data_iterator = iterator
        else:
            self._data.use_iterator(iterator)

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Apply ``fn`` to every batch that is taken from an iterator; it returns a dict of tensors."""
        self._data.apply(fn)

    def set_train_batch_size(self, train_batch_size: int) -> NoReturn:
        """Refuse: DeepSpeed's would change its own count of micro-batches, and not the plan."""
        raise ConfigError(
            f"set_train_batch_size: planner {STOCK!r} runs one plan; set train_batch_size in the JSON, or choose "
            "another planner"
        )

    def destroy(self) -> None:
        """Release what prefetches, and of what DeepSpeed's engine holds."""
        self._data.close()
        super().destroy()

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write the model as HuggingFace files, as `GraphPipelineEngine.save_pretrained` does."""
        check_directory("save_pretrained", save_directory)
        # The layer computes with one-dimensional scalars, as DeepSpeed needs them; `named_values` turns them back.
        persistent = {p.name for p in self._runner.reference.analysis.op_graph.parameters if p.is_persistent}
        state = {n: t.detach() for n, t in self._layer.named_values().items() if n in persistent}
        setting = self._runner.source.setting
        is_writer = self.plan.stages[self.stage_id].ranks[0] == self.global_rank
        hf_weights.save_pretrained(
            save_directory,
            model=self._runner.source.model,
            states={self.stage_id: {**state, **self._spare}} if is_writer else {},
            num_stages=self.num_stages,
            group=setting.group,
        )

    def _use(self, runner: ChainRunner, batch: Batch) -> ChainCode:
        """Let the layer run at this batch's shape; DeepSpeed exchanges shapes anew where it has changed."""
        code = runner.code_for(batch)
        # DeepSpeed exchanges shapes once and keeps them (``first_output_send``, ``grad_layer``);
        # another shape needs that anew on all ranks, which see the same stream of batches and so come
        # here in the same step.
        if code is not self._code:
            # A new shape runs on what is bound already; only an evaluation's code may read more.
            missing = [name for name in code.function.tensors if name not in self._layer.tensors]
            if missing:  # what only evaluation reads (a mask's buffer, say)
                self._layer.bind({**self._layer.tensors, **runner.source.materialise(missing)})
            self._layer.use(code)
            self.reset_activation_shape()
            self._code = code
        return code

    def _evaluation_runner(self, batch: Batch) -> ChainRunner:
        # By keys: labels or none decide which graph is captured. Sizes do not, a loss unit is what is captured.
        key = tuple(sorted(batch))
        if key not in self._evaluation:
            source, training = self._runner.source, self._runner.reference
            reference = source.planned.analyse(batch, ())
            if reference.analysis.op_graph.loss is None:
                raise ConfigError(
                    f"eval_batch: the model returns no loss for a batch of {sorted(batch)}; give labels"
                )
            parameters = {p.name for p in reference.analysis.op_graph.parameters if not p.is_buffer}
            held = [parameters.intersection(names) for names in held_tensors(self.plan, training)]
            plan = evaluation_plan(self.plan, reference.block_graph, parameters=parameters, held=held)
            self._evaluation[key] = ChainRunner(source, reference, plan)
        return self._evaluation[key]

    def _exec_send_grads(self, buffer_id: int) -> None:
        """Send zeros for received tensors that no gradient reached; DeepSpeed asserts there is one."""
        inputs = self.pipe_buffers["inputs"][buffer_id]
        # DeepSpeed 0.19 asserts ``grad is not None`` for every floating input, and the sender waits for it. What only
        # later stages read, a frozen part made, or the loss does not use, has none.
        for tensor in inputs:
            if tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
        super()._exec_send_grads(buffer_id)

    @staticmethod
    def _timed(kind: EventKind, execute: Callable[..., None]) -> Callable[..., None]:
        is_task = kind in (EventKind.FORWARD, EventKind.BACKWARD)

        def run(self: StockPipelineEngine, **arguments: Any) -> None:
            start = _now_us()
            execute(self, **arguments)
            if self._events is None:
                return
            # Its schedule runs both kinds in order of micro-batches, so their number so far is the number of this one.
            event = Event(
                rank=self.global_rank,
                stage=self.stage_id,
                kind=kind,
                start_us=start,
                end_us=_now_us(),
                micro_batch=sum(e.kind is kind for e in self._events) if is_task else -1,
            )
            self._events.append(event)

        return run

    # DeepSpeed looks instructions up in this table of its class: the one place to change what a
    # schedule's step does.
    _INSTRUCTION_MAP = {
        **PipelineEngine._INSTRUCTION_MAP,
        ds_schedule.SendGrad: _exec_send_grads,
        ds_schedule.ForwardPass: _timed(EventKind.FORWARD, PipelineEngine._exec_forward_pass),
        ds_schedule.BackwardPass: _timed(EventKind.BACKWARD, PipelineEngine._exec_backward_pass),
        ds_schedule.ReduceTiedGrads: _timed(EventKind.REDUCE, PipelineEngine._exec_reduce_tied_grads),
        ds_schedule.ReduceGrads: _timed(EventKind.REDUCE, PipelineEngine._exec_reduce_grads),
        ds_schedule.OptimizerStep: _timed(EventKind.STEP, PipelineEngine._exec_optimizer_step),
    }


def _now_us() -> float:
    return time.perf_counter_ns() / 1e3


# ---- on a list of layers, its optimizer step separate: what benchmarks compare with -----------------------------

# DeepSpeed's schedule ends with these three instructions; they run by themselves in `step`, so that a
# benchmark can time the pipeline without them.
_STEP = (ds_schedule.ReduceTiedGrads, ds_schedule.ReduceGrads, ds_schedule.OptimizerStep)


class _TrainSchedule(ds_schedule.TrainSchedule):
    """DeepSpeed's 1F1B up to the last backward."""

    def steps(self) -> Iterator[list[Any]]:
        for commands in super().steps():
            yield [command for command in commands if not isinstance(command, _STEP)]


class _StepSchedule(ds_schedule.TrainSchedule):
    """What DeepSpeed does after the last backward."""

    def steps(self) -> Iterator[list[Any]]:
        yield [command() for command in _STEP]


def join_ranks() -> None:
    """Join the process group that the launcher's variables describe, on gloo."""
    with without_shared_memory_op():
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)


class PipelinePeer:
    """Stock DeepSpeed running a chain, one layer a rank.

    Args:
        layers: one a stage, the same on every rank; each rank keeps its own.
        loss: from the last layer's output and the labels.
        micro_batch_size, num_micro_batches: of one mini-batch.
        make_optimizer: from parameters.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        loss: Callable[[Tensor, Tensor], Tensor],
        micro_batch_size: int,
        num_micro_batches: int,
        make_optimizer: Callable[[Any], torch.optim.Optimizer],
    ) -> None:
        module = PipelineModule(
            layers=list(layers), num_stages=len(layers), loss_fn=loss, partition_method="uniform"
        )
        config = {
            "train_batch_size": micro_batch_size * num_micro_batches,
            "train_micro_batch_size_per_gpu": micro_batch_size,
            "gradient_accumulation_steps": num_micro_batches,
            "steps_per_print": 1_000_000,
        }
        optimizer = make_optimizer(module.parameters())
        self.engine, *_ = deepspeed.initialize(model=module, config=config, optimizer=optimizer)
        sizes = {
            "micro_batches": num_micro_batches,
            "stages": len(layers),
            "stage_id": self.engine.stage_id,
        }
        self._train, self._step = _TrainSchedule(**sizes), _StepSchedule(**sizes)

    def run(self, micro_batches: Iterator[tuple[Tensor, Tensor]]) -> None:
        """Run all forwards, backwards and messages of one mini-batch (as `train_batch`, without the step)."""
        engine = self.engine
        engine.set_dataiterator(micro_batches)
        engine.module.train()
        # What `train_batch` sets before it runs its schedule (DeepSpeed 0.19:
        # ``PipelineEngine.train_batch``).
        engine.total_loss = engine.total_additional_losses = None
        engine._compute_loss = True
        engine._exec_schedule(self._train)

    def step(self) -> None:
        """Reduce gradients and step the optimizer."""
        self.engine._exec_schedule(self._step)
