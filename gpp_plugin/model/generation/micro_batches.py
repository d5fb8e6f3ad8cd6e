"""Micro-batches of prompts: generations that a rank runs in turns, so that its stages compute while others wait.

    stage 0   0 1 2 3 0 1 2 3 0 ..      four micro-batches on four stages: a stage decodes a token of one of them while
    stage 1   . 0 1 2 3 0 1 2 3 ..      the logits of another are on their way
    stage 2   . . 0 1 2 3 0 1 2 ..
    stage 3   . . . 0 1 2 3 0 1 ..

Each is a call of the model's own `generate` in a thread of its own, on a copy of the model (the modules' Python objects
once more, over the same weights), and with links of its own. One thread of a rank runs at a time: where it would wait
for another rank, the one whose tensor came first continues. Ranks need not take the same turns, for what is sent in one
micro-batch is heard in no other.

Source: this project
Tests: tests/model/test_micro_batches.py, tests/integrations/test_generation.py, tests/model/test_lane_wire.py
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_plugin.errors import CommTimeout, ConfigError, first_line
from gpp_plugin.runtime.messages.sockets import hang_up
from gpp_plugin.runtime.random_streams import Streams, set_streams, streams_of
from gpp_plugin.runtime.ranks.collectives import own_name, wait_for_message

T = TypeVar("T")


class _Abandoned(BaseException):
    """The rank has given up the generation; this one of its micro-batches ends as well."""


class Turns:
    """Runs several calls in threads, one at a time: in a wait for other ranks, the others continue.

    Each call draws random numbers of its own streams, which begin as the rank's are; what one of them draws is not
    noticed by the others.

    Args:
        device: on which the calls draw and compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._changed = threading.Condition()
        # Those that could continue, in the order in which they became so; the first of them has the turn.
        self._ready: deque[int] = deque()
        self._is_abandoned = False
        self._errors: list[BaseException] = []
        self._running = 0
        self.is_stopping = False
        """Whether some micro-batch has failed: the next tensor that this rank sends carries that."""

    def run(self, calls: Sequence[Callable[[], T]]) -> tuple[list[T], list[Streams]]:
        """Return what each call returned, and its random streams at its end.

        Raises:
            BaseException: what the first of them raised; the others end by themselves in their next wait.
        """
        # A call that fails in a way that all ranks share returns so. One that raises is known to fail on this rank
        # alone: nobody would end the others' waits before this rank says so, which it does by raising. Their threads
        # end behind it, as every wait does; no daemons, which end in the middle of gloo's and abort the process.
        begin = streams_of(self._device)
        found: list[Any] = [None] * len(calls)
        ends = [begin] * len(calls)

        def body(number: int) -> None:
            try:
                if self._device.type == "cuda":
                    torch.cuda.set_device(self._device)  # of each thread its own
                self._take(number)
                set_streams(self._device, begin)
                found[number] = calls[number]()
                ends[number] = streams_of(self._device)
            except _Abandoned:
                pass
            except BaseException as error:  # also what ends a program: it is the caller's to raise
                self._errors.append(error)
            finally:
                self._leave(number)

        self._running = len(calls)
        for number in range(len(calls)):
            self._ready.append(number)
        for number in range(len(calls)):
            name = f"gpp micro-batch {number}"
            threading.Thread(target=body, args=(number,), name=name).start()
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._errors or not self._running)
        finally:
            with self._changed:
                self._is_abandoned = True
                self._changed.notify_all()
        if self._errors:
            raise self._errors[0]
        set_streams(self._device, begin)
        return found, ends

    @contextmanager
    def waiting(self, number: int) -> Iterator[None]:
        """Let the others continue while a call waits for other ranks."""
        own = streams_of(self._device)
        with self._changed:
            self._ready.remove(number)
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._ready.append(number)
            self._take(number)
            set_streams(self._device, own)

    def _take(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_abandoned or self._ready[0] == number)
            if self._is_abandoned:
                raise _Abandoned

    def _leave(self, number: int) -> None:
        with self._changed:
            if number in self._ready:
                self._ready.remove(number)
            self._running -= 1
            self._changed.notify_all()


def copy_modules(model: nn.Module) -> Any:
    """Return the modules of a model once more, over the same parameters and buffers.

    What a module notes of a generation (Qwen2.5-VL's offsets of positions) and what is put in its place meanwhile are
    the copy's own.

    Raises:
        ConfigError: it has something that cannot be copied, or that would run in the model instead of the copy.
    """
    bound = next((path for path, m in model.named_modules() if _is_plain_function(m)), None)
    if bound is not None:
        raise ConfigError(
            f"graph_pipeline.generate.micro_batches: the forward of {bound or type(model).__name__!r} was replaced by "
            "a function, which is bound to one model; set it to 1"
        )
    tensors = (
        *model.parameters(),
        *model.buffers(),
        *(t for m in model.modules() for t in vars(m).values() if isinstance(t, torch.Tensor)),
    )
    try:
        return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    except Exception as error:
        raise ConfigError(
            f"graph_pipeline.generate.micro_batches: {type(model).__name__} cannot be copied "
            f"({type(error).__name__}: {first_line(error)}); set it to 1"
        ) from error


