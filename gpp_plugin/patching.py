"""The patches that come with this package, and copies of installed packages with them applied."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from importlib import metadata, resources, util
from pathlib import Path

from gpp_plugin.errors import ConfigError


def _find_patches() -> Path:
    """Return the folder of the patches: inside the package in a wheel, beside it in a checkout."""
    package = Path(str(resources.files("gpp_plugin")))
    inside = package / "patches"
    return inside if inside.is_dir() else package.parent / "patches"


PATCHES = _find_patches()
MODULES = {"deepspeed": "deepspeed", "megatron-core": "megatron"}
"""Import name of each distribution that has patches."""


def patches_for(package: str) -> tuple[Path, ...]:
    """Return the patches for the installed release of ``package``, in their order.

    Raises:
        ConfigError: it is not installed, or there are none for that release.
    """
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise ConfigError(f"{package} is not installed; install it to use its patches") from None
    found = tuple(sorted((PATCHES / f"{package}-{version}").glob("*.patch")))
    if not found:
        known = sorted(folder.name for folder in PATCHES.glob(f"{package}-*"))
        raise ConfigError(
            f"there are no patches for {package} {version} (there are for {', '.join(known) or 'none'}); "
            "install a release that there are patches for"
        )
    return found


@contextlib.contextmanager
def patched_package(package: str) -> Iterator[Path]:
    """Yield a folder that holds a patched copy of an installed package; put it first on PYTHONPATH.

    Raises:
        ConfigError: as for `patches_for`, or a patch does not apply to what is installed.
    """
    patches = patches_for(package)
    spec = util.find_spec(MODULES[package])
    assert spec is not None and spec.submodule_search_locations is not None, "patches_for found it installed"
    source = Path(next(iter(spec.submodule_search_locations)))
    with tempfile.TemporaryDirectory(prefix="gpp_patched_") as name:
        folder = Path(name)
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
