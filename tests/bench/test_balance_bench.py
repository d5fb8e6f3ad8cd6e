"""`gpp bench balance`: what order and packing gain in the simulator, and that rounds have times of their own."""

import argparse
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpp_benchmarks import balance
from gpp_plugin.compare import contests
from gpp_plugin.ir.schedule import Task, TaskKind
from gpp_plugin.schedule.durations import duration_reader


def rows(**options: Any) -> dict[tuple[str, str, str], dict[str, Any]]:
    defaults: dict[str, Any] = {
        "units": 16,
        "mini_batches": 24,
        "scale_time": 1.0,
        "seed": 0,
        "real_time": False,
    }
    found = balance.run(argparse.Namespace(**{**defaults, **options}))["rows"]
    return {(row["samples"], row["units"], row["order"]): row for row in found}


@pytest.mark.parametrize("ranks", [4, 8])
def test_balanced_units_are_a_fifth_faster(ranks: int) -> None:
    found = rows(ranks=ranks, simulate=True)
    gain = {key: row["simulated_gain"] for key, row in found.items()}
    for samples in ("mix", "4 times"):
        assert gain[samples, "as they come", "given"] == 1
        assert gain[samples, "as they come", "balanced"] > 1.2
        assert gain[samples, "packed", "balanced"] >= gain[samples, "packed", "given"] > 1.1
    assert gain["mix", "packed", "balanced"] > 1.5


def test_the_mix_is_the_stated_one() -> None:
    samples = balance.mix(20_000, 0)
    share = [float((samples.images == 0).mean()), float((samples.images == 1).mean())]
    assert share == pytest.approx([0.3, 0.4], abs=0.02)
    assert set(samples.images) == set(range(9))
    texts = samples.tokens - balance.IMAGE_TOKENS * samples.images
    assert (texts.min(), texts.max()) == (32, 4096)
    assert np.median(texts) == pytest.approx(362, rel=0.05)
    texts_alone = balance.unit_factors(samples, [np.flatnonzero(samples.images == 0)[:4].tolist()], 2)
    assert texts_alone[0, 0] == 0, "no tower there"
    assert texts_alone[0, 1] > 0


def test_every_sample_is_in_one_unit() -> None:
    samples = balance.mix(192, 1)
    for is_packed in (False, True):
        batches = balance.unit_lists(samples, units=8, is_packed=is_packed, seed=0)
        assert all(len(units) == 8 for units in batches)
        assert sorted(n for units in batches for unit in units for n in unit) == list(range(192))


def test_each_round_has_the_times_of_its_own_mini_batch() -> None:
    samples = balance.mix(16, 0)
    plan = balance.make_plan(samples, ranks=4, units=4, scale=1.0)
    (units,) = balance.unit_lists(samples, units=4, is_packed=False, seed=0)
    factors = balance.unit_factors(samples, units, 2)
    epoch = [balance.task_times(plan, factors, order) for order in ((0, 1, 2, 3), (3, 1, 0, 2))]
    # ranks are told in JSON, and read one after the other: the first in rounds that warm up as well
    read = [contests._read(json.loads(json.dumps(contests._listed(times)))) for times in epoch]
    assert read == epoch
    durations, seen = dict(read[0]), []
    run = duration_reader(plan, durations)
    task = Task(stage=1, kind=TaskKind.BACKWARD, micro_batch=1, half=None)
    rank = SimpleNamespace(
        iterate=lambda: seen.append(run(task, 3))
    )  # of stage 1 the second one: unit 3, then 2
    iterate = contests._taking_turns(rank, durations, read)
    for _ in range(contests.WARM_UP + 3):
        iterate()
    last, third = (2 * balance.FORWARD_US * factors[unit, 1] for unit in (3, 2))
    assert seen == pytest.approx([last, last, last, third, last])
