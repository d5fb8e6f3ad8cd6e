"""Names from files in a terminal: nothing of them is obeyed."""

import dataclasses
import json
from pathlib import Path

import pytest

from gpp_plugin.api import format_timeline, plan, save, simulate
from gpp_plugin.cli import main
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.report.rows_text import json_text

EVIL = "\x1b]0;owned\x07\x1b[2J\r\n\u202egnp"


@pytest.fixture(scope="module")
def evil_plan() -> PipelinePlan:
    made = plan("mmt", "summit", num_devices=4, sizes={"branches": 2}, mini_batch=16, data_parallel=1)
    stages = tuple(
        dataclasses.replace(stage, name=f"{EVIL}{index}") for index, stage in enumerate(made.stages)
    )
    memory = tuple(
        dataclasses.replace(part, stage=stage.name) for part, stage in zip(made.memory, stages, strict=True)
    )
    return dataclasses.replace(
        made, model=EVIL, planner=EVIL, stages=stages, memory=memory, losses=(), notes=(EVIL,)
    )


def test_what_is_printed_is_printable(
    evil_plan: PipelinePlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, times = tmp_path / "plan.json", tmp_path / "timeline.json"
    save(evil_plan, file)
    assert main(["report", str(file)]) == 0
    assert main(["simulate", str(file), "--out", str(times)]) == 0
    assert main(["report", str(times), "--plan", str(file)]) == 0
    text = capsys.readouterr().out
    assert r"\x1b]0;owned\x07" in text
    assert all(char.isprintable() or char == "\n" for char in text)
    assert "owned" in format_timeline(simulate(evil_plan), evil_plan)


def test_errors_are_printable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.json").write_text('{"name": "c", "\\u001b[2J": 1}')
    assert main(["plan", "mmt", "--cluster", str(tmp_path / "c.json")]) == 1
    assert all(char.isprintable() or char == "\n" for char in capsys.readouterr().err)


def test_json_has_null_for_what_it_cannot_say() -> None:
    value = {"rows": [{"a": float("nan"), "b": (float("-inf"), 2.5)}, "inf"], "n": 3, "ok": True}
    assert json.loads(json_text(value)) == {
        "rows": [{"a": None, "b": [None, 2.5]}, "inf"],
        "n": 3,
        "ok": True,
    }
