"""Captured stages on tensor ranks: losses, gradients and files of one process, beside data-parallel ranks and stages."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations import captured_tensor_jobs as jobs
from tests.integrations.engine_jobs import B, U
from tests.models import build
from tests.ranks import run_kept_ranks
from tests.reference import ReferenceRun, gradient_errors, train_reference
from tests.tiers import some

CLIPPING = 0.5
FULL = {"recompute": "full"}
UNLIKE = {"stages": 2, "data_parallel": 1, "tensor_parallel": {"transformer.wte": 2, "transformer.h.0": 2}}
"""Both stages hold the embedding, one on two tensor ranks and one on a single one."""

LISTED = {"stages": 2, "tensor_parallel": {"transformer.h.0": 2}}
"""The embedding, or the head, goes with the layer; whichever does not has one rank."""

BRANCHES = {"stages": 2, "data_parallel": 1, "tensor_parallel": {"vision_model": 4, "text_model": 2}}


def _case(name: str, ranks: int, *, stages: int = 1, tensor: int = 2, zero: int = 0, clipping: float = 0.0,
          memory: dict[str, Any] | None = None, schedule: str = "auto") -> Any:  # fmt: skip
    block: dict[str, Any] = {"stages": stages, "tensor_parallel": tensor, "schedule": schedule}
    block["data_parallel"] = ranks // stages // tensor
    if memory:
        block["memory"] = memory
    return ranks, (name, block, {"zero": zero, "clipping": clipping})


ALL_CASES = {
    "llama": _case("llama", 2, zero=1, clipping=CLIPPING),
    "gpt2": _case("gpt2", 2, memory=FULL),
    "clip": _case("clip", 2),
    "llava": _case("llava", 2, zero=1),
    "t5": _case("t5", 2, clipping=CLIPPING),
    "llama, two data positions": _case("llama", 4, zero=1, clipping=CLIPPING, memory=FULL),
    "clip, two data positions": _case("clip", 4, zero=1),
    "gpt2, four tensor ranks": _case("gpt2", 4, tensor=4),
    "t5, two stages": _case("t5", 4, stages=2, clipping=CLIPPING),
    "llava, two stages": _case("llava", 4, stages=2, zero=1, memory=FULL),
    "llama, weights in parts twice": _case("llama", 4, zero=3, clipping=CLIPPING),
    "gpt2, backwards in two parts": _case("gpt2", 4, stages=2, schedule="zero_bubble"),
    "gpt2, one stage of two": (3, ("gpt2", UNLIKE, {"zero": 1, "clipping": CLIPPING})),
    "gpt2, one layer listed": (3, ("gpt2", LISTED, {"clipping": CLIPPING})),
    "clip, four tensor ranks": _case("clip", 4, tensor=4),
    "clip, four and two tensor ranks": (6, ("clip", BRANCHES, {"zero": 1, "clipping": 0.0})),
    "t5, four tensor ranks": _case("t5", 4, tensor=4, clipping=CLIPPING, memory=FULL),
    "gpt2, three stages": _case("gpt2", 6, stages=3, zero=1, clipping=CLIPPING),
}
CASES = dict(some(ALL_CASES.items(), every=6))


class ClippedAdamW(torch.optim.AdamW):
    """AdamW that clips as the engine does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, CLIPPING)
        return super().step(closure)


