"""One rank of `gpp bench p2p`: messages back and forth over every system in turn.

python -m gpp_benchmarks._p2p_ranks SETTINGS_JSON
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpp_benchmarks._emulated_graphs import emulated_plan
from gpp_plugin.errors import RuntimeFailure
from gpp_plugin.integrations.deepspeed.pipeline_peer import join_ranks
from gpp_plugin.integrations.megatron.p2p import over_megatron
from gpp_plugin.ir.program import Direction, Message
from gpp_plugin.ir.samples import SampleRange
from gpp_plugin.launch import emit_event, end_rank, real_time
from gpp_plugin.runtime.messages.sockets import widened_sockets
from gpp_plugin.runtime.messages.transport import Transport, make_transport
from gpp_plugin.runtime.messages.wires import Wire

TIMEOUT_S = 60.0
CPU = torch.device("cpu")

Wait = Callable[[], Tensor]
"""Waits for a message and returns it."""

Ends = tuple[Callable[[], Wait], Callable[[Tensor], Callable[[], object]]]
"""What posts a receive, and what sends a tensor and returns what waits for that."""


def main() -> None:
    """Measure on this rank; rank 0 reports."""
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    join_ranks()
    for size in settings["sizes"]:
        count = size["bytes"] // 4
        ends = {name: _MAKERS[name](count) for name in settings["systems"]}
        with real_time() if settings["is_real_time"] else contextlib.nullcontext():
            times = _measure(ends, count, size["messages"], settings["rounds"])
        if dist.get_rank() == 0:
            emit_event(bytes=size["bytes"], messages=size["messages"], us=times)
    dist.barrier()
    end_rank()


def _measure(ends: dict[str, Ends], count: int, messages: int, rounds: int) -> dict[str, list[float]]:
    sent = torch.arange(count, dtype=torch.float32) + dist.get_rank()
    expected = torch.arange(count, dtype=torch.float32) + (1 - dist.get_rank())
    for name, both in ends.items():
        _exchange(both, sent, 1)
        if not torch.equal(_exchange(both, sent, 2), expected):
            raise RuntimeFailure(f"{name}: what came is not what was sent")
    gc.collect()
    gc.freeze()
    names = list(ends)
    times: dict[str, list[float]] = {name: [] for name in names}
    for round_number in range(rounds):
        first = round_number % len(names)
        for name in (*names[first:], *names[:first]):
            dist.barrier()
            start = time.perf_counter()
            _exchange(ends[name], sent, messages)
            times[name].append((time.perf_counter() - start) / messages / 2 * 1e6)
    return times


def _exchange(ends: Ends, sent: Tensor, messages: int) -> Tensor:
    """Send ``messages`` back and forth, rank 0 first; return the last one received."""
    receive, send = ends
    is_first = dist.get_rank() == 0
    for _ in range(messages):
        wait = receive()
        if is_first:
            done = send(sent)
            received = wait()
        else:
            received = wait()
            done = send(sent)
        done()
    return received


def _bare(count: int) -> Ends:
    """Return isend and irecv, in a group each way, as our transport has them."""
    with widened_sockets():
        groups = [dist.new_group([0, 1], backend="gloo") for _ in range(2)]
    rank = dist.get_rank()
    to, fro = groups[rank], groups[1 - rank]

    def receive() -> Wait:
        buffer = torch.empty(count)
        work: Any = dist.irecv(buffer, src=1 - rank, group=fro)

        def wait() -> Tensor:
            work.wait()
            return buffer

        return wait

    def send(tensor: Tensor) -> Callable[[], object]:
        work: Any = dist.isend(tensor, dst=1 - rank, group=to)
        return work.wait

    return receive, send


def _native(count: int) -> Ends:
    return _bound(_gloo(), count)


def _megatron(count: int) -> Ends:
    plan = emulated_plan("pair", [(0, 1)], num_micro_batches=1, samples=1, message_bytes=4 * count)
    specs = {spec.name: spec for spec in plan.tensors}
    channels = [_message(direction).channel for direction in Direction]
    return _bound(
        over_megatron(_gloo(), plan, specs=specs, channels=channels, device=CPU, timeout_s=TIMEOUT_S), count
    )


def _gloo() -> Transport:
    return make_transport(device=CPU, channels=[], timeout_s=TIMEOUT_S)


def _message(direction: Direction) -> Message:
    source = 0 if direction is Direction.ACTIVATION else 1
    return Message(
        edge=0,
        direction=direction,
        src_rank=source,
        dst_rank=1 - source,
        src_micro_batch=0,
        dst_micro_batch=0,
        samples=SampleRange(first_sample=0, num_samples=1),
        has_whole_tensors=True,
    )


def _bound(transport: Transport, count: int) -> Ends:
    """Return a transport's ends: rank 0 sends activations, rank 1 gradients."""
    rank = dist.get_rank()
    wire = Wire(name="x0", slot=0, axis=0, first_row=0, num_rows=1, shape=(count,), dtype=torch.float32)
    outgoing, incoming = (Direction.ACTIVATION, Direction.GRADIENT)[:: 1 if rank == 0 else -1]
    post_send = transport.bind_send(_message(outgoing), [wire], "stage0 -> loss")
    post_receive = transport.bind_receive(_message(incoming), [wire], "stage0 -> loss")

    def receive() -> Wait:
        buffers = [torch.empty(count)]
        pending = post_receive(buffers)

        def wait() -> Tensor:
            pending.wait()
            return buffers[0]

        return wait

    def send(tensor: Tensor) -> Callable[[], object]:
        return post_send([tensor]).wait

    return receive, send


_MAKERS: dict[str, Callable[[int], Ends]] = {"native": _native, "megatron": _megatron, "bare": _bare}

if __name__ == "__main__":
    main()
