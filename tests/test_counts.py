"""The counts that .ci/counts.py prints, on a small package and on this one."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

from tests.waits import run_program

ROOT = Path(__file__).parent.parent
FILES = {
    "small/__init__.py": '"""Documented."""\n',
    "small/one.py": '''"""Documented,
in two lines."""

import small.folder.two  # a trailing comment
from small import numpy  # noqa: F401

LIMIT = 3
"""Documented too."""


class Thing:
    # a comment
    text = """two
lines"""


class _Thing:
    pass
''',
    "small/folder/__init__.py": "",
    "small/folder/one.py": "class Thing:\n    pass\n",
    "small/folder/two.py": "def later():\n    from .. import one\n    from ..folder import one as other\n    return one, other\n",
    "small/numpy.py": "def long():\n" + "    print()\n" * 60,
    "small/bench/one.py": "x = 1\n",
}


def counts_of(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-I", str(ROOT / ".ci" / "counts.py"), *arguments, "--json"]
    return json.loads(run_program(command, capture_output=True, text=True, timeout=60, check=True).stdout)


def test_a_small_package_is_counted_by_hand(tmp_path: Path) -> None:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert counts_of(str(tmp_path), "--package", "small") == {
        "files": 6,
        "code_lines": 8 + 2 + 4 + 61,
        "comment_lines": 1,
        "trailing_comments": 1,
        "comments_per_thousand": 13.3,
        "single_importers": [
            "small.folder.one <- small.folder.two",
            "small.folder.two <- small.one",
            "small.numpy <- small.one",
            "small.one <- small.folder.two",
        ],
        "lone_protocols": [],
        "files_over_700": [],
        "circles": [["small.folder.two", "small.one"]],
        "longest_folder": "small/folder",
        "longest_folder_files": 3,
        "functions_over_60": ["small.numpy:1 long (61 lines)"],
        "functions_over_35_without_comment": ["small.numpy:1 long (61 lines)"],
        "duplicate_basenames": {"one.py": ["small.folder.one", "small.one"]},
        "duplicate_classes": {"Thing": ["small.folder.one", "small.one"]},
        "named_like_a_dependency": ["small.numpy"],
    }


def test_this_package_keeps_its_house_in_order() -> None:
    """No circles, no folder that hides its files, no name twice, and more than bare code."""
    counts = counts_of()
    assert counts["files"] > 100 and counts["code_lines"] > 10_000  # it was found at all
    assert counts["circles"] == []
    assert counts["longest_folder_files"] <= 20, counts["longest_folder"]
    assert counts["duplicate_basenames"] == {} and counts["duplicate_classes"] == {}
    assert counts["named_like_a_dependency"] == []
    assert counts["comments_per_thousand"] >= 40
    # growth is paid for: these limits rise only in a commit that says why (CONTRIBUTING.md)
    layers = tomllib.loads((ROOT / ".ci" / "layers.toml").read_text())
    assert counts["files"] <= layers["most_files"]
    assert len(counts["single_importers"]) <= layers["most_single_importers"], counts["single_importers"]
    assert len(counts["files_over_700"]) <= layers["most_files_over_700"], counts["files_over_700"]
