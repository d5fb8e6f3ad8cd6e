"""What one call of `train_batch` does on a rank: its programs, its loss, how often stages step, when the job ends.

    MiniBatchRunner   runs a mini-batch; after one that failed on its way nothing more runs
    TrainingSteps     from one mini-batch to the next: which programs of which mini-batch run is a table (`StepPolicy`)

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

import contextlib
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpp_plugin.engine.memory_watch import MemoryWatch
from gpp_plugin.engine.metrics import Metrics, share_of_loss
from gpp_plugin.engine.rank_engine import RankEngine
from gpp_plugin.engine.stage_engine import StageEngine
from gpp_plugin.engine.stage_step import StepResult
from gpp_plugin.errors import CaptureError, CommTimeout, ConfigError, GppError, RuntimeFailure
from gpp_plugin.ir.timeline import Event
from gpp_plugin.runtime.batches import Batch, UnitBatch, batch_checksum
from gpp_plugin.runtime.executor import MiniBatchResult
from gpp_plugin.runtime.rank_runner import RankRunner
from gpp_plugin.runtime.ranks.collectives import Collectives, do_together
from gpp_plugin.runtime.ranks.placement_of_ranks import Setting
from gpp_plugin.schedule.orders.async_1f1b import Windows, windows_of
from gpp_plugin.schedule.orders.gpipe import forward_only_stages

logger = logging.getLogger(__name__)

_NEW_SHAPES = "code for a new shape"
_LOSS_TAG = 1 << 30
"""Beyond the numbers of the group's own meetings, which gloo's monitored barrier uses as tags."""
_CALLS_KEPT = 4
"""Calls whose losses may be on their way; a rank that computes the loss is in the same call, or one before it."""

# ---- running them -------------------------------------------------------------------------------------------


def failure_after(step: int, error: BaseException) -> str:
    """Return what ended a job, for whoever calls the engine again; an interrupt has no text of its own."""
    return f"the mini-batch after step {step} failed ({str(error) or type(error).__name__})"


class RankStep:
    """The step of a rank's program: of all its stages, or in mode async of one; looks at the gradients before it.

    Args:
        stages: steps, when it has been seen what they hold.
    """

    def __init__(self, stages: RankEngine, memory: MemoryWatch) -> None:
        self._stages = stages
        self._memory = memory
        self.keeps_gradients = False
        self.gradients: dict[str, Tensor] | None = None

    def __call__(self) -> StepResult:
        """Keep the gradients where the user asked, and step; collective over the ranks that step together."""
        self._note()
        if self.keeps_gradients:
            self.gradients = self._stages.full_gradients()
        return self._stages.step()

    def alone(self, stage: StageEngine) -> Callable[[], StepResult]:
        """Return the step of one stage by itself (mode async); collective over its ranks."""

        def step() -> StepResult:
            self._note()
            if self.keeps_gradients:
                self.gradients = {**(self.gradients or {}), **stage.full_gradients()}
            return stage.step()

        return step

    def _note(self) -> None:
        self._memory.note_gradients(stage.gradients for stage in self._stages.stages)


class StepHooks:
    """What a program calls on the optimizer side of one stage.

    Its first four calls are the stage's own, bound once: a program makes one of them for every micro-batch.

    Args:
        step: of all the rank's stages, or of this one alone.
    """

    def __init__(self, stage: StageEngine, step: Callable[[], StepResult]) -> None:
        self._stage = stage
        self.accumulate = stage.accumulate
        self.begin_reduction = stage.begin_reduction
        self.reduce_data = stage.reduce_data
        self.reduce_tied = stage.reduce_tied
        self.step = step

    @property
    def loss_scale(self) -> float:
        """Return the factor on every loss of this mini-batch."""
        return self._stage.loss_scale


class MiniBatchRunner:
    """Runs mini-batches; a failure that leaves messages under way ends the job.

    Args:
        stages: whose gradients a failed mini-batch leaves behind.
        memory: counts one mini-batch of training.
        group: of all ranks; None for a single one. Messages of others may still arrive after a failure here.
    """

    def __init__(self, stages: RankEngine, memory: MemoryWatch, *, group: dist.ProcessGroup | None) -> None:
        self._stages = stages
        self._memory = memory
        self._group = group
        self._num_ranks = 1 if group is None else dist.get_world_size(group)
        self.failure: str | None = None

    def refuse_after_failure(self) -> None:
        """Refuse to go on where an earlier mini-batch failed on its way.

        Raises:
            RuntimeFailure: says which, and what to do.
        """
        if self.failure is not None:
            raise RuntimeFailure(f"this job cannot go on: {self.failure}; start it anew from a checkpoint")

    def run(
        self,
        runner: RankRunner,
        batch: Batch,
        *,
        following: Batch | None = None,
        record: bool = False,
        count: bool = False,
    ) -> MiniBatchResult:
        """Run one mini-batch, and leave nothing of it behind if it fails.

        Args:
            following, record, count: as of `RankRunner.run`.

        Raises:
            RuntimeFailure: an earlier mini-batch failed on its way, so that messages of it may still arrive.
        """
        self.refuse_after_failure()
        try:
            self.learn_shapes(runner, batch)
            if runner.has_ragged_units and runner.is_training:
                self._stages.rest(runner.unread_parameters(batch))
            return runner.run(batch, following=following, record=record, count=count)
        except BaseException as error:
            self._stages.zero_grad()
            # What capture or configuration refuse is refused before the first message, by every rank alike.
            if self._group is not None and not isinstance(error, (CaptureError, ConfigError)):
                self.failure = failure_after(self._stages.global_steps, error)
            raise

    def learn_shapes(self, runner: RankRunner, batch: Batch) -> None:
        """Make code for units of shapes that were not met lately; collective over all ranks where there are any.

        Raises:
            CaptureError: a rank could not; the same on every rank.
        """
        # A rank makes code for its own units alone: before any message all know whether all could. Ranks that a plan
        # leaves idle have met nothing, and come to every such collectives (`stand_by`), but know no sets of inputs.
        if not runner.has_ragged_units:
            return
        has_idle = runner.plan.num_ranks < self._num_ranks
        if runner.has_new_shapes(batch) or has_idle:
            if not has_idle:
                runner.learn_branches(batch)
            do_together(lambda: runner.make_code(batch), what=_NEW_SHAPES, group=self._group)
        runner.note_shapes(batch)

    def stand_by(self, batch: Batch) -> None:
        """Do what a rank does while others run a batch on a plan that leaves it idle.

        Raises:
            CaptureError: they have no code for its units.
        """
        if isinstance(batch, UnitBatch):
            do_together(lambda: None, what=_NEW_SHAPES, group=self._group)

    def train(
        self, runner: RankRunner, batch: Batch, *, following: Batch | None = None, record: bool
    ) -> MiniBatchResult:
        """Run one mini-batch of training, counted if it is the one to compare with the plan."""
        counts = self._memory.is_due(batch)
        result = self.run(runner, batch, following=following, record=record, count=counts)
        # In mode async the pipeline fills first; counting goes on until as much is held as ever will be.
        if counts and runner.has_peaked:
            most, under_way = result.most_bytes, result.message_bytes
            self._memory.compare(result.memories, batch, most_bytes=most, message_bytes=under_way)
        return result

    @contextlib.contextmanager
    def ending_on_failure(self) -> Iterator[None]:
        """Let nothing more run after a failure that other ranks do not share."""
        try:
            yield
        except BaseException as error:
            self._stages.zero_grad()
            self.failure = failure_after(self._stages.global_steps, error)
            raise


# ---- from one mini-batch to the next -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedCall:
    """What one call of `train_batch` brought: the mean loss, the last step, and what happened when, if recorded."""

    loss: float
    step: StepResult
    events: Sequence[Event]


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
        stages: RankEngine,
        runner: MiniBatchRunner,
        *,
        setting: Setting,
        collectives: Collectives,
        reads_inputs: bool,
        learn_shapes: Callable[[Batch], None],
        metrics: Metrics,
    ) -> None:
        self._rank_runner = rank_runner
        self._stages = stages
        self._runner = runner
        self._collectives = collectives
        self._losses: LossSum | LossReports = LossSum(
            collectives, mini_batch=rank_runner.plan.mini_batch, is_sum=rank_runner.sums_losses
        )
        # In mode async it is checked that all ranks are given the same; else they agree before a call.
        self._data: DataCheck | None = None
        if rank_runner.policy.steps_alone:
            limit_s = collectives.timeout_s
            self._losses = loss_reports(rank_runner, stages, setting=setting, timeout_s=limit_s)
            self._data = DataCheck(
                group=setting.group, rank=setting.rank, reads=reads_inputs, timeout_s=limit_s
            )
        self._learn_shapes = learn_shapes
        self._metrics = metrics
        self._is_prefetch_off = False
        self._has_noted_staleness = self._data is None

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
        runner = self._rank_runner
        return runner.policy.can_prefetch and runner.has_peeked and not self._is_prefetch_off

    def train(self, batch: Batch, *, following: Batch | None = None, record: bool) -> TrainedCall:
        """Train on one mini-batch.

        In mode async it enters the pipeline, which is full when this returns, and the learning-rate schedule advances
        once. The loss is then the mean of those that came out meanwhile, which lag behind what enters by the
        micro-batches in flight. The first call waits for at least one; a later one during which none came out returns
        the last one again.

        Args:
            following: the next call's, where it is known and of use.

        Raises:
            CommTimeout, RuntimeFailure: a rank failed, or was given other data.
        """
        if self._data is not None:
            # Posted before the mini-batch, checked one call later: by then the others' facts have long come.
            self._data.post(batch, self._stages.global_steps + 1)
        following = self._common_following(batch, following) if self.can_prefetch else None
        # Mini-batches overlap within one shape only: messages and weight versions of another one do not fit.
        if self._rank_runner.is_another_shape(batch):
            self.drain()
        result = self._runner.train(self._rank_runner, batch, following=following, record=record)
        with self._ending_on_failure():
            if self._data is not None:
                self._data.check()
            step, running = self._stages.global_steps, self._rank_runner.num_running
            loss = self._losses.of_call(result, step, running)
        stepped = self._stages.end_mini_batch()
        if not self._has_noted_staleness:
            self._has_noted_staleness = True
            self._metrics.note_staleness(self.staleness, self._stages.global_samples)
        return TrainedCall(loss=loss, step=stepped, events=result.events)

    def _ending_on_failure(self) -> contextlib.AbstractContextManager[None]:
        """Let nothing more run after a failure while micro-batches are in flight (mode async)."""
        return contextlib.nullcontext() if self._data is None else self._runner.ending_on_failure()

    def drain(self) -> None:
        """Finish what is in flight, or drop what was prefetched: the model is then one of synchronous training.

        Raises:
            RuntimeFailure: an earlier mini-batch of mode async failed on its way.
        """
        runner = self._rank_runner
        if self._data is not None:
            self._runner.refuse_after_failure()
            num_running = runner.num_running
            if num_running:
                with self._ending_on_failure():
                    runner.drain()
                    self._data.check(keep=0)
                self._losses.note_drain(num_running)
        elif runner.has_prefetched and self._runner.failure is None:
            with self._runner.ending_on_failure():
                runner.drop()

    def flush(self) -> float | None:
        """Drain; return the mean of the losses that no call has returned, None if there are none."""
        self.drain()
        with self._ending_on_failure():
            return self._losses.flush()

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
            self._is_prefetch_off = True
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


class LossSum:
    """The loss of a synchronous mini-batch, which ranks sum when it ends.

    Args:
        collectives: of all ranks.
        mini_batch: what losses are means over, in all; ``is_sum``: they are sums, divided already.
    """

    def __init__(self, collectives: Collectives, *, mini_batch: int, is_sum: bool) -> None:
        self._collectives = collectives
        self._mini_batch = mini_batch
        self._is_sum = is_sum

    def of_call(self, result: MiniBatchResult, step: int, num_running: int) -> float:
        """Return the mean loss on every rank."""
        mine = share_of_loss(result.losses, self._mini_batch, is_sum=self._is_sum)
        own = torch.tensor([mine], dtype=torch.float64)
        return float(self._collectives.sum(own, f"the loss of step {step}"))

    def note_drain(self, num_running: int) -> None:
        """Do nothing: no loss is left."""

    def flush(self) -> float | None:
        """Return None: every call has returned its loss."""
        return None


class LossReports:
    """Losses of mode async, sent by the rank that has them to all others.

    They travel one way: a collective of all ranks after every mini-batch would empty the front of the pipeline while
    its end still works.

    Args:
        root: the first of ``loss_ranks``, which are the stage that computes the loss.
        rank: this one.
        group: a CPU group of all ranks; None for a single one.
        stage_group: of the loss stage's ranks, where this rank is one of them.
        micro_batch_size: samples of one loss.
        device: of the tensors that ``stage_group`` moves.
        windows: the tasks of each mini-batch; they say how many losses are due.
        timeout_s: how long this rank waits for a loss.
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
        windows: Windows,
        timeout_s: float,
    ) -> None:
        self._windows = windows
        self._num_left = 0  # losses of drained micro-batches that no call has returned
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
        self._due: deque[float] = deque()
        self._last = math.nan
        self._sent: deque[tuple[Any, Tensor, int]] = deque()

    def of_call(self, result: MiniBatchResult, step: int, num_running: int) -> float:
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
        self._finish()
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
            dist.all_reduce(parts, group=self._stage_group)
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

    def _finish(self) -> None:
        """Wait until everything has been sent.

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


class DataCheck:
    """Whether all ranks are given the same mini-batches in mode async, known one mini-batch later.

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
            if squares * readers != total * total:  # as in `BatchSource`
                raise different_data(step, checksum=checksum, rank=self._rank)


def loss_reports(
    runner: RankRunner, stages: RankEngine, *, setting: Setting, timeout_s: float
) -> LossReports:
    """Return the losses of mode async: of the stage that holds the model's loss.

    Args:
        timeout_s: how long this rank waits for a loss.
    """
    plan, loss_block = runner.plan, runner.reference.block_graph.loss_block
    index = next(i for i, stage in enumerate(plan.stages) if loss_block in stage.blocks)
    stage = plan.stages[index]
    return LossReports(
        loss_ranks=stage.data_ranks(0),
        rank=setting.rank,
        num_ranks=setting.num_ranks,
        group=setting.group,
        stage_group=stages.groups.data[index],
        micro_batch_size=stage.micro_batch_size,
        device=setting.device,
        windows=windows_of(plan),
        timeout_s=timeout_s,
    )


def different_data(step: int, *, checksum: int, rank: int) -> RuntimeFailure:
    """Return the error of ranks that were given different mini-batches."""
    return RuntimeFailure(
        f"step {step}: the ranks were given different mini-batches (checksum {checksum} on rank {rank}); give every "
        "rank the same stream of batches: no DistributedSampler, the same shuffle seed everywhere"
    )
