"""Messages over gloo: what arrives is what was sent, both ways at once, and a wait ends with where it was."""

from __future__ import annotations

import dataclasses
import datetime
import os
import re
import weakref
from collections import defaultdict, deque
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gpp_plugin.ir.program import Direction, Instruction, InstructionKind, Message, RankProgram
from gpp_plugin.ir.schedule import Task, TaskKind
from gpp_plugin.ir.tensors import SampleRange
from gpp_plugin.runtime.messages.mailbox import (
    Carry,
    LocalTransfers,
    Mailbox,
    pack_entry,
)
from gpp_plugin.runtime.messages.routes import MessageEntry, Payload, RowSource
from gpp_plugin.runtime.messages.transport import (
    PACKED_BYTES,
    MessagePlace,
    Posted,
    Transport,
    make_transport,
)
from gpp_plugin.runtime.recorder import Recorder
from gpp_plugin.schedule.messages import most_sends
from tests.ranks import run_kept_ranks

NAMES = ("vision -> loss", "text -> loss")


def message(source: int, *, edge: int = 0, micro_batch: int = 0) -> Message:
    """Return an activation from rank 0 to 1, or the gradient back from rank 1 to 0."""
    return Message(
        edge=edge,
        direction=Direction.ACTIVATION if source == 0 else Direction.GRADIENT,
        src_rank=source,
        dst_rank=1 - source,
        src_micro_batch=micro_batch,
        dst_micro_batch=micro_batch + 3,
        samples=SampleRange(first_sample=4, num_samples=2),
        has_whole_tensors=True,
    )


def wires_for(tensors: list[Tensor]) -> list[Payload]:
    return [
        Payload(
            name=f"t{slot}",
            slot=slot,
            axis=-1,
            first_row=0,
            num_rows=0,
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
        )
        for slot, tensor in enumerate(tensors)
    ]


def tensors_of(seed: int, size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(3, size, generator=generator),
        torch.randn(5, generator=generator) > 0,
        torch.tensor(1.5 + seed, dtype=torch.float64),
        torch.randint(-(2**60), 2**60, (2, 2), generator=generator),
        torch.randn(7, generator=generator).to(torch.bfloat16),
    ]


def make(timeout_s: float = 30.0) -> Transport:
    return make_transport(device=torch.device("cpu"), channels=[(0, 1), (1, 0)], timeout_s=timeout_s)


def exchange_unmeshed(size: int) -> bool:
    """As `exchange`, in groups as a job of many ranks has them."""
    with mock.patch.dict(os.environ, TORCH_GLOO_LAZY_INIT="1"):
        return exchange(size)


def exchange(size: int) -> bool:
    """Send five messages each way, of several tensors each, on two edges; return whether all arrived."""
    rank = dist.get_rank()
    transport = make()
    keys = [(edge, micro_batch) for micro_batch in range(5) for edge in range(2)]
    template = tensors_of(0, size)
    arrived, pending = {}, []
    for edge, micro_batch in keys:
        incoming = message(1 - rank, edge=edge, micro_batch=micro_batch)
        arrived[edge, micro_batch] = [torch.empty_like(tensor) for tensor in template]
        post = transport.bind_receive(incoming, wires_for(template), NAMES[edge])
        pending.append(post(arrived[edge, micro_batch]))
    for edge, micro_batch in keys:
        outgoing = message(rank, edge=edge, micro_batch=micro_batch)
        sent = tensors_of(100 * rank + 10 * edge + micro_batch, size)
        pending.append(transport.bind_send(outgoing, wires_for(template), NAMES[edge])(sent))
    for each in pending:
        each.wait()
    transport.close()
    return all(
        torch.equal(found, wanted)
        for (edge, micro_batch), tensors in arrived.items()
        for found, wanted in zip(
            tensors, tensors_of(100 * (1 - rank) + 10 * edge + micro_batch, size), strict=True
        )
    )


@pytest.mark.parametrize(
    ("exchange", "size"),
    [(exchange, PACKED_BYTES), (exchange_unmeshed, 8)],
    ids=["one by one", "as one, in a large job"],
)
def test_messages_of_several_tensors_arrive_both_ways(exchange: Any, size: int) -> None:
    assert run_kept_ranks(exchange, 2, size, timeout_s=60) == [True, True]


class Work:
    def __init__(self, log: list[object], error: str = "", done: bool = True) -> None:
        self._log, self._error, self._done = log, error, done

    def wait(self, *limit: object) -> None:
        self._log.append(limit)
        if self._error:
            raise RuntimeError(self._error)

    def is_completed(self) -> bool:
        return self._done


