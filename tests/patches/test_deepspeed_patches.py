"""Every patch for DeepSpeed applies to the pinned release, fails before and passes after."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata, util
from pathlib import Path

import pytest

from tests.patches.deepspeed_scenarios import SCENARIOS
from tests.waits import run_program

ROOT = Path(__file__).parents[2]
VERSION = "0.19.8"
PATCHES = sorted((ROOT / "patches" / f"deepspeed-{VERSION}").glob("*.patch"))

pytestmark = pytest.mark.skipif(
    metadata.version("deepspeed") != VERSION, reason=f"the patches are for deepspeed {VERSION}"
)


def outcomes(folder: Path, *, is_patched: bool) -> dict[str, str]:
    """Copy the installed DeepSpeed, apply all patches or none, and run every scenario with it."""
    spec = util.find_spec("deepspeed")
    assert spec is not None and spec.origin is not None
    shutil.copytree(Path(spec.origin).parent, folder / "deepspeed")  # compiled modules too: seconds less
    for patch in PATCHES if is_patched else ():
        subprocess.run(["git", "apply", "-p1", str(patch)], cwd=folder, check=True)
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    program = [
        sys.executable,
        str(ROOT / "tests" / "patches" / "deepspeed_scenarios.py"),
        str(folder / "out.json"),
    ]
    with (folder / "log.txt").open("w") as log:
        run_program(program, cwd=folder, env=environment, check=True, timeout=200, stdout=log, stderr=log)
    found: dict[str, str] = json.loads((folder / "out.json").read_text())
    assert found.pop("deepspeed") == str(folder / "deepspeed")
    return found


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return outcomes(tmp_path_factory.mktemp("pristine"), is_patched=False)


@pytest.fixture(scope="module")
def after(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return outcomes(tmp_path_factory.mktemp("patched"), is_patched=True)


def test_every_patch_has_a_scenario() -> None:
    assert [patch.name[:4] for patch in PATCHES] == sorted(SCENARIOS)


@pytest.mark.parametrize("number", sorted(SCENARIOS))
def test_the_failure_is_there_before(number: str, before: dict[str, str]) -> None:
    assert before[number] != "ok"


@pytest.mark.parametrize("number", sorted(SCENARIOS))
def test_the_failure_is_gone_after(number: str, after: dict[str, str]) -> None:
    assert after[number] == "ok"
