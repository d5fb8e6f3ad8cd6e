"""Ranks that do not have the same job are refused before anything is captured, with key, values and ranks."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_plugin.engine.engine_files import loaded_facts
from gpp_plugin.engine.framework import StepCounters
from gpp_plugin.errors import ConfigError
from gpp_plugin.runtime.ranks import agreement
from gpp_plugin.runtime.ranks.job_board import is_shared
from tests.fault_job import make_odd, odd_config
from tests.integrations.engine_jobs import B, config_of, make_engine, said_of
from tests.models import build
from tests.ranks import run_kept_ranks

SAID = {
    "lr": "optimizer.params.lr is 0.001 on ranks 0, 2 and 0.002 on rank 1",
    "optimizer": "optimizer.type is 'AdamW' on ranks 0, 2 and 'SGD' on rank 1",
    "scheduler": "scheduler.type is not set on ranks 0, 2 and 'WarmupLR' on rank 1",
    "clip": "gradient_clipping is not set on ranks 0, 2 and 0.1 on rank 1",
    "zero": "zero_optimization.stage is not set on ranks 0, 2 and 1 on rank 1",
    "batch": "train_micro_batch_size_per_gpu is 2 on ranks 0, 2 and 1 on rank 1",
    "mode": "graph_pipeline.mode is 'sync' on ranks 0, 2 and 'async' on rank 1",
    "seed": "graph_pipeline.seed is 0 on ranks 0, 2 and 7 on rank 1",
    "stages": "graph_pipeline.stages is 3 on ranks 0, 2 and 1 on rank 1",
    "schedule": "graph_pipeline.schedule is 'auto' on ranks 0, 2 and 'gpipe' on rank 1",
    "tensor_parallel": "graph_pipeline.tensor_parallel is 1 on ranks 0, 2 and 'auto' on rank 1",
    "bad_block": "planner",
    "weights": "give every rank the same weights: seed all ranks alike",
    "frozen": "frozen",
    "version": "deepspeed is ",
}


def refuse_each(names: list[str]) -> dict[str, str]:
    """Return what each disagreement is refused with."""
    software, said = agreement.software_facts, {}
    for name in names:
        config = config_of(block={"comm_timeout_s": 20, "stages": 3})
        model, make_batch = build("two_branch")
        seed = torch.initial_seed()
        if dist.get_rank() == 1:
            config = odd_config(name, config)
            make_odd(name, model)
        said[name] = said_of(functools.partial(make_engine, model, make_batch(B, 0), config))
        agreement.software_facts = software
        torch.manual_seed(seed)
    return said


def test_each_disagreement_is_refused_on_all_ranks() -> None:
    said = run_kept_ranks(refuse_each, 3, list(SAID))
    for name, expected in SAID.items():
        for rank in range(3):
            text = said[rank][name]
            assert text.startswith("ConfigError: ") and expected in text, (name, rank, text)
    assert "rank 1 failed before it joined the others" in said[0]["bad_block"]
    assert len({said[rank]["lr"] for rank in range(3)}) == 1


class Broken(dict[str, Any]):
    """A configuration that cannot be read."""

    def items(self) -> Any:
        raise KeyError("a secret of the script's")


def read_a_broken_one() -> str:
    config = config_of(block={"comm_timeout_s": 20, "stages": 2})
    model, make_batch = build("two_branch")
    if dist.get_rank() == 1:
        config["optimizer"] = Broken(config["optimizer"])
    return said_of(functools.partial(make_engine, model, make_batch(B, 0), config))


def test_what_fails_on_one_rank_before_it_has_joined_fails_on_all() -> None:
    first, second = run_kept_ranks(read_a_broken_one, 2)
    assert "a secret of the script's" in first and "rank 1 failed before it joined the others" in first, first
    assert second.startswith("KeyError"), second


def test_a_checksum_is_of_all_of_a_small_tensor_and_of_runs_of_a_large_one() -> None:
    small = torch.zeros(1000)
    other = small.clone()
    other[517] = 1e-30
    assert agreement.checksum(small) != agreement.checksum(other)
    large = torch.randn(3, agreement.SAMPLE)
    assert agreement.checksum(large) == agreement.checksum(large.clone())
    assert agreement.checksum(large) != agreement.checksum(large * 1.0001)
    ends = large.clone()
    ends[2, -1] += 1
    assert agreement.checksum(large) != agreement.checksum(ends)
    assert agreement.checksum(torch.empty(3, device="meta")) == "meta"
    assert agreement.checksum(large.t()) == agreement.checksum(large.t().contiguous())
    assert agreement.checksum(torch.tensor(True)) != agreement.checksum(torch.tensor(False))


def test_paths_of_a_rank_s_own_are_not_compared() -> None:
    config: dict[str, Any] = {
        "tensorboard": {"output_path": "/a"},
        "graph_pipeline": {"trace_path": "b", "seed": 1},
    }
    assert agreement.config_facts(config) == {"graph_pipeline.seed": "1"}


def test_an_optimizer_is_told_by_its_class_and_its_groups_options() -> None:
    layer = nn.Linear(2, 2)
    optimizers = [
        torch.optim.SGD([{"params": [layer.weight], "lr": 0.1}, {"params": [layer.bias], "lr": rate}], lr=0.3)
        for rate in (0.2, 0.25)
    ]
    facts = [agreement.recipe_facts(each, None, [1, 2]) for each in optimizers]
    assert {key for key in facts[0] if facts[0][key] != facts[1][key]} == {"param_groups[1]"}
    assert facts[0]["training_data="] == "list of 2 samples"


def test_what_explains_weights_is_named_before_them() -> None:
    told = [{"weight a": value, "zero": value, "x": value, "lr": value} for value in ("1", "2")]
    said = agreement.describe_differences(told)
    assert [part.split(" is ")[0] for part in said.split(": ")[1].split("; ")[:3]] == ["lr", "x", "zero"]
    assert "and 1 more keys" in said
    assert "seed all ranks alike" in said


def stage_of(weight: Tensor, *, tensor: int = 1, position: int = 0) -> Any:
    module = nn.Module()
    module.embed = nn.Parameter(weight)
    told = {
        "counters": StepCounters(global_steps=3),
        "loss_scale": 1.0,
        "tensor_position": position,
        "module": module,
    }
    return SimpleNamespace(stage=SimpleNamespace(tensor=tensor), **told)


def test_loaded_weights_are_compared_over_those_that_hold_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that tensor ranks share out has parts, whatever it is tied to."""
    told: list[Any] = []

    def exchange(make: Any, **_: Any) -> list[Any]:
        told.append(make())
        return told

    def compare(stage: Any) -> None:
        agreement.agree(loaded_facts([stage], "t"), what="", group=cast(Any, "all"), is_partial=True)

    monkeypatch.setattr(agreement, "exchange", exchange)
    whole = torch.arange(6.0)
    for weight, tensor, position in ((whole, 1, 0), (whole[:3], 2, 0), (whole[3:], 2, 1), (whole, 1, 0)):
        compare(stage_of(weight, tensor=tensor, position=position))
    for weight, tensor, at in ((whole + 1, 1, ""), (whole[3:], 2, " of tensor position 0")):
        with pytest.raises(ConfigError, match=f"weight embed{at} is float32") as refused:
            compare(stage_of(weight, tensor=tensor))
        assert is_shared(refused.value), "raised on every rank: none failed before the others"
        told.pop()


def test_what_is_frozen_and_what_a_value_says_are_facts_and_how_zero_is_written_is_none() -> None:
    layer = nn.Linear(2, 2)
    layer.bias.requires_grad_(False)
    layer.register_buffer("mean", torch.zeros(2))
    facts = agreement.model_facts(layer)
    assert {name for name, text in facts.items() if text.endswith(" frozen")} == {"weight bias"}
    assert {"weight weight", "weight mean"} <= facts.keys()
    told = [
        agreement.fingerprint_of(SimpleNamespace(a=a, b=(b,)))
        for a, b in ((0, 1.0), (0.0, 1), (0.5, 1), (10, 1))
    ]
    assert told[0] == told[1] and len(set(told)) == 3
