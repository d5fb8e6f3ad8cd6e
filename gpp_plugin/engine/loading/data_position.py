"""Where training is in its data, as JSON: what a checkpoint keeps so that no sample comes twice and none is left out.

    kind "samples"   a dataset with numbers: the epoch's random state as it began, and how many lists of numbers of it
                     are trained; the rest follows by drawing the epoch anew, and no sample is loaded for it
    kind "stream"    an iterable dataset: its own ``state_dict`` after the last mini-batch that was trained, or how many
                     samples are to be read and dropped
    kind "given"     a caller's loader or iterator: its own ``state_dict``, as torchdata has it

A mini-batch is of *lists*, what the loader's batch sampler yields: one, or one for each unit where it is of units.
States are written as those of checkpoints (`state_values`), tensors in place: ranks compare them.
Positions count mini-batches trained: what workers have loaded ahead, or a frozen branch has run, does not count.

Source: this project
Tests: tests/integrations/test_data_position.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

SAMPLES, STREAM, GIVEN = "samples", "stream", "given"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPoint:
    """A point in an epoch of a dataset with numbers.

    Args:
        mini_batches: trained before it, in all epochs.
        lists: of this epoch's that come before it.
        generator: the loader's random state as the epoch began; None: as it is.
        sampler: the batch sampler's own state as the epoch began, where it has one.
    """

    mini_batches: int = 0
    lists: int = 0
    generator: Tensor | None = None
    sampler: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPoint:
    """A point in an iterable dataset.

    Args:
        mini_batches: trained before it, in all passes.
        passes: over the dataset that are complete.
        state: of the dataset; None: it has none, or is at its beginning.
        dropped: lists to be read and dropped from the very beginning, where there is no state.
    """

    mini_batches: int = 0
    passes: int = 0
    state: Any = None
    dropped: int = 0
