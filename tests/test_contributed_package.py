"""A package made here and installed with pip adds a planner, a schedule and a transport: each is named and trains.

Its planner and its schedule are those of docs/adding_a_planner.md and docs/adding_a_schedule.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.doc_blocks import ROOT, read_page
from tests.integrations.engine_jobs import B, U, config_of
from tests.models import build
from tests.ranks import run_ranks
from tests.reference import train_reference
from tests.waits import run_program

STEPS = 3
PYPROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "gpp-stranger"
version = "1.0"

[project.entry-points."gpp_plugin.planners"]
halves = "gpp_stranger.planner:halves_plan"
[project.entry-points."gpp_plugin.schedules"]
last_first = "gpp_stranger.schedule:LAST_FIRST"
[project.entry-points."gpp_plugin.transports"]
post_office = "gpp_stranger.transport:POST_OFFICE"

[tool.setuptools]
packages = ["gpp_stranger"]
"""

TRANSPORT = '''
"""The built-in transport, which counts what is sent."""

from gpp_plugin.plugins import TransportFactory
from gpp_plugin.runtime.messages.transport import NATIVE_TRANSPORT

SENT = 0


class PostOffice:
    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def bind_send(self, message, payloads, edge):
        post = self.inner.bind_send(message, payloads, edge)

        def counted(tensors):
            global SENT
            SENT += 1
            return post(tensors)

        return counted


class PostOffices(TransportFactory):
    def make(self, request):
        return PostOffice(NATIVE_TRANSPORT.make(request))


POST_OFFICE = PostOffices()
'''

TESTS = """
import gpp_plugin.testing


def test_planner():
    plans = gpp_plugin.testing.check_planner("halves")
    assert [len(stage.blocks) for stage in plans["plain chain on two ranks"].stages] == [4, 4]


def test_schedule():
    gpp_plugin.testing.check_schedule("last_first")


def test_transport():
    gpp_plugin.testing.check_transport("post_office")
"""


def train(target: str, configs: list[str]) -> list[dict[str, Any]]:
    """Train a small model under each configuration file, with the package of ``target`` installed."""
    sys.path.insert(0, target)  # as the interpreter would have it from PYTHONPATH

    import deepspeed

    import gpp_plugin
    from gpp_plugin.plugins import look_again

    look_again()
    answers = []
    for config in configs:
        model, make_batch = build("gpt2")
        batches = [make_batch(B, seed) for seed in range(STEPS)]
        wrapped = gpp_plugin.GraphPipelineModule(model, sample_batch=batches[0])
        engine = deepspeed.initialize(model=wrapped, config=config)[0]
        losses = [float(engine.train_batch(data_iter=iter([batch]))) for batch in batches]
        answers.append(
            {
                "losses": losses,
                "num_micro_batches": engine.plan.num_micro_batches(0),
                "planner": engine.plan.planner,
                "stages": [len(stage.blocks) for stage in engine.plan.stages],
                "schedules": {stage.schedule for stage in engine.plan.stages},
                "sent": getattr(sys.modules.get("gpp_stranger.transport"), "SENT", 0),
            }
        )
        engine.destroy()
    return answers


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return where the package's tests are, and where it is installed."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    home, tests = source / "gpp_stranger", source / "test_stranger.py"
    home.mkdir()
    (source / "pyproject.toml").write_text(PYPROJECT)
    (home / "__init__.py").write_text("")
    for name, page in (("planner", "adding_a_planner.md"), ("schedule", "adding_a_schedule.md")):
        blocks = read_page(ROOT / "docs" / page).blocks
        (home / f"{name}.py").write_text(next(block.text for block in blocks if block.language == "python"))
    (home / "transport.py").write_text(TRANSPORT.lstrip())
    tests.write_text(TESTS)
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--quiet", "--disable-pip-version-check"]
    done = run_python(source, "-m", "pip", "install", *options, "--target", str(target), str(source))
    assert done.returncode == 0, done.stdout + done.stderr
    return tests, target


def run_python(target: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT), str(target)])
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
    per_rank = run_ranks(train, 2, str(target), [str(path) for path in paths], timeout_s=250)
    model, make_batch = build("gpt2")
    batches = [make_batch(B, seed) for seed in range(STEPS)]
    reference = train_reference(model, batches, unit=U)
    for added, built_in in per_rank:
        assert added["losses"] == pytest.approx(built_in["losses"], rel=1e-6)
        assert added["losses"] == pytest.approx(reference.losses, rel=1e-5)
        assert (added["planner"], added["schedules"]) == ("halves", {"last_first"})
        assert len(added["stages"]) == 2 and abs(added["stages"][0] - added["stages"][1]) <= 1
        assert added["sent"] == STEPS * added["num_micro_batches"], "one message a micro-batch and direction"


def test_its_own_tests_run_the_shared_checks(folders: tuple[Path, Path]) -> None:
    tests, target = folders
    done = run_python(target, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
