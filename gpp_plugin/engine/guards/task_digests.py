"""Checksums of what each task of a mini-batch was given and what it made, so that two runs of it can be compared.

    0F0   given 1f3a        made 77c1
    0F1   given 90be        made 0d02    in the second run: given 90be, made 0d12: the task, and nobody before it,
    0B0   given 5e11        made 3c3c    has another result for the same inputs

A checksum is a sum over the tensor's bits where results are the same bits each time, as on the CPU and with torch's
deterministic algorithms; elsewhere it is the norm, and differences that rounding makes are none. They stay on the
device until somebody asks.

Source: this project
Tests: tests/integrations/test_repetition.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpp_plugin.runtime.compute import StageCompute
from gpp_plugin.runtime.ranks.rank_status import HERE

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDigest:
    """The checksums of one task.

    Args:
        task: as the program names it.
        given, made: of its tensors, in order.
    """

    task: str
    given: tuple[float, ...]
    made: tuple[float, ...]


class TaskDigests:
    """Notes the tasks of one rank, of all its stages, in the order in which they run.

    Args:
        tolerance: relative difference that rounding makes where the device's results vary; of their type.
    """

    def __init__(self, device: torch.device, *, tolerance: float) -> None:
        is_exact = device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
        self._digest = _checksum if is_exact else _norm
        self._tolerance = 0.0 if is_exact else tolerance
        self._noted: list[tuple[str, int, list[Tensor]]] = []

    def around(self, compute: StageCompute) -> StageCompute:
        """Return a stage's compute whose tasks are noted."""
        watched: Any = _WatchedCompute(compute, self)
        return watched

    def note(
        self, given: Sequence[Tensor | None], made: Sequence[Tensor | None], *, task: str | None = None
    ) -> None:
        """Note a task; by default the one whose instruction runs."""
        before = [self._digest(each) for each in given if each is not None]
        after = [self._digest(each) for each in made if each is not None]
        self._noted.append((str(HERE.instruction) if task is None else task, len(before), before + after))

    def take(self) -> list[TaskDigest]:
        """Return what was noted, and begin anew; reads the device once."""
        found = []
        all_of = [each for _, _, digests in self._noted for each in digests]
        read = torch.stack(all_of).tolist() if all_of else []
        for task, num_given, digests in self._noted:
            own, read = read[: len(digests)], read[len(digests) :]
            found.append(TaskDigest(task=task, given=tuple(own[:num_given]), made=tuple(own[num_given:])))
        self._noted.clear()
        return found

    def forget(self) -> None:
        """Begin anew."""
        self._noted.clear()

    def differ(self, first: Sequence[float], second: Sequence[float]) -> bool:
        """Return whether the checksums of a task's tensors differ by more than rounding makes."""
        return len(first) != len(second) or any(
            not _is_close(a, b, self._tolerance) for a, b in zip(first, second, strict=True)
        )


def _is_close(first: float, second: float, tolerance: float) -> bool:
    if not (math.isfinite(first) and math.isfinite(second)):  # inf is within any share of inf
        return first == second or (math.isnan(first) and math.isnan(second))
    return first == second or abs(first - second) <= tolerance * max(abs(first), abs(second))


@torch.no_grad()
def _checksum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits, read as integers: a bit that flips changes it."""
    bits = tensor.detach().contiguous().view(-1)
    if bits.is_complex():
        bits = torch.view_as_real(bits).view(-1)
    whole = (bits if bits.dtype == torch.bool else bits.view(_INTEGERS[bits.element_size()])).sum(
        dtype=torch.int64
    )
    return (whole % (1 << 52)).double()  # a double has it exactly


@torch.no_grad()
def _norm(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return _checksum(tensor)
    return torch.linalg.vector_norm(tensor.detach(), dtype=torch.float32).double()


class _WatchedCompute:
    """A stage's compute; what it does not watch it leaves to the other."""

    def __init__(self, compute: StageCompute, digests: TaskDigests) -> None:
        self._compute = compute
        self._digests = digests

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compute, name)

    def forward(
        self, micro_batch: int, half: int | None, inputs: Sequence[Tensor], received: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """As of `StageCompute`."""
        outputs = self._compute.forward(micro_batch, half, inputs, received)
        self._digests.note(received, outputs)
        return outputs

    def backward(self, micro_batch: int, gradients: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """As of `StageCompute`."""
        made = self._compute.backward(micro_batch, gradients)
        self._digests.note(gradients, made)
        return made

    def input_gradient(self, micro_batch: int, gradients: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """As of `StageCompute`."""
        made = self._compute.input_gradient(micro_batch, gradients)
        self._digests.note(gradients, made)
        return made
