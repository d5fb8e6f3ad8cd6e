"""``"p2p": "megatron"``: the same losses to the bit, over P2PCommunicator where it can, errors like native ones."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from gpp_plugin.config import read_config
from gpp_plugin.errors import ConfigError
from gpp_plugin.integrations.megatron.p2p import check_megatron_p2p
from tests.integrations import megatron_p2p_jobs as jobs
from tests.ranks import run_kept_ranks, run_ranks

needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
)


@needs_megatron
def test_losses_are_those_of_the_native_transport_to_the_bit() -> None:
    names = ["diamond", "sizes", "data-parallel"]
    answers = run_ranks(jobs.train_both_ways, 4, names)
    for rank, by_name in enumerate(answers):
        for name, answer in by_name.items():
            assert answer["megatron"] == answer["native"], name
            assert len(set(answer["native"])) == 4, "the losses of different steps differ"
            assert answer["native notes"] == []
            assert answer["native transport"] == "GlooTransport"
            assert answer["megatron transport"] == "MegatronTransport"
            assert answer["pairs"] and all(rank in pair for pair in answer["pairs"]), name
    pairs = {name: {pair for by_name in answers for pair in by_name[name]["pairs"]} for name in names}
    assert pairs["diamond"] == pairs["sizes"] == {(0, 1), (0, 2), (0, 3), (1, 3), (2, 3)}
    assert pairs["data-parallel"] == {(0, 3), (1, 2)}, "one communicator for each replica"
    for name in names[:2]:
        assert answers[0][name]["megatron notes"] == ["p2p megatron: 5 of 5 edges over P2PCommunicator"]


@needs_megatron
def test_edges_of_other_types_stay_native_beside_communicators() -> None:
    answers = [answer["odd edges"] for answer in run_ranks(jobs.train_both_ways, 3, ["odd edges"])]
    assert all(answer["megatron"] == answer["native"] for answer in answers)
    (note,) = answers[0]["megatron notes"]
    assert note.startswith("p2p megatron: 1 of 3 edges over P2PCommunicator; native: ")
    assert "tensors a message" in note
    assert [answer["pairs"] for answer in answers] == [[], [(1, 2)], [(1, 2)]]


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
