"""A stage that steps alone, after each micro-batch (asynchronous mode).

Norm, clipping and overflow are of the stage's own gradient of one micro-batch: stages never wait for each other to
step. The learning-rate schedule and the counters advance once a mini-batch, whatever overflowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from gpp_plugin.integrations.stage_engine import StageEngine, StepResult
from gpp_plugin.runtime.weight_versions import ParameterPlaces, WeightPlaces


class AsyncStageEngine(StageEngine):
    """The training state of one rank's stage; `step` is collective over the stage's ranks only."""

    _last_norm = 0.0
    _has_overflowed = False

    @property
    def _norm_group(self) -> Any:
        return self.groups.stage[self.stage_index]

    def weight_places(self, parameters: Sequence[nn.Parameter]) -> WeightPlaces:
        """Return where these trained parameters may lie."""
        if self._masters is None:
            return ParameterPlaces(parameters)
        return self._masters.places(parameters)

    def step(self) -> StepResult:
        """Update the stage with the gradient of one micro-batch; skip it where that is not finite.

        Raises:
            ConfigError: tensor ranks have unlike gradients of what they hold alike; seen at the first step.
        """
        if not self._has_compared:
            self._reductions.compare_duplicates()
        self._has_compared = True
        norm, overflow = self._update()
        self._last_norm = norm
        self._has_overflowed |= overflow
        return self._result(norm, overflow)

    def end_mini_batch(self) -> StepResult:
        """Advance schedule and counters; return the norm of the stage's last update, and whether it skipped any."""
        overflow, self._has_overflowed = self._has_overflowed, False
        self._advance_rates()
        self._count(overflow)
        return self._result(self._last_norm, overflow)
