"""What ranks of an asynchronous pipeline tell each other between windows, without waiting for each other.

A meeting of all ranks after every mini-batch would empty the pipeline's front while its end still works. So losses
travel one way, from the first rank of the stage that computes them, and whether all ranks were given the same data
is known one mini-batch later.
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

from gpp_plugin.errors import CommTimeout, RuntimeFailure
from gpp_plugin.runtime.batches import Batch, batch_checksum

_LOSS_TAG = 1 << 30
"""Beyond the numbers of the group's own meetings, which gloo's monitored barrier uses as tags."""
_CALLS_KEPT = 4
"""Calls whose losses may be on their way; a rank that feeds the loss is in the same call, or one before it."""


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
            if squares * readers != total * total:
                raise RuntimeFailure(
                    f"step {step}: the ranks were given different mini-batches (checksum {checksum} on rank "
                    f"{self._rank}); give every rank the same stream of batches: no DistributedSampler, the same "
                    "shuffle seed everywhere"
                )
