"""From a stage's gradients to its step: sums over ranks in their order, one norm, one decision, one update.

    runtime, per micro-batch      backward; accumulate        (before the last one, where allowed: begin_reduction)
    runtime, once per mini-batch  reduce_data     over the stage's ranks that hold the same parameters: data x context
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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_plugin.engine.framework import StepCounters, WeightUpdater
from gpp_plugin.engine.gradient_store import Summand, sum_over
from gpp_plugin.engine.partitioned_gradients import StageGradients
from gpp_plugin.engine.stage_groups import (
    StageGroups,
    TiedParameter,
    duplicates,
    has_one_size,
    sequence_parallel,
)
from gpp_plugin.errors import ConfigError, RuntimeFailure
from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.runtime.ranks.collectives import all_reduce

LARGEST_DIFFERENCE = 1e-2
"""Between a duplicate's gradient norms on two tensor ranks, over the larger one; parts of a sum differ by more."""


# ---- sums over ranks ----------------------------------------------------------------------------------------


class StageUpdate:
    """One stage's step: the sums over ranks that its gradients need, each done once and in order; then the weights.

    Args:
        stage_index: of ``stage`` in the plan.
        tied: the parameters that the stage holds together with others.
        foreign: parameters that another stage, or another rank of this one, counts in the norm.
        untrained: parameters whose gradients are only forgotten.
    """

    def __init__(
        self,
        gradients: StageGradients,
        updater: WeightUpdater,
        *,
        stage: Stage,
        stage_index: int,
        groups: StageGroups,
        tied: Sequence[TiedParameter],
        device: torch.device,
        foreign: Collection[str],
        untrained: Sequence[nn.Parameter] = (),
    ) -> None:
        self.gradients = gradients
        self.updater = updater
        self.stage_index = stage_index
        self.tied = tuple(tied)
        self.is_written = False
        """Whether it is known that somebody wrote to the parameters since the last step."""
        self.frozen: frozenset[str] = frozenset()
        """Trained parameters that take no gradient for now: they stay as they are."""
        self.hooks: dict[str, list[Mapping[int, Callable[[Tensor], Tensor | None]]]] = {}
        """Users' hooks on trained parameters; each table is the one that their handles remove them from."""
        self._stage = stage
        self._is_reduced = stage.num_replicas > 1 or bool(updater.layout)
        """Whether `reduce_data` is due: where ranks step their parts of the gradients, even a single one reduces."""
        self._groups = groups
        self._device = device
        self._foreign = frozenset(foreign)
        self._untrained = tuple(untrained)
        self._has_data = self._has_tied = self._has_tensor = False
        self._is_shown = False  # to users' hooks: the mini-batch's gradients

    def accumulate(self) -> None:
        """Take in a micro-batch's gradients, which no rank has summed yet."""
        self.gradients.accumulate()
        self._has_data = False

    def begin_reduction(self) -> None:
        """Sum over the ranks of the same parameters as gradients become final, in the backward that follows."""
        self.gradients.begin_reduction()

    def reduce_data(self) -> None:
        """Sum over the ranks of the same parameters; collective over them.

        Context ranks have each the summands of their positions, as data-parallel ranks those of their samples.
        """
        if not self._has_data:
            self.gradients.reduce_data()
        self._has_data = True

    def bring_tied(self, names: Sequence[str], *, shared_out: bool = False) -> Iterator[Summand]:
        """Yield what this rank brings of tied parameters to the sums over their stages.

        Args:
            shared_out: all tensor ranks, which have the same, take part in the sum, and each brings its share.
        """
        self._has_tied = True
        for summand in self.gradients.tied_summands([n for n in names if n in self.gradients.parameters]):
            if shared_out:
                summand.brought.div_(self._stage.tensor)
            yield summand

    def prepare_tied(self) -> None:
        """See to it that the stage's own sum of tied parameters is whole; collective over its tensor ranks.

        Raises:
            RuntimeFailure: it is not complete.
        """
        if not self._has_data and not self.gradients.is_empty():
            raise RuntimeFailure("reduce_tied before reduce_data: the stage's own sum must be complete first")
        # another stage is to hear of a whole sum, not of one rank's part of the sequence
        self.sum_tensor()

    @property
    def lacks_tied(self) -> bool:
        """Return whether tied parameters are still to be summed over their stages."""
        return bool(self.tied) and not self._has_tied

    def sum_tensor(self) -> None:
        """Sum over the tensor ranks what each has of its part of the sequence only; once a mini-batch."""
        if self._stage.tensor > 1 and not self._has_tensor:
            names = sequence_parallel(self.gradients.parameters)
            self.gradients.sum_tensor(names, group=self._groups.tensor[self.stage_index])
        self._has_tensor = True

    def compare_duplicates(self) -> None:
        """Refuse a duplicate whose gradient is not the same on all tensor ranks; collective over them, before a step.

        It would make the copies drift apart and the norm wrong, without a sign of it in the loss.

        Raises:
            ConfigError: names the parameter.
        """
        group = self._groups.tensor[self.stage_index]
        if self._stage.tensor == 1 or not isinstance(group, dist.ProcessGroup):
            return
        self.sum_tensor()
        names = duplicates(self.gradients.parameters)
        own = self.gradients.norms(names).to(self._device)
        # One maximum gives both bounds: the least norm is minus the greatest of their negatives.
        bounds = torch.cat([own, -own])
        all_reduce(bounds, op=dist.ReduceOp.MAX, group=group, what="a look at what tensor ranks hold alike")
        most, least = bounds.cpu().chunk(2)
        for name, high, low in zip(names, most.tolist(), (-least).tolist(), strict=True):
            if high - low > LARGEST_DIFFERENCE * high:
                raise ConfigError(
                    f"stage {self._stage.name!r}: the gradient of {name!r} differs between tensor ranks ({low:.3g}, "
                    f"{high:.3g}), which hold it alike; set parameter.tensor_model_parallel = True on a shard, and "
                    "parameter.sequence_parallel = True where each rank's gradient is a part of the sum"
                )

    def finish(self) -> None:
        """Complete the sums for a step.

        Raises:
            RuntimeFailure: a sum that other ranks take part in was left out.
        """
        lacks_data = self._is_reduced and not self._has_data
        if (lacks_data or self.lacks_tied) and not self.gradients.is_empty():
            raise RuntimeFailure("step before reduce_data and reduce_tied: replicas would step differently")
        self.sum_tensor()
        if self.frozen:
            self.gradients.rest(self.frozen)
        if self.hooks and not self._is_shown:  # a step that is held comes here twice
            self._is_shown = True
            self._call_hooks()

    @torch.no_grad()
    def _call_hooks(self) -> None:
        """Show users' hooks the whole gradients, without the loss scale, and take what they return."""
        scale = self.updater.loss_scale
        for name, tables in self.hooks.items():
            held = None if name in self.frozen else self.gradients.whole(name)
            if held is None:
                continue
            for hook in [hook for table in tables for hook in table.values()]:
                gradient = held / scale
                returned = hook(gradient)
                held.copy_((gradient if returned is None else returned) * scale)

    def adopt_written(self) -> None:
        """Let the masters take over what was written to parameters since the last step."""
        self.updater.adopt_written()
        self.is_written = False

    def squared_norm(self) -> Tensor:
        """Return this rank's share of the stage's part of the squared norm."""
        return self.gradients.squared_norm(without=self._foreign, precision=self.updater.norm_precision)

    def apply(self, norm: float) -> None:
        """Step the optimizer, with gradients that are clipped for the whole model's ``norm``."""
        own = self.gradients
        self.updater.apply(own.for_optimizer(), coefficient=self._coefficient(norm), resting=own.resting)

    def _coefficient(self, norm: float) -> float:
        """Return the factor that takes the loss scale out of the gradients and clips them to the largest norm.

        Scale 1024, norm 2 of the unscaled gradients, clipping at 0.5: 1 / 1024 * 0.5 / 2 = 1 / 4096.
        """
        coefficient = 1.0 / self.updater.loss_scale
        clipping = self.updater.config.gradient_clipping
        if clipping > 0:
            # As torch.nn.utils.clip_grad_norm_ and DeepSpeed do.
            coefficient *= min(clipping / (norm + 1e-6), 1.0)  # in this order nan stays
        return coefficient

    def clear(self) -> None:
        """Forget the mini-batch's gradients."""
        self.gradients.clear()
        for parameter in self._untrained:
            parameter.grad = None
        self._has_data = self._has_tied = self._has_tensor = self._is_shown = False


