"""What is wrong with a ``graph_pipeline`` block: one line for each key, with its value and what to write instead."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from gpp_plugin.config.block import (
    A_PLANNER,
    A_SCHEDULE,
    A_TRANSPORT,
    BLOCK,
    SOME_BACKENDS,
    GraphPipelineConfig,
    LengthsConfig,
    MemoryConfig,
)
from gpp_plugin.errors import nearest
from gpp_plugin.ir.typed_leaves import show
from gpp_plugin.plugins import (
    BACKEND_WORDS,
    BACKENDS,
    PLANNERS,
    TRANSPORTS,
    named_backends,
)
from gpp_plugin.schedule.names import schedule_names

REMOVED = {
    "repeat_steps": "steps are no longer run twice; remove the key. Rank 0 logs losses far above the usual range",
}
"""Keys of earlier releases, each with what to do instead."""


def problems_of(error: ValidationError) -> list[str]:
    """Return one line per wrong key; a union's several complaints about one value are one problem."""
    # Pydantic says of {"micro_batch_sizes": {"loss": 0}} once for each form the value may have:
    #
    #   ("micro_batch_sizes", "literal['auto','search']")             not one of them
    #   ("micro_batch_sizes", "constrained-int")                      no whole number
    #   ("micro_batch_sizes", "dict[...]", "loss", "constrained-int") not at least 1
    #   ("micro_batch_sizes", "dict[...]", "loss", "literal['full']") not "full"
    #
    # Without the union's tags these are two paths, the whole and ".loss"; the longer one says where it is.
    lines: dict[str, str] = {}
    for item in error.errors(include_url=False):
        keys, field, choices = _locate(item["loc"])
        path = ".".join([BLOCK, *keys])
        if field is None:
            line = _unknown_key(path, keys, item["input"], choices)
        else:
            line = _wrong_value(path, item["input"], field)
        lines.setdefault(path, line)
    # A union complains about the whole value too, once for each form it may have.
    return [line for path, line in lines.items() if not any(other.startswith(f"{path}.") for other in lines)]


def _locate(loc: Sequence[int | str]) -> tuple[list[str], FieldInfo | None, list[str]]:
    """Return the key path of a pydantic location without union tags, its field, and its siblings."""
    fields = GraphPipelineConfig.model_fields
    first = str(loc[0])
    field = fields.get(first)
    inner = {"memory": MemoryConfig.model_fields, "lengths": LengthsConfig.model_fields}.get(first)
    if inner is not None and len(loc) > 1:
        siblings = inner
        second = str(loc[1])
        return [first, second], siblings.get(second), list(siblings)
    if first == "micro_batch_sizes" and len(loc) > 2:
        return [first, str(loc[2])], field, []
    return [first], field, list(fields)


def _unknown_key(path: str, keys: Sequence[str], value: Any, known: Iterable[str]) -> str:
    # "limit_gb" written beside "memory" instead of in it is nearer to a key of the memory object than to its
    # own siblings, so that is looked for first, with a stricter likeness.
    if len(keys) == 1 and keys[0] in REMOVED:
        return f"{path}: {REMOVED[keys[0]]} (value {show(value)})"
    names = list(known)
    near = difflib.get_close_matches(keys[-1], names, n=1, cutoff=0.6)
    inner = difflib.get_close_matches(keys[-1].rpartition(".")[2], MemoryConfig.model_fields, n=1, cutoff=0.8)
    if len(keys) == 1 and inner:  # the memory object's keys, written beside it
        return f'{path}: unknown key (value {show(value)}); write "memory": {{"{inner[0]}": {show(value)}}}'
    hint = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(names)}"
    return f"{path}: unknown key (value {show(value)}); {hint}"


def _wrong_value(path: str, value: Any, field: FieldInfo | None) -> str:
    expected = field.description if field is not None else None
    if expected == A_PLANNER:
        expected = "one of " + ", ".join(PLANNERS.names())
    if expected == A_SCHEDULE:
        expected = "one of " + ", ".join(schedule_names())
    if expected == A_TRANSPORT:
        expected = "one of " + ", ".join(TRANSPORTS.names())
    if path.startswith(f"{BLOCK}.backends"):
        return _wrong_backends(path, value)
    if path.startswith(f"{BLOCK}.micro_batch_sizes."):
        expected = 'a whole number of samples of at least 1, or "full"'
    if (
        path == f"{BLOCK}.eager" and isinstance(value, str) and value
    ):  # one path, where a list of them is asked for
        return f"{path}: {show(value)} is not valid; give a list: {show([value])}"
    words = [
        word for word in re.findall(r"\w+", (expected or "").removeprefix("one of ")) if not word.isdigit()
    ]
    near = difflib.get_close_matches(value.lower(), words, n=1, cutoff=0.6) if isinstance(value, str) else []
    hint = f"; did you mean {near[0]!r}?" if near and near[0] != value else ""
    return f"{path}: {show(value)} is not valid; give {expected}{hint}"


def _wrong_backends(path: str, value: Any) -> str:
    """Return what is wrong with what stages are to run on: the first name that is none, or the whole."""
    names = BACKENDS.names()
    if isinstance(value, str) and value in names:
        return f"{path}: {show(value)} is not valid; give a list: {show([value])}"
    wrong = next((n for n in named_backends(value) if isinstance(n, str) and n not in BACKENDS), None)
    if wrong is not None:
        return f"{path}: no backend {show(wrong)}{nearest(wrong, names)}; give one of {', '.join(names)}"
    hint = nearest(value, (*BACKEND_WORDS, *names)) if isinstance(value, str) else ""
    return f"{path}: {show(value)} is not valid; give {SOME_BACKENDS}{hint}"
