"""One rank of a rehearsed plan: the executors and the transport of the runtime around emulated stages.

python -m gpp_plugin.rehearse.rehearsal_rank PLAN SETTINGS_JSON OUTPUT_DIRECTORY
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpp_plugin.ir.plan import PipelinePlan, Stage, StageEdge
from gpp_plugin.ir.program import RankProgram
from gpp_plugin.ir.schedule import Task, TaskKind
from gpp_plugin.ir.serialize import load, save
from gpp_plugin.ir.tensors import DTYPE_BYTES, TensorSpec
from gpp_plugin.ir.timeline import Event, Timeline
from gpp_plugin.launch import emit_event, end_rank
from gpp_plugin.plan.edge_transports import NATIVE
from gpp_plugin.plugins import Transport, TransportRequest, find_transport
from gpp_plugin.rehearse.rehearsal import (
    LEAST_COMM_TIMEOUT_S,
    RehearsalSettings,
    make_async_programs,
    programs_of_plan,
    scale_tensors,
)
from gpp_plugin.runtime.compute import BoundaryGradients, boundary_gradients
from gpp_plugin.runtime.executor import RankExecutor, StageExecutor
from gpp_plugin.runtime.messages.mailbox import LocalTransfers
from gpp_plugin.runtime.messages.routes import held_shape
from gpp_plugin.runtime.rank_programs import channels_of
from gpp_plugin.runtime.ranks.collectives import Collectives, begin_all_gather
from gpp_plugin.runtime.ranks.placement_of_ranks import JobPlacement
from gpp_plugin.runtime.recorder import gather_timeline, start_clock
from gpp_plugin.schedule.event_loop import Durations, duration_reader
from gpp_plugin.schedule.gathers import EARLY_BUCKET_ELEMENTS, last_backward, stages_that_reduce_early
from gpp_plugin.schedule.program_sets import SYNCHRONOUS, ProgramSet, lower_prefetch
from gpp_plugin.simulate.predict import num_windows

# Stands for a stage's compute and optimizer: delays of the planned durations, tensors of the right shapes.

CPU = torch.device("cpu")
SPIN_US = 200.0
"""The last part of a delay is a busy wait: a sleeping process is woken late."""


def wait_us(duration_us: float) -> None:
    """Return ``duration_us`` microseconds after the call, by sleeping and then a short spin."""
    end = time.perf_counter() + duration_us * 1e-6
    if duration_us > SPIN_US:
        time.sleep((duration_us - SPIN_US) * 1e-6)
    while time.perf_counter() < end:
        pass


FLOAT_BYTES = 4
BUCKET_FLOATS = 1 << 23
"""Gradients are reduced in pieces, so that a rank needs no second copy of all of them."""

TaskMicroseconds = Callable[[TaskKind, int | None, int], float]
"""From (kind, half, micro-batch) to the duration of one task."""


class EmulatedCompute:
    """A `StageCompute` that waits for each task's duration.

    The tensors it returns are the same ones every time and hold zeros: nothing but their shapes and dtypes
    matters to a message. Ranks of the same samples begin each task together, as their collectives make them.

    Args:
        rank: one of the stage's; what it holds of tensors in parts differs from rank to rank.
        specs: every tensor on the plan's edges.
        gradients: which of them have gradients that this rank receives and sends.
        task_us: microseconds of the stage's tasks.
        model_group: the group of this rank's data position; None for a single rank.
        device: where the tensors lie.
        last_backward: what runs in place of a delay in the backward of micro-batch ``reduces_in``.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        stage: int,
        *,
        rank: int,
        specs: Mapping[str, TensorSpec],
        gradients: BoundaryGradients,
        task_us: TaskMicroseconds,
        model_group: dist.ProcessGroup | None = None,
        device: torch.device = CPU,
        last_backward: Callable[[float], None] = wait_us,
        reduces_in: int | None = None,
    ) -> None:
        # A stage with one rank of 4 samples, an output of hidden [samples, 8, 16] holds
        #
        #   _made       {4: [zeros [4, 8, 16]], 2: [zeros [2, 8, 16]]}  of a whole and of half a forward
        #   _gradients  [zeros [4, 8, 16]]                                 in the order of gradient_inputs
        #
        # and no others: messages are only read while they travel, so the same tensor may be
        # sent many times at once.
        self.received = _names(edge for edge in plan.edges if edge.dst == stage)
        self.outputs = _names(edge for edge in plan.edges if edge.src == stage)
        self.gradient_outputs = gradients.outputs
        self.gradient_inputs = gradients.inputs
        self._task_us = task_us
        self._model_group = model_group
        self._collectives = torch.zeros(1, device=device)
        self._last_backward, self._reduces_in = last_backward, reduces_in
        own = plan.stages[stage]
        # The axis along which a stage's ranks hold parts of a tensor; the two ends of an
        # edge may differ in it.
        axes = {
            name: edge.src_shard_axis if edge.src == stage else edge.dst_shard_axis
            for edge in plan.edges
            if stage in (edge.src, edge.dst)
            for name in (*edge.batch_tensors, *edge.whole_tensors)
        }

        def zeros(name: str, num_samples: int) -> Tensor:
            spec = specs[name]
            shape = held_shape(spec, num_samples, own, rank, axes[name])
            return torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=device)

        self._local = own.local_batch_size
        self._made = {
            rows: [zeros(name, rows) for name in self.outputs]
            for rows in {self._local, self._local // 2}
            if rows
        }
        self._gradients = [zeros(name, self._local) for name in self.gradient_inputs]

    def forward(
        self, micro_batch: int, half: int | None, inputs: Sequence[Tensor], received: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Wait for the forward's duration and return tensors of the outputs' shapes."""
        self._run(TaskKind.FORWARD, micro_batch, half)
        return self._made[self._local if half is None else self._local // 2]

    def backward(self, micro_batch: int, gradients: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """Wait for the backward's duration and return tensors of the received ones' shapes."""
        self._run(TaskKind.BACKWARD, micro_batch)
        return self._gradients

    def input_gradient(self, micro_batch: int, gradients: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """Wait for the duration of the gradients that are sent, and return tensors of their shapes."""
        self._run(TaskKind.INPUT_GRADIENT, micro_batch)
        return self._gradients

    def weight_gradient(self, micro_batch: int) -> None:
        """Wait for the duration of the weights' gradients."""
        self._run(TaskKind.WEIGHT_GRADIENT, micro_batch)

    def clear(self) -> None:
        """Do nothing: no activations are saved."""

    def _run(self, kind: TaskKind, micro_batch: int, half: int | None = None) -> None:
        # Before the delay, not after: real tensor ranks synchronise in the first collective of a task.
        if self._model_group is not None:
            dist.all_reduce(self._collectives, group=self._model_group)
        is_last = kind is TaskKind.BACKWARD and micro_batch == self._reduces_in
        (self._last_backward if is_last else wait_us)(self._task_us(kind, half, micro_batch))


class EmulatedHooks:
    """The optimizer side: gradients are reduced at their real (scaled) size, the step updates nothing.

    Args:
        data_group: the group of the ranks that this one reduces with; None for a single one.
        gradient_bytes: what the stage reduces in one mini-batch, as 4-byte floats.
        bucket_bytes: of those, what an early sum has.
        world_group: the group of all ranks, which agree on the norm before a step.
        device: where the gradients lie.
    """

    loss_scale = 1.0

    def __init__(
        self,
        *,
        data_group: dist.ProcessGroup | None,
        gradient_bytes: float,
        bucket_bytes: float,
        world_group: dist.ProcessGroup | None,
        device: torch.device = CPU,
    ) -> None:
        self.data_group = data_group
        self._world_group = world_group
        # The whole size is held, if only once: sending one small piece repeatedly would stay in a
        # cache and look faster.
        floats = round(gradient_bytes / FLOAT_BYTES) if data_group is not None else 0
        self._gradients = torch.zeros(floats, device=device)
        self._buckets = self._gradients.split(max(1, round(bucket_bytes / FLOAT_BYTES)))
        self._sent: list[dist.Work] = []
        self._norm = torch.zeros(1, device=device)

    def accumulate(self) -> None:
        """Do nothing: there are no gradients to take up."""

    def begin_reduction(self) -> None:
        """Do nothing: what sums early is `last_backward`."""

    def last_backward(self, duration_us: float) -> None:
        """Take as long as the last backward; begin to sum each bucket when its gradients are final.

        They are made evenly over the backward. A single bucket goes behind it (`engine.gradient_store.EarlySends`).
        """
        for piece in self._buckets:
            wait_us(duration_us / len(self._buckets))
            if len(self._buckets) > 1:
                self._sent.append(dist.all_reduce(piece, group=self.data_group, async_op=True))

    def reduce_data(self) -> None:
        """Sum as many bytes as the stage has gradients over its data-parallel ranks; wait for what has begun."""
        if self._sent:
            while self._sent:
                self._sent.pop().wait()
            return
        for piece in self._gradients.split(BUCKET_FLOATS) if self._gradients.numel() else ():
            dist.all_reduce(piece, group=self.data_group)

    def reduce_tied(self) -> None:
        """Do nothing: a plan does not say what is tied, and its programs have no such sum."""

    def step(self) -> None:
        """Agree with all ranks, as they do on the gradients' norm; no parameter is there to update."""
        if self._world_group is not None:
            dist.all_reduce(self._norm, group=self._world_group)


class EmulatedWeights:
    """The stage's parameters where its ranks hold parts of them: gathered at their real (scaled) size.

    Args:
        data_group: of the ranks that hold the other parts.
        num_bytes: of all of them.
    """

    def __init__(
        self, *, data_group: dist.ProcessGroup, num_bytes: float, device: torch.device = CPU
    ) -> None:
        self._group = data_group
        self._part = torch.zeros(
            max(1, round(num_bytes / data_group.size())), dtype=torch.uint8, device=device
        )
        self._whole = torch.zeros(self._part.numel() * data_group.size(), dtype=torch.uint8, device=device)

    @classmethod
    def of(
        cls, stage: Stage, data_group: dist.ProcessGroup | None, scale_bytes: float, device: torch.device
    ) -> EmulatedWeights | None:
        """Return those of a stage on one of its ranks; None where each rank holds them whole."""
        if not stage.gathered_bytes or data_group is None:
            return None
        num_bytes = stage.sharded_bytes * scale_bytes
        return cls(data_group=data_group, num_bytes=num_bytes, device=device)

    def gather(self) -> Callable[[], None]:
        """Begin to bring the parts together."""
        return begin_all_gather(self._whole, self._part, group=self._group, what="a rehearsed gather")

    def free(self) -> None:
        """Do nothing: the next gather needs the memory."""

    def apart(self, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the outputs: nothing that is computed is a view of these."""
        return outputs


def _names(edges: Iterable[StageEdge]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for edge in edges for name in (*edge.batch_tensors, *edge.whole_tensors)))


class RehearsalRank:
    """This rank's part of a plan; made on all ranks of the plan together, which are those of the joined
    process group.

    Args:
        plan: with times that are already scaled.
        has_step: ranks agree with each other before the optimizer step, as they do on the gradients' norm.
        durations: of single tasks, where the plan's times do not hold.
        prefetches: the plan's frozen branch is prefetched; what is run is the steady program.
        placement: where the ranks run; None: on CPUs.
        group: a CPU group of all ranks; None: the default group is one.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        settings: RehearsalSettings,
        *,
        has_step: bool = True,
        durations: Durations | None = None,
        prefetches: bool = False,
        placement: JobPlacement | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        # In this order on every rank, since making a group is a collective of all ranks, members or not:
        #
        #   data groups, model groups   a row of ranks each, stage by stage; stages on the same ranks share them
        #   transport                   one channel a pair of ranks and direction
        #   norm groups                 all ranks; in mode async a stage's
        #
        # Stages on ranks (0, 1), (2) and (3) have one data group, (0, 1): none is made for a single rank.
        rank = dist.get_rank()
        device, backend = (CPU, "gloo") if placement is None else (placement.own_device, placement.backend)
        timeout_s = settings.comm_timeout_s or LEAST_COMM_TIMEOUT_S
        programs = _programs_of(plan, prefetches=prefetches)
        specs = scale_tensors(plan, settings.scale_bytes)
        make_groups = functools.partial(_make_groups, timeout_s=timeout_s, backend=backend)
        data_groups = make_groups([s.replicas(t) for s in plan.stages for t in range(s.tensor)])
        model_groups = make_groups([s.model_ranks(d) for s in plan.stages for d in range(s.degree)])
        transport = _make_transport(plan, programs.all, specs, device, backend, timeout_s)
        early = set(range(len(plan.stages) if plan.mode == "sync" and not plan.zero_stage else 0))
        for name in programs.programs.keys() & {"whole", "steady", "epilogue"}:
            early &= stages_that_reduce_early(plan, programs.programs[name])
        each = min((DTYPE_BYTES[t.dtype] for t in plan.tensors if t.requires_grad), default=FLOAT_BYTES)
        own = programs.of_rank(rank)
        program, steps_alone = own.main, own.policy.steps_alone
        self._plan = plan
        names = [repr(plan.stages[index].name) for index in program.stages]
        self._collectives = Collectives(
            group=(group or dist.group.WORLD) if plan.num_ranks > 1 else None,
            who=f"rank {rank}, stage {' and '.join(names)}",
            timeout_s=timeout_s,
        )
        # the ranks that agree on a norm: all of them, or those of a stage that steps alone
        everyone = tuple(range(plan.num_ranks))
        agreeing = make_groups([s.ranks for s in plan.stages] if steps_alone else [everyone])
        local_transfers = LocalTransfers()

        def maker(index: int) -> Callable[..., StageExecutor]:
            stage, part = plan.stages[index], program.of_stage(index)
            hooks = EmulatedHooks(
                data_group=data_groups.get(stage.replicas(stage.tensor_position(rank))),
                gradient_bytes=stage.gradient_bytes * settings.scale_bytes,
                bucket_bytes=EARLY_BUCKET_ELEMENTS * each * settings.scale_bytes,
                world_group=agreeing.get(stage.ranks if steps_alone else everyone) if has_step else None,
                device=device,
            )
            model_group = model_groups.get(stage.model_ranks(stage.position(rank)[0]))
            self._step = hooks.step
            return functools.partial(
                StageExecutor,
                plan=plan,
                compute=_make_compute(
                    plan,
                    part,
                    specs,
                    durations,
                    model_group,
                    device,
                    last_backward=hooks.last_backward,
                    reduces_in=last_backward(part) if index in early else None,
                ),
                specs=specs,
                transport=transport,
                hooks=hooks,
                device=device,
                local_transfers=local_transfers,
                weights=EmulatedWeights.of(stage, hooks.data_group, settings.scale_bytes, device),
            )

        # Model inputs are not rehearsed: no batch is loaded, so each micro-batch has an empty tuple of them.
        inputs: list[list[tuple[Tensor, ...]]] = [[()] * plan.num_micro_batches(i) for i in program.stages]
        self._inputs = inputs
        makers = [(own.of_stage(index), maker(index)) for index in program.stages]
        self._parts = {
            name: [make(program=own.programs[name], place=own.place(name)) for own, make in makers]
            for name in own.programs
        }
        self._executor = RankExecutor(own, local_transfers=local_transfers, step=self._step)

    def barrier(self, what: str) -> None:
        """Wait for all ranks; ``what`` is the occasion, for errors."""
        self._collectives.barrier(what)

    def iterate(self) -> None:
        """Run one mini-batch; of an asynchronous plan as many as fill the pipeline and some more, and empty it."""
        self._run(record=False)

    def run(self) -> Timeline | None:
        """Do so again; return all ranks' timeline on the first one, None elsewhere."""
        clock = start_clock(self._collectives)
        events = self._run(record=True)
        timeline = gather_timeline(events, clock, plan=self._plan, collectives=self._collectives)
        return None if timeline is None else dataclasses.replace(timeline, source="rehearsed")

    def _run(self, *, record: bool) -> list[Event]:
        # A program's events number micro-batches as it does. `_run_program` adds those that came before since the
        # pipeline was empty, so that all read as the one long mini-batch that they are simulated as. In mode async,
        # with two micro-batches a mini-batch and programs that repeat from the second on:
        #
        #   prologue 1 (0 before)   0F0 0F1 0B0        steady once more (2 before): 0F2 -> 0F4, 0B1 -> 0B3, ...
        #   steady     (0 before)   0F2 0B1 0F3 0B2
        executor, policy = self._executor, self._executor.programs.policy
        windows = executor.programs.windows
        events: list[Event] = []
        for _ in range(1 if windows is None else num_windows(windows)):
            *first, last = policy.calls[executor.last, policy.can_prefetch]
            for name in first:
                self._run_program(name, record=False)
            events += self._run_program(last, record=record)
        drain = policy.drains.get(executor.last)
        return events if drain is None else events + self._run_program(drain, record=record)

    def _run_program(self, name: str, *, record: bool) -> list[Event]:
        executor = self._executor
        events = executor.run(name, self._parts[name], self._inputs, record=record).events
        windows = executor.programs.windows
        if windows is None:
            return events
        before = executor.mini_batches_before * windows.micro_batches
        return [
            dataclasses.replace(e, micro_batch=e.micro_batch + before) if e.micro_batch >= 0 else e
            for e in events
        ]


def _programs_of(plan: PipelinePlan, *, prefetches: bool) -> ProgramSet:
    if plan.mode == "async":
        return make_async_programs(plan, validate=False)
    if prefetches:
        return lower_prefetch(plan)
    whole = programs_of_plan(plan, validate=False)
    return ProgramSet(plan=plan, programs={"whole": whole}, policy=SYNCHRONOUS)


def _make_compute(
    plan: PipelinePlan,
    program: RankProgram,
    specs: Mapping[str, TensorSpec],
    durations: Durations | None,
    model_group: dist.ProcessGroup | None,
    device: torch.device,
    **early: Any,
) -> EmulatedCompute:
    read = duration_reader(plan, durations)
    return EmulatedCompute(
        plan,
        program.stage,
        rank=program.rank,
        specs=specs,
        gradients=boundary_gradients(program, plan, specs),
        task_us=lambda kind, half, micro_batch: read(
            Task(stage=program.stage, kind=kind, micro_batch=micro_batch, half=half), program.rank
        ),
        model_group=model_group,
        device=device,
        **early,
    )


def _make_transport(
    plan: PipelinePlan,
    programs: Sequence[RankProgram],
    specs: Mapping[str, TensorSpec],
    device: torch.device,
    backend: str,
    timeout_s: float,
) -> Transport:
    request = TransportRequest(
        plan=plan,
        specs=specs,
        channels=frozenset(channels_of(programs)),
        device=str(device),
        backend=backend,
        timeout_s=timeout_s,
    )
    return find_transport(NATIVE).make(request)


def _make_groups(
    rows: Sequence[tuple[int, ...]], *, timeout_s: float, backend: str
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Make a group of each row of several ranks, by all ranks alike; return those that this rank is in."""
    own = {}
    for row in dict.fromkeys(rows):
        if len(row) > 1:
            group = dist.new_group(list(row), timeout=datetime.timedelta(seconds=timeout_s), backend=backend)
            if dist.get_rank() in row:
                own[row] = group
    return own


def main() -> None:
    """Rehearse on this rank; rank 0 writes the timelines and reports."""
    plan = load(PipelinePlan, sys.argv[1])
    settings = RehearsalSettings(**json.loads(sys.argv[2]))
    folder = Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", timeout=datetime.timedelta(seconds=settings.comm_timeout_s or LEAST_COMM_TIMEOUT_S)
    )
    is_first = dist.get_rank() == 0
    rank = RehearsalRank(plan, settings)
    if is_first:
        emit_event(event="ready")
    # Step -1 warms up: connections are made and buffers touched for the first time.
    for step in range(-1, settings.steps):
        timeline = rank.run()
        if timeline is not None and step >= 0:
            save(timeline, folder / f"timeline{step}.json")
            emit_event(event="step", step=step, iteration_us=timeline.iteration_us)
    rank.barrier("the end of the rehearsal")
    end_rank()


if __name__ == "__main__":
    main()
