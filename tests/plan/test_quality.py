"""The searches against brute force, on a small sample (all of it: gpp bench plan-quality)."""

import pytest

from gpp_benchmarks.plan_quality import check_auto, check_series_parallel


@pytest.mark.parametrize("seed", range(40))
def test_the_dp_equals_brute_force_over_series_parallel_plans(seed):
    assert check_series_parallel(seed)["is_equal"]


@pytest.mark.parametrize("seed", range(10))
def test_auto_equals_brute_force_over_all_partitions(seed):
    row = check_auto(seed)
    assert (row["us"] is None) == (row["best_us"] is None)
    if row["us"] is not None:
        assert row["us"] <= row["best_us"] * (1 + 1e-6)
