"""`torch.distributed` for a rank that is recorded alone: groups that write down what they are asked for.

They do as `ProcessGroupNCCL` does (torch 2.11 to 2.13; asynchronous collectives, and point-to-point calls always):
a communicator is made at its first use, where the hosts of its ranks meet; it has a stream of its own, which waits for
what is on the current stream at the time of the call; ``wait`` makes the current stream wait for the launch, not the
host. A collective without ``async_op`` runs on the current stream itself. A send or receive by itself uses a
communicator of the two ranks; those between ``_start_coalescing`` and ``_end_coalescing``, like collectives, use the
group's, and are one launch. gloo's calls run in threads of the host, which
waits for them; its messages have tags, and here a send ends no sooner than its receive is posted.

What is moved is read and written where the launch runs (`memory`). The numbers of other ranks are made up: a receive
brings quarters, in sums and gathers all ranks have what this one has. Buffers are kept by the code under
test alone: that some releases of torch hold on to them in a work is not counted on.

Where the default group is bound to a device (``device_id``), a NCCL group is split off from it: all ranks of the default
group enter ``ncclCommSplit``, members or not, and a group of one rank alone does, too. Of a gloo group only outsiders
do (torch 2.13, ``_new_process_group_helper``).
"""

from __future__ import annotations

import contextlib
import datetime
import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from tests.nccl.fake_cuda import FakeCuda, options_namespace
from tests.nccl.memory import thread_of
from tests.nccl.operations import Collectives, Communicator, Place, Transfer

OUTSIDE = -100
"""What torch gives a rank for a group that it is not in."""


class FakeWork:
    """Something under way; never done before it is waited for."""

    def __init__(self, cuda: FakeCuda, item: int, *, is_thread: bool) -> None:
        self._cuda, self._item, self._is_thread = cuda, item, is_thread

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        if not self._is_thread:
            self._cuda.tape.put(self._cuda.stream.number, "wait for transfers", after=[self._item])
        if self._is_thread or timeout is not None:  # NCCL's wait with a limit is one of the host
            self.end()
        return True

    def end(self) -> None:
        """Let the host wait until it is done."""
        wait = self._cuda.tape.host_wait if self._is_thread else self._cuda.host_wait
        wait("wait with a limit", after=[self._item])

    def is_completed(self) -> bool:
        return False


