"""Runs a rank's programs: each compiled once to bound callables, which are called in order.

    rank's program    0F0  send 0>2  receive 0>2  2F0  2B0  send 2>0  receive 2>0  0B0  reduce(0)  reduce(2)  step
    of stage 0        x    x                                          x            x    x                     (x)
    of stage 2                       x            x    x    x                                      x          (x)

A `StageExecutor` compiles what one stage does in one program. A `RankExecutor` puts the steps of a rank's stages into
one list, and runs the rank's programs one after the other; a step of all stages is in each one's program and runs once.
Neither computes anything: a `Mailbox` moves messages, and a `StageCompute` does the tasks. Which pieces make up what a
task reads and where rows are sent from (`routes`) is resolved at compile time. Gradients that several consumers send
for one tensor are summed in the order of edges, consumer micro-batches and ranks, whatever order they arrive in, so
results do not depend on timing.

What outlives a program (`program_sets`) is in a `Carry` a stage.

Source: this project
Tests: tests/runtime/test_rank_runner.py, tests/runtime/test_prefetch.py
"""

from __future__ import annotations

import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpp_plugin.errors import CommTimeout, GppError, RuntimeFailure, describe_error
from gpp_plugin.ir.memory_report import MemoryCounts
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.program import Instruction, InstructionKind, Message, RankProgram
from gpp_plugin.ir.schedule import Task, TaskKind
from gpp_plugin.ir.timeline import Event, EventKind
from gpp_plugin.runtime.batches import lately
from gpp_plugin.runtime.compute import StageCompute, StageHooks, StageWeights, has_backwards
from gpp_plugin.runtime.messages.mailbox import Carry, LocalTransfers, Mailbox, compile_reading
from gpp_plugin.runtime.messages.routes import BoundarySpecs, Reading, Routes, resolve_routes
from gpp_plugin.runtime.messages.transport import Transport
from gpp_plugin.runtime.ranks.failure_board import HERE
from gpp_plugin.runtime.ranks.job_board import is_broken_connection
from gpp_plugin.runtime.recorder import Moment, Recorder
from gpp_plugin.runtime.weight_versions import WeightVersions
from gpp_plugin.schedule.program_sets import EMPTY, ProgramPlace, RankPrograms

MOST_EXECUTORS = 64
"""Programs joined for the stages of a rank, one for each set of shapes, that are kept."""


