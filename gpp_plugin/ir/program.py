"""What one rank does, in order: compute, send, receive, gather, reduce, step. The only input of a runtime.

A rank may hold several stages. Its program is one list all the same; every instruction but the step is of one of the
stages (`RankProgram.stage_of`), and a tensor that passes between two of them is a local transfer: a message whose two
ranks are one, sent by the producer's part and received by the consumer's, that no transport ever sees.

    rank 0, stages 0 and 2   0F0  send 0>1  receive 1>2  2F0  2B0  send  receive  0B0  reduce(0)  reduce(2)  step
    rank 1, stage 1          receive 0>1  1F0  send 1>2 ...
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from gpp_plugin.errors import ScheduleError
from gpp_plugin.ir.schedule import Task
from gpp_plugin.ir.tensors import SampleRange


class Direction(enum.Enum):
    """Whether a message holds activations (along its edge) or gradients (against it)."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One transfer between two ranks for one edge: the rows of one range of samples.

    Args:
        edge: index into `PipelinePlan.edges`.
        src_rank, dst_rank: sender and receiver (for a gradient, the edge's consumer sends).
        src_micro_batch, dst_micro_batch: the micro-batch of the sending and of the receiving task.
        samples: the samples of the mini-batch whose rows it holds.
        has_whole_tensors: whether it also holds the edge's tensors without a batch axis.
        src_half, dst_half: the half of a forward that sends and that first needs an activation message;
            None where the task is whole.
    """

    edge: int
    direction: Direction
    src_rank: int
    dst_rank: int
    src_micro_batch: int
    dst_micro_batch: int
    samples: SampleRange
    has_whole_tensors: bool
    src_half: int | None = None
    dst_half: int | None = None

    @property
    def channel(self) -> tuple[int, int]:
        """Return the ordered channel it travels on, with all messages of all edges that go the same way: its ranks."""
        return (self.src_rank, self.dst_rank)

    @property
    def is_local_transfer(self) -> bool:
        """Return whether it passes between two stages of one rank."""
        return self.src_rank == self.dst_rank

    def __str__(self) -> str:
        # act e1 r0.2a>r3.1 [8..11]: an activation along edge 1, sent by rank 0 in the first half of its micro-batch
        # 2, read by rank 3 in its micro-batch 1, the rows of samples 8 to 11. A gradient runs from consumer to
        # producer.
        arrow = "act" if self.direction is Direction.ACTIVATION else "grad"
        end = self.samples.end - 1
        sent, needed = ("" if half is None else "ab"[half] for half in (self.src_half, self.dst_half))
        return (
            f"{arrow} e{self.edge} r{self.src_rank}.{self.src_micro_batch}{sent}"
            f">r{self.dst_rank}.{self.dst_micro_batch}{needed} [{self.samples.first_sample}..{end}]"
        )


class InstructionKind(enum.Enum):
    """What an instruction does."""

    COMPUTE = "compute"
    SEND = "send"
    RECEIVE = "receive"
    """Post a receive; it is waited for by the task that reads it."""
    GATHER = "gather"
    """Make a stage's parameters whole, of which each of its data-parallel ranks holds a part (ZeRO 3)."""
    FREE = "free"
    """Free them again, but for the rank's part; no rank is waited for."""
    REDUCE_DATA = "reduce_data"
    """Sum gradients over the stage's data-parallel group."""
    REDUCE_TIED = "reduce_tied"
    """Sum gradients of tied parameters over the stages that share them."""
    STEP = "step"
    """Agree on norm and overflow over all ranks, clip, step the optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One step of a rank's program.

    Args:
        task: what a COMPUTE runs.
        message: what a SEND or a RECEIVE posts.
        stage: of a gather, a free or a reduction, whose it is, and of a step of one stage by itself (mode async), which
            one; None: of the rank's one stage, or, of a step, of all.
    """

    kind: InstructionKind
    task: Task | None = None
    message: Message | None = None
    stage: int | None = None

    def __str__(self) -> str:
        if self.kind is InstructionKind.COMPUTE:
            return str(self.task)
        if self.message is not None:
            return f"{self.kind.value}({self.message})"
        return self.kind.value if self.stage is None else f"{self.kind.value}({self.stage})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgram:
    """Everything one rank does in one mini-batch, in order.

    Args:
        stages: those the rank holds, in the plan's order.
        edges: (src, dst) stages of the plan's edges by index; they identify a message where there are several
            stages, and empty where there is one.
    """

    rank: int
    stages: tuple[int, ...]
    instructions: tuple[Instruction, ...]
    edges: tuple[tuple[int, int], ...] = ()

    @property
    def stage(self) -> int:
        """Return the rank's one stage.

        Raises:
            ScheduleError: it holds several.
        """
        if len(self.stages) > 1:
            raise ScheduleError(f"rank {self.rank} holds the stages {list(self.stages)}, not one")
        return self.stages[0]

    def stage_of(self, instruction: Instruction) -> int | None:
        """Return whose an instruction is; None of a step of all stages where the rank holds several."""
        if len(self.stages) == 1:
            return self.stages[0]
        if instruction.task is not None:
            return instruction.task.stage
        if instruction.message is None:
            return instruction.stage
        # an activation leaves the edge's source, a gradient its target
        ends = self.edges[instruction.message.edge]
        is_forward = instruction.message.direction is Direction.ACTIVATION
        return ends[(instruction.kind is InstructionKind.SEND) != is_forward]

    def instruction(self, kind: InstructionKind, stage: int) -> Instruction:
        """Return an instruction of one of the rank's stages, which it names where there are several."""
        return Instruction(kind=kind, stage=stage if len(self.stages) > 1 else None)

    def of_stage(self, stage: int) -> RankProgram:
        """Return what the rank does for one of its stages, in order; a step of all stages is in each one's."""
        if self.stages == (stage,):
            return self
        own = (i for i in self.instructions if self.stage_of(i) in (stage, None))
        return RankProgram(rank=self.rank, stages=(stage,), instructions=tuple(own))

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Return its tasks, in order."""
        return tuple(i.task for i in self.instructions if i.task is not None)

    def messages(self, kind: InstructionKind) -> tuple[Message, ...]:
        """Return what its SENDs, or its RECEIVEs, post, in order."""
        return tuple(i.message for i in self.instructions if i.message is not None and i.kind is kind)
