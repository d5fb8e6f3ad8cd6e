"""What reaches torch's NCCL groups: one group a channel, one launch a message, types that NCCL knows."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gpp_plugin.plugins import TransportRequest
from gpp_plugin.runtime.messages import transport
from gpp_plugin.runtime.messages.transport import NATIVE_TRANSPORT, NcclTransport
from tests.runtime.test_transport import Under, message, wires_for
from tests.schedule.plans import make_plan

CPU = torch.device("cpu")


class Group:
    """A process group that notes what it is asked for."""

    def __init__(self, ranks: list[int], given: dict[str, Any]) -> None:
        self.ranks, self.given = ranks, given
        self.calls: list[Any] = []

    def _start_coalescing(self, device: torch.device) -> None:
        self.calls.append("start")

    def _end_coalescing(self, device: torch.device) -> Under:
        self.calls.append("end")
        return Under()

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.calls.append(("send", peer, tensors[0].dtype, tensors[0].numel()))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.calls.append(("recv", peer, tensors[0].dtype, tensors[0].numel()))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    groups: list[Group] = []

    def new_group(ranks: list[int], **given: Any) -> Group:
        groups.append(Group(ranks, given))
        return groups[-1]

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: group.calls.append("destroyed"))
    monkeypatch.setattr(transport, "_nccl_options", lambda timeout_s: timeout_s)
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


@pytest.mark.parametrize(("mini_batch_s", "limit_s"), [(3.0, 600.0), (200.0, 2000.0)])
def test_a_job_s_transfers_may_wait_for_a_whole_mini_batch_and_groups_end_with_it(
    made: list[Group], mini_batch_s: float, limit_s: float
) -> None:
    plan = dataclasses.replace(make_plan((), (), mini_batch=4), iteration_us=mini_batch_s * 1e6)
    channels = frozenset({(0, 1), (1, 0), (2, 3)})
    request = TransportRequest(
        plan=plan, specs={}, channels=channels, device="cpu", backend="nccl", timeout_s=7.0
    )
    transport = NATIVE_TRANSPORT.make(request)
    assert [group.given["timeout"].total_seconds() for group in made] == [limit_s] * 3
    assert [group.given["pg_options"] for group in made] == [limit_s] * 3
    transport.close()
    assert [group.calls[-1:] for group in made] == [["destroyed"], [], ["destroyed"]], "a rank's own, once"
    transport.open(channels)
    assert len(made) == 6, "none is left"
