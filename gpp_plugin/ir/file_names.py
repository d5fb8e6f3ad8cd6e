"""File names out of names that users and models give: safe on every file system, no two alike."""

from __future__ import annotations

import hashlib
from urllib.parse import quote

MOST_CHARACTERS = 120
"""Longer names are cut: file systems take 255 bytes, and what is made of a name adds to it."""


def escape_name(name: str) -> str:
    """Return ``name`` as a part of a file name: letters, digits and ``_-.~`` as they are, all else in percent code.

    `urllib.parse.unquote` gives the name back, unless it was too long: then its end is a hash of the whole.

    >>> escape_name("language_model.2-3+lm_head+loss")
    'language_model.2-3%2Blm_head%2Bloss'
    >>> escape_name("../größe 1")
    '%2E.%2Fgr%C3%B6%C3%9Fe%201'
    """
    escaped = quote(name, safe="")
    if escaped.startswith("."):  # hidden, or the directory itself
        escaped = f"%2E{escaped[1:]}"
    if len(escaped) <= MOST_CHARACTERS:
        return escaped
    return f"{escaped[: MOST_CHARACTERS - 17]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
