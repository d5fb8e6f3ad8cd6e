"""`gpp bench lengths`: units of any length and number of images."""

from __future__ import annotations

import pytest
import torch

from gpp_benchmarks import _lengths_models
from gpp_benchmarks._attention_models import Size


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
