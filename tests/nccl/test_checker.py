"""The model's own judgement: the worked example, exhaustive interleaving of small jobs, waits in turn and at once."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.nccl.checker import (
    WaitGraph,
    ends,
    ends_serially,
    find_stuck,
    mismatches,
    points_that_hang,
    share_queues,
)
from tests.nccl.coverage_counts import Tell
from tests.nccl.exhaustive import Machine
from tests.nccl.mutants import answer, exchange, jobs_of, mutants, random_job
from tests.nccl.operations import Job, Tape, Transfer
from tests.tiers import is_whole, some

SMALL = [
    *(
        exchange(waits=waits, one_stream=one_stream)
        for waits in (False, True)
        for one_stream in (False, True)
    ),
    answer(),
    *(random_job(random.Random(seed)) for seed in some(range(7), every=3)),
]


def test_the_worked_example() -> None:
    job = exchange(waits=False, one_stream=False)
    graph = WaitGraph(job)
    assert ends(graph, share_queues(job, 4))
    assert points_that_hang(graph, share_queues(job, 4)) == {}  # if one host waits, the other one still sends
    shared = {(rank, stream): min(stream, 1) for rank in range(2) for stream in range(3)}
    assert not ends(graph, shared) and Machine(job, shared).can_hang()
    job = exchange(waits=False, one_stream=True)
    assert not ends(WaitGraph(job), share_queues(job, 4))
    job = exchange(waits=True, one_stream=False)
    stuck = find_stuck(WaitGraph(job), share_queues(job, 4))
    assert stuck is not None
    assert str(stuck).splitlines() == [
        "rank 0 #0 stream 1: receive [1>0 on 0:all]",
        "rank 1 #0 stream 1: receive [0>1 on 0:all]",
    ]


def test_one_wait_is_enough_where_the_other_rank_needs_what_is_not_sent_yet() -> None:
    graph, queues = WaitGraph(job := answer()), share_queues(answer(), 4)
    assert ends(graph, queues)
    assert points_that_hang(graph, queues) == {0: [1]}
    assert find_stuck(graph, queues, waits_at=[(0, 1)]) is not None
    assert Machine(_with_wait(job, 0, 1), queues).can_hang()
    assert not Machine(_with_wait(job, 0, 2), queues).can_hang()


def _with_wait(job: Job, rank: int, point: int) -> Job:
    """Return a job with a device-wide wait before one operation, as a mutant."""
    added = [mutant for kind, mutant in mutants(job) if kind == "add a device-wide wait"]
    return added[sum(len(operations) + 1 for operations in job[:rank]) + point]


def test_a_missing_end_is_a_hang() -> None:
    tape = Tape(0)
    tape.put(1, "send", transfers=[Transfer((0, "all"), 0, 1)])
    job = jobs_of([tape, Tape(1)])
    assert not ends(WaitGraph(job), share_queues(job, 8))
    assert Machine(job, share_queues(job, 8)).can_hang()


def test_messages_that_are_taken_for_each_other_are_found() -> None:
    tapes = [Tape(0), Tape(1)]
    for tape, sizes in zip(tapes, ((4, 8), (8, 4)), strict=True):
        for size in sizes:
            tape.put(1, "transfer", transfers=[Transfer((0, "all"), 0, 1)], sizes=[size])
    assert len(mismatches(jobs_of(tapes))) == 2


def judged_mutants() -> Iterator[tuple[str, bool, bool, Job]]:
    """Yield every changed job on every mapping: the change, whether some interleaving hangs, whether the checker agrees."""
    for job in SMALL:
        for kind, mutant in (("unchanged", job), *mutants(job)):
            for queues in _mappings(mutant):
                hangs = Machine(mutant, queues).can_hang()
                yield kind, hangs, ends(WaitGraph(mutant), queues) is not hangs, mutant


def test_exhaustive_interleaving_finds_the_same_hangs(tell: Tell) -> None:
    """Every mutant that some interleaving hangs is found, none of the others is."""
    counts: Counter[tuple[str, bool]] = Counter()
    wrong = []
    for kind, hangs, is_judged_right, mutant in judged_mutants():
        counts[kind, hangs] += 1
        if not is_judged_right:
            wrong.append((kind, hangs, mutant))
    for kind in sorted({kind for kind, _ in counts}):
        tell(f"{kind}: {counts[kind, True]} hang, {counts[kind, False]} end")
    total, hang = sum(counts.values()), sum(count for (_, hangs), count in counts.items() if hangs)
    tell(f"{total} mutants and mappings, {hang} hang, {len(wrong)} judged otherwise")
    assert wrong == []
    assert min(hang, total - hang) > (300 if is_whole() else 100)


def _mappings(job: Job) -> list[dict[tuple[int, int], int]]:
    """Return the mappings to 1, 2 and 8 queues, those that are alike once."""
    found: dict[tuple[object, ...], dict[tuple[int, int], int]] = {}
    for num_queues in (1, 2, 8):
        queues = dict(share_queues(job, num_queues))
        found[tuple(sorted(queues.items()))] = queues
    return list(found.values())


@pytest.mark.parametrize("num_queues", [1, 2, 8])
def test_points_found_at_once_are_those_found_in_turn(num_queues: int) -> None:
    jobs = [*SMALL, *(mutant for job in SMALL for kind, mutant in mutants(job) if kind == "move a launch")]
    some = 0
    for job in jobs:
        graph, queues = WaitGraph(job), share_queues(job, num_queues)
        found = points_that_hang(graph, queues)
        if not ends(graph, queues):
            assert found is None
            continue
        points = [(rank, at) for rank, operations in enumerate(job) for at in range(len(operations) + 1)]
        in_turn = [point for point in points if not ends(graph, queues, waits_at=[point])]
        assert found is not None
        assert [(rank, at) for rank, ats in sorted(found.items()) for at in ats] == in_turn
        if ends_serially(graph):  # waits at all points at once are the strictest
            assert in_turn == []
            assert ends(graph, queues, waits_at=random.Random(0).sample(points, min(3, len(points))))
        some += bool(in_turn)
    assert some > 3
