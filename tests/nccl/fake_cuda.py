"""`torch.cuda` for a rank that is recorded: streams, events and waits go onto a tape, tensors are without memory.

Inside `recorded_cuda` a tensor that is asked for on ``cuda`` is one on ``meta`` that says ``cuda`` of itself, so that
code written for a GPU runs as it is. What makes the host wait for the device there (``item``, a copy to the host, an
event's or a stream's synchronise) is written down as a wait; what is read are ones.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.nccl.operations import Tape

CUDA = torch.device("cuda", 0)
META = torch.device("meta")

_READS = {
    Tensor.item: lambda tensor: 1.0,
    Tensor.tolist: lambda tensor: torch.ones(tensor.shape).tolist(),
    Tensor.__float__: lambda tensor: 1.0,
    Tensor.__int__: lambda tensor: 1,
    Tensor.__bool__: lambda tensor: True,
    Tensor.cpu: lambda tensor: torch.ones(tensor.shape, dtype=tensor.dtype),
}
"""What brings numbers to the host."""


class FakeStream:
    """A stream of the recorded rank."""

    def __init__(self, cuda: FakeCuda, number: int) -> None:
        self._cuda = cuda
        self.number = number
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
        tail = self._cuda.tape.tails.get(self.number)
        self._cuda.tape.host_wait("synchronise a stream", after=[] if tail is None else [tail])

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
        self._cuda.tape.host_wait("synchronise an event", after=[] if self._item is None else [self._item])

    def query(self) -> bool:
        return False

    def elapsed_time(self, other: FakeEvent) -> float:
        return 1.0


class FakeCuda(TorchFunctionMode):
    """The device of one rank."""

    def __init__(self, tape: Tape, *, num_devices: int) -> None:
        super().__init__()
        self.tape = tape
        self.stream = FakeStream(self, 0)
        self._num_devices = num_devices

    # ---- torch.cuda ----------------------------------------------------------------------------

    def synchronize(self, device: Any = None) -> None:
        self.tape.host_wait("synchronise the device")

    def new_stream(self, device: Any = None, priority: int = 0) -> FakeStream:
        return FakeStream(self, self.tape.new_stream())

    @contextlib.contextmanager
    def using(self, stream: FakeStream | None) -> Iterator[None]:
        before, self.stream = self.stream, stream or self.stream
        try:
            yield
        finally:
            self.stream = before

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
        }

    # ---- tensors -------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func is Tensor.device.__get__:  # type: ignore[attr-defined]
            return CUDA if func(*args).type == "meta" else func(*args)
        if func is Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return args[0].is_meta
        if func in _READS and args[0].is_meta:
            self._read("read on the host")
            return _READS[func](args[0])
        given.pop("pin_memory", None)
        if "device" in given:
            given["device"] = _real(given["device"])
        if func is Tensor.to:
            return self._to(args, given)
        if func is Tensor.cuda:
            return args[0].to(META)
        if func is Tensor.copy_ and args[1].is_meta and not args[0].is_meta:
            if not (given.get("non_blocking") or args[2:3] == (True,)):
                self._read("copy to the host")
            return args[0].fill_(1)
        return func(*args, **given)

    def _to(self, args: tuple[Any, ...], given: dict[str, Any]) -> Tensor:
        args = tuple(_real(each) if isinstance(each, (torch.device, str)) else each for each in args)
        target = given.get("device", next((each for each in args if isinstance(each, torch.device)), None))
        if args[0].is_meta and target is not None and torch.device(target).type == "cpu":
            self._read("copy to the host")
            return torch.ones(args[0].shape, dtype=args[0].dtype)
        return args[0].to(*args[1:], **given)

    def _read(self, what: str) -> None:
        # A copy to pageable memory is one of the current stream, which the host waits for.
        copied = self.tape.put(self.stream.number, what)
        self.tape.host_wait(what, after=[copied])


def _real(device: Any) -> Any:
    """Return where a tensor is made that is asked for on ``device``."""
    if isinstance(device, int) or (device is not None and torch.device(device).type == "cuda"):
        return META
    return device


@contextlib.contextmanager
def recorded_cuda(cuda: FakeCuda) -> Iterator[None]:
    """Let `torch.cuda` and tensors be those of a recorded rank."""
    with contextlib.ExitStack() as stack:
        for name, value in cuda.attributes().items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(cuda)
        yield


def options_namespace() -> types.SimpleNamespace:
    """Return what stands for `torch.distributed.ProcessGroupNCCL`, which a torch without CUDA lacks."""

    class Options(types.SimpleNamespace):
        def __init__(self, *args: Any, **given: Any) -> None:
            super().__init__(config=types.SimpleNamespace(), **given)

    return types.SimpleNamespace(Options=Options)
