"""`torch.distributed` for a rank that is recorded alone: groups that write down what they are asked for.

They do as `ProcessGroupNCCL` does (torch 2.11 to 2.13; asynchronous collectives, and point-to-point calls always):
a communicator is made at its first use, where the hosts of its ranks meet; it has a stream of its own, which waits for
what is on the current stream at the time of the call; ``wait`` makes the current stream wait for the launch, not the
host. A collective without ``async_op`` runs on the current stream itself. A send or receive by itself uses a
communicator of the two ranks; those between ``_start_coalescing`` and ``_end_coalescing``, like collectives, use the
group's, and are one launch. gloo's calls run in threads of the host, which waits for them.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from tests.nccl.fake_cuda import FakeCuda, options_namespace
from tests.nccl.operations import Communicator, Meeting, Place, Transfer

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
            self._cuda.tape.host_wait("wait with a limit", after=[self._item])
        return True

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
        self._coalesced: list[tuple[Transfer, int]] | None = None

    def rank(self) -> int:
        return self.ranks.index(self._cuda.tape.rank)

    def size(self) -> int:
        return len(self.ranks)

    # ---- transfers -----------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> FakeWork | None:
        return self._move(self.ranks[peer], tensors, is_send=True)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> FakeWork | None:
        return self._move(self.ranks[peer], tensors, is_send=False)

    def _start_coalescing(self, device: torch.device) -> None:
        assert self._coalesced is None, "coalescing does not nest"
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> FakeWork:
        transfers, self._coalesced = self._coalesced, None
        assert transfers, "nothing was put into a launch"
        return self._launch("all", "transfers", transfers=transfers)

    def _move(self, peer: int, tensors: list[Tensor], *, is_send: bool) -> FakeWork | None:
        assert self.backend == "nccl", "messages over gloo are not modelled"
        own = self._cuda.tape.rank
        pair = f"{min(own, peer)}-{max(own, peer)}"
        key = pair if self._coalesced is None else "all"
        ends = (own, peer) if is_send else (peer, own)
        transfer = Transfer((self._number, key), *ends)
        if self._coalesced is not None:
            self._coalesced.append((transfer, _num_bytes(tensors)))
            return None
        return self._launch(
            key, "send" if is_send else "receive", transfers=[(transfer, _num_bytes(tensors))]
        )

    # ---- collectives ---------------------------------------------------------------------------

    def meet(self, what: str, *, async_op: bool = False) -> FakeWork | None:
        """Write down a collective."""
        meeting = Meeting((self._number, "all"), self.ranks)
        tape = self._cuda.tape
        if self.backend == "gloo":
            item = tape.put(tape.new_thread(), what, meeting=meeting, place=Place.THREAD)
            work = FakeWork(self._cuda, item, is_thread=True)
            if not async_op:
                work.wait()
            return work if async_op else None
        if async_op:
            return self._launch("all", what, meeting=meeting)
        self._open("all")
        tape.put(self._cuda.stream.number, what, meeting=meeting)
        return None

    # ---- launches ------------------------------------------------------------------------------

    def _open(self, key: str) -> None:
        if key not in self._streams:
            ranks = self.ranks if key == "all" else tuple(int(rank) for rank in key.split("-"))
            communicator: Communicator = (self._number, key)
            self._cuda.tape.host_meet(Meeting((communicator[0], f"open {key}"), ranks), "make a communicator")
            self._streams[key] = self._cuda.tape.new_stream()

    def _launch(
        self,
        key: str,
        what: str,
        *,
        transfers: Sequence[tuple[Transfer, int]] = (),
        meeting: Meeting | None = None,
    ) -> FakeWork:
        self._open(key)
        tape = self._cuda.tape
        ready = tape.put(self._cuda.stream.number, "record")
        item = tape.put(
            self._streams[key],
            what,
            after=[ready],
            transfers=[transfer for transfer, _ in transfers],
            sizes=[size for _, size in transfers],
            meeting=meeting,
        )
        return FakeWork(self._cuda, item, is_thread=False)


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class FakeDistributed:
    """`torch.distributed` of one rank of a job over NCCL."""

    def __init__(self, cuda: FakeCuda, num_ranks: int) -> None:
        self._cuda = cuda
        self._num_ranks = num_ranks
        self._num_groups = 0
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
        if use_local_synchronization:  # a job of groups numbered alike has none of its own in between
            assert len(members) == 1, "groups that only their ranks make are not modelled"
            return FakeGroup(self._cuda, number=-1, ranks=members, backend=backend or "nccl", name="alone")
        group = self._make(members, backend or "nccl", group_desc or f"group {self._num_groups}")
        self.made.append((group.ranks, group.backend))
        everyone = Meeting((group._number, "store"), self.world.ranks)
        self._cuda.tape.host_meet(everyone, "make a group")
        return group if self._cuda.tape.rank in members else OUTSIDE

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

    def attributes(self) -> dict[str, Any]:
        """Return what `torch.distributed` is while the rank is recorded."""

        def collective(name: str) -> Any:
            def call(*args: Any, group: Any = None, async_op: bool = False, **given: Any) -> FakeWork | None:
                return self._group(group).meet(name, async_op=async_op)

            return call

        names = ("all_reduce", "broadcast", "reduce_scatter_tensor", "reduce_scatter_single", "barrier")
        return {
            **{name: collective(name) for name in (*names, "monitored_barrier")},
            **{name: collective(name) for name in ("all_gather_into_tensor", "all_gather_single")},
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
            "is_initialized": lambda: True,
            "isend": self.isend,
            "irecv": self.irecv,
            "all_gather_object": self.all_gather_object,
            "destroy_process_group": lambda group=None: None,
        }


@contextlib.contextmanager
def recorded_distributed(fake: FakeDistributed) -> Iterator[None]:
    """Let `torch.distributed` be that of a recorded rank."""
    with contextlib.ExitStack() as stack:
        for name, value in fake.attributes().items():
            stack.enter_context(mock.patch.object(dist, name, value, create=True))
        yield
