"""Runs one rank's program: compiled once to bound callables, then called in order.

The executor chooses nothing and computes nothing: it moves messages, and a `StageCompute` does the tasks. An
exchange posts its transfers; a task waits for the messages it reads, so that a message delays nothing but
its reader. Each instruction of the `RankProgram` becomes one callable; what a message holds (`wires`), which
pieces make up what a task reads and where rows are sent from (`routes`) is resolved at compile time.
Gradients that several consumers send for one tensor are summed in the order of edges, consumer
micro-batches and ranks, whatever order they arrive in, so results do not depend on timing.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpp_plugin.errors import GppError, RuntimeFailure
from gpp_plugin.ir.memory_counts import MemoryCounts
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.program import Instruction, InstructionKind, Message, RankProgram
from gpp_plugin.ir.schedule import Task, TaskKind
from gpp_plugin.ir.tensors import TensorSpec
from gpp_plugin.ir.timeline import Event, EventKind
from gpp_plugin.runtime.carry import Carry, WindowPlace
from gpp_plugin.runtime.compute import StageCompute, StageHooks
from gpp_plugin.runtime.routes import Parcel, Piece, Reading, Source, resolve_routes
from gpp_plugin.runtime.transport import Pending, Post, Transport
from gpp_plugin.runtime.wires import Wire

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class MiniBatchResult:
    """What one rank has after a mini-batch.

    Args:
        losses: (loss, samples it is the mean over) of each loss computed here.
        outputs: named output -> (first sample, tensor) in order; evaluation only.
        events: what was done when, in microseconds of this rank's clock; only when recorded.
        step_result: what `StageHooks.step` returned.
        memory: what was kept for backward; None where it was not counted, or the rank runs no backwards.
    """

    losses: list[tuple[Tensor, int]]
    outputs: dict[str, list[tuple[int, Tensor]]]
    events: list[Event]
    step_result: object
    memory: MemoryCounts | None = None


class StageExecutor:
    """Compiles and runs the program of one rank at one shape.

    Args:
        compute: does the stage's tasks.
        specs: every boundary tensor of the graph at the shapes of this mini-batch.
        transport: where messages go; None when the plan has one rank.
        hooks: what the reductions and the step call; None for a program without them.
        device: where the stage computes; receive buffers lie there.
        loss: node name of the loss if this stage yields it.
        named_outputs: output name -> node name, collected when running forward only.
        window: where the program stands among those of an asynchronous pipeline; None: it is run by itself.
    """

    def __init__(
        self,
        *,
        plan: PipelinePlan,
        program: RankProgram,
        compute: StageCompute,
        specs: Mapping[str, TensorSpec],
        transport: Transport | None,
        hooks: StageHooks | None,
        device: torch.device,
        loss: str | None = None,
        named_outputs: Mapping[str, str] | None = None,
        is_training: bool = True,
        window: WindowPlace | None = None,
    ) -> None:
        self._program = program
        self._rank = program.rank
        self._stage = plan.stages[program.stage]
        self._compute = compute
        self._transport = transport
        self._hooks = hooks
        self._device = device
        # Tensor ranks have the same losses and outputs: the first one tells them.
        is_first = self._stage.position(self._rank)[1] == 0
        self._loss = -1 if loss is None or not is_first else compute.outputs.index(loss)
        self._named_outputs = {
            name: compute.outputs.index(node)
            for name, node in (named_outputs or {}).items()
            if node in compute.outputs and is_first and not is_training
        }
        self._is_training = is_training
        self._is_trained = any(
            instruction.task is not None and instruction.task.kind is not TaskKind.FORWARD
            for instruction in program.instructions
        )
        self._is_window = window is not None
        self._carried: tuple[Message, ...] = ()
        self._first_input = 0
        if window is not None:
            self._is_trained = window.is_trained
            self._carried, self._first_input = window.carried, window.first_micro_batch
        self._shift = 0
        self._routes = resolve_routes(
            program, plan=plan, boundary=compute, specs=specs, carried=self._carried
        )
        self._inbox: list[list[Tensor]] = []
        self._pending_receives: list[Pending] = []
        self._bound_receives = self._bind_receives()
        self._pending_sends: deque[Pending] = deque()
        self._most_sends = _most_sends(program, in_flight=self._stage.in_flight)
        self._sends_of: defaultdict[int, list[Pending]] = defaultdict(list)
        self._made: dict[int, Sequence[Tensor]] = {}
        self._inputs: Sequence[Sequence[Tensor]] = ()
        self._result = _empty_result()
        self._is_recording = False
        self._steps = self._compile()

    # ---- compile -------------------------------------------------------------------------------

    def _compile(self) -> list[tuple[Instruction, Callable[[], None]]]:
        exchanges = [i for i in self._program.instructions if i.kind is InstructionKind.EXCHANGE]
        posted_after = self._prepost_marks(exchanges)
        steps: list[tuple[Instruction, Callable[[], None]]] = []
        exchange_index = 0
        for instruction in self._program.instructions:
            if instruction.kind is InstructionKind.COMPUTE:
                assert instruction.task is not None
                steps.append((instruction, self._compile_task(instruction.task)))
            elif instruction.kind is InstructionKind.EXCHANGE:
                sends, drops = self._routes.sends[exchange_index], self._routes.drops[exchange_index]
                steps.append(
                    (instruction, self._compile_exchange(sends, posted_after[exchange_index], drops))
                )
                exchange_index += 1
            else:
                steps.append((instruction, self._compile_collective(instruction.kind)))
        return steps

    def _bind_receives(self) -> list[tuple[Post, tuple[tuple[tuple[int, ...], torch.dtype], ...]]]:
        """Return, for each message, what posts its receive and the shapes and dtypes of its buffers."""
        transport = self._transport
        assert transport is not None or not self._routes.receives, "a program with messages needs a transport"
        return [
            (
                transport.bind_receive(message, wires),
                tuple((wire.shape, wire.dtype) for wire in wires),
            )
            for message, wires in self._routes.receives
            if transport is not None
        ]

    def _prepost_marks(self, exchanges: Sequence[Instruction]) -> list[int]:
        """Return, for each exchange, how many receives are posted when it starts.

        Receives are posted some exchanges ahead, and in batches: half of the depth may be used up before
        more are posted, because a sender learns of a batch at once.
        """
        if self._transport is None:
            return [0] * len(exchanges)
        depth, limit = self._transport.prepost_depth, self._transport.prepost_bytes
        num_carried = len(self._carried)
        sizes = [sum(wire.num_bytes for wire in wires) for _, wires in self._routes.receives]
        ends = [
            num_carried + end
            for end in itertools.accumulate(len(exchange.receives) for exchange in exchanges)
        ]
        marks: list[int] = []
        posted = num_carried
        for index, end in enumerate(ends):
            if posted < ends[min(index + depth // 2, len(ends) - 1)]:
                last = ends[min(index + 1, len(ends) - 1)] if depth else end
                furthest = ends[min(index + depth, len(ends) - 1)]
                ahead = 0
                while last < furthest and (ahead := ahead + sizes[last]) <= limit:
                    last += 1
                posted = max(posted, last)
            marks.append(posted)
        return marks

    def _compile_exchange(
        self,
        sends: Sequence[tuple[Message, tuple[Parcel, ...]]],
        mark: int,
        drops: Sequence[int],
    ) -> Callable[[], None]:
        transport = self._transport
        assert transport is not None, "a program with messages needs a transport"
        begin, end = transport.begin_exchange, transport.end_exchange
        bound = [
            (transport.bind_send(message, [parcel.wire for parcel in parcels]), message, parcels)
            for message, parcels in sends
        ]

        def exchange() -> None:
            begin()
            if len(self._inbox) < mark:
                self._post_receives(mark)
            for post, message, parcels in bound:
                self._send(post, message, parcels)
            end()
            for slot in drops:
                del self._made[slot]
            self._reap_sends()

        return exchange

    def _compile_collective(self, kind: InstructionKind) -> Callable[[], None]:
        hooks = self._hooks
        assert hooks is not None, "a program with reductions needs hooks"

        def reduce(call: Callable[[], object]) -> Callable[[], None]:
            def run() -> None:
                start = self._now()
                call()
                self._record(EventKind.REDUCE, -1, start)

            return run

        def step() -> None:
            if not self._is_window:  # a window sends copies, which no update changes
                self._finish_sends()  # a sent tensor may be a view of a parameter
            start = self._now()
            self._result.step_result = hooks.step()
            self._record(EventKind.STEP, -1, start)

        if kind is InstructionKind.REDUCE_DATA:
            return reduce(hooks.reduce_data)
        return reduce(hooks.reduce_tied) if kind is InstructionKind.REDUCE_TIED else step

    def _compile_task(self, task: Task) -> Callable[[], None]:
        if task.kind is TaskKind.FORWARD:
            return self._compile_forward(task)
        if task.kind is TaskKind.WEIGHT_GRADIENT:
            return self._compile_weight_gradient(task.micro_batch)
        return self._compile_backward(task)

    def _compile_forward(self, task: Task) -> Callable[[], None]:
        micro_batch, half = task.micro_batch, task.half
        waits = self._routes.reads[task].waits
        reads = [self._compile_reading(reading) for reading in self._routes.reads[task].tensors]
        slot = self._routes.slots.get(task, -1)
        forward, loss = self._compute.forward, self._loss
        num_samples = self._stage.local_batch_size // (1 if half is None else 2)
        first_sample = self._stage.samples(micro_batch, self._rank).first_sample + num_samples * (half or 0)
        # a stage without backwards is held back by nothing but its sends: wait for those of the
        # micro-batch that must be gone before this one starts
        expired = micro_batch - self._stage.in_flight
        is_held_back = self._is_training and not self._is_trained
        first_input = self._first_input

        def run() -> None:
            for number in waits:
                self._complete(number)
            shift = self._shift
            if is_held_back:
                for pending in self._sends_of.pop(expired + shift, ()):
                    pending.wait()
            start = self._now()
            rows = self._inputs[micro_batch - first_input]
            outputs = forward(micro_batch + shift, half, rows, [read() for read in reads])
            if slot >= 0:
                self._made[slot] = outputs
            if loss >= 0:
                self._result.losses.append((outputs[loss].detach(), num_samples))
            for name, position in self._named_outputs.items():
                self._result.outputs.setdefault(name, []).append((first_sample, outputs[position]))
            self._record(EventKind.FORWARD, micro_batch, start, half)

        return run

    def _compile_backward(self, task: Task) -> Callable[[], None]:
        micro_batch = task.micro_batch
        waits = self._routes.reads[task].waits
        reads = [
            self._compile_reading(reading) if reading.groups else None
            for reading in self._routes.reads[task].tensors
        ]
        slot = self._routes.slots.get(task, -1)
        is_whole = task.kind is TaskKind.BACKWARD
        backward = self._compute.backward if is_whole else self._compute.input_gradient
        kind = EventKind.BACKWARD if is_whole else EventKind.INPUT_GRADIENT

        def run() -> None:
            for number in waits:
                self._complete(number)
            start = self._now()
            gradients = backward(micro_batch + self._shift, [None if r is None else r() for r in reads])
            if slot >= 0:
                self._made[slot] = gradients
            self._record(kind, micro_batch, start)

        return run

    def _compile_weight_gradient(self, micro_batch: int) -> Callable[[], None]:
        weight_gradient = self._compute.weight_gradient

        def run() -> None:
            start = self._now()
            weight_gradient(micro_batch)
            self._record(EventKind.WEIGHT_GRADIENT, micro_batch, start)

        return run

    # ---- run -----------------------------------------------------------------------------------

    def run(
        self, inputs: Sequence[Sequence[Tensor]], *, record: bool = False, carry: Carry | None = None
    ) -> MiniBatchResult:
        """Run the program once.

        Args:
            inputs: for each micro-batch, this rank's rows of the model's inputs that the stage reads.
            record: whether to note the time of every task and message.
            carry: what the windows before left, and this one leaves; required of a window.

        Raises:
            CommTimeout: a message did not come in time.
            RuntimeFailure: a task failed; names rank, stage and task.
        """
        self._inputs = inputs
        self._result = _empty_result()
        self._is_recording = record
        instruction: Instruction | None = None
        if carry is not None:
            self._take_over(carry)
        is_carried = False
        try:
            with torch.set_grad_enabled(self._is_training):
                for instruction, step in self._steps:  # noqa: B007 - named in errors
                    step()
                if carry is None:
                    self._finish_sends()
                else:
                    self._hand_over(carry)
                    is_carried = True
        except GppError as error:
            raise type(error)(
                f"rank {self._rank}, stage {self._stage.name}, at {instruction}: {error}"
            ) from error
        except Exception as error:
            raise RuntimeFailure(
                f"rank {self._rank}, stage {self._stage.name}, at {instruction}: {type(error).__name__}: {error}"
            ) from error
        finally:
            self._inputs = ()
            self._sends_of.clear()
            self._made.clear()
            if not is_carried:
                self._compute.clear()
            self._inbox.clear()
            self._pending_receives.clear()
            self._pending_sends.clear()
        return self._result

    def _take_over(self, carry: Carry) -> None:
        """Go on with what the window before left."""
        self._shift = carry.shift
        for message in self._carried:
            buffers, pending = carry.received.pop(message)
            self._inbox.append(buffers)
            self._pending_receives.append(pending)
        assert not carry.received, "a window reads or passes on all that it is left"
        self._pending_sends.extend(carry.sends)
        self._sends_of.update(carry.sends_of)
        carry.clear()

    def _hand_over(self, carry: Carry) -> None:
        """Leave what was received for later windows, and what has not been sent yet."""
        is_read = {number for reads in self._routes.reads.values() for number in reads.waits}
        for number, (message, _) in enumerate(self._routes.receives):
            if number not in is_read:
                carry.received[message] = self._inbox[number], self._pending_receives[number]
        carry.sends.extend(self._pending_sends)
        carry.sends_of.update(self._sends_of)

    def _post_receives(self, mark: int) -> None:
        for post, buffers_of in self._bound_receives[len(self._inbox) : mark]:
            buffers = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in buffers_of]
            self._inbox.append(buffers)
            self._pending_receives.append(post(buffers))

    def _complete(self, number: int) -> None:
        start = self._now()
        self._pending_receives[number].wait()
        if self._is_recording:
            message, wires = self._routes.receives[number]
            self._record_message(EventKind.RECEIVE, message, start, wires)

    def _send(self, post: Post, message: Message, parcels: Sequence[Parcel]) -> None:
        start = self._now()
        tensors = []
        for parcel in parcels:
            wire = parcel.wire
            tensor = self._rows(parcel.sources, wire.axis)
            for cut in wire.cuts:
                if tensor.shape[cut.axis] != cut.size:
                    raise RuntimeFailure(
                        f"{wire.name} is {tuple(tensor.shape)}; by the plan each tensor rank holds {cut.size} elements "
                        f"of it along axis {cut.axis}"
                    )
                tensor = tensor.narrow(cut.axis, cut.first, cut.count)
            if tensor.shape != wire.shape or tensor.dtype != wire.dtype:
                raise RuntimeFailure(
                    f"{wire.name} is {tuple(tensor.shape)} {tensor.dtype}, the plan was compiled for "
                    f"{wire.shape} {wire.dtype}; its shape depends on the data"
                )
            tensors.append(tensor.contiguous())
        pending = post(tensors)
        self._pending_sends.append(pending)
        if not self._is_trained:
            self._sends_of[message.src_micro_batch + self._shift].append(pending)
        if self._is_recording:
            self._record_message(EventKind.SEND, message, start, [parcel.wire for parcel in parcels])

    def _finish_sends(self) -> None:
        """Wait until everything has been sent."""
        while self._pending_sends:
            self._pending_sends.popleft().wait()

    def _reap_sends(self) -> None:
        """Let go of what has been sent.

        gloo says that a send is done only to who waits for it. Those of long ago are waited for, lest what was sent
        stays until the mini-batch ends; the program would finish even if every send were waited for at once.
        """
        pending = self._pending_sends
        while pending and (len(pending) > self._most_sends or pending[0].is_done()):
            pending.popleft().wait()

    def _rows(self, sources: Sequence[Source], axis: int) -> Tensor:
        """Return the rows to send, out of one task or joined out of both halves."""
        tensors = []
        for source in sources:
            tensor = self._made[source.slot][source.position].detach()
            if axis >= 0 and tensor.shape[axis] != source.num_rows:
                tensor = tensor.narrow(axis, source.first_row, source.num_rows)
            tensors.append(tensor)
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=axis)

    def _compile_reading(self, reading: Reading) -> Callable[[], Tensor]:
        """Return what makes a tensor: pieces of a group joined by rows or placed, groups summed in order."""
        if not reading.groups:
            return lambda: torch.empty(reading.shape, dtype=reading.dtype, device=self._device)
        groups = [self._compile_group(pieces, reading) for pieces in reading.groups]
        if len(groups) == 1:
            return groups[0]

        def read() -> Tensor:
            total: Tensor | None = None
            for join in groups:
                part = join()
                total = part if total is None else total + part
            assert total is not None
            return total

        return read

    def _compile_group(self, pieces: Sequence[Piece], reading: Reading) -> Callable[[], Tensor]:
        axis = reading.axis
        takes = [self._compile_piece(piece, axis) for piece in pieces]
        if len(takes) == 1:
            return takes[0]
        if not any(piece.place for piece in pieces):
            return lambda: torch.cat([take() for take in takes], dim=axis)

        def join() -> Tensor:
            whole = torch.empty(reading.shape, dtype=reading.dtype, device=self._device)
            for piece, take in zip(pieces, takes, strict=True):
                part = whole
                for cut in piece.place:
                    part = part.narrow(cut.axis, cut.first, cut.count)
                part.copy_(take())
            return whole

        return join

    def _compile_piece(self, piece: Piece, axis: int) -> Callable[[], Tensor]:
        inbox, number, position = self._inbox, piece.number, piece.position

        def take() -> Tensor:
            buffers = inbox[number]
            tensor = buffers[position]
            if piece.is_last:  # let go of it here
                buffers[position] = _TAKEN
            if piece.num_rows < 0:
                return tensor
            # captured code may view what it gets, which rows cut behind the first axis do not allow
            return tensor.narrow(axis, piece.first_row, piece.num_rows).contiguous()

        return take

    def _now(self) -> float:
        if not self._is_recording:
            return 0.0
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter_ns() / 1e3

    def _record(self, kind: EventKind, micro_batch: int, start: float, half: int | None = None) -> None:
        if self._is_recording:
            self._result.events.append(
                Event(
                    rank=self._rank,
                    stage=self._program.stage,
                    kind=kind,
                    micro_batch=micro_batch,
                    start_us=start,
                    end_us=self._now(),
                    half=half,
                )
            )

    def _record_message(self, kind: EventKind, message: Message, start: float, wires: Sequence[Wire]) -> None:
        is_send = kind is EventKind.SEND
        self._result.events.append(
            Event(
                rank=self._rank,
                stage=self._program.stage,
                kind=kind,
                micro_batch=message.src_micro_batch if is_send else message.dst_micro_batch,
                half=message.src_half if is_send else message.dst_half,
                edge=message.edge,
                peer=message.dst_rank if is_send else message.src_rank,
                start_us=start,
                end_us=self._now(),
                bytes=sum(wire.num_bytes for wire in wires),
            )
        )


_TAKEN = torch.empty(0)


def _most_sends(program: RankProgram, *, in_flight: int) -> int:
    """Return how many sends may be under way: those of twice the micro-batches in flight."""
    forwards = {
        i.task.micro_batch
        for i in program.instructions
        if i.task is not None and i.task.kind is TaskKind.FORWARD
    }
    sends = sum(len(instruction.sends) for instruction in program.instructions)
    return 2 * max(in_flight, 1) * math.ceil(sends / max(len(forwards), 1))


def _empty_result() -> MiniBatchResult:
    return MiniBatchResult(losses=[], outputs={}, events=[], step_result=None)
