"""A package made here and installed with pip adds a planner, a schedule and a transport: each is named and trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import contributed_jobs
from tests.contributed_package import pip_install, write_package
from tests.integrations.engine_jobs import B, U, config_of
from tests.models import build
from tests.ranks import run_ranks
from tests.reference import train_reference
from tests.waits import run_program

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return where the package's tests are, and where it is installed."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    tests = write_package(source)
    pip_install(source, target)
    return tests, target


def run_python(target: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(REPOSITORY), str(target)])
    environment = {**os.environ, "PYTHONPATH": paths}
    return run_program(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=280, env=environment, cwd=target
    )


def test_each_is_named_in_a_json_configuration_and_trains(folders: tuple[Path, Path], tmp_path: Path) -> None:
    _, target = folders
    own = {"planner": "halves", "schedule": "last_first", "p2p": "post_office"}
    blocks = [own, {"planner": "uniform", "stages": 2, "schedule": "gpipe"}]
    paths = [tmp_path / f"{index}.json" for index in range(len(blocks))]
    for path, block in zip(paths, blocks, strict=True):
        path.write_text(json.dumps(config_of(block={**block, "slicing": "off"})))
    per_rank = run_ranks(contributed_jobs.train, 2, str(target), [str(path) for path in paths], timeout_s=250)
    model, make_batch = build("gpt2")
    batches = [make_batch(B, seed) for seed in range(contributed_jobs.STEPS)]
    reference = train_reference(model, batches, unit=U)
    for added, built_in in per_rank:
        assert added["losses"] == pytest.approx(built_in["losses"], rel=1e-6)
        assert added["losses"] == pytest.approx(reference.losses, rel=1e-5)
        assert (added["planner"], added["schedules"]) == ("halves", {"last_first"})
        assert len(added["stages"]) == 2 and abs(added["stages"][0] - added["stages"][1]) <= 1
        num_micro_batches = B // U
        assert added["sent"] == contributed_jobs.STEPS * num_micro_batches, (
            "one message a micro-batch and direction"
        )


def test_its_own_tests_run_the_shared_checks(folders: tuple[Path, Path]) -> None:
    tests, target = folders
    done = run_python(target, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


def test_the_configuration_and_the_commands_list_them(folders: tuple[Path, Path]) -> None:
    _, target = folders
    code = """
import sys
from gpp_plugin.config.reader import read_config
from gpp_plugin.errors import ConfigError
try:
    read_config({"graph_pipeline": {"planner": "halfs", "schedule": "last", "p2p": "post"}})
except ConfigError as error:
    print(error)
assert "torch" not in sys.modules and "gpp_stranger" not in sys.modules
from gpp_plugin.cli import main
for option in (["--planner", "halves", "--schedule", "last_first", "--p2p", "post_office"], ["--help"]):
    main(["plan", "mmt", "--devices", "2", "--size", "branches=2", "--size", "layers=2", *option])
"""
    done = run_python(target, "-c", code)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second, third, *printed = done.stdout.splitlines()
    assert first.startswith('graph_pipeline.planner: "halfs" is not valid; give one of auto, ')
    assert first.endswith("vpipe, halves; did you mean 'halves'?")
    assert "zero_bubble, last_first" in second
    assert third.startswith(
        'graph_pipeline.p2p: "post" is not valid; give one of native, megatron, post_office'
    )
    text = " ".join(" ".join(printed).split())
    assert "halves" in text and "last_first" in text and "{native,megatron,post_office}" in text
