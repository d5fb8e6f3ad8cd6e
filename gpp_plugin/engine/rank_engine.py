"""All that one rank trains: a `StageEngine` for each of its stages, one step of all of them, one set of counters.

    rank 0   stage 0   module, gradients, optimizer ─┐
             stage 2   module, gradients, optimizer ─┴─ one norm, one decision, counters
    rank 1   stage 1   module, gradients, optimizer ─── the same norm, the same decision

Stages of one rank share nothing else: a parameter that two of them hold has a copy, an optimizer state and a ZeRO
partition in each, as on ranks of their own.

    runtime, per micro-batch     backward; accumulate()
    runtime, once per mini-batch reduce_data(); reduce_tied()
    step()                       as the rule has it: by all stages together, or by one alone (`stage_step`)

A `WeightUpdater` updates the weights; which framework's it is this module does not know. A stage's gradient norm is
a part of the graph's, so that norm, clipping and overflow are the engine's and not the framework's.

Source: this project
Tests: tests/integrations/test_shared_ranks.py
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_plugin.engine.checkpoints.checkpoint_files import STATE
from gpp_plugin.engine.checkpoints.optimizer_pieces import OptimizerPieces, check_like
from gpp_plugin.engine.framework import StageReplica, StepCounters, WeightUpdater
from gpp_plugin.engine.gradient_store import GradientStore
from gpp_plugin.engine.partitioned_gradients import PartitionedGradients, StageGradients
from gpp_plugin.engine.sharded_weights import GatheredBytes, ShardedWeights, attached, gathered
from gpp_plugin.engine.stage_groups import StageGroups, TiedParameter, duplicates, make_replicas_equal
from gpp_plugin.engine.stage_step import (
    RankUpdate,
    StageUpdate,
    StepAlone,
    StepResult,
    StepRule,
    StepTogether,
    TiedSums,
)
from gpp_plugin.errors import CheckpointError, ConfigError, GppError, describe_error
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.serialize import from_plain
from gpp_plugin.runtime.ranks.collectives import exchange


class StageEngine:
    """Owns the training state of one of a rank's stages; `RankEngine` makes those of a rank together.

    Construction, `step` and `parameter_state` are collective: over the stage's ranks, the ranks of the rule, the
    stage's ranks.

    Args:
        module: the stage's module, parameters under their HuggingFace names, on ``device`` and equal on the stage's
            ranks; cast to the configured type.
        plan: the plan in force.
        index: of the stage in it.
        rank: this global rank.
        groups: the process groups of ``plan`` and ``tied``.
        tied: the parameters that several stages hold, the same list on every rank.
        make_optimizer: from the module, what updates its weights.
        counters: of the rank.
        step, reduce_tied: what the rank does when this stage, by its index, is to step or sums what is tied.
        device: where the module lives.
        reduces_early: its ranks may sum gradients in the last backward (`schedule.gathers`); alike on all.
        whole_bytes: counts what is gathered on the rank (ZeRO 3).

    Raises:
        ConfigError: the configuration asks for what a stage cannot do, or the framework refuses it.
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        plan: PipelinePlan,
        index: int,
        rank: int,
        groups: StageGroups,
        tied: Sequence[TiedParameter] = (),
        make_optimizer: Callable[[nn.Module, StageReplica], WeightUpdater],
        counters: StepCounters,
        step: Callable[[int], StepResult],
        reduce_tied: Callable[[int], None],
        device: torch.device,
        reduces_early: bool = False,
        whole_bytes: GatheredBytes,
    ) -> None:
        self.module = module
        self.plan = plan
        self.rank = rank
        self.groups = groups
        self.device = device
        self.stage_index = index
        self.stage = plan.stages[index]
        self.tensor_position = self.stage.tensor_position(rank)
        replicas = tuple(sorted(self.stage.replicas(self.tensor_position)))
        self.position = replicas.index(rank)  # among the ranks that hold the same parameters
        self.tied = tuple(tie for tie in tied if index in tie.stages)
        self.counters = counters
        self._step, self._reduce_tied = step, reduce_tied
        replica = StageReplica(
            rank=rank,
            data_ranks=replicas,
            data_group=groups.data[index],
            single_group=groups.single,
            mini_batch=plan.mini_batch,
            device=device,
            zero_stage=plan.zero_stage,
        )
        self.updater = make_optimizer(module, replica)
        self.trained: Mapping[str, nn.Parameter] = self.updater.trained
        """The parameters that the optimizer steps, by name."""
        self.config = self.updater.config
        self.dtype: torch.dtype = getattr(torch, self.config.dtype)
        self.gradients: StageGradients = self._make_gradients(reduces_early)
        trained = set(map(id, self.updater.trained.values()))
        # of the norm the stage counts what no other stage, and no other rank of this one, does
        foreign = set(self._foreign_ties())
        if self.tensor_position > 0:
            foreign.update(duplicates(self.gradients.parameters))
        self.update = StageUpdate(
            self.gradients,
            self.updater,
            stage=self.stage,
            stage_index=index,
            groups=groups,
            tied=self.tied,
            device=device,
            foreign=foreign,
            untrained=[p for p in module.parameters() if id(p) not in trained and p.requires_grad],
        )
        self.weights = self._make_weights(whole_bytes)
        # bound once: a program makes one of them for every micro-batch
        self.accumulate = self.update.accumulate
        self.begin_reduction = self.update.begin_reduction
        self.reduce_data = self.update.reduce_data
        self.zero_grad = self.update.clear

    # ---- construction ------------------------------------------------------------------------------------

    def _make_gradients(self, reduces_early: bool) -> StageGradients:
        payload = self.config.communication_dtype
        common: dict[str, Any] = {
            "dtype": getattr(torch, self.config.accumulation_dtype),
            "group": self.groups.data[self.stage_index],
            "position": self.position,
            "degree": self.stage.num_replicas,
            "communication_dtype": None if payload is None else getattr(torch, payload),
            "bucket_elements": self.config.bucket_elements,
        }
        if not self.is_partitioned:
            return GradientStore(
                self.updater.trained, reduces_early=reduces_early, device=self.device, **common
            )
        return PartitionedGradients(
            self.updater.trained,
            self.updater.layout,
            is_reduced_often=self.config.zero_stage >= 2,
            **common,
        )

    def _make_weights(self, count: GatheredBytes) -> ShardedWeights | None:
        """Return what gathers the stage's parameters, and let go of all but this rank's part; None below ZeRO 3."""
        if self.config.zero_stage < 3 or self.stage.num_replicas == 1:
            return None
        group = self.groups.data[self.stage_index]
        assert isinstance(group, dist.ProcessGroup), "this rank is in its stage's group"
        weights = ShardedWeights(
            self.module.parameters(),
            self.updater.flat_weights(),
            group=group,
            position=self.position,
            degree=self.stage.num_replicas,
            count=count,
        )
        self.updater.publish_to(weights.parts)
        return weights

    def _foreign_ties(self) -> set[str]:
        """Return the parameters of the stage that another one owns: it counts and saves them."""
        return {tie.name for tie in self.tied if tie.owner != self.stage_index}

    # ---- one mini-batch ----------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        """Return the factor on every loss of this mini-batch; the same on every rank."""
        return self.updater.loss_scale

    def rest(self, names: Collection[str]) -> None:
        """Leave these parameters, which no unit of the mini-batch that begins reads, as they are in its step."""
        self.gradients.resting = frozenset(names).intersection(self.gradients.parameters)

    def reduce_tied(self) -> None:
        """Sum tied parameters' gradients over their stages, after `reduce_data`; collective over those stages.

        Where the rank holds several such stages, when all of them have come to it.
        """
        self._reduce_tied(self.stage_index)

    def full_gradients(self) -> dict[str, Tensor]:
        """Return the mini-batch's gradients, fp32 and unscaled, between reduction and step.

        Parameters that no loss reached are left out. With tensor parallelism, and from ZeRO 1 on, collective
        over the stage's ranks.
        """
        self.update.sum_tensor()
        return {name: gradient.div_(self.loss_scale) for name, gradient in self.gradients.gather().items()}

    def step(self) -> StepResult:
        """Take a step of all stages of the rank, or in mode async of this one; as of `RankEngine.step`."""
        return self._step(self.stage_index)

    # ---- optimizer and weights -----------------------------------------------------------------------------

    @property
    def optimizer(self) -> Any:
        """Return the stage's optimizer; one over placeholders where the stage trains nothing."""
        return self.updater.optimizer

    @property
    def is_trained(self) -> bool:
        """Return whether the optimizer steps any parameter of the stage."""
        return bool(self.updater.trained)

    @property
    def is_partitioned(self) -> bool:
        """Return whether optimizer state and masters are partitioned over the stage's ranks (ZeRO 1 to 3)."""
        return bool(self.updater.layout)

    def weight_tensors(self) -> tuple[Tensor, ...]:
        """Return parameters and buffers of the module; under ZeRO 3 this rank's parts of them."""
        own = self.weights
        if own is None:
            return (*self.module.parameters(), *self.module.buffers())
        return (
            *own.tensors,
            *(p for p in self.module.parameters() if id(p) not in own.parameters),
            *self.module.buffers(),
        )

    def parameter_state(self) -> dict[str, Tensor]:
        """Return the stage's parameters as fp32 copies, the masters where there are any.

        Collective over the stage's ranks under ZeRO 1 to 3.
        """
        state: dict[str, Tensor] = {}
        with gathered([] if self.weights is None else [self.weights]):
            for name, parameter in self.module.named_parameters():
                if name in self.updater.trained:
                    state[name] = self.updater.master(name)
                else:
                    state[name] = parameter.detach().float().clone()
        return state

    def refresh_masters(self) -> None:
        """Take master weights anew after the module's parameters were written from outside."""
        if self.weights is not None:
            self.weights.keep_written()
        self.updater.refresh_masters()

    # ---- state, as checkpoints hold it ----------------------------------------------------------------

    def held_weights(self) -> dict[str, Tensor]:
        """Return parameters and persistent buffers by name: the stage's own tensors."""
        tensors: dict[str, Tensor] = dict(self.module.named_parameters())
        return tensors | self.saved_buffers()

    def saved_buffers(self) -> dict[str, Tensor]:
        """Return the persistent buffers by name."""
        persistent = set(self.module.state_dict(keep_vars=True))
        return {name: buffer for name, buffer in self.module.named_buffers() if name in persistent}

    def own_weights(self) -> dict[str, Tensor]:
        """Return what the stage saves of `held_weights`: each tie only on its owner."""
        foreign = self._foreign_ties()
        return {name: tensor for name, tensor in self.held_weights().items() if name not in foreign}

    def optimizer_pieces(self) -> OptimizerPieces:
        """Return what optimizer and masters keep on this rank of the parameters that the stage saves."""
        return self.updater.pieces(self._foreign_ties())

    def shared_state(self) -> dict[str, Any]:
        """Return schedule, loss scaler and counters: the same on every rank."""
        return {**self.updater.shared_state(), "counters": dataclasses.asdict(self.counters)}

    def check_shared_state(self, state: Mapping[str, Any], *, load_scheduler: bool = True) -> None:
        """Refuse what `load_shared_state` could not restore; nothing changes.

        Raises:
            GppError: says what is wrong.
        """
        check_like({"counters": dataclasses.asdict(self.counters)}, state, "engine", file=STATE)
        if absent := sorted(dataclasses.asdict(self.counters).keys() - state["counters"].keys()):
            raise CheckpointError(f"{STATE}: engine.counters has no {absent[0]}")
        from_plain(StepCounters, state["counters"], root="engine.counters")
        self.updater.check_shared_state(state, load_scheduler=load_scheduler)

    def load_shared_state(self, state: Mapping[str, Any], *, load_scheduler: bool = True) -> None:
        """Restore what `shared_state` returned, the schedule if ``load_scheduler``."""
        self.updater.load_shared_state(state, load_scheduler=load_scheduler)
        for name in dataclasses.asdict(self.counters):
            setattr(self.counters, name, state["counters"][name])


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
        self.counters = StepCounters()
        self.whole_bytes = GatheredBytes()
        self.keeps_gradients = False
        """Whether each step leaves its unscaled gradients in ``gradients``."""
        self.gradients: dict[str, Tensor] | None = None
        self.measures_gradients = True
        self.gradient_bytes = 0
        """Most bytes of all stages' gradients before a step, of the steps that are measured."""
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
                        counters=self.counters,
                        step=self.step,
                        reduce_tied=lambda stage: self._ties.reduce(stage),
                        device=self.device,
                        reduces_early=index in reduces_early,
                        whole_bytes=self.whole_bytes,
                    )
                )

        self._agree(build, "construction")
        self.stages: tuple[StageEngine, ...] = tuple(made)
        self._ties = TiedSums([stage.update for stage in made], groups, plan)
        self._rule = self._make_rule(steps_alone)

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
                self.counters,
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
                    f"{describe_error(error)}"
                ) from error

        # On the default group, whose timeout is the job's: a rank may be compiling an optimizer meanwhile.
        exchange(attempt, what=what, group=dist.group.WORLD)

    # ---- one mini-batch ----------------------------------------------------------------------------------

    def rest(self, names: Collection[str]) -> None:
        """Leave these parameters, which no unit of the mini-batch that begins reads, as they are in its step."""
        for stage in self.stages:
            stage.rest(names)

    def step(self, stage: int | None = None) -> StepResult:
        """Take a step of all stages, or in mode async of one; collective over the ranks that step together.

        Raises:
            RuntimeFailure: gradients were not reduced, or the loss scale cannot sink any further.
            ConfigError: tensor ranks have unlike gradients of what they hold alike; seen at the first step.
        """
        if self.measures_gradients:
            held_bytes = sum(own.gradients.held_bytes() for own in self.stages)
            self.gradient_bytes = max(self.gradient_bytes, held_bytes)
        if self.keeps_gradients:
            is_alone = stage is not None and isinstance(self._rule, StepAlone)
            found = dict(self.gradients or {}) if is_alone else {}
            for own in self.stages:
                if not is_alone or own.stage_index == stage:
                    found.update(own.full_gradients())
            self.gradients = found
        return self._rule.step(stage)

    def use_plan(self, plan: PipelinePlan) -> None:
        """Step on a plan of the same stages on the same ranks from now on; no stage steps alone."""
        self.plan = plan
        for own in self.stages:
            own.plan, own.stage = plan, plan.stages[own.stage_index]
        self._rule = self._make_rule(False)

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
        weights = self.weights
        return attached(weights) if weights else contextlib.nullcontext()

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Hold the parameters of all stages whole while the context lasts; collective over all ranks."""
        self._readers += 1
        try:
            with gathered(self.weights):
                yield
        finally:
            self._readers -= 1

    def refuse_without_optimizer(self) -> None:
        """Refuse to train where the job has no optimizer.

        Raises:
            ConfigError: says what to add.
        """
        self.stages[0].updater.require()

    def refuse_while_gathered(self) -> None:
        """Refuse a mini-batch within `gathered`, on all ranks alike: also on those that hold all their weights.

        Raises:
            ConfigError: parameters of some rank are gathered for somebody else.
        """
        is_in_parts = any(stage.config.zero_stage >= 3 for stage in self.stages)
        if self._readers and is_in_parts and any(stage.num_replicas > 1 for stage in self.plan.stages):
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
