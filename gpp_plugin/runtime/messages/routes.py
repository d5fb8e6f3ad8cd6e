"""What each message holds, and where the rows of every task's tensors come from and go to; all resolved once.

A `Payload` is one tensor of one message as one end sees it. The sender cuts its rows out of the task's
tensor; the receiver puts the pieces of one tensor together in the order of their samples. Where context ranks
hold parts of the positions, or tensor ranks shards, both do so along that axis as well: a message holds what is in
its sender's and in its receiver's part. Nothing travels for parts that are empty, or have nothing in common.

Messages become numbers, tasks whose tensors are sent become slots, names become positions: the executor looks
nothing up. A forward in two halves reads its rows out of messages that may hold both, and a message may
be sent out of both; everything else is a special case of that. Pieces of one tensor are joined along its rows, or,
where they are of several parts as well, each is put in its place.

At another length of the batch messages have other shapes, and parts begin elsewhere; all the rest stays: which rows of
which message make up what, who waits for it, and who releases it. So a program's routes are resolved once, and later
ones take everything but these from them (`_Resolver.resolve_as`):

    payload of [4, 9, 64], rows 0..3     ->      payload of [4, 13, 64], rows 0..3

Source: this project
Tests: tests/runtime/test_tensor_grids.py
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.plan import PipelinePlan, Stage, StageEdge
from gpp_plugin.ir.program import Direction, InstructionKind, Message, RankProgram
from gpp_plugin.ir.schedule import Task, TaskKind
from gpp_plugin.ir.tensors import LayoutKind, SampleRange, TensorSpec, part_range
from gpp_plugin.runtime.compute import StageCompute

BoundarySpecs = Mapping[str, TensorSpec] | Sequence[Mapping[str, TensorSpec]]
"""Boundary tensors by name: of all samples alike, or of each sample in order where each has shapes of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCut:
    """Elements ``first`` to ``first + count`` along ``axis``, of ``size``, of the task's tensor at one end."""

    axis: int
    first: int
    count: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """One tensor of one message.

    Args:
        name: node name of the tensor.
        slot: its index among the edge's tensors, the same at both ends and in both directions.
        axis: batch axis, or -1 for a tensor that travels whole.
        first_row, num_rows: the message's rows within the task's tensor at this end.
        shape, dtype: of what travels.
        cuts: its part of the task's tensor along the axes of shards; empty where tensors are held whole.
    """

    name: str
    slot: int
    axis: int
    first_row: int
    num_rows: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    cuts: tuple[ShardCut, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Return the bytes that travel."""
        return math.prod(self.shape) * self.dtype.itemsize


def specs_of(specs: BoundarySpecs, samples: SampleRange) -> Mapping[str, TensorSpec]:
    """Return the boundary tensors of some samples; where samples differ in shape a range is one of them.

    Samples of the next mini-batch are numbered behind those of this one, and ``specs`` are then of that one: of four
    samples a mini-batch, 6 is its number 2.
    """
    return specs if isinstance(specs, Mapping) else specs[samples.first_sample % len(specs)]


def payloads_of(
    message: Message, *, is_sender: bool, plan: PipelinePlan, specs: BoundarySpecs
) -> tuple[Payload, ...]:
    """Return the tensors of ``message`` as its sender sees them, or its receiver.

    Tensors of no elements are left out: nothing travels for them.

    Raises:
        PlanError: the edge names a tensor that was not captured.
    """
    # Both ends see the same tensors, shapes and slots, but rows within their own task's tensor. Samples 4..5 of a
    # tensor with 3 rows a sample, from a producer's task on samples 0..5 to a consumer's on 4..7:
    #
    #     sender    first_row 12, num_rows 6        receiver   first_row 0, num_rows 6        shape (6, ...) at both
    #
    # A gradient is sent the other way, so its producer is the edge's consumer. Who the tensors belong to is by the
    # edge, who sends by the message.
    edge = plan.edges[message.edge]
    is_forward = message.direction is Direction.ACTIVATION
    is_producer = is_sender == is_forward
    stage = plan.stages[edge.src if is_producer else edge.dst]
    task = (
        stage.samples(message.src_micro_batch, message.src_rank)
        if is_sender
        else stage.samples(message.dst_micro_batch, message.dst_rank)
    )
    gradients = frozenset(edge.gradient_tensors)
    known = specs_of(specs, message.samples)
    payloads = []
    for slot, name in enumerate((*edge.batch_tensors, *edge.whole_tensors)):
        if not is_forward and name not in gradients:
            continue
        spec = known.get(name)
        if spec is None:
            raise PlanError(
                f"edge {message.edge} sends {name!r}, which the captured graph does not have; plan anew"
            )
        is_batch = spec.layout.kind is LayoutKind.BATCH
        if not is_batch and not message.has_whole_tensors:
            continue
        rows = spec.layout.rows_per_sample
        shape = list(spec.shape_for(message.samples.num_samples))
        cuts = _cuts(message, edge, plan, spec, is_producer=is_producer)
        for cut in cuts:
            shape[cut.axis] = cut.count
        if math.prod(shape) == 0:
            continue
        payloads.append(
            Payload(
                name=name,
                slot=slot,
                axis=spec.layout.axis if is_batch else -1,
                first_row=(message.samples.first_sample - task.first_sample) * rows if is_batch else 0,
                num_rows=message.samples.num_samples * rows if is_batch else 0,
                shape=tuple(shape),
                dtype=getattr(torch, spec.dtype),
                cuts=cuts,
            )
        )
    return tuple(payloads)


def held_shape(
    spec: TensorSpec, num_samples: int, stage: Stage, rank: int, shard_axis: int | None
) -> tuple[int, ...]:
    """Return the shape of a tensor as ``rank`` of ``stage`` has it for that many samples: its part, or all.

    Raises:
        PlanError: the tensor cannot be cut so.
    """
    shape = list(spec.shape_for(num_samples))
    if shard_axis is not None and stage.model_parallel > 1:
        shape[shard_axis] = len(_part(spec, stage, shard_axis, rank))
    return tuple(shape)


def _cuts(
    message: Message, edge: StageEdge, plan: PipelinePlan, spec: TensorSpec, *, is_producer: bool
) -> tuple[ShardCut, ...]:
    """Return the part of each shard axis that a message holds, within the tensor of one end."""
    # A tensor of 12 along the axis, held in 2 parts by the producer and 3 by the consumer; what producer 0 (0..5)
    # and consumer 1 (4..7) share is 4..5. The sender cuts its part at (first 4, count 2, size 6), the receiver puts
    # it into its own at (first 0, count 2, size 4). Along an axis that only one end has cut, the other one holds all
    # of it. Of 3 along the axis, producer 0 has 0..0 and consumer 1 has 1..1: a count of 0, so nothing travels.
    is_forward = message.direction is Direction.ACTIVATION
    ranks = (message.src_rank, message.dst_rank) if is_forward else (message.dst_rank, message.src_rank)
    stages = plan.stages[edge.src], plan.stages[edge.dst]
    held = [
        {} if axis is None or stage.model_parallel == 1 else {axis: _part(spec, stage, axis, rank)}
        for stage, rank, axis in zip(stages, ranks, (edge.src_shard_axis, edge.dst_shard_axis), strict=True)
    ]
    cuts = []
    here = held[0] if is_producer else held[1]
    for axis in sorted({*held[0], *held[1]}):
        whole = range(spec.shape[axis])
        first, second = (parts.get(axis, whole) for parts in held)
        own = here.get(axis, whole)
        both = range(max(first.start, second.start), min(first.stop, second.stop))
        cuts.append(ShardCut(axis=axis, first=both.start - own.start, count=len(both), size=len(own)))
    return tuple(cuts)


def _part(spec: TensorSpec, stage: Stage, axis: int, rank: int) -> range:
    """Return the elements along ``axis`` that ``rank`` of ``stage`` holds: positions as even as can be, or a shard."""
    is_samples = spec.layout.kind is LayoutKind.BATCH and spec.layout.axis == axis
    number = stage.num_parts(axis)
    is_uneven = stage.context == 1 and 0 <= axis < len(spec.shape) and spec.shape[axis] % number > 0
    if not 0 <= axis < len(spec.shape) or is_samples or is_uneven:
        how, fix = ("", "") if stage.context > 1 else ("equal ", "its tensor size divides and that ")
        raise PlanError(
            f"stage {stage.name!r} holds {spec.name!r} of shape {spec.shape} in {number} {how}parts along axis {axis}, "
            f"which cannot be; choose an axis that {fix}is not the samples'"
        )
    return part_range(spec.shape[axis], number, stage.part_at(stage.position(rank)[1], axis))


# ---- routes ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One received part of a tensor.

    Args:
        number: of the message among all that the rank receives; ``position`` of the tensor within it.
        first_row, num_rows: what is read of it; ``num_rows`` -1 for all.
        is_last: nobody reads that tensor afterwards.
        place: its position in the tensor that is read; empty where pieces lie one behind the other by rows.
    """

    number: int
    position: int
    first_row: int
    num_rows: int
    is_last: bool = False
    place: tuple[ShardCut, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One tensor that a task reads: groups of pieces, joined along ``axis`` or placed, and then summed in order.

    Args:
        groups: empty where nothing comes: a tensor without elements, or a gradient that no consumer sends.
        shape: of what pieces are placed in, or of a tensor of which there are none; () of one that is made of pieces.
    """

    name: str
    groups: tuple[tuple[Piece, ...], ...]
    axis: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_made(self) -> bool:
        """Return whether a tensor is made, for pieces or without any, and not just a piece or pieces joined."""
        return not self.groups or any(piece.place for group in self.groups for piece in group)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReads:
    """What a task waits for (numbers of messages nobody waited for before), and the tensors it reads."""

    waits: tuple[int, ...] = ()
    tensors: tuple[Reading, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSource:
    """Rows of one tensor of a task: the task's slot, the tensor's position in what the task made."""

    slot: int
    position: int
    first_row: int
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageEntry:
    """One tensor of a message to send; more than one source only where it holds rows of both halves."""

    payload: Payload
    sources: tuple[RowSource, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """All of a rank's routes.

    Args:
        receives: the messages in the order they are posted, with what they hold; carried ones first.
        sends: each message to send, in order, with its parcels.
        drops: for each of them, the slots that nothing is sent from afterwards.
        reads: what each task with something to read reads.
        slots: the tasks whose tensors are sent, and where they are stored.
        names: of the tensors that the stage reads and makes, in their orders.
    """

    receives: tuple[tuple[Message, tuple[Payload, ...]], ...]
    sends: tuple[tuple[Message, tuple[MessageEntry, ...]], ...]
    drops: tuple[tuple[int, ...], ...]
    reads: Mapping[Task, TaskReads]
    slots: Mapping[Task, int]
    names: tuple[tuple[str, ...], ...]


def resolve_routes(
    program: RankProgram,
    *,
    plan: PipelinePlan,
    boundary: StageCompute,
    specs: BoundarySpecs,
    carried: Sequence[Message] = (),
    next_specs: BoundarySpecs | None = None,
    known: Routes | None = None,
) -> Routes:
    """Return the routes of one rank's program.

    Args:
        boundary: names the tensors that the stage reads and makes, and their order.
        carried: messages whose receives an earlier program posted; they are numbered first.
        next_specs: of what is received for the mini-batch behind this one (`schedule.program_sets`).
        known: of the same program and the same messages carried, at other shapes.

    Raises:
        PlanError: an edge names a tensor that was not captured.
    """
    resolver = _Resolver(program, plan, boundary, specs, carried, next_specs or specs)
    found = None if known is None else resolver.resolve_as(known)
    return found or resolver.resolve()


class _Resolver:
    """Reads a program once, and resolves its routes."""

    def __init__(
        self,
        program: RankProgram,
        plan: PipelinePlan,
        boundary: StageCompute,
        specs: BoundarySpecs,
        carried: Sequence[Message],
        next_specs: BoundarySpecs,
    ) -> None:
        # ``shard_axes``: (is it read here, tensor) -> the axis along which this stage's ranks hold parts of
        # it. ``makers``: (is it a forward, micro-batch) -> the tasks that make what is sent of it; two where it runs
        # in halves.
        self._program = program
        self._plan = plan
        self._boundary = boundary
        self._specs = specs
        self._stage = plan.stages[program.stage]
        self._local = self._stage.local_batch_size
        self._shard_axes: dict[tuple[bool, str], int | None] = {}
        self._payloads_by_rows: dict[tuple[object, ...], tuple[Payload, ...]] = {}
        for edge in plan.edges:
            for name in (*edge.batch_tensors, *edge.whole_tensors):
                if edge.dst == program.stage:
                    self._shard_axes[True, name] = edge.dst_shard_axis
                if edge.src == program.stage:
                    self._shard_axes[False, name] = edge.src_shard_axis
        self._tasks = [i.task for i in program.instructions if i.task is not None]
        own = program.messages(InstructionKind.RECEIVE)
        self._receives = [(message, self._payloads(message, is_sender=False)) for message in carried]
        for message in own:
            is_next = message.samples.first_sample >= plan.mini_batch
            known = next_specs if is_next else specs
            self._receives.append((message, self._payloads(message, known, is_sender=False)))
        self._slots: dict[Task, int] = {}
        self._makers: dict[tuple[bool, int], list[Task]] = defaultdict(list)
        for task in self._tasks:
            if task.kind is not TaskKind.WEIGHT_GRADIENT:
                self._makers[task.kind is TaskKind.FORWARD, task.micro_batch].append(task)

    def resolve(self) -> Routes:
        sent = self._program.messages(InstructionKind.SEND)
        sends = tuple((message, self._entries(message)) for message in sent)
        return Routes(
            receives=tuple(self._receives),
            sends=sends,
            drops=_drops(sends),
            reads=self._reads(),
            slots=self._slots,
            names=self._names(),
        )

    def resolve_as(self, known: Routes) -> Routes | None:
        """Return the routes as those of the same program at other shapes are; None where they differ in more."""
        pairs = [(a, b) for (_, a), (_, b) in zip(self._receives, known.receives, strict=True)]
        sent = [self._payloads(message, is_sender=True) for message, _ in known.sends]
        pairs += [
            (new, tuple(p.payload for p in entries))
            for new, (_, entries) in zip(sent, known.sends, strict=True)
        ]
        # micro-batches of one shape share their payloads, so most pairs are looked at once
        distinct = {(id(new), id(old)): (new, old) for new, old in pairs}.values()
        if self._names() != known.names or not all(_differ_in_shapes_only(*pair) for pair in distinct):
            return None
        entries = [
            tuple(
                MessageEntry(payload=payload, sources=old.sources)
                for payload, old in zip(payloads, olds, strict=True)
            )
            for payloads, (_, olds) in zip(sent, known.sends, strict=True)
        ]
        return Routes(
            receives=tuple(self._receives),
            sends=tuple((message, new) for (message, _), new in zip(known.sends, entries, strict=True)),
            drops=known.drops,
            reads={task: self._reads_as(task, reads) for task, reads in known.reads.items()},
            slots=known.slots,
            names=known.names,
        )

    def _reads_as(self, task: Task, known: TaskReads) -> TaskReads:
        if not any(reading.is_made for reading in known.tensors):
            return known
        tensors = tuple(self._reading_as(task, r) if r.is_made else r for r in known.tensors)
        return TaskReads(waits=known.waits, tensors=tensors)

    def _reading_as(self, task: Task, known: Reading) -> Reading:
        groups = tuple(
            tuple(replace(p, place=self._place(task, known.name, p)) if p.place else p for p in group)
            for group in known.groups
        )
        return replace(known, groups=groups, shape=self._held_shape(task, known.name))

    def _names(self) -> tuple[tuple[str, ...], ...]:
        of = self._boundary
        return tuple(map(tuple, (of.received, of.outputs, of.gradient_outputs, of.gradient_inputs)))

    def _payloads(
        self, message: Message, specs: BoundarySpecs | None = None, *, is_sender: bool
    ) -> tuple[Payload, ...]:
        # Micro-batches differ for a payload only in where its rows begin within a task.
        known, rank = specs_of(specs or self._specs, message.samples), self._program.rank
        micro_batch = message.src_micro_batch if is_sender else message.dst_micro_batch
        first = message.samples.first_sample - self._stage.samples(micro_batch, rank).first_sample
        key = (
            message.edge,
            message.direction,
            message.channel,
            first,
            message.samples.num_samples,
            message.has_whole_tensors,
            id(known),
            is_sender,
        )
        if key not in self._payloads_by_rows:
            self._payloads_by_rows[key] = payloads_of(
                message, is_sender=is_sender, plan=self._plan, specs=known
            )
        return self._payloads_by_rows[key]

    # ---- what is sent ----------------------------------------------------------------------------

    def _entries(self, message: Message) -> tuple[MessageEntry, ...]:
        is_activation = message.direction is Direction.ACTIVATION
        makers = self._makers[is_activation, message.src_micro_batch]
        names = self._boundary.outputs if is_activation else self._boundary.gradient_inputs
        return tuple(
            MessageEntry(payload=payload, sources=self._sources(payload, makers, names.index(payload.name)))
            for payload in self._payloads(message, is_sender=True)
        )

    def _sources(self, payload: Payload, makers: Sequence[Task], position: int) -> tuple[RowSource, ...]:
        # A message of rows 1..2 of a micro-batch of four samples whose forward runs in halves takes the last row of
        # 0a (rows 0..1) and the first of 0b (rows 2..3):
        #
        #     [RowSource(slot of 0a, first_row=1, num_rows=1), RowSource(slot of 0b, first_row=0, num_rows=1)]
        sources: list[RowSource] = []
        for task in makers:
            first, count = payload.first_row, payload.num_rows
            if payload.axis >= 0:
                start, end = self._rows(task, payload.name)
                first, count = max(first, start) - start, min(first + count, end) - max(first, start)
                if count <= 0:
                    continue
            elif sources:
                continue  # the same for all samples: the first half's does for both
            slot = self._slots.setdefault(task, len(self._slots))
            sources.append(RowSource(slot=slot, position=position, first_row=first, num_rows=count))
        assert sources, f"no task makes {payload.name}"
        return tuple(sources)

    def _spec(self, task: Task, name: str) -> TensorSpec:
        """Return a tensor as it is for the samples of a task."""
        return specs_of(self._specs, self._stage.samples(task.micro_batch, self._program.rank))[name]

    def _rows(self, task: Task, name: str) -> tuple[int, int]:
        """Return the rows of a tensor that a task has, within those of its micro-batch."""
        rows = self._local * self._spec(task, name).layout.rows_per_sample
        if task.half is None:
            return 0, rows
        return task.half * rows // 2, (task.half + 1) * rows // 2

    # ---- what is read ----------------------------------------------------------------------------

    def _reads(self) -> dict[Task, TaskReads]:
        # Two passes over the tasks, as only the whole program says who reads a piece last, and that one releases
        # it. Whoever reads a message first waits for it: halves 0a and 0b that both read message 4 wait as (4,) and
        # ().
        arrived = self._arrived()
        groups: dict[Task, dict[str, list[list[Piece]]]] = {}
        last_reader: dict[tuple[int, int], Task] = {}
        for task in self._tasks:
            groups[task] = {}
            for name in self._names_read(task):
                found = arrived.get((task.kind is TaskKind.FORWARD, task.micro_batch, name), [])
                groups[task][name] = self._groups(task, name, found)
                for piece in (piece for group in groups[task][name] for piece in group):
                    last_reader[piece.number, piece.position] = task
        reads = {}
        is_awaited: set[int] = set()
        for task, groups_of in groups.items():
            tensors = tuple(
                self._reading(task, name, pieces, last_reader) for name, pieces in groups_of.items()
            )
            numbers = dict.fromkeys(
                p.number for reading in tensors for group in reading.groups for p in group
            )
            reads[task] = TaskReads(waits=tuple(n for n in numbers if n not in is_awaited), tensors=tensors)
            is_awaited.update(numbers)
        return reads

    def _names_read(self, task: Task) -> tuple[str, ...]:
        if task.kind is TaskKind.FORWARD:
            return self._boundary.received
        return () if task.kind is TaskKind.WEIGHT_GRADIENT else self._boundary.gradient_outputs

    def _arrived(self) -> dict[tuple[bool, int, str], list[tuple[int, int]]]:
        """Return (number, position) of what comes of a tensor for a micro-batch, in an order that is fixed."""
        found: dict[tuple[bool, int, str], list[tuple[int, int]]] = defaultdict(list)
        for number, (message, payloads) in enumerate(self._receives):
            is_activation = message.direction is Direction.ACTIVATION
            for position, payload in enumerate(payloads):
                found[is_activation, message.dst_micro_batch, payload.name].append((number, position))
        for pieces in found.values():
            pieces.sort(key=lambda p: self._order(p[0]))
        return found

    def _order(self, number: int) -> tuple[int, SampleRange, int]:
        message = self._receives[number][0]
        return (message.edge, message.samples, message.src_rank)

    def _groups(self, task: Task, name: str, arrived: Sequence[tuple[int, int]]) -> list[list[Piece]]:
        """Return the pieces of a tensor: those of a group are joined, the groups added up."""
        is_batch = self._spec(task, name).layout.kind is LayoutKind.BATCH
        if task.kind is TaskKind.FORWARD:
            joined = (
                self._rows_of_half(task, name, arrived)
                if is_batch
                else _of_half(task, self._receives, arrived)
            )
            return [self._placed(task, name, joined)] if joined else []
        # Gradients. Two consumers (edges 0 and 1), the second with micro-batches half the size, send for one tensor
        # of four rows: ``[[rows 0..3 of edge 0], [rows 0..1, rows 2..3 of edge 1]]``; rows of a group are joined,
        # groups added. A tensor without a batch axis is the same for every consumer micro-batch: their gradients add
        # up.
        by_source: dict[tuple[int, SampleRange | None], list[Piece]] = defaultdict(list)
        for number, position in arrived:
            message = self._receives[number][0]
            by_source[message.edge, None if is_batch else message.samples].append(_whole(number, position))
        order = sorted(by_source, key=lambda source: (source[0], source[1] or _NO_SAMPLES))
        return [self._placed(task, name, by_source[source]) for source in order]

    def _placed(self, task: Task, name: str, pieces: Sequence[Piece]) -> list[Piece]:
        """Return the pieces with their places, if they are of different parts and no join by rows will do."""
        if len({self._receives[piece.number][1][piece.position].cuts for piece in pieces}) == 1:
            return list(pieces)
        return [replace(piece, place=self._place(task, name, piece)) for piece in pieces]

    def _place(self, task: Task, name: str, piece: Piece) -> tuple[ShardCut, ...]:
        """Return where a piece lies in the tensor that a task reads."""
        payload = self._receives[piece.number][1][piece.position]
        if payload.axis < 0:
            return payload.cuts
        rows = payload.num_rows if piece.num_rows < 0 else piece.num_rows
        start, end = self._rows(task, name)
        first = payload.first_row + piece.first_row - start
        return (ShardCut(axis=payload.axis, first=first, count=rows, size=end - start), *payload.cuts)

    def _held_shape(self, task: Task, name: str) -> tuple[int, ...]:
        """Return the shape of what a task reads of a tensor, as this rank holds it."""
        samples = self._local if task.half is None else self._local // 2
        shard_axis = self._shard_axes.get((task.kind is TaskKind.FORWARD, name))
        return held_shape(self._spec(task, name), samples, self._stage, self._program.rank, shard_axis)

    def _rows_of_half(self, task: Task, name: str, arrived: Sequence[tuple[int, int]]) -> list[Piece]:
        start, end = self._rows(task, name)
        pieces = []
        for number, position in arrived:
            payload = self._receives[number][1][position]
            first, last = max(payload.first_row, start), min(payload.first_row + payload.num_rows, end)
            if (first, last) == (payload.first_row, payload.first_row + payload.num_rows):
                pieces.append(_whole(number, position))
            elif first < last:
                pieces.append(
                    Piece(
                        number=number,
                        position=position,
                        first_row=first - payload.first_row,
                        num_rows=last - first,
                    )
                )
        return pieces

    def _reading(
        self,
        task: Task,
        name: str,
        groups: Sequence[Sequence[Piece]],
        last_reader: Mapping[tuple[int, int], Task],
    ) -> Reading:
        spec = self._spec(task, name)
        reading = Reading(
            name=name,
            groups=tuple(
                tuple(replace(p, is_last=last_reader[p.number, p.position] == task) for p in group)
                for group in groups
            ),
            axis=spec.layout.axis if spec.layout.kind is LayoutKind.BATCH else -1,
            shape=(),
            dtype=getattr(torch, spec.dtype),
        )
        return replace(reading, shape=self._held_shape(task, name)) if reading.is_made else reading


def _differ_in_shapes_only(new: Sequence[Payload], old: Sequence[Payload]) -> bool:
    """Return whether the tensors of a message are those of another one, with as many rows."""
    # parts may begin elsewhere and be longer, but none has become empty, or ceased to be
    return len(new) == len(old) and all(
        (a.name, a.slot, a.axis, a.first_row, a.num_rows, a.dtype, len(a.cuts))
        == (b.name, b.slot, b.axis, b.first_row, b.num_rows, b.dtype, len(b.cuts))
        for a, b in zip(new, old, strict=True)
    )


_NO_SAMPLES = SampleRange(first_sample=-1, num_samples=0)


def _whole(number: int, position: int) -> Piece:
    return Piece(number=number, position=position, first_row=0, num_rows=-1)


def _of_half(
    task: Task,
    receives: Sequence[tuple[Message, tuple[Payload, ...]]],
    arrived: Sequence[tuple[int, int]],
) -> list[Piece]:
    """Return what holds a tensor without a batch axis: the half's own, or what came for the first."""
    found = [pair for pair in arrived if receives[pair[0]][0].dst_half == task.half] or arrived
    return [
        _whole(*pair) for pair in found if receives[pair[0]][0].samples == receives[found[0][0]][0].samples
    ]


def _drops(sends: Sequence[tuple[Message, tuple[MessageEntry, ...]]]) -> tuple[tuple[int, ...], ...]:
    """Return, for each send, the slots that it is the last to send from."""
    last = {
        source.slot: index
        for index, (_, entries) in enumerate(sends)
        for entry in entries
        for source in entry.sources
    }
    drops: list[list[int]] = [[] for _ in sends]
    for slot, index in last.items():
        drops[index].append(slot)
    return tuple(map(tuple, drops))
