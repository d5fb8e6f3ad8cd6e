"""What a plan's step is predicted to cost: the one ledger that is stored with a plan, and that every command prints.

    step  =  compute + tensor sums + bubble + messages + reductions + gathers + optimizer

Of a collective only the exposed part counts, which the step waits for; the rest is hidden behind tasks. Each term is
what the step takes longer with it than without: tasks alone, then messages, collectives and the optimizer on top.

Source: this project
Tests: tests/plan/test_step_cost.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from gpp_plugin.ir.cluster import Cluster
from gpp_plugin.ir.typed_leaves import Bytes, Index, Micros, OneOf

REDUCTIONS, GATHERS, TENSOR_SUMS = "reductions", "gathers", "tensor sums"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrices:
    """What a plan is simulated with, beside the times of its tasks.

    Args:
        cluster: the devices of the plan's ranks, and their links; None: messages take no time.
        reduce_us, gather_us, update_us: by stage its reductions, one gather of its parameters, its optimizer step; in
            mode ``async`` those behind one backward. Empty: they take no time.
    """

    cluster: Cluster | None = None
    reduce_us: tuple[Micros, ...] = ()
    gather_us: tuple[Micros, ...] = ()
    update_us: tuple[Micros, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """Collectives of one kind in a step, in microseconds.

    Args:
        total_us: on the rank with most of them; ``exposed_us``: what the step is longer by.
    """

    kind: Annotated[str, OneOf((REDUCTIONS, GATHERS, TENSOR_SUMS))]
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
        zero_stage: what the ranks of a stage share out.
        step_us: the whole.
        compute_us: of the rank that computes most, without tensor sums; ``bubble_us``: what tasks wait for each other.
        message_us: what messages between stages add; ``optimizer_us``: what optimizer steps add.
        start_up_us: until every stage has begun; in mode ``async`` what filling the pipeline adds, and ``drain_us``
            what draining it takes.
        ranks: memory, by rank.
    """

    plan: str
    prices: StepPrices
    zero_stage: Index
    step_us: Micros
    compute_us: Micros
    bubble_us: Micros
    message_us: Micros
    collectives: tuple[CollectiveCost, ...]
    optimizer_us: Micros
    start_up_us: Micros
    drain_us: Micros = 0.0
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
