"""Mini-batches of units of unlike lengths and numbers of samples equal one process that runs them one by one."""

from typing import Any

import pytest

from tests.integrations import unit_jobs as jobs
from tests.ranks import run_kept_ranks


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
