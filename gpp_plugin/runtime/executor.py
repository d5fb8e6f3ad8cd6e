"""Runs one rank's program: compiled once to bound callables, then called in order.

The executor chooses nothing. An exchange posts its transfers; a task waits for the messages it reads, so
that a message delays nothing but its reader. Each instruction of the `RankProgram` becomes one callable; what a message
holds (`wires`), which pieces make up a task's input and where a gradient goes is resolved at compile
time. Gradients that several consumers send for one tensor are summed in the order of edges, consumer
micro-batches and ranks, whatever order they arrive in, so results do not depend on timing.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gpp_plugin.errors import GppError, RuntimeFailure
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.program import Direction, Instruction, InstructionKind, Message, RankProgram
from gpp_plugin.ir.schedule import Task, TaskKind
from gpp_plugin.ir.tensors import LayoutKind, TensorSpec
from gpp_plugin.ir.timeline import Event, EventKind
from gpp_plugin.runtime.stage_module import StageFunction
from gpp_plugin.runtime.transport import Pending, Transport
from gpp_plugin.runtime.wires import Wire, wires_of

logger = logging.getLogger(__name__)


class StageHooks(Protocol):
    """What the program asks of the stage's optimizer side."""

    @property
    def loss_scale(self) -> float:
        """Factor of every loss's seed gradient, the same on all ranks."""

    def accumulate(self) -> None:
        """Take up the gradients of one micro-batch's backward."""

    def reduce_data(self) -> None:
        """Sum gradients over the stage's data-parallel group."""

    def reduce_tied(self) -> None:
        """Sum gradients of tied parameters over the stages that share them."""

    def step(self) -> object:
        """Agree on norm and overflow with all ranks; update, or skip."""


@dataclass(slots=True, kw_only=True)
class MiniBatchResult:
    """What one rank has after a mini-batch.

    Args:
        losses: (loss, samples it is the mean over) of each loss unit computed here.
        outputs: named output -> (first sample, tensor) in order; evaluation only.
        events: what was done when, in microseconds of this rank's clock; only when recorded.
        step_result: what `StageHooks.step` returned.
        peak_in_flight: most micro-batches held between forward and backward.
    """

    losses: list[tuple[Tensor, int]]
    outputs: dict[str, list[tuple[int, Tensor]]]
    events: list[Event]
    step_result: object
    peak_in_flight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """One received part of a tensor: where it is in the inbox."""

    message: Message
    position: int


