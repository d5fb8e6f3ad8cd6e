"""The on-disk store of measurements: one JSON file each, under a key of all that they depend on."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from gpp_plugin.errors import GppError, ProfileError
from gpp_plugin.ir.profile import Profile
from gpp_plugin.ir.serialize import fingerprint, load, save

logger = logging.getLogger(__name__)

T = TypeVar("T")


def default_directory() -> Path:
    """Return ``gpp_plugin/profiles`` under the user's cache directory (``XDG_CACHE_HOME`` or ``~/.cache``)."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if root else Path.home() / ".cache") / "gpp_plugin" / "profiles"


class MeasurementStore:
    """Measurements of one kind on disk, by what they depend on.

    Args:
        directory: where the files are; it is made when first written to.
        what: what a file holds, for the warning that it cannot be read.
        lost: the warning where the disk refuses: of the directory and the reason.
        prefix: of the files' names.
    """

    def __init__(self, directory: str | Path, *, what: str, lost: str, prefix: str = "") -> None:
        self.directory = Path(directory)
        self._what, self._lost, self._prefix = what, lost, prefix

    def path(self, key: Mapping[str, object]) -> Path:
        """Return the file for ``key``: what the measurement depends on, as JSON types."""
        # The file's name is the fingerprint of the key alone: another torch, processor, graph or release is another
        # file, and nothing is ever compared or thrown away.
        return self.directory / f"{self._prefix}{fingerprint(dict(key))}.json"

    def look_up(self, key: Mapping[str, object], read: Callable[[Path], T]) -> T | None:
        """Return what is stored; None where there is nothing, or, with a warning, none that can be read."""
        path = self.path(key)
        if not path.exists():
            return None
        try:
            return read(path)
        except GppError as error:
            logger.warning("ignoring %s that cannot be read; measuring again: %s", self._what, error)
            return None

    def keep(self, key: Mapping[str, object], write: Callable[[Path], None]) -> None:
        """Store a measurement; where the disk refuses, warn and continue without."""
        try:
            write(self.path(key))
        except OSError as error:
            logger.warning(self._lost, self.directory, error)


class CostStore(MeasurementStore):
    """Profiles on disk.

    Args:
        directory: where the files are; `default_directory` if None.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        lost = (
            "the profile could not be stored in %s (%s); it will be measured again next time, or set "
            "graph_pipeline.profile_dir to a directory that can be written"
        )
        super().__init__(directory or default_directory(), what="a stored profile", lost=lost)

    def find(self, key: Mapping[str, object]) -> Profile | None:
        """Return the stored profile, or None."""
        return self.look_up(key, _read_profile)

    def put(self, key: Mapping[str, object], profile: Profile) -> None:
        """Store a profile."""
        self.keep(key, functools.partial(save, profile))

    def find_or_measure(self, key: Mapping[str, object], measure: Callable[[], Profile]) -> Profile:
        """Return the stored profile, or measure one and store it.

        Raises:
            ProfileError: ``measure`` failed.
        """
        stored = self.find(key)
        if stored is not None:
            logger.info("using the profile stored in %s", self.path(key))
            return stored
        profile = measure()
        if not profile.costs:
            raise ProfileError("the profile measured has no blocks; is the BlockGraph empty?")
        self.put(key, profile)
        return profile


def _read_profile(path: Path) -> Profile:
    profile = load(Profile, path)
    profile.check()
    return profile
