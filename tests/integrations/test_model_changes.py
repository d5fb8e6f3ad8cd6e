"""Modes, writes, flags, attributes and hooks of the user's model: honoured as in one process, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integrations import change_jobs
from tests.ranks import run_kept_ranks

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "ZeRO 1": {"zero_optimization": {"stage": 1}},
    "ZeRO 3": {"zero_optimization": {"stage": 3}},
    "bf16": {"bf16": {"enabled": True}},
    "bf16, ZeRO 2": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}},
}


@pytest.mark.parametrize("name", PRECISIONS)
def test_changes_between_steps_are_those_of_one_process(name: str) -> None:
    first, second = run_kept_ranks(_change_between_steps, 2, PRECISIONS[name])
    tolerance = 3e-2 if "bf16" in name else 1e-5
    assert first["losses"] == second["losses"] == pytest.approx(first["wanted"], rel=tolerance)
    for key, tensor in first["state"].items():
        found = first["weights"][key].to(tensor.dtype)
        assert torch.allclose(found, tensor, rtol=tolerance, atol=tolerance), key


def _change_between_steps(config: dict[str, Any]) -> dict[str, Any]:
    answer = change_jobs.change_between_steps(**config)
    del answer["engine"]
    return answer


def test_what_is_written_to_parameters_in_parts_is_taken_or_refused_by_name() -> None:
    first, second = run_kept_ranks(change_jobs.change_what_is_in_parts, 2)
    assert first["losses"] == second["losses"] == pytest.approx(first["wanted"], rel=3e-2)
    found, wanted = (float(first[key]["logit_scale"]) for key in ("weights", "state"))
    assert found == pytest.approx(wanted, rel=1e-2)
    for told in (first["told"], second["told"]):
        for name in ("head.weight", "tower.0.bias"):
            assert f"{name} was written to" in told[name], told[name]
    expected = 0.5 * first["before"]["head.weight"]
    assert torch.equal(first["told"]["head.weight as advised"]["head.weight"], expected)


def test_modes_that_were_set_before_the_start_stay() -> None:
    first, _ = run_kept_ranks(change_jobs.modes_before_start, 2)
    assert first["losses"] == pytest.approx(first["wanted"], rel=1e-5)
    assert first["modes"] == first["were"]
    for key, tensor in first["state"].items():
        assert torch.allclose(first["weights"][key], tensor, atol=1e-5), key


def test_what_cannot_be_followed_is_refused_by_name_until_it_is_undone() -> None:
    for told in run_kept_ranks(change_jobs.refusals, 2):
        assert "beta is 5.0, and was 1.0" in told["attribute"]
        assert "tower.2.p is 0.5, and was 0.0" in told["dropout"]
        assert "tower.1 is in eval mode" in told["mode"] and "tower.1.train()" in told["mode"]
        assert "hooks on tower.0" in told["hook"] and "handle.remove()" in told["hook"]
        thawed = (
            "head.bias takes a gradient now" if "rank" in told else "rank 1 could not take its mini-batch"
        )
        assert thawed in told["thawed"]
        assert "before deepspeed.initialize" in told["shell"]
        assert "before deepspeed.initialize" in told["engine"]


def test_hooks_that_were_there_before_are_called() -> None:
    ranks = run_kept_ranks(change_jobs.hooks_before_start, 2)
    owner = ranks[0]
    assert owner["loss"] == pytest.approx(owner["wanted"], rel=1e-5)
    assert owner["calls"] == {"forward": 1, "backward": 1}
    assert owner["at start"]["forward"] < 10, "not while it is timed"
    for name, tensor in owner["should"].items():
        assert torch.allclose(owner["last"][name], tensor, atol=1e-6), name


def test_hooks_that_add_up_and_numbers_without_an_axis_train_over_several_units() -> None:
    ranks = run_kept_ranks(change_jobs.two_units, 2)
    for rank in ranks:
        assert (
            '"units": 2' in rank["told"]["axis"]
            and "'tau' is a tensor without an axis" in rank["told"]["axis"]
        )
    assert "tower.weight has a hook" in ranks[0]["told"]["clamp"] and "clamp" in ranks[1]["told"]
    first = ranks[0]
    assert first["losses"] == pytest.approx(first["wanted"], rel=1e-5)
    for key, tensor in first["state"].items():
        assert torch.allclose(first["weights"][key], tensor, atol=1e-6), key
