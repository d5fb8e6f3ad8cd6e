#!/usr/bin/env python3
"""Builds sdist and wheel, installs the wheel away from the checkout, and trains, plans and measures with it there.

.venv/bin/python .ci/wheel.py [--quick] [--keep FOLDER] [--pythons python3.12 python3.13 ...]

With --quick it trains two steps and plans once, and no more.

The environment it makes holds the wheel alone and sees the dependencies of the Python that runs this, so nothing is
downloaded. An editable install in that Python is not seen: what a `.pth` file there does is not done again.

For every further interpreter, named here or in WHEEL_PYTHONS (`make wheel-check PYTHONS="python3.12 python3.13"`), a
bare environment is made, the wheel and all it needs installed by pip, and the same commands run there. A name is looked
for in PATH; one that is not there, or does not run, fails the check, but for `auto`: all of `AUTO` that do.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = (".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".cache", "*.pyc")
"""What is in a checkout but in no release."""
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
AUTO = ("python3.12", "python3.13", "python3.14")
"""What `auto` looks for."""
EXTRAS = "demo,hf,report"
"""What the commands below need in a bare environment."""
PROBE = "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))"
INSTALL_S = 1800.0
"""An index far away and a torch of gigabytes."""
SMALL = "--devices 2 --stages 2 --mini-batch 4 --loss-unit 2 --length 8 --steps 1 --modes single,stock,graph".split()
"""A comparison that trains for real, and quickly."""
WHERE = (
    "import gpp_plugin, gpp_benchmarks, importlib.metadata as m; "
    "assert m.version('gpp_plugin') == gpp_plugin.__version__; "
    "print(gpp_plugin.__file__, gpp_benchmarks.__file__)"
)


class CheckFailed(Exception):
    """The message says which step went wrong and how."""


def main() -> int:
    """Run all steps; return 0 if each of them worked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--keep", type=Path, help="keep sdist, wheel and environment in this folder")
    parser.add_argument("--quick", action="store_true", help="train two steps and plan once, and no more")
    parser.add_argument(
        "--pythons",
        nargs="*",
        default=os.environ.get("WHEEL_PYTHONS", "").split(),
        help="further interpreters to install into and run with (WHEEL_PYTHONS)",
    )
    args = parser.parse_args()
    start = time.monotonic()
    try:
        pythons = find_pythons(args.pythons)
        if args.keep is not None:
            shutil.rmtree(args.keep, ignore_errors=True)
            args.keep.mkdir(parents=True)
            check(args.keep.resolve(), pythons, is_quick=args.quick)
        else:
            with tempfile.TemporaryDirectory(prefix="gpp_wheel_") as folder:
                check(Path(folder), pythons, is_quick=args.quick)
    except CheckFailed as error:
        print(f"wheel: {error}", file=sys.stderr)
        return 1
    print(f"wheel: built, installed and used in {time.monotonic() - start:.0f} s")
    return 0


def find_pythons(names: Sequence[str]) -> list[str]:
    """Return the interpreters of these names; of ``auto`` those that are there and run.

    Raises:
        CheckFailed: a name is not in PATH, or does not run, or is older than what the package needs.
    """
    found = []
    for name in names:
        for each in AUTO if name == "auto" else (name,):
            path = shutil.which(each)
            if path is None:
                why = "is not in PATH"
            elif subprocess.run([path, "-c", PROBE], capture_output=True, check=False).returncode != 0:
                why = "is there, but does not run, is older than 3.11 or has no venv"
            else:
                found.append(path)
                continue
            if name != "auto":
                raise CheckFailed(f"{each} {why}; name interpreters that do, by name or path, or `auto`")
    return found


def check(folder: Path, pythons: Sequence[str] = (), *, is_quick: bool = False) -> None:
    """Build in ``folder``, install there and run; then in a bare environment of each further interpreter.

    Raises:
        CheckFailed: a step failed, or a file is missing.
    """
    sdist, wheel = build(folder)
    check_files(sdist, wheel)
    use(folder, install(folder, wheel), is_quick=is_quick)
    for number, python in enumerate(pythons):
        inner = folder / f"bare{number}"
        inner.mkdir()
        use(inner, install_bare(inner, wheel, python), is_quick=is_quick)


def build(folder: Path) -> tuple[Path, Path]:
    """Return the sdist of this checkout, and the wheel made from nothing but that sdist."""
    # From copies: `build/` and `*.egg-info` of a checkout remember files that are gone by now.
    source = folder / "source"
    shutil.copytree(ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
    run([sys.executable, "-c", BUILD, "build_sdist", folder], cwd=source)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    run([sys.executable, "-c", BUILD, "build_wheel", folder], cwd=unpacked)
    (wheel,) = folder.glob("*.whl")
    return sdist, wheel


def check_files(sdist: Path, wheel: Path) -> None:
    """Compare what is packed with what lies in the checkout.

    Raises:
        CheckFailed: a file of the checkout is missing.
    """
    source = sdist.parent / "source"
    here = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()} - {".gitignore"}
    with tarfile.open(sdist) as archive:
        _require(sdist, here, {name.partition("/")[2] for name in archive.getnames()})
    # In the wheel a file lies where it is imported from: benchmarks/ is no package, patches/ is one inside.
    packed = {name for name in here if name.startswith("gpp_plugin/")}
    packed |= {
        name.removeprefix("benchmarks/") for name in here if name.startswith("benchmarks/gpp_benchmarks/")
    }
    packed |= {f"gpp_plugin/{name}" for name in here if name.startswith("patches/")}
    with zipfile.ZipFile(wheel) as archive:
        _require(wheel, packed, set(archive.namelist()))


