"""`gpp bench start-up`: medians of what rounds saw, and which part of the work a stack belongs to."""

import types

import pytest

from gpp_benchmarks import _start_up_ranks as ranks
from gpp_benchmarks import start_up


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


def test_rows_hold_medians_and_leave_the_third_step_out_of_the_total() -> None:
    starts = [
        {
            "seconds": {"import": 1.0, "first_step": seconds, "third_step": 0.5},
            "busy": {"import": 0.5, "first_step": seconds / 2, "third_step": 0.5},
            "parts": parts,
            "busy_parts": parts,
            "peak_mb": 100 * seconds,
        }
        for seconds, parts in (
            (2.0, {"plan": 1.0}),
            (4.0, {"plan": 3.0, "capture": 6.0}),
            (9.0, {"plan": 2.0}),
        )
    ]
    row = start_up._medians(starts)
    assert row["seconds"] == {"import": 1.0, "first_step": 4.0, "third_step": 0.5}
    assert (row["total_s"], row["busy_s"], row["peak_mb"]) == (5.0, 2.5, 400.0)
    assert row["parts_s"] == {"plan": 2.0, "capture": 0.0}
    text = start_up._text({"job": "clip", **row})
    assert (
        "clip: 5.00 s to the end of the first step, of which rank 0 works 2.50; it has at most 400 MB" in text
    )
    assert "first step 4.00 (2.00)" in text
