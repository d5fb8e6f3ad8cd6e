"""Synchronous steps of a pipeline whose frozen branch runs ahead: which mini-batch it may run, and when that is void.

    train(a)           runs the whole of a, to see whether the branch leaves nothing behind but its results
    train(b), then c   the branch on b, and the rest of b while the branch runs c
    train(c), then d   the rest of c while the branch runs d
    drain              what was run ahead is dropped: checkpoints, evaluations and new weights find none of it

Position, counters and gradients are those of mini-batches trained. What is run ahead changes nothing but what the ranks
behind the branch have received, so dropping it and running it again gives the same bits.

Source: this project
Tests: tests/integrations/test_frozen_ahead.py
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from gpp_plugin.engine.training_steps import SynchronousSteps, TrainedCall
from gpp_plugin.errors import GppError
from gpp_plugin.runtime.batches import Batch
from gpp_plugin.runtime.kept_lanes import KeptAhead

logger = logging.getLogger(__name__)


class LookAheadSteps(SynchronousSteps):
    """A mini-batch and its step, with the branch's forwards of the next one among them.

    Args:
        meet: learns the shapes of a mini-batch before a lane runs it; collective.
        steps: as of `SynchronousSteps`.
    """

    def __init__(self, lane: KeptAhead, *given: Any, meet: Callable[[Batch], None], **steps: Any) -> None:
        super().__init__(lane, *given, **steps)
        self._ahead = lane
        self._meet_shapes = meet
        self._is_off = False

    @property
    def looks_ahead(self) -> bool:
        """Return whether the next call of `train` may have use for the mini-batch that follows."""
        return self._ahead.has_peeked and not self._is_off

    def train(self, batch: Batch, *, following: Batch | None = None, record: bool) -> TrainedCall:
        """Run one mini-batch and its step, and the branch of the one that follows."""
        if self.looks_ahead:
            self._ahead.look_to(self._agree(batch, following))
        return super().train(batch, record=record)

    def drain(self) -> None:
        """Drop what was run ahead."""
        if self._ahead.is_ahead and self._runner.failure is None:
            with self._runner.ending_on_failure():
                self._ahead.drop()

    def flush(self) -> None:
        """Drop what was run ahead; every call has returned its loss."""
        self.drain()

    def _agree(self, batch: Batch, following: Batch | None) -> Batch | None:
        """Return the mini-batch to look to, on all ranks or on none; drop what was run ahead where any finds it void.

        One sum over all ranks of what each of them knows: an iterator may have ended here and not there.
        """
        lane = self._ahead
        mine = [lane.is_stale(batch), following is None, lane.is_stateful]
        facts = torch.tensor(mine, dtype=torch.float32)
        with self._runner.ending_on_failure():
            is_stale, is_missing, is_stateful = self._meeting.sum(facts, "what is run ahead").tolist()
            if is_stale:
                lane.drop()
        if is_stateful:
            self._is_off = True
            if self._stages.rank == 0:
                logger.info(
                    "look_ahead: the frozen branch draws random numbers or writes tensors of its own (dropout, batch "
                    "norm in training), so it runs no mini-batch ahead of its turn"
                )
        if following is None or is_missing or is_stateful:
            return None
        try:
            self._meet_shapes(following)
            self._runner.learn_shapes(self._lane, following)
        except GppError:  # on every rank; raised when its turn comes
            return None
        return following
