"""The plan: which stage holds which blocks, on which ranks, in which micro-batches, and how its memory is made to fit.

Source: PipeDream (SOSP 2019, doi 10.1145/3341301.3359646), section 3.3
Tests: tests/plan/test_asynchronous.py, tests/plan/test_memory_breakdown.py
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, NamedTuple

import networkx as nx

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.schedule import TaskKind
from gpp_plugin.ir.serialize import DERIVED, fingerprint
from gpp_plugin.ir.step_cost import RankBytes, StepCost
from gpp_plugin.ir.tensors import SampleRange, TensorSpec
from gpp_plugin.ir.typed_leaves import Bytes, Count, Index, MeanBytes, Micros, OneOf, SignedMicros, ZeroStage


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedTensor:
    """A saved tensor that waits for its backward in host memory.

    Args:
        name: of the `SavedTensor`.
        bytes: of one micro-batch on one rank.
        free_us: from its last use in the forward to its first in the backward, less both transfers
            (Capuchin's FreeTime); negative where the transfers cannot hide.
    """

    name: str
    bytes: Bytes
    free_us: SignedMicros


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputedSegment:
    """Consecutive blocks that run again before their backward, as one checkpointed segment.

    What was made outside and is read inside stays; random state is restored.

    Args:
        blocks: in execution order.
        tensors: names of the `SavedTensor`s that are dropped after the forward.
        bytes: of them, for one micro-batch on one rank.
        held_bytes: results of earlier blocks that are held for this segment only.
        recompute_us: time of the second forward.
    """

    blocks: tuple[str, ...]
    tensors: tuple[str, ...]
    bytes: Bytes
    held_bytes: Bytes
    recompute_us: Micros


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What one stage swaps and recomputes for every micro-batch.

    Args:
        working_bytes: what is back in device memory beside what is saved: the largest segment made again,
            and two swapped tensors, one in use and one on its way.
        swap_us: transfer time of one micro-batch that does not hide behind compute.
    """

    swapped: tuple[SwappedTensor, ...] = ()
    recomputed: tuple[RecomputedSegment, ...] = ()
    working_bytes: Bytes = 0
    swap_us: Micros = 0.0

    @property
    def swapped_bytes(self) -> int:
        """Return bytes in host memory, of one micro-batch on one rank."""
        return sum(tensor.bytes for tensor in self.swapped)

    @property
    def recomputed_bytes(self) -> int:
        """Return bytes not saved for one micro-batch, less what is saved instead."""
        return sum(segment.bytes - segment.held_bytes for segment in self.recomputed)

    @property
    def recompute_us(self) -> float:
        """Return the time of the second forwards of one micro-batch."""
        return sum(segment.recompute_us for segment in self.recomputed)

    @property
    def added_us(self) -> float:
        """Return what one micro-batch takes longer than without."""
        return self.recompute_us + self.swap_us


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBreakdown:
    """Predicted bytes of one rank of a stage at its peak, by what they hold.

    Args:
        weights: the current ones, under ZeRO 3 the rank's part; ``stashed_weights``: older versions (mode async).
        gathered: the rest of them while one of the stage's tasks runs (ZeRO 3).
        activations: saved for backward by all micro-batches in flight, after swap and recompute.
        working: tensors back in use, or on their way to or from the host.
        transient: most that one block holds while it runs, and the gradients that wait for weight gradients.
        inputs: its part of the mini-batch, held while a step runs.
        messages: sent and not gone, and buffers of the next ones to come; beside ``total``, which planners cut by.
        limit: what the plan may use of the stage's smallest rank; 0 where that is not known.
    """

    stage: str
    weights: Bytes
    stashed_weights: Bytes
    gradients: Bytes
    optimizer: Bytes
    activations: Bytes
    working: Bytes
    transient: Bytes
    inputs: Bytes = 0
    gathered: Bytes = 0
    messages: Bytes = 0
    limit: Bytes = 0

    @property
    def total(self) -> int:
        """Return all bytes but those of messages."""
        held = self.weights + self.stashed_weights + self.gradients + self.optimizer
        return held + self.activations + self.working + self.transient + self.inputs + self.gathered


def joined_breakdown(parts: Sequence[MemoryBreakdown]) -> MemoryBreakdown:
    """Return what fills a rank that holds several stages: the sum of what each of them does; one stage's as it is.

    Of gathered weights it holds one stage's at a time, the largest, or two where they fit (`schedule.gathers`).
    """
    if len(parts) == 1:
        return parts[0]
    limits = [part.limit for part in parts if part.limit]
    sums = {
        field.name: sum(getattr(part, field.name) for part in parts)
        for field in fields(MemoryBreakdown)
        if field.name not in ("stage", "limit", "gathered")
    }
    joined = MemoryBreakdown(
        stage=", ".join(part.stage for part in parts), limit=min(limits, default=0), **sums
    )
    free_bytes = joined.limit - joined.total - joined.messages
    return replace(joined, gathered=gathered_together([part.gathered for part in parts], free_bytes))


def gathered_together(gathered: Sequence[int], free_bytes: int) -> int:
    """Return the bytes of gathered weights that a rank holds at a time: of two stages, where that fits, or of one.

    Args:
        gathered: of each of its stages.
        free_bytes: bytes for them; 0 or less where no limit is known.

    >>> gathered_together([40, 60, 30], 100), gathered_together([40, 60, 30], 99), gathered_together([40], 0)
    (100, 60, 40)
    """
    *_, second, first = sorted((0, *gathered))
    return first + second if first + second <= free_bytes else first


def rank_bytes(peaks: Sequence[tuple[float, float]]) -> float:
    """Return M of a rank that holds several stages: the sum of theirs, but of what is gathered the largest alone.

    Args:
        peaks: by stage, M and of it P - P / p.

    >>> rank_bytes([(100, 40), (80, 30)])
    150
    """
    return sum(most - gathered for most, gathered in peaks) + max(gathered for _, gathered in peaks)


LOSS_KEY = "loss"
"""What users call the stage that yields the loss wherever they name stages; `PipelinePlan.losses` says which it is."""


class ModelGrid(NamedTuple):
    """How many ranks compute the same samples together: context x tensor of them."""

    context: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        """Return the ranks of a data position."""
        return self.context * self.tensor


ALONE = ModelGrid()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of the pipeline graph.

    Args:
        name: what it holds (`plan.stage_names`), or as the user calls it; unique in the plan.
        blocks: block names in topological order.
        ranks: the global ranks of its grid of data x context x tensor positions, row by row: the rank at data position
            d, context position c and tensor position t is ``ranks[(d * context + c) * tensor + t]``.
        micro_batch_size: samples the whole stage takes at a time; each data position gets an equal part.
        schedule: ``1f1b``, ``gpipe``, ``greedy`` or ``zero_bubble``; ``k`` is the k of kFkB (with ``1f1b``).
        num_sliced: micro-batches, the first ones, whose forwards run in two halves (AutoPipe's slicer).
        joins_last_slice: the halves of the last of those leave together, after the second one.
        in_flight: most micro-batches held, from the first forward to the end of the backward.
        forward_us, backward_us: predicted time of one micro-batch on one rank.
        half_forward_us: of half a micro-batch's forward; 0 is half of ``forward_us``.
        input_gradient_us, weight_gradient_us: of the parts of a split backward; 0 both is half of
            ``backward_us`` each.
        pending: most micro-batches at a time whose input gradient is made and whose weight gradient is not; they are in
            flight, and hold gradients beside what they saved.
        memory_bytes: predicted peak of one rank; 0 where not predicted.
        gradient_bytes: gradients of the stage's parameters, which its ranks reduce among themselves.
        sharded_bytes: its parameters where each of its data-parallel ranks holds a part of them, and all gather them
            for the stage's tasks (ZeRO 3); 0: each holds them whole.
        memory: what it swaps and recomputes; None: nothing. ``backward_us`` contains what that adds.
        tensor: tensor-parallel size: so many ranks share out weights, with collectives inside each task.
        context: context-parallel size: so many ranks have parts of the positions of the same samples, and whole
            weights. The context x tensor ranks of a data position compute the same samples together.
        backend: what its forward runs on where that is not torch (`openvino`, of a mix `openvino + torch`); a stage
            without gradients alone has one.
        compiled: those of its blocks, of a stage that trains, whose code is compiled.
    """

    name: str
    blocks: tuple[str, ...]
    ranks: tuple[Index, ...]
    micro_batch_size: Count
    in_flight: Count
    schedule: str = "1f1b"
    k: Count = 1
    num_sliced: Index = 0
    joins_last_slice: bool = False
    forward_us: Micros = 0.0
    backward_us: Micros = 0.0
    half_forward_us: Micros = 0.0
    input_gradient_us: Micros = 0.0
    weight_gradient_us: Micros = 0.0
    pending: Index = 0
    memory_bytes: Bytes = 0
    gradient_bytes: Bytes = 0
    sharded_bytes: Bytes = 0
    memory: MemoryPlan | None = None
    tensor: Count = 1
    backend: str = ""
    compiled: tuple[str, ...] = ()
    context: Count = 1

    @property
    def forward_label(self) -> str:
        """Return the stage's name, and what it runs on where that is not torch: ``vision on openvino``."""
        return f"{self.name} on {self.runs_on}" if self.runs_on else self.name

    @property
    def runs_on(self) -> str:
        """Return what it runs on in words; empty for torch's operators alone."""
        if not self.compiled:
            return self.backend
        number = len(self.compiled)
        return "compiled code" if number == len(self.blocks) else f"compiled code ({number} of its blocks)"

    @property
    def grid(self) -> ModelGrid:
        """Return the context x tensor ranks of a data position."""
        return ModelGrid(self.context, self.tensor)

    @property
    def model_parallel(self) -> int:
        """Return how many ranks compute the same samples together."""
        return self.context * self.tensor

    @property
    def degree(self) -> int:
        """Return the data-parallel degree: how many ranks compute different samples."""
        return len(self.ranks) // self.model_parallel

    @property
    def num_replicas(self) -> int:
        """Return how many ranks hold the same parameters: those of data x context."""
        return len(self.ranks) // self.tensor

    @property
    def gathered_bytes(self) -> int:
        """Return what a rank holds of the parameters beside its own part while they are whole; 0 where it always does.

        >>> held = {"ranks": (0, 1, 2, 3), "sharded_bytes": 80}
        >>> stage = Stage(name="a", blocks=("a",), micro_batch_size=4, in_flight=1, **held)
        >>> stage.gathered_bytes
        60
        """
        return self.sharded_bytes - self.sharded_bytes // self.num_replicas

    @property
    def local_batch_size(self) -> int:
        """Return the samples one rank computes at a time."""
        return self.micro_batch_size // self.degree

    def position(self, rank: int) -> tuple[int, int]:
        """Return the data position of ``rank`` in the stage's grid, and its place among those of the same samples."""
        # ranks (4, 5, 6, 7, 8, 9), tensor 2: three data positions of two ranks; rank 7 is (1, 1)
        return divmod(self.ranks.index(rank), self.model_parallel)

    def context_position(self, rank: int) -> int:
        """Return which part of the positions ``rank`` has."""
        return self.position(rank)[1] // self.tensor

    def tensor_position(self, rank: int) -> int:
        """Return which part of the weights ``rank`` has."""
        return self.position(rank)[1] % self.tensor

    def data_ranks(self, place: int = 0) -> tuple[int, ...]:
        """Return the ranks at a place of each data position, in the order of their samples."""
        # of the same grid: place 1 has ranks 5, 7 and 9, which compute different samples
        return self.ranks[place :: self.model_parallel]

    def num_parts(self, shard_axis: int | None) -> int:
        """Return in how many parts its ranks hold an edge's tensors: of context ranks the positions, else shards."""
        sizes = (self.context, self.tensor) if shard_axis is not None else ()
        return next((size for size in sizes if size > 1), 1)

    def part_at(self, place: int, shard_axis: int | None) -> int:
        """Return which of these parts the rank at a place of a data position has."""
        # context 2, tensor 2: places 0 and 1 have part 0 whole, 2 and 3 part 1; tensor 4 alone: place t has shard t
        return place * self.num_parts(shard_axis) // self.model_parallel

    def model_ranks(self, data_position: int) -> tuple[int, ...]:
        """Return the ranks of a data position, which compute the same samples together."""
        size = self.model_parallel
        return self.ranks[data_position * size : (data_position + 1) * size]

    def replicas(self, tensor_position: int) -> tuple[int, ...]:
        """Return the ranks that hold the same parameters, those of one tensor position: their gradients are summed."""
        return self.ranks[tensor_position :: self.tensor]

    def tensor_ranks(self, data_position: int, context_position: int = 0) -> tuple[int, ...]:
        """Return the tensor-parallel group of a data and a context position: the same positions, different shards."""
        first = context_position * self.tensor
        return self.model_ranks(data_position)[first : first + self.tensor]

    def context_ranks(self, data_position: int, tensor_position: int = 0) -> tuple[int, ...]:
        """Return the context-parallel group of a data and a tensor position: the same shards, different positions."""
        return self.model_ranks(data_position)[tensor_position :: self.tensor]

    def samples(self, micro_batch: int, rank: int, half: int | None = None) -> SampleRange:
        """Return the samples of the mini-batch that ``rank`` computes in (half of) ``micro_batch``."""
        # A mini-batch of 16, micro-batches of 8, 2 ranks; who computes which samples:
        #     micro-batch      0               1
        #     rank 0       0  1  2  3     8  9 10 11
        #     rank 1       4  5  6  7    12 13 14 15
        local = self.local_batch_size
        first = micro_batch * self.micro_batch_size + self.position(rank)[0] * local
        whole = SampleRange(first_sample=first, num_samples=local)
        return whole if half is None else whole.halves()[half]


ORDER_ONLY = "(order)"
"""The name of tensors that no stage makes or sends: their edge says that one stage runs after another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEdge:
    """Tensors from stage ``src`` to stage ``dst`` (indices into `PipelinePlan.stages`).

    Args:
        batch_tensors: have a batch axis; every message holds its samples' rows.
        whole_tensors: have none; held by the message with the consumer's first sample.
        gradient_tensors: those of both whose gradient flows back.
        bytes_per_sample, bytes_fixed: forward size of the batch and of the whole tensors.
        gradient_bytes_per_sample, gradient_bytes_fixed: the same for the gradients.
        src_shard_axis, dst_shard_axis: the axis along which the ranks of a data position of the producer, or of the
            consumer, hold each tensor in parts. Context ranks hold parts of the positions (`part_range`), the tensor
            ranks of a context position all the same one. Tensor ranks alone hold equal shards (Megatron's sequence
            parallelism), shard t at tensor position t. None: each rank holds the whole tensor. Shapes and bytes are
            of whole tensors. Tensors held in different ways between the same two stages are on edges of their own.
        message_us, gradient_us: what a message takes, and a gradient's, where orders reckon with it; 0: they take
            messages to be free.
    """

    src: Index
    dst: Index
    batch_tensors: tuple[str, ...] = ()
    whole_tensors: tuple[str, ...] = ()
    gradient_tensors: tuple[str, ...] = ()
    bytes_per_sample: MeanBytes = 0.0
    bytes_fixed: MeanBytes = 0.0
    gradient_bytes_per_sample: MeanBytes = 0.0
    gradient_bytes_fixed: MeanBytes = 0.0
    src_shard_axis: Index | None = None
    dst_shard_axis: Index | None = None
    message_us: Micros = 0.0
    gradient_us: Micros = 0.0

    @property
    def is_order_only(self) -> bool:
        """Return whether ``dst`` only waits for ``src``: for prediction of what runs in a line (`ORDER_ONLY`)."""
        names = (*self.batch_tensors, *self.whole_tensors)
        return bool(names) and all(name.startswith(ORDER_ONLY) for name in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another plan that was found beside the one that is taken: longer, with less memory or fewer stages.

    Args:
        iteration_us: as its planner evaluates it, before schedules are tried.
        peak_bytes: of the fullest rank.
    """

    num_stages: Count
    iteration_us: Micros
    peak_bytes: Bytes
    zero_stage: ZeroStage = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """Stages in a topological order, all edges between them, and how a mini-batch is cut.

    Args:
        graph: fingerprint of the BlockGraph it was made for.
        mini_batch: samples of one optimizer step (B).
        loss_unit: samples one rank computes one loss on (u); a coupled stage's local batch.
        mode: ``sync``: one optimizer step a mini-batch; ``async``: one after every backward, which uses the
            weights of its forward, so that a stage holds as many versions as micro-batches (PipeDream).
        iteration_us: predicted time of one optimizer step; 0 where not predicted.
        notes: lines for the user (what was chosen and why).
        tensors: every tensor an edge names, once; what a rehearsal, without the model, makes messages of.
        memory: what one rank of each stage is predicted to be filled with; empty where it is not predicted.
        losses: names of the stages that yield a loss; empty (plans of older releases, plans of delays alone): those
            that no other stage reads from.
        vertical_sync: in mode ``async``, a micro-batch uses weights of the same age on every stage.
        zero_stage: of DeepSpeed's ZeRO, which times and memory are of.
        alternatives: what one may choose instead, by increasing time.
        cost: what the step takes and the ranks hold; what every command prints. None where it was not predicted.
        is_estimate: it is only compared with others: this package does not run what it describes.

    Its fingerprint is that of what runs: how it was found, and what is said of it, are left out.
    """

    model: str
    graph: str
    planner: str = field(metadata=DERIVED)
    mini_batch: Count
    loss_unit: Count
    stages: tuple[Stage, ...]
    edges: tuple[StageEdge, ...]
    iteration_us: Micros = field(default=0.0, metadata=DERIVED)
    notes: tuple[str, ...] = field(default=(), metadata=DERIVED)
    tensors: tuple[TensorSpec, ...] = ()
    mode: Annotated[str, OneOf(("sync", "async"))] = "sync"
    memory: tuple[MemoryBreakdown, ...] = ()
    losses: tuple[str, ...] = ()
    vertical_sync: bool = False
    zero_stage: ZeroStage = 0
    alternatives: tuple[Alternative, ...] = field(default=(), metadata=DERIVED)
    cost: StepCost | None = field(default=None, metadata=DERIVED)
    is_estimate: bool = False

    def edge_name(self, edge: int) -> str:
        """Return how an edge is called, by its stages: ``vision -> loss``."""
        ends = self.edges[edge]
        return f"{self.stages[ends.src].name} -> {self.stages[ends.dst].name}"

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks the stages use together; one that several stages share counts once."""
        return len({rank for stage in self.stages for rank in stage.ranks})

    @property
    def depth(self) -> int:
        """Return the number of stages on the longest path of the stage graph."""
        # hops, not time: two towers and a loss are three stages in depth 2
        return int(nx.dag_longest_path_length(self.digraph(), weight=None)) + 1 if self.stages else 0

    def digraph(self) -> nx.DiGraph:
        """Return the stage graph over stage indices, all edges."""
        graph = nx.DiGraph()
        graph.add_nodes_from(range(len(self.stages)))
        graph.add_edges_from((edge.src, edge.dst) for edge in self.edges)
        return graph

    def num_micro_batches(self, stage: int) -> int:
        """Return how many micro-batches of a mini-batch ``stage`` runs."""
        return self.mini_batch // self.stages[stage].micro_batch_size

    @property
    def num_rank_tasks(self) -> int:
        """Return how many forwards and backwards all data positions run in a mini-batch."""
        return sum(2 * self.num_micro_batches(i) * stage.degree for i, stage in enumerate(self.stages))

    def with_each(self, **values: Iterable[Any]) -> PipelinePlan:
        """Return the plan with fields of its stages changed, by field a value for each stage."""
        rows = zip(*values.values(), strict=True)
        changes = (dict(zip(values, row, strict=True)) for row in rows)
        stages = (replace(stage, **own) for stage, own in zip(self.stages, changes, strict=True))
        return replace(self, stages=tuple(stages))

    def num_versions(self, stage: int) -> int:
        """Return how many sets of its weights ``stage`` holds at most, the present one among them.

        In mode ``async`` as many as it holds micro-batches, and with vertical sync as many as the stage that holds
        most: it continues with weights as old as that one's (PipeDream, section 3.3).
        """
        if self.mode == "sync":
            return 1
        if self.vertical_sync:
            return max(each.in_flight for each in self.stages)
        return self.stages[stage].in_flight

    @property
    def shares_ranks(self) -> bool:
        """Return whether any rank holds several stages."""
        return self.num_ranks < sum(len(stage.ranks) for stage in self.stages)

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """Return the indices of the stages on ``rank``, in the plan's order.

        Raises:
            PlanError: the plan does not use that rank.
        """
        found = tuple(index for index, stage in enumerate(self.stages) if rank in stage.ranks)
        if not found:
            raise PlanError(f"rank {rank} is in no stage; the plan uses {self.num_ranks} ranks")
        return found

    def names_on_rank(self, rank: int) -> str:
        """Return the names of the stages on ``rank``, for messages: ``vision, text.0-3``."""
        return ", ".join(self.stages[index].name for index in self.stages_of_rank(rank))

    def stage_of_rank(self, rank: int) -> int:
        """Return the index of the one stage on ``rank``.

        Raises:
            PlanError: the plan does not use that rank, or puts several stages on it.
        """
        found = self.stages_of_rank(rank)
        if len(found) > 1:
            names = self.names_on_rank(rank)
            raise PlanError(f"rank {rank} holds several stages ({names}); none of them is the rank's stage")
        return found[0]

    def loss_stages(self) -> tuple[int, ...]:
        """Return the indices of the stages that yield a loss."""
        if self.losses:
            return tuple(index for index, stage in enumerate(self.stages) if stage.name in self.losses)
        inner = {edge.src for edge in self.edges}
        return tuple(index for index in range(len(self.stages)) if index not in inner)

    def stage_index(self, name: str) -> int:
        """Return the index of the stage of that name; ``loss`` is the one that yields the loss, whatever its name.

        Raises:
            PlanError: there is none, or several stages yield a loss.
        """
        names = [stage.name for stage in self.stages]
        if name in names:
            return names.index(name)
        yielding = self.loss_stages()
        if name == LOSS_KEY and len(yielding) == 1:
            return yielding[0]
        meant = f" ({LOSS_KEY!r} means {names[yielding[0]]!r})" if len(yielding) == 1 else ""
        raise PlanError(f"the plan has no stage {name!r}; its stages are {', '.join(names)}{meant}")


def bytes_by_rank(plan: PipelinePlan) -> tuple[RankBytes, ...]:
    """Return what each rank holds at its peak, all its stages together: by the breakdown where the plan has one."""
    found = []
    for rank in range(plan.num_ranks):
        own = plan.stages_of_rank(rank)
        if plan.memory:
            part = joined_breakdown([plan.memory[index] for index in own])
            found.append(RankBytes(rank=rank, held=part.total, messages=part.messages, limit=part.limit))
        else:
            peaks = [(plan.stages[index].memory_bytes, plan.stages[index].gathered_bytes) for index in own]
            found.append(RankBytes(rank=rank, held=int(rank_bytes(peaks))))
    return tuple(found)


def cost_key(plan: PipelinePlan) -> str:
    """Return what a plan's `StepCost` is stored under: it depends on all that a step's costs follow from, no more."""
    count = len(plan.stages)
    timed = plan.with_each(backend=[""] * count, compiled=[()] * count)
    settings = (plan.mini_batch, plan.mode, plan.vertical_sync, plan.zero_stage)
    return fingerprint((timed.stages, plan.edges, plan.memory, settings))


def stage_compute_us(plan: PipelinePlan, index: int) -> float:
    """Return the predicted microseconds that one rank of a stage computes of it in one mini-batch."""
    if plan.cost is not None:
        return plan.cost.stage_us[index]
    # 4 micro-batches of 1 ms forward and 2 ms back are 12 ms
    stage = plan.stages[index]
    backward_us = 0.0 if index in forward_only_stages(plan) else stage.backward_us
    return plan.num_micro_batches(index) * (stage.forward_us + backward_us)


def stage_task_us(stage: Stage, kind: TaskKind, half: int | None = None) -> float:
    """Return the microseconds that the plan gives a task of ``stage``: the one definition of its parts' times."""
    if kind is TaskKind.FORWARD:
        if half is None:
            return stage.forward_us
        # 0 means that halves were not measured: a kernel's start-up cost is then not counted twice.
        return stage.half_forward_us or stage.forward_us / 2.0
    if kind is TaskKind.BACKWARD:
        return stage.backward_us
    # Both are tested, since one may truly be 0: a stage without weights has no weight
    # gradient, and the first stage no input gradient.
    if not stage.input_gradient_us and not stage.weight_gradient_us:
        return stage.backward_us / 2.0
    return stage.input_gradient_us if kind is TaskKind.INPUT_GRADIENT else stage.weight_gradient_us


# What the graph of a plan's stages says: sinks first, who is behind whom, who is waited for, where no gradient flows.


def sinks_first(plan: PipelinePlan) -> list[int]:
    """Return the stage indices so that every stage comes after all its successors.

    Raises:
        PlanError: the stages depend on each other in a circle.
    """
    waiting = [0] * len(plan.stages)
    incoming: list[list[int]] = [[] for _ in plan.stages]
    for edge in plan.edges:
        incoming[edge.dst].append(edge.src)
        waiting[edge.src] += 1
    ready = [index for index, count in enumerate(waiting) if count == 0]
    order = []
    while ready:
        index = ready.pop()
        order.append(index)
        for other in incoming[index]:
            waiting[other] -= 1
            if waiting[other] == 0:
                ready.append(other)
    if len(order) < len(plan.stages):
        circle = [plan.stages[i].name for i, count in enumerate(waiting) if count]
        raise PlanError(f"the stages {circle} depend on each other in a circle; no schedule can run them")
    return order


def stages_behind(plan: PipelinePlan) -> list[set[int]]:
    """Return for each stage the stages that depend on it, directly or not."""
    behind: list[set[int]] = [set() for _ in plan.stages]
    successors: list[list[int]] = [[] for _ in plan.stages]
    for edge in plan.edges:
        successors[edge.src].append(edge.dst)
    for index in sinks_first(plan):
        for other in successors[index]:
            behind[index] |= {other} | behind[other]
    return behind


def on_own_ranks(plan: PipelinePlan) -> PipelinePlan:
    """Return the plan with ranks of its own for every stage: itself where no stages share any."""
    if not plan.shares_ranks:
        return plan
    ends = itertools.accumulate(len(stage.ranks) for stage in plan.stages)
    return plan.with_each(
        ranks=[tuple(range(end - len(s.ranks), end)) for end, s in zip(ends, plan.stages, strict=True)]
    )


def sends_gradients(plan: PipelinePlan, stage: int) -> bool:
    """Return whether other stages wait for a stage's input gradients, so that splitting its backward helps."""
    return any(edge.dst == stage and edge.gradient_tensors for edge in plan.edges)


def forward_only_stages(plan: PipelinePlan) -> frozenset[int]:
    """Return the stages through which no gradient flows in training: frozen, or before every trained parameter.

    They run no backwards, in plans, predictions and programs alike. Nobody sends them a gradient of their outputs, nor
    waits for one of theirs; the stages that yield a loss have backwards. A stage behind one of them has a backward
    without the gradients of what it receives from there.
    """
    ends = {end for edge in plan.edges if edge.gradient_tensors for end in (edge.src, edge.dst)}
    return frozenset(range(len(plan.stages))) - ends - set(plan.loss_stages())


def frozen_branch(plan: PipelinePlan) -> frozenset[int]:
    """Return the forward-only stages that depend on the mini-batch alone: all that is before them is forward-only too.

    Nothing that training changes reaches them, so they may run a mini-batch before its turn. A forward-only stage
    behind a trained one (it reads tensors without gradients) is none of them.
    """
    found = set(forward_only_stages(plan))
    while late := {edge.dst for edge in plan.edges if edge.src not in found and edge.dst in found}:
        found -= late
    return frozenset(found)
