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
from tests.nccl.recording import Run, record_job

QUEUES = (1, 4, 8, 32)

Tell = Callable[[object], None]


@dataclass(slots=True)
class Counts:
    """What was checked, and what hangs.

    Args:
        points: host points of all jobs.
        mappings: of streams to queues, those of all jobs.
        checks: answers to "does all of it end", each with its own waits; those in turn are one a point.
        hangs: a line each.
    """

    jobs: int = 0
    operations: int = 0
    points: int = 0
    mappings: int = 0
    checks: int = 0
    hangs: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        minutes = (time.monotonic() - self.started) / 60
        return (
            f"{self.jobs} jobs, {self.operations} host operations, {self.points} host points, {self.mappings} mappings "
            f"to queues, {self.checks} checks, {len(self.hangs)} hangs, {minutes:.2f} min"
        )


def check_all_points(counts: Counts, name: str, job: Job, *, seed: int) -> None:
    """Check a job with a wait at each host point in turn, and at all at once, under 1, 4, 8 and 32 queues and two
    random mappings.
    """
    graph = _graph(counts, name, job)
    if not ends_serially(graph):
        counts.hangs.append(f"{name}: with waits at all points\n{find_stuck(graph, None)}")
    counts.checks += 1
    for what, queues in _mappings(job, seed):
        found = points_that_hang(graph, queues)
        counts.mappings += 1
        counts.checks += count_points(job)
        if found is None:
            counts.hangs.append(f"{name}: {what}, without a wait\n{find_stuck(graph, queues)}")
        elif found:
            counts.hangs.append(f"{name}: {what}, with a wait at points {found}")


def check_samples(counts: Counts, name: str, job: Job, *, seed: int, samples: int = 4) -> None:
    """Check a job with waits at all points, and at ``samples`` of them under every mapping."""
    graph = _graph(counts, name, job)
    if not ends_serially(graph):
        counts.hangs.append(f"{name}: with waits at all points\n{find_stuck(graph, None)}")
    counts.checks += 1
    rng = random.Random(seed)
    for what, queues in _mappings(job, seed):
        ranks = [rng.randrange(len(job)) for _ in range(samples)]
        waits_at = [(rank, rng.randint(0, len(job[rank]))) for rank in ranks]
        counts.mappings += 1
        counts.checks += 1
        if not ends(graph, queues, waits_at=waits_at):
            counts.hangs.append(f"{name}: {what}, with waits at {waits_at}")


def _graph(counts: Counts, name: str, job: Job) -> WaitGraph:
    counts.jobs += 1
    counts.operations += sum(map(len, job))
    counts.points += count_points(job)
    counts.hangs += [f"{name}: {line}" for line in mismatches(job)]
    return WaitGraph(job)


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
    check = check_samples if is_sampled else check_all_points
    for seed, (name, run) in enumerate(runs):
        check(counts, name, record_job(run), seed=seed)
    return counts


def everything(run: Run) -> Run:
    """Return the run with an evaluation between two mini-batches, of which the second is traced."""
    if not run.train:
        return run
    return dataclasses.replace(run, steps=2, record=True, evaluate=True)


def report(tell: Tell, counts: Counts) -> None:
    """Tell what was checked, and fail with the first hangs."""
    tell(counts)
    assert counts.jobs and not counts.hangs, "\n".join(counts.hangs[:3])
