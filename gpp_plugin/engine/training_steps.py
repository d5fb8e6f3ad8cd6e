"""What one call of `train_batch` does on a rank: its programs, its loss, how often stages step, when the job ends.

From one mini-batch to the next, which programs of which mini-batch run is a table (`StepPolicy`):

    synchronous       a mini-batch, one step of all stages, and the sum of its loss over all ranks
    frozen prefetch   the same. The first mini-batch runs whole, to see whether the branch leaves nothing behind but its
                      outputs; then each call runs the branch of the next one. Checkpoints, evaluations and new weights
                      drop what was prefetched: running it again gives the same bits.
    mode async        each micro-batch is one step of every stage, and the pipeline stays full (PipeDream). `flush`
                      finishes what is in flight. Whatever reads or writes the model as a whole drains first. Clipping
                      and gradient norm are per stage and micro-batch.

The middle one of three stages in mode async, two micro-batches in flight there, two a call; bars are the ends of calls:

    F0 F1 B0 | F2 B1 F3 B2 | F4 B3 F5 B4 | ... drained here: B5

Source: PipeDream (Narayanan et al., SOSP 2019, sections 3.2 and 3.3; doi 10.1145/3341301.3359646); others: this project
Tests: tests/integrations/test_async.py, tests/integrations/test_frozen_ahead.py, tests/integrations/test_engine.py
"""

from __future__ import annotations

import functools
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpp_plugin.engine.metrics import Metrics
from gpp_plugin.engine.mini_batch_runner import MiniBatchRunner, share_of_loss
from gpp_plugin.engine.rank_engine import RankEngine
from gpp_plugin.engine.stage_step import StepResult
from gpp_plugin.errors import GppError
from gpp_plugin.ir.plan import forward_only_stages
from gpp_plugin.runtime.batches import Batch, batch_checksum
from gpp_plugin.runtime.executor import MiniBatchResult
from gpp_plugin.runtime.messages.sockets import hang_up
from gpp_plugin.runtime.random_streams import MODEL_STREAMS
from gpp_plugin.runtime.rank_runner import RankRunner
from gpp_plugin.runtime.ranks.collectives import Collectives, all_reduce, own_name, wait_for, wait_for_message
from gpp_plugin.runtime.ranks.job_board import shared_error
from gpp_plugin.runtime.ranks.placement_of_ranks import Setting
from gpp_plugin.schedule.orders.async_1f1b import windows_of

logger = logging.getLogger(__name__)

_LOSS_TAG = 1 << 30
"""Beyond the numbers of the group's own meetings, which gloo's monitored barrier uses as tags."""
_CALLS_KEPT = 4
"""Calls whose losses may be on their way; a rank that computes the loss is in the same call, or one before it."""

# ---- from one mini-batch to the next -----------------------------------------------------------------------


