"""Polynomials in lengths: exact through bytes, without negative coefficients through times."""

from __future__ import annotations

import pytest

from gpp_plugin.ir.size_formulas import products, terms_of, value_of
from gpp_plugin.model.measure_lengths import exact_fit, fit_points, nonnegative_fit, range_of


@pytest.mark.parametrize(
    ("lows", "highs"), [([256], [512]), ([64, 16], [128, 48]), ([8, 8, 8], [24, 40, 16])]
)
def test_bytes_at_any_lengths_are_those_of_the_polynomial_they_are(lows: list[int], highs: list[int]) -> None:
    points, checked = fit_points(lows, highs)
    terms = terms_of(len(lows))
    assert len(points) == len(terms) and checked not in points
    known = [float(7 * i * i - 3) for i in range(len(terms))]  # negative ones too

    def num_bytes(lengths: tuple[int, ...]) -> float:
        return value_of(tuple(known), products(lengths, terms))

    found = exact_fit(points, [num_bytes(point) for point in points])
    for lengths in (checked, tuple(9 * high for high in highs)):
        assert value_of(found, products(lengths, terms)) == pytest.approx(num_bytes(lengths), rel=1e-9)


def test_times_never_fall_with_the_length_whatever_the_noise() -> None:
    points, _ = fit_points([100], [400])
    (quick,) = {nonnegative_fit(points, [105.0, 100.0, 103.0], of=[0])}
    assert min(quick) >= 0.0
    assert value_of(quick, products((250,), terms_of(1))) == pytest.approx(102.6, rel=0.01)
    linear = nonnegative_fit(points, [10.0, 25.0, 40.0], of=[0])
    assert linear == pytest.approx((0.0, 0.1, 0.0), abs=1e-6)


def test_times_depend_on_the_lengths_that_are_named_alone() -> None:
    points, _ = fit_points([10, 10], [40, 40])
    values = [10.0 + length + 0.3 * other for length, other in points]
    found = nonnegative_fit(points, values, of=[0])
    assert [c > 0 for c, term in zip(found, terms_of(2), strict=True) if term[1]] == [False] * 3
    assert value_of(found, products((40, 10), terms_of(2))) == pytest.approx(55, rel=0.05)
    both = nonnegative_fit(points, values, of=[0, 1])
    assert value_of(both, products((25, 33), terms_of(2))) == pytest.approx(44.9, rel=1e-6)


def test_typical_lengths_that_are_alike_are_measured_down_to_half_of_them() -> None:
    assert range_of([512, 1024], 4096) == (512, 1024)
    assert range_of([512], 4096) == (256, 512)
    assert range_of([500, 512], 4096) == (256, 512)
    assert range_of([6], 64) == (4, 12)
    low, high = range_of([2], 2)
    assert low <= high <= 2
