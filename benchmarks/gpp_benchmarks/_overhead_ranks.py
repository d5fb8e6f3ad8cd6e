"""One rank of `gpp bench overhead`: every runtime in turn, in the same processes.

python -m gpp_benchmarks._overhead_ranks SETTINGS_JSON
"""

from __future__ import annotations

import functools
import gc
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime
from torch.nn import functional as F

from gpp_benchmarks._ranks import over_ranks, rank_settings
from gpp_plugin.capture.export import capture_model
from gpp_plugin.engine.rank_engine import RankEngine, StageEngine
from gpp_plugin.engine.stage_groups import StageGroups
from gpp_plugin.errors import RuntimeFailure
from gpp_plugin.integrations.deepspeed.stage_optimizer import DeepSpeedOptimizer
from gpp_plugin.integrations.deepspeed.stock_engine import PipelinePeer, join_ranks
from gpp_plugin.ir.block_graph import BlockGraph, OpGraph
from gpp_plugin.ir.cluster import Cluster, Device, Link
from gpp_plugin.launch import emit_event
from gpp_plugin.model.graph.captured_part import whole_part
from gpp_plugin.plan.explicit_plan import explicit_plan
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.profile.analytic_costs import analytic_profile, default_sample_counts
from gpp_plugin.relative_errors import tensor_error
from gpp_plugin.runtime.messages.transport import make_transport
from gpp_plugin.runtime.rank_programs import channels_of, make_programs
from gpp_plugin.runtime.rank_runner import RankRunner
from gpp_plugin.runtime.stage_module import StageModule, make_reference
from gpp_plugin.runtime.stage_runner import RunnerContext
from gpp_plugin.schedule.orders.kfkb import one_f_one_b_schedule
from gpp_plugin.schedule.program_sets import RankPrograms

# The runtimes, all on one chain of linear layers, one layer a rank.
#
# Each does the same work in `ChainRuntime.run`: all forwards, backwards and messages of one mini-batch, 1F1B;
# `finish` is the optimizer step. Every one leaves the same gradients, which `gradient` returns for a check.

TIMEOUT_S = 60.0
LEARNING_RATE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainSize:
    """The work: ``num_stages`` layers Linear(width, width) and a mean squared error."""

    num_stages: int
    num_micro_batches: int
    micro_batch_size: int
    width: int

    @property
    def mini_batch(self) -> int:
        """Return the samples of one step."""
        return self.num_micro_batches * self.micro_batch_size

    def layer(self, stage: int) -> nn.Linear:
        """Return a stage's layer, the same on every rank and for every runtime."""
        generator = torch.Generator().manual_seed(stage)
        layer = nn.Linear(self.width, self.width)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / self.width**0.5)
        return layer

    def data(self) -> tuple[Tensor, Tensor]:
        """Return the mini-batch: features and labels, both [mini_batch, width]."""
        generator = torch.Generator().manual_seed(1234)
        shape = (self.mini_batch, self.width)
        return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


class ChainRuntime(Protocol):
    """One rank's part of a chain in some runtime."""

    def run(self) -> float:
        """Run all forwards, backwards and messages; return the time of the clock when they were done."""

    def finish(self) -> None:
        """Step the optimizer, if `run` has not, and forget gradients."""

    def gradient(self) -> Tensor | None:
        """Return the gradient of this rank's weight after `run`; None where `run` has stepped already."""


def make_optimizer(parameters: object) -> torch.optim.Optimizer:
    """Return the optimizer of every runtime."""
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)  # type: ignore[arg-type]


