"""Measured costs of single operators, for refinements that move a cut by nodes (DawnPiper, section 4)."""

from __future__ import annotations

from typing import Any

from gpp_plugin.capture.coarsen import coarsen
from gpp_plugin.capture.graph import CapturedGraph
from gpp_plugin.ir.profile import Profile
from gpp_plugin.profile.measure import profile_blocks

NODE_REPEATS = 50
"""Operators are quick and their times noisy: the paper's number of timed runs (DawnPiper, C.1)."""


def profile_nodes(captured: CapturedGraph, *, repeats: int = NODE_REPEATS, **options: Any) -> Profile:
    """Measure every operator by itself; operators that must stay together (views and writes of them) as one.

    Args:
        repeats: timed runs after warm-up, of which the median counts.
        options: as of `profile_blocks`.

    Returns:
        Costs by block of ``coarsen(captured, granularity="node")``, whose ``nodes`` are operator names.

    Raises:
        ProfileError: an operator cannot be run; the message names it.
    """
    return profile_blocks(captured, coarsen(captured, granularity="node"), repeats=repeats, **options)