def _require(archive: Path, wanted: set[str], found: set[str]) -> None:
    missing = sorted(wanted - found)
    if missing:
        raise CheckFailed(
            f"{archive.name} lacks {len(missing)} files of the checkout: {', '.join(missing[:5])}, ...; does every "
            "folder have an __init__.py, and does MANIFEST.in or package_data of setup.py name them?"
        )
    print(f"{archive.name}: {len(wanted)} files, none missing", flush=True)


def install(folder: Path, wheel: Path) -> Path:
    """Return the Python of an environment with the wheel."""
    run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"])
    python = folder / "venv" / "bin" / "python"
    run([sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel])
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    # A folder named in a .pth file is looked into last, and its own .pth files, an editable install among them, not.
    dependencies = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "dependencies.pth").write_text("".join(f"{path}\n" for path in dependencies))
    return python


def install_bare(folder: Path, wheel: Path, interpreter: str) -> Path:
    """Return the Python of an environment that pip put the wheel and all that it needs into."""
    run([interpreter, "-m", "venv", folder / "venv"])
    python = folder / "venv" / "bin" / "python"
    print(run([python, "-VV"]).strip(), flush=True)
    pip = [python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt"]
    run([*pip, "setuptools", "wheel", f"torch=={release_of_torch()}"], timeout_s=INSTALL_S)
    run([*pip, "--no-build-isolation", f"{wheel}[{EXTRAS}]"], timeout_s=INSTALL_S)
    return python


def release_of_torch() -> str:
    """Return the release of torch that the Makefile installs."""
    words = (ROOT / "Makefile").read_text(encoding="utf-8").split()
    return next(word for word in words if word.startswith("torch==")).removeprefix("torch==")


def use(folder: Path, python: Path, *, is_quick: bool = False) -> None:
    """Train, plan, simulate, measure and run the demo from an empty directory; if quick, train and plan.

    Raises:
        CheckFailed: a command failed, or something was imported from elsewhere than the wheel.
    """
    work = folder / "work"
    work.mkdir()
    shutil.copy(ROOT / ".ci" / "wheel_job.py", work)
    gpp = python.parent / "gpp"
    for file in run([python, "-c", WHERE], cwd=work).split():
        _require_inside(folder, file)
    ranks = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    line = next(
        line for line in run([*ranks, "wheel_job.py"], cwd=work).splitlines() if line.startswith('{"losses"')
    )
    print(line, flush=True)
    trained = json.loads(line)
    _require_inside(folder, trained["package"])
    if len(trained["losses"]) != 2 or len(trained["stages"]) != 2:
        raise CheckFailed(f"two steps in two stages were asked for; trained: {line}")
    for how in ("missing", "broken"):  # all that an extra brings
        run([*ranks, "wheel_job.py", how], cwd=work)
    run([gpp, "plan", "clip-l14", "--devices", "4", "--cluster", "dgx_a100", "--out", "plan.json"], cwd=work)
    if is_quick:
        return
    for arguments in (
        ["doctor"],
        ["doctor", "--patches"],
        ["plan", "llava-7b", "--devices", "8", "--cluster", "dgx_h100", "--against", "none"],
        ["compare", "mmt", "--size", "branches=2", "--cluster", "summit", "--modes", "single,stock,graph"],
        ["compare", "gpt2_tiny", *SMALL],
        ["simulate", "plan.json"],
        ["report", "plan.json"],
        ["bench", "autopipe", "--planners", "autopipe"],
        ["demo", "--steps", "2", "--ranks", "2", "--stages", "2"],
    ):
        run([gpp, *arguments], cwd=work)


def _require_inside(folder: Path, file: str) -> None:
    if not Path(file).resolve().is_relative_to(folder.resolve() / "venv"):
        raise CheckFailed(f"{file} was imported, and not what the wheel installed in {folder / 'venv'}")


def run(command: Sequence[str | Path], *, cwd: Path | None = None, timeout_s: float = 300.0) -> str:
    """Return what a command prints; nothing of this checkout is in its environment.

    Raises:
        CheckFailed: its exit code is not 0, or the time ran out.
    """
    words = [str(word) for word in command]
    name = " ".join([Path(words[0]).name, *words[1:]])[:100]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment |= {
        "OMP_NUM_THREADS": "1",
        "DS_BUILD_OPS": "0",
        "PATH": os.pathsep.join(
            [str(Path(words[0]).parent), str(Path(sys.executable).parent), os.environ["PATH"]]
        ),
    }
    if cwd is not None:
        environment["XDG_CACHE_HOME"] = str(cwd / ".cache")
    start = time.monotonic()
    process = subprocess.Popen(
        words,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # ranks that a command started are in its session
        process.wait()
        raise CheckFailed(f"`{name}` did not end within {timeout_s:g} s") from None
    if process.returncode:
        last = "\n".join(printed.splitlines()[-25:])
        raise CheckFailed(f"`{name}` ended with exit code {process.returncode}:\n{last}")
    print(f"{time.monotonic() - start:5.1f} s  {name}", flush=True)
    return printed


if __name__ == "__main__":
    sys.exit(main())
