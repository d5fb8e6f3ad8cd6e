"""Mini-batches of units that cost about as much as each other: `pack`; samples in one row: `flatten`."""

from gpp_plugin.data.unit_packing import PackedUnits, PackReport, flatten, pack

__all__ = ["PackReport", "PackedUnits", "flatten", "pack"]
