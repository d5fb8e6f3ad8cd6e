"""Mini-batches of units that cost about as much as each other: `pack`."""

from gpp_plugin.data.unit_packing import PackedUnits, PackReport, pack

__all__ = ["PackReport", "PackedUnits", "pack"]
