"""What users see of training: the step log with phases and messages, monitors, FLOPs."""

from __future__ import annotations

import csv
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpp_plugin.engine import metrics
from gpp_plugin.engine.metrics import OutlierMonitor, StragglerWatch
from gpp_plugin.engine.stage_step import StepResult
from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.runtime.batches import UnitBatch
from gpp_plugin.runtime.executor import MiniBatchResult, StageExecutor
from gpp_plugin.runtime.ranks.collectives import Collectives
from tests.integrations.engine_jobs import B, config_of, logged, make_engine, steps
from tests.models import build
from tests.ranks import run_kept_ranks, run_ranks


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
        monitor=SimpleNamespace(enabled=True, write_events=written.extend),
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
            loss=float(number), step=step, result=MiniBatchResult(), batch=batch, global_steps=number,
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


# ---- stragglers ----------------------------------------------------------------------------------------------


def plan_of_replicas(number: int) -> PipelinePlan:
    stage = Stage(
        name="text", blocks=("a",), ranks=tuple(range(number)), micro_batch_size=2 * number, in_flight=1,
        forward_us=1.0, backward_us=2.0,
    )  # fmt: skip
    return PipelinePlan(
        model="m",
        graph="",
        planner="",
        mini_batch=2 * number,
        loss_unit=2 * number,
        stages=(stage,),
        edges=(),
    )


def watch_of(number: int) -> StragglerWatch:
    return StragglerWatch(
        plan_of_replicas(number), rank=0, collectives=Collectives(group=None, who="rank 0", timeout_s=1.0)
    )