def test_what_was_posted_is_waited_for_once_and_then_kept_no_longer() -> None:
    log: list[object] = []
    place = MessagePlace("send", message(0, edge=0, micro_batch=1), "a -> b", datetime.timedelta(seconds=9))
    sent, staged, arrives = torch.ones(2), torch.full((2,), 3.0), torch.zeros(2)
    watched = weakref.ref(sent)
    posted = Posted([Work(log), Work(log, done=False)], place, [sent], [(arrives, staged)])  # type: ignore[list-item]
    del sent
    assert not posted.is_done() and watched() is not None
    for _ in range(2):
        posted.wait()
        assert log == [(place.timeout,)] * 2 and arrives.tolist() == [3.0, 3.0]
        arrives.zero_().add_(3.0)
    assert posted.is_done() and watched() is None
    Posted([Work(log)], MessagePlace("send", place.message, "a", None), []).wait()  # type: ignore[list-item]
    assert log[2:] == [()], "no limit"


@pytest.mark.parametrize(
    ("verb", "waited_s", "error", "said"),
    [
        (
            "receive",
            8.2,
            "late",
            r"from rank 0 on rank 1, edge a, micro-batch 4, .*: nothing came within 9 s",
        ),
        (
            "send",
            8.0,
            "odd",
            r"to rank 1 on rank 0, edge a, micro-batch 1, samples 4..5: after 8.0 s: odd; look",
        ),
        ("send", 9.5, "Connection RESET by peer", "after 9.5 s the other rank is gone"),
    ],
)
def test_a_failed_message_says_where_and_why(verb: str, waited_s: float, error: str, said: str) -> None:
    place = MessagePlace(verb, message(0, edge=0, micro_batch=1), "a", datetime.timedelta(seconds=9))
    assert re.search(said, place.describe(RuntimeError(error), waited_s))


@pytest.mark.parametrize(
    ("depth", "limit", "sizes", "carried", "marks"),
    [
        (4, 1000, [1] * 8, 0, [5, 5, 5, 8, 8, 8, 8, 8]),
        (0, 1000, [1] * 3, 0, [1, 2, 3]),
        (1, 1000, [1] * 4, 0, [2, 2, 4, 4]),
        (4, 1000, [1] * 8, 2, [7, 7, 7, 8, 8, 8]),
        (4, 2, [1] * 8, 0, [4, 4, 6, 6, 8, 8, 8, 8]),
        (4, 9, [1, 5, 1, 10, 1, 1, 1, 1], 0, [3, 3, 7, 7, 7, 8, 8, 8]),
    ],
)  # fmt: skip
def test_receives_are_posted_ahead_in_batches_within_their_bytes(
    depth: int, limit: int, sizes: list[int], carried: int, marks: list[int]
) -> None:
    mail = object.__new__(Mailbox)
    vars(mail).update(
        _transport=SimpleNamespace(prepost_depth=depth, prepost_bytes=limit),
        _travelling=list(range(len(sizes))),
        _num_carried=carried,
        _routes=SimpleNamespace(receives=[(None, [SimpleNamespace(num_bytes=size)]) for size in sizes]),
    )
    assert mail._posted_at() == marks


@pytest.mark.parametrize(
    ("in_flight", "forwards", "sends", "most"),
    [(3, 2, 5, 9), (3, 2, 4, 6), (1, 3, 3, 2), (0, 3, 4, 4), (4, 0, 3, 12)],
)
def test_the_sends_of_the_micro_batches_in_flight_may_be_under_way(
    in_flight: int, forwards: int, sends: int, most: int
) -> None:
    tasks = [Task(stage=0, kind=TaskKind.FORWARD, micro_batch=m) for m in range(forwards)]
    tasks += [Task(stage=0, kind=TaskKind.BACKWARD, micro_batch=m) for m in range(2 * forwards)]
    local = dataclasses.replace(message(0), dst_rank=0)
    sent = [message(0, micro_batch=m) for m in range(sends)] + [local] * 9
    program = RankProgram(
        rank=0,
        stages=(0,),
        instructions=(
            *(Instruction(kind=InstructionKind.COMPUTE, task=task) for task in tasks),
            *(Instruction(kind=InstructionKind.SEND, message=each) for each in sent),
        ),
    )
    assert most_sends(program, in_flight=in_flight) == most


