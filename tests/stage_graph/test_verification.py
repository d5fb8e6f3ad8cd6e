"""Before training, a capture is held against its module; one that is another model does not train."""

from __future__ import annotations

import copy
import random
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gpp_plugin.config.reader import read_config
from gpp_plugin.errors import CaptureError, ConfigError
from gpp_plugin.integrations.deepspeed.dispatch import setting_of
from gpp_plugin.ir.profile import BlockCost
from gpp_plugin.model import verification
from gpp_plugin.model.graph.graph_job import GraphJob
from gpp_plugin.model.graph.module_trial import Place
from gpp_plugin.model.graph.stage_graph import StageGraph
from gpp_plugin.model.model_source import ModelSource
from gpp_plugin.model.verification import StartUp, copy_model, verify_part
from tests.capture.graphs import Calls, compared
from tests.integrations.engine_jobs import B, config_of
from tests.models import build
from tests.ranks import run_kept_ranks
from tests.reference import loss_of
from tests.stage_graph import untrue_jobs
from tests.stage_graph.untrue_models import (
    Counting,
    Honest,
    Noisy,
    Reversed,
    Rounded,
    Scaled,
    Severed,
    make_batch,
)

CPU = torch.device("cpu")


def state_of(model: nn.Module) -> list[Any]:
    tensors = [t.detach().clone() for t in (*model.parameters(), *model.buffers())]
    return [*tensors, [p.grad for p in model.parameters()], model.training, torch.get_rng_state()]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("clip", "real"),
        ("llava", "real"),
        ("batch_norm_mlp", "real"),
        ("frozen_branch", "real"),
        ("whisper", "meta"),
        ("gpt2", "meta"),
        ("t5", "bfloat16"),
        ("batch_norm_mlp", "bfloat16"),
    ],
)
def test_a_capture_is_its_module(name: str, kind: str) -> None:
    model, batches = build(name, dropout=0.3, device="meta" if kind == "meta" else "cpu")
    batch = batches(4, 1)
    found = compared(model, batch, torch.bfloat16 if kind == "bfloat16" else None)
    assert found.differences == ()
    assert found.loss_error < 1e-6 and found.gradient_error < 2e-6
    plain, _ = build(name)
    loss_of(plain(**batch)).backward()
    assert found.num_gradients == sum(p.grad is not None for p in plain.parameters()) > 0


def test_draws_are_the_same_in_graph_and_module_and_nothing_else_changes() -> None:
    model = Noisy()
    batch = make_batch(4)
    before, outside = state_of(model), (random.getstate(), repr(np.random.get_state()))
    assert compared(model, batch).differences == ()
    after = state_of(model)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True) if isinstance(a, Tensor))
    assert before[-3:-1] == after[-3:-1]
    assert outside == (random.getstate(), repr(np.random.get_state()))


@pytest.mark.parametrize(
    ("make", "first", "number"),
    [
        (Scaled, "loss", 11),
        (Severed, "norm of the gradient of layers.0.weight", 8),
        (Reversed, "gradient of layers.0.weight[", 8),
        (Counting, "buffer mean[", 1),
    ],
)
def test_what_differs_is_named_with_both_values(make: type[Honest], first: str, number: int) -> None:
    torch.manual_seed(0)
    model, batch = make(), make_batch(4)
    differences = compared(model, batch).differences
    assert differences[0].what.startswith(first) and len(differences) == number
    gradient = differences[0]
    if make is Severed:
        assert np.isnan(gradient.graph) and gradient.module > 0 and gradient.error == float("inf")
    if make is Reversed:
        assert gradient.graph == pytest.approx(-gradient.module) and gradient.error == pytest.approx(2.0)
    if make is Scaled:
        assert gradient.module == pytest.approx(model(**batch)["loss"].item(), rel=1e-7)


def source_of(model: nn.Module | StageGraph, directory: Path, **block: Any) -> ModelSource:
    config = config_of(block={"verify": True, "stages": 2, "profile_dir": str(directory), **block})
    read = read_config(config)
    assert read is not None
    setting = setting_of(config, rank=0, num_ranks=2, device=CPU, group=None)
    return ModelSource(model, config=read, setting=setting)


@pytest.mark.parametrize("make", [Scaled, Severed, Reversed, Counting])
def test_another_model_is_refused_in_one_line_unless_it_is_not_verified(
    make: type[Honest], tmp_path: Path
) -> None:
    with pytest.raises(CaptureError) as caught:
        source_of(make(), tmp_path).prepare_plan(make_batch(B))
    text = str(caught.value)
    assert text.startswith(f"the capture of {make.__name__} is not the model: ") and "\n" not in text
    assert re.search(r"\S+ in the graph and \S+ in the module \(off by", text) and '"verify": false' in text
    source_of(make(), tmp_path, verify=False).prepare_plan(make_batch(B))


# ---- how much is compared -----------------------------------------------------------------------------------


