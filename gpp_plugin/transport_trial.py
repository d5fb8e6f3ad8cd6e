"""One rank of `gpp_plugin.testing.check_transport`: runs a small plan's messages and compares every row.

python -m gpp_plugin.transport_trial TRANSPORT DEVICE

No model and no executor: the messages of the rank's program are posted as they stand, receives as far ahead as the
transport's ``prepost_depth`` allows, and every tensor is made of (mini-batch, message, slot) alone, so that the
receiver knows what the sender sent. Three stages, one rank each::

    s0 --x (float32, samples x 3), ids (int64), bias (no batch axis)--> s1 --y (float32)--> s2
    s0 --z (bfloat16)----------------------------------------------------------------------------^

s0 takes two samples at a time, the others four: activations of two tasks of s0 are rows of one task of s1.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gpp_plugin.ir.plan import PipelinePlan, Stage, StageEdge
from gpp_plugin.ir.program import Direction, InstructionKind, Message, RankProgram
from gpp_plugin.ir.tensors import UNIFORM, TensorSpec, batch_layout
from gpp_plugin.launch import emit_event, end_rank
from gpp_plugin.plugins import Pending, Post, Transport, TransportRequest, find_transport
from gpp_plugin.rehearse.rehearsal import programs_of_plan
from gpp_plugin.runtime.messages.routes import Payload, payloads_of
from gpp_plugin.runtime.rank_programs import channels_of

TIMEOUT_S = 60.0
MINI_BATCHES = 2

SPECS = {
    name: TensorSpec(
        name=name, dtype=dtype, shape=shape, num_samples=2, layout=layout, requires_grad=dtype != "int64"
    )
    for name, dtype, shape, layout in (
        ("x", "float32", (2, 3), batch_layout()),
        ("ids", "int64", (2, 5), batch_layout()),
        ("bias", "float32", (7,), UNIFORM),
        ("y", "float32", (2, 9000), batch_layout()),
        ("z", "bfloat16", (2, 4), batch_layout()),
    )
}


def trial_plan() -> PipelinePlan:
    """Return three stages of one rank each, the first with micro-batches of half the size."""
    stages = tuple(
        Stage(
            name=f"s{index}",
            blocks=(f"b{index}",),
            ranks=(index,),
            micro_batch_size=size,
            in_flight=count,
            forward_us=1.0,
            backward_us=2.0,
        )
        for index, (size, count) in enumerate([(2, 4), (4, 2), (4, 1)])
    )
    edges = (
        StageEdge(
            src=0,
            dst=1,
            batch_tensors=("x", "ids"),
            whole_tensors=("bias",),
            gradient_tensors=("x", "bias"),
        ),
        StageEdge(src=1, dst=2, batch_tensors=("y",), gradient_tensors=("y",)),
        StageEdge(src=0, dst=2, batch_tensors=("z",), gradient_tensors=("z",)),
    )
    return PipelinePlan(
        model="trial",
        graph="none",
        planner="none",
        mini_batch=8,
        loss_unit=4,
        stages=stages,
        edges=edges,
        tensors=tuple(SPECS.values()),
    )


def rows_of(mini_batch: int, message: Message, payload: Payload) -> Tensor:
    """Return what a payload of a message holds in this trial: the same at both ends, another in every mini-batch."""
    is_forward, first = message.direction is Direction.ACTIVATION, message.samples.first_sample
    key = (mini_batch, message.edge, is_forward, first, payload.slot)
    generator = torch.Generator().manual_seed(hash(key) & 0x7FFFFFFF)
    if payload.dtype.is_floating_point:
        return torch.randn(payload.shape, generator=generator).to(payload.dtype)
    return torch.randint(-(2**60), 2**60, payload.shape, generator=generator, dtype=payload.dtype)


class _Trial:
    """This rank's messages: bound once, posted once a mini-batch."""

    def __init__(
        self, transport: Transport, plan: PipelinePlan, program: RankProgram, device: torch.device
    ) -> None:
        self._transport = transport
        self._device = device
        # (is it sent, message, payloads, what posts it), in the order of the program
        self._posts: list[tuple[bool, Message, Sequence[Payload], Post]] = []
        for instruction in program.instructions:
            message = instruction.message
            if message is None:
                continue
            is_sent = instruction.kind is InstructionKind.SEND
            payloads = payloads_of(message, is_sender=is_sent, plan=plan, specs=SPECS)
            bind = transport.bind_send if is_sent else transport.bind_receive
            self._posts.append(
                (is_sent, message, payloads, bind(message, payloads, plan.edge_name(message.edge)))
            )
        self._receives = [entry for entry in self._posts if not entry[0]]

    def run(self, mini_batch: int) -> None:
        """Post every message in its order, later receives ahead, and compare what comes.

        With a depth of 2, receive i posts, if they are not posted yet, the receives i, i + 1 and i + 2, and waits for
        its own.

        Raises:
            AssertionError: a tensor is not what its sender sent.
        """
        posted: list[Callable[[int], None]] = []
        leaving: list[tuple[Pending, list[Tensor]]] = []
        num_received = 0
        for is_sent, message, payloads, post in self._posts:
            if is_sent:
                rows = [rows_of(mini_batch, message, payload).to(self._device) for payload in payloads]
                leaving.append((post(rows), rows))
                continue
            while len(posted) < min(num_received + 1 + self._transport.prepost_depth, len(self._receives)):
                posted.append(self._posted(*self._receives[len(posted)][1:]))
            posted[num_received](mini_batch)
            num_received += 1
        for pending, _ in leaving:
            pending.wait()
            assert pending.is_done(), "a message that was waited for is not done"

    def _posted(self, message: Message, payloads: Sequence[Payload], post: Post) -> Callable[[int], None]:
        """Post a receive, and return what waits for it in a mini-batch and compares every row."""
        buffers = [
            torch.empty(payload.shape, dtype=payload.dtype, device=self._device) for payload in payloads
        ]
        pending = post(buffers)

        def check(mini_batch: int) -> None:
            pending.wait()
            for buffer, payload in zip(buffers, payloads, strict=True):
                is_same = torch.equal(buffer.cpu(), rows_of(mini_batch, message, payload))
                assert is_same, f"{message}: tensor {payload.name!r} did not arrive as it was sent"

        return check


def main() -> None:
    """Run this rank's part; rank 0 tells when all ranks are through."""
    name, kind = sys.argv[1:3]
    torch.set_num_threads(1)
    backend = "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=TIMEOUT_S))
    rank = dist.get_rank()
    device = torch.device(kind if kind == "cpu" else f"{kind}:{rank}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    plan = trial_plan()
    programs = programs_of_plan(plan)
    factory = find_transport(name)
    factory.check(str(device))
    request = TransportRequest(
        plan=plan,
        specs=SPECS,
        channels=frozenset(channels_of(programs)),
        device=str(device),
        backend="gloo" if kind == "cpu" else "nccl",
        timeout_s=TIMEOUT_S,
    )
    transport = factory.make(request)
    trial = _Trial(transport, plan, programs[rank], device)
    for mini_batch in range(MINI_BATCHES):
        trial.run(mini_batch)
    dist.barrier()
    transport.close()
    if rank == 0:
        emit_event(event="done")
    end_rank()


if __name__ == "__main__":
    main()
