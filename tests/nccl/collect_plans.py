"""Every plan that tests of this repository lower, in the tests' own process or in one that they start.

`read_plans` returns them from ``plans.json``, which this writes anew (half an hour on two cores)::

    python -m tests.nccl.collect_plans tests/schedule tests/simulate tests/runtime tests/rehearse tests/stage_graph \
        tests/compare tests/demo tests/integrations tests/test_api.py

Each process started meanwhile writes down what `lower_schedules` and `lower_async` are given, but for random plans.
What is kept is what programs are made of: stages, edges, orders; names, costs in memory and notes are not. Plans that
differ in times, or in how many micro-batches come, are one. A plan of one rank sends nothing and is left out.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.ir.serialize import from_plain, to_plain
from tests.nccl.recording import Run

PLANS = Path(__file__).with_name("plans.json")
FOLDER = "GPP_TESTS_COLLECT_PLANS"
_STAGE = (
    "ranks",
    "micro_batch_size",
    "in_flight",
    "schedule",
    "k",
    "num_sliced",
    "joins_last_slice",
    "tensor",
    "context",
)
_TIMES = ("forward_us", "backward_us", "half_forward_us", "input_gradient_us", "weight_gradient_us")
_EDGE = ("src", "dst", "src_shard_axis", "dst_shard_axis")
_TENSORS = ("batch_tensors", "whole_tensors", "gradient_tensors")


def read_plans() -> list[tuple[str, Run]]:
    """Return (the test that lowered it first, what it does with the plan)."""
    return [(row["test"], _run(row)) for row in json.loads(PLANS.read_text())]


def _run(row: dict[str, Any]) -> Run:
    plan, is_training = _with_ranks_in_a_row(from_plain(PipelinePlan, row["plan"])), row["training"]
    return Run(
        plan=plan if is_training else replace(plan, mode="sync"),
        forward_only=frozenset(row["forward_only"]),
        tied=tuple(row["tied"]),
        zero=row["zero"],
        train=is_training,
        evaluate=not is_training,
    )


def _with_ranks_in_a_row(plan: PipelinePlan) -> PipelinePlan:
    """Return the plan without ranks that it leaves idle, as evaluations of a part of a mini-batch do."""
    used = sorted(rank for stage in plan.stages for rank in stage.ranks)
    stages = (replace(stage, ranks=tuple(used.index(rank) for rank in stage.ranks)) for stage in plan.stages)
    return replace(plan, stages=tuple(stages))


# ---- in every process that is started ------------------------------------------------------------------------


def install() -> None:
    """Write down what is lowered from now on, where the environment says so."""
    folder = os.environ.get(FOLDER)
    if folder is None:
        return
    from gpp_plugin.schedule import lower, program_sets

    lower.lower_schedules = _noting(lower.lower_schedules, Path(folder))
    program_sets.lower_async = _noting(program_sets.lower_async, Path(folder))


def _noting(call: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    @functools.wraps(call)
    def noted(plan: PipelinePlan, *args: Any, **options: Any) -> Any:
        lowered = call(plan, *args, **options)  # what is refused never runs
        if plan.num_ranks > 1 and plan.model != "random":
            row = _row(plan, options)
            path = folder / f"{abs(hash(_key(row))):x}"  # PYTHONHASHSEED is fixed
            if not path.exists():
                path.write_text(json.dumps(row))
        return lowered

    return noted


def _row(plan: PipelinePlan, options: dict[str, Any]) -> dict[str, Any]:
    return {
        "test": os.environ.get("PYTEST_CURRENT_TEST", "").split("::")[0],
        "forward_only": sorted(options.get("forward_only_stages", ())),
        "tied": sorted(options.get("tied_stages", ())),
        "zero": 2 if options.get("reduce_each_backward") else 0,
        "training": options.get("training", True),
        "plan": strip(plan),
    }


def strip(plan: PipelinePlan) -> dict[str, Any]:
    """Return what programs are made of, as JSON."""
    plain = to_plain(plan)
    names: dict[str, str] = {}
    usual = {field.name: field.default for field in dataclasses.fields(Stage)}
    stages = [
        {
            "name": f"s{index}",
            "blocks": [f"b{index}"],
            **{key: stage[key] for key in _STAGE if stage[key] != usual[key]},
            **{key: float(f"{stage[key]:.3g}") for key in _TIMES if stage[key]},
        }
        for index, stage in enumerate(plain["stages"])
    ]
    edges = [
        {
            **{key: edge[key] for key in _EDGE if edge[key] is not None},
            **{
                key: [names.setdefault(name, f"t{len(names)}") for name in edge[key]]
                for key in _TENSORS
                if edge[key]
            },
        }
        for edge in plain["edges"]
    ]
    kept = ("mini_batch", "loss_unit", "mode", "vertical_sync")
    told = {"model": "", "graph": "", "planner": ""}
    return {**told, **{key: plain[key] for key in kept}, "stages": stages, "edges": edges}


def _key(row: dict[str, Any]) -> str:
    """Return what is the same of plans of which one is enough."""
    plan, left_out = row["plan"], {*_TIMES, "in_flight"}
    stages = [{key: value for key, value in stage.items() if key not in left_out} for stage in plan["stages"]]
    return json.dumps({**row, "plan": {**plan, "stages": stages, "mini_batch": 0}, "test": ""})


# ---- the command -------------------------------------------------------------------------------------------


def main(tests: list[str]) -> None:
    """Run tests and write down the plans that they lower."""
    root = Path(__file__).parents[2]
    with tempfile.TemporaryDirectory() as temporary:
        found, start = Path(temporary) / "plans", Path(temporary) / "start"
        found.mkdir()
        start.mkdir()
        (start / "sitecustomize.py").write_text("import tests.nccl.collect_plans as c\nc.install()\n")
        path = os.pathsep.join([str(start), str(root), str(root / "benchmarks")])
        environment = {**os.environ, FOLDER: str(found), "PYTHONPATH": path, "PYTHONHASHSEED": "0"}
        subprocess.run([sys.executable, "-m", "pytest", "-q", *tests], env=environment, cwd=root, check=False)
        rows = [json.loads(file.read_text()) for file in found.iterdir()]
    write(rows)


def write(rows: list[dict[str, Any]]) -> None:
    """Write the plans, one a line."""
    lines = sorted(json.dumps(row, separators=(",", ":")) for row in rows)
    PLANS.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main(sys.argv[1:])