def test_a_straggler_is_named_once_until_it_recovers_or_is_slower_still() -> None:
    watch = watch_of(2)

    def named(slowness: float) -> str:
        return watch.new_stragglers(
            metrics.times_of_ranks(watch._plan, {0: 1e4, 1: 1e4 * slowness}),
        )

    assert [bool(named(each)) for each in (1.2, 1.29, 1.5, 1.5, 1.25, 1.6, 1.9)] == [
        *(False, False, True, False, False, False, False)
    ], "1.25 is no recovery, and 1.9 not 1.3 times the 1.5 that it was named with"
    assert named(2.0) == "rank 1 (stage 'text'), whose tasks take 20.0 ms a step, 2.00 times its replicas'"
    assert [bool(named(each)) for each in (1.1, 1.4, 1.4)] == [False, True, False], "it had recovered"
    many = watch_of(12)
    said = many.new_stragglers(metrics.times_of_ranks(many._plan, {r: 1e4 * (1 + r // 7) for r in range(12)}))
    assert said.count("rank ") == StragglerWatch.MOST_NAMED and said.endswith("; and 1 more"), said


def test_times_are_medians_of_windows_and_those_that_a_device_has_not_come_through_are_read_later() -> None:
    class Mark:
        """Of a device that is through behind the next step."""

        has_passed = False

        def query(self) -> bool:
            return self.has_passed

        def elapsed_time(self, end: Any) -> float:
            assert self.has_passed and end.has_passed, "else a host would have to wait"
            return 3.0

    watch, window = watch_of(1), StragglerWatch.WINDOW
    spikes = [(0.0, 1e9 if step < window // 2 - 1 else 7.0) for step in range(window)]
    assert [watch.note([each]) for each in spikes] == [None] * window
    times = watch.note([(0.0, 100.0)])
    assert times is not None and times[0].us == 7.0, "the window's, one step later"
    watch = watch_of(1)
    for step in range(window):  # of ten tasks that are planned eight run now and then, and then none
        watch.note([(0.0, 2.0)] * 10 if step == 0 else [(0.0, 2.0)] * 8 if step < 7 else [])
    times = watch.note([(0.0, 1.0)])
    assert times is not None and times[0].us == 20.0, "as long as all would have taken"
    watch = watch_of(1)
    marks = [Mark() for _ in range(window)]
    for step in range(window):
        assert watch.note([(marks[step], marks[step])]) is None  # type: ignore[list-item]
        marks[max(step - 1, 0)].has_passed = True
    times = watch.note([])
    assert times is not None and times[0].us == 3000.0, "the device's milliseconds"


def planted(factors: tuple[float, ...]) -> dict[str, Any]:
    """Train on two stages; the tasks of rank 1 take so many times the planned time, of rank 0 once."""
    with logged("gpp_plugin.engine.metrics") as records:
        model, make_batch = build("two_branch")
        engine = make_engine(model, make_batch(B, 0), config_of(block={"stages": 2}))
        rank, written, spent = engine.global_rank, [], []
        watch = engine._metrics._stragglers
        real, planned = (
            metrics.spent_us,
            metrics.times_of_ranks(engine.plan, {0: 1.0, 1: 1.0})[rank].planned_us,
        )
        engine._metrics._write = written.extend if rank == 0 else None
        said = []
        try:
            for factor in factors:
                metrics.spent_us = lambda tasks, factor=factor: (  # as slow as it is planned, on any machine
                    spent.append(real(tasks)) or 5 * planned * (factor if rank == 1 else 1.0)
                )
                records.clear()
                steps(engine, [make_batch(B, seed) for seed in range(watch.WINDOW)])
                said.append([r.getMessage() for r in records if "slow" in r.getMessage()])
        finally:
            metrics.spent_us = real
    engine.destroy()
    return {"said": said, "written": written, "spent": spent, "planned_us": planned}


def test_a_rank_that_takes_longer_than_planned_is_named_in_the_log_and_in_monitors() -> None:
    first, second = run_kept_ranks(planted, 2, (1.2, 1.5, 1.5, 1.2))
    assert min(first["spent"] + second["spent"]) > 0, "every rank's tasks are timed in every step"
    assert second["said"] == [[], [], [], []], "rank 0 tells of all"
    # a window is looked at one step behind it
    assert [len(lines) for lines in first["said"]] == [0, 0, 1, 0]
    (line,) = first["said"][2]
    assert line.startswith("step 41: slow in the last 20 steps: rank 1 (stage '"), line
    assert "1.50 times the plan's beside other stages; look at" in line, line
    ratios = {
        name: value for name, value, samples in first["written"] if samples == 21 * B and "TaskTime" in name
    }
    assert ratios == pytest.approx(
        {
            "Train/TaskTime/ms_rank_0": 5 * first["planned_us"] / 1e3,
            "Train/TaskTime/ms_rank_1": 6 * second["planned_us"] / 1e3,
            "Train/TaskTime/over_plan_rank_0": 1 / 1.2,
            "Train/TaskTime/over_plan_rank_1": 1.2,
        }
    )  # fmt: skip


def slowly_fed(uses_loader: bool) -> list[float]:
    """Train with data that sleep on rank 1; return what the tasks of each rank take, in ms."""
    model, make_batch = build("two_branch")
    rows = make_batch(6 * B, 0)
    samples = [{key: value[i] for key, value in rows.items()} for i in range(6 * B)]
    given = {"training_data": SlowSamples(samples)} if uses_loader else {}
    engine = make_engine(model, make_batch(B, 0), config_of(block={"stages": 2}), **given)
    watch, found = engine._metrics._stragglers, []
    watch.WINDOW, note = 3, watch.note
    watch.note = lambda tasks: found.append(note(tasks)) or found[-1]
    stream = None if uses_loader else (SlowSamples([make_batch(B, seed)])[0] for seed in range(6))
    for _ in range(4):
        engine.train_batch(data_iter=stream)
    return [found[-1][rank].us / 1e3 for rank in range(2)]


class SlowSamples(list[Any]):
    """Samples of which each is read for long on rank 1, longer than the tasks of a step take."""

    def __getitem__(self, index: Any) -> Any:
        time.sleep(SLOW_S * (os.environ["RANK"] == "1"))
        return super().__getitem__(index)


SLOW_S = 0.3


@pytest.mark.parametrize("uses_loader", [False, True])
def test_a_stage_whose_data_come_slowly_is_no_slow_stage(uses_loader: bool) -> None:
    for times in run_kept_ranks(slowly_fed, 2, uses_loader):
        assert max(times) < 1e3 * SLOW_S, times


def slowed(block: dict[str, Any], factor: float) -> list[str]:
    """Let every forward take as long as is planned of its rank at least, on rank 3 ``factor`` times that."""
    forward_of = StageExecutor._guarded_forward
    with logged("gpp_plugin.engine.metrics") as records:
        model, make_batch = build("two_branch")
        engine = make_engine(model, make_batch(B, 0), config_of(block=block))
        least_us = min(stage.forward_us + stage.backward_us for stage in engine.plan.stages)

        def slow(self: Any, readings: Any) -> Any:
            forward = forward_of(self, readings)
            planned = (self._stage.forward_us + self._stage.backward_us) / least_us
            delay_s = 0.04 * planned * (factor if self._rank == 3 else 1.0)
            return lambda *given: (time.sleep(delay_s), forward(*given))[1]

        StageExecutor._guarded_forward = slow  # type: ignore[method-assign]
        try:
            steps(engine, [make_batch(B, seed) for seed in range(StragglerWatch.WINDOW + 1)])
        finally:
            StageExecutor._guarded_forward = forward_of  # type: ignore[method-assign]
    return [r.getMessage() for r in records if "slow" in r.getMessage()]


@pytest.mark.parametrize(
    "block",
    [{"stages": 1}, {"stages": 2}, {"stages": 2, "mode": "async"}],
    ids=["replicas", "stages", "mode async"],
)
def test_a_rank_with_a_real_delay_is_named_on_four_ranks(block: dict[str, Any]) -> None:
    assert run_ranks(slowed, 4, block, 1.2) == [[], [], [], []]
    said, *others = run_ranks(slowed, 4, block, 1.6)
    assert others == [[], [], []] and len(said) == 1 and "rank 3 (stage" in said[0], said
    assert said[0].count("rank ") == 1, said
