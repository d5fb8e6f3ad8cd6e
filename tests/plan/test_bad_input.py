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
    (["--stages", "40", "--devices", "64"], "40 stages are asked for and the model has 33 blocks; lower stages to 33"),
    (
        ["--virtual-stages", "20"],
        "--virtual-stages 20 on 4 ranks makes at least 40 stages and the model has 33 blocks; lower --virtual-stages to 16",
    ),
    (
        ["--virtual-stages", "2", "--stages", "6"],
        "6 stages are asked for and --virtual-stages 2 on 4 ranks makes 4 or 8; change stages",
    ),
    (["--virtual-stages", "2", "--mode", "async"], "--virtual-stages: mode async searches no ranks of several stages; set"),
    (["--stages", "5", "--mode", "async"], "5 stages: mode async searches no ranks of several stages; set"),
    (
        ["--colocate", "auto", "--planner", "stock_1f1b"],
        "planner 'stock_1f1b' makes stages for DeepSpeed's own PipelineEngine, which holds one a rank",
    ),
    (
        ["--mini-batch", "63", "--micro-batch", "4"],
        "--micro-batch is 4, which does not divide the mini-batch of 63; the nearest sizes that do are 3 and 7",
    ),
    (["--planner", "grahpipe"], "no planner 'grahpipe'; did you mean 'graphpipe'?"),
    (["--data-parallel", "3"], "--data-parallel 3 does not divide 4 ranks; choose a divisor"),
    (["--devices", "0"], "--devices 0: give at least 1"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), REQUESTS)
def test_a_wrong_request(arguments, message, capsys):
    defaults = ["--devices", "4", "--loss-unit", "1", "--cluster", "summit"]
    assert main(["plan", "mmt", *defaults, *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"gpp plan: {message}")
    assert error.count("\n") == 1
