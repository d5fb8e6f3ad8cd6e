"""`gpp doctor`: what is installed, which backends and devices really work, and what to do about the rest.

Backends are really tried: two processes send and receive over gloo, and over NCCL where there are two devices.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import importlib.metadata
import importlib.resources
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpp_plugin.config.deepspeed_keys import KEYS, KeyVerdict
from gpp_plugin.doctor.preflight import (
    Check,
    Status,
    add_preflight_arguments,
    check_optimizer,
    print_advice,
    print_checks,
    run_preflight,
)
from gpp_plugin.errors import ConfigError, GppError, RuntimeFailure
from gpp_plugin.launch import emit_event, end_rank, run_ranks
from gpp_plugin.report.units import format_bytes, format_table

# The patches in `patches/`: which of them the installed packages need, and a copy of a package with them applied.
#
# A patch is looked for in the installed source, hunk by hunk, wherever its lines are: all of its new lines there means
# that it is in, all of its old ones that it is needed. Where neither holds, the source is of another version. A patch
# may name lines of the fault (``Fault: FILE: TEXT`` in its header): where none of them is left, upstream has mended it
# in its own way.


_INSIDE = Path(str(importlib.resources.files("gpp_plugin"))) / "patches"
PATCH_DIR = _INSIDE if _INSIDE.is_dir() else _INSIDE.parents[1] / "patches"
"""The folder of the patches: inside the package in a wheel, beside it in a checkout."""
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
    paths = sorted(folder.resolve().glob("*/*.patch"))  # `git -C` runs in another folder
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
    return Path(next(iter(spec.submodule_search_locations))).resolve().parent


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


Version = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A distribution and the versions this release works with.

    Args:
        least: the first version that works; ``tested`` the last one tried.
        purpose: what it is for, where training does without it.
    """

    name: str
    least: Version
    tested: Version
    purpose: str = ""