class TrainingSteps:
    """Trains one mini-batch after the other; every method is collective over all ranks.

    Args:
        collectives: of all ranks.
        reads_inputs: this rank's stages read model inputs.
        learn_shapes: learns the shapes of a mini-batch before it runs; collective.
        metrics: are given the staleness of gradients, in mode async.
    """

    def __init__(
        self,
        rank_runner: RankRunner,
        runner: MiniBatchRunner,
        *,
        setting: Setting,
        collectives: Collectives,
        reads_inputs: bool,
        learn_shapes: Callable[[Batch], None],
        metrics: Metrics,
    ) -> None:
        self._rank_runner = rank_runner
        self._stages = runner.stages
        self._runner = runner
        self._collectives = collectives
        # In mode async it is checked that all ranks are given the same; else they agree before a call.
        self._reports: LossReports | None = None
        if rank_runner.policy.steps_alone:
            data = DataCheck(setting, reads=reads_inputs, timeout_s=collectives.timeout_s)
            self._reports = LossReports(rank_runner, runner.stages, setting=setting, data=data)
        self._learn_shapes = learn_shapes
        self._metrics = metrics
        self._may_prefetch = rank_runner.policy.can_prefetch
        self._has_noted_staleness = self._reports is None

    @property
    def staleness(self) -> dict[str, int]:
        """Return, by stage that trains, how many updates lie between the weights of a gradient and the update it makes.

        In mode async this is what it is while the pipeline is full; after a `flush` the first micro-batches see less.
        """
        plan = self._rank_runner.plan
        windows = windows_of(plan) if self._rank_runner.policy.steps_alone else None
        frozen = forward_only_stages(plan)
        return {
            stage.name: 0 if windows is None else windows.staleness(index)
            for index, stage in enumerate(plan.stages)
            if index not in frozen
        }

    @property
    def can_prefetch(self) -> bool:
        """Return whether the next call of `train` may have use for the mini-batch that follows."""
        return self._may_prefetch and self._rank_runner.has_peeked

    def train(
        self, batch: Batch, *, following: Batch | None = None, record: bool
    ) -> tuple[float, StepResult, MiniBatchResult]:
        """Train on one mini-batch; return the mean loss, the last step, and what this rank has, events if recorded.

        In mode async it enters the pipeline, which is full when this returns, and the learning-rate schedule advances
        once. The loss is then the mean of those that came out meanwhile, which lag behind what enters by the
        micro-batches in flight. The first call waits for at least one; a later one during which none came out returns
        the last one again.

        Args:
            following: the next call's, where it is known and of use.

        Raises:
            CommTimeout, RuntimeFailure: a rank failed, or was given other data.
        """
        if self._reports is not None:
            # Posted before the mini-batch, checked one call later: by then the others' facts have long come.
            self._reports.data.post(batch, self._stages.counters.global_steps + 1)
        following = self._common_following(batch, following) if self.can_prefetch else None
        # Mini-batches overlap within one shape only: messages and weight versions of another one do not fit.
        if self._reports is not None and self._rank_runner.is_another_shape(batch):
            self.drain()
        result = self._runner.train(self._rank_runner, batch, following=following, record=record)
        if self._reports is None:
            loss = self._sum_loss(result)
        else:
            with self._runner.ending_on_failure():
                self._reports.data.check()
                loss = self._reports.of_call(result, self._rank_runner.num_running)
        stepped = self._stages.end_mini_batch()
        if not self._has_noted_staleness:
            self._has_noted_staleness = True
            self._metrics.note_staleness(self.staleness, self._stages.counters.global_samples)
        return loss, stepped, result

    def _sum_loss(self, result: MiniBatchResult) -> float:
        """Return the mean loss of a synchronous mini-batch, summed over all ranks."""
        runner, step = self._rank_runner, self._stages.counters.global_steps
        mine = share_of_loss(result.losses, runner.plan.mini_batch, is_sum=runner.sums_losses)
        own = torch.tensor([mine], dtype=torch.float64)
        return float(self._collectives.sum(own, f"the loss of step {step}"))

    def drain(self) -> None:
        """Finish what is in flight, or drop what was prefetched: the model is then one of synchronous training.

        Raises:
            RuntimeFailure: an earlier mini-batch of mode async failed on its way.
        """
        runner = self._rank_runner
        if self._reports is not None:
            self._runner.refuse_after_failure()
            num_running = runner.num_running
            if num_running:
                with MODEL_STREAMS.drawing(), self._runner.ending_on_failure():
                    runner.drain()
                    self._reports.data.check(keep=0)
                self._reports.note_drain(num_running)
        elif runner.has_prefetched and self._runner.failure is None:
            with self._runner.ending_on_failure():
                runner.drop()

    def flush(self) -> float | None:
        """Drain; return the mean of the losses that no call has returned, None if there are none."""
        self.drain()
        if self._reports is None:
            return None
        with self._runner.ending_on_failure():
            return self._reports.flush()

    def _common_following(self, batch: Batch, following: Batch | None) -> Batch | None:
        """Return the mini-batch to prefetch, on all ranks or on none; drop what any finds stale.

        One sum over all ranks of what each of them knows: an iterator may have ended here and not there.
        """
        runner = self._rank_runner
        mine = [runner.is_stale(batch), following is None, runner.is_stateful]
        facts = torch.tensor(mine, dtype=torch.float32)
        with self._runner.ending_on_failure():
            is_stale, is_missing, is_stateful = self._collectives.sum(facts, "what is prefetched").tolist()
            if is_stale:
                runner.drop()
        if is_stateful:
            self._may_prefetch = False
            if self._stages.rank == 0:
                logger.info(
                    "frozen_prefetch: the frozen branch draws random numbers or writes tensors of its own (dropout, "
                    "batch norm in training), so it runs no mini-batch ahead of its turn"
                )
        if following is None or is_missing or is_stateful:
            return None
        try:
            self._learn_shapes(following)
            self._runner.learn_shapes(runner, following)
        except GppError:  # on every rank; raised when its turn comes
            return None
        return following


