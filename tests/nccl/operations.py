"""What the ranks of a job asked of their devices: the recorded-order model of NCCL, and a worked hang.

A host call of NCCL, like a kernel launch, puts work on a stream and returns. So what a rank asks for, and in which
order, does not depend on the other ranks: each rank's real executor and transport can be run alone, on groups that
only write down (`recording`), and a checker (`checker`) puts the ranks together afterwards. What is written down:

    host operation   one entry of a rank's list, in the order in which its host comes to them; a *host point* is a
                     place between two of them, where the host may stop for the whole device (allocator, pinned
                     memory, lazy loading of a kernel)
    item             a host operation that puts work on a stream: a task's kernels, an event's record, a stream's wait,
                     a *transfer launch* (one or more sends and receives that NCCL runs as one kernel), a collective
    stream           first in, first out. Stream 0 is the one that computes; each communicator has its own
    queue            a hardware queue that several streams share; here it is serial in the order of issue: an item
                     that waits, for an event or for another rank, holds up everything behind it, of all its streams
    rendezvous       a transfer launch ends when each of its transfers has been started at both ends, a collective when
                     all its ranks have started it. Ends are matched by communicator, sender and receiver, first with
                     first: NCCL has no tags
    host wait        the host goes on when certain items have ended: a device-wide or a stream's synchronise, an
                     event's, reading a number (``item``), a collective over gloo, the making of a communicator

A worked example. Ranks 0 and 1 exchange one message each way; both have posted their receives before they send:

    rank 0   receive dx (stream 1)   device-wide wait    send x (stream 2)
    rank 1   receive x  (stream 1)   device-wide wait    send dx (stream 2)

Rank 0's wait needs the end of ``receive dx``, which needs rank 1 to start ``send dx``, which rank 1's host does behind
its own wait, for the end of ``receive x``, whose send rank 0's host starts behind its wait: a circle. Without the
waits both finish if streams 1 and 2 have a queue each. If they share one, send x stands behind receive dx in it, and
send dx behind receive x: the same circle without any host wait.

Nothing in a list depends on time, and what has happened never hinders what has not: whether all of it happens is one
question about one graph, whatever the ranks' speeds. Operations that are left over wait for each other (or for an end
that nobody starts), and a hang of the model is exactly that.

Why a hang on real hardware is a hang here: every wait of the hardware is one of the waits above. Queues of a real
device let an item start before the one in front of it has ended where both are of different streams; here they do not.
A launch here needs all its transfers' other ends; NCCL lets go of small messages earlier. Both make the model stricter
than the device, so the model may see a hang that one device in particular would not have, never the reverse.

Waiting too much is one half; `races` has the other one, whether ranks wait *enough*. It judges the same lists by what is
read and written where (`memory`), and by the reads of a host that stand between two tasks. What a rank computes meanwhile
is made up, a task that only reads and makes its tensors (`recording`), or all of a stage's training (`computing`).
`planted` has faults of waiting and keeping, and which of the checks finds each.

What it does not model: a device so full of spinning NCCL kernels that no compute kernel finds a multiprocessor
(``max_ctas`` of the communicators bounds them), eager sends of small messages, the host's own threads (the watchdog,
autograd's) beside the one that issues, and time: limits, and ranks that fail.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Communicator = tuple[int, str]
"""Number of the group in the order in which the job makes groups, and which communicator of the group."""


class Transfer(NamedTuple):
    """One end of a message: the other end is the same one with the same number on the other rank."""

    communicator: Communicator
    sender: int
    receiver: int


class Collectives(NamedTuple):
    """A collective; the ranks' n-th ones on a communicator are one."""

    communicator: Communicator
    ranks: tuple[int, ...]


class Place(enum.Enum):
    """Where an operation happens: on a stream of the device, in a thread of the host (gloo), or in the host's way."""

    DEVICE = "device"
    THREAD = "thread"
    HOST = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One host operation.

    Args:
        stream: of an item; threads number theirs apart. -1 for a host wait.
        after: numbers of this rank's items that have ended before an item starts, or a host wait ends; None for a
            host wait for the whole device.
        transfers: of a transfer launch; ``sizes``: the bytes that each of them moves, if they are known.
        collectives: of a collective.
        what: for people.
    """

    place: Place
    stream: int = -1
    after: tuple[int, ...] | None = ()
    transfers: tuple[Transfer, ...] = ()
    sizes: tuple[int, ...] = ()
    collectives: Collectives | None = None
    what: str = ""

    def __str__(self) -> str:
        where = {Place.DEVICE: f"stream {self.stream}", Place.THREAD: "gloo", Place.HOST: "host"}[self.place]
        waits = " for the device" if self.after is None else "".join(f" #{item}" for item in self.after)
        ends = [f"{t.sender}>{t.receiver} on {t.communicator[0]}:{t.communicator[1]}" for t in self.transfers]
        if self.collectives is not None:
            ends.append(f"ranks {list(self.collectives.ranks)} on {self.collectives.communicator[0]}")
        return (
            f"{where}: {self.what}" + (f" after{waits}" if waits else "") + "".join(f" [{e}]" for e in ends)
        )


@dataclass(slots=True)
class Tape:
    """The operations of one rank, in the order of its host."""

    rank: int
    operations: list[Operation] = field(default_factory=list)
    num_streams: int = 1
    num_threads: int = 0
    tails: dict[int, int] = field(default_factory=dict)
    """By stream of the device, the last item on it."""

    def new_stream(self) -> int:
        """Return the number of one more stream of the device."""
        self.num_streams += 1
        return self.num_streams - 1

    def new_thread(self) -> int:
        """Return the number of one more thread beside the host."""
        self.num_threads += 1
        return self.num_threads - 1

    def put(
        self,
        stream: int,
        what: str,
        *,
        after: Sequence[int] = (),
        transfers: Sequence[Transfer] = (),
        sizes: Sequence[int] = (),
        collectives: Collectives | None = None,
        place: Place = Place.DEVICE,
    ) -> int:
        """Put an item on a stream; return its number."""
        self.operations.append(
            Operation(
                place=place,
                stream=stream,
                after=tuple(after),
                transfers=tuple(transfers),
                sizes=tuple(sizes),
                collectives=collectives,
                what=what,
            )
        )
        number = len(self.operations) - 1
        if place is Place.DEVICE:
            self.tails[stream] = number
        return number

    def host_wait(self, what: str, *, after: Sequence[int] | None = None) -> None:
        """Let the host wait for items; for everything on the device where none are named."""
        waits = None if after is None else tuple(after)
        self.operations.append(Operation(place=Place.HOST, after=waits, what=what))

    def host_meet(self, collectives: Collectives, what: str) -> None:
        """Let the host wait until the hosts of some ranks have come here."""
        item = self.put(self.new_thread(), what, collectives=collectives, place=Place.THREAD)
        self.host_wait(what, after=[item])


Job = tuple[tuple[Operation, ...], ...]
"""The operations of every rank, by rank."""
