"""``"p2p": "megatron"``: the same losses to the bit, over P2PCommunicator where it can, errors like native ones."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gpp_benchmarks._emulated_graphs import emulated_plan
from gpp_plugin.config.reader import read_config
from gpp_plugin.errors import CommTimeout, ConfigError
from gpp_plugin.integrations.megatron.p2p import MEGATRON_TRANSPORT
from gpp_plugin.ir.program import Direction, Message
from gpp_plugin.ir.tensors import SampleRange
from gpp_plugin.plugins import TransportRequest
from gpp_plugin.runtime.messages.routes import Payload
from tests.integrations.engine_jobs import B, config_of, make_engine, steps
from tests.models import build
from tests.ranks import run_kept_ranks, run_ranks
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

    dist.barrier()
    plan = emulated_plan("pair", [(0, 1)], num_micro_batches=4)
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
    request = TransportRequest(
        plan=plan,
        specs={spec.name: spec for spec in plan.tensors},
        channels=frozenset([message.channel]),
        device="cpu",
        backend="gloo",
        timeout_s=WAIT_S,
    )
    transport = MEGATRON_TRANSPORT.make(request)
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


needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
)


@needs_megatron
def test_losses_are_those_of_the_native_transport_to_the_bit() -> None:
    answers = run_ranks(train_both_ways, 4, list(BLOCKS))
    pairs: dict[str, set[tuple[int, int]]] = {}
    for name in BLOCKS:
        found = [by_name[name] for by_name in answers]
        for rank, answer in enumerate(found):
            assert answer["megatron"] == answer["native"], name
            assert len(set(answer["native"])) == 3, "the losses of two steps and of an evaluation differ"
            assert answer["native notes"] == []
            assert answer["native transport"] == "GlooTransport"
            assert answer["megatron transport"] == "MegatronTransport"
            assert all(rank in pair for pair in answer["pairs"]), name
        pairs[name] = {pair for answer in found for pair in answer["pairs"]}
    assert pairs["diamond"] == pairs["sizes"] == {(0, 1), (0, 2), (0, 3), (1, 3), (2, 3)}
    assert pairs["data-parallel"] == {(0, 3), (1, 2)}, "one communicator for each replica"
    assert pairs["odd edges"] == {(2, 3)}, "edges of several tensors and types stay native beside it"
    notes = {name: answers[0][name]["megatron notes"] for name in BLOCKS}
    assert notes["diamond"] == notes["sizes"] == ["p2p megatron: 5 of 5 edges over P2PCommunicator"]
    (note,) = notes["odd edges"]
    assert note.startswith("p2p megatron: 1 of 3 edges over P2PCommunicator; native: ")
    assert "tensors a message" in note


@needs_megatron
def test_a_wait_in_vain_ends_as_a_native_one() -> None:
    assert run_kept_ranks(wait_in_vain, 2, timeout_s=60)[1] == (
        "receive of activation from rank 0 on rank 1, edge stage0 -> loss, micro-batch 3, samples 4..5: nothing came "
        "within 2 s; look for the first error of the other ranks, or raise graph_pipeline.comm_timeout_s"
    )


def test_what_cannot_work_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"p2p: \"megatorn\" is not valid; give one of native, megatron"):
        read_config({"graph_pipeline": {"p2p": "megatorn"}})
    with pytest.raises(ConfigError) as refused:
        MEGATRON_TRANSPORT.check("cuda:0")
    assert "on a CUDA device sends over NCCL" in str(refused.value)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as refused:
        MEGATRON_TRANSPORT.check("cpu")
    assert str(refused.value) == (
        'graph_pipeline.p2p: "megatron" needs megatron-core, which is not installed; pip install '
        "'megatron-core>=0.16', or write \"native\""
    )
