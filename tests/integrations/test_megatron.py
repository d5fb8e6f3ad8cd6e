"""Chunks of megatron-core models: shared out over tensor ranks they compute what one rank does."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch

from gpp_plugin.errors import ConfigError
from gpp_plugin.integrations.megatron import cpu, gpt_stage, require_megatron
from gpp_plugin.model.graph.stage_graph import StageContext, StageGraph
from tests.integrations import megatron_jobs as jobs
from tests.ranks import run_kept_ranks
from tests.reference import gradient_errors

pytest.importorskip("megatron.core")

EXACT = 1e-12
"""Everything is in double precision."""


@pytest.fixture(scope="module")
def shared_out() -> list[dict[str, Any]]:
    return run_kept_ranks(jobs.shared_out, 2)


@pytest.mark.parametrize("kind", jobs.KINDS)
def test_tensor_parallel_chunks_equal_one_rank(kind: str, shared_out: list[dict[str, Any]]) -> None:
    first, second = (answer[kind] for answer in shared_out)
    whole, one_chunk, two_chunks = first["losses"]
    assert one_chunk == pytest.approx(whole, rel=EXACT) and two_chunks == pytest.approx(whole, rel=EXACT)
    assert second["losses"][1:] == first["losses"][1:], "the loss is the same on all tensor ranks"
    for split in ("found", "in two"):
        assert set(first[split]) == set(first["wanted"])
        errors = gradient_errors(first[split], first["wanted"])
        assert max(errors.values()) < EXACT, (split, max(errors, key=errors.__getitem__), errors)
    length = jobs.LENGTH // 2 if "sequence" in kind else jobs.LENGTH
    assert first["hidden"] == (length, 4, jobs.HIDDEN)
    assert first["logits"] < EXACT
    assert first["numbers"] == [2, 3, 4], "layers know their numbers in the model"
    assert not first["globals"], "nothing is put into Megatron's global groups"
    assert first["weights"] and second["weights"], "what was shared out is gathered bit for bit"


def test_image_embeddings_take_the_places_of_their_token() -> None:
    first, second = run_kept_ranks(jobs.merged, 2)
    loss, of_images, gradients = first["whole"]
    assert loss == pytest.approx(first["by hand"], rel=EXACT)
    for layout in ("tensor", "sequence"):
        found, found_of_images, found_gradients = first[layout]
        assert found == pytest.approx(loss, rel=EXACT) and second[layout][0] == found
        errors = gradient_errors(
            {**found_gradients, "images": found_of_images}, {**gradients, "images": of_images}
        )
        assert max(errors.values()) < EXACT, (layout, errors)
        assert torch.equal(second[layout][1], found_of_images), "embeddings have one gradient on tensor ranks"
    assert "images has 2 positions a sample, and token 63 is [3, 2, 2] times" in first["said"]


def test_blocks_with_the_batch_first_equal_one_rank() -> None:
    first, second = run_kept_ranks(jobs.blocks, 2)
    output, of_input, gradients = first["whole"]
    for layout in ("tensor", "sequence"):
        found, found_of_input, found_gradients = first[layout]
        assert torch.allclose(found, output, rtol=0, atol=1e-12) and torch.equal(second[layout][0], found)
        errors = gradient_errors(
            {**found_gradients, "input": found_of_input}, {**gradients, "input": of_input}
        )
        assert max(errors.values()) < EXACT, (layout, errors)
        assert torch.equal(second[layout][1], found_of_input)
    assert not torch.equal(*first["drawn"]), "chunks draw their own weights"


def test_dropout_agrees_over_tensor_ranks_and_repeats_where_torch_is_set_back() -> None:
    first, second = run_kept_ranks(jobs.dropped, 2)
    for name in ("hidden", "attention", "both"):
        one, two = first[name], second[name]
        assert one["losses"] == two["losses"], name
        assert one["losses"][0] != one["losses"][1], "the next micro-batch drops other elements"
        assert one["repeated"] == one["losses"][0] and two["repeated"] == one["losses"][0]
        loss, gradients, wanted = one["recomputed"]
        assert loss == one["losses"][0]
        assert all(torch.equal(gradients[key], wanted[key]) for key in wanted), (
            "the same elements are dropped"
        )
        assert one["evaluated"][0] == one["evaluated"][1]
    as_one_rank = pytest.approx(first["hidden"]["whole"], rel=EXACT)
    assert first["hidden"]["losses"] == as_one_rank
    assert first["of a data position"] != second["of a data position"]


def test_the_cpu_layer_touches_megatron_only_and_can_be_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    require_megatron("test")
    cpu.remove()
    names = [(importlib.import_module(r.module), r.name) for r in cpu.REPLACED]
    before = [getattr(module, name) for module, name in names]
    of_torch = dict(vars(torch.cuda))
    with cpu.on_cpu():
        assert not cpu.install(), "once is enough"
        assert all(getattr(*place) is not value for place, value in zip(names, before, strict=True))
        own = importlib.import_module("megatron.core.utils").torch
        assert own.cuda.current_device() == torch.device("cpu")
        assert dict(vars(torch.cuda)) == of_torch and sys.modules["torch"] is torch
    assert all(getattr(*place) is value for place, value in zip(names, before, strict=True))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not cpu.install(), "never where there is CUDA"
    assert all(getattr(*place) is value for place, value in zip(names, before, strict=True))


def language_graph(tensor: int, **changes: Any) -> StageGraph:
    graph = StageGraph(name="language")
    options = {**jobs.LANGUAGE, **changes.pop("options", {})}
    given = gpt_stage(jobs.config_of(**changes), **options)
    inputs = ["input_ids", "labels"]
    graph.stage("language", given, inputs=inputs, outputs=["loss"], ranks=range(tensor), tensor=tensor)
    return graph


@pytest.mark.parametrize(
    ("tensor", "changes", "said"),
    [
        (3, {}, "stage 'language': tensor=3 does not divide num_attention_heads=4; change num_attention_heads, or"),
        (4, {"num_query_groups": 2}, "stage 'language': tensor=4 does not divide num_query_groups=2"),
        (4, {"ffn_hidden_size": 70}, "stage 'language': tensor=4 does not divide ffn_hidden_size=70"),
        (2, {"options": {"vocab_size": 63}}, "tensor=2 does not divide vocab_size=63; pad the vocabulary to 64"),
        (4, {"sequence_parallel": True}, "tensor_model_parallel_size=2, the stage has tensor=4"),
        (2, {"num_moe_experts": 2}, "stage 'language': num_moe_experts=2 is not for stages of a graph"),
        (2, {"options": {"layers": range(2, 5)}}, "stage 'language': layers=range(2, 5) are not consecutive layers"),
    ],
)  # fmt: skip
def test_what_cannot_be_shared_out_is_refused_when_written(tensor: int, changes: Any, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        language_graph(tensor, **dict(changes))
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_mistakes_with_chunks_are_one_line() -> None:
    for said in run_kept_ranks(jobs.refuse, 2):
        assert all("\n" not in text for text in said.values())
        assert said["no hidden"].startswith(
            "ConfigError: stage 'all': with pre_process=False it reads 'hidden_states'"
        )
        assert "it takes the embeddings [] and received ['images']" in said["unknown embeds"]
        assert "its layers' specification is not the local one, which an attention_mask needs" in said["mask"]
        assert said["missing weight"].startswith(
            "CheckpointError: stage 'all': the whole model's weights have no"
        )
        assert "'decoder.layers.1." in said["missing weight"], "by its name in the whole model"
        assert "is (64, 64), a share of (32, 64), and the stage has (32, 32)" in said["wide weight"]
        assert said["no chunk"].startswith("TypeError: Linear is no chunk that gpt_stage")


def test_a_factory_needs_torch_distributed() -> None:
    context = StageContext(
        stage="language", rank=0, device=torch.device("cpu"), dtype=torch.float32, data_group=None, tensor_group=None,
        single_group=None, data_rank=0, data_size=1, tensor_rank=0, tensor_size=1,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"stage 'language': .* need torch.distributed"):
        gpt_stage(jobs.config_of(), **jobs.LANGUAGE)(context)


def test_without_megatron_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "megatron", None)
    with pytest.raises(ConfigError, match=r"stage 'language' .* pip install 'gpp_plugin\[megatron\]'"):
        require_megatron("language")
