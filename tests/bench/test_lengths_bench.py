"""`gpp bench lengths`: lengths that are all new, texts of them, and what it says."""

from __future__ import annotations

import argparse

import pytest
import torch

from gpp_benchmarks import _lengths_ranks as ranks
from gpp_benchmarks import lengths
from gpp_plugin.errors import ConfigError


def test_lengths_are_all_new_as_long_as_there_are_some() -> None:
    drawn = ranks.drawn_lengths(20, shortest=5, longest=24)
    assert sorted(drawn) == list(range(5, 25))
    assert drawn == ranks.drawn_lengths(20, shortest=5, longest=24)
    assert len(ranks.drawn_lengths(7, shortest=5, longest=7)) == 7


def test_texts_are_cut_in_proportion() -> None:
    batch = {"ids": torch.ones(2, 16, dtype=torch.int64), "labels": torch.ones(2, 8, dtype=torch.int64)}
    short = ranks.cut({**batch, "pixels": torch.ones(2, 3)}, 12)
    assert [tuple(value.shape) for value in short.values()] == [(2, 12), (2, 6), (2, 3)]


def test_too_few_batches_are_refused() -> None:
    options = argparse.Namespace(models=["t5"], batches=7, ranks=1, layers=1, width=32)
    with pytest.raises(ConfigError, match="at least 8 batches"):
        lengths.run(options)
