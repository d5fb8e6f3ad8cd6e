"""The messages of one stage on a rank: receives that are posted, sends that are under way, what is transferred.

A send and a receive are posted where the program has them (a receive some receives early where the transport says that
nothing can stand still for it). A task waits for the messages it reads, so a message delays nothing but its reader.
What a message holds and where its rows come from (`routes`) is resolved at compile time. A program takes
over what the one before has posted, and leaves its own to the next one (`Carry`).

What passes between two stages of one rank never travels: the producer's mailbox lays the very tensors down where the
consumer's takes them (`LocalTransfers`), in the next instruction of the rank's program.

Source: PipeDream (SOSP 2019, doi 10.1145/3341301.3359646), section 3.3
Tests: tests/runtime/test_tensor_grids.py, tests/runtime/test_traces.py, tests/runtime/test_weight_versions.py,
    tests/integrations/test_async.py, tests/runtime/test_receive_buffers.py
"""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpp_plugin.errors import RuntimeFailure
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.program import Message, RankProgram
from gpp_plugin.ir.timeline import EventKind
from gpp_plugin.plugins import Pending, Post
from gpp_plugin.runtime.messages.routes import MessageEntry, Piece, Reading, Routes
from gpp_plugin.runtime.messages.transport import Transport
from gpp_plugin.runtime.recorder import Recorder
from gpp_plugin.schedule.messages import most_sends
from gpp_plugin.schedule.program_sets import moved_message

# The buffers that messages are received into; on a CUDA device made early, so that a receive need not follow a task.
#
# A transfer begins behind what was launched on the current stream before it was posted. On the stream that computes, a
# receive posted between two tasks would begin when the first of them ends, though its message came long before:
#
#     compute    F3 -------------| B1 ...              B1 waits for its gradient all the time that it travels
#     receive                    |gradient of 1|
#
# It has to wait only until nobody uses the memory of its buffers any more. So buffers are made some receives early, on
# the stream that computes, where an event marks all that may still use their memory, and the receive is launched on a
# stream that waits for that event alone:
#
#     compute    F3 -------------| B1 ...              made before F3, so the gradient travels beside it
#     receive      |gradient of 1|
#
# Memory: the buffers of ``early`` receives more than are posted. What a task has read returns to the allocator as
# anything else it used: the stream that computes has waited for the transfer by then. The event was recorded before
# the receive was posted, so that a receive waits for nothing behind it (`schedule.lower`).

Shape = tuple[tuple[int, ...], torch.dtype]

_HERE: contextlib.AbstractContextManager[object] = contextlib.nullcontext()


class ReceiveBuffers:
    """Makes the buffers of each receive of a program, in order.

    Args:
        shapes: by number of the receive, shape and type of each of its tensors.
        early: how many receives before their place buffers are made; a CPU has no streams and ignores it.
    """

    def __init__(self, shapes: Sequence[Sequence[Shape]], *, device: torch.device, early: int) -> None:
        self._shapes = shapes
        self._device = device
        self._early = early if device.type == "cuda" else 0
        self._beside = torch.cuda.Stream(device, priority=-1) if self._early else None
        self._next = 0
        self._sizes = [
            sum(math.prod(shape) * dtype.itemsize for shape, dtype in tensors) for tensors in shapes
        ]
        self.made_bytes = 0
        """Bytes of all that were made since the program began, taken or not."""
        self._made: deque[tuple[list[Tensor], torch.cuda.Event]] = deque()

    def take(self, number: int) -> tuple[list[Tensor], contextlib.AbstractContextManager[object]]:
        """Return the buffers of a receive, and what to post it in; numbers ascend within a program."""
        if self._beside is None:
            self.made_bytes += self._sizes[number]
            return self._make(number), _HERE
        self._next = max(self._next, number)
        while self._next <= min(number + self._early, len(self._shapes) - 1):
            made = self._make(self._next)
            self.made_bytes += self._sizes[self._next]
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
            self._made.append((made, event))
            self._next += 1
        buffers, unused = self._made.popleft()
        self._beside.wait_event(unused)
        return buffers, torch.cuda.stream(self._beside)

    def _make(self, number: int) -> list[Tensor]:
        return [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in self._shapes[number]]

    def clear(self) -> None:
        """Release what was made and not taken; the next number is that of a program's first receive."""
        self._made.clear()
        self._next = self.made_bytes = 0


