"""Whether every rank waits enough: no two uses of one piece of memory may happen in either order.

Two accesses of overlapping bytes of one block (`memory`), at least one of them a write, *race* unless one is ordered
before the other:

    same stream               in the order of issue
    host, then anything       the host had done it before it issued the other
    stream, then another      the other waits for an item behind the first: an event, a work's ``wait``; or for one that
                              waits for such an item
    stream, then the host     the host waits for an item behind it, or for the whole device
    letting go                is a write of the allocating stream where it happens; allocation is one as well

Nothing here depends on time, so one run stands for all timings. For each operation of a rank's tape a *clock* says, by
stream, up to which operation of that stream everything has ended when it starts. An access at operation n of stream s is
before another one whose clock has n or more for s. The accesses of a rank are judged by what the rank itself waits for:
an order that comes about only by way of another rank (it answers, so it must have heard) does not count.

A worked example. Task B reads a message that stream 2 receives, and its buffer was allocated on stream 0:

    0  stream 0   record            allocated before it                     clock of stream 0 {}
    1  stream 2   wait for #0                                               clock of stream 2 {0: 0}
    2  stream 2   receive           writes the buffer at clock {0: 0}: behind its allocation
    3  stream 0   wait for #2                                               clock of stream 0 {2: 2}
    4  stream 0   B                 reads it at clock {2: 2}: behind the receive

Without operation 3 task B reads at clock {}, and 2 is not in it: a race. Without operation 1 the receive may write while
kernels before the allocation still use the memory. If the buffer is let go of behind 2 and before 3, its memory may be
written by stream 0 while the message comes: a race as well.

What it does not model: streams that libraries make for themselves, and memory that Python never sees (workspaces).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tests.nccl.memory import HOST, LET_GO, Access, Block, Memory, thread_of
from tests.nccl.operations import Operation, Place

Clock = Mapping[int, int]
"""By stream, the last operation that has ended for certain, and all before it; `EVERY`: of all streams of the device."""
EVERY = 1 << 30
Point = tuple[int, int, bool]
"""(operations issued so far, stream, whether it is what the operation of that number does)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """Two accesses in no order.

    Args:
        operations: of the rank.
    """

    rank: int
    block: Block
    first: Access
    second: Access
    operations: Sequence[Operation]

    @property
    def places(self) -> tuple[object, ...]:
        """Return what is the same for all races of one fault."""
        return tuple(
            (e.where.file, e.where.line, e.what, e.is_write, min(e.stream, 0))
            for e in (self.first, self.second)
        )

    def __str__(self) -> str:
        owner = "" if self.block.stream == HOST else f", allocated on stream {self.block.stream}"
        lines = [f"race on rank {self.rank}: {self.block.shape}{owner}"]
        for access in (self.first, self.second):
            verb = "writes" if access.is_write else "reads"
            lines.append(f"  {_name(access.stream)} {verb} it: {access.what} at {access.where}")
        waits = (
            f"{_name(self.second.stream)} does not wait for {self.first.what!r} of {_name(self.first.stream)}"
        )
        lines.append(f"  missing: {waits}; an event, a work's wait, or record_stream where it is let go of")
        return "\n".join([*lines, *self._timeline()])

    def _timeline(self) -> list[str]:
        """Draw what both streams and the host have done around the two accesses."""
        begin, end = self.first.at, self.second.at
        lines, left_out = [], 0
        for number in range(max(begin - 1, 0), min(end + 1, len(self.operations))):
            each = self.operations[number]
            if each.place is Place.DEVICE and each.stream not in (self.first.stream, self.second.stream):
                continue
            if begin + 4 < number < end - 3:
                left_out += 1
                continue
            if left_out:
                lines.append(f"    ... {left_out} more")
                left_out = 0
            both = (self.first, self.second)
            lines += [_mark(number, a) for a in both if a.at == number and not a.is_own]
            own = any(a.at == number and a.is_own for a in both)
            lines.append(f"    #{number} {each}" + ("  <-" if own else ""))
        if self.second.at >= len(self.operations):
            lines.append(_mark(self.second.at, self.second))
        return lines


def _mark(number: int, access: Access) -> str:
    return (
        f"    #{number} {_name(access.stream)}: {access.what} "
        + ("writes" if access.is_write else "reads")
        + "  <-"
    )


def _name(stream: int) -> str:
    return (
        "the host"
        if stream == HOST
        else f"stream {stream}"
        if stream >= 0
        else f"gloo's thread of #{-2 - stream}"
    )


def clocks(operations: Sequence[Operation], points: Iterable[Point]) -> dict[Point, Clock]:
    """Return the clock of whatever is issued to a stream, or done by the host, when so many operations were issued."""
    asked: defaultdict[int, set[Point]] = defaultdict(set)
    for point in points:
        asked[point[0]].add(point)
    found: dict[Point, Clock] = {}
    host: dict[int, int] = {}
    of_stream: dict[int, dict[int, int]] = {}
    ended: dict[int, dict[int, int]] = {}  # by item, what has ended when it has, itself among it
    for number in range(len(operations) + 1):
        for point in asked.get(number, ()):
            found[point] = _join(of_stream.get(point[1], host), host)
        if number == len(operations):
            break
        each = operations[number]
        if each.place is Place.HOST:
            if each.after is None:
                host = {**host, EVERY: number}
            for item in each.after or ():
                host = _join(host, ended[item])
            continue
        stream = thread_of(number) if each.place is Place.THREAD else each.stream
        clock = _join(of_stream.get(stream, host), host)
        for item in each.after or ():
            clock = _join(clock, ended[item])
        ended[number] = {**clock, stream: number}
        if each.place is Place.DEVICE:
            of_stream[stream] = clock
        if (number, stream, True) in found:  # what it does itself is behind what it waits for
            found[number, stream, True] = clock
    return found


def _join(one: dict[int, int], other: Mapping[int, int]) -> dict[int, int]:
    """Return the later of two clocks, stream by stream; one of the two where it is."""
    if one is other:
        return one
    joined = None
    for stream, number in other.items():
        if number > one.get(stream, -1):
            if joined is None:
                joined = dict(one)
            joined[stream] = number
    return one if joined is None else joined


def races(rank: int, operations: Sequence[Operation], blocks: Iterable[Block]) -> list[Race]:
    """Return the races of a rank, one for each pair of places."""
    shared = [block for block in blocks if len(block.streams) > 1]
    of_clock = clocks(operations, {(a.at, a.stream, a.is_own) for block in shared for a in block.accesses})
    found: dict[tuple[object, ...], Race] = {}
    for block in shared:
        by_stream: dict[int, list[Access]] = {}
        for access in block.accesses:
            clock = of_clock[access.at, access.stream, access.is_own]
            for stream, others in by_stream.items():
                if stream in (access.stream, HOST) or (stream in block.named and access.what == LET_GO):
                    continue
                ended = max(clock.get(stream, -1), clock.get(EVERY, -1) if stream >= 0 else -1)
                begin = bisect_right(others, ended, key=lambda other: other.at)
                for other in others[begin:]:
                    if (
                        (other.is_write or access.is_write)
                        and other.first < access.end
                        and access.first < other.end
                    ):
                        race = Race(rank=rank, block=block, first=other, second=access, operations=operations)
                        found.setdefault(race.places, race)
            by_stream.setdefault(access.stream, []).append(access)
    return list(found.values())


def races_of(rank: int, memory: Memory) -> list[Race]:
    """Return the races of a recorded rank."""
    return races(rank, memory.tape.operations, memory.used)
