"""Micro-batches of prompts: generations that a rank runs in turns, so that its stages compute while others wait.

    stage 0   0 1 2 3 0 1 2 3 0 ..      four micro-batches on four stages: a stage decodes a token of one of them while
    stage 1   . 0 1 2 3 0 1 2 3 ..      the logits of another are on their way
    stage 2   . . 0 1 2 3 0 1 2 ..
    stage 3   . . . 0 1 2 3 0 1 ..

Each is a call of the model's own `generate` in a thread of its own, on a twin of the model (the modules' Python objects
once more, over the same weights), and with wires of its own. One thread of a rank runs at a time: where it would wait
for another rank, the one whose tensor came first goes on. Ranks need not take the same turns, for what is sent in one
micro-batch is heard in no other.

Source: this project
Tests: tests/model/test_micro_batches.py, tests/integrations/test_generation.py
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from gpp_plugin.errors import ConfigError, first_line
from gpp_plugin.runtime.random_streams import Streams, set_streams, streams_of

T = TypeVar("T")


class _Abandoned(BaseException):
    """The rank has given up the generation; this one of its micro-batches ends as well."""


class Turns:
    """Runs several calls in threads, one at a time: in a wait for other ranks, the others go on.

    Each call draws random numbers of its own streams, which begin as the rank's are; what one of them draws is not
    noticed by the others.

    Args:
        device: on which the calls draw and compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._changed = threading.Condition()
        # Those that could go on, in the order in which they became so; the first of them has the turn.
        self._ready: deque[int] = deque()
        self._is_abandoned = False
        self._errors: list[BaseException] = []
        self._running = 0
        self.is_stopping = False
        """Whether some micro-batch has failed: the others tell so with the next tensor that this rank sends."""

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
            self._abandon()
        if self._errors:
            raise self._errors[0]
        set_streams(self._device, begin)
        return found, ends

    @contextmanager
    def waiting(self, number: int) -> Iterator[None]:
        """Let the others go on while a call waits for other ranks."""
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

    def _abandon(self) -> None:
        with self._changed:
            self._is_abandoned = True
            self._changed.notify_all()


def in_micro_batch(turns: Turns | None, number: int) -> str:
    """Return what is said of a wait of one of several micro-batches, behind what it is for."""
    return "" if turns is None else f", micro-batch {number}"


def twin_of(model: nn.Module) -> Any:
    """Return the modules of a model once more, over the same parameters and buffers.

    What a module notes of a generation (Qwen2.5-VL's offsets of positions) and what is put in its place meanwhile are
    the twin's own.

    Raises:
        ConfigError: it has something that cannot be copied, or that would go on with the model instead of the twin.
    """
    bound = next((path for path, m in model.named_modules() if _is_plain_function(m)), None)
    if bound is not None:
        raise ConfigError(
            f"graph_pipeline.generate.micro_batches: the forward of {bound or type(model).__name__!r} was replaced by "
            "a function, which knows one model alone; set it to 1"
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