class Under:
    """Something under way; says whether it was waited for."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1

    def is_done(self) -> bool:
        return self.waits > 0


def mailbox(**held: Any) -> Any:
    """Return a mailbox of three receives, of which a task reads the second."""
    mail: Any = object.__new__(Mailbox)
    receives = tuple((message(0, micro_batch=n), ()) for n in range(3))
    empty = [[]] * 3
    vars(mail).update(
        _routes=SimpleNamespace(receives=receives, reads={"0F1": SimpleNamespace(waits=(1,))}),
        _no_buffers=empty,
        inbox=list(empty),
        _receives=[Under() for _ in range(3)],
        _sends=deque(),
        _sends_of=defaultdict(list),
        _posted=0,
        _sizes=[1, 2, 4],
        _sent_bytes=deque(),
        _sending_bytes=0,
        _read_bytes=0,
        most_bytes=0,
        _buffers=SimpleNamespace(clear=lambda: None, made_bytes=0),
        _recorder=Recorder(rank=0, stage=0, device=torch.device("cpu")),
        shift=0,
        _carried=(),
        _num_carried=0,
        _is_trained=False,
        **held,
    )
    return mail


def test_a_mini_batch_that_failed_leaves_nothing_in_a_mailbox() -> None:
    mail, sent = mailbox(), Under()
    mail.inbox[0], mail._posted = [torch.ones(2)], 2
    mail._sends.append(sent)
    mail._sends_of[1].append(sent)
    old = list(mail._receives)
    mail.clear()
    assert mail.inbox == [[], [], []] and mail._posted == 0 and not mail._sends and not mail._sends_of
    mail.finish_sends()
    mail.complete(0)
    assert not sent.waits and not any(pending.waits for pending in old), (
        "what was posted is nobody's any more"
    )
    laid = LocalTransfers()
    laid.place(message(0)).append(torch.ones(2))
    laid.clear()
    assert laid.place(message(0)) == []
    carry = Carry(received={message(0): ([], sent)}, sends=deque([sent]), sends_of={1: [sent]})
    carry.clear()
    assert not carry.received and not carry.sends and not carry.sends_of


def test_a_window_leaves_to_the_next_what_no_task_of_it_reads_and_what_is_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gpp_plugin.runtime.messages.mailbox.pack_entry", lambda entry, made: None)
    first, sends, carry = mailbox(), [Under() for _ in range(3)], Carry(shift=4)
    first.inbox[:] = [[torch.full((1,), float(n))] for n in range(3)]
    first.shift = 4
    entries: Any = [(SimpleNamespace(payload=SimpleNamespace(num_bytes=2**n)),) for n in range(3)]
    vars(first._routes).update(
        sends=[(message(0, micro_batch=n), entries[n]) for n in range(3)], drops=[()] * 3
    )
    vars(first).update(
        _names=["edge"],
        _marks=[],
        _most_sends=3,
        _transport=SimpleNamespace(
            prepost_depth=0,
            bind_send=lambda sent, payloads, edge: lambda tensors: sends[sent.src_micro_batch],
        ),
    )
    for number in range(3):
        first.compile_send(number, {})()
    assert first.most_bytes == 1 + 2 + 4
    first.finish_sends_of(1)
    assert [pending.waits for pending in sends] == [0, 1, 0], "the micro-batch counted without the shift"
    first.hand_over(carry)
    assert [m.src_micro_batch for m in carry.received] == [0, 2] and list(carry.sends) == sends
    # the next mini-batch counts from its own first micro-batch: 10 later for the sender, 5 for the receiver, 20 samples
    edges = (SimpleNamespace(src=0, dst=1),)
    carry.renumber(
        SimpleNamespace(edges=edges, num_micro_batches=lambda stage: (10, 5)[stage], mini_batch=20), 0
    )
    second = mailbox()
    samples = SampleRange(first_sample=4 - 20, num_samples=2)
    second._carried = tuple(
        dataclasses.replace(message(0, micro_batch=n), dst_micro_batch=n + 13 - 5, samples=samples)
        for n in (-8, -10)
    )
    second._num_carried = 2
    second.take_over(carry)
    assert [float(held[0]) for held in second.inbox[:2]] == [2.0, 0.0] and second._posted == 2
    assert second._receives[:2] == [first._receives[2], first._receives[0]] and second.shift == 4
    assert not carry.received and not carry.sends and not carry.sends_of, "what it holds is held once"
    second.finish_sends_of(-8)
    second.finish_sends()
    assert [pending.waits for pending in sends] == [1, 2, 2]


def test_what_is_sent_is_rows_of_what_tasks_made_one_after_the_other() -> None:
    halves = [torch.arange(12.0).view(2, 3, 2).requires_grad_(True), torch.arange(4.0).view(2, 1, 2)]
    rows = [
        RowSource(slot=n, position=0, first_row=first, num_rows=count)
        for n, first, count in ((0, 1, 2), (1, 0, 1))
    ]
    for sources, wanted in (
        (rows[:1], halves[0][:, 1:]),
        (rows, torch.cat([halves[0][:, 1:], halves[1]], dim=1)),
    ):
        payload = Payload(
            name="x", slot=0, axis=1, first_row=0, num_rows=0, shape=tuple(wanted.shape), dtype=torch.float32
        )
        found = pack_entry(
            MessageEntry(payload=payload, sources=tuple(sources)), {n: [t] for n, t in enumerate(halves)}
        )
        assert torch.equal(found, wanted) and found.is_contiguous() and not found.requires_grad
