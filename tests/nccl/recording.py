"""Records what each rank of a plan asks of its device: the real executor, mailbox and transport, one rank at a time.

A rank's job is that of an engine in small: groups of its stage, a transport, mini-batches, their reductions and step,
the agreement on the loss. Only the stage's arithmetic is left out: a task is one item on the stream that computes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from gpp_plugin.engine.checkpoints.save_checkpoint import BackgroundSave, FileContents, save_checkpoint
from gpp_plugin.engine.stage_groups import StageGroups, TiedParameter
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.program import RankProgram
from gpp_plugin.ir.schedule import TaskKind
from gpp_plugin.ir.tensors import UNIFORM, TensorSpec, batch_layout
from gpp_plugin.plugins import TransportRequest
from gpp_plugin.runtime.batches import InputLink, InputRows
from gpp_plugin.runtime.compute import (
    AutogradCompute,
    BoundaryGradients,
    ComputeByShape,
    boundary_gradients,
)
from gpp_plugin.runtime.executor import MiniBatchResult, RankExecutor, StageExecutor
from gpp_plugin.runtime.messages.mailbox import LocalTransfers
from gpp_plugin.runtime.messages.routes import BoundarySpecs, held_shape
from gpp_plugin.runtime.messages.transport import NATIVE_TRANSPORT, Transport
from gpp_plugin.runtime.rank_programs import channels_of, spec_of_unit
from gpp_plugin.runtime.ranks import collectives
from gpp_plugin.runtime.ranks.collectives import Collectives, begin_all_gather
from gpp_plugin.runtime.ranks.failure_board import HERE
from gpp_plugin.runtime.weight_versions import WeightVersions
from gpp_plugin.schedule.build import build_schedules, forward_schedules
from gpp_plugin.schedule.checks.validate_programs import validate_prefetch
from gpp_plugin.schedule.gathers import last_backward, stages_that_reduce_early
from gpp_plugin.schedule.lower import lower_schedules
from gpp_plugin.schedule.program_sets import (
    EMPTY,
    SYNCHRONOUS,
    ProgramPlace,
    ProgramSet,
    RankPrograms,
    lower_async,
    lower_prefetch,
)
from gpp_plugin.simulate.predict import num_windows
from tests.nccl.computing import LOSS, ComputingStages
from tests.nccl.fake_cuda import CUDA, FakeCuda, recorded_cuda
from tests.nccl.fake_groups import FakeDistributed, recorded_distributed
from tests.nccl.memory import Memory
from tests.nccl.operations import Job, Tape
from tests.nccl.races import Race, races_of

SIDE = 12
"""Elements of a made-up tensor along each axis but that of samples: shards of 1, 2, 3, 4 and 6 fit."""

SAME_GROUPS = "all ranks make the same groups in one order"
Shape = tuple[tuple[int, ...], torch.dtype]
MakeTransport = Callable[[TransportRequest], Transport]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a job does with a plan.

    Args:
        zero: ZeRO stage; from 2 on gradients are reduced behind every backward. What is gathered is the plan's to say.
        steps: mini-batches, or windows more than those that fill an asynchronous pipeline.
        record: the last mini-batch is traced.
        evaluate: a mini-batch of evaluation behind the first one of training.
        prefetches: the plan's frozen branch is prefetched, as `RankJob._prefetch` says.
        has_units: the plan's samples are units (`plan_of_units`) of shapes of their own, others in each mini-batch.
        computes: its stages really compute and train (`computing`); else tasks only read and make their tensors.
        sends_weights: what they send is a view of a weight.
        make_transport: as a `TransportFactory` does.
    """

    plan: PipelinePlan
    forward_only: frozenset[int] = frozenset()
    tied: tuple[int, ...] = ()
    zero: int = 0
    steps: int = 1
    record: bool = False
    evaluate: bool = False
    train: bool = True
    prefetches: bool = False
    has_units: bool = False
    computes: bool = False
    sends_weights: bool = False
    make_transport: MakeTransport = NATIVE_TRANSPORT.make


