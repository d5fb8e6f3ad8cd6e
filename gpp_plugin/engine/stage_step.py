"""From a stage's gradients to its step: sums over ranks in their order, one norm, one decision, one update.

    runtime, per micro-batch      backward; accumulate        (before the last one, where allowed: begin_reduction)
    runtime, once per mini-batch  reduce_data     over the stage's data-parallel ranks
                                  sum_tensor      over its tensor ranks, of what each has of its part of the sequence
                                  reduce_tied     over the stages that hold a parameter together
    step                          norm over a group of ranks -> overflow? -> clip -> optimizer -> learning rates

Two rules say over which ranks a step is agreed, and how often it is taken:

    StepTogether   all stages, once a mini-batch: one norm of the whole model, and all step or none
    StepAlone      each stage by itself, after each of its micro-batches (mode async)

Nothing here knows a framework: what updates the weights is a `WeightUpdater`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from gpp_plugin.engine.gradients.gradient_store import StageGradients
from gpp_plugin.engine.setting import StepCounters, WeightUpdater
from gpp_plugin.engine.stage_groups import StageGroups, TiedParameter, duplicates, sequence_parallel
from gpp_plugin.errors import ConfigError, RuntimeFailure
from gpp_plugin.ir.plan import Stage

LARGEST_DIFFERENCE = 1e-2
"""Between a duplicate's gradient norms on two tensor ranks, over the larger one; parts of a sum differ by more."""


# ---- sums over ranks ----------------------------------------------------------------------------------------


class GradientReductions:
    """The sums over ranks that a mini-batch's gradients need before the step, each done once and in order.

    Args:
        stage_index: of ``stage`` in the plan.
        tied: the parameters that the stage holds together with others.
    """

    def __init__(
        self,
        gradients: StageGradients,
        *,
        stage: Stage,
        stage_index: int,
        groups: StageGroups,
        tied: Sequence[TiedParameter],
        device: torch.device,
    ) -> None:
        self._gradients = gradients
        self._stage = stage
        self._stage_index = stage_index
        self._groups = groups
        self._tied = tuple(tied)
        self._device = device
        self._has_data = self._has_tied = self._has_tensor = False

    def accumulate(self) -> None:
        """Take in a micro-batch's gradients, which no rank has summed yet."""
        self._gradients.accumulate()
        self._has_data = False

    def begin_reduction(self) -> None:
        """Sum over the data-parallel ranks as gradients become final, in the backward that follows."""
        self._gradients.begin_reduction()

    def reduce_data(self) -> None:
        """Sum over the data-parallel ranks; collective over them."""
        if not self._has_data:
            self._gradients.reduce_data()
        self._has_data = True

    def reduce_tied(self) -> None:
        """Sum tied parameters' gradients over their stages; collective over those.

        Raises:
            RuntimeFailure: the stage's own sum is not complete.
        """
        if not self._has_data and not self._gradients.is_empty():
            raise RuntimeFailure("reduce_tied before reduce_data: the stage's own sum must be complete first")
        if not self._has_tied:
            # Tensor ranks first: another stage is to hear of a whole sum, not of one rank's part of the sequence.
            self.sum_tensor()
            # A stage may share parameters with several sets of stages, {0, 2} and {0, 3}, say. All ranks go through
            # these sets in one order, or stage 0 would wait in the first while stage 3 waits in the second.
            for stages in sorted({tuple(sorted(set(tie.stages))) for tie in self._tied}):
                names = [tie.name for tie in self._tied if tuple(sorted(set(tie.stages))) == stages]
                self._gradients.reduce_tied(
                    [name for name in names if name in self._gradients.parameters],
                    group=self._groups.tied[stages],
                )
        self._has_tied = True

    def sum_tensor(self) -> None:
        """Sum over the tensor ranks what each has of its part of the sequence only; once a mini-batch."""
        if self._stage.tensor > 1 and not self._has_tensor:
            names = sequence_parallel(self._gradients.parameters)
            self._gradients.sum_tensor(names, group=self._groups.tensor[self._stage_index])
        self._has_tensor = True

    def compare_duplicates(self) -> None:
        """Refuse tensor ranks that have unlike gradients of what they hold alike; collective over them.

        Raises:
            ConfigError: names the parameter.
        """
        group = self._groups.tensor[self._stage_index]
        if self._stage.tensor > 1 and isinstance(group, dist.ProcessGroup):
            self.sum_tensor()
            check_duplicates(self._gradients, stage=self._stage.name, group=group, device=self._device)

    def finish(self, *, is_partitioned: bool) -> None:
        """Complete the sums for a step.

        Args:
            is_partitioned: ranks step their parts of the gradients, so that even a single one reduces.

        Raises:
            RuntimeFailure: a sum that other ranks take part in was left out.
        """
        lacks_data = (self._stage.degree > 1 or is_partitioned) and not self._has_data
        if (lacks_data or (self._tied and not self._has_tied)) and not self._gradients.is_empty():
            raise RuntimeFailure("step before reduce_data and reduce_tied: replicas would step differently")
        self.sum_tensor()

    def clear(self) -> None:
        """Forget the mini-batch's gradients."""
        self._gradients.clear()
        self._has_data = self._has_tied = self._has_tensor = False


