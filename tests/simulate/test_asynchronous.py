"""Asynchronous plans in simulation: closed forms of a full pipeline."""

import dataclasses

import pytest

from gpp_plugin.cli import main
from gpp_plugin.ir.serialize import save
from gpp_plugin.simulate.predict import simulate_windows
from tests.schedule.plans import chain_plan, simple_plan
from tests.schedule.test_async import asynchronous


@pytest.mark.parametrize("micro_batches", [1, 2, 5, 8])
def test_a_full_pipeline_has_no_bubble(micro_batches):
    plan = asynchronous(chain_plan(4, micro_batches, forward_us=1.0, backward_us=2.0))
    found = simulate_windows(plan)
    assert found.steady_us == pytest.approx(3.0 * micro_batches)
    assert found.fill_us + found.drain_us == pytest.approx(9.0), "once what a synchronous step has every time"


def test_the_slowest_stage_sets_the_pace_and_updates_count():
    plan = asynchronous(simple_plan([1] * 3, [(0, 2), (1, 2)], mini_batch=4, forward_us=[1.0, 3.0, 1.0],
                                    backward_us=[2.0, 3.0, 1.0]))  # fmt: skip
    assert simulate_windows(plan).steady_us == pytest.approx(24.0)
    assert simulate_windows(plan, update_us={1: 0.5}).steady_us == pytest.approx(26.0)


def test_the_command_says_what_a_full_pipeline_takes(tmp_path, capsys):
    plan = dataclasses.replace(asynchronous(chain_plan(2, 2)), model="m")
    save(plan, tmp_path / "plan.json")
    assert main(["simulate", str(tmp_path / "plan.json"), "--json"]) == 0
    said = capsys.readouterr().out
    assert "while the pipeline is full" in said and '"steady_us": 4.0' in said
