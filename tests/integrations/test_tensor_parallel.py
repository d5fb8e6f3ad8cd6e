"""Stages of data x tensor ranks on six gloo ranks: gradients, norm, steps and checkpoints of one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations import tensor_jobs as jobs
from tests.ranks import run_kept_ranks

STEPS = 4
TRAINED = [(case, zero) for case in jobs.CASES for zero in (0, 1, 2)]


def part_of(case: str, rank: int, stage: int, name: str, whole: Tensor) -> Tensor:
    own = jobs.make_plan(case).stages[stage]
    return jobs.own_part(name, whole, own.position(rank)[1], own.tensor)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> list[dict[tuple[str, int], dict[str, Any]]]:
    directory = str(tmp_path_factory.mktemp("tensor"))
    return run_kept_ranks(jobs.train, jobs.NUM_RANKS, TRAINED, directory, STEPS)


@functools.cache
def alone(case: str) -> tuple[list[float], list[float], list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Return losses, norms, first gradients and last parameters by stage of one process with plain torch."""
    modules = jobs.alone(case, torch.float32)
    parameters = list(dict.fromkeys(p for m in modules for p in m.parameters() if p.requires_grad))
    optimizer = torch.optim.SGD(parameters, lr=0.5, momentum=0.9)
    losses, norms, first = [], [], []
    for step in range(STEPS):
        loss = jobs.alone_loss(case, modules, jobs.make_batch(step, torch.float32))
        loss.backward()
        if not first:
            first = [{n: p.grad.clone() for n, p in m.named_parameters() if p.requires_grad} for m in modules]
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, 0.05).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, first, [dict(module.named_parameters()) for module in modules]


@pytest.mark.parametrize(("case", "zero"), TRAINED)
def test_norm_clipping_and_steps_are_those_of_one_process(trained, case, zero):
    losses, norms, gradients, parameters = alone(case)
    assert min(norms) > 0.05  # every step is clipped, so that a wrong norm shows in the parameters
    for rank, answer in enumerate(found[case, zero] for found in trained):
        stage = answer["stage"]
        assert answer["losses"] == pytest.approx(losses, rel=1e-5)
        assert answer["norms"] == pytest.approx(norms, rel=1e-5)
        assert answer["gradients"].keys() == gradients[stage].keys()
        for name, gradient in answer["gradients"].items():
            wanted = part_of(case, rank, stage, name, gradients[stage][name])
            assert float((gradient - wanted).norm()) <= 2e-6 * float(wanted.norm()), name
        for name, parameter in answer["parameters"].items():
            wanted = part_of(case, rank, stage, name, parameters[stage][name].detach())
            torch.testing.assert_close(parameter, wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("case", "zero"), TRAINED)
def test_what_tensor_ranks_hold_alike_stays_alike(trained, case, zero):
    plan = jobs.make_plan(case)
    for index, stage in enumerate(plan.stages):
        module = jobs.alone(case, torch.float32)[index]
        shards = {n for n, p in module.named_parameters() if getattr(p, "tensor_model_parallel", False)}
        for row in map(stage.tensor_ranks, range(stage.degree)):
            first, *others = (trained[rank][case, zero]["parameters"] for rank in row)
            for name in first.keys() - shards:
                assert all(torch.equal(first[name], other[name]) for other in others)


@pytest.mark.parametrize(("case", "zero"), TRAINED)
def test_training_goes_on_bit_for_bit_from_a_checkpoint(trained, case, zero):
    assert all(found[case, zero]["is_bitwise_after_reload"] for found in trained)
    files = trained[0][case, zero]["files"]
    sharded = ["01-loss"] if case == "grid" else ["01-first", "02-second"]
    models = [name for name in files if name.startswith("model-")]
    assert {f"model-{stage}-t{t}.safetensors" for stage in sharded for t in range(2)} <= set(models)
    assert len(models) == len(jobs.CASES[case]) + len(sharded)


def test_an_asynchronous_stage_counts_what_its_grid_holds_once():
    norms = run_kept_ranks(jobs.stage_norm, jobs.NUM_RANKS, "grid")
    for stage, module in zip(jobs.make_plan("grid").stages, jobs.alone("grid", torch.float32), strict=True):
        count = sum(p.numel() for p in module.parameters() if p.requires_grad)
        for rank in stage.ranks:  # every element is summed over the data positions
            assert norms[rank] == pytest.approx(stage.degree * count**0.5)


@pytest.mark.parametrize("zero", [0, 1])
def test_a_duplicate_with_unlike_gradients_is_refused_on_every_rank_before_it_steps(zero):
    for said in run_kept_ranks(jobs.forgotten, jobs.NUM_RANKS, zero):
        assert "stage 'first': the gradient of 'norm.weight' differs between tensor ranks" in said or (
            "stage 'second': the gradient of 'norm.weight' differs between tensor ranks" in said
        )
        assert "sequence_parallel = True" in said and "\n" not in said
