"""`torch.cuda` for a rank that is recorded: streams, events and waits go onto a tape, tensors are real ones.

Inside `recorded_cuda` a tensor that is asked for on ``cuda`` is one on the CPU whose storage is known as a block of the
device (`memory`), and says ``cuda`` of itself, so that code written for a GPU runs as it is, with numbers. What makes the
host wait for the device there (``item``, a copy to the host, an event's or a stream's synchronise) is written down as a
wait.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._C import _len_torch_function_stack
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from tests.nccl.memory import HostRead, Memory, where
from tests.nccl.operations import Tape

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")


class FakeStream:
    """A stream of the recorded rank."""

    def __init__(self, cuda: FakeCuda, number: int) -> None:
        self._cuda = cuda
        self.number = self.stream_id = number
        self.device = CUDA

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or FakeEvent(self._cuda)
        event.record(self)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        event.wait(self)

    def wait_stream(self, stream: FakeStream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        item = self._cuda.tape.put(self.number, "record")
        self._cuda.host_wait("synchronise a stream", after=[item])

    def query(self) -> bool:
        return False


class FakeEvent:
    """An event of the recorded rank; it never has happened before somebody waits for it."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._item: int | None = None

    def record(self, stream: FakeStream | None = None) -> None:
        self._item = self._cuda.tape.put((stream or self._cuda.stream).number, "record")

    def wait(self, stream: FakeStream | None = None) -> None:
        if self._item is not None:  # an event that was never recorded holds nobody up
            self._cuda.tape.put((stream or self._cuda.stream).number, "wait for event", after=[self._item])

    def synchronize(self) -> None:
        self._cuda.host_wait("synchronise an event", after=[] if self._item is None else [self._item])

    def query(self) -> bool:
        return False

    def elapsed_time(self, other: FakeEvent) -> float:
        return 1.0


