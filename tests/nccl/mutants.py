"""Small jobs, and every change of one operation of theirs: what a mistake in a runtime would make of them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence

from tests.nccl.operations import Collectives, Job, Operation, Place, Tape, Transfer

_Row = list[tuple[int, Operation]]
"""Operations with the names that ``after`` calls them by, so that they can be moved."""


def mutants(job: Job) -> Iterator[tuple[str, Job]]:
    """Yield (kind of change, changed job) for every single change of one rank."""
    for rank, operations in enumerate(job):
        named = list(enumerate(operations))
        for kind, row in _changes(named):
            yield kind, tuple(_numbered(row) if r == rank else other for r, other in enumerate(job))


def _numbered(row: _Row) -> tuple[Operation, ...]:
    """Return the operations with ``after`` by place; waits for what now stands behind them are dropped."""
    place = {name: at for at, (name, _) in enumerate(row)}
    found = []
    for at, (_, each) in enumerate(row):
        after = each.after
        if after is not None:
            after = tuple(place[name] for name in after if place.get(name, at) < at)
        found.append(dataclasses.replace(each, after=after))
    return tuple(found)


def _changes(row: _Row) -> Iterator[tuple[str, _Row]]:
    for at, (name, each) in enumerate(row):
        without = [*row[:at], *row[at + 1 :]]
        if at + 1 < len(row):
            yield "swap", [*row[:at], row[at + 1], row[at], *row[at + 2 :]]
        if each.transfers:
            for other in range(len(row)):
                if abs(other - at) > 1:
                    yield "move a launch", [*without[:other], row[at], *without[other:]]
        if each.place is Place.HOST or not (each.transfers or each.collectives):
            yield "drop a wait", without
        if each.after and each.place is not Place.HOST:
            yield "start at once", [*row[:at], (name, dataclasses.replace(each, after=())), *row[at + 1 :]]
        if each.transfers or each.collectives:
            yield "drop a launch", without
        if len(each.transfers) > 1:
            one, *rest = each.transfers
            first = (name, dataclasses.replace(each, transfers=(one,)))
            second = (len(row), dataclasses.replace(each, transfers=tuple(rest)))
            yield "split a launch", [*row[:at], first, second, *row[at + 1 :]]
            turned = dataclasses.replace(each, transfers=each.transfers[::-1])
            yield "turn a launch", [*row[:at], (name, turned), *row[at + 1 :]]
        yield from _merged(row, at)
    for at in range(len(row) + 1):
        wait = Operation(place=Place.HOST, after=None, what="added wait")
        yield "add a device-wide wait", [*row[:at], (len(row), wait), *row[at:]]


def _merged(row: _Row, at: int) -> Iterator[tuple[str, _Row]]:
    """Yield the row with a launch and the next one on its stream as one, at the place of either."""
    name, each = row[at]
    for other in range(at + 1, len(row)):
        later, next_one = row[other]
        if each.transfers and next_one.transfers and next_one.stream == each.stream:
            both = dataclasses.replace(
                each,
                transfers=(*each.transfers, *next_one.transfers),
                after=(*(each.after or ()), *(next_one.after or ())),
            )
            rest = [*row[at + 1 : other], *row[other + 1 :]]
            yield "merge launches", [*row[:at], (name, both), *rest]
            yield (
                "merge launches",
                [*row[:at], *row[at + 1 : other], (later, both), *row[other + 1 :]],
            )
            return


# ---- small jobs --------------------------------------------------------------------------------------------


def exchange(*, waits: bool, one_stream: bool) -> Job:
    """Return two ranks that receive, then send, on streams of their own or on one; the worked example."""
    tapes = [Tape(0), Tape(1)]
    for tape in tapes:
        inward, outward = tape.new_stream(), tape.new_stream()
        own, other = tape.rank, 1 - tape.rank
        communicator = (0, "all")
        receive = tape.put(inward, "receive", transfers=[Transfer(communicator, other, own)])
        if waits:
            tape.host_wait("device")
        task = tape.put(0, "task")
        send = tape.put(
            inward if one_stream else outward,
            "send",
            after=[task],
            transfers=[Transfer(communicator, own, other)],
        )
        tape.put(0, "wait", after=[receive])
        tape.put(0, "wait", after=[send])
    return jobs_of(tapes)


def answer() -> Job:
    """Return rank 0 that has posted its receive of dx before it sends x, and rank 1 that needs x to make dx."""
    tapes = [Tape(0), Tape(1)]
    x, dx = Transfer((0, "x"), 0, 1), Transfer((0, "dx"), 1, 0)
    receive = tapes[0].put(2, "receive dx", transfers=[dx])
    tapes[0].put(1, "send x", transfers=[x])
    tapes[0].put(0, "wait for dx", after=[receive])
    receive = tapes[1].put(1, "receive x", transfers=[x])
    tapes[1].put(0, "wait for x", after=[receive])
    task = tapes[1].put(0, "make dx")
    tapes[1].put(2, "send dx", after=[task], transfers=[dx])
    return jobs_of(tapes)


def jobs_of(tapes: Sequence[Tape]) -> Job:
    return tuple(tuple(tape.operations) for tape in tapes)


def random_job(rng: random.Random) -> Job:
    """Return a job of 2 to 4 ranks whose messages, collectives and waits are in one global order, or nearly."""
    num_ranks = rng.choice([2, 2, 3, 4])
    tapes = [Tape(rank) for rank in range(num_ranks)]
    streams: dict[tuple[int, object], int] = {}

    def stream(rank: int, key: object) -> int:
        if (rank, key) not in streams:
            streams[rank, key] = tapes[rank].new_stream()
        return streams[rank, key]

    for _ in range(rng.randint(2, {2: 5, 3: 4, 4: 3}[num_ranks])):
        kind = rng.choice(["message", "message", "message", "swap", "sum", "hosts"])
        one, other = rng.sample(range(num_ranks), 2)
        if kind == "message":
            communicator = (0, f"{one}>{other}") if rng.random() < 0.6 else (0, "all")
            count = rng.choice([1, 1, 2])
            ends = [Transfer(communicator, one, other)] * count
            for rank in (one, other):
                _put_transfers(tapes[rank], stream(rank, communicator), ends, rng)
        elif kind == "swap":
            ends = [Transfer((0, "all"), one, other), Transfer((0, "all"), other, one)]
            for rank in (one, other):
                _put_transfers(tapes[rank], stream(rank, (0, "all")), ends, rng)
        else:
            ranks = tuple(sorted(rng.sample(range(num_ranks), rng.randint(2, num_ranks))))
            collectives = Collectives((1, kind), ranks)
            for rank in ranks:
                if kind == "sum":
                    tapes[rank].put(0, "sum", collectives=collectives)
                else:
                    tapes[rank].host_meet(collectives, "hosts")
    return jobs_of(tapes)


def _put_transfers(tape: Tape, stream: int, ends: Sequence[Transfer], rng: random.Random) -> None:
    tail = tape.tails.get(0)
    after = [tail] if tail is not None and rng.random() < 0.7 else []
    item = tape.put(stream, "transfers", after=after, transfers=ends)
    if rng.random() < 0.5:
        tape.put(0, "wait", after=[item])
    elif rng.random() < 0.2:
        tape.host_wait("wait", after=[item] if rng.random() < 0.5 else None)
