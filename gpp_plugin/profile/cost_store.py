"""The on-disk store of measured costs: one JSON file a profile, under a key of all that times depend on."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from gpp_plugin.errors import GppError, ProfileError
from gpp_plugin.ir.profile import Profile
from gpp_plugin.ir.serialize import fingerprint, load, save

logger = logging.getLogger(__name__)


def default_directory() -> Path:
    """Return ``gpp_plugin/profiles`` under the user's cache directory (``XDG_CACHE_HOME`` or ``~/.cache``)."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if root else Path.home() / ".cache") / "gpp_plugin" / "profiles"


class CostStore:
    """Profiles on disk.

    Args:
        directory: where the files are; `default_directory` if None. It is made when first written to.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        self.directory = Path(directory) if directory is not None else default_directory()

    def path(self, key: Mapping[str, object]) -> Path:
        """Return the file for ``key``: what the times depend on, as JSON types."""
        return self.directory / f"{fingerprint(dict(key))}.json"

    def find(self, key: Mapping[str, object]) -> Profile | None:
        """Return the stored profile, or None; a file that cannot be read is ignored with a warning."""
        # The file's name is the fingerprint of the key alone: another torch, processor, graph or release is another
        # file, and nothing is ever compared or thrown away.
        path = self.path(key)
        if not path.exists():
            return None
        try:
            profile = load(Profile, path)
            profile.check()
            return profile
        except GppError as error:
            logger.warning("ignoring a stored profile that cannot be read; measuring again: %s", error)
            return None

    def put(self, key: Mapping[str, object], profile: Profile) -> None:
        """Write ``profile`` whole or not at all; where the disk refuses, say so and go on without."""
        try:
            save(profile, self.path(key))
        except OSError as error:
            logger.warning(
                "the profile could not be stored in %s (%s); it will be measured again next time, "
                "or set graph_pipeline.profile_dir to a directory that can be written",
                self.directory,
                error,
            )

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
