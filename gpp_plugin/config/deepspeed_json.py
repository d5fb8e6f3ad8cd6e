"""A DeepSpeed configuration as a dict, from all that `deepspeed.initialize` takes."""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpp_plugin.errors import ConfigError, ReadError
from gpp_plugin.ir.serialize import SMALL_BYTES, parse_json, read_text, shown_path

_WHAT = "a DeepSpeed configuration"
_MOST_COMMENTED = 256 << 10
"""Characters of JSON with comments, whose reader is slow."""


def load_deepspeed_json(ds_config: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """Return a DeepSpeed configuration as a dict, from what `deepspeed.initialize` accepts.

    Raises:
        ConfigError: it is neither a dict, nor a readable JSON file, nor base64 of JSON.
    """
    if isinstance(ds_config, Mapping):
        return dict(ds_config)
    if not isinstance(ds_config, (str, os.PathLike)):
        raise ConfigError(f"config: expected a dict or a file name, found {type(ds_config).__name__}")
    try:
        text = read_text(ds_config, what=_WHAT)
    except ReadError:
        decoded = _from_base64(str(ds_config))
        if decoded is None:
            raise
        text = decoded
    name = shown_path(ds_config)
    try:
        plain = parse_json(text, what=_WHAT, max_bytes=SMALL_BYTES)
    except ReadError as error:
        plain = _from_hjson(text) if isinstance(error.__cause__, json.JSONDecodeError) else None
        if plain is None:
            raise ReadError(f"{name}: {error}") from error.__cause__
    if not isinstance(plain, dict):
        raise ReadError(f"{name}: holds a {type(plain).__name__}; a DeepSpeed configuration is an object")
    return plain


def _from_base64(text: str) -> str | None:
    try:
        return base64.urlsafe_b64decode(text).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None


def _from_hjson(text: str) -> Any | None:
    """Read JSON with comments, which DeepSpeed's own reader takes."""
    try:
        # DeepSpeed parses with hjson, so comments and trailing commas are no errors to its users.
        import hjson
    except ImportError:  # comes with deepspeed; without it the strict reader's message stands
        return None
    if len(text) > _MOST_COMMENTED:
        return None
    try:
        plain = hjson.loads(text, object_pairs_hook=dict)
        return parse_json(hjson.dumpsJSON(plain), what=_WHAT)
    except (ValueError, RecursionError):
        return None
