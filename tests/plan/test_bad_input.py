"""What a user gets wrong is answered in one line that names the need, the limit and the fix."""

import copy
import json

import pytest

from gpp_plugin.cli import main
from gpp_plugin.plan.cluster_files import CLUSTER_DIR

SUMMIT = json.loads((CLUSTER_DIR / "summit.json").read_text())


def changed(change):
    description = copy.deepcopy(SUMMIT)
    change(description)
    return json.dumps(description)


CLUSTERS = [
    (changed(lambda d: d["devices"][0].update(memory_gb=0)), "c.json: devices[0].memory_gb is 0; it must be"),
    ('{"name": "x", ', "{path}: not JSON at line 1, column 15"),
    (
        changed(lambda d: d["devices"][0].update(memory_gb=0.05)),
        "no plan fits: stage ",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), CLUSTERS, ids=["memory", "json", "small"])
def test_a_wrong_cluster(text, message, tmp_path, capsys):
    path = tmp_path / "c.json"
    path.write_text(text)
    assert main(["plan", "mmt", "--devices", "8", "--loss-unit", "1", "--cluster", str(path)]) == 1
    # where nobody looks a long search says nothing in front of it
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(f"gpp plan: {message.replace('{path}', str(path))}")


def test_a_model_that_fits_nowhere_says_by_how_much_and_which_knob(tmp_path, capsys):
    path = tmp_path / "c.json"
    path.write_text(CLUSTERS[-1][0])
    main(["plan", "mmt", "--devices", "8", "--loss-unit", "1", "--cluster", str(path)])
    error = capsys.readouterr().err
    assert "rank " in error and "may use 50000000 (" in error and "too many" in error
    assert "alone needs " in error and "raise --memory-limit-gb by " in error


REQUESTS = [
    (["--stages", "40", "--devices", "64"], "--stages: 40 is more than the 33 blocks of the model; write --stages 33, or"),
    (
        ["--virtual-stages", "20"],
        "--virtual-stages: 20 on 4 ranks makes at least 40 stages and the model has 33 blocks; write --virtual-stages 16",
    ),
    (
        ["--virtual-stages", "2", "--set", "stages=6"],
        "--set stages: 6 is not possible with --virtual-stages 2, which makes 4 or 8 stages on 4 ranks; change --set stages",
    ),
    (["--stages", "5", "--mode", "async"], "--stages: mode async has one stage a rank; write --virtual-stages 1, --colo"),
    (
        ["--colocate", "auto", "--planner", "stock_1f1b"],
        "planner 'stock_1f1b' makes stages for DeepSpeed's own PipelineEngine, which holds one a rank",
    ),
    (["--mini-batch", "63", "--micro-batch", "4"], "--micro-batch: 4 does not divide --mini-batch 63; give 3 or 7"),
    (["--loss-unit", "5"], "--loss-unit: 5 does not divide --mini-batch 64; give 4 or 8"),
    (["--data-parallel", "3"], "--data-parallel: 3 does not divide 4 ranks; give 2 or 4"),
    (["--zero", "3", "--mode", "async"], "--zero: 3 is not valid in mode async, which needs several versions of the weights"),
    (["--set", "memory.limit_gb=0.01"], "no plan fits: stage "),
    (["--set", "trace_path=t.json"], "--set trace_path: no plan depends on it; leave it out"),
    (["--set", "memory.recompute=full"], '--set memory.recompute: "full" is for training; give one of auto, off'),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), REQUESTS)
def test_a_wrong_request(arguments, message, capsys):
    defaults = ["--devices", "4", "--cluster", "summit", "--mini-batch", "64"]
    assert main(["plan", "mmt", *defaults, *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"gpp plan: {message}")
    assert error.count("\n") == 1
