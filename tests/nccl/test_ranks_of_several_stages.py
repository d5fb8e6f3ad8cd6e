"""Ranks that hold several stages: hand-overs travel nowhere, and collectives of all stages come in one order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from gpp_benchmarks._random_plans import FAMILIES, random_draw
from gpp_plugin.ir.program import Instruction, InstructionKind, RankProgram
from tests.nccl.coverage_counts import Counts, Tell, check_job, check_runs, report
from tests.nccl.recording import Programs, Run, lower, record_job
from tests.schedule.plans import on_ranks, sharded, simple_plan


def random_run(seed: int) -> Run:
    """Return a random graph of 2 to 7 stages on 1 to 4 ranks, ZeRO 2 every third time, ties every fourth."""
    family = FAMILIES[seed % len(FAMILIES)]
    draw = random_draw(seed, family, most_stages=7, most_ranks=4, shares_ranks=True)
    trained = [i for i in range(len(draw.plan.stages)) if i not in draw.forward_only]
    tied = tuple(trained[:2]) if seed % 4 == 0 and len(trained) > 1 else ()
    return Run(plan=draw.plan, forward_only=draw.forward_only, zero=2 if seed % 3 == 0 else 0, tied=tied)


def test_stages_that_are_gathered(tell: Tell) -> None:
    runs = [random_run(seed) for seed in range(2000, 2012)]
    runs = [dataclasses.replace(run, plan=sharded(run.plan), zero=3, evaluate=True) for run in runs]
    report(tell, check_runs([(f"seed {n}", run) for n, run in enumerate(runs)], is_sampled=True))


# ---- faults ------------------------------------------------------------------------------------------------


def two_stages_on_both_ranks() -> Run:
    plan = simple_plan([2, 2], [(0, 1)], mini_batch=4)
    return Run(plan=on_ranks(plan, (0, 1), (0, 1)))


def hangs(run: Run, programs: Programs) -> list[str]:
    counts = Counts()
    check_job(counts, "damaged", record_job(run, programs), seed=0)
    return counts.hangs


def turned(
    programs: tuple[RankProgram, ...], rank: int, is_moved: Callable[[Instruction], bool]
) -> tuple[RankProgram, ...]:
    """Return the programs with the first two blocks of such instructions of a rank in each other's place."""
    instructions = list(programs[rank].instructions)
    places = [at for at, each in enumerate(instructions) if is_moved(each)]
    first, second = (
        [at for at in places if instructions[at].stage == stage]
        for stage in dict.fromkeys(instructions[at].stage for at in places)
    )
    for one, other in zip(first, second, strict=False):
        instructions[one], instructions[other] = instructions[other], instructions[one]
    changed = dataclasses.replace(programs[rank], instructions=tuple(instructions))
    return (*programs[:rank], changed, *programs[rank + 1 :])


def test_sums_of_two_stages_in_another_order_on_one_rank_are_found() -> None:
    run = two_stages_on_both_ranks()
    programs = lower(run)
    assert hangs(run, programs) == []
    # without sums in the last backward, which are launched where the tasks stand and not where the tail is
    plain = dataclasses.replace(programs, early=frozenset())
    assert hangs(run, plain) == []
    swapped = turned(plain.training, 1, lambda each: each.kind is InstructionKind.REDUCE_DATA)
    assert swapped != plain.training
    assert hangs(run, dataclasses.replace(plain, training=swapped))