# ---- losses, and whether all ranks train on the same data -------------------------------------------------


class LossReports:
    """Losses of mode async, sent by the rank that has them to all others.

    They travel one way: a collective of all ranks after every mini-batch would empty the front of the pipeline while
    its end still works.

    Args:
        data: whether all ranks are given the same, and how long ranks are waited for.
    """

    def __init__(self, runner: RankRunner, stages: RankEngine, *, setting: Setting, data: DataCheck) -> None:
        plan, loss_block = runner.plan, runner.reference.block_graph.loss_block
        index = next(i for i, stage in enumerate(plan.stages) if loss_block in stage.blocks)
        stage = plan.stages[index]
        loss_ranks = stage.data_ranks(0)
        self.data = data
        self._windows = windows_of(plan)
        self._num_left = 0  # losses of drained micro-batches that no call has returned
        self._root = loss_ranks[0]
        self._has_losses = setting.rank in loss_ranks
        self._degree = len(loss_ranks)
        self._rank = setting.rank
        self._others = [other for other in range(setting.num_ranks) if other != self._root]
        self._group = setting.group
        # of context ranks, which hold the same parameters, the first one has the losses
        self._stage_group: Any = stages.groups.data[index]
        if self._has_losses and self._degree > 1 and stage.context > 1:
            self._stage_group = dist.new_group(
                list(loss_ranks), backend="gloo", use_local_synchronization=True
            )
        self._micro_batch_size = stage.micro_batch_size
        self._device = setting.device
        self._due: deque[float] = deque()
        self._last = math.nan
        self._sent: deque[tuple[Any, Tensor, int]] = deque()

    def of_call(self, result: MiniBatchResult, num_running: int) -> float:
        """Return the mean of the losses that are due: those left by a drain, and those that came out in this call.

        Every rank knows from the order of tasks alone how many these are; only the loss stage has their values. With
        two micro-batches a call and three stages in a row 1, 2 and 4 losses are out after calls 1, 2 and 3, so that
        these return 1, 1 and 2 (`schedule.orders.async_1f1b.Windows.num_reported`).

        Args:
            num_running: mini-batches since the pipeline was empty.
        """
        self._add(result.losses)
        windows = self._windows
        before = windows.num_reported(num_running - 1) if num_running > 1 else 0
        due = windows.num_reported(num_running) - before + self._num_left
        self._num_left = 0
        return self._mean_of_next(due)

    def note_drain(self, num_running: int) -> None:
        """Note that the losses of so many mini-batches are out; those that are left come with the next ones."""
        windows = self._windows
        self._num_left += num_running * windows.micro_batches - windows.num_reported(num_running)

    def flush(self) -> float | None:
        """Return the mean of the losses that no call has returned, the same on every rank; None if there are none."""
        self._num_left = 0
        loss = self._mean_of_next(None)
        while self._sent:
            self._complete_oldest()
        return None if math.isnan(loss) else loss

    def _add(self, losses: Sequence[tuple[Tensor, int]]) -> None:
        """Take up losses, one a micro-batch; the stage's ranks have a part of each."""
        if not self._has_losses:
            return
        # Each rank of the stage has the mean over its own rows of a micro-batch: weighted by its share of them, the
        # ranks' parts add up to the micro-batch's mean. Double precision, so that the order of ranks does not show.
        parts = torch.stack([loss.float() * (count / self._micro_batch_size) for loss, count in losses])
        parts = parts.double().to(self._device)
        if self._degree > 1:
            all_reduce(parts, group=self._stage_group, what="the losses of the stage's other ranks")
        self._due.extend(parts.tolist())

    def _mean_of_next(self, count: int | None) -> float:
        """Return the mean of the next ``count`` losses (None: of all that are left), the same on every rank.

        Where there is none it is the last one; nan where ``count`` is None.
        """
        value = math.nan
        # Where no loss came out in this call the last value is sent again: the number of
        # messages a call is one, whatever the programs hold, and stays the same on both sides.
        if self._rank == self._root:
            losses = [self._due.popleft() for _ in range(len(self._due) if count is None else count)]
            if losses:
                self._last = value = math.fsum(losses) / len(losses)
            elif count is not None:
                value = self._last
        if self._group is None:
            return value
        if self._rank == self._root:
            self._send(value)
            return value
        return self._receive()

    def _send(self, value: float) -> None:
        # gloo says that a send is done only to who waits for it; to have come this far the others took these
        while len(self._sent) > _CALLS_KEPT * len(self._others):
            self._complete_oldest()
        for other in self._others:
            tensor = torch.tensor([value], dtype=torch.float64)
            self._sent.append((dist.isend(tensor, other, group=self._group, tag=_LOSS_TAG), tensor, other))

    def _complete_oldest(self) -> None:
        work, _, other = self._sent.popleft()
        self._wait(work, "the loss to be taken", other)

    def _receive(self) -> float:
        tensor = torch.empty(1, dtype=torch.float64)
        work = dist.irecv(tensor, self._root, group=self._group, tag=_LOSS_TAG)
        self._wait(work, f"the loss from rank {self._root}", self._root)
        return float(tensor)

    def _wait(self, work: Any, what: str, other: int) -> None:
        assert self._group is not None, "a single rank has its losses"
        wait_for_message(
            work,
            what=what,
            who=own_name(),
            group=self._group,
            most_s=self.data.timeout_s,
            hang_up=functools.partial(hang_up, self._group, [other]),
        )


