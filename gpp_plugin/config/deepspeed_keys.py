"""Every key of DeepSpeed's configuration, sub-keys included, and what a graph of stages makes of it: one table.

The table is `deepspeed_keys.toml`. `config_values` goes by it, `gpp doctor --keys` prints it, and a test walks the
configuration classes of the installed DeepSpeed: a key of theirs that is not there fails it.

Tests: tests/integrations/test_deepspeed_keys.py
"""

from __future__ import annotations

import enum
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpp_plugin.config.key_names import place_of
from gpp_plugin.errors import ConfigError
from gpp_plugin.ir.typed_leaves import MOST_COUNT, show


class KeyVerdict(enum.Enum):
    """What becomes of a key."""

    HONOURED = "honoured"
    REFUSED = "refused"
    NO_EFFECT = "without effect"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedKey:
    """A key of DeepSpeed's configuration.

    Args:
        path: ``zero_optimization.stage``.
        note: what it means here, or what to do instead.
        off: values with which a key requests nothing, beside null, false (true where it is one of them), "auto" and
            what is empty.
        warns: of a key without effect: its user would have expected one.
    """

    path: str
    verdict: KeyVerdict
    note: str = ""
    off: tuple[Any, ...] = ()
    warns: bool = False

    def is_requested(self, value: Any) -> bool:
        """Return whether a value requests something."""
        if isinstance(value, bool):
            return value is not any(off is True for off in self.off)  # 1 equals True, and is a number
        return value is not None and value not in ("", "auto", [], {}, *self.off)


_TABLE: Mapping[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))

REPLACED_KEYS: Mapping[str, str] = _TABLE["replaced"]
"""Keys of the batch arithmetic, which is ours: DeepSpeed's classes do not see them."""

REFUSED_OPTIMIZERS: Mapping[str, str] = _TABLE["refused_optimizers"]
"""Lower-case names of optimizers that DeepSpeed has or had, and why stages cannot have them."""

VALUES: Mapping[str, Sequence[Any]] = _TABLE["values"]
"""Path -> the kind of a value, and for numbers the least and the largest."""

FREE = frozenset(_TABLE["free"])
"""Objects whose keys are names of the user's, or of the class that gets them."""


def _keys() -> Iterator[DeepSpeedKey]:
    replaced = ({"keys": [path], "note": note} for path, note in REPLACED_KEYS.items())
    for verdict, rows in (
        (KeyVerdict.HONOURED, [*replaced, {"keys": _TABLE["honoured"], "note": ""}]),
        (KeyVerdict.REFUSED, _TABLE["refused"]),
        (KeyVerdict.NO_EFFECT, _TABLE["without_effect"]),
    ):
        for row in rows:
            for line in row["keys"]:
                block, _, names = line.rpartition(": ")
                for name in names.split():
                    path = f"{block}.{name}" if block else name
                    yield DeepSpeedKey(
                        path=path,
                        verdict=verdict,
                        note=row["note"],
                        off=tuple(_TABLE["off"].get(path, ())),
                        warns=row.get("warns", False),
                    )


KEYS: Mapping[str, DeepSpeedKey] = {key.path: key for key in sorted(_keys(), key=lambda key: key.path)}
"""Path -> the key. What an optimizer and a schedule take is their constructors'; `bfloat16` has the keys of `bf16`."""


def names_in(block: str) -> tuple[str, ...]:
    """Return the keys of a block, "" for those outside of any.

    >>> names_in("csv_monitor")
    ('enabled', 'job_name', 'output_path')
    """
    if block == "bfloat16":
        block = "bf16"
    return tuple(path.rpartition(".")[2] for path in KEYS if path.rpartition(".")[0] == block)


def home_of(name: str, *, joined: bool = True, alone: bool = True) -> str | None:
    """Return the key that is meant by a name that stands elsewhere; None where there is none, or several.

    Args:
        joined: of a key at the top, or one with its block in front.
        alone: of a key without its block.

    >>> home_of("tensorboard"), home_of("tensorboard_enabled"), home_of("overlap_comm"), home_of("enabled")
    ('tensorboard', 'tensorboard.enabled', 'zero_optimization.overlap_comm', None)
    """
    whole = [path for path in KEYS if name == path.replace(".", "_")] if joined else []
    found = whole or [path for path in KEYS if alone and name == path.rpartition(".")[2]]
    return found[0] if len(found) == 1 else None


def configured_keys(config: Mapping[str, Any], block: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of every key of a configuration, those of a block that is not enabled left out."""
    for name, value in config.items():
        path = f"{block}.{name}" if block else str(name)
        path = path.replace("bfloat16", "bf16", 1) if path.startswith("bfloat16") else path
        yield path, value
        if path in FREE and isinstance(value, Mapping):
            yield from ((f"{path}.{key}", item) for key, item in value.items() if f"{path}.{key}" in KEYS)
        elif isinstance(value, Mapping):
            # all blocks that have such a switch are off without it, but for these two
            is_on = value.get("enabled", path in ("weight_quantization", "timers.throughput"))
            if "enabled" not in names_in(path) or is_on not in (False, None, "auto"):
                yield from configured_keys(value, path)


def sequence_size(config: Mapping[str, Any], own: object) -> int | None:
    """Return the context size that DeepSpeed's own key says, or the block that projects ship for ALST; None: neither.

    Args:
        own: what the `graph_pipeline` block says; None: nothing.

    Raises:
        ConfigError: a value is not possible, or two say different sizes.

    >>> sequence_size({"sequence_parallel": {"enabled": True, "size": 4, "mode": "ulysses"}}, None)
    4
    """
    found: dict[str, Any] = {"sequence_parallel_size": config.get("sequence_parallel_size")}
    block = config.get("sequence_parallel")
    if isinstance(block, Mapping) and block.get("enabled") is not False:
        found["sequence_parallel.size"] = block.get("size")
        if block.get("mode") not in (None, "auto", "ulysses"):
            raise ConfigError(
                f'sequence_parallel.mode: {show(block["mode"])} is not possible; write "ulysses", which '
                "exchanges heads for positions, or remove it"
            )
    said, size = {} if own is None else {place_of("sequence_parallel"): own}, None
    for key, value in found.items():
        if value is None or value is False or value == "auto":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_COUNT:
            raise ConfigError(f"{key}: {show(value)} is not valid; write a whole number of at least 1")
        for other, known in said.items():
            if known != value:
                raise ConfigError(f"{key}: {value}, and {other} is {show(known)}; keep one of them")
        size = said[key] = value
    return size
