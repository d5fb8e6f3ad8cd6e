"""What users see of training: the step log with phases and messages, monitors, FLOPs."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpp_plugin.engine import metrics
from gpp_plugin.engine.metrics import OutlierMonitor
from gpp_plugin.engine.stage_step import StepResult
from gpp_plugin.runtime.batches import UnitBatch
from tests.integrations.engine_jobs import B, config_of, logged, make_engine, steps
from tests.models import build
from tests.ranks import run_ranks


def observe(directory: str) -> dict[str, Any]:
    """Every report of the JSON, alone with the others, a line each two steps."""
    with logged("gpp_plugin.engine.metrics") as records:
        model, make_batch = build("t5")
        config = config_of(
            steps_per_print=2,
            wall_clock_breakdown=True,
            comms_logger={"enabled": True},
            flops_profiler={"enabled": True, "profile_step": 1, "output_file": f"{directory}/flops.txt"},
            csv_monitor={"enabled": True, "output_path": directory, "job_name": "job"},
            tensorboard={"enabled": True, "output_path": directory, "job_name": "board"},
            block={"stages": 2},
        )
        engine = make_engine(model, make_batch(B, 0), config)
        steps(engine, [make_batch(B, seed) for seed in range(4)])
    names = [stage.name for stage in engine.plan.stages]
    return {"lines": [record.getMessage() for record in records], "stages": names}


def rows_of(directory: Path, name: str) -> list[float]:
    (path,) = directory.glob(f"job/*{name}.csv")
    return [float(row[1]) for row in list(csv.reader(path.open()))[1:]]


@pytest.mark.parametrize(("is_asked", "is_set_up"), [(True, False), (True, True), (False, False)])
def test_lines_reach_users_who_ask_and_have_set_up_no_logging(
    is_asked: bool, is_set_up: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = object.__new__(metrics.Metrics)
    found._is_active = is_asked
    monkeypatch.setattr(metrics.logger, "hasHandlers", lambda: is_set_up)
    found._say("step %d: loss %.1f", 3, 0.5)
    assert capsys.readouterr().err == ("step 3: loss 0.5\n" if is_asked and not is_set_up else "")


def test_numbers_are_of_the_steps_since_the_last_line() -> None:
    """Two stages of unlike work, the first frozen, on four ranks; tokens are elements of two keys, in every unit."""
    graph = SimpleNamespace(
        num_samples=2,
        blocks=[SimpleNamespace(name=n, flops=f) for n, f in (("a", 4e9), ("b", 6e9), ("c", 2e9))],
    )
    stages = [
        SimpleNamespace(name="tower", blocks=("a",), forward_us=5.0, backward_us=0.0),
        SimpleNamespace(name="text", blocks=("b", "c"), forward_us=5.0, backward_us=9.0),
    ]
    written: list[tuple[str, float, int]] = []
    found = metrics.Metrics(
        {"steps_per_print": 2},
        SimpleNamespace(rank=0, device=torch.device("cpu"), dtype=torch.float32),  # type: ignore[arg-type]
        SimpleNamespace(block_graph=graph),  # type: ignore[arg-type]
        SimpleNamespace(stages=stages, mini_batch=8, num_ranks=4),  # type: ignore[arg-type]
        write_events=written.extend,
        collectives=None,  # type: ignore[arg-type]
    )
    lines: list[str] = []
    found._say = lambda text, *values: lines.append(text % values)  # type: ignore[method-assign]
    unit = {
        "input_ids": torch.zeros(2, 7),
        "decoder_input_ids": torch.zeros(2, 3),
        "labels": torch.zeros(2, 9),
    }
    batch = UnitBatch(units=(unit, {"input_ids": torch.zeros(1, 4), "pixel_values": torch.zeros(99)}))
    step = StepResult(
        grad_norm=0.5, overflow=False, learning_rates=(3e-4, 1.0), loss_scale=2.0, stage_norms={1: 0.3}
    )
    for number, seconds in enumerate((0.5, 1.5, 0.25, 0.25), start=1):
        found.after_step(
            loss=float(number), step=step, events=(), batch=batch, global_steps=number,
            global_samples=8 * number, seconds=seconds,
        )  # fmt: skip
    # per sample 2 GFLOP in the tower, once, and 4 in the text, three times: of 8 samples 112
    assert lines == [
        "step 2: loss 2.0000, lr 0.0003, 1, gradient norm 0.5, 1000.0 ms a step, 8.0 samples/s, 24 tokens/s, "
        "0.028 TFLOP/s a rank",
        "step 4: loss 4.0000, lr 0.0003, 1, gradient norm 0.5, 250.0 ms a step, 32.0 samples/s, 96 tokens/s, "
        "0.112 TFLOP/s a rank",
    ]
    second = {name: value for name, value, samples in written if samples == 16}
    assert second == pytest.approx(
        {
            "Train/Samples/train_loss": 2.0, "Train/Samples/lr": 3e-4, "Train/Samples/loss_scale": 2.0,
            "Train/Samples/grad_norm": 0.5, "Train/GradNorm/text": 0.3,
            "Train/Throughput/samples_per_second": 8 / 1.5, "Train/Throughput/tokens_per_second": 24 / 1.5,
            "Train/Throughput/tflops_per_rank": 0.112 / 1.5 / 4,
        }
    )  # fmt: skip


def test_every_report_of_the_configuration(tmp_path: Path) -> None:
    answers = run_ranks(observe, 2, str(tmp_path))
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
    seconds = [B / rate for rate in rows_of(tmp_path, "samples_per_second")]
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


def test_an_outlier_is_far_above_the_last_finite_losses() -> None:
    # around 0, of 1.4826 times the median distance 1: an outlier is above 8 of these, and from the 21st number on
    sides, deviation = [1.0, -1.0], 1.4826
    early, late = OutlierMonitor(), OutlierMonitor()
    for i in range(OutlierMonitor.LEAST):
        late.note(sides[i % 2])
        if i < OutlierMonitor.LEAST - 1:
            early.note(sides[i % 2])
    assert early.note(1e6) is None and early.note(1e6) is not None
    for _ in range(OutlierMonitor.WINDOW):  # no number of these is kept, or the range would be none
        assert late.note(float("nan")) is None and late.note(float("inf")) is None
    assert late.note(-1e6) is None and late.note(1e6) is not None, "far below, and far above"
    late = OutlierMonitor()
    for i in range(OutlierMonitor.WINDOW):
        late.note(sides[i % 2])
    assert late.note(OutlierMonitor.DEVIATIONS * deviation * 0.999) is None
    found = late.note(OutlierMonitor.DEVIATIONS * deviation * 1.02)
    assert found == pytest.approx(OutlierMonitor.DEVIATIONS * 1.02, rel=0.01)
    alarms = [late.note(100.0) is not None for _ in range(OutlierMonitor.WINDOW)]
    assert alarms == [i < OutlierMonitor.WINDOW // 2 - 1 for i in range(OutlierMonitor.WINDOW)], (
        "a level that stays becomes the usual one"
    )
    small = OutlierMonitor()
    for _ in range(OutlierMonitor.LEAST):
        small.note(-2.0)
    assert small.note(-2.0 + 0.02 * OutlierMonitor.DEVIATIONS * 0.99) is None, (
        "a hundredth of the median's size"
    )
    assert small.note(-2.0 + 0.02 * OutlierMonitor.DEVIATIONS * 1.01)
