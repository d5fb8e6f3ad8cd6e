"""What is written down about one stage, read strictly: names, ranks, counts and axes, refused in one line each.

Source: this project
Tests: tests/stage_graph/test_bad_input.py
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from gpp_plugin.errors import ConfigError

Names: TypeAlias = Sequence[str] | Mapping[str, str]


def read_name(name: Any) -> str:
    """Return a stage's name.

    Raises:
        ConfigError: it is no text, is empty, or has a dot.
    """
    if not isinstance(name, str) or not name or "." in name:
        raise ConfigError(f"stage {name!r}: a name is text, not empty, and has no dots")
    return name


def read_pairs(stage: str, what: str, names: Any, *, is_input: bool) -> tuple[tuple[str, str], ...]:
    """Return inputs as (keyword, where from), or outputs as (field, name).

    Raises:
        ConfigError: they are no list of texts and no dict of them, or names repeat.
    """
    if isinstance(names, Mapping):
        _check_texts(stage, what, [*names, *names.values()])
        pairs = tuple(names.items())
    else:
        texts = read_texts(stage, what, names)
        pairs = tuple((text.rpartition(".")[2] if is_input else text, text) for text in texts)
    own = [key for key, _ in pairs] if is_input else [name for _, name in pairs]
    twice = sorted({name for name in own if own.count(name) > 1})
    if twice:
        raise ConfigError(
            f"stage {stage!r}: {what} names {twice[0]!r} twice; a dict gives arguments other names"
        )
    if not is_input and not pairs:
        raise ConfigError(f"stage {stage!r}: it has no outputs; name what its module returns")
    dotted = [name for _, name in pairs if "." in name] if not is_input else []
    if dotted:
        raise ConfigError(f"stage {stage!r}: output {dotted[0]!r} has a dot in its name; leave it out")
    return pairs


def read_texts(stage: str, what: str, texts: Any) -> tuple[str, ...]:
    """Return a list of names; what has no order, such as a set, is in another one on every rank.

    Raises:
        ConfigError: it is no list or tuple of texts.
    """
    if isinstance(texts, str):
        raise ConfigError(f"stage {stage!r}: {what} is the text {texts!r}; give a list: [{texts!r}]")
    if not isinstance(texts, Sequence):
        raise ConfigError(f"stage {stage!r}: {what} is {texts!r}; give a list of names")
    _check_texts(stage, what, texts)
    return tuple(texts)


def _check_texts(stage: str, what: str, texts: Iterable[Any]) -> None:
    wrong = [text for text in texts if not isinstance(text, str) or not text]
    if wrong:
        raise ConfigError(f"stage {stage!r}: {what} holds {wrong[0]!r}; names are texts")


def read_ranks(stage: str, ranks: Any) -> tuple[int, ...]:
    """Return the ranks of a stage.

    Raises:
        ConfigError: they are no list of ranks, or one is listed twice.
    """
    found = tuple(ranks) if isinstance(ranks, Sequence) else ()
    if not found or not all(_is_whole(rank) for rank in found):
        raise ConfigError(f"stage {stage!r}: ranks is {ranks!r}; list one or more global ranks")
    twice = sorted({rank for rank in found if found.count(rank) > 1})
    if twice:
        raise ConfigError(f"stage {stage!r}: rank {twice[0]} is listed twice; a rank runs one stage once")
    return found


def read_count(stage: str, what: str, value: Any) -> int:
    """Return a whole number of at least 1.

    Raises:
        ConfigError: it is none.
    """
    if not _is_whole(value) or value < 1:
        raise ConfigError(f"stage {stage!r}: {what} is {value!r}; give a whole number of at least 1")
    return int(value)


def read_coupled(stage: str, coupled: Any) -> bool | None:
    """Return whether a stage mixes samples, or None where that is to be found out.

    Raises:
        ConfigError: it is neither.
    """
    if coupled is None or isinstance(coupled, bool):
        return coupled
    raise ConfigError(f"stage {stage!r}: coupled is {coupled!r}; give True, False, or None to find out")


def read_axes(stage: str, what: str, axes: Any) -> tuple[tuple[str, int], ...]:
    """Return the axis of each named tensor.

    Raises:
        ConfigError: it is no dict from names to axes.
    """
    pairs = _items(stage, what, axes)
    wrong = [name for name, axis in pairs if not _is_whole(axis)]
    if wrong:
        raise ConfigError(
            f"stage {stage!r}: {what} of {wrong[0]!r} is {dict(pairs)[wrong[0]]!r}; give the axis, 0 or more"
        )
    return pairs


def read_layouts(stage: str, layouts: Any) -> tuple[tuple[str, int | str], ...]:
    """Return the batch axis of each named output, or "uniform".

    Raises:
        ConfigError: it is no dict from names to those.
    """
    pairs = _items(stage, "layouts", layouts)
    for output, layout in pairs:
        if not _is_whole(layout) and layout != "uniform":
            raise ConfigError(
                f'stage {stage!r}: the layout of {output!r} is {layout!r}; give its batch axis or "uniform"'
            )
    return pairs


def _items(stage: str, what: str, given: Any) -> tuple[tuple[str, Any], ...]:
    if given is None:
        return ()
    if not isinstance(given, Mapping):
        raise ConfigError(f"stage {stage!r}: {what} is {given!r}; give a dict from names to axes")
    return tuple(given.items())


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
