"""`gpp bench balance`: what order and packing gain in the simulator."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import pytest

from gpp_benchmarks import balance


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
