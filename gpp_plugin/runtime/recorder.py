"""Notes when one rank did what: the events of a measured timeline."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from gpp_plugin.ir.program import Message
from gpp_plugin.ir.timeline import Event, EventKind
from gpp_plugin.runtime.wires import Wire


class Recorder:
    """The events of one rank; while it is off nothing is noted, and no device is waited for.

    Args:
        device: where the stage computes; CUDA is synchronised at each event, or its times would be of launches.
    """

    def __init__(self, *, rank: int, stage: int, device: torch.device) -> None:
        self._rank = rank
        self._stage = stage
        self._device = device
        self._events: list[Event] = []
        self.is_on = False

    def start(self, events: list[Event], *, is_on: bool) -> None:
        """Note into ``events`` from here on, if it is on."""
        self._events, self.is_on = events, is_on

    def now(self) -> float:
        """Return microseconds of this rank's clock; 0 while nothing is noted."""
        if not self.is_on:
            return 0.0
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter_ns() / 1e3

    def note(self, kind: EventKind, micro_batch: int, start_us: float, half: int | None = None) -> None:
        """Note what ends now: a task, or (``micro_batch`` -1) what is done once a mini-batch."""
        if self.is_on:
            self._events.append(
                Event(
                    rank=self._rank,
                    stage=self._stage,
                    kind=kind,
                    micro_batch=micro_batch,
                    start_us=start_us,
                    end_us=self.now(),
                    half=half,
                )
            )

    def note_message(self, kind: EventKind, message: Message, start_us: float, wires: Sequence[Wire]) -> None:
        """Note a message that has been posted (a send) or has come (a receive) by now."""
        if not self.is_on:
            return
        is_send = kind is EventKind.SEND
        self._events.append(
            Event(
                rank=self._rank,
                stage=self._stage,
                kind=kind,
                micro_batch=message.src_micro_batch if is_send else message.dst_micro_batch,
                half=message.src_half if is_send else message.dst_half,
                edge=message.edge,
                peer=message.dst_rank if is_send else message.src_rank,
                start_us=start_us,
                end_us=self.now(),
                bytes=sum(wire.num_bytes for wire in wires),
            )
        )