class StageExecutor:
    """Compiles and runs the program of one rank at one shape.

    Args:
        function: the stage's code; ``parameters`` are bound in the order of ``function.tensors``.
        specs: every boundary tensor of the graph at the shapes of this mini-batch.
        transport: where messages go; None when the plan has one rank.
        hooks: optimizer side; None for a forward-only program.
        device: where the stage computes; receive buffers lie there.
        loss: node name of the loss if this stage yields it.
        named_outputs: output name -> node name, collected when running forward only.
    """

    def __init__(
        self,
        *,
        plan: PipelinePlan,
        program: RankProgram,
        function: StageFunction,
        parameters: Sequence[Tensor],
        specs: Mapping[str, TensorSpec],
        transport: Transport | None,
        hooks: StageHooks | None,
        device: torch.device,
        loss: str | None = None,
        named_outputs: Mapping[str, str] | None = None,
        is_training: bool = True,
    ) -> None:
        self._plan = plan
        self._program = program
        self._rank = program.rank
        self._stage = plan.stages[program.stage]
        self._function = function
        self._parameters = tuple(parameters)
        self._specs = specs
        self._transport = transport
        self._hooks = hooks
        self._device = device
        self._loss = loss
        self._named_outputs = dict(named_outputs or {})
        self._is_training = is_training
        self._local_samples = self._stage.local_batch_size
        self._inbox: dict[Message, list[Tensor]] = {}
        self._pending_receives: dict[Message, list[Pending]] = {}
        self._pending_sends: deque[Pending] = deque()
        self._sends_of: defaultdict[int, list[Pending]] = defaultdict(list)
        self._made: dict[int, dict[str, Tensor]] = {}
        self._leaves: dict[int, dict[str, Tensor]] = {}
        self._inputs: list[tuple[Tensor, ...]] = []
        self._result = _empty_result()
        self._is_recording = False
        self._receives: list[tuple[Message, tuple[Wire, ...]]] = []
        self._num_posted = 0
        self._has_backward: frozenset[int] = frozenset()
        self._sent: frozenset[int] = frozenset()
        self._steps = self._compile()

    # ---- compile -------------------------------------------------------------------------------

    def _compile(self) -> list[tuple[Instruction, Callable[[], None]]]:
        plan, rank = self._plan, self._rank
        incoming: dict[tuple[TaskKind, int], dict[str, list[_Piece]]] = defaultdict(lambda: defaultdict(list))
        exchanges = [i for i in self._program.instructions if i.kind is InstructionKind.EXCHANGE]
        wires = {
            message: wires_of(message, rank=rank, plan=plan, specs=self._specs)
            for exchange in exchanges
            for message in (*exchange.sends, *exchange.receives)
        }
        for exchange in exchanges:
            for message in exchange.receives:
                kind = TaskKind.FORWARD if message.direction is Direction.ACTIVATION else TaskKind.BACKWARD
                for position, wire in enumerate(wires[message]):
                    incoming[kind, message.dst_micro_batch][wire.name].append(
                        _Piece(message=message, position=position)
                    )
        for pieces_of in incoming.values():
            for pieces in pieces_of.values():
                pieces.sort(key=lambda p: (p.message.edge, p.message.samples, p.message.src_rank))
        self._receives = [
            (message, wires[message]) for exchange in exchanges for message in exchange.receives
        ]
        self._has_backward = frozenset(
            i.task.micro_batch
            for i in self._program.instructions
            if i.task is not None and i.task.kind is TaskKind.BACKWARD
        )
        self._sent = frozenset(
            message.src_micro_batch
            for exchange in exchanges
            for message in exchange.sends
            if message.direction is Direction.ACTIVATION
        )
        posted_after = self._prepost_marks(exchanges)
        dropped_after = self._drop_marks(exchanges)
        steps: list[tuple[Instruction, Callable[[], None]]] = []
        exchange_index = 0
        for instruction in self._program.instructions:
            if instruction.kind is InstructionKind.COMPUTE:
                assert instruction.task is not None
                task = instruction.task
                steps.append((instruction, self._compile_task(task, incoming[task.kind, task.micro_batch])))
            elif instruction.kind is InstructionKind.EXCHANGE:
                sends = [(message, wires[message]) for message in instruction.sends]
                mark, drops = posted_after[exchange_index], dropped_after[exchange_index]
                steps.append((instruction, self._compile_exchange(sends, mark, drops)))
                exchange_index += 1
            else:
                steps.append((instruction, self._compile_collective(instruction.kind)))
        return steps

    def _prepost_marks(self, exchanges: Sequence[Instruction]) -> list[int]:
        """Return, for each exchange, how many receives are posted when it starts."""
        depth = self._transport.prepost_depth if self._transport is not None else 0
        cumulative = [0]
        for exchange in exchanges:
            cumulative.append(cumulative[-1] + len(exchange.receives))
        return [cumulative[min(index + 1 + depth, len(exchanges))] for index in range(len(exchanges))]

    def _drop_marks(self, exchanges: Sequence[Instruction]) -> list[list[int]]:
        """Return, for each exchange, the micro-batches whose tensors nobody needs after its sends.

        Outputs of a forward that has a backward are kept for it; gradients and the outputs of a
        forward-only task go with the last message that sends them.
        """
        last: dict[int, int] = {}
        for index, exchange in enumerate(exchanges):
            for message in exchange.sends:
                if (
                    message.direction is Direction.GRADIENT
                    or message.src_micro_batch not in self._has_backward
                ):
                    last[message.src_micro_batch] = index
        drops: list[list[int]] = [[] for _ in exchanges]
        for micro_batch, index in last.items():
            drops[index].append(micro_batch)
        return drops

    def _compile_exchange(
        self,
        sends: Sequence[tuple[Message, tuple[Wire, ...]]],
        mark: int,
        drops: Sequence[int],
    ) -> Callable[[], None]:
        def exchange() -> None:
            self._post_receives(mark)
            for message, wires in sends:
                self._send(message, wires)
            for micro_batch in drops:
                del self._made[micro_batch]

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
            start = self._now()
            self._result.step_result = hooks.step()
            self._record(EventKind.STEP, -1, start)

        if kind is InstructionKind.REDUCE_DATA:
            return reduce(hooks.reduce_data)
        return reduce(hooks.reduce_tied) if kind is InstructionKind.REDUCE_TIED else step

    def _compile_task(self, task: Task, incoming: Mapping[str, list[_Piece]]) -> Callable[[], None]:
        if task.kind is TaskKind.FORWARD:
            return self._compile_forward(task.micro_batch, incoming)
        return self._compile_backward(task.micro_batch, incoming)

    def _compile_forward(self, micro_batch: int, incoming: Mapping[str, list[_Piece]]) -> Callable[[], None]:
        messages = _messages_of(incoming)
        function, parameters = self._function, self._parameters
        gradient_names = frozenset(
            name
            for edge in self._plan.edges
            if edge.dst == self._program.stage
            for name in edge.gradient_tensors
        )
        assemblies = []
        for name in function.received:
            spec = self._specs[name]
            axis = spec.layout.axis if spec.layout.kind is LayoutKind.BATCH else -1
            empty = spec.shape_for(self._local_samples) if not incoming.get(name) else None
            assemblies.append((name, incoming.get(name, []), axis, empty, getattr(torch, spec.dtype)))
        has_backward = micro_batch in self._has_backward
        is_sent = micro_batch in self._sent
        # a stage without backwards is held back by nothing but its sends: wait for those of the
        # micro-batch that must be gone before this one starts
        expired = micro_batch - self._stage.in_flight if self._is_training and not has_backward else -1

        def forward() -> None:
            for message in messages:
                self._complete(message)
            if expired >= 0:
                for pending in self._sends_of.pop(expired, ()):
                    pending.wait()
            start = self._now()
            received = []
            leaves: dict[str, Tensor] = {}
            for name, pieces, axis, empty, dtype in assemblies:
                if empty is not None:
                    tensor = torch.empty(empty, dtype=dtype, device=self._device)
                else:
                    tensor = self._assemble(pieces, axis)
                if has_backward and name in gradient_names:
                    tensor.requires_grad_(True)
                    leaves[name] = tensor
                received.append(tensor)
            outputs = function.call(*parameters, *self._inputs[micro_batch], *received)
            made = dict(zip(function.outputs, outputs, strict=True))
            if has_backward or is_sent:
                self._made[micro_batch] = made
            if has_backward:
                self._leaves[micro_batch] = leaves
                self._result.peak_in_flight = max(self._result.peak_in_flight, len(self._leaves))
            self._note_loss(made)
            if not self._is_training:
                self._collect(micro_batch, made)
            self._record(EventKind.FORWARD, micro_batch, start)

        return forward

    def _compile_backward(self, micro_batch: int, incoming: Mapping[str, list[_Piece]]) -> Callable[[], None]:
        messages = _messages_of(incoming)
        gradients = []
        for name, pieces in incoming.items():
            spec = self._specs[name]
            axis = spec.layout.axis if spec.layout.kind is LayoutKind.BATCH else -1
            by_edge: dict[int, list[_Piece]] = defaultdict(list)
            for piece in pieces:
                by_edge[piece.message.edge].append(piece)
            gradients.append((name, [by_edge[edge] for edge in sorted(by_edge)], axis))
        share = self._local_samples / self._plan.mini_batch
        loss, hooks = self._loss, self._hooks
        assert hooks is not None, "a program with backward tasks needs hooks"

        def backward() -> None:
            for message in messages:
                self._complete(message)
            start = self._now()
            made = self._made.pop(micro_batch)
            tensors: list[Tensor] = []
            seeds: list[Tensor | None] = []
            if loss is not None:
                tensors.append(made[loss])
                seeds.append(made[loss].new_tensor(hooks.loss_scale * share))
            for name, edges, axis in gradients:
                tensors.append(made[name])
                seeds.append(self._sum_gradients(edges, axis))
            if tensors:
                torch.autograd.backward(tensors, seeds)
            hooks.accumulate()
            gradients_of_leaves = self._leaf_gradients(micro_batch)
            if gradients_of_leaves:
                self._made[micro_batch] = gradients_of_leaves
            self._record(EventKind.BACKWARD, micro_batch, start)

        return backward

    # ---- run -----------------------------------------------------------------------------------

    def run(self, inputs: Sequence[tuple[Tensor, ...]], *, record: bool = False) -> MiniBatchResult:
        """Run the program once.

        Args:
            inputs: for each micro-batch, this rank's rows of ``function.batch_inputs``.
            record: whether to note the time of every task and message.

        Raises:
            CommTimeout: a message did not come in time.
            RuntimeFailure: a task failed; names rank, stage and task.
        """
        self._inputs = list(inputs)
        self._result = _empty_result()
        self._is_recording = record
        self._num_posted = 0
        instruction: Instruction | None = None
        try:
            with torch.set_grad_enabled(self._is_training):
                for instruction, step in self._steps:  # noqa: B007 - named in errors
                    step()
                while self._pending_sends:
                    self._pending_sends.popleft().wait()
        except GppError as error:
            raise type(error)(
                f"rank {self._rank}, stage {self._stage.name}, at {instruction}: {error}"
            ) from error
        except Exception as error:
            raise RuntimeFailure(
                f"rank {self._rank}, stage {self._stage.name}, at {instruction}: {type(error).__name__}: {error}"
            ) from error
        finally:
            self._inputs = []
            self._sends_of.clear()
            self._made.clear()
            self._leaves.clear()
            self._inbox.clear()
            self._pending_receives.clear()
            self._pending_sends.clear()
        return self._result

    def _post_receives(self, mark: int) -> None:
        transport = self._transport
        assert transport is not None, "a program with messages needs a transport"
        while self._num_posted < mark:
            message, wires = self._receives[self._num_posted]
            buffers = [torch.empty(w.shape, dtype=w.dtype, device=self._device) for w in wires]
            self._inbox[message] = buffers
            self._pending_receives[message] = [
                transport.receive(message, wire.slot, buffer)
                for wire, buffer in zip(wires, buffers, strict=True)
            ]
            self._num_posted += 1

    def _complete(self, message: Message) -> None:
        start = self._now()
        for pending in self._pending_receives.pop(message):
            pending.wait()
        self._record_message(EventKind.RECEIVE, message, start)

    def _send(self, message: Message, wires: Sequence[Wire]) -> None:
        transport = self._transport
        assert transport is not None, "a program with messages needs a transport"
        start = self._now()
        tensors = self._made[message.src_micro_batch]
        for wire in wires:
            tensor = tensors[wire.name].detach()
            if wire.axis >= 0 and tensor.shape[wire.axis] != wire.num_rows:
                tensor = tensor.narrow(wire.axis, wire.first_row, wire.num_rows)
            if tuple(tensor.shape) != wire.shape or tensor.dtype != wire.dtype:
                raise RuntimeFailure(
                    f"{wire.name} is {tuple(tensor.shape)} {tensor.dtype}, the plan was compiled for "
                    f"{wire.shape} {wire.dtype}; its shape depends on the data"
                )
            pending = transport.send(message, wire.slot, tensor.contiguous())
            self._pending_sends.append(pending)
            if not self._has_backward:
                self._sends_of[message.src_micro_batch].append(pending)
        while self._pending_sends and self._pending_sends[0].is_done():
            self._pending_sends.popleft().wait()
        self._record_message(EventKind.SEND, message, start, sum(w.num_bytes for w in wires))

    def _assemble(self, pieces: Sequence[_Piece], axis: int) -> Tensor:
        if len(pieces) == 1:
            return self._take(pieces[0])
        return torch.cat([self._take(piece) for piece in pieces], dim=axis)

    def _take(self, piece: _Piece) -> Tensor:
        buffers = self._inbox[piece.message]
        tensor = buffers[piece.position]
        buffers[piece.position] = _TAKEN  # a piece is part of one tensor: let go of it here
        return tensor

    def _sum_gradients(self, edges: Sequence[Sequence[_Piece]], axis: int) -> Tensor:
        """Return the gradient of one output: pieces of an edge joined by rows, edges summed in order."""
        total: Tensor | None = None
        for pieces in edges:
            if axis >= 0:
                parts = [self._assemble(pieces, axis)]
            else:  # the same tensor for every consumer micro-batch: their gradients add up
                parts = [self._take(piece) for piece in pieces]
            for part in parts:
                total = part if total is None else total + part
        assert total is not None
        return total

    def _leaf_gradients(self, micro_batch: int) -> dict[str, Tensor]:
        return {
            name: leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
            for name, leaf in self._leaves.pop(micro_batch).items()
        }

    def _note_loss(self, made: Mapping[str, Tensor]) -> None:
        if self._loss is not None:
            self._result.losses.append((made[self._loss].detach(), self._local_samples))

    def _collect(self, micro_batch: int, made: Mapping[str, Tensor]) -> None:
        first = self._stage.samples(micro_batch, self._rank).first_sample
        for output, node in self._named_outputs.items():
            if node in made:
                self._result.outputs.setdefault(output, []).append((first, made[node]))

    def _now(self) -> float:
        if not self._is_recording:
            return 0.0
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter_ns() / 1e3

    def _record(self, kind: EventKind, micro_batch: int, start: float) -> None:
        if self._is_recording:
            self._result.events.append(
                Event(
                    rank=self._rank,
                    stage=self._program.stage,
                    kind=kind,
                    micro_batch=micro_batch,
                    start_us=start,
                    end_us=self._now(),
                )
            )

    def _record_message(self, kind: EventKind, message: Message, start: float, num_bytes: int = 0) -> None:
        if self._is_recording:
            is_send = kind is EventKind.SEND
            self._result.events.append(
                Event(
                    rank=self._rank,
                    stage=self._program.stage,
                    kind=kind,
                    micro_batch=message.src_micro_batch if is_send else message.dst_micro_batch,
                    edge=message.edge,
                    start_us=start,
                    end_us=self._now(),
                    bytes=num_bytes,
                )
            )


def _messages_of(incoming: Mapping[str, list[_Piece]]) -> tuple[Message, ...]:
    """Return the messages that a task waits for, each once."""
    return tuple(dict.fromkeys(piece.message for pieces in incoming.values() for piece in pieces))


_TAKEN = torch.empty(0)


def _empty_result() -> MiniBatchResult:
    return MiniBatchResult(losses=[], outputs={}, events=[], step_result=None, peak_in_flight=0)
