"""`gpp bench start-up`: which part of the work a stack belongs to."""

from __future__ import annotations

import types

import pytest

from gpp_benchmarks import _start_up_ranks as ranks


def frame(*files: str) -> types.SimpleNamespace:
    """Return a stack of frames whose code is in ``files``, the outermost first."""
    made = None
    for file in files:
        made = types.SimpleNamespace(f_code=types.SimpleNamespace(co_filename=file), f_back=made)
    assert made is not None
    return made


@pytest.mark.parametrize(
    ("files", "part"),
    [
        (["script.py", "/site/gpp_plugin/capture/export.py", "/site/torch/export/__init__.py"], "capture"),
        (["script.py", "/site/gpp_plugin/model/preparation.py", "/site/gpp_plugin/plan/auto.py"], "plan"),
        (
            ["script.py", "/site/gpp_plugin/runtime/ranks/agree.py", "/site/gpp_plugin/capture/export.py"],
            "capture",
        ),
        (
            ["script.py", "/site/gpp_plugin/runtime/ranks/agree.py", "/site/torch/distributed.py"],
            ranks.WAITING,
        ),
        (["script.py", "/site/torch/nn/modules/module.py"], ranks.OTHER),
    ],
)
def test_the_outermost_known_file_says_what_is_done(files: list[str], part: str) -> None:
    assert ranks._part_of(frame(*files)) == part
