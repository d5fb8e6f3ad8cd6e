"""ZeRO 3: ranks hold parts of their stages' parameters, gathered by the program; against one process and ZeRO 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations import sharded_jobs as jobs
from tests.integrations.engine_jobs import B, U
from tests.models import build
from tests.ranks import run_kept_ranks, run_ranks
from tests.reference import gradient_errors, train_reference
from tests.tiers import some

CASES = [(case, max(max(stage["ranks"]) for stage in jobs.PLACED[case][1]) + 1) for case in jobs.PLACED]


@pytest.mark.parametrize(("case", "num_ranks"), CASES)
def test_training_equals_one_process(case: str, num_ranks: int) -> None:
    answers = run_kept_ranks(jobs.train, num_ranks, case, 3, {})
    model, make_batch = build(jobs.PLACED[case][0])
    batches = [make_batch(B, seed) for seed in range(3)]
    reference = train_reference(model, batches, unit=U)
    is_clipped = "gradient_clipping" in jobs.PLACED[case][2]
    found = {name: gradient for answer in answers for name, gradient in answer["gradients"].items()}
    assert found.keys() == reference.gradients.keys()
    errors = gradient_errors(found, reference.gradients)
    assert max(errors.values()) < 2e-6, max(errors, key=errors.__getitem__)
    for answer in answers:
        compared = 1 if is_clipped else 3  # the reference does not clip
        assert answer["losses"][:compared] == pytest.approx(reference.losses[:compared], rel=1e-5)
        assert answer["shapes alone"]
        check_memory(answer)
    assert any(any(answer["sharded"]) for answer in answers)


def check_memory(answer: dict[str, Any]) -> None:
    """Hold what a rank has against its plan: parts between tasks, one stage whole while it runs."""
    memory, stages = answer["memory"], answer["stages"]
    parts = sum(stage.sharded_bytes // stage.degree for stage in stages)
    if not any(answer["sharded"]):
        assert not memory.held.gathered and not answer["gathers"]
        return
    assert memory.predicted.weights == pytest.approx(parts, abs=2)
    assert memory.held.weights == pytest.approx(parts, rel=0.02, abs=1024)
    largest = max(stage.gathered_bytes for stage in stages)
    assert memory.predicted.gathered == largest
    assert memory.held.gathered == pytest.approx(largest, rel=0.02, abs=1024)
    assert len(answer["gathers"]) == 1 if len(stages) == 1 else len(answer["gathers"]) > len(stages)


@pytest.mark.parametrize(("case", "num_ranks"), some(reversed(CASES), every=3))
def test_bf16_has_the_bits_of_zero_2(case: str, num_ranks: int) -> None:
    more = {"bf16": {"enabled": True}, "gradient_clipping": 0.1}
    twos, threes = (run_kept_ranks(jobs.train, num_ranks, case, zero, more) for zero in (2, 3))
    for two, three in zip(twos, threes, strict=True):
        for key in ("losses", "norms", "evaluated"):
            assert two[key] == three[key], key
        assert two["state"].keys() == three["state"].keys()
        assert all(torch.equal(value, three["state"][name]) for name, value in two["state"].items())


def test_overflow_skips_as_under_zero_2() -> None:
    twos, threes = (run_ranks(jobs.overflow, 2, zero) for zero in (2, 3))
    for two, three in zip(twos, threes, strict=True):
        assert 1 <= three["skipped"] < 12 and all(three["same"][: three["skipped"]])
        assert not three["same"][-1]
        assert (two["skipped"], two["scale"], two["same"]) == (
            three["skipped"],
            three["scale"],
            three["same"],
        )
        assert all(torch.equal(value, three["state"][name]) for name, value in two["state"].items())


def test_weights_are_there_for_whoever_needs_them(tmp_path: Path) -> None:
    answers = run_kept_ranks(jobs.use_weights, 2, str(tmp_path))
    for answer in answers:
        two, three = answer["2"], answer["3"]
        assert torch.equal(two["tokens"], three["tokens"])
        assert two["losses"] == three["losses"]
        assert "leave it before" in three["refusal"]
    two, three = answers[0]["2"]["whole"], answers[0]["3"]["whole"]
    assert two.keys() == three.keys() and all(torch.equal(two[name], three[name]) for name in two)
    model, _ = build("gpt2")
    exports = [type(model).from_pretrained(tmp_path / f"export{zero}").state_dict() for zero in (2, 3)]
    assert all(torch.equal(value, exports[1][name]) for name, value in exports[0].items())


def test_what_cannot_be_done_is_said() -> None:
    for said in run_kept_ranks(jobs.refusals, 2):
        assert "mode async" in said["async"] and "use stage 2" in said["async"]
        assert "graph_pipeline.backends" in said["backends"]
        assert "offload_param.device: 'cpu' is not supported" in said["offload"]
        assert "deepspeed.zero.Init" in said["in parts"]
        assert all("\n" not in line for line in said.values())
