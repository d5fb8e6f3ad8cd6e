"""What of a long table `make test` runs, and what it leaves to `make soak ARGS=tables`.

A table is thinned by `some`, a test that has no short form is marked `long`. Both run whole where the variable
GPP_LONG_TESTS is 1, which `make soak ARGS=tables` sets.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

import pytest

IS_LONG = os.environ.get("GPP_LONG_TESTS") == "1"
long = pytest.mark.long
Case = TypeVar("Case")


def some(cases: Iterable[Case], *, every: int) -> list[Case]:
    """Return one case of ``every`` so many, the first included; all of them in the long run."""
    return list(cases)[:: 1 if IS_LONG else every]
