"""`gpp demo`, shortened: four ranks train the same as one process, the towers at the same time."""

import json
import sys

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.serialize import fingerprint, load
from gpp_plugin.ir.timeline import Timeline
from tests.waits import run_program


def test_demo(tmp_path):
    done = run_program(
        [sys.executable, "-m", "gpp_plugin.cli", "demo", "--steps", "6", "--out", str(tmp_path), "--json"],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["command"] == "demo"
    assert [row["step"] for row in result["rows"]] == list(range(1, 7))
    assert result["max_relative_difference"] < 2e-6
    assert result["seconds"] > result["train_seconds"] > 0
    assert 0 <= result["accuracy"] <= 1

    plan, timeline = load(PipelinePlan, tmp_path / "plan.json"), load(Timeline, tmp_path / "timeline.json")
    assert (result["num_stages"], result["depth"]) == (len(plan.stages), plan.depth)
    assert plan.depth < len(plan.stages) == 4
    assert plan.stages[plan.stage_index("loss")].micro_batch_size == plan.mini_batch == 64
    assert timeline.source == "measured" and timeline.plan == fingerprint(plan)
    assert result["overlap"]["same_micro_batch_us"] > 0
    assert (tmp_path / "model" / "config.json").is_file()
