"""``"p2p": "megatron"``: the same losses to the bit, over P2PCommunicator where it can, errors like native ones."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from gpp_plugin.config.reader import read_config
from gpp_plugin.errors import ConfigError
from gpp_plugin.integrations.megatron.p2p import check_megatron_p2p
from tests.integrations import megatron_p2p_jobs as jobs
from tests.ranks import run_kept_ranks, run_ranks

needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
)


@needs_megatron
def test_losses_are_those_of_the_native_transport_to_the_bit() -> None:
    answers = run_ranks(jobs.train_both_ways, 4, list(jobs.BLOCKS))
    pairs: dict[str, set[tuple[int, int]]] = {}
    for name in jobs.BLOCKS:
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
    notes = {name: answers[0][name]["megatron notes"] for name in jobs.BLOCKS}
    assert notes["diamond"] == notes["sizes"] == ["p2p megatron: 5 of 5 edges over P2PCommunicator"]
    (note,) = notes["odd edges"]
    assert note.startswith("p2p megatron: 1 of 3 edges over P2PCommunicator; native: ")
    assert "tensors a message" in note


@needs_megatron
def test_a_wait_in_vain_ends_as_a_native_one() -> None:
    assert run_kept_ranks(jobs.wait_in_vain, 2, timeout_s=60)[1] == (
        "receive of activation from rank 0 on rank 1, edge stage0 -> loss, micro-batch 3, samples 4..5: nothing came "
        "within 2 s; look for the first error of the other ranks, or raise graph_pipeline.comm_timeout_s"
    )


def test_what_cannot_work_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"p2p: \"megatorn\" is not valid; give one of native, megatron"):
        read_config({"graph_pipeline": {"p2p": "megatorn"}})
    with pytest.raises(ConfigError) as refused:
        check_megatron_p2p(torch.device("cuda", 0))
    assert "on a CUDA device sends over NCCL" in str(refused.value)

    def find_nothing(name: str) -> Any:
        return None

    monkeypatch.setattr(importlib.util, "find_spec", find_nothing)
    with pytest.raises(ConfigError) as refused:
        check_megatron_p2p(torch.device("cpu"))
    assert str(refused.value) == (
        'graph_pipeline.p2p: "megatron" needs megatron-core, which is not installed; pip install '
        "'megatron-core>=0.16', or write \"native\""
    )
