"""The patches in `patches/`: which of them the installed packages need, and a copy of a package with them applied.

A patch is looked for in the installed source, hunk by hunk, wherever its lines are: all of its new lines there means
that it is in, all of its old ones that it is needed. Where neither holds, the source is of another version. A patch
may name lines of the fault (``Fault: FILE: TEXT`` in its header): where none of them is left, upstream has mended it
in its own way.

Source: this project
Tests: tests/test_patch_check.py
"""

from __future__ import annotations

import contextlib
import enum
import importlib.metadata
import importlib.resources
import importlib.util
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpp_plugin.errors import ConfigError
from gpp_plugin.report.units import format_table


def _find_patches() -> Path:
    """Return the folder of the patches: inside the package in a wheel, beside it in a checkout."""
    package = Path(str(importlib.resources.files("gpp_plugin")))
    inside = package / "patches"
    return inside if inside.is_dir() else package.parent / "patches"


PATCH_DIR = _find_patches()
IMPORTED_AS = {"deepspeed": "deepspeed", "megatron-core": "megatron"}
"""Import name of each distribution that has patches."""

_FAULT = "Fault: "


class Need(enum.Enum):
    """Whether the installed package needs a patch."""

    NEEDED = "needed"
    ALREADY_IN = "already in"
    OTHER_VERSION = "not for this version"
    NOT_INSTALLED = "not installed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hunk:
    """One change: the lines it takes out with those around them, and what they become."""

    file: str
    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """A patch as its file says.

    Args:
        distribution, version: the release it was made for.
        title: the first line of its reason.
        faults: (file, text): lines of the faulty source.
    """

    path: Path
    distribution: str
    version: str
    title: str
    hunks: tuple[Hunk, ...]
    faults: tuple[tuple[str, str], ...]

    @property
    def package(self) -> str:
        """Return the top-level package whose files it changes."""
        return self.hunks[0].file.split("/")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was found for one patch; ``root`` is the folder that the package is installed in, if it is."""

    patch: Patch
    need: Need
    installed: str
    root: Path | None


def read_patches(folder: Path) -> tuple[Patch, ...]:
    """Read all patches below ``folder``, in the order in which they are applied.

    Raises:
        ConfigError: there are none, or a file is no patch.
    """
    paths = sorted(folder.glob("*/*.patch"))
    if not paths:
        raise ConfigError(
            f"--patches: no patches in {folder}; give the directory with the folders PACKAGE-VERSION"
        )
    return tuple(_read_patch(path) for path in paths)


def _read_patch(path: Path) -> Patch:
    distribution, _, version = path.parent.name.rpartition("-")
    lines = path.read_text(encoding="utf-8").splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith("--- a/")), None)
    hunks = _read_hunks(lines[start:]) if start is not None else ()
    if not hunks:
        raise ConfigError(f"{path}: not a patch, it changes no file")
    faults = [line.removeprefix(_FAULT).partition(": ") for line in lines[:start] if line.startswith(_FAULT)]
    return Patch(
        path=path,
        distribution=distribution,
        version=version,
        title=lines[0],
        hunks=hunks,
        faults=tuple((file, text) for file, _, text in faults),
    )


def _read_hunks(lines: Sequence[str]) -> tuple[Hunk, ...]:
    hunks: list[Hunk] = []
    file, before, after = "", [], []  # type: str, list[str], list[str]

    # A unified diff, line by line; each @@ block is a hunk of its own. Context lines are in both versions:
    #
    #   --- a/deepspeed/runtime/pipe/engine.py
    #   +++ b/deepspeed/runtime/pipe/engine.py       file
    #   @@ -10,3 +10,3 @@                            line numbers are not used: other releases have moved them
    #    a                                           before: a b c        after: a B c
    #   -b
    #   +B
    #    c
    def close() -> None:
        if before or after:
            hunks.append(Hunk(file=file, before=tuple(before), after=tuple(after)))
        before.clear()
        after.clear()

    for line in lines:
        if line.startswith(("--- a/", "@@")):
            close()
        elif line.startswith("+++ b/"):
            file = line.removeprefix("+++ b/").split("\t")[0]
        elif line.startswith(("+", "-", " ")) or not line:
            if not line.startswith("+"):
                before.append(line[1:])
            if not line.startswith("-"):
                after.append(line[1:])
    close()
    return tuple(hunks)


def find_need(patch: Patch, root: Path) -> Need:
    """Return whether the package below ``root`` needs a patch."""
    # "Already in" first: where a patch only adds lines around a context, old and new may both be found.
    sources = {hunk.file: _lines(root / hunk.file) for hunk in patch.hunks}
    if all(_contains(sources[hunk.file], hunk.after) for hunk in patch.hunks):
        return Need.ALREADY_IN
    if all(_contains(sources[hunk.file], hunk.before) for hunk in patch.hunks):
        return Need.NEEDED
    # Neither old nor new lines: another release. If all files of the named faults are there and none of the
    # faulty text is, upstream has mended it differently; otherwise nothing can be said.
    is_known = bool(patch.faults) and all(_lines(root / file) for file, _ in patch.faults)
    faulty = (text in line for file, text in patch.faults for line in _lines(root / file))
    return Need.ALREADY_IN if is_known and not any(faulty) else Need.OTHER_VERSION


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


def _contains(lines: Sequence[str], wanted: Sequence[str]) -> bool:
    count = len(wanted)
    return any(tuple(lines[i : i + count]) == wanted for i in range(len(lines) - count + 1))


def check_patches(patches: Sequence[Patch], roots: Mapping[str, Path] | None = None) -> tuple[Finding, ...]:
    """Look for every patch in the installed packages.

    Args:
        roots: package -> the folder it is in, instead of where Python would import it from.
    """
    findings = []
    for patch in patches:
        root = roots.get(patch.package) if roots is not None else package_root(patch.package)
        need = Need.NOT_INSTALLED if root is None else find_need(patch, root)
        installed = installed_version(patch.distribution) or "-"
        findings.append(Finding(patch=patch, need=need, installed=installed, root=root))
    return tuple(findings)


def package_root(package: str) -> Path | None:
    """Return the folder that a top-level package is in, without importing it; None where there is none."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))).parent