# Makes the tensors that a task reads out of received pieces, and those of a message out of what tasks made.
#
# Which pieces and rows these are was resolved before (`routes`); a reading becomes one callable. Gradients that
# several consumers send for one tensor are summed in the order of the groups, whatever order they arrived in.

Take = Callable[[], Tensor]
Inbox = list[list[Tensor]]
"""The buffers of each message that the rank receives, by its number."""

_TAKEN_PIECE = torch.empty(0)


def compile_reading(reading: Reading, inbox: Inbox, device: torch.device) -> Take:
    """Return what makes a tensor: pieces of a group joined by rows or placed, groups summed in order.

    Args:
        inbox: filled with buffers when the callable is called, which releases those that nobody reads afterwards.
    """
    if not reading.groups:
        return lambda: torch.empty(reading.shape, dtype=reading.dtype, device=device)
    groups = [_compile_group(pieces, reading, inbox, device) for pieces in reading.groups]
    if len(groups) == 1:
        return groups[0]

    def read() -> Tensor:
        total: Tensor | None = None
        for join in groups:
            part = join()
            total = part if total is None else total + part
        assert total is not None
        return total

    return read


def _compile_group(pieces: Sequence[Piece], reading: Reading, inbox: Inbox, device: torch.device) -> Take:
    axis = reading.axis
    takes = [_compile_piece(piece, axis, inbox) for piece in pieces]
    if len(takes) == 1:
        return takes[0]
    if not any(piece.place for piece in pieces):
        return lambda: torch.cat([take() for take in takes], dim=axis)

    def join() -> Tensor:
        whole = torch.empty(reading.shape, dtype=reading.dtype, device=device)
        for piece, take in zip(pieces, takes, strict=True):
            part = whole
            for cut in piece.place:
                part = part.narrow(cut.axis, cut.first, cut.count)
            part.copy_(take())
        return whole

    return join


def _compile_piece(piece: Piece, axis: int, inbox: Inbox) -> Take:
    number, position = piece.number, piece.position

    def take() -> Tensor:
        buffers = inbox[number]
        tensor = buffers[position]
        if piece.is_last:  # release it here
            buffers[position] = _TAKEN_PIECE
        if piece.num_rows < 0:
            return tensor
        # captured code may view what it gets, which rows cut behind the first axis do not allow
        return tensor.narrow(axis, piece.first_row, piece.num_rows).contiguous()

    return take


def pack_entry(entry: MessageEntry, made: Mapping[int, Sequence[Tensor]]) -> Tensor:
    """Return one tensor of a message, contiguous, as its receiver expects it.

    Args:
        made: what tasks made, by slot.

    Raises:
        RuntimeFailure: it is not of the shape or dtype that the plan was compiled for.
    """
    payload = entry.payload
    tensors = []
    for source in entry.sources:  # rows of one task, or of both halves
        tensor = made[source.slot][source.position].detach()
        if payload.axis >= 0 and tensor.shape[payload.axis] != source.num_rows:
            tensor = tensor.narrow(payload.axis, source.first_row, source.num_rows)
        tensors.append(tensor)
    tensor = tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=payload.axis)
    for cut in payload.cuts:
        if tensor.shape[cut.axis] != cut.size:
            raise RuntimeFailure(
                f"{payload.name} is {tuple(tensor.shape)}; by the plan the rank holds {cut.size} elements "
                f"of it along axis {cut.axis}"
            )
        tensor = tensor.narrow(cut.axis, cut.first, cut.count)
    if tensor.shape != payload.shape or tensor.dtype != payload.dtype:
        raise RuntimeFailure(
            f"{payload.name} is {tuple(tensor.shape)} {tensor.dtype}, the plan was compiled for "
            f"{payload.shape} {payload.dtype}; its shape depends on the data"
        )
    return tensor.contiguous()


