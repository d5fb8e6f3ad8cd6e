"""Units filled to a budget: every sample once, whole mini-batches, the same everywhere, resumable."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from gpp_plugin.data import pack
from gpp_plugin.errors import CheckpointError, ConfigError


def lengths(count: int, seed: int = 0) -> np.ndarray:
    """Return token counts as texts have them: log-normal from 32 to 4,096."""
    generator = np.random.default_rng(seed)
    return np.clip(np.exp(generator.normal(5.5, 1.0, count)), 32, 4096).astype(int)


@pytest.mark.parametrize("is_padded", [True, False])
@pytest.mark.parametrize(("count", "units"), [(1000, 8), (203, 4), (5, 5), (7, 4), (64, 1)])
def test_every_sample_is_in_one_unit_an_epoch_and_mini_batches_are_whole(
    count: int, units: int, is_padded: bool
) -> None:
    packing = pack(range(count), cost=lengths(count), budget=8192, units=units, is_padded=is_padded)
    for epoch in range(3):
        found = packing.epoch_units(epoch)
        assert sorted(sample for unit in found for sample in unit) == list(range(count))
        assert len(found) % units == 0
        assert all(found)
    assert packing.epoch_units(0) != packing.epoch_units(1)
    assert packing.report().over_budget == 0


def test_units_stay_below_each_budget() -> None:
    tokens, patches = lengths(500), lengths(500, seed=1) // 8
    packing = pack(
        range(500),
        cost=np.stack([tokens, patches], axis=1),
        budget=(8192, 1024),
        units=4,
        is_padded=False,
    )
    for unit in packing.epoch_units(0):
        assert tokens[unit].sum() <= 8192
        assert patches[unit].sum() <= 1024
    padded = pack(range(500), cost=tokens, budget=8192, units=4)
    assert all(tokens[unit].max() * len(unit) <= 8192 for unit in padded.epoch_units(0))


def test_units_are_better_filled_and_balanced_than_units_of_equal_counts() -> None:
    costs = lengths(4000)
    order = np.random.default_rng(0).permutation(4000)
    equal = costs[order].reshape(-1, 8, 20)  # mini-batches of 8 units of 20 samples
    by_count = equal.max(axis=2) * 20
    wasted = 1 - equal.sum() / by_count.sum()
    report = pack(range(4000), cost=costs, budget=8192, units=8).report()
    assert report.padding < wasted / 3
    assert report.fill > 0.85
    assert report.imbalance < (by_count.max(axis=1) / by_count.mean(axis=1)).mean() - 0.2
    summed = pack(range(4000), cost=costs, budget=8192, units=8, is_padded=False).report()
    assert summed.imbalance < 1.05
    assert summed.padding == 0


def test_two_ranks_derive_the_same_and_a_resumed_one_goes_on_in_the_middle() -> None:
    first, second = (pack(range(203), cost=lengths(203), budget=8192, units=4, seed=3) for _ in range(2))
    whole = [unit for _ in range(3) for unit in first]
    assert whole == [unit for _ in range(3) for unit in second]
    resumed = pack(range(203), cost=lengths(203), budget=8192, units=4, seed=3)
    stream = iter(resumed)
    taken = list(islice(stream, 8))
    again = pack(range(203), cost=lengths(203), budget=8192, units=4, seed=3)
    again.load_state_dict(resumed.state_dict())
    assert taken + [unit for _ in range(3) for unit in again] == whole
    # a loader took units ahead: only two mini-batches were trained
    again.load_state_dict(first.state_dict(mini_batches=2))
    assert [unit for _ in range(3) for unit in again] == whole[8:]
    in_second = first.state_dict(mini_batches=len(first.epoch_units(0)) // 4 + 1)
    assert (in_second["epoch"], in_second["position"]) == (1, 4)


def test_costs_by_the_length_of_entries_or_by_a_function() -> None:
    samples = [{"ids": [0] * n, "patches": [0] * (20 - n)} for n in range(1, 20)]
    by_name = pack(samples, cost="ids", budget=40, units=2)
    by_call = pack(samples, cost=lambda sample: len(sample["ids"]), budget=40, units=2)
    assert by_name.epoch_units(0) == by_call.epoch_units(0)
    both = pack(samples, cost=("ids", "patches"), budget=(40, 40), units=2)
    for unit in both.epoch_units(0):
        assert max(len(samples[i]["patches"]) for i in unit) * len(unit) <= 40
    free = pack(samples, cost=[0] * 19, budget=1, units=3, is_padded=False)
    assert all(free.epoch_units(0))


def test_what_cannot_be_packed_is_refused_in_one_line() -> None:
    for match, given in {
        "sample 2 costs": {"cost": [1, 2, 50, 3], "budget": 10, "units": 2},
        "4 samples do not make": {"cost": [1, 2, 5, 3], "budget": 10, "units": 8},
        "3 costs for 4 samples": {"cost": [1, 2, 3], "budget": 10, "units": 2},
        "for 1 costs a sample": {"cost": [1, 2, 3, 4], "budget": (10, 10), "units": 2},
    }.items():
        with pytest.raises(ConfigError, match=match) as caught:
            pack(range(4), **given)
        assert "\n" not in str(caught.value)
    packing = pack(range(4), cost=[1, 2, 3, 4], budget=10, units=2)
    other = pack(range(4), cost=[1, 2, 3, 5], budget=10, units=2)
    with pytest.raises(CheckpointError, match="is of other samples"):
        packing.load_state_dict(other.state_dict())
