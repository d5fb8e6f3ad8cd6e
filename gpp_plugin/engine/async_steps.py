"""Mode async: every stage steps after each micro-batch, and the pipeline stays full (PipeDream).

    train    B samples enter; each micro-batch of them is one update of every stage
    flush    what is in flight is finished; nothing else is left to do for a synchronous view of the model

Whatever reads or writes the model as a whole (checkpoints, evaluation, exports, state dicts) drains first, so it is
collective. What runs is in `schedule.orders.async_1f1b`, weights in `runtime.weight_versions`.

Between windows ranks do not wait for each other: a meeting of all after every mini-batch would empty the pipeline's
front while its end still works. So losses travel one way, from the first rank of the stage that computes them, and
whether all ranks were given the same data is known one mini-batch later.

Source: PipeDream (Narayanan et al., SOSP 2019, sections 3.2 and 3.3; doi 10.1145/3341301.3359646).
Tests: tests/integrations/test_async.py
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpp_plugin.engine.job_context import Setting
from gpp_plugin.engine.metrics import Metrics
from gpp_plugin.engine.rank_engine import RankEngine
from gpp_plugin.engine.training_steps import MiniBatchRunner, TrainedCall, different_data
from gpp_plugin.errors import CommTimeout
from gpp_plugin.runtime.batches import Batch, batch_checksum
from gpp_plugin.runtime.kept_lanes import KeptWindows
from gpp_plugin.schedule.orders.async_1f1b import windows_of
from gpp_plugin.schedule.orders.gpipe import forward_only_stages

_LOSS_TAG = 1 << 30
"""Beyond the numbers of the group's own meetings, which gloo's monitored barrier uses as tags."""
_CALLS_KEPT = 4
"""Calls whose losses may be on their way; a rank that feeds the loss is in the same call, or one before it."""


class AsynchronousSteps:
    """Windows of a pipeline that is drained on request only, each stage stepping by itself.

    Clipping and gradient norm are per stage and micro-batch. A rank that leaves without `flush` leaves the last
    micro-batches' updates out.

    The middle one of three stages, two micro-batches in flight there, two a call; bars are the ends of calls:

        F0 F1 B0 | F2 B1 F3 B2 | F4 B3 F5 B4 | ... drained here: B5

    Args:
        reads_inputs: this rank is given the mini-batch itself, and not its shape only.
        timeout_s: how long this rank waits for a loss, or for others to begin a call.
    """

    def __init__(
        self,
        lane: KeptWindows,
        stages: RankEngine,
        runner: MiniBatchRunner,
        *,
        metrics: Metrics,
        setting: Setting,
        reads_inputs: bool,
        timeout_s: float,
    ) -> None:
        self._lane = lane
        self._stages = stages
        self._runner = runner
        self._metrics = metrics
        self._windows = windows_of(lane.plan)
        loss_block = lane.lanes[0].reference.block_graph.loss_block
        loss_stage = next(i for i, s in enumerate(lane.plan.stages) if loss_block in s.blocks)
        yields_loss = lane.plan.stages[loss_stage]
        self._losses = LossReports(
            loss_ranks=yields_loss.data_ranks(0),
            rank=setting.rank,
            num_ranks=setting.num_ranks,
            group=setting.group,
            stage_group=stages.groups.data[loss_stage],
            micro_batch_size=yields_loss.micro_batch_size,
            device=setting.device,
            timeout_s=timeout_s,
        )
        self._agreement = DataAgreement(
            group=setting.group, rank=setting.rank, reads=reads_inputs, timeout_s=timeout_s
        )
        self._num_left = 0  # losses of drained micro-batches that no call has returned
        self._has_told_staleness = False

    @property
    def staleness(self) -> dict[str, int]:
        """Return, by stage, how many updates lie between the weights of a gradient and the update it makes.

        This is what it is while the pipeline is full; after a `flush` the first micro-batches see less.
        """
        plan = self._lane.plan
        frozen = forward_only_stages(plan)
        return {
            stage.name: self._windows.staleness(index)
            for index, stage in enumerate(plan.stages)
            if index not in frozen
        }

    @property
    def looks_ahead(self) -> bool:
        """Return False: what enters stays in the pipeline anyway."""
        return False

    def train(self, batch: Batch, *, following: Batch | None = None, record: bool) -> TrainedCall:
        """Let a mini-batch enter the pipeline, which is full when this returns.

        Every micro-batch makes one update of every stage; the learning-rate schedule advances once. The loss is the
        mean of those that came out meanwhile, which lag behind what enters by the micro-batches in flight. The first
        call waits for at least one; a later one during which none came out (while the pipeline fills, if it holds more
        micro-batches than a call brings) has the last one again.

        Raises:
            CommTimeout, RuntimeFailure: a rank failed, or was given other data in the call before.
        """
        # Posted before the window, looked at one call later: by then the others' facts have long come.
        self._agreement.post(batch, self._stages.global_steps + 1)
        # Windows overlap within one compiled shape only: messages and weight versions of another one do not fit.
        if self._lane.is_another_shape(batch):
            self.drain()
        result = self._runner.train(self._lane, batch, record=record)
        with self._runner.ending_on_failure():
            self._agreement.check()
            loss = self._tell_losses(result.losses)
        step = self._stages.end_mini_batch()
        if not self._has_told_staleness:
            self._has_told_staleness = True
            self._metrics.note_staleness(self.staleness, self._stages.global_samples)
        return TrainedCall(loss=loss, step=step, events=result.events)

    def _tell_losses(self, losses: Sequence[tuple[Tensor, int]]) -> float:
        """Return the mean of the losses that are due: those left by a drain, and those that left the window.

        Every rank knows from the windows alone how many these are; only the loss stage knows their values. With two
        micro-batches a call and three stages in a row 1, 2 and 4 losses are out after calls 1, 2 and 3, so that
        these tell 1, 1 and 2 (`schedule.orders.async_1f1b.Windows.num_reported`).
        """
        self._losses.add(losses)
        window, windows = self._lane.window, self._windows
        before = windows.num_reported(window - 1) if window > 1 else 0
        due = windows.num_reported(window) - before + self._num_left
        self._num_left = 0
        return self._losses.tell(due)

    def flush(self) -> float | None:
        """Finish the micro-batches in flight, so that every stage has made all its updates; collective.

        Returns:
            The mean of the losses that no `train` has returned, the same on every rank; None if there are none.
        """
        self.drain()
        self._num_left = 0  # all are told now
        with self._runner.ending_on_failure():
            loss = self._losses.tell(None)
            self._losses.finish()
        return None if math.isnan(loss) else loss

    def drain(self) -> None:
        """Empty the pipeline; collective. Losses that are left come out with the next ones.

        Raises:
            RuntimeFailure: an earlier mini-batch failed on its way.
        """
        self._runner.refuse_after_failure()
        window = self._lane.window
        if not window:
            return
        with self._runner.ending_on_failure():
            self._lane.drain()
            self._agreement.check(keep=0)
        self._num_left += window * self._windows.micro_batches - self._windows.num_reported(window)


class LossReports:
    """Mean losses, told by the rank that knows them to all others.

    Args:
        root: the first of ``loss_ranks``, which are the stage that computes the loss.
        rank: this one.
        group: a CPU group of all ranks; None for a single one.
        stage_group: of the loss stage's ranks, where this rank is one of them.
        micro_batch_size: samples of one loss.
        device: of the tensors that ``stage_group`` moves.
    """

    def __init__(
        self,
        *,
        loss_ranks: Sequence[int],
        rank: int,
        num_ranks: int,
        group: dist.ProcessGroup | None,
        stage_group: Any,
        micro_batch_size: int,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self._root = loss_ranks[0]
        self._has_losses = rank in loss_ranks
        self._degree = len(loss_ranks)
        self._rank = rank
        self._others = [other for other in range(num_ranks) if other != self._root]
        self._group = group
        self._stage_group = stage_group
        self._micro_batch_size = micro_batch_size
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)
        self._untold: deque[float] = deque()
        self._last = math.nan
        self._sent: deque[tuple[Any, Tensor, int]] = deque()

    def add(self, losses: Sequence[tuple[Tensor, int]]) -> None:
        """Take up the losses of a window, one a micro-batch; the stage's ranks have a part of each."""
        if not self._has_losses:
            return
        # Each rank of the stage has the mean over its own rows of a micro-batch: weighted by its share of them, the
        # ranks' parts add up to the micro-batch's mean. Double precision, so that the order of ranks does not show.
        parts = torch.stack([loss.float() * (count / self._micro_batch_size) for loss, count in losses])
        parts = parts.double().to(self._device)
        if self._degree > 1:
            dist.all_reduce(parts, group=self._stage_group)
        self._untold.extend(parts.tolist())

    def tell(self, count: int | None) -> float:
        """Return the mean of the next ``count`` losses (None: of all that are left), the same on every rank.

        Where there is none to tell it is the last one told; nan where ``count`` is None.
        """
        value = math.nan
        # A rank that is told nothing (no loss came out in this call) is sent the last value again: the number of
        # messages a call is one, whatever the windows hold, and stays the same on both sides.
        if self._rank == self._root:
            told = [self._untold.popleft() for _ in range(len(self._untold) if count is None else count)]
            if told:
                self._last = value = math.fsum(told) / len(told)
            elif count is not None:
                value = self._last
        if self._group is None:
            return value
        if self._rank == self._root:
            self._send(value)
            return value
        return self._receive()

    def finish(self) -> None:
        """Wait until everything has been told.

        Raises:
            CommTimeout: a rank did not take a loss in time.
        """
        while self._sent:
            self._complete_oldest()

    def _send(self, value: float) -> None:
        # gloo says that a send is done only to who waits for it; to have come this far the others took these
        while len(self._sent) > _CALLS_KEPT * len(self._others):
            self._complete_oldest()
        for other in self._others:
            tensor = torch.tensor([value], dtype=torch.float64)
            self._sent.append((dist.isend(tensor, other, group=self._group, tag=_LOSS_TAG), tensor, other))

    def _complete_oldest(self) -> None:
        work, _, other = self._sent.popleft()
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            raise CommTimeout(
                f"rank {self._rank} waited {self._timeout.total_seconds():g} s for rank {other} to take the loss: look "
                "for the first error of the other ranks, or raise graph_pipeline.comm_timeout_s"
            ) from error

    def _receive(self) -> float:
        tensor = torch.empty(1, dtype=torch.float64)
        work = dist.irecv(tensor, self._root, group=self._group, tag=_LOSS_TAG)
        assert work is not None, "this rank is in the group"
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            raise CommTimeout(
                f"rank {self._rank} waited {self._timeout.total_seconds():g} s for the loss from rank {self._root}: "
                "look for the first error of the other ranks, or raise graph_pipeline.comm_timeout_s"
            ) from error
        return float(tensor)