def installed_version(name: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def apply_commands(findings: Sequence[Finding]) -> list[str]:
    """Return the commands that apply the patches that are needed, one a folder, in the order of the patches."""
    needed: dict[Path, list[Path]] = {}
    for finding in findings:
        if finding.need is Need.NEEDED and finding.root is not None:
            needed.setdefault(finding.root, []).append(finding.patch.path)
    apply = ("apply", "-p1")
    return [shlex.join(["git", "-C", str(root), *apply, *map(str, paths)]) for root, paths in needed.items()]


def report_patches(folder: Path) -> dict[str, Any]:
    """Print which patches are needed and the command that applies them; return the same as JSON types.

    Raises:
        ConfigError: there are no patches in ``folder``.
    """
    findings = check_patches(read_patches(folder))
    rows = [
        {
            "package": finding.patch.distribution,
            "made_for": finding.patch.version,
            "installed": finding.installed,
            "patch": finding.patch.path.stem,
            "need": finding.need.value,
            "title": finding.patch.title,
        }
        for finding in findings
    ]
    header = ["package", "installed", "patch", "need"]
    print(format_table(header, [[row[key] for key in header] for row in rows], left=4))
    commands = apply_commands(findings)
    if commands:
        print("\ngpp_plugin works without them. To apply those that are needed:")
        print("\n".join(commands))
    else:
        print("\nnothing to apply")
    return {"rows": rows, "commands": commands, "ok": True}


def patches_for(package: str) -> tuple[Path, ...]:
    """Return the patches for the installed release of the distribution ``package``, in their order.

    Raises:
        ConfigError: it is not installed, or there are none for that release.
    """
    version = installed_version(package)
    if version is None:
        raise ConfigError(f"{package} is not installed; install it to use its patches")
    found = tuple(sorted((PATCH_DIR / f"{package}-{version}").glob("*.patch")))
    if not found:
        known = sorted(folder.name for folder in PATCH_DIR.glob(f"{package}-*"))
        raise ConfigError(
            f"there are no patches for {package} {version} (there are for {', '.join(known) or 'none'}); run from a "
            "checkout of this repository with a pinned release"
        )
    return found


@contextlib.contextmanager
def patched_package(package: str) -> Iterator[Path]:
    """Yield a folder that holds a patched copy of an installed distribution; put it first on PYTHONPATH.

    Raises:
        ConfigError: as for `patches_for`, or a patch does not apply to what is installed.
    """
    patches = patches_for(package)
    root = package_root(IMPORTED_AS[package])
    assert root is not None, "patches_for found it installed"
    source = root / IMPORTED_AS[package]
    with tempfile.TemporaryDirectory(prefix="gpp_patched_") as name:
        folder = Path(name)
        # The whole package is copied, since a folder on PYTHONPATH hides the installed package, not single files of
        # it; the environment itself, which others share, stays as it was installed.
        shutil.copytree(source, folder / source.name, ignore=shutil.ignore_patterns("__pycache__"))
        for patch in patches:
            done = subprocess.run(
                ["git", "apply", "-p1", str(patch)], cwd=folder, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise ConfigError(
                    f"{patch.name} does not apply to the installed {package}: {done.stderr.strip().splitlines()[0]}; "
                    "is it patched already? Install the release anew"
                )
        yield folder
