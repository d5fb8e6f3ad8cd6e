"""What each rank runs in the tests of ``"p2p": "megatron"``; importable by the processes that run it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from gpp_benchmarks._emulated_graphs import emulated_plan
from gpp_plugin.errors import CommTimeout
from gpp_plugin.ir.program import Direction, Message
from gpp_plugin.ir.samples import SampleRange
from gpp_plugin.runtime.messages.payloads import Payload
from tests.integrations.engine_jobs import B, config_of, make_engine, steps
from tests.models import build
from tests.runtime.odd_models import build_odd

DIAMOND = {"stages": [{"modules": [name]} for name in ("stem", "up", "down", "*")]}
REPLICAS = {"stages": [{"modules": ["stem"], "ranks": [0, 2]}, {"modules": ["*"], "ranks": [3, 1]}]}
WAIT_S = 2.0
ODD = {
    "stages": [
        {"modules": ["stem"], "ranks": [0, 1]},
        {"modules": ["middle"], "ranks": [2]},
        {"modules": ["*"], "ranks": [3]},
    ]
}
BLOCKS: dict[str, tuple[str, dict[str, Any]]] = {
    "diamond": ("diamond", {"plan": DIAMOND, "slicing": "off"}),
    "sizes": ("diamond", {"plan": DIAMOND, "slicing": 1, "micro_batch_sizes": {"up": 4}}),
    "data-parallel": ("diamond", {"plan": REPLICAS}),
    "odd edges": ("odd_edges", {"plan": ODD}),
}


def train_both_ways(names: list[str]) -> dict[str, dict[str, Any]]:
    """Losses of two steps and of an evaluation with each transport, and what the plan says of the edges."""
    answers = {}
    for name in names:
        model_name, block = BLOCKS[name]
        answer: dict[str, Any] = {}
        for p2p in ("native", "megatron"):
            model, make_batch = build_odd(model_name) or build(model_name)
            engine = make_engine(model, make_batch(B, 0), config_of(block={**block, "p2p": p2p}))
            losses = steps(engine, [make_batch(B, seed) for seed in range(2)])
            losses.append(float(engine.eval_batch(iter([make_batch(B, 7)]))))
            answer[p2p] = losses
            answer[f"{p2p} notes"] = [note for note in engine.plan.notes if note.startswith("p2p")]
            answer[f"{p2p} transport"] = type(engine._rank_runner._shared.transport).__name__
            answer["pairs"] = sorted(
                pair for pair, _ in getattr(engine._rank_runner._shared.transport, "_communicators", {})
            )
        answers[name] = answer
    return answers


def wait_in_vain() -> str:
    """Wait on rank 1 for a gradient that rank 0 does not send; return what the error says."""
    from megatron.core.pipeline_parallel import p2p_communication  # noqa: F401 - seconds, not part of a wait

    from gpp_plugin.integrations.megatron.p2p import over_megatron
    from gpp_plugin.runtime.messages.transport import make_transport

    dist.barrier()
    plan = emulated_plan("pair", [(0, 1)], num_micro_batches=4)
    device = torch.device("cpu")
    message = Message(
        edge=0,
        direction=Direction.ACTIVATION,
        src_rank=0,
        dst_rank=1,
        src_micro_batch=0,
        dst_micro_batch=3,
        samples=SampleRange(first_sample=4, num_samples=2),
        has_whole_tensors=True,
    )
    payload = Payload(name="x0", slot=0, axis=0, first_row=0, num_rows=2, shape=(2, 3), dtype=torch.float32)
    native = make_transport(device=device, channels=[message.channel], timeout_s=WAIT_S)
    transport = over_megatron(
        native,
        plan,
        specs={spec.name: spec for spec in plan.tensors},
        channels=[message.channel],
        device=device,
        timeout_s=WAIT_S,
    )
    said = ""
    if dist.get_rank() == 1:
        pending = transport.bind_receive(message, [payload], plan.edge_name(0))([torch.empty(payload.shape)])
        try:
            pending.wait()
        except CommTimeout as error:
            said = str(error)
    dist.barrier()
    transport.close()
    return said