def check_duplicates(
    gradients: StageGradients, *, stage: str, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Refuse a duplicate whose gradient is not the same on all tensor ranks; collective over them, before a step.

    It would make the copies drift apart and the norm wrong, without a sign of it in the loss.

    Raises:
        ConfigError: names the parameter.
    """
    names = duplicates(gradients.parameters)
    own = gradients.norms(names).to(device)
    # One maximum gives both bounds: the least norm is minus the greatest of their negatives.
    bounds = torch.cat([own, -own])
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    most, least = bounds.cpu().chunk(2)
    for name, high, low in zip(names, most.tolist(), (-least).tolist(), strict=True):
        if high - low > LARGEST_DIFFERENCE * high:
            raise ConfigError(
                f"stage {stage!r}: the gradient of {name!r} differs between tensor ranks ({low:.3g}, {high:.3g}), "
                "which hold it alike; set parameter.tensor_model_parallel = True on a shard, and "
                "parameter.sequence_parallel = True where each rank's gradient is a part of the sum"
            )


# ---- the step -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step did; the same on every rank that it was agreed with.

    Args:
        grad_norm: L2 norm of the gradient, before clipping; inf on overflow.
        overflow: the gradient was not finite, and no stage stepped.
        learning_rates: of every parameter group of the model, after the step.
        loss_scale: for the next mini-batch.
    """

    grad_norm: float
    overflow: bool
    learning_rates: tuple[float, ...]
    loss_scale: float


class StageUpdate:
    """Updates a stage's weights with its reduced gradients, and counts what was done.

    Args:
        group: the ranks whose gradients make up the norm; they all take the same decision.
        foreign: parameters that another rank of ``group`` counts in the norm.
        compare: checks, before the first update, that tensor ranks agree on what they hold alike; collective.
        clear: forgets the gradients.
        samples: of a mini-batch.
    """

    def __init__(
        self,
        gradients: StageGradients,
        reductions: GradientReductions,
        updater: WeightUpdater,
        counters: StepCounters,
        *,
        group: dist.ProcessGroup | int,
        foreign: Collection[str],
        compare: Callable[[], None],
        clear: Callable[[], None],
        samples: int,
    ) -> None:
        self._gradients = gradients
        self._reductions = reductions
        self._updater = updater
        self._counters = counters
        self._group = group
        self._foreign = frozenset(foreign)
        self._compare: Callable[[], None] | None = compare
        self._clear = clear
        self._samples = samples
        self._is_partitioned = bool(updater.layout)

    def run(self) -> tuple[float, bool]:
        """Step the optimizer; return the gradient's norm, and whether it kept the step away. Collective over the group.

        Raises:
            RuntimeFailure: gradients were not reduced.
            ConfigError: tensor ranks have unlike gradients of what they hold alike.
        """
        if self._compare is not None:
            self._compare()
        self._compare = None
        self._reductions.finish(is_partitioned=self._is_partitioned)
        # Gradients carry the loss scale until they are stepped: fp16 would lose small ones if they were divided here.
        norm = self._scaled_norm() / self._updater.loss_scale
        overflow = self._updater.config.check_overflow and not math.isfinite(norm)
        if not overflow:
            self._updater.apply(self._gradients, coefficient=self._coefficient(norm))
        self._clear()
        return norm, overflow

    @torch.no_grad()
    def _scaled_norm(self) -> float:
        """Return the L2 norm of the scaled gradient; not finite where any element is not.

        Data-parallel ranks share their parameters out; a tied one is its owner's, and one that the tensor ranks
        hold alike is the first one's: every element is squared on one rank, and one number a rank is summed.
        """
        total = self._gradients.squared_norm(without=self._foreign, precision=self._updater.norm_precision)
        dist.all_reduce(total, group=self._group)
        # One read of the device a step: the norm, and with it what else the host does not know.
        unknown = self._gradients.unknown()
        if unknown is None:
            value = total.item()
        else:
            value, *flags = torch.cat([total.reshape(1), unknown.to(total.dtype)]).tolist()
            self._gradients.learn(flags)
        return math.sqrt(value) if value >= 0 else math.nan

    def _coefficient(self, norm: float) -> float:
        """Return the factor that takes the loss scale out of the gradients and clips them to the largest norm.

        Scale 1024, norm 2 of the unscaled gradients, clipping at 0.5: 1 / 1024 * 0.5 / 2 = 1 / 4096.
        """
        coefficient = 1.0 / self._updater.loss_scale
        clipping = self._updater.config.gradient_clipping
        if clipping > 0:
            # As torch.nn.utils.clip_grad_norm_ and DeepSpeed do.
            coefficient *= min(1.0, clipping / (norm + 1e-6))
        return coefficient

    def end_mini_batch(self, *, overflow: bool, has_stepped: bool) -> None:
        """Advance the learning rates where there was a step; count the mini-batch; choose the next loss scale."""
        if has_stepped:
            self._updater.advance_rates()
        self._counters.add(samples=self._samples, overflow=overflow)
        self._updater.count(self._counters, overflow=overflow)

    def result(self, norm: float, overflow: bool) -> StepResult:
        """Return what a step did."""
        return StepResult(
            grad_norm=math.inf if overflow else norm,
            overflow=overflow,
            learning_rates=self._updater.rates(),
            loss_scale=self._updater.loss_scale,
        )


class StepRule(Protocol):
    """Over which ranks a step is agreed, and how often it is taken."""

    def step(self) -> StepResult:
        """Update the stage with the gradients that were summed; collective over the ranks of the rule."""

    def end_mini_batch(self) -> StepResult:
        """Return what the mini-batch's steps did, when the last of them is taken."""


class StepTogether:
    """All stages step once a mini-batch, or none does.

        stage 0   F F F B B B ──┐ norm  ┌─ step ─┐
        stage 1     F F F B B B ┴─ sum ─┴─ step ─┴─ rates, counters, loss scale

    Args:
        update: agreed over all ranks.
    """

    def __init__(self, update: StageUpdate) -> None:
        self._update = update
        self._last: StepResult | None = None

    def step(self) -> StepResult:
        """Take the step of all stages, or of none; collective over all ranks."""
        norm, overflow = self._update.run()
        self._update.end_mini_batch(overflow=overflow, has_stepped=not overflow)
        self._last = self._update.result(norm, overflow)
        return self._last

    def end_mini_batch(self) -> StepResult:
        """Return what the mini-batch's one step did."""
        assert self._last is not None, "a mini-batch ends with its step"
        return self._last


class StepAlone:
    """A stage steps by itself after each of its micro-batches: no stage waits for another one to step.

        stage 0   F0 F1 F2 B0 step F3 B1 step F4 B2 step ...
        stage 1      F0 B0 step F1 B1 step F2 B2 step ...

    Norm, clipping and overflow are of the stage's own gradient of one micro-batch. The learning-rate schedule and the
    counters advance once a mini-batch, whatever overflowed: they are the same on every rank.

    Args:
        update: agreed over the stage's ranks.
    """

    def __init__(self, update: StageUpdate) -> None:
        self._update = update
        self._last_norm = 0.0
        self._has_overflowed = False

    def step(self) -> StepResult:
        """Update the stage with the gradient of one micro-batch; collective over the stage's ranks."""
        norm, overflow = self._update.run()
        self._last_norm = norm
        self._has_overflowed |= overflow
        return self._update.result(norm, overflow)

    def end_mini_batch(self) -> StepResult:
        """Advance schedule and counters; return the norm of the stage's last update, and whether it skipped any."""
        overflow, self._has_overflowed = self._has_overflowed, False
        self._update.end_mini_batch(overflow=overflow, has_stepped=True)
        return self._update.result(self._last_norm, overflow)