def job_of(model: nn.Module | StageGraph, unit: int, dtype: torch.dtype = torch.float32) -> GraphJob:
    place = Place(rank=0, device=CPU, dtype=dtype, group=None)
    return GraphJob(model, make_batch(unit), place=place, num_ranks=1, loss_unit=unit, seed=0, timeout_s=60.0)


def verified(
    model: nn.Module, unit: int, us_per_sample: float, *, dtype: torch.dtype = torch.float32
) -> tuple[bool, str]:
    """Verify a model whose one block is said to take so long."""
    job = job_of(model, unit, dtype)
    (part,) = job.owns.values()
    assert isinstance(part, verification.CapturedPart)
    cost = BlockCost(
        block="all",
        samples=(1, unit),
        forward_us=(us_per_sample, unit * us_per_sample),
        backward_us=(0.0, 0.0),
    )
    start_up = StartUp(began=time.monotonic(), tracing_s=0.1, num_samples=unit)
    place = Place(rank=0, device=CPU, dtype=dtype, group=None)
    return verify_part(part, place, make_batch(unit), job._survey, [cost], start_up)


@pytest.mark.parametrize(
    ("us_per_sample", "what"),
    [
        (1e3, "at most; 64 samples)"),
        (1e4, "at most; 16 samples)"),
        (1e5, "at most; 2 samples)"),
        (2e5, "at most; 2 samples, 2 layers of each list)"),
    ],
)
def test_time_decides_on_how_much_is_compared(us_per_sample: float, what: str) -> None:
    is_verified, line = verified(Honest(), 64, us_per_sample)
    assert is_verified and what in line


def test_what_there_is_no_time_for_is_said() -> None:
    is_verified, line = verified(Honest(), 64, 1e7)
    assert not is_verified
    assert line.startswith(
        "not verified: Honest was not compared with its capture (64 samples: 1920.0 s of 1.0 s allowed"
    )
    assert "2 samples, 2 layers of each list: " in line and "\n" not in line


def test_memory_decides_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        verification, "_free_bytes", lambda device: 2500.0
    )  # of 291 + 24 parameters' gradients
    is_verified, line = verified(Honest(), 4, 1.0)
    assert is_verified and "2 samples, 2 layers of each list" in line
    with pytest.raises(CaptureError, match="gradient of layers.0.weight"):
        verified(Reversed(), 4, 1.0)


def test_a_module_that_does_not_run_is_said() -> None:
    class Broken(Honest):
        def change(self, hidden: Tensor) -> Tensor:
            if torch.compiler.is_exporting():
                return hidden
            raise ZeroDivisionError("not today\nnor tomorrow")

    is_verified, line = verified(Broken(), 4, 1.0)
    assert not is_verified and "ZeroDivisionError: not today" in line and "\n" not in line


def test_a_constant_rounded_in_half_precision_is_no_other_model() -> None:
    model = Rounded()
    batch = make_batch(4)
    assert compared(model, batch, torch.bfloat16).differences != ()
    is_verified, line = verified(model, 4, 1.0, dtype=torch.bfloat16)
    assert is_verified, line
    with pytest.raises(CaptureError):
        verified(Reversed(), 4, 1.0, dtype=torch.bfloat16)


# ---- parts of a graph ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ((), ""),
        (("tower",), "stage 'tower': the capture of Tower is not the model: gradient of layer.weight["),
        (("end",), "stage 'end': the capture of End is not the model: gradient of argument_hidden["),
    ],
)
def test_parts_are_verified_on_their_ranks_and_all_hear_of_it(wrong: tuple[str, ...], says: str) -> None:
    answers = run_kept_ranks(untrue_jobs.start_parts, 2, wrong, timeout_s=90)
    assert answers[0] == answers[1]
    assert says in answers[0] and bool(says) == bool(answers[0]), answers[0]


def metric(model: Any, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        return {"loss": nn.functional.cross_entropy(model.head(x), labels)}


def test_a_given_stage_whose_loss_needs_no_gradient_is_refused() -> None:
    graph = StageGraph()
    graph.stage(
        "own", Calls(metric, head=nn.Linear(8, 3)), inputs=["x", "labels"], outputs=["loss"], ranks=[0]
    )
    with pytest.raises(ConfigError, match="stage 'own': its loss own.loss needs no gradient"):
        job_of(graph, 4)


def test_the_twin_shares_parameters_and_keeps_ties() -> None:
    model, _ = build("t5")
    before = copy.deepcopy(model.state_dict())
    twin = copy_model(model, device=CPU)
    assert twin.lm_head.weight is twin.shared.weight  # type: ignore[union-attr]
    shared = [
        a.data_ptr() == b.data_ptr() for a, b in zip(twin.parameters(), model.parameters(), strict=True)
    ]
    assert all(shared)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    half = copy_model(model.bfloat16(), device=CPU, dtype=torch.float32)
    assert {p.dtype for p in half.parameters()} == {torch.float32}
