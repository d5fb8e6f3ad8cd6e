"""File names out of names that users and models give."""

from urllib.parse import unquote

import pytest

from gpp_plugin.ir.serialize import MOST_CHARACTERS, escape_name

NAMES = [
    "loss", "language_model.2-3+lm_head+loss", "vision tower/é", "..", ".hidden", "a%2Bb", "a+b", "a_b", "größe#2", "a\\b:c*?",
    "x" * 500,
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES[:-1])
def test_names_come_back(name, tmp_path):
    escaped = escape_name(name)
    assert unquote(escaped) == name
    assert escaped.isascii() and not set(escaped) & set('/\\:*?"<>| +') and not escaped.startswith(".")
    (tmp_path / f"{escaped}.pt").write_text(name)
    assert [path.name for path in tmp_path.iterdir()] == [f"{escaped}.pt"]


def test_no_two_are_alike_and_none_is_too_long():
    names = [*NAMES, "x" * 501, "é" * 500]
    escaped = [escape_name(name) for name in names]
    assert len(set(escaped)) == len(names)
    assert max(map(len, escaped)) <= MOST_CHARACTERS
