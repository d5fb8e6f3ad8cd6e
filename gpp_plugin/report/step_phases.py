"""Where the time of a step goes on each rank, and what its messages carry: tables of what ranks noted meanwhile.

Source: this project
Tests: tests/report/test_step_phases.py
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.timeline import Event, EventKind
from gpp_plugin.report.units import IN_LOGS, format_bytes, format_ms, format_table, shorten_name

PHASE_OF = {
    EventKind.FORWARD: "forward",
    EventKind.BACKWARD: "backward",
    EventKind.INPUT_GRADIENT: "backward",
    EventKind.WEIGHT_GRADIENT: "backward",
    EventKind.RECEIVE: "waiting",
    EventKind.SEND: "sending",
    EventKind.GATHER: "gather",
    EventKind.REDUCE: "reduce",
    EventKind.STEP: "step",
}
"""Kind of event -> the phase it belongs to; what is in none (loading, the host's own work) is ``other``."""
PHASES = (*dict.fromkeys(PHASE_OF.values()), "other")
MOST_RANKS = 32
"""Rows of a table of ranks; of more, those that compute least and most."""


@dataclass(slots=True)
class PhaseTimes:
    """One rank's microseconds by phase, and its messages, added up over steps.

    Args:
        messages: (edge of the plan, or -1 for reductions; kind) -> how many, bytes, microseconds.
    """

    steps: int = 0
    total_us: float = 0.0
    by_phase: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    messages: dict[tuple[int, str], tuple[int, int, float]] = field(default_factory=dict)

    def add(self, events: Iterable[Event], total_us: float) -> None:
        """Add one step of this rank's events.

        Args:
            total_us: how long the whole step took.
        """
        known = 0.0
        for event in events:
            took = event.end_us - event.start_us
            self.by_phase[PHASE_OF[event.kind]] += took
            known += took
            if event.kind in (EventKind.SEND, EventKind.RECEIVE, EventKind.REDUCE):
                key = (event.edge, event.kind.value)
                count, size, us = self.messages.get(key, (0, 0, 0.0))
                self.messages[key] = (count + 1, size + event.bytes, us + took)
        self.by_phase["other"] += max(total_us - known, 0.0)
        self.total_us += total_us
        self.steps += 1

    def a_step(self) -> dict[str, float]:
        """Return microseconds by phase of the mean step."""
        return {phase: us / max(self.steps, 1) for phase, us in self.by_phase.items()}


def mean_phases(ranks: Sequence[PhaseTimes]) -> dict[str, float]:
    """Return microseconds by phase of the mean step of the mean rank."""
    steps = [rank.a_step() for rank in ranks]
    return {phase: sum(step[phase] for step in steps) / len(steps) for phase in PHASES}


def format_phases(ranks: Mapping[int, PhaseTimes], plan: PipelinePlan) -> str:
    """Return the table of ranks and phases, milliseconds a step.

    >>> from gpp_plugin.ir.plan import PipelinePlan, Stage
    >>> stage = Stage(name="loss", blocks=("a",), ranks=(0,), micro_batch_size=2, in_flight=1)
    >>> plan = PipelinePlan(
    ...     model="m", graph="", planner="", mini_batch=4, loss_unit=2, stages=(stage,), edges=()
    ... )
    >>> times = PhaseTimes()
    >>> times.add([Event(rank=0, stage=0, kind=EventKind.FORWARD, start_us=0.0, end_us=1500.0)], 2000.0)
    >>> print(format_phases({0: times}, plan))
    rank  stage  forward  backward  waiting  sending  gather  reduce   step  other  total ms
    0     loss      1.50     0.000    0.000    0.000   0.000   0.000  0.000  0.500      2.00
    """
    shown = sorted(ranks)
    left_out = ""
    if len(shown) > MOST_RANKS:
        busiest = sorted(shown, key=lambda rank: -_computed_us(ranks[rank]))
        shown = sorted([*busiest[: MOST_RANKS // 2], *busiest[-MOST_RANKS // 2 :]])
        left_out = f"\n{len(ranks) - MOST_RANKS} ranks that compute neither least nor most are left out"
    rows = []
    for rank in shown:
        step = ranks[rank].a_step()
        total = ranks[rank].total_us / max(ranks[rank].steps, 1)
        rows.append(
            [
                str(rank),
                shorten_name(plan.names_on_rank(rank)),
                *(format_ms(step[phase]) for phase in PHASES),
                format_ms(total),
            ]
        )
    return format_table(["rank", "stage", *PHASES, "total ms"], rows, left=2, width=IN_LOGS) + left_out


def _computed_us(times: PhaseTimes) -> float:
    return times.by_phase["forward"] + times.by_phase["backward"]


def format_messages(ranks: Mapping[int, PhaseTimes], plan: PipelinePlan) -> str:
    """Return the table of what was sent along each edge and reduced within stages, of all ranks, a step."""
    steps = max((times.steps for times in ranks.values()), default=0) or 1
    sums: dict[tuple[int, str], tuple[int, int, float]] = defaultdict(lambda: (0, 0, 0.0))
    for times in ranks.values():
        for key, (count, size, us) in times.messages.items():
            before = sums[key]
            sums[key] = (before[0] + count, before[1] + size, before[2] + us)
    rows = []
    for (edge, kind), (count, size, us) in sorted(sums.items()):
        name = plan.edge_name(edge) if edge >= 0 else "gradients within stages"
        rows.append(
            [
                name,
                kind,
                f"{count / steps:.0f}",
                format_bytes(size / steps),
                format_bytes(size / count),
                format_ms(us / steps),
                format_ms(us / count),
            ]
        )
    header = ["messages", "what", "a step", "bytes a step", "each", "ms a step", "ms each"]
    return format_table(header, rows, left=2, width=IN_LOGS)
