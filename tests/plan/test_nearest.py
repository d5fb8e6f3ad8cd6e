"""How the nearest configuration that fits is told."""

import pytest

from gpp_plugin.plan.nearest import limit_gb


@pytest.mark.parametrize(
    ("num_bytes", "said"),
    [
        (477_600, "0.0004776"),
        (477_601, "0.0004777"),
        (12_345_400_000, "12.35"),
        (8_000_000_000, "8"),
        (80_000_000_001, "80.01"),
        (7, "0.000000007"),
        (9_999_900, "0.01"),
    ],
)
def test_the_limit_that_is_told_allows_the_bytes(num_bytes: int, said: str) -> None:
    assert limit_gb(num_bytes) == said
    assert round(float(said) * 1e9) >= num_bytes