@functools.cache
def alone(name: str, clipping: float) -> ReferenceRun:
    model, make_batch = build(name, layers=1)
    make = ClippedAdamW if clipping else torch.optim.AdamW
    batches = [make_batch(B, seed) for seed in range(jobs.STEPS)]
    return train_reference(
        model, batches, unit=U, make_optimizer=lambda ps: make(ps, lr=1e-3, weight_decay=0.01)
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[str, list[dict[str, Any]]]:
    found = {}
    for ranks in (2, 3, 4, 6):
        own = {case: given for case, (on, given) in CASES.items() if on == ranks}
        directory = str(tmp_path_factory.mktemp(f"tensor{ranks}"))
        answers = run_kept_ranks(jobs.train_all, ranks, own, directory, timeout_s=600)
        found |= {case: [answer[case] for answer in answers] for case in own}
    return found


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_one_process(trained, case):
    _, (name, block, options) = CASES[case]
    reference = alone(name, options["clipping"])
    held: set[str] = set()
    assert any(answer["shards"] for answer in trained[case])
    for answer in trained[case]:
        assert max(answer["tensor"]) == (4 if "four" in case else 2)
        assert answer["losses"][0] == pytest.approx(reference.losses[0], rel=1e-6)
        assert answer["losses"] == pytest.approx(reference.losses, rel=1e-5)
        wanted = {
            n: jobs.part_of(reference.gradients[n], answer["shards"].get(n)) for n in answer["gradients"]
        }
        assert max(gradient_errors(answer["gradients"], wanted).values()) < 2e-6
        held |= set(answer["gradients"])
    assert held == set(reference.gradients)


@pytest.mark.parametrize("case", CASES)
def test_exports_are_the_trained_weights_whole(trained, case):
    for answer in trained[case]:
        exported: dict[str, Tensor] = answer["exported"]
        for name, own in answer["held"].items():
            whole = exported[name]
            assert torch.equal(own, jobs.part_of(whole, answer["shards"].get(name))), name
        if answer["gathered"] is not None:
            assert all(torch.equal(answer["gathered"][n], exported[n]) for n in exported)


@pytest.mark.parametrize("case", CASES)
def test_evaluation_is_the_same_on_all_ranks(trained, case):
    first, *others = (answer["evaluated"] for answer in trained[case])
    assert all(other == first for other in others)


SUMMED = [
    ("llama", 2, jobs.TWO),
    ("t5", 2, jobs.TWO),
    ("gpt2", 2, jobs.TWO),
    ("llava", 2, jobs.TWO),
    ("clip", 4, {"stages": 2, "data_parallel": 1, "tensor_parallel": 2}),
]


@pytest.mark.parametrize(("name", "ranks", "block"), SUMMED)
def test_bytes_that_are_summed_are_those_of_the_graph(name, ranks, block, tmp_path):
    for answer in run_kept_ranks(jobs.count_sums, ranks, name, block, str(tmp_path)):
        assert answer["forward"] == answer["planned forward"] > 0
        assert answer["backward"] == answer["planned backward"] > 0


def test_dropout_is_the_same_in_every_run(tmp_path):
    first, second = run_kept_ranks(jobs.drop, 2, str(tmp_path))
    assert first == second
    assert first["first"] == first["second"] == first["again"]


def test_mini_batches_of_several_lengths(tmp_path):
    first, second = run_kept_ranks(jobs.at_lengths, 2, str(tmp_path))
    model, make_batch = build("llama", layers=1)
    reference = train_reference(model, jobs.batches_of_lengths(make_batch), unit=U)
    assert first == second == pytest.approx(reference.losses, rel=1e-5)


def test_checkpoints_are_cut_anew_for_other_tensor_sizes(tmp_path):
    for answer in run_kept_ranks(jobs.go_on, 2, str(tmp_path)):
        assert answer["same"] == answer["first"]
        assert answer["whole"] == pytest.approx(answer["first"], rel=1e-5)
        assert answer["back"] == pytest.approx(answer["first"], rel=1e-5)


def test_evaluation_has_what_lies_inside_of_a_region_and_what_cannot_be_shared_out_is_refused(tmp_path):
    model, batch = jobs.Inside(), jobs.inside_batch()
    wanted = model(**batch)
    reference = train_reference(model, [batch] * 2, unit=U)
    for answer in run_kept_ranks(jobs.evaluate_inside, 2, str(tmp_path)):
        assert answer["held"]["pair.up.weight"] == (4, 6)
        assert answer["loss"] == pytest.approx(float(wanted["loss"]), rel=1e-6)
        assert torch.allclose(answer["inner"], wanted["inner"].detach(), rtol=1e-6)
        assert answer["trained"] == pytest.approx(reference.losses, rel=1e-5)
        assert "aten.cumsum.default" in answer["refused"] and "tensor_parallel" in answer["refused"]
