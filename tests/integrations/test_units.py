"""Mini-batches of units of unlike lengths and numbers of samples equal one process that runs them one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations import unit_jobs as jobs
from tests.ranks import run_kept_ranks


@pytest.mark.parametrize(
    ("name", "ranks", "zero", "block", "loss_mean"),
    [
        (
            "gpt2",
            3,
            0,
            {"stages": 3, "schedule": "greedy", "memory": {"recompute": "full"}, "unit_order": "given"},
            "tokens",
        ),
        ("t5", 3, 0, {"data_parallel": 1}, "units"),
        ("t5", 4, 1, {"stages": 2, "data_parallel": 2, "schedule": "zero_bubble"}, "units"),
        ("llava", 2, 0, {"data_parallel": 2}, "tokens"),
        ("llava", 3, 1, {"data_parallel": 1, "schedule": "gpipe"}, "tokens"),
    ],
)
def test_losses_and_gradients_equal_one_process(
    name: str, ranks: int, zero: int, block: dict[str, Any], loss_mean: str
) -> None:
    for answer in run_kept_ranks(jobs.train_units, ranks, name, zero, block, loss_mean):
        assert answer["losses"] == pytest.approx(answer["wanted"], rel=1e-6)
        assert answer["errors"]
        assert max(answer["errors"].values()) < 2e-6
        assert answer["evaluated"] == pytest.approx(answer["wanted_evaluated"], rel=2e-6)
        assert answer["logits"] and all(apart < 1e-5 for apart in answer["logits"])
        assert answer["left"] == 0, "a mini-batch is as many items as there are units"
        assert any(answer["recomputed"]) == ("memory" in block)
        if block.get("unit_order") == "given":
            assert answer["orders"] == [None] * 3
        else:
            assert any(order != (0, 1, 2, 3) for order in answer["orders"]), "units are moved in some step"
            assert all(sorted(order) == [0, 1, 2, 3] for order in answer["orders"])


@pytest.fixture(scope="module")
def of_counts() -> list[dict[str, Any]]:
    """Return what each rank found of mini-batches of other numbers of samples and lengths each."""
    return run_kept_ranks(jobs.train_counts, 2, [(2, 3, 5), (7, 2, 6), (3, 8, 11)])


def test_units_of_any_number_of_samples_equal_one_process(of_counts: list[dict[str, Any]]) -> None:
    for answer in of_counts:
        assert answer["losses"] == pytest.approx(answer["wanted"], rel=1e-6)
        assert answer["errors"]
        assert max(answer["errors"].values()) < 2e-6


def test_units_of_any_number_of_samples_share_one_capture(of_counts: list[dict[str, Any]]) -> None:
    for answer in of_counts:
        assert answer["exports"] == (2, 0), (
            "the second number of samples by itself, the third and all others by symbols"
        )


@pytest.mark.parametrize(("ranks", "block", "workers"), [(3, {"stages": 3}, 0), (2, {"data_parallel": 2}, 0)])
def test_packed_units_of_the_engines_own_loader_equal_one_process(
    ranks: int, block: dict[str, Any], workers: int
) -> None:
    answers = run_kept_ranks(jobs.train_packed, ranks, block, workers, "tokens")
    for answer in answers:
        assert answer["losses"] == pytest.approx(answer["wanted"], rel=1e-6)
        assert max(answer["errors"].values()) < 2e-6
        assert answer["shapes"] > 3
    assert all(answer["reads"] for answer in answers) == (ranks == 2)


def test_a_resumed_job_goes_on_with_the_units_that_were_left(tmp_path: Path) -> None:
    for answer in run_kept_ranks(jobs.resume_units, 4, str(tmp_path), {"stages": 2, "data_parallel": 2}):
        assert answer["resumed"] == answer["losses"][1:]


def test_mistakes_are_refused_in_one_line_and_training_goes_on() -> None:
    for said in run_kept_ranks(jobs.refuse_units, 2):
        assert not any("\n" in line for line in said.values())
        for case, words in {
            "sizes": "micro_batch_sizes: 2 is not possible with graph_pipeline.units",
            "slicing": 'slicing: "on" is not possible',
            "async": 'mode: "async" is not possible',
            "transport": 'p2p: "megatron" is not possible',
            "stock": "runs micro-batches of one shape",
            "batch size": "7 is not graph_pipeline.units=4 times",
            "no size": "train_micro_batch_size_per_gpu: missing",
            "early": "ended after 3 of graph_pipeline.units=4 items",
            "keys": "lacks ['labels']",
            "rows": "'labels': 2} are not multiples of 3 samples",
            "packing": "packs mini-batches of 2 units, and graph_pipeline.units is 4",
            "trains": "nothing",
        }.items():
            assert words in said[case], (case, said[case])


def test_a_unit_that_one_rank_has_no_code_for_is_refused_by_all_before_it_runs() -> None:
    answers = run_kept_ranks(jobs.refuse_a_shape, 2)
    assert answers[0] == answers[1]
    assert len(answers[0]["said"]) == 2
    assert all("the graph changed with the input shapes" in line for line in answers[0]["said"])
