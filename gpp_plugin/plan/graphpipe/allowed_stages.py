"""The stages of a table that are in time and fit at a level, and the fewest devices of one and of what is behind it.

The rule is a minimum over columns of devices of the stage + devices behind it. With N items that is N x N sums a level,
most of which cannot be least: of the stages that begin alike on the same devices the longest leaves least behind. So it
is enough to know the last column of each row and degree:

    row 0, in time     columns  0 1 2 3 4 5            behind column   0 1 2 3 4 5
      on 1 device               x x . . . .                            9 7 6 4 3 0     (fewer items, fewer devices)
      on 2                      x x x x . .
      on 4                      x x x x x x            least of 1 + 7, 2 + 4, 4 + 0: 4

Fewer items may need *more* devices where tensors are large beside the time: a stage that begins behind one has to
receive it. So the order of what is behind is looked at first, and where it is not as above, all sums are made.

Source: this project
Tests: tests/plan/test_stage_search.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from gpp_plugin.plan.graphpipe.intervals import Counts, Ints
from gpp_plugin.plan.graphpipe.stage_shapes import Bools


class AllowedStages:
    """Stages of one pair of steps: levels they add after a sink (``first``) and after another stage (``step``).

    Args:
        degrees: [variant] devices, not decreasing.
        masks: [variant, row, column] each; allowed are the stages that are in all of them.
        num_ends: the first so many columns are ends between items, in their order; others share items with a fork.
        last: returns [variant, row] the last allowed column among those, -1 where there is none; None: look.
    """

    def __init__(
        self,
        first: int,
        step: int,
        degrees: Counts,
        masks: Sequence[Callable[[slice], Bools]],
        num_ends: int,
        last: Callable[[], Ints] | None,
    ) -> None:
        self.first, self.step = first, step
        self._degrees, self._masks, self._num_ends = degrees, masks, num_ends
        self._last = last

    def _fits(self, columns: slice) -> Bools:
        return functools.reduce(np.logical_and, (mask(columns) for mask in self._masks))

    @functools.cached_property
    def cost(self) -> Counts:
        """Return [row, column] the fewest devices of a stage; inf where there is none."""
        return self._cost_of(self._fits(slice(None)))

    def _cost_of(self, fits: Bools) -> Counts:
        # Variants are by increasing degree, so the first one that fits has the fewest devices.
        chosen = fits.argmax(axis=0)
        return np.where(fits.any(axis=0), self._degrees[chosen], np.inf)

    @functools.cached_property
    def _shared_ends(self) -> Counts:
        """Return [row, column] the costs of stages that end with heads of branches."""
        return self._cost_of(self._fits(slice(self._num_ends, None)))

    @functools.cached_property
    def _longest(self) -> tuple[Ints, Counts]:
        """Return [variant, row] the last column, and the devices of that stage; inf where there is none."""
        last = last_of(self._fits(slice(self._num_ends))) if self._last is None else self._last()
        return np.maximum(last, 0), np.where(last >= 0, self._degrees[:, None], np.inf)

    def fewest_with(self, after: Counts) -> Counts:
        """Return [end, exit, row]: the fewest devices of a stage and of what is behind it.

        Args:
            after: [end, exit, column] devices of what is behind.
        """
        num = self._num_ends
        ends = after[:, :, :num]
        if not (ends[:, :, 1:] <= ends[:, :, :-1]).all():
            every: Counts = (self.cost + after[:, :, None, :]).min(axis=3)
            return every
        last, devices = self._longest
        fewest: Counts = (ends.take(last, axis=2) + devices).min(axis=2)
        if after.shape[2] > num:
            fewest = np.minimum(fewest, (self._shared_ends + after[:, :, None, num:]).min(axis=3))
        return fewest


def last_of(fits: Bools) -> Ints:
    """Return [variant, row] the last column that is true, -1 where none is."""
    last = fits.shape[2] - 1 - fits[:, :, ::-1].argmax(axis=2)
    return np.where(fits.any(axis=2), last, -1)
