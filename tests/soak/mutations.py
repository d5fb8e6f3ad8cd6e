"""Mutations of JSON: what a careless hand, another program or an attacker makes of a valid file."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

_DEEP = "@deep@"
"""Stands for a value that is nested too deeply to be written by `json`."""
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 64, 2**31, 2**62, 2**63, 10**30, -(10**12), 0.5, -0.5, 1e-300, 1e18, 1e300,
    float("nan"), float("inf"), float("-inf"), "", "0", "-1", "NaN", "auto", "*", "../../outside", "/dev/zero",
    "\x1b[2J", "a\0b", "\ud800", "x" * 20_000, "\u202e", [], {}, [0], [[]], {"": 0}, [None] * 2000,
    "__import__('os')", {"__class__": "os.system"}, _DEEP,
)  # fmt: skip


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of every value below ``value``."""
    found, open_ = [], [value]
    while open_:
        at = open_.pop()
        items = at.items() if isinstance(at, dict) else enumerate(at) if isinstance(at, list) else ()
        for key, item in items:
            found.append((at, key))
            open_.append(item)
    return found


def _delete(draw: random.Random, at: Any, key: Any) -> None:
    del at[key]


def _replace(draw: random.Random, at: Any, key: Any) -> None:
    at[key] = copy.deepcopy(draw.choice(ODD_VALUES))


def _scale(draw: random.Random, at: Any, key: Any) -> None:
    if isinstance(at[key], (int, float)):
        at[key] = at[key] * draw.choice((-1, 2, 3, 10, 1000, 10**6, 10**9, 0.5))
    else:
        _retype(draw, at, key)


def _shift(draw: random.Random, at: Any, key: Any) -> None:
    if isinstance(at[key], (int, float)):
        at[key] = at[key] + draw.choice((-2, -1, 1, 2, 100))
    else:
        _replace(draw, at, key)


def _retype(draw: random.Random, at: Any, key: Any) -> None:
    value = at[key]
    shown = value if isinstance(value, (int, float, str)) else 1
    at[key] = draw.choice((str(shown), [value], {"value": value}, None, True, [shown, shown], 0))


def _swap(draw: random.Random, at: Any, key: Any) -> None:
    other = draw.choice(list(at) if isinstance(at, dict) else range(len(at)))
    at[key], at[other] = at[other], at[key]


def _repeat(draw: random.Random, at: Any, key: Any) -> None:
    value = at[key]
    if isinstance(at, list):
        at.insert(key, copy.deepcopy(value))
    elif isinstance(value, list):
        at[key] = value * draw.choice((2, 3, 50))
    else:
        at[key] = [value, value]


def _rename(draw: random.Random, at: Any, key: Any) -> None:
    if isinstance(at, dict):
        at[draw.choice((key[:-1], key + "s", "_" + key, "", "\x1b[31m", key.upper(), "__proto__"))] = at.pop(
            key
        )
    else:
        _swap(draw, at, key)


def _take_from_elsewhere(draw: random.Random, at: Any, key: Any, root: Any) -> None:
    other, name = draw.choice(_places(root))
    at[key] = copy.deepcopy(other[name])


_WAYS: tuple[Callable[[random.Random, Any, Any], None], ...] = (
    _delete, _replace, _replace, _scale, _shift, _retype, _swap, _repeat, _rename,
)  # fmt: skip


def mutate(draw: random.Random, valid: Any, *, fixed: tuple[str, ...] = ()) -> bytes:
    """Return a file made of a valid one by one to three changes of its structure, or of its bytes.

    Args:
        fixed: top-level keys below which alone changes are made, where most changes of an envelope are refused alike.
    """
    value = copy.deepcopy(valid)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        kept = [key for key in fixed if key in value]  # a change before this one may have taken one away
        root = value[draw.choice(kept)] if kept and draw.random() < 0.9 else value
        places = _places(root)
        if not places:
            break
        at, key = draw.choice(places)
        if draw.random() < 0.1:
            _take_from_elsewhere(draw, at, key, root)
        else:
            draw.choice(_WAYS)(draw, at, key)
    depth = draw.choice((30, 100, 3000, 200_000))
    text = json.dumps(value).replace(json.dumps(_DEEP), "[" * depth + "]" * depth)
    if draw.random() < 0.08:
        text = _repeat_a_key(draw, text)
    content = text.encode("utf-8", "surrogatepass")
    return _spoil(draw, content) if draw.random() < 0.08 else content


def _repeat_a_key(draw: random.Random, text: str) -> str:
    colons = [i for i, char in enumerate(text) if char == "{"]
    at = draw.choice(colons) if colons else 0
    return f'{text[: at + 1]}"a": 1, "a": 2, {text[at + 1 :]}' if colons else text


def _spoil(draw: random.Random, content: bytes) -> bytes:
    at = draw.randrange(len(content) + 1)
    way = draw.randrange(5)
    if way == 0:
        return content[:at]
    if way == 1:
        return content[:at] + bytes([draw.randrange(256)]) + content[at + 1 :]
    if way == 2:
        return content[:at] + content[at // 2 : at] + content[at:]
    return (b"", b"\xff\xfe", b"null", b"[]", b"PK\x03\x04", b"\x80\x04\x95", b"//\n{}")[draw.randrange(7)]
