"""Every patch applies to the pinned release of its package, fails before and passes after."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata, util
from pathlib import Path
from typing import Any

import pytest

from tests.waits import run_program

ROOT = Path(__file__).parents[2]
VERSIONS = {"deepspeed": "0.19.8", "megatron-core": "0.16.1"}
FAILURES: dict[str, dict[str, str]] = {
    # of each scenario: DeepSpeed's without any patch, megatron-core's with all patches before its own
    "deepspeed": dict.fromkeys(("0001", "0002", "0003", "0004", "0005"), ""),
    "megatron-core": {
        "0001": "NCCL",
        "0002": "the gradient of source is off by 66 %",
        "0003": "Timed out waiting",
        "0004": "Mismatch in shape",
    },
}


def patches_of(name: str) -> list[Path]:
    return sorted((ROOT / "patches" / f"{name}-{VERSIONS[name]}").glob("*.patch"))


def copy_with(folder: Path, package: str, inside: str, patches: list[Path]) -> Path:
    """Copy a folder of an installed package and apply patches."""
    spec = util.find_spec(package)  # of a namespace nothing is imported
    assert spec is not None and spec.submodule_search_locations is not None
    source = Path(next(iter(spec.submodule_search_locations)), inside)
    shutil.copytree(source, folder / package / inside)  # compiled modules too: seconds less
    for patch in patches:
        subprocess.run(["git", "apply", "-p1", str(patch)], cwd=folder, check=True)
    return folder


def run_scenarios(module: str, folder: Path, *arguments: str, path: Path = ROOT) -> dict[str, str]:
    out = folder / "out.json"
    environment = {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-m", f"tests.patches.{module}", *arguments, str(out)]
    with (folder / "log.txt").open("w") as log:
        run_program(program, cwd=folder, env=environment, check=True, timeout=280, stdout=log, stderr=log)
    found: dict[str, str] = json.loads(out.read_text())
    return found


def deepspeed_outcomes(folder: Path) -> dict[str, str]:
    """Run every scenario with a DeepSpeed without patches, and with one with all of them."""
    found = {}
    for when, patches in (("before", []), ("after", patches_of("deepspeed"))):
        copied = copy_with(folder / when, "deepspeed", ".", patches)
        outcomes = run_scenarios("deepspeed_scenarios", folder / when, path=copied)
        assert outcomes.pop("deepspeed") == str(copied / "deepspeed")
        found |= {f"{number} {when}": said for number, said in outcomes.items()}
    return found


def megatron_outcomes(folder: Path) -> dict[str, str]:
    """Run every scenario with the patches before its own, and with all of them."""
    inside, patches = "core/pipeline_parallel", patches_of("megatron-core")
    everything = copy_with(folder / "all", "megatron", inside, patches)
    cases = []
    for index, number in enumerate(FAILURES["megatron-core"]):
        before = copy_with(folder / f"before_{number}", "megatron", inside, patches[:index])
        cases += [[f"{number} before", number, str(before)], [f"{number} after", number, str(everything)]]
    (folder / "cases.json").write_text(json.dumps(cases))
    return run_scenarios("megatron_scenarios", folder, str(folder / "cases.json"))


@pytest.fixture(scope="module", params=VERSIONS)
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a package's name, and what each of its scenarios came to, before and after."""
    name = request.param
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        version = "none"
    if version != VERSIONS[name]:
        pytest.skip(f"the patches are for {name} {VERSIONS[name]}")
    run = {"deepspeed": deepspeed_outcomes, "megatron-core": megatron_outcomes}[name]
    return name, run(tmp_path_factory.mktemp(name))


@pytest.mark.parametrize("name", VERSIONS)
def test_every_patch_has_a_scenario(name: str) -> None:
    assert [patch.name[:4] for patch in patches_of(name)] == sorted(FAILURES[name])


def test_each_failure_is_there_before(outcomes: Any) -> None:
    name, found = outcomes
    for number, failure in FAILURES[name].items():
        said = found[f"{number} before"]
        assert said != "ok" and failure in said, number


def test_each_failure_is_gone_after(outcomes: Any) -> None:
    name, found = outcomes
    assert {number: found[f"{number} after"] for number in FAILURES[name]} == dict.fromkeys(
        FAILURES[name], "ok"
    )