class TiedSums:
    """The sums of tied parameters' gradients over the stages that hold them, of all stages of a rank together.

    A rank of several stages is in the group of a tie once, and may hold both ends of it. All ranks go through the sets
    of stages that share parameters in one order, so that none waits in one set for a rank that waits in another; of a
    rank's own stages the last one that asks therefore begins.

        rank 0, stages 0 2   reduce_data(0 2)  reduce_tied(0)  reduce_tied(2): sets {0 2} {0 3} {2 3}
        rank 1, stage 3      reduce_data(3)    reduce_tied(3):                        {0 3} {2 3}

    Args:
        stages: of this rank, in the plan's order.
    """

    def __init__(self, stages: Sequence[StageUpdate], groups: StageGroups, plan: PipelinePlan) -> None:
        self._plan = plan
        self._stages = [stage for stage in stages if stage.tied]
        self._groups = groups
        self._asked: set[int] = set()
        names: dict[tuple[int, ...], list[str]] = {}
        for tie in dict.fromkeys(tie for stage in self._stages for tie in stage.tied):
            names.setdefault(tie.holders, []).append(tie.name)
        self._names = sorted((holders, sorted(of_set)) for holders, of_set in names.items())

    def reduce(self, stage: int) -> None:
        """Sum tied gradients when all of this rank's stages have asked for it; collective over the stages that share.

        Raises:
            RuntimeFailure: a stage's own sum is not complete.
        """
        self._asked.add(stage)
        waiting = [own for own in self._stages if own.lacks_tied]
        if any(own.stage_index not in self._asked for own in waiting):
            return
        self._asked.clear()
        for own in waiting:
            own.prepare_tied()
        for holders, names in self._names if waiting else ():
            sharing = [own for own in self._stages if own.stage_index in holders]
            unlike = not has_one_size(self._plan, holders)
            brought = [own.bring_tied(names, shared_out=unlike) for own in sharing]
            sum_over(self._groups.tied[holders], brought)

    def clear(self) -> None:
        """Forget who has asked."""
        self._asked.clear()


