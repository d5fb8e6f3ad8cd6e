"""No random graph of stages hangs under any schedule: the recorded-order model (`operations`)."""

from __future__ import annotations

from gpp_benchmarks._random_plans import FAMILIES, random_draw
from tests.nccl.coverage_counts import Tell, check_runs, everything, report
from tests.nccl.recording import Run
from tests.tiers import some


def random_run(seed: int) -> Run:
    """Return a random graph of 2 to 9 stages under some family of schedules, ZeRO 2 every third time."""
    draw = random_draw(seed, FAMILIES[seed % len(FAMILIES)], most_ranks=16)
    return Run(plan=draw.plan, forward_only=draw.forward_only, zero=2 if seed % 3 == 0 else 0)


def test_random_graphs_with_a_wait_at_every_point(tell: Tell) -> None:
    report(
        tell,
        check_runs([(f"seed {seed}", everything(random_run(seed))) for seed in some(range(50), every=14)]),
    )


def test_random_graphs_with_sampled_waits(tell: Tell) -> None:
    report(
        tell,
        check_runs(
            [(f"seed {s}", random_run(s)) for s in some(range(1000, 1500), every=11)], is_sampled=True
        ),
    )
