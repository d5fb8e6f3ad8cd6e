"""Stages of a stage graph that swap or run again as a whole: bit-equal, statistics updated once, what is held falls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.plan import MemoryPlan, RecomputedSegment, SwappedTensor
from gpp_plugin.runtime.memory.activation_policy import RunAgain
from gpp_plugin.runtime.stage_module import StageFunction
from tests.ranks import run_kept_ranks
from tests.stage_graph import recompute_jobs

NUM_RANKS = 4


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    return run_kept_ranks(recompute_jobs.train_variants, NUM_RANKS)


@pytest.mark.parametrize(
    ("plain", "way"),
    [
        ("plain", "full"),
        ("plain", "auto"),
        ("plain", "swap"),
        ("split_plain", "split"),
        ("seeded_plain", "seeded"),
        ("async_plain", "async_full"),
        ("async_plain", "async_swap"),
    ],
)
def test_weights_buffers_and_random_state_are_bit_equal(
    answers: list[dict[str, Any]], plain: str, way: str
) -> None:
    for rank in answers:
        assert rank[way]["losses"] == rank[plain]["losses"]
        assert rank[way]["tensors"].keys() == rank[plain]["tensors"].keys()
        for name, tensor in rank[plain]["tensors"].items():
            assert torch.equal(rank[way]["tensors"][name], tensor), name
        assert torch.equal(rank[way]["drawn"], rank[plain]["drawn"])
        assert "deep" in rank[way]["optimized"]
        assert rank[plain]["optimized"] == []
        assert rank[way]["differences"] == (), "what is counted is what is planned"


def test_statistics_are_updated_once_a_micro_batch(answers: list[dict[str, Any]]) -> None:
    tensors = answers[1]["full"]["tensors"]
    micro_batches = 2 * recompute_jobs.ROWS // 4
    assert int(tensors["deep.norm.num_batches_tracked"]) == micro_batches
    assert float(tensors["deep.calls"]) == pytest.approx(1.25**micro_batches)


def test_counted_bytes_fall_to_what_is_planned(answers: list[dict[str, Any]]) -> None:
    full, plain = answers[1]["full"], answers[1]["plain"]
    assert full["differences"] == plain["differences"] == ()
    (segment,) = full["memory"].recomputed
    assert segment.blocks == ("deep",)
    counted, before = full["counts"][1], plain["counts"][1]
    assert counted["recomputed_bytes"] == segment.bytes
    assert counted["held_bytes"] == before["held_bytes"] - segment.bytes + segment.held_bytes
    assert counted["peak_held_bytes"] == full["predicted"][1] == counted["held_bytes"] * full["in_flight"]
    assert counted["working_bytes"] == segment.bytes
    assert before["recomputed_bytes"] == 0


@pytest.mark.parametrize(("plain", "way"), [("plain", "swap"), ("async_plain", "async_swap")])
def test_counted_bytes_leave_as_planned(answers: list[dict[str, Any]], plain: str, way: str) -> None:
    swap, before = answers[1][way], answers[1][plain]
    assert swap["memory"].swapped and not swap["memory"].recomputed
    counted = swap["counts"][1]
    assert counted["swapped_bytes"] == sum(tensor.bytes for tensor in swap["memory"].swapped)
    assert counted["held_bytes"] == before["counts"][1]["held_bytes"] - counted["swapped_bytes"]
    assert counted["peak_held_bytes"] == swap["predicted"][1] < before["predicted"][1]
    assert 0 < counted["working_bytes"] <= swap["memory"].working_bytes


def test_auto_recomputes_only_what_does_not_fit(answers: list[dict[str, Any]]) -> None:
    assert answers[0]["auto"]["optimized"] == ["deep"]
    assert answers[1]["auto"]["memory"].recomputed
    assert "stage 'deep' needs" in answers[0]["refused"]


def test_loss_stage_gains_nothing(answers: list[dict[str, Any]]) -> None:
    assert answers[3]["full"]["in_flight"] == 1
    assert "end" not in answers[3]["full"]["optimized"]


@pytest.mark.parametrize("swaps", [True, False])
def test_nothing_but_the_whole_stage(swaps: bool) -> None:
    segment = RecomputedSegment(blocks=("other",), tensors=(), bytes=8, held_bytes=0, recompute_us=1.0)
    plan = MemoryPlan(
        swapped=(SwappedTensor(name="t", bytes=8, free_us=0.0),) if swaps else (),
        recomputed=() if swaps else (segment,),
    )
    module = torch.nn.Linear(2, 2)
    function = StageFunction(
        call=lambda *given: given, tensors=(), constants=(), batch_inputs=(), received=(), outputs=(), code="",
        given=module,
    )  # fmt: skip
    with pytest.raises(PlanError, match="stage 'deep' runs the user's own module as it is"):
        RunAgain("deep", plan, ("deep",), function, torch.device("cpu"))
