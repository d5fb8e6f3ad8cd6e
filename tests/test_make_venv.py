"""`make` with a Python that has a torch for its GPU, in an environment of its own: the new environment sees it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.waits import run_program

SCRIPT = Path(__file__).parents[1] / ".ci" / "make_venv.py"


def make(python: Path | str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(python), str(SCRIPT), str(folder), "--without-pip"]
    return run_program(command, capture_output=True, text=True, timeout=120)


def site_of(folder: Path) -> Path:
    (found,) = folder.glob("lib/python*/site-packages")
    return found


def add_package(folder: Path, name: str, text: str, version: str = "1.0") -> None:
    """Put a package where a distribution installs one, for imports and for pip."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(text)
    (folder / f"{name}-{version}.dist-info").mkdir()
    (folder / f"{name}-{version}.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    )


def ask(folder: Path, code: str) -> str:
    done = run_program(
        [folder / "bin" / "python", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def caller(tmp_path: Path) -> Path:
    """An environment without packages, made from this Python's installation."""
    folder = tmp_path / "caller"
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    run_program([base, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
    return folder


def fake_torch(version: str, *, has_gpu: bool) -> str:
    return f"__version__ = {version!r}\nclass cuda:\n    is_available = staticmethod(lambda: {has_gpu})\n"


def test_the_torch_of_the_callers_environment_is_seen(caller: Path, tmp_path: Path) -> None:
    add_package(site_of(caller), "torch", fake_torch("2.12.0+cu130", has_gpu=True), "2.12.0")
    nested = tmp_path / "elsewhere"
    nested.mkdir()
    (nested / "companion.py").write_text("VALUE = 7\n")
    (site_of(caller) / "editable.pth").write_text(f"{nested}\n")
    new = tmp_path / "new"
    done = make(caller / "bin" / "python", new)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"using torch 2.12.0+cu130 of {site_of(caller) / 'torch' / '__init__.py'}"
    assert ask(new, "import torch; print(torch.__file__)") == str(site_of(caller) / "torch" / "__init__.py")
    assert ask(new, "import companion; print(companion.VALUE)") == "7", "what is installed editable, too"
    assert ask(new, "import importlib.metadata as m; print(m.version('torch'))") == "2.12.0", "pip asks so"
    add_package(site_of(new), "torch", fake_torch("2.13.0", has_gpu=True), "2.13.0")
    assert ask(new, "import torch; print(torch.__version__)") == "2.13.0", "its own packages come first"


@pytest.mark.parametrize(("version", "has_gpu"), [("2.10.0", True), ("2.13.0+cpu", False)])
def test_another_torch_of_the_callers_is_not(
    caller: Path, tmp_path: Path, version: str, has_gpu: bool
) -> None:
    add_package(site_of(caller), "torch", fake_torch(version, has_gpu=has_gpu))
    done = make(caller / "bin" / "python", tmp_path / "new")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert ask(tmp_path / "new", "import importlib.util as u; print(u.find_spec('torch'))") == "None"
    assert not list(site_of(tmp_path / "new").glob("*caller*"))


def test_an_environment_that_sees_another_one_is_refused(caller: Path, tmp_path: Path) -> None:
    """An old .venv with a torch of its own: what make would announce is not what would run."""
    add_package(site_of(caller), "torch", fake_torch("2.12.0", has_gpu=True))
    new = tmp_path / "new"
    assert make(caller / "bin" / "python", new).returncode == 0
    add_package(site_of(new), "torch", fake_torch("2.11.0", has_gpu=True))
    done = make(caller / "bin" / "python", new)
    assert done.returncode == 1
    assert "sees torch 2.11.0 of " in done.stderr and "remove " in done.stderr
