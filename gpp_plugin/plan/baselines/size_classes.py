"""The micro-batch sizes of many stages at once: what `BatchRules.micro_batch_size` says, for arrays of stages.

Stages are alike where they hold coupled blocks or none, and blocks that the user fixes to one and the same size or to
none. Each such class has one size a degree.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gpp_plugin.plan.batch_rules import BatchRules
from gpp_plugin.plan.costs.cost_model import Floats

Ints = npt.NDArray[np.int64]


class SizeClasses:
    """The classes of one request.

    Args:
        names: of the blocks, in the order of the last axis of `flags`.
    """

    def __init__(self, rules: BatchRules, names: Sequence[str]) -> None:
        self.rules = rules
        self._fixed = sorted(set(rules.fixed.values()))
        rows = [[name in rules.coupled for name in names]]
        rows += [[rules.fixed.get(name) == size for name in names] for size in self._fixed]
        self.flags: Floats = np.array(rows, dtype=float)
        """[flag, block]: coupled, then fixed to the first of the sizes, to the second, ..."""

    def of(self, counts: Floats) -> Ints:
        """Return [...] the class of each stage.

        Args:
            counts: [flag, ...] how many of a stage's blocks have the flag.
        """
        # coupled 1, fixed to 8, and to 32:    none  coupled  8     8 and coupled  32    8 and 32
        # class                                0     1        2     3              4     -1, which has no size
        held = counts > 0.5
        sizes = np.arange(1, len(self._fixed) + 1).reshape(-1, *(1,) * (counts.ndim - 1))
        classes = 2 * (held[1:] * sizes).sum(axis=0) + held[0]
        found: Ints = np.where(held[1:].sum(axis=0) > 1, -1, classes).astype(np.int64)
        return found

    def sizes(self, classes: Ints, degree: int, wish: int) -> Ints:
        """Return [...] the micro-batch size of stages of these classes on ``degree`` ranks, 0 where there is none."""
        table = [
            self.rules.size_of(fixed, is_coupled, degree, wish) or 0
            for fixed in (None, *self._fixed)
            for is_coupled in (False, True)
        ]
        found: Ints = np.array([*table, 0])[classes]
        return found

    @property
    def are_alike(self) -> bool:
        """Return whether all stages of a plan have the same size, whatever their degrees."""
        return not self.rules.coupled and not self.rules.fixed
