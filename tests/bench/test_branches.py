"""`gpp bench branches`: its bound, its draws and the simulation of them, and its rows on short delays."""

import importlib.util
import json

import pytest

from gpp_benchmarks._emulated_graphs import bound_us, branch_links, emulated_plan
from gpp_benchmarks.branches import draw_times
from gpp_plugin.cli import main
from gpp_plugin.ir.schedule import TaskKind
from gpp_plugin.simulate.predict import predict_iteration_us


def three_branches(num_micro_batches):
    return emulated_plan(
        "3 branches",
        branch_links(3, 1, has_own_join=True),
        num_micro_batches=num_micro_batches,
        forward_us=40_000.0,
        backward_us=40_000.0,
    )


@pytest.mark.parametrize(("num_micro_batches", "bound"), [(8, 720_000.0), (16, 1_360_000.0)])
def test_the_bound_is_the_simulation_of_even_times(num_micro_batches, bound):
    plan = three_branches(num_micro_batches)
    assert (len(plan.stages), plan.depth) == (4, 2)
    assert bound_us(plan) == predict_iteration_us(plan) == bound
    assert predict_iteration_us(plan, durations=draw_times(plan, jitter=0.0, seed=1)) == pytest.approx(bound)


def test_every_task_has_a_draw_of_its_own_within_the_jitter():
    plan = three_branches(8)
    times = draw_times(plan, jitter=0.8, seed=3)
    assert set(times) == {
        (stage, kind, micro_batch)
        for stage in range(4)
        for kind in (TaskKind.FORWARD, TaskKind.BACKWARD)
        for micro_batch in range(8)
    }
    assert len(set(times.values())) == len(times)
    assert 8_000.0 <= min(times.values()) < 20_000.0 < 60_000.0 < max(times.values()) <= 72_000.0
    assert times == draw_times(plan, jitter=0.8, seed=3) != draw_times(plan, jitter=0.8, seed=4)
    assert predict_iteration_us(plan, durations=times) > sum(
        us for (stage, _, _), us in times.items() if stage == 3
    )


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
def test_both_systems_run_even_and_drawn_times(capsys):
    arguments = ["--micro-batches", "4", "--forward-ms", "4", "--backward-ms", "4", "--rounds", "2"]
    assert main(["bench", "branches", *arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = {(row["system"], row["times"]): row for row in result["rows"]}
    assert set(rows) == {(system, times) for system in ("gpp", "megatron") for times in ("even", "drawn")}
    for (_, times), row in rows.items():
        # (4 micro-batches + 2 stages - 1) x 8 ms; a delay never ends early
        assert row["iteration_ms"] >= row["fastest_ms"] >= row["simulated_ms"] * 0.999
        assert row["bound_ms"] == (pytest.approx(40.0) if times == "even" else None)
        assert row["over_gpp"] == pytest.approx(row["iteration_ms"] / rows["gpp", times]["iteration_ms"])
    assert rows["gpp", "drawn"]["simulated_ms"] != rows["gpp", "even"]["simulated_ms"]
    assert [verdict["what"] for verdict in result["verdicts"]] == ["over the bound", "from the simulation"]
    for verdict in result["verdicts"]:
        assert verdict["holds"] == (verdict["value"] <= verdict["limit"])
