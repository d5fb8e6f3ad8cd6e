"""All that one rank trains: a `StageEngine` for each of its stages, one step of all of them, one set of counters.

    rank 0   stage 0   module, gradients, optimizer ─┐
             stage 2   module, gradients, optimizer ─┴─ one norm, one decision, counters
    rank 1   stage 1   module, gradients, optimizer ─── the same norm, the same decision

Stages of one rank share nothing else: a parameter that two of them hold has a copy, an optimizer state and a ZeRO
partition in each, as on ranks of their own.

Source: this project
Tests: tests/integrations/test_shared_ranks.py
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_plugin.engine.framework import StageReplica, StepCounters, WeightUpdater
from gpp_plugin.engine.sharded_weights import GatheredBytes, ShardedWeights, attached, gathered
from gpp_plugin.engine.stage_engine import StageEngine
from gpp_plugin.engine.stage_groups import StageGroups, TiedParameter, make_replicas_equal
from gpp_plugin.engine.stage_step import RankUpdate, StepAlone, StepResult, StepRule, StepTogether, TiedSums
from gpp_plugin.errors import ConfigError, GppError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.runtime.ranks.collectives import exchange


class RankEngine:
    """Owns the training state of one rank's stages.

    Construction, `step` and `full_gradients` are collective: over all ranks, the ranks of the rule, each stage's ranks.

    Args:
        modules: of the rank's stages in the plan's order, parameters under their HuggingFace names; moved to
            ``device``, cast to the configured type, and made equal on each stage's ranks.
        plan, rank, groups, tied, make_optimizer: as of `StageEngine`.
        framework: its name, for errors.
        device: where the modules live.
        steps_alone: each of the rank's stages steps after each of its micro-batches, whatever others do (mode async).
        reduces_early: the stages of the plan that may sum gradients in their last backward; alike on all ranks.

    Raises:
        ConfigError: the configuration asks for what a stage cannot do, or the framework refuses it on any rank.
    """

    def __init__(
        self,
        *,
        modules: Sequence[nn.Module],
        plan: PipelinePlan,
        rank: int,
        groups: StageGroups,
        tied: Sequence[TiedParameter] = (),
        make_optimizer: Callable[[nn.Module, StageReplica], WeightUpdater],
        framework: str = "",
        device: torch.device | str = "cpu",
        steps_alone: bool = False,
        reduces_early: Collection[int] = (),
    ) -> None:
        self.plan = plan
        self.rank = rank
        self.groups = groups
        self.device = torch.device(device)
        self.indices = plan.stages_of_rank(rank)
        self._framework = framework
        self._tied = tuple(tied)
        self._counters = StepCounters()
        self.whole_bytes = GatheredBytes()
        self._readers = 0
        made: list[StageEngine] = []

        def build() -> None:
            own = dict(zip(self.indices, modules, strict=True))
            self._prepare(own)
            for index, module in own.items():
                made.append(
                    StageEngine(
                        module=module,
                        plan=plan,
                        index=index,
                        rank=rank,
                        groups=groups,
                        tied=tied,
                        make_optimizer=make_optimizer,
                        counters=self._counters,
                        device=self.device,
                        reduces_early=index in reduces_early,
                        whole_bytes=self.whole_bytes,
                    )
                )

        self._agree(build, "construction")
        self.stages: tuple[StageEngine, ...] = tuple(made)
        self._ties = TiedSums([stage.reductions for stage in made], groups, plan)
        self._rule = self._make_rule(steps_alone)
        for stage in made:
            stage.join(self._rule, self._ties)

    # ---- construction ------------------------------------------------------------------------------------

    def _prepare(self, modules: dict[int, nn.Module]) -> None:
        """Move the modules to their device and make them equal on all ranks that hold them."""
        for index, module in modules.items():
            known = dict(module.named_parameters(remove_duplicate=False))
            missing = [tie.name for tie in self._tied if index in tie.stages and tie.name not in known]
            if missing:
                raise ConfigError(
                    f"stage {self.plan.stages[index].name!r} lacks its tied parameters {missing}"
                )
            module.to(self.device)
        # Before the optimizers are made: masters are copies of these bits, and a cast rounds them.
        make_replicas_equal(modules, plan=self.plan, groups=self.groups, tied=self._tied)

    def _make_rule(self, steps_alone: bool) -> StepRule:
        """Return the rule of the rank's steps: of each stage after each of its micro-batches, or of all together."""

        def update(
            stages: Sequence[StageEngine], group: Any, agreeing: Sequence[int], compare: Callable[[], None]
        ) -> RankUpdate:
            return RankUpdate(
                [stage.update for stage in stages],
                self._counters,
                group=group,
                agreeing=agreeing,
                compare=compare,
                samples=self.plan.mini_batch,
            )

        if not steps_alone:
            every = range(len(self.plan.stages))
            return StepTogether(update(self.stages, self.groups.world, every, self._compare_duplicates))
        # Alone, only the tensor ranks take part in the check; together, all ranks raise where one of them would.
        return StepAlone(
            {
                stage.stage_index: update(
                    [stage],
                    self.groups.stage[stage.stage_index],
                    [stage.stage_index],
                    stage.update.compare_duplicates,
                )
                for stage in self.stages
            }
        )

    def _compare_duplicates(self) -> None:
        """Refuse, on all ranks, tensor ranks of any stage that have unlike gradients of what they hold alike."""

        def compare() -> None:
            for stage in self.stages:
                stage.update.compare_duplicates()

        if any(stage.tensor > 1 for stage in self.plan.stages):
            self._agree(compare, "the first step")

    def _agree(self, action: Callable[[], None], what: str) -> None:
        """Run ``action`` and fail on every rank if it fails on any, so that none waits for a dead one."""

        def attempt() -> None:
            try:
                action()
            except GppError:
                raise
            except Exception as error:  # whatever the framework or the user's factory raises
                framework = f", {self._framework}" if self._framework else ""
                raise ConfigError(
                    f"{what} failed on rank {self.rank} (stage {self.plan.names_on_rank(self.rank)!r}{framework}): "
                    f"{type(error).__name__}: {error}"
                ) from error

        # On the default group, whose timeout is the job's: a rank may be compiling an optimizer meanwhile.
        exchange(attempt, what=what, group=dist.group.WORLD)

    # ---- one mini-batch ----------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        """Return the factor on every loss of this mini-batch; the same on every rank."""
        return self.stages[0].loss_scale

    def rest(self, names: Collection[str]) -> None:
        """Leave these parameters, which no unit of the mini-batch that begins reads, as they are in its step."""
        for stage in self.stages:
            stage.rest(names)

    def full_gradients(self) -> dict[str, Tensor]:
        """Return the gradients of all stages as of `StageEngine.full_gradients`; collective likewise."""
        gradients: dict[str, Tensor] = {}
        for stage in self.stages:
            gradients.update(stage.full_gradients())
        return gradients

    def step(self) -> StepResult:
        """Take a step as the rule has it; collective over the ranks that step together.

        Raises:
            RuntimeFailure: gradients were not reduced, or the loss scale cannot sink any further.
            ConfigError: tensor ranks have unlike gradients of what they hold alike; seen at the first step.
        """
        return self._rule.step()

    def end_mini_batch(self) -> StepResult:
        """Return what the mini-batch's steps did; where the stage steps alone, advance schedule and counters."""
        return self._rule.end_mini_batch()

    def zero_grad(self) -> None:
        """Forget the mini-batch's gradients."""
        self._ties.clear()
        for stage in self.stages:
            stage.zero_grad()

    # ---- weights that ranks hold in parts (ZeRO 3) -----------------------------------------------------------

    @property
    def weights(self) -> list[ShardedWeights]:
        """Return what gathers the parameters of the rank's stages; of those that it holds whole there is nothing."""
        return [stage.weights for stage in self.stages if stage.weights is not None]

    def attached(self) -> AbstractContextManager[None]:
        """Let programs gather and free the stages' parameters while the context lasts."""
        return attached(self.weights)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Hold the parameters of all stages whole while the context lasts; collective over all ranks."""
        self._readers += 1
        try:
            with gathered(self.weights):
                yield
        finally:
            self._readers -= 1

    def refuse_while_gathered(self) -> None:
        """Refuse a mini-batch within `gathered`, on all ranks alike: also on those that hold all their weights.

        Raises:
            ConfigError: parameters of some rank are gathered for somebody else.
        """
        is_in_parts = any(stage.config.zero_stage >= 3 for stage in self.stages)
        if self._readers and is_in_parts and any(stage.degree > 1 for stage in self.plan.stages):
            raise ConfigError(
                "a mini-batch within engine.gathered_parameters(): leave it before the next train_batch() or "
                "eval_batch()"
            )

    # ---- what users see ------------------------------------------------------------------------------------

    @property
    def only(self) -> StageEngine:
        """Return the rank's one stage.

        Raises:
            PlanError: the rank holds several.
        """
        self.plan.stage_of_rank(self.rank)
        return self.stages[0]

    def of(self, stage: int) -> StageEngine:
        """Return one of the rank's stages by its index in the plan."""
        return self.stages[self.indices.index(stage)]

    @property
    def global_steps(self) -> int:
        """Return the optimizer steps so far, skipped ones among them."""
        return self._counters.global_steps

    @property
    def global_samples(self) -> int:
        """Return the samples trained on so far."""
        return self._counters.global_samples

    @property
    def skipped_steps(self) -> int:
        """Return the steps that overflow prevented."""
        return self._counters.skipped_steps

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of the parameters."""
        return self.stages[0].dtype

    @functools.cached_property
    def optimizer(self) -> Any:
        """Return the one stage's optimizer; of several stages a `JoinedOptimizers` of those that train."""
        trained = [stage.optimizer for stage in self.stages if stage.is_trained]
        if len(self.stages) == 1 or not trained:
            return self.stages[0].optimizer
        return JoinedOptimizers(trained)

    @property
    def lr_scheduler(self) -> Any:
        """Return the first stage's learning-rate scheduler, if any; the other stages' are in the same state."""
        return self.stages[0].updater.lr_scheduler

    def require_optimizer(self) -> None:
        """Refuse to train where the job has no optimizer.

        Raises:
            ConfigError: says what to add.
        """
        self.stages[0].updater.require()

    def close(self) -> None:
        """Let go of what the framework holds; the stages step no more."""
        for stage in self.stages:
            stage.updater.close()


class JoinedOptimizers:
    """The optimizers of a rank's stages as one, for users who read rates and state or set rates.

    Args:
        optimizers: of the stages that train, in the plan's order.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self.optimizers = tuple(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups of all stages, in the plan's order: the optimizers' own, which may be changed."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        """Return the state of all parameters."""
        return {key: value for optimizer in self.optimizers for key, value in optimizer.state.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizers' states, in the plan's order."""
        return {"stages": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for optimizer, own in zip(self.optimizers, state["stages"], strict=True):
            optimizer.load_state_dict(own)

    def step(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: `train_batch` steps the optimizers."""
        raise ConfigError(
            "optimizer.step() does not exist for a pipeline; train_batch() steps the optimizers"
        )

    def zero_grad(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: `train_batch` clears gradients."""
        raise ConfigError(
            "optimizer.zero_grad() does not exist for a pipeline; train_batch() clears gradients"
        )
