"""Every patch for megatron-core applies to the pinned release, fails before and passes after."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata, util
from pathlib import Path

import pytest

from tests.waits import run_program

ROOT = Path(__file__).parents[2]
VERSION = "0.16.1"
PATCHES = sorted((ROOT / "patches" / f"megatron-core-{VERSION}").glob("*.patch"))
NUMBERS = [patch.name[:4] for patch in PATCHES]
FAILURES = {  # of each scenario, with all patches before its own
    "0001": "NCCL",
    "0002": "the gradient of source is off by 66 %",
    "0003": "Timed out waiting",
    "0004": "Mismatch in shape",
}


def installed_version() -> str:
    try:
        return metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        return "none"


pytestmark = pytest.mark.skipif(
    installed_version() != VERSION, reason=f"the patches are for megatron-core {VERSION}"
)


def copy_with(folder: Path, patches: list[Path]) -> Path:
    """Copy the communicators of the installed megatron-core and apply patches."""
    spec = util.find_spec("megatron")  # a namespace: nothing is imported
    assert spec is not None and spec.submodule_search_locations is not None
    inside = Path("core", "pipeline_parallel")
    source = Path(next(iter(spec.submodule_search_locations)), inside)
    target = folder / "megatron" / inside
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    for patch in patches:
        subprocess.run(["git", "apply", "-p1", str(patch)], cwd=folder, check=True)
    return folder


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Run every scenario with the patches before its own, and with all of them."""
    folder = tmp_path_factory.mktemp("megatron")
    everything = copy_with(folder / "all", PATCHES)
    cases = []
    for index, number in enumerate(NUMBERS):
        before = copy_with(folder / f"before_{number}", PATCHES[:index])
        cases += [[f"{number} before", number, str(before)], [f"{number} after", number, str(everything)]]
    (folder / "cases.json").write_text(json.dumps(cases))
    program = [
        sys.executable,
        str(ROOT / "tests" / "patches" / "megatron_scenarios.py"),
        str(folder / "cases.json"),
        str(folder / "out.json"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "log.txt").open("w") as log:
        run_program(program, cwd=folder, env=environment, check=True, timeout=280, stdout=log, stderr=log)
    found: dict[str, str] = json.loads((folder / "out.json").read_text())
    return found


def test_every_patch_has_a_scenario() -> None:
    assert sorted(FAILURES) == NUMBERS


@pytest.mark.parametrize("number", sorted(FAILURES))
def test_the_failure_is_there_before(number: str, outcomes: dict[str, str]) -> None:
    assert FAILURES[number] in outcomes[f"{number} before"]


@pytest.mark.parametrize("number", sorted(FAILURES))
def test_the_failure_is_gone_after(number: str, outcomes: dict[str, str]) -> None:
    assert outcomes[f"{number} after"] == "ok"
