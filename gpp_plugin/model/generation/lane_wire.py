"""How the ranks of one lane tell each other a tensor: one broadcast, with a limit, that also says who failed.

    the bytes of the tensor | one byte: 0, or 1 where the sender has nothing to tell because a module of its failed

All ranks of a lane run the same program, so each of them comes to the same broadcasts in the same order, knows the
shape of what comes, and stops at the same place where one of them fails.

Source: this project
Tests: tests/integrations/test_generation.py
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpp_plugin.model.generation.micro_batches import Turns, in_micro_batch
from gpp_plugin.runtime.ranks.waiting import own_name, wait_for


class LaneStopped(Exception):
    """A module failed on some rank of the lane; the ranks that hear of it leave the generation together."""


@dataclass(slots=True, kw_only=True)
class LaneWire:
    """What joins the ranks of a lane.

    Args:
        ranks: global ranks by their position in the lane; ``position`` is this rank's.
        group: of these ranks; None for a single one.
        device: where tensors live, and ``staging`` where the group wants them.
        timeout_s: how long ranks at work are waited for, at most.
        micro_batch: whose tensors these are; ``turns``: with others on this rank, None where it is the only one.
        messages, sent_bytes: how many tensors were told so far, and bytes of them by this rank.
    """

    ranks: tuple[int, ...]
    position: int
    group: dist.ProcessGroup | None
    device: torch.device
    staging: torch.device
    timeout_s: float
    micro_batch: int = 0
    turns: Turns | None = None
    messages: int = 0
    sent_bytes: int = 0

    def tell(self, value: Tensor, *, source: int, has_failed: bool) -> Tensor:
        """Return the tensor of the rank at position ``source``, on every rank of the lane.

        Args:
            value: the tensor there; elsewhere one on the meta device with its shape.

        Raises:
            LaneStopped: the rank has none, because a module of its failed, here or in another micro-batch.
            CommTimeout: a rank did not come in time, or is gone.
        """
        if self.group is None:
            if has_failed:
                raise LaneStopped
            return value
        is_source = source == self.position
        has_failed = has_failed or (self.turns is not None and self.turns.is_stopping)
        size = value.numel() * value.element_size()
        sent = torch.empty(size + 1, dtype=torch.uint8, device=self.staging)
        body = sent[:size].view(value.dtype).view(value.shape)
        if is_source:
            sent[size] = int(has_failed)
            if not has_failed:
                body.copy_(value)
            self.sent_bytes += size
        self.messages += 1
        self._wait(dist.broadcast(sent, src=self.ranks[source], group=self.group, async_op=True))
        if int(sent[size]):
            if self.turns is not None:
                self.turns.is_stopping = True
            raise LaneStopped
        return value if is_source else body.to(self.device)

    def _wait(self, work: Any) -> None:
        assert self.group is not None
        turns = self.turns
        with contextlib.nullcontext() if turns is None else turns.waiting(self.micro_batch):
            wait_for(
                work,
                what="the next tensor of a generation" + in_micro_batch(turns, self.micro_batch),
                who=own_name(),
                group=self.group,
                most_s=self.timeout_s,
                is_polled=self.staging.type != "cpu",
            )
