"""Entries of a HuggingFace configuration that no model can have: which one it is, where transformers does not say.

transformers takes many entries as they come: a negative number of layers is none, a text for a number fails somewhere
inside a module. So sizes are held against those of the class's own default, and of what fails the guilty entry is found
by leaving out one after the other.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from gpp_plugin.errors import ConfigError
from gpp_plugin.ir.typed_leaves import show

LARGEST_SIZE = 2**31 - 1
MOST_LAYERS = 4096
"""Layers, heads, experts: each is a module, which takes time to make even without weights."""
_MODULES = re.compile(r"(layers?|depths?|heads?|blocks|experts)$|^n_(layer|head)s?$")
_NO_SIZE = re.compile(
    r"(_ids?|_idx|_index|_token|_layer|seed|offset|_type|_dtype|stride|_window\w*|_length|_every|_interval)$"
)
_NEVER_ZERO = re.compile(
    r"^(vocab_size|hidden_size|n_embd|n_head|d_model|d_kv|image_size|patch_size|num_channels|in_channels"
    r"|num_attention_heads|num_heads|encoder_attention_heads|decoder_attention_heads|intermediate_size|embed_dim"
    r"|max_position_embeddings|n_positions|num_hidden_layers|num_layers|n_layer|num_mel_bins|max_source_positions|projection_dim|head_dim)$"
)
_TRIAL_S = 2.0
"""For finding the guilty entry."""


def check_sizes(config: Any, source: object) -> None:
    """Refuse sizes that are negative, zero or texts where the model's own are positive numbers.

    Args:
        config: a `transformers` configuration, with those inside it.
        source: where it comes from, for errors.

    Raises:
        ConfigError: it names the entry, its value and the usual one.
    """
    for path, part in _parts(config, ""):
        try:
            usual = vars(type(part)())
        except Exception:  # a class without defaults of its own
            usual = {}
        for key, value in vars(part).items():
            _check_entry(f"{path}{key}", value, usual.get(key), source)


def _parts(config: Any, path: str) -> Iterator[tuple[str, Any]]:
    yield path, config
    for name in getattr(config, "sub_configs", None) or {}:
        part = getattr(config, name, None)
        if hasattr(part, "to_diff_dict"):
            yield from _parts(part, f"{path}{name}.")


def _check_entry(path: str, value: Any, usual: Any, source: object) -> None:
    key = path.rpartition(".")[2]
    is_size = type(usual) is int and usual > 0 and not _NO_SIZE.search(key)
    for number in value if isinstance(value, (list, tuple)) else [value]:
        # depths may be a list where the class has one; what is no number there is the model's own affair
        is_module = _MODULES.search(key) is not None
        if isinstance(number, bool) or not isinstance(number, int):
            if is_size and isinstance(number, (str, bool)):
                raise ConfigError(f"{source}: {path}: {show(number)} is no number; give one, like {usual}")
            continue
        known = is_size or is_module or _NEVER_ZERO.search(key) is not None
        # -2 layers is none, but the layer from the end whose features are taken (`vision_feature_layer`) may be
        counts = is_size or not (isinstance(value, list) or _NO_SIZE.search(key))
        least = 1 if _NEVER_ZERO.search(key) else 0 if counts else -LARGEST_SIZE
        most = MOST_LAYERS if is_module else LARGEST_SIZE
        if known and not least <= number <= most:
            like = f", like {usual}" if is_size else ""
            raise ConfigError(
                f"{source}: {path}: {show(number)} is not valid; give a number from {least} to {most}{like}"
            )


def guilty_key(
    entries: dict[str, Any], build: Callable[[dict[str, Any]], object], *, end: float | None = None
) -> tuple[str, ...]:
    """Return the keys that lead to the entry without which ``build`` works: ``("vision_config", "patch_size")``.

    Empty where no single one is to blame, or it takes too long.

    Args:
        end: when to give up, by `time.monotonic`.
    """
    end = time.monotonic() + _TRIAL_S if end is None else end
    # numbers first: they are what is most often wrong, and flags change little
    keys = sorted(entries, key=lambda key: (isinstance(entries[key], (bool, type(None))), str(key)))
    for key in keys:
        if time.monotonic() > end:
            return ()
        rest = {other: value for other, value in entries.items() if other != key}
        try:
            build(rest)
        except Exception:  # noqa: S112 - the next one, then
            continue
        inner = entries[key]
        if not isinstance(inner, dict):
            return (key,)
        return (key, *guilty_key(inner, functools.partial(_build_with, build, rest, key), end=end))
    return ()


def _build_with(build: Callable[[dict[str, Any]], object], rest: dict[str, Any], key: str, part: Any) -> None:
    build({**rest, key: part})


def wrong_entry(source: object, entries: dict[str, Any], guilty: tuple[str, ...], error: Exception) -> str:
    """Return the line for entries that transformers cannot take."""
    # transformers and huggingface_hub write several lines: the last that says something is the reason
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = f"{type(error).__name__}: {lines[-1][:200] if lines else 'without a reason'}"
    if not guilty:
        return f"{source}: transformers cannot use these entries ({reason}); compare them with a published config.json"
    value: Any = entries
    for key in guilty:
        value = value[key]
    return (
        f"{source}: {'.'.join(guilty)}: {show(value)} is not valid beside the others ({reason}); mend it, or leave it "
        "out for the model's own"
    )