# ---- what a rank computes ----------------------------------------------------------------------------------


class RecordedCompute:
    """A stage whose tasks are one item each, of the right tensors.

    Args:
        model_group: of the rank's data position; ranks of the same samples meet in each task.
        early: what begins the sums of gradients, before the backward of this micro-batch; None where nothing does.
        kept: what each micro-batch's backward reads beside gradients, for all code of the stage; None: it has none.
    """

    def __init__(
        self,
        run: Run,
        program: RankProgram,
        specs: Mapping[str, TensorSpec],
        gradients: BoundaryGradients,
        cuda: FakeCuda,
        model_group: Any,
        early: tuple[int, Callable[[], None]] | None,
        kept: dict[int, list[Tensor]] | None,
    ) -> None:
        plan, stage = run.plan, run.plan.stages[program.stage]
        incoming = [edge for edge in plan.edges if edge.dst == program.stage]
        outgoing = [edge for edge in plan.edges if edge.src == program.stage]
        axes = {n: e.dst_shard_axis for e in incoming for n in (*e.batch_tensors, *e.whole_tensors)}
        axes |= {n: e.src_shard_axis for e in outgoing for n in (*e.batch_tensors, *e.whole_tensors)}
        names = [[*e.batch_tensors, *e.whole_tensors] for e in (*incoming, *outgoing)]
        self.received = tuple(dict.fromkeys(n for each in names[: len(incoming)] for n in each))
        self.outputs = tuple(dict.fromkeys(n for each in names[len(incoming) :] for n in each))
        self.gradient_outputs = gradients.outputs
        self.gradient_inputs = gradients.inputs
        self._cuda = cuda
        self._group = model_group
        self._early = early
        self._local = stage.local_batch_size

        def made(name: str, samples: int) -> Shape:
            return held_shape(specs[name], samples, stage, program.rank, axes[name]), getattr(
                torch, specs[name].dtype
            )

        self._made = {
            half: [made(name, self._local // (1 if half is None else 2)) for name in self.outputs]
            for half in (None, 0, 1)
        }
        self._gradients = [made(name, self._local) for name in self.gradient_inputs]
        self._kept = kept

    def shapes(self, half: int | None) -> dict[str, tuple[int, ...]]:
        """Return the shapes of what a micro-batch, or half of it, gives other stages."""
        return {name: shape for name, (shape, _) in zip(self.outputs, self._made[half], strict=True)}

    def _task(self, what: str, reads: Sequence[Tensor], makes: Sequence[Shape] = ()) -> list[Tensor]:
        """Put a task onto the stream that computes, which reads tensors and makes others."""
        if self._group is not None:
            dist.all_reduce(torch.zeros(1, device=CUDA), group=self._group)
        self._cuda.tape.put(self._cuda.stream.number, what)
        self._cuda.memory.touch(reads, is_write=False, what=what)
        return [torch.empty(shape, dtype=dtype, device=CUDA) for shape, dtype in makes]

    def forward(
        self, micro_batch: int, half: int | None, inputs: Sequence[Tensor], received: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        reads = [*inputs, *received]
        if self._kept is not None:
            self._kept.setdefault(micro_batch, []).extend(reads)
        return self._task(f"F{micro_batch}", reads, self._made[half])

    def backward(self, micro_batch: int, gradients: Sequence[Tensor | None]) -> Sequence[Tensor]:
        if self._early is not None and self._early[0] == micro_batch:
            self._early[1]()
        assert self._kept is not None
        reads = [*self._kept.pop(micro_batch), *filter_none(gradients)]
        return self._task(f"B{micro_batch}", reads, self._gradients)

    def input_gradient(self, micro_batch: int, gradients: Sequence[Tensor | None]) -> Sequence[Tensor]:
        assert self._kept is not None
        self._kept[micro_batch] += filter_none(gradients)
        return self._task(f"I{micro_batch}", self._kept[micro_batch], self._gradients)

    def weight_gradient(self, micro_batch: int) -> None:
        assert self._kept is not None
        self._task(f"W{micro_batch}", self._kept.pop(micro_batch))

    def clear(self) -> None:
        if self._kept is not None:
            self._kept.clear()


def has_backwards(program: RankProgram) -> bool:
    return any(i.task is not None and i.task.kind is not TaskKind.FORWARD for i in program.instructions)


def filter_none(gradients: Sequence[Tensor | None]) -> list[Tensor]:
    return [gradient for gradient in gradients if gradient is not None]


class RecordedHooks:
    """The optimizer side of a stage: its sums over ranks, and the norm that a step is agreed on.

    Args:
        step_group: the ranks that step together.
        sums_ties: the rank's last stage of those that share a parameter.
    """

    loss_scale = 1.0

    def __init__(
        self, run: Run, stage: int, groups: StageGroups, step_group: Any, *, sums_ties: bool
    ) -> None:
        self._has_data = run.plan.stages[stage].degree > 1
        self._is_partitioned = run.zero > 0
        self._data = groups.data[stage]
        self._tied = list(groups.tied.values()) if sums_ties else []
        self._step_group = step_group
        self._begun: list[Any] = []

    def begin_reduction(self) -> None:
        """Launch a sum ahead of the last backward, of which a part is launched within it: as early as any may be."""
        gradients = torch.zeros(4, device=CUDA)
        work = dist.all_reduce(gradients, group=self._data, async_op=True)
        self._begun.append((work, gradients))

    def accumulate(self) -> None:
        pass

    def reduce_data(self) -> None:
        while self._begun:
            work, _ = self._begun.pop()
            work.wait()
        if self._has_data:
            gradients = torch.zeros(4, device=CUDA)
            if self._is_partitioned:
                dist.reduce_scatter_tensor(torch.zeros(1, device=CUDA), gradients, group=self._data)
            else:
                dist.all_reduce(gradients, group=self._data)

    def reduce_tied(self) -> None:
        for group in self._tied:
            dist.all_reduce(torch.zeros(4, device=CUDA), group=group)

    def step(self) -> float:
        norm = torch.zeros((), device=CUDA)
        dist.all_reduce(norm, group=self._step_group)
        return norm.item()


class RecordedWeights:
    """Parameters that a stage's ranks hold in parts."""

    def __init__(self, group: Any, degree: int) -> None:
        self._group, self._degree = group, degree
        self._gathered: tuple[Tensor, ...] = ()

    def gather(self) -> Callable[[], None]:
        whole, part = torch.zeros(self._degree, device=CUDA), torch.zeros(1, device=CUDA)
        self._gathered = whole, part
        return begin_all_gather(whole, part, group=self._group, what="a gather")

    def free(self) -> None:
        self._gathered = ()

    def apart(self, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        return outputs


_ROWS = {
    name: TensorSpec(name=name, dtype="float32", shape=(1, 2), num_samples=1, layout=batch_layout())
    for name in ("cast", "pinned")
}


class WrittenLater(BackgroundSave):
    """A save behind the training whose thread does nothing: who records reads what it would, at once and at the end."""

    copies: Mapping[str, FileContents] = types.MappingProxyType({})

    def begin(self, prepared: Any, rank: int, num_ranks: int) -> None:
        super().begin(prepared, rank, num_ranks)
        self.copies = prepared.files.files

    def _run(self, prepared: Any, rank: int, num_ranks: int) -> None:
        pass


# ---- a rank's job ------------------------------------------------------------------------------------------


def made_up_specs(plan: PipelinePlan, length: int = 1) -> dict[str, TensorSpec]:
    """Return tensors for the names on a plan's edges: four axes, of which one is that of samples if there is one.

    Args:
        length: of the batch that they are of; another one makes every message another one.
    """
    sharded: defaultdict[str, set[int | None]] = defaultdict(set)
    batch: dict[str, bool] = {}
    for edge in plan.edges:
        for name in (*edge.batch_tensors, *edge.whole_tensors):
            sharded[name] |= {edge.src_shard_axis, edge.dst_shard_axis}
            batch[name] = name in edge.batch_tensors
    specs = {}
    for number, (name, is_batch) in enumerate(batch.items(), start=1):
        # All are of unlike sizes: a message that is taken for another one is seen.
        shape = [SIDE, SIDE, SIDE * length, SIDE * number]
        axis = min({0, 1, 2, 3} - sharded[name])
        if is_batch:
            shape[axis] = 1
        specs[name] = TensorSpec(
            name=name,
            dtype="float32",
            shape=tuple(shape),
            num_samples=1,
            layout=batch_layout(axis=axis) if is_batch else UNIFORM,
        )
    return specs


def specs_of_units(plan: PipelinePlan, step: int) -> list[Mapping[str, TensorSpec]]:
    """Return the tensors of each unit of a mini-batch: one to three samples of three lengths."""
    found: list[Mapping[str, TensorSpec]] = []
    for number in range(step, step + plan.mini_batch):
        specs, count = made_up_specs(plan, 1 + number % 3), 1 + number // 2 % 3
        found.append(
            {
                name: spec_of_unit(dataclasses.replace(spec, shape=spec.shape_for(count), num_samples=count))
                for name, spec in specs.items()
            }
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """What the ranks of a run do: lowered once for all of them."""

    training: tuple[RankProgram, ...] = ()
    evaluation: tuple[RankProgram, ...] = ()
    windows: ProgramSet | None = None
    ahead: ProgramSet | None = None
    early: frozenset[int] = frozenset()


def lower(run: Run) -> Programs:
    """Return the programs of all ranks of a run."""
    plan, frozen = run.plan, run.forward_only
    evaluation: tuple[RankProgram, ...] = ()
    if run.evaluate:
        single = dataclasses.replace(plan, mode="sync")
        evaluation = lower_schedules(single, forward_schedules(single), training=False)
    if plan.mode == "async":
        return Programs(windows=lower_async(plan, forward_only_stages=frozen), evaluation=evaluation)
    training: tuple[RankProgram, ...] = ()
    if run.train:
        training = lower_schedules(
            plan,
            build_schedules(plan, forward_only_stages=frozen),
            tied_stages=run.tied,
            forward_only_stages=frozen,
            reduce_each_backward=run.zero >= 2,
        )
    early = stages_that_reduce_early(plan, training) if training and not run.zero else frozenset[int]()
    ahead = None
    if run.prefetches:  # as `RunnerFactory` does
        ahead = lower_prefetch(plan, tied_stages=run.tied, reduce_each_backward=run.zero >= 2)
        validate_prefetch(plan, ahead)
        for name in ("steady", "epilogue"):
            early &= stages_that_reduce_early(plan, ahead.programs[name])
    return Programs(training=training, evaluation=evaluation, early=early, ahead=ahead)


class RankJob:
    """One rank of a run, as an engine would set it up and drive it."""

    def __init__(self, run: Run, programs: Programs, cuda: FakeCuda) -> None:
        self._run = run
        self._plan = plan = run.plan
        self._programs = programs
        self._cuda = cuda
        self._rank = dist.get_rank()
        self._stages = plan.stages_of_rank(self._rank)
        self._specs = made_up_specs(plan)
        self._collectives = Collectives(group=dist.new_group(None, backend="gloo"), who="", timeout_s=60.0)
        tied = {"name": "tied", "stages": run.tied, "is_whole": True}
        ties = [TiedParameter(owner=first, **tied) for first in run.tied[:1]]
        self._groups = StageGroups.create(plan, ties, timeout_s=60.0)
        self._shared: Transport | None = None
        self._local_transfers = LocalTransfers()
        self._links = {stage: InputLink(CUDA) for stage in self._stages}
        self._kept: dict[int, dict[int, list[Tensor]]] = {stage: {} for stage in self._stages}
        self._real = None
        self._computes: dict[int, AutogradCompute] = {}
        self._saved = WrittenLater(timeout_s=60.0)
        if run.computes:
            self._real = ComputingStages(
                plan,
                self._rank,
                groups=self._groups,
                ties=ties,
                zero=run.zero,
                early=programs.early,
                num_sent=SIDE**3 if run.sends_weights else 0,
            )
        self._hooks: dict[int, Any] = {stage: self._make_hooks(stage) for stage in self._stages}

    def _make_hooks(self, stage: int) -> Any:
        if self._real is not None:
            return self._real.engine.of(stage)
        is_alone = self._plan.mode == "async"
        group = self._groups.stage[stage] if is_alone else self._groups.world
        # the last of the rank's stages that share a parameter sums for all of them (`TiedSums`)
        last = max((s for s in self._stages if s in self._run.tied), default=-1)
        return RecordedHooks(self._run, stage, self._groups, group, sums_ties=stage == last)

    def _step(self) -> object:
        if self._real is not None:
            return self._real.engine.step()
        return self._hooks[self._stages[0]].step()

    def run(self) -> None:
        """Do everything."""
        self._run_all()
        if self._real is not None:
            with self._cuda.memory.off(), self._real.engine.gathered():
                weights = [p for stage in self._real.engine.stages for p in stage.module.parameters()]
                self._cuda.memory.numbers += [weight.detach().clone() for weight in weights]
            self._saved.wait(self._real.engine.stages[0])
        self._cuda.memory.numbers += self._read_saved()

    def _run_all(self) -> None:
        programs = self._programs
        if programs.windows is not None:
            self._run_windows(programs.windows)
        if programs.ahead is not None:
            self._prefetch(programs.ahead)
        elif self._run.has_units:
            self._run_units()
        elif programs.training:
            train = self._executor(programs.training[self._rank], self._transport(programs.training))
            for step in range(self._run.steps):
                self._train(train, record=self._run.record and step == self._run.steps - 1)
                if step == 0:
                    self._save()
                    self._evaluate()
        else:
            self._evaluate()

    def _train(self, run: Callable[..., MiniBatchResult], *, record: bool) -> None:
        with self._inputs() as inputs, self._attached():
            result = run(inputs, record=record)
        self._cuda.memory.numbers += [loss for loss, _ in result.losses]
        self._agree_on_loss()

    def _save(self) -> None:
        """Copy what is saved; the thread that writes it reads it at once, or when training has changed all of it."""
        if self._real is not None:
            stages = self._real.engine.stages
            for stage in stages:
                stage.update.adopt_written()
            with tempfile.TemporaryDirectory() as folder, self._real.engine.gathered():
                save_checkpoint(stages, folder, "saved", background=self._saved)
            self._read_saved()

    def _read_saved(self) -> list[Tensor]:
        return [
            tensor.clone() for contents in self._saved.copies.values() for tensor in contents.tensors.values()
        ]

    def _evaluate(self) -> None:
        programs = self._programs.evaluation
        if programs:
            executor = self._executor(programs[self._rank], self._transport(programs), is_training=False)
            with self._inputs() as inputs, self._attached():
                executor(inputs)
            self._agree_on_loss()

    def _run_windows(self, programs: ProgramSet) -> None:
        own = programs.of_rank(self._rank)
        transport = self._transport(programs.all)
        versions = {} if self._real is None else {s: self._real.versions(s) for s in self._stages}

        def make(of_stage: RankPrograms, name: str) -> StageExecutor:
            return self._part(
                of_stage.programs[name],
                transport,
                place=of_stage.place(name),
                boundary=of_stage.main,
                versions=versions.get(of_stage.main.stage) if of_stage.is_trained else None,
            )

        parts = {name: [make(own.of_stage(s), name) for s in self._stages] for name in own.programs}
        rank, windows = self._rank_executor(own), own.windows
        assert windows is not None
        # a save between two windows drains the pipeline, which is filled anew behind it
        saved_behind = [windows.first_steady] if self._real is not None else []
        for count in (*saved_behind, num_windows(windows) + self._run.steps - 1):
            for step in range(count):
                (name,) = own.policy.calls[rank.last, False]
                with self._inputs() as inputs:
                    rank.run(name, parts[name], inputs, record=self._run.record and step == count - 1)
                if self._real is not None:
                    self._real.engine.end_mini_batch()
                self._agree_on_loss()
            drain = own.policy.drains[rank.last]
            rank.run(drain, parts[drain], [()] * len(self._stages), record=self._run.record)
            for each in versions.values():
                each.settle()
            if not self._saved.is_busy:
                self._save()
        self._evaluate()

    def _prefetch(self, programs: ProgramSet) -> None:
        """Train on mini-batches of two lengths in turn, as `TrainingSteps` and `RankRunner` do.

        What was prefetched is dropped twice: for an evaluation, and since the caller comes with another iterator.
        """
        plan, own = self._plan, programs.of_rank(self._rank)
        transport = self._transport(self._programs.training)
        made: dict[Any, StageExecutor] = {}
        rank = self._rank_executor(own)

        def run_part(name: str, now: int, following: int | None) -> None:
            executors = []
            for of_stage in map(own.of_stage, self._stages):
                is_next = of_stage.is_prefetched and following is not None
                length = following if is_next else now
                key = of_stage.main.stage, name, length, following
                if key not in made:
                    made[key] = self._part(
                        of_stage.programs[name],
                        transport,
                        place=of_stage.place(name),
                        specs=made_up_specs(plan, length),
                        next_specs=None if following is None else made_up_specs(plan, following),
                    )
                executors.append(made[key])
            with self._inputs() as inputs, self._attached():
                rank.run(name, executors, inputs, record=self._run.record)

        # Every mini-batch has a number; those of odd numbers are of length 2. One is trained on as a whole first, then
        # each with the next one's branch. Behind 3 comes an evaluation, behind 4 mini-batch 7 in the place of 5.
        self._train(self._executor(self._programs.training[self._rank], transport), record=self._run.record)
        carried: int | None = None
        for number, following in ((1, 2), (2, 3), (3, 4), (4, 5), (7, 8), (8, None)):
            self._collectives.sum(torch.zeros(3), "what is prefetched")
            if carried not in (None, number):
                rank.drop()
                carried = None
            *first, last = own.policy.calls[rank.last, following is not None]
            assert (carried is None) == (first == ["prologue"])
            for name in first:
                run_part(name, number % 2 + 1, number % 2 + 1)
            carries = rank.carries
            run_part(last, number % 2 + 1, None if following is None else following % 2 + 1)
            carried = following
            self._agree_on_loss()
            if number == 3 and self._programs.evaluation:
                rank.drop()
                carried = None
                self._evaluate()
        assert rank.last == EMPTY
        for carry in carries:
            assert not carry.received and not carry.sends, "after the last one nothing is kept"

    def _run_units(self) -> None:
        """Train on mini-batches of units of unlike shapes, and evaluate between two, as `RankRunner` does."""
        programs = self._programs
        for step in range(self._run.steps):
            for of_ranks in (programs.training, programs.evaluation if step == 0 else ()):
                if of_ranks:
                    self._collectives.sum(torch.zeros(1), "code for a new shape")
                    specs = specs_of_units(self._plan, step)
                    executor = self._executor(
                        of_ranks[self._rank],
                        self._transport(of_ranks),
                        is_training=of_ranks is programs.training,
                        specs=specs,
                    )
                    self._train(executor, record=self._run.record)

    def _agree_on_loss(self) -> None:
        """Read the losses and sum them over all ranks, as a call of ``train_batch`` ends."""
        if set(self._stages) & set(self._plan.loss_stages()):
            torch.zeros((), device=CUDA).item()
        self._collectives.sum(torch.zeros(1), "the loss")

    @contextlib.contextmanager
    def _inputs(self) -> Iterator[list[InputRows]]:
        """Yield what each micro-batch of each stage reads: rows that are cast on the host, and pinned ones."""
        plan = self._plan
        rows = torch.arange(2.0 * plan.mini_batch).view(-1, 2) / plan.mini_batch
        batch = {"cast": rows.double(), "pinned": rows.pin_memory()}
        with contextlib.ExitStack() as stack:
            yield [
                stack.enter_context(
                    self._links[stage].slice_batch(
                        batch,
                        list(batch),
                        samples=[
                            plan.stages[stage].samples(m, self._rank)
                            for m in range(plan.num_micro_batches(stage))
                        ],
                        specs=_ROWS,
                        dtype=torch.float32,
                    )
                )
                for stage in self._stages
            ]

    def _attached(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._real is None else self._real.engine.attached()

    def _transport(self, programs: Sequence[RankProgram]) -> Transport | None:
        """Return the one transport of all programs, as `RunnerFactory` makes it."""
        channels = channels_of(programs)
        if not channels:
            return None
        if self._shared is not None:
            self._shared.open(channels)
            return self._shared
        request = TransportRequest(
            plan=self._plan,
            specs=self._specs,
            channels=frozenset(channels),
            device="cuda",
            backend="nccl",
            timeout_s=60.0,
        )
        self._shared = self._run.make_transport(request)
        return self._shared

    def _rank_executor(self, programs: RankPrograms) -> RankExecutor:
        return RankExecutor(programs, local_transfers=self._local_transfers, step=self._step)

    def _executor(
        self, program: RankProgram, transport: Transport | None, **options: Any
    ) -> Callable[..., MiniBatchResult]:
        """Return what runs a program of the rank; arguments as of `_part`, the same for all of its stages."""
        parts = [self._part(program.of_stage(stage), transport, **options) for stage in program.stages]
        programs = RankPrograms(plan=self._plan, programs={"whole": program}, policy=SYNCHRONOUS)
        return functools.partial(self._rank_executor(programs).run, "whole", parts)

    def _part(
        self,
        program: RankProgram,
        transport: Transport | None,
        *,
        is_training: bool = True,
        place: ProgramPlace | None = None,
        specs: BoundarySpecs | None = None,
        next_specs: Mapping[str, TensorSpec] | None = None,
        boundary: RankProgram | None = None,
        versions: WeightVersions | None = None,
    ) -> StageExecutor:
        """Return what runs one stage's program; ``boundary`` is the one that has all its gradients."""
        boundary = boundary or program
        index, hooks = program.stage, self._hooks[program.stage]
        stage = self._plan.stages[index]
        group = self._groups.model[index] if stage.model_parallel > 1 else None
        last = last_backward(program) if is_training and index in self._programs.early else None
        early = None if last is None else (last, hooks.begin_reduction)

        def compute(specs: Mapping[str, TensorSpec]) -> RecordedCompute | AutogradCompute:
            gradients = boundary_gradients(boundary, self._plan, specs)
            kept = self._kept[index] if has_backwards(boundary) else None
            made = RecordedCompute(self._run, program, specs, gradients, self._cuda, group, early, kept)
            if self._real is None:
                return made
            found = self._computes.get(index) if versions is not None else None
            if found is None:
                found = self._computes[index] = self._real.compute(
                    index,
                    program,
                    received=made.received,
                    shapes=(made.shapes(None), made.shapes(0)),
                    gradients=gradients,
                    specs=specs,
                    versions=versions,
                    is_trained=has_backwards(boundary),
                    is_training=is_training,
                )
            return found

        weights: Any = None
        if self._real is not None:
            weights = self._real.engine.of(index).weights
        elif stage.gathered_bytes:
            weights = RecordedWeights(self._groups.data[index], stage.num_replicas)
        specs = self._specs if specs is None else specs
        return StageExecutor(
            plan=self._plan,
            program=program,
            compute=compute(specs) if isinstance(specs, Mapping) else self._of_units(index, specs, compute),
            specs=specs,
            transport=transport,
            hooks=hooks,
            device=CUDA,
            loss=LOSS if self._real is not None and index in self._plan.loss_stages() else None,
            is_training=is_training,
            place=place,
            next_specs=next_specs,
            local_transfers=self._local_transfers,
            weights=weights,
            versions=versions,
        )

    def _of_units(
        self,
        index: int,
        specs: Sequence[Mapping[str, TensorSpec]],
        compute: Callable[[Mapping[str, TensorSpec]], RecordedCompute],
    ) -> ComputeByShape:
        """Return what runs each micro-batch of this rank with its own unit's tensors."""
        stage, count = self._plan.stages[index], self._plan.num_micro_batches(index)
        own = [specs[stage.samples(m, self._rank).first_sample] for m in range(count)]
        functions: Any = [types.SimpleNamespace(choice=None, batch_inputs=())] * count
        computes: Any = [compute(each) for each in own]
        return ComputeByShape(computes, functions)


def record_rank(
    num_ranks: int,
    rank: int,
    work: Callable[[FakeCuda], None],
    *,
    is_bound: bool = False,
    told: dict[tuple[int, int, int], Tensor] | None = None,
) -> tuple[FakeCuda, list[Any]]:
    """Return the device of one rank with what ``work`` asks of it, and the groups that it makes.

    Args:
        is_bound: the default group is bound to the device.
        told: as of `FakeDistributed`.
    """
    HERE.instruction = None  # where a job before failed
    tape = Tape(rank)
    cuda = FakeCuda(tape, num_devices=num_ranks)
    fake = FakeDistributed(cuda, num_ranks, told={} if told is None else told, is_bound=is_bound)
    polled = mock.patch.object(collectives, "_poll", lambda work, seconds: work.end())
    with (
        torch.random.fork_rng(devices=[]),
        recorded_cuda(cuda),
        recorded_distributed(fake),
        _no_cuda_stand_ins(),
        polled,
    ):
        torch.default_generator.manual_seed(rank)
        work(cuda)
    return cuda, fake.made


@contextlib.contextmanager
def _no_cuda_stand_ins() -> Iterator[None]:
    """Take away what other tests of this process have put in the place of CUDA in megatron-core."""
    from gpp_plugin.integrations.megatron import cpu

    was_installed = bool(cpu._originals)
    cpu.remove()
    yield
    if was_installed:
        with mock.patch.object(torch.cuda, "is_available", lambda: False):
            cpu.install()


@dataclass(frozen=True, slots=True)
class Recorded:
    """What all ranks of a run ask for, and the memory of each."""

    job: Job
    memories: tuple[Memory, ...]

    def races(self) -> list[Race]:
        """Return the races of all ranks, one for each pair of places."""
        found = [race for rank, memory in enumerate(self.memories) for race in races_of(rank, memory)]
        return list({race.places: race for race in reversed(found)}.values())

    def numbers(self) -> list[Tensor]:
        """Return the weights of all ranks at the end, and their losses; nothing where stages do not compute."""
        return [number for memory in self.memories for number in memory.numbers]

    def host_reads(self) -> list[str]:
        """Return where hosts wait for the device while a program runs, but in its step."""
        found = [read for memory in self.memories for read in memory.reads]
        return sorted({str(read) for read in found if read.is_within_tasks})


def record(run: Run, programs: Programs | None = None) -> Recorded:
    """Return what all ranks of a run ask for, and use.

    Args:
        programs: theirs, where they are not those that a run is lowered to.
    """
    programs = programs or lower(run)
    return record_ranks(run.plan.num_ranks, lambda cuda: RankJob(run, programs, cuda).run())


def record_ranks(num_ranks: int, work: Callable[[FakeCuda], Any], *, is_bound: bool = False) -> Recorded:
    """Return what ranks do that all run ``work``; arguments as of `record_rank`."""
    told: dict[tuple[int, int, int], Tensor] = {}
    ranks = [record_rank(num_ranks, rank, work, is_bound=is_bound, told=told) for rank in range(num_ranks)]
    cudas, made = zip(*ranks, strict=True)
    assert all(groups == made[0] for groups in made), SAME_GROUPS
    return Recorded(
        tuple(tuple(cuda.tape.operations) for cuda in cudas), tuple(cuda.memory for cuda in cudas)
    )


def record_job(run: Run, programs: Programs | None = None) -> Job:
    """Return what all ranks of a run ask for; arguments as of `record`."""
    return record(run, programs).job