class FakeCuda(TorchFunctionMode):
    """The device of one rank, and its `memory`."""

    def __init__(self, tape: Tape, *, num_devices: int) -> None:
        super().__init__()
        self.tape = tape
        self.stream = FakeStream(self, 0)
        self.memory = Memory(tape, lambda: self.stream.number, self)
        self._num_devices = num_devices

    # ---- torch.cuda ----------------------------------------------------------------------------

    def host_wait(self, what: str, *, after: list[int] | None = None) -> None:
        """Let the host wait for items of the device."""
        self.tape.host_wait(what, after=after)
        self.memory.reads.append(HostRead(what, where()))

    def synchronize(self, device: Any = None) -> None:
        self.host_wait("synchronise the device")

    def new_stream(self, device: Any = None, priority: int = 0) -> FakeStream:
        return FakeStream(self, self.tape.new_stream())

    @contextlib.contextmanager
    def using(self, stream: FakeStream | None) -> Iterator[None]:
        before, self.stream = self.stream, stream or self.stream
        try:
            yield
        finally:
            self.stream = before

    def set_random_state(self, state: Tensor, device: Any = None) -> None:
        self.memory.random_state = state.clone()

    def attributes(self) -> dict[str, Any]:
        """Return what `torch.cuda` is while the rank is recorded."""
        return {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: self._num_devices,
            "current_device": lambda: 0,
            "set_device": lambda device: None,
            "device": lambda device: contextlib.nullcontext(),
            "current_stream": lambda device=None: self.stream,
            "default_stream": lambda device=None: FakeStream(self, 0),
            "stream": self.using,
            "Stream": self.new_stream,
            "Event": lambda **options: FakeEvent(self),
            "synchronize": self.synchronize,
            "get_rng_state": lambda device=None: self.memory.random_state.clone(),
            "set_rng_state": self.set_random_state,
            "manual_seed": lambda seed: self.set_random_state(
                torch.Generator().manual_seed(seed).get_state()
            ),
        }

    def within(self, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a call that finds this device's tensors wherever it is made."""

        def called(value: Any) -> Any:
            if _len_torch_function_stack():
                return call(value)
            with self:
                return call(value)

        return called

    # ---- tensors -------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _OURS and not (kwargs and ("device" in kwargs or "pin_memory" in kwargs)):
            return func(*args, **(kwargs or {}))
        memory, given = self.memory, dict(kwargs or {})
        if func == _DEVICE:
            return CUDA if memory.is_device(args[0]) else func(*args)
        if func == _IS_CUDA:
            return memory.is_device(args[0])
        if func in (Tensor.to, Tensor.cuda, Tensor.cpu):
            return self._move(func, args, given)
        if func in (Tensor.tolist, Tensor.numpy) and memory.is_device(args[0]):
            memory.read(func.__name__, args[:1])
            with memory.off():
                return func(*args, **given)
        if func is Tensor.is_pinned:
            block = memory.block(args[0])
            return block is not None and block.is_pinned
        is_pinned = bool(given.pop("pin_memory", False))
        if func is Tensor.pin_memory:
            is_pinned, func = True, Tensor.clone
        is_device = _is_cuda(given.get("device"))
        if is_device:
            given["device"] = CPU
        made = func(*args, **given)
        if is_device and isinstance(made, Tensor) and memory.block(made) is None:
            memory.allocate(made)
            if func in (torch.tensor, torch.as_tensor):
                memory.read("a tensor of numbers")  # copied from pageable memory
        elif is_pinned:
            memory.watch_host(made, is_pinned=True)
        return made

    def _move(self, func: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Tensor:
        """Return a tensor on another device, in another type, or itself."""
        source, memory = args[0], self.memory
        asked = [
            each for each in (*args[1:], given.get("device")) if isinstance(each, (torch.device, str, int))
        ]
        is_there = memory.is_device(source)
        is_wanted = func is Tensor.cuda or is_there
        if func is Tensor.cpu:
            is_wanted = False
        elif asked:
            is_wanted = _is_cuda(asked[0])
        rest = tuple(_real(each) for each in args[1:])
        if "device" in given:
            given["device"] = _real(given["device"])
        if is_there == is_wanted or source.is_meta or (asked and torch.device(asked[0]).type == "meta"):
            return source if func in (Tensor.cuda, Tensor.cpu) else source.to(*rest, **given)
        wanted = [each for each in (*rest, given.get("dtype")) if isinstance(each, torch.dtype)]
        dtype = wanted[0] if wanted else source.dtype
        with torch.no_grad():
            made = torch.empty_strided(source.shape, source.stride(), dtype=dtype)
            if is_wanted:
                memory.allocate(made)
            made.copy_(source.detach(), bool(given.get("non_blocking", False)))
        return made


_DEVICE = Tensor.device.__get__  # type: ignore[attr-defined]
_IS_CUDA = Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_OURS = {
    _DEVICE, _IS_CUDA, Tensor.to, Tensor.cuda, Tensor.cpu, Tensor.tolist, Tensor.numpy, Tensor.is_pinned,
    Tensor.pin_memory,
}  # fmt: skip
"""What does something else on a recorded device than on the CPU, whatever its arguments."""


def _is_cuda(device: Any) -> bool:
    return isinstance(device, int) or (device is not None and torch.device(device).type == "cuda")


def _real(device: Any) -> Any:
    """Return where a tensor is made that is asked for on ``device``; anything else as it is."""
    return (
        CPU
        if isinstance(device, (torch.device, str, int)) and not isinstance(device, bool) and _is_cuda(device)
        else device
    )


@contextlib.contextmanager
def recorded_cuda(cuda: FakeCuda) -> Iterator[None]:
    """Let `torch.cuda` and tensors be those of a recorded rank."""
    resize = torch.UntypedStorage.resize_

    @functools.wraps(resize)
    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        before = storage.nbytes()
        made = resize(storage, size)
        cuda.memory.resized(storage, before, size)
        return made

    def named(tensor: Tensor, stream: FakeStream) -> None:
        block = cuda.memory.block(tensor)
        if block is not None:
            block.named.add(stream.number)

    wrap = Tensor._make_wrapper_subclass

    def wrapped(*args: Any, device: Any = None, **given: Any) -> Tensor:
        # torch guards the device that a tensor names in many of its calls, and this one has none
        return wrap(*args, device=_real(device), **given)

    begin = saved_tensors_hooks.__init__

    def hooked(self: saved_tensors_hooks, pack: Any, unpack: Any) -> None:
        # autograd calls them within an operator, where torch has taken the mode away
        begin(self, cuda.within(pack), cuda.within(unpack))

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(saved_tensors_hooks, "__init__", hooked))
        for name, value in cuda.attributes().items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resized))
        stack.enter_context(mock.patch.object(Tensor, "record_stream", named))
        stack.enter_context(mock.patch.object(Tensor, "_make_wrapper_subclass", wrapped))
        stack.enter_context(cuda)
        stack.enter_context(cuda.memory)
        yield


def options_namespace() -> types.SimpleNamespace:
    """Return what stands for `torch.distributed.ProcessGroupNCCL`, which a torch without CUDA lacks."""

    class Options(types.SimpleNamespace):
        def __init__(self, *args: Any, **given: Any) -> None:
            super().__init__(config=types.SimpleNamespace(), **given)

    return types.SimpleNamespace(Options=Options)
