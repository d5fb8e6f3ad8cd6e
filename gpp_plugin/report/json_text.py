"""Results as JSON that every reader takes.

Source: this project
Tests: tests/report/test_printable.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Return JSON as its standard has it: a number that is not finite, which it cannot say, is null.

    >>> json_text({"loss_difference": float("inf"), "rows": (1, 2.5)})
    '{"loss_difference": null, "rows": [1, 2.5]}'
    """
    return json.dumps(_sayable(value), indent=indent, allow_nan=False)


def _sayable(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _sayable(item) for key, item in value.items()}
    return [_sayable(item) for item in value] if isinstance(value, list | tuple) else value