# The ends of what `.ci/versions.py` was run with are those of torch and transformers (docs/gpus.md has the table);
# setup.py requires the same least ones.
PACKAGES = (
    Package(name="torch", least=(2, 11), tested=(2, 13)),
    Package(name="deepspeed", least=(0, 19), tested=(0, 19)),
    Package(name="networkx", least=(3, 2), tested=(3, 6)),
    Package(name="numpy", least=(1, 26), tested=(2, 4)),
    Package(name="pydantic", least=(2, 7), tested=(2, 14)),
    Package(name="rich", least=(13,), tested=(15,)),
    Package(name="safetensors", least=(0, 4, 5), tested=(0, 8)),
    Package(name="transformers", least=(5, 17), tested=(5, 23), purpose="HuggingFace models"),
    Package(name="scikit-learn", least=(1, 5), tested=(1, 9), purpose="gpp demo"),
    Package(name="tensorboard", least=(2, 18), tested=(2, 21), purpose="the tensorboard monitor"),
    Package(name="megatron-core", least=(0, 16), tested=(0, 16), purpose="stages of Megatron modules"),
)
_MODULE = "gpp_plugin.doctor.checks"
"""This module, by name also where it runs as a script."""
EXCHANGE_TIMEOUT_S = 90.0
IMPORT_TIMEOUT_S = 120.0
NUM_VALUES = 1 << 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gpp doctor`."""
    parser.add_argument(
        "--patches",
        nargs="?",
        type=Path,
        const=PATCH_DIR,
        metavar="DIRECTORY",
        help="only say which patches the installed DeepSpeed and megatron-core need, and how to apply them",
    )
    parser.add_argument(
        "--keys",
        action="store_true",
        help="only list every key of DeepSpeed's configuration: honoured, refused or without effect",
    )
    add_preflight_arguments(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Print every check and its advice; ``ok`` of the result is false if training cannot work.

    Raises:
        ConfigError: the directory of --patches has none, or as `run_preflight`.
    """
    if args.patches is not None:
        return report_patches(args.patches)
    if args.keys:
        return report_keys()
    if args.gpus is not None:
        return run_preflight(args)
    checks = list(run_checks())
    print_checks(checks)
    print_advice(checks)
    broken = [check.name for check in checks if check.is_failure]
    print("\n" + (f"training cannot work: {', '.join(broken)}" if broken else "everything required works"))
    return {
        "rows": [{**asdict(check), "status": check.status.value} for check in checks],
        "ok": not broken,
        "broken": broken,
    }


def report_keys() -> dict[str, Any]:
    """Print what becomes of every key of DeepSpeed's configuration under a ``graph_pipeline`` block."""
    header = ["key", "verdict", "note"]
    rows = [[key.path, key.verdict.value, key.note] for key in KEYS.values()]
    print(format_table(header, rows, left=3))
    counts = {verdict.value: sum(row[1] == verdict.value for row in rows) for verdict in KeyVerdict}
    print("\n" + ", ".join(f"{count} {name}" for name, count in counts.items()) + f"; {len(rows)} keys")
    return {"rows": [dict(zip(header, row, strict=True)) for row in rows], "counts": counts}


def run_checks() -> Iterator[Check]:
    """Yield the checks, the cheap ones first; a backend is tried only where torch imports."""
    yield check_python(sys.version_info[:3])
    for package in PACKAGES:
        yield check_package(package, installed_version(package.name))
    hook = check_hook()
    yield hook
    yield check_compiler(shutil.which)
    yield check_machine()
    if hook.status is Status.OK:
        yield check_optimizer()
        yield from check_backends()
        yield check_exchange("gloo")
        yield from check_cuda()


def check_python(version: Version) -> Check:
    """Check the interpreter."""
    found = ".".join(map(str, version))
    if version < (3, 11):
        advice = "install Python 3.11 or newer and make the environment anew: make PYTHON=python3.11 install"
        return Check(name="python", status=Status.FAILED, found=found, advice=advice)
    return Check(name="python", status=Status.OK, found=found)


def parse_version(text: str) -> Version:
    """Return the release numbers of a version.

    >>> parse_version("2.13.0+cpu"), parse_version("5.0rc1"), parse_version("0.16.1.post2")
    ((2, 13, 0), (5, 0), (0, 16, 1))
    """
    # Pre-releases count as the release: 5.0rc1 has what 5.0 requires.
    numbers = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in numbers[0].split(".")) if numbers else ()


def check_package(package: Package, version: str | None) -> Check:
    """Check one distribution against the versions this release works with."""
    least, tested = (".".join(map(str, each)) for each in (package.least, package.tested))
    status, advice = Status.OK, ""
    if version is None:
        purpose = f" for {package.purpose}" if package.purpose else ""
        status, advice = Status.MISSING, f"pip install '{package.name}>={least}'{purpose}"
    elif parse_version(version) < package.least:
        advice = f"{version} is older than {least}: pip install --upgrade '{package.name}>={least}'"
        status = Status.FAILED
    # Compared by the numbers of ``tested``: with tested (2, 13), 2.13.1 is fine and 2.14.0 is newer. Newer is a
    # warning: most newer releases work, and a user should look here first where one does not.
    elif parse_version(version)[: len(package.tested)] > package.tested:
        advice = f"{version} is newer than {tested}, the last one tried; if something fails, try {tested}"
        status = Status.WARNING
    required = not package.purpose
    return Check(name=package.name, status=status, found=version or "-", advice=advice, is_required=required)


def check_backends() -> Iterator[Check]:
    """Check what stages that train nothing may run on beside torch's operators; nothing is built."""
    from gpp_plugin.plugins import BACKENDS, find_backend

    for name in BACKENDS.names():
        if name == "torch":
            continue
        status, found, advice = Status.OK, "-", ""
        try:
            backend = find_backend(name)
            if reason := backend.missing():
                status, advice = Status.MISSING, f"{reason} (to run frozen stages on it)"
            else:
                found = backend.version()
        except GppError as error:
            status, advice = Status.FAILED, str(error)
        yield Check(name=f"backend {name}", status=status, found=found, advice=advice, is_required=False)


def check_hook() -> Check:
    """Check in a fresh process that `import gpp_plugin` makes `deepspeed.initialize` honour the block."""
    name = "deepspeed hook"
    # A process of its own: here deepspeed may be imported already, or be wrapped. DeepSpeed first, then this
    # package: the harder of the two orders, in which the wrapper comes too late to catch the import itself.
    code = (
        "import deepspeed; stock = deepspeed.initialize; import gpp_plugin; "
        "assert deepspeed.initialize is not stock, 'deepspeed.initialize is not wrapped'"
    )
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        found = f"importing deepspeed took more than {IMPORT_TIMEOUT_S:g} s"
        advice = "run python -X importtime -c 'import deepspeed' to see what hangs"
        return Check(name=name, status=Status.FAILED, found=found, advice=advice)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        advice = "import torch, deepspeed and gpp_plugin one by one in python; reinstall the one that fails"
        return Check(name=name, status=Status.FAILED, found=lines[-1], advice=advice)
    return Check(name=name, status=Status.OK, found="deepspeed.initialize reads graph_pipeline")


def check_compiler(find: Callable[[str], str | None]) -> Check:
    """Check for a C++ compiler, which DeepSpeed's native optimizers and torch.compile need."""
    for compiler in ("c++", "g++", "clang++"):
        if find(compiler):
            return Check(name="compiler", status=Status.OK, found=compiler, is_required=False)
    advice = "install g++ if you use DeepSpeed's native optimizers (torch's need none)"
    return Check(name="compiler", status=Status.MISSING, found="-", advice=advice, is_required=False)


def check_machine() -> Check:
    """Report cores and memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = f"{platform.system()} {platform.machine()}, {cores} cores, {format_bytes(memory)} memory"
    return Check(name="machine", status=Status.OK, found=found)


def check_exchange(backend: str) -> Check:
    """Exchange tensors between two processes over ``backend`` and check what arrived."""
    name, is_gloo, status, advice = f"{backend} send/receive", backend == "gloo", Status.OK, ""
    try:
        # Really tried: torch reports gloo as available on machines where a firewall stops its sockets.
        events = [*run_ranks(_MODULE, [backend], num_ranks=2, timeout_s=EXCHANGE_TIMEOUT_S)]
        found = f"2 processes, round trip of 256 KiB in {events[-1]['us']:.0f} us"
    except RuntimeFailure as error:
        status, found = Status.FAILED, str(error).splitlines()[-1]
        advice = "set NCCL_DEBUG=INFO and run gpp doctor again; check driver and NCCL versions"
        if is_gloo:
            advice = (
                "look for a firewall or host name trouble between processes of this machine (GLOO_SOCKET_IFNAME=lo "
                "names the interface)"
            )
    return Check(name=name, status=status, found=found, advice=advice, is_required=is_gloo)


def check_cuda() -> Iterator[Check]:
    """Report CUDA devices, and try NCCL between two of them."""
    import torch

    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
        found = f"no device (torch is {built})"
        advice = "training runs on the CPU over gloo; install a CUDA build of torch to use a GPU"
        yield Check(name="cuda", status=Status.MISSING, found=found, advice=advice, is_required=False)
        return
    # NCCL refuses two ranks on one device ("Duplicate GPU detected"), so one device cannot try it.
    count = torch.cuda.device_count()
    properties = torch.cuda.get_device_properties(0)
    found = f"{count} x {properties.name}, {format_bytes(properties.total_memory)}, CUDA {torch.version.cuda}"
    yield Check(name="cuda", status=Status.OK, found=found, is_required=False)
    if count > 1:
        yield check_exchange("nccl")
        return
    found = f"{'.'.join(map(str, torch.cuda.nccl.version()))}, not tried"
    advice = "one device cannot host two NCCL ranks; several ranks share it and exchange messages over gloo"
    yield Check(name="nccl", status=Status.WARNING, found=found, advice=advice, is_required=False)


def _exchange(backend: str) -> None:
    """Be one of two ranks: send a tensor, get it back negated; rank 0 reports the time."""
    import time

    import torch
    import torch.distributed as dist

    # rank 0   send --->  recv, compare        a round trip of 2 x 256 KiB, three times; rank 1   recv,
    # negate, send --->         the last one is timed, when the connection is there
    #
    # Negated, so that a transport that returns the sender's own buffer is found out.
    dist.init_process_group(backend)
    rank = dist.get_rank()
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    sent = torch.arange(NUM_VALUES, dtype=torch.float32, device=device)
    received = torch.empty_like(sent)
    seconds = 0.0
    for _ in range(3):  # the first exchange also connects
        start = time.perf_counter()
        if rank == 0:
            dist.send(sent, dst=1)
            dist.recv(received, src=1)
            if not torch.equal(received, -sent):
                raise GppError(f"{backend}: what came back is not what was sent")
        else:
            dist.recv(received, src=0)
            dist.send(-received, dst=0)
        seconds = time.perf_counter() - start
    if rank == 0:
        emit_event(us=seconds * 1e6)
    dist.barrier()
    end_rank()


if __name__ == "__main__":
    _exchange(sys.argv[1])
