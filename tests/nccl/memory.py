"""What each operator of a recorded rank reads and writes, on which stream: the memory of its device, and pinned memory.

Tensors are real ones on the CPU, so that the code under test computes with numbers. A storage that was made on ``cuda``
is known here as a `Block`, and so is every storage of the host that is used beside the host: page-locked buffers, and
tensors in gloo's hands. What belongs to no block is the host's own, in its order, and of no interest.

    operator      reads its tensors and writes its results, and what its schema says that it writes, on the current stream
    view          touches nothing
    new storage   is a block of the current stream: writing begins at once, as the memory may have been used before
    letting go    of a storage is a write by the stream that allocated it, or by the host, at this point of the host's
                  order: whatever is launched there next may get the memory. Streams that `record_stream` named are
                  waited for
    copy          from pinned memory, or to it with ``non_blocking``, is the stream's; from or to other host memory, the
                  host waits. Pinned memory is never let go of too early: torch's allocator waits for the copies
    host read     of a number (``item``, ``nonzero``, a mask as index): the host waits
    collective    reads and writes its tensors on the communicator's stream (`fake_groups`)
    random        operators draw from a generator of the device's own
    backward      runs on the current stream: torch runs a node on that of its forward, and all of a stage's are one

An access is stamped with the number of operations on the tape so far: kernels between operations 6 and 7 of a stream have
ended when operation 7 of that stream has.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gpp_plugin.ir.program import InstructionKind
from gpp_plugin.runtime.ranks.failure_board import HERE
from tests.nccl.operations import Tape

LET_GO = "let go of"
HOST = -1
"""In the place of a stream's number; -2, -3 ... are threads of gloo, by the operation that they do (`thread_of`)."""
PACKAGE = str(Path(__file__).parents[2] / "gpp_plugin")
READERS = ("messages/transport.py",)
"""Files that may read the device between tasks: gloo's messages are staged through the host."""
_LOOKS = ("empty", "zeros", "ones", "full", "rand", "randn", "randint", "new_", "empty_strided")
_READS = (
    "_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal", "masked_select", "_unique2", "unique_dim",
    "unique_consecutive", "bincount",
)  # fmt: skip


def thread_of(item: int) -> int:
    """Return what stands for the stream of an item that a thread of the host does."""
    return -2 - item


class Where(NamedTuple):
    """The innermost line of the package that runs, and the instruction of the program."""

    file: str
    line: int
    instruction: Any

    def __str__(self) -> str:
        running = "" if self.instruction is None else f" in {self.instruction}"
        return f"{self.file.removeprefix(PACKAGE + '/')}:{self.line}{running}"


class Access(NamedTuple):
    """Something that reads or writes bytes ``first`` to ``end`` of a block.

    Args:
        at: operations on the tape before it; of what an operation itself does (``is_own``) its number.
    """

    at: int
    stream: int
    first: int
    end: int
    is_write: bool
    what: str
    where: Where
    is_own: bool


class Block:
    """The memory of one storage, from its allocation until it is let go of.

    Args:
        stream: that allocated it; `HOST` of host memory.
    """

    __slots__ = ("accesses", "is_pinned", "named", "ref", "shape", "stream", "streams")

    def __init__(self, stream: int, shape: str, *, is_pinned: bool = False) -> None:
        self.stream = stream
        self.shape = shape
        self.is_pinned = is_pinned
        self.accesses: list[Access] = []
        self.streams: set[int] = set()
        self.named: set[int] = set()
        self.ref: Any = None


class HostRead(NamedTuple):
    """The host waits for the device, mostly to read a value."""

    what: str
    where: Where

    @property
    def is_within_tasks(self) -> bool:
        """Return whether it is between the first and the last task of a mini-batch, where nothing may be read."""
        instruction = self.where.instruction
        is_step = instruction is None or instruction.kind is InstructionKind.STEP
        return not is_step and not self.where.file.endswith(READERS)

    def __str__(self) -> str:
        return f"{self.what} at {self.where}"


