"""Gradients that are not finite: how many steps running may be skipped for them, and where they first appear.

`NanLocator` looks at what every operator of a mini-batch returns, and at the gradient that comes back to it:

    0F0   embed ok   layer.0 ok   layer.1 nan  <- first in a forward: made of finite inputs, in micro-batch 0
    0B0   head ok    layer.1 inf               <- or first in a backward, which runs from the loss down

It reads a number back for each operator, several times what a step costs: it is on where ``locate_nan`` requests it.
The module is that of the captured operator, which the line of the generated code that runs it names.

Source: this project
Tests: tests/integrations/test_non_finite.py
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gpp_plugin.engine.stage_step import StepResult
from gpp_plugin.errors import RuntimeFailure
from gpp_plugin.runtime.ranks.collectives import Collectives
from gpp_plugin.runtime.ranks.failure_board import HERE
from gpp_plugin.runtime.ranks.job_board import mark_shared

MOST_FRAMES = 12
"""How far up the code that runs an operator is looked for."""


class SkippedSteps:
    """Ends a job that steps no more: its gradients are not finite, step after step.

    Args:
        most: how many steps running may be skipped; None: any number. While a dynamic loss scale sinks, as it does at
            the beginning in fp16, steps are not counted: it has an end of its own.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._running = 0
        self._last_scale = 0.0

    def count(self, step: StepResult, *, number: int, where: str = "") -> None:
        """Count one step, which all ranks took or skipped together.

        Args:
            number: of the step.
            where: the numbers were first seen not to be finite, where that is known.

        Raises:
            RuntimeFailure: too many have been skipped; the same on every rank.
        """
        has_sunk = step.loss_scale < self._last_scale
        self._last_scale = step.loss_scale
        if not step.overflow:
            self._running = 0
        elif not has_sunk:
            self._running += 1
        if self._most is None or self._running < self._most:
            return
        first = number - self._running + 1
        self._running = 0
        advice = f": {where}" if where else "; set graph_pipeline.locate_nan to see where"
        error = RuntimeFailure(
            f"{self._most} steps running were skipped (steps {first} to {number}): their gradients are not finite, and "
            f"the weights have not changed since{advice}; lower the learning rate or the gradients' clipping, look at "
            "these batches, or load an earlier checkpoint (graph_pipeline.max_skipped_steps: null continues for ever)"
        )
        mark_shared(error)
        raise error


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Where a number that is not finite was first seen on a rank.

    Args:
        order: sorts findings of ranks: forwards come before the backwards that carry their numbers back.
        place: in words.
    """

    order: tuple[int, int]
    place: str


class NanLocator(TorchFunctionMode):
    """Finds where numbers are not finite first; watches what runs inside ``with locator.watching():``."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Found | None = None
        self._fine = 0
        self._instruction = ""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch one mini-batch."""
        self.found = None
        with self:
            yield

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call an operator and look at what it returns."""
        result = func(*args, **(kwargs or {}))
        if self.found is None and HERE.instruction is not None:
            outputs = result if isinstance(result, tuple | list) else (result,)
            for output in outputs:
                if isinstance(output, Tensor) and output.is_floating_point() and output.numel():
                    self._look(func, output, args)
        return result

    def _look(self, func: Callable[..., Any], output: Tensor, args: Iterable[Any]) -> None:
        # Masks hold minus infinity, so in a forward only what is no number counts, or is above all numbers.
        code = _running_code()
        if code is None:
            return
        worst = float(output.detach().amax())
        if worst != worst or worst == float("inf"):
            inputs = [t for t in args if isinstance(t, Tensor) and t.is_floating_point() and t.numel()]
            if all(_is_fine(t) for t in inputs):
                self._note(0, code, func, "returns")
            return
        if output.requires_grad:
            output.register_hook(lambda gradient: self._look_back(gradient, code, func))

    def _look_back(self, gradient: Tensor, code: tuple[Any, str], func: Callable[..., Any]) -> None:
        if self.found is not None or HERE.instruction is None:
            return
        if self._instruction != str(HERE.instruction):
            self._instruction, self._fine = str(HERE.instruction), 0
        if bool(torch.isfinite(gradient).all()):
            self._fine += 1
        elif self._fine:  # else it came so from the stage behind, or with the loss
            self._note(1, code, func, "is given a gradient of")

    def _note(self, phase: int, code: tuple[Any, str], func: Callable[..., Any], does: str) -> None:
        owner, line = code
        module = _module_of(owner, line)
        task = getattr(HERE.instruction, "task", None)
        micro_batch = -1 if task is None else task.micro_batch
        operator = getattr(func, "__name__", str(func))
        self.found = Found(
            order=(phase, micro_batch),
            place=f"{module} (operator {operator}) of stage {HERE.stage!r} {does} numbers that are not finite, in "
            f"micro-batch {micro_batch}, at {HERE.instruction}",
        )


def _is_fine(tensor: Tensor) -> bool:
    worst = float(tensor.detach().amax())
    return worst == worst and worst != float("inf")


def _running_code() -> tuple[Any, str] | None:
    """Return the generated module, or the user's, whose code calls an operator now, and the line of it."""
    frame: FrameType | None = sys._getframe(3)
    for _ in range(MOST_FRAMES):
        if frame is None:
            return None
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return owner, linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def _module_of(owner: Any, line: str) -> str:
    """Return the path of the model's module whose operator a line of generated code runs."""
    if not isinstance(owner, torch.fx.GraphModule):
        return f"module {type(owner).__name__}"
    name = line.strip().split(" ", 1)[0].rstrip(";")
    node = next((node for node in owner.graph.nodes if node.name == name), None)
    stack = {} if node is None else node.meta.get("nn_module_stack") or {}
    paths = [str(entry[0]) for entry in stack.values()]
    path = next((path for path in reversed(paths) if path), "")
    # the capture is of a wrapper, whose one module is the model
    return f"module {path.split('.', 1)[-1]}" if path else f"operator {name}"


def first_found(found: Found | None, collectives: Collectives) -> str:
    """Return where numbers were first not finite on any rank; empty where no operator was seen; collective."""
    gathered = [
        each for each in collectives.gather(found, "where numbers are not finite") if each is not None
    ]
    return min(gathered, key=lambda each: each.order).place if gathered else ""
