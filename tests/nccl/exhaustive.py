"""Runs the operations of all ranks in every order in which they can happen, to judge `checker` by.

It knows of no graph and no proof: a state is what each host has come to and which items have started and ended, a step
is anything that may happen next, and all states that any order of steps leads to are looked at. A state in which
nothing may happen, though something is left, is a hang. Ends of transfers are matched when they start, by count. Only
for small jobs: the states are as many as the ways in which ranks can be ahead of each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tests.nccl.operations import Collectives, Job, Operation, Place

Begun = tuple[tuple[int, ...], ...]
State = tuple[tuple[int, ...], int, int, Begun]
"""Per rank the number of operations that its host is through; items that have started, and ended, as bits; and, for
each pair of a rank and what it meets others in, its items in the order in which they started."""


class Machine:
    """All ranks of a job; ``queues`` says which hardware queue a rank's stream is in."""

    def __init__(self, job: Job, queues: Mapping[tuple[int, int], int]) -> None:
        # Item n of rank r is bit ``first[r] + n``. ``needs[item]``: the items that have ended before it starts.
        # ``meets[item]``: the places in `Begun` of its own end of each rendezvous, and those of the others'.
        self._job = job
        self._first = [sum(map(len, job[:rank])) for rank in range(len(job))]
        self._all_items = 0
        self._needs: dict[int, int] = {}
        self._meets: dict[int, list[tuple[int, list[int]]]] = {}
        self._host_needs = [
            [self._bits(rank, each, n) for n, each in enumerate(row)] for rank, row in enumerate(job)
        ]
        self._places: dict[tuple[int, object], int] = {}
        for rank, row in enumerate(job):
            for number, each in enumerate(row):
                if each.place is Place.HOST:
                    continue
                item = self._first[rank] + number
                self._all_items |= 1 << item
                before = self._bits(rank, each, number)
                for other in range(number):
                    if _is_in_one_queue(queues, rank, each, row[other]):
                        before |= 1 << (self._first[rank] + other)
                self._needs[item] = before
                self._meets[item] = [self._met(rank, what) for what in _rendezvous(each)]

    def _bits(self, rank: int, operation: Operation, number: int) -> int:
        """Return the items that an operation names; of a wait for the device, all those before it on the device."""
        row, first = self._job[rank], self._first[rank]
        named = operation.after
        if named is None:
            named = tuple(n for n in range(number) if row[n].place is Place.DEVICE)
        return sum(1 << (first + n) for n in set(named))

    def _met(self, rank: int, what: object) -> tuple[int, list[int]]:
        ranks = what.ranks if isinstance(what, Collectives) else (what.sender, what.receiver)  # type: ignore[attr-defined]
        places = {r: self._places.setdefault((r, what), len(self._places)) for r in ranks}
        return places[rank], [place for r, place in places.items() if r != rank]

    def can_hang(self, *, most_states: int = 300_000) -> bool:
        """Return whether some order of steps leads to a state in which something is left and nothing can happen."""
        first: State = (tuple(0 for _ in self._job), 0, 0, tuple(() for _ in self._places))
        over = tuple(map(len, self._job))
        seen, waiting = {first}, [first]
        while waiting:
            state = waiting.pop()
            is_stuck = True
            for step in self._steps(state):
                is_stuck = False
                if step not in seen:
                    seen.add(step)
                    waiting.append(step)
            if is_stuck and (state[0] != over or state[2] != self._all_items):
                return True
            assert len(seen) <= most_states, f"more than {most_states} states: the job is not small"
        return False

    def _steps(self, state: State) -> Iterator[State]:
        hosts, started, ended, begun = state
        for rank, at in enumerate(hosts):
            row = self._job[rank]
            if at < len(row) and (row[at].place is not Place.HOST or not self._host_needs[rank][at] & ~ended):
                yield (*hosts[:rank], at + 1, *hosts[rank + 1 :]), started, ended, begun
            for item in range(self._first[rank], self._first[rank] + at):
                bit = 1 << item
                if item not in self._needs or ended & bit:
                    continue
                if started & bit:
                    if all(self._is_met(item, begun, own, others) for own, others in self._meets[item]):
                        yield hosts, started, ended | bit, begun
                elif not self._needs[item] & ~ended:
                    # What meets nobody may end as soon as it has started; who could see the difference?
                    ended_too = ended if self._meets[item] else ended | bit
                    yield hosts, started | bit, ended_too, self._begin(item, begun)

    def _begin(self, item: int, begun: Begun) -> Begun:
        for own, _ in self._meets[item]:
            begun = (*begun[:own], (*begun[own], item), *begun[own + 1 :])
        return begun

    def _is_met(self, item: int, begun: Begun, own: int, others: list[int]) -> bool:
        """Return whether the other ranks have started as many ends as the item's is the how-manyth."""
        # An item with two transfers of one kind has two ends; the later one decides.
        ordinal = max(n for n, each in enumerate(begun[own]) if each == item)
        return all(len(begun[place]) > ordinal for place in others)


def _rendezvous(operation: Operation) -> list[object]:
    return [*operation.transfers, *([] if operation.collectives is None else [operation.collectives])]


def _is_in_one_queue(
    queues: Mapping[tuple[int, int], int], rank: int, one: Operation, other: Operation
) -> bool:
    if one.place is not Place.DEVICE or other.place is not Place.DEVICE:
        return False
    return queues[rank, one.stream] == queues[rank, other.stream]
