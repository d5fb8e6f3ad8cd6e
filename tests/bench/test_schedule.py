"""`gpp bench schedule`: what its rows say."""

import pytest

from gpp_benchmarks._schedule_orders import interleaved_chain, tower_plans
from gpp_benchmarks.schedule import _calibrated
from gpp_plugin.cli import main
from gpp_plugin.simulate.predict import predict_iteration_us


def test_interleaved_stages_and_a_colocated_tower_are_simulated_as_published():
    # (ranks - 1) x (forward + backward) / stages a rank of start-up and wind-down beside 16 micro-batches
    plan = interleaved_chain(4, forward_us=20e3, backward_us=40e3)
    assert predict_iteration_us(plan) == pytest.approx((1 + 7 / 64) * 16 * 60e3)
    towers = tower_plans(forward_us=20e3, backward_us=40e3)
    work = [
        sum(
            p.num_micro_batches(i) * s.degree * (s.forward_us + s.backward_us) for i, s in enumerate(p.stages)
        )
        for p in towers.values()
    ]
    assert work == pytest.approx([8 * 16 * 60e3] * 2)
    disjoint, colocated = map(predict_iteration_us, towers.values())
    assert disjoint / colocated > 1.1


def test_calibration_grants_each_runtime_what_it_lost_on_the_chain():
    chain = [
        {"runtime": "gpp", "ranks": 8, "over_bound": 1.02},
        {"runtime": "deepspeed", "ranks": 8, "over_bound": 1.07},
    ]
    rows = [{"runtime": "gpp", "simulated_speedup": 1.2}, {"runtime": "deepspeed", "simulated_speedup": 1.0}]
    ours, stock = _calibrated(rows, chain)
    assert ours["calibrated_speedup"] == pytest.approx(1.2 * 1.07 / 1.02)
    assert stock["calibrated_speedup"] == 1.0
    assert _calibrated(rows, chain[:1]) == rows


def test_real_time_priority_that_is_not_permitted_takes_one_line(monkeypatch, capsys):
    def refuse(*arguments):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.sched_setscheduler", refuse)
    assert main(["bench", "schedule", "--what", "zero-bubble", "--real-time"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "--real-time: this process may not have real-time priority (Operation not permitted)" in error