class Memory(TorchDispatchMode):
    """The blocks of one rank, and who uses them.

    Args:
        current: returns the number of the current stream.
        outer: makes tensors say where they are.
    """

    def __init__(self, tape: Tape, current: Callable[[], int], outer: TorchFunctionMode) -> None:
        super().__init__()
        self._outer = outer
        self.tape = tape
        self.current = current
        self.used: list[Block] = []
        """Blocks that more than one stream used."""
        self.reads: list[HostRead] = []
        self.numbers: list[Tensor] = []
        """What the rank has computed in the end."""
        self.random_state = torch.Generator().manual_seed(1234).get_state()
        self._blocks: dict[int, Block] = {}
        self._is_off = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the wrapper costs more than what is done in it

    # ---- blocks --------------------------------------------------------------------------------

    def block(self, tensor: Tensor) -> Block | None:
        """Return the block of a tensor; None of the host's own."""
        if tensor.is_meta:
            return None
        return self._blocks.get(tensor.untyped_storage()._cdata)

    def is_device(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the device; one of the package's that wraps others is."""
        found = self.block(tensor)
        return _is_wrapper(type(tensor)) if found is None else found.stream != HOST

    def allocate(self, tensor: Tensor, *, what: str = "allocated") -> None:
        """Let the current stream have allocated the storage of a tensor."""
        self._add(tensor, Block(self.current(), f"{list(tensor.shape)} {str(tensor.dtype)[6:]}"))
        self.touch([tensor], is_write=True, what=what, whole=True)

    def watch_host(self, tensor: Tensor, *, is_pinned: bool = False) -> Block:
        """Take note of who uses a host tensor from now on; return its block."""
        found = self.block(tensor)
        if found is None:
            found = Block(
                HOST, f"{list(tensor.shape)} {str(tensor.dtype)[6:]} on the host", is_pinned=is_pinned
            )
            self._add(tensor, found)
            self.touch([tensor], is_write=True, stream=HOST, what="written")
        return found

    def _add(self, tensor: Tensor, block: Block) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata

        def gone(_: object) -> None:
            if self._blocks.get(key) is block:
                del self._blocks[key]
            self._end(block)

        block.ref = weakref.ref(storage, gone)
        self._blocks[key] = block

    def _end(self, block: Block) -> None:
        """Let go of a block: the stream that allocated it, or the host, may write there from now on."""
        if not block.is_pinned:
            self._note(block, block.stream, 0, 1 << 62, True, LET_GO, None)
        block.ref = None

    def resized(self, storage: torch.UntypedStorage, before: int, after: int) -> None:
        """Take note of a storage whose bytes were let go of, or made."""
        block = self._blocks.get(storage._cdata)
        if block is None or block.stream == HOST or before == after:
            return
        if before:
            self._end(block)
        again = torch.empty(0, dtype=torch.uint8).set_(storage)
        del self._blocks[storage._cdata]
        if after:
            self.allocate(again)
        else:
            self._add(again, Block(self.current(), "nothing"))

    # ---- accesses ------------------------------------------------------------------------------

    def touch(
        self,
        tensors: Iterable[Tensor],
        *,
        is_write: bool,
        what: str,
        stream: int | None = None,
        at: int | None = None,
        whole: bool = False,
    ) -> None:
        """Take note that a stream, by default the current one, reads or writes tensors."""
        stream = self.current() if stream is None else stream
        with torch._C.DisableTorchFunction():
            for tensor in tensors:
                block = self.block(tensor)
                if block is None:
                    continue
                first, end = (0, 1 << 62) if whole else _span(tensor)
                if first < end:
                    self._note(block, stream, first, end, is_write, what, at)

    def _note(
        self, block: Block, stream: int, first: int, end: int, is_write: bool, what: str, at: int | None
    ) -> None:
        is_own = at is not None
        at = len(self.tape.operations) if at is None else at
        accesses = block.accesses
        if accesses:
            last = accesses[-1]
            if (last.at, last.stream, last.first, last.end, last.is_own) == (
                at,
                stream,
                first,
                end,
                is_own,
            ) and (last.is_write or not is_write):
                return
        accesses.append(Access(at, stream, first, end, is_write, what, where(), is_own))
        if stream not in block.streams:
            block.streams.add(stream)
            if len(block.streams) == 2:
                self.used.append(block)

    def read(self, what: str, tensors: Iterable[Tensor] = ()) -> None:
        """Let the host wait for what it reads of the device."""
        item = self.tape.put(self.current(), what)
        self.touch(tensors, is_write=False, what=what, at=item)
        self.tape.host_wait(what, after=[item])
        self.reads.append(HostRead(what, where()))

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Take no note of what is done inside: it stands for what another rank, or the device itself, does."""
        before, self._is_off = self._is_off, True
        try:
            yield
        finally:
            self._is_off = before

    # ---- operators -----------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        wrapper: Any = next(filter(_is_wrapper, types), None)
        if wrapper is not None:  # whose own operators come here
            with self._outer, self:
                return wrapper.__torch_dispatch__(func, types, args, kwargs)
        effect = _effect(func)
        if self._is_off or effect.is_view:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return self._operate(func, effect, args, kwargs)

    def _operate(self, func: Any, effect: _Effect, args: Any, kwargs: Mapping[str, Any]) -> Any:
        if effect.name == "copy_":
            return self._copy(func, args, kwargs)
        reads, writes = effect.split(args, kwargs)
        is_device = any(self.is_device(t) for t in (*reads, *writes))
        stream = self.current() if is_device else HOST
        if not effect.is_look:
            self.touch(reads, is_write=False, stream=stream, what=effect.name)
        self.touch(writes, is_write=True, stream=stream, what=effect.name)
        if not is_device:
            return func(*args, **kwargs)
        if effect.is_read or (effect.is_index and _has_mask(args)):
            self.read(effect.name, reads)
        with self._drawing() if effect.is_random else contextlib.nullcontext():
            made = func(*args, **kwargs)
        for tensor in _tensors(made):
            if not tensor.is_meta and self.block(tensor) is None:
                self.allocate(tensor, what=effect.name)
        return made

    def _copy(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        target, source = args[:2]
        is_blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        to, out = self.block(target), self.block(source)
        to_device, of_device = self.is_device(target), self.is_device(source)
        is_beside = to_device or of_device
        stream = self.current() if is_beside else HOST
        if to_device and out is not None and not of_device and not out.is_pinned:
            self.touch([source], is_write=False, stream=HOST, what="copy")  # staged by the host
        else:
            self.touch([source], is_write=False, stream=stream, what="copy")
        if of_device and not to_device and to is None and not is_blocking:
            self.watch_host(target)
        self.touch([target], is_write=True, stream=stream, what="copy")
        if is_beside and to_device != of_device and is_blocking:
            self.read("copy between host and device")
        return func(*args, **kwargs)

    @contextlib.contextmanager
    def _drawing(self) -> Iterator[None]:
        """Draw from the device's generator."""
        before = torch.get_rng_state()
        torch.set_rng_state(self.random_state)
        try:
            yield
        finally:
            self.random_state = torch.get_rng_state()
            torch.set_rng_state(before)


# ---- what an operator does ----------------------------------------------------------------------------------


class _Effect(NamedTuple):
    """What an operator does with its tensors.

    Args:
        written: positions and names of the arguments that it writes.
        is_look: it looks at shapes alone.
    """

    name: str
    written: frozenset[int | str]
    is_view: bool
    is_look: bool
    is_read: bool
    is_index: bool
    is_random: bool

    def split(self, args: Any, kwargs: Mapping[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the tensors that are read, and those that are written."""
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        for key, value in (*enumerate(args), *kwargs.items()):
            (writes if key in self.written else reads).extend(_tensors(value))
        return reads, writes


@functools.cache
def _effect(func: Any) -> _Effect:
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    is_written = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    written: set[int | str] = set()
    for position, (argument, found) in enumerate(zip(schema.arguments, is_written, strict=True)):
        if found:
            written |= {position, argument.name}
    is_view = not written and any(r.alias_info is not None for r in schema.returns)
    return _Effect(
        name=name,
        written=frozenset(written),
        is_view=is_view or name in ("_unsafe_view", "set_", "lift_fresh"),
        is_look=name.startswith(_LOOKS) or name.endswith("_like"),
        is_read=name in _READS,
        is_index=name in ("index", "index_put", "index_put_"),
        is_random=torch.Tag.nondeterministic_seeded in func.tags,
    )


def _is_wrapper(kind: type) -> bool:
    return kind.__module__.startswith("gpp_plugin")


def _has_mask(args: Any) -> bool:
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for each in value for t in _tensors(each)]
    return []


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the bytes of a storage between a tensor's first and last element."""
    count = tensor.numel()
    if not count:
        return 0, 0
    if not tensor.is_contiguous():
        count = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first, size = int(tensor.storage_offset()), tensor.element_size()
    return first * size, (first + count) * size


def where() -> Where:
    """Return the innermost line of the package that runs, and the instruction."""
    frame: Any = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    if frame is None:
        return Where("?", 0, HERE.instruction)
    return Where(frame.f_code.co_filename, frame.f_lineno, HERE.instruction)
