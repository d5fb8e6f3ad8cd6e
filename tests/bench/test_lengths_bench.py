"""`gpp bench lengths`: lengths that are all new, texts of them, and what it says."""

import argparse

import pytest
import torch

from gpp_benchmarks import _lengths_models, lengths
from gpp_benchmarks import _lengths_ranks as ranks
from gpp_benchmarks._attention_models import Size
from gpp_plugin.errors import ConfigError


def test_lengths_are_all_new_as_long_as_there_are_some() -> None:
    drawn = ranks.drawn_lengths(20, shortest=5, longest=24)
    assert sorted(drawn) == list(range(5, 25))
    assert drawn == ranks.drawn_lengths(20, shortest=5, longest=24)
    assert len(ranks.drawn_lengths(7, shortest=5, longest=7)) == 7


def test_texts_are_cut_in_proportion() -> None:
    batch = {"ids": torch.ones(2, 16, dtype=torch.int64), "labels": torch.ones(2, 8, dtype=torch.int64)}
    short = _lengths_models.cut({**batch, "pixels": torch.ones(2, 3)}, 12)
    assert [tuple(value.shape) for value in short.values()] == [(2, 12), (2, 6), (2, 3)]


def test_units_of_a_mini_batch_differ() -> None:
    drawn = ranks.drawn_shapes(12, units=4, shortest=5, longest=30, most_images=3)
    assert [len(units) for units in drawn] == [4] * 12
    assert all(len({length for length, _ in units}) == 4 for units in drawn[:6]), (
        "until all lengths were there"
    )
    assert {images for units in drawn for _, images in units} == {1, 2, 3}
    assert drawn == ranks.drawn_shapes(12, units=4, shortest=5, longest=30, most_images=3)


@pytest.mark.parametrize("name", sorted(_lengths_models.FAMILIES))
def test_units_have_a_loss_at_any_length_and_number_of_images(name: str) -> None:
    most = _lengths_models.FAMILIES[name].most_images
    model, unit = _lengths_models.build(name, Size(width=32, layers=1, length=128, samples=2))
    for length, images in ((128, most), (64, min(most, 1))):
        made = unit(length, images)
        assert (
            max(value.shape[1] for value in made.values() if value.ndim == 2 and value.dtype == torch.int64)
            == length
        )
        with torch.no_grad():
            assert float(model(**made).loss) > 0


def test_odd_options_are_refused() -> None:
    options = argparse.Namespace(models=["t5"], batches=7, ranks=1, layers=1, width=32, longest=256)
    with pytest.raises(ConfigError, match="at least 8 batches"):
        lengths.run(options)
    with pytest.raises(ConfigError, match="texts of at least 128"):
        lengths.run(argparse.Namespace(**{**vars(options), "batches": 8, "longest": 100}))
