"""Steps that are run twice before they are taken: whether a rank computes the same from the same inputs.

A processor, a memory or a link that is wrong now and then raises nothing: the loss is another number. So a mini-batch
whose gradient is out of its usual range, and every n-th where that is asked for, is run again before any stage steps:

    run      forwards, backwards, sums, the norm: it is a spike, or the step's turn; the step is held
    again    weights, buffers and random states as before
    compare  what every task was given and made (`TaskDigests`)
             the same on all ranks     the step is taken
             given the same, made another result: that rank is named, on all ranks, and nothing is stepped

What is not wrong twice running, and not out of range, nobody sees but by its turn.

Source: this project
Tests: tests/integrations/test_repetition.py
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpp_plugin.engine.checkpoints.rank_files import random_state, restore_random_state
from gpp_plugin.engine.guards.spikes import Spikes
from gpp_plugin.engine.guards.task_digests import TaskDigest, TaskDigests
from gpp_plugin.engine.rank_engine import RankEngine
from gpp_plugin.engine.stage_engine import StageEngine
from gpp_plugin.errors import RuntimeFailure
from gpp_plugin.runtime.executor import MiniBatchResult
from gpp_plugin.runtime.ranks.agree import Meeting
from gpp_plugin.runtime.ranks.job_board import mark_shared

logger = logging.getLogger(__name__)

GRADIENTS = "the gradients of "
MOST_NAMED = 3


@dataclass(slots=True, kw_only=True)
class Verdict:
    """What one rank finds when it compares two runs of a mini-batch.

    Args:
        own: tasks that were given the same and made something else.
        came: tasks that were given something else.
    """

    own: list[str] = field(default_factory=list)
    came: list[str] = field(default_factory=list)


class Repetition:
    """Runs mini-batches again before their step, where their gradient is suspicious or it is their turn.

    Args:
        every: each so many steps; None: only those whose gradient is suspicious.
        step: the step of all the rank's stages.
    """

    def __init__(
        self,
        *,
        every: int | None,
        stages: RankEngine,
        digests: TaskDigests,
        meeting: Meeting,
        step: Callable[[], object],
    ) -> None:
        self._every = every
        self._stages = stages
        self._digests = digests
        self._meeting = meeting
        self._step = step
        self._norms = Spikes()
        self._is_again = self._is_held = False
        self._reason = ""
        self._summed: set[int] = set()

    def note_gradients(self, stage: StageEngine) -> None:
        """Note what a stage's gradients are on this rank before the ranks sum them."""
        self._summed.add(stage.stage_index)
        self._digests.note([], stage.gradients.parts(), task=f"{GRADIENTS}stage {stage.stage.name!r}")

    def run(
        self, first: Callable[[], MiniBatchResult], again: Callable[[], MiniBatchResult]
    ) -> MiniBatchResult:
        """Run a mini-batch and its step, twice where there is reason to; collective over all ranks.

        Raises:
            RuntimeFailure: a rank has other results the second time; the same on every rank. Nothing was stepped.
        """
        random, buffers = random_state(self._stages.device), self._copy_buffers()
        self._digests.forget()
        self._is_again = self._is_held = False
        result = self._held(first)
        if not self._is_held:
            return result
        before, reason = self._digests.take(), self._reason
        self._stages.zero_grad()
        restore_random_state(self._stages.device, random)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        self._is_again = True
        result = self._held(again)
        self._compare(before, self._digests.take(), reason)
        self._step()
        return result

    def _held(self, run: Callable[[], MiniBatchResult]) -> MiniBatchResult:
        self._summed.clear()
        self._stages.hold_steps(self._is_to_be_held)
        try:
            return run()
        finally:
            self._stages.hold_steps(None)

    def _is_to_be_held(self, norm: float) -> bool:
        """Return whether the step, whose norm all ranks have alike, is to be held; note the stages' gradients."""
        number = self._stages.global_steps + 1
        if not self._is_again:
            spike = self._norms.note(norm)
            self._reason = ""
            if not math.isfinite(norm):
                self._reason = "its gradient is not finite"
            elif spike is not None:
                self._reason = f"its gradient's norm {norm:.3g} is {spike:.1f} deviations above the usual one"
            elif self._every is not None and number % self._every == 0:
                self._reason = "it is its turn"
            self._is_held = bool(self._reason)
        if self._is_held:
            for stage in self._stages.stages:
                if stage.is_trained and stage.stage_index not in self._summed:
                    self.note_gradients(stage)
        return self._is_held

    def _copy_buffers(self) -> list[tuple[Tensor, Tensor]]:
        return [(b, b.detach().clone()) for stage in self._stages.stages for b in stage.module.buffers()]

    def _compare(self, first: Sequence[TaskDigest], second: Sequence[TaskDigest], reason: str) -> None:
        """Refuse a step of which any rank has other results the second time; collective."""
        verdict = self._verdict(first, second)
        told = self._meeting.gather(verdict, "the results of a step that was run twice")
        number = self._stages.global_steps + 1
        culprits = [(rank, each.own) for rank, each in enumerate(told) if each.own]
        if not culprits and not any(each.came for each in told):
            if self._stages.rank == 0 and "turn" not in reason:
                logger.warning("step %d was run twice, as %s: the results are the same", number, reason)
            return
        self._stages.zero_grad()
        if culprits:
            what = "; ".join(f"{self._name(rank)} at {_listed(own)}" for rank, own in culprits)
            said = f"other results from the same inputs: {what}. A processor or memory there is not to be trusted"
        else:
            what = "; ".join(
                f"{self._name(rank)} at {_listed(each.came)}" for rank, each in enumerate(told) if each.came
            )
            said = f"all ranks have the same results, but were sent other inputs: {what}. A link is not to be trusted"
        error = RuntimeFailure(
            f"step {number} was run twice, as {reason}, and came out differently; {said}, or an operator of the model "
            "draws numbers or sums in an order that changes (torch.use_deterministic_algorithms). Nothing was stepped: "
            "go on from a checkpoint without that device (graph_pipeline.repeat_steps)"
        )
        mark_shared(error)
        raise error

    def _verdict(self, first: Sequence[TaskDigest], second: Sequence[TaskDigest]) -> Verdict:
        verdict, differ = Verdict(), self._digests.differ
        received_other = False
        for one, two in zip(first, second, strict=True):
            if differ(one.given, two.given):
                received_other = True
                verdict.came.append(one.task)
            elif differ(one.made, two.made) and not (received_other and one.task.startswith(GRADIENTS)):
                verdict.own.append(one.task)
        return verdict

    def _name(self, rank: int) -> str:
        return f"rank {rank} (stage {self._stages.plan.names_on_rank(rank)!r})"


def _listed(tasks: Sequence[str]) -> str:
    more = f" and {len(tasks) - MOST_NAMED} more" if len(tasks) > MOST_NAMED else ""
    return ", ".join(tasks[:MOST_NAMED]) + more