def _is_plain_function(module: nn.Module) -> bool:
    forward = vars(module).get("forward")
    return callable(getattr(forward, "__code__", None) and forward) and not hasattr(forward, "__self__")


# How a rank of a replica sends a tensor to the others: a message to each reader, which also carries failures.
#
#     the bytes of the tensor | one byte: 0, or 1 where the sender has no value because one of its modules failed
#
# All ranks of a replica run the same program. So each reaches the same messages in the same order, with the same
# sender, readers and shape. A sender continues at once, a rank that reads nothing has nothing to do, and a
# message comes when its reader requests it, whatever the others are busy with: over gloo, on CUDA devices through the
# host, as what a token transfers is small.

_MAX_SENDS = 64
"""Messages under way: gloo says that one is taken only to who waits for it, and these many back all were."""


class ReplicaStopped(Exception):
    """A module failed on some rank of the replica; the ranks that hear of it leave the generation together."""


@dataclass(slots=True, kw_only=True)
class ReplicaLink:
    """What joins the ranks of a replica.

    Args:
        ranks: global ranks by their position in the replica; ``position`` is this rank's.
        group: gloo's, of these ranks; None where this rank is not in the replica, or alone.
        device: where tensors live.
        timeout_s: how long a rank at work is waited for; one that is not, as long as the job says.
        micro_batch: whose tensors these are; ``turns``: with others on this rank, None where it is the only one.
        messages, sent_bytes: how many tensors were sent so far in the replica, and bytes of them by this rank.
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
    def waits_for(self) -> str:
        """Return what a rank waits for here, in errors."""
        return "the next tensor of a generation" + (f", micro-batch {self.micro_batch}" if self.turns else "")

    @property
    def others(self) -> tuple[int, ...]:
        """Return the other positions."""
        return tuple(position for position in range(len(self.ranks)) if position != self.position)

    def broadcast(
        self, value: Tensor, *, source: int, readers: Sequence[int], has_failed: bool
    ) -> Tensor | None:
        """Return the tensor of the rank at position ``source``, there and at ``readers``; elsewhere the argument.

        Every rank of the replica calls it.

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
        """Wait until everything that was sent is taken.

        Raises:
            CommTimeout: a rank did not come in time, or is gone.
        """
        self._finish_all_but(0)

    def _finish_all_but(self, number: int) -> None:
        while len(self._sends) > number:
            self._wait(self._sends[0][0])
            self._sends.popleft()  # behind the wait: until then it holds what is sent

    def hang_up(self) -> None:
        """End every wait of this replica, here and on the other ranks: this rank gives up."""
        if self.group is not None:
            hang_up(self.group, [self.ranks[position] for position in self.others])

    def _send(self, value: Tensor, readers: Sequence[int], has_failed: bool) -> None:
        size = value.nbytes
        sent = torch.empty(size + 1, dtype=torch.uint8)
        sent[size] = int(has_failed)
        if not has_failed:
            sent[:size].view(value.dtype).view(value.shape).copy_(value)
        for reader in readers:
            work = self._post(dist.isend, sent, self.ranks[reader])
            self._sends.append((work, sent))
            self.sent_bytes += size
        self._finish_all_but(_MAX_SENDS)

    def _receive(self, value: Tensor, source: int) -> Tensor | None:
        size = value.nbytes
        came = torch.empty(size + 1, dtype=torch.uint8)
        self._wait(self._post(dist.irecv, came, self.ranks[source]))
        if int(came[size]):
            return None
        return came[:size].view(value.dtype).view(value.shape).to(self.device)

    def _post(self, begin: Callable[..., Any], tensor: Tensor, other: int) -> Any:
        """Begin to send or receive.

        Raises:
            CommTimeout: the connection was closed before.
        """
        try:
            return begin(tensor, other, group=self.group, tag=self.micro_batch)
        except RuntimeError as error:
            what = f"the next tensor of a generation is neither sent to rank {other} nor taken from it"
            raise CommTimeout(f"{own_name()}: {what}: {first_line(error)[:120]}") from error

    def _wait(self, work: Any) -> None:
        assert self.group is not None
        turns = self.turns
        with contextlib.nullcontext() if turns is None else turns.waiting(self.micro_batch):
            wait_for_message(
                work,
                what=self.waits_for,
                who=own_name(),
                group=self.group,
                most_s=self.timeout_s,
                hang_up=self.hang_up,
            )
