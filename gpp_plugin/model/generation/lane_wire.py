"""How the ranks of one lane tell each other a tensor: a message to each reader, that also says who failed.

    the bytes of the tensor | one byte: 0, or 1 where the sender has nothing to tell because a module of its failed

All ranks of a lane run the same program, so each of them comes to the same messages in the same order, and knows who
tells what to whom and of what shape. A sender goes on at once, a rank that reads nothing has nothing to do, and a
message comes when its reader asks for it, whatever the others are busy with: over gloo, on CUDA devices through the
host, as what a token hands over is small.

Source: this project
Tests: tests/model/test_lane_wire.py, tests/integrations/test_generation.py
"""

from __future__ import annotations

import contextlib
import datetime
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpp_plugin.model.generation.micro_batches import Turns, in_micro_batch
from gpp_plugin.runtime.ranks.waiting import own_name, wait_for_message

_SENDS_KEPT = 64
"""Messages under way: gloo says that one is taken only to who waits for it, and these many back all were."""

_HANG_UP_TAG = 1 << 29
"""Of a message that nobody sends."""


class LaneStopped(Exception):
    """A module failed on some rank of the lane; the ranks that hear of it leave the generation together."""


@dataclass(slots=True, kw_only=True)
class LaneWire:
    """What joins the ranks of a lane.

    Args:
        ranks: global ranks by their position in the lane; ``position`` is this rank's.
        group: gloo's, of these ranks; None where this rank is not in the lane, or alone.
        device: where tensors live.
        timeout_s: how long a rank at work is waited for; one that is not, as long as the job says.
        micro_batch: whose tensors these are; ``turns``: with others on this rank, None where it is the only one.
        messages, sent_bytes: how many tensors were told so far on the lane, and bytes of them by this rank.
    """

    ranks: tuple[int, ...]
    position: int
    group: dist.ProcessGroup | None
    device: torch.device
    timeout_s: float
    micro_batch: int = 0
    turns: Turns | None = None
    messages: int = 0
    sent_bytes: int = 0
    _sends: deque[tuple[Any, Tensor]] = field(default_factory=deque)

    @property
    def others(self) -> tuple[int, ...]:
        """Return the other positions."""
        return tuple(position for position in range(len(self.ranks)) if position != self.position)

    def tell(self, value: Tensor, *, source: int, readers: Sequence[int], has_failed: bool) -> Tensor | None:
        """Return the tensor of the rank at position ``source``, there and at ``readers``; elsewhere what was given.

        Every rank of the lane calls it.

        Args:
            value: the tensor at the source; elsewhere one on the meta device with its shape.
            has_failed: the source has none.

        Returns:
            None at the source and the readers where the source has failed.

        Raises:
            CommTimeout: a rank did not come in time, or is gone.
        """
        self.messages += 1
        if self.position == source:
            self._send(value, readers, has_failed)
            return None if has_failed else value
        return self._receive(value, source) if self.position in readers else value

    def finish(self) -> None:
        """Wait until everything that was told is taken.

        Raises:
            CommTimeout: a rank did not come in time, or is gone.
        """
        while self._sends:
            self._wait(self._sends.popleft()[0])

    def hang_up(self) -> None:
        """End every wait of this lane, here and on the other ranks: this rank gives up."""
        # gloo closes the connections of a group in which a receive is late, and nothing else does while one is waited
        # for.
        if self.group is None:
            return
        nothing = torch.empty(1, dtype=torch.uint8)
        with contextlib.suppress(RuntimeError):
            other = self.ranks[self.others[0]]
            work = dist.irecv(nothing, other, group=self.group, tag=_HANG_UP_TAG)
            work.wait(datetime.timedelta(milliseconds=1))  # type: ignore[union-attr]

    def _send(self, value: Tensor, readers: Sequence[int], has_failed: bool) -> None:
        size = _bytes_of(value)
        sent = torch.empty(size + 1, dtype=torch.uint8)
        sent[size] = int(has_failed)
        if not has_failed:
            sent[:size].view(value.dtype).view(value.shape).copy_(value)
        for reader in readers:
            work = dist.isend(sent, self.ranks[reader], group=self.group, tag=self.micro_batch)
            self._sends.append((work, sent))
            self.sent_bytes += size
        while len(self._sends) > _SENDS_KEPT:
            self._wait(self._sends.popleft()[0])

    def _receive(self, value: Tensor, source: int) -> Tensor | None:
        size = _bytes_of(value)
        came = torch.empty(size + 1, dtype=torch.uint8)
        self._wait(dist.irecv(came, self.ranks[source], group=self.group, tag=self.micro_batch))
        if int(came[size]):
            return None
        return came[:size].view(value.dtype).view(value.shape).to(self.device)

    def _wait(self, work: Any) -> None:
        assert self.group is not None
        turns = self.turns
        with contextlib.nullcontext() if turns is None else turns.waiting(self.micro_batch):
            wait_for_message(
                work,
                what="the next tensor of a generation" + in_micro_batch(turns, self.micro_batch),
                who=own_name(),
                group=self.group,
                most_s=self.timeout_s,
                hang_up=self.hang_up,
            )


def _bytes_of(value: Tensor) -> int:
    return value.numel() * value.element_size()