# ---- the step -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step did; the same on every rank that it was agreed with.

    Args:
        grad_norm: L2 norm of the gradient, before clipping; inf on overflow.
        overflow: the gradient was not finite, and no stage stepped.
        learning_rates: of every parameter group of the model, after the step.
        loss_scale: for the next mini-batch.
        stage_norms: what each stage brings to the norm, by its index in the plan: their squares add up to its square.
            Of all stages that it was agreed with; not finite where the stage's gradient is not.
    """

    grad_norm: float
    overflow: bool
    learning_rates: tuple[float, ...]
    loss_scale: float
    stage_norms: Mapping[int, float] = field(default_factory=dict)


class RankUpdate:
    """Updates the stages of one rank, all of them or none, and counts what was done.

        stage 0, stage 2 of rank 0   squares + squares ──┐                          ┌── step, step
        stage 1 of rank 1            squares ────────────┴ one sum over the ranks ──┴── step

    Args:
        stages: of this rank, in the plan's order.
        group: the ranks whose gradients make up the norm; they all take the same decision.
        agreeing: the stages of the plan whose gradients these are.
        compare: checks, before the first update, that tensor ranks agree on what they hold alike; collective.
        samples: of a mini-batch.
    """

    def __init__(
        self,
        stages: Sequence[StageUpdate],
        counters: StepCounters,
        *,
        group: dist.ProcessGroup | int,
        agreeing: Sequence[int],
        compare: Callable[[], None],
        samples: int,
    ) -> None:
        self._stages = tuple(stages)
        self._agreeing = tuple(agreeing)
        self._counters = counters
        self._group = group
        self._compare: Callable[[], None] | None = compare
        self._samples = samples
        # of what is alike on all stages, one that trains speaks for the others
        self._speaker = next((s.updater for s in stages if s.updater.trained), stages[0].updater)

    def run(self) -> StepResult:
        """Step the optimizers, unless the gradient is not finite.

        Collective over the group. Rates and loss scale are those of the step; a mini-batch that ends changes them.

        Raises:
            RuntimeFailure: gradients were not reduced.
            ConfigError: tensor ranks have unlike gradients of what they hold alike.
        """
        if self._compare is not None:
            self._compare()
        self._compare = None
        for stage in self._stages:
            stage.finish()
        # Gradients carry the loss scale until they are stepped: fp16 would lose small ones if they were divided here.
        scale = self._speaker.loss_scale
        squares, written = self._scaled_squares()
        norm = _root(sum(squares)) / scale
        overflow = self._speaker.config.check_overflow and not math.isfinite(norm)
        for stage in self._stages:
            if not overflow:
                if stage in written:
                    stage.adopt_written()
                stage.apply(norm)
            stage.clear()
        return StepResult(
            grad_norm=norm,
            overflow=overflow,
            learning_rates=self._speaker.rates(),
            loss_scale=scale,
            stage_norms={
                index: _root(own) / scale for index, own in zip(self._agreeing, squares, strict=True)
            },
        )

    @torch.no_grad()
    def _scaled_squares(self) -> tuple[list[float], list[StageUpdate]]:
        """Return the squared L2 norm of each stage's scaled gradient, and the rank's stages that were written to.

        A norm is not finite where any element is not.

        Ranks of the same parameters share them out; a tied one is its owner's, and one that the tensor ranks
        hold alike is the first one's: every element is squared on one rank, and one number a stage is summed.
        """
        # stages 0 2 on this rank of four stages:  [s0, 0, s2, 0]
        own = {stage.stage_index: stage.squared_norm() for stage in self._stages}
        nothing = torch.zeros_like(next(iter(own.values())))
        squares = torch.stack([own.get(index, nothing) for index in self._agreeing])
        all_reduce(squares, group=self._group, what="the norm of the gradients")
        # One read of the device a step: the norms, and with them what else the host does not know.
        asked = [(stage.gradients, stage.gradients.unknown()) for stage in self._stages]
        unknown = [(gradients, flags) for gradients, flags in asked if flags is not None]
        counts = [(stage, stage.updater.written()) for stage in self._stages]
        counted = [(stage, count) for stage, count in counts if count is not None]
        read = torch.cat(
            [
                squares,
                *(count.reshape(1).to(squares) for _, count in counted),
                *(flags.to(squares.dtype) for _, flags in unknown),
            ]
        ).tolist()
        known = read[len(squares) :]
        seen = {stage for (stage, _), count in zip(counted, known, strict=False) if count > 0}
        known = known[len(counted) :]
        for gradients, flags in unknown:
            gradients.learn(known[: len(flags)])
            known = known[len(flags) :]
        written = [stage for stage in self._stages if stage in seen or stage.is_written]
        return read[: len(squares)], written

    def end_mini_batch(self, *, overflow: bool, has_stepped: bool) -> None:
        """Advance the learning rates where there was a step; count the mini-batch; choose the next loss scale."""
        # a step skipped for overflow counts in all three, so that every rank's schedule sees the same numbers
        self._counters.global_steps += 1
        self._counters.global_samples += self._samples
        self._counters.skipped_steps += int(overflow)
        self.follow(overflow=overflow, has_stepped=has_stepped)

    def follow(self, *, overflow: bool, has_stepped: bool) -> None:
        """Do so but for the count, which another update of the rank has made."""
        for stage in self._stages:
            if has_stepped:
                stage.updater.advance_rates()
            stage.updater.count(self._counters, overflow=overflow)

    def result(self, last: StepResult) -> StepResult:
        """Return what a step did, with rates and loss scale as they are now."""
        return replace(
            last,
            grad_norm=math.inf if last.overflow else last.grad_norm,
            learning_rates=self._speaker.rates(),
            loss_scale=self._speaker.loss_scale,
        )


def _root(square: float) -> float:
    return math.sqrt(square) if square >= 0 else math.nan


class StepTogether:
    """All stages step once a mini-batch, or none does.

        stage 0   F F F B B B ──┐ norm  ┌─ step ─┐
        stage 1     F F F B B B ┴─ sum ─┴─ step ─┴─ rates, counters, loss scale

    Args:
        update: agreed over all ranks.
    """

    def __init__(self, update: RankUpdate) -> None:
        self._update = update
        self._last: StepResult | None = None

    def step(self, stage: int | None = None) -> StepResult:
        """Take the step of all stages, or of none, whoever asks for it; collective over all ranks."""
        result = self._update.run()
        self._update.end_mini_batch(overflow=result.overflow, has_stepped=not result.overflow)
        self._last = self._update.result(result)
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
        updates: of each stage of the rank, agreed over the stage's ranks.
    """

    def __init__(self, updates: Mapping[int, RankUpdate]) -> None:
        self._updates = dict(updates)
        self._last: dict[int, StepResult] = {}
        self._has_overflowed = False

    def step(self, stage: int | None = None) -> StepResult:
        """Update a stage with the gradient of one micro-batch; collective over the stage's ranks."""
        if stage is None:
            (stage,) = self._updates
        update = self._updates[stage]
        self._last[stage] = result = update.run()
        self._has_overflowed |= result.overflow
        return update.result(result)

    def end_mini_batch(self) -> StepResult:
        """Advance schedule and counters; return whether an update was skipped, and the norm of the last ones.

        It is that of each stage's last update, of all stages of the rank together.
        """
        overflow, self._has_overflowed = self._has_overflowed, False
        first, *others = self._updates.values()
        first.end_mini_batch(overflow=overflow, has_stepped=True)
        for update in others:
            update.follow(overflow=overflow, has_stepped=True)
        norms = {stage: norm for last in self._last.values() for stage, norm in last.stage_norms.items()}
        return first.result(
            StepResult(
                grad_norm=math.hypot(*norms.values()),
                overflow=overflow,
                learning_rates=(),
                loss_scale=1.0,
                stage_norms=norms,
            )
        )


StepRule = StepTogether | StepAlone
"""Over which ranks a step is agreed, and how often it is taken."""