@dataclass(slots=True, kw_only=True)
class MiniBatchResult:
    """What one rank has after a mini-batch.

    Args:
        losses: (loss, samples it is the mean over) of each loss computed here.
        outputs: named output -> (first sample, tensor) in order; evaluation only.
        events: what was done when, in microseconds of this rank's clock; only when recorded.
        tasks: start and end of each task (`recorder.spent_us`), always.
        step_result: what `StageHooks.step` returned.
        memories: what each stage kept for backward, by its index; empty where it was not counted, or the rank runs no
            backwards.
        most_bytes: no less than all stages of the rank ever kept at once, local transfers counted once.
        message_bytes: most that messages under way took so far, each stage's at its own most.
    """

    losses: list[tuple[Tensor, int]] = field(default_factory=list)
    outputs: dict[str, list[tuple[int, Tensor]]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    tasks: list[tuple[Moment, Moment]] = field(default_factory=list)
    step_result: object = None
    memories: dict[int, MemoryCounts] = field(default_factory=dict)
    most_bytes: int = 0
    message_bytes: int = 0


Step = Callable[[], None]


class StageExecutor:
    """Compiles and runs the program of one stage on one rank at one shape.

    Args:
        program: what the rank does for the stage, in order.
        compute: does the stage's tasks.
        specs: every boundary tensor of the graph at the shapes of this mini-batch, or of each of its samples.
        transport: where messages go; None when the plan has one rank.
        hooks: what the reductions and the step call; None for a program without them.
        device: where the stage computes; receive buffers lie there.
        loss: node name of the loss if this stage yields it.
        named_outputs: output name -> node name, collected when running forward only.
        place: where the program stands among those of a pipeline that carries messages over; None: it runs by itself.
        next_specs: of the tensors that come for the next mini-batch, where its shapes are others.
        known: routes of the same program and place at other shapes.
        local_transfers: shared by the stages of the rank; None where it holds one.
        weights: what gathers the stage's parameters; None for a program that gathers none.
        versions: of them in mode async, where the stage's step makes a new one.
    """

    def __init__(
        self,
        *,
        plan: PipelinePlan,
        program: RankProgram,
        compute: StageCompute,
        specs: BoundarySpecs,
        transport: Transport | None,
        hooks: StageHooks | None,
        device: torch.device,
        loss: str | None = None,
        named_outputs: Mapping[str, str] | None = None,
        is_training: bool = True,
        place: ProgramPlace | None = None,
        next_specs: BoundarySpecs | None = None,
        known: Routes | None = None,
        local_transfers: LocalTransfers | None = None,
        weights: StageWeights | None = None,
        versions: WeightVersions | None = None,
    ) -> None:
        # Everything that can be known before the first mini-batch is known here: tensors have positions, messages
        # numbers, tasks slots, and each instruction becomes one closure over those. Running the program is calling a
        # list.
        self._program = program
        self._rank = program.rank
        self._stage = plan.stages[program.stage]
        self.stage_name = self._stage.name
        self._compute = compute
        self._hooks = hooks
        self._weights = weights
        self._versions = versions
        self._device = device
        # Ranks of the same samples have the same losses and outputs: the first one reports them.
        is_first = self._stage.position(self._rank)[1] == 0
        self._loss = -1 if loss is None or not is_first else compute.outputs.index(loss)
        self._named_outputs = {
            name: compute.outputs.index(node)
            for name, node in (named_outputs or {}).items()
            if node in compute.outputs and is_first and not is_training
        }
        self._is_trained = has_backwards(program)
        # in mode async copies are sent, which no update changes
        self._keeps_activations = place is not None and place.keeps_activations
        carried: tuple[Message, ...] = ()
        self._first_input = 0
        if place is not None:
            self._is_trained = place.is_trained
            carried, self._first_input = place.carried, place.first_micro_batch
        self.routes = resolve_routes(
            program,
            plan=plan,
            boundary=compute,
            specs=specs,
            carried=carried,
            next_specs=next_specs,
            known=known,
        )
        self.recorder = Recorder(rank=program.rank, stage=program.stage, device=device)
        self.mail = Mailbox(
            self.routes,
            program=program,
            transport=transport,
            names=[plan.edge_name(edge) for edge in range(len(plan.edges))],
            device=device,
            recorder=self.recorder,
            carried=carried,
            in_flight=self._stage.in_flight,
            is_trained=self._is_trained,
            local_transfers=local_transfers or LocalTransfers(),
        )
        tasks = (i.task for i in program.instructions if i.task is not None)
        self.forwards = sorted({t.micro_batch for t in tasks if t.kind is TaskKind.FORWARD})
        """The micro-batches whose forwards the program runs, which read rows of a mini-batch."""
        self._made: dict[int, Sequence[Tensor]] = {}
        self._gathering: Callable[[], None] | None = None
        self._inputs: Sequence[Sequence[Tensor]] = ()
        self.result = MiniBatchResult()
        """What the stage has after a mini-batch."""
        self.is_training = is_training
        self.steps = self._compile()
        """What each instruction of the program does, in order."""

    # ---- compile -------------------------------------------------------------------------------

    def _compile(self) -> list[tuple[Instruction, Step]]:
        steps: list[tuple[Instruction, Step]] = []
        sends, receives = itertools.count(), itertools.count()
        previous: InstructionKind | None = None
        for instruction in self._program.instructions:
            if instruction.kind is InstructionKind.COMPUTE:
                assert instruction.task is not None
                task = instruction.task
                if task.kind is TaskKind.FORWARD:
                    step = self._compile_forward(task)
                elif task.kind is TaskKind.WEIGHT_GRADIENT:
                    step = self._compile_weight_gradient(task.micro_batch)
                else:
                    step = self._compile_backward(task)
                if previous is InstructionKind.GATHER:
                    step = self._behind_gather(step)
            elif instruction.kind is InstructionKind.RECEIVE:
                step = self.mail.compile_receive(next(receives))
            elif instruction.kind is InstructionKind.SEND:
                step = self.mail.compile_send(next(sends), self._made)
            elif instruction.kind is InstructionKind.STEP:
                step = functools.partial(self.step, None)
            elif instruction.kind in (InstructionKind.GATHER, InstructionKind.FREE):
                step = self._compile_gather(instruction.kind)
            else:
                hooks = self._hooks
                assert hooks is not None, "a program with reductions needs hooks"
                is_tied = instruction.kind is InstructionKind.REDUCE_TIED
                step = self._compile_reduction(hooks.reduce_tied if is_tied else hooks.reduce_data)
            steps.append((instruction, step))
            if instruction.kind in (InstructionKind.COMPUTE, InstructionKind.GATHER, InstructionKind.FREE):
                previous = instruction.kind
        return steps

    def _compile_weight_gradient(self, micro_batch: int) -> Step:
        recorder, compute = self.recorder, self._compute

        def run() -> None:
            start = recorder.moment()
            compute.weight_gradient(micro_batch)
            recorder.note_task(EventKind.WEIGHT_GRADIENT, micro_batch, start)

        return run

    def _compile_reduction(self, reduce: Step) -> Step:
        recorder = self.recorder

        def run() -> None:
            start = recorder.now()
            reduce()
            recorder.note(EventKind.REDUCE, start)

        return run

    def _compile_gather(self, kind: InstructionKind) -> Step:
        weights = self._weights
        assert weights is not None, "a program with gathers needs weights"
        if kind is InstructionKind.FREE:
            return self._behind_gather(weights.free)
        gather = weights.gather

        def run() -> None:
            self._gathering = gather()

        return run

    def _behind_gather(self, step: Step) -> Step:
        """Return a step that first waits for the gather that was begun, if one was; what is noted is that wait."""
        recorder = self.recorder

        def run() -> None:
            gathering, self._gathering = self._gathering, None
            if gathering is not None:
                start = recorder.now()
                gathering()
                recorder.note(EventKind.GATHER, start)
            step()

        return run

    def step(self, of_all: Callable[[], object] | None) -> None:
        """Step when everything has been sent.

        Args:
            of_all: the step of all stages of the rank; None: the stage's own.
        """
        if not self._keeps_activations:
            self.mail.finish_sends()  # a sent tensor may be a view of a parameter
        start = self.recorder.now()
        versions = self._versions
        if of_all is None:
            assert self._hooks is not None, "a program with a step needs hooks"
            of_all = self._hooks.step
        if versions is not None:
            versions.begin_update()
        self.result.step_result = of_all()
        if versions is not None:
            versions.end_update()
        self.recorder.note(EventKind.STEP, start)

    def _compile_forward(self, task: Task) -> Step:
        mail, recorder = self.mail, self.recorder
        micro_batch, half = task.micro_batch, task.half
        waits = mail.awaited(self.routes.reads[task].waits)
        readings = self.routes.reads[task].tensors
        reads = [compile_reading(reading, mail.inbox, self._device) for reading in readings]
        slot = self.routes.slots.get(task, -1)
        forward, loss = self._guarded_forward(readings), self._loss
        num_samples = self._stage.local_batch_size // (1 if half is None else 2)
        first_sample = self._stage.samples(micro_batch, self._rank).first_sample + num_samples * (half or 0)
        # a stage without backwards is held back by nothing but its sends: wait for those of the
        # micro-batch that must be gone before this one starts; units that lack its branch do not count
        run_before = [m for m in self.forwards if m < micro_batch]
        in_flight = self._stage.in_flight
        expired = run_before[-in_flight] if in_flight <= len(run_before) else micro_batch - in_flight
        is_held_back = self.is_training and not self._is_trained
        first_input = self._first_input

        # A task waits for the messages it reads and no others; which ones somebody has waited for before is known
        # too, so ``waits`` names each message once in the whole program.
        def run() -> None:
            for number in waits:
                mail.complete(number)
            if is_held_back:
                mail.finish_sends_of(expired)
            start = recorder.moment()
            rows = self._inputs[micro_batch - first_input]
            outputs = forward(micro_batch + mail.shift, half, rows, [read() for read in reads])
            if slot >= 0:
                self._made[slot] = outputs
            if loss >= 0:
                self.result.losses.append((outputs[loss].detach(), num_samples))
            for name, position in self._named_outputs.items():
                self.result.outputs.setdefault(name, []).append((first_sample, outputs[position]))
            recorder.note_task(EventKind.FORWARD, micro_batch, start, half)

        return run

    def _guarded_forward(self, readings: Sequence[Reading]) -> Callable[..., Sequence[Tensor]]:
        """Return the stage's forward; where it reads local transfers, one that refuses to write into them.

        What is received is the stage's own to write into; a local transfer's is its producer's, and perhaps read by
        others.
        """
        forward = self._compute.forward
        handed = [
            (position, reading.name)
            for position, reading in enumerate(readings)
            for pieces in reading.groups
            if len(pieces) == 1 and self.routes.receives[pieces[0].number][0].is_local_transfer
        ]
        if not handed:
            return forward
        name = self.stage_name

        def guarded(
            micro_batch: int, half: int | None, inputs: Sequence[Tensor], received: Sequence[Tensor]
        ) -> Sequence[Tensor]:
            versions = [received[position]._version for position, _ in handed]
            watched = [received[position] for position, _ in handed]
            outputs = forward(micro_batch, half, inputs, received)
            for (_, tensor), before, found in zip(handed, versions, watched, strict=True):
                if found._version != before:
                    raise RuntimeFailure(
                        f"stage {name} writes into {tensor}, which another stage of its rank made and may still need; "
                        "clone it before it is written to, or put the stages on ranks of their own"
                    )
            return outputs

        return guarded

    def _compile_backward(self, task: Task) -> Step:
        mail, recorder = self.mail, self.recorder
        micro_batch = task.micro_batch
        waits = mail.awaited(self.routes.reads[task].waits)
        # of an empty part nothing comes, but its backward takes part in collectives; else nobody has a gradient
        reads = [
            compile_reading(reading, mail.inbox, self._device)
            if reading.groups or 0 in reading.shape
            else None
            for reading in self.routes.reads[task].tensors
        ]
        slot = self.routes.slots.get(task, -1)
        is_whole = task.kind is TaskKind.BACKWARD
        backward = self._compute.backward if is_whole else self._compute.input_gradient
        kind = EventKind.BACKWARD if is_whole else EventKind.INPUT_GRADIENT

        def run() -> None:
            for number in waits:
                mail.complete(number)
            start = recorder.moment()
            gradients = backward(micro_batch + mail.shift, [None if r is None else r() for r in reads])
            if slot >= 0:
                self._made[slot] = gradients
            recorder.note_task(kind, micro_batch, start)

        return run

    # ---- run -----------------------------------------------------------------------------------

    def begin(self, inputs: Sequence[Sequence[Tensor]], *, record: bool, carry: Carry | None) -> None:
        """Get ready to run ``steps``.

        Args:
            inputs: for each micro-batch, this rank's rows of the model's inputs that the stage reads.
            record: whether to note the time of every task and message.
            carry: what the programs before left, and this one leaves; required of a program with a place.
        """
        self._inputs = inputs
        self.result = MiniBatchResult()
        self.recorder.start(self.result.events, self.result.tasks, is_on=record)
        if carry is not None:
            self.mail.take_over(carry)

    def finish(self, carry: Carry | None) -> None:
        """Do what is left when all steps are done: nothing is under way afterwards but what ``carry`` has."""
        self.result.message_bytes = self.mail.most_bytes
        if carry is None:
            self.mail.finish_sends()
        else:
            self.mail.hand_over(carry)

    def release(self, *, is_carried: bool) -> None:
        """Release everything; in mode async saved activations stay for the next program."""
        self._inputs = ()
        self._gathering = None
        self.mail.clear()
        self._made.clear()
        if not (is_carried and self._keeps_activations):
            self._compute.clear()


def run_steps(
    program: RankProgram,
    steps: Sequence[tuple[Instruction, Step]],
    parts: Sequence[StageExecutor],
    inputs: Sequence[Sequence[Sequence[Tensor]]],
    *,
    record: bool,
    carries: Sequence[Carry | None],
) -> None:
    """Run the steps of a rank's stages in order; release everything of all of them where one fails.

    Raises:
        CommTimeout: a message did not come in time.
        RuntimeFailure: a task failed; names rank, stage and task.
    """
    # One loop, no branches by kind: ``steps`` has the closures in the order of the program. The last instruction
    # named is the one that failed. After a failure everything is released, a carry included (``is_carried``), as it is
    # unknown what the other ranks have done; after success what is carried stays.
    instruction: Instruction | None = None
    is_carried = False
    here = HERE
    try:
        for part, given, carry in zip(parts, inputs, carries, strict=True):
            part.begin(given, record=record, carry=carry)
        with torch.set_grad_enabled(parts[0].is_training):
            for instruction, step in steps:
                here.instruction = instruction  # for the other ranks, should this one go without a word
                step()
            here.instruction = None
            for part, carry in zip(parts, carries, strict=True):
                part.finish(carry)
            is_carried = carries[0] is not None
            for part in parts:
                part.recorder.finish()
    except GppError as error:
        raise type(error)(f"{_place(program, parts, instruction)}: {error}") from error
    except Exception as error:
        if is_broken_connection(error):
            raise CommTimeout(
                f"{_place(program, parts, instruction)}: a sum over ranks broke off: another rank is gone, or did not "
                "come in the time its process group has"
            ) from error
        raise RuntimeFailure(f"{_place(program, parts, instruction)}: {describe_error(error)}") from error
    finally:
        for part in parts:
            part.release(is_carried=is_carried)


def _place(program: RankProgram, parts: Sequence[StageExecutor], instruction: Instruction | None) -> str:
    """Return where a rank failed: rank, stage and instruction."""
    stage = None if instruction is None else program.stage_of(instruction)
    part = parts[0] if stage is None else parts[program.stages.index(stage)]
    return f"rank {program.rank}, stage {part.stage_name}, at {instruction}"


# ---- all stages of a rank ----------------------------------------------------------------------------------

Around = Callable[[Instruction, Step], Step]
Steps = list[tuple[Instruction, Step]]


class RankExecutor:
    """Runs the programs of a rank one after the other, for all of its stages.

    A carry holds what a program leaves for the next one; after the last of them (`StepPolicy.after`) it is empty.

    Args:
        programs: the rank's, by name.
        local_transfers: shared by the executors of its stages.
        step: of all stages of the rank; None where stages step alone, or none does.

    Attributes:
        last: name of the last program, or `EMPTY` where nothing is carried.
        carries: what is carried, a stage each.
        mini_batches_before: how many mini-batches before the one that the last program counts from the pipeline was
            empty.
    """

    def __init__(
        self,
        programs: RankPrograms,
        *,
        local_transfers: LocalTransfers,
        step: Callable[[], object] | None = None,
    ) -> None:
        self.programs = programs
        self._local_transfers = local_transfers
        self._step = step
        self._joined: OrderedDict[tuple[int, ...], tuple[tuple[object, ...], Steps]] = OrderedDict()
        self.mini_batches_before = 0
        self._counts = [programs.plan.num_micro_batches(stage) for stage in programs.stages]
        self.forget()

    @property
    def carried_bytes(self) -> int:
        """Return the bytes that were received for the next program."""
        received = (held for carry in self.carries for held, _ in carry.received.values())
        return sum(tensor.nbytes for buffers in received for tensor in buffers)

    def run(
        self,
        name: str,
        parts: Sequence[StageExecutor],
        inputs: Sequence[Sequence[Sequence[Tensor]]],
        *,
        record: bool = False,
        program: RankProgram | None = None,
        around: Around | None = None,
    ) -> MiniBatchResult:
        """Run a program.

        Args:
            parts: what each stage does in it, in the rank's order of stages, made with the same ``local_transfers``.
            inputs, record: as of `StageExecutor.begin`, one a stage.
            program: in place of the one of that name, where units lack branches.
            around: what runs in place of a stage's step; None: the step itself.
        """
        program = program or self.programs.programs[name]
        carries: Sequence[Carry | None] = [None] * len(parts)
        if name != "whole":
            carries = self._carry_to(name)
        try:
            run_steps(
                program, self._steps_of(program, parts, around), parts, inputs, record=record, carries=carries
            )
        except BaseException:
            self.forget()
            raise
        finally:
            self._local_transfers.clear()
        self.last = self.programs.policy.after(name)
        if self.last == EMPTY and name != "whole":
            for carry in self.carries:
                carry.wait()
            self.forget()
        return _join_results([part.result for part in parts])

    def drop(self) -> None:
        """Release what is carried when it has come; collective over all ranks, which carry the same."""
        # Both ends of every message were posted in the program that sent it, so none waits for what is still to come.
        for carry in self.carries:
            carry.wait(received=True)
        self.forget()

    def forget(self) -> None:
        """Release what is carried without waiting for it: a program failed."""
        self.last = EMPTY
        self.carries = tuple(Carry() for _ in self._counts)

    def _carry_to(self, name: str) -> Sequence[Carry]:
        """Return the carries in the numbers of a program."""
        # Mode async, two micro-batches, of programs that repeat from the second on. Micro-batches 2 and 3 of "steady"
        # mean 4 and 5 in the third mini-batch (``shift`` 2); what the second left for "micro-batch 3" it expects as 1.
        policy, plan = self.programs.policy, self.programs.plan
        if self.last == EMPTY:
            self.mini_batches_before = 0
        if (self.last, name) in policy.renumbered:
            self.mini_batches_before += 1
            for stage, carry in zip(self.programs.stages, self.carries, strict=True):
                carry.renumber(plan, stage)
        for carry, count in zip(self.carries, self._counts, strict=True):
            carry.shift = self.mini_batches_before * count if policy.steps_alone else 0
        return self.carries

    def _steps_of(self, program: RankProgram, parts: Sequence[StageExecutor], around: Around | None) -> Steps:
        """Return what each instruction of a program does."""
        # told apart by identity, and held so that no other takes the place of one
        key = tuple(map(id, (program, *parts)))
        made = lately(
            self._joined,
            key,
            lambda: ((program, *parts), self._join(program, parts, around)),
            most=MOST_EXECUTORS,
        )
        return made[1]

    def _join(self, program: RankProgram, parts: Sequence[StageExecutor], around: Around | None) -> Steps:
        """Return each instruction of a program with its stage's next step, or the step of all stages."""
        own = {stage: iter(part.steps) for stage, part in zip(program.stages, parts, strict=True)}
        joined: Steps = []
        for instruction in program.instructions:
            stage = program.stage_of(instruction)
            if stage is None:
                assert self._step is not None, "a program with a step of all stages needs one"
                joined.append((instruction, functools.partial(_step_all, parts, self._step)))
                for steps in own.values():
                    next(steps)  # each stage's program has that step too
                continue
            found, compiled = next(own[stage])
            assert found == instruction, "stages run what the rank's program has of theirs"
            joined.append((instruction, compiled if around is None else around(instruction, compiled)))
        return joined


def _step_all(parts: Sequence[StageExecutor], step: Callable[[], object]) -> None:
    for part in parts:
        part.mail.finish_sends()
    parts[0].step(step)


def _join_results(results: Sequence[MiniBatchResult]) -> MiniBatchResult:
    """Return what several stages of a rank have, as one: losses and outputs stage by stage, events by their time."""
    if len(results) == 1:
        return results[0]
    joined = MiniBatchResult()
    for result in results:
        joined.losses += result.losses
        joined.outputs |= result.outputs
        joined.events += result.events
        joined.tasks += result.tasks
        joined.message_bytes += result.message_bytes
        joined.step_result = joined.step_result if result.step_result is None else result.step_result
    joined.events.sort(key=lambda event: event.start_us)
    return joined
