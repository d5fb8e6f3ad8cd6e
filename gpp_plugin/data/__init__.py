"""Mini-batches of units that cost about as much as each other: `pack`."""

from gpp_plugin.data.packing import Packing, PackReport, pack

__all__ = ["PackReport", "Packing", "pack"]