class _Eager:
    """What the runtimes without an engine share: this rank's layer, its rows, its optimizer."""

    def __init__(self, size: ChainSize) -> None:
        self.size = size
        self.rank = dist.get_rank()
        self.is_first, self.is_last = self.rank == 0, self.rank == size.num_stages - 1
        self.layer = size.layer(self.rank)
        self.optimizer = make_optimizer(self.layer.parameters())
        self.features, self.labels = size.data()

    def finish(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradient(self) -> Tensor | None:
        return self.layer.weight.grad


class PureCompute(_Eager):
    """The forwards and backwards of every stage, without a message: what overhead is counted from."""

    def run(self) -> float:
        size = self.size
        rows = self.features.split(size.micro_batch_size)
        labels = self.labels.split(size.micro_batch_size)
        received = torch.randn(size.micro_batch_size, size.width)
        for micro_batch in range(size.num_micro_batches):
            features = rows[micro_batch] if self.is_first else received.detach().requires_grad_()
            output = self.layer(features)
            if self.is_last:
                (F.mse_loss(output, labels[micro_batch]) / size.num_micro_batches).backward()
            else:
                output.backward(received)
        return time.perf_counter()

    def gradient(self) -> Tensor | None:
        """Return None: without messages gradients are not those of the chain."""
        return None


class RawLoop(_Eager):
    """A bare 1F1B loop over isend and irecv, all receives posted before it starts."""

    def __init__(self, size: ChainSize) -> None:
        super().__init__(size)
        self.group = dist.new_group(None, backend="gloo")

    def run(self) -> float:
        size, rank = self.size, self.rank
        count, shape = size.num_micro_batches, (size.micro_batch_size, size.width)
        rows = self.features.split(size.micro_batch_size)
        labels = self.labels.split(size.micro_batch_size)
        activations: list[tuple[dist.Work, Tensor]] = []
        gradients: list[tuple[dist.Work, Tensor]] = []
        for posted, source, is_used in (
            (activations, rank - 1, not self.is_first),
            (gradients, rank + 1, not self.is_last),
        ):
            for _ in range(count if is_used else 0):
                buffer = torch.empty(shape)
                posted.append((_posted(dist.irecv(buffer, source, group=self.group)), buffer))
        held: dict[int, tuple[Tensor, Tensor]] = {}
        sent: list[tuple[dist.Work, Tensor]] = []

        def forward(micro_batch: int) -> None:
            if self.is_first:
                features = rows[micro_batch]
            else:
                work, features = activations[micro_batch]
                work.wait()
                features.requires_grad_()
            output = self.layer(features)
            if self.is_last:
                output = F.mse_loss(output, labels[micro_batch]) / count
            else:
                data = output.detach()
                sent.append((_posted(dist.isend(data, rank + 1, group=self.group)), data))
            held[micro_batch] = features, output

        def backward(micro_batch: int) -> None:
            features, output = held.pop(micro_batch)
            if self.is_last:
                output.backward()
            else:
                work, gradient = gradients[micro_batch]
                work.wait()
                output.backward(gradient)
            if not self.is_first:
                assert features.grad is not None
                sent.append((_posted(dist.isend(features.grad, rank - 1, group=self.group)), features.grad))

        warm_up = min(count, size.num_stages - rank)
        for micro_batch in range(warm_up):
            forward(micro_batch)
        for micro_batch in range(count):
            backward(micro_batch)
            if micro_batch + warm_up < count:
                forward(micro_batch + warm_up)
        for work, _ in sent:
            work.wait()
        return time.perf_counter()


def _posted(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is in the group"
    return work


class TorchSchedule1F1B(_Eager):
    """torch.distributed.pipelining's Schedule1F1B."""

    def __init__(self, size: ChainSize) -> None:
        super().__init__(size)
        self.schedule = Schedule1F1B(
            self.make_stage(), n_microbatches=size.num_micro_batches, loss_fn=F.mse_loss
        )

    def make_stage(self) -> PipelineStage:
        """Return this rank's stage on a group of its own."""
        group = dist.new_group(None, backend="gloo")
        return PipelineStage(self.layer, self.rank, self.size.num_stages, torch.device("cpu"), group=group)

    def run(self) -> float:
        if self.is_first:
            self.schedule.step(self.features, return_outputs=False)
        elif self.is_last:
            self.schedule.step(target=self.labels, losses=[], return_outputs=False)
        else:
            self.schedule.step(return_outputs=False)
        return time.perf_counter()


class TorchRuntime(TorchSchedule1F1B):
    """torch's schedule IR runtime, given the 1F1B order of compute."""

    def __init__(self, size: ChainSize) -> None:
        super().__init__(size)
        runtime = _PipelineScheduleRuntime(
            [self.make_stage()], n_microbatches=size.num_micro_batches, loss_fn=F.mse_loss
        )
        runtime._prepare_schedule_with_comms(
            {stage: _one_f_one_b_actions(size, stage) for stage in range(size.num_stages)}
        )
        self.schedule = runtime  # type: ignore[assignment]


def _one_f_one_b_actions(size: ChainSize, stage: int) -> list[_Action | None]:
    order = one_f_one_b_schedule(stage, size.num_micro_batches, num_in_flight=size.num_stages - stage)
    return [_Action.from_str(str(task)) for task in order.tasks]


class DeepSpeedPipeline:
    """DeepSpeed's PipelineEngine."""

    def __init__(self, size: ChainSize) -> None:
        self.peer = PipelinePeer(
            [size.layer(stage) for stage in range(size.num_stages)],
            loss=F.mse_loss,
            micro_batch_size=size.micro_batch_size,
            num_micro_batches=size.num_micro_batches,
            make_optimizer=make_optimizer,
        )
        features, labels = size.data()
        self.batches = list(
            zip(features.split(size.micro_batch_size), labels.split(size.micro_batch_size), strict=True)
        )

    def run(self) -> float:
        self.peer.run(iter(self.batches))
        return time.perf_counter()

    def finish(self) -> None:
        self.peer.step()

    def gradient(self) -> Tensor | None:
        return next(p.grad for p in self.peer.engine.module.parameters() if p.dim() == 2)


class _Chain(nn.Module):
    """The chain as one model, as a user gives it."""

    def __init__(self, size: ChainSize) -> None:
        super().__init__()
        self.layers = nn.ModuleList(size.layer(stage) for stage in range(size.num_stages))

    def forward(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            features = layer(features)
        return {"loss": F.mse_loss(features, labels)}


class _Hooks:
    """The stage's optimizer side, and when it was asked to step."""

    def __init__(self, engine: StageEngine) -> None:
        self.engine = engine
        self.asked_at = 0.0
        self.weight_gradient: Tensor | None = None
        self.loss_scale = engine.loss_scale
        self.accumulate = engine.accumulate
        self.begin_reduction = engine.begin_reduction
        self.reduce_tied = engine.reduce_tied

    def reduce_data(self) -> None:
        if not self.asked_at:
            self.asked_at = time.perf_counter()
        self.engine.reduce_data()

    def step(self) -> object:
        if not self.asked_at:
            self.asked_at = time.perf_counter()
        gradients = (p.grad for p in self.engine.module.parameters() if p.dim() == 2)
        self.weight_gradient = next(g.clone() for g in gradients if g is not None)
        return self.engine.step()


class OurRuntime:
    """This package's: captured, planned one layer a stage, lowered, validated, run by the executor."""

    def __init__(self, size: ChainSize) -> None:
        model = _Chain(size)
        features, labels = size.data()
        self.batch = {"features": features, "labels": labels}
        unit = {name: rows[: size.micro_batch_size] for name, rows in self.batch.items()}
        captured = capture_model(model, unit)
        reference = make_reference(captured.analysis, "layer")
        last = size.num_stages - 1
        paths = [[f"layers.{stage}"] if stage < last else ["*"] for stage in range(size.num_stages)]
        stages = [{"modules": modules, "ranks": [stage]} for stage, modules in enumerate(paths)]
        request = _plan_request(size, reference.block_graph, captured.op_graph)
        self.plan = explicit_plan({"stages": stages}, request)
        programs = make_programs(self.plan, reference)
        rank = dist.get_rank()
        own = next(program for program in programs if program.rank == rank)
        self.runner = RankRunner(
            RankPrograms(plan=self.plan, programs={"whole": own}),
            RunnerContext(
                source=whole_part(model, unit),
                reference=reference,
                transport=make_transport(
                    device=torch.device("cpu"), channels=channels_of(programs), timeout_s=TIMEOUT_S
                ),
                device=torch.device("cpu"),
            ),
        )
        (function,) = self.runner.prepare(self.batch)
        names = function.tensors
        tensors = dict(model.named_parameters())
        module = StageModule(tensors={name: tensors[name] for name in names}, parameters=names)
        config = {
            "train_batch_size": size.mini_batch,
            "train_micro_batch_size_per_gpu": size.micro_batch_size,
        }
        self.engine = RankEngine(
            modules=[module],
            plan=self.plan,
            rank=rank,
            groups=StageGroups.create(self.plan, timeout_s=TIMEOUT_S),
            make_optimizer=functools.partial(DeepSpeedOptimizer, config=config, optimizer=make_optimizer),
        ).only
        self.hooks = _Hooks(self.engine)
        self.runner.bind([module], [self.hooks])

    def run(self) -> float:
        self.hooks.asked_at = 0.0
        self.runner.run(self.batch)
        return self.hooks.asked_at

    def finish(self) -> None:
        """Do nothing: the step is an instruction of the program, so `run` has taken it."""

    def gradient(self) -> Tensor | None:
        return self.hooks.weight_gradient


def _plan_request(size: ChainSize, graph: BlockGraph, op_graph: OpGraph) -> PlanRequest:
    device = Device(name="cpu", memory_bytes=10**9, flops_per_s=1e10, memory_bytes_per_s=1e9)
    link = Link(name="this machine", span=size.num_stages, bytes_per_s=1e9, latency_us=100.0)
    profile = analytic_profile(
        graph, device, sample_counts=default_sample_counts(size.mini_batch), op_graph=op_graph
    )
    return PlanRequest(
        graph=graph,
        profile=profile,
        cluster=Cluster(name="this machine", devices=(device,) * size.num_stages, links=(link,)),
        num_ranks=size.num_stages,
        mini_batch=size.mini_batch,
        loss_unit=size.micro_batch_size,
        micro_batch_sizes={"*": size.micro_batch_size},
    )


RUNTIMES: dict[str, Callable[[ChainSize], ChainRuntime]] = {
    "compute": PureCompute,
    "gpp": OurRuntime,
    "raw": RawLoop,
    "torch_1f1b": TorchSchedule1F1B,
    "torch_runtime": TorchRuntime,
    "deepspeed": DeepSpeedPipeline,
}

Sample = tuple[float, float, float]
"""Seconds: of all micro-batches, of this process's threads meanwhile, of the optimizer step."""

WARM_UP = 3
LARGEST_DIFFERENCE = 1e-4


def main() -> None:
    """Measure on this rank; rank 0 reports."""
    settings = rank_settings()
    join_ranks()
    size = ChainSize(**settings["size"])
    runtimes = {name: RUNTIMES[name](size) for name in ("compute", *settings["runtimes"])}
    for _ in range(WARM_UP):
        _check_gradients({name: _gradient_after(runtime) for name, runtime in runtimes.items()})
    gc.collect()
    gc.freeze()  # what was made so far lives on: no runtime pays for looking at it again
    names = list(runtimes)
    times: dict[str, list[Sample]] = {name: [] for name in names}
    for round_index in range(settings["rounds"]):
        first = round_index % len(names)
        for name in [*names[first:], *names[:first]]:
            times[name].append(_time_once(runtimes[name]))
        if os.environ["RANK"] == "0":
            emit_event(event="round", index=round_index + 1)
    found = {name: over_ranks(own) for name, own in times.items()}
    if os.environ["RANK"] == "0":
        emit_event(event="times", times=found)
    dist.barrier()
    dist.destroy_process_group()


def _gradient_after(runtime: ChainRuntime) -> torch.Tensor | None:
    runtime.run()
    gradient = runtime.gradient()
    copy = None if gradient is None else gradient.clone()
    runtime.finish()
    return copy


def _check_gradients(gradients: Mapping[str, torch.Tensor | None]) -> None:
    """Refuse to compare runtimes that do not do the same work."""
    found = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    reference = next(iter(found.values()), None)
    for name, gradient in found.items():
        assert reference is not None
        difference = tensor_error(gradient, reference)
        if not difference <= LARGEST_DIFFERENCE:
            raise RuntimeFailure(
                f"{name} has another gradient than {next(iter(found))} on rank {dist.get_rank()}: they differ "
                f"by {difference:.1e} of its norm; their times cannot be compared"
            )


def _time_once(runtime: ChainRuntime) -> Sample:
    gc.collect()  # no runtime pays for what another one left behind
    dist.barrier()
    start, cpu_start = time.perf_counter(), time.process_time()
    done = runtime.run()
    cpu = time.process_time() - cpu_start
    runtime.finish()
    return done - start, cpu, time.perf_counter() - done


if __name__ == "__main__":
    main()