@dataclass(slots=True, kw_only=True)
class Carry:
    """The messages of a stage that outlive a program, in the numbers of the next one.

    Saved activations and weight versions stay where the stage computes (`AutogradCompute`, `WeightVersions`).

    Args:
        received: message -> its buffers and what completes them; not read yet.
        sends: posted, perhaps not gone, of ``sent_bytes`` each; ``sends_of`` those of a stage without backwards by
            micro-batch.
        shift: how many micro-batches came before those that the program names, since nothing was carried.
    """

    received: dict[Message, tuple[list[Tensor], Pending]] = field(default_factory=dict)
    sends: deque[Pending] = field(default_factory=deque)
    sent_bytes: deque[int] = field(default_factory=deque)
    sends_of: dict[int, list[Pending]] = field(default_factory=dict)
    shift: int = 0

    def clear(self) -> None:
        """Release everything."""
        self.received.clear()
        self.sends.clear()
        self.sent_bytes.clear()
        self.sends_of.clear()

    def renumber(self, plan: PipelinePlan, stage: int) -> None:
        """Count from the mini-batch behind the one that was counted from."""
        count = plan.num_micro_batches(stage)
        self.received = {moved_message(plan, message, -1): held for message, held in self.received.items()}
        self.sends_of = {micro_batch - count: held for micro_batch, held in self.sends_of.items()}

    def wait(self, *, received: bool = False) -> None:
        """Wait until everything has been sent; ``received``: and has come."""
        # What a transport writes into must not be released before.
        came = [pending for _, pending in self.received.values()] if received else []
        for pending in (*self.sends, *came):
            pending.wait()


class LocalTransfers:
    """Where the stages of one rank lay down what they transfer to each other.

    A send is directly followed by its receive, so a place holds tensors between the two only. The tensors are those of
    the producer, detached; the last reader releases them.
    """

    def __init__(self) -> None:
        self._places: dict[Message, list[Tensor]] = {}

    def place(self, message: Message) -> list[Tensor]:
        """Return the place of a message, the same one to both of its ends."""
        return self._places.setdefault(message, [])

    def clear(self) -> None:
        """Release what nobody has taken: a mini-batch failed."""
        for place in self._places.values():
            place.clear()


class _Taken:
    """What completes a local transfer that a program leaves to a later one, and a message of nothing: it is there."""

    def wait(self) -> None:
        """Do nothing."""

    def is_done(self) -> bool:
        """Return True."""
        return True


_TAKEN = _Taken()


def _post_nothing(tensors: Sequence[Tensor]) -> Pending:
    """Stand for a message without tensors, as of parts that are empty: no transport gets it."""
    return _TAKEN


