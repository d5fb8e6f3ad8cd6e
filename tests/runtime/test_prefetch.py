"""Two mini-batches in one program on real executors: what a task reads is of its own mini-batch, whatever came when."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from gpp_plugin.ir.program import InstructionKind
from gpp_plugin.ir.tensors import Layout, LayoutKind, TensorSpec
from gpp_plugin.runtime.executor import RankExecutor, StageExecutor
from gpp_plugin.runtime.messages.mailbox import LocalTransfers
from gpp_plugin.schedule.program_sets import EMPTY, lower_prefetch
from tests.runtime.memory_stages import Hooks
from tests.runtime.test_transport import Under
from tests.schedule.plans import freeze, simple_plan

WIDTHS = (3, 5, 5, 2)
"""Of the mini-batches, one after the other: three shapes."""


class Payload(Under):
    """Both ends of all messages of two ranks that run in turn: what is sent waits until it is received."""

    prepost_depth = 4
    prepost_bytes = 1 << 20
    buffers_ahead = 0

    def __init__(self) -> None:
        super().__init__()
        self.sent: defaultdict[tuple[int, int], deque[list[Tensor]]] = defaultdict(deque)

    def bind_send(self, message: Any, payloads: Any, edge: str) -> Any:
        def post(tensors: Sequence[Tensor]) -> Any:
            self.sent[message.channel].append([t.clone() for t in tensors])
            return self

        return post

    def bind_receive(self, message: Any, payloads: Any, edge: str) -> Any:
        def post(buffers: Sequence[Tensor]) -> Any:
            for buffer, tensor in zip(buffers, self.sent[message.channel].popleft(), strict=True):
                buffer.copy_(tensor)  # raises where the shapes are not those that were sent
            return self

        return post


class Doubling:
    """A stage that sends its inputs doubled (frozen), or notes what it received (trained)."""

    gradient_outputs: tuple[str, ...] = ()
    gradient_inputs: tuple[str, ...] = ()

    def __init__(self, stage: int) -> None:
        self.received, self.outputs = ((), ("t0",)) if stage == 0 else (("t0",), ())
        self.noted: list[Tensor] = []
        self.held: set[int] = set()

    def forward(self, micro_batch: int, half: Any, inputs: Any, received: Sequence[Tensor]) -> list[Tensor]:
        if not self.received:
            return [inputs[0] * 2]
        self.noted.append(received[0].clone())
        self.held.add(micro_batch)
        return []

    def backward(self, micro_batch: int, gradients: Any) -> list[Tensor]:
        self.held.remove(micro_batch)
        return []

    def clear(self) -> None:
        assert not self.held


def specs(width: int) -> dict[str, TensorSpec]:
    layout = Layout(kind=LayoutKind.BATCH, axis=0)
    return {"t0": TensorSpec(name="t0", shape=(1, width), dtype="float32", layout=layout, num_samples=1)}


def mini_batch(number: int) -> Tensor:
    return torch.arange(8.0)[:, None] + 100 * number + torch.zeros(WIDTHS[number])


@pytest.mark.parametrize(("frozen_size", "trained_size"), [(2, 4), (4, 2), (2, 2), (8, 1)])
def test_every_task_reads_its_own_mini_batch(frozen_size: int, trained_size: int) -> None:
    plan = freeze(simple_plan([frozen_size, trained_size], [(0, 1)], mini_batch=8, num_bytes=8.0), {0})
    programs = [lower_prefetch(plan).of_rank(rank) for rank in (0, 1)]
    payload, computes, hooks = Payload(), (Doubling(0), Doubling(1)), (Hooks(), Hooks())
    executors = [RankExecutor(own, local_transfers=LocalTransfers()) for own in programs]

    def run(name: str, now: int, following: int | None) -> list[Any]:
        for rank, own_programs in enumerate(programs):  # in turn: the frozen stage waits for nobody
            own = following if rank == 0 and following is not None else now
            executor = StageExecutor(
                plan=plan,
                program=own_programs.programs[name],
                compute=computes[rank],
                specs=specs(WIDTHS[own]),
                transport=payload,
                hooks=hooks[rank],
                device=torch.device("cpu"),
                place=own_programs.place(name),
                next_specs=None if following is None else specs(WIDTHS[following]),
            )
            rows = [(r,) for r in mini_batch(own).split(frozen_size)] if rank == 0 else [()] * 8
            carries = executors[rank].carries
            executors[rank].run(name, [executor], [rows])
        return list(carries[0].received)

    carried = run("prologue", 0, 0)
    count = 8 // trained_size
    assert {m.dst_micro_batch for m in carried} == set(range(count, 2 * count)) and hooks[0].steps == 0
    for now in range(3):
        carried = run("steady", now, now + 1)
        assert {m.samples.first_sample for m in carried} <= set(range(8, 16)), (
            "in the numbers of this program"
        )
        found = torch.cat(computes[1].noted)
        assert torch.equal(found, mini_batch(now) * 2)
        computes[1].noted.clear()
    assert run("epilogue", 3, None) == []
    assert [executor.last for executor in executors] == [EMPTY, EMPTY]
    assert torch.equal(torch.cat(computes[1].noted), mini_batch(3) * 2)
    assert [h.steps for h in hooks] == [4, 4]


def test_what_is_carried_is_numbered_as_the_next_program_does() -> None:
    plan = freeze(simple_plan([2, 4], [(0, 1)], mini_batch=8, num_bytes=8.0), {0})
    own = lower_prefetch(plan).of_rank(1)
    (carry,) = RankExecutor(own, local_transfers=LocalTransfers()).carries
    carry.received = {m: ([], Payload()) for m in own.programs["prologue"].messages(InstructionKind.RECEIVE)}
    carry.renumber(plan, 1)
    assert {m.dst_micro_batch for m in carry.received} == {0, 1}
    assert {m.src_micro_batch for m in carry.received} == {0, 1, 2, 3}
    assert {m.samples.first_sample for m in carry.received} <= set(range(8))
    assert set(carry.received) == set(own.place("steady").carried)  # type: ignore[union-attr]


def test_dropping_waits_for_what_came_and_keeps_nothing() -> None:
    plan = freeze(simple_plan([2, 2], [(0, 1)], mini_batch=8, num_bytes=8.0), {0})
    own = lower_prefetch(plan).of_rank(1)
    executor, payload = RankExecutor(own, local_transfers=LocalTransfers()), Payload()
    (carry,) = executor.carries
    carry.received = {m: ([], payload) for m in own.programs["prologue"].messages(InstructionKind.RECEIVE)}
    executor.drop()
    assert payload.waits == 4 and not executor.carries[0].received