class FakeGroup:
    """A process group as one of its ranks has it.

    Args:
        number: groups made before it by the job; the same on all ranks.
    """

    def __init__(self, cuda: FakeCuda, *, number: int, ranks: Sequence[int], backend: str, name: str) -> None:
        self._cuda = cuda
        self._number = number
        self.ranks = tuple(ranks)
        self.backend = backend
        self.group_name = name
        self._streams: dict[str, int] = {}
        self._coalesced: list[tuple[Transfer, list[Tensor]]] | None = None

    def rank(self) -> int:
        return self.ranks.index(self._cuda.tape.rank)

    def size(self) -> int:
        return len(self.ranks)

    # ---- transfers -----------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> FakeWork | None:
        return self._move(self.ranks[peer], tensors, tag, is_send=True)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> FakeWork | None:
        return self._move(self.ranks[peer], tensors, tag, is_send=False)

    def _start_coalescing(self, device: torch.device) -> None:
        assert self._coalesced is None, "coalescing does not nest"
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> FakeWork:
        transfers, self._coalesced = self._coalesced, None
        assert transfers, "nothing was put into a launch"
        return self._launch("all", "transfers", transfers=transfers)

    def _move(self, peer: int, tensors: list[Tensor], tag: int, *, is_send: bool) -> FakeWork | None:
        own = self._cuda.tape.rank
        ends = (own, peer) if is_send else (peer, own)
        if self.backend == "gloo":
            return self._move_by_thread(
                Transfer((self._number, f"tag {tag}"), *ends), tensors, is_send=is_send
            )
        pair = f"{min(own, peer)}-{max(own, peer)}"
        key = pair if self._coalesced is None else "all"
        transfer = Transfer((self._number, key), *ends)
        if self._coalesced is not None:
            self._coalesced.append((transfer, tensors))
            return None
        return self._launch(key, "send" if is_send else "receive", transfers=[(transfer, tensors)])

    def _move_by_thread(self, transfer: Transfer, tensors: list[Tensor], *, is_send: bool) -> FakeWork:
        """Let a thread of the host send or receive, which matches transfers by their tags."""
        tape, memory, what = self._cuda.tape, self._cuda.memory, "send" if is_send else "receive"
        for tensor in tensors:
            memory.watch_host(tensor)
        item = tape.put(
            tape.new_thread(), what, transfers=[transfer], sizes=[_num_bytes(tensors)], place=Place.THREAD
        )
        self._touch(item, thread_of(item), what, tensors if is_send else [], [] if is_send else tensors)
        with memory.off():
            for tensor in [] if is_send else tensors:
                tensor.detach().zero_()
        return FakeWork(self._cuda, item, is_thread=True)

    # ---- collectives ---------------------------------------------------------------------------

    def meet(
        self,
        what: str,
        *,
        reads: Sequence[Tensor] = (),
        writes: Sequence[Tensor] = (),
        async_op: bool = False,
    ) -> FakeWork | None:
        """Write down a collective, which reads and writes tensors of this rank."""
        tape, memory = self._cuda.tape, self._cuda.memory
        used = (*reads, *writes)
        is_host = self.backend == "gloo" or ("gloo" in self.backend and not any(map(memory.is_device, used)))
        assert all(memory.is_device(t) is not is_host for t in used), what
        collectives = Collectives((self._number, "host" if is_host else "all"), self.ranks)
        if is_host:
            for tensor in (*reads, *writes):
                memory.watch_host(tensor)
            item = tape.put(tape.new_thread(), what, collectives=collectives, place=Place.THREAD)
            self._touch(item, thread_of(item), what, reads, writes)
            work = FakeWork(self._cuda, item, is_thread=True)
            if not async_op:
                work.wait()
            return work if async_op else None
        if async_op:
            return self._launch("all", what, collectives=collectives, reads=reads, writes=writes)
        self._open("all")
        item = tape.put(self._cuda.stream.number, what, collectives=collectives)
        self._touch(item, self._cuda.stream.number, what, reads, writes)
        return None

    def _touch(
        self, item: int, stream: int, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor]
    ) -> None:
        memory = self._cuda.memory
        memory.touch(reads, is_write=False, what=what, stream=stream, at=item)
        memory.touch(writes, is_write=True, what=what, stream=stream, at=item)

    # ---- launches ------------------------------------------------------------------------------

    def _open(self, key: str) -> None:
        if key not in self._streams:
            ranks = self.ranks if key == "all" else tuple(int(rank) for rank in key.split("-"))
            communicator: Communicator = (self._number, key)
            self._cuda.tape.host_meet(
                Collectives((communicator[0], f"open {key}"), ranks), "make a communicator"
            )
            self._streams[key] = self._cuda.tape.new_stream()

    def _launch(
        self,
        key: str,
        what: str,
        *,
        transfers: Sequence[tuple[Transfer, list[Tensor]]] = (),
        collectives: Collectives | None = None,
        reads: Sequence[Tensor] = (),
        writes: Sequence[Tensor] = (),
    ) -> FakeWork:
        self._open(key)
        tape = self._cuda.tape
        ready = tape.put(self._cuda.stream.number, "record")
        item = tape.put(
            self._streams[key],
            what,
            after=[ready],
            transfers=[transfer for transfer, _ in transfers],
            sizes=[_num_bytes(tensors) for _, tensors in transfers],
            collectives=collectives,
        )
        own, memory = tape.rank, self._cuda.memory
        sent = [t for transfer, tensors in transfers if transfer.sender == own for t in tensors]
        come = [t for transfer, tensors in transfers if transfer.sender != own for t in tensors]
        assert all(memory.is_device(t) for t in (*sent, *come)), f"{what} of memory of the host"
        self._touch(item, self._streams[key], what, [*reads, *sent], [*writes, *come])
        with memory.off():
            for tensor in come:
                tensor.detach().fill_(0.25 if tensor.is_floating_point() else 0)
        return FakeWork(self._cuda, item, is_thread=False)


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class FakeDistributed:
    """`torch.distributed` of one rank of a job over NCCL.

    Args:
        is_bound: the default group is bound to the rank's device.
        told: what ranks that were recorded before brought to collectives of the host, by group, number and rank.
    """

    def __init__(
        self,
        cuda: FakeCuda,
        num_ranks: int,
        *,
        told: dict[tuple[int, int, int], Tensor],
        is_bound: bool = False,
    ) -> None:
        self._cuda = cuda
        self._told = told
        self._num_told: Counter[int] = Counter()
        self._num_ranks = num_ranks
        self._num_groups = 0
        self._is_bound = is_bound
        self.world = self._make(range(num_ranks), "nccl", "world")
        self.made: list[tuple[tuple[int, ...], str]] = []
        """The groups that the rank has asked for, in order: the same on all ranks, members or not."""

    def _make(self, ranks: Sequence[int], backend: str, name: str) -> FakeGroup:
        self._num_groups += 1
        return FakeGroup(self._cuda, number=self._num_groups - 1, ranks=ranks, backend=backend, name=name)

    def new_group(
        self,
        ranks: Sequence[int] | None = None,
        timeout: Any = None,
        backend: str | None = None,
        pg_options: Any = None,
        use_local_synchronization: bool = False,
        group_desc: str | None = None,
        device_id: Any = None,
    ) -> FakeGroup | int:
        members = sorted(range(self._num_ranks) if ranks is None else ranks)
        is_inside = self._cuda.tape.rank in members
        if self._is_bound and (backend != "gloo" or not is_inside):
            self._cuda.tape.host_meet(Collectives((0, "split"), self.world.ranks), "split the default group")
        if use_local_synchronization:  # a job of groups numbered alike has none of its own in between
            assert len(members) == 1, "groups that only their ranks make are not modelled"
            return FakeGroup(self._cuda, number=-1, ranks=members, backend=backend or "nccl", name="alone")
        group = self._make(members, backend or "nccl", group_desc or f"group {self._num_groups}")
        self.made.append((group.ranks, group.backend))
        everyone = Collectives((group._number, "store"), self.world.ranks)
        self._cuda.tape.host_meet(everyone, "make a group")
        return group if is_inside else OUTSIDE

    def _group(self, group: Any) -> FakeGroup:
        found = self.world if group is None else group
        assert isinstance(found, FakeGroup), "this rank is not in that group"
        return found

    def get_rank(self, group: Any = None) -> int:
        return self._group(group).rank()

    def get_world_size(self, group: Any = None) -> int:
        return self._group(group).size()

    def isend(self, tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> FakeWork | None:
        found = self._group(group)
        return found.send([tensor], found.ranks.index(dst), tag)

    def irecv(self, tensor: Tensor, src: int, group: Any = None, tag: int = 0) -> FakeWork | None:
        found = self._group(group)
        return found.recv([tensor], found.ranks.index(src), tag)

    def all_gather_object(self, values: list[Any], value: Any, group: Any = None) -> None:
        self._group(group).meet("all_gather_object")
        values[:] = [value] * len(values)

    def _collective(
        self, name: str, *args: Any, group: Any = None, async_op: bool = False, **given: Any
    ) -> Any:
        """Write a collective down, and let its tensors hold numbers as if all ranks had this one's.

        Objects, which hosts exchange, are those of the ranks that were recorded before this one.
        """
        found, tensors = (
            self._group(group),
            [
                list(a) if isinstance(a, list) else [a]
                for a in (*args, *given.values())
                if isinstance(a, (Tensor, list))
            ],
        )
        reads = writes = tensors[0] if tensors else []
        if name in _ONE_OUT:
            writes, reads = tensors[:2]
        elif name == "gather":
            reads, writes = tensors[0], tensors[1] if len(tensors) > 1 else []
        elif name == "broadcast":
            is_source = given.get("src") == self.get_rank()
            reads, writes = (reads, []) if is_source else ([], writes)
        work = found.meet(name, reads=reads, writes=writes, async_op=async_op)
        is_sum = (name == "all_reduce" and given.get("op", dist.ReduceOp.SUM) == dist.ReduceOp.SUM) or name[
            :6
        ] == "reduce"
        with self._cuda.memory.off():
            if name in _ONE_OUT or name == "gather":
                _fill(reads[0].detach(), [t.detach() for t in writes], found.rank())
            for tensor in writes if is_sum else ():
                tensor.detach().mul_(found.size())
            if name in ("all_gather", "gather", "broadcast") and not self._cuda.memory.is_device(
                (*reads, *writes)[0]
            ):
                sources = [found.ranks.index(given["src"])] if name == "broadcast" else range(found.size())
                self._hear(found, reads, dict(zip(sources, writes, strict=False)))
        return work

    def _hear(self, group: FakeGroup, brought: Sequence[Tensor], places: Mapping[int, Tensor]) -> None:
        """Take note of what this rank brings, and write what others have brought to their places."""
        number = self._num_told[group._number] = self._num_told[group._number] + 1
        for tensor in brought[:1]:
            self._told[group._number, number, group.rank()] = tensor.clone()
        for rank, target in places.items():
            told = self._told.get((group._number, number, rank))
            if told is not None:
                count = min(told.numel(), target.numel())
                target.view(-1)[:count] = told.view(-1)[:count]

    def attributes(self) -> dict[str, Any]:
        """Return what `torch.distributed` is while the rank is recorded."""
        return {
            **{name: functools.partial(self._collective, name) for name in _COLLECTIVES},
            "ProcessGroup": FakeGroup,
            "ProcessGroupNCCL": options_namespace(),
            "group": mock.Mock(WORLD=self.world),
            "new_group": self.new_group,
            "get_rank": self.get_rank,
            "get_world_size": self.get_world_size,
            "get_backend": lambda group=None: self._group(group).backend,
            "get_backend_config": lambda group=None: self._group(group).backend,
            "get_process_group_ranks": lambda group: list(self._group(group).ranks),
            "get_global_rank": lambda group, rank: self._group(group).ranks[rank],
            "get_group_rank": lambda group, rank: self._group(group).ranks.index(rank),
            "is_initialized": lambda: True,
            "isend": self.isend,
            "irecv": self.irecv,
            "all_gather_object": self.all_gather_object,
            "destroy_process_group": lambda group=None: None,
        }


_ONE_OUT = (
    "all_gather", "all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single",
    "all_to_all_single",
)  # fmt: skip
"""Collectives that take what they write, then what they read."""
_COLLECTIVES = ("all_reduce", "broadcast", "gather", "barrier", "monitored_barrier", *_ONE_OUT)


def _fill(own: Tensor, others: list[Tensor], position: int) -> None:
    """Write what ranks would bring that all have ``own``: whole to each tensor, piece by piece to a larger one."""
    own = own.clone()  # it may be a part of what is written
    for target in others:
        if target.numel() >= own.numel():
            times = -(-target.numel() // max(own.numel(), 1))
            target.view(-1).copy_(own.view(-1).repeat(times)[: target.numel()])
        else:
            first = min(position * target.numel(), own.numel() - target.numel())  # parts may be uneven
            target.view(-1).copy_(own.view(-1)[first : first + target.numel()])


@contextlib.contextmanager
def recorded_distributed(fake: FakeDistributed) -> Iterator[None]:
    """Let `torch.distributed` be that of a recorded rank."""
    with contextlib.ExitStack() as stack:
        for name, value in fake.attributes().items():
            stack.enter_context(mock.patch.object(dist, name, value, create=True))
        yield
