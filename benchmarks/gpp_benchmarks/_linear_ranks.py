"""The optimizer side of linear stages on a rank, and delays of their tasks: what the exactness bench runs them with."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpp_benchmarks._linear_stages import LinearNetwork, Parameters
from gpp_plugin.runtime.compute import AutogradCompute

LEARNING_RATE = 0.02
"""The longest step of a parameter tensor, by its norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """One stage's gradients on this rank of each mini-batch, and the parameters they were taken at."""

    gradients: list[dict[str, Tensor]]
    parameters: list[Parameters]


class LinearHooks:
    """The optimizer side of a stage on a rank: sums gradients over the stage's ranks, steps plainly, keeps a copy.

    Ranks of different stages meet nowhere but in their messages: a stage that is done begins the next mini-batch.
    """

    loss_scale = 1.0

    def __init__(self, parameters: Parameters, group: dist.ProcessGroup | None) -> None:
        self.parameters = parameters
        self._group = group
        self._sums: dict[str, Tensor] = {}
        self.done = Trained(gradients=[], parameters=[])

    def accumulate(self) -> None:
        """Leave what autograd added up where it is."""

    def begin_reduction(self) -> None:
        """Do nothing: `reduce_data` sums all."""

    @torch.no_grad()
    def reduce_data(self) -> None:
        """Sum what has come together since the last time over the stage's ranks, and add it up.

        A rank may have no gradient where another one has: consumers ask only some of a stage's ranks for what is the
        same for all samples.
        """
        counts = torch.tensor([p.grad is not None for p in self.parameters.values()], dtype=torch.int32)
        if self._group is not None:
            dist.all_reduce(counts, group=self._group)
        for count, (name, parameter) in zip(counts.tolist(), self.parameters.items(), strict=True):
            if not count:
                continue
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            if self._group is not None:
                dist.all_reduce(gradient, group=self._group)
            self._sums[name] = self._sums[name] + gradient if name in self._sums else gradient
            parameter.grad = None

    def reduce_tied(self) -> None:
        """Do nothing: no parameter is on two stages."""

    @torch.no_grad()
    def step(self) -> None:
        """Keep the gradients and where they were taken, and step along them."""
        self.done.gradients.append(self._sums)
        self.done.parameters.append({name: p.detach().clone() for name, p in self.parameters.items()})
        for name, gradient in self._sums.items():
            self.parameters[name].copy_(stepped(self.parameters[name], gradient))
        self._sums = {}


def stepped(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return a parameter after a step along its gradient, no longer than `LEARNING_RATE`.

    The loss of random deep graphs is steep: a step as long as its gradient would end in numbers that say nothing.
    """
    return parameter - gradient * (LEARNING_RATE / gradient.norm().clamp(min=1.0))


TASKS = frozenset({"forward", "backward", "input_gradient", "weight_gradient"})


class Delayed:
    """An `AutogradCompute` that waits a random time before each task.

    Args:
        longest_s: of the waits.
    """

    def __init__(self, compute: AutogradCompute, rng: random.Random, longest_s: float) -> None:
        self._compute, self._rng, self._longest_s = compute, rng, longest_s

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._compute, name)
        if name not in TASKS:
            return found

        def delayed(*given: Any) -> Any:
            time.sleep(self._rng.uniform(0.0, self._longest_s))
            return found(*given)

        return delayed


def stage_rows(network: LinearNetwork, index: int, rank: int, data: Tensor) -> list[tuple[Tensor, ...]]:
    """Return the rows of a mini-batch that a stage's micro-batches read on a rank."""
    plan, stage = network.plan, network.plan.stages[index]
    rows = [stage.samples(m, rank) for m in range(plan.num_micro_batches(index))]
    if not network.stages[index].reads_data:
        return [()] * len(rows)
    return [(data[r.first_sample : r.end],) for r in rows]