class Mailbox:
    """Posts and completes the messages of one program of one stage.

    Args:
        transport: where messages go; None where none does.
        names: how the plan's edges are called in errors.
        device: where receive buffers lie.
        carried: messages that programs before have posted; the first of ``routes.receives``.
        in_flight: of the stage; bounds how many sends are under way.
        is_trained: the stage runs backwards; where it does not, its sends are also stored by micro-batch.
        local_transfers: shared with the other stages of the rank.
    """

    def __init__(
        self,
        routes: Routes,
        *,
        program: RankProgram,
        transport: Transport | None,
        names: Sequence[str],
        device: torch.device,
        recorder: Recorder,
        carried: tuple[Message, ...],
        in_flight: int,
        is_trained: bool,
        local_transfers: LocalTransfers,
    ) -> None:
        # Receives have numbers, those of local transfers too; what is posted is counted without them. Of receives 0-3,
        # 1 a local transfer, ``travelling`` is [0, 2, 3]: the second that is posted is number 2.
        received = routes.receives
        self._travelling = [n for n, (message, _) in enumerate(received) if not message.is_local_transfer]
        assert transport is not None or not self._travelling, "a program with messages needs a transport"
        self._routes = routes
        self._local_transfers = local_transfers
        self._transport = transport
        self._names = names
        self._recorder = recorder
        self._carried = carried
        self._num_carried = sum(not message.is_local_transfer for message in carried)
        self._is_trained = is_trained
        self._bound: list[Post] = []
        early = 0
        if transport is not None:
            early = transport.buffers_ahead
            self._bound = [
                transport.bind_receive(received[n][0], received[n][1], names[received[n][0].edge])
                if received[n][1]
                else _post_nothing
                for n in self._travelling
            ]
        shapes = [[(payload.shape, payload.dtype) for payload in received[n][1]] for n in self._travelling]
        self._buffers = ReceiveBuffers(shapes, device=device, early=early)
        self._marks = self._posted_at()
        self._most_sends = most_sends(program, in_flight=in_flight)
        self._posted = 0
        self._receives: list[Pending] = [_TAKEN] * len(received)
        self._sends: deque[Pending] = deque()
        # What is under way, in bytes: sent and not waited for; made for receives, less what a task has waited for.
        # Buffers that are made ahead count from then on, as memory is taken then; so does what was taken over.
        self._sizes = [sum(payload.num_bytes for payload in payloads) for _, payloads in received]
        self._sent_bytes: deque[int] = deque()
        self._sending_bytes = self._read_bytes = 0
        self.most_bytes = 0
        """The most bytes that sends under way, and buffers of receives that no task has read, took at once."""
        self._sends_of: defaultdict[int, list[Pending]] = defaultdict(list)
        self._no_buffers: Inbox = [[]] * len(received)
        self.inbox: Inbox = list(self._no_buffers)
        self.shift = 0
        """How many micro-batches came before those that the program names."""

    # ---- compile -------------------------------------------------------------------------------

    def _posted_at(self) -> list[int]:
        """Return, for each receive of the program that travels, how many are posted when it is through.

        Where the transport allows it they are posted early, and in batches: half of the depth may be used up before
        more are posted, because a sender learns of a batch at once.
        """
        # Of 8 small receives, none carried, and a depth of 4:
        #
        #     receive    0  1  2  3  4  5  6  7
        #     marks      5  5  5  8  8  8  8  8     at 3 fewer than two are posted early: fill up to four
        #
        # The next receive is posted whatever its size, so that a rank never waits for a buffer to receive what it is
        # about to need; beyond it bytes are bounded, as each posted buffer is memory that nobody reads yet. Depth 0
        # posts the receive itself, no more.
        if self._transport is None:
            return []
        depth, limit = self._transport.prepost_depth, self._transport.prepost_bytes
        sizes = [sum(payload.num_bytes for payload in self._routes.receives[n][1]) for n in self._travelling]
        marks: list[int] = []
        posted = self._num_carried
        for end in range(posted + 1, len(sizes) + 1):
            if posted < min(end + depth // 2, len(sizes)):
                last = min(end + 1, len(sizes)) if depth else end
                furthest = min(end + depth, len(sizes))
                early = 0
                while last < furthest and (early := early + sizes[last]) <= limit:
                    last += 1
                posted = max(posted, last)
            marks.append(posted)
        return marks

    def compile_receive(self, index: int) -> Callable[[], None]:
        """Return what posts the program's receive number ``index``, and others before their place."""
        number = len(self._carried) + index
        message = self._routes.receives[number][0]
        if message.is_local_transfer:
            place, inbox = self._local_transfers.place(message), self.inbox

            def take() -> None:
                inbox[number] = place.copy()
                place.clear()

            return take
        mark = self._marks[bisect_left(self._travelling, number) - self._num_carried]

        def receive() -> None:
            if self._posted < mark:
                self._post_receives(mark)

        return receive

    def awaited(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Return those messages of the program that a task waits for: a local transfer is there when it is taken."""
        return tuple(n for n in numbers if not self._routes.receives[n][0].is_local_transfer)

    def compile_send(self, index: int, made: dict[int, Sequence[Tensor]]) -> Callable[[], None]:
        """Return what posts the program's send number ``index``.

        Args:
            made: what tasks made, by slot; what nothing is sent from afterwards is taken out of it.
        """
        (message, entries), drops = self._routes.sends[index], self._routes.drops[index]
        if message.is_local_transfer:
            place = self._local_transfers.place(message)

            def lay() -> None:
                place[:] = [pack_entry(entry, made) for entry in entries]
                for slot in drops:
                    del made[slot]

            return lay
        transport = self._transport
        assert transport is not None, "a program with messages needs a transport"
        post: Post = _post_nothing
        if entries:
            payloads = [entry.payload for entry in entries]
            post = transport.bind_send(message, payloads, self._names[message.edge])
        # What may be posted early is posted before the first message of either kind: a rank that begins with sends
        # would else keep senders waiting that answer them.
        mark = self._marks[0] if transport.prepost_depth and self._marks else 0
        num_bytes = sum(entry.payload.num_bytes for entry in entries)

        def send() -> None:
            if self._posted < mark:
                self._post_receives(mark)
            start = self._recorder.now() if self._recorder.is_on else 0.0
            pending = post([pack_entry(entry, made) for entry in entries])
            self._sends.append(pending)
            self._sent_bytes.append(num_bytes)
            self._sending_bytes += num_bytes
            self._note_bytes()
            if not self._is_trained:
                self._sends_of[message.src_micro_batch].append(pending)
            if self._recorder.is_on:
                self._recorder.note_message(EventKind.SEND, message, start, [e.payload for e in entries])
            for slot in drops:
                del made[slot]
            self._reap_sends()

        return send

    # ---- run -----------------------------------------------------------------------------------

    def _post_receives(self, mark: int) -> None:
        for posted in range(self._posted, mark):
            buffers, beside = self._buffers.take(posted)
            number = self._travelling[posted]
            self.inbox[number] = buffers
            with beside:
                self._receives[number] = self._bound[posted](buffers)
            self._posted = posted + 1
        self._note_bytes()

    def _note_bytes(self) -> None:
        held = self._sending_bytes + self._buffers.made_bytes - self._read_bytes
        if held > self.most_bytes:
            self.most_bytes = held

    def complete(self, number: int) -> None:
        """Wait for a message.

        Raises:
            CommTimeout: it did not come in time.
        """
        start = self._recorder.now() if self._recorder.is_on else 0.0
        self._receives[number].wait()
        self._read_bytes += self._sizes[number]
        if self._recorder.is_on:
            message, payloads = self._routes.receives[number]
            self._recorder.note_message(EventKind.RECEIVE, message, start, payloads)

    def finish_sends(self) -> None:
        """Wait until everything has been sent."""
        while self._sends:
            self._sends.popleft().wait()
        self._sent_bytes.clear()
        self._sending_bytes = 0

    def finish_sends_of(self, micro_batch: int) -> None:
        """Wait until a micro-batch has been sent by a stage without backwards."""
        for pending in self._sends_of.pop(micro_batch, ()):
            pending.wait()

    def _reap_sends(self) -> None:
        """Release what has been sent.

        gloo says that a send is done only to who waits for it. Those of long ago are waited for, lest what was sent
        stays until the mini-batch ends; the program would finish even if every send were waited for at once.
        """
        pending = self._sends
        while pending and (len(pending) > self._most_sends or pending[0].is_done()):
            pending.popleft().wait()
            self._sending_bytes -= self._sent_bytes.popleft()

    def clear(self) -> None:
        """Release everything."""
        self._sends_of.clear()
        self.inbox[:] = self._no_buffers
        self._receives[:] = [_TAKEN] * len(self._receives)
        self._posted = 0
        self._sends.clear()
        self._buffers.clear()
        self._sent_bytes.clear()
        self._sending_bytes = self._read_bytes = 0

    # ---- carry ---------------------------------------------------------------------------------

    def take_over(self, carry: Carry) -> None:
        """Go on with what the program before left."""
        # It is in this program's numbers: where a mini-batch ended in between, it was renumbered before.
        self.shift = carry.shift
        for number, message in enumerate(self._carried):
            # nothing travels, and nobody reads it, where a rank's part is empty
            nothing: tuple[list[Tensor], Pending] = ([], _TAKEN)
            self.inbox[number], self._receives[number] = carry.received.pop(message, nothing)
            if not message.is_local_transfer:
                self._read_bytes -= self._sizes[number]
        self._posted = self._num_carried
        assert not carry.received, "a program reads or passes on all that it is left"
        self._sends.extend(carry.sends)
        self._sent_bytes.extend(carry.sent_bytes)
        self._sending_bytes = sum(self._sent_bytes)
        self._note_bytes()
        self._sends_of.update(carry.sends_of)
        carry.clear()

    def hand_over(self, carry: Carry) -> None:
        """Leave what was received for later programs, and what has not been sent yet."""
        is_read = {number for reads in self._routes.reads.values() for number in reads.waits}
        for number, (message, _) in enumerate(self._routes.receives):
            if self.inbox[number] and number not in is_read:
                carry.received[message] = self.inbox[number], self._receives[number]
        carry.sends.extend(self._sends)
        carry.sent_bytes.extend(self._sent_bytes)
        carry.sends_of.update(self._sends_of)
