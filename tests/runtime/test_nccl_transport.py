"""What reaches torch's NCCL groups: one group a channel, one launch a message, types that NCCL knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from gpp_plugin.runtime.messages import nccl_transport
from gpp_plugin.runtime.messages.nccl_transport import NcclTransport
from tests.runtime.test_transport import message, wires_for

CPU = torch.device("cpu")


class Work:
    def wait(self) -> None:
        pass


class Group:
    """A process group that notes what it is asked for."""

    def __init__(self, ranks: list[int]) -> None:
        self.ranks = ranks
        self.calls: list[Any] = []

    def _start_coalescing(self, device: torch.device) -> None:
        self.calls.append("start")

    def _end_coalescing(self, device: torch.device) -> Work:
        self.calls.append("end")
        return Work()

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.calls.append(("send", peer, tensors[0].dtype, tensors[0].numel()))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.calls.append(("recv", peer, tensors[0].dtype, tensors[0].numel()))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    groups: list[Group] = []

    def new_group(ranks: list[int], **_: Any) -> Group:
        groups.append(Group(ranks))
        return groups[-1]

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(nccl_transport, "_options", lambda timeout_s: None)
    return groups


def test_a_group_for_each_pair_and_direction_made_once_on_all_ranks_in_one_order(made: list[Group]) -> None:
    transport = NcclTransport(device=CPU, timeout_s=1.0)
    transport.open([(1, 0), (0, 1), (2, 3)])
    assert [group.ranks for group in made] == [[0, 1], [2, 3], [0, 1]]
    # Rank 1 receives on the first, has no part in the second, which others open meanwhile, and sends on the third.
    assert [group.calls for group in made] == [
        ["start", ("recv", 0, torch.float32, 1), "end"],
        [],
        ["start", ("send", 0, torch.float32, 1), "end"],
    ]
    transport.open([(0, 1), (2, 3), (3, 1)])  # an evaluation with one channel more
    assert [group.ranks for group in made[3:]] == [[1, 3]]


def test_edges_between_two_ranks_share_a_communicator_and_a_message_is_one_launch(made: list[Group]) -> None:
    transport = NcclTransport(device=CPU, timeout_s=1.0)
    transport.open([(0, 1), (1, 0)])
    tensors = [torch.zeros(3, 2), torch.zeros(5, dtype=torch.int16), torch.zeros((), dtype=torch.bool)]
    for edge in range(2):
        transport.bind_receive(message(0, edge=edge), wires_for(tensors), "a -> b")(tensors)
    assert made[0].calls[3:] == 2 * [
        "start",
        ("recv", 0, torch.float32, 6),
        ("recv", 0, torch.uint8, 10),  # NCCL knows no int16
        ("recv", 0, torch.bool, 1),
        "end",
    ]
