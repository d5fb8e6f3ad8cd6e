"""gpp doctor --patches: what it says of packages without patches, with all or one of them, and of other versions."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpp_plugin.cli import main
from gpp_plugin.doctor import checks
from gpp_plugin.doctor.checks import (
    IMPORTED_AS,
    PATCH_DIR,
    Need,
    apply_commands,
    check_patches,
    package_root,
    patched_package,
    patches_for,
    read_patches,
)
from gpp_plugin.errors import ConfigError

PATCHES = read_patches(PATCH_DIR)
PACKAGES = sorted({patch.package for patch in PATCHES})
HAS_PINNED = all(
    checks.installed_version(patch.distribution) == patch.version for patch in PATCHES
)  # as constraints.txt asks for

needs_pinned = pytest.mark.skipif(not HAS_PINNED, reason="DeepSpeed or megatron-core of another version")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a folder with the files of the installed packages that patches change."""
    for file in {hunk.file for patch in PATCHES for hunk in patch.hunks}:
        source = package_root(file.split("/")[0])
        assert source is not None
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / file, tmp_path / file)
    return tmp_path


def needs(root: Path) -> list[Need]:
    return [finding.need for finding in check_patches(PATCHES, dict.fromkeys(PACKAGES, root))]


def test_patches_are_read_whole() -> None:
    assert PACKAGES == ["deepspeed", "megatron"]
    for patch in PATCHES:
        text = patch.path.read_text()
        assert len(patch.hunks) == sum(line.startswith("@@") for line in text.splitlines())
        assert patch.title == text.splitlines()[0]
        assert all(file in {hunk.file for hunk in patch.hunks} for file, _ in patch.faults)


@needs_pinned
def test_the_pinned_releases_need_all_and_the_command_applies_them(root: Path) -> None:
    assert set(needs(root)) == {Need.NEEDED}
    (command,) = apply_commands(check_patches(PATCHES, dict.fromkeys(PACKAGES, root)))
    subprocess.run(shlex.split(command), check=True)
    assert set(needs(root)) == {Need.ALREADY_IN}
    assert apply_commands(check_patches(PATCHES, dict.fromkeys(PACKAGES, root))) == []


@needs_pinned
@pytest.mark.parametrize("distribution", IMPORTED_AS)
def test_a_copy_is_patched_and_the_installed_package_is_not(distribution: str) -> None:
    own = [patch for patch in PATCHES if patch.distribution == distribution]
    with patched_package(distribution) as folder:
        copied = check_patches(own, {IMPORTED_AS[distribution]: folder})
    assert {finding.need for finding in copied} == {Need.ALREADY_IN}
    assert {finding.need for finding in check_patches(own)} == {Need.NEEDED}
    assert not folder.exists()


def test_a_distribution_without_patches_takes_one_line() -> None:
    with pytest.raises(ConfigError, match="no-such-thing is not installed"):
        patches_for("no-such-thing")
    with pytest.raises(ConfigError, match=r"no patches for numpy .*run from a checkout"):
        patches_for("numpy")


@needs_pinned
@pytest.mark.parametrize("index", range(len(PATCHES)), ids=[patch.path.stem for patch in PATCHES])
def test_one_patch_alone_is_told_from_the_others(index: int, root: Path) -> None:
    subprocess.run(["git", "apply", "-p1", str(PATCHES[index].path)], cwd=root, check=True)
    expected = [Need.ALREADY_IN if i == index else Need.NEEDED for i in range(len(PATCHES))]
    assert needs(root) == expected


@needs_pinned
def test_what_upstream_mended_in_its_own_way_is_in(root: Path) -> None:
    numbers = {patch.path.stem: index for index, patch in enumerate(PATCHES)}
    join = numbers["0004-join-along-the-batch-dimension"]
    file = root / PATCHES[join].hunks[0].file
    text = file.read_text()
    file.write_text(text.replace("_list, dim=0)", "_list, dim=self._batch_dim)"))
    assert needs(root)[join] is Need.ALREADY_IN
    file.write_text(text.replace("# Concatenate received", "# Join the received"))
    assert needs(root)[join] is Need.OTHER_VERSION, "the fault is there, in other lines"


@needs_pinned
def test_commands_name_files_that_are_there_from_any_folder(
    root: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "own").symlink_to(PATCH_DIR, target_is_directory=True)
    monkeypatch.chdir(folder)
    (command,) = apply_commands(check_patches(read_patches(Path("own")), dict.fromkeys(PACKAGES, root)))
    monkeypatch.chdir("/")
    named = [word for word in shlex.split(command) if word.endswith(".patch")]
    assert len(named) == len(PATCHES) and all(Path(word).is_file() for word in named)


def test_packages_without_the_files_or_not_there_at_all(tmp_path: Path) -> None:
    assert set(needs(tmp_path)) == {Need.OTHER_VERSION}
    assert {finding.need for finding in check_patches(PATCHES, {})} == {Need.NOT_INSTALLED}


@needs_pinned
def test_the_command_line(root: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "package_root", lambda package: root if package == "deepspeed" else None)
    assert main(["doctor", "--patches", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert [row["patch"] for row in result["rows"]] == [patch.path.stem for patch in PATCHES]
    assert {row["need"] for row in result["rows"] if row["package"] == "megatron-core"} == {"not installed"}
    assert lines[0].split() == ["package", "installed", "patch", "need"]
    assert all(command in lines for command in result["commands"])


def test_a_directory_without_patches_takes_one_line(tmp_path: Path, capsys: Any) -> None:
    assert main(["doctor", "--patches", str(tmp_path)]) == 1
    advice = "give the directory with the folders PACKAGE-VERSION"
    assert capsys.readouterr().err == f"gpp doctor: --patches: no patches in {tmp_path}; {advice}\n"
    broken = tmp_path / "deepspeed-1.0" / "0001-nothing.patch"
    broken.parent.mkdir()
    broken.write_text("Nothing\n")
    assert main(["doctor", "--patches", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"gpp doctor: {broken}: not a patch, it changes no file\n"