class DataCheck:
    """Whether all ranks are given the same mini-batches in mode async, known one mini-batch later.

    Args:
        reads: whether this rank's stage reads model inputs.
        timeout_s: how long ranks at work are waited for.
    """

    def __init__(self, setting: Setting, *, reads: bool, timeout_s: float) -> None:
        self._group = setting.group
        self._rank = setting.rank
        self._reads = reads
        self.timeout_s = timeout_s
        self._posted: deque[tuple[Any, Tensor, int, int]] = deque()

    def post(self, batch: Batch, step: int) -> None:
        """Begin to compare this rank's mini-batch with the others'."""
        if self._group is None:
            return
        # Asynchronous, and so is the reduction: it moves on while the program runs, and no rank waits for another here.
        checksum = batch_checksum(batch) if self._reads else 0
        facts = torch.tensor([checksum, checksum * checksum, int(self._reads)], dtype=torch.float64)
        work = dist.all_reduce(facts, group=self._group, async_op=True)
        self._posted.append((work, facts, step, checksum))

    def check(self, *, keep: int = 1) -> None:
        """Look at what was posted, but for the last ``keep``.

        Raises:
            RuntimeFailure: the ranks were given different data.
            CommTimeout: one has not begun the step in time, or is gone.
        """
        while len(self._posted) > keep:
            work, facts, step, checksum = self._posted.popleft()
            assert self._group is not None, "there is a sum"
            what = f"the beginning of step {step}"
            wait_for(work, what=what, who=own_name(), group=self._group, most_s=self.timeout_s)
            total, squares, readers = facts.tolist()
            if squares * readers != total * total:  # as in `BatchSource`
                raise different_data(step, checksum=checksum, rank=self._rank)


def different_data(step: int, *, checksum: int, rank: int) -> GppError:
    """Return the error of ranks that were given different mini-batches, which all of them raise."""
    return shared_error(
        "RuntimeFailure",
        f"step {step}: the ranks were given different mini-batches (checksum {checksum} on rank {rank}); give every "
        "rank the same stream of batches: no DistributedSampler, the same shuffle seed everywhere",
    )
