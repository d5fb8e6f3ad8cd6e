"""What a plan's step is predicted to cost: the one ledger that is stored with a plan, and that every command prints.

    step  =  compute + tensor sums + exchanges + bubble + messages + reductions + gathers + optimizer

Of a collective only the exposed part counts, which the step waits for; the rest is hidden behind tasks. Each term is
what the step takes longer with it than without: tasks alone, then messages, collectives and the optimizer on top.

Source: this project
Tests: tests/plan/test_step_cost.py
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from gpp_plugin.ir.cluster import Cluster
from gpp_plugin.ir.typed_leaves import Bytes, Index, Micros, OneOf, Share

REDUCTIONS, GATHERS, TENSOR_SUMS = "reductions", "gathers", "tensor sums"
EXCHANGES = "exchanges"
"""Of context ranks: all that they send each other inside of tasks."""


Buckets = tuple[tuple[Share, Micros], ...]
"""The buckets that decide when a sum is through: (share of the last backward after which one is final, microseconds
from its begin to the end of the last one)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReductions:
    """What the ranks of one stage send each other in a step, microseconds of each; 0: nothing.

    Args:
        last_us: the sum of gradients at the end, all of it at once.
        early: the same sum in buckets; empty: it is never early.
        each_us: the sum behind each backward but the last (ZeRO 2 and 3).
        gather_us: one gather of parameters (ZeRO 3).
        step_us: parameters behind the step (ZeRO 1 and 2): gathered, but counted among reductions.
    """

    last_us: Micros = 0.0
    early: Buckets = ()
    each_us: Micros = 0.0
    gather_us: Micros = 0.0
    step_us: Micros = 0.0

    @classmethod
    def under(cls, zero_stage: int, whole_us: float, early: Buckets, gather_us: float) -> StageReductions:
        """Return those of a ZeRO stage.

        Args:
            whole_us: an all-reduce of all gradients; half of it is a reduce-scatter, or an all-gather.
        """
        half = whole_us / 2
        if zero_stage == 0:
            return cls(last_us=whole_us, early=early)
        if zero_stage == 3:
            return cls(last_us=half, each_us=half, gather_us=gather_us)
        return cls(last_us=half, each_us=half if zero_stage == 2 else 0.0, step_us=half)

    def times(self, factor: float, early: float, *, gather_us: float) -> StageReductions:
        """Return the same with sums that take ``factor`` times as long, those of buckets ``early`` times."""
        return replace(
            self,
            last_us=self.last_us * factor,
            early=tuple((share, left * early) for share, left in self.early),
            each_us=self.each_us * factor,
            gather_us=gather_us,
            step_us=self.step_us * factor,
        )

    def least_behind_us(self, backward_us: float, num_micro_batches: int) -> float:
        """Return what follows a stage's work at least, up to the step, whatever its sums hide behind."""
        behind = min(self.exposed_us(backward_us), self.last_us)
        return behind + (num_micro_batches - 1) * self.each_us

    def exposed_us(self, backward_us: float) -> float:
        """Return what is left of the last sum behind a last backward that takes so long, on all ranks at once.

        >>> StageReductions(last_us=6.0, early=((1 / 3, 6.0), (1.0, 2.0))).exposed_us(6.0)
        2.0
        """
        if not self.early:
            return self.last_us
        return max(share * backward_us + left for share, left in self.early) - backward_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Reductions:
    """What all stages send in a step.

    Args:
        stages: one for each of the plan.
        tied: sums of parameters that several stages hold: these stages, and microseconds.
    """

    stages: tuple[StageReductions, ...]
    tied: tuple[tuple[tuple[Index, ...], Micros], ...] = ()

    @property
    def has_early(self) -> bool:
        """Return whether any sum may be early."""
        return any(own.early for own in self.stages)

    @property
    def is_between_tasks(self) -> bool:
        """Return whether tasks wait for any."""
        return any(own.each_us or own.gather_us for own in self.stages)

    def with_early(self, stages: Iterable[int]) -> Reductions:
        """Return the same where no other stages are early."""
        allowed = set(stages)
        return replace(
            self, stages=tuple(s if i in allowed else replace(s, early=()) for i, s in enumerate(self.stages))
        )

    def with_gathers(self, gather_us: Mapping[int, float]) -> Reductions:
        """Return the same with gathers that take so long, by stage."""
        return replace(
            self, stages=tuple(replace(s, gather_us=gather_us.get(i, 0.0)) for i, s in enumerate(self.stages))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrices:
    """What a plan is simulated with, beside the times of its tasks.

    Args:
        cluster: the devices of the plan's ranks, and their links; None: messages take no time.
        reductions: None: nothing is reduced or gathered, or it takes no time.
        update_us: by stage, its optimizer step; empty: it takes no time. In mode ``async`` this is, like reductions,
            what follows one backward.
    """

    cluster: Cluster | None = None
    reductions: Reductions | None = None
    update_us: tuple[Micros, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTime:
    """Collectives of one kind in a step, in microseconds.

    Args:
        total_us: on the rank with most of them; ``exposed_us``: what the step is longer by.
    """

    kind: Annotated[str, OneOf((REDUCTIONS, GATHERS, TENSOR_SUMS, EXCHANGES))]
    total_us: Micros
    exposed_us: Micros

    @property
    def hidden_us(self) -> float:
        """Return what runs beside tasks."""
        return max(self.total_us - self.exposed_us, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBytes:
    """What one rank is filled with at its peak, by all its stages together.

    Args:
        held: all but messages; ``messages``: sent and not gone, and buffers of the next ones.
        limit: what the plan may use of the rank; 0 where that is not known.
    """

    rank: Index
    held: Bytes
    messages: Bytes = 0
    limit: Bytes = 0

    @property
    def peak(self) -> int:
        """Return all its bytes."""
        return self.held + self.messages

    @property
    def fits(self) -> bool:
        """Return whether it stays within its limit."""
        return not self.limit or self.peak <= self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """The costs of one optimizer step; of a plan of mode ``async`` those of a mini-batch while the pipeline is full.

    Args:
        plan: key of the plan it is of (`plan.cost_key`); with another one it says nothing.
        prices: what it was simulated with, the cluster among them.
        step_us: the whole.
        compute_us: of the rank that computes most, without tensor sums; ``bubble_us``: what tasks wait for each other.
        message_us: what messages between stages add; ``optimizer_us``: what optimizer steps add.
        start_up_us: until every stage has begun; in mode ``async`` what filling the pipeline adds, and ``drain_us``
            what draining it takes.
        stage_us: by stage, what one of its ranks computes.
        ranks: memory, by rank.
    """

    plan: str
    prices: StepPrices
    step_us: Micros
    compute_us: Micros
    bubble_us: Micros
    message_us: Micros
    collectives: tuple[CollectiveTime, ...]
    optimizer_us: Micros
    start_up_us: Micros
    drain_us: Micros = 0.0
    stage_us: tuple[Micros, ...]
    ranks: tuple[RankBytes, ...]

    @property
    def fullest(self) -> RankBytes:
        """Return the rank with least room; the one that holds most where limits are not known."""
        return max(self.ranks, key=lambda rank: (rank.peak - rank.limit, rank.peak))

    @property
    def fits(self) -> bool:
        """Return whether every rank stays within its limit."""
        return all(rank.fits for rank in self.ranks)

    @property
    def parts(self) -> dict[str, float]:
        """Return the terms of the step by name, in microseconds; they sum up to it."""
        exposed = {each.kind: each.exposed_us for each in self.collectives}
        return {
            "compute": self.compute_us,
            "bubble": self.bubble_us,
            "messages": self.message_us,
            **exposed,
            "optimizer": self.optimizer_us,
        }
