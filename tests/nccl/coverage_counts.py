"""Puts recorded jobs before the checker with every wait that is asked for, and counts what was done."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tests.nccl.checker import (
    Queues,
    WaitGraph,
    count_points,
    ends,
    ends_serially,
    find_stuck,
    mismatches,
    points_that_hang,
    share_queues,
)
from tests.nccl.operations import Job, Place
from tests.nccl.recording import Recorded, Run, record

QUEUES = (1, 4, 8, 32)

Tell = Callable[[object], None]


@dataclass(slots=True)
class Counts:
    """What was checked, and what hangs.

    Args:
        points: host points of all jobs.
        mappings: of streams to queues, those of all jobs.
        checks: answers to "does all of it end", each with its own waits; those in turn are one a point.
        hangs, races: a text each; a wait of a host for its device between two tasks is among the races.
    """

    jobs: int = 0
    operations: int = 0
    points: int = 0
    mappings: int = 0
    checks: int = 0
    hangs: list[str] = field(default_factory=list)
    races: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        minutes = (time.monotonic() - self.started) / 60
        return (
            f"{self.jobs} jobs, {self.operations} host operations, {self.points} host points, {self.mappings} mappings "
            f"to queues, {self.checks} checks, {len(self.hangs)} hangs, {len(self.races)} races, {minutes:.2f} min"
        )


def check_job(counts: Counts, name: str, job: Job, *, seed: int, samples: int | None = None) -> None:
    """Check a job with waits at all points at once, and in turn, under 1, 4, 8 and 32 queues and a random mapping.

    Args:
        samples: at so many points, all at once, instead of at each in turn.
    """
    counts.jobs += 1
    counts.operations += sum(map(len, job))
    counts.points += count_points(job)
    counts.hangs += [f"{name}: {line}" for line in mismatches(job)]
    graph = WaitGraph(job)
    if not ends_serially(graph):
        counts.hangs.append(f"{name}: with waits at all points\n{find_stuck(graph, None)}")
    counts.checks += 1
    rng = random.Random(seed)
    for what, queues in _mappings(job, seed):
        counts.mappings += 1
        if samples is not None:
            ranks = [rng.randrange(len(job)) for _ in range(samples)]
            waits_at = [(rank, rng.randint(0, len(job[rank]))) for rank in ranks]
            counts.checks += 1
            if not ends(graph, queues, waits_at=waits_at):
                counts.hangs.append(f"{name}: {what}, with waits at {waits_at}")
            continue
        found = points_that_hang(graph, queues)
        counts.checks += count_points(job)
        if found is None:
            counts.hangs.append(f"{name}: {what}, without a wait\n{find_stuck(graph, queues)}")
        elif found:
            counts.hangs.append(f"{name}: {what}, with a wait at points {found}")


def _mappings(job: Job, seed: int) -> Iterable[tuple[str, Queues]]:
    for num_queues in QUEUES:
        yield f"{num_queues} queues", share_queues(job, num_queues)
    rng = random.Random(seed)
    yield (
        "streams at random in 5 queues",
        {
            (rank, each.stream): rng.randrange(5)
            for rank, operations in enumerate(job)
            for each in operations
            if each.place is Place.DEVICE
        },
    )


def check_runs(runs: Sequence[tuple[str, Run]], *, is_sampled: bool = False) -> Counts:
    """Record and check runs; return what was done."""
    counts = Counts()
    for seed, (name, run) in enumerate(runs):
        recorded = record(run)
        check_job(counts, name, recorded.job, seed=seed, samples=4 if is_sampled else None)
        check_waits(counts, name, recorded)
    return counts


def check_waits(counts: Counts, name: str, recorded: Recorded) -> None:
    """Check that ranks wait enough for what they read and write, and that no host waits between two tasks."""
    counts.races += [f"{name}: {race}" for race in recorded.races()]
    counts.races += [f"{name}: host waits between tasks: {read}" for read in recorded.host_reads()]


def everything(run: Run) -> Run:
    """Return the run with an evaluation between two mini-batches, of which the second is traced."""
    if not run.train:
        return run
    return dataclasses.replace(run, steps=2, record=True, evaluate=True)


def report(tell: Tell, counts: Counts) -> None:
    """Tell what was checked, and fail with the first hangs and races."""
    tell(counts)
    assert not counts.races, "\n".join(counts.races[:3])
    assert counts.jobs and not counts.hangs, "\n".join(counts.hangs[:3])