class DataAgreement:
    """Whether all ranks are given the same mini-batches, known one mini-batch later.

    Args:
        reads: whether this rank's stage reads model inputs.
    """

    def __init__(self, *, group: dist.ProcessGroup | None, rank: int, reads: bool, timeout_s: float) -> None:
        self._group = group
        self._rank = rank
        self._reads = reads
        self._timeout = timedelta(seconds=timeout_s)
        self._posted: deque[tuple[Any, Tensor, int, int]] = deque()

    def post(self, batch: Batch, step: int) -> None:
        """Tell the others what this rank was given."""
        if self._group is None:
            return
        # Asynchronous, and so is the reduction: it moves on while the window runs, and no rank waits for another here.
        checksum = batch_checksum(batch) if self._reads else 0
        facts = torch.tensor([checksum, checksum * checksum, int(self._reads)], dtype=torch.float64)
        work = dist.all_reduce(facts, group=self._group, async_op=True)
        self._posted.append((work, facts, step, checksum))

    def check(self, *, keep: int = 1) -> None:
        """Look at what was posted, but for the last ``keep``.

        Raises:
            RuntimeFailure: the ranks were given different data.
        """
        while len(self._posted) > keep:
            work, facts, step, checksum = self._posted.popleft()
            try:
                work.wait(self._timeout)
            except RuntimeError as error:
                raise CommTimeout(
                    f"rank {self._rank} waited {self._timeout.total_seconds():g} s for the other ranks to begin step "
                    f"{step}: look for the first error of the other ranks"
                ) from error
            total, squares, readers = facts.tolist()
            if squares * readers != total * total:  # as in `SynchronousSteps`
                raise different_data(step, checksum=checksum, rank=self._rank)
