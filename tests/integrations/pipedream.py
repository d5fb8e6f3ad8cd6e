"""PipeDream's staleness in one process, on copies of a plain model: what the asynchronous engine must equal.

Micro-batch m runs on one model whose parameters are, stage by stage, the versions that the stage had at m's forward;
its gradient then updates every stage's newest parameters. Nothing here is shared with the engine's code.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.reference import loss_of, units_of


@dataclass(frozen=True, kw_only=True)
class PlainStage:
    """A stage as the emulation sees it: its parameters, and how many micro-batches it holds."""

    parameters: tuple[str, ...]
    held: int


class Emulation:
    """Trains a copy of ``model``.

    Args:
        unit: samples one loss is computed on; a micro-batch's loss is the mean over its units.
        window: micro-batches of one mini-batch: learning rates change between those.
        rate_at: learning rate of the n-th mini-batch.
        clip: largest norm of one stage's gradient; 0 does not clip.
        dtype: of weights, gradients and floating inputs; updates are made to fp32 masters.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Sequence[PlainStage],
        *,
        unit: int,
        window: int,
        make_optimizer: Callable[[Any], torch.optim.Optimizer],
        vertical_sync: bool = False,
        rate_at: Callable[[int], float] | None = None,
        clip: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model = copy.deepcopy(model).train()
        self.dtype = dtype
        self.stages = stages
        self.unit, self.window, self.vertical_sync = unit, window, vertical_sync
        self.rate_at, self.clip = rate_at, clip
        named = dict(self.model.named_parameters())
        self.live = [{n: named[n] for n in s.parameters if named[n].requires_grad} for s in stages]
        self.optimizers = [make_optimizer(list(own.values())) if own else None for own in self.live]
        self.longest = max(stage.held for stage in stages)
        self.num_windows = 0
        self._start()

    def _start(self) -> None:
        self.history = [[self._copy(own)] for own in self.live]
        self.waiting: list[list[dict[str, Tensor]]] = [[] for _ in self.stages]
        self.count = 0

    def _copy(self, own: dict[str, nn.Parameter]) -> dict[str, Tensor]:
        return {name: parameter.detach().to(self.dtype, copy=True) for name, parameter in own.items()}

    def _cast(self, value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self.dtype) if is_float else value

    def micro_batch(self, batch: dict[str, Any]) -> float:
        """Run one micro-batch through every stage and return its loss."""
        used: dict[str, Tensor] = {}
        for index, stage in enumerate(self.stages):
            lag = self.longest if self.vertical_sync else stage.held
            age = max(0, self.count - lag + 1)
            used.update({n: t.clone().requires_grad_(True) for n, t in self.history[index][age].items()})
        units = units_of(batch, self.unit)
        total = 0.0
        for part in units:
            given = {key: self._cast(value) for key, value in part.items()}
            loss = loss_of(torch.func.functional_call(self.model, used, (), given))
            (loss / len(units)).backward()
            total += float(loss.detach()) / len(units)
        for index, own in enumerate(self.live):
            self.waiting[index].append({n: used[n].grad for n in own})  # type: ignore[misc]
        self.count += 1
        for index, stage in enumerate(self.stages):
            if len(self.waiting[index]) == stage.held:
                self._update(index)
        return total

    def _update(self, index: int) -> None:
        gradients = self.waiting[index].pop(0)
        optimizer = self.optimizers[index]
        if optimizer is not None:
            for name, parameter in self.live[index].items():
                gradient = gradients[name]
                parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
            if self.clip:
                torch.nn.utils.clip_grad_norm_(self.live[index].values(), self.clip)
            if self.rate_at is not None:
                for group in optimizer.param_groups:
                    group["lr"] = self.rate_at(self.num_windows)
            optimizer.step()
        self.history[index].append(self._copy(self.live[index]))

    def mini_batch(self, batch: dict[str, Any], size: int) -> list[float]:
        """Run a mini-batch in micro-batches of ``size`` samples; return their losses."""
        losses = [self.micro_batch(part) for part in units_of(batch, size)]
        self.num_windows += 1
        return losses

    def flush(self) -> None:
        """Let every stage make its remaining updates."""
        for index in range(len(self.stages)):
            while self.waiting[index]:
                self._update(index)
        self._start()


def reported(losses: Sequence[Sequence[float]], longest: int) -> list[float]:
    """Return what `train_batch` returns for mini-batches with these losses, without a flush between them."""
    flat = [loss for of_batch in losses for loss in of_batch]
    told, answers = 0, []
    for number in range(1, len(losses) + 1):
        until = max(told, 1, number * len(losses[0]) - longest + 1)
        new = flat[told:until]
        answers.append(sum(new) / len(new) if new else answers[-1])
        told = until
    return answers
