"""What users see of training: the step log with phases and messages, monitors, FLOPs."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path

import pytest

from gpp_plugin.engine import metrics
from tests.integrations import observation_jobs as jobs
from tests.ranks import run_ranks


def rows_of(directory: Path, name: str) -> list[float]:
    (path,) = directory.glob(f"job/*{name}.csv")
    return [float(row[1]) for row in list(csv.reader(path.open()))[1:]]


@pytest.mark.parametrize(("is_asked", "is_set_up"), [(True, False), (True, True), (False, False)])
def test_lines_reach_users_who_ask_and_have_set_up_no_logging(
    is_asked: bool, is_set_up: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = object.__new__(metrics.Metrics)
    found._is_asked = is_asked
    monkeypatch.setattr(metrics.logger, "hasHandlers", lambda: is_set_up)
    found._say("step %d: loss %.1f", 3, 0.5)
    assert capsys.readouterr().err == ("step 3: loss 0.5\n" if is_asked and not is_set_up else "")


def test_every_report_of_the_configuration(tmp_path: Path) -> None:
    answers = run_ranks(jobs.observe, 2, str(tmp_path))
    assert not answers[1]["lines"], "rank 0 tells of all"
    lines = answers[0]["lines"]
    (first, second) = (line for line in lines if line.startswith("step "))
    assert first.startswith("step 2: loss ") and second.startswith("step 4: loss ")
    assert all(word in first for word in ("samples/s", "tokens/s", "TFLOP/s a rank", "ms a step"))
    assert "MFU" not in first, "nobody knows the peak of this processor"
    phases = next(line for line in lines if line.startswith("wall clock, mean of 2 steps:")).splitlines()
    assert phases[1].split()[:4] == ["rank", "stage", "forward", "backward"] and len(phases) == 4
    for row in phases[2:]:
        *parts, total = map(float, row.split()[2:])
        assert sum(parts) == pytest.approx(total, rel=0.02) and min(parts[:2]) > 0
    messages = next(line for line in lines if line.startswith("messages of all ranks:")).splitlines()
    assert any(" -> " in row and " send " in row for row in messages)
    assert any(" -> " in row and " receive " in row for row in messages)
    flops = (tmp_path / "flops.txt").read_text()
    assert "FLOPs a mini-batch" in flops and all(line in flops for line in flops.splitlines())
    assert len(rows_of(tmp_path, "train_loss")) == 4
    seconds = [jobs.B / rate for rate in rows_of(tmp_path, "samples_per_second")]
    tokens = rows_of(tmp_path, "tokens_per_second")
    assert all(
        rate * s == pytest.approx(tokens[0] * seconds[0]) for rate, s in zip(tokens, seconds, strict=True)
    )
    assert len(rows_of(tmp_path, "elapsed_time_ms_forward")) == 2, "a number a line of the log"
    assert min(rows_of(tmp_path, "tflops_per_rank")) > 0
    assert list(tmp_path.glob("board/*tfevents*"))
    whole, *stages = (
        rows_of(tmp_path, name)
        for name in ("Samples_grad_norm", *map("GradNorm_{}".format, answers[0]["stages"]))
    )
    assert len(whole) == 4 and len(stages) == 2 and "gradient norm" in first
    for norm, *own in zip(whole, *stages, strict=True):
        assert sum(each**2 for each in own) == pytest.approx(norm**2) and min(own) > 0


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_a_monitor_that_is_not_installed_is_told_on_every_rank() -> None:
    for said in run_ranks(jobs.observe_without_wandb, 2):
        assert said.endswith(
            'needs wandb, which is not installed; pip install wandb, or set its "enabled" to false'
        )
